// SPDX-License-Identifier: Apache-2.0
// What follows from the options of a group alone: its Op, its clock, and the clip factor of a norm.
#pragma once

#include <math.h>

#include <new>
#include <type_traits>

#include "backend/tasks.hpp"
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

GA_HD void advance_clock(const ga_optimizer& o, Clock& clock, double lr) {
  ByKind<Optimizers>::call(o.kind, [&](auto optimizer) { optimizer.advance(o, clock, lr); });
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

}  // namespace ga
