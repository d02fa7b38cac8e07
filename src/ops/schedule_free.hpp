// SPDX-License-Identifier: Apache-2.0
// Schedule-Free AdamW and SGD (Defazio et al. 2024, arXiv 2405.15682), as in the package schedulefree
// 1.4. The parameter is y, where gradients are taken; z is the sequence that steps; x, the average
// that is evaluated, is never stored: x = y + (1 - 1 / beta) (z - y).
//
//   d = g / (sqrt(v / (1 - beta2^t)) + eps) + wd y, of SGD d = g + wd y
//   y <- y + c (z - y) + lr (beta (1 - c) - 1) d;  z <- z - lr d
//   c = w_t / (w_1 + ... + w_t), w_t = t^r (largest lr so far)^s
//   r = average_power, s = average_lr_power; beta is AdamW's beta1, SGD's momentum
//
// z begins as the parameter that the first step finds.
#pragma once

#include "core/elementary.hpp"
#include "core/error.hpp"
#include "ops/op.hpp"

namespace ga {

// The numbers of the clock: w_1 + ... + w_t, and the largest learning rate so far.
enum { kWeightSum, kLargestRate };

GA_HD double averaging_weight(const ga_optimizer& o, const Clock& clock) {
  return real_power(static_cast<double>(clock.step), o.average_power) *
         real_power(clock.numbers[kLargestRate], o.average_lr_power);
}

// What both have: z and y move by d.
template <class T>
struct ScheduleFreeStep {
  T begin, go_on, average, move, lr, decay;

  GA_HD ScheduleFreeStep(const ga_optimizer& o, const StepInput& in, double beta)
      : begin(T(in.clock.step == 1)),
        go_on(T(in.clock.step != 1)),
        lr(T(in.lr)),
        decay(T(in.weight_decay)) {
    const double sum = in.clock.numbers[kWeightSum];
    const double c = sum > 0 ? averaging_weight(o, in.clock) / sum : 0;
    average = T(c);
    move = T(in.lr * (beta * (1 - c) - 1));
  }

  GA_HD T operator()(T y, T d, T& z) const {
    d += decay * y;
    const T before = go_on * z + begin * y;
    z = before - lr * d;
    return y + average * (before - y) + move * d;
  }
};

template <class T>
struct ScheduleFreeAdamWOp : ElementWise {
  using Real = T;
  static constexpr int slots = 2;
  static constexpr SlotNames slot_names = {"z", "exp_avg_sq"};
  ScheduleFreeStep<T> step;
  T beta2, gain2, root, e;

  GA_HD ScheduleFreeAdamWOp(const ga_optimizer& o, const StepInput& in)
      : step(o, in, o.beta1), beta2(T(o.beta2)), gain2(T(1 - o.beta2)) {
    const double bias = square_root(1 - power(o.beta2, in.clock.step));
    root = T(bias);
    e = T(o.eps * bias);
  }

  GA_HD T operator()(T p, T g, T* state) const {
    const T v = beta2 * state[1] + gain2 * (g * g);
    state[1] = v;
    return step(p, root * g / (square_root(v) + e), state[0]);
  }
};

template <class T>
struct ScheduleFreeSgdOp : ElementWise {
  using Real = T;
  static constexpr int slots = 1;
  static constexpr SlotNames slot_names = {"z"};
  ScheduleFreeStep<T> step;

  GA_HD ScheduleFreeSgdOp(const ga_optimizer& o, const StepInput& in) : step(o, in, o.momentum) {}

  GA_HD T operator()(T p, T g, T* state) const { return step(p, g, state[0]); }
};

struct ScheduleFree : OptimizerBase {
  static constexpr bool bf16_state = false;  // z holds weights
  static constexpr ClockNumber clock_numbers[kClockNumbers] = {{"weight_sum", 0, HUGE_VAL},
                                                               {"lr_max", 0, HUGE_VAL}};

  static void defaults(ga_optimizer& o) { o.average_lr_power = 2; }

  static void check(const ga_optimizer& o, const char* name, const char* field, double beta) {
    if (!(beta > 0 && beta < 1))
      fail(GA_ERROR_INVALID_ARGUMENT, "%s: %s was %g, expected a number in (0, 1)", name, field,
           beta);
    check_range(name, "average_power", o.average_power, 0, HUGE_VAL);
    check_range(name, "average_lr_power", o.average_lr_power, 0, HUGE_VAL);
  }

  GA_HD static void advance(const ga_optimizer& o, Clock& clock, double lr) {
    ++clock.step;
    double* const of = clock.numbers;
    of[kLargestRate] = lr > of[kLargestRate] ? lr : of[kLargestRate];
    of[kWeightSum] += averaging_weight(o, clock);
  }
};

struct ScheduleFreeAdamW : ScheduleFree {
  static constexpr int32_t kind = GA_OPTIMIZER_SCHEDULE_FREE_ADAMW;
  static constexpr const char* name = "Schedule-Free AdamW";
  template <class T>
  using Ops = TypeList<ScheduleFreeAdamWOp<T>>;

  static void defaults(ga_optimizer& o) {
    ScheduleFree::defaults(o);
    o.lr = 2.5e-3;
    o.beta1 = 0.9;
    o.beta2 = 0.999;
    o.eps = 1e-8;
  }

  static void check(const ga_optimizer& o) { ScheduleFree::check(o, name, "beta1", o.beta1); }
  static double share_of_average(const ga_optimizer& o) { return o.beta1; }
};

struct ScheduleFreeSgd : ScheduleFree {
  static constexpr int32_t kind = GA_OPTIMIZER_SCHEDULE_FREE_SGD;
  static constexpr const char* name = "Schedule-Free SGD";
  template <class T>
  using Ops = TypeList<ScheduleFreeSgdOp<T>>;

  static void defaults(ga_optimizer& o) {
    ScheduleFree::defaults(o);
    o.lr = 1;
    o.momentum = 0.9;
  }

  static void check(const ga_optimizer& o) { ScheduleFree::check(o, name, "momentum", o.momentum); }
  static double share_of_average(const ga_optimizer& o) { return o.momentum; }
};

}  // namespace ga
