// SPDX-License-Identifier: Apache-2.0
// LARS (You, Gitman & Ginsburg 2017), as timm's Lars:
//
//   r = trust_coefficient |p| / (|g| + wd |p| + eps)
//   r = 1 if either norm is 0, or if wd is 0 unless always_adapt
//   g <- r (g + wd p), then the update of torch.optim.SGD without decay (sgd.hpp)
//
// Passes: the first reads p for |p| (|g| is known already), the second updates as SGD.
#pragma once

#include <cmath>

#include "core/error.hpp"
#include "ops/op.hpp"

namespace ga {

template <class T, bool kMomentum, bool kNesterov>
struct LarsOp : LayerWise {
  using Real = T;
  static constexpr int slots = kMomentum ? 1 : 0;
  static constexpr SlotNames slot_names = {kMomentum ? "momentum_buffer" : nullptr};
  static constexpr SlotCodes codes = {kMomentum ? Code::kSigned : Code::kNone};
  static constexpr int norms = 1;
  static constexpr bool reads_gradient_norm = true;
  static constexpr Pass measuring = {false, false, false};
  static constexpr Pass updating = {true, kMomentum, kMomentum};
  T l2, ratio, keep, gain, mu, lr;

  GA_HD LarsOp(const ga_optimizer& o, const StepInput& in)
      : l2(T(in.weight_decay)),
        ratio(T(1)),
        keep(T(in.clock.step == 1 ? 0 : o.momentum)),
        gain(T(in.clock.step == 1 ? 1 : 1 - o.dampening)),
        mu(T(o.momentum)),
        lr(T(in.lr)) {
    const double p = in.norm[0], g = in.gradient_norm;
    if ((in.weight_decay != 0 || o.always_adapt) && p > 0 && g > 0)
      ratio = T(o.trust_coefficient * p / (g + in.weight_decay * p + o.eps));
  }

  GA_HD void measure(T p, T, T*, T* x) const { x[0] = p; }

  GA_HD T operator()(T p, T g, T* state) const {
    g = ratio * (g + l2 * p);
    if (!kMomentum) return p - lr * g;
    const T b = keep * state[0] + gain * g;
    state[0] = b;
    return p - lr * (kNesterov ? g + mu * b : b);
  }
};

struct Lars : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_LARS;
  static constexpr const char* name = "LARS";
  template <class T>
  using Ops = TypeList<LarsOp<T, false, false>, LarsOp<T, true, false>, LarsOp<T, true, true>>;

  static void defaults(ga_optimizer& o) {
    o.lr = 1;
    o.eps = 1e-8;
    o.trust_coefficient = 1e-3;
  }

  static void check(const ga_optimizer& o) {
    if (!(o.trust_coefficient > 0) || !std::isfinite(o.trust_coefficient))
      fail(GA_ERROR_INVALID_ARGUMENT,
           "LARS: trust_coefficient was %g, expected a finite number > 0", o.trust_coefficient);
    if (o.nesterov && (o.momentum == 0 || o.dampening != 0))
      fail(GA_ERROR_INVALID_ARGUMENT,
           "LARS: nesterov needs momentum > 0 and dampening 0, but they were %g and %g", o.momentum,
           o.dampening);
  }

  static int select(const ga_optimizer& o, bool) {
    if (o.momentum == 0) return 0;
    return o.nesterov ? 2 : 1;
  }
};

}  // namespace ga
