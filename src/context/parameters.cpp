// SPDX-License-Identifier: Apache-2.0
#include "context/parameters.hpp"

#include <algorithm>

#include "backend/codes.hpp"
#include "batchnorm/batchnorm.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "files/safetensors.hpp"
#include "model/table_writer.hpp"
#include "window/accumulator.hpp"

namespace ga {
namespace {

Subject subject_of(const NewParam& e) { return {"parameter", e.name}; }

// The number of elements of a tensor; throws if the shape is invalid or larger than an address
// space.
int64_t element_count(const NewParam& e, int32_t element_size) {
  const Subject of = subject_of(e);
  if (e.rank < 0 || e.rank > safetensors::kMostDimensions)  // the most that a state file can hold
    of.fail(GA_ERROR_INVALID_ARGUMENT, "rank was %d, expected 0 to %lld", e.rank,
            ll(safetensors::kMostDimensions));
  if (e.rank > 0 && !e.shape)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "shape was NULL, but rank is %d", e.rank);
  int64_t count = 1;
  bool too_large = false;
  for (int32_t d = 0; d < e.rank; ++d) {
    if (e.shape[d] < 0)
      of.fail(GA_ERROR_INVALID_ARGUMENT, "dimension %d was %lld, expected >= 0", d, ll(e.shape[d]));
    too_large = too_large || __builtin_mul_overflow(count, e.shape[d], &count);
  }
  if (std::find(e.shape, e.shape + e.rank, 0) != e.shape + e.rank) return 0;
  intptr_t bytes;
  if (too_large || __builtin_mul_overflow(count, element_size, &bytes))
    of.fail(GA_ERROR_INVALID_ARGUMENT, "its shape has more elements than memory can hold");
  return count;
}

int32_t check_dtype(const Subject& of, const char* what, int32_t dtype) {
  const DtypeInfo info = dtype_info(dtype);
  if (info.size == 0)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "%s was %d, expected a ga_dtype", what, dtype);
  if (!info.floating)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "%s was %s, which is for indices", what, info.name);
  return info.size;
}

}  // namespace

void Parameters::check_data(const char* tensor, const void* data, int64_t count, int32_t size,
                            ga_param self) const {
  if (count == 0) return;
  const Subject of = {"parameter", tensor};
  if (!data)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "data was NULL, but it has %lld elements", ll(count));
  const int64_t bytes = count * size;
  if (static_cast<uintptr_t>(bytes) > UINTPTR_MAX - reinterpret_cast<uintptr_t>(data))
    of.fail(GA_ERROR_INVALID_ARGUMENT,
            "its %lld elements at address %p reach past the end of memory", ll(count), data);
  model_.ranges.check_readable(of, "its data", data, count, size);
  model_.ranges.check_disjoint(of, "its data", data, bytes, self);
}

// Checks how the parameter is cut into matrices.
void Parameters::check_cut(const Subject& of, const NewParam& e) {
  const ga_param_options& o = e.options;
  const auto in = [&](const char* field, int32_t value, int32_t first, int32_t last) {
    if (value < first || value > last)
      of.fail(GA_ERROR_INVALID_ARGUMENT, "%s was %d, expected %d to %d, since its rank is %d",
              field, value, first, last, e.rank);
  };
  if (o.cut_matrices != 0 && o.cut_matrices != 1)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "cut_matrices was %d, expected 0 or 1", o.cut_matrices);
  if (!o.cut_matrices) {
    if (o.batch_axes || o.output_axis || o.split_axis || o.matrix_parts)
      of.fail(GA_ERROR_INVALID_ARGUMENT,
              "cut_matrices was 0, but batch_axes, output_axis, split_axis and matrix_parts were "
              "%d, %d, %d and %d, expected 0",
              o.batch_axes, o.output_axis, o.split_axis, o.matrix_parts);
    return;
  }
  if (e.rank < 2)
    of.fail(GA_ERROR_INVALID_ARGUMENT,
            "cut_matrices was 1, but its rank is %d, and a matrix has two axes", e.rank);
  in("batch_axes", o.batch_axes, 0, e.rank - 2);
  in("output_axis", o.output_axis, o.batch_axes, e.rank - 1);
  if (o.matrix_parts < 0)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "matrix_parts was %d, expected >= 0", o.matrix_parts);
  if (o.matrix_parts == 0 && o.split_axis != 0)
    of.fail(GA_ERROR_INVALID_ARGUMENT,
            "split_axis was %d, but matrix_parts was 0, so that no axis is split", o.split_axis);
  if (o.matrix_parts == 0) return;
  in("split_axis", o.split_axis, o.batch_axes, e.rank - 1);
  if (e.shape[o.split_axis] % o.matrix_parts != 0)
    of.fail(
        GA_ERROR_INVALID_ARGUMENT,
        "matrix_parts was %d, but its axis %d has %lld elements, which do not divide into so many "
        "equal parts",
        o.matrix_parts, o.split_axis, ll(e.shape[o.split_axis]));
}

// Checks that dtypes and options of a parameter fit each other and the group's optimizer.
void Parameters::check_options(const NewParam& e, int32_t dtype, int64_t elements) const {
  const ga_param_options& o = e.options;
  const Group& g = model_.params.group(e.group);
  const OptimizerInfo& info = *g.info;
  const Subject of = subject_of(e);
  const auto choice = [&](const char* field, int32_t value, int32_t last, const char* type) {
    if (value < 0 || value > last)
      of.fail(GA_ERROR_INVALID_ARGUMENT, "%s was %d, expected 0 to %d (%s)", field, value, last,
              type);
  };
  const auto refuse = [&](const char* what) { of.fail(GA_ERROR_UNSUPPORTED, "%s", what); };
  choice("master", o.master, GA_MASTER_NONE, "ga_master");
  choice("rounding", o.rounding, GA_ROUND_STOCHASTIC, "ga_rounding");
  choice("rows", o.rows, GA_ROWS_LAZY, "ga_rows");
  if (e.rank < 32 && o.agc_axes >> std::max(e.rank, 0) != 0)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "agc_axes was 0x%x, but its rank is %d: it has axes 0 to %d",
            o.agc_axes, e.rank, e.rank - 1);
  const bool f64 = dtype == GA_F64;
  if (!f64 && o.gradient_dtype == GA_F64)
    refuse("gradient_dtype was f64, which is for f64 parameters");
  if (f64 ? o.accumulator_dtype != 0 && o.accumulator_dtype != GA_F64
          : o.accumulator_dtype == GA_F64)
    refuse(f64 ? "accumulator_dtype was not f64, but its dtype is f64"
               : "accumulator_dtype was f64, which is for f64 parameters");
  model_.ranks->check_options(of, o);
  if (f64 && g.optimizer.state_dtype != 0)
    refuse("its dtype is f64, but its group has a state_dtype");
  if (f64 && model_.options.ema && model_.options.ema->dtype == GA_BF16)
    refuse("its dtype is f64, but the dtype of the EMA is bf16");
  if (o.reduce != 0 && o.reduce != GA_REDUCE_MAX)
    of.fail(GA_ERROR_INVALID_ARGUMENT,
            "reduce was %d, expected GA_REDUCE_MAX, or 0 for that of the context "
            "(ga_config.reduce)",
            o.reduce);
  choice("write_early", o.write_early, 1, "0 or 1");
  if (o.write_early && (dtype_info(dtype).size != 2 || o.master != GA_MASTER_F32 ||
                        g.optimizer.kind == GA_OPTIMIZER_EXTERNAL))
    refuse("write_early was 1, but the library keeps no master weights of it");
  if (o.write_early && o.rounding != GA_ROUND_NEAREST)
    refuse("write_early was 1, but it is not rounded to nearest");
  choice("follow_data", o.follow_data, 1, "0 or 1");
  if (o.follow_data && o.rounding != GA_ROUND_NEAREST && o.master == GA_MASTER_F32)
    refuse(
        "follow_data was 1, but it is rounded stochastically, so that what the program has written "
        "looks like what was rounded; ga_param_changed tells of it");
  if (o.reduce == GA_REDUCE_MAX) {
    if (g.optimizer.kind != GA_OPTIMIZER_EXTERNAL)
      of.fail(GA_ERROR_UNSUPPORTED,
              "reduce was GA_REDUCE_MAX, but its group has the optimizer %s; maxima are for "
              "GA_OPTIMIZER_EXTERNAL, whose programs read them with ga_gradient",
              info.name);
    if (o.rows != GA_ROWS_NONE) refuse("reduce was GA_REDUCE_MAX, but rows was set");
  }
  check_cut(of, e);
  if (info.matrices_only && (!(e.rank == 2 || o.cut_matrices) || f64))
    of.fail(GA_ERROR_UNSUPPORTED,
            "%s is for matrices, but its rank is %d and its dtype %s; a group with another "
            "optimizer may take it%s",
            info.name, e.rank, dtype_info(dtype).name,
            e.rank > 2 && !f64
                ? ", or ga_param_options.cut_matrices may say how it is cut into some"
                : "");
  const bool lent = model_.config.gradient_life == GA_GRADIENTS_LENT;
  if (lent && model_.config.accumulation == GA_ACCUMULATE_COMPENSATED &&
      (o.accumulator_dtype == GA_F16 || o.accumulator_dtype == GA_BF16))
    refuse("its accumulator is compensated, but ga_config.gradient_life is GA_GRADIENTS_LENT");
  if (o.rows == GA_ROWS_NONE) return;
  if (lent) refuse("rows was set, but ga_config.gradient_life is GA_GRADIENTS_LENT");
  if (e.rank < 1) refuse("rows was set, but its rank is 0");
  if (o.accumulator_dtype == GA_F16 || o.accumulator_dtype == GA_BF16)
    refuse("rows was set, but its accumulator has 16 bits");
  if (model_.config.accumulation != GA_ACCUMULATE_PLAIN)
    refuse("rows was set, but ga_config.accumulation is not GA_ACCUMULATE_PLAIN");
  if (o.rows == GA_ROWS_LAZY && !info.lazy(g.optimizer))
    of.fail(GA_ERROR_UNSUPPORTED,
            "rows was GA_ROWS_LAZY, but its group's optimizer, %s%s, moves every element in every "
            "step",
            info.name, g.optimizer.dampening != 0 ? " with dampening" : "");
  const int op = g.op[e.rank >= 2 ? 1 : 0];
  const int64_t columns = e.shape && e.shape[0] > 0 ? elements / e.shape[0] : 0;
  if (o.rows == GA_ROWS_LAZY && g.optimizer.state_dtype == GA_STATE_8BIT && elements > kMostSmall &&
      op >= 0 && has_codes(op_info(op).codes) && block_of_rows(columns) == 0)
    of.fail(GA_ERROR_UNSUPPORTED,
            "rows was GA_ROWS_LAZY and its group's state is GA_STATE_8BIT, whose blocks do not lie "
            "in two rows, so that a row has a multiple of %d elements, but it has %lld",
            kLeastBlock, ll(columns));
  if (e.shape && e.shape[0] > static_cast<int64_t>(UINT32_MAX))
    refuse("rows was set, but it has more than 2^32 - 1 rows");
}

ga_param Parameters::add(void* data, int32_t dtype, Span<const NewParam> entries) {
  const size_t count = entries.size;
  model_.window.check_empty("a function that adds parameters");
  if (count > static_cast<size_t>(INT32_MAX) - model_.params.size())
    fail(GA_ERROR_INVALID_ARGUMENT, "the context would have more than %d parameters", INT32_MAX);
  const size_t old_params = model_.params.size();
  try {
    model_.params.make_room(count);
    model_.ranges.reserve_more(count);
    for (size_t i = 0; i < count; ++i) {
      const NewParam& e = entries.data[i];
      const ga_param_options& options = e.options;
      const Subject of = subject_of(e);
      if (!e.name || !*e.name)
        fail(GA_ERROR_INVALID_ARGUMENT, "parameter %zu: its name was %s", old_params + i,
             e.name ? "empty" : "NULL");
      if (model_.params.find(e.name) >= 0)
        of.fail(GA_ERROR_INVALID_ARGUMENT, "the context has a parameter of that name already");
      stages_.layers.check_name(of, e.name);
      model_.params.group(e.group);
      const int32_t size = check_dtype(of, "dtype", dtype);
      const int32_t gradient_dtype = options.gradient_dtype ? options.gradient_dtype : dtype;
      check_dtype(of, "gradient_dtype", gradient_dtype);
      if (i > 0 && gradient_dtype != model_.params[old_params].gradient_dtype)
        of.fail(GA_ERROR_UNSUPPORTED,
                "gradient_dtype was %s, but that of \"%s\" in the same block is %s",
                dtype_info(gradient_dtype).name, entries.data[0].name,
                dtype_info(model_.params[old_params].gradient_dtype).name);
      if (options.accumulator_dtype)
        check_dtype(of, "accumulator_dtype", options.accumulator_dtype);
      const int64_t elements = element_count(e, std::max(size, 4));
      check_options(e, dtype, elements);
      if (e.offset < 0 || e.offset > INTPTR_MAX / size - elements)
        of.fail(GA_ERROR_INVALID_ARGUMENT, "offset was %lld, expected >= 0", ll(e.offset));
      char* const at = data ? static_cast<char*>(data) + e.offset * size : nullptr;
      check_data(e.name, at, elements, size, -1);
      const ga_param id = model_.params.add(e, at, dtype, elements);
      if (model_.params.clip_of(model_.params[id]).scope == GA_CLIP_AGC)
        model_.params.units_axes(id);
      model_.ranges.add(at, static_cast<size_t>(elements * size), id);
    }
  } catch (...) {
    model_.params.drop_from(old_params);
    model_.ranges.remove_params_from(static_cast<ga_param>(old_params));
    throw;
  }
  model_.params.add_block(static_cast<ga_param>(old_params));
  stages_.writer.settings_changed(true);
  for (size_t i = old_params; i < model_.params.size(); ++i) {
    model_.arrays.look_for(model_.params[i]);
    model_.params.only_sums = model_.params.only_sums && is_sum(model_.params[i].reduction);
  }
  if (!model_.params.only_sums) model_.options.choose_path(model_.params);
  stages_.accumulator.forget_checks();
  return static_cast<ga_param>(old_params);
}

void Parameters::bind(ga_param id, void* data) {
  model_.window.check_empty("ga_param_bind");
  Param& p = model_.params.get(id);
  check_data(model_.params.name(id), data, p.count, dtype_info(p.dtype).size, id);
  const size_t bytes = data_bytes(p);
  model_.arrays.claim(id, data);
  if (p.count > 0) model_.ranges.remove(p.data);
  p.data = data;
  if (is_prepared(id)) stages_.writer.describe(static_cast<size_t>(id));
  model_.ranges.add(data, bytes, id);
  stages_.accumulator.forget_checks();
}

void Parameters::set_frozen(ga_param id, bool frozen) {
  model_.window.check_empty("ga_param_set_frozen");
  Param& p = model_.params.get(id);
  if (p.frozen == frozen) return;
  p.frozen = frozen;
  stages_.writer.settings_changed(true);
  model_.arrays.look_for(p);
  if (is_prepared(id)) stages_.writer.describe(static_cast<size_t>(id));
}

void Parameters::set_group_frozen(ga_group id, bool frozen) {
  model_.window.check_empty("ga_group_set_frozen");
  model_.params.group(id);
  for (size_t i = 0; i < model_.params.size(); ++i)
    if (model_.params[i].group == id && !model_.params.tensor(i).removed)
      set_frozen(static_cast<ga_param>(i), frozen);
}

void Parameters::set_scale(ga_param id, const char* name, double Tensor::*which, double scale) {
  model_.params.get(id);
  check_rate(name, scale);
  model_.check_settable();
  model_.params.tensor(id).*which = scale;
  stages_.writer.write_scales(static_cast<size_t>(id));
}

void Parameters::set_part(ga_param id, const int64_t* whole, const int64_t* first, int32_t copies) {
  model_.window.check_empty("ga_param_set_part");
  model_.params.get(id);
  Tensor& t = model_.params.tensor(id);
  const Subject of = model_.params.subject(id);
  const size_t rank = t.shape.size();
  if (rank > 0 && (!whole || !first))
    of.fail(GA_ERROR_INVALID_ARGUMENT, "%s was NULL", whole ? "first" : "whole_shape");
  if (copies < 1) of.fail(GA_ERROR_INVALID_ARGUMENT, "copies was %d, expected at least 1", copies);
  for (size_t axis = 0; axis < rank; ++axis)
    if (first[axis] < 0 || whole[axis] < t.shape[axis] || first[axis] > whole[axis] - t.shape[axis])
      of.fail(GA_ERROR_INVALID_ARGUMENT,
              "its elements [%lld, %lld) of axis %zu are not among those of the whole, [0, %lld)",
              ll(first[axis]), ll(first[axis] + t.shape[axis]), axis, ll(whole[axis]));
  Part part;
  part.copies = copies;
  if (rank > 0) {
    part.whole.assign(whole, whole + rank);
    part.first.assign(first, first + rank);
  }
  const Param& p = model_.params[id];
  Param as_part = p;
  as_part.code_block = ParamList::code_block_of(t, part);
  if (p.owns && p.code_block != as_part.code_block &&
      (model_.params.is_coded(p) || model_.params.is_coded(as_part)))
    of.fail(GA_ERROR_INVALID_STATE,
            "its optimizer has GA_STATE_8BIT and it has state already, which has other blocks in "
            "such a part; the part is to be set before the first window");
  if (t.options.rows == GA_ROWS_LAZY && model_.params.is_coded(as_part) &&
      !part.has_whole(as_part.code_block, t.shape))
    of.fail(
        GA_ERROR_UNSUPPORTED,
        "its rows are GA_ROWS_LAZY and its state is GA_STATE_8BIT, whose blocks of %d elements of "
        "a row the part would cut",
        as_part.code_block);
  model_.params.set_part(id, std::move(part));
  stages_.writer.settings_changed(true);
  if (is_prepared(id)) stages_.writer.describe(static_cast<size_t>(id));
}

void Parameters::remove(ga_param id) {
  model_.window.check_empty("ga_param_remove");
  Param& p = model_.params.get(id);
  const auto i = static_cast<size_t>(id);
  if (const char* const layer = stages_.layers.name_of_user(id))
    model_.params.subject(id).fail(
        GA_ERROR_INVALID_STATE, "layer \"%s\" has it as its gamma or beta, so it cannot be removed",
        layer);
  model_.check_no_capture("ga_param_remove");
  model_.params.remove(id);
  if (p.count > 0) model_.ranges.remove(p.data);
  model_.speculation->forget(i);
  if (p.owns) model_.arrays.free(i);
  p.data = nullptr;
  if (is_prepared(id)) stages_.writer.describe(i);
  stages_.writer.set_tables();
}

void Parameters::changed(ga_param id) {
  model_.window.check_empty("ga_param_changed");
  Param& p = model_.params.get(id);
  model_.arrays.renew_master(p);
}

}  // namespace ga
