// SPDX-License-Identifier: Apache-2.0
#include "numbers.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Drops the lower bits of a float. A carry moves to the exponent, as it should.
std::uint32_t drop(std::uint32_t bits, int count) {
  return (bits + (1U << (count - 1)) - 1 + (bits >> count & 1)) >> count;
}

std::uint16_t to_bf16(float x) {
  return static_cast<std::uint16_t>(std::isnan(x) ? 0x7fc0 : drop(bits_of(x), 16));
}

float from_bf16(std::uint16_t x) { return float_of(std::uint32_t{x} << 16); }

std::uint16_t to_f16(float x) {
  const float size = std::abs(x);
  std::uint32_t half;
  if (std::isnan(x)) {
    half = 0x7e00;
  } else if (size >= 65520) {  // rounds to what is past the largest
    half = 0x7c00;
  } else if (size < 0x1p-14F) {  // subnormal: the last bit of 0.5 + size is worth 2^-24
    half = bits_of(0.5F + size) - bits_of(0.5F);
  } else {
    half = drop(bits_of(size), 13) - (112 << 10);  // exponents are biased by 15, not by 127
  }
  return static_cast<std::uint16_t>(half | (bits_of(x) >> 16 & 0x8000));
}

float from_f16(std::uint16_t x) {
  const std::uint32_t sign = std::uint32_t{x} << 16 & 0x80000000, rest = x & 0x7fffU;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | rest << 13);
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112F));
}

}  // namespace

std::size_t bytes_of(ga_dtype dtype) { return dtype == GA_F64 ? 8 : dtype == GA_F32 ? 4 : 2; }

void from_floats(const float* in, std::int64_t count, ga_dtype dtype, void* out) {
  auto* halves = static_cast<std::uint16_t*>(out);
  switch (dtype) {
    case GA_F64:
      std::copy_n(in, count, static_cast<double*>(out));
      break;
    case GA_F16:
      std::transform(in, in + count, halves, to_f16);
      break;
    case GA_BF16:
      std::transform(in, in + count, halves, to_bf16);
      break;
    default:
      std::copy_n(in, count, static_cast<float*>(out));
  }
}

void to_floats(const void* in, std::int64_t count, ga_dtype dtype, float* out) {
  const auto* halves = static_cast<const std::uint16_t*>(in);
  const auto* doubles = static_cast<const double*>(in);
  switch (dtype) {
    case GA_F64:
      std::transform(doubles, doubles + count, out, [](double x) { return static_cast<float>(x); });
      break;
    case GA_F16:
      std::transform(halves, halves + count, out, from_f16);
      break;
    case GA_BF16:
      std::transform(halves, halves + count, out, from_bf16);
      break;
    default:
      std::copy_n(static_cast<const float*>(in), count, out);
  }
}
