// SPDX-License-Identifier: Apache-2.0
// Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019) as torch.optim and keras.optimizers
// define them, and AdamWeightDecay of the BERT release. The flavors differ in three folded scalars:
//
//   p <- decay p - a m / (sqrt(v) + e)
//
//             a                                      e                     decay
//   torch     lr sqrt(1 - beta2^t) / (1 - beta1^t)   eps sqrt(1 - beta2^t) 1, AdamW 1 - lr wd
//   Keras     lr sqrt(1 - beta2^t) / (1 - beta1^t)   eps                   1 - lr wd
//   BERT      lr                                     eps                   1 - lr wd
#pragma once

#include "core/error.hpp"
#include "ops/op.hpp"

namespace ga {

// m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2;  AMSGrad takes the root of the
// largest v so far.
template <class T, bool kL2, bool kAmsgrad>
struct AdamOp : ElementWise {
  using Real = T;
  static constexpr int slots = kAmsgrad ? 3 : 2;
  static constexpr SlotNames slot_names = {"exp_avg", "exp_avg_sq",
                                           kAmsgrad ? "max_exp_avg_sq" : nullptr};
  static constexpr SlotCodes codes = {Code::kSigned, kAmsgrad ? Code::kNone : Code::kPositive};
  T decay, l2, beta1, gain1, beta2, gain2, a, e;

  GA_HD AdamOp(const ga_optimizer& o, const StepInput& in)
      : decay(kL2 ? T(1) : T(1 - in.lr * in.weight_decay)),
        l2(kL2 ? T(in.weight_decay) : T(0)),
        beta1(T(o.beta1)),
        gain1(T(1 - o.beta1)),
        beta2(T(o.beta2)),
        gain2(T(1 - o.beta2)) {
    const double root =
        o.flavor == GA_FLAVOR_BERT ? 1 : square_root(1 - power(o.beta2, in.clock.step));
    const double bias = o.flavor == GA_FLAVOR_BERT ? 1 : 1 - power(o.beta1, in.clock.step);
    a = T(in.lr * root / bias);
    e = T(o.flavor == GA_FLAVOR_TORCH ? o.eps * root : o.eps);
  }

  GA_HD T operator()(T p, T g, T* state) const {
    if (kL2) g += l2 * p;
    const T m = beta1 * state[0] + gain1 * g;
    const T v = beta2 * state[1] + gain2 * (g * g);
    state[0] = m;
    state[1] = v;
    T top = v;
    if (kAmsgrad) {
      top = v > state[2] ? v : state[2];
      state[2] = top;
    }
    return decay * p - a * m / (square_root(top) + e);
  }
};

struct Adam : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_ADAM;
  static constexpr const char* name = "Adam";
  template <class T>
  using Ops = TypeList<AdamOp<T, false, false>, AdamOp<T, false, true>, AdamOp<T, true, false>,
                       AdamOp<T, true, true>>;

  static bool has_flavor(int32_t flavor) { return flavor != GA_FLAVOR_BERT; }

  static void defaults(ga_optimizer& o) {
    o.lr = 1e-3;
    o.beta1 = 0.9;
    o.beta2 = 0.999;
    o.eps = o.flavor == GA_FLAVOR_TORCH ? 1e-8 : 1e-7;
  }

  static int select(const ga_optimizer& o, bool) {
    const bool l2 = o.flavor == GA_FLAVOR_TORCH && o.weight_decay != 0;
    return (l2 ? 2 : 0) + (o.amsgrad ? 1 : 0);
  }

  static bool lazy(const ga_optimizer&) { return true; }
};

struct AdamW : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_ADAMW;
  static constexpr const char* name = "AdamW";
  template <class T>
  using Ops = TypeList<AdamOp<T, false, false>, AdamOp<T, false, true>>;

  static bool has_flavor(int32_t) { return true; }

  static void defaults(ga_optimizer& o) {
    Adam::defaults(o);
    if (o.flavor == GA_FLAVOR_BERT) o.eps = 1e-6;
    o.weight_decay = o.flavor == GA_FLAVOR_KERAS ? 4e-3 : 1e-2;
  }

  static void check(const ga_optimizer& o) {
    if (o.flavor == GA_FLAVOR_BERT && o.amsgrad)
      fail(GA_ERROR_INVALID_ARGUMENT, "AdamW: amsgrad was set, but the BERT flavor has none");
  }

  static int select(const ga_optimizer& o, bool) { return o.amsgrad ? 1 : 0; }

  static bool lazy(const ga_optimizer&) { return true; }
};

}  // namespace ga
