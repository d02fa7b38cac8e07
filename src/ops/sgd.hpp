// SPDX-License-Identifier: Apache-2.0
// Stochastic gradient descent with momentum (Sutskever et al. 2013), as torch.optim.SGD and as
// keras.optimizers.SGD.
#pragma once

#include "core/error.hpp"
#include "ops/decay.hpp"

namespace ga {

// p <- (1 - lr wd) p - lr (g + l2 p)
template <class T>
struct SgdPlain : ElementWise {
  using Real = T;
  static constexpr int slots = 0;
  Decay<T> decay;
  T lr;

  GA_HD SgdPlain(const ga_optimizer& o, const StepInput& in) : decay(o, in), lr(T(in.lr)) {}

  GA_HD T operator()(T p, T g, T*) const { return decay.keep * p - lr * (g + decay.l2 * p); }
};

// b <- mu b + (1 - dampening) g, but b <- g in the first step; p <- p - lr b, or with Nesterov
// p <- p - lr (g + mu b)
template <class T, bool kNesterov>
struct SgdMomentum : ElementWise {
  using Real = T;
  static constexpr int slots = 1;
  static constexpr SlotNames slot_names = {"momentum_buffer"};
  static constexpr SlotCodes codes = {Code::kSigned};
  T l2, keep, gain, mu, lr;

  GA_HD SgdMomentum(const ga_optimizer& o, const StepInput& in)
      : l2(T(in.weight_decay)),
        keep(T(in.clock.step == 1 ? 0 : o.momentum)),
        gain(T(in.clock.step == 1 ? 1 : 1 - o.dampening)),
        mu(T(o.momentum)),
        lr(T(in.lr)) {}

  GA_HD T operator()(T p, T g, T* state) const {
    g += l2 * p;
    const T b = keep * state[0] + gain * g;
    state[0] = b;
    return p - lr * (kNesterov ? g + mu * b : b);
  }
};

// v <- mu v - lr g; p <- p + v, or p + mu v - lr g with Nesterov
template <class T, bool kNesterov>
struct SgdKerasMomentum : ElementWise {
  using Real = T;
  static constexpr int slots = 1;
  static constexpr SlotNames slot_names = {"momentum_buffer"};
  static constexpr SlotCodes codes = {Code::kSigned};
  T decay, mu, lr;

  GA_HD SgdKerasMomentum(const ga_optimizer& o, const StepInput& in)
      : decay(T(1 - in.lr * in.weight_decay)), mu(T(o.momentum)), lr(T(in.lr)) {}

  GA_HD T operator()(T p, T g, T* state) const {
    const T v = mu * state[0] - lr * g;
    state[0] = v;
    return decay * p + (kNesterov ? mu * v - lr * g : v);
  }
};

struct Sgd : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_SGD;
  static constexpr const char* name = "SGD";
  template <class T>
  using Ops = TypeList<SgdPlain<T>, SgdMomentum<T, false>, SgdMomentum<T, true>,
                       SgdKerasMomentum<T, false>, SgdKerasMomentum<T, true>>;

  static bool has_flavor(int32_t flavor) { return flavor != GA_FLAVOR_BERT; }

  static void defaults(ga_optimizer& o) { o.lr = o.flavor == GA_FLAVOR_KERAS ? 1e-2 : 1e-3; }

  static void check(const ga_optimizer& o) {
    if (o.flavor == GA_FLAVOR_KERAS && o.dampening != 0)
      fail(GA_ERROR_INVALID_ARGUMENT, "SGD: dampening was %g, but the Keras flavor has none",
           o.dampening);
    if (o.nesterov && (o.momentum == 0 || o.dampening != 0))
      fail(GA_ERROR_INVALID_ARGUMENT,
           "SGD: nesterov needs momentum > 0 and dampening 0, but they were %g and %g", o.momentum,
           o.dampening);
  }

  static int select(const ga_optimizer& o, bool) {
    if (o.momentum == 0) return 0;
    return (o.flavor == GA_FLAVOR_KERAS ? 3 : 1) + (o.nesterov ? 1 : 0);
  }

  // With dampening, the first gradient weighs more than the others, and nobody knows which gradient
  // is the first of a row.
  static bool lazy(const ga_optimizer& o) { return o.dampening == 0; }
};

}  // namespace ga
