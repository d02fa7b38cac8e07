// SPDX-License-Identifier: Apache-2.0
// How kernels read and write state in 8 bits, whose numbers backend/codes.hpp describes.
#pragma once

#include "backend/codes.hpp"
#include "backend/cuda/formats.hpp"

// A loop that is unrolled, however long it is, so that what it indexes is in registers.
#ifdef __CUDACC__
#define GA_UNROLLED _Pragma("unroll")
#else
#define GA_UNROLLED
#endif

namespace ga::cuda {

// f(thread, magnitudes) in all threads, then take(thread, magnitudes), where each of the kCount magnitudes is the
// largest that f gave to the kTeam neighbouring threads of this one. They are bits of floats, without the sign, and
// begin as 0. Between the two is a barrier, so that take may write what f has read.
template <int kTeam, int kCount, class F, class Take>
GA_DEVICE void with_largest(F f, Take take) {
#ifdef __CUDACC__
  const int thread = static_cast<int>(threadIdx.x);
  uint32_t magnitudes[kCount] = {};
  f(thread, magnitudes);
  uint32_t largest[kCount];
  GA_UNROLLED
  for (int k = 0; k < kCount; ++k) {
    uint32_t x = magnitudes[k];
    for (int distance = kTeam / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, x, distance);
      x = other > x ? other : x;
    }
    largest[k] = x;
  }
  __syncthreads();
  take(thread, largest);
#else
  uint32_t all[kThreads][kCount] = {};
  sim::each_thread(kThreads, [&](int thread) { f(thread, all[thread]); });
  sim::end_phase();
  sim::each_thread(kThreads, [&](int thread) {
    uint32_t largest[kCount] = {};
    for (int of_team = 0; of_team < kTeam; ++of_team) {
      const uint32_t(&magnitudes)[kCount] = all[thread / kTeam * kTeam + of_team];
      for (int k = 0; k < kCount; ++k)
        if (magnitudes[k] > largest[k]) largest[k] = magnitudes[k];
    }
    take(thread, largest);
  });
  sim::end_phase();
#endif
}

// The bits of the largest magnitude among the first `count` of four elements, and `largest`.
GA_DEVICE uint32_t larger_magnitude(uint32_t largest, const Four<float>& x, int count) {
  for (int l = 0; l < 4; ++l) {
    const uint32_t magnitude = bits_of(saturated(x.x[l])) & 0x7fffffff;
    if (l < count && magnitude > largest) largest = magnitude;
  }
  return largest;
}

// The codes and scales of a state from an element on that begins a block.
struct CodedArray {
  struct alignas(4) [[gnu::may_alias]] Word {
    uint32_t codes;  // of four elements, that of the first in the lowest byte
  };
  uint8_t* codes;
  float* scales;

  CodedArray() = default;
  GA_DEVICE CodedArray(const Array& state, float* of_blocks, int64_t first, int32_t block)
      : codes(static_cast<uint8_t*>(state.data) + first), scales(of_blocks + first / block) {}

  GA_DEVICE float* scale_at(int of_block) const { return global(scales + of_block); }

  // Of elements [i, i + count), count <= 4, then zeros; i is a multiple of 4.
  GA_DEVICE uint32_t load(int i, int count) const {
    const uint8_t* const at = global(codes + i);
    if (count == 4) return reinterpret_cast<const Word*>(at)->codes;
    uint32_t word = 0;
    for (int l = 0; l < 4; ++l)
      if (l < count) word |= uint32_t{at[l]} << 8 * l;
    return word;
  }
  GA_DEVICE void store(int i, int count, uint32_t word) const {
    uint8_t* const at = global(codes + i);
    if (count == 4) {
      reinterpret_cast<Word*>(at)->codes = word;
      return;
    }
    for (int l = 0; l < 4; ++l)
      if (l < count) at[l] = static_cast<uint8_t>(word >> 8 * l);
  }
};

template <bool kSigned>
GA_DEVICE Four<float> read_codes(uint32_t word, float scale) {
  Four<float> x;
  for (int l = 0; l < 4; ++l) x.x[l] = Codes<kSigned>::read(word >> 8 * l, scale);
  return x;
}

// What the codes of a block are written with.
struct BlockScale {
  float scale, inverse;

  BlockScale() = default;
  // largest: the bits of its largest magnitude.
  GA_DEVICE explicit BlockScale(uint32_t largest)
      : scale(scale_of_block(float_of(largest))), inverse(inverse_of(scale)) {}
};

// The codes of four elements, of the first or of the second of two slots, which share the 32 random bits of an
// element.
template <bool kSigned, int kHalf>
GA_DEVICE uint32_t write_codes(const Four<float>& x, const BlockScale& block,
                               const Four<uint32_t>& random) {
  uint32_t word = 0;
  if (block.scale == 0) return word;
  for (int l = 0; l < 4; ++l)
    word |= Codes<kSigned>::write(saturated(x.x[l]), block.inverse, code_bits<kHalf>(random.x[l]))
            << 8 * l;
  return word;
}

}  // namespace ga::cuda
