// SPDX-License-Identifier: Apache-2.0
// Adamax (Kingma & Ba 2015, algorithm 2), as torch.optim.Adamax and as keras.optimizers.Adamax:
//
//   m <- beta1 m + (1 - beta1) g
//   u <- max(beta2 u, |g| + within)
//   p <- keep p - lr / (1 - beta1^t) m / (u + outside)
//
//           within   outside   decay
//   torch   eps      0         L2
//   Keras   0        eps       keep = 1 - lr wd
#pragma once

#include "ops/decay.hpp"

namespace ga {

template <class T>
struct AdamaxOp : ElementWise {
  using Real = T;
  static constexpr int slots = 2;
  static constexpr SlotNames slot_names = {"exp_avg", "exp_inf"};
  Decay<T> decay;
  T beta1, gain1, beta2, within, outside, a;

  GA_HD AdamaxOp(const ga_optimizer& o, const StepInput& in)
      : decay(o, in), beta1(T(o.beta1)), gain1(T(1 - o.beta1)), beta2(T(o.beta2)) {
    const bool keras = o.flavor == GA_FLAVOR_KERAS;
    within = T(keras ? 0 : o.eps);
    outside = T(keras ? o.eps : 0);
    a = T(in.lr / (1 - power(o.beta1, in.clock.step)));
  }

  GA_HD T operator()(T p, T g, T* state) const {
    g += decay.l2 * p;
    const T m = beta1 * state[0] + gain1 * g;
    const T u = larger(beta2 * state[1], absolute(g) + within);
    state[0] = m;
    state[1] = u;
    return decay.keep * p - a * m / (u + outside);
  }
};

struct Adamax : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_ADAMAX;
  static constexpr const char* name = "Adamax";
  template <class T>
  using Ops = TypeList<AdamaxOp<T>>;

  static bool has_flavor(int32_t flavor) { return flavor != GA_FLAVOR_BERT; }

  static void defaults(ga_optimizer& o) {
    const bool keras = o.flavor == GA_FLAVOR_KERAS;
    o.lr = keras ? 1e-3 : 2e-3;
    o.beta1 = 0.9;
    o.beta2 = 0.999;
    o.eps = keras ? 1e-7 : 1e-8;
  }
};

}  // namespace ga
