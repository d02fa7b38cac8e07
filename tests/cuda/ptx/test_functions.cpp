// SPDX-License-Identifier: Apache-2.0
// The functions of CUDA's device library that kernels call, where the library calls them, against the C library in
// 80 bits.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "ptx/compare.hpp"
#include "ptx/ptx.hpp"

namespace ga::ptx {
namespace {

constexpr int kCount = 20000;

// The largest error in units of the last place of the exact result. rcp.approx.ftz.f64 is not defined to the bit:
// `changed` counts the results that depend on a unit of its last place.
struct Found {
  double error = 0;
  int changed = 0;
};
template <class Exact>
Found compare(const char* name, double least_x, double most_x, double least_y, double most_y,
              Exact exact) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> x(least_x, most_x), y(least_y, most_y);
  Found found;
  for (int k = 0; k < kCount; ++k) {
    const double a = x(random), b = y(random);
    const double is = device_function(name, a, b);
    const long double should = exact(static_cast<long double>(a), static_cast<long double>(b));
    const double unit = std::nextafter(std::fabs(is), HUGE_VAL) - std::fabs(is);
    found.error = std::max(found.error, static_cast<double>(std::fabs(is - should)) / unit);
    for (const int units : {-1, 1}) {
      if (device_function(name, a, b, units) != is) {
        ++found.changed;
        break;
      }
    }
  }
  return found;
}

const auto kPow = [](long double x, long double y) { return std::pow(x, y); };
const auto kExp = [](long double x, long double) { return std::exp(x); };
const auto kLog = [](long double x, long double) { return std::log(x); };

void expect_below(const char* what, const Found& found, double error, int changed) {
  std::printf("%s: %.3f ulp at most, %d of %d depend on the approximation\n", what, found.error,
              found.changed, kCount);
  EXPECT_LT(found.error, error) << what;
  EXPECT_LE(found.changed, changed) << what;
}

// The errors that NVIDIA states in the CUDA C++ Programming Guide, "Mathematical Functions".
constexpr double kPowError = 2, kExpError = 1, kLogError = 1;

TEST(DeviceFunctions, HaveTheErrorsThatNvidiaStates) {
  expect_below("gamma^steps", compare("ga_pow", 0.9, 1, 1, 10000, kPow), kPowError, 0);
  expect_below("Adafactor: step^-0.8", compare("ga_pow", 1, 1e6, -0.8, -0.8, kPow), kPowError, 0);
  expect_below("NAdam: 0.96^(step / 250)", compare("ga_pow", 0.96, 0.96, 0, 400, kPow), kPowError,
               0);
  expect_below("ADOPT: step^0.3", compare("ga_pow", 1, 1e6, 0.3, 0.3, kPow), kPowError, 0);
  expect_below("KARRAS, POLYNOMIAL: x^y", compare("ga_pow", 0, 1, 0, 20, kPow), kPowError, 0);
  expect_below("AdEMAMix: exp", compare("ga_exp", -1, 0, 0, 1, kExp), kExpError, 0);
  expect_below("AdEMAMix: log", compare("ga_log", 0.5, 1, 0, 1, kLog), kLogError, 10);
}

// What the C library gives to the last bit.
TEST(DeviceFunctions, OfTrivialArguments) {
  EXPECT_EQ(device_function("ga_pow", 0, 0), 1.0);
  EXPECT_EQ(device_function("ga_pow", 1, 1e300), 1.0);
  EXPECT_EQ(device_function("ga_pow", 0.7, 0), 1.0);
  EXPECT_EQ(device_function("ga_pow", 0.7, 1), 0.7);
  EXPECT_EQ(device_function("ga_pow", 3, 2), 9.0);
  EXPECT_EQ(device_function("ga_pow", 0, -1), HUGE_VAL);
  EXPECT_EQ(device_function("ga_pow", 2, 1024), HUGE_VAL);
  EXPECT_EQ(device_function("ga_pow", 2, -1074), 0x1p-1074);
  EXPECT_TRUE(std::isnan(device_function("ga_pow", -1, 0.5)));
  EXPECT_EQ(device_function("ga_exp", 0, 0), 1.0);
  EXPECT_EQ(device_function("ga_exp", -HUGE_VAL, 0), 0.0);
  EXPECT_EQ(device_function("ga_log", 1, 0), 0.0);
  EXPECT_EQ(device_function("ga_log", 0, 0), -HUGE_VAL);
}

}  // namespace
}  // namespace ga::ptx
