// SPDX-License-Identifier: Apache-2.0
// Sums of squares whose bits depend on neither the order of the terms nor how they are cut into parts, as binned
// sums of Demmel & Nguyen 2015 ("Parallel reproducible summation") are.
//
// Numbers of bins fill the line: bin k has multiples of its unit 2^(40 k) below 2^(40 (k + 1)). With K the bin of the
// largest term, each term is rounded to a multiple of the unit of bin K - 2, and these are added without any further
// rounding. So the sum is wrong by at most 2^-81 of the largest term for each term, and by nothing else.
//
// A part of the terms begins with the bin of its own largest one. What it has of lower bins than K - 2 is left out
// when parts are put together; what it has of the others is what the whole would have, since a term rounded to nearest
// in one bin leaves the same rest for the next one, however many zeros come before.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/hd.hpp"

namespace ga {

struct BinnedSum {
  static constexpr int kBits = 40, kBins = 3;
  static constexpr int64_t kLowest = -50, kNone = INT64_MIN;  // of f64, smaller squares vanish

  int64_t top = kNone;        // K; kNone: all terms are zeros
  int64_t units[kBins] = {};  // of bins K, K - 1, K - 2: below 2^40 each, and
  int64_t wraps[kBins] = {};  // so many times 2^40 more

  // Of terms that no bin takes, which value() has in place of the others.
  enum Nonfinite : int64_t { kInfinite = 1, kNan = 2 };
  int64_t nonfinite = 0;

  // The bin of the square of a number whose exponent, of ilogb(), is e.
  GA_HD static int64_t bin_of(int e) {
    const int64_t exponent = 2 * int64_t{e} + 1;
    const int64_t bin = exponent >= 0 ? exponent / kBits : -((kBits - 1 - exponent) / kBits);
    return bin < kLowest ? kLowest : bin;
  }

  // Adds terms of bins t, t - 1 and t - 2: so many units of each, below 2^62.
  GA_HD void add(int64_t t, const int64_t* more) {
    raise(t);
    for (int64_t k = top - t, from = 0; k < kBins; ++k, ++from) put(k, more[from]);
  }
  GA_HD void add(const BinnedSum& sum) {
    nonfinite |= sum.nonfinite;
    if (sum.top == kNone) return;
    raise(sum.top);
    for (int64_t k = top - sum.top, from = 0; k < kBins; ++k, ++from) {
      put(k, sum.units[from]);
      wraps[k] += sum.wraps[from];
    }
  }

  // The same double whatever the parts were; infinite where it is too large.
  double value() const {
    if (nonfinite & kNan) return std::numeric_limits<double>::quiet_NaN();
    if (nonfinite & kInfinite) return std::numeric_limits<double>::infinity();
    if (top == kNone) return 0;
    int64_t digits[kBins + 2] = {};  // in base 2^40, the last one first
    int64_t carry = 0;
    for (int k = 0; k < kBins; ++k) {
      const int64_t sum = units[kBins - 1 - k] + carry;
      digits[k] = sum & kMask;
      carry = (sum >> kBits) + wraps[kBins - 1 - k];
    }
    digits[kBins] = carry & kMask;
    digits[kBins + 1] = carry >> kBits;
    double sum = 0;
    for (int k = kBins + 1; k >= 0; --k)
      sum += std::ldexp(static_cast<double>(digits[k]),
                        static_cast<int>(kBits * (top - kBins + 1 + k)));
    return sum;
  }

 private:
  static constexpr int64_t kMask = (int64_t{1} << kBits) - 1;

  GA_HD void put(int64_t k, int64_t more) {
    const int64_t sum = units[k] + (more & kMask);
    units[k] = sum & kMask;
    wraps[k] += (more >> kBits) + (sum >> kBits);
  }
  // Makes room for terms of bin t.
  GA_HD void raise(int64_t t) {
    if (top == kNone) top = t;
    for (; top < t; ++top) {
      for (int k = kBins - 1; k > 0; --k) units[k] = units[k - 1], wraps[k] = wraps[k - 1];
      units[0] = wraps[0] = 0;
    }
  }
};

}  // namespace ga
