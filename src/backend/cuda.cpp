// SPDX-License-Identifier: Apache-2.0
// Contexts on CUDA devices, by the side module libgradaccum_cuda.so. This library itself does not
// need CUDA.
#include "backend/cuda/module.h"
#include "core/error.hpp"
#include "core/module.hpp"

namespace ga {
namespace {

const CudaModule& module() {
  const auto& table = *static_cast<const CudaModule*>(open_module("cuda", kCudaAbi));
  if (table.layout != cuda_layout())
    fail(GA_ERROR_UNSUPPORTED,
         "module libgradaccum_cuda.so (%s) and this library are of different builds: one compiler, "
         "with one "
         "C++ runtime, must build both",
         table.text);
  return table;
}

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(const ga_config& config) {
  return std::unique_ptr<Backend>(module().make(config));
}

void cuda_versions(int32_t& runtime, int32_t& driver) {
  runtime = driver = 0;
  try {
    module().versions(runtime, driver);
  } catch (const Error&) {  // not there
  }
  for (int32_t* version : {&runtime, &driver})
    *version = 10000 * (*version / 1000) + 100 * (*version % 1000 / 10);
}

int32_t cuda_device_count() {
  try {
    return module().device_count();
  } catch (const Error& e) {
    if (e.status() != GA_ERROR_UNSUPPORTED) throw;
    set_last_error(GA_OK, e.what());
    return 0;
  }
}

}  // namespace ga
