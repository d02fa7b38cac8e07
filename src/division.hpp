// SPDX-License-Identifier: Apache-2.0
// How the elements of a parameter are divided among ranks. Rank q adds up a window's gradient of its
// range; a rank that shards the optimizer also keeps state of that range alone, and updates it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ga {

struct Range {
  int64_t first, count;
};

struct Division {
  int64_t piece = 0;  // rank q has [q piece, (q + 1) piece), cut at the end; 0: the owner has all
  int32_t owner = 0;

  Range range(int32_t rank, int64_t count) const {
    if (piece == 0) return rank == owner ? Range{0, count} : Range{0, 0};
    const int64_t first = std::min(rank * piece, count);
    return {first, std::min(piece, count - first)};
  }
};

}  // namespace ga
