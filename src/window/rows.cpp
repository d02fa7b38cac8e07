// SPDX-License-Identifier: Apache-2.0
// Gradients that have rows of a parameter alone, such as those of an embedding.
#include <algorithm>

#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/preparation.hpp"
#include "model/table_writer.hpp"
#include "window/accumulator.hpp"

namespace ga {

void Accumulator::make_dense(ga_param id) {
  Param& p = model_.params[id];
  if (p.held() != Held::kRows) return;
  FinishTask task = {};
  task.gradient = identity(writer_.source_of(id));
  task.f64 = p.f64;
  task.target = writer_.target_of(id);
  task.count = p.count;
  model_.window.or_invalidate([&] { model_.backend->finish({&task, 1}); });
  model_.backend->clear_rows({&model_.params.tensor(id).set, 1});
  p.hold(Held::kStored);
  p.window.stale = true;
}

void Accumulator::accumulate_rows(ga_param id, const void* indices, int32_t index_dtype,
                                  int64_t count, const void* values) {
  Param& p = part(id, "ga_accumulate_rows");
  ++latest_;
  const Tensor& t = model_.params.tensor(id);
  const Subject of = model_.params.subject(id);
  refuse(id, "ga_accumulate_rows", false);
  if (t.options.rows == GA_ROWS_NONE)
    of.fail(GA_ERROR_INVALID_ARGUMENT,
            "ga_accumulate_rows was called, but the parameter was added without "
            "ga_param_options.rows");
  if (index_dtype != GA_I32 && index_dtype != GA_I64)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "index_dtype was %d, expected GA_I32 or GA_I64",
            index_dtype);
  const int64_t columns = t.rows > 0 ? p.count / t.rows : 0;
  const int32_t size = dtype_info(p.gradient_dtype).size;
  int64_t elements;
  if (count < 0 || __builtin_mul_overflow(count, std::max<int64_t>(columns, 1), &elements) ||
      elements > INTPTR_MAX / 8)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "count was %lld, expected a number of rows", ll(count));
  elements = count * columns;
  if (count > 0 && (!indices || (!values && elements > 0)))
    of.fail(GA_ERROR_INVALID_ARGUMENT, "%s was NULL", indices ? "values" : "indices");
  const Micro& micro = model_.window.open_micro();
  if (!reads(micro) || p.frozen) return;
  const int32_t index_size = dtype_info(index_dtype).size;
  model_.ranges.check(model_.params.subject(id), "indices", indices, count, index_size);
  model_.ranges.check(model_.params.subject(id), "values", values, elements, size);
  check_alive(id, "indices", indices, count * index_size);
  check_alive(id, "values", values, elements * size);

  const Contribution c = {latest_, id,    p.gradient_dtype, values, elements,
                          indices, count, index_dtype};
  const Source rows = contribution(values, p.gradient_dtype, micro);
  const int64_t wrong = model_.backend->check_rows(rows_task(c, rows));
  if (wrong >= 0)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "indices[%lld] was %lld, but it has rows 0 to %lld",
            ll(wrong),
            index_dtype == GA_I32 ? static_cast<const int32_t*>(indices)[wrong]
                                  : ll(static_cast<const int64_t*>(indices)[wrong]),
            ll(t.rows - 1));
  preparation_.prepare();
  model_.backend->prepare_rows(rows_task(c, rows), model_.options.deferring() ? rows_held_ : 0);
  rows_held_ += count;
  if (model_.options.deferring())
    defer(c);
  else
    add_rows(c, rows, nullptr);
}

RowsTask Accumulator::rows_task(ga_param id, const void* indices, int32_t index_dtype, int64_t rows,
                                const Source& values) const {
  const Param& p = model_.params[id];
  const Tensor& t = model_.params.tensor(id);
  RowsTask task = {};
  task.target = {p.accumulator, p.accumulator_dtype};
  task.rows = t.rows;
  task.columns = t.rows > 0 ? p.count / t.rows : 0;
  task.set = t.set;
  task.dense = p.held() == Held::kStored || p.held() == Held::kBorrowed;
  task.indices = indices;
  task.index_dtype = index_dtype;
  task.count = rows;
  task.values = values;
  return task;
}

void Accumulator::add_rows(const Contribution& c, const Source& values, const MicroPlan* plan) {
  Param& p = model_.params[c.param];
  added_ = true;
  store_borrowed(c.param);
  RowsTask task = rows_task(c, values);
  task.plan = plan;
  if (p.count > 0) model_.window.or_invalidate([&] { model_.backend->accumulate_rows(task); });
  if (task.dense)
    p.window.stale = true;
  else
    p.hold(task.set ? Held::kRows : Held::kStored);
}

}  // namespace ga
