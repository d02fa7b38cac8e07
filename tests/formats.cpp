// SPDX-License-Identifier: Apache-2.0
#include "formats.hpp"

#include <algorithm>

namespace ga::test {

// ---- Formats ------------------------------------------------------------------------------------

const Format& format(int32_t dtype) {
  static const Format f32 = {"f32", 4, 24, 127, -126}, f64 = {"f64", 8, 53, 1023, -1022},
                      f16 = {"f16", 2, 11, 15, -14}, bf16 = {"bf16", 2, 8, 127, -126};
  return dtype == GA_F64 ? f64 : dtype == GA_F16 ? f16 : dtype == GA_BF16 ? bf16 : f32;
}

double decode(uint16_t bits, int32_t dtype) {
  const Format& f = format(dtype);
  const int fraction_bits = f.precision - 1;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int exponent = (bits & 0x7fff) >> fraction_bits;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (0x7fff >> fraction_bits)) return fraction ? NAN : sign * INFINITY;
  const int hidden = exponent == 0 ? 0 : 1 << fraction_bits;
  return sign *
         std::ldexp(hidden + fraction, std::max(exponent, 1) - 1 + f.min_exponent - fraction_bits);
}

const std::vector<double>& decoded(int32_t dtype) {
  static const auto make = [](int32_t of) {
    std::vector<double> values;
    for (int bits = 0; bits <= 0xffff; ++bits) {
      values.push_back(decode(static_cast<uint16_t>(bits), of));
    }
    return values;
  };
  static const std::vector<double> f16 = make(GA_F16), bf16 = make(GA_BF16);
  return dtype == GA_F16 ? f16 : bf16;
}

double to_nearest(double x, const Format& f) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double spacing = f.spacing(x);
  const double rounded = std::nearbyint(x / spacing) * spacing;  // both exact
  return std::abs(rounded) > f.largest() ? std::copysign(INFINITY, x) : rounded;
}

uint16_t encode_exact(double x, int32_t dtype) {
  const Format& f = format(dtype);
  const auto sign = static_cast<uint16_t>(std::signbit(x) ? 0x8000 : 0);
  const int fraction_bits = f.precision - 1;
  const int infinity = 0x7fff & ~((1 << fraction_bits) - 1);
  if (std::isnan(x)) return static_cast<uint16_t>(sign | infinity | 1 << (fraction_bits - 1));
  if (std::isinf(x)) return static_cast<uint16_t>(sign | infinity);
  const double spacing = f.spacing(x);
  const auto significand = static_cast<int>(std::abs(x) / spacing);
  // The exponent field of the smallest normal numbers is 1, and the hidden bit adds it.
  const int field = std::ilogb(spacing) - std::ilogb(f.smallest());
  return static_cast<uint16_t>(sign | ((field << fraction_bits) + significand));
}

uint16_t encode_by_definition(double x, int32_t dtype) {
  return encode_exact(to_nearest(x, format(dtype)), dtype);
}

uint16_t encode(double x, int32_t dtype) {
  const bool f16 = dtype == GA_F16;
  const int precision = f16 ? 11 : 8, bias = f16 ? 15 : 127, dropped = 53 - precision;
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  const auto sign = static_cast<uint16_t>(bits >> 48 & 0x8000);
  const uint64_t magnitude = bits & ~(uint64_t{1} << 63);
  const int exponent = static_cast<int>(magnitude >> 52) - 1023;
  // About the largest number, an infinity or a NaN.
  if (exponent >= bias) return encode_by_definition(x, dtype);
  // Zero or subnormal: a multiple of the smallest number.
  if (exponent <= -bias)
    return static_cast<uint16_t>(sign | std::lrint(std::abs(x) * (f16 ? 0x1p24 : 0x1p133)));
  // What is added carries into the bits that stay where the nearest number, the even one of two, is larger.
  const uint64_t half = (uint64_t{1} << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
  const auto rebias = static_cast<uint64_t>(1023 - bias) << (precision - 1);
  return static_cast<uint16_t>(sign | (((magnitude + half) >> dropped) - rebias));
}

// ---- Typed tensors ------------------------------------------------------------------------------

Tensor::Tensor(int32_t dtype, int64_t count, double value)
    : dtype_(dtype), count_(count), bytes_((static_cast<size_t>(count) + 2) * size() + 64, 0xa5) {
  const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
  start_ = (64 - address % 64) % 64 + size();
  memset(data(), 0, static_cast<size_t>(count) * size());
  if (value != 0) fill(value);
}

double Tensor::read(const void* at, int32_t dtype) {
  uint16_t bits;
  float single;
  double value;
  switch (dtype) {
    case GA_F32:
      return memcpy(&single, at, sizeof single), single;
    case GA_F64:
      return memcpy(&value, at, sizeof value), value;
    default:
      return memcpy(&bits, at, sizeof bits), decoded(dtype)[bits];
  }
}

void Tensor::set(int64_t i, double x) {
  if (dtype_ == GA_F32) {
    const auto single = static_cast<float>(x);
    memcpy(at(i), &single, sizeof single);
  } else if (dtype_ == GA_F64) {
    memcpy(at(i), &x, sizeof x);
  } else {
    set_bits(i, encode(x, dtype_));
  }
}

bool Tensor::canaries() const {
  const auto bad = [](uint8_t byte) { return byte != 0xa5; };
  return std::none_of(bytes_.begin(), bytes_.begin() + static_cast<ptrdiff_t>(start_), bad) &&
         std::none_of(
             bytes_.begin() + static_cast<ptrdiff_t>(start_ + static_cast<size_t>(count_) * size()),
             bytes_.end(), bad);
}

Tensor random_tensor(int32_t dtype, int64_t count, uint64_t seed) {
  Random random(seed);
  Tensor t(dtype, count);
  int seventh = 0, eleventh = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double x = random.signed_unit() * (seventh == 3 ? 0x1p-20 : 1);
    t.set(i, eleventh == 5 ? 0 : x);
    if (++seventh == 7) seventh = 0;
    if (++eleventh == 11) eleventh = 0;
  }
  return t;
}

// ---- Contexts -----------------------------------------------------------------------------------

ga_param_options options(int32_t gradient_dtype, int32_t accumulator_dtype) {
  ga_param_options o;
  memset(&o, 0, sizeof o);
  o.struct_size = sizeof o;
  o.gradient_dtype = gradient_dtype;
  o.accumulator_dtype = accumulator_dtype;
  return o;
}

ga_status try_add(ga_context* ctx, ga_group group, const char* name, void* data, int32_t dtype,
                  const std::vector<int64_t>& shape, const ga_param_options& o, ga_param* out) {
  return ga_param_add(ctx, group, name, data, dtype, static_cast<int32_t>(shape.size()),
                      shape.empty() ? nullptr : shape.data(), &o, out);
}

ga_param add(ga_context* ctx, ga_group group, Tensor& p, std::vector<int64_t> shape,
             const ga_param_options& o) {
  static int number = 0;
  ga_param id = -1;
  if (shape.empty()) shape = {p.count()};
  const std::string name = "p" + std::to_string(number++);
  EXPECT_OK(try_add(ctx, group, name.c_str(), p.data(), p.dtype(), shape, o, &id));
  return id;
}

void accumulate(ga_context* ctx, const std::vector<const Tensor*>& gradients, double weight,
                double loss_scale) {
  std::vector<const void*> list;
  for (const Tensor* g : gradients) list.push_back(g ? g->data() : nullptr);
  EXPECT_OK(ga_accumulate(ctx, list.data(), list.size(), weight, MicroOptions(loss_scale)));
}

std::vector<double> external_gradient(ga_context* ctx, ga_param param, int64_t count) {
  const void* data = nullptr;
  int32_t dtype = 0;
  EXPECT_OK(ga_gradient(ctx, param, &data, &dtype, nullptr));
  std::vector<double> result;
  if (data == nullptr) return result;
  const auto size = static_cast<int64_t>(format(dtype).size);
  const std::vector<uint8_t> bytes = from_library<uint8_t>(data, count * size);
  for (int64_t i = 0; i < count; ++i) {
    result.push_back(Tensor::read(bytes.data() + i * size, dtype));
  }
  return result;
}

testing::AssertionResult refused(ga_status status, ga_status expected,
                                 const std::vector<std::string>& words) {
  const std::string text = ga_last_error();
  if (status != expected) {
    return testing::AssertionFailure() << ga_status_name(status) << ", not "
                                       << ga_status_name(expected) << ": \"" << text << '"';
  }
  for (const std::string& word : words) {
    if (text.find(word) == std::string::npos) {
      return testing::AssertionFailure() << '"' << text << "\" lacks \"" << word << '"';
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace ga::test
