// SPDX-License-Identifier: Apache-2.0
// ADOPT (Taniguchi et al. 2024, algorithm 2), as timm's Adopt with clip_exp c, 1/4 in the paper:
//
//   t = 1:  v <- g^2
//   else    m <- beta1 m + (1 - beta1) clip(g / max(sqrt(v), eps), (t - 1)^c)
//           p <- keep p - lr m
//           v <- beta2 v + (1 - beta2) g^2
//
// with clip(x, b) = min(max(x, -b), b); m is updated with the v of the step before. Decay is L2, or
// keep = 1 - lr wd if decoupled.
#pragma once

#include "core/elementary.hpp"
#include "ops/decay.hpp"

namespace ga {

constexpr double kClipExponent = 0.25;

// Folded scalars make the first step a step like the others: gain1, lr and beta2 are 0, gain2 is 1.
template <class T>
struct AdoptOp : ElementWise {
  using Real = T;
  static constexpr int slots = 2;
  static constexpr SlotNames slot_names = {"exp_avg", "exp_avg_sq"};
  static constexpr SlotCodes codes = {Code::kSigned, Code::kPositive};
  Decay<T> decay;
  T beta1, gain1, beta2, gain2, eps, clip, lr;

  GA_HD AdoptOp(const ga_optimizer& o, const StepInput& in)
      : decay(o, in, o.decoupled != 0), beta1(T(o.beta1)) {
    const bool first = in.clock.step == 1;
    if (first) decay.keep = T(1);
    gain1 = T(first ? 0 : 1 - o.beta1);
    beta2 = T(first ? 0 : o.beta2);
    gain2 = T(first ? 1 : 1 - o.beta2);
    eps = T(first ? 1 : o.eps);
    const auto before = static_cast<double>(in.clock.step - 1);
    // real_power() may differ from the roots in the last bit: runs keep those of the versions that had no such function.
    clip = T(o.clip_exponent == kClipExponent ? square_root(square_root(before))
                                              : real_power(before, o.clip_exponent));
    lr = T(first ? 0 : in.lr);
  }

  GA_HD T operator()(T p, T g, T* state) const {
    g += decay.l2 * p;
    const T x = g / larger(eps, square_root(state[1]));
    const T m = beta1 * state[0] + gain1 * (x < -clip ? -clip : x > clip ? clip : x);
    state[0] = m;
    state[1] = beta2 * state[1] + gain2 * (g * g);
    return decay.keep * p - lr * m;
  }
};

struct Adopt : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_ADOPT;
  static constexpr const char* name = "ADOPT";
  template <class T>
  using Ops = TypeList<AdoptOp<T>>;

  static void defaults(ga_optimizer& o) {
    o.lr = 1e-3;
    o.beta1 = 0.9;
    o.beta2 = 0.9999;
    o.eps = 1e-6;
    o.clip_exponent = kClipExponent;
  }

  static void check(const ga_optimizer& o) {
    check_range(name, "clip_exponent", o.clip_exponent, 0, HUGE_VAL);
  }
};

}  // namespace ga
