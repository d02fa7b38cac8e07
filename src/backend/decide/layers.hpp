// SPDX-License-Identifier: Apache-2.0
// What is decided between the passes of an update: norms after a clip by units, norms over layers, factored second
// moments.
#pragma once

#include "backend/decide/plans.hpp"

namespace ga {

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
template <class ThreadGroup>
GA_DEVICE void sum_units(ThreadGroup& threads, const ScalarTables& t, const UnitTask* units,
                         const ga_param* ids, int64_t count) {
  if (!t.control->go) return;
  threads.each_item(count, [&](int64_t k) {
    const UnitTask& task = units[ids[k]];
    ParamState& s = t.param_states[ids[k]];
    if (!task.param.data || !s.touched) return;
    s.sum_squares = task.totals->squares;
    s.smallest = task.totals->smallest < 1 ? task.totals->smallest : 1;
  });
}

// After sum_units(): repeats the decisions that depend on norms. last: no other parameters follow.
template <class ThreadGroup>
GA_DEVICE void settle_units(ThreadGroup& threads, const ScalarTables& t, const ga_param* ids,
                            int64_t count, bool last) {
  if (!t.control->go) return;
  take_smallest(threads, t);
  if (last) bound_groups(threads, t);
  const bool all = last && t.settings->bounded >= 0;
  threads.each_item(all ? t.params : count, [&](int64_t k) {
    const int64_t i = all ? k : ids[k];
    if ((t.plans[i].actions & kUpdate) == 0) return;
    plan_gradient(t, i);
    const ParamInput& p = t.param_inputs[i];
    if (ByPosition<AllOps<float>>::layer_wise(p.op)) fold(t, i, false);
  });
}

// Adds up the norms from the first pass of layer-wise Ops.
template <class ThreadGroup>
GA_DEVICE void sum_layers(ThreadGroup& threads, const ScalarTables& t, const UpdateTask* measures,
                          const ga_param* ids, int64_t count) {
  threads.each_lane_group(count, [&](int64_t k, auto& warp) {
    const int64_t i = ids[k];
    if ((t.plans[i].actions & kUpdate) == 0) return;
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
template <class ThreadGroup>
GA_DEVICE void fold_layers(ThreadGroup& threads, const ScalarTables& t, const ga_param* ids,
                           int64_t count) {
  threads.each_item(count, [&](int64_t k) {
    const int64_t i = ids[k];
    if ((t.plans[i].actions & kUpdate) == 0) return;
    fold(t, i, true);
    t.plans[i].orthogonal_scale = reciprocal_norm(
        t.param_states[i].norm_squares[0], t.group_inputs[t.param_inputs[i].group].optimizer.eps);
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

template <class T, class ThreadGroup>
GA_DEVICE void blend_as(ThreadGroup& threads, const FactorTask& task) {
  if (!task.columns)
    return threads.each_item(task.row_count, [&](int64_t i) { add_row_mean<T>(task, i); });
  const T gain = static_cast<T>(task.plan->factor_gain);
  const double clipped = task.plan->factor * task.plan->factor;
  T* const rows = static_cast<T*>(task.rows);
  T* const columns = static_cast<T*>(task.columns);
  const auto into = [&](T* ema, const double* sums, int64_t units, int64_t length) {
    threads.each_item(units, [&](int64_t i) {
      const T mean = static_cast<T>(sums[i] * clipped / static_cast<double>(length));
      ema[i] += gain * (mean - ema[i]);
    });
  };
  into(rows, task.row_sums, task.row_pattern->units, task.column_count);
  into(columns, task.column_sums, task.column_pattern->units, task.row_count);
  threads.each_warp(task.matrices, [&](int64_t m, auto& warp) {
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
template <class ThreadGroup>
GA_DEVICE void blend(ThreadGroup& threads, const FactorTask& task) {
  if ((task.plan->actions & kUpdate) == 0) return;
  if (task.f64)
    blend_as<double>(threads, task);
  else
    blend_as<float>(threads, task);
}

}  // namespace ga
