// SPDX-License-Identifier: Apache-2.0
// The units of a tensor: its elements with the same indices along the axes that are kept, all
// together along those that are reduced. Norms over units are for adaptive clipping (a unit is a
// filter or a neuron) and for factored second moments (a unit is a row or a column).
#pragma once

#include <cstdint>

#include "hd.hpp"

namespace ga {

// Neighbouring axes of one kind are merged, those of extent 1 left out, so kept and reduced axes
// alternate. The tensor is cut into pieces along its outermost axis; where that is kept, pieces
// have no unit in common and share one array of sums, else each piece has its own.
struct UnitPattern {
  static constexpr int kMaxAxes = 32;
  int axes = 0;
  bool kept[kMaxAxes];
  int64_t extent[kMaxAxes];
  int64_t unit_stride[kMaxAxes];  // units from index to index; 0: reduced
  int64_t count = 0;              // elements
  int64_t units = 0;
  int64_t pieces = 0;
  bool shared = false;  // one array of sums for all pieces

  GA_HD int64_t sums() const { return shared ? units : units * pieces; }
  // The outermost indices of a piece: [begin, end)
  GA_HD int64_t begin(int64_t piece) const { return extent[0] * piece / pieces; }
  GA_HD int64_t slab() const { return count / extent[0]; }  // elements to an outermost index
  // Of a shared pattern: the first unit of a piece.
  GA_HD int64_t first_unit(int64_t piece) const { return begin(piece) * unit_stride[0]; }
};

// reduced: bit d for axis d; axes from 32 on are reduced as axis 31 is.
UnitPattern make_units(int32_t rank, const int64_t* shape, uint32_t reduced);

}  // namespace ga
