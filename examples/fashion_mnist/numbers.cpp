// SPDX-License-Identifier: Apache-2.0
#include "numbers.hpp"

#include <algorithm>

#include "halves.hpp"

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
