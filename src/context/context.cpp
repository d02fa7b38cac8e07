// SPDX-License-Identifier: Apache-2.0
#include "context/context.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "core/error.hpp"
#include "ranks/exchange.hpp"

namespace ga {
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
