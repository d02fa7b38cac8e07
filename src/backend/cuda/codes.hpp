// SPDX-License-Identifier: Apache-2.0
// How kernels read and write state in 8 bits, whose numbers backend/codes.hpp describes.
#pragma once

#include "backend/codes.hpp"
#include "backend/cuda/formats.hpp"

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
  for (int distance = kTeam / 2; distance > 0; distance /= 2) {
    for (uint32_t& x : magnitudes) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, x, distance);
      x = other > x ? other : x;
    }
  }
  __syncthreads();
  take(thread, magnitudes);
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
    const uint32_t magnitude = bits_of(x.x[l]) & 0x7fffffff;
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
  GA_DEVICE CodedArray(const Array& state, const Array& of_blocks, int64_t first)
      : codes(static_cast<uint8_t*>(state.data) + first),
        scales(static_cast<float*>(of_blocks.data) + first / kCodeBlock) {}

  GA_DEVICE float* scale_at(int i) const { return global(scales + i / kCodeBlock); }

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

// Writes the codes of a block, which is of the first or of the second of two slots that share random bits.
template <bool kSigned, int kHalf>
class CodeWriter {
 public:
  // largest: the bits of the block's largest magnitude.
  GA_DEVICE explicit CodeWriter(uint32_t largest)
      : scale_(scale_of_block(float_of(largest))),
        per_scale_(inverse_of(scale_)),
        lost_(largest >= 0x7f800000) {}

  GA_DEVICE float scale() const { return scale_; }

  // random: 32 bits for each element.
  GA_DEVICE uint32_t operator()(const Four<float>& x, const Four<uint32_t>& random) const {
    uint32_t word = 0;
    if (scale_ == 0) return word;
    for (int l = 0; l < 4; ++l) {
      const uint32_t code =
          lost_ ? Codes<kSigned>::write_lost(x.x[l])
                : Codes<kSigned>::write(x.x[l], per_scale_, code_bits<kHalf>(random.x[l]));
      word |= code << 8 * l;
    }
    return word;
  }

 private:
  float scale_, per_scale_;
  bool lost_;
};

}  // namespace ga::cuda
