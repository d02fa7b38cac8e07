// SPDX-License-Identifier: Apache-2.0
// Adadelta (Zeiler 2012, algorithm 1), as torch.optim.Adadelta and as keras.optimizers.Adadelta:
//
//   v <- rho v + (1 - rho) g^2
//   d = sqrt(u + eps) / sqrt(v + eps) g
//   u <- rho u + (1 - rho) d^2
//   p <- keep p - lr d
//
// Decay is L2 in torch, keep = 1 - lr wd in Keras; the flavors differ in nothing else.
#pragma once

#include "ops/decay.hpp"

namespace ga {

template <class T>
struct AdadeltaOp : ElementWise {
  using Real = T;
  static constexpr int slots = 2;
  static constexpr SlotNames slot_names = {"square_avg", "acc_delta"};
  Decay<T> decay;
  T rho, rest, eps, lr;

  GA_HD AdadeltaOp(const ga_optimizer& o, const StepInput& in)
      : decay(o, in), rho(T(o.rho)), rest(T(1 - o.rho)), eps(T(o.eps)), lr(T(in.lr)) {}

  GA_HD T operator()(T p, T g, T* state) const {
    g += decay.l2 * p;
    const T v = rho * state[0] + rest * (g * g);
    const T d = square_root(state[1] + eps) / square_root(v + eps) * g;
    state[0] = v;
    state[1] = rho * state[1] + rest * (d * d);
    return decay.keep * p - lr * d;
  }
};

struct Adadelta : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_ADADELTA;
  static constexpr const char* name = "Adadelta";
  template <class T>
  using Ops = TypeList<AdadeltaOp<T>>;

  static bool has_flavor(int32_t flavor) { return flavor != GA_FLAVOR_BERT; }

  static void defaults(ga_optimizer& o) {
    const bool keras = o.flavor == GA_FLAVOR_KERAS;
    o.lr = keras ? 1e-3 : 1;
    o.rho = keras ? 0.95 : 0.9;
    o.eps = keras ? 1e-7 : 1e-6;
  }
};

}  // namespace ga
