// SPDX-License-Identifier: Apache-2.0
// What the kernels of all backends share below the Ops: 16-bit numbers, stochastic rounding, maxima,
// the order of sums and the walk over units. Compiled for each ISA level of the CPU and for devices,
// with equal bits everywhere.
//
// Conversions follow IEEE 754 even if the program flushes subnormals to zero. A NaN becomes quiet
// and keeps the upper bits of its payload.
#pragma once

#include <cfloat>
#include <cstdint>

#include "core/hd.hpp"
#include "numbers/units.hpp"

namespace ga {

// ---- 16-bit numbers -----------------------------------------------------------------------------

GA_HD uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}

GA_HD float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
}

GA_HD float from_bf16(uint16_t h) { return float_of(uint32_t{h} << 16); }

GA_HD uint16_t to_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  const uint32_t nan = u >> 16 | 0x40;
  return static_cast<uint16_t>((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

GA_HD float from_f16(uint16_t h) {
  const uint32_t u = h & 0x7fffu;
  const uint32_t normal = (u << 13) + (uint32_t{127 - 15} << 23);
  const uint32_t nan = u << 13 | 0x7fc00000;
  const uint32_t tiny = bits_of(static_cast<float>(static_cast<int32_t>(u)) * 0x1p-24f);
  const uint32_t magnitude =
      u < 0x400 ? tiny : (u < 0x7c00 ? normal : (u == 0x7c00 ? 0x7f800000 : nan));
  return float_of(magnitude | (uint32_t{h} & 0x8000u) << 16);
}

GA_HD uint16_t to_f16(float x) {
  const uint32_t u = bits_of(x) & 0x7fffffff;
  const uint32_t sign = bits_of(x) >> 16 & 0x8000;
  const uint32_t normal = (u - (uint32_t{127 - 15} << 23) + 0xfff + (u >> 13 & 1)) >> 13;
  // Adding 1/2 leaves the sum's last bit at the smallest f16, 2^-24, and rounds there.
  const uint32_t tiny = bits_of(float_of(u < 0x38800000 ? u : 0) + 0.5f) - 0x3f000000;
  const uint32_t nan = 0x7e00 | (u >> 13 & 0x3ff);
  const uint32_t magnitude =
      u < 0x38800000 ? tiny : (u < 0x47800000 ? normal : (u <= 0x7f800000 ? 0x7c00 : nan));
  return static_cast<uint16_t>(sign | magnitude);
}

// ---- Stochastic rounding ------------------------------------------------------------------------

// 32 random bits for each index below 2^32, from a 64-bit key: lowbias32 (Wellons 2018) with one
// half of the key mixed in before each multiplication.
struct Chance {
  uint32_t first, second;

  GA_HD Chance(uint64_t key, uint64_t high) {
    uint64_t z = key + 0x9e3779b97f4a7c15 * (high + 1);  // splitmix64
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z ^= z >> 31;
    first = static_cast<uint32_t>(z);
    second = static_cast<uint32_t>(z >> 32);
  }

  GA_HD uint32_t operator()(uint32_t index) const {
    uint32_t x = index ^ first;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15 ^ second) * 0x846ca68bu;
    return x ^ x >> 16;
  }
};

// Rounds up with a probability equal to the cut fraction, by adding the lower 16 random bits below
// the last bit that stays.
GA_HD uint16_t to_bf16(float x, uint32_t random) {
  const uint32_t u = bits_of(x);
  const uint32_t magnitude = u & 0x7fffffff;
  const uint32_t added = magnitude < 0x7f800000 ? random & 0xffff : 0;
  const uint32_t quiet = magnitude > 0x7f800000 ? 0x40 : 0;
  return static_cast<uint16_t>((u + added) >> 16 | quiet);
}

GA_HD uint16_t to_f16(float x, uint32_t random) {
  const uint32_t u = bits_of(x) & 0x7fffffff;
  const uint32_t sign = bits_of(x) >> 16 & 0x8000;
  const uint32_t normal = (u - (uint32_t{127 - 15} << 23) + (random & 0x1fff)) >> 13;
  // Below 2^-14: the significand in units of 2^-24, with `kept` bits behind the binary point, to
  // which as many random bits are added.
  const uint32_t exponent = u >> 23;
  const uint32_t shift = exponent < 113 ? 126 - exponent : 14;
  const uint32_t lost = shift > 31 ? shift - 31 : 0;
  const uint32_t significand = exponent == 0 || lost > 23 ? 0 : ((u & 0x7fffff) | 0x800000) >> lost;
  const uint32_t kept = shift - lost;  // 14 to 31
  const uint32_t tiny = (significand + (random >> (32 - kept))) >> kept;
  const uint32_t magnitude = exponent < 113 ? tiny : (u < 0x47800000 ? normal : 0x7c00);
  return u >= 0x7f800000 ? to_f16(x) : static_cast<uint16_t>(sign | magnitude);
}

// ---- Maxima --------------------------------------------------------------------------------------

// The larger of two numbers; a NaN if one of them is one. Of zeros the first, whatever their signs.
template <class T>
GA_HD T maximum(T a, T b) {
  return b > a || b != b ? b : a;
}

// ---- Order of sums ------------------------------------------------------------------------------

// Element i of a tile of kTile elements is squared and added to lane i mod kLanes, in order of i; the
// square is rounded before. The lanes are then added by halves, in double: lane l and lane l + 16,
// then 8, 4, 2 and 1 apart. So are the totals of a chunk's tiles, with 0 for an absent tile.
//
// The lanes of a tile of floats are floats first. A lane has at most kTile / kLanes = 32 terms, each
// rounded as a square and in 31 sums at most, so the total is wrong by at most 32 * 2^-24 of itself,
// and a norm by half of that, 0.96e-6; the errors of many lanes cancel, and 1e-8 is what is seen, or
// 3e-7 where all elements are alike. This holds unless squares overflow, which leaves a total that is
// not finite, or underflow: each of the 1024 squares is then wrong by 2^-150 (2^-126 where subnormals
// are flushed), together by less than 2^-36 of a total of kSmallestTotal. Without such a total the
// lanes are added anew in double, where the square of a float is exact and neither over- nor
// underflows. The lanes of a measuring pass, and sums over units that are not runs, are doubles at once.
//
// The tiles of a unit's run (below), or of the part of a run in a piece, start at the start of the
// run or part; their totals are added one after the other.
constexpr int kLanes = 32;
constexpr int64_t kTile = 1024;
constexpr int kTotals = 64;  // tiles of a chunk
constexpr double kSmallestTotal = 0x1p-80;

// Of the total of a tile whose lanes are floats.
GA_HD bool is_trusted(double total) { return total >= kSmallestTotal && total <= DBL_MAX; }

// Adds x by halves, x[i] + x[i + kCount / 2], until one number is left. Overwrites x.
template <int kCount>
GA_HD double add_halves(double* x) {
  static_assert((kCount & (kCount - 1)) == 0);
  for (int half = kCount / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

// ---- Units --------------------------------------------------------------------------------------

// Walks a tensor by runs: stretches along the innermost axis of a pattern, whose elements are
// either units one after the other (kept) or all of one unit.
class UnitCursor {
 public:
  GA_HD UnitCursor(const UnitPattern& pattern, int64_t element)
      : pattern_(pattern), last_(pattern.axes - 1), unit_(0) {
    for (int a = last_; a >= 0; --a) {
      index_[a] = element % pattern.extent[a];
      element /= pattern.extent[a];
      unit_ += index_[a] * pattern.unit_stride[a];
    }
  }

  GA_HD bool kept() const { return pattern_.kept[last_]; }
  GA_HD int64_t unit() const { return unit_; }
  GA_HD int64_t left() const { return pattern_.extent[last_] - index_[last_]; }

  // count: at most left()
  GA_HD void advance(int64_t count) {
    index_[last_] += count;
    unit_ += count * pattern_.unit_stride[last_];
    for (int a = last_; a > 0 && index_[a] == pattern_.extent[a]; --a) {
      unit_ += pattern_.unit_stride[a - 1] - pattern_.extent[a] * pattern_.unit_stride[a];
      index_[a] = 0;
      ++index_[a - 1];
    }
  }

 private:
  const UnitPattern& pattern_;
  int last_;
  int64_t unit_;
  int64_t index_[UnitPattern::kMaxAxes];
};

}  // namespace ga
