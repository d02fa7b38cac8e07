// SPDX-License-Identifier: Apache-2.0
// Lion (Chen et al. 2023, algorithm 2), as keras.optimizers.Lion:
//
//   p <- (1 - lr wd) p - lr sign(beta1 m + (1 - beta1) g);  m <- beta2 m + (1 - beta2) g
//
// The flavors differ in the default lr alone: 1e-4, as in the paper, and 1e-3 in Keras.
#pragma once

#include "ops/decay.hpp"

namespace ga {

template <class T>
struct LionOp : ElementWise {
  using Real = T;
  static constexpr int slots = 1;
  static constexpr SlotNames slot_names = {"exp_avg"};
  static constexpr SlotCodes codes = {Code::kSigned};
  Decay<T> decay;
  T beta1, gain1, beta2, gain2, lr;

  GA_HD LionOp(const ga_optimizer& o, const StepInput& in)
      : decay(o, in, true),
        beta1(T(o.beta1)),
        gain1(T(1 - o.beta1)),
        beta2(T(o.beta2)),
        gain2(T(1 - o.beta2)),
        lr(T(in.lr)) {}

  GA_HD T operator()(T p, T g, T* state) const {
    const T m = state[0];
    state[0] = beta2 * m + gain2 * g;
    return decay.keep * p - lr * sign(beta1 * m + gain1 * g);
  }
};

struct Lion : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_LION;
  static constexpr const char* name = "Lion";
  template <class T>
  using Ops = TypeList<LionOp<T>>;

  static bool has_flavor(int32_t flavor) { return flavor != GA_FLAVOR_BERT; }

  static void defaults(ga_optimizer& o) {
    o.lr = o.flavor == GA_FLAVOR_KERAS ? 1e-3 : 1e-4;
    o.beta1 = 0.9;
    o.beta2 = 0.99;
  }
};

}  // namespace ga
