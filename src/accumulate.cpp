// SPDX-License-Identifier: Apache-2.0
// Contributions to a window. Every function checks all it was given first, then makes its pass over
// the data, then records what has changed; so a call that fails has changed nothing. Only a pass
// that breaks off half-way leaves the accumulators unknown, and the window invalid.
#include <cmath>

#include "context.hpp"
#include "error.hpp"
#include "tensor.hpp"

namespace ga {

Micro Context::make_micro(double weight, const double* scale) const {
  const Micro m = {weight, scale ? *scale : config_.loss_scale};
  if (!(m.weight >= 0) || !std::isfinite(m.weight))
    fail(GA_ERROR_INVALID_ARGUMENT, "weight was %g, expected a finite number >= 0", m.weight);
  if (!std::isfinite(m.loss_scale) || m.loss_scale == 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "loss scale was %g, expected a finite number other than 0",
         m.loss_scale);
  return m;
}

float Context::contribution_scale(const Micro& m) const {
  const double weight = config_.gradient_kind == GA_GRADIENT_MEAN ? m.weight : 1;
  return static_cast<float>(weight / m.loss_scale);
}

void Context::check_gradient(ga_param id, const void* gradient) {
  Param& p = params_[static_cast<size_t>(id)];
  if (p.held == Held::kAdopted && gradient == p.adopted.data && p.count > 0)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "parameter \"%s\": its second gradient in this window came at %p, where its first still "
         "lives (GA_GRADIENTS_LIVE)",
         name(id), gradient);
  if (gradient == p.checked) return;
  const int32_t size = dtype_info(p.gradient_dtype).size;
  if (reinterpret_cast<uintptr_t>(gradient) % static_cast<uintptr_t>(size) != 0)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "parameter \"%s\": its gradient was at address %p, expected a multiple of its element, %d "
         "bytes",
         name(id), gradient, size);
  if (const Range* r = overlap(gradient, p.count * size, -1))
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": its gradient at %p overlaps %s%s%s",
         name(id), gradient, r->param < 0 ? "memory of the library" : "parameter \"",
         r->param < 0 ? "" : name(r->param), r->param < 0 ? "" : "\"");
  p.checked = gradient;
}

// One contribution: a task over the data and what it makes of the parameter. Checks are behind it;
// if the pass fails, the window is invalid and none of this is looked at again.
void Context::plan(Param& p, const void* gradient, float scale) {
  if (p.held == Held::kNothing && config_.gradient_life == GA_GRADIENTS_LIVE) {
    p.held = Held::kAdopted;
    p.adopted = {gradient, p.gradient_dtype, scale};
    return;
  }
  AccumulateTask& task = accumulate_tasks_.add();
  task.target = p.accumulator;
  task.count = p.count;
  task.partials = p.partials;
  task.keep = p.held == Held::kStored;
  task.sources = 1;
  Source* source = &task.source[0];
  if (p.held == Held::kAdopted) {
    *source++ = p.adopted;
    task.sources = 2;
  }
  source->data = gradient;
  source->dtype = p.gradient_dtype;
  source->scale = scale;
  p.held = Held::kStored;
  p.stale = false;  // new partials come with what is stored
}

template <class Work>
void Context::or_invalidate(Work&& work) {
  try {
    work();
  } catch (const std::exception& e) {
    window_.invalidate();
    throw Error(GA_ERROR_FAULT, e.what());
  }
}

void Context::accumulate(const void* const* gradients, size_t count, double weight,
                         const double* scale) {
  const Micro micro = make_micro(weight, scale);
  window_.check_whole();
  if (count != blocks_.size())
    fail(GA_ERROR_INVALID_ARGUMENT,
         "count was %zu, but the context has %zu: one gradient pointer for each ga_param_add and "
         "each ga_params_add_flat",
         count, blocks_.size());
  if (count > 0 && !gradients && micro.weight > 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "gradients was NULL");
  prepare();
  window_.reserve_one();

  accumulate_tasks_.clear();
  if (micro.weight > 0) {
    const auto each = [&](auto&& body) {
      for (size_t b = 0; b < count; ++b)
        if (gradients[b])
          for (ga_param id = blocks_[b].first; id < blocks_[b].first + blocks_[b].count; ++id)
            if (Param& p = params_[static_cast<size_t>(id)]; !p.frozen)
              body(id, p,
                   static_cast<const char*>(gradients[b]) +
                       p.offset * dtype_info(p.gradient_dtype).size);
    };
    each([&](ga_param id, Param&, const void* gradient) { check_gradient(id, gradient); });
    const float scale = contribution_scale(micro);
    each([&](ga_param, Param& p, const void* gradient) { plan(p, gradient, scale); });
  }
  forget_delivered();
  or_invalidate([&] { backend_->accumulate(accumulate_tasks_.span()); });
  window_.add(micro);
}

void Context::micro_begin(int64_t index, double weight, const double* scale) {
  const Micro micro = make_micro(weight, scale);
  prepare();
  window_.reserve_one();
  window_.begin(index, micro);
  forget_delivered();
}

// The parameter of a call that contributes to the open micro-batch.
Context::Param& Context::part(ga_param id, const char* what) {
  window_.check_part(what);
  Param& p = param(id);
  if (p.acquired)
    fail(GA_ERROR_INVALID_STATE,
         "%s: the accumulator of parameter \"%s\" is handed out; ga_accumulator_release is due",
         what, name(id));
  return p;
}

void Context::accumulate_part(ga_param id, const void* gradient) {
  Param& p = part(id, "ga_accumulate_part");
  const Micro& micro = window_.open_micro();
  if (micro.weight == 0 || p.frozen) return;
  if (!gradient && p.count > 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": its gradient was NULL", name(id));
  check_gradient(id, gradient);
  accumulate_tasks_.clear();
  plan(p, gradient, contribution_scale(micro));
  or_invalidate([&] { backend_->accumulate(accumulate_tasks_.span()); });
}

// Copies an adopted gradient where someone else is about to add to it.
void Context::store_adopted(ga_param id) {
  Param& p = params_[static_cast<size_t>(id)];
  if (p.held != Held::kAdopted) return;
  const AccumulateTask task = {p.accumulator, p.count, p.partials, {p.adopted, {}}, 1, false};
  or_invalidate([&] { backend_->accumulate({&task, 1}); });
  p.held = Held::kStored;
  p.stale = false;
}

void Context::accumulate_matmul(ga_param id, int64_t k, const void* a, int64_t lda,
                                bool transpose_a, const void* b, int64_t ldb, bool transpose_b,
                                int32_t dtype) {
  Param& p = part(id, "ga_accumulate_matmul");
  if (dtype_info(dtype).size == 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": dtype was %d, expected a ga_dtype", name(id),
         dtype);
  if (!dtype_info(dtype).supported)
    fail(GA_ERROR_UNSUPPORTED, "parameter \"%s\": dtype was %s, this version multiplies f32",
         name(id), dtype_info(dtype).name);
  const int64_t m = tensors_[static_cast<size_t>(id)].rows;
  const int64_t n = m > 0 ? p.count / m : 0;
  if (k < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": k was %lld, expected >= 0", name(id),
         static_cast<long long>(k));
  const auto check_matrix = [&](const char* which, const void* data, int64_t rows, int64_t columns,
                                int64_t ld) {
    if (rows == 0 || columns == 0) return;
    if (ld < columns)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "parameter \"%s\": ld%s was %lld, but a row of %s has %lld elements", name(id), which,
           static_cast<long long>(ld), which, static_cast<long long>(columns));
    if (!data) fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": %s was NULL", name(id), which);
    const int32_t size = dtype_info(dtype).size;
    if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(size) != 0)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "parameter \"%s\": %s was at address %p, expected a multiple of its element, %d bytes",
           name(id), which, data, size);
    int64_t elements;
    if (__builtin_mul_overflow(rows - 1, ld, &elements) ||
        __builtin_add_overflow(elements, columns, &elements) || elements > INT64_MAX / size)
      fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": %s has more elements than memory can hold",
           name(id), which);
    if (overlap(data, elements * size, -1))
      fail(GA_ERROR_INVALID_ARGUMENT,
           "parameter \"%s\": %s at %p overlaps a parameter or memory of the library", name(id),
           which, data);
  };
  check_matrix("a", a, transpose_a ? k : m, transpose_a ? m : k, lda);
  check_matrix("b", b, transpose_b ? n : k, transpose_b ? k : n, ldb);
  backend_->prepare_matmul();
  const Micro& micro = window_.open_micro();
  if (micro.weight == 0 || p.frozen) return;
  store_adopted(id);
  const MatmulTask task = {m,
                           n,
                           k,
                           static_cast<const float*>(a),
                           lda,
                           transpose_a,
                           static_cast<const float*>(b),
                           ldb,
                           transpose_b,
                           p.accumulator,
                           p.partials,
                           contribution_scale(micro),
                           p.held == Held::kStored};
  bool has_partials = true;
  if (p.count > 0) or_invalidate([&] { has_partials = backend_->matmul(task); });
  p.held = Held::kStored;
  p.stale = !has_partials;
}

ga_accumulator Context::acquire(ga_param id) {
  Param& p = part(id, "ga_accumulator_acquire");
  const Micro& micro = window_.open_micro();
  ga_accumulator out = {};
  out.struct_size = sizeof out;
  out.dtype = GA_F32;
  out.rows = tensors_[static_cast<size_t>(id)].rows;
  out.columns = out.rows > 0 ? p.count / out.rows : 0;
  out.leading_dimension = out.columns;
  if (micro.weight > 0 && !p.frozen) {
    store_adopted(id);
    out.data = p.accumulator;
    out.alpha = contribution_scale(micro);
    out.beta = p.held == Held::kStored ? 1 : 0;
  }
  p.acquired = true;
  return out;
}

void Context::release(ga_param id) {
  window_.check_part("ga_accumulator_release");
  Param& p = param(id);
  if (!p.acquired)
    fail(GA_ERROR_INVALID_STATE, "parameter \"%s\": its accumulator was released, but not acquired",
         name(id));
  p.acquired = false;
  if (window_.open_micro().weight == 0 || p.frozen) return;
  p.held = Held::kStored;
  p.stale = true;
}

void Context::micro_end() {
  window_.check_part("ga_micro_end");
  for (size_t i = 0; i < params_.size(); ++i)
    if (params_[i].acquired)
      fail(GA_ERROR_INVALID_STATE,
           "ga_micro_end: the accumulator of parameter \"%s\" is still handed out; "
           "ga_accumulator_release is due",
           tensors_[i].name.c_str());
  window_.end();
}

}  // namespace ga
