// SPDX-License-Identifier: Apache-2.0
// Runs a suite on another device. With GA_TEST_DEVICE=cuda in the environment, contexts that the
// tests make for the CPU are made for CUDA instead; with cuda:<folder>, on a simulated device, by
// the module in that folder. The device must be able to read plain host memory, and must have
// finished its work when a call returns (CUDA_LAUNCH_BLOCKING=1 on a GPU). Linked with
// --wrap=ga_context_create.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "gradaccum/gradaccum.h"

extern "C" ga_status __real_ga_context_create(const ga_config* config, ga_context** out);
extern "C" ga_status __wrap_ga_context_create(const ga_config* config, ga_context** out);

namespace {

// Returns true if contexts are made for CUDA. Prints the device once, because the suite would pass
// on the CPU too.
bool on_cuda() {
  static const bool on = [] {
    const char* const device = std::getenv("GA_TEST_DEVICE");
    if (!device || std::strncmp(device, "cuda", 4) != 0) return false;
    if (device[4] == ':') {
      setenv("GA_MODULE_PATH", device + 5, 1);
      setenv("GA_SIM_PAGEABLE_ACCESS", "1", 1);
      setenv("GA_SIM_PROTECT", "0", 1);  // tests write accumulators on the host, as kernels would
    }
    std::printf("on device %s\n", device);
    return true;
  }();
  return on;
}

}  // namespace

extern "C" ga_status __wrap_ga_context_create(const ga_config* config, ga_context** out) {
  if (!on_cuda()) return __real_ga_context_create(config, out);
  ga_config c;
  ga_config_init(&c, sizeof c);
  // A config of another version, or for another device, goes to the library unchanged.
  if (config && (config->struct_size != sizeof c || config->device != GA_DEVICE_CPU))
    return __real_ga_context_create(config, out);
  if (config) c = *config;
  c.device = GA_DEVICE_CUDA;
  return __real_ga_context_create(&c, out);
}
