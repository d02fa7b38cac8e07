// SPDX-License-Identifier: Apache-2.0
// How the elements of a parameter are divided among ranks. Rank q adds up a window's gradient of its
// range; a rank that shards the optimizer also keeps state of that range alone, and updates it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/tasks.hpp"
#include "core/tensor.hpp"

namespace ga {

// An array from an element on.
inline Array offset(const Array& a, int64_t elements) {
  return {static_cast<char*>(a.data) + elements * dtype_info(a.format).size, a.format};
}

// The array of which `part` is what lies from element `first` on. Only that part exists.
inline Array whole_of(const Array& part, int64_t first) {
  const auto address = reinterpret_cast<uintptr_t>(part.data);
  const auto bytes = static_cast<uintptr_t>(first * dtype_info(part.format).size);
  return {reinterpret_cast<void*>(address - bytes), part.format};
}

struct Range {
  int64_t first, count;
};

// An array of a parameter, one element for every `each` of the parameter's, of which ranks may have parts.
struct DividedArray {
  Array own;      // what this rank has
  int64_t count;  // elements of the whole
  int64_t each = 1;
};

struct Division {
  int64_t piece = 0;  // rank q has [q piece, (q + 1) piece), cut at the end; 0: the owner has all
  int32_t owner = 0;
  // The pieces that ranks take norms of: those they have where the optimizer is sharded, so that norms have
  // the same bits where it is not.
  int64_t measured_piece = 0;
  // Where the optimizer is not sharded, ranks add up other pieces than they take norms of. Then norms are a pass of
  // their own behind the addition, sharded or not.
  bool measured_separately = false;

  // What a rank adds up.
  Range range(int32_t rank, int64_t count) const { return of(piece, rank, count); }
  // What it measures.
  Range measured(int32_t rank, int64_t count) const { return of(measured_piece, rank, count); }

 private:
  Range of(int64_t size, int32_t rank, int64_t count) const {
    if (size == 0) return rank == owner ? Range{0, count} : Range{0, 0};
    const int64_t first = std::min(rank * size, count);
    return {first, std::min(size, count - first)};
  }
};

}  // namespace ga
