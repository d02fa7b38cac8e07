// SPDX-License-Identifier: Apache-2.0
// Blocks, registers and prefetching for the kernels of every ISA level. Included by the files that
// are compiled once per level, within their anonymous namespaces.
//
// Kernels work in blocks of kBlock elements and, where that pays (see isa.cpp), prefetch kAhead elements
// ahead: a core then keeps more cache lines in flight than the hardware prefetcher alone.
#pragma once

constexpr int64_t kBlock = 64;
constexpr int64_t kAhead = 512;
constexpr int64_t kGroup = 16;  // the last elements of an array are padded to a multiple of it

static_assert(kTile % kBlock == 0 && kBlock % kLanes == 0 && kLanes == 2 * kGroup);
static_assert(kChunk == kTile * kTotals);

#define GA_INLINE __attribute__((always_inline)) inline
#define GA_INLINE_BODY __attribute__((always_inline))  // of a lambda

#if defined(__clang__)
#define GA_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define GA_INDEPENDENT _Pragma("GCC ivdep")
#endif

#define GA_CONCAT_(a, b) a##b
#define GA_CONCAT(a, b) GA_CONCAT_(a, b)

GA_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <int kWrite, class T>
GA_INLINE void prefetch_block(const T* p) {
  if (!prefetching) return;
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < kBlock; i += kLine) __builtin_prefetch(p + i, kWrite, 3);
}

// One register of floats, and the two of doubles that it widens to. By hand, because compilers
// vectorise a loop that both stores floats and sums their squares in double only at some levels.
#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
typedef float Floats __attribute__((vector_size(kBytes)));
typedef float FloatsInMemory __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(kBytes)));
typedef double DoublesInMemory __attribute__((vector_size(kBytes), aligned(8), may_alias));
template <class T>
constexpr int kWidth = kBytes / static_cast<int>(sizeof(T));

GA_INLINE Floats get(const float* p) { return *reinterpret_cast<const FloatsInMemory*>(p); }
GA_INLINE void put(float* p, Floats x) { *reinterpret_cast<FloatsInMemory*>(p) = x; }
GA_INLINE Doubles get(const double* p) { return *reinterpret_cast<const DoublesInMemory*>(p); }
GA_INLINE void put(double* p, Doubles x) { *reinterpret_cast<DoublesInMemory*>(p) = x; }

// Streaming stores, which bypass the caches; p is aligned to a register.
GA_INLINE void put_past(float* p, Floats x) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, x);
#elif defined(__AVX__)
  _mm256_stream_ps(p, x);
#elif defined(__SSE2__)
  _mm_stream_ps(p, x);
#else
  put(p, x);
#endif
}
GA_INLINE void put_past(double* p, Doubles x) {
  put_past(reinterpret_cast<float*>(p), reinterpret_cast<Floats>(x));
}

// By registers: gcc makes a slow string instruction of a memcpy of this size.
template <class T>
GA_INLINE T* copy_block(T* to, const T* block) {
  for (int64_t i = 0; i < kBlock; i += kWidth<T>) put(to + i, get(block + i));
  return to;
}

template <class T>
GA_INLINE void stream_block(T* to, const T* block) {
  for (int64_t i = 0; i < kBlock; i += kWidth<T>) put_past(to + i, get(block + i));
}

GA_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();  // the end of a parallel region does not order streaming stores
#endif
}

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

// The square of a float is exact in double, so a fused multiply-add rounds as a multiply and an add
// do, and gives the bits of the levels that have none.
GA_INLINE Doubles add_square(Doubles sum, Doubles x) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(x, x, sum);
#elif defined(__FMA__)
  return _mm256_fmadd_pd(x, x, sum);
#else
  return sum + x * x;
#endif
}

// at(0) + ... + at(kCount - 1), added as by add_halves().
template <int kCount, class At>
GA_INLINE Doubles halves_of(At&& at) {
  if constexpr (kCount == 1)
    return at(0);
  else
    return halves_of<kCount / 2>([&](int r) GA_INLINE_BODY { return at(r) + at(r + kCount / 2); });
}

GA_INLINE double total_of(Doubles lanes) {
#if defined(__AVX512F__)
  const __m256d four =
      _mm256_add_pd(_mm512_castpd512_pd256(lanes), _mm512_extractf64x4_pd(lanes, 1));
#elif defined(__AVX__)
  const __m256d four = lanes;
#endif
#if defined(__AVX__)
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
#else
  const Doubles two = lanes;
#endif
  return two[0] + two[1];
}

// As add_halves(), of lanes in registers. (An array of them would be copied on the stack.)
template <int kRegisters>
GA_INLINE double total_of(const Doubles* lanes) {
  return total_of(halves_of<kRegisters>([&](int r) GA_INLINE_BODY { return lanes[r]; }));
}
template <int kRegisters>
GA_INLINE double total_of(const Floats* lanes) {
  return total_of(halves_of<2 * kRegisters>([&](int r) GA_INLINE_BODY {
    return r % 2 == 0 ? widen_low(lanes[r / 2]) : widen_high(lanes[r / 2]);
  }));
}
