// SPDX-License-Identifier: Apache-2.0
// Sums of squares in the order of numbers.hpp, and the ends of arrays. Included in the same way as vectors.hpp.
#pragma once

#include "backend/cpu/formats.hpp"

// The last elements of a tensor, fewer than a block, padded with zeros to whole groups of kGroup,
// so that the loops below handle only whole groups.
template <class T>
struct Padded {
  alignas(64) T data[kBlock];

  GA_INLINE Padded(const T* from, int64_t count) {
    int64_t i = 0;
    for (; i + kGroup <= count; i += kGroup) std::memcpy(data + i, from + i, kGroup * sizeof(T));
    if (i == count) return;
#if defined(__AVX512F__)  // one store, because a vector load after scalar stores is slow
    if constexpr (std::is_same_v<T, float>) {
      const auto mask = static_cast<__mmask16>((1u << (count - i)) - 1);
      _mm512_store_ps(data + i, _mm512_maskz_loadu_ps(mask, from + i));
      return;
    }
#endif
    std::memset(data + i, 0, kGroup * sizeof(T));
    for (; i < count; ++i) data[i] = from[i];
  }

  GA_INLINE void copy_to(T* to, int64_t count) const {
    int64_t i = 0;
    for (; i + kGroup <= count; i += kGroup) std::memcpy(to + i, data + i, kGroup * sizeof(T));
    for (; i < count; ++i) to[i] = data[i];
  }
};

// The elements of a tile before those that are to be padded, which begin in lane 0.
GA_INLINE int64_t before_end(int64_t count) {
  return count % kGroup == 0 ? count : count & -kLanes;
}

GA_INLINE int64_t whole_groups(int64_t count) { return (count + kGroup - 1) / kGroup * kGroup; }

// Zeros a tile from element `count` to the end of the group.
template <class T>
GA_INLINE void pad_tile(T* tile, int64_t count) {
  std::memset(tile + count, 0, static_cast<size_t>(whole_groups(count) - count) * sizeof(T));
}

// ---- Sums of squares ----------------------------------------------------------------------------

// The lanes of a tile in double.
struct WideLanes {
  static constexpr int kRegisters = kLanes / kWidth<double>;
  Doubles sum[kRegisters] = {};

  // x holds the elements of lanes [lane, lane + kWidth).
  GA_INLINE void add(int lane, Doubles x) { sum[lane / kWidth<double>] += x * x; }
  GA_INLINE void add(int lane, Floats x) {
    Doubles* const s = sum + lane / kWidth<double>;
    s[0] = add_square(s[0], widen_low(x));
    s[1] = add_square(s[1], widen_high(x));
  }
  GA_INLINE double total() const { return total_of<kRegisters>(sum); }
  GA_INLINE double group_total() const { return total_of<kRegisters / 2>(sum); }
};

// The lanes of a tile in f32, if is_trusted() says so of their total.
struct NarrowLanes {
  static constexpr int kRegisters = kLanes / kWidth<float>;
  Floats sum[kRegisters] = {};

  GA_INLINE void add(int lane, Floats x) { sum[lane / kWidth<float>] += x * x; }
  GA_INLINE double total() const { return total_of<kRegisters>(sum); }
  // The total if only the lanes of the first group are used.
  GA_INLINE double group_total() const { return total_of<kRegisters / 2>(sum); }
};

template <class T>
using Lanes = std::conditional_t<std::is_same_v<T, float>, NarrowLanes, WideLanes>;

// Runs body(i, lane) for each register of whole groups, from lane 0 on. Once this is unrolled,
// lanes are constants, so their sums stay in registers.
template <class T, class Body>
GA_INLINE void each_register(int64_t count, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int l = 0; l < kLanes; l += kWidth<T>) body(i + l, l);
  if (i < count)
    for (int l = 0; l < kGroup; l += kWidth<T>) body(i + l, l);
}

template <class Lanes, class T>
GA_INLINE void add_groups(Lanes& lanes, const T* x, int64_t count) {
  each_register<T>(count, [&](int64_t i, int l) GA_INLINE_BODY { lanes.add(l, get(x + i)); });
}

// The total of a tile of f32 in double. element(i), i in [0, count): its elements.
template <class Element>
__attribute__((noinline)) double wide_total(int64_t count, Element&& element) {
  alignas(64) float tile[kTile];
  uint32_t any = 0;
  for (int64_t i = 0; i < count; ++i) {
    tile[i] = element(i);
    any |= bits_of(tile[i]);
  }
  if (any << 1 == 0) return 0;  // zeros, as in the gradient of an embedding
  pad_tile(tile, count);
  WideLanes lanes;
  add_groups(lanes, tile, whole_groups(count));
  return lanes.total();
}

// The sum over a chunk, tile after tile.
template <class T>
class ChunkSum {
 public:
  // element(i), i in [0, count): the elements of the tile, for another look at them where the total
  // alone does not suffice.
  template <class Element>
  GA_INLINE void add_tile(const Lanes<T>& lanes, int64_t count, Element&& element) {
    double total = lanes.total();
    if constexpr (std::is_same_v<T, float>) {
      if (!is_trusted(total)) total = wide_total(count, element);
    } else if (!is_finite(total)) {  // the squares may have overflowed
      for (int64_t i = 0; i < count; ++i) finite_ = finite_ && is_finite(element(i));
    }
    totals_[tiles_++] = total;
  }
  // tile: padded to whole groups.
  GA_INLINE void add_tile(const T* tile, int64_t count) {
    Lanes<T> lanes;
    add_groups(lanes, tile, whole_groups(count));
    add_tile(lanes, count, [&](int64_t i) { return tile[i]; });
  }
  GA_INLINE void add_wide_tile(const WideLanes& lanes) { totals_[tiles_++] = lanes.total(); }

  // To be called once, at the end.
  GA_INLINE double total() {
    if (tiles_ == 1) return totals_[0];  // adding zeros would not change it
    for (int t = tiles_; t < kTotals; ++t) totals_[t] = 0;
    return add_halves<kTotals>(totals_);
  }
  // Whether all elements are finite. The squares of finite floats cannot overflow a double.
  GA_INLINE bool finite(double total) const {
    return std::is_same_v<T, float> ? is_finite(total) : finite_;
  }

 private:
  alignas(64) double totals_[kTotals];
  int tiles_ = 0;
  bool finite_ = true;
};
