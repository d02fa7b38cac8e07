// SPDX-License-Identifier: Apache-2.0
//
// A libgradaccum_cuda.so that was built with another C++ runtime than the library, which must not call its functions.
#include <cstdlib>

#include "backend/cuda/module.h"

extern "C" const void* ga_module_cuda(char*, size_t) {
  static const ga::CudaModule table = {ga::kCudaAbi,
                                       ga::cuda_layout() ^ 1,
                                       "CUDA 13.0 for sm_90",
                                       []() -> int32_t { abort(); },
                                       [](const ga_config&) -> ga::Backend* { abort(); },
                                       [](int32_t&, int32_t&) { abort(); }};
  return &table;
}
