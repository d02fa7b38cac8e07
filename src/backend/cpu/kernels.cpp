// SPDX-License-Identifier: Apache-2.0
// The only loops over elements on the CPU, compiled once per ISA level (GA_ISA is its name).
// Nothing here has external linkage but one function, so that no code of a higher level can be
// linked in place of a lower one's.
//
// Same bits at every level: every element is computed by the same IEEE operations (no contraction,
// no reassociation), and sums run in kLanes lanes of double, element i in lane i mod kLanes, added
// up in a fixed order.
//
// The loops go in blocks of kBlock elements and prefetch kAhead elements further on: one core then
// keeps more cache lines in flight than the hardware prefetcher does alone (measured: AdamW and the
// norm 12-15 % faster on memory).
#include "backend/cpu/kernels.hpp"

#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 means its own intrinsics
#endif

#include "ops/all.hpp"

namespace ga::cpu {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kAhead = 512;
constexpr int64_t kTile = 1024;  // elements converted at a time; fits L1 with all its streams
constexpr int kLanes = 16;

static_assert(kTile % kBlock == 0 && kBlock % kLanes == 0 && kChunk % kTile == 0);

#define GA_INLINE __attribute__((always_inline)) inline

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

// ---- Reading
// --------------------------------------------------------------------------------------

// Elements [offset, offset + count) of a source as floats, in place where they are floats already.
using Load = const float* (*)(const void* data, int64_t offset, int64_t count, float* tile);

const float* load_f32(const void* data, int64_t offset, int64_t, float*) {
  return static_cast<const float*>(data) + offset;
}

constexpr Load loads[] = {nullptr, load_f32, nullptr, nullptr, nullptr};  // [ga_dtype]

GA_INLINE const float* load(const Source& s, int64_t offset, int64_t count, float* tile) {
  alignas(64) static constexpr float zeros[kTile] = {};
  return s.data ? loads[s.dtype](s.data, offset, count, tile) : zeros;
}

// The last elements of a tensor, fewer than a block, padded with zeros to whole groups of kLanes:
// the loops below then know whole groups only. Optimizer state needs no copy: it is padded in place
// (context.cpp), and what becomes of its padding is never looked at.
struct Padded {
  alignas(64) float data[kBlock];

  GA_INLINE Padded(const float* from, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
      std::memcpy(data + i, from + i, kLanes * sizeof(float));
    if (i == count) return;
#if defined(__AVX512F__)  // whole registers: what is written float by float is slow to load as one
    const auto mask = static_cast<__mmask16>((1u << (count - i)) - 1);
    _mm512_store_ps(data + i, _mm512_maskz_loadu_ps(mask, from + i));
#else
    std::memset(data + i, 0, kLanes * sizeof(float));
    for (; i < count; ++i) data[i] = from[i];
#endif
  }

  GA_INLINE void copy_to(float* to, int64_t count) const {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) std::memcpy(to + i, data + i, kLanes * sizeof(float));
    for (; i < count; ++i) to[i] = data[i];
  }
};

GA_INLINE int64_t whole_groups(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// ---- Sums of squares
// ------------------------------------------------------------------------------

// One register of floats, and the two of doubles it widens to. By hand, since the compilers
// vectorise a loop that both stores floats and sums their squares in double at some levels only.
#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef float FloatsInMemory __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(4 * kWidth)));

GA_INLINE Floats get(const float* p) { return *reinterpret_cast<const FloatsInMemory*>(p); }
GA_INLINE void put(float* p, Floats x) { *reinterpret_cast<FloatsInMemory*>(p) = x; }

#if defined(__AVX512F__)
GA_INLINE Doubles widen_low(Floats x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
GA_INLINE Doubles widen_high(Floats x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
#elif defined(__AVX__)
GA_INLINE Doubles widen_low(Floats x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
GA_INLINE Doubles widen_high(Floats x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
#elif defined(__SSE2__)
GA_INLINE Doubles widen_low(Floats x) { return _mm_cvtps_pd(x); }
GA_INLINE Doubles widen_high(Floats x) { return _mm_cvtps_pd(_mm_movehl_ps(x, x)); }
#else
GA_INLINE Doubles widen_low(Floats x) { return Doubles{x[0], x[1]}; }
GA_INLINE Doubles widen_high(Floats x) { return Doubles{x[2], x[3]}; }
#endif

// The square of a float is exact in double: a fused multiply-add rounds as multiply and add do, so
// it is used where there is one, and the bits stay those of the other levels.
GA_INLINE Doubles add_square(Doubles sum, Doubles x) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(x, x, sum);
#elif defined(__FMA__)
  return _mm256_fmadd_pd(x, x, sum);
#else
  return sum + x * x;
#endif
}

struct Lanes {
  Doubles sum[2 * kLanes / kWidth] = {};

  // x holds the elements of lanes [lane, lane + kWidth).
  GA_INLINE void add(int lane, Floats x) {
    Doubles* const s = sum + 2 * lane / kWidth;
    s[0] = add_square(s[0], widen_low(x));
    s[1] = add_square(s[1], widen_high(x));
  }

  // Lanes kLane, kLane + kStep, ... in pairs, these in pairs, and so on.
  template <int kLane, int kStep>
  GA_INLINE static double tree(const double (&s)[kLanes]) {
    if constexpr (kStep == kLanes)
      return s[kLane];
    else
      return tree<kLane, 2 * kStep>(s) + tree<kLane + kStep, 2 * kStep>(s);
  }

  GA_INLINE Partial total() const {
    double s[kLanes];
    std::memcpy(s, sum, sizeof s);
    const double all = tree<0, 1>(s);
    // The squares of finite floats cannot overflow a double: the sum is finite exactly when every
    // element is.
    return {all, 0, !(all <= 1.7976931348623157e308)};
  }
};

// ---- Accumulate
// -----------------------------------------------------------------------------------

// a <- [a +] scale0 g0 [+ scale1 g1] over whole groups
template <int kSources, bool kKeep>
GA_INLINE void accumulate_groups(float scale0, float scale1, float* __restrict a,
                                 const float* __restrict g0, const float* __restrict g1,
                                 int64_t count, Lanes& lanes) {
  for (int64_t i = 0; i < count; i += kLanes)
    for (int l = 0; l < kLanes; l += kWidth) {
      Floats x = get(g0 + i + l) * scale0;
      if (kKeep) x = get(a + i + l) + x;
      if (kSources == 2) x = x + get(g1 + i + l) * scale1;
      put(a + i + l, x);
      lanes.add(l, x);
    }
}

template <int kSources, bool kKeep, bool kStream>
void accumulate_chunk(const AccumulateTask& task, int64_t offset, int64_t count) {
  const float scale0 = task.source[0].scale;
  const float scale1 = kSources == 2 ? task.source[1].scale : 0.0f;
  Lanes lanes;
  alignas(64) float tile0[kTile];
  alignas(64) float tile1[kTile];
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    const float* const g0 = load(task.source[0], offset + t, n, tile0);
    const float* const g1 = kSources == 2 ? load(task.source[1], offset + t, n, tile1) : g0;
    float* const a = task.target + offset + t;
    int64_t b = 0;
    for (; b + kBlock <= n; b += kBlock) {
      prefetch_block<0>(g0 + b + kAhead);
      if (kSources == 2) prefetch_block<0>(g1 + b + kAhead);
      if (kStream) {
        alignas(64) float block[kBlock];
        accumulate_groups<kSources, kKeep>(scale0, scale1, block, g0 + b, g1 + b, kBlock, lanes);
        stream_block(a + b, block);
      } else {
        prefetch_block<1>(a + b + kAhead);
        accumulate_groups<kSources, kKeep>(scale0, scale1, a + b, g0 + b, g1 + b, kBlock, lanes);
      }
    }
    if (b == n) continue;
    const Padded end0(g0 + b, n - b);
    const Padded end1(g1 + b, kSources == 2 ? n - b : 0);
    Padded end_a(a + b, kKeep ? n - b : 0);
    accumulate_groups<kSources, kKeep>(scale0, scale1, end_a.data, end0.data, end1.data,
                                       whole_groups(n - b), lanes);
    end_a.copy_to(a + b, n - b);
  }
  if (kStream) stream_fence();
  task.partials[offset / kChunk] = lanes.total();
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
// --------------------------------------------------------

struct View {
  float source_scale, scale, limit, factor;

  explicit View(const GradientView& g)
      : source_scale(g.source.scale), scale(g.scale), limit(g.limit), factor(g.factor) {}

  // X: float or Floats
  template <class X>
  GA_INLINE X scaled(X x) const {
    return x * source_scale * scale;
  }
  template <class X>
  GA_INLINE X clamped(X x) const {
    const X low = X{} - limit, high = X{} + limit;
    return x < low ? low : (x > high ? high : x);
  }
  GA_INLINE float operator()(float x) const { return clamped(scaled(x)) * factor; }
};

template <bool kLimited>
GA_INLINE void norm_groups(const View& view, const float* __restrict g, int64_t count, Lanes& raw,
                           Lanes& limited) {
  for (int64_t i = 0; i < count; i += kLanes)
    for (int l = 0; l < kLanes; l += kWidth) {
      const Floats x = get(g + i + l) * view.source_scale;
      raw.add(l, x);
      if (kLimited) limited.add(l, view.clamped(x * view.scale));
    }
}

template <bool kLimited>
void norm_chunk(const NormTask& task, int64_t offset, int64_t count) {
  const View view(task.gradient);
  Lanes raw, limited;
  alignas(64) float tile[kTile];
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    const float* const g = load(task.gradient.source, offset + t, n, tile);
    int64_t b = 0;
    for (; b + kBlock <= n; b += kBlock) {
      prefetch_block<0>(g + b + kAhead);
      norm_groups<kLimited>(view, g + b, kBlock, raw, limited);
    }
    if (b < n)
      norm_groups<kLimited>(view, Padded(g + b, n - b).data, whole_groups(n - b), raw, limited);
  }
  Partial partial = raw.total();
  if (kLimited) partial.limited = limited.total().sum_squares;
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
    // clang-format off
    GA_INDEPENDENT  // target is the source itself, element for element, or apart from it
    for (int64_t i = 0; i < n; ++i) a[i] = view(g[i]);
    // clang-format on
  }
}

// ---- Update
// ---------------------------------------------------------------------------------------

template <class Op>
GA_INLINE void update_groups(const Op& op, const View& view, const float* g, float* p,
                             float* const (&state)[kMaxSlots], int64_t count) {
  // clang-format off
  GA_INDEPENDENT  // parameters, gradients and state do not overlap
  for (int64_t i = 0; i < count; ++i) {
    // clang-format on
    float s[Op::slots + 1];
    for (int k = 0; k < Op::slots; ++k) s[k] = state[k][i];
    const float updated = op(p[i], view(g[i]), s);
    for (int k = 0; k < Op::slots; ++k) state[k][i] = s[k];
    p[i] = updated;
  }
}

template <class Op>
void update(const UpdateTask& task, int64_t offset, int64_t count) {
  const Op op = *reinterpret_cast<const Op*>(task.folded->bytes);
  const View view(task.gradient);
  alignas(64) float tile[kTile];
  for (int64_t t = 0; t < count; t += kTile) {
    const int64_t n = smaller(kTile, count - t);
    const float* g = load(task.gradient.source, offset + t, n, tile);
    float* p = task.param + offset + t;
    float* state[kMaxSlots] = {};
    for (int k = 0; k < Op::slots; ++k) state[k] = task.state[k] + offset + t;
    const float* const end = g + n / kBlock * kBlock;
    while (g < end) {
      prefetch_block<0>(g + kAhead);
      prefetch_block<1>(p + kAhead);
      for (int k = 0; k < Op::slots; ++k) prefetch_block<1>(state[k] + kAhead);
      update_groups(op, view, g, p, state, kBlock);
      g += kBlock;
      p += kBlock;
      for (int k = 0; k < Op::slots; ++k) state[k] += kBlock;
    }
    if (const int64_t rest = n % kBlock; rest > 0) {
      const Padded end_g(g, rest);
      Padded end_p(p, rest);
      update_groups(op, view, end_g.data, end_p.data, state, whole_groups(rest));
      end_p.copy_to(p, rest);
    }
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
