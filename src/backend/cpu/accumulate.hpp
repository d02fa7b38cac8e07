// SPDX-License-Identifier: Apache-2.0
// Adds contributions to accumulators. Included in the same way as vectors.hpp.
#pragma once

#include "backend/cpu/sums.hpp"

// What becomes of the target's contents: nothing, or they are kept as they are, or times a factor.
enum Keep { kNone, kAll, kScaled };

// a <- [[keep] a +] scale0 g0 [+ scale1 g1] over whole groups. contribution: sums over scale0 g0 alone.
template <class T, int kSources, Keep kKeep, bool kNoise>
GA_INLINE void accumulate_groups(T keep, T scale0, T scale1, T* __restrict a,
                                 const T* __restrict g0, const T* __restrict g1, int64_t count,
                                 Lanes<T>& lanes, Lanes<T>& contribution) {
  each_register<T>(count, [&](int64_t i, int l) GA_INLINE_BODY {
    auto x = get(g0 + i) * scale0;
    if (kNoise) contribution.add(l, x);
    if (kKeep == kAll) x = get(a + i) + x;
    if (kKeep == kScaled) x = get(a + i) * keep + x;
    if (kSources == 2) x = x + get(g1 + i) * scale1;
    put(a + i, x);
    lanes.add(l, x);
  });
}

template <class T>
GA_INLINE void store_partial(const AccumulateTask& task, int64_t offset, ChunkSum<T>& sums,
                             ChunkSum<T>* contribution) {
  Partial& p = task.partials[offset / kChunk];
  const double sum = sums.total();
  // A pass that overwrites stores its contribution, so the sums are the same.
  const double own =
      task.noise == 0 ? 0 : task.noise * (contribution ? contribution->total() : sum);
  p.sum_squares = sum;
  p.noise = task.keep != 0 ? p.noise + own : own;
  p.nonfinite = !sums.finite(sum);
}

template <class T, int kSources, Keep kKeep, bool kStream, bool kNoise>
void accumulate_chunk(const AccumulateTask& task, int64_t offset, int64_t count) {
  const T keep = static_cast<T>(task.keep);
  const T scale0 = static_cast<T>(scale_of(task.source[0]));
  const T scale1 = kSources == 2 ? static_cast<T>(scale_of(task.source[1])) : T(0);
  ChunkSum<T> sums, contributions;
  alignas(64) T tile0[kTile];
  alignas(64) T tile1[kTile];
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    const T* const g0 = load<T>(task.source[0], offset + t, n, tile0);
    const T* const g1 = kSources == 2 ? load<T>(task.source[1], offset + t, n, tile1) : g0;
    T* const a = static_cast<T*>(task.target.data) + offset + t;
    Lanes<T> lanes, contribution;
    int64_t b = 0;
    for (; b + kBlock <= n; b += kBlock) {
      prefetch_block<0>(g0 + b + kAhead);
      if (kSources == 2) prefetch_block<0>(g1 + b + kAhead);
      if (kStream) {
        alignas(64) T block[kBlock];
        accumulate_groups<T, kSources, kKeep, kNoise>(keep, scale0, scale1, block, g0 + b, g1 + b,
                                                      kBlock, lanes, contribution);
        stream_block(a + b, block);
      } else {
        prefetch_block<1>(a + b + kAhead);
        accumulate_groups<T, kSources, kKeep, kNoise>(keep, scale0, scale1, a + b, g0 + b, g1 + b,
                                                      kBlock, lanes, contribution);
      }
    }
    if (b < n) {
      const Padded<T> end0(g0 + b, n - b);
      const Padded<T> end1(g1 + b, kSources == 2 ? n - b : 0);
      Padded<T> end_a(a + b, kKeep != kNone ? n - b : 0);
      accumulate_groups<T, kSources, kKeep, kNoise>(keep, scale0, scale1, end_a.data, end0.data,
                                                    end1.data, whole_groups(n - b), lanes,
                                                    contribution);
      end_a.copy_to(a + b, n - b);
    }
    // What was streamed past the caches is made again, not read.
    sums.add_tile(lanes, n, [&](int64_t i) {
      if (!kStream) return a[i];
      return kSources == 2 ? g0[i] * scale0 + g1[i] * scale1 : g0[i] * scale0;
    });
    if (kNoise) contributions.add_tile(contribution, n, [&](int64_t i) { return g0[i] * scale0; });
  }
  if (kStream) stream_fence();
  store_partial(task, offset, sums, kNoise ? &contributions : nullptr);
}

// As accumulate_chunk(), for a tensor of one tile: what a chunk of many needs would take longer than
// the loop.
template <int kSources, Keep kKeep>
GA_INLINE void accumulate_tile(const AccumulateTask& task) {
  const int64_t count = task.count, whole = before_end(count);
  const auto keep = static_cast<float>(task.keep);
  const auto scale0 = static_cast<float>(task.source[0].scale);
  const auto scale1 = kSources == 2 ? static_cast<float>(task.source[1].scale) : 0.0f;
  const float* const g0 = static_cast<const float*>(task.source[0].data);
  const float* const g1 = kSources == 2 ? static_cast<const float*>(task.source[1].data) : g0;
  float* const a = static_cast<float*>(task.target.data);
  NarrowLanes lanes, none;
  accumulate_groups<float, kSources, kKeep, false>(keep, scale0, scale1, a, g0, g1, whole, lanes,
                                                   none);
  if (whole < count) {
    const int64_t rest = count - whole;
    const Padded<float> end0(g0 + whole, rest), end1(g1 + whole, kSources == 2 ? rest : 0);
    Padded<float> end_a(a + whole, kKeep != kNone ? rest : 0);
    accumulate_groups<float, kSources, kKeep, false>(keep, scale0, scale1, end_a.data, end0.data,
                                                     end1.data, whole_groups(rest), lanes, none);
    end_a.copy_to(a + whole, rest);
  }
  double total = lanes.total();
  if (!is_trusted(total)) total = wide_total(count, [&](int64_t i) { return a[i]; });
  Partial& p = *task.partials;
  p.sum_squares = total;
  if (kKeep == kNone) p.noise = 0;
  p.nonfinite = !is_finite(total);
}

// For accumulators that are not of the type computed in.
template <class T>
void accumulate_packed(const AccumulateTask& task, int64_t offset, int64_t count) {
  const T keep = static_cast<T>(task.keep);
  const Rounding rounding =
      task.counter ? Rounding{true, random_key(task.seed, Purpose::kAccumulate, *task.counter,
                                               task.contribution, task.key)}
                   : Rounding{false, 0};
  ChunkSum<T> sums, contributions;
  alignas(64) T tile_a[kTile];
  alignas(64) T tile_g[kTile];
  alignas(64) T c[kTile];
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    const T* a = load<T>({task.target.data, task.target.format, 1, nullptr}, offset + t, n, tile_a);
    for (int s = 0; s < task.sources; ++s) {
      const T scale = static_cast<T>(scale_of(task.source[s]));
      const T* const g = load<T>(task.source[s], offset + t, n, tile_g);
      for (int64_t i = 0; i < n; ++i) c[i] = s == 0 ? g[i] * scale : c[i] + g[i] * scale;
    }
    pad_tile(c, n);
    if (task.noise != 0) contributions.add_tile(c, n);
    if (task.keep != 0)
      for (int64_t i = 0; i < n; ++i) c[i] = a[i] * keep + c[i];
    store<T>(task.target, offset + t, n, c, static_cast<uint64_t>(offset + t), rounding);
    a = load<T>({task.target.data, task.target.format, 1, nullptr}, offset + t, n, tile_a);
    std::memcpy(c, a, static_cast<size_t>(n) * sizeof(T));
    sums.add_tile(c, n);
  }
  store_partial(task, offset, sums, &contributions);
}

// The larger of target and source, or of two sources.
template <class T>
void accumulate_maximum(const AccumulateTask& task, int64_t offset, int64_t count) {
  const Source target = {task.target.data, task.target.format, 1, nullptr};
  const Source& first = task.sources == 2 ? task.source[0] : target;
  const Source& second = task.source[task.sources - 1];
  const T scale1 = static_cast<T>(scale_of(first)), scale2 = static_cast<T>(scale_of(second));
  ChunkSum<T> sums;
  alignas(64) T tile1[kTile];
  alignas(64) T tile2[kTile];
  alignas(64) T x[kTile];
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    const T* const g1 = load<T>(first, offset + t, n, tile1);
    const T* const g2 = load<T>(second, offset + t, n, tile2);
    for (int64_t i = 0; i < n; ++i) x[i] = maximum(g1[i] * scale1, g2[i] * scale2);
    store<T>(task.target, offset + t, n, x, 0, {false, 0});
    const T* const stored = load<T>(target, offset + t, n, tile1);
    std::memcpy(x, stored, static_cast<size_t>(n) * sizeof(T));
    pad_tile(x, n);
    sums.add_tile(x, n);
  }
  store_partial(task, offset, sums, static_cast<ChunkSum<T>*>(nullptr));
}

template <class T>
void accumulate_as(const AccumulateTask& task, int64_t offset, int64_t count, bool stream) {
  if (task.keep == kMaximum)
    accumulate_maximum<T>(task, offset, count);
  else if (task.target.format != native<T>)
    accumulate_packed<T>(task, offset, count);
  else if (task.keep != 0 && task.keep != 1)
    (task.noise != 0 ? accumulate_chunk<T, 1, kScaled, false, true>
                     : accumulate_chunk<T, 1, kScaled, false, false>)(task, offset, count);
  else if (task.keep != 0)
    (task.noise != 0 ? accumulate_chunk<T, 1, kAll, false, true>
                     : accumulate_chunk<T, 1, kAll, false, false>)(task, offset, count);
  else if (task.sources == 2)
    (stream ? accumulate_chunk<T, 2, kNone, true, false>
            : accumulate_chunk<T, 2, kNone, false, false>)(task, offset, count);
  else
    (stream ? accumulate_chunk<T, 1, kNone, true, false>
            : accumulate_chunk<T, 1, kNone, false, false>)(task, offset, count);
}

GA_INLINE bool is_plain(const Source& s) { return s.format == GA_F32 && s.data && !s.divisor; }

void accumulate(const AccumulateTask& given, int64_t offset, int64_t count, bool stream) {
  if (given.count <= kTile && given.target.format == GA_F32 && is_plain(given.source[0]) &&
      !given.plan && given.noise == 0) {
    if (given.keep == 1) return accumulate_tile<1, kAll>(given);
    if (given.keep > 0) return accumulate_tile<1, kScaled>(given);
    if (given.keep == 0 && !stream) {
      if (given.sources == 1) return accumulate_tile<1, kNone>(given);
      if (is_plain(given.source[1])) return accumulate_tile<2, kNone>(given);
    }
  }
  if (given.plan && !given.plan->active) return;
  AccumulateTask planned;
  if (given.plan) {
    planned = given;
    planned.keep = given.plan->keep;
    planned.noise = given.plan->noise;
    planned.source[0].scale = given.plan->scale;
    planned.source[0].divisor = nullptr;
  }
  const AccumulateTask& task = given.plan ? planned : given;
  (task.target.format == GA_F64 ? accumulate_as<double> : accumulate_as<float>)(task, offset, count,
                                                                                stream);
}
