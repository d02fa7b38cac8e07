// SPDX-License-Identifier: Apache-2.0
#include "step/step.hpp"

#include <cmath>

#include "batchnorm/batchnorm.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/preparation.hpp"
#include "model/table_writer.hpp"
#include "window/accumulator.hpp"

namespace ga {

Step::Step(const Stages& stages)
    : stages_(stages),
      model_(stages.model),
      update_(stages.model, stages.writer, stages.preparation) {
  stages.preparation.add(*this);
}

ga_window_info Step::window() {
  if (model_.length.is_due() && !model_.backend->capturing()) model_.length.find();
  ga_window_info w = {};
  w.struct_size = sizeof w;
  w.state = model_.window.state();
  w.micro_batches = model_.window.size();
  w.open_micro = model_.window.open_index();
  w.accum_steps = model_.window.accum_steps();
  w.weight = model_.window.weight();
  w.windows = model_.progress.windows();
  w.steps = model_.progress.steps_seen();
  return w;
}

// Whether the tables have what this window has brought to a parameter, in most cases the same as the window
// before: a stored gradient whose norm is known.
inline bool Step::is_written(size_t i) const {
  const Param& p = model_.params[i];
  const ParamInput& in = model_.tables.param_inputs[i];
  return p.held() == Held::kStored && in.held == Held::kStored && !p.window.stale && !in.clamped &&
         !in.unmeasured && model_.config.accumulation != GA_ACCUMULATE_RUNNING_MEAN;
}

// Whether the tables have all that this window has brought, since it has brought what the one before did.
bool Step::repeats_window() const {
  return model_.config.device == GA_DEVICE_CPU && !model_.config.eager && model_.ranks->alone() &&
         stages_.accumulator.repeats_window();
}

// Writes what this window has brought to each parameter into the tables. Notes the gradients that are read once more
// before the step is decided, none if the window is discarded: for the norms of gradients that were never stored, of
// accumulators last written by the program or by a matrix product, and of gradients after clipping by value.
void Step::write_params(bool discards) {
  norms_.clear();
  for (size_t i = 0; i < model_.tables.params(); ++i) {
    if (is_written(i)) continue;
    Param& p = model_.params[i];
    const Held held = p.held();
    const bool known = (held == Held::kReduced && !p.window.stale) || p.ahead != Ahead::kNot;
    if (!discards && !p.frozen && held != Held::kNothing && !known &&
        stages_.writer.needs_norm(i)) {
      norms_.push_back(static_cast<ga_param>(i));
      p.window.stale = held == Held::kRows;  // the pass has not updated the partials of the rows
    }
    stages_.writer.write_param(i);
  }
}

// Has the tables say what this window has brought. Returns what is summed before the step is decided.
StepSums Step::write_window(bool discards) {
  const bool written = repeats_window();
  flags_set_ = flags_set_ && written;
  if (!written) write_params(discards);
  // A graph must send every entry: windows between two replays may change entries that this window found
  // unchanged.
  if (model_.backend->capturing()) stages_.writer.edit_params();
  if (discards) return {};
  return {params_of(norms_), update_.units_first(), update_.factored_first()};
}

// Writes the window, unless it has nothing, and sends all tables that have changed. Gradients of the window before that
// the program may have read until now are forgotten.
StepSums Step::send_window(End end) {
  model_.params.forget_delivered();
  StepSums sums = {};
  model_.health.or_break([&] {
    if (end != End::kEmpty) sums = write_window(end == End::kDiscarded);
    stages_.writer.flush();
  });
  return sums;
}

// ---- ga_step ------------------------------------------------------------------------------------

ga_step_result Step::step() {
  check_step();
  // A step that updates parameters without a gradient may be the first call that needs their arrays. Over ranks, it is
  // for gradients that others have brought.
  const bool about_all = model_.config.missing == GA_MISSING_ZERO || model_.options.ema;
  if ((model_.window.weight() > 0 && about_all) || !model_.ranks->alone())
    stages_.preparation.prepare();
  WindowTotals totals = stages_.accumulator.totals();
  model_.progress.take_ticket();
  if (!model_.ranks->begin_end(totals, false)) return end_discarded();
  update_.make_lists();
  const bool may_apply = totals.reduced || totals.weight > 0;
  totals.last = !may_apply || !update_.settles_units();
  const StepSums sums = model_.ranks->reduce(totals, update_.units_of_shard(), [this, may_apply] {
    return send_window(may_apply ? End::kDecided : End::kEmpty);
  });
  model_.health.or_break([&] {
    const bool goes = decide(totals, sums) && may_apply;
    model_.speculation->settle(goes);
    if (goes) apply();
  });
  return end_applied(totals);
}

void Step::check_step() const {
  model_.check_device();
  model_.window.check_step();
  if (model_.ranks->alone() || model_.ranks->has_own_parameters()) model_.speculation->join();
  if (model_.config.nonfinite == GA_NONFINITE_FAIL && model_.backend->capturing())
    fail(GA_ERROR_INVALID_STATE,
         "ga_step waits for its result under GA_NONFINITE_FAIL, which is not possible while the "
         "stream is being captured");
}

// Returns whether the window is applied, as far as the host knows.
bool Step::decide(const WindowTotals& totals, const StepSums& sums) {
  model_.backend->decide(totals, sums, model_.ranks->over_ranks());
  const bool fails = model_.config.nonfinite == GA_NONFINITE_FAIL;
  const Control* const known = fails ? &model_.progress.control() : model_.backend->known();
  if (fails && known->result.outcome == GA_STEP_SKIPPED_NONFINITE) {
    model_.window.reject();
    fail_nonfinite(*known);
  }
  return !known || known->go;
}

// Updates parameters and state, and notes of what they are now.
void Step::apply() {
  update_.run();
  update_.gather();
  if (flags_set_) return;
  flags_set_ = true;
  for (Param& p : model_.params) {
    if (!p.owns) continue;
    p.average_written = true;
    if (p.frozen || (p.held() == Held::kNothing && model_.config.missing == GA_MISSING_SKIP))
      continue;
    p.state_written = true;
    p.unrounded = false;
    const int op = model_.params.op_of(p);
    p.accumulator_written = p.accumulator_written || op < 0 || op_info(op).emits;
    if (op >= 0) continue;
    model_.params.deliver(p);
    flags_set_ = false;
  }
}

ga_step_result Step::end_applied(const WindowTotals& totals) {
  model_.progress.count_window();
  ga_step_result r = {};
  if (!model_.backend->result_of(totals.ticket, r)) {
    r = pending();
    r.micro_batches = totals.micro_batches;
    r.weight = totals.weight;
  }
  model_.speculation->report_done();
  empty_window();
  stages_.accumulator.keep_window();
  model_.speculation->check_callbacks();
  return r;
}

// Ends a window that another rank has discarded.
ga_step_result Step::end_discarded() {
  model_.speculation->discard();
  model_.speculation->report_done();
  drop_window();
  model_.speculation->check_callbacks();
  const Control& c = model_.progress.control();
  ga_step_result r = pending();
  r.outcome = GA_STEP_SKIPPED_DISCARD;
  r.norm = r.lr = 0;
  r.clip_factor = 1;
  r.loss_scale = model_.loss_scale();
  r.windows = c.windows;
  r.steps = c.steps;
  r.skipped = c.skipped;
  r.dropped = c.dropped;
  return r;
}

ga_step_result Step::pending() {
  ga_step_result r = {};
  r.struct_size = sizeof r;
  r.outcome = GA_STEP_PENDING;
  r.norm = r.clip_factor = r.lr = r.loss_scale = NAN;
  r.noise_scale = r.noise_trace = r.noise_signal = NAN;
  return r;
}

void Step::fail_nonfinite(const Control& c) const {
  if (c.nonfinite_at >= static_cast<int64_t>(model_.params.size()))
    fail(GA_ERROR_NONFINITE,
         "the gradient of a parameter of another rank is infinite or NaN; the window is kept until "
         "ga_discard");
  fail(GA_ERROR_NONFINITE,
       "the gradient of parameter \"%s\" is infinite or NaN; the window is kept until ga_discard",
       model_.params.name(static_cast<ga_param>(c.nonfinite_at)));
}

void Step::empty_window() {
  model_.speculation->end_window();
  stages_.accumulator.end_window();
  stages_.layers.end_window();
  model_.window.clear();
  model_.backend->set_window_open(false);
  model_.length.look_up();
}

// ---- ga_discard ---------------------------------------------------------------------------------

void Step::discard() {
  model_.speculation->check_not_in_place("ga_discard");
  model_.speculation->discard();
  if (model_.ranks->on_device())
    discard_over_devices();
  else
    model_.ranks->discard();
  drop_window();
}

// Other ranks may be in ga_step, and learn of it on their devices alone: so this rank makes the same exchanges.
void Step::discard_over_devices() {
  model_.check_device();
  if (model_.ranks->has_failed()) return;
  stages_.preparation.prepare();
  WindowTotals totals = stages_.accumulator.totals();
  model_.progress.take_ticket();
  totals.discards = totals.last = true;
  if (!model_.ranks->begin_end(totals, true)) return;
  update_.make_lists();
  model_.ranks->reduce(totals, update_.units_of_shard(),
                       [this] { return send_window(End::kDiscarded); });
  model_.health.or_break([&] {
    model_.backend->decide(totals, {}, {});
    // No rank applies this window, since this one discards it. Those in ga_step do not know that yet and exchange what
    // they have updated, which is nothing, and this rank takes part. Under FAIL they have waited for the outcome.
    if (model_.config.nonfinite == GA_NONFINITE_FAIL) return;
    update_.run();
    update_.gather();
  });
  model_.progress.count_window();
}

void Step::drop_window() {
  model_.params.forget_delivered();
  // Statistics may be half changed in a window that is invalid.
  const bool invalid = model_.window.state() == GA_WINDOW_INVALID;
  if (model_.options.deferring() || stages_.accumulator.rows_held() > 0 ||
      stages_.layers.has_statistics() || model_.window.rejected() || invalid)
    model_.backend->clear_window();
  empty_window();
}

const void* Step::gradient(ga_param id, int32_t* dtype, int64_t* count) const {
  const Param& p = model_.params.get(id);
  const ga_optimizer& o = model_.params.group_of(p).optimizer;
  if (o.kind != GA_OPTIMIZER_EXTERNAL)
    model_.params.subject(id).fail(
        GA_ERROR_INVALID_ARGUMENT,
        "its group has the optimizer %s; ga_gradient is for GA_OPTIMIZER_EXTERNAL",
        model_.params.group_of(p).info->name);
  ParamState state = {};
  const bool stepped = p.delivered && model_.progress.control().go;
  if (stepped)
    model_.backend->read(&state, model_.tables.param_states.at(static_cast<size_t>(id)),
                         sizeof state);
  if (!stepped || !state.touched)
    model_.params.subject(id).fail(
        GA_ERROR_INVALID_STATE,
        "there is no gradient; ga_gradient is legal after an applied ga_step in which "
        "the parameter had one, until the next accumulate, ga_discard or ga_step");
  if (dtype) *dtype = p.accumulator_dtype;
  if (count) *count = p.count;
  return p.accumulator;
}

}  // namespace ga
