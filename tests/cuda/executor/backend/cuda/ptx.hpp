// SPDX-License-Identifier: Apache-2.0
// Replaces src/backend/cuda/ptx.hpp where kernels are executed on the host.
#pragma once

#include <cmath>
#include <cstdint>

#include "backend/numbers.hpp"
#include "core/hd.hpp"

namespace ga::cuda {

template <class T, int kCount>
GA_DEVICE void store_global(void* to, const T (&x)[kCount]) {
  sim::assume(sim::is_global(to));
  constexpr size_t kMost = 16 / sizeof(T);
  constexpr size_t kEach = kCount < kMost ? kCount : kMost;
  for (size_t i = 0; i < kCount; i += kEach)
    sim::store_vector(static_cast<T*>(to) + i, x + i, kEach * sizeof(T));
}

// Every NaN becomes the one that the device makes.
GA_DEVICE float widen_f16(uint16_t h) {
  const float x = from_f16(h);
  return x == x ? x : float_of(0x7fffffffu);
}
GA_DEVICE uint16_t narrow_f16(float x) { return x == x ? to_f16(x) : uint16_t{0x7fff}; }
GA_DEVICE uint16_t narrow_bf16(float x) { return x == x ? to_bf16(x) : uint16_t{0x7fff}; }

}  // namespace ga::cuda
