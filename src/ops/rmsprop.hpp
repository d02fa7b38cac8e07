// SPDX-License-Identifier: Apache-2.0
// RMSprop (Tieleman & Hinton 2012; centered: Graves 2013), as torch.optim.RMSprop and as
// keras.optimizers.RMSprop:
//
//   v <- rho v + (1 - rho) g^2;  centered also m <- rho m + (1 - rho) g, else m is 0
//   s = g / (sqrt(v - m^2 + within) + outside)
//   p <- keep p - lr s;  with momentum b <- mu b + gain s;  p <- keep p - step b
//
//           within   outside   gain   step   decay
//   torch   0        eps       1      lr     L2
//   Keras   eps      0         lr     1      keep = 1 - lr wd
#pragma once

#include "ops/decay.hpp"

namespace ga {

template <class T, bool kCentered, bool kMomentum>
struct RmspropOp : ElementWise {
  using Real = T;
  static constexpr int slots = 1 + (kCentered ? 1 : 0) + (kMomentum ? 1 : 0);
  static constexpr int last = slots - 1;
  static constexpr const char* buffer = kMomentum ? "momentum_buffer" : nullptr;
  static constexpr SlotNames slot_names = {"square_avg", kCentered ? "grad_avg" : buffer,
                                           kCentered ? buffer : nullptr};
  static constexpr SlotCodes codes = {
      kCentered ? Code::kNone : Code::kPositive,  // differences of averages hide in codes
      kMomentum && !kCentered ? Code::kSigned : Code::kNone,
      kMomentum&& kCentered ? Code::kSigned : Code::kNone};
  Decay<T> decay;
  T rho, rest, within, outside, mu, gain, step;

  GA_HD RmspropOp(const ga_optimizer& o, const StepInput& in)
      : decay(o, in), rho(T(o.rho)), rest(T(1 - o.rho)), mu(T(o.momentum)) {
    const bool keras = o.flavor == GA_FLAVOR_KERAS;
    within = T(keras ? o.eps : 0);
    outside = T(keras ? 0 : o.eps);
    gain = T(kMomentum && keras ? in.lr : 1);
    step = T(kMomentum && keras ? 1 : in.lr);
  }

  GA_HD T operator()(T p, T g, T* state) const {
    g += decay.l2 * p;
    T v = rho * state[0] + rest * (g * g);
    state[0] = v;
    if (kCentered) {
      const T m = rho * state[1] + rest * g;
      state[1] = m;
      v = larger(T(0), v - m * m);  // a variance, but rounding may leave it negative
    }
    T s = g / (square_root(v + within) + outside);
    if (kMomentum) {
      s = mu * state[last] + gain * s;
      state[last] = s;
    }
    return decay.keep * p - step * s;
  }
};

struct Rmsprop : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_RMSPROP;
  static constexpr const char* name = "RMSprop";
  template <class T>
  using Ops = TypeList<RmspropOp<T, false, false>, RmspropOp<T, false, true>,
                       RmspropOp<T, true, false>, RmspropOp<T, true, true>>;

  static bool has_flavor(int32_t flavor) { return flavor != GA_FLAVOR_BERT; }

  static void defaults(ga_optimizer& o) {
    const bool keras = o.flavor == GA_FLAVOR_KERAS;
    o.lr = keras ? 1e-3 : 1e-2;
    o.rho = keras ? 0.9 : 0.99;
    o.eps = keras ? 1e-7 : 1e-8;
  }

  static int select(const ga_optimizer& o, bool) {
    return (o.centered ? 2 : 0) + (o.momentum != 0 ? 1 : 0);
  }
};

}  // namespace ga
