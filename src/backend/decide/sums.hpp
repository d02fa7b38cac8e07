// SPDX-License-Identifier: Apache-2.0
// A window ends in two steps: sum_window() adds up the partials, decide_window() decides. All that
// decide_window() reads of the gradients is in Control::sums and ParamState::sums, neither partials
// nor the place of a gradient. These sums are additive, so a communicator can reduce them over all
// ranks between the two steps.
#pragma once

#include "backend/backend.hpp"
#include "backend/decide/options.hpp"

namespace ga {

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

// Whether a step updates a parameter or delivers its gradient.
GA_HD bool is_touched(const ScalarTables& t, int64_t i, bool gradient) {
  const ParamInput& p = t.param_inputs[i];
  return !p.frozen && (gradient || (t.settings->missing == GA_MISSING_ZERO && is_sum(p.reduction)));
}

// Whether there is a gradient of all rows.
GA_HD bool is_dense(const ParamInput& p) {
  return p.held == Held::kStored || p.held == Held::kBorrowed || p.held == Held::kReduced;
}

GA_HD double weight_of(const ScalarTables& t, int64_t i) {
  const bool checked =
      t.settings->deferring && t.settings->running_mean && t.param_inputs[i].held != Held::kReduced;
  return checked ? t.param_states[i].held_weight : t.param_inputs[i].weight;
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

template <class ThreadGroup>
GA_DEVICE void sum_window(ThreadGroup& threads, const ScalarTables& t, const WindowTotals& w) {
  threads.once([&] {
    t.control->ticket = w.ticket;
    t.control->sums = brought(t, w);
  });
  if (!w.reduced)
    threads.each_lane_group(t.params, [&](int64_t i, auto& warp) { sum_param(warp, t, i); });
}

}  // namespace ga
