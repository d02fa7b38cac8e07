// SPDX-License-Identifier: Apache-2.0
// Adding, changing and removing parameters.
#include <algorithm>

#include "context/context.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "files/names.hpp"
#include "files/safetensors.hpp"
#include "ranks/exchange.hpp"

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
  int64_t bytes;
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

void Context::check_data(const char* tensor, const void* data, int64_t count, int32_t size,
                         ga_param self) const {
  if (count == 0) return;
  const Subject of = {"parameter", tensor};
  if (!data)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "data was NULL, but it has %lld elements", ll(count));
  const int64_t bytes = count * size;
  if (static_cast<uintptr_t>(bytes) > UINTPTR_MAX - reinterpret_cast<uintptr_t>(data))
    of.fail(GA_ERROR_INVALID_ARGUMENT,
            "its %lld elements at address %p reach past the end of memory", ll(count), data);
  ranges_.check_readable(of, "its data", data, count, size);
  ranges_.check_apart(of, "its data", data, bytes, self);
}

// Checks that dtypes and options of a parameter fit each other and the group's optimizer.
void Context::check_options(const NewParam& e, int32_t dtype) const {
  const ga_param_options& o = e.options;
  const Group& g = params_.group(e.group);
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
  if (o.rows == GA_ROWS_LAZY && exchange_ && exchange_->on_device())
    refuse(
        "rows was GA_ROWS_LAZY, which a context on a device that has a communicator does not take");
  if (f64 && g.optimizer.state_dtype != 0)
    refuse("its dtype is f64, but its group has a state_dtype");
  if (f64 && ema_ && ema_->dtype == GA_BF16)
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
  if (info.matrices_only && (e.rank != 2 || f64))
    of.fail(
        GA_ERROR_UNSUPPORTED,
        "%s is for matrices, but its rank is %d and its dtype %s; a group with another optimizer "
        "may take it",
        info.name, e.rank, dtype_info(dtype).name);
  if (o.rows == GA_ROWS_NONE) return;
  if (e.rank < 1) refuse("rows was set, but its rank is 0");
  if (o.accumulator_dtype == GA_F16 || o.accumulator_dtype == GA_BF16)
    refuse("rows was set, but its accumulator has 16 bits");
  if (config_.accumulation != GA_ACCUMULATE_PLAIN)
    refuse("rows was set, but ga_config.accumulation is not GA_ACCUMULATE_PLAIN");
  if (o.rows == GA_ROWS_LAZY && !info.lazy(g.optimizer))
    of.fail(GA_ERROR_UNSUPPORTED,
            "rows was GA_ROWS_LAZY, but its group's optimizer, %s%s, moves every element in every "
            "step",
            info.name, g.optimizer.dampening != 0 ? " with dampening" : "");
  if (e.shape && e.shape[0] > static_cast<int64_t>(UINT32_MAX))
    refuse("rows was set, but it has more than 2^32 - 1 rows");
}

ga_param Context::add_params(void* data, int32_t dtype, Span<const NewParam> entries) {
  const size_t count = entries.size;
  window_.check_empty("a function that adds parameters");
  if (count > static_cast<size_t>(INT32_MAX) - params_.size())
    fail(GA_ERROR_INVALID_ARGUMENT, "the context would have more than %d parameters", INT32_MAX);
  const size_t old_params = params_.size();
  try {
    params_.make_room(count);
    ranges_.reserve_more(count);
    for (size_t i = 0; i < count; ++i) {
      const NewParam& e = entries.data[i];
      const ga_param_options& options = e.options;
      const Subject of = subject_of(e);
      if (!e.name || !*e.name)
        fail(GA_ERROR_INVALID_ARGUMENT, "parameter %zu: its name was %s", old_params + i,
             e.name ? "empty" : "NULL");
      if (params_.find(e.name) >= 0)
        of.fail(GA_ERROR_INVALID_ARGUMENT, "the context has a parameter of that name already");
      check_name(of, e.name);
      params_.group(e.group);
      const int32_t size = check_dtype(of, "dtype", dtype);
      const int32_t gradient_dtype = options.gradient_dtype ? options.gradient_dtype : dtype;
      check_dtype(of, "gradient_dtype", gradient_dtype);
      if (i > 0 && gradient_dtype != params_[old_params].gradient_dtype)
        of.fail(GA_ERROR_UNSUPPORTED,
                "gradient_dtype was %s, but that of \"%s\" in the same block is %s",
                dtype_info(gradient_dtype).name, entries.data[0].name,
                dtype_info(params_[old_params].gradient_dtype).name);
      if (options.accumulator_dtype)
        check_dtype(of, "accumulator_dtype", options.accumulator_dtype);
      const int64_t elements = element_count(e, std::max(size, 4));
      check_options(e, dtype);
      if (e.offset < 0 || e.offset > INT64_MAX / size - elements)
        of.fail(GA_ERROR_INVALID_ARGUMENT, "offset was %lld, expected >= 0", ll(e.offset));
      char* const at = data ? static_cast<char*>(data) + e.offset * size : nullptr;
      check_data(e.name, at, elements, size, -1);
      const ga_param id = params_.add(e, at, dtype, elements);
      if (params_.clip_of(params_[id]).scope == GA_CLIP_AGC) params_.units_axes(id);
      ranges_.add(at, static_cast<size_t>(elements * size), id);
    }
  } catch (...) {
    params_.drop_from(old_params);
    ranges_.remove_params_from(static_cast<ga_param>(old_params));
    throw;
  }
  params_.add_block(static_cast<ga_param>(old_params));
  settings_changed(true);
  for (size_t i = old_params; i < params_.size(); ++i) {
    arrays_.look_for(params_[i]);
    maxima_ = maxima_ || params_[i].maximum;
  }
  if (maxima_) choose_path();
  forget_checks();
  return static_cast<ga_param>(old_params);
}

void Context::check_name(const Subject& of, const char* name) const {
  const auto is_used = [&](std::string_view owner) {
    return params_.find(owner) >= 0 || batch_norms_.find(owner) >= 0;
  };
  ga::check_name(of, name, is_used);
  const auto refuse = [&](const char* other) {
    of.fail(GA_ERROR_INVALID_ARGUMENT,
            "\"%.200s\" is also the name of its state in a state file (ga_save)", other);
  };
  if (const ga_param id = params_.find_state_of(name); id >= 0) refuse(params_.name(id));
  for (ga_bn id = 0; id < batch_norms_.count(); ++id)
    if (const char* const layer = batch_norms_.info(id).name; is_state_of(layer, name))
      refuse(layer);
}

void Context::bind(ga_param id, void* data) {
  window_.check_empty("ga_param_bind");
  Param& p = params_.get(id);
  check_data(params_.name(id), data, p.count, dtype_info(p.dtype).size, id);
  const size_t bytes = data_bytes(p);
  arrays_.claim(id, data);
  if (p.count > 0) ranges_.remove(p.data);
  p.data = data;
  if (static_cast<size_t>(id) < prepared_) describe(static_cast<size_t>(id));
  ranges_.add(data, bytes, id);
  forget_checks();
}

// Gradients have to be checked again, for there is new memory that they must not overlap.
void Context::forget_checks() {
  if (!checked_) return;
  for (Param& p : params_) p.checked = p.checked_before = nullptr;
  checked_ = false;
}

void Context::set_frozen(ga_param id, bool frozen) {
  window_.check_empty("ga_param_set_frozen");
  Param& p = params_.get(id);
  if (p.frozen == frozen) return;
  p.frozen = frozen;
  settings_changed(true);
  arrays_.look_for(p);
  if (static_cast<size_t>(id) < prepared_) describe(static_cast<size_t>(id));
}

void Context::set_group_frozen(ga_group id, bool frozen) {
  window_.check_empty("ga_group_set_frozen");
  params_.group(id);
  for (size_t i = 0; i < params_.size(); ++i)
    if (params_[i].group == id && !params_.tensor(i).removed)
      set_frozen(static_cast<ga_param>(i), frozen);
}

void Context::set_scale(ga_param id, const char* name, double Tensor::*which, double scale) {
  params_.get(id);
  check_rate(name, scale);
  check_settable();
  params_.tensor(id).*which = scale;
  tell_scales(static_cast<size_t>(id));
}

void Context::remove(ga_param id) {
  window_.check_empty("ga_param_remove");
  Param& p = params_.get(id);
  const auto i = static_cast<size_t>(id);
  if (const char* const layer = batch_norms_.name_of_user(id))
    params_.subject(id).fail(GA_ERROR_INVALID_STATE,
                             "layer \"%s\" has it as its gamma or beta, so it cannot be removed",
                             layer);
  check_no_capture("ga_param_remove");
  params_.remove(id);
  if (p.count > 0) ranges_.remove(p.data);
  if (eager_) eager_->forget(i);
  if (p.owns) arrays_.free(i);
  p.data = nullptr;
  if (i < prepared_) describe(i);
  lists_due_ = true;
  set_tables();
}

void Context::changed(ga_param id) {
  window_.check_empty("ga_param_changed");
  Param& p = params_.get(id);
  arrays_.renew_master(p);
}

}  // namespace ga
