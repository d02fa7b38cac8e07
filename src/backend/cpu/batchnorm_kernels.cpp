// SPDX-License-Identifier: Apache-2.0
// See batchnorm_kernels.hpp; the rules of kernels.cpp about linkage and bits hold here too.
//
// Order of sums, in double. Planes: element i of a plane is added to lane i mod 16; the lanes run
// over all samples and are added by halves. Rows are added one after the other.
//
// Both walk memory in its order as far as possible and keep the sums of several channels: the
// planes of one channel lie too far apart for the hardware prefetcher.
#include "backend/cpu/batchnorm_kernels.hpp"

#include <cstring>
#include <initializer_list>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 means its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "backend/numbers.hpp"

namespace ga::cpu {
namespace {

#include "backend/cpu/formats.hpp"

template <class T>
using Real = std::conditional_t<std::is_same_v<T, float>, Floats, Doubles>;
template <class T>
constexpr int kRegisters = kGroup / kWidth<T>;  // of a group
constexpr int kDoubles = kGroup / kWidth<double>;
// Twice the distance of other kernels, because the next plane lies elsewhere in memory.
constexpr int64_t kFar = 2 * kAhead;

template <class T>
GA_INLINE Real<T> all_of(T x) {
  return Real<T>{} + x;
}

// A group's sums.
struct GroupSums {
  Doubles first[kDoubles], second[kDoubles];
};

// Widens while loading, because a register of floats would have to be split first.
GA_INLINE Doubles wide(const double* p) { return get(p); }
#if defined(__AVX512F__)
GA_INLINE Doubles wide(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
#elif defined(__AVX__)
GA_INLINE Doubles wide(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
#else
GA_INLINE Doubles wide(const float* p) {
  return Doubles{static_cast<double>(p[0]), static_cast<double>(p[1])};
}
#endif

// ---- Elements -----------------------------------------------------------------------------------

// Elements of a tensor as T, in the tile if they are converted.
template <class T>
GA_INLINE const T* read(const void* data, int32_t format, int64_t offset, int64_t count, T* tile) {
  if (format == native<T>) return static_cast<const T*>(data) + offset;
  if constexpr (std::is_same_v<T, float>)
    return (format == GA_BF16 ? load_bf16<float> : load_f16<float>)(data, offset, count, tile);
  return tile;
}

template <class T>
GA_INLINE void write(void* data, int32_t format, int64_t offset, int64_t count, const T* tile) {
  if constexpr (std::is_same_v<T, float>)
    (format == GA_BF16 ? store_bf16<float> : store_f16<float>)(data, offset, count, tile, 0,
                                                               {false, 0});
}

// An incomplete group of n < kGroup elements, filled up with `missing`.
template <class T>
struct End {
  T data[kGroup];

  GA_INLINE End(const T* from, int64_t n, T missing) {
    for (int64_t i = 0; i < kGroup; ++i) data[i] = i < n ? from[i] : missing;
  }
  GA_INLINE Doubles operator()(int k) const { return wide(data + k * kWidth<double>); }
};
#if defined(__AVX512F__)
template <>
struct End<float> {  // in registers, because a vector load after scalar stores is slow
  const float* from;
  unsigned mask;
  __m256 fill;

  GA_INLINE End(const float* data, int64_t n, float missing)
      : from(data), mask((1u << n) - 1), fill(_mm256_set1_ps(missing)) {}
  GA_INLINE Doubles operator()(int k) const {
    const auto part = static_cast<__mmask8>(mask >> (8 * k));
    return _mm512_cvtps_pd(_mm256_mask_loadu_ps(fill, part, from + 8 * k));
  }
};
#endif

// A complete group.
template <class T>
struct Whole {
  const T* data;
  GA_INLINE Doubles operator()(int k) const { return wide(data + k * kWidth<double>); }
};

// ---- Sums ---------------------------------------------------------------------------------------

// A number for each column, in double, which is subtracted from x.
struct Reference {
  Doubles x[kDoubles];

  GA_INLINE static Reference columns(const BnNumbers& n, int64_t column) {
    Reference r;
    for (int k = 0; k < kDoubles; ++k)
      r.x[k] = get(static_cast<const double*>(n.data) + column + k * kWidth<double>);
    return r;
  }
  GA_INLINE static Reference of_one(const BnNumbers& n, int64_t column) {
    Reference r;
    for (int k = 0; k < kDoubles; ++k) r.x[k] = all_of(static_cast<const double*>(n.data)[column]);
    return r;
  }
};

// x - shift, and its square.
template <class T>
struct Deviations {
  static constexpr bool kTwo = false;  // whether dy is read too
  template <int kCount = kDoubles, class Group>
  GA_INLINE static void add(GroupSums& s, const Reference& shift, const Group& x, const Group&) {
    for (int k = 0; k < kCount; ++k) {
      const Doubles d = x(k) - shift.x[k];
      s.first[k] += d;
      s.second[k] += d * d;
    }
  }
  GA_INLINE static void add(double& first, double& second, double shift, T x, T) {
    const double d = static_cast<double>(x) - shift;
    first += d;
    second += d * d;
  }
};

// dy, and dy (x - mean).
template <class T>
struct Products {
  static constexpr bool kTwo = true;
  template <int kCount = kDoubles, class Group>
  GA_INLINE static void add(GroupSums& s, const Reference& mean, const Group& x, const Group& dy) {
    for (int k = 0; k < kCount; ++k) {
      const Doubles g = dy(k);
      s.first[k] += g;
      s.second[k] += g * (x(k) - mean.x[k]);
    }
  }
  GA_INLINE static void add(double& first, double& second, double mean, T x, T dy) {
    const double g = static_cast<double>(dy);
    first += g;
    second += g * (static_cast<double>(x) - mean);
  }
};

// ---- Passes that write elements -----------------------------------------------------------------

template <class T>
struct Normalise {
  static constexpr bool kTwo = false;
  static constexpr int kNumbers = 4;
  template <class X>
  GA_INLINE static X apply(X x, X, const X* n) {
    return BnForward<T>::apply(x, n[0], n[1], n[2], n[3]);
  }
};

template <class T>
struct Gradient {
  static constexpr bool kTwo = true;
  static constexpr int kNumbers = 5;
  template <class X>
  GA_INLINE static X apply(X x, X dy, const X* n) {
    return BnBackward<T>::apply(x, dy, n[0], n[1], n[2], n[3], n[4]);
  }
};

// ---- Planes -------------------------------------------------------------------------------------

// Runs body(channel - first, offset, count, ahead) for the stretches of a call, in the order of
// memory and no longer than a tile. `ahead` is the distance to the elements to prefetch, which at
// the end of the planes of a sample lie in the next sample.
template <class Body>
GA_INLINE void each_stretch(const BnTask& task, int64_t first, int64_t last, int64_t begin,
                            int64_t end, Body&& body) {
  const int64_t plane = task.positions, sample = task.channels * plane;
  const int64_t jump = sample - (last - first) * plane;
  for (int64_t s = begin / plane; s * plane < end; ++s) {
    const int64_t from = begin > s * plane ? begin - s * plane : 0;
    const int64_t to = smaller(plane, end - s * plane);
    int64_t at = s * sample + first * plane;
    const int64_t far = s * sample + last * plane - kFar;
    for (int64_t c = 0; c < last - first; ++c, at += plane)
      for (int64_t t = from; t < to; t += kTile)
        body(c, at + t, smaller(kTile, to - t), at + t < far ? kFar : kFar + jump);
  }
}

// Prefetches the group at that distance.
template <bool kTwo, class T>
GA_INLINE void fetch_group(int64_t ahead, const T* x, const T* dy) {
  if (!bn_prefetching || ahead == 0) return;
  __builtin_prefetch(x + ahead, 0, 3);
  if (sizeof(T) == 8) __builtin_prefetch(x + ahead + 8, 0, 3);
  if (!kTwo) return;
  __builtin_prefetch(dy + ahead, 0, 3);
  if (sizeof(T) == 8) __builtin_prefetch(dy + ahead + 8, 0, 3);
}

// Adds a stretch to the lanes of its channel.
template <class T, class Action>
GA_INLINE void sum_stretch(GroupSums& s, const Reference& reference, const T* x, const T* dy,
                           int64_t count, int64_t ahead) {
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) {
    fetch_group<Action::kTwo>(ahead, x + i, dy + i);
    Action::add(s, reference, Whole<T>{x + i}, Whole<T>{dy + i});
  }
  if (i == count) return;
  // Filled up with elements that add nothing: the shift, or 0 for dy.
  fetch_group<Action::kTwo>(ahead, x + i, dy + i);
  const T missing = Action::kTwo ? T(0) : static_cast<T>(reference.x[0][0]);
  const End<T> end(x + i, count - i, missing);
  const End<T> end_dy(dy + i, count - i, T(0));
  if (count - i <= kWidth<double>)
    Action::template add<1>(s, reference, end, end_dy);
  else
    Action::add(s, reference, end, end_dy);
}

template <class T, class Action>
void sum_planes(const BnTask& task, int64_t first, int64_t last, int64_t begin, int64_t end,
                const BnNumbers& numbers, const BnSums& sums) {
  GroupSums lanes[kMostPlanes];
  for (int64_t c = 0; c < last - first; ++c) lanes[c] = {};
  const bool in_place = task.dtype == native<T>;
  const int64_t plane = task.positions, sample = task.channels * plane;
  // Small planes of two samples at a time: lanes are loaded and stored once for both, and memory
  // delivers two streams at once.
  if (in_place && plane <= kTile && begin % plane == 0 && end % plane == 0) {
    const T* const x = static_cast<const T*>(task.x);
    const T* const dy = Action::kTwo ? static_cast<const T*>(task.dy) : x;
    const int64_t pairs = (end - begin) / plane / 2;
    const int64_t chunk = (last - first) * plane, jump = 2 * sample - chunk;
    for (int64_t k = 0; k < pairs; ++k) {
      int64_t at = (begin / plane + 2 * k) * sample + first * plane;
      const int64_t far = at + chunk - kFar;
      for (int64_t c = 0; c < last - first; ++c, at += plane) {
        const Reference reference = Reference::of_one(numbers, c);
        const int64_t ahead = at < far ? kFar : kFar + jump;
        GroupSums s = lanes[c];
        for (const int64_t row : {at, at + sample})
          sum_stretch<T, Action>(s, reference, x + row, dy + row, plane, ahead);
        lanes[c] = s;
      }
    }
    begin += 2 * pairs * plane;
  }
  alignas(64) T tile_x[kTile];
  alignas(64) T tile_dy[Action::kTwo ? kTile : 1];
  each_stretch(task, first, last, begin, end,
               [&](int64_t column, int64_t offset, int64_t count, int64_t ahead) GA_INLINE_BODY {
                 const T* const x = read<T>(task.x, task.dtype, offset, count, tile_x);
                 const T* const dy =
                     Action::kTwo ? read<T>(task.dy, task.dtype, offset, count, tile_dy) : x;
                 const Reference reference = Reference::of_one(numbers, column);
                 GroupSums s = lanes[column];
                 sum_stretch<T, Action>(s, reference, x, dy, count, in_place ? ahead : 0);
                 lanes[column] = s;
               });
  for (int64_t c = 0; c < last - first; ++c) {
    sums.first[c] = total_of<kDoubles>(lanes[c].first);
    sums.second[c] = total_of<kDoubles>(lanes[c].second);
  }
}

// Copies past the caches, except at the ends that share a cache line with other data.
template <class T>
void copy_past(T* to, const T* from, int64_t count) {
  int64_t i = 0;
  for (; i < count && reinterpret_cast<uintptr_t>(to + i) % 64 != 0; ++i) to[i] = from[i];
  for (; i + kGroup <= count; i += kGroup)
    for (int k = 0; k < kRegisters<T>; ++k)
      put_past(to + i + k * kWidth<T>, get(from + i + k * kWidth<T>));
  for (; i < count; ++i) to[i] = from[i];
}

template <class T, class Action>
void map_planes(const BnTask& task, int64_t first, int64_t last, int64_t begin, int64_t end,
                const BnNumbers& numbers, bool stream) {
  const bool packed = task.dtype != native<T>;
  alignas(64) T tile_x[kTile];
  alignas(64) T tile_dy[Action::kTwo ? kTile : 1];
  // Results that go past the caches are collected first, from consecutive planes.
  alignas(64) T made[2 * kTile];
  int64_t held = 0, made_at = 0;
  const auto flush = [&] {
    copy_past(static_cast<T*>(task.out) + made_at, made, held);
    held = 0;
  };
  each_stretch(task, first, last, begin, end,
               [&](int64_t column, int64_t offset, int64_t count, int64_t ahead) GA_INLINE_BODY {
                 const T* const x = read<T>(task.x, task.dtype, offset, count, tile_x);
                 const T* const dy =
                     Action::kTwo ? read<T>(task.dy, task.dtype, offset, count, tile_dy) : x;
                 T* out = packed ? tile_x : static_cast<T*>(task.out) + offset;
                 if (packed) ahead = 0;
                 if (stream) {
                   if (held > 0 && (made_at + held != offset || held + count > 2 * kTile)) flush();
                   if (held == 0) made_at = offset;
                   out = made + held;
                   held += count;
                 }
                 T one[Action::kNumbers];
                 Real<T> n[Action::kNumbers];
                 for (int k = 0; k < Action::kNumbers; ++k) {
                   one[k] = static_cast<const T*>(numbers.data)[k * numbers.columns + column];
                   n[k] = all_of(one[k]);
                 }
                 int64_t i = 0;
                 for (; i + kWidth<T> <= count; i += kWidth<T>) {
                   fetch_group<Action::kTwo>(ahead, x + i, dy + i);
                   put(out + i, Action::apply(get(x + i), get(dy + i), n));
                 }
                 for (; i < count; ++i) out[i] = Action::apply(x[i], dy[i], one);
                 if (packed) write<T>(task.out, task.dtype, offset, count, out);
               });
  if (!stream) return;
  flush();
  stream_fence();
}

// ---- Rows ---------------------------------------------------------------------------------------

// The sums are loaded and stored once for all kRows rows.
template <class T, class Action, int kRows>
void sum_row(const T* x, const T* dy, int64_t step, int64_t count, bool in_place,
             const BnNumbers& numbers, int64_t column, const BnSums& sums) {
  double* const s1 = sums.first + column;
  double* const s2 = sums.second + column;
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) {
    const Reference reference = Reference::columns(numbers, column + i);
    GroupSums s;
    for (int k = 0; k < kDoubles; ++k) {
      s.first[k] = get(s1 + i + k * kWidth<double>);
      s.second[k] = get(s2 + i + k * kWidth<double>);
    }
    // At the end of the row, prefetches from the next one.
    const int64_t ahead = !in_place            ? 0
                          : i + kAhead < count ? kAhead
                                               : kAhead - count + kRows * step;
    for (int r = 0; r < kRows; ++r) {
      fetch_group<Action::kTwo>(ahead, x + r * step + i, dy + r * step + i);
      Action::add(s, reference, Whole<T>{x + r * step + i}, Whole<T>{dy + r * step + i});
    }
    for (int k = 0; k < kDoubles; ++k) {
      put(s1 + i + k * kWidth<double>, s.first[k]);
      put(s2 + i + k * kWidth<double>, s.second[k]);
    }
  }
  for (; i < count; ++i)
    for (int r = 0; r < kRows; ++r)
      Action::add(s1[i], s2[i], static_cast<const double*>(numbers.data)[column + i],
                  x[r * step + i], dy[r * step + i]);
}

template <class T, class Action>
void sum_rows(const BnTask& task, int64_t begin, int64_t end, const BnNumbers& numbers,
              int64_t first, int64_t last, const BnSums& sums) {
  const int64_t width = numbers.columns, elements = task.count();
  const bool in_place = task.dtype == native<T>;
  alignas(64) T tile_x[kTile];
  alignas(64) T tile_dy[Action::kTwo ? kTile : 1];
  for (int64_t c = first; c < last; ++c) sums.first[c] = sums.second[c] = 0;
  // Four rows took 0.75 of the time of two where they are 2048 wide, and 1.1 of it where they are 64 wide.
  const int64_t together = width >= 512 ? 4 : 2;
  for (int64_t row = begin; row < end;) {
    const int64_t at = row * width;
    if (in_place && row + together <= end && at + together * width <= elements) {
      const T* const x = static_cast<const T*>(task.x) + at + first;
      const T* const dy = Action::kTwo ? static_cast<const T*>(task.dy) + at + first : x;
      (together == 4 ? sum_row<T, Action, 4> : sum_row<T, Action, 2>)(x, dy, width, last - first,
                                                                      true, numbers, first, sums);
      row += together;
      continue;
    }
    const int64_t stop = smaller(last, elements - at);  // of an incomplete last row
    for (int64_t c = first; c < stop; c += kTile) {
      const int64_t count = smaller(kTile, stop - c);
      const T* const x = read<T>(task.x, task.dtype, at + c, count, tile_x);
      const T* const dy = Action::kTwo ? read<T>(task.dy, task.dtype, at + c, count, tile_dy) : x;
      sum_row<T, Action, 1>(x, dy, width, count, in_place, numbers, c, sums);
    }
    ++row;
  }
}

template <class T, class Action>
void map_rows(const BnTask& task, int64_t begin, int64_t end, const BnNumbers& numbers,
              bool stream) {
  const int64_t width = numbers.columns, elements = task.count();
  const bool packed = task.dtype != native<T>;
  const T* const data = static_cast<const T*>(numbers.data);
  alignas(64) T tile_x[kTile];
  alignas(64) T tile_dy[Action::kTwo ? kTile : 1];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t columns = smaller(width, elements - row * width);
    for (int64_t c = 0; c < columns; c += kTile) {
      const int64_t count = smaller(kTile, columns - c), offset = row * width + c;
      const T* const x = read<T>(task.x, task.dtype, offset, count, tile_x);
      const T* const dy = Action::kTwo ? read<T>(task.dy, task.dtype, offset, count, tile_dy) : x;
      T* const out = packed ? tile_x : static_cast<T*>(task.out) + offset;
      const bool past = stream && reinterpret_cast<uintptr_t>(out) % kBytes == 0;
      int64_t i = 0;
      for (; i + kWidth<T> <= count; i += kWidth<T>) {
        fetch_group<Action::kTwo>(packed ? 0 : kAhead, x + i, dy + i);
        Real<T> n[Action::kNumbers];
        for (int k = 0; k < Action::kNumbers; ++k) n[k] = get(data + k * width + c + i);
        const Real<T> y = Action::apply(get(x + i), get(dy + i), n);
        if (past)
          put_past(out + i, y);
        else
          put(out + i, y);
      }
      for (; i < count; ++i) {
        T n[Action::kNumbers];
        for (int k = 0; k < Action::kNumbers; ++k) n[k] = data[k * width + c + i];
        out[i] = Action::apply(x[i], dy[i], n);
      }
      if (packed) write<T>(task.out, task.dtype, offset, count, out);
    }
  }
  if (stream) stream_fence();
}

template <class T>
constexpr BnPlanes planes_of = {sum_planes<T, Deviations<T>>, sum_planes<T, Products<T>>,
                                map_planes<T, Normalise<T>>, map_planes<T, Gradient<T>>};
template <class T>
constexpr BnRows rows_of = {sum_rows<T, Deviations<T>>, sum_rows<T, Products<T>>,
                            map_rows<T, Normalise<T>>, map_rows<T, Gradient<T>>};

constexpr BnKernels kernels = {{planes_of<float>, planes_of<double>},
                               {rows_of<float>, rows_of<double>}};

}  // namespace

const BnKernels& GA_CONCAT(batchnorm_kernels_, GA_ISA)();
const BnKernels& GA_CONCAT(batchnorm_kernels_, GA_ISA)() { return kernels; }

}  // namespace ga::cpu
