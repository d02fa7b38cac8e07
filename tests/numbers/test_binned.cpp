// SPDX-License-Identifier: Apache-2.0
//
// Binned sums of squares: the same bits for every order and every way to cut the terms, at every level, and what they
// are, by arithmetic on integers of 4,352 bits.
#include <algorithm>
#include <array>
#include <cfloat>
#include <memory>
#include <numeric>

#include "backend/backend.hpp"
#include "support.hpp"

namespace ga::test {
namespace {

// A number of units of 2^-2300, of which the first word is the last of its digits.
class Exact {
 public:
  static constexpr int kUnit = -2300;

  // mantissa 2^exponent
  void add(unsigned __int128 mantissa, int exponent) {
    const int shift = exponent - kUnit;
    ASSERT_GE(shift, 0);
    unsigned __int128 carry = 0;
    for (size_t w = static_cast<size_t>(shift) / 32, k = 0; w < words_.size(); ++w, ++k) {
      // Digits of the mantissa that fall into this word.
      const int from = static_cast<int>(k) * 32 - shift % 32;
      const unsigned __int128 part = from >= 128 ? 0
                                     : from >= 0 ? mantissa >> from
                                                 : mantissa << -from;
      carry += words_[w];
      carry += static_cast<uint32_t>(part);
      words_[w] = static_cast<uint32_t>(carry);
      carry >>= 32;
    }
  }
  // The number times 2^exponent.
  double times(int exponent) const {
    double sum = 0;
    for (size_t w = words_.size(); w-- > 0;)
      sum +=
          std::ldexp(static_cast<double>(words_[w]), static_cast<int>(w) * 32 + kUnit + exponent);
    return sum;
  }

 private:
  std::array<uint32_t, 136> words_ = {};
};

// The square of x, rounded to a multiple of 2^grid, ties to even; of a double, first to a double.
void add_square(double x, bool f64, int grid, Exact& sum) {
  int exponent;
  const double fraction = std::frexp(std::abs(x), &exponent);
  auto mantissa = static_cast<unsigned __int128>(std::ldexp(fraction, 53));
  mantissa *= mantissa;
  int unit = 2 * (exponent - 53);
  const auto round_to = [&](int to) {
    const int drop = to - unit;
    if (drop <= 0) return;
    unit = to;
    if (drop > 120) {
      mantissa = 0;
      return;
    }
    const unsigned __int128 half = static_cast<unsigned __int128>(1) << (drop - 1);
    const unsigned __int128 rest = mantissa & (2 * half - 1);
    mantissa >>= drop;
    if (rest > half || (rest == half && (mantissa & 1))) ++mantissa;
  };
  if (mantissa == 0) return;
  if (f64) {
    int bits = 0;
    for (unsigned __int128 m = mantissa; m; m >>= 1) ++bits;
    round_to(unit + bits - 53);
  }
  round_to(grid);
  if (mantissa) sum.add(mantissa, unit);
}

// The sum as its definition has it, without bins.
template <class T>
double expected(const std::vector<T>& x) {
  double most = 0;
  for (const T v : x) most = std::max(most, std::abs(static_cast<double>(v)));
  if (most == 0) return 0;
  int exponent;
  std::frexp(most, &exponent);
  const int bin = std::max(-50, static_cast<int>(std::floor((2.0 * (exponent - 1) + 1) / 40)));
  Exact sum;
  for (const T v : x) add_square(v, sizeof(T) == 8, 40 * (bin - 2), sum);
  // A power of two that makes the sum one of usual size: its square root is a norm's.
  return sum.times(-40 * bin);
}

template <class T>
class Binned {
 public:
  Binned() : backend_(make_cpu_backend(config())) {}

  // Of x in pieces of so many elements, added up in some order.
  BinnedSum of(const std::vector<T>& x, size_t piece, uint64_t seed) {
    std::vector<BinnedSum> parts;
    for (size_t at = 0; at < x.size(); at += piece) {
      const size_t n = std::min(piece, x.size() - at);
      std::vector<BinnedSum> chunks(static_cast<size_t>(chunk_count(static_cast<int64_t>(n))));
      BinnedTask task = {};
      task.source = {x.data() + at, dtype_of<T>(), 1, nullptr};
      task.f64 = sizeof(T) == 8;
      task.count = static_cast<int64_t>(n);
      task.sums = chunks.data();
      backend_->reserve(static_cast<int64_t>(chunks.size()), 1, 0);
      backend_->host()->sum_binned({&task, 1});
      parts.insert(parts.end(), chunks.begin(), chunks.end());
    }
    Random random(seed);
    for (size_t k = parts.size(); k > 1; --k)
      std::swap(parts[k - 1], parts[static_cast<size_t>(random.below(k))]);
    BinnedSum sum;
    for (const BinnedSum& part : parts) sum.add(part);
    return sum;
  }

 private:
  std::unique_ptr<Backend> backend_;
};

// Numbers of all sizes between 2^low and 2^high, in a random order.
template <class T>
std::vector<T> numbers(size_t count, int low, int high, uint64_t seed) {
  Random random(seed);
  std::vector<T> x(count);
  for (T& v : x) {
    const double fraction = 1 + static_cast<double>(random.below(uint64_t{1} << 52)) * 0x1p-52;
    const int exponent =
        low + static_cast<int>(random.below(static_cast<uint64_t>(high - low + 1)));
    v = static_cast<T>(std::ldexp(random.below(2) ? fraction : -fraction, exponent));
  }
  return x;
}

struct Range {
  const char* name;
  int low, high;
};

template <class T>
void expect_one_sum(const std::vector<T>& x) {
  const double want = expected(x);
  double most = 0;
  for (const T v : x) most = std::max(most, std::abs(static_cast<double>(v)));
  const int64_t bin = most == 0 ? 0 : BinnedSum::bin_of(std::ilogb(most));
  for (const char* const level : kIsaLevels) {
    const Isa isa(level);
    if (!Isa::available()) continue;
    SCOPED_TRACE(level);
    Binned<T> binned;
    const double whole = binned.of(x, x.size(), 1).value();
    const double scaled =
        std::ldexp(std::ldexp(whole, static_cast<int>(-20 * bin)), static_cast<int>(-20 * bin));
    if (std::isfinite(whole) && whole > DBL_MIN) {
      EXPECT_NEAR(scaled, want, want * 0x1p-50);
    }
    for (const size_t piece : {size_t{1}, size_t{7}, size_t{1000}, size_t{70000}}) {
      if (x.size() / piece > 5000) continue;
      std::vector<T> mixed = x;
      Random random(piece);
      for (size_t k = mixed.size(); k > 1; --k)
        std::swap(mixed[k - 1], mixed[static_cast<size_t>(random.below(k))]);
      EXPECT_EQ(binned.of(x, piece, piece).value(), whole) << piece;
      EXPECT_EQ(binned.of(mixed, piece, piece + 1).value(), whole) << piece;
    }
  }
}

TEST(Binned, TheSumDependsOnNothingElse) {
  for (const Range& r : {Range{"alike", -3, -3}, Range{"gradients", -30, 0}, Range{"far", -60, 60},
                         Range{"all", -149, 127}, Range{"small", -149, -100}}) {
    SCOPED_TRACE(r.name);
    for (const size_t count : {size_t{1}, size_t{3}, size_t{100}, size_t{4000}})
      expect_one_sum(numbers<float>(count, r.low, r.high, count));
  }
  expect_one_sum(numbers<float>(200001, -40, 2, 5));
  for (const Range& r : {Range{"gradients", -30, 0}, Range{"far", -300, 300},
                         Range{"all", -1074, 1023}, Range{"tiny", -1074, -1000}}) {
    SCOPED_TRACE(r.name);
    for (const size_t count : {size_t{1}, size_t{3}, size_t{4000}})
      expect_one_sum(numbers<double>(count, r.low, r.high, count));
  }
}

// Around the ends of bins, where a term begins in one or in the next, and half-way between two units.
TEST(Binned, EndsOfBins) {
  std::vector<float> x;
  for (int e = -60; e <= 60; ++e)
    for (const float f : {1.0f, 1 + FLT_EPSILON, 2 - FLT_EPSILON, 1.5f, std::sqrt(2.0f)})
      for (int k = 0; k < 9; ++k) x.push_back(std::ldexp(f, e));
  expect_one_sum(x);
  for (const int high : {0, 10, 19, 20, 21, 39, 40, 41}) {
    x.clear();
    for (int e = high - 75; e <= high; ++e) x.push_back(std::ldexp(1.0f, e));
    expect_one_sum(x);
  }
}

TEST(Binned, ZerosAndWhatIsNotFinite) {
  Binned<float> binned;
  std::vector<float> x(3000, 0.0f);
  EXPECT_EQ(binned.of(x, 1000, 1).value(), 0);
  x[2500] = -3;
  EXPECT_EQ(binned.of(x, 1000, 1).value(), 9);
  for (const size_t bad : {size_t{100}, size_t{1000}, size_t{2999}})
    for (const uint64_t order : {1u, 2u, 3u}) {
      std::vector<float> of_bad = x;
      of_bad[bad] = order == 2 ? INFINITY : -INFINITY;
      EXPECT_EQ(binned.of(of_bad, 1000, order).value(), INFINITY);
      of_bad[1500] = order == 2 ? NAN : -NAN;
      EXPECT_TRUE(std::isnan(binned.of(of_bad, 1000, order).value()));
    }
}

// More terms than a bin's 2^40 can take up without a carry.
TEST(Binned, ManyTerms) {
  BinnedSum sum;
  const int64_t units[] = {(int64_t{1} << 40) - 1, (int64_t{1} << 40) - 1, 5};
  for (int doubling = 0; doubling < 30; ++doubling) {
    if (doubling == 0) {
      sum.add(2, units);
      sum.add(2, units);
    } else {
      sum.add(BinnedSum(sum));
    }
  }
  const double of_one = std::ldexp(static_cast<double>(units[0]), 80) +
                        std::ldexp(static_cast<double>(units[1]), 40) + 5;
  EXPECT_NEAR(sum.value(), std::ldexp(of_one, 30), std::ldexp(of_one, 30) * 0x1p-51);
}

}  // namespace
}  // namespace ga::test
