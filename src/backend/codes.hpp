// SPDX-License-Identifier: Apache-2.0
// State in 8 bits (GA_STATE_8BIT): blocks of 256 elements, or of a power of two that divides a row, each with a scale s,
// its largest magnitude, and codes of magnitudes in [0, 1] as shares of s.
//
// A code is the upper bits of a float: code c > 0 stands for the float whose bits are (c + before) << 20,
// eight steps to an octave, and the largest for 1. Code 0 stands for 0. Numbers that are never negative have
// 255 codes down to 1.25 2^-32; signed ones have 127, down to 1.25 2^-16, and a bit for the sign.
//
// The element with the largest magnitude keeps its bits, since its share is 1. A number that is read and rounded to the
// nearest code is the same number again, whatever the scale, and the same code where it is not less than 2^-143: its
// product with the scale, and that with the inverse, are at most 2^-7 of itself off, and half a step is at least 2^-5.
// Where the largest magnitude is subnormal, s and all codes are 0. An infinity, such as a square that overflows, becomes
// the largest float, to which the rest of its block is lost; a NaN becomes 0, and has made its parameter NaN before.
//
// In a step, numbers are rounded stochastically: so a moving average keeps what a step changes even if that
// is less than half a step of the code, as a second moment does with beta2 = 0.999. What is never negative
// stays positive: below the least code it is that code.
#pragma once

#include "backend/numbers.hpp"
#include "ops/op.hpp"

namespace ga {

constexpr int32_t kCodeBlock = 256;  // elements of the largest block
constexpr int32_t kLeastBlock = 16;
constexpr int64_t kMostSmall = 4096;  // elements; a parameter with so many keeps state of f32

GA_HD constexpr int64_t block_count(int64_t elements, int64_t block) {
  return (elements + block - 1) / block;
}

// The elements of a block where none may lie in two rows of `columns` elements; 0: no block is large enough.
constexpr int32_t block_of_rows(int64_t columns) {
  const int64_t block = columns & -columns;
  return block < kLeastBlock ? 0 : block < kCodeBlock ? static_cast<int32_t>(block) : kCodeBlock;
}

constexpr uint32_t kCodeCut = 20;  // bits of a float below those of a code

// One float, where the CPU's kernels have a register of them.
struct Single {
  using Float = float;
  using Word = uint32_t;
  using Int = int32_t;
  GA_HD static Word bits(Float x) { return bits_of(x); }
  GA_HD static Float floats(Word u) { return float_of(u); }
  // Without its fraction. Any number, if x is out of the range of Int.
  GA_HD static Int truncated(Float x) { return static_cast<Int>(x < 0x1p31f ? x : 0); }
  template <class T>
  GA_HD static T pick(bool first, T a, T b) {
    return first ? a : b;
  }
};

template <bool kSigned, class Lanes = Single>
struct Codes {
  using Float = typename Lanes::Float;
  using Word = typename Lanes::Word;
  using Int = typename Lanes::Int;
  static constexpr uint32_t kTop = kSigned ? 127 : 255;  // stands for 1
  static constexpr uint32_t kBefore = (127u << 3) - kTop;
  static constexpr float kLeast = kSigned ? 0x1.4p-16f : 0x1.4p-32f;  // what 1 stands for

  GA_HD static Float read(Word code, Float scale) {
    const Word c = code & kTop;
    const Float x = Lanes::floats((c + kBefore) << kCodeCut) * scale;
    const Word magnitude = Lanes::pick(c == 0, Word{}, Lanes::bits(x));
    return Lanes::floats(kSigned ? magnitude | (code & 0x80) << 24 : magnitude);
  }

  // x: of a block whose scale is finite and not 0, and per_scale its inverse. random: see code_bits().
  GA_HD static Word write(Float x, Float per_scale, Word random) {
    const Float share = share_of(x, per_scale);
    if (!kSigned) return code(x, share, random, Word{});
    const Int below = Lanes::truncated(share * ((1 << kCodeCut) / kLeast));
    return code(x, share, random, one_if(below > signed_of(random)));
  }

  // The nearest code.
  GA_HD static Word write(Float x, Float per_scale) {
    const Float share = share_of(x, per_scale);
    return code(x, share, Word{} + (1u << (kCodeCut - 1)), one_if(share >= kLeast / 2));
  }

 private:
  template <class Mask>
  GA_HD static Word one_if(Mask mask) {
    return Lanes::pick(mask, Word{} + 1, Word{});
  }
  GA_HD static Int signed_of(Word u) { return (Int)u; }  // NOLINT: a register too
  GA_HD static Float share_of(Float x, Float per_scale) {
    return Lanes::floats(Lanes::bits(x) & 0x7fffffff) * per_scale;
  }

  // added: to the bits that are cut. low: the code of a signed share below the least.
  GA_HD static Word code(Float x, Float share, Word added, Word low) {
    const Word u = Lanes::bits(x);
    const Word stepped = ((Lanes::bits(share) + added) >> kCodeCut) - kBefore;
    if (kSigned) return Lanes::pick(share < kLeast, low, stepped) | (u >> 24 & 0x80);
    const Word one = Word{} + 1;
    const Word c = Lanes::pick(signed_of(stepped) > 1, stepped, one);
    return Lanes::pick((u & 0x7fffffff) == 0, Word{}, c);
  }
};

// Of the 32 random bits of an element, those for the first and for the second of two slots: the middles of 2^16
// intervals of kCodeCut bits. So a share that its product with per_scale has put above 1, by up to five last places where
// per_scale is subnormal, is not rounded up to a code that there is not.
constexpr uint32_t kMostCodeBits = (1u << kCodeCut) - 8;
template <int kHalf, class Word>
GA_HD Word code_bits(Word random) {
  constexpr uint32_t kUpper = (1u << kCodeCut) - 16;
  return ((kHalf == 0 ? random : random >> (32 - kCodeCut)) & kUpper) | 8;
}

// What is kept of a number that is not finite.
GA_HD float saturated(float x) {
  const uint32_t u = bits_of(x), magnitude = u & 0x7fffffff;
  if (magnitude < 0x7f800000) return x;
  return magnitude > 0x7f800000 ? 0 : float_of((u & 0x80000000) | 0x7f7fffff);
}

// The scale of a block whose largest magnitude is that.
GA_HD float scale_of_block(float largest) { return bits_of(largest) < 0x00800000 ? 0 : largest; }

// 1 / scale, rounded up where the product with the scale would else be less than 1, whose code would be random.
GA_HD float inverse_of(float scale) {
  const float inverse = 1 / scale;
  return scale * inverse < 1 ? float_of(bits_of(inverse) + 1) : inverse;
}

GA_HD bool is_scale(double x) { return x == 0 || (x >= 0x1p-126 && x <= FLT_MAX); }

}  // namespace ga
