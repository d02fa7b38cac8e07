// SPDX-License-Identifier: Apache-2.0
// Sums of squares over the units of a tensor. Included in the same way as vectors.hpp.
#pragma once

#include "backend/cpu/sums.hpp"

// s[j] += the squares of x[j] in kRows rows, `step` elements apart, in their order. The sums are loaded
// and stored once for all rows.
template <int kRows, class T>
GA_INLINE void add_squares(double* __restrict s, const T* __restrict x, int64_t step,
                           int64_t count) {
  int64_t j = 0;
  if constexpr (std::is_same_v<T, float>)
    for (; j + kWidth<float> <= count; j += kWidth<float>) {
      Doubles low = get(s + j), high = get(s + j + kWidth<double>);
      for (int r = 0; r < kRows; ++r) {
        const Floats f = get(x + r * step + j);
        low = add_square(low, widen_low(f));
        high = add_square(high, widen_high(f));
      }
      put(s + j, low);
      put(s + j + kWidth<double>, high);
    }
  for (; j < count; ++j)
    for (int r = 0; r < kRows; ++r) {
      const auto f = static_cast<double>(x[r * step + j]);
      s[j] += f * f;
    }
}

// The sum of squares over a tile of a run.
template <class T>
GA_INLINE double tile_total(const T* x, int64_t count) {
  Lanes<T> lanes;
  double total;
  if (count <= kGroup) {
    prefetch_block<0>(x + kAhead);
    add_groups(lanes, Padded<T>(x, count).data, kGroup);
    total = lanes.group_total();
  } else {
    int64_t b = 0;
    for (; b + kBlock <= count; b += kBlock) {
      prefetch_block<0>(x + b + kAhead);
      add_groups(lanes, x + b, kBlock);
    }
    if (b < count) {
      prefetch_block<0>(x + b + kAhead);
      add_groups(lanes, Padded<T>(x + b, count - b).data, whole_groups(count - b));
    }
    total = lanes.total();
  }
  if constexpr (std::is_same_v<T, float>)
    if (!is_trusted(total)) total = wide_total(count, [&](int64_t i) { return x[i]; });
  return total;
}

// The sums of squares of one array over the units of a piece.
template <class T>
struct UnitSums {
  double* sums;
  double run = 0;  // of the tiles of the run so far, if runs are reduced

  GA_INLINE UnitSums(double* all, const UnitPattern& pattern, int64_t piece)
      : sums(all ? all + (pattern.shared ? 0 : piece * pattern.units) : nullptr) {}

  GA_INLINE void add_kept(int64_t unit, const T* x, int64_t count) {
    add_rows<1>(unit, x, 0, count);
  }
  // Adds rows of as many units, which are `step` elements apart. Prefetches the rows behind them.
  template <int kRows>
  GA_INLINE void add_rows(int64_t unit, const T* x, int64_t step, int64_t count) {
    const T* const next = x + (kRows > 1 ? kRows * step : kAhead);
    for (int64_t b = 0; b < count; b += kBlock) {
      for (int r = 0; r < kRows; ++r) prefetch_block<0>(next + r * step + b);
      add_squares<kRows>(sums + unit + b, x + b, step, smaller(count - b, kBlock));
    }
  }
  // Adds a tile of a run; tiles are counted from the beginning of the run.
  GA_INLINE void add_reduced(const T* x, int64_t count) { run += tile_total(x, count); }
  GA_INLINE void end_run(int64_t unit) {
    sums[unit] += run;
    run = 0;
  }
};

// One piece of a tensor.
template <class T, bool kParam>
void unit_norms_of(const UnitTask& task, int64_t piece) {
  const UnitPattern& pattern = *task.pattern;
  const auto view = View<T>::of_units(task.gradient);
  const int64_t from = pattern.first;  // where element 0 of the pattern is
  const int64_t begin = pattern.begin(piece) * pattern.slab();
  const int64_t end = pattern.begin(piece + 1) * pattern.slab();
  const int64_t first_unit = pattern.shared ? pattern.first_unit(piece) : 0;
  const int64_t last_unit = pattern.shared ? pattern.first_unit(piece + 1) : pattern.units;
  UnitSums<T> gradient(task.sums, pattern, piece), param(task.param_sums, pattern, piece);
  const size_t bytes = static_cast<size_t>(last_unit - first_unit) * sizeof(double);
  std::memset(gradient.sums + first_unit, 0, bytes);
  if (kParam) std::memset(param.sums + first_unit, 0, bytes);

  int64_t t = begin;
  if (pattern.axes == 2 && pattern.kept[1] && task.gradient.source.format == native<T> &&
      view.is_identity() && (!kParam || task.param.format == native<T>)) {
    // By columns of a matrix that needs no conversion.
    constexpr int kRows = 8;
    const int64_t columns = pattern.extent[1];
    const T* const g = static_cast<const T*>(task.gradient.source.data);
    const T* const p = static_cast<const T*>(task.param.data);
    for (; g && t + kRows * columns <= end; t += kRows * columns) {
      gradient.template add_rows<kRows>(0, g + t, columns, columns);
      if (kParam) param.template add_rows<kRows>(0, p + t, columns, columns);
    }
  }

  UnitCursor at(pattern, t);
  const bool kept = at.kept();
  int64_t run = 0;
  alignas(64) T tile_g[kTile];
  alignas(64) T tile_p[kTile];
  while (t < end) {
    // A reduced run is cut at multiples of kTile from its beginning.
    const int64_t n =
        smaller(end - t, kept || at.left() + run <= kTile ? kTile : smaller(at.left(), kTile));
    const T* g = load<T>(task.gradient.source, from + t, n, tile_g);
    const T* const p = kParam ? load<T>(task.param, from + t, n, tile_p) : nullptr;
    if (!view.is_identity()) {
      for (int64_t i = 0; i < n; ++i) tile_g[i] = view.clamped(view.scaled(g[i]));
      g = tile_g;
    }
    int64_t used = 0;
    while (used < n) {
      const int64_t left = at.left();
      const int64_t m = smaller(left, n - used);
      if (kept) {
        gradient.add_kept(at.unit(), g + used, m);
        if (kParam) param.add_kept(at.unit(), p + used, m);
      } else {
        // A short run that the tile cuts starts again with the next tile.
        if (m < left && run == 0 && used > 0 && left <= kTile) break;
        gradient.add_reduced(g + used, m);
        if (kParam) param.add_reduced(p + used, m);
        run += m;
        if (m == left) {
          gradient.end_run(at.unit());
          if (kParam) param.end_run(at.unit());
          run = 0;
        }
      }
      used += m;
      at.advance(m);
    }
    t += used;
  }
  if (run > 0) {  // the last unit reaches into the next piece
    gradient.end_run(at.unit());
    if (kParam) param.end_run(at.unit());
  }
  const double scale = unit_scale(task.gradient);
  if (scale != 1)
    for (int64_t u = first_unit; u < last_unit; ++u) gradient.sums[u] *= scale * scale;
}

template <class T>
void unit_norms_as(const UnitTask& task, int64_t piece) {
  (task.param.data ? unit_norms_of<T, true> : unit_norms_of<T, false>)(task, piece);
}

void unit_norms(const UnitTask& task, int64_t piece) {
  (task.f64 ? unit_norms_as<double> : unit_norms_as<float>)(task, piece);
}
