// SPDX-License-Identifier: Apache-2.0
// Adagrad (Duchi, Hazan & Singer 2011), as torch.optim.Adagrad and as keras.optimizers.Adagrad:
//
//   s <- s + g^2;  p <- keep p - lr_t g / (sqrt(s + within) + outside)
//
//           lr_t                          within   outside   decay
//   torch   lr / (1 + (t - 1) lr_decay)   0        eps       L2
//   Keras   lr                            eps      0         keep = 1 - lr wd
#pragma once

#include "core/error.hpp"
#include "ops/decay.hpp"

namespace ga {

template <class T>
struct AdagradOp : ElementWise {
  using Real = T;
  static constexpr int slots = 1;
  static constexpr SlotNames slot_names = {"sum"};
  static constexpr SlotCodes codes = {Code::kPositive};
  Decay<T> decay;
  T within, outside, lr;

  GA_HD AdagradOp(const ga_optimizer& o, const StepInput& in) : decay(o, in) {
    const bool keras = o.flavor == GA_FLAVOR_KERAS;
    within = T(keras ? o.eps : 0);
    outside = T(keras ? 0 : o.eps);
    lr = T(in.lr / (1 + static_cast<double>(in.clock.step - 1) * o.lr_decay));
  }

  GA_HD T operator()(T p, T g, T* state) const {
    g += decay.l2 * p;
    const T s = state[0] + g * g;
    state[0] = s;
    return decay.keep * p - lr * g / (square_root(s + within) + outside);
  }
};

struct Adagrad : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_ADAGRAD;
  static constexpr const char* name = "Adagrad";
  template <class T>
  using Ops = TypeList<AdagradOp<T>>;

  static bool has_flavor(int32_t flavor) { return flavor != GA_FLAVOR_BERT; }

  static void defaults(ga_optimizer& o) {
    const bool keras = o.flavor == GA_FLAVOR_KERAS;
    o.lr = keras ? 1e-3 : 1e-2;
    o.eps = keras ? 1e-7 : 1e-10;
    o.initial_accumulator = keras ? 0.1 : 0;
  }

  static void check(const ga_optimizer& o) {
    if (o.flavor == GA_FLAVOR_KERAS && o.lr_decay != 0)
      fail(GA_ERROR_INVALID_ARGUMENT, "Adagrad: lr_decay was %g, but the Keras flavor has none",
           o.lr_decay);
  }

  static bool lazy(const ga_optimizer&) { return true; }
  static double initial(const ga_optimizer& o, int) { return o.initial_accumulator; }
};

}  // namespace ga
