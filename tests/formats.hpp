// SPDX-License-Identifier: Apache-2.0
//
// Tensors of every dtype, rounded in float64 by the definition of IEEE 754, and what the tests of
// dtypes, rows, EMA and clipping share beyond support.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

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

const Format& format(int32_t dtype);

// The value of a 16-bit number: sign, exponent and fraction as the standard defines them.
double decode(uint16_t bits, int32_t dtype);

// decode() of all 65536 values, computed once.
const std::vector<double>& decoded(int32_t dtype);

// Rounds x to the nearest number of the format, ties to even; from half a spacing beyond the
// largest number on, to infinity.
double to_nearest(double x, const Format& f);

// Returns the bits of x, which the 16-bit format must represent exactly.
uint16_t encode_exact(double x, int32_t dtype);

uint16_t encode_by_definition(double x, int32_t dtype);

// encode_by_definition(), by integers: tests convert more numbers than the library. test_dtypes compares the
// two at every number at which they could differ.
uint16_t encode(double x, int32_t dtype);

// ---- Typed tensors ------------------------------------------------------------------------------

// Numbers of one dtype between canaries, at an address that is a multiple of their size but of no
// more.
class Tensor {
 public:
  Tensor(int32_t dtype, int64_t count, double value = 0);
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
  static double read(const void* at, int32_t dtype);
  // Rounds to nearest.
  void set(int64_t i, double x);
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
  bool canaries() const;

 private:
  int32_t dtype_;
  int64_t count_;
  std::vector<uint8_t> bytes_;
  size_t start_;
};

// Numbers of both signs and mixed magnitude, rounded to the dtype: every 7th is of order 2^-20
// (subnormal in f16), every 11th is zero.
Tensor random_tensor(int32_t dtype, int64_t count, uint64_t seed);

// ---- Contexts -----------------------------------------------------------------------------------

ga_param_options options(int32_t gradient_dtype = 0, int32_t accumulator_dtype = 0);

ga_status try_add(ga_context* ctx, ga_group group, const char* name, void* data, int32_t dtype,
                  const std::vector<int64_t>& shape, const ga_param_options& o,
                  ga_param* out = nullptr);

ga_param add(ga_context* ctx, ga_group group, Tensor& p, std::vector<int64_t> shape = {},
             const ga_param_options& o = options());

void accumulate(ga_context* ctx, const std::vector<const Tensor*>& gradients, double weight = 1,
                double loss_scale = 0);

// The gradient that ga_gradient returns.
std::vector<double> external_gradient(ga_context* ctx, ga_param param, int64_t count);

// Succeeds if a call was refused with the expected status and a message that contains these words.
testing::AssertionResult refused(ga_status status, ga_status expected,
                                 const std::vector<std::string>& words);

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
