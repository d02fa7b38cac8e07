// SPDX-License-Identifier: Apache-2.0
// AdEMAMix (Pagliardini et al. 2024, algorithm 1), as in pytorch_optimizer with decoupled decay:
// AdamW with a second, slow EMA s of the gradients, whose half-life grows.
//
//   s <- b s + (1 - b) g
//   p <- (1 - lr wd) p - lr (m / (1 - beta1^t) + a s) / (sqrt(v / (1 - beta2^t)) + eps)
//   a = alpha min(1, t / alpha_warmup)
//   1 / ln b = (1 - r) / ln beta1 + r / ln beta3, r = min(1, t / beta3_warmup)
#pragma once

#include "core/elementary.hpp"
#include "ops/adam.hpp"

namespace ga {

template <class T>
struct AdemamixOp : AdamOp<T, false, false> {
  static constexpr int slots = 3;
  static constexpr SlotNames slot_names = {"exp_avg", "exp_avg_sq", "exp_avg_slow"};
  static constexpr SlotCodes codes = {Code::kSigned, Code::kPositive};
  T beta3, gain3, slow;

  GA_HD AdemamixOp(const ga_optimizer& o, const StepInput& in) : AdamOp<T, false, false>(o, in) {
    const auto t = static_cast<double>(in.clock.step);
    const double r = fmin(1, t / static_cast<double>(o.beta3_warmup));  // t / 0 is infinite
    const double b =
        r < 1 ? exponential(1 / ((1 - r) / natural_log(o.beta1) + r / natural_log(o.beta3)))
              : o.beta3;
    beta3 = T(b);
    gain3 = T(1 - b);
    slow = T(in.lr * square_root(1 - power(o.beta2, in.clock.step)) * o.alpha *
             fmin(1, t / static_cast<double>(o.alpha_warmup)));
  }

  GA_HD T operator()(T p, T g, T* state) const {
    state[0] = this->beta1 * state[0] + this->gain1 * g;
    state[1] = this->beta2 * state[1] + this->gain2 * (g * g);
    state[2] = beta3 * state[2] + gain3 * g;
    return this->decay * p -
           (this->a * state[0] + slow * state[2]) / (square_root(state[1]) + this->e);
  }
};

struct Ademamix : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_ADEMAMIX;
  static constexpr const char* name = "AdEMAMix";
  template <class T>
  using Ops = TypeList<AdemamixOp<T>>;

  static void defaults(ga_optimizer& o) {
    Adam::defaults(o);
    o.beta3 = 0.9999;
    o.alpha = 5;
  }

  static void check(const ga_optimizer& o) {
    check_range(name, "beta3", o.beta3, 0, 1);
    check_range(name, "alpha", o.alpha, 0, HUGE_VAL);
    check_range(name, "alpha_warmup", static_cast<double>(o.alpha_warmup), 0, HUGE_VAL);
    check_range(name, "beta3_warmup", static_cast<double>(o.beta3_warmup), 0, HUGE_VAL);
  }
};

}  // namespace ga
