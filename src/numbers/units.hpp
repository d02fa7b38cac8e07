// SPDX-License-Identifier: Apache-2.0
// The units of a tensor: a unit is all elements with the same indices along the axes that are kept;
// the other axes are reduced. Norms over units are for adaptive clipping (a unit is a filter or a
// neuron) and for factored second moments (a unit is a row or a column).
#pragma once

#include <cstdint>

#include "core/hd.hpp"

namespace ga {

// Neighbouring axes of one kind are merged and axes of size 1 left out, so kept and reduced axes
// alternate. The tensor is cut into pieces along its outermost axis. If that is kept, pieces have
// no unit in common and share one array of sums, else each piece has its own array. A pattern may be
// of a part of a tensor: then all its numbers are of the part, which begins at element `first`.
struct UnitPattern {
  static constexpr int kMaxAxes = 32;
  int axes = 0;
  bool kept[kMaxAxes];
  int64_t extent[kMaxAxes];
  int64_t unit_stride[kMaxAxes];  // units from one index to the next; 0 if the axis is reduced
  int64_t count = 0;              // elements
  int64_t units = 0;
  int64_t pieces = 0;
  bool shared = false;  // one array of sums for all pieces
  int64_t first = 0;    // of a part of a tensor: where it begins

  GA_HD int64_t sums() const { return shared ? units : units * pieces; }
  // The outermost indices of a piece: [begin, end)
  GA_HD int64_t begin(int64_t piece) const { return extent[0] * piece / pieces; }
  GA_HD int64_t slab() const { return count / extent[0]; }  // elements of an outermost index
  // The first unit of a piece, of a shared pattern.
  GA_HD int64_t first_unit(int64_t piece) const { return begin(piece) * unit_stride[0]; }
};

// reduced: bit d is for axis d; bit 31 also for all later axes.
UnitPattern make_units(int32_t rank, const int64_t* shape, uint32_t reduced);
// The part of a shared pattern that has `count` elements from `first` on: whole outermost indices.
UnitPattern part_of(UnitPattern pattern, int64_t first, int64_t count);

}  // namespace ga
