// SPDX-License-Identifier: Apache-2.0
// The kernels of batch normalisation on the CPU, compiled once per ISA level from
// batchnorm_kernels.cpp. All levels give the same bits.
#pragma once

#include "backend/tasks.hpp"

namespace ga::cpu {

extern const bool prefetching, bn_prefetching;  // whether kernels prefetch, and those of this file

// What a pass needs of each channel: arrays of numbers of the type computed in, `columns` elements
// apart, with an element for every column.
//   statistics       shift, in double
//   backward sums    mean, in double
//   forward          centre high and low, scale, shift
//   backward         centre high and low, scale, shift, slope
struct BnNumbers {
  const void* data;
  int64_t columns;
};

// Sums of each column: over x - shift and its square, or over dy and dy (x - mean).
struct BnSums {
  double* first;
  double* second;
};

// [samples, channels, positions]: elements [begin, end) of each of the channels [first, last),
// counted over the samples; numbers and sums begin with those of `first`.
struct BnPlanes {
  using Sum = void (*)(const BnTask&, int64_t first, int64_t last, int64_t begin, int64_t end,
                       const BnNumbers&, const BnSums&);
  using Map = void (*)(const BnTask&, int64_t first, int64_t last, int64_t begin, int64_t end,
                       const BnNumbers&, bool stream);
  Sum statistics, sums;
  Map forward, backward;
};
// Rows [begin, end) of a matrix with a column for each channel. Several positions are folded to one
// row if channels are few, so the last row may be incomplete. Sums are of columns [first, last).
struct BnRows {
  using Sum = void (*)(const BnTask&, int64_t begin, int64_t end, const BnNumbers&, int64_t first,
                       int64_t last, const BnSums&);
  using Map = void (*)(const BnTask&, int64_t begin, int64_t end, const BnNumbers&, bool stream);
  Sum statistics, sums;
  Map forward, backward;
};

constexpr int64_t kMostPlanes = 128;  // channels in one call of BnPlanes

struct BnKernels {
  BnPlanes planes[2];  // [whether it is computed in double]
  BnRows rows[2];
};

}  // namespace ga::cpu
