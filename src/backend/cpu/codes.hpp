// SPDX-License-Identifier: Apache-2.0
// Unpacks tiles of state in 8 bits, and packs them again. Included in the same way as vectors.hpp.
#pragma once

#include "backend/cpu/formats.hpp"

// A state of codes: its two arrays.
struct CodedState {
  int32_t format;
  int32_t block;
  uint8_t* codes;
  float* scales;

  CodedState() = default;
  CodedState(const Array& state, float* of_blocks, int32_t block_size)
      : format(state.format),
        block(block_size),
        codes(static_cast<uint8_t*>(state.data)),
        scales(of_blocks) {}
};

// Registers of floats, see Single.
struct Registers {
  using Float = Floats;
  typedef uint32_t Word __attribute__((vector_size(kBytes)));
  typedef int32_t Int __attribute__((vector_size(kBytes)));
  GA_INLINE static Word bits(Float x) { return reinterpret_cast<Word>(x); }
  GA_INLINE static Float floats(Word u) { return reinterpret_cast<Float>(u); }
  GA_INLINE static Int truncated(Float x) { return __builtin_convertvector(x, Int); }
  template <class Mask, class T>
  GA_INLINE static T pick(Mask first, T a, T b) {
    return first ? a : b;
  }
};
constexpr int64_t kFloats = kWidth<float>;
typedef uint8_t CodesOfRegister __attribute__((vector_size(kFloats)));
typedef uint8_t CodesInMemory __attribute__((vector_size(kFloats), aligned(1), may_alias));
typedef uint32_t WordsInMemory __attribute__((vector_size(kBytes), aligned(4), may_alias));

// By hand, since gcc 12 takes the elements one by one.
GA_INLINE Registers::Word get_codes(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<Registers::Word>(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<Registers::Word>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(__SSE4_1__)
  return reinterpret_cast<Registers::Word>(_mm_cvtepu8_epi32(_mm_loadu_si32(p)));
#else
  return __builtin_convertvector(*reinterpret_cast<const CodesInMemory*>(p), Registers::Word);
#endif
}
GA_INLINE void put_codes(uint8_t* p, Registers::Word codes) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(codes)));
#elif defined(__AVX2__)
  const __m256i u = reinterpret_cast<__m256i>(codes);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
#elif defined(__SSE4_1__)
  const __m128i words = _mm_packus_epi32(reinterpret_cast<__m128i>(codes), __m128i{});
  _mm_storeu_si32(p, _mm_packus_epi16(words, words));
#else
  *reinterpret_cast<CodesInMemory*>(p) = __builtin_convertvector(codes, CodesOfRegister);
#endif
}

// f(b, n, scale) for each block of [offset, offset + count): the n elements from offset + b on, and the place of their
// scale. offset: a multiple of the block.
template <class F>
GA_INLINE void each_code_block(const CodedState& s, int64_t offset, int64_t count, F&& f) {
  const int64_t block = s.block;
  float* scale = s.scales + (block == kCodeBlock ? offset / kCodeBlock : offset / block);
  int64_t b = 0;
  if (block == kCodeBlock)  // a constant, for the loops
    for (; b + kCodeBlock <= count; b += kCodeBlock) f(b, int64_t{kCodeBlock}, scale++);
  for (; b < count; b += block) f(b, smaller(block, count - b), scale++);
}

// Here and below, what is read and written is padded to whole registers: tiles are to whole groups, and the library's
// arrays to whole cache lines.
template <bool kSigned>
[[gnu::noinline]] void load_codes(const CodedState& s, int64_t offset, int64_t count, float* tile) {
  const uint8_t* const __restrict codes = s.codes + offset;
  float* const __restrict to = tile;
  each_code_block(s, offset, count, [&](int64_t b, int64_t n, const float* at) GA_INLINE_BODY {
    const Floats scale = Floats{} + *at;
    for (int64_t i = b; i < b + n; i += kFloats)
      put(to + i, Codes<kSigned, Registers>::read(get_codes(codes + i), scale));
  });
}

template <bool kSigned, int kHalf>
void store_saturated(const float* x, int64_t count, uint8_t* codes, float* scale_at,
                     const uint32_t* random);

// random: for each element.
template <bool kSigned, int kHalf>
GA_INLINE void store_block(const float* __restrict x, int64_t count, uint8_t* __restrict codes,
                           float* scale_at, const uint32_t* __restrict random) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<int32_t>(bits_of(x[i]) & 0x7fffffff);
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest >= 0x7f800000)
    return store_saturated<kSigned, kHalf>(x, count, codes, scale_at, random);
  const float scale = scale_of_block(float_of(static_cast<uint32_t>(largest)));
  *scale_at = scale;
  if (scale == 0) {
    std::memset(codes, 0, static_cast<size_t>(count));
    return;
  }
  using InRegisters = Codes<kSigned, Registers>;
  const Floats per_scale = Floats{} + inverse_of(scale);
  for (int64_t i = 0; i < count; i += kFloats) {
    const Registers::Word bits = *reinterpret_cast<const WordsInMemory*>(random + i);
    put_codes(codes + i, InRegisters::write(get(x + i), per_scale, code_bits<kHalf>(bits)));
  }
}

inline void load_coded(const CodedState& s, int64_t offset, int64_t count, float* tile) {
  (s.format == kSignedCodes ? load_codes<true> : load_codes<false>)(s, offset, count, tile);
}

// A block with numbers that are not finite.
template <bool kSigned, int kHalf>
[[gnu::noinline]] void store_saturated(const float* x, int64_t count, uint8_t* codes,
                                       float* scale_at, const uint32_t* random) {
  alignas(64) float block[kCodeBlock] = {};
  for (int64_t i = 0; i < count; ++i) block[i] = saturated(x[i]);
  store_block<kSigned, kHalf>(block, count, codes, scale_at, random);
}

template <bool kSigned, int kHalf>
[[gnu::noinline]] void store_codes(const CodedState& s, int64_t offset, int64_t count,
                                   const float* tile, const uint32_t* random) {
  each_code_block(s, offset, count, [&](int64_t b, int64_t n, float* scale) GA_INLINE_BODY {
    store_block<kSigned, kHalf>(tile + b, n, s.codes + offset + b, scale, random + b);
  });
}

// Stores a tile of two slots, which share the random bits of an element. A tile may be NULL: a slot that is no codes.
[[gnu::noinline]] inline void store_coded_pair(const CodedState (&slots)[2],
                                               const float* const (&tiles)[2], int64_t offset,
                                               int64_t count, uint64_t index, uint64_t key) {
  using StoreCodes = void (*)(const CodedState&, int64_t, int64_t, const float*, const uint32_t*);
  static constexpr StoreCodes stores[2][2] = {{store_codes<false, 0>, store_codes<false, 1>},
                                              {store_codes<true, 0>, store_codes<true, 1>}};
  alignas(64) uint32_t random[kTile];
  stochastic(key, index, count, [&](int64_t i, uint32_t bits) GA_INLINE_BODY { random[i] = bits; });
  for (int half = 0; half < 2; ++half)
    if (tiles[half])
      stores[slots[half].format == kSignedCodes][half](slots[half], offset, count, tiles[half],
                                                       random);
}
