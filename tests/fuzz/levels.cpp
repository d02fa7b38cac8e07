// SPDX-License-Identifier: Apache-2.0
//
// The scalar kernels under the names of all instruction set levels.
#include "backend/cpu/kernels.hpp"

namespace ga::cpu {

const Kernels& kernels_scalar();
const BnKernels& batchnorm_kernels_scalar();

#define GA_LEVEL(name)                                         \
  const Kernels& kernels_##name() { return kernels_scalar(); } \
  const BnKernels& batchnorm_kernels_##name() { return batchnorm_kernels_scalar(); }
#if defined(__x86_64__)
GA_LEVEL(x86_64_v2)
GA_LEVEL(x86_64_v3)
GA_LEVEL(x86_64_v4)
#else
GA_LEVEL(neon)
#endif

}  // namespace ga::cpu
