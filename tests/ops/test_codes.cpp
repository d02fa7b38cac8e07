// SPDX-License-Identifier: Apache-2.0
//
// The codes of state in 8 bits: which numbers they stand for, that they are read and rounded back to themselves for
// every scale, and how numbers between two codes are rounded. The table of codes is made here in double.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "backend/codes.hpp"

namespace ga::test {
namespace {

constexpr uint32_t kLeastRandom = 8, kMostRandom = kMostCodeBits;

// What the codes of magnitudes stand for, for the scale 1.
template <bool kSigned>
std::vector<double> shares() {
  constexpr int kCodes = kSigned ? 128 : 256;
  std::vector<double> list = {0};
  for (int c = 1; c < kCodes; ++c) {
    const int below = kCodes - 1 - c;  // steps below 1
    const int octave = (below + 7) / 8, step = octave * 8 - below;
    list.push_back(std::ldexp(1 + step / 8.0, -octave));
  }
  return list;
}

template <bool kSigned>
uint32_t nearest(float x, float scale) {
  return Codes<kSigned>::write(x, inverse_of(scale));
}

template <class Body>
void each_scale(const Body& body) {
  for (int exponent = -126; exponent <= 127; ++exponent)
    for (const float significand : {1.0f, 1.0f + 0x1p-23f, 1.2345678f, 1.5f, 1.9f, 2 - 0x1p-23f})
      body(std::ldexp(significand, exponent));
}

template <bool kSigned>
void stands_for_its_share() {
  const std::vector<double> table = shares<kSigned>();
  EXPECT_EQ(table.back(), 1);
  EXPECT_EQ(static_cast<float>(table[1]), Codes<kSigned>::kLeast);
  for (uint32_t c = 0; c < 256; ++c) {
    const double share = table[c % table.size()], sign = c < table.size() ? 1 : -1;
    EXPECT_EQ(Codes<kSigned>::read(c, 1), sign * share) << c;
    EXPECT_EQ(Codes<kSigned>::read(c, 0x1p-30f), sign * std::ldexp(share, -30)) << c;
    EXPECT_EQ(Codes<kSigned>::read(c, 1.7f), static_cast<float>(sign * share * double{1.7f})) << c;
  }
}
TEST(Codes, StandForTheirShares) {
  stands_for_its_share<true>();
  stands_for_its_share<false>();
}

template <bool kSigned>
void is_the_same_again() {
  each_scale([](float scale) {
    for (uint32_t c = 0; c < 256; ++c) {
      const float x = Codes<kSigned>::read(c, scale);
      const uint32_t again = nearest<kSigned>(x, scale);
      ASSERT_EQ(Codes<kSigned>::read(again, scale), x) << scale << ' ' << c;
      // Several codes stand for the same number where so few of the smallest ones are left.
      if (scale * Codes<kSigned>::kLeast >= 0x1p-143f) {
        ASSERT_EQ(again, c) << scale << ' ' << x;
      }
    }
    // and so is the scale, which is in each block that is not of zeros
    ASSERT_EQ(scale_of_block(Codes<kSigned>::read(Codes<kSigned>::kTop, scale)), scale);
  });
}
TEST(Codes, AreReadAndRoundedToThemselves) {
  is_the_same_again<true>();
  is_the_same_again<false>();
}

template <bool kSigned>
void is_nearest() {
  const std::vector<double> table = shares<kSigned>();
  for (const float scale : {1.0f, 0.3f, 1e-20f, 3e30f})
    for (double share = 1; share > 1e-12; share *= 0.997) {
      const auto x = static_cast<float>(share * double{scale});
      const double exact = double{x} / double{scale};
      const uint32_t c = nearest<kSigned>(x, scale);
      ASSERT_LT(c, table.size());
      double least = 2;
      for (size_t k = kSigned ? 0 : 1; k < table.size(); ++k)
        least = std::min(least, std::abs(table[k] - exact));
      ASSERT_LE(std::abs(table[c] - exact), least * (1 + 1e-5) + 1e-7 * exact) << share;
      if (kSigned) {
        ASSERT_EQ(nearest<kSigned>(-x, scale), c | 0x80);
      } else {
        ASSERT_GE(c, 1u) << "what is positive stays so";
      }
    }
}
TEST(Codes, AreTheNearest) {
  is_nearest<true>();
  is_nearest<false>();
}

// The largest element of a block keeps its bits, whatever the random ones are.
template <bool kSigned>
void keeps_the_largest() {
  each_scale([](float scale) {
    const float per_scale = inverse_of(scale);
    for (const uint32_t random : {kLeastRandom, kMostRandom})
      ASSERT_EQ(Codes<kSigned>::write(scale, per_scale, random), Codes<kSigned>::kTop) << scale;
  });
}
TEST(Codes, KeepTheLargest) {
  keeps_the_largest<true>();
  keeps_the_largest<false>();
}

// Over all random bits, of which there are 16, the mean of the codes is the number, to the last of these bits.
template <bool kSigned>
void is_right_on_average() {
  const std::vector<double> table = shares<kSigned>();
  const double least = table[1];
  std::vector<double> tries = {0.0, 0.7, 0.123, 1e-3, 3.3e-5, least * 1.01, 0.999};
  if (kSigned) tries.insert(tries.end(), {least * 0.75, least * 0.01});
  for (const double share : tries) {
    const auto x = static_cast<float>(share);
    size_t above = 0;
    while (table[above] < double{x}) ++above;
    const size_t below = table[above] == double{x} ? above : above - 1;
    double sum = 0;
    for (uint32_t random = kLeastRandom; random <= kMostRandom; random += 16) {
      const uint32_t c = Codes<kSigned>::write(x, 1, random);
      ASSERT_TRUE(c == above || c == below) << share << ": " << c;
      sum += table[c];
    }
    EXPECT_NEAR(sum / 0x1p16, x, 0x1p-16 * (table[above] - table[below]) + 1e-300) << share;
  }
}
TEST(Codes, AreRightOnAverage) {
  is_right_on_average<true>();
  is_right_on_average<false>();
}

// The random bits of both slots are in the middles of their intervals, and each is as likely as any other.
TEST(Codes, RandomBits) {
  for (const uint32_t bits : {0u, ~0u, 0x12345678u}) {
    for (const uint32_t of_slot : {code_bits<0>(bits), code_bits<1>(bits)}) {
      EXPECT_EQ(of_slot % 16, 8u);
      EXPECT_LE(of_slot, kMostRandom);
    }
  }
  EXPECT_EQ(code_bits<0>(0x12345678u), 0x45678u);
  EXPECT_EQ(code_bits<1>(0x12345678u), 0x12348u);
}

// However small it is, a positive second moment is not rounded to 0, and 0 stays 0.
TEST(Codes, KeepWhatIsPositive) {
  for (const float scale : {1.0f, 1e-30f, 1e38f})
    for (const float x : {scale * 1e-9f, scale * 1e-20f, FLT_MIN, 0x1p-149f})
      for (const uint32_t random : {kLeastRandom, kMostRandom / 2, kMostRandom}) {
        if (x == 0 || x > scale) continue;
        EXPECT_GE(Codes<false>::write(x, inverse_of(scale), random), 1u) << x << ' ' << scale;
        EXPECT_EQ(Codes<false>::write(0, inverse_of(scale), random), 0u);
        EXPECT_EQ(Codes<true>::write(0, inverse_of(scale), random), 0u);
        EXPECT_EQ(Codes<true>::write(-0.0f, inverse_of(scale), random), 0x80u);
      }
}

TEST(Codes, ScalesAreNormal) {
  EXPECT_EQ(scale_of_block(0), 0);
  EXPECT_EQ(scale_of_block(0x1p-127f), 0);
  EXPECT_EQ(scale_of_block(FLT_MIN), FLT_MIN);
  for (const double bad : {-1.0, 1e-40, -0x1p-126, 1e300, double{INFINITY}, double{NAN}})
    EXPECT_FALSE(is_scale(bad)) << bad;
  for (const double good : {0.0, 0x1p-126, 1.0, double{FLT_MAX}}) EXPECT_TRUE(is_scale(good));
}

TEST(Codes, AreOfFiniteNumbers) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(saturated(infinity), FLT_MAX);
  EXPECT_EQ(saturated(-infinity), -FLT_MAX);
  EXPECT_EQ(saturated(NAN), 0);
  for (const float x : {0.0f, -0.0f, FLT_MAX, -1e-45f})
    EXPECT_EQ(bits_of(saturated(x)), bits_of(x));
}

}  // namespace
}  // namespace ga::test
