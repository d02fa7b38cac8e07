// SPDX-License-Identifier: Apache-2.0
// Newton-Schulz iterations (OrthogonalizeTask) with the passes of any backend.
#pragma once

#include <utility>

#include "backend/tasks.hpp"

namespace ga {

// Engine has, run on the backend one after the other:
//
//   multiply(const MatmulTask&), combine(const Combination&)
//   pack(cut, x, first, count, to), unpack(cut, from, x, first, count): elements of the packed matrices,
//     as many from number `first` on
//   scales(run, eps, room, out): out[i] = reciprocal_norm() of matrix i
//   line_squares(run, of_columns, room, out): sums of squares of all rows, or of all columns
//   line_scales(out, count, eps): out[i] = reciprocal_norm(out[i])
//   variance_scales(task, first, matrices, ratios, out): takes the mean squares of the outputs of the matrices
//     from number `first` on into their variances, and makes of the sums of squares in out what outputs are
//     multiplied by; ratios: room for a number for each matrix
//   scale_lines(run, by_row, by_column): multiplies lines by numbers; either may be NULL
//
// room: for a number for each chunk of each matrix, or as many as there are elements.
template <class Engine>
class NewtonSchulz {
 public:
  // For `matrices` matrices from number `first` on. scratch: so many times OrthogonalizeTask::room().
  NewtonSchulz(const OrthogonalizeTask& task, Engine& engine, int64_t first, int64_t matrices,
               float* scratch)
      : task_(task),
        cut_(task.cut),
        engine_(engine),
        first_(first),
        matrices_(matrices),
        count_(matrices * cut_.size()),
        smalls_(matrices * cut_.small() * cut_.small()) {
    const auto take = [&scratch](int64_t floats) {
      return std::exchange(scratch, scratch + floats);
    };
    const auto numbers = [&](int64_t count) { return reinterpret_cast<double*>(take(2 * count)); };
    scales_ = numbers(matrices);
    rows_ = numbers(matrices * cut_.rows);
    columns_ = numbers(matrices * cut_.columns);
    next_ = take(count_);
    gram_ = take(smalls_);
    square_ = take(smalls_);
    x_ = cut_.axes > 0 ? take(count_) : task.x + first * cut_.size();
    narrow_ = reinterpret_cast<uint16_t*>(scratch);
  }

  void run() {
    if (count_ == 0) return;
    const int64_t first = first_ * cut_.size();
    if (cut_.axes > 0) engine_.pack(cut_, task_.x, first, count_, x_);
    if (task_.equilibrate != GA_EQUILIBRATE_NONE) equilibrate();
    if (task_.has_own_norms()) {
      // By both norms, the larger elements were, the smaller they are now.
      const bool inverse = task_.equilibrate == GA_EQUILIBRATE_BOTH;
      engine_.scales(packed(), inverse ? 0 : task_.eps, room(), scales_);
    }
    if (task_.precision == GA_PRECISION_BF16)
      run_in_bf16();
    else
      run_in_f32();
    if (task_.variances) divide_by_deviations();
    if (cut_.axes > 0) engine_.unpack(cut_, x_, task_.x, first, count_);
  }

 private:
  void run_in_f32() {
    float* const poly = square_;
    begin(nullptr);
    for (int step = 0; step < task_.steps; ++step) {
      const Coefficients t(task_, step);
      engine_.multiply(product_with_itself(x_, GA_F32));
      combine({t.b, nullptr, gram_, GA_F32, 0, nullptr, poly, nullptr}, smalls_);
      engine_.multiply(square(gram_, GA_F32, poly, t.c, true));
      combine({t.a, nullptr, x_, GA_F32, 0, nullptr, next_, nullptr}, count_);
      engine_.multiply(product_of(poly, x_, GA_F32, true));
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
    uint16_t* const x16 = narrow_;
    uint16_t* const small16 = x16 + count_;  // G, then the polynomial
    begin(x16);
    for (int step = 0; step < task_.steps; ++step) {
      const Coefficients t(task_, step);
      engine_.multiply(product_with_itself(x16, GA_BF16));
      combine({1, nullptr, gram_, GA_F32, 0, nullptr, nullptr, small16}, smalls_);
      engine_.multiply(square(small16, GA_BF16, square_, 1, false));
      combine({t.b, nullptr, small16, GA_BF16, t.c, square_, gram_, small16}, smalls_);
      engine_.multiply(product_of(small16, x16, GA_BF16, false));
      const bool last = step + 1 == task_.steps;
      combine({t.a, nullptr, x_, GA_F32, 1, next_, next_, last ? nullptr : x16}, count_);
      std::swap(x_, next_);
    }
  }

  struct Coefficients {
    Coefficients(const OrthogonalizeTask& task, int step)
        : a(static_cast<float>(task.table[step][0])),
          b(static_cast<float>(task.table[step][1])),
          c(static_cast<float>(task.table[step][2])) {}
    float a, b, c;
  };

  MatrixRun packed() const { return {x_, matrices_, cut_.rows, cut_.columns}; }
  // The other X is free before and after the iterations.
  double* room() const { return reinterpret_cast<double*>(next_); }

  void equilibrate() {
    const bool both = task_.equilibrate == GA_EQUILIBRATE_BOTH;
    const bool outputs = task_.equilibrate == GA_EQUILIBRATE_OUTPUTS;
    double* const by_row = both || outputs != cut_.transposed ? rows_ : nullptr;
    double* const by_column = both || outputs == cut_.transposed ? columns_ : nullptr;
    if (by_row) engine_.line_squares(packed(), false, room(), by_row);
    if (by_column) engine_.line_squares(packed(), true, room(), by_column);
    if (by_row) engine_.line_scales(by_row, matrices_ * cut_.rows, task_.eps);
    if (by_column) engine_.line_scales(by_column, matrices_ * cut_.columns, task_.eps);
    engine_.scale_lines(packed(), by_row, by_column);
  }

  // Of beta2.
  void divide_by_deviations() {
    double* const out = cut_.transposed ? columns_ : rows_;
    engine_.line_squares(packed(), cut_.transposed, room(), out);
    engine_.variance_scales(task_, first_, matrices_, scales_, out);
    engine_.scale_lines(packed(), cut_.transposed ? nullptr : out, cut_.transposed ? out : nullptr);
  }

  // X <- X / norm. Each step ends in the other place, and the last one is to end where X is now.
  void begin(uint16_t* x16) {
    const double* const scales = task_.has_own_norms() ? scales_ : &task_.plan->orthogonal_scale;
    if (task_.steps % 2 != 0) std::swap(x_, next_);
    const float* const from = task_.steps % 2 != 0 ? next_ : x_;
    combine({1, scales, from, GA_F32, 0, nullptr, x_, x16}, count_);
  }

  void combine(Combination pass, int64_t count) {
    pass.count = count;
    pass.each = cut_.size();
    engine_.combine(pass);
  }

  bool is_wide() const { return cut_.rows <= cut_.columns; }

  // X X', or X' X if that is smaller; then the polynomial is applied from the right.
  MatmulTask product_with_itself(const void* x, int32_t dtype) const {
    MatmulTask t = {};
    t.m = t.n = cut_.small(), t.k = cut_.size() / t.m;
    t.a = t.b = x, t.lda = t.ldb = cut_.columns, t.a_stride = t.b_stride = cut_.size();
    (is_wide() ? t.transpose_b : t.transpose_a) = true;
    t.symmetric = true;
    return to(t, dtype, gram_, 1, false);
  }
  MatmulTask square(const void* matrix, int32_t dtype, float* target, float scale,
                    bool keep) const {
    MatmulTask t = {};
    t.m = t.n = t.k = t.lda = t.ldb = cut_.small();
    t.a = t.b = matrix, t.a_stride = t.b_stride = t.m * t.m;
    t.symmetric = true;
    return to(t, dtype, target, scale, keep);
  }
  MatmulTask product_of(const void* poly, const void* x, int32_t dtype, bool keep) const {
    const int64_t small = cut_.small() * cut_.small();
    MatmulTask t = {};
    t.m = cut_.rows, t.n = cut_.columns, t.k = cut_.small();
    t.a = is_wide() ? poly : x, t.lda = t.k, t.a_stride = is_wide() ? small : cut_.size();
    t.b = is_wide() ? x : poly, t.ldb = t.n, t.b_stride = is_wide() ? cut_.size() : small;
    return to(t, dtype, next_, 1, keep);
  }
  MatmulTask to(MatmulTask t, int32_t dtype, float* target, float scale, bool keep) const {
    t.dtype = dtype, t.tf32 = task_.precision == GA_PRECISION_TF32;
    t.target = target, t.scale = static_cast<double>(scale), t.keep = keep;
    t.batch = matrices_, t.target_stride = t.m * t.n;
    return t;
  }

  const OrthogonalizeTask& task_;
  const Cut& cut_;
  Engine& engine_;
  const int64_t first_, matrices_, count_, smalls_;
  double *scales_, *rows_, *columns_;
  float *x_, *next_, *gram_, *square_;
  uint16_t* narrow_;
};

}  // namespace ga
