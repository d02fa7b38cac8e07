// SPDX-License-Identifier: Apache-2.0
// The gradient as the optimizer sees it: clipped by units, its norm, and as the program gets it. Included in the same
// way as vectors.hpp.
#pragma once

#include "backend/cpu/sums.hpp"

template <class T>
const T* load_clipped(const void* data, int64_t offset, int64_t count, T* tile) {
  const ClippedGradient& c = *static_cast<const ClippedGradient*>(data);
  const auto view = c.pattern ? View<T>::of_units(c.gradient) : View<T>(c.gradient);
  const T* g = load<T>(c.gradient.source, offset, count, tile);
  if (!c.pattern || !view.is_identity()) {
    for (int64_t i = 0; i < count; ++i) tile[i] = view(g[i]);
    g = tile;
  }
  if (!c.pattern) return tile;
  UnitCursor at(*c.pattern, offset - c.pattern->first);
  for (int64_t i = 0; i < count;) {
    const int64_t n = smaller(smaller(at.left(), count - i), kBlock);
    const T* const factors = static_cast<const T*>(c.factors) + at.unit();
    prefetch_block<0>(g + i + kAhead);
    if (at.kept())
      for (int64_t j = 0; j < n; ++j) tile[i + j] = g[i + j] * factors[j];
    else
      for (int64_t j = 0; j < n; ++j) tile[i + j] = g[i + j] * factors[0];
    i += n;
    at.advance(n);
  }
  return tile;
}

template <class T, bool kLimited>
GA_INLINE void norm_groups(const View<T>& view, const T* __restrict g, int64_t count, Lanes<T>& raw,
                           Lanes<T>& limited) {
  each_register<T>(count, [&](int64_t i, int l) GA_INLINE_BODY {
    const auto x = get(g + i) * view.source_scale;
    raw.add(l, x);
    if (kLimited) limited.add(l, view.clamped(x * view.scale));
  });
}

template <class T, bool kLimited>
void norm_chunk(const NormTask& task, int64_t offset, int64_t count) {
  const View<T> view(task.gradient);
  ChunkSum<T> raw_sum, limited_sum;
  alignas(64) T tile[kTile];
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    const T* const g = load<T>(task.gradient.source, offset + t, n, tile);
    Lanes<T> raw, limited;
    int64_t b = 0;
    for (; b + kBlock <= n; b += kBlock) {
      prefetch_block<0>(g + b + kAhead);
      norm_groups<T, kLimited>(view, g + b, kBlock, raw, limited);
    }
    if (b < n)
      norm_groups<T, kLimited>(view, Padded<T>(g + b, n - b).data, whole_groups(n - b), raw,
                               limited);
    const auto element = [&](int64_t i) { return g[i] * view.source_scale; };
    raw_sum.add_tile(raw, n, element);
    if (kLimited)
      limited_sum.add_tile(limited, n,
                           [&](int64_t i) { return view.clamped(element(i) * view.scale); });
  }
  Partial& partial = task.partials[offset / kChunk];
  partial.sum_squares = raw_sum.total();
  partial.nonfinite = !raw_sum.finite(partial.sum_squares);
  if (kLimited) partial.second_squares = limited_sum.total();
}

// As norm_chunk(), for a tensor of one tile: see accumulate_tile().
GA_INLINE void norm_tile(const NormTask& task) {
  const View<float> view(task.gradient);
  const int64_t count = task.count, whole = before_end(count);
  const float* const g = static_cast<const float*>(task.gradient.source.data);
  NarrowLanes lanes, none;
  norm_groups<float, false>(view, g, whole, lanes, none);
  if (whole < count)
    norm_groups<float, false>(view, Padded<float>(g + whole, count - whole).data,
                              whole_groups(count - whole), lanes, none);
  double total = lanes.total();
  if (!is_trusted(total))
    total = wide_total(count, [&](int64_t i) { return g[i] * view.source_scale; });
  task.partials->sum_squares = total;
  task.partials->nonfinite = !is_finite(total);
}

void norm(const NormTask& task, int64_t offset, int64_t count) {
  const bool limited = is_limited(task.gradient);
  const Source& source = task.gradient.source;
  if (task.count <= kTile && source.format == GA_F32 && source.data && !task.f64 && !limited)
    return norm_tile(task);
  if (task.f64)
    (limited ? norm_chunk<double, true> : norm_chunk<double, false>)(task, offset, count);
  else
    (limited ? norm_chunk<float, true> : norm_chunk<float, false>)(task, offset, count);
}

template <class T>
void finish_as(const FinishTask& task, int64_t offset, int64_t count) {
  const View<T> view(task.gradient);
  alignas(64) T tile[kTile];
  alignas(64) T out[kTile];
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    if (task.has_gradient()) {
      const T* g = load<T>(task.gradient.source, offset + t, n, tile);
      for (int64_t i = 0; i < n; ++i) out[i] = view(g[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(task.constant);
    }
    store<T>(task.target, offset + t, n, out, static_cast<uint64_t>(offset + t), {false, 0});
  }
}

void finish(const FinishTask& task, int64_t offset, int64_t count) {
  (task.f64 ? finish_as<double> : finish_as<float>)(task, offset, count);
}
