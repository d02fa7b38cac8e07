// SPDX-License-Identifier: Apache-2.0
#include "numbers/units.hpp"

#include <algorithm>

namespace ga {
namespace {

// Smaller pieces would not pay for a thread, nor for an array of sums.
int64_t pieces_of(const UnitPattern& p) {
  constexpr int64_t kSmallestPiece = 65536, kElementsPerSum = 64, kMostPieces = 64;
  const int64_t smallest = std::max(kSmallestPiece, p.shared ? 0 : kElementsPerSum * p.units);
  const int64_t most = p.shared ? p.extent[0] : std::min(kMostPieces, p.extent[0]);
  return p.count == 0 ? 0 : std::clamp<int64_t>(p.count / smallest, 1, most);
}

}  // namespace

UnitPattern make_units(int32_t rank, const int64_t* shape, uint32_t reduced) {
  UnitPattern p;
  p.count = p.units = 1;
  for (int32_t d = 0; d < rank; ++d) {
    p.count *= shape[d];
    const bool kept = !(reduced >> std::min(d, 31) & 1u);
    if (kept) p.units *= shape[d];
    if (shape[d] == 1) continue;
    if (p.axes > 0 && p.kept[p.axes - 1] == kept) {
      p.extent[p.axes - 1] *= shape[d];
    } else {
      p.kept[p.axes] = kept;
      p.extent[p.axes++] = shape[d];
    }
  }
  if (p.axes == 0) {  // one element
    p.kept[0] = false;
    p.extent[0] = 1;
    p.axes = 1;
  }
  int64_t stride = 1;
  for (int a = p.axes - 1; a >= 0; --a) {
    p.unit_stride[a] = p.kept[a] ? stride : 0;
    if (p.kept[a]) stride *= p.extent[a];
  }
  p.shared = p.kept[0];
  p.pieces = pieces_of(p);
  return p;
}

UnitPattern part_of(UnitPattern p, int64_t first, int64_t count) {
  if (count == p.count) return p;
  p.first = first;
  p.extent[0] = count / p.slab();
  p.units = p.extent[0] * p.unit_stride[0];
  p.count = count;
  p.pieces = pieces_of(p);
  return p;
}

}  // namespace ga
