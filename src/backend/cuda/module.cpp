// SPDX-License-Identifier: Apache-2.0
// The one function that libgradaccum_cuda.so exports. The module loads without a driver, because
// the CUDA runtime is linked statically and looks for the driver when it is first called.
#include "backend/cuda/module.h"

#include <cuda_runtime.h>

#include <string>
#include <type_traits>

#include "backend/cuda/runtime.hpp"
#include "core/module.hpp"

#ifndef GA_CUDA_TARGETS
#define GA_CUDA_TARGETS "the host, for tests"
#endif

extern "C" __attribute__((visibility("default"))) const void* ga_module_cuda(char*, size_t) {
  static_assert(std::is_same_v<decltype(&ga_module_cuda), ga::ModuleEntry>);
  constexpr int kVersion = CUDART_VERSION;
  static const std::string text = "CUDA " + std::to_string(kVersion / 1000) + "." +
                                  std::to_string(kVersion % 1000 / 10) + " for " GA_CUDA_TARGETS;
  static const ga::CudaModule table = {ga::kCudaAbi,           ga::cuda_layout(),
                                       text.c_str(),           ga::cuda::device_count,
                                       ga::cuda::make_backend, ga::cuda::versions};
  return &table;
}
