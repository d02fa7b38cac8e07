// SPDX-License-Identifier: Apache-2.0
// The end of a window: reduce, check, clip, update, in this order. Norms are sums of the partials
// that the accumulating passes left; only gradients without partials take a pass of their own (see
// tell_window). The backend makes the decisions (decide.hpp), and no function here waits for them.
#include <cmath>

#include "context/context.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "ranks/exchange.hpp"

namespace ga {

ga_window_info Context::window() {
  if (accum_due_ && !backend_->capturing()) update_accum_steps();
  ga_window_info w = {};
  w.struct_size = sizeof w;
  w.state = window_.state();
  w.micro_batches = window_.size();
  w.open_micro = window_.open_index();
  w.accum_steps = window_.accum_steps();
  w.weight = window_.weight();
  w.windows = windows_;
  w.steps = steps_seen();
  return w;
}

// The number of applied steps, as far as it is known without a wait.
int64_t Context::steps_seen() const {
  if (const Control* c = backend_->known()) return c->steps;
  ga_step_result r = {};
  const bool known = windows_ > 0 && backend_->result(0, false, r);
  return known && r.windows > steps_set_after_ ? r.steps : steps_set_;
}

// The control block as the last step left it; waits for that step.
const Control& Context::control() const {
  if (const Control* c = backend_->known()) return *c;
  backend_->read(&last_control_, tables_.control.at(), sizeof last_control_);
  return last_control_;
}

// Whether anything but ga_step_result depends on the norm of a parameter's gradient.
bool Context::norm_wanted(ga_param id) const {
  const Param& p = params_[id];
  const ga_clip& clip = params_.clip_of(p);
  if (clip.when == GA_CLIP_WHEN_STEP &&
      (clip.scope == GA_CLIP_GLOBAL || clip.scope == GA_CLIP_PER_TENSOR))
    return true;
  const int op = params_.op_of(p);
  return (op >= 0 && op_info(op).reads_gradient_norm) ||
         params_.group_of(p).optimizer.kind == tables_.settings[0].bounded;
}

// Whether the norm of a parameter's gradient is to be taken in a pass of its own. If nobody wants it, the
// tables say that it is not known.
bool Context::needs_norm(size_t i) {
  const Param& p = params_[i];
  const bool checked = config_.nonfinite != GA_NONFINITE_IGNORE;
  const bool measured = config_.measure_norm != 0 || config_.noise_scale != 0;
  const bool unknown = p.held() == Held::kAdopted || p.stale;
  const bool due = unknown || tables_.param_inputs[i].clamped;
  const bool wanted =
      due && (checked || (measured && !p.maximum) || norm_wanted(static_cast<ga_param>(i)));
  tables_.param_inputs.set(i, &ParamInput::unmeasured, unknown && !wanted);
  return wanted;
}

// Whether the tables have what this window has brought to a parameter, in most cases the same as the window
// before: a stored gradient whose norm is known.
inline bool Context::is_told(size_t i) const {
  const Param& p = params_[i];
  const ParamInput& in = tables_.param_inputs[i];
  return p.held() == Held::kStored && in.held == Held::kStored && !p.stale && !in.clamped &&
         !in.unmeasured && config_.accumulation != GA_ACCUMULATE_RUNNING_MEAN;
}

// Writes what this window has brought to each parameter into the tables. Returns the gradients that are
// read once more before the step is decided, none if the window is discarded. Norms: of gradients that
// were never stored, of accumulators last written by the program or by a matrix product, and of
// gradients after clipping by value.
StepSums Context::tell_window(bool discards) {
  norms_.clear();
  for (size_t i = 0; i < prepared_; ++i) {
    if (is_told(i)) continue;
    Param& p = params_[i];
    const Held held = p.held();
    const bool known = (held == Held::kSummed && !p.stale) || p.ahead != Ahead::kNot;
    if (!discards && !p.frozen && held != Held::kNothing && !known && needs_norm(i)) {
      norms_.push_back(static_cast<ga_param>(i));
      p.stale = held == Held::kRows;  // the pass has not updated the partials of the rows
    }
    tell_param(i);
  }
  // A graph must send every entry: windows between two replays may change entries that this window found
  // unchanged.
  if (backend_->capturing()) edit_params();
  if (discards) return {};
  return {params_of(norms_), params_of(units_first_), params_of(factored_first_)};
}

void Context::empty_window() {
  if (eager_) eager_->end_window();
  for (Param& p : params_) {
    const bool written =
        p.held() == Held::kStored || p.held() == Held::kRows || p.held() == Held::kSummed;
    p.accumulator_written = p.accumulator_written || written;
    p.hold(Held::kNothing);
    p.acquired = false;
    p.stale = false;
    p.ready = false;
    p.pending = false;
    p.contributions = 0;
    p.last_micro = -1;
  }
  if (rows_held_ > 0)
    for (const Tensor& t : params_.tensors())
      if (t.set) backend_->clear_rows({&t.set, 1});
  rows_held_ = 0;
  noise_repeated_ = any_ready_ = false;
  contributions_.clear();
  batch_norms_.end_window();
  window_.clear();
  backend_->set_window_open(false);
  look_up_accum_steps();
}

WindowTotals Context::window_totals() const {
  WindowTotals totals = {};
  totals.ticket = tickets_ + 1;
  totals.micro_batches = window_.size();
  totals.weight = window_.weight();
  totals.weighted = window_.weighted();
  totals.noise_wanted = config_.noise_scale && !noise_repeated_;
  totals.over_ranks = totals.summed = exchange_ && exchange_->on_device();
  return totals;
}

ga_step_result Context::step() {
  check_device();
  window_.check_step();
  if (eager_ && !exchange_) eager_->join();
  if (config_.nonfinite == GA_NONFINITE_FAIL && backend_->capturing())
    fail(GA_ERROR_INVALID_STATE,
         "ga_step waits for its result under GA_NONFINITE_FAIL, which is not possible while the "
         "stream is being captured");
  // A step that updates parameters without a gradient may be the first call that needs their
  // arrays.
  const bool about_all = config_.missing == GA_MISSING_ZERO || ema_;
  if ((window_.weight() > 0 && about_all) || exchange_) prepare();
  WindowTotals totals = window_totals();
  ++tickets_;
  OverRanks over_ranks;
  if (totals.summed) or_end([&] { exchange_->check_queued(); });
  if (exchange_) {
    bool goes_on = false;
    or_lose_window([&] {
      goes_on = totals.summed ? exchange_->hold_all(false) : exchange_->begin_step(totals);
    });
    if (!goes_on) {
      if (eager_) {
        eager_->discard();
        eager_->tell_done();
      }
      drop_window();
      if (eager_) eager_->check_callbacks();
      return discarded();
    }
  }
  if (lists_due_) make_lists();
  if (exchange_ && !totals.summed) {
    or_lose_window([&] { exchange_->add_gradients(); });
    if (eager_)
      eager_->join();  // it goes on while ranks exchange the rest, and reads the control block
    tables_.control.at()->sums = exchange_->sums();
    over_ranks = [this] { or_lose_window([&] { exchange_->add_sums(); }); };
  }
  const bool may_apply = totals.summed || totals.weight > 0;
  totals.last = !may_apply || !settles_units_;
  forget_delivered();

  or_break([&] {
    StepSums sums = {};
    if (may_apply) sums = tell_window(false);
    flush();
    if (totals.summed) {
      or_lose_window([&] { exchange_->exchange_all(totals, sums.norms); });
      sums.norms = {};
    }
    backend_->decide(totals, sums, over_ranks);
    const bool fails = config_.nonfinite == GA_NONFINITE_FAIL;
    const Control* const known = fails ? &control() : backend_->known();
    if (fails && known->result.outcome == GA_STEP_SKIPPED_NONFINITE) {
      window_.reject();
      fail_nonfinite(*known);
    }
    const bool goes = may_apply && !(known && !known->go);
    if (eager_) eager_->settle(goes);
    if (goes) {
      update();
      if (shards()) gather_updates();
      for (Param& p : params_) {
        if (!p.owns) continue;
        p.average_written = true;
        if (p.frozen || (p.held() == Held::kNothing && config_.missing == GA_MISSING_SKIP))
          continue;
        p.state_written = true;
        p.unrounded = false;
        const int op = params_.op_of(p);
        p.accumulator_written = p.accumulator_written || op < 0 || op_info(op).emits;
        if (op < 0) p.delivered = delivered_ = true;
      }
    }
  });
  ++windows_;
  ga_step_result r = {};
  if (!backend_->result_of(totals.ticket, r)) {
    r = pending();
    r.micro_batches = totals.micro_batches;
    r.weight = totals.weight;
  }
  if (eager_) eager_->tell_done();
  empty_window();
  if (listed_by_ + 1 == calls_ && !adopts_) listed_by_ = calls_;
  if (eager_) eager_->check_callbacks();
  return r;
}

ga_step_result Context::pending() {
  ga_step_result r = {};
  r.struct_size = sizeof r;
  r.outcome = GA_STEP_PENDING;
  r.norm = r.clip_factor = r.lr = r.loss_scale = NAN;
  r.noise_scale = r.noise_trace = r.noise_signal = NAN;
  return r;
}

void Context::fail_nonfinite(const Control& c) const {
  fail(GA_ERROR_NONFINITE,
       "the gradient of parameter \"%s\" is infinite or NaN; the window is kept until ga_discard",
       params_.name(static_cast<ga_param>(c.nonfinite_at)));
}

void Context::discard() {
  check_not_in_place("ga_discard");
  if (eager_) eager_->discard();
  if (exchange_ && exchange_->on_device())
    discard_over_devices();
  else if (exchange_)
    or_lose_window([&] { exchange_->discard(); });
  drop_window();
}

// Other ranks may be in ga_step, and learn of it on their devices alone: so this rank makes the same
// exchanges.
void Context::discard_over_devices() {
  check_device();
  if (exchange_->has_failed()) return;
  prepare();
  WindowTotals totals = window_totals();
  ++tickets_;
  totals.discards = totals.last = true;
  or_end([&] { exchange_->check_queued(); });
  bool goes_on = false;
  or_lose_window([&] { goes_on = exchange_->hold_all(true); });
  if (!goes_on) return;
  if (lists_due_) make_lists();
  or_break([&] {
    tell_window(true);
    flush();
    or_lose_window([&] { exchange_->exchange_all(totals, {}); });
    backend_->decide(totals, {}, {});
    // No rank applies this window, since this one discards it. Those in ga_step do not know that yet and exchange what
    // they have updated, which is nothing, and this rank takes part. Under FAIL they have waited for the outcome.
    if (config_.nonfinite == GA_NONFINITE_FAIL) return;
    update();
    if (shards()) gather_updates();
  });
  ++windows_;
}

void Context::or_lose_window(const std::function<void()>& exchange) {
  try {
    exchange();
  } catch (...) {
    if (exchange_->may_write_late()) backend_->keep_memory();
    if (exchange_->has_moved()) window_.invalidate();
    if (eager_) eager_->discard();
    throw;
  }
}

// The result of ga_step in a window that another rank has discarded.
ga_step_result Context::discarded() const {
  const Control& c = control();
  ga_step_result r = pending();
  r.outcome = GA_STEP_SKIPPED_DISCARD;
  r.norm = r.lr = 0;
  r.clip_factor = 1;
  r.loss_scale = loss_scale();
  r.windows = c.windows;
  r.steps = c.steps;
  r.skipped = c.skipped;
  r.dropped = c.dropped;
  return r;
}

void Context::drop_window() {
  forget_delivered();
  const bool invalid = window_.state() == GA_WINDOW_INVALID;  // statistics may be half changed
  if (deferring() || rows_held_ > 0 || batch_norms_.has_statistics() || window_.rejected() ||
      invalid)
    backend_->clear_window();
  empty_window();
}

void Context::forget_delivered() {
  if (delivered_)
    for (Param& p : params_) p.delivered = false;
  delivered_ = false;
}

void Context::set_comm(std::shared_ptr<Comm> comm, const ga_comm_options& options) {
  window_.check_empty("ga_context_set_comm");
  if (batch_norms_.has_statistics())
    fail(GA_ERROR_INVALID_STATE,
         "ga_context_set_comm was called while a layer has statistics of the next window; "
         "ga_discard "
         "drops them");
  if (comm && config_.device != GA_DEVICE_CPU && options.overlap && !comm->on_stream())
    fail(GA_ERROR_UNSUPPORTED,
         "ga_comm_options.overlap was 1, but by way of the host gradients of a device are "
         "exchanged in "
         "ga_step alone");
  const bool shards = options.shard == GA_SHARD_OPTIMIZER;
  if (prepared_ > 0 && (shards || this->shards()))
    fail(GA_ERROR_INVALID_STATE, "ga_context_set_comm was called %s; %s",
         shards ? "with GA_SHARD_OPTIMIZER after the library has made its arrays (in ga_prepare, "
                  "for state by name, or with the first contribution to a window)"
                : "in a context that keeps only this rank's part of the state",
         shards ? "it is legal only before" : "another context loads a state that was saved");
  const auto undivide = [&](bool sharded) {
    if (prepared_ > 0) return;
    params_.sharded = sharded;
    if (exchange_) exchange_->check_division();
    for (Param& p : params_) p.share = {0, p.count};
  };
  undivide(false);
  std::unique_ptr<Exchange> next;
  if (exchange_ && exchange_->on_device()) backend_->wait();
  if (exchange_) exchange_->watch(false);
  if (comm) {
    try {
      next = std::make_unique<Exchange>(*this, std::move(comm), options);
      next->watch(true);
      next->agree();
    } catch (...) {
      next.reset();
      if (exchange_) exchange_->watch(true);
      undivide(this->shards());
      throw;
    }
  }
  if (exchange_ && exchange_->may_write_late()) backend_->keep_memory();
  exchange_.swap(next);
  for (size_t i = 0; i < prepared_; ++i) describe(i);  // norms over layers are cut in another way
  rank_key_ = exchange_ ? static_cast<uint64_t>(exchange_->rank()) * 0x9e3779b97f4a7c15 : 0;
  choose_path();
  if (eager_) eager_->look_again();
}

void Context::on_all_ranks(const char* what, bool alone,
                           const std::function<void(const Ready&)>& work) {
  if (!exchange_) return work([] {});
  exchange_->begin_call(what);
  const bool by_one = alone && !shards() && !exchange_->has_open_window();
  bool given_up = false;  // by all ranks
  const Ready ready = [&] {
    try {
      exchange_->vote(what, nullptr);
    } catch (...) {
      given_up = true;
      throw;
    }
  };
  try {
    if (!by_one || exchange_->rank() == 0) work(by_one ? Ready([] {}) : ready);
  } catch (const Error& e) {
    if (!given_up) exchange_->vote(what, &e);
    throw;
  } catch (const std::exception& e) {
    const Error error(GA_ERROR_INTERNAL, e.what());
    if (!given_up) exchange_->vote(what, &error);
    throw;
  }
  ready();
}

bool Context::shards() const { return exchange_ && exchange_->shards(); }

int32_t Context::rank() const { return exchange_ ? exchange_->rank() : 0; }
int32_t Context::ranks() const { return exchange_ ? exchange_->ranks() : 1; }

const void* Context::gradient(ga_param id, int32_t* dtype, int64_t* count) const {
  const Param& p = params_.get(id);
  const ga_optimizer& o = params_.group_of(p).optimizer;
  if (o.kind != GA_OPTIMIZER_EXTERNAL)
    params_.subject(id).fail(
        GA_ERROR_INVALID_ARGUMENT,
        "its group has the optimizer %s; ga_gradient is for GA_OPTIMIZER_EXTERNAL",
        params_.group_of(p).info->name);
  ParamState state = {};
  const bool stepped = delivered_ && p.delivered && control().go;
  if (stepped)
    backend_->read(&state, tables_.param_states.at(static_cast<size_t>(id)), sizeof state);
  if (!stepped || !state.touched)
    params_.subject(id).fail(
        GA_ERROR_INVALID_STATE,
        "there is no gradient; ga_gradient is legal after an applied ga_step in which "
        "the parameter had one, until the next accumulate, ga_discard or ga_step");
  if (dtype) *dtype = p.accumulator_dtype;
  if (count) *count = p.count;
  return p.accumulator;
}

}  // namespace ga
