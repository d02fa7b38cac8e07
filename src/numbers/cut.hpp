// SPDX-License-Identifier: Apache-2.0
// How a tensor is cut into equal matrices, each of which MUON makes orthogonal by itself
// (ga_param_options.cut_matrices).
#pragma once

#include <cstdint>

#include "core/hd.hpp"
#include "gradaccum/gradaccum.h"

namespace ga {

// A matrix is packed if it is row-major without gaps, and the matrices lie one behind the other. Its rows
// are its outputs, or the inputs where these are the outer axes in the tensor, as in Keras.
struct Cut {
  static constexpr int kMaxAxes = 6;
  int64_t matrices = 1;
  int64_t rows = 0, columns = 0;  // of a packed matrix
  bool transposed = false;        // the rows are the inputs
  // The axes of all packed matrices, the outermost first, and their strides in the tensor. 0 axes: the
  // tensor has its matrices packed.
  int axes = 0;
  int64_t extent[kMaxAxes] = {}, stride[kMaxAxes] = {};

  GA_HD int64_t size() const { return rows * columns; }
  GA_HD int64_t small() const { return rows < columns ? rows : columns; }
  GA_HD int64_t outputs() const { return transposed ? columns : rows; }
  GA_HD int64_t inputs() const { return transposed ? rows : columns; }
  // So many elements of packed matrices lie in the tensor without gaps, and the next as many elsewhere.
  int64_t run() const { return stride[axes - 1] == 1 ? extent[axes - 1] : 1; }
  // Where the element of that number of the packed matrices is in the tensor.
  GA_HD int64_t place(int64_t element) const {
    int64_t at = 0;
    for (int a = axes - 1; a > 0; --a) {
      at += element % extent[a] * stride[a];
      element /= extent[a];
    }
    return at + element * stride[0];
  }
};

// rank: 2 or more. options: of zeros, one matrix whose outputs are axis 0; else legal ones.
Cut make_cut(int32_t rank, const int64_t* shape, const ga_param_options& options);

}  // namespace ga
