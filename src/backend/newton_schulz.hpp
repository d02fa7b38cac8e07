// SPDX-License-Identifier: Apache-2.0
// Newton-Schulz iterations (OrthogonalizeTask) with the matrix products of any backend.
#pragma once

#include <algorithm>
#include <utility>

#include "backend/tasks.hpp"

namespace ga {

// multiply(const MatmulTask&), combine(const Combination&): run on the backend, one after the other.
template <class Multiply, class Combine>
class NewtonSchulz {
 public:
  NewtonSchulz(const OrthogonalizeTask& task, Multiply multiply, Combine combine)
      : task_(task),
        multiply_(std::move(multiply)),
        combine_(std::move(combine)),
        count_(task.rows * task.columns),
        small_(std::min(task.rows, task.columns)),
        x_(task.x),
        next_(task.scratch),
        gram_(task.scratch + count_),
        square_(gram_ + small_ * small_) {}

  void run() {
    if (count_ == 0) return;
    if (task_.precision == GA_PRECISION_BF16)
      run_in_bf16();
    else
      run_in_f32();
  }

 private:
  void run_in_f32() {
    float* const poly = square_;
    combine_({1, &task_.plan->orthogonal_scale, x_, GA_F32, 0, nullptr, x_, nullptr, count_});
    for (int step = 0; step < task_.steps; ++step) {
      multiply_(product_with_itself(x_, GA_F32));
      combine_({task_.b, nullptr, gram_, GA_F32, 0, nullptr, poly, nullptr, small_ * small_});
      multiply_(square(gram_, GA_F32, poly, task_.c, true));
      combine_({task_.a, nullptr, x_, GA_F32, 0, nullptr, next_, nullptr, count_});
      multiply_(product_of(poly, x_, GA_F32, true));
      std::swap(x_, next_);
    }
  }

  // Factors of products are rounded to bf16. X itself stays f32: of a gradient with few large singular
  // values the iteration raises the small ones by up to a^steps, and the rounding errors of X with
  // them. The polynomial is one of the rounded G in both of its terms, whose errors cancel for the most
  // part where singular values are near 1. In float64 with factors rounded to bf16, five steps of a
  // uniform gradient of 256 x 256 and of one nearly of rank 1 had errors of 0.013 and 0.0008; with X
  // rounded too 0.011 and 0.29; with the exact G in b G 0.016 and 0.0007.
  void run_in_bf16() {
    auto* const x16 = reinterpret_cast<uint16_t*>(square_ + small_ * small_);
    uint16_t* const small16 = x16 + count_;  // G, then the polynomial
    const int64_t smalls = small_ * small_;
    combine_({1, &task_.plan->orthogonal_scale, x_, GA_F32, 0, nullptr, x_, x16, count_});
    for (int step = 0; step < task_.steps; ++step) {
      multiply_(product_with_itself(x16, GA_BF16));
      combine_({1, nullptr, gram_, GA_F32, 0, nullptr, nullptr, small16, smalls});
      multiply_(square(small16, GA_BF16, square_, 1, false));
      combine_({task_.b, nullptr, small16, GA_BF16, task_.c, square_, gram_, small16, smalls});
      multiply_(product_of(small16, x16, GA_BF16, false));
      const bool last = step + 1 == task_.steps;
      combine_({task_.a, nullptr, x_, GA_F32, 1, next_, next_, last ? nullptr : x16, count_});
      std::swap(x_, next_);
    }
  }

  bool is_wide() const { return task_.rows <= task_.columns; }

  // X X', or X' X if that is smaller; then the polynomial is applied from the right.
  MatmulTask product_with_itself(const void* x, int32_t dtype) const {
    const int64_t c = task_.columns;
    MatmulTask t = {};
    t.m = t.n = small_, t.k = count_ / small_;
    t.a = t.b = x, t.lda = t.ldb = c;
    (is_wide() ? t.transpose_b : t.transpose_a) = true;
    return to(t, dtype, gram_, 1, false);
  }
  MatmulTask square(const void* matrix, int32_t dtype, float* target, float scale,
                    bool keep) const {
    MatmulTask t = {};
    t.m = t.n = t.k = small_;
    t.a = t.b = matrix, t.lda = t.ldb = small_;
    return to(t, dtype, target, scale, keep);
  }
  MatmulTask product_of(const void* poly, const void* x, int32_t dtype, bool keep) const {
    MatmulTask t = {};
    t.m = task_.rows, t.n = task_.columns, t.k = small_;
    t.a = is_wide() ? poly : x, t.lda = small_;
    t.b = is_wide() ? x : poly, t.ldb = task_.columns;
    return to(t, dtype, next_, 1, keep);
  }
  MatmulTask to(MatmulTask t, int32_t dtype, float* target, float scale, bool keep) const {
    t.dtype = dtype, t.tf32 = task_.precision == GA_PRECISION_TF32;
    t.target = target, t.scale = static_cast<double>(scale), t.keep = keep;
    return t;
  }

  const OrthogonalizeTask& task_;
  Multiply multiply_;
  Combine combine_;
  const int64_t count_, small_;
  float *x_, *next_;
  float *const gram_, *const square_;
};

}  // namespace ga
