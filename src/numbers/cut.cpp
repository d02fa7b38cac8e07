// SPDX-License-Identifier: Apache-2.0
#include "numbers/cut.hpp"

#include <algorithm>
#include <vector>

namespace ga {
namespace {

struct Axis {
  int64_t extent, stride;
};

// Merges neighbours that lie in the tensor as in the packed matrices, and leaves out axes of size 1.
void set_axes(Cut& cut, const std::vector<Axis>& packed) {
  for (const Axis& axis : packed) {
    if (axis.extent == 1) continue;
    const int last = cut.axes - 1;
    if (last >= 0 && cut.stride[last] == axis.extent * axis.stride) {
      cut.extent[last] *= axis.extent;
      cut.stride[last] = axis.stride;
      continue;
    }
    cut.extent[cut.axes] = axis.extent;
    cut.stride[cut.axes++] = axis.stride;
  }
  if (cut.axes == 1) cut.axes = 0;
}

}  // namespace

Cut make_cut(int32_t rank, const int64_t* shape, const ga_param_options& o) {
  Cut cut;
  if (std::find(shape, shape + rank, 0) != shape + rank) return cut;  // of nothing
  const int64_t parts = o.matrix_parts > 1 ? o.matrix_parts : 1;
  std::vector<Axis> packed = {{1, 0}};  // the parts, then the axes of a matrix
  int64_t stride = 1, before = 1, after = 1, outputs = 1;
  std::vector<Axis> tensor(static_cast<size_t>(rank));
  for (int32_t d = rank - 1; d >= 0; --d) {
    Axis& axis = tensor[static_cast<size_t>(d)];
    axis = {shape[d], stride};
    stride *= axis.extent;
    if (d == o.split_axis && d >= o.batch_axes) {
      axis.extent /= parts;
      packed[0] = {parts, axis.extent * axis.stride};
    }
    if (d < o.batch_axes)
      cut.matrices *= axis.extent;
    else
      (d < o.output_axis ? before : d > o.output_axis ? after : outputs) *= axis.extent;
  }
  cut.matrices *= parts;
  // The outputs come first, unless they are the innermost axis already.
  cut.transposed = before != 1 && after == 1;
  cut.rows = cut.transposed ? before : outputs;
  cut.columns = cut.transposed ? outputs : before * after;
  const auto first = tensor.begin() + o.batch_axes, output = tensor.begin() + o.output_axis;
  if (!cut.transposed) packed.push_back(*output);
  packed.insert(packed.end(), first, output);
  packed.insert(packed.end(), output + (cut.transposed ? 0 : 1), tensor.end());
  packed.insert(packed.begin(), tensor.begin(), first);
  set_axes(cut, packed);
  return cut;
}

}  // namespace ga
