// SPDX-License-Identifier: Apache-2.0
// LAMB (You et al. 2020, algorithm 2), as timm's Lamb and as keras.optimizers.Lamb:
//
//   m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
//   u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + l2 p
//   p <- q - lr |q| / |u| u, q = keep p;  the ratio |q| / |u| is 1 if either norm is 0
//
//           decay               ratio
//   timm    l2 = wd             1 if wd is 0, unless always_adapt
//   Keras   keep = 1 - lr wd    as above
//
// g is already clipped to max_grad_norm by its norm over all groups.
//
// Passes: the first reads p, g, m, v and writes m, v, and u over g; the second reads p and u and
// writes p.
#pragma once

#include "core/error.hpp"
#include "ops/decay.hpp"

namespace ga {

template <class T>
struct LambOp : LayerWise {
  using Real = T;
  static constexpr int slots = 2;
  static constexpr SlotNames slot_names = {"exp_avg", "exp_avg_sq"};
  static constexpr SlotCodes codes = {Code::kSigned, Code::kPositive};
  static constexpr Pass measuring = {true, true, true};
  static constexpr bool emits = true;
  static constexpr Pass updating = {true, false, false};
  Decay<T> decay;
  T beta1, gain1, beta2, gain2, a, e, lr;

  GA_HD LambOp(const ga_optimizer& o, const StepInput& in)
      : decay(o, in),
        beta1(T(o.beta1)),
        gain1(T(1 - o.beta1)),
        beta2(T(o.beta2)),
        gain2(T(1 - o.beta2)) {
    const bool keras = o.flavor == GA_FLAVOR_KERAS;
    const double root = square_root(1 - power(o.beta2, in.clock.step));
    a = T(root / (1 - power(o.beta1, in.clock.step)));
    e = T(o.eps * root);
    const double p = keras ? absolute(1 - in.lr * in.weight_decay) * in.norm[1] : in.norm[1];
    const double u = in.norm[0];
    const bool adapt = keras || in.weight_decay != 0 || o.always_adapt;
    lr = T(adapt && p > 0 && u > 0 ? in.lr * (p / u) : in.lr);
  }

  GA_HD void measure(T p, T g, T* state, T* x) const {
    state[0] = beta1 * state[0] + gain1 * g;
    state[1] = beta2 * state[1] + gain2 * (g * g);
    x[0] = a * state[0] / (square_root(state[1]) + e) + decay.l2 * p;
    x[1] = p;
  }

  GA_HD T operator()(T p, T u, T*) const { return decay.keep * p - lr * u; }
};

struct Lamb : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_LAMB;
  static constexpr const char* name = "LAMB";
  static constexpr bool limits_norm = true;
  template <class T>
  using Ops = TypeList<LambOp<T>>;

  static bool has_flavor(int32_t flavor) { return flavor != GA_FLAVOR_BERT; }

  static void defaults(ga_optimizer& o) {
    const bool keras = o.flavor == GA_FLAVOR_KERAS;
    o.lr = 1e-3;
    o.beta1 = 0.9;
    o.beta2 = 0.999;
    o.eps = keras ? 1e-7 : 1e-6;
    o.weight_decay = keras ? 0 : 1e-2;
    o.max_grad_norm = keras ? 0 : 1;
  }

  static void check(const ga_optimizer& o) {
    if (o.flavor != GA_FLAVOR_KERAS) return;
    if (o.max_grad_norm != 0)
      fail(GA_ERROR_INVALID_ARGUMENT, "LAMB: max_grad_norm was %g, but the Keras flavor has none",
           o.max_grad_norm);
    if (o.always_adapt)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "LAMB: always_adapt was set, but the Keras flavor does so without");
  }
};

}  // namespace ga
