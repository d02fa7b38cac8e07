// SPDX-License-Identifier: Apache-2.0
// Newton-Schulz iterations (OrthogonalizeTask) with the matrix products of any backend.
#pragma once

#include <algorithm>
#include <utility>

#include "backend/tasks.hpp"

namespace ga {

// multiply(const MatmulTask&): a product of f32 matrices.
// scale(from, factor, to, count): to <- factor from. The caller has applied orthogonal_scale to x.
template <class Multiply, class Scale>
void newton_schulz(const OrthogonalizeTask& task, Multiply&& multiply, Scale&& scale) {
  const int64_t r = task.rows, c = task.columns, small = std::min(r, c);
  const int64_t count = r * c;
  if (count == 0) return;
  float* x = task.x;
  float* next = task.scratch;
  float* const gram = task.scratch + count;
  float* const poly = gram + small * small;
  const auto product = [&](int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, bool ta,
                           const float* b, int64_t ldb, bool tb, float factor, float* target,
                           bool keep) {
    MatmulTask t = {};
    t.m = m, t.n = n, t.k = k;
    t.a = a, t.lda = lda, t.transpose_a = ta;
    t.b = b, t.ldb = ldb, t.transpose_b = tb;
    t.dtype = GA_F32, t.target = target, t.scale = static_cast<double>(factor), t.keep = keep;
    multiply(t);
  };
  for (int step = 0; step < task.steps; ++step) {
    if (r <= c)
      product(r, r, c, x, c, false, x, c, true, 1, gram, false);
    else  // X' X is smaller: apply the polynomial from the right
      product(c, c, r, x, c, true, x, c, false, 1, gram, false);
    scale(gram, task.b, poly, small * small);
    product(small, small, small, gram, small, false, gram, small, false, task.c, poly, true);
    scale(x, task.a, next, count);
    if (r <= c)
      product(r, c, r, poly, r, false, x, c, false, 1, next, true);
    else
      product(r, c, c, x, c, false, poly, c, false, 1, next, true);
    std::swap(x, next);
  }
}

}  // namespace ga
