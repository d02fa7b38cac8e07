// SPDX-License-Identifier: Apache-2.0
//
// Tensors of every dtype, rounded in float64 by the definition of IEEE 754, and what the tests of
// dtypes, rows, EMA and clipping share beyond support.hpp.
#pragma once

#include <cfloat>

#include "support.hpp"

namespace ga::test {

// ---- Formats ------------------------------------------------------------------------------------

// A binary floating-point format: precision in bits, the hidden bit included, and the exponents of
// the largest and the smallest normal numbers.
struct Format {
  const char* name;
  size_t size;
  int precision, max_exponent, min_exponent;

  double roundoff() const { return std::ldexp(1.0, -precision); }  // relative, to nearest
  double smallest() const { return std::ldexp(1.0, min_exponent - precision + 1); }
  double largest() const { return std::ldexp(2 - std::ldexp(1.0, 1 - precision), max_exponent); }
  // The distance between the numbers of this format around x.
  double spacing(double x) const {
    const int exponent = x == 0 ? min_exponent : std::max(std::ilogb(x), min_exponent);
    return std::ldexp(1.0, exponent - precision + 1);
  }
};

inline const Format& format(int32_t dtype) {
  static const Format f32 = {"f32", 4, 24, 127, -126}, f64 = {"f64", 8, 53, 1023, -1022},
                      f16 = {"f16", 2, 11, 15, -14}, bf16 = {"bf16", 2, 8, 127, -126};
  return dtype == GA_F64 ? f64 : dtype == GA_F16 ? f16 : dtype == GA_BF16 ? bf16 : f32;
}

// The value of a 16-bit number: sign, exponent and fraction as the standard defines them.
inline double decode(uint16_t bits, int32_t dtype) {
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

// decode() of all 65536 values, computed once.
inline const std::vector<double>& decoded(int32_t dtype) {
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

// Rounds x to the nearest number of the format, ties to even; from half a spacing beyond the
// largest number on, to infinity.
inline double to_nearest(double x, const Format& f) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double spacing = f.spacing(x);
  const double rounded = std::nearbyint(x / spacing) * spacing;  // both exact
  return std::abs(rounded) > f.largest() ? std::copysign(INFINITY, x) : rounded;
}

// Returns the bits of x, which the 16-bit format must represent exactly.
inline uint16_t encode_exact(double x, int32_t dtype) {
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

inline uint16_t encode_by_definition(double x, int32_t dtype) {
  return encode_exact(to_nearest(x, format(dtype)), dtype);
}

// encode_by_definition(), by integers: tests convert more numbers than the library. test_dtypes compares the
// two at every number at which they could differ.
inline uint16_t encode(double x, int32_t dtype) {
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

// Numbers of one dtype between canaries, at an address that is a multiple of their size but of no
// more.
class Tensor {
 public:
  Tensor(int32_t dtype, int64_t count, double value = 0)
      : dtype_(dtype), count_(count), bytes_((static_cast<size_t>(count) + 2) * size() + 64, 0xa5) {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    start_ = (64 - address % 64) % 64 + size();
    memset(data(), 0, static_cast<size_t>(count) * size());
    if (value != 0) fill(value);
  }
  // A copy has memory of its own.
  Tensor(const Tensor& other) : Tensor(other.dtype_, other.count_) {
    memcpy(data(), other.data(), static_cast<size_t>(count_) * size());
  }
  Tensor& operator=(const Tensor&) = delete;

  int32_t dtype() const { return dtype_; }
  int64_t count() const { return count_; }
  size_t size() const { return format(dtype_).size; }
  void* data() { return bytes_.data() + start_; }
  const void* data() const { return bytes_.data() + start_; }
  void* at(int64_t i) { return bytes_.data() + start_ + static_cast<size_t>(i) * size(); }
  const void* at(int64_t i) const {
    return bytes_.data() + start_ + static_cast<size_t>(i) * size();
  }

  double get(int64_t i) const { return read(at(i), dtype_); }
  static double read(const void* at, int32_t dtype) {
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
  // Rounds to nearest.
  void set(int64_t i, double x) {
    if (dtype_ == GA_F32) {
      const auto single = static_cast<float>(x);
      memcpy(at(i), &single, sizeof single);
    } else if (dtype_ == GA_F64) {
      memcpy(at(i), &x, sizeof x);
    } else {
      set_bits(i, encode(x, dtype_));
    }
  }
  uint16_t bits(int64_t i) const {
    uint16_t bits;
    memcpy(&bits, at(i), sizeof bits);
    return bits;
  }
  void set_bits(int64_t i, uint16_t bits) { memcpy(at(i), &bits, sizeof bits); }
  void fill(double x) {
    for (int64_t i = 0; i < count_; ++i) set(i, x);
  }

  bool operator==(const Tensor& other) const {
    return dtype_ == other.dtype_ && count_ == other.count_ &&
           memcmp(data(), other.data(), static_cast<size_t>(count_) * size()) == 0;
  }
  bool operator!=(const Tensor& other) const { return !(*this == other); }
  // Returns true if the bytes before and after the numbers are unchanged.
  bool canaries() const {
    const auto bad = [](uint8_t byte) { return byte != 0xa5; };
    return std::none_of(bytes_.begin(), bytes_.begin() + static_cast<ptrdiff_t>(start_), bad) &&
           std::none_of(bytes_.begin() +
                            static_cast<ptrdiff_t>(start_ + static_cast<size_t>(count_) * size()),
                        bytes_.end(), bad);
  }

 private:
  int32_t dtype_;
  int64_t count_;
  std::vector<uint8_t> bytes_;
  size_t start_;
};

// Numbers of both signs and mixed magnitude, rounded to the dtype: every 7th is of order 2^-20
// (subnormal in f16), every 11th is zero.
inline Tensor random_tensor(int32_t dtype, int64_t count, uint64_t seed) {
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

inline ga_param_options options(int32_t gradient_dtype = 0, int32_t accumulator_dtype = 0) {
  ga_param_options o;
  memset(&o, 0, sizeof o);
  o.struct_size = sizeof o;
  o.gradient_dtype = gradient_dtype;
  o.accumulator_dtype = accumulator_dtype;
  return o;
}

inline ga_status try_add(ga_context* ctx, ga_group group, const char* name, void* data,
                         int32_t dtype, const std::vector<int64_t>& shape,
                         const ga_param_options& o, ga_param* out = nullptr) {
  return ga_param_add(ctx, group, name, data, dtype, static_cast<int32_t>(shape.size()),
                      shape.empty() ? nullptr : shape.data(), &o, out);
}

inline ga_param add(ga_context* ctx, ga_group group, Tensor& p, std::vector<int64_t> shape = {},
                    const ga_param_options& o = options()) {
  static int number = 0;
  ga_param id = -1;
  if (shape.empty()) shape = {p.count()};
  const std::string name = "p" + std::to_string(number++);
  EXPECT_OK(try_add(ctx, group, name.c_str(), p.data(), p.dtype(), shape, o, &id));
  return id;
}

inline void accumulate(ga_context* ctx, const std::vector<const Tensor*>& gradients,
                       double weight = 1, double loss_scale = 0) {
  std::vector<const void*> list;
  for (const Tensor* g : gradients) list.push_back(g ? g->data() : nullptr);
  EXPECT_OK(ga_accumulate(ctx, list.data(), list.size(), weight, MicroOptions(loss_scale)));
}

// The gradient that ga_gradient returns.
inline std::vector<double> external_gradient(ga_context* ctx, ga_param param, int64_t count) {
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

// Succeeds if a call was refused with the expected status and a message that contains these words.
inline testing::AssertionResult refused(ga_status status, ga_status expected,
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

// Compares all fields bit for bit.
inline bool same_window(const ga_window_info& a, const ga_window_info& b) {
  return memcmp(&a, &b, sizeof a) == 0;
}

// Runs body on each instruction set level that this machine has.
template <class Body>
void on_every_isa(const Body& body) {
  int levels = 0;
  for (const char* level : kIsaLevels) {
    const Isa isa(level);
    if (!Isa::available()) continue;
    SCOPED_TRACE(level);
    ++levels;
    body();
  }
  EXPECT_GT(levels, 0);
}

}  // namespace ga::test
