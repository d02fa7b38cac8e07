// SPDX-License-Identifier: Apache-2.0
//
// What the library should compute, in float64, one scalar at a time, written from the published
// formulas: Kingma & Ba 2015, Reddi et al. 2018, Loshchilov & Hutter 2019, Sutskever et al. 2013,
// and the definitions of the frameworks where they differ. It knows nothing of the library but the
// structs of its public header.
//
// The numbers carry their own tolerance. A Real is a float64 value together with a bound on the
// error that float32 arithmetic makes on the way to it (running error analysis, Wilkinson 1963;
// Higham 2002, section 3.3): each operation passes on the bounds of its operands and adds half an
// ulp of its own result. So no test has a tolerance of its own: a result is right when it lies
// within the bound, and the bound grows exactly where rounding must.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gradaccum/gradaccum.h"

namespace ga::ref {

// ---- The one table of tolerances ----------------------------------------------------------------

// A float32 operation (+ - * / sqrt) is correctly rounded: half an ulp, 2^-24 of the result.
inline constexpr double kHalfUlp = 0x1p-24;
// What a result that underflows may lose: half the distance between subnormal float32 numbers,
// times 2^5, as much as a scalar folded in afterwards may enlarge it (1 / sqrt(1 - beta2) for beta2
// = 0.999).
inline constexpr double kUnderflow = 0x1p-145;
// The library may evaluate the same formula in another order, with other scalars folded beforehand:
// for instance (1 - lr wd) p rounds three times by |p| where p - lr wd p rounds once. No order of
// the formulas below has more than four times the roundings of the order written here.
inline constexpr double kOrder = 4;
// A norm is a sum of n squares in float64 in a fixed order of lanes, each lane of at most 2^16
// terms of one sign, then pairwise over chunks: at most (2^16 + 64) 2^-53 = 7.3e-12 of the sum of
// squares, half of that after the root.
inline constexpr double kNorm = 4e-12;
// Numbers that stay in float64 on the host (learning rates, factors) pass through at most 16
// operations, each good to one float64 ulp (libm's pow and cos included).
inline constexpr double kHost = 16 * 0x1p-52;

// ---- Numbers ------------------------------------------------------------------------------------

struct Real {
  double value = 0;
  double error = 0;

  Real() = default;
  Real(double v, double e) : value(v), error(e) {}
};

// A number that float32 holds exactly.
inline Real exact(double x) { return {x, 0}; }

// A scalar computed on the host in float64 and rounded once.
inline Real scalar(double x) { return {x, std::abs(x) * kHalfUlp + kUnderflow}; }

inline Real round(double value, double error) {
  return {value, error + (std::abs(value) + error) * kHalfUlp + kUnderflow};
}

inline Real operator-(const Real& a) { return {-a.value, a.error}; }
inline Real operator+(const Real& a, const Real& b) {
  return round(a.value + b.value, a.error + b.error);
}
inline Real operator-(const Real& a, const Real& b) {
  return round(a.value - b.value, a.error + b.error);
}
inline Real operator*(const Real& a, const Real& b) {
  return round(a.value * b.value,
               std::abs(a.value) * b.error + std::abs(b.value) * a.error + a.error * b.error);
}
inline Real operator/(const Real& a, const Real& b) {
  const double least = std::abs(b.value) - b.error;  // the divisor may be this small
  const double quotient = a.value / b.value;
  const double error = least > 0 ? (std::abs(a.value) + a.error) / least - std::abs(quotient)
                                 : std::numeric_limits<double>::infinity();
  return round(quotient, error);
}
inline Real sqrt(const Real& a) {
  const double root = std::sqrt(a.value);
  const double low = std::sqrt(std::max(0.0, a.value - a.error));
  return round(root, std::max(std::sqrt(a.value + a.error) - root, root - low));
}
inline Real max(const Real& a, const Real& b) {
  return {std::max(a.value, b.value), std::max(a.error, b.error)};
}
inline Real clamp(const Real& a, double limit) {
  return {std::clamp(a.value, -limit, limit), a.error + limit * kHalfUlp * (limit < 1e300)};
}

// How far the library may be from x.
inline double tolerance(const Real& x) { return kOrder * x.error; }
inline bool agrees(float got, const Real& x) {
  return std::abs(static_cast<double>(got) - x.value) <= tolerance(x);
}

// ---- Accumulation -------------------------------------------------------------------------------

// One parameter element over one window.
class Sum {
 public:
  // g as the program hands it over: a mean or a sum over the micro-batch, of a loss multiplied by
  // loss_scale.
  void add(float g, double weight, double loss_scale, int32_t gradient_kind) {
    const double factor = (gradient_kind == GA_GRADIENT_MEAN ? weight : 1.0) / loss_scale;
    const Real contribution = scalar(factor) * exact(g);
    sum_ = empty_ ? contribution : sum_ + contribution;
    empty_ = false;
  }
  // What the optimizer is to see.
  Real reduced(double total_weight, int32_t reduce) const {
    return reduce == GA_REDUCE_MEAN ? sum_ * scalar(1.0 / total_weight) : sum_;
  }
  bool empty() const { return empty_; }

 private:
  Real sum_;
  bool empty_ = true;
};

// ---- Clipping -----------------------------------------------------------------------------------

// torch.nn.utils.clip_grad_norm_, and tf.clip_by_global_norm.
inline double clip_factor(int32_t flavor, double norm, double max_norm) {
  if (flavor == GA_FLAVOR_KERAS) return norm > max_norm ? max_norm / norm : 1.0;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

// ---- Optimizers ---------------------------------------------------------------------------------

// One element of a parameter and its state.
struct Element {
  Real p;
  Real m;                // first moment, momentum buffer or velocity
  Real v;                // second moment
  Real v_max;            // AMSGrad
  bool started = false;  // has been updated before
};

inline void sgd_torch(const ga_optimizer& o, double lr, Real g, Element& e) {
  if (o.weight_decay != 0) g = g + scalar(o.weight_decay) * e.p;
  Real direction = g;
  if (o.momentum != 0) {
    e.m = e.started ? scalar(o.momentum) * e.m + scalar(1 - o.dampening) * g : g;
    direction = o.nesterov ? g + scalar(o.momentum) * e.m : e.m;
  }
  e.p = e.p - scalar(lr) * direction;
}

inline void sgd_keras(const ga_optimizer& o, double lr, Real g, Element& e) {
  if (o.weight_decay != 0) e.p = e.p - scalar(lr * o.weight_decay) * e.p;
  const Real descent = scalar(lr) * g;
  if (o.momentum == 0) {
    e.p = e.p - descent;
    return;
  }
  e.m = scalar(o.momentum) * e.m - descent;
  e.p = o.nesterov ? e.p + scalar(o.momentum) * e.m - descent : e.p + e.m;
}

// t counts from 1.
inline void adam(const ga_optimizer& o, double lr, int64_t t, Real g, Element& e) {
  const bool l2 = o.flavor == GA_FLAVOR_TORCH && o.kind == GA_OPTIMIZER_ADAM;
  const bool corrected = o.flavor != GA_FLAVOR_BERT;
  const Real p = e.p;
  if (l2 && o.weight_decay != 0) g = g + scalar(o.weight_decay) * p;

  e.m = scalar(o.beta1) * e.m + scalar(1 - o.beta1) * g;
  e.v = scalar(o.beta2) * e.v + scalar(1 - o.beta2) * (g * g);
  e.v_max = max(e.v_max, e.v);
  const Real v = o.amsgrad ? e.v_max : e.v;

  const double correction1 = corrected ? 1 - std::pow(o.beta1, static_cast<double>(t)) : 1;
  const double correction2 = corrected ? 1 - std::pow(o.beta2, static_cast<double>(t)) : 1;
  const Real descent = scalar(lr / correction1) * e.m;  // lr times the corrected first moment
  const double root = std::sqrt(correction2);
  e.p = o.flavor == GA_FLAVOR_TORCH ? p - descent / (sqrt(v) / scalar(root) + scalar(o.eps))
                                    : p - scalar(root) * descent / (sqrt(v) + scalar(o.eps));
  if (!l2 && o.weight_decay != 0) e.p = e.p - scalar(lr * o.weight_decay) * p;
}

// One applied update with the reduced, clipped gradient g. t is the one that the flavor counts by,
// from 1.
inline void update(const ga_optimizer& o, double lr, int64_t t, Real g, Element& e) {
  if (o.maximize) g = -g;
  if (o.kind == GA_OPTIMIZER_SGD) {
    if (o.flavor == GA_FLAVOR_KERAS) {
      sgd_keras(o, lr, g, e);
    } else {
      sgd_torch(o, lr, g, e);
    }
  } else if (o.kind != GA_OPTIMIZER_EXTERNAL) {
    adam(o, lr, t, g, e);
  }
  e.started = true;
}

// ---- Schedules ----------------------------------------------------------------------------------

// Learning rate of the step that follows s applied ones.
inline double learning_rate(const ga_schedule& schedule, double lr, int64_t s) {
  const auto step = static_cast<double>(s);
  const auto warmup = static_cast<double>(schedule.warmup_steps);
  const auto total = static_cast<double>(schedule.total_steps);
  if (schedule.kind == GA_SCHEDULE_TABLE) {
    return schedule.table[std::min(s, schedule.table_size - 1)];
  }
  if (schedule.kind == GA_SCHEDULE_BERT) {
    return step < warmup ? lr * step / warmup : lr * (1 - std::min(step, total) / total);
  }
  if (step < warmup) return lr * (step + 1) / warmup;

  const double after = step - warmup;
  const double x = std::clamp(after / (total - warmup), 0.0, 1.0);
  const double end = schedule.end_factor * lr;
  switch (schedule.kind) {
    case GA_SCHEDULE_LINEAR:
      return end + (lr - end) * (1 - x);
    case GA_SCHEDULE_COSINE:
      return end + (lr - end) * (1 + std::cos(M_PI * x)) / 2;
    case GA_SCHEDULE_POLYNOMIAL:
      return end + (lr - end) * std::pow(1 - x, schedule.power);
    case GA_SCHEDULE_INVERSE_SQRT: {
      const double c = std::max(warmup, 1.0);
      return lr * std::sqrt(c / (c + after));
    }
    case GA_SCHEDULE_STEP:
      return lr *
             std::pow(schedule.gamma, std::floor(after / static_cast<double>(schedule.step_size)));
    case GA_SCHEDULE_EXPONENTIAL:
      return lr * std::pow(schedule.gamma, after);
    default:
      return lr;
  }
}

}  // namespace ga::ref
