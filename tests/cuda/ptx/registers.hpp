// SPDX-License-Identifier: Apache-2.0
// How a register holds a number of each type of PTX.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>

#include "ptx.hpp"

namespace ga::ptx {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;

template <class T>
T value(u64 bits) {
  if constexpr (std::same_as<T, bool>)
    return bits != 0;
  else if constexpr (std::integral<T>)
    return static_cast<T>(bits);
  else if constexpr (std::same_as<T, f32>)
    return std::bit_cast<f32>(static_cast<u32>(bits));
  else
    return std::bit_cast<f64>(bits);
}

// A NaN that an f32 instruction makes is this one, whatever NaN it has read.
constexpr u32 kNaN = 0x7fffffff;

template <class T>
u64 bits_of(T x) {
  if constexpr (std::same_as<T, f32>)
    return x == x ? std::bit_cast<u32>(x) : kNaN;
  else if constexpr (std::same_as<T, f64>)
    return std::bit_cast<u64>(x);
  else
    return static_cast<u64>(static_cast<s64>(x));
}

// f(lane) for each bit.
template <class F>
void each(u32 lanes, F f) {
  if (lanes == ~u32{0}) {
    for (int l = 0; l < kLanes; ++l) f(l);
  } else {
    for (; lanes != 0; lanes &= lanes - 1) f(std::countr_zero(lanes));
  }
}

}  // namespace ga::ptx
