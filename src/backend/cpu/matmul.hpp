// SPDX-License-Identifier: Apache-2.0
// A context's matrix engine: oneDNN, in a side module that is opened by the first product.
#pragma once

#include <vector>

#include "backend/backend.hpp"
#include "backend/cpu/kernels.hpp"
#include "backend/cpu/matmul_module.h"
#include "backend/cpu/threads.hpp"

namespace ga::cpu {

class MatmulEngine {
 public:
  explicit MatmulEngine(Threads& threads) : threads_(threads) {}

  // Room for that many elements of matrices that are not f32. Throws GA_ERROR_UNSUPPORTED, or
  // std::bad_alloc; nothing to do from the second time on.
  void open(int64_t converted);
  // After open(). Returns whether the partials were stored. Throws GA_ERROR_FAULT.
  bool run(const MatmulTask& task, const Kernels& kernels, bool stream);
  void orthogonalize(const OrthogonalizeTask& task, const Kernels& kernels);
  int64_t bytes() const {
    return static_cast<int64_t>((scratch_.size() + converted_.size()) * sizeof(float));
  }

 private:
  // Rows of columns elements, scaled, to f32 rows one behind the other.
  void convert(const Kernels& kernels, Source from, int64_t rows, int64_t columns, int64_t stride,
               float* to);
  void run_bands(const MatmulTask& task, const Kernels& kernels, bool stream);
  void run_direct(const MatmulTask& task);
  [[noreturn]] void fail_product(const MatmulTask& task, const char* error) const;

  Threads& threads_;
  const ga_matmul_module* module_ = nullptr;
  std::vector<float> scratch_;    // a band for each thread
  std::vector<float> converted_;  // matrices
  int64_t cache_ = 0;             // bytes of a core's own
};

}  // namespace ga::cpu
