// SPDX-License-Identifier: Apache-2.0
// Runs a suite on another device: with GA_TEST_DEVICE=cuda in the environment, contexts that the
// tests make for the CPU are made for CUDA. The device has to read plain host memory, and to have
// done its work when a call returns (CUDA_LAUNCH_BLOCKING=1 on a GPU). Linked with
// --wrap=ga_context_create.
#include <cstdlib>
#include <cstring>

#include "gradaccum/gradaccum.h"

extern "C" ga_status __real_ga_context_create(const ga_config* config, ga_context** out);
extern "C" ga_status __wrap_ga_context_create(const ga_config* config, ga_context** out);

extern "C" ga_status __wrap_ga_context_create(const ga_config* config, ga_context** out) {
  const char* const device = std::getenv("GA_TEST_DEVICE");
  if (!device || std::strcmp(device, "cuda") != 0) return __real_ga_context_create(config, out);
  ga_config c;
  ga_config_init(&c, sizeof c);
  // What is not as this version has it is for the library to judge.
  if (config && (config->struct_size != sizeof c || config->device != GA_DEVICE_CPU))
    return __real_ga_context_create(config, out);
  if (config) c = *config;
  c.device = GA_DEVICE_CUDA;
  return __real_ga_context_create(&c, out);
}
