// SPDX-License-Identifier: Apache-2.0
// The decisions of a step, from the partials of the gradients to the numbers that the kernels read.
// All backends share this code and run it with a Crew, one thread on the CPU or a block on a GPU:
//
//     struct Crew {
//       void each_item(int64_t n, F f);   // f(i) for i in [0, n), then a barrier
//       void each_warp(int64_t n, F f);   // f(i, warp) for i in [0, n), then a barrier
//       void each_octet(int64_t n, F f);  // as each_warp, for many items of few numbers each
//       void once(F f);                   // f() in one thread, then a barrier
//       bool recall(const ScalarTables&, int64_t i);  // for plan_param() alone, see below
//     };
//     struct Warp {
//       double sum(int64_t n, F f);       // the sum of f(j), in 32 lanes, in a fixed order
//       double smallest(int64_t n, F f);  // the least f(j); infinite for n = 0
//       int64_t first(int64_t n, F f);    // the least j with f(j) true; -1: none
//       bool leader() const;              // true in one thread of the warp
//     };
//
// All threads of a Crew call each function. f(i) runs for several i at a time, none of which may
// depend on another; f(j) of a Warp has no side effect and may run more than once for a j. recall()
// is called for each updated parameter and may always return false. True means that recall() has
// taken what plan_anew() would compute from a parameter for which it comes to equal bytes.
//
// The order of sums, and so their bits, does not depend on the Crew.
#pragma once

#include <math.h>

#include <new>
#include <type_traits>

#include "backend/backend.hpp"
#include "ops/all.hpp"

namespace ga {

// ---- Dispatch over the lists of optimizers and Ops ----------------------------------------------

template <class List>
struct ByKind;
template <class... O>
struct ByKind<TypeList<O...>> {
  // Calls f(optimizer) for the optimizer of that kind.
  template <class F>
  GA_HD static void call(int32_t kind, F&& f) {
    (void)((O::kind == kind ? (f(O()), true) : false) || ...);
  }
};

template <class List>
struct ByPosition;
template <class... Op>
struct ByPosition<TypeList<Op...>> {
  GA_HD static void fold(int op, const ga_optimizer& o, const StepInput& in, OpBytes& out) {
    int at = 0;
    static_assert(((sizeof(Op) <= sizeof out.bytes && alignof(Op) <= alignof(OpBytes)) && ...));
    static_assert(((std::is_trivially_copyable_v<Op> && Op::slots <= kMaxSlots) && ...));
    (void)((at++ == op ? (new (out.bytes) Op(o, in), true) : false) || ...);
  }
  GA_HD static bool layer_wise(int op) {
    int at = 0;
    bool found = false;
    (void)((at++ == op ? (found = Op::norms > 0, true) : false) || ...);
    return found;
  }
};

GA_HD void advance_clock(const ga_optimizer& o, Clock& clock) {
  ByKind<Optimizers>::call(o.kind, [&](auto optimizer) { optimizer.advance(o, clock); });
}

// ---- Clipping -----------------------------------------------------------------------------------

GA_HD double clip_factor(const ga_clip& clip, double norm) {
  if (clip.flavor == GA_FLAVOR_KERAS) return norm > clip.max_norm ? clip.max_norm / norm : 1;
  const double factor = clip.max_norm / (norm + 1e-6);
  return factor < 1 ? factor : 1;
}

// The clip factor of a unit (Brock et al. 2021, equation 3).
GA_HD double agc_factor(const UnitTask& task, int64_t unit) {
  const double g = sqrt(task.sums[unit]);
  const double p = sqrt(task.param_sums[unit]);
  const double most = task.factor * (p < task.eps ? task.eps : p);
  return g > most ? most / larger(g, 1e-6) : 1;
}

GA_HD void store_agc_factor(const UnitTask& task, int64_t unit) {
  const double factor = unit_scale(task.gradient) * agc_factor(task, unit);
  if (task.f64)
    static_cast<double*>(task.factors)[unit] = factor;
  else
    static_cast<float*>(task.factors)[unit] = static_cast<float>(factor);
}

// ---- The end of a window: sums ------------------------------------------------------------------
//
// A window ends in two steps: sum_window() adds up the partials, judge_window() decides. All that
// judge_window() reads of the gradients is in Control::sums and ParamState::sums, neither partials
// nor the place of a gradient. These sums are additive, so a communicator can reduce them over all
// ranks between the two steps.

// What all ranks bring to the window.
GA_HD WindowSums brought(const ScalarTables& t, const WindowTotals& w) {
  return w.over_ranks ? t.control->sums : brought_by(*t.settings, *t.control, w);
}

GA_HD bool has_gradient(const ScalarTables& t, int64_t i) {
  const ParamInput& p = t.param_inputs[i];
  if (p.frozen || p.held == Held::kNothing) return false;
  return !t.settings->deferring || t.param_states[i].contributed != 0;
}

// After add_ranks().
GA_HD bool some_rank_has_gradient(const ScalarTables& t, int64_t i) {
  return !t.param_inputs[i].frozen && t.param_states[i].sums.gradients != 0;
}

// Whether a step updates a parameter or delivers its gradient. The maximum of nothing is not zero.
GA_HD bool is_touched(const ScalarTables& t, int64_t i, bool gradient) {
  const ParamInput& p = t.param_inputs[i];
  return !p.frozen && (gradient || (t.settings->missing == GA_MISSING_ZERO && !p.maximum));
}

// Whether there is a gradient of all rows.
GA_HD bool is_dense(const ParamInput& p) {
  return p.held == Held::kStored || p.held == Held::kAdopted || p.held == Held::kSummed;
}

GA_HD double weight_of(const ScalarTables& t, int64_t i) {
  const bool checked =
      t.settings->deferring && t.settings->running_mean && t.param_inputs[i].held != Held::kSummed;
  return checked ? t.param_states[i].held_weight : t.param_inputs[i].weight;
}

GA_HD double mean_of(const Settings& set, double weight) {
  return set.reduce == GA_REDUCE_MEAN ? 1 / weight : 1;
}

// The mean as known before the decision, for norms.
GA_HD double mean_of(const ScalarTables& t, const WindowTotals& w) {
  return mean_of(*t.settings, brought(t, w).weight);
}

// ParamPlan::raw.
GA_HD Numbers raw_numbers(const ScalarTables& t, double mean, int64_t i) {
  const GroupInput& g = t.group_inputs[t.param_inputs[i].group];
  const double sign = g.optimizer.maximize ? -1 : 1;
  const bool limited = g.clip.when == GA_CLIP_WHEN_STEP;
  return {mean * weight_of(t, i) * sign, limited ? g.clip.max_value : HUGE_VAL, 1};
}

// Task tables divide by the result's loss scale. Before the decision only the scaler has the value.
GA_HD void undecided(const ScalarTables& t, Source& source) {
  if (source.divisor) source.divisor = &t.control->scaler.scale;
}

// The task that takes the norm of a gradient before the decision. tasks: at addresses for the
// caller. raw: raw_numbers().
template <class Tasks>
GA_HD NormTask norm_task(const ScalarTables& t, const Tasks& tasks, int64_t i, const Numbers* raw) {
  const ParamInput& p = t.param_inputs[i];
  const UpdateTask& update = tasks.updates[i];
  const bool layered = ByPosition<AllOps<float>>::layer_wise(p.op);
  NormTask task = {};
  task.gradient = p.by_units ? tasks.units[i].gradient
                  : layered  ? tasks.measures[i].gradient
                             : update.gradient;
  task.gradient.numbers = p.clamped ? raw : nullptr;
  undecided(t, task.gradient.source);
  task.f64 = p.f64;
  task.count = p.count;
  task.partials = update.partials;
  return task;
}

// Sums of the partials of a parameter whose gradient is held.
template <class Warp, class Take>
GA_DEVICE void sum_partials(Warp& warp, const ScalarTables& t, int64_t i, bool held, Take&& take) {
  const ParamInput& p = t.param_inputs[i];
  const bool rows = p.held == Held::kRows && !p.stale_rows;
  const bool measured = held && !p.unmeasured;
  const int64_t n = !measured ? 0 : rows ? p.rows->size : chunk_count(p.measured_count);
  const auto partial = [&](int64_t k) -> const Partial& {
    return rows ? p.rows->entries[k].partial : p.partials[k];
  };
  const double squares = warp.sum(n, [&](int64_t k) { return partial(k).sum_squares; });
  const double clamped =
      p.clamped && !rows ? warp.sum(n, [&](int64_t k) { return partial(k).second_squares; }) : 0;
  const double noise = t.settings->noise && p.measured_count == p.count
                           ? warp.sum(n, [&](int64_t k) { return partial(k).noise; })
                           : 0;
  const bool nonfinite = warp.first(n, [&](int64_t k) { return partial(k).nonfinite != 0; }) >= 0;
  if (!warp.leader()) return;
  take(held && !measured ? NAN : squares, clamped, noise, nonfinite);
}

template <class Warp>
GA_DEVICE void sum_param(Warp& warp, const ScalarTables& t, int64_t i) {
  const bool held = has_gradient(t, i);
  sum_partials(warp, t, i, held, [&](double squares, double clamped, double noise, bool nonfinite) {
    ParamSums& sums = t.param_states[i].sums;
    sums.squares = squares;
    sums.clamped = clamped;
    sums.noise = noise;
    sums.nonfinite = nonfinite;
    sums.gradients = held;
    sums.dense = is_dense(t.param_inputs[i]);
  });
}

template <class Crew>
GA_DEVICE void sum_window(Crew& crew, const ScalarTables& t, const WindowTotals& w) {
  crew.once([&] {
    t.control->ticket = w.ticket;
    t.control->sums = brought(t, w);
  });
  if (!w.summed) crew.each_octet(t.params, [&](int64_t i, auto& warp) { sum_param(warp, t, i); });
}

// ---- The end of a window: decision --------------------------------------------------------------

// The squares of a parameter's reduced gradient.
GA_HD double squares_of(const ScalarTables& t, int64_t i) {
  const double scale = t.control->mean * weight_of(t, i);
  return t.param_states[i].sums.squares * scale * scale;
}

// Sets what the clip by norm reads. Maxima are outside of all norms.
GA_HD void reduce_param(const ScalarTables& t, int64_t i) {
  ParamState& s = t.param_states[i];
  s.touched = is_touched(t, i, s.sums.gradients != 0);
  if (t.param_inputs[i].maximum) s.sums.squares = 0;
  s.sum_squares = t.param_inputs[i].clamped ? s.sums.clamped : squares_of(t, i);
}

// Sums the squares of n gradients for a clip by norm: over all groups under the context's clip
// (group -1), or over a group with a clip of its own.
template <class Warp, class GroupOf, class Squares>
GA_DEVICE void total_clip(Warp& warp, const ScalarTables& t, int64_t group, int64_t n,
                          GroupOf group_of, Squares squares) {
  if (group >= 0 && !t.group_inputs[group].own_clip) return;
  const double x = warp.sum(n, [&](int64_t i) {
    const ga_group g = group_of(i);
    const double x = squares(i);
    return (group < 0 ? !t.group_inputs[g].own_clip : g == group) ? x : 0.0;
  });
  if (warp.leader()) (group < 0 ? t.control->totals.shared : t.group_states[group].sum_squares) = x;
}

// Sums over parameters, a warp for each sum: those of the context, then those of the groups.
template <class Crew>
GA_DEVICE void total_params(Crew& crew, const ScalarTables& t) {
  const Settings& set = *t.settings;
  Control& c = *t.control;
  const auto total = [&](auto& warp, auto value) {
    return warp.sum(t.params, [&](int64_t i) {
      const double x = value(i, t.param_states[i]);  // read whether it counts or not, to wait once
      return t.param_states[i].touched ? x : 0.0;
    });
  };
  crew.each_warp(t.groups + 5, [&](int64_t k, auto& warp) {
    if ((k == 1 && !set.clips) || ((k == 3 || k == 4) && !set.noise)) return;
    if (k == 0) {
      const double x = total(warp, [&](int64_t i, const ParamState& s) {
        return t.param_inputs[i].clamped ? squares_of(t, i) : s.sum_squares;
      });
      if (warp.leader()) c.totals.all = x;
    } else if (k == 2) {
      const int64_t first = warp.first(t.params, [&](int64_t i) {
        return t.param_states[i].touched && t.param_states[i].sums.nonfinite != 0;
      });
      if (warp.leader()) c.nonfinite_at = first;
    } else if (k == 3) {
      const double x = total(warp, [](int64_t, const ParamState& s) { return s.sums.noise; });
      if (warp.leader()) c.totals.micros = x;
    } else if (k == 4) {
      const double x = total(warp, [&](int64_t i, const ParamState& s) {
        const double weight = weight_of(t, i);
        return s.sums.squares * weight * weight;
      });
      if (warp.leader()) c.totals.window = x;
    } else {
      total_clip(
          warp, t, k == 1 ? -1 : k - 5, t.params,
          [&](int64_t i) { return t.param_inputs[i].group; },
          [&](int64_t i) {
            const ParamState& s = t.param_states[i];
            const double x = s.sum_squares;
            return s.touched ? x : 0.0;
          });
    }
  });
}

GA_HD void back_off(const ScalarTables& t) {
  Control& c = *t.control;
  if (!t.settings->scaled) return;
  c.scaler.back_off(t.settings->scaler);
  c.loss_scale = static_cast<float>(c.scaler.scale);
}

// Whether gradients can be divided by the sum of the weights in their compute type. In double, the
// squares of the accumulated gradient, which norms need, must neither overflow nor vanish.
GA_HD bool divides(const ScalarTables& t, double weight) {
  if (weight >= 0x1p-126 && weight <= 0x1p127) return true;
  if (!(weight >= 0x1p-400 && weight <= 0x1p400)) return false;
  for (int64_t i = 0; i < t.params; ++i)
    if (t.param_states[i].touched && !t.param_inputs[i].f64 && !t.param_inputs[i].maximum)
      return false;
  return true;
}

// Decides the outcome of the window and whether the step is applied (Control::go).
GA_HD void decide_outcome(const ScalarTables& t) {
  const Settings& set = *t.settings;
  Control& c = *t.control;
  ga_step_result& r = c.result;
  r = {};
  r.struct_size = sizeof r;
  r.micro_batches = static_cast<int64_t>(c.sums.micro_batches);
  r.weight = c.sums.weight;
  r.window_dropped = static_cast<int64_t>(c.sums.dropped);
  r.dropped_micros = c.dropped_micros;
  r.clip_factor = 1;
  r.loss_scale = set.scaled ? c.scaler.scale : set.loss_scale;
  c.go = false;
  if (c.sums.discarded != 0) {
    r.outcome = GA_STEP_SKIPPED_DISCARD;
    r.micro_batches = r.window_dropped = 0;
    r.weight = 0;
    r.dropped_micros = 0;
  } else if (c.sums.failed != 0) {
    r.outcome = GA_STEP_SKIPPED_ERROR;
  } else if (!(r.weight > 0)) {
    r.outcome = GA_STEP_SKIPPED_EMPTY;
  } else if (set.reduce == GA_REDUCE_MEAN && !divides(t, r.weight)) {
    r.outcome = GA_STEP_SKIPPED_WEIGHT;
  } else {
    r.norm = sqrt(c.totals.all);
    c.go = c.nonfinite_at < 0 || set.nonfinite == GA_NONFINITE_IGNORE;
    if (!c.go) r.outcome = GA_STEP_SKIPPED_NONFINITE;
  }
}

// Advances the counters and the loss scale. A rejected window does not count: ga_step returns an
// error, and the window stays until the program discards it, on every rank.
GA_HD void count_window(const ScalarTables& t) {
  const Settings& set = *t.settings;
  Control& c = *t.control;
  ga_step_result& r = c.result;
  if (r.outcome != GA_STEP_SKIPPED_DISCARD) {
    c.rejected = r.outcome == GA_STEP_SKIPPED_NONFINITE && set.nonfinite == GA_NONFINITE_FAIL;
    if (c.rejected) return;
  }
  if (r.outcome == GA_STEP_SKIPPED_NONFINITE || r.window_dropped > 0)
    back_off(t);
  else if (c.go && set.scaled)
    c.scaler.advance(set.scaler);
  c.loss_scale = static_cast<float>(set.scaled ? c.scaler.scale : set.loss_scale);
  c.dropped += r.window_dropped;
  ++c.windows;
  ++(c.go ? c.steps : c.skipped);
  r.windows = c.windows;
  r.steps = c.steps;
  r.skipped = c.skipped;
  r.dropped = c.dropped;
}

GA_HD void estimate_noise(const ScalarTables& t) {
  Control& c = *t.control;
  const double samples = c.sums.weight;
  const bool estimated = c.sums.weighted >= 2 && c.sums.unestimated == 0 && samples * samples > 0 &&
                         is_finite(samples * samples);
  if (c.go && t.settings->noise && estimated)
    c.noise.add(c.totals.micros / samples, c.totals.window / (samples * samples),
                static_cast<int64_t>(c.sums.weighted), samples, t.settings->noise_smoothing);
  c.result.noise_scale = c.noise.scale();
  c.result.noise_trace = c.noise.trace();
  c.result.noise_signal = c.noise.signal();
}

// Sets the clip factor, the learning rate and the clock of a group.
GA_HD void plan_group(const ScalarTables& t, int64_t k) {
  Control& c = *t.control;
  const GroupInput& in = t.group_inputs[k];
  GroupState& g = t.group_states[k];
  g.clip_factor = 1;
  if (in.clip.scope == GA_CLIP_GLOBAL && in.clip.when == GA_CLIP_WHEN_STEP)
    g.clip_factor = clip_factor(in.clip, sqrt(in.own_clip ? g.sum_squares : c.totals.shared));
  if (!c.go) return;
  g.lr = in.schedule.rate(in.optimizer.lr, c.steps - 1);
  if (k == 0) c.result.lr = g.lr;
  advance_clock(in.optimizer, g.clock);
}

GA_HD void clip_param(const ScalarTables& t, int64_t i) {
  ParamState& s = t.param_states[i];
  const int64_t group = t.param_inputs[i].group;
  const ga_clip& clip = t.group_inputs[group].clip;
  s.factor = t.group_states[group].clip_factor;
  if (clip.scope == GA_CLIP_PER_TENSOR && clip.when == GA_CLIP_WHEN_STEP)
    s.factor = clip_factor(clip, sqrt(s.sum_squares));
  s.smallest = s.factor;
  if (!t.param_inputs[i].clipped_in_parts) return;
  s.sum_squares = s.sums.unit_squares;
  s.smallest = s.sums.unit_smallest < 1 ? s.sums.unit_smallest : 1;
}

// Calls f(channel, layer) for all channels of all layers with batch normalisation.
template <class Crew, class F>
GA_DEVICE void each_channel(Crew& crew, const ScalarTables& t, F&& f) {
  for (int64_t l = 0; l < t.bn_count; ++l) {
    const BnInput& layer = t.bn[l];
    crew.each_item(layer.channels, [&](int64_t c) { f(layer.state[c], layer); });
  }
}

GA_HD BnHistory history_of(const BnChannel& c, const BnInput& layer) {
  return {layer.history, layer.channels, &c - layer.state};
}

// Resets the counters of a window.
template <class Crew>
GA_DEVICE void clear_window(Crew& crew, const ScalarTables& t) {
  crew.once([&] {
    Control& c = *t.control;
    if (c.rejected) back_off(t);
    c.rejected = false;
    c.weight = 0;
    c.weighted = c.window_dropped = 0;
    c.dropped_micros = 0;
    c.micro_finite = c.failed = false;
  });
  if (t.settings->deferring)
    crew.each_item(t.params, [&](int64_t i) { t.param_states[i].contributed = 0; });
  each_channel(crew, t, [](BnChannel& c, const BnInput&) { forget(c); });
}

// Writes the smallest factor of all parameters to the result.
template <class Crew>
GA_DEVICE void take_smallest(Crew& crew, const ScalarTables& t) {
  crew.each_warp(1, [&](int64_t, auto& warp) {
    const double smallest = warp.smallest(t.params, [&](int64_t i) {
      const bool clipped = t.param_states[i].touched && !t.param_inputs[i].maximum;
      return clipped ? t.param_states[i].smallest : 1.0;
    });
    if (warp.leader() && t.control->go) t.control->result.clip_factor = smallest < 1 ? smallest : 1;
  });
}

GA_HD bool is_bounded(const ScalarTables& t, int64_t i) {
  const ga_optimizer& o = t.group_inputs[t.param_inputs[i].group].optimizer;
  return t.param_states[i].touched && o.kind == t.settings->bounded;
}

// Sums the squares of the clipped gradients of groups that share max_grad_norm.
template <class Crew>
GA_DEVICE void sum_bounded(Crew& crew, const ScalarTables& t) {
  crew.each_warp(1, [&](int64_t, auto& warp) {
    const double sum = warp.sum(t.params, [&](int64_t i) {
      const ParamState& s = t.param_states[i];
      return is_bounded(t, i) ? s.sum_squares * s.factor * s.factor : 0.0;
    });
    if (warp.leader()) t.control->totals.bounded = sum;
  });
}

// Divides these gradients by norm / max_grad_norm if that is above 1.
template <class Crew>
GA_DEVICE void bound_groups(Crew& crew, const ScalarTables& t) {
  if (t.settings->bounded < 0 || !t.control->go) return;
  sum_bounded(crew, t);
  crew.each_item(t.params, [&](int64_t i) {
    const double most = t.group_inputs[t.param_inputs[i].group].optimizer.max_grad_norm;
    if (!is_bounded(t, i) || !(most > 0)) return;
    const double over = sqrt(t.control->totals.bounded) / most;
    if (over > 1) t.param_states[i].factor /= over;  // a NaN leaves the factor alone
  });
}

// The input for folding a parameter's Op. measured: the first pass of a layer-wise Op has run.
GA_HD StepInput step_input(const ScalarTables& t, int64_t i, bool measured) {
  const ParamInput& p = t.param_inputs[i];
  const ParamState& s = t.param_states[i];
  const GroupState& g = t.group_states[p.group];
  const ga_optimizer& o = t.group_inputs[p.group].optimizer;
  return {g.lr * p.lr_scale,
          o.weight_decay * p.weight_decay_scale,
          o.flavor == GA_FLAVOR_TORCH ? s.clock : g.clock,
          p.extent,
          p.extent > 0 ? p.count / p.extent : 0,
          sqrt(s.sum_squares) * s.factor,
          {measured ? sqrt(s.norm_squares[0]) : 0, measured ? sqrt(s.norm_squares[1]) : 0}};
}

GA_HD void fold(const ScalarTables& t, int64_t i, bool measured) {
  const ParamInput& p = t.param_inputs[i];
  const ga_optimizer& o = t.group_inputs[p.group].optimizer;
  const StepInput in = step_input(t, i, measured);
  if (p.f64)
    ByPosition<AllOps<double>>::fold(p.op, o, in, t.plans[i].folded);
  else
    ByPosition<AllOps<float>>::fold(p.op, o, in, t.plans[i].folded);
}

// Sets the numbers of the gradient. To be called again whenever ParamState::factor has changed.
GA_HD void plan_gradient(const ScalarTables& t, int64_t i) {
  const ParamInput& p = t.param_inputs[i];
  const double factor = t.param_states[i].factor;
  ParamPlan& plan = t.plans[i];
  Numbers gradient = plan.raw;
  if (p.by_units)  // the gradient's source contains scale, limit and the units' factors
    gradient = {factor, HUGE_VAL, 1};
  else if (is_finite(gradient.limit))
    gradient.factor = factor;
  else  // mean and clip factor become one scalar, rounded once
    gradient.scale *= factor;
  plan.gradient = gradient;
  plan.factor = factor;
}

// What plan_param() computes unless recall() has taken it from another parameter.
GA_COLD void plan_anew(const ScalarTables& t, int64_t i) {
  const ParamInput& p = t.param_inputs[i];
  const ga_optimizer& o = t.group_inputs[p.group].optimizer;
  Clock& clock = t.param_states[i].clock;
  ParamPlan& plan = t.plans[i];
  advance_clock(o, clock);
  plan.raw = raw_numbers(t, t.control->mean, i);
  plan_gradient(t, i);
  if (p.op < 0) {
    if (p.maximum) plan.raw = plan.gradient = {1, HUGE_VAL, 1};
    return;
  }
  ByKind<Optimizers>::call(o.kind, [&](auto optimizer) {
    plan.factor_gain = optimizer.factor_gain(o, clock);
    plan.factor_floor = optimizer.factor_floor(o);
  });
  fold(t, i, false);
}

// Sets the plan of a parameter.
template <class Crew>
GA_DEVICE void plan_param(Crew& crew, const ScalarTables& t, int64_t i) {
  const ParamInput& p = t.param_inputs[i];
  ParamState& s = t.param_states[i];
  ParamPlan& plan = t.plans[i];
  const Control& c = *t.control;
  plan.duty = 0;
  if (!c.go) return;
  if (p.average) {
    plan.duty |= kFollow;
    const double steps = static_cast<double>(c.steps);
    const ga_ema& e = t.settings->ema;
    plan.average_gain =
        !s.averaged ? 1 : 1 - (e.kind == GA_EMA_TORCH ? e.decay : pow(1 - 1 / steps, e.gamma + 1));
    s.averaged = true;
  }
  if (p.by_chance) {
    const uint64_t seed = t.settings->seed;
    plan.copy_key = random_key(seed, Purpose::kCopy, c.steps - 1, 0, p.key);
    plan.state_key = random_key(seed, Purpose::kState, c.steps - 1, 0, p.key);
  }
  if (!s.touched) return;
  const bool rows = p.lazy && s.sums.dense == 0;
  plan.duty |= p.op < 0 ? kDeliver : rows ? kUpdateRows : kUpdate;
  if (!crew.recall(t, i)) plan_anew(t, i);
}

// Decides the step. last: no settle_units() follows.
template <class Crew>
GA_DEVICE void judge_window(Crew& crew, const ScalarTables& t, bool last) {
  const Settings& set = *t.settings;
  Control& c = *t.control;
  crew.once([&] { c.mean = mean_of(set, c.sums.weight); });
  crew.each_item(t.params, [&](int64_t i) { reduce_param(t, i); });
  total_params(crew, t);
  crew.once([&] {
    decide_outcome(t);
    count_window(t);
    estimate_noise(t);
  });
  // Asked before a thread may be in clear_window(), which changes what this reads.
  const bool clears = !c.rejected || c.sums.discarded != 0;
  crew.each_item(t.groups, [&](int64_t k) { plan_group(t, k); });
  const bool bounded = set.bounded >= 0;
  if (bounded) {
    crew.each_item(t.params, [&](int64_t i) { clip_param(t, i); });
    if (last) bound_groups(crew, t);
  }
  crew.each_item(t.params, [&](int64_t i) {
    if (!bounded) clip_param(t, i);
    plan_param(crew, t, i);
  });
  if (set.clips) take_smallest(crew, t);
  if (c.go)
    each_channel(crew, t, [&](BnChannel& channel, const BnInput& layer) {
      if (!layer.frozen)
        commit(channel, history_of(channel, layer), c.result.micro_batches, layer.momentum,
               layer.biased);
    });
  if (clears) clear_window(crew, t);
}

// Computes UnitTask::totals.
template <class Warp>
GA_DEVICE void total_units(const UnitTask& task, Warp& warp) {
  const int64_t n = task.pattern->units, cut = task.cut > 0 ? task.cut : n;
  double squares = 0;
  for (int64_t first = 0; first < n; first += cut)
    squares += warp.sum(n - first < cut ? n - first : cut, [&](int64_t k) {
      const double factor = agc_factor(task, first + k);
      return task.sums[first + k] * factor * factor;
    });
  const double least = warp.smallest(n, [&](int64_t u) { return agc_factor(task, u); });
  if (warp.leader()) *task.totals = {squares, least};
}

// Replaces the norms of these parameters by those after the clip by units.
template <class Crew>
GA_DEVICE void sum_units(Crew& crew, const ScalarTables& t, const UnitTask* units,
                         const ga_param* ids, int64_t count) {
  if (!t.control->go) return;
  crew.each_item(count, [&](int64_t k) {
    const UnitTask& task = units[ids[k]];
    ParamState& s = t.param_states[ids[k]];
    if (!task.param.data || !s.touched) return;
    s.sum_squares = task.totals->squares;
    s.smallest = task.totals->smallest < 1 ? task.totals->smallest : 1;
  });
}

// After sum_units(): repeats the decisions that depend on norms. last: no other parameters follow.
template <class Crew>
GA_DEVICE void settle_units(Crew& crew, const ScalarTables& t, const ga_param* ids, int64_t count,
                            bool last) {
  if (!t.control->go) return;
  take_smallest(crew, t);
  if (last) bound_groups(crew, t);
  const bool all = last && t.settings->bounded >= 0;
  crew.each_item(all ? t.params : count, [&](int64_t k) {
    const int64_t i = all ? k : ids[k];
    if ((t.plans[i].duty & kUpdate) == 0) return;
    plan_gradient(t, i);
    const ParamInput& p = t.param_inputs[i];
    if (ByPosition<AllOps<float>>::layer_wise(p.op)) fold(t, i, false);
  });
}

// Adds up the norms from the first pass of layer-wise Ops.
template <class Crew>
GA_DEVICE void sum_layers(Crew& crew, const ScalarTables& t, const UpdateTask* measures,
                          const ga_param* ids, int64_t count) {
  crew.each_octet(count, [&](int64_t k, auto& warp) {
    const int64_t i = ids[k];
    if ((t.plans[i].duty & kUpdate) == 0) return;
    const UpdateTask& task = measures[i];
    const Partial* partials = task.partials;
    double first = 0, second = 0;
    const int64_t stretch = task.stretch();
    for (int64_t at = 0; at < task.count; at += stretch) {
      const int64_t left = task.count - at;
      const int64_t n = chunk_count(left < stretch ? left : stretch);
      first += warp.sum(n, [&](int64_t c) { return partials[c].sum_squares; });
      second += warp.sum(n, [&](int64_t c) { return partials[c].second_squares; });
      partials += n;
    }
    if (!warp.leader()) return;
    t.param_states[i].norm_squares[0] = first;
    t.param_states[i].norm_squares[1] = second;
  });
}

// After sum_layers(): folds these Ops for the second pass.
template <class Crew>
GA_DEVICE void fold_layers(Crew& crew, const ScalarTables& t, const ga_param* ids, int64_t count) {
  crew.each_item(count, [&](int64_t k) {
    const int64_t i = ids[k];
    if ((t.plans[i].duty & kUpdate) == 0) return;
    fold(t, i, true);
    const double divisor = larger(sqrt(t.param_states[i].norm_squares[0]),
                                  t.group_inputs[t.param_inputs[i].group].optimizer.eps);
    t.plans[i].orthogonal_scale = divisor > 0 ? 1 / divisor : 0;
  });
}

// ---- Factored second moments --------------------------------------------------------------------

// The task for the sums of squares over rows or columns.
GA_HD UnitTask sums_of(const FactorTask& task, bool rows) {
  UnitTask sums = {};
  sums.gradient = task.gradient;
  sums.f64 = task.f64;
  sums.pattern = rows ? task.row_pattern : task.column_pattern;
  sums.sums = rows ? task.row_sums : task.column_sums;
  return sums;
}

// A state by rows: adds what the sum of a row comes to.
template <class T>
GA_HD void add_row_mean(const FactorTask& task, int64_t row) {
  const double clipped = task.plan->factor * task.plan->factor;
  static_cast<T*>(task.rows)[row] +=
      static_cast<T>(task.row_sums[row] * clipped / static_cast<double>(task.column_count));
}

template <class T, class Crew>
GA_DEVICE void blend_as(Crew& crew, const FactorTask& task) {
  if (!task.columns)
    return crew.each_item(task.row_count, [&](int64_t i) { add_row_mean<T>(task, i); });
  const T gain = static_cast<T>(task.plan->factor_gain);
  const double clipped = task.plan->factor * task.plan->factor;
  T* const rows = static_cast<T*>(task.rows);
  T* const columns = static_cast<T*>(task.columns);
  const auto into = [&](T* ema, const double* sums, int64_t units, int64_t length) {
    crew.each_item(units, [&](int64_t i) {
      const T mean = static_cast<T>(sums[i] * clipped / static_cast<double>(length));
      ema[i] += gain * (mean - ema[i]);
    });
  };
  into(rows, task.row_sums, task.row_pattern->units, task.column_count);
  into(columns, task.column_sums, task.column_pattern->units, task.row_count);
  crew.each_warp(task.matrices, [&](int64_t m, auto& warp) {
    const double sum = warp.sum(task.row_count, [&](int64_t i) {
      return static_cast<double>(rows[m * task.row_count + i]);
    });
    if (!warp.leader()) return;
    const double mean = sum / static_cast<double>(task.row_count);
    const double floor = task.plan->factor_floor;
    static_cast<T*>(task.scales)[m] = static_cast<T>(1 / (mean < floor ? floor : mean));
  });
}

// After these sums, over all ranks: updates the EMAs and computes the scales.
template <class Crew>
GA_DEVICE void blend(Crew& crew, const FactorTask& task) {
  if ((task.plan->duty & kUpdate) == 0) return;
  if (task.f64)
    blend_as<double>(crew, task);
  else
    blend_as<float>(crew, task);
}

// ---- A micro-batch ------------------------------------------------------------------------------

// The contributions to a micro-batch.
struct Contributions {
  const MicroInput* inputs;
  MicroPlan* plans;
  int64_t count;

  GA_HD ga_group group_of(const ScalarTables& t, int64_t k) const {
    return t.param_inputs[inputs[k].param].group;
  }
  GA_HD bool is_maximum(const ScalarTables& t, int64_t k) const {
    return t.param_inputs[inputs[k].param].maximum;
  }
};

// Sets the views through which the norms of the contributions are taken.
template <class Crew>
GA_DEVICE void open_micro(Crew& crew, const ScalarTables& t, const Contributions& m) {
  crew.each_item(m.count, [&](int64_t k) {
    const ga_clip& clip = t.group_inputs[m.group_of(t, k)].clip;
    m.plans[k].view = {1, clip.when == GA_CLIP_WHEN_MICRO ? clip.max_value : HUGE_VAL, 1};
  });
}

// Adds up the partials of each contribution.
template <class Crew>
GA_DEVICE void sum_micro(Crew& crew, const Contributions& m) {
  crew.each_octet(m.count, [&](int64_t k, auto& warp) {
    const MicroInput& in = m.inputs[k];
    MicroPlan& plan = m.plans[k];
    const bool clamped = is_finite(plan.view.limit);
    const double squares = warp.sum(in.chunks, [&](int64_t j) {
      return clamped ? in.partials[j].second_squares : in.partials[j].sum_squares;
    });
    const int64_t bad =
        warp.first(in.chunks, [&](int64_t j) { return in.partials[j].nonfinite != 0; });
    if (!warp.leader()) return;
    plan.squares = squares;
    plan.nonfinite = bad >= 0;
  });
}

// Computes whether all contributions are finite, and total_clip() for the context and each group.
template <class Crew>
GA_DEVICE void total_micro(Crew& crew, const ScalarTables& t, const Contributions& m) {
  Control& c = *t.control;
  crew.each_warp(t.groups + 2, [&](int64_t j, auto& warp) {
    if (j == 0) {
      const int64_t bad = warp.first(m.count, [&](int64_t k) { return m.plans[k].nonfinite; });
      if (warp.leader()) c.micro_finite = bad < 0;
    } else {
      total_clip(
          warp, t, j - 2, m.count, [&](int64_t k) { return m.group_of(t, k); },
          [&](int64_t k) { return m.is_maximum(t, k) ? 0.0 : m.plans[k].squares; });
    }
  });
}

// Sets how a contribution is added to the accumulator, if at all.
GA_HD void plan_contribution(const ScalarTables& t, const MicroInput& in, const Micro& micro,
                             bool added, MicroPlan& plan) {
  const Settings& set = *t.settings;
  const Control& c = *t.control;
  const ParamState& s = t.param_states[in.param];
  const ga_group group = t.param_inputs[in.param].group;
  const GroupInput& g = t.group_inputs[group];
  const ga_clip& clip = g.clip;
  // A nonfinite contribution is added unclipped: a clip by value would hide it from ga_step.
  const bool clips = set.clip_micro && (c.micro_finite || set.nonfinite == GA_NONFINITE_IGNORE);
  plan.active = added;
  if (t.param_inputs[in.param].maximum) {
    plan.scale = 1 / (micro.loss_scale != 0 ? micro.loss_scale : c.scaler.scale);
    plan.keep = in.again || s.contributed != 0 ? kMaximum : 0;
    plan.noise = 0;
    return;
  }
  plan.scale = set.gradient_kind == GA_GRADIENT_MEAN ? micro.weight : 1;
  if (set.running_mean && added) plan.scale /= c.weight;  // c.weight may be 0 if it is not added
  if (clip.when != GA_CLIP_WHEN_MICRO ||
      (clip.scope == GA_CLIP_NONE && !is_finite(clip.max_value))) {
    plan.scale /= micro.loss_scale != 0 ? micro.loss_scale : c.scaler.scale;
  } else if (!clips) {
    plan.view.limit = HUGE_VAL;
  } else if (clip.scope == GA_CLIP_GLOBAL || clip.scope == GA_CLIP_PER_TENSOR) {
    const double squares = clip.scope == GA_CLIP_PER_TENSOR ? plan.squares
                           : g.own_clip                     ? t.group_states[group].sum_squares
                                                            : c.totals.shared;
    plan.view.factor = clip_factor(clip, sqrt(squares));
  }
  plan.keep = in.again || s.contributed != 0 ? 1 : 0;
  plan.noise = set.noise ? 1 / micro.weight : 0;
  if (set.running_mean) {
    if (!in.again && s.contributed != 0) plan.keep *= s.held_weight / c.weight;
    plan.noise *= c.weight * c.weight;  // c.weight divides the stored contribution
  }
}

// After sum_micro(): decides whether and how micro-batch number index is added.
template <class Crew>
GA_DEVICE void judge_micro(Crew& crew, const ScalarTables& t, const Contributions& m,
                           const Micro& micro, int64_t index) {
  Control& c = *t.control;
  total_micro(crew, t, m);
  const bool added = c.micro_finite || t.settings->nonfinite != GA_NONFINITE_DROP_MICRO;
  crew.once([&] {
    if (!added) {
      ++c.window_dropped;
      if (index < 64) c.dropped_micros |= uint64_t{1} << index;
    } else {
      c.weight += micro.weight;
      ++c.weighted;
    }
  });
  crew.each_item(m.count,
                 [&](int64_t k) { plan_contribution(t, m.inputs[k], micro, added, m.plans[k]); });
  if (!added) {
    each_channel(crew, t, [&](BnChannel& channel, const BnInput& layer) {
      drop(channel, history_of(channel, layer), index);
    });
    return;
  }
  crew.each_item(m.count, [&](int64_t k) {
    ParamState& s = t.param_states[m.inputs[k].param];
    s.contributed = 1;
    s.held_weight = c.weight;
  });
}

}  // namespace ga
