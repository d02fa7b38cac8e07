// SPDX-License-Identifier: Apache-2.0
// Gradients that are matrix products, and accumulators that the program writes itself.

#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/preparation.hpp"
#include "window/accumulator.hpp"

namespace ga {

void Accumulator::accumulate_matmul(ga_param id, int64_t k, const void* a, int64_t lda,
                                    bool transpose_a, const void* b, int64_t ldb, bool transpose_b,
                                    int32_t dtype) {
  Param& p = part(id, "ga_accumulate_matmul");
  ++latest_;
  const Subject of = model_.params.subject(id);
  const DtypeInfo info = dtype_info(dtype);
  if (info.size == 0)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "dtype was %d, expected a ga_dtype", dtype);
  if (dtype != GA_F32 && dtype != GA_F16 && dtype != GA_BF16)
    of.fail(GA_ERROR_UNSUPPORTED, "dtype was %s, but products are of f32, f16 or bf16", info.name);
  if (p.accumulator_dtype != GA_F32)
    of.fail(GA_ERROR_UNSUPPORTED,
            "products are added to f32 accumulators, but its accumulator is %s",
            dtype_info(p.accumulator_dtype).name);
  refuse(id, "ga_accumulate_matmul", true);
  const int64_t m = model_.params.tensor(id).rows;
  const int64_t n = m > 0 ? p.count / m : 0;
  if (k < 0) of.fail(GA_ERROR_INVALID_ARGUMENT, "k was %lld, expected >= 0", ll(k));
  const auto check_matrix = [&](const char* which, const void* data, int64_t rows, int64_t columns,
                                int64_t ld) {
    if (rows == 0 || columns == 0) return;
    if (ld < columns)
      of.fail(GA_ERROR_INVALID_ARGUMENT, "ld%s was %lld, but a row of %s has %lld elements", which,
              ll(ld), which, ll(columns));
    if (!data) of.fail(GA_ERROR_INVALID_ARGUMENT, "%s was NULL", which);
    int64_t elements;
    if (__builtin_mul_overflow(rows - 1, ld, &elements) ||
        __builtin_add_overflow(elements, columns, &elements) || elements > INTPTR_MAX / info.size)
      of.fail(GA_ERROR_INVALID_ARGUMENT, "%s has more elements than memory can hold", which);
    model_.ranges.check(model_.params.subject(id), which, data, elements, info.size);
    check_alive(id, which, data, elements * info.size);
  };
  check_matrix("a", a, transpose_a ? k : m, transpose_a ? m : k, lda);
  check_matrix("b", b, transpose_b ? n : k, transpose_b ? k : n, ldb);
  const Micro& micro = model_.window.open_micro();
  if (!reads(micro) || p.frozen) return;
  model_.backend->prepare_matmul(dtype == GA_F32 ? 0 : k * (m + n), GA_PRECISION_F32);
  preparation_.prepare();
  added_ = true;
  store_borrowed(id);
  make_dense(id);
  MatmulTask task = {};
  task.m = m, task.n = n, task.k = k;
  task.a = a, task.lda = lda, task.transpose_a = transpose_a;
  task.b = b, task.ldb = ldb, task.transpose_b = transpose_b;
  task.dtype = dtype;
  task.target = static_cast<float*>(p.accumulator);
  task.partials = p.partials;
  const Source scale = contribution(nullptr, GA_F32, micro);
  task.scale = scale.scale;
  task.divisor = scale.divisor;
  task.keep = p.held() == Held::kStored;
  bool has_partials = true;
  if (p.count > 0)
    model_.window.or_invalidate([&] { has_partials = model_.backend->matmul(task); });
  p.hold(Held::kStored);
  p.window.stale = !has_partials;
}

ga_accumulator Accumulator::acquire(ga_param id) {
  Param& p = part(id, "ga_accumulator_acquire");
  refuse(id, "ga_accumulator_acquire", true);
  const Micro& micro = model_.window.open_micro();
  ga_accumulator out = {};
  out.struct_size = sizeof out;
  out.dtype = p.accumulator_dtype;
  out.rows = model_.params.tensor(id).rows;
  out.columns = out.rows > 0 ? p.count / out.rows : 0;
  out.leading_dimension = out.columns;
  if (reads(micro) && !p.frozen) {
    preparation_.prepare();
    added_ = true;
    store_borrowed(id);
    make_dense(id);
    out.data = p.accumulator;
    const double scale = micro.loss_scale == 0 ? model_.loss_scale() : micro.loss_scale;
    out.alpha = contribution(nullptr, GA_F32, {micro.weight, scale}).scale;
    out.beta = p.held() == Held::kStored ? 1 : 0;
  }
  p.window.acquired = true;
  return out;
}

void Accumulator::release(ga_param id) {
  model_.window.check_part("ga_accumulator_release");
  Param& p = model_.params.get(id);
  if (!p.window.acquired)
    model_.params.subject(id).fail(GA_ERROR_INVALID_STATE,
                                   "its accumulator was released, but not acquired");
  p.window.acquired = false;
  if (!reads(model_.window.open_micro()) || p.frozen) return;
  p.hold(Held::kStored);
  p.window.stale = true;
}

}  // namespace ga
