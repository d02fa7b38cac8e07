// SPDX-License-Identifier: Apache-2.0
// exp, log and pow of core/elementary.hpp: against a table by Python's module decimal with 60 digits, and against
// the C library where its long double has more bits. That every build has the same bits is tested in test_bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/elementary.hpp"
#include "oracle/elementary.hpp"

namespace ga::test {
namespace {

constexpr double kLargestError = 0.501;  // in units of the last place, as elementary.hpp says
constexpr double kLeast = 0x1p-1074, kMost = DBL_MAX;

double unit_of(double x) {
  return std::fabs(x) < DBL_MIN ? kLeast : std::ldexp(1, std::ilogb(x) - 52);
}

double evaluated(const std::string& function, double x, double y) {
  return function == "exponential"   ? exponential(x)
         : function == "natural_log" ? natural_log(x)
                                     : real_power(x, y);
}

TEST(Elementary, HardToRound) {
  std::map<std::string, double> largest;
  for (const oracle::Elementary& row : oracle::kElementary) {
    const double is = evaluated(row.function, row.x, row.y);
    const double error = std::fabs((is - row.nearest) / unit_of(row.nearest) - row.off);
    EXPECT_LE(error, kLargestError) << row.function << " " << row.x << " " << row.y;
    largest[row.function] = std::max(largest[row.function], error);
  }
  for (const auto& [function, error] : largest)
    std::printf("%s: %.8f ulp at most\n", function.c_str(), error);
  EXPECT_EQ(largest.size(), 3u);
}

// ---- A million random arguments -----------------------------------------------------------------

class Random {
 public:
  double between(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(engine_);
  }
  double of_any_size(double low, double high) { return std::exp2(between(low, high)); }
  double near_one(double least) { return 1 + between(-1, 1) * of_any_size(std::log2(least), -1); }
  // The exponent for which the logarithm of the power is between these.
  double exponent(double x, double low, double high) { return between(low, high) / std::log(x); }

 private:
  std::mt19937_64 engine_{1};
};

#if LDBL_MANT_DIG > DBL_MANT_DIG

struct Arguments {
  double x, y;
};
struct Range {
  const char* name;
  const char* function;
  std::function<Arguments(Random&)> draw;
};

std::vector<Range> ranges() {
  const auto one = [](auto draw) { return [draw](Random& r) { return Arguments{draw(r), 0}; }; };
  return {
      {"exp(-1..1)", "exponential", one([](Random& r) { return r.between(-1, 1); })},
      {"exp, small", "exponential", one([](Random& r) { return r.near_one(0x1p-60) - 1; })},
      {"exp, any", "exponential", one([](Random& r) { return r.between(-708, 709.7); })},
      {"exp, subnormal", "exponential", one([](Random& r) { return r.between(-745, -708); })},
      {"log, near 1", "natural_log", one([](Random& r) { return r.near_one(0x1p-52); })},
      {"log, any", "natural_log", one([](Random& r) { return r.of_any_size(-1074, 1024); })},
      {"gamma^steps", "real_power",
       [](Random& r) {
         return Arguments{r.between(0.9, 1), std::floor(r.between(1, 10000))};
       }},
      {"Adafactor", "real_power",
       [](Random& r) {
         return Arguments{std::floor(r.between(1, 1e7)), r.between(-1, 0)};
       }},
      {"ADOPT", "real_power",
       [](Random& r) {
         return Arguments{std::floor(r.between(1, 1e7)), r.between(0, 1)};
       }},
      {"NAdam", "real_power",
       [](Random& r) {
         return Arguments{0.96, r.between(0, 2)};
       }},
      {"schedules and averages", "real_power",
       [](Random& r) {
         return Arguments{r.between(0, 1), r.between(0, 20)};
       }},
      {"pow, near 1", "real_power",
       [](Random& r) {
         const double x = r.near_one(0x1p-45);
         return Arguments{x, r.exponent(x == 1 ? 2 : x, -708, 709)};
       }},
      {"pow, any", "real_power",
       [](Random& r) {
         const double x = r.of_any_size(-1074, 1024);
         return Arguments{x, r.exponent(x, -708, 709)};
       }},
      {"pow, subnormal", "real_power",
       [](Random& r) {
         const double x = r.of_any_size(-1074, 1024);
         return Arguments{x, r.exponent(x, -745, -708)};
       }},
  };
}

long double by_the_c_library(const std::string& function, long double x, long double y) {
  return function == "exponential" ? expl(x) : function == "natural_log" ? logl(x) : powl(x, y);
}

TEST(Elementary, AMillionArguments) {
  const std::vector<Range> list = ranges();
  const int count = 1000000 / static_cast<int>(list.size());
  Random random;
  for (const Range& range : list) {
    double largest = 0;
    Arguments worst = {};
    for (int i = 0; i < count; ++i) {
      const Arguments a = range.draw(random);
      const double is = evaluated(range.function, a.x, a.y);
      const long double should = by_the_c_library(range.function, a.x, a.y);
      if (!(std::fabs(should) < kMost) || should == 0) continue;
      const double error =
          static_cast<double>(std::fabs(is - should) / unit_of(static_cast<double>(should)));
      if (error <= largest) continue;
      largest = error;
      worst = a;
    }
    std::printf("%s: %.8f ulp at most\n", range.name, largest);
    EXPECT_LE(largest, kLargestError) << range.name << ": " << worst.x << " " << worst.y;
    EXPECT_GT(largest, 0.4) << range.name;  // of so many, some are next to a midpoint
  }
}

#endif

// ---- What is exact ------------------------------------------------------------------------------

// What C says of pow(), but for x < 0, where real_power() is NaN, and -0, which is as 0.
TEST(Elementary, SpecialArguments) {
  const double infinite = HUGE_VAL, nan = std::nan("");
  const double exponents[] = {1, 2, 0.5, 1e300, kLeast, infinite};
  for (const double y : exponents) {
    for (const double zero : {0.0, -0.0}) {
      EXPECT_EQ(real_power(zero, y), 0) << y;
      EXPECT_EQ(real_power(zero, -y), infinite) << y;
    }
    EXPECT_EQ(real_power(infinite, y), infinite) << y;
    EXPECT_EQ(real_power(infinite, -y), 0) << y;
    EXPECT_EQ(real_power(1, y), 1) << y;
    EXPECT_EQ(real_power(1, -y), 1) << y;
    EXPECT_TRUE(std::isnan(real_power(-1, y))) << y;
    EXPECT_TRUE(std::isnan(real_power(nan, y))) << y;
  }
  for (const double x : {0.0, kLeast, 0.5, 1.0, 1.5, kMost, infinite, nan}) {
    EXPECT_EQ(real_power(x, 0), 1) << x;
    EXPECT_EQ(real_power(x, -0.0), 1) << x;
    if (x != 1) {
      EXPECT_TRUE(std::isnan(real_power(x, nan))) << x;
    }
  }
  EXPECT_EQ(real_power(1, nan), 1);
  for (const double x : {kLeast, 0.5, 1 - 0x1p-53}) {
    EXPECT_EQ(real_power(x, infinite), 0) << x;
    EXPECT_EQ(real_power(x, -infinite), infinite) << x;
    EXPECT_EQ(real_power(x, kMost), 0) << x;
    EXPECT_EQ(real_power(x, -kMost), infinite) << x;
    EXPECT_EQ(real_power(1 / x, infinite), infinite) << x;
    EXPECT_EQ(real_power(1 / x, -infinite), 0) << x;
  }

  EXPECT_EQ(exponential(0), 1);
  EXPECT_EQ(exponential(-0.0), 1);
  EXPECT_EQ(exponential(infinite), infinite);
  EXPECT_EQ(exponential(-infinite), 0);
  EXPECT_EQ(exponential(709.79), infinite);
  EXPECT_EQ(exponential(-745.14), 0);
  EXPECT_EQ(exponential(-kMost), 0);
  EXPECT_TRUE(std::isnan(exponential(nan)));

  EXPECT_FALSE(std::signbit(natural_log(1)));
  EXPECT_EQ(natural_log(1), 0);
  EXPECT_EQ(natural_log(0), -infinite);
  EXPECT_EQ(natural_log(-0.0), -infinite);
  EXPECT_EQ(natural_log(infinite), infinite);
  EXPECT_TRUE(std::isnan(natural_log(-kLeast)));
  EXPECT_TRUE(std::isnan(natural_log(-infinite)));
  EXPECT_TRUE(std::isnan(natural_log(nan)));
}

TEST(Elementary, ExactResults) {
  for (int n = -1074; n <= 1023; ++n) {
    const double power = std::ldexp(1, n);
    EXPECT_EQ(real_power(2, n), power) << n;
    EXPECT_EQ(real_power(0.5, -n), power) << n;
    EXPECT_EQ(real_power(power, 1), power) << n;
    EXPECT_EQ(real_power(power * power, 0.5),
              power * power == 0 || std::isinf(power * power) ? power * power : power)
        << n;
  }
  EXPECT_EQ(real_power(2, -1075.5), 0);
  EXPECT_EQ(real_power(2, 1024), HUGE_VAL);
  for (int base = 3; base <= 15; ++base) {
    double power = 1;
    for (int n = 1; power * base < 0x1p53; ++n) EXPECT_EQ(real_power(base, n), power *= base);
  }
  Random random;
  for (int i = 0; i < 10000; ++i) {
    const double x = random.of_any_size(-1074, 1024);
    EXPECT_EQ(real_power(x, 1), x);
  }
}

}  // namespace
}  // namespace ga::test
