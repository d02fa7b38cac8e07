// SPDX-License-Identifier: Apache-2.0
// The matrix engine of a context: oneDNN, in a side module that is opened before the first product, or products of the
// library's own where that module is not.
#pragma once

#include <vector>

#include "backend/backend.hpp"
#include "backend/cpu/kernels.hpp"
#include "backend/cpu/matmul_module.h"
#include "backend/cpu/threads.hpp"

namespace ga::cpu {

class MatmulEngine {
 public:
  MatmulEngine(Threads& threads, const ga_matmul_module& own) : threads_(threads), own_(own) {}

  // Opens the module if that has not been done, and makes room for so many elements of matrices
  // that are not f32. See Backend::prepare_matmul().
  void open(int64_t converted, ga_precision precision);
  // To be called after open(). Returns whether the partials were stored. Throws GA_ERROR_FAULT.
  bool run(const MatmulTask& task, const Kernels& kernels, bool stream);
  void orthogonalize(const OrthogonalizeTask& task, const Kernels& kernels);
  int64_t bytes() const {
    return static_cast<int64_t>((scratch_.size() + converted_.size()) * sizeof(float));
  }

 private:
  // Scales a matrix and converts it to f32, without gaps between its rows.
  void convert(const Kernels& kernels, Source from, int64_t rows, int64_t columns, int64_t stride,
               float* to);
  class Iterations;
  void run_bands(const MatmulTask& task, const Kernels& kernels);
  void run_direct(const MatmulTask& task);
  // Throws unless error is NULL.
  void check_product(const MatmulTask& task, const char* error) const;

  Threads& threads_;
  const ga_matmul_module& own_;
  const ga_matmul_module* module_ = nullptr;
  std::vector<float> scratch_;    // for each thread, as a Job has it
  std::vector<float> converted_;  // matrices
  int64_t cache_ = 0;             // bytes of the L2 cache of a core
};

}  // namespace ga::cpu
