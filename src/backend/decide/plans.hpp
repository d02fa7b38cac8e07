// SPDX-License-Identifier: Apache-2.0
// What a step does to each group and parameter: clip factors, learning rates, clocks, folded Ops.
#pragma once

#include "backend/decide/outcome.hpp"

namespace ga {

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
  advance_clock(in.optimizer, g.clock, g.lr);
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
template <class ThreadGroup, class F>
GA_DEVICE void each_channel(ThreadGroup& threads, const ScalarTables& t, F&& f) {
  for (int64_t l = 0; l < t.bn_count; ++l) {
    const BnInput& layer = t.bn[l];
    threads.each_item(layer.channels, [&](int64_t c) { f(layer.state[c], layer); });
  }
}

GA_HD BnHistory history_of(const BnChannel& c, const BnInput& layer) {
  return {layer.history, layer.channels, &c - layer.state};
}

// Resets the counters of a window.
template <class ThreadGroup>
GA_DEVICE void clear_window(ThreadGroup& threads, const ScalarTables& t) {
  threads.once([&] {
    Control& c = *t.control;
    if (c.rejected) back_off(t);
    c.rejected = false;
    c.weight = 0;
    c.weighted = c.window_dropped = 0;
    c.dropped_micros = 0;
    c.micro_finite = c.failed = false;
  });
  if (t.settings->deferring)
    threads.each_item(t.params, [&](int64_t i) { t.param_states[i].contributed = 0; });
  each_channel(threads, t, [](BnChannel& c, const BnInput&) { forget(c); });
}

// Writes the smallest factor of all parameters to the result.
template <class ThreadGroup>
GA_DEVICE void take_smallest(ThreadGroup& threads, const ScalarTables& t) {
  threads.each_warp(1, [&](int64_t, auto& warp) {
    const double smallest = warp.smallest(t.params, [&](int64_t i) {
      const bool clipped = t.param_states[i].touched && is_sum(t.param_inputs[i].reduction);
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
template <class ThreadGroup>
GA_DEVICE void sum_bounded(ThreadGroup& threads, const ScalarTables& t) {
  threads.each_warp(1, [&](int64_t, auto& warp) {
    const double sum = warp.sum(t.params, [&](int64_t i) {
      const ParamState& s = t.param_states[i];
      return is_bounded(t, i) ? s.sum_squares * s.factor * s.factor : 0.0;
    });
    if (warp.leader()) t.control->totals.bounded = sum;
  });
}

// Divides these gradients by norm / max_grad_norm if that is above 1.
template <class ThreadGroup>
GA_DEVICE void bound_groups(ThreadGroup& threads, const ScalarTables& t) {
  if (t.settings->bounded < 0 || !t.control->go) return;
  sum_bounded(threads, t);
  threads.each_item(t.params, [&](int64_t i) {
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
          p.outputs,
          p.inputs,
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
  advance_clock(o, clock, t.group_states[p.group].lr);
  plan.raw = raw_numbers(t, t.control->mean, i);
  plan_gradient(t, i);
  if (p.op < 0) {
    if (!is_sum(p.reduction)) plan.raw = plan.gradient = {1, HUGE_VAL, 1};
    return;
  }
  ByKind<Optimizers>::call(o.kind, [&](auto optimizer) {
    plan.factor_gain = optimizer.factor_gain(o, clock);
    plan.factor_floor = optimizer.factor_floor(o);
  });
  fold(t, i, false);
}

// Sets the plan of a parameter.
template <class ThreadGroup>
GA_DEVICE void plan_param(ThreadGroup& threads, const ScalarTables& t, int64_t i) {
  const ParamInput& p = t.param_inputs[i];
  ParamState& s = t.param_states[i];
  ParamPlan& plan = t.plans[i];
  const Control& c = *t.control;
  plan.actions = 0;
  if (!c.go) return;
  if (p.average) {
    plan.actions |= kFollow;
    plan.average_gain = s.averaged ? c.average_gain : 1;
    s.averaged = true;
  }
  if (p.stochastic) {
    const uint64_t seed = t.settings->seed;
    plan.copy_key = random_key(seed, Purpose::kCopy, c.steps - 1, 0, p.key);
    plan.state_key = random_key(seed, Purpose::kState, c.steps - 1, 0, p.key);
  }
  if (!s.touched) return;
  const bool rows = p.lazy && s.sums.dense == 0;
  plan.actions |= p.op < 0 ? kDeliver : rows ? kUpdateRows : kUpdate;
  if (!threads.recall(t, i)) plan_anew(t, i);
}

}  // namespace ga
