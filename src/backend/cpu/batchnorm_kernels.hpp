// SPDX-License-Identifier: Apache-2.0
// The loops of batch normalisation on the CPU, compiled once per ISA level from
// batchnorm_kernels.cpp. All levels give the same bits.
#pragma once

#include "backend/tasks.hpp"

namespace ga::cpu {

// What a pass takes of a channel: numbers of the type computed in, each for all columns, one array
// behind the other, `columns` apart.
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

// Loops of two kinds. Planes, [samples, channels, positions]: elements [begin, end) of each of the
// channels [first, last), counted over the samples; numbers and sums begin with those of `first`.
// Rows: [begin, end) of a matrix, to whose rows as many samples' positions are folded as make it
// wide enough, so that the last one may not be whole; sums of columns [first, last).
struct BnPlanes {
  void (*statistics)(const BnTask&, int64_t first, int64_t last, int64_t begin, int64_t end,
                     const BnNumbers&, const BnSums&);
  void (*sums)(const BnTask&, int64_t first, int64_t last, int64_t begin, int64_t end,
               const BnNumbers&, const BnSums&);
  void (*forward)(const BnTask&, int64_t first, int64_t last, int64_t begin, int64_t end,
                  const BnNumbers&, bool stream);
  void (*backward)(const BnTask&, int64_t first, int64_t last, int64_t begin, int64_t end,
                   const BnNumbers&, bool stream);
};
struct BnRows {
  void (*statistics)(const BnTask&, int64_t begin, int64_t end, const BnNumbers&, int64_t first,
                     int64_t last, const BnSums&);
  void (*sums)(const BnTask&, int64_t begin, int64_t end, const BnNumbers&, int64_t first,
               int64_t last, const BnSums&);
  void (*forward)(const BnTask&, int64_t begin, int64_t end, const BnNumbers&, bool stream);
  void (*backward)(const BnTask&, int64_t begin, int64_t end, const BnNumbers&, bool stream);
};

// At most so many channels of planes at a time.
constexpr int64_t kMostPlanes = 128;

struct BnKernels {
  BnPlanes planes[2];  // [computed in double]
  BnRows rows[2];
};

}  // namespace ga::cpu
