// SPDX-License-Identifier: Apache-2.0
// Plans of parameters that are updated before their window is decided: what follows from all that is known
// by then, and whether the decision has come to the same.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "backend/cpu/thread_group.hpp"
#include "backend/decide.hpp"

namespace ga::cpu {

// What the plan of a parameter follows from, but for options. Factors of units, and norms of first passes, follow
// from the same and from parameter and gradient.
struct Grounds {
  bool go;
  int32_t actions;
  Numbers raw;
  double factor, lr, weight_decay, average_gain;
  Clock clock;
  uint64_t copy_key, state_key;
};

inline Grounds grounds_of(const ScalarTables& t, int64_t i) {
  const ParamPlan& plan = t.plans[i];
  const StepInput in = step_input(t, i, false);
  Grounds g = {};
  g.go = t.control->go;
  g.actions = plan.actions;
  g.raw = plan.raw;
  g.factor = plan.factor;
  g.lr = in.lr;
  g.weight_decay = in.weight_decay;
  g.clock = in.clock;
  if ((plan.actions & kFollow) != 0) g.average_gain = plan.average_gain;
  if (t.param_inputs[i].stochastic) {
    g.copy_key = plan.copy_key;
    g.state_key = plan.state_key;
  }
  return g;
}

inline bool same(const Numbers& a, const Numbers& b) {
  return a.scale == b.scale && a.limit == b.limit && a.factor == b.factor;
}

// Whether two plans are the same, to the bit.
inline bool same(const Grounds& a, const Grounds& b) {
  return a.go == b.go && a.actions == b.actions && same(a.raw, b.raw) && a.factor == b.factor &&
         a.lr == b.lr && a.weight_decay == b.weight_decay && a.average_gain == b.average_gain &&
         a.clock == b.clock && a.copy_key == b.copy_key && a.state_key == b.state_key;
}

class Predictor {
 public:
  void reserve(size_t params) {
    if (params <= states_.size()) return;
    states_.resize(params);
    grounds_.resize(params);
  }

  static int64_t bytes(size_t params) {
    return static_cast<int64_t>(params * (sizeof(ParamState) + sizeof(Grounds)));
  }

  // Writes the plans of these parameters. A parameter's own norm clips it, and has to be measured before.
  void plan(const ScalarTables& tables, const WindowTotals& totals, Span<const ReadyParam> params) {
    const std::lock_guard<std::mutex> lock(mutex_);
    control_ = *tables.control;
    groups_.assign(tables.group_states, tables.group_states + tables.groups);
    const ScalarTables copies = copies_of(tables);
    predict(copies, totals);
    ThreadGroup threads;
    for (size_t k = 0; k < params.size; ++k) {
      const int64_t id = params.data[k].param;
      const auto i = static_cast<size_t>(id);
      states_[i] = tables.param_states[i];
      if (tables.param_inputs[i].held == Held::kReduced) {
        // Norms over ranks are not known yet, and predicted to clip nothing.
        states_[i].sums = {};
        states_[i].sums.gradients = states_[i].sums.dense = 1;
      } else {
        Warp warp;
        sum_param(warp, copies, id);
      }
      reduce_param(copies, id);
      clip_param(copies, id);
      plan_param(threads, copies, id);
      grounds_[i] = grounds_of(copies, id);
    }
  }

  // After the pass over the units of a parameter: for an Op that reads the norm of the gradient.
  void settle_units(const ScalarTables& tables, const UnitTask* units, ga_param param) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const ScalarTables copies = copies_of(tables);
    ThreadGroup threads;
    sum_units(threads, copies, units, &param, 1);
  }

  // After the first pass of a layer-wise Op.
  void settle_layer(const ScalarTables& tables, const UpdateTask* measures, ga_param param) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const ScalarTables copies = copies_of(tables);
    ThreadGroup threads;
    sum_layers(threads, copies, measures, &param, 1);
    fold_layers(threads, copies, &param, 1);
  }

  bool matches(const ScalarTables& tables, ga_param param) const {
    return same(grounds_[static_cast<size_t>(param)], grounds_of(tables, param));
  }

 private:
  // With copies of the control block and of the states of groups and parameters, since only the plans are to
  // change.
  ScalarTables copies_of(const ScalarTables& tables) {
    ScalarTables copies = tables;
    copies.control = &control_;
    copies.group_states = groups_.data();
    copies.param_states = states_.data();
    return copies;
  }

  // As decide_window() will if it applies the step, and no norm over several parameters clips it.
  static void predict(const ScalarTables& t, const WindowTotals& totals) {
    Control& c = *t.control;
    c.sums = brought_by(*t.settings, c, totals);
    c.mean = mean_of(*t.settings, c.sums.weight);
    c.go = true;
    count_step(*t.settings, c);
    for (int64_t k = 0; k < t.groups; ++k) {
      plan_group(t, k);
      t.group_states[k].clip_factor = 1;
    }
  }

  std::mutex mutex_;  // several threads may plan
  Control control_ = {};
  std::vector<GroupState> groups_;
  std::vector<ParamState> states_;  // by parameter, as the next one
  std::vector<Grounds> grounds_;
};

}  // namespace ga::cpu
