// SPDX-License-Identifier: Apache-2.0
// Sets of small numbers, a bit for each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ga {

inline size_t words_for_bits(size_t bits) { return (bits + 63) / 64; }
inline bool bit(const uint64_t* words, size_t i) { return (words[i / 64] >> (i % 64) & 1) != 0; }
inline void set_bit(uint64_t* words, size_t i) { words[i / 64] |= uint64_t{1} << (i % 64); }

}  // namespace ga
