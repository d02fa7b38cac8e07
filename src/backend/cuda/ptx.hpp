// SPDX-License-Identifier: Apache-2.0
// Instructions of PTX that CUDA C++ has no function for. The tests that execute the kernels on the host
// replace this file (tests/cuda/executor).
#pragma once

#include <cstdint>

#include "core/hd.hpp"

namespace ga::cuda {

// One store of neighbouring numbers to global memory; the compiler may split an assignment into smaller ones.
GA_DEVICE void store_global(void* to, const uint16_t (&x)[4]) {
  asm volatile("st.global.v4.u16 [%0], {%1, %2, %3, %4};" ::"l"(to), "h"(x[0]), "h"(x[1]),
               "h"(x[2]), "h"(x[3])
               : "memory");
}
GA_DEVICE void store_global(void* to, const float (&x)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
GA_DEVICE void store_global(void* to, const uint32_t (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
GA_DEVICE void store_global(void* to, const uint32_t (&x)[2]) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(x[0]), "r"(x[1]) : "memory");
}
// Two stores.
GA_DEVICE void store_global(void* to, const double (&x)[4]) {
  asm volatile("st.global.v2.f64 [%0], {%1, %2};" ::"l"(to), "d"(x[0]), "d"(x[1]) : "memory");
  asm volatile("st.global.v2.f64 [%0 + 16], {%1, %2};" ::"l"(to), "d"(x[2]), "d"(x[3]) : "memory");
}

// Conversions to and from 16 bits. A NaN stays one, but loses what its lower bits hold.
GA_DEVICE float widen_f16(uint16_t h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
GA_DEVICE uint16_t narrow_f16(float x) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
// From compute capability 8.0 on.
GA_DEVICE uint16_t narrow_bf16(float x) {
  uint16_t h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}

}  // namespace ga::cuda
