// SPDX-License-Identifier: Apache-2.0
// Adafactor (Shazeer & Stern 2018), as torch.optim.Adafactor. With rms(x) = |x| / sqrt(n):
//
//   k = t^beta2_decay                                    1 - beta2 of step t
//   V <- (1 - k) V + k g^2                               rank 0 and 1
//   R, C <- (1 - k) R, C + k (means of g^2 over rows, columns);  V = R C / max(mean R, eps1)
//   U = g / sqrt(max(V, eps1^2))
//   a = max(eps2, rms(p)) min(lr, 1 / sqrt(t)) / max(1, rms(U) / clip_threshold)
//   p <- (1 - lr wd) p - a U
//
// Passes: the first, which is not the Op's, updates R and C from g; the second reads p, g and V and
// writes U over g; the third reads p and U and writes p.
#pragma once

#include <cfloat>
#include <cmath>

#include "core/elementary.hpp"
#include "core/error.hpp"
#include "ops/decay.hpp"

namespace ga {

GA_HD double adafactor_gain(const ga_optimizer& o, const Clock& clock) {
  return real_power(static_cast<double>(clock.step), o.beta2_decay);
}

template <class T, bool kFactored>
struct AdafactorOp : LayerWise {
  using Real = T;
  static constexpr int slots = 1;
  static constexpr bool factored = kFactored;
  static constexpr SlotNames slot_names = {kFactored ? "row_var" : "variance",
                                           kFactored ? "col_var" : nullptr};
  static constexpr Pass measuring = {true, true, !kFactored};
  static constexpr bool emits = true;
  static constexpr Pass updating = {true, false, false};
  Decay<T> decay;
  T keep, gain, floor, a;

  GA_HD AdafactorOp(const ga_optimizer& o, const StepInput& in)
      : decay(o, in, true), floor(T(o.eps * o.eps)) {
    const double k = adafactor_gain(o, in.clock);
    keep = T(1 - k);
    gain = T(k);
    const double root = square_root(static_cast<double>(in.rows) * static_cast<double>(in.columns));
    const double most = 1 / square_root(static_cast<double>(in.clock.step));
    const double rho = in.lr < most ? in.lr : most;
    const double clip = larger(1.0, in.norm[0] / (root * o.clip_threshold));
    a = T(larger(o.eps2, in.norm[1] / root) * rho / clip);
  }

  GA_HD void measure(T p, T g, T* state, T* x) const {
    if (!kFactored) state[0] = keep * state[0] + gain * (g * g);
    x[0] = g / square_root(larger(floor, state[0]));
    x[1] = p;
  }

  GA_HD T operator()(T p, T u, T*) const { return decay.keep * p - a * u; }
};

struct Adafactor : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_ADAFACTOR;
  static constexpr const char* name = "Adafactor";
  static constexpr bool bf16_state = false;
  template <class T>
  using Ops = TypeList<AdafactorOp<T, false>, AdafactorOp<T, true>>;

  static void defaults(ga_optimizer& o) {
    o.lr = 1e-2;
    o.eps = FLT_EPSILON;
    o.eps2 = 1e-3;
    o.beta2_decay = -0.8;
    o.clip_threshold = 1;
  }

  static void check(const ga_optimizer& o) {
    if (!(o.clip_threshold > 0) || !std::isfinite(o.clip_threshold))
      fail(GA_ERROR_INVALID_ARGUMENT,
           "Adafactor: clip_threshold was %g, expected a finite number > 0", o.clip_threshold);
    if (!(o.beta2_decay <= 0) || !std::isfinite(o.beta2_decay))
      fail(GA_ERROR_INVALID_ARGUMENT,
           "Adafactor: beta2_decay was %g, expected a finite number <= 0", o.beta2_decay);
  }

  static int select(const ga_optimizer&, bool matrix) { return matrix ? 1 : 0; }

  GA_HD static double factor_gain(const ga_optimizer& o, const Clock& clock) {
    return adafactor_gain(o, clock);
  }
  GA_HD static double factor_floor(const ga_optimizer& o) { return o.eps; }
};

}  // namespace ga
