// f16 and bf16, to and from f32, for the CPU and, compiled by nvcc, for a GPU too.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define ON_BOTH __host__ __device__ inline
#else
#define ON_BOTH inline
#endif

ON_BOTH std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

ON_BOTH float float_of(std::uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Drops the lowest count bits of a float, rounding to nearest, ties to even. A carry out of the
// mantissa increments the exponent, which is the correct result.
ON_BOTH std::uint32_t drop(std::uint32_t bits, int count) {
  return (bits + (1U << (count - 1)) - 1 + (bits >> count & 1)) >> count;
}

ON_BOTH std::uint16_t to_bf16(float x) {
  return static_cast<std::uint16_t>(x != x ? 0x7fc0 : drop(bits_of(x), 16));
}

ON_BOTH float from_bf16(std::uint16_t x) { return float_of(std::uint32_t{x} << 16); }

ON_BOTH std::uint16_t to_f16(float x) {
  const float size = float_of(bits_of(x) & 0x7fffffff);
  std::uint32_t half;
  if (x != x) {
    half = 0x7e00;
  } else if (size >= 65520) {  // rounds to infinity
    half = 0x7c00;
  } else if (size < 0x1p-14F) {  // subnormal: the last bit of 0.5 + size is worth 2^-24
    half = bits_of(0.5F + size) - bits_of(0.5F);
  } else {
    half = drop(bits_of(size), 13) - (112 << 10);  // exponents are biased by 15, not by 127
  }
  return static_cast<std::uint16_t>(half | (bits_of(x) >> 16 & 0x8000));
}

ON_BOTH float from_f16(std::uint16_t x) {
  const std::uint32_t sign = std::uint32_t{x} << 16 & 0x80000000, rest = x & 0x7fffU;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | rest << 13);
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112F));
}
