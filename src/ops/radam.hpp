// SPDX-License-Identifier: Apache-2.0
// RAdam (Liu et al. 2020, algorithm 2), as torch.optim.RAdam:
//
//   m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
//   R = 2 / (1 - beta2) - 1;  r = R - 2 t beta2^t / (1 - beta2^t)
//   r > 5:  p <- keep p - a m / (sqrt(v) + eps),
//           a = lr / (1 - beta1^t) sqrt(1 - beta2^t)
//               sqrt((r - 4) (r - 2) R / ((R - 4) (R - 2) r))
//   else    p <- keep p - lr / (1 - beta1^t) m
//
// Decay is L2, or keep = 1 - lr wd if decoupled.
#pragma once

#include "ops/decay.hpp"

namespace ga {

// Both cases divide by sqrt(v) + eps clamped to [low, high], which is [1, 1] in the second case.
template <class T>
struct RadamOp : ElementWise {
  using Real = T;
  static constexpr int slots = 2;
  static constexpr SlotNames slot_names = {"exp_avg", "exp_avg_sq"};
  static constexpr SlotCodes codes = {Code::kSigned, Code::kPositive};
  Decay<T> decay;
  T beta1, gain1, beta2, gain2, a, eps, low, high;

  GA_HD RadamOp(const ga_optimizer& o, const StepInput& in)
      : decay(o, in, o.decoupled != 0),
        beta1(T(o.beta1)),
        gain1(T(1 - o.beta1)),
        beta2(T(o.beta2)),
        gain2(T(1 - o.beta2)),
        eps(T(o.eps)) {
    const double t = static_cast<double>(in.clock.step);
    const double decayed = power(o.beta2, in.clock.step);
    const double unbias2 = 1 - decayed;
    const double limit = 2 / (1 - o.beta2) - 1;
    const double length = limit - 2 * t * decayed / unbias2;
    const bool rectified = length > 5;
    double scale = 1;
    if (rectified)
      scale = square_root(unbias2 * (length - 4) * (length - 2) * limit /
                          ((limit - 4) * (limit - 2) * length));
    a = T(in.lr * scale / (1 - power(o.beta1, in.clock.step)));
    low = T(rectified ? 0 : 1);
    high = T(rectified ? HUGE_VAL : 1);
  }

  GA_HD T operator()(T p, T g, T* state) const {
    g += decay.l2 * p;
    const T m = beta1 * state[0] + gain1 * g;
    const T v = beta2 * state[1] + gain2 * (g * g);
    state[0] = m;
    state[1] = v;
    const T root = square_root(v) + eps;
    return decay.keep * p - a * m / larger(low, high < root ? high : root);
  }
};

struct Radam : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_RADAM;
  static constexpr const char* name = "RAdam";
  template <class T>
  using Ops = TypeList<RadamOp<T>>;

  static void defaults(ga_optimizer& o) {
    o.lr = 1e-3;
    o.beta1 = 0.9;
    o.beta2 = 0.999;
    o.eps = 1e-8;
  }
};

}  // namespace ga
