// SPDX-License-Identifier: Apache-2.0 The only loops over elements on the CPU: plain bodies that
// the compiler vectorises, compiled once per ISA level (GA_ISA is its name). Nothing here has
// external linkage but one function, so that no code of a higher level can be linked in place of a
// lower one's.
//
// Same bits at every level: every element is computed by the same IEEE operations (no contraction,
// no reassociation), and sums run in kLanes lanes of double, element i in lane i mod kLanes, added
// up in a fixed order.
//
// The loops go in blocks of kBlock elements and prefetch kAhead elements further on: one core then
// keeps more cache lines in flight than the hardware prefetcher does alone (measured: AdamW and the
// norm 12-15 % faster on memory).
#include "backend/cpu/kernels.hpp"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "ops/all.hpp"

namespace ga::cpu {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kAhead = 512;
constexpr int64_t kTile =
    1024;  // elements that are converted at a time; fits L1 with all its streams
constexpr int kLanes = 16;

static_assert(kTile % kBlock == 0 && kBlock % kLanes == 0 && kChunk % kTile == 0);

#define GA_INLINE_LAMBDA __attribute__((always_inline))
#define GA_INLINE GA_INLINE_LAMBDA inline

#if defined(__clang__)
#define GA_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define GA_INDEPENDENT _Pragma("GCC ivdep")
#endif

GA_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <int kWrite>
GA_INLINE void prefetch_block(const float* p) {
  for (int64_t i = 0; i < kBlock; i += 16) __builtin_prefetch(p + i, kWrite, 3);
}

// Copies a block past the caches; target is 64-byte aligned.
GA_INLINE void stream_block(float* target, const float* block) {
#if defined(__AVX512F__)
  for (int64_t i = 0; i < kBlock; i += 16) _mm512_stream_ps(target + i, _mm512_load_ps(block + i));
#elif defined(__AVX__)
  for (int64_t i = 0; i < kBlock; i += 8) _mm256_stream_ps(target + i, _mm256_load_ps(block + i));
#elif defined(__SSE2__)
  for (int64_t i = 0; i < kBlock; i += 4) _mm_stream_ps(target + i, _mm_load_ps(block + i));
#else
  for (int64_t i = 0; i < kBlock; ++i) target[i] = block[i];
#endif
}

GA_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();  // streamed stores are not ordered by the end of a parallel region
#endif
}

// ---- Reading: elements [offset, offset + count) of a source as floats, in place where they are
// floats already ----

using Load = const float* (*)(const void* data, int64_t offset, int64_t count, float* tile);

const float* load_f32(const void* data, int64_t offset, int64_t, float*) {
  return static_cast<const float*>(data) + offset;
}

constexpr Load loads[] = {nullptr, load_f32, nullptr, nullptr, nullptr};  // [ga_dtype]

GA_INLINE const float* load(const Source& s, int64_t offset, int64_t count, float* tile) {
  alignas(64) static constexpr float zeros[kTile] = {};
  return s.data ? loads[s.dtype](s.data, offset, count, tile) : zeros;
}

// ---- Sums of squares

struct Lanes {
  double sum[kLanes];
};

// The square of a float is exact in double: a fused multiply-add rounds as multiply and add do, so
// it is used where there is one and the bits stay those of the other levels.
GA_INLINE double add_square(double sum, float x) {
  const double d = x;
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fma(d, d, sum);
#else
  return sum + d * d;
#endif
}

Partial total(const Lanes& lanes) {
  double s[kLanes];
  std::memcpy(s, lanes.sum, sizeof s);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) s[l] += s[l + width];
  // The squares of finite floats cannot overflow a double: the sum is finite exactly when every
  // element is.
  return {s[0], !(s[0] <= 1.7976931348623157e308)};
}

// ---- Accumulate

template <int kSources, bool kKeep>
struct Combine {
  float scale0, scale1;
  GA_INLINE float operator()(float a, float g0, float g1) const {
    if (kKeep) return a + g0 * scale0;
    if (kSources == 2) return g0 * scale0 + g1 * scale1;
    return g0 * scale0;
  }
};

template <int kSources, bool kKeep, bool kStream>
void accumulate_tile(const Combine<kSources, kKeep>& combine, float* __restrict a,
                     const float* __restrict g0, const float* __restrict g1, int64_t count,
                     Lanes& lanes) {
  double sum[kLanes];
  std::memcpy(sum, lanes.sum, sizeof sum);
  int64_t b = 0;
  for (; b + kBlock <= count; b += kBlock) {
    prefetch_block<0>(g0 + b + kAhead);
    if (kSources == 2) prefetch_block<0>(g1 + b + kAhead);
    if (!kStream) prefetch_block<1>(a + b + kAhead);
    alignas(64) float block[kBlock];
    float* __restrict out = kStream ? block : a + b;
    for (int64_t i = 0; i < kBlock; i += kLanes)
      for (int l = 0; l < kLanes; ++l) {
        const float x = combine(kKeep ? a[b + i + l] : 0.0f, g0[b + i + l],
                                kSources == 2 ? g1[b + i + l] : 0.0f);
        out[i + l] = x;
        sum[l] = add_square(sum[l], x);
      }
    if (kStream) stream_block(a + b, block);
  }
  for (; b < count; ++b) {
    const float x = combine(kKeep ? a[b] : 0.0f, g0[b], kSources == 2 ? g1[b] : 0.0f);
    a[b] = x;
    sum[b % kLanes] = add_square(sum[b % kLanes], x);
  }
  std::memcpy(lanes.sum, sum, sizeof sum);
}

template <int kSources, bool kKeep, bool kStream>
void accumulate_chunk(const AccumulateTask& task, int64_t offset, int64_t count) {
  const Combine<kSources, kKeep> combine = {task.source[0].scale,
                                            kSources == 2 ? task.source[1].scale : 0.0f};
  Lanes lanes = {};
  alignas(64) float tile0[kTile];
  alignas(64) float tile1[kTile];
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    const float* g0 = load(task.source[0], offset + t, n, tile0);
    const float* g1 = kSources == 2 ? load(task.source[1], offset + t, n, tile1) : g0;
    accumulate_tile<kSources, kKeep, kStream>(combine, task.target + offset + t, g0, g1, n, lanes);
  }
  if (kStream) stream_fence();
  task.partials[offset / kChunk] = total(lanes);
}

void accumulate(const AccumulateTask& task, int64_t offset, int64_t count, bool stream) {
  if (task.keep)
    accumulate_chunk<1, true, false>(task, offset, count);
  else if (task.sources == 2)
    (stream ? accumulate_chunk<2, false, true> : accumulate_chunk<2, false, false>)(task, offset,
                                                                                    count);
  else
    (stream ? accumulate_chunk<1, false, true> : accumulate_chunk<1, false, false>)(task, offset,
                                                                                    count);
}

// ---- The gradient as the optimizer sees it
// ---------------------------------------------------------------------

struct View {
  float source_scale, scale, limit, factor;

  explicit View(const GradientView& g)
      : source_scale(g.source.scale), scale(g.scale), limit(g.limit), factor(g.factor) {}

  GA_INLINE float scaled(float x) const { return x * source_scale * scale; }
  GA_INLINE float clamped(float x) const { return x < -limit ? -limit : (x > limit ? limit : x); }
  GA_INLINE float operator()(float x) const { return clamped(scaled(x)) * factor; }
};

// With a limit two sums are taken: of the clamped elements, and of the raw ones to see the
// non-finite among them.
template <bool kLimited>
void norm_chunk(const NormTask& task, int64_t offset, int64_t count) {
  const View view(task.gradient);
  Lanes raw = {};
  Lanes clamped = {};
  alignas(64) float tile[kTile];
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    const float* __restrict g = load(task.gradient.source, offset + t, n, tile);
    double r[kLanes], c[kLanes];
    std::memcpy(r, raw.sum, sizeof r);
    std::memcpy(c, clamped.sum, sizeof c);
    const auto add = [&](int64_t i, int l) GA_INLINE_LAMBDA {
      const float x = view.scaled(g[i]);
      r[l] = add_square(r[l], x);
      if (kLimited) c[l] = add_square(c[l], view.clamped(x));
    };
    int64_t b = 0;
    for (; b + kBlock <= n; b += kBlock) {
      prefetch_block<0>(g + b + kAhead);
      for (int64_t i = 0; i < kBlock; i += kLanes)
        for (int l = 0; l < kLanes; ++l) add(b + i + l, l);
    }
    for (; b < n; ++b) add(b, static_cast<int>(b % kLanes));
    std::memcpy(raw.sum, r, sizeof r);
    std::memcpy(clamped.sum, c, sizeof c);
  }
  Partial partial = total(raw);
  if (kLimited) partial.sum_squares = total(clamped).sum_squares;
  task.partials[offset / kChunk] = partial;
}

void norm(const NormTask& task, int64_t offset, int64_t count) {
  const bool limited = task.gradient.limit <= 3.40282347e38f;
  (limited ? norm_chunk<true> : norm_chunk<false>)(task, offset, count);
}

void finish(const FinishTask& task, int64_t offset, int64_t count) {
  const View view(task.gradient);
  alignas(64) float tile[kTile];
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    const float* g = load(task.gradient.source, offset + t, n, tile);
    float* a = task.target + offset + t;
    GA_INDEPENDENT  // target is the source itself, element for element, or apart from it
        for (int64_t i = 0; i < n; ++i) a[i] = view(g[i]);
  }
}

// ---- Update

template <class Op>
GA_INLINE void update_range(const Op& op, const View& view, const float* g, float* p,
                            float* const (&state)[kMaxSlots], int64_t begin, int64_t end) {
  GA_INDEPENDENT  // parameters, gradients and state do not overlap
      for (int64_t i = begin; i < end; ++i) {
    float s[Op::slots + 1];
    for (int k = 0; k < Op::slots; ++k) s[k] = state[k][i];
    const float updated = op(p[i], view(g[i]), s);
    for (int k = 0; k < Op::slots; ++k) state[k][i] = s[k];
    p[i] = updated;
  }
}

template <class Op>
void update(const UpdateTask& task, int64_t offset, int64_t count) {
  Op op = *reinterpret_cast<const Op*>(task.folded->bytes);
  const View view(task.gradient);
  alignas(64) float tile[kTile];
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    const float* g = load(task.gradient.source, offset + t, n, tile);
    float* p = task.param + offset + t;
    float* state[kMaxSlots] = {};
    for (int k = 0; k < Op::slots; ++k) state[k] = task.state[k] + offset + t;
    int64_t b = 0;
    for (; b + kBlock <= n; b += kBlock) {
      prefetch_block<0>(g + b + kAhead);
      prefetch_block<1>(p + b + kAhead);
      for (int k = 0; k < Op::slots; ++k) prefetch_block<1>(state[k] + b + kAhead);
      update_range(op, view, g, p, state, b, b + kBlock);
    }
    update_range(op, view, g, p, state, b, n);
  }
}

template <class List>
struct UpdateTable;
template <class... Op>
struct UpdateTable<TypeList<Op...>> {
  static constexpr void (*loops[])(const UpdateTask&, int64_t, int64_t) = {update<Op>...};
};

constexpr Kernels kernels = {accumulate, norm, finish, UpdateTable<AllOps<float>>::loops};

}  // namespace

#define GA_CONCAT_(a, b) a##b
#define GA_CONCAT(a, b) GA_CONCAT_(a, b)

const Kernels& GA_CONCAT(kernels_, GA_ISA)();
const Kernels& GA_CONCAT(kernels_, GA_ISA)() { return kernels; }

}  // namespace ga::cpu
