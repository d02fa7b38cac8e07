// SPDX-License-Identifier: Apache-2.0
// The outcome of a window, from its sums: whether it is applied, norms, the noise scale, the loss scale, and the
// counters.
#pragma once

#include "backend/decide/sums.hpp"
#include "core/elementary.hpp"

namespace ga {

// The squares of a parameter's reduced gradient.
GA_HD double squares_of(const ScalarTables& t, int64_t i) {
  const double scale = t.control->mean * weight_of(t, i);
  return t.param_states[i].sums.squares * scale * scale;
}

// Sets what the clip by norm reads. What is no sum is outside of all norms.
GA_HD void reduce_param(const ScalarTables& t, int64_t i) {
  ParamState& s = t.param_states[i];
  s.touched = is_touched(t, i, s.sums.gradients != 0);
  if (!is_sum(t.param_inputs[i].reduction)) s.sums.squares = 0;
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
template <class ThreadGroup>
GA_DEVICE void total_params(ThreadGroup& threads, const ScalarTables& t) {
  const Settings& set = *t.settings;
  Control& c = *t.control;
  if (set.norms_given) return;
  const auto total = [&](auto& warp, auto value) {
    return warp.sum(t.params, [&](int64_t i) {
      const double x = value(i, t.param_states[i]);  // read whether it counts or not, to wait once
      return t.param_states[i].touched ? x : 0.0;
    });
  };
  threads.each_warp(t.groups + 5, [&](int64_t k, auto& warp) {
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
    if (t.param_states[i].touched && !t.param_inputs[i].f64 && is_sum(t.param_inputs[i].reduction))
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

// Counts a step that is applied, on which the EMA depends.
GA_HD void count_step(const Settings& set, Control& c) {
  ++c.steps;
  const ga_ema& e = set.ema;
  const double decay = e.kind == GA_EMA_TORCH
                           ? e.decay
                           : real_power(1 - 1 / static_cast<double>(c.steps), e.gamma + 1);
  c.average_gain = 1 - decay;
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
  if (c.go)
    count_step(set, c);
  else
    ++c.skipped;
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

}  // namespace ga
