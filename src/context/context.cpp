// SPDX-License-Identifier: Apache-2.0
#include "context/context.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

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

ga_config default_config() {
  ga_config c = {};
  c.struct_size = sizeof c;
  c.loss_scale = 1;
  c.noise_smoothing = 0.9;
  return c;
}

void check_config(const ga_config& c) {
  check_choice("device", c.device, GA_DEVICE_CUDA, "ga_device");
  if (c.num_threads < 0 || c.num_threads > 4096)
    fail(GA_ERROR_INVALID_ARGUMENT, "num_threads was %d, expected 0 to 4096", c.num_threads);
  if (c.accum_steps < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "accum_steps was %lld, expected >= 0", ll(c.accum_steps));
  check_choice("gradient_kind", c.gradient_kind, GA_GRADIENT_SUM, "ga_gradient_kind");
  if (c.reduce == GA_REDUCE_MAX)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "reduce was GA_REDUCE_MAX, which is for single parameters: ga_param_options.reduce");
  check_choice("reduce", c.reduce, GA_REDUCE_SUM, "ga_reduce");
  check_choice("missing", c.missing, GA_MISSING_ZERO, "ga_missing");
  check_choice("nonfinite", c.nonfinite, GA_NONFINITE_IGNORE, "ga_nonfinite");
  check_choice("gradient_life", c.gradient_life, GA_GRADIENTS_LIVE, "ga_gradient_life");
  check_choice("accumulation", c.accumulation, GA_ACCUMULATE_STOCHASTIC, "ga_accumulation");
  if (c.accumulation == GA_ACCUMULATE_RUNNING_MEAN &&
      (c.gradient_kind != GA_GRADIENT_MEAN || c.reduce != GA_REDUCE_MEAN))
    fail(GA_ERROR_INVALID_ARGUMENT,
         "accumulation was GA_ACCUMULATE_RUNNING_MEAN, which needs GA_GRADIENT_MEAN and "
         "GA_REDUCE_MEAN, but gradient_kind was %d and reduce %d",
         c.gradient_kind, c.reduce);
  check_choice("noise_scale", c.noise_scale, 1, "0 or 1");
  check_choice("measure_norm", c.measure_norm, 1, "0 or 1");
  check_choice("ga_config.reserved2", c.reserved2, 0, "reserved");
  if (c.device_ordinal < 0 || (c.device == GA_DEVICE_CPU && c.device_ordinal != 0))
    fail(GA_ERROR_INVALID_ARGUMENT, "device_ordinal was %d, expected %s", c.device_ordinal,
         c.device == GA_DEVICE_CPU ? "0 for GA_DEVICE_CPU" : ">= 0");
  if (c.device == GA_DEVICE_CPU && c.stream)
    fail(GA_ERROR_INVALID_ARGUMENT, "stream was %p, but device is GA_DEVICE_CPU", c.stream);
  if (!c.allocate != !c.free)
    fail(GA_ERROR_INVALID_ARGUMENT, "%s was set without %s", c.allocate ? "allocate" : "free",
         c.allocate ? "free" : "allocate");
  if (!(c.noise_smoothing >= 0 && c.noise_smoothing < 1))
    fail(GA_ERROR_INVALID_ARGUMENT, "noise_smoothing was %g, expected a number in [0, 1)",
         c.noise_smoothing);
  check_choice("eager", c.eager, 1, "0 or 1");
  if (c.eager_threads < 0 || c.eager_threads > 4096)
    fail(GA_ERROR_INVALID_ARGUMENT, "eager_threads was %d, expected 0 to 4096", c.eager_threads);
  if (c.eager_bytes < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "eager_bytes was %lld, expected >= 0", ll(c.eager_bytes));
  if (c.eager && c.device != GA_DEVICE_CPU)
    fail(GA_ERROR_UNSUPPORTED, "eager was 1, but updates ahead of ga_step are for the CPU alone");
  if (!std::isfinite(c.loss_scale) || c.loss_scale == 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "loss_scale was %g, expected a finite number other than 0",
         c.loss_scale);
}

Context::Context(const ga_config& config)
    : config_(config),
      log_(Log::of(config)),
      backend_(config.device == GA_DEVICE_CUDA ? make_cuda_backend(config)
                                               : make_cpu_backend(config)),
      callers_(config.eager ? new Callers : nullptr) {
  window_.set_accum_steps(config.accum_steps);
  if (config.eager) eager_ = std::make_unique<Eager>(*this);
  tables_ = tables_.grown(*backend_, ContextTables::kContext, 1);
  choose_path();
  tell_settings();
  tell_scaler();
  set_tables();
}

Context::~Context() {
  if (exchange_ && exchange_->may_write_late()) backend_->keep_memory();
  exchange_.reset();  // its thread, which gives work to those of eager_
  eager_.reset();
  for (const Tensor& t : params_.tensors()) backend_->free_rows(t.set);
  mark_.store(0, std::memory_order_relaxed);
}

// Throws where no thread, or not this one, can use the context.
inline void Context::check_thread(const char* function) const {
  if (!is_of_this_process()) fail_foreign();
  if (Eager::is_telling(*this))
    fail(GA_ERROR_INVALID_STATE, "%s was called by on_param_done, which must not use the context",
         function);
}

void Context::fail_foreign() const {
  if (mark_.load(std::memory_order_relaxed) >> 32 != kMark >> 32)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "ctx, %p, is not a context: it has been destroyed, or never was one",
         static_cast<const void*>(this));
  fail(GA_ERROR_INVALID_STATE,
       "the context was created before fork() by the parent of this process and cannot be used in "
       "the child; the child may create contexts of its own");
}

Context::Use::Use(const Context& context, const char* function, bool changing) : context_(context) {
  context.check_thread(function);
  if (context.in_use_.exchange(true, std::memory_order_acquire)) fail_in_use();
  if (context.broken_) {
    context.in_use_.store(false, std::memory_order_release);
    throw *context.broken_;
  }
  if (changing && context.ema_swapped_) {
    context.in_use_.store(false, std::memory_order_release);
    fail_swapped(function);
  }
  context.calls_ += changing;
}

thread_local const Context::SharedUse* Context::SharedUse::innermost_ = nullptr;

Context::SharedUse::SharedUse(const Context& context, const char* function, bool changing)
    : context_(context), outer_(innermost_) {
  context.check_thread(function);
  // A callback of a call may run on the thread of the call, which then would wait for itself.
  for (const SharedUse* use = outer_; use; use = use->outer_)
    if (&use->context_ == &context) fail_in_use();
  const Callers::Lock lock = context.callers_->lock();
  if (!context.callers_->enter(context.in_use_)) fail_in_use();
  if (context.broken_) {
    context.callers_->leave(context.in_use_);
    throw *context.broken_;
  }
  if (changing && context.ema_swapped_) {
    context.callers_->leave(context.in_use_);
    fail_swapped(function);
  }
  context.calls_ += changing;
  innermost_ = this;
}

Context::SharedUse::~SharedUse() {
  innermost_ = outer_;
  const Callers::Lock lock = context_.callers_->lock();
  context_.callers_->leave(context_.in_use_);
}

void Context::fail_in_use() {
  fail(GA_ERROR_INVALID_STATE,
       "the context is in another call; one thread may use it at a time, and the program's "
       "callbacks (parallel_for, allocate, free, log, on_param_done) must not use it");
}

void Context::fail_swapped(const char* function) {
  fail(GA_ERROR_INVALID_STATE,
       "%s was called while the parameters and their EMA are exchanged; ga_ema_swap(ctx, 0) takes "
       "that back",
       function);
}

// For calls that read or write the state of a device at once, and not in the order of a graph.
void Context::check_no_capture(const char* what) const {
  if (backend_->capturing())
    fail(GA_ERROR_INVALID_STATE,
         "%s waits for the device, which is not possible while the stream is being captured", what);
}

void Context::set_stream(void* stream) {
  if (config_.device == GA_DEVICE_CPU)
    fail(GA_ERROR_UNSUPPORTED, "stream was %p, but the context is on the CPU, which has no streams",
         stream);
  backend_->set_stream(stream);
  config_.stream = stream;
}

// ---- Window length ------------------------------------------------------------------------------

// If K depends on a step that may still be running, K is found when the next window opens.
void Context::look_up_accum_steps() {
  accum_due_ = !phases_.empty() && !backend_->known();
  if (!accum_due_) update_accum_steps();
}

// Waits for the last step if there is a schedule of K.
void Context::update_accum_steps() {
  accum_due_ = false;
  int64_t k = config_.accum_steps;
  const int64_t done = phases_.empty() ? 0 : steps();
  for (const AccumPhase& phase : phases_)
    if (phase.from_step <= done) k = phase.accum_steps;
  window_.set_accum_steps(k);
}

void Context::set_accum_steps(int64_t k) {
  window_.check_empty("ga_context_set_accum_steps");
  if (!phases_.empty())
    fail(GA_ERROR_INVALID_STATE,
         "ga_context_set_accum_steps was called while a schedule of accum_steps is set; "
         "ga_context_set_accum_schedule with count 0 removes the schedule");
  if (k < 0) fail(GA_ERROR_INVALID_ARGUMENT, "accum_steps was %lld, expected >= 0", ll(k));
  config_.accum_steps = k;
  update_accum_steps();
}

void Context::set_accum_schedule(const int64_t* from_steps, const int64_t* accum_steps,
                                 size_t count) {
  window_.check_empty("ga_context_set_accum_schedule");
  if (count > 0 && !(from_steps && accum_steps))
    fail(GA_ERROR_INVALID_ARGUMENT, "%s was NULL, but count is %zu",
         from_steps ? "accum_steps" : "from_steps", count);
  std::vector<AccumPhase> phases;
  phases.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const int64_t from = from_steps[i];
    if (i == 0 ? from != 0 : from <= phases.back().from_step)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "from_steps[%zu] was %lld; the first is 0 and each is larger than the one before", i,
           ll(from));
    if (accum_steps[i] < 0)
      fail(GA_ERROR_INVALID_ARGUMENT, "accum_steps[%zu] was %lld, expected >= 0", i,
           ll(accum_steps[i]));
    phases.push_back({from, accum_steps[i]});
  }
  phases_.swap(phases);
  update_accum_steps();
}

// ---- Groups -------------------------------------------------------------------------------------

ga_group Context::add_group(const ga_optimizer& o) {
  window_.check_empty("ga_group_add");
  check_optimizer(o);
  if (params_.groups.size() >= INT32_MAX) fail(GA_ERROR_INVALID_ARGUMENT, "too many groups");
  const OptimizerInfo& info = optimizer_info(o.kind, o.flavor);
  Group g = {o, &info, {info.op(o, false), info.op(o, true)}, false, default_clip(), {}, {}};
  if (g.op[1] >= 0 && op_info(g.op[1]).orthogonal) backend_->prepare_matmul(0);
  GroupState state = {};
  state.clock =
      clock_after(info, o, params_.groups.empty() && windows_ == 0 ? steps_set_ : steps());
  params_.groups.reserve(params_.groups.size() + 1);
  ContextTables tables = tables_.grown(*backend_, ContextTables::kGroup, params_.groups.size() + 1);
  backend_->write(tables.group_states.at(params_.groups.size()), &state, sizeof state);
  tables_.swap(tables, ContextTables::kGroup);
  params_.groups.push_back(std::move(g));
  tell_groups();
  tell_settings();
  set_tables();
  return static_cast<ga_group>(params_.groups.size()) - 1;
}

void Context::set_lr(ga_group id, double lr) {
  Group& g = params_.group(id);
  check_rate("lr", lr);
  check_settable();
  g.optimizer.lr = lr;
  tell_groups();
}

void Context::set_weight_decay(ga_group id, double weight_decay) {
  ga_optimizer o = params_.group(id).optimizer;
  check_rate("weight_decay", weight_decay);
  o.weight_decay = weight_decay;
  change_optimizer(id, o);
}

void Context::set_optimizer(ga_group id, ga_optimizer o) {
  const Group& g = params_.group(id);
  check_optimizer(o);
  check_same_state(g.optimizer, o);
  o.state_dtype = g.optimizer.state_dtype;
  for (size_t i = 0; i < params_.size(); ++i)
    if (params_[i].group == id && params_.tensor(i).options.rows == GA_ROWS_LAZY &&
        !params_.tensor(i).removed && !g.info->lazy(o))
      params_.subject(i).fail(
          GA_ERROR_UNSUPPORTED,
          "its rows are GA_ROWS_LAZY, but with these hyper-parameters %s moves every element",
          g.info->name);
  change_optimizer(id, o);
  tell_settings();  // max_grad_norm
  lists_due_ = true;
}

// Gives a group other hyper-parameters, with which its parameters may need another Op.
void Context::change_optimizer(ga_group id, const ga_optimizer& o) {
  Group& g = params_.group(id);
  check_settable();
  const bool same_steps = g.optimizer.ns_steps == o.ns_steps;  // which say where the result lies
  g.optimizer = o;
  const int before[] = {g.op[0], g.op[1]};
  for (int matrix = 0; matrix < 2; ++matrix) g.op[matrix] = g.info->op(o, matrix);
  tell_groups();
  if (same_steps && std::equal(before, before + 2, g.op)) return;
  for (size_t i = 0; i < prepared_; ++i)
    if (params_[i].group == id) describe(i);
  lists_due_ = true;
}

void Context::set_schedule(ga_group id, const ga_schedule* schedule) {
  Group& g = params_.group(id);
  check_settable();
  ga_schedule next = {};
  Table<double> rates;
  if (schedule) {
    check_schedule(*schedule);
    next = *schedule;
    if (next.kind == GA_SCHEDULE_TABLE) {
      rates = Table<double>(*backend_, static_cast<size_t>(next.table_size));
      std::copy_n(next.table, next.table_size, &rates.edit(0));
      rates.edit_all();
      rates.flush(*backend_);
    }
  }
  next.table = nullptr;
  g.rates.swap(rates);
  g.schedule = next;
  tell_groups();
}

double Context::lr(ga_group id) const {
  const Group& g = params_.group(id);
  const ScheduleData schedule = {g.schedule, g.rates.host_data()};
  return schedule.rate(g.optimizer.lr, steps());
}

double Context::last_lr(ga_group id) const {
  params_.group(id);
  GroupState state = {};
  backend_->read(&state, tables_.group_states.at(static_cast<size_t>(id)), sizeof state);
  return state.lr;
}

void Context::set_loss_scaler(const ga_loss_scaler* scaler) {
  window_.check_empty("ga_context_set_loss_scaler");
  if (scaler) check_loss_scaler(*scaler);
  scaler_ = scaler ? *scaler : ga_loss_scaler{};
  scaled_ = scaler != nullptr;
  tell_settings();
  tell_scaler();
}

double Context::loss_scale() const { return scaled_ ? control().scaler.scale : config_.loss_scale; }

const void* Context::device_loss_scale() const {
  return config_.device == GA_DEVICE_CPU ? nullptr : &tables_.control.at()->loss_scale;
}

// ---- Parameters ---------------------------------------------------------------------------------

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

// ---- Arrays -------------------------------------------------------------------------------------

ga_memory Context::memory() const {
  ga_memory m = {};
  if (exchange_) exchange_->divide();
  const bool adopting = adopts_ && config_.accum_steps == 1 && phases_.empty();
  const size_t params = params_.size();
  const int64_t planned = arrays_.count(m, adopting) +  // not resident yet
                          bytes_of_lists(params) - bytes_of_lists(prepared_) +
                          ContextTables::bytes(0, params) - ContextTables::bytes(0, prepared_);
  m.workspace += bytes_of_lists(params) + ContextTables::bytes(params_.groups.size(), params);
  for (const Group& g : params_.groups) m.workspace += g.rates.bytes();
  m.workspace +=
      micro_partials_.bytes() + micro_plans_.bytes() +
      static_cast<int64_t>(contributions_.capacity() *
                           (sizeof(Contribution) + sizeof(MicroInput) + sizeof(NormTask)));
  m.rows += backend_->row_bytes();
  m.averages += static_cast<int64_t>(ema_kept_.bytes());
  int64_t written = 0;
  if (eager_) m.eager = eager_->bytes(written);
  if (exchange_) m.workspace += exchange_->bytes();
  m.batch_norm = batch_norms_.bytes();
  m.workspace += backend_->bn_bytes() + batch_norms_.inputs().bytes();
  for (const int64_t bytes : {m.accumulators, m.optimizer_state, m.workspace, m.masters, m.averages,
                              m.rows, m.batch_norm, m.eager})
    if (__builtin_add_overflow(m.total, bytes, &m.total)) m.total = INT64_MAX;
  m.resident = m.total - planned - (m.eager - written);
  return m;
}

// Bytes of the working lists for so many parameters, and of what the host knows of them.
int64_t Context::bytes_of_lists(size_t params) const {
  const size_t words = config_.device == GA_DEVICE_CPU ? 0 : 3 * sizeof(Word);
  const int64_t ahead = eager_ ? eager_->list_bytes(params) : 0;
  return ahead + static_cast<int64_t>(params * (sizeof(Param) + sizeof(Tensor) + sizeof(Source) +
                                                sizeof(AccumulateTask) + sizeof(void*) +
                                                11 * sizeof(ga_param) + words));
}

// Called after the last check of a call that contributes, so that no other call leaves arrays behind.
void Context::prepare() {
  make_arrays();
  arrays_.fill_new();
}

// Not what updates ahead take, which depend on an exchange that the context may have yet to get.
void Context::make_own() {
  if (arrays_.lacking()) make_lacking();
  arrays_.fill_new();
}

void Context::make_arrays() {
  if (arrays_.lacking()) make_lacking();
  if (eager_) eager_->make_second_set();
}

void Context::make_lacking() {
  check_device();
  if (exchange_) exchange_->divide();
  const size_t n = params_.size();
  ContextTables tables;
  try {
    accumulate_tasks_.reserve(n);
    listed_.reserve(n);
    told_.resize(n);
    if (config_.device != GA_DEVICE_CPU) moved_.reserve(3 * n);
    for (auto* list : {&plain_, &pieces_, &layers_, &layers_over_ranks_, &norms_, &units_first_,
                       &factored_first_, &units_of_share_, &ids_[0], &ids_[1], &ids_[2], &noted_})
      list->reserve(n);
    if (eager_) {
      int64_t chunks = 0;
      for (const Param& p : params_) chunks += chunk_count(p.count);
      eager_->reserve(n, chunks);
    }
    tables = tables_.grown(*backend_, ContextTables::kParam, n);
    arrays_.make();
  } catch (const std::bad_alloc&) {
    arrays_.fail_allocation();
  } catch (const std::length_error&) {  // of a list that would have been larger than memory
    arrays_.fail_allocation();
  }
  tables_.swap(tables, ContextTables::kParam);
  prepared_ = n;
  for (size_t i = 0; i < n; ++i) describe(i);  // the tables have moved
  lists_due_ = true;
  if (eager_) eager_->look_again();
  set_tables();
  flush();
}

}  // namespace ga
