// SPDX-License-Identifier: Apache-2.0
// NAdam (Dozat 2016), as torch.optim.NAdam and as keras.optimizers.Nadam:
//
//   m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
//   mu_t = beta1 (1 - 0.96^(t psi) / 2), M_t = mu_1 ... mu_t, psi = momentum_decay
//   p <- keep p - lr ((1 - mu_t) / (1 - M_t) g + mu_t+1 / (1 - M_t+1) m)
//                 / (sqrt(v / (1 - beta2^t)) + eps)
//
//           psi    decay
//   torch   4e-3   L2, or keep = 1 - lr wd if decoupled
//   Keras   1      keep = 1 - lr wd
#pragma once

#include "core/elementary.hpp"
#include "core/error.hpp"
#include "ops/decay.hpp"

namespace ga {

// mu_t, of which decayed is 0.96^psi
GA_HD double nadam_mu(const ga_optimizer& o, double decayed, int64_t t) {
  return o.beta1 * (1 - 0.5 * power(decayed, t));
}

// The number of the clock is M_t.
template <class T>
struct NadamOp : ElementWise {
  using Real = T;
  static constexpr int slots = 2;
  static constexpr SlotNames slot_names = {"exp_avg", "exp_avg_sq"};
  static constexpr SlotCodes codes = {Code::kSigned, Code::kPositive};
  Decay<T> decay;
  T beta1, gain1, beta2, gain2, of_g, of_m, e;

  GA_HD NadamOp(const ga_optimizer& o, const StepInput& in)
      : decay(o, in, o.decoupled != 0),
        beta1(T(o.beta1)),
        gain1(T(1 - o.beta1)),
        beta2(T(o.beta2)),
        gain2(T(1 - o.beta2)) {
    const double product = in.clock.numbers[0];
    const double decayed = real_power(0.96, o.momentum_decay);
    const double mu = nadam_mu(o, decayed, in.clock.step);
    const double next = nadam_mu(o, decayed, in.clock.step + 1);
    const double root = square_root(1 - power(o.beta2, in.clock.step));
    of_g = T(in.lr * root * (1 - mu) / (1 - product));
    of_m = T(in.lr * root * next / (1 - product * next));
    e = T(o.eps * root);
  }

  GA_HD T operator()(T p, T g, T* state) const {
    g += decay.l2 * p;
    const T m = beta1 * state[0] + gain1 * g;
    const T v = beta2 * state[1] + gain2 * (g * g);
    state[0] = m;
    state[1] = v;
    return decay.keep * p - (of_g * g + of_m * m) / (square_root(v) + e);
  }
};

struct Nadam : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_NADAM;
  static constexpr const char* name = "NAdam";
  static constexpr ClockNumber clock_numbers[kClockNumbers] = {{"mu_product", 1, 1}};
  template <class T>
  using Ops = TypeList<NadamOp<T>>;

  static bool has_flavor(int32_t flavor) { return flavor != GA_FLAVOR_BERT; }

  static void defaults(ga_optimizer& o) {
    const bool keras = o.flavor == GA_FLAVOR_KERAS;
    o.lr = keras ? 1e-3 : 2e-3;
    o.beta1 = 0.9;
    o.beta2 = 0.999;
    o.eps = keras ? 1e-7 : 1e-8;
    o.momentum_decay = keras ? 1 : 4e-3;
  }

  static void check(const ga_optimizer& o) {
    if (o.flavor == GA_FLAVOR_KERAS && o.decoupled)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "NAdam: decoupled was set, but the Keras flavor has no other weight decay");
  }

  GA_HD static void advance(const ga_optimizer& o, Clock& clock, double) {
    const double before = clock.step == 0 ? 1 : clock.numbers[0];
    ++clock.step;
    const double decayed = real_power(0.96, o.momentum_decay);
    clock.numbers[0] = flush_small(before * nadam_mu(o, decayed, clock.step));
  }
};

}  // namespace ga
