// SPDX-License-Identifier: Apache-2.0
// Runs decide.hpp on the CPU, on one thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "backend/numbers.hpp"
#include "control.hpp"
#include "optimizer.hpp"

namespace ga::cpu {

struct Warp {
  template <class F>
  double sum(int64_t n, F&& f) const {
    if (n == 0) return 0;
    if (n == 1) return f(int64_t{0});
    double lanes[kLanes] = {};
    for (int64_t j = 0; j < n; ++j) lanes[j % kLanes] += f(j);
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

class Crew {
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
  void each_octet(int64_t n, F&& f) {
    each_warp(n, f);
  }
  template <class F>
  void once(F&& f) {
    f();
  }
  // Parameters of a group have mostly been updated together, and then share the folded Op of the
  // last.
  bool recall(const ScalarTables& t, int64_t i) {
    const ParamInput& p = t.param_inputs[i];
    const int64_t last = last_;
    last_ = i;
    if (last < 0 || op_info(p.op).norms > 0) return false;
    const ParamInput& q = t.param_inputs[last];
    const Clock &a = t.param_states[i].clock, &b = t.param_states[last].clock;
    if (p.group != q.group || p.op != q.op || p.f64 != q.f64 || a.step != b.step ||
        a.product != b.product || p.lr_scale != q.lr_scale ||
        p.weight_decay_scale != q.weight_decay_scale)
      return false;
    t.plans[i].folded = t.plans[last].folded;
    return true;
  }

 private:
  int64_t last_ = -1;
};

}  // namespace ga::cpu
