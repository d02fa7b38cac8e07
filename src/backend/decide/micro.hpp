// SPDX-License-Identifier: Apache-2.0
// The decision about a micro-batch that is checked or clipped as a whole.
#pragma once

#include "backend/decide/plans.hpp"

namespace ga {

// The contributions to a micro-batch.
struct Contributions {
  const MicroInput* inputs;
  MicroPlan* plans;
  int64_t count;

  GA_HD ga_group group_of(const ScalarTables& t, int64_t k) const {
    return t.param_inputs[inputs[k].param].group;
  }
  GA_HD bool is_measured(const ScalarTables& t, int64_t k) const {
    return is_sum(t.param_inputs[inputs[k].param].reduction);
  }
};

// Sets the views through which the norms of the contributions are taken.
template <class ThreadGroup>
GA_DEVICE void open_micro(ThreadGroup& threads, const ScalarTables& t, const Contributions& m) {
  threads.each_item(m.count, [&](int64_t k) {
    const ga_clip& clip = t.group_inputs[m.group_of(t, k)].clip;
    m.plans[k].view = {1, clip.when == GA_CLIP_WHEN_MICRO ? clip.max_value : HUGE_VAL, 1};
  });
}

// Adds up the partials of each contribution.
template <class ThreadGroup>
GA_DEVICE void sum_micro(ThreadGroup& threads, const Contributions& m) {
  threads.each_lane_group(m.count, [&](int64_t k, auto& warp) {
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
template <class ThreadGroup>
GA_DEVICE void total_micro(ThreadGroup& threads, const ScalarTables& t, const Contributions& m) {
  Control& c = *t.control;
  threads.each_warp(t.groups + 2, [&](int64_t j, auto& warp) {
    if (j == 0) {
      const int64_t bad = warp.first(m.count, [&](int64_t k) { return m.plans[k].nonfinite; });
      if (warp.leader()) c.micro_finite = bad < 0;
    } else {
      total_clip(
          warp, t, j - 2, m.count, [&](int64_t k) { return m.group_of(t, k); },
          [&](int64_t k) { return m.is_measured(t, k) ? m.plans[k].squares : 0.0; });
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
  if (const Reduction r = t.param_inputs[in.param].reduction; !is_sum(r)) {
    plan.scale = 1 / (micro.loss_scale != 0 ? micro.loss_scale : c.scaler.scale);
    plan.keep = in.again || s.contributed != 0 ? keep_of(r) : 0;
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
template <class ThreadGroup>
GA_DEVICE void decide_micro(ThreadGroup& threads, const ScalarTables& t, const Contributions& m,
                            const Micro& micro, int64_t index) {
  Control& c = *t.control;
  total_micro(threads, t, m);
  const bool added = c.micro_finite || t.settings->nonfinite != GA_NONFINITE_DROP_MICRO;
  threads.once([&] {
    if (!added) {
      ++c.window_dropped;
      if (index < 64) c.dropped_micros |= uint64_t{1} << index;
    } else {
      c.weight += micro.weight;
      ++c.weighted;
    }
  });
  threads.each_item(
      m.count, [&](int64_t k) { plan_contribution(t, m.inputs[k], micro, added, m.plans[k]); });
  if (!added) {
    each_channel(threads, t, [&](BnChannel& channel, const BnInput& layer) {
      drop(channel, history_of(channel, layer), index);
    });
    return;
  }
  threads.each_item(m.count, [&](int64_t k) {
    ParamState& s = t.param_states[m.inputs[k].param];
    s.contributed = 1;
    s.held_weight = c.weight;
  });
}

}  // namespace ga
