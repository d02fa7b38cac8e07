// SPDX-License-Identifier: Apache-2.0
// All loops over elements on the CPU but those of batch normalisation, compiled once per ISA level,
// which GA_ISA names. Only one function has external linkage, so that no code of a higher level can
// be linked in place of a lower one's.
//
// The bits are the same at every level: every element takes the same IEEE operations (no
// contraction, no reassociation), and sums of squares are in the order of numbers.hpp.
#include "backend/cpu/kernels.hpp"

#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 means its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "backend/numbers.hpp"
#include "ops/all.hpp"

namespace ga::cpu {
namespace {

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

// ---- Accumulate ---------------------------------------------------------------------------------

// a <- [a +] scale0 g0 [+ scale1 g1] over whole groups. contribution: sums over scale0 g0 alone.
template <class T, int kSources, bool kKeep, bool kNoise>
GA_INLINE void accumulate_groups(T scale0, T scale1, T* __restrict a, const T* __restrict g0,
                                 const T* __restrict g1, int64_t count, Lanes<T>& lanes,
                                 Lanes<T>& contribution) {
  each_register<T>(count, [&](int64_t i, int l) GA_INLINE_BODY {
    auto x = get(g0 + i) * scale0;
    if (kNoise) contribution.add(l, x);
    if (kKeep) x = get(a + i) + x;
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

template <class T, int kSources, bool kKeep, bool kStream, bool kNoise>
void accumulate_chunk(const AccumulateTask& task, int64_t offset, int64_t count) {
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
        accumulate_groups<T, kSources, kKeep, kNoise>(scale0, scale1, block, g0 + b, g1 + b, kBlock,
                                                      lanes, contribution);
        stream_block(a + b, block);
      } else {
        prefetch_block<1>(a + b + kAhead);
        accumulate_groups<T, kSources, kKeep, kNoise>(scale0, scale1, a + b, g0 + b, g1 + b, kBlock,
                                                      lanes, contribution);
      }
    }
    if (b < n) {
      const Padded<T> end0(g0 + b, n - b);
      const Padded<T> end1(g1 + b, kSources == 2 ? n - b : 0);
      Padded<T> end_a(a + b, kKeep ? n - b : 0);
      accumulate_groups<T, kSources, kKeep, kNoise>(scale0, scale1, end_a.data, end0.data,
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
template <int kSources, bool kKeep>
GA_INLINE void accumulate_tile(const AccumulateTask& task) {
  const int64_t count = task.count, whole = count % kGroup == 0 ? count : count & -kLanes;
  const auto scale0 = static_cast<float>(task.source[0].scale);
  const auto scale1 = kSources == 2 ? static_cast<float>(task.source[1].scale) : 0.0f;
  const float* const g0 = static_cast<const float*>(task.source[0].data);
  const float* const g1 = kSources == 2 ? static_cast<const float*>(task.source[1].data) : g0;
  float* const a = static_cast<float*>(task.target.data);
  NarrowLanes lanes, none;
  accumulate_groups<float, kSources, kKeep, false>(scale0, scale1, a, g0, g1, whole, lanes, none);
  if (whole < count) {
    const int64_t rest = count - whole;
    const Padded<float> end0(g0 + whole, rest), end1(g1 + whole, kSources == 2 ? rest : 0);
    Padded<float> end_a(a + whole, kKeep ? rest : 0);
    accumulate_groups<float, kSources, kKeep, false>(scale0, scale1, end_a.data, end0.data,
                                                     end1.data, whole_groups(rest), lanes, none);
    end_a.copy_to(a + whole, rest);
  }
  double total = lanes.total();
  if (!is_trusted(total)) total = wide_total(count, [&](int64_t i) { return a[i]; });
  Partial& p = *task.partials;
  p.sum_squares = total;
  if (!kKeep) p.noise = 0;
  p.nonfinite = !is_finite(total);
}

// For accumulators that are not of the type computed in, or that are scaled (a running mean).
template <class T>
void accumulate_packed(const AccumulateTask& task, int64_t offset, int64_t count) {
  const T keep = static_cast<T>(task.keep);
  const Rounding rounding =
      task.counter ? Rounding{true, random_key(task.seed, Purpose::kAccumulate, *task.counter,
                                               task.contribution, task.param)}
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
  if (task.target.format != native<T> || (task.keep != 0 && task.keep != 1))
    (task.keep == kMaximum ? accumulate_maximum<T> : accumulate_packed<T>)(task, offset, count);
  else if (task.keep != 0)
    (task.noise != 0 ? accumulate_chunk<T, 1, true, false, true>
                     : accumulate_chunk<T, 1, true, false, false>)(task, offset, count);
  else if (task.sources == 2)
    (stream ? accumulate_chunk<T, 2, false, true, false>
            : accumulate_chunk<T, 2, false, false, false>)(task, offset, count);
  else
    (stream ? accumulate_chunk<T, 1, false, true, false>
            : accumulate_chunk<T, 1, false, false, false>)(task, offset, count);
}

GA_INLINE bool is_plain(const Source& s) { return s.format == GA_F32 && s.data && !s.divisor; }

void accumulate(const AccumulateTask& given, int64_t offset, int64_t count, bool stream) {
  if (given.count <= kTile && given.target.format == GA_F32 && is_plain(given.source[0]) &&
      !given.plan && given.noise == 0) {
    if (given.keep == 1) return accumulate_tile<1, true>(given);
    if (given.keep == 0 && !stream) {
      if (given.sources == 1) return accumulate_tile<1, false>(given);
      if (is_plain(given.source[1])) return accumulate_tile<2, false>(given);
    }
  }
  if (given.plan && !given.plan->active) return;
  AccumulateTask judged;
  if (given.plan) {
    judged = given;
    judged.keep = given.plan->keep;
    judged.noise = given.plan->noise;
    judged.source[0].scale = given.plan->scale;
    judged.source[0].divisor = nullptr;
  }
  const AccumulateTask& task = given.plan ? judged : given;
  (task.target.format == GA_F64 ? accumulate_as<double> : accumulate_as<float>)(task, offset, count,
                                                                                stream);
}

// ---- The gradient as the optimizer sees it ------------------------------------------------------

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
  UnitCursor at(*c.pattern, offset);
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

void norm(const NormTask& task, int64_t offset, int64_t count) {
  const bool limited = is_limited(task.gradient);
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

// ---- Update -------------------------------------------------------------------------------------

// A tile of an array, in place or unpacked.
template <class T>
struct Stream {
  alignas(64) T tile[kTile];
  T* data;
  bool in_place;
  Place next;  // of the next tile

  GA_INLINE void open(const Array& a, int64_t offset, int64_t count) {
    in_place = a.format == native<T>;
    if (in_place) {
      data = static_cast<T*>(a.data) + offset;
      return;
    }
    data = tile;
    next = Place(a.format, a.data, offset + kTile);
    load<T>({a.data, a.format, 1, nullptr}, offset, count, tile);
    pad_tile(tile, count);
  }

  // Prefetches kAhead elements ahead of block b, or the same block of the next tile.
  template <int kWrite>
  GA_INLINE void prefetch(int64_t b) const {
    if (in_place)
      prefetch_block<kWrite>(data + b + kAhead);
    else
      next.template prefetch_block<kWrite>(b);
  }
};

// Updates the EMA of a parameter.
template <class T>
GA_INLINE void move_average(const UpdateTask& task, int64_t offset, int64_t count, const T* p) {
  const auto index = static_cast<uint64_t>(task.first + offset);
  const T gain = static_cast<T>(task.plan->average_gain);
  Stream<T> e;
  e.open(task.average, offset, count);
  T* const average = e.data;
  // clang-format off
  GA_INDEPENDENT  // the EMA does not overlap the parameter
  for (int64_t i = 0; i < count; ++i) average[i] += gain * (p[i] - average[i]);
  // clang-format on
  if (!e.in_place)
    store<T>(task.average, offset, count, average, index, {true, task.plan->state_key + kMaxSlots});
}

template <class T>
void follow_as(const UpdateTask& task, int64_t offset, int64_t count) {
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    Stream<T> p;
    p.open(task.param, offset + t, n);
    move_average<T>(task, offset + t, n, p.data);
  }
}

void follow(const UpdateTask& task, int64_t offset, int64_t count) {
  (task.f64 ? follow_as<double> : follow_as<float>)(task, offset, count);
}

// How the loops over elements read a gradient: as a View does, but for a limit and a third factor, which few
// views have, and which an earlier pass over the tile takes then.
template <class T>
class Scaled {
 public:
  GA_INLINE explicit Scaled(const GradientView& g) : view_(g) {
    T* next = factors_;
    for (const T factor : {view_.source_scale, view_.scale, view_.factor}) {
      if (factor == 1) continue;
      in_tile_ = next == factors_ + 2;
      if (!in_tile_) *next++ = factor;
    }
    in_tile_ = in_tile_ || view_.limit != static_cast<T>(HUGE_VAL);
    if (in_tile_) factors_[0] = factors_[1] = 1;
  }
  GA_INLINE T operator()(T x) const { return x * factors_[0] * factors_[1]; }

  GA_INLINE bool in_tile() const { return in_tile_; }
  void pass(const T* g, int64_t count, T* tile) const {
    for (int64_t i = 0; i < count; ++i) tile[i] = view_(g[i]);
  }

 private:
  const View<T> view_;
  T factors_[2] = {1, 1};
  bool in_tile_ = false;
};

template <class Op>
constexpr int slots_of = Op::factored ? 1 : Op::slots;

// One tile of all arrays of an update.
template <class Op, bool kMeasuring>
struct UpdateTile {
  using T = typename Op::Real;
  static constexpr Pass kPass = kMeasuring ? Op::measuring : Op::updating;
  static constexpr int kSlots = kPass.reads_state || kPass.writes_state ? slots_of<Op> : 0;
  const Scaled<T> scaled;
  alignas(64) T gradient_tile[kTile];
  const T* g;
  Place next_g;
  Stream<T> p;
  Stream<T> state[kSlots + 1];

  GA_INLINE explicit UpdateTile(const UpdateTask& task) : scaled(task.gradient) {}

  GA_INLINE void open(const UpdateTask& task, int64_t offset, int64_t count) {
    g = kPass.gradient ? load<T>(task.gradient.source, task.first + offset, count, gradient_tile)
                       : nullptr;
    if (kPass.gradient && scaled.in_tile()) {
      scaled.pass(g, count, gradient_tile);
      g = gradient_tile;
    }
    if (kPass.gradient && g == gradient_tile)
      next_g = Place(task.gradient.source.format, task.gradient.source.data,
                     task.first + offset + kTile);
    p.data = p.tile;
    if (kPass.parameter) p.open(task.param, offset, count);
    for (int k = 0; k < kSlots; ++k) state[k].open(task.state[k], offset, count);
  }

  GA_INLINE void prefetch(int64_t b) const {
    if (kPass.gradient) {
      if (g == gradient_tile)
        next_g.template prefetch_block<0>(b);
      else
        prefetch_block<0>(g + b + kAhead);
    }
    if (kPass.parameter) p.template prefetch<!kMeasuring>(b);
    for (int k = 0; k < kSlots; ++k) state[k].template prefetch<kPass.writes_state>(b);
  }

  // Runs body(g, p, state, b, n) over blocks at b of whole groups, of which n elements are not
  // padding.
  template <class Body>
  GA_INLINE void each_block(const UpdateTask& task, int64_t count, Body&& body) {
    int64_t b = 0;
    for (; b + kBlock <= count; b += kBlock) {
      prefetch(b);
      T* s[kSlots + 1];
      for (int k = 0; k < kSlots; ++k) s[k] = state[k].data + b;
      body(kPass.gradient ? g + b : nullptr, p.data + b, s, b, kBlock);
    }
    const int64_t rest = count - b;
    if (rest == 0) return;
    const Padded<T> end_g(g + b, kPass.gradient ? rest : 0);
    Padded<T> end_p(p.data + b, kPass.parameter ? rest : 0);
    T* s[kSlots + 1];
    if (task.padded_state) {
      for (int k = 0; k < kSlots; ++k) s[k] = state[k].data + b;
      body(end_g.data, end_p.data, s, b, rest);
    } else {
      alignas(64) T ends[(kSlots + 1) * kBlock];
      for (int k = 0; k < kSlots; ++k) {
        s[k] = ends + k * kBlock;
        const Padded<T> end(state[k].data + b, rest);
        std::memcpy(s[k], end.data, static_cast<size_t>(whole_groups(rest)) * sizeof(T));
      }
      body(end_g.data, end_p.data, s, b, rest);
      if (kPass.writes_state)
        for (int k = 0; k < kSlots; ++k)
          std::memcpy(state[k].data + b, s[k], static_cast<size_t>(rest) * sizeof(T));
    }
    if (!kMeasuring) end_p.copy_to(p.data + b, rest);
  }

  GA_INLINE void close_state(const UpdateTask& task, int64_t offset, int64_t count) {
    if (!kPass.writes_state || kSlots == 0 || state[0].in_place) return;
    const auto index = static_cast<uint64_t>(task.first + offset);
    for (int k = 0; k < kSlots; k += 2) {
      const uint64_t key = task.plan->state_key + static_cast<uint64_t>(k);
      if (k + 1 < kSlots)
        store_bf16_pair<T>(task.state[k], task.state[k + 1], offset, count, state[k].data,
                           state[k + 1].data, index, key);
      else
        store_bf16<T>(task.state[k].data, offset, count, state[k].data, index, {true, key});
    }
  }
};

template <class Op>
GA_INLINE void update_groups(const Op& op, const Scaled<typename Op::Real>& scaled,
                             const typename Op::Real* g, typename Op::Real* p,
                             typename Op::Real* const* state, int64_t count) {
  using T = typename Op::Real;
  using Tile = UpdateTile<Op, false>;
  constexpr Pass pass = Op::updating;
  // clang-format off
  GA_INDEPENDENT  // parameters, gradients and state do not overlap
  for (int64_t i = 0; i < count; ++i) {
    // clang-format on
    T s[Tile::kSlots + 1];
    for (int k = 0; k < Tile::kSlots; ++k) s[k] = state[k][i];
    const T updated = op(p[i], pass.gradient ? scaled(g[i]) : T(0), s);
    if (pass.writes_state)
      for (int k = 0; k < Tile::kSlots; ++k) state[k][i] = s[k];
    p[i] = updated;
  }
}

// As update(), for one tile of arrays of the type computed in, and nothing that follows the update:
// what a chunk of many tiles needs would take longer than the loop. Returns whether it is one.
template <class Op>
GA_INLINE bool update_tile(const Op& op, const UpdateTask& task, int64_t offset, int64_t count) {
  using T = typename Op::Real;
  constexpr int kSlots = UpdateTile<Op, false>::kSlots;
  const Source& source = task.gradient.source;
  bool plain =
      count <= kTile && task.param.format == native<T> && !task.copy.data && !task.average.data;
  plain = plain && (!Op::updating.gradient || (source.format == native<T> && source.data));
  for (int k = 0; k < kSlots; ++k) plain = plain && task.state[k].format == native<T>;
  if (!plain) return false;
  const Scaled<T> scaled(task.gradient);
  if (scaled.in_tile()) return false;

  const T* const g =
      Op::updating.gradient ? static_cast<const T*>(source.data) + task.first + offset : nullptr;
  T* const p = static_cast<T*>(task.param.data) + offset;
  T* state[kSlots + 1];
  for (int k = 0; k < kSlots; ++k) state[k] = static_cast<T*>(task.state[k].data) + offset;
  const int64_t whole = count & -kGroup, rest = count - whole;
  update_groups(op, scaled, g, p, state, whole);
  if (rest == 0) return true;
  const Padded<T> end_g(g + whole, g ? rest : 0);
  Padded<T> end_p(p + whole, rest);
  alignas(64) T ends[kSlots + 1][kGroup];
  for (int k = 0; k < kSlots; ++k) {
    const Padded<T> end(state[k] + whole, rest);
    std::memcpy(ends[k], end.data, sizeof ends[k]);
    state[k] += whole;
  }
  T* padded[kSlots + 1];
  for (int k = 0; k < kSlots; ++k) padded[k] = ends[k];
  update_groups(op, scaled, end_g.data, end_p.data, padded, kGroup);
  for (int k = 0; k < kSlots; ++k)
    if (Op::updating.writes_state)
      std::memcpy(state[k], ends[k], static_cast<size_t>(rest) * sizeof(T));
  end_p.copy_to(p + whole, rest);
  return true;
}

template <class Op>
void update(const UpdateTask& task, int64_t offset, int64_t count) {
  using T = typename Op::Real;
  const Op op = *reinterpret_cast<const Op*>(task.plan->folded.bytes);
  if (update_tile(op, task, offset, count)) return;
  UpdateTile<Op, false> tile(task);
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    tile.open(task, offset + t, n);
    tile.each_block(task, n, [&](const T* g, T* p, T* const* state, int64_t, int64_t m) {
      update_groups(op, tile.scaled, g, p, state, m == kBlock ? kBlock : whole_groups(m));
    });
    tile.close_state(task, offset + t, n);
    const T* p = tile.p.data;
    const auto store_to = [&](const Array& a) {
      store<T>(a, offset + t, n, p, static_cast<uint64_t>(task.first + offset + t),
               {task.by_chance, task.plan->copy_key});
    };
    if (!tile.p.in_place) {
      store_to(task.param);
      if (task.average.data)  // which follows the parameter as stored
        load<T>({task.param.data, task.param.format, 1, nullptr}, offset + t, n, tile.p.tile);
    }
    if (task.copy.data) store_to(task.copy);
    if (task.average.data) move_average<T>(task, offset + t, n, p);
  }
}

// The first pass of a layer-wise optimizer.
template <class Op>
void measure(const UpdateTask& task, int64_t offset, int64_t count) {
  using T = typename Op::Real;
  using Tile = UpdateTile<Op, true>;
  constexpr Pass pass = Op::measuring;
  const Op op = *reinterpret_cast<const Op*>(task.plan->folded.bytes);
  ChunkSum<T> first_sum, second_sum;
  Tile tile(task);
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    WideLanes first, second;
    tile.open(task, offset + t, n);
    tile.each_block(task, n, [&](const T* g, const T* p, T* const* state, int64_t b, int64_t m) {
      alignas(64) T x0[kBlock], x1[kBlock];
      const int64_t groups = m == kBlock ? kBlock : whole_groups(m);
      // clang-format off
      GA_INDEPENDENT
      for (int64_t i = 0; i < groups; ++i) {
        // clang-format on
        T s[Tile::kSlots + 1];
        T x[2] = {};
        for (int k = 0; k < Tile::kSlots; ++k) s[k] = state[k][i];
        op.measure(p[i], pass.gradient ? tile.scaled(g[i]) : T(0), s, x);
        if (pass.writes_state)
          for (int k = 0; k < Tile::kSlots; ++k) state[k][i] = s[k];
        x0[i] = x[0];
        if (Op::norms == 2) x1[i] = x[1];
      }
      for (int64_t i = m; i < groups; ++i) x0[i] = x1[i] = 0;
      add_groups(first, x0, groups);
      if (Op::norms == 2) add_groups(second, x1, groups);
      if constexpr (Op::emits)
        std::memcpy(static_cast<T*>(task.emitted) + offset + t + b, x0,
                    static_cast<size_t>(m) * sizeof(T));
    });
    first_sum.add_wide_tile(first);
    if (Op::norms == 2) second_sum.add_wide_tile(second);
    tile.close_state(task, offset + t, n);
  }
  const int64_t stretch = task.stretch(), before = offset / stretch;
  Partial& partial =
      task.partials[before * chunk_count(stretch) + (offset - before * stretch) / kChunk];
  partial.sum_squares = first_sum.total();
  partial.second_squares = Op::norms == 2 ? second_sum.total() : 0;
}

template <class Op>
constexpr auto measure_of = [] {
  if constexpr (Op::norms > 0)
    return measure<Op>;
  else
    return nullptr;
}();

// ---- Units --------------------------------------------------------------------------------------

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
  // Adds rows of as many units, which are `step` elements apart.
  template <int kRows>
  GA_INLINE void add_rows(int64_t unit, const T* x, int64_t step, int64_t count) {
    for (int64_t b = 0; b < count; b += kBlock) {
      for (int r = 0; r < kRows; ++r) prefetch_block<0>(x + r * step + b + kAhead);
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
    constexpr int kRows = 4;
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
    const T* g = load<T>(task.gradient.source, t, n, tile_g);
    const T* const p = kParam ? load<T>(task.param, t, n, tile_p) : nullptr;
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

// ---- Tables -------------------------------------------------------------------------------------

template <class List>
struct OpLoops;
template <class... Op>
struct OpLoops<TypeList<Op...>> {
  static constexpr UpdateLoop updates[] = {update<Op>...};
  static constexpr UpdateLoop measures[] = {measure_of<Op>...};
};

constexpr Kernels kernels = {accumulate,
                             norm,
                             finish,
                             follow,
                             {OpLoops<AllOps<float>>::updates, OpLoops<AllOps<double>>::updates},
                             {OpLoops<AllOps<float>>::measures, OpLoops<AllOps<double>>::measures},
                             unit_norms};

}  // namespace

const Kernels& GA_CONCAT(kernels_, GA_ISA)();
const Kernels& GA_CONCAT(kernels_, GA_ISA)() { return kernels; }

}  // namespace ga::cpu
