// SPDX-License-Identifier: Apache-2.0
// exp, log and pow of the numbers of a step, in float64. C libraries differ in the last bit of theirs, and so does
// CUDA's; these have the same bits everywhere, because they consist of additions, multiplications and divisions, each
// rounded as IEEE 754 says, without contraction to fused multiply-add.
//
// They compute in pairs of doubles with some 100 bits (Dekker 1971; Knuth, TAOCP 2, 4.2.2) and the terms that are
// small enough in double. The coefficients are those of the Taylor series. The error is below 0.501 units in the last
// place, of subnormal results too: nearly all results are those that are rounded correctly.
#pragma once

#include <math.h>

#include <cstdint>

#include "core/hd.hpp"

namespace ga {

// high + low, where low is at most half a unit in the last place of high.
struct DoublePair {
  double high, low;
};

// a + b, if |a| >= |b|.
GA_HD constexpr DoublePair ordered_sum(double a, double b) {
  const double s = a + b;
  return {s, b - (s - a)};
}

// a + b, exactly.
GA_HD constexpr DoublePair exact_sum(double a, double b) {
  const double s = a + b, of_b = s - a;
  return {s, (a - (s - of_b)) + (b - of_b)};
}

// x as a sum of two numbers of 26 bits. |x| < 2^996
GA_HD constexpr DoublePair halves(double x) {
  const double c = 0x8000001p0 * x, high = c - (c - x);
  return {high, x - high};
}

// a b, exactly, unless its low part underflows.
GA_HD constexpr DoublePair exact_product(double a, double b) {
  const DoublePair x = halves(a), y = halves(b);
  const double p = a * b;
  return {p, ((x.high * y.high - p) + x.high * y.low + x.low * y.high) + x.low * y.low};
}

GA_HD constexpr DoublePair operator+(DoublePair a, DoublePair b) {
  const DoublePair s = exact_sum(a.high, b.high);
  return ordered_sum(s.high, s.low + (a.low + b.low));
}

GA_HD constexpr DoublePair operator*(DoublePair a, DoublePair b) {
  const DoublePair p = exact_product(a.high, b.high);
  return ordered_sum(p.high, p.low + (a.high * b.low + a.low * b.high));
}

GA_HD constexpr DoublePair operator/(DoublePair a, DoublePair b) {
  const double q = a.high / b.high;
  const DoublePair p = exact_product(q, b.high);
  return ordered_sum(q, ((a.high - p.high) - p.low + (a.low - q * b.low)) / b.high);
}

GA_HD constexpr DoublePair inverse(int n) {
  return DoublePair{1, 0} / DoublePair{static_cast<double>(n), 0};
}

// 2^n, -1022 <= n <= 1023
GA_HD double power_of_two(int n) {
  const uint64_t bits = static_cast<uint64_t>(n + 1023) << 52;
  double x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// ln 2 = kLn2 + kLn2Rest, of which kLn2 has 42 bits: its products with exponents are exact.
constexpr double kLn2 = 0x1.62e42fefa38p-1, kLn2Rest = 0x1.ef35793c7673p-45;

// The logarithm of a finite x > 0. With x = 2^k m, 1 / sqrt(2) < m < sqrt(2), and s = (m - 1) / (m + 1):
// ln x = k ln 2 + 2 (s + s^3 / 3 + s^5 / 5 + ...), where s^2 < 0.0295. The sum ends below 2^-79 of s.
GA_CALLED DoublePair log_pair(double x) {
  int k = -1023;
  if (x < 0x1p-1022) {
    x *= 0x1p54;
    k -= 54;
  }
  uint64_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  k += static_cast<int>(bits >> 52);
  bits = (bits & 0xfffffffffffff) | 0x3ff0000000000000;
  double m;
  __builtin_memcpy(&m, &bits, sizeof m);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++k;
  }
  const DoublePair s = DoublePair{m - 1, 0} / exact_sum(m, 1), square = s * s;
  double tail = 0;
  for (int n = 29; n > 7; n -= 2) tail = (tail + 1.0 / n) * square.high;
  constexpr DoublePair third = inverse(3), fifth = inverse(5), seventh = inverse(7);
  const DoublePair sum =
      s + s * (square * (third + square * (fifth + square * (seventh + DoublePair{tail, 0}))));
  return DoublePair{k * kLn2, k * kLn2Rest} + DoublePair{2 * sum.high, 2 * sum.low};
}

// 2^n x, rounded once. 0.5 < x.high < 2
GA_HD double scaled(DoublePair x, int n) {
  if (x.high < 1) {
    x = {2 * x.high, 2 * x.low};
    --n;
  }
  if (n > 1023) return HUGE_VAL;
  if (n >= -1022) return x.high * power_of_two(n);
  // The last place of a subnormal result is that of `one`, to which it is rounded by adding it.
  const double one = power_of_two(-1022 - n);
  const DoublePair s = exact_sum(one, x.high);
  return ((s.high + (s.low + x.low)) - one) * 0x1p-60 * power_of_two(n + 60);
}

// e^x. With n the integer next to x / ln 2 and r = x - n ln 2: 2^n (1 + r + r^2 / 2! + ...), where |r| < 0.347. The
// sum ends below 2^-74.
GA_CALLED double exp_of_pair(DoublePair x) {
  if (x.high > 710) return HUGE_VAL;
  if (x.high < -746) return 0;
  const double n = floor(x.high * 1.4426950408889634 + 0.5);
  const DoublePair r =
      DoublePair{x.high - n * kLn2, 0} + DoublePair{-n * kLn2Rest, 0} + DoublePair{x.low, 0};
  double tail = 0;
  for (int i = 17; i > 4; --i) tail = (1 + tail) * (r.high * (1.0 / i));
  constexpr DoublePair one = {1, 0}, half = {0.5, 0}, sixth = inverse(6), last = inverse(24);
  const DoublePair sum = half + r * (sixth + r * (last + last * DoublePair{tail, 0}));
  return scaled(one + r * (one + r * sum), static_cast<int>(n));
}

// e^x
GA_HD double exponential(double x) { return x != x ? x : exp_of_pair({x, 0}); }

// ln x, NaN if x < 0
GA_HD double natural_log(double x) {
  if (!(x > 0)) return x == 0 ? -HUGE_VAL : NAN;
  return x == HUGE_VAL ? x : log_pair(x).high;
}

// x^y as pow(), but NaN for every x < 0.
GA_HD double real_power(double x, double y) {
  if (y == 0 || x == 1) return 1;
  if (!(x >= 0) || y != y) return NAN;
  if (x == 0) return y > 0 ? 0 : HUGE_VAL;
  const bool grows = (x > 1) == (y > 0);
  if (x == HUGE_VAL || fabs(y) == HUGE_VAL) return grows ? HUGE_VAL : 0;
  const DoublePair log = log_pair(x);
  // Beyond this the result overflows or vanishes, and before the product does.
  if (fabs(y * log.high) > 750) return grows ? HUGE_VAL : 0;
  return exp_of_pair(log * DoublePair{y, 0});
}

}  // namespace ga
