// SPDX-License-Identifier: Apache-2.0
//
// What the library should compute, in float64, one scalar at a time, written from the published
// papers (those that ga_optimizer_kind names) and from the definitions of the frameworks where they
// differ. Of the library it includes the public header alone.
//
// The numbers carry their own tolerance. A Real is a float64 value together with a bound on the
// error that the library's arithmetic makes on the way to it (running error analysis, Wilkinson
// 1963; Higham 2002, section 3.3): each operation passes on the bounds of its operands and adds
// half an ulp of its own result. So no test has a tolerance of its own: a result is right when it
// lies within the bound, and the bound grows exactly where rounding must.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gradaccum/gradaccum.h"

namespace ga::ref {
// ---- The one table of tolerances ----------------------------------------------------------------

// An operation of float32 (+ - * / sqrt) is correctly rounded: half an ulp, 2^-24 of the result.
inline constexpr double kHalfUlp = 0x1p-24;
// The error of a result that underflows: half the distance between subnormal float32 numbers, times
// 2^5, the largest factor that a scalar which is multiplied in later has (1 / sqrt(1 - beta2) for
// beta2 = 0.999).
inline constexpr double kUnderflow = 0x1p-145;
// The same two for float64.
inline constexpr double kHalfUlp64 = 0x1p-53;
inline constexpr double kUnderflow64 = 0x1p-1070;
// The library may evaluate the same formula in another order, with other scalars folded beforehand:
// for instance (1 - lr wd) p rounds three times by |p| where p - lr wd p rounds once. No order of
// the formulas in reference.cpp has more than four times the roundings of the order written there.
inline constexpr double kOrder = 4;
// For float64 parameters reference.cpp rounds as much as the library does: once more.
inline constexpr double kOrder64 = kOrder + 1;
// A norm of float64 numbers is a sum of n squares in a fixed order of lanes, each lane of at most 2^16
// terms of one sign, then pairwise over chunks: the error is at most (2^16 + 64) 2^-53 = 7.3e-12 of
// the sum of squares, and half of that after the root. For few terms in any order, the error is
// half of n 2^-53 plus the rounding of the root.
inline constexpr double kNorm64 = 4e-12;
// A norm of float32 numbers adds at most 32 squares in float32, each of which is rounded itself, before
// it goes on in float64: half of 32 * 2^-24 of the norm.
inline constexpr double kNorm = 16 * kHalfUlp + kNorm64;
// What is seen of float32 numbers that were not made to be rounded one way.
inline constexpr double kUsualNorm = 1e-7;
// Numbers that stay in float64 on the host (learning rates, factors) are results of at most 16
// operations, each accurate to one float64 ulp (libm's pow and cos included).
inline constexpr double kHost = 16 * 0x1p-52;
// A matrix product of inner dimension k: each element is off by at most k roundings of the sum of
// its terms' magnitudes, in any order (Higham 2002, section 3.5). newton_schulz() derives the
// effect on the Newton-Schulz iteration.

// ---- Numbers ------------------------------------------------------------------------------------

// The arithmetic that the library is assumed to use. With sets it until the end of a scope.
struct Arithmetic {
  double half_ulp = kHalfUlp;
  double underflow = kUnderflow;
  double order = kOrder;
};
inline constexpr Arithmetic kFloat32 = {};
inline constexpr Arithmetic kFloat64 = {kHalfUlp64, kUnderflow64, kOrder64};
inline thread_local Arithmetic arithmetic = kFloat32;

class With {
 public:
  explicit With(const Arithmetic& a) : before_(arithmetic) { arithmetic = a; }
  ~With() { arithmetic = before_; }
  With(const With&) = delete;
  With& operator=(const With&) = delete;

 private:
  Arithmetic before_;
};

struct Real {
  double value = 0;
  double error = 0;

  Real() = default;
  Real(double v, double e) : value(v), error(e) {}
  bool zero() const { return value == 0 && error == 0; }  // for certain
};

// A number that the format holds exactly.
inline Real exact(double x) { return {x, 0}; }

inline Real round(double value, double error) {
  return {value, error + (std::abs(value) + error) * arithmetic.half_ulp + arithmetic.underflow};
}

// A scalar computed on the host in float64, of a few operations, and rounded once.
inline Real scalar(double x) { return x == 0 ? Real() : round(x, std::abs(x) * 4 * kHalfUlp64); }
// A scalar that the host computes by a longer formula, whose error is tracked too.
template <class Formula>
Real on_host(Formula formula) {
  const auto compute = [&] {
    const With host(kFloat64);
    return Real(formula());
  };
  const Real x = compute();
  return x.zero() ? x : round(x.value, x.error);
}

// Operations with an exact zero are exact.
inline Real operator-(const Real& a) { return {-a.value, a.error}; }
inline Real operator+(const Real& a, const Real& b) {
  if (a.zero()) return b;
  if (b.zero()) return a;
  return round(a.value + b.value, a.error + b.error);
}
inline Real operator-(const Real& a, const Real& b) { return a + -b; }
inline Real operator*(const Real& a, const Real& b) {
  if (a.zero() || b.zero()) return {};
  return round(a.value * b.value,
               std::abs(a.value) * b.error + std::abs(b.value) * a.error + a.error * b.error);
}
inline Real operator/(const Real& a, const Real& b) {
  const double least = std::abs(b.value) - b.error;  // the divisor may be this small
  if (a.zero() && least > 0) return {};
  const double quotient = a.value / b.value;
  const double error = least > 0 ? (std::abs(a.value) + a.error) / least - std::abs(quotient)
                                 : std::numeric_limits<double>::infinity();
  return round(quotient, error);
}
inline Real sqrt(const Real& a) {
  if (a.zero()) return {};
  const double root = std::sqrt(std::max(0.0, a.value));
  const double low = std::sqrt(std::max(0.0, a.value - a.error));
  return round(root, std::max(std::sqrt(std::max(0.0, a.value + a.error)) - root, root - low));
}
inline Real abs(const Real& a) { return {std::abs(a.value), a.error}; }
inline Real max(const Real& a, const Real& b) {
  const double value = std::max(a.value, b.value);
  const double low = std::max(a.value - a.error, b.value - b.error);
  const double high = std::max(a.value + a.error, b.value + b.error);
  return {value, std::max(value - low, high - value)};
}
inline Real clamp(const Real& a, double limit) {
  const double off = limit * arithmetic.half_ulp;  // the limit is rounded
  if (!(std::abs(a.value) + a.error > limit - off)) return a;
  if (std::abs(a.value) - arithmetic.order * a.error > limit + off) {  // whatever rounding did
    return {std::copysign(limit, a.value), off};
  }
  const double value = std::clamp(a.value, -limit, limit);
  return {value, std::isinf(a.value) ? off : a.error + off};
}
// Returns -1, 0 or 1, or all three as 0 with error 1 if rounding decides the sign.
inline Real sign(const Real& a) {
  if (a.zero()) return {};
  if (std::abs(a.value) <= arithmetic.order * a.error) return {0, 1};
  return exact(a.value > 0 ? 1 : -1);
}

// The largest allowed distance of the library's result from x.
inline double tolerance(const Real& x) { return arithmetic.order * x.error; }
inline bool agrees(double got, const Real& x) { return std::abs(got - x.value) <= tolerance(x); }

// The 2-norm in float64, as the library computes it.
Real norm(const std::vector<Real>& list);

// ---- Accumulation -------------------------------------------------------------------------------

// One parameter element over one window.
class Sum {
 public:
  // Adds the program's gradient g: a mean or a sum over the micro-batch, of a loss multiplied by
  // loss_scale.
  void add(double g, double weight, double loss_scale, int32_t gradient_kind) {
    const double factor = (gradient_kind == GA_GRADIENT_MEAN ? weight : 1.0) / loss_scale;
    add(scalar(factor) * exact(g));
  }
  // Adds a contribution that includes its weight.
  void add(const Real& contribution) {
    sum_ = empty_ ? contribution : sum_ + contribution;
    empty_ = false;
  }
  // The gradient that the optimizer gets.
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
double clip_factor(int32_t flavor, double norm, double max_norm);

using Shape = std::vector<int64_t>;

int64_t count_of(const Shape& shape);

// The axes that a unit of adaptive gradient clipping is taken over, one bit each (Brock et al. 2021
// and its JAX source; timm; GradientAccumulator).
uint32_t agc_axes(int32_t preset, const Shape& shape);

// Clips a gradient by the parameter's units. Returns the smallest factor.
double agc(const ga_clip& clip, const Shape& shape, uint32_t axes, const std::vector<Real>& p,
           std::vector<Real>& g);

// ---- Optimizers, element by element -------------------------------------------------------------

// One element of a parameter and its state.
struct Element {
  Real p;
  Real m;                // first moment, momentum buffer or velocity; Adadelta: squares of updates
  Real v;                // second moment; Adamax: its infinity norm
  Real w;                // AMSGrad: the largest v; centered RMSprop: first moment
  bool started = false;  // has been updated before
  double weights = 0, highest = 0;  // Schedule-Free: their sum, and the largest learning rate
};

bool schedule_free(const ga_optimizer& o);

// One applied update with the reduced, clipped gradient g, of an optimizer that takes elements one
// by one. t is the one that the flavor counts by, from 1.
void update(const ga_optimizer& o, double lr, int64_t t, Real g, Element& e);

// ---- Optimizers, tensor by tensor ---------------------------------------------------------------

struct Tensor {
  Shape shape;
  std::vector<Element> elements;
  std::vector<Real> rows, columns;  // Adafactor: the factors of the second moment
  double spread = 0;  // Muon: the elements are off by this much more, in Frobenius norm
};

std::vector<Real> values(const Tensor& tensor);

// One applied update of a whole tensor.
void update(const ga_optimizer& o, double lr, int64_t t, const std::vector<Real>& gradient,
            Tensor& tensor);

// Updates one row of the first axis, with rows without a gradient left alone.
void update_row(const ga_optimizer& o, double lr, int64_t t, const std::vector<Real>& gradient,
                Tensor& tensor, int64_t row);

// ---- Muon ---------------------------------------------------------------------------------------

// A matrix, row by row.
struct Matrix {
  size_t rows, columns;
  std::vector<double> data;

  Matrix(size_t r, size_t c) : rows(r), columns(c), data(r * c) {}
  double& at(size_t i, size_t j) { return data[i * columns + j]; }
  double at(size_t i, size_t j) const { return data[i * columns + j]; }
  double frobenius() const {
    double squares = 0;
    for (const double x : data) squares += x * x;
    return std::sqrt(squares);
  }
};

Matrix transpose(const Matrix& a);
Matrix operator*(const Matrix& a, const Matrix& b);

// alpha a + beta b
Matrix combine(double alpha, const Matrix& a, double beta, const Matrix& b);

// a, b and c of an iteration of Newton-Schulz.
std::array<double, 3> coefficients(const ga_optimizer& o, int32_t step);

// ---- EMA ----------------------------------------------------------------------------------------

// The EMA of a parameter after the context's t-th applied step. begun: the EMA was updated before.
Real follow(const ga_ema& ema, int64_t t, bool begun, const Real& average, const Real& p);

// ---- Noise scale --------------------------------------------------------------------------------

// The simple noise scale of McCandlish et al. 2018, appendix A.1, smoothed over windows.
struct Noise {
  double weight = 0;
  Real trace, signal;

  // contributions: the sum over micro-batches k of |c_k|^2 / b_k, c_k being b_k times the mean
  // gradient of its b_k samples; sum: that over k of c_k, as a norm. samples: all b_k.
  void add(const Real& contributions, const Real& sum, double micro_batches, double samples,
           double smoothing) {
    const With host(kFloat64);
    const Real n = exact(samples);
    const Real micros = contributions / n, window = sum * sum / (n * n);
    const Real t = (micros - window) * n / exact(micro_batches - 1);
    const Real s = window - t / n;
    weight = smoothing * weight + (1 - smoothing);
    trace = exact(smoothing) * trace + exact(1 - smoothing) * t;
    signal = exact(smoothing) * signal + exact(1 - smoothing) * s;
  }
};

// ---- Schedules ----------------------------------------------------------------------------------

// The learning rate of the step after s applied steps.
double learning_rate(const ga_schedule& schedule, double lr, int64_t applied);

}  // namespace ga::ref
