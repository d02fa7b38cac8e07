// SPDX-License-Identifier: Apache-2.0
//
// Factors of matrix products in f32, and what the elements of a product may be.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "support.hpp"

namespace ga::test {

// Numbers of both signs and mixed magnitude, with zeros, at an address that is a multiple of 4
// bytes but of no more.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t columns, int64_t ld, uint64_t seed)
      : ld_(ld), data_(static_cast<size_t>(rows * ld + 1 + columns), kCanary) {
    Random random(seed);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t kind = random.below(11);
        const double scale = kind == 0 ? 0 : kind == 1 ? 1e3 : kind == 2 ? 1e-6 : 1;
        at(i, j) = static_cast<float>(scale * random.signed_unit());
      }
  }
  float* data() { return data_.data() + 1; }
  const float* data() const { return data_.data() + 1; }
  float& at(int64_t i, int64_t j) { return data()[i * ld_ + j]; }
  float at(int64_t i, int64_t j) const { return data()[i * ld_ + j]; }
  int64_t ld() const { return ld_; }
  std::vector<float>& all() { return data_; }

 private:
  int64_t ld_;
  std::vector<float> data_;
};

// A factor of a product: rows x columns after transposition.
struct Factor {
  bool transposed;
  Matrix stored;

  Factor(int64_t rows, int64_t columns, bool transpose, int64_t padding, uint64_t seed)
      : transposed(transpose),
        stored(transpose ? columns : rows, transpose ? rows : columns,
               (transpose ? rows : columns) + padding, seed) {}
  float at(int64_t i, int64_t j) const { return transposed ? stored.at(j, i) : stored.at(i, j); }
};

// A sum in float64 and a bound on the error of any f32 evaluation: each term undergoes at most
// `roundings` roundings of relative size 2^-24 (Higham 2002, section 3.1), and each rounding may
// lose the spacing of a subnormal.
struct Sum {
  double value = 0, magnitude = 0;
  double roundings = 0;
  void add(double term) {
    value += term;
    magnitude += std::abs(term);
  }
  double tolerance() const {
    const double nu = roundings * 0x1p-24;
    return nu / (1 - nu) * magnitude + roundings * 0x1p-149;
  }
  bool holds(float x) const { return std::abs(x - value) <= tolerance(); }
};

inline Sum dot(const Factor& a, const Factor& b, int64_t k, int64_t i, int64_t j, double alpha) {
  Sum sum;
  for (int64_t p = 0; p < k; ++p) {
    // Two roundings of 2^-53 in double are negligible beside 2^-24.
    sum.add(alpha * a.at(i, p) * b.at(p, j));
  }
  sum.roundings = static_cast<double>(k) + 2;  // products and sums, alpha, the sum with c
  return sum;
}

}  // namespace ga::test
