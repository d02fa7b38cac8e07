// SPDX-License-Identifier: Apache-2.0
// Runs decide.hpp on the CPU, on one thread. A ThreadGroup serves one step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "backend/decide.hpp"
#include "backend/numbers.hpp"
#include "numbers/optimizer.hpp"

namespace ga::cpu {

struct Warp {
  template <class F>
  double sum(int64_t n, F&& f) const {
    if (n == 0) return 0;
    if (n == 1) return f(int64_t{0});
    double lanes[kLanes] = {};
    for (int64_t j = 0; j < n; j += kLanes)
      for (int64_t l = 0; l < std::min<int64_t>(kLanes, n - j); ++l) lanes[l] += f(j + l);
    return add_halves<kLanes>(lanes);
  }
  template <class F>
  double smallest(int64_t n, F&& f) const {
    double least = HUGE_VAL;
    for (int64_t j = 0; j < n; ++j) least = std::min(least, f(j));
    return least;
  }
  template <class F>
  int64_t first(int64_t n, F&& f) const {
    for (int64_t j = 0; j < n; ++j)
      if (f(j)) return j;
    return -1;
  }
  bool leader() const { return true; }
};

class ThreadGroup {
 public:
  template <class F>
  void each_item(int64_t n, F&& f) {
    for (int64_t i = 0; i < n; ++i) f(i);
  }
  template <class F>
  void each_warp(int64_t n, F&& f) {
    Warp warp;
    for (int64_t i = 0; i < n; ++i) f(i, warp);
  }
  template <class F>
  void each_lane_group(int64_t n, F&& f) {
    each_warp(n, f);
  }
  template <class F>
  void once(F&& f) {
    f();
  }
  // Parameters of a group have mostly been updated together, and then share the plan of the last one that
  // was planned by itself. Its Op is not layer-wise: what is left out below is not read.
  bool recall(const ScalarTables& t, int64_t i) {
    const ParamInput& p = t.param_inputs[i];
    ParamState& s = t.param_states[i];
    if (is_alike(t, i)) {
      const ParamPlan& from = t.plans[last_];
      ParamPlan& plan = t.plans[i];
      s.clock = t.param_states[last_].clock;
      plan.raw = from.raw;
      plan.gradient = from.gradient;
      plan.factor = from.factor;
      plan.folded = from.folded;
      return true;
    }
    last_ = p.op >= 0 && op_info(p.op).norms == 0 ? i : -1;
    before_ = s.clock;
    return false;
  }

 private:
  // Whether all that recall() copies follows from the same for both parameters.
  bool is_alike(const ScalarTables& t, int64_t i) const {
    if (last_ < 0) return false;
    const ParamInput &p = t.param_inputs[i], &q = t.param_inputs[last_];
    const ParamState& s = t.param_states[i];
    return p.group == q.group && p.op == q.op && p.f64 == q.f64 && p.by_units == q.by_units &&
           p.lr_scale == q.lr_scale && p.weight_decay_scale == q.weight_decay_scale &&
           weight_of(t, i) == weight_of(t, last_) && s.factor == t.param_states[last_].factor &&
           s.clock == before_;
  }

  int64_t last_ = -1;
  Clock before_ = {};  // the clock of that parameter before this step
};

}  // namespace ga::cpu
