// SPDX-License-Identifier: Apache-2.0
// Binned sums of squares, see numbers/binned.hpp. Included in the same way as vectors.hpp.
#pragma once

#include "backend/cpu/sums.hpp"

typedef uint64_t Words __attribute__((vector_size(kBytes)));

// Of terms in [0, 2^40): the units of three bins that they make, in lanes. A term plus magic is a number of units
// behind the bits of magic, rounded to nearest; these are added as integers, modulo 2^64.
struct BinnedLanes {
  static constexpr double kMagic[BinnedSum::kBins] = {0x1.8p52, 0x1.8p12, 0x1.8p-28};
  Words bits[BinnedSum::kBins] = {};

  GA_INLINE void add(Doubles x) {
    Doubles rest = x * x;
    for (int k = 0; k < BinnedSum::kBins; ++k) {
      const Doubles rounded = rest + kMagic[k];
      bits[k] += reinterpret_cast<Words>(rounded);
      rest -= rounded - kMagic[k];
    }
  }
  // After so many calls of add().
  GA_INLINE int64_t units(int k, int64_t calls) const {
    uint64_t sum = 0;
    for (int lane = 0; lane < kWidth<double>; ++lane) sum += bits[k][lane];
    uint64_t magic;
    std::memcpy(&magic, &kMagic[k], sizeof magic);
    return static_cast<int64_t>(sum - static_cast<uint64_t>(calls * kWidth<double>) * magic);
  }
};

template <class T>
using BitsOf = std::conditional_t<std::is_same_v<T, float>, int32_t, int64_t>;

// The bits of the largest magnitude; of an infinity, or of a NaN, if there is one.
template <class T>
GA_INLINE BitsOf<T> largest_bits(const T* x, int64_t count) {
  using Bits = BitsOf<T>;
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();
  Bits most = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= kMagnitude;
    most = bits > most ? bits : most;
  }
  return most;
}

// 2^exponent, of a normal double.
GA_INLINE double power_of_two(int64_t exponent) {
  const int64_t bits = (exponent + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// x: whole groups.
template <class T>
void add_binned(const T* x, int64_t count, BinnedSum& sum) {
  const BitsOf<T> bits = largest_bits(x, count);
  T most;
  std::memcpy(&most, &bits, sizeof most);
  if (!is_finite(most)) {
    sum.nonfinite |= std::isnan(most) ? BinnedSum::kNan : BinnedSum::kInfinite;
    return;
  }
  if (most == 0) return;
  const auto wide = static_cast<double>(most);
  int64_t exponent;
  std::memcpy(&exponent, &wide, sizeof exponent);
  const int64_t bin = BinnedSum::bin_of(static_cast<int>((exponent >> 52) - 1023));
  const double scale = power_of_two(-bin * BinnedSum::kBits / 2);  // of the roots of terms
  BinnedLanes lanes[2];
  for (int64_t i = 0; i < count; i += kGroup) {
    if constexpr (std::is_same_v<T, float>) {
      for (int64_t k = 0; k < kGroup; k += kWidth<float>) {
        const Floats f = get(x + i + k);
        lanes[0].add(widen_low(f) * scale);
        lanes[1].add(widen_high(f) * scale);
      }
    } else {
      for (int64_t k = 0; k < kGroup; k += 2 * kWidth<double>) {
        lanes[0].add(get(x + i + k) * scale);
        lanes[1].add(get(x + i + k + kWidth<double>) * scale);
      }
    }
  }
  const int64_t calls = count / (2 * kWidth<double>);
  int64_t units[BinnedSum::kBins];
  for (int k = 0; k < BinnedSum::kBins; ++k)
    units[k] = lanes[0].units(k, calls) + lanes[1].units(k, calls);
  sum.add(bin, units);
}

template <class T>
void binned_chunk(const BinnedTask& task, int64_t offset, int64_t count) {
  alignas(64) T tile[kTile];
  const T scale = static_cast<T>(scale_of(task.source));
  BinnedSum sum;
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    const T* g = load<T>(task.source, offset + t, n, tile);
    if (scale != 1 || n % kGroup != 0) {
      for (int64_t i = 0; i < n; ++i) tile[i] = g[i] * scale;
      pad_tile(tile, n);
      g = tile;
    }
    add_binned(g, whole_groups(n), sum);
  }
  task.sums[offset / kChunk] = sum;
}

void binned(const BinnedTask& task, int64_t offset, int64_t count) {
  (task.f64 ? binned_chunk<double> : binned_chunk<float>)(task, offset, count);
}
