// SPDX-License-Identifier: Apache-2.0
#include "reference.hpp"

#include <map>
#include <stdexcept>
#include <utility>

namespace ga::ref {

namespace {

// The relative error of a norm of so many numbers, in the arithmetic of now.
double norm_error(size_t terms) {
  const double wide = std::min(kNorm64, static_cast<double>(terms + 4) * kHalfUlp64);
  if (arithmetic.half_ulp == kHalfUlp64) return wide;
  const auto of_lane = static_cast<double>(std::min<size_t>((terms + 31) / 32, 32));
  return wide + of_lane * kHalfUlp / 2;
}

// The 2-norm of the errors of some numbers: |x + e| lies within |e| of |x|.
double error_norm(const std::vector<Real>& list) {
  double squares = 0;
  for (const Real& x : list) squares += x.error * x.error;
  return std::sqrt(squares);
}

}  // namespace

Real norm(const std::vector<Real>& list) {
  long double squares = 0;
  bool zero = true;
  for (const Real& x : list) {
    squares += static_cast<long double>(x.value) * x.value;
    zero = zero && x.zero();
  }
  if (zero) return {};
  const auto root = static_cast<double>(std::sqrt(squares));
  return {root, error_norm(list) + root * norm_error(list.size())};
}

// ---- Clipping -----------------------------------------------------------------------------------

double clip_factor(int32_t flavor, double norm, double max_norm) {
  if (flavor == GA_FLAVOR_KERAS) return norm > max_norm ? max_norm / norm : 1.0;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

int64_t count_of(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

uint32_t agc_axes(int32_t preset, const Shape& shape) {
  const auto rank = static_cast<uint32_t>(shape.size());
  const uint32_t all = (uint32_t{1} << rank) - 1;
  const auto longer = std::count_if(shape.begin(), shape.end(), [](int64_t n) { return n != 1; });
  if (rank <= 1 || (preset == GA_AGC_NFNETS && longer <= 1)) return all;
  if (preset == GA_AGC_TORCH) return all & ~uint32_t{1};
  return rank <= 3 ? 1 : all >> 1;
}

namespace {

// The elements of each unit.
std::vector<std::vector<size_t>> agc_units(const Shape& shape, uint32_t axes) {
  std::map<int64_t, std::vector<size_t>> units;  // by the first element
  for (int64_t i = 0; i < count_of(shape); ++i) {
    int64_t rest = i, stride = 1, first = 0;
    for (size_t d = shape.size(); d-- > 0; stride *= shape[d], rest /= shape[d]) {
      if ((axes >> d & 1) == 0) first += rest % shape[d] * stride;
    }
    units[first].push_back(static_cast<size_t>(i));
  }
  std::vector<std::vector<size_t>> result;
  for (auto& unit : units) result.push_back(std::move(unit.second));
  return result;
}

}  // namespace

double agc(const ga_clip& clip, const Shape& shape, uint32_t axes, const std::vector<Real>& p,
           std::vector<Real>& g) {
  double least = 1;
  for (const std::vector<size_t>& unit : agc_units(shape, axes)) {
    std::vector<Real> pu, gu;
    for (const size_t i : unit) {
      pu.push_back(p[i]);
      gu.push_back(g[i]);
    }
    const Real limit = scalar(clip.agc_factor) * max(norm(pu), exact(clip.agc_eps));
    const Real size = norm(gu);
    // If rounding decides, either branch is right, because both give the same g (for limits above
    // 1e-6).
    if (size.value + tolerance(size) <= limit.value - tolerance(limit)) continue;
    const Real ratio = limit / max(size, exact(1e-6));
    const Real factor(std::min(1.0, ratio.value), ratio.error);
    least = std::min(least, factor.value);
    for (const size_t i : unit) g[i] = g[i] * factor;
  }
  return least;
}

// ---- Optimizers, element by element -------------------------------------------------------------

bool schedule_free(const ga_optimizer& o) {
  return o.kind == GA_OPTIMIZER_SCHEDULE_FREE_ADAMW || o.kind == GA_OPTIMIZER_SCHEDULE_FREE_SGD;
}

namespace {

// beta m + (1 - beta) x
Real average(double beta, const Real& m, const Real& x) {
  return scalar(beta) * m + scalar(1 - beta) * x;
}

// 1 - beta^t, in float64. Any way to compute beta^t has at most t roundings.
Real bias_correction(double beta, int64_t t) {
  const double power = std::pow(beta, static_cast<double>(t));
  return {1 - power, (static_cast<double>(t) * power + 1) * 2 * kHalfUlp64};
}

// p - lr weight_decay p, written as a product: a difference would count the error of p twice.
void decay(const ga_optimizer& o, double lr, Real& p) {
  if (o.weight_decay != 0) p = scalar(1 - lr * o.weight_decay) * p;
}

// Whether weight_decay p is part of the gradient.
bool l2(const ga_optimizer& o) {
  return o.flavor == GA_FLAVOR_TORCH && o.weight_decay != 0 && o.kind != GA_OPTIMIZER_ADAMW &&
         o.kind != GA_OPTIMIZER_LION && o.kind != GA_OPTIMIZER_ADEMAMIX &&
         o.kind != GA_OPTIMIZER_ROWWISE_ADAGRAD && !schedule_free(o) && o.decoupled == 0;
}

// torch.optim.SGD, after the weight decay.
void momentum_torch(const ga_optimizer& o, double lr, const Real& g, Element& e) {
  Real direction = g;
  if (o.momentum != 0) {
    e.m = e.started ? scalar(o.momentum) * e.m + scalar(1 - o.dampening) * g : g;
    direction = o.nesterov ? g + scalar(o.momentum) * e.m : e.m;
  }
  e.p = e.p - scalar(lr) * direction;
}

void sgd_keras(const ga_optimizer& o, double lr, const Real& g, Element& e) {
  const Real descent = scalar(lr) * g;
  if (o.momentum == 0) {
    e.p = e.p - descent;
    return;
  }
  e.m = scalar(o.momentum) * e.m - descent;
  e.p = o.nesterov ? e.p + scalar(o.momentum) * e.m - descent : e.p + e.m;
}

// t counts from 1, here and below.
void adam(const ga_optimizer& o, double lr, int64_t t, const Real& g, Element& e) {
  const Real p = e.p;
  e.m = average(o.beta1, e.m, g);
  e.v = average(o.beta2, e.v, g * g);
  e.w = max(e.w, e.v);
  const Real root = sqrt(o.amsgrad ? e.w : e.v);
  if (o.flavor == GA_FLAVOR_BERT) {
    e.p = p - scalar(lr) * (e.m / (root + scalar(o.eps)));
  } else {
    const Real descent = on_host([&] { return exact(lr) / bias_correction(o.beta1, t); }) * e.m;
    const Real correction = on_host([&] { return sqrt(bias_correction(o.beta2, t)); });
    e.p = o.flavor == GA_FLAVOR_TORCH ? p - descent / (root / correction + scalar(o.eps))
                                      : p - correction * descent / (root + scalar(o.eps));
  }
  if (o.flavor == GA_FLAVOR_BERT && o.weight_decay != 0) {
    e.p = e.p - scalar(lr * o.weight_decay) * p;
  }
}

void rmsprop(const ga_optimizer& o, double lr, const Real& g, Element& e) {
  const bool torch = o.flavor == GA_FLAVOR_TORCH;
  e.v = average(o.rho, e.v, g * g);
  Real variance = e.v;
  if (o.centered) {
    e.w = average(o.rho, e.w, g);
    variance = variance - e.w * e.w;
  }
  const Real eps = scalar(o.eps);
  const Real d = torch ? sqrt(variance) + eps : sqrt(variance + eps);
  const Real rate = scalar(lr);
  if (o.momentum == 0) {
    e.p = e.p - rate * (g / d);
  } else if (torch) {
    e.m = scalar(o.momentum) * e.m + g / d;
    e.p = e.p - rate * e.m;
  } else {
    e.m = scalar(o.momentum) * e.m + rate * g / d;
    e.p = e.p - e.m;
  }
}

void adagrad(const ga_optimizer& o, double lr, int64_t t, const Real& g, Element& e) {
  if (!e.started) e.v = scalar(o.initial_accumulator);
  e.v = e.v + g * g;
  if (o.flavor == GA_FLAVOR_TORCH) {
    const Real rate = scalar(lr / (1 + static_cast<double>(t - 1) * o.lr_decay));
    e.p = e.p - rate * (g / (sqrt(e.v) + scalar(o.eps)));
  } else {
    e.p = e.p - scalar(lr) * (g / sqrt(e.v + scalar(o.eps)));
  }
}

void adadelta(const ga_optimizer& o, double lr, const Real& g, Element& e) {
  const Real eps = scalar(o.eps);
  e.v = average(o.rho, e.v, g * g);
  const Real delta = sqrt(e.m + eps) / sqrt(e.v + eps) * g;
  e.m = average(o.rho, e.m, delta * delta);
  e.p = e.p - scalar(lr) * delta;
}

void adamax(const ga_optimizer& o, double lr, int64_t t, const Real& g, Element& e) {
  const bool torch = o.flavor == GA_FLAVOR_TORCH;
  const Real eps = scalar(o.eps);
  e.m = average(o.beta1, e.m, g);
  e.v = max(scalar(o.beta2) * e.v, torch ? abs(g) + eps : abs(g));
  const Real rate = on_host([&] { return exact(lr) / bias_correction(o.beta1, t); });
  e.p = e.p - rate * (e.m / (torch ? e.v : e.v + eps));
}

void nadam(const ga_optimizer& o, double lr, int64_t t, const Real& g, Element& e) {
  const auto momentum = [&](int64_t step) {
    const double power = std::pow(0.96, static_cast<double>(step) * o.momentum_decay);
    return exact(o.beta1) * Real(1 - 0.5 * power, kHost);
  };
  // The product of all momenta so far. The last one is cached, because the next element needs it
  // too.
  thread_local struct {
    double beta1 = -1, decay = -1;
    int64_t t = -1;
    Real product;
  } last;
  if (last.beta1 != o.beta1 || last.decay != o.momentum_decay || last.t != t) {
    const With host(kFloat64);
    last = {o.beta1, o.momentum_decay, t, exact(1)};
    for (int64_t step = 1; step <= t; ++step) last.product = last.product * momentum(step);
  }
  const Real product = last.product;
  e.m = average(o.beta1, e.m, g);
  e.v = average(o.beta2, e.v, g * g);
  const Real correction = on_host([&] { return sqrt(bias_correction(o.beta2, t)); });
  const Real of_g =
      on_host([&] { return exact(lr) * (exact(1) - momentum(t)) / (exact(1) - product); });
  const Real of_m =
      on_host([&] { return exact(lr) * momentum(t + 1) / (exact(1) - product * momentum(t + 1)); });
  e.p = e.p - (of_g * g + of_m * e.m) / (sqrt(e.v) / correction + scalar(o.eps));
}

void radam(const ga_optimizer& o, double lr, int64_t t, const Real& g, Element& e) {
  e.m = average(o.beta1, e.m, g);
  e.v = average(o.beta2, e.v, g * g);
  const Real descent = on_host([&] { return exact(lr) / bias_correction(o.beta1, t); }) * e.m;
  // Length of the moving average, and its limit (Liu et al. 2020, algorithm 2).
  const auto steps = static_cast<double>(t);
  const double limit = 2 / (1 - o.beta2) - 1;
  const auto length = [&] {
    const Real correction = bias_correction(o.beta2, t);
    return exact(limit) - exact(2 * steps) * (exact(1) - correction) / correction;
  };
  if (on_host(length).value <= 5) {
    e.p = e.p - descent;
    return;
  }
  const Real rate = on_host([&] {
    const Real rho = length(), four = exact(4), two = exact(2);
    const Real rectified = sqrt((rho - four) * (rho - two) * exact(limit) /
                                ((exact(limit) - four) * (exact(limit) - two) * rho));
    return sqrt(bias_correction(o.beta2, t)) * rectified;
  });
  e.p = e.p - rate * descent / (sqrt(e.v) + scalar(o.eps));
}

void lion(const ga_optimizer& o, double lr, const Real& g, Element& e) {
  e.p = e.p - scalar(lr) * sign(average(o.beta1, e.m, g));
  e.m = average(o.beta2, e.m, g);
}

void adopt(const ga_optimizer& o, double lr, int64_t t, const Real& g, Element& e) {
  if (t == 1) {
    e.v = g * g;
    return;
  }
  const Real ratio = g / max(sqrt(e.v), scalar(o.eps));
  e.m = average(o.beta1, e.m, clamp(ratio, std::pow(static_cast<double>(t - 1), o.clip_exponent)));
  e.p = e.p - scalar(lr) * e.m;
  e.v = average(o.beta2, e.v, g * g);
}

void ademamix(const ga_optimizer& o, double lr, int64_t t, const Real& g, Element& e) {
  const double n = static_cast<double>(t), start = std::log(o.beta1), end = std::log(o.beta3);
  const double r = std::min(1.0, n / static_cast<double>(o.beta3_warmup));
  const double b = r < 1 ? std::exp(start * end / ((1 - r) * end + r * start)) : o.beta3;
  e.m = average(o.beta1, e.m, g);
  e.v = average(o.beta2, e.v, g * g);
  const auto host = [](double x) { return on_host([=] { return Real(x, kHost); }); };
  e.w = host(b) * e.w + host(1 - b) * g;
  const Real fast = on_host([&] { return exact(lr) / bias_correction(o.beta1, t); }) * e.m;
  const double share = std::min(1.0, n / static_cast<double>(o.alpha_warmup));
  const Real slow = scalar(lr * o.alpha * share) * e.w;
  const Real correction = on_host([&] { return sqrt(bias_correction(o.beta2, t)); });
  e.p = e.p - (fast + slow) / (sqrt(e.v) / correction + scalar(o.eps));
}

// By the paper's algorithm 1, x and all: p is y, m is z, w is x.
void schedule_free(const ga_optimizer& o, double lr, int64_t t, const Real& g, Element& e) {
  const bool adam = o.kind == GA_OPTIMIZER_SCHEDULE_FREE_ADAMW;
  const double beta = adam ? o.beta1 : o.momentum;
  if (!e.started) e.m = e.w = e.p;
  Real direction = g;
  if (adam) {
    e.v = average(o.beta2, e.v, g * g);
    const Real correction = on_host([&] { return sqrt(bias_correction(o.beta2, t)); });
    direction = g / (sqrt(e.v) / correction + scalar(o.eps));
  }
  e.m = e.m - scalar(lr) * (direction + scalar(o.weight_decay) * e.p);
  e.highest = std::max(e.highest, lr);
  const double weight =
      std::pow(static_cast<double>(t), o.average_power) * std::pow(e.highest, o.average_lr_power);
  e.weights += weight;
  e.w = average(1 - (e.weights > 0 ? weight / e.weights : 0), e.w, e.m);
  e.p = average(beta, e.w, e.m);
}

}  // namespace

void update(const ga_optimizer& o, double lr, int64_t t, Real g, Element& e) {
  if (o.kind == GA_OPTIMIZER_EXTERNAL) return;
  if (o.maximize) g = -g;
  if (l2(o)) {
    g = g + scalar(o.weight_decay) * e.p;
  } else if (o.flavor != GA_FLAVOR_BERT && (o.kind != GA_OPTIMIZER_ADOPT || t > 1) &&
             !schedule_free(o)) {
    decay(o, lr, e.p);
  }
  switch (o.kind) {
    case GA_OPTIMIZER_SGD:
      if (o.flavor == GA_FLAVOR_KERAS) {
        sgd_keras(o, lr, g, e);
      } else {
        momentum_torch(o, lr, g, e);
      }
      break;
    case GA_OPTIMIZER_RMSPROP:
      rmsprop(o, lr, g, e);
      break;
    case GA_OPTIMIZER_ADAGRAD:
      adagrad(o, lr, t, g, e);
      break;
    case GA_OPTIMIZER_ADADELTA:
      adadelta(o, lr, g, e);
      break;
    case GA_OPTIMIZER_ADAMAX:
      adamax(o, lr, t, g, e);
      break;
    case GA_OPTIMIZER_NADAM:
      nadam(o, lr, t, g, e);
      break;
    case GA_OPTIMIZER_RADAM:
      radam(o, lr, t, g, e);
      break;
    case GA_OPTIMIZER_LION:
      lion(o, lr, g, e);
      break;
    case GA_OPTIMIZER_ADOPT:
      adopt(o, lr, t, g, e);
      break;
    case GA_OPTIMIZER_ADEMAMIX:
      ademamix(o, lr, t, g, e);
      break;
    case GA_OPTIMIZER_SCHEDULE_FREE_ADAMW:
    case GA_OPTIMIZER_SCHEDULE_FREE_SGD:
      schedule_free(o, lr, t, g, e);
      break;
    case GA_OPTIMIZER_ADAM:
    case GA_OPTIMIZER_ADAMW:
      adam(o, lr, t, g, e);
      break;
    default:
      throw std::logic_error("reference.cpp has no formula for this optimizer");
  }
  e.started = true;
}

// ---- Optimizers, tensor by tensor ---------------------------------------------------------------

std::vector<Real> values(const Tensor& tensor) {
  std::vector<Real> p;
  for (const Element& e : tensor.elements) p.push_back(e.p);
  return p;
}

namespace {

// Whether a norm is > 0; false for a NaN.
bool positive(const Real& norm) { return !norm.zero() && !std::isnan(norm.value); }

// |p| / |u|, 1 if either is not > 0
Real trust_ratio(const Real& p, const Real& u) {
  return positive(p) && positive(u) ? p / u : exact(1);
}

// timm.optim.Lamb, and keras.optimizers.Lamb.
void lamb(const ga_optimizer& o, double lr, int64_t t, const std::vector<Real>& g, Tensor& tensor) {
  const bool torch = o.flavor == GA_FLAVOR_TORCH;
  const Real correction1 = on_host([&] { return bias_correction(o.beta1, t); });
  const Real correction2 = on_host([&] { return sqrt(bias_correction(o.beta2, t)); });
  std::vector<Real> u;
  for (size_t i = 0; i < g.size(); ++i) {
    Element& e = tensor.elements[i];
    if (!torch) decay(o, lr, e.p);
    e.m = average(o.beta1, e.m, g[i]);
    e.v = average(o.beta2, e.v, g[i] * g[i]);
    u.push_back(e.m / correction1 / (sqrt(e.v) / correction2 + scalar(o.eps)));
    if (torch) u[i] = u[i] + scalar(o.weight_decay) * e.p;
  }
  Real rate = scalar(lr);
  if (!torch || o.weight_decay != 0 || o.always_adapt) {
    rate = rate * trust_ratio(norm(values(tensor)), norm(u));
  }
  for (size_t i = 0; i < g.size(); ++i) {
    tensor.elements[i].p = tensor.elements[i].p - rate * u[i];
  }
}

// timm.optim.Lars
void lars(const ga_optimizer& o, double lr, std::vector<Real> g, Tensor& tensor) {
  if (o.weight_decay != 0 || o.always_adapt) {
    const Real size = norm(values(tensor)), slope = norm(g);
    const Real ratio = positive(size) && positive(slope)
                           ? scalar(o.trust_coefficient) * size /
                                 (slope + scalar(o.weight_decay) * size + scalar(o.eps))
                           : exact(1);
    for (size_t i = 0; i < g.size(); ++i) {
      g[i] = (g[i] + scalar(o.weight_decay) * tensor.elements[i].p) * ratio;
    }
  }
  for (size_t i = 0; i < g.size(); ++i) momentum_torch(o, lr, g[i], tensor.elements[i]);
}

// The mean of non-negative numbers, summed in float64.
Real mean(const std::vector<Real>& list, size_t first, size_t count, size_t stride = 1) {
  double sum = 0, error = 0;
  for (size_t k = 0; k < count; ++k) {
    sum += list[first + k * stride].value;
    error += list[first + k * stride].error;
  }
  if (sum == 0 && error == 0) return {};
  const auto n = static_cast<double>(count);
  return round(sum / n, error / n + 2 * norm_error(count) * sum / n);
}

// 1 / sqrt(max(x, least)), at most 1 / sqrt(least) even if the error of x is large.
Real inverse_root(const Real& x, double least) {
  const double value = 1 / std::sqrt(std::max(x.value, least));
  const double most = 1 / std::sqrt(std::max(x.value - x.error, least));
  const double lowest = 1 / std::sqrt(std::max(x.value + x.error, least));
  return round(value, std::max(most - value, value - lowest));
}

// torch.optim.Adafactor
void adafactor(const ga_optimizer& o, double lr, int64_t t, const std::vector<Real>& g,
               Tensor& tensor) {
  const size_t count = g.size(), rank = tensor.shape.size();
  if (count == 0) return;
  const auto step = static_cast<double>(t);
  const double fresh = std::pow(step, o.beta2_decay);
  const double root = std::sqrt(static_cast<double>(count));
  const Real size = norm(values(tensor)) * scalar(1 / root);
  const Real rate = max(scalar(o.eps2), size) * scalar(std::min(lr, 1 / std::sqrt(step)));

  std::vector<Real> squares;
  for (const Real& x : g) squares.push_back(x * x);
  // 1 - t^beta2_decay, which is 0 at first.
  const Real kept = on_host([&] { return Real(1 - fresh, t == 1 ? 0 : 4 * kHalfUlp64); });
  const auto move = [&](Real& average, const Real& x) {
    average = kept * average + scalar(fresh) * x;
  };
  std::vector<Real> second(count);
  if (rank >= 2) {
    const auto rows = static_cast<size_t>(tensor.shape[rank - 2]),
               columns = static_cast<size_t>(tensor.shape[rank - 1]);
    const size_t matrices = count / rows / columns;
    tensor.rows.resize(matrices * rows);
    tensor.columns.resize(matrices * columns);
    for (size_t k = 0; k < matrices; ++k) {
      const size_t first = k * rows * columns;
      Real* r = &tensor.rows[k * rows];
      Real* c = &tensor.columns[k * columns];
      for (size_t i = 0; i < rows; ++i) move(r[i], mean(squares, first + i * columns, columns));
      for (size_t j = 0; j < columns; ++j) move(c[j], mean(squares, first + j, rows, columns));
      const Real whole = max(mean(tensor.rows, k * rows, rows), scalar(o.eps));
      for (size_t i = 0; i < rows; ++i) {
        for (size_t j = 0; j < columns; ++j) second[first + i * columns + j] = r[i] * c[j] / whole;
      }
    }
  } else {
    for (size_t i = 0; i < count; ++i) {
      move(tensor.elements[i].v, squares[i]);
      second[i] = tensor.elements[i].v;
    }
  }
  std::vector<Real> u;
  for (size_t i = 0; i < count; ++i) {
    u.push_back(g[i] * inverse_root(second[i], o.eps * o.eps));
  }
  const Real excess = norm(u) * scalar(1 / (root * o.clip_threshold));
  const Real descent = rate / max(exact(1), excess);
  for (size_t i = 0; i < count; ++i) {
    Real& p = tensor.elements[i].p;
    decay(o, lr, p);
    p = p - descent * u[i];
  }
}

// EXACT_ROWWISE_ADAGRAD of FBGEMM, by rows of the first axis. The state of a row is in its first element.
void rowwise_adagrad(const ga_optimizer& o, double lr, const std::vector<Real>& g, Tensor& tensor) {
  const size_t rows = tensor.shape.empty() ? 1 : static_cast<size_t>(tensor.shape[0]);
  const size_t columns = g.empty() ? 0 : g.size() / rows;
  std::vector<Real> squares;
  for (const Real& x : g) squares.push_back(x * x);
  for (size_t i = 0; i < g.size(); ++i) {
    Element& first = tensor.elements[i - i % columns];
    const Real sum = first.started ? first.v : scalar(o.initial_accumulator);
    if (i % columns == 0) first.v = sum + mean(squares, i, columns);
    Real& p = tensor.elements[i].p;
    decay(o, lr, p);
    p = p - scalar(lr) / (sqrt(first.v) + scalar(o.eps)) * g[i];
  }
}

}  // namespace

// ---- Muon ---------------------------------------------------------------------------------------

Matrix transpose(const Matrix& a) {
  Matrix t(a.columns, a.rows);
  for (size_t i = 0; i < a.rows; ++i) {
    for (size_t j = 0; j < a.columns; ++j) t.at(j, i) = a.at(i, j);
  }
  return t;
}

Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows, b.columns);
  for (size_t i = 0; i < a.rows; ++i) {
    for (size_t k = 0; k < a.columns; ++k) {
      for (size_t j = 0; j < b.columns; ++j) c.at(i, j) += a.at(i, k) * b.at(k, j);
    }
  }
  return c;
}

Matrix combine(double alpha, const Matrix& a, double beta, const Matrix& b) {
  Matrix c = a;
  for (size_t i = 0; i < c.data.size(); ++i) c.data[i] = alpha * a.data[i] + beta * b.data[i];
  return c;
}

namespace {

Matrix abs(Matrix a) {
  for (double& x : a.data) x = std::abs(x);
  return a;
}

}  // namespace

std::array<double, 3> coefficients(const ga_optimizer& o, int32_t step) {
  // From modded-nanogpt, which divides by 1.02 times the norm.
  constexpr double polar_express[5][3] = {
      {8.156554524902461, -22.48329292557795, 15.878769915207462},
      {4.042929935166739, -2.808917465908714, 0.5000178451051316},
      {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
      {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
      {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}};
  constexpr double you[5][3] = {{4.0848, -6.8946, 2.9270},
                                {3.9505, -6.3029, 2.6377},
                                {3.7418, -5.5913, 2.3037},
                                {2.8769, -3.1427, 1.2046},
                                {2.8366, -3.0525, 1.2012}};
  const bool polar = o.ns_preset == GA_NS_POLAR_EXPRESS;
  const double* const table = polar                      ? polar_express[0]
                              : o.ns_preset == GA_NS_YOU ? you[0]
                              : o.ns_table               ? o.ns_table
                                                         : o.ns_coefficients;
  const int32_t rows = o.ns_preset != GA_NS_OWN ? 5 : o.ns_table ? o.ns_rows : 1;
  const double* const row = table + 3 * std::min(step, rows - 1);
  std::array<double, 3> abc = {row[0], row[1], row[2]};
  for (size_t i = 0; i < 3 && polar && step == 0; ++i)
    abc[i] /= std::pow(1.02, 2 * static_cast<double>(i) + 1);
  return abc;
}

namespace {

// Repeats X <- a X + b (X X') X + c (X X')^2 X. error: a bound on the Frobenius norm of the error
// of X, on entry and on return.
//
// Let f(s) = a s + b s^3 + c s^5. The step applies f to the singular values of X. Such a map of
// matrices, f being odd, is Lipschitz in the Frobenius norm with the largest |f'| up to the
// spectral norm of the matrices between X and the library's X, |X|_2 + error: in the basis of the
// singular vectors, the derivative of the map multiplies elements by divided differences of f. So
// an error on entry grows at most by that constant. One step adds its roundings, elementwise, with
// n and m the dimensions of X, n <= m, u half an ulp and |.| taken of the elements:
//     G = X X'        E1 = m u |X| |X|'
//     B = b G + c G^2 E2 = |b| E1 + |c| (n u |G| |G| + E1 |G| + |G| E1) + 3 u (|b| |G| + |c| |G^2|)
//     a X + B X       E3 = E2 |X| + n u |B| |X| + 3 u (|a| |X| + |B X|)
// E3 is taken in Frobenius norm. Terms of u^2 are left out: they are below 1e-4 of the others.
// |X|_2^2 = |G|_2, whose 64th power is at most the Frobenius norm of G^64.
Matrix newton_schulz(Matrix x, const ga_optimizer& o, double& error) {
  const double u = arithmetic.half_ulp;
  const double n = static_cast<double>(x.rows), m = static_cast<double>(x.columns);
  for (int32_t step = 0; step < o.ns_steps; ++step) {
    const std::array<double, 3> abc = coefficients(o, step);
    const double a = abc[0], b = abc[1], c = abc[2];
    const Matrix g = x * transpose(x), gg = g * g;
    const Matrix update = combine(b, g, c, gg), product = update * x;

    const Matrix ax = abs(x), ag = abs(g);
    const Matrix gram = ax * transpose(ax);
    Matrix e1 = gram;
    for (double& e : e1.data) e *= m * u;
    const Matrix square = ag * ag, left = e1 * ag, right = ag * e1;
    Matrix e2 = e1;
    for (size_t i = 0; i < e2.data.size(); ++i) {
      e2.data[i] = std::abs(b) * e1.data[i] +
                   std::abs(c) * (n * u * square.data[i] + left.data[i] + right.data[i]) +
                   3 * u * (std::abs(b * g.data[i]) + std::abs(c * gg.data[i]));
    }
    Matrix e3 = e2 * ax;
    const Matrix magnitude = abs(update) * ax;
    for (size_t i = 0; i < e3.data.size(); ++i) {
      e3.data[i] +=
          n * u * magnitude.data[i] + 3 * u * (std::abs(a * x.data[i]) + std::abs(product.data[i]));
    }

    // The largest |f'(s)|, f' = a + 3 b s^2 + 5 c s^4, is at an end or where s^2 = -3 b / (10 c).
    Matrix power = gg;
    for (int k = 2; k < 64; k *= 2) power = power * power;
    const double s = std::pow(power.frobenius(), 1.0 / 128) + error;
    const auto slope = [&](double s2) { return std::abs(a + 3 * b * s2 + 5 * c * s2 * s2); };
    double steepest = std::max(slope(0), slope(s * s));
    const double turn = c == 0 ? 0 : -3 * b / (10 * c);
    if (turn > 0 && turn < s * s) steepest = std::max(steepest, slope(turn));
    error = steepest * error + e3.frobenius();
    x = combine(a, x, 1, product);
  }
  return x;
}

// torch.optim.Muon, with the iteration in the arithmetic of the parameter.
void muon(const ga_optimizer& o, double lr, const std::vector<Real>& g, Tensor& tensor) {
  const auto rows = static_cast<size_t>(tensor.shape[0]),
             columns = static_cast<size_t>(tensor.shape[1]);
  if (rows == 0 || columns == 0) return;
  std::vector<Real> u;
  for (size_t i = 0; i < g.size(); ++i) {
    Real& m = tensor.elements[i].m;
    m = average(o.momentum, m, g[i]);
    u.push_back(o.nesterov ? scalar(1 - o.momentum) * g[i] + scalar(o.momentum) * m : m);
  }
  const Real size = max(norm(u), scalar(o.eps));
  Matrix x(rows, columns);
  for (size_t i = 0; i < u.size(); ++i) x.data[i] = u[i].value / size.value;
  // Of two vectors u and v, u / |u| and v / |v| are at most 2 |u - v| / (|u| + |v|) apart (Dunkl &
  // Williams 1964). Then the quotient, or a rounded reciprocal and the product, rounds.
  const double off = error_norm(u);
  double error = 2 * off / std::max(size.value, 2 * size.value - off) +
                 (4 * arithmetic.half_ulp + size.error / size.value) * x.frobenius();
  if (rows > columns) x = transpose(x);
  x = newton_schulz(x, o, error);
  if (rows > columns) x = transpose(x);

  const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
  const double adjusted = o.adjust_lr == GA_ADJUST_ORIGINAL ? lr * std::sqrt(std::max(1.0, r / c))
                          : o.adjust_lr == GA_ADJUST_MATCH_RMS
                              ? lr * 0.2 * std::sqrt(std::max(r, c))
                              : lr;
  for (size_t i = 0; i < g.size(); ++i) {
    Real& p = tensor.elements[i].p;
    const Real without = p;
    decay(o, lr, p);
    if (o.cautious) {  // unless the step moves away from zero; which way is not known of small elements
      const double known = std::abs(without.value) - without.error - tensor.spread;
      if (std::abs(x.data[i]) <= error || known <= 0)
        p.error += lr * o.weight_decay * (std::abs(p.value) + p.error + tensor.spread);
      else if ((without.value < 0) != (x.data[i] < 0))
        p = without;
    }
    p = p - scalar(adjusted) * exact(x.data[i]);
  }
  // Under `cautious` elements may keep all of it.
  tensor.spread =
      (o.cautious ? 1 : std::abs(1 - lr * o.weight_decay)) * tensor.spread + adjusted * error;
}

}  // namespace

void update(const ga_optimizer& o, double lr, int64_t t, const std::vector<Real>& gradient,
            Tensor& tensor) {
  std::vector<Real> g = gradient;
  if (o.maximize) {
    for (Real& x : g) x = -x;
  }
  switch (o.kind) {
    case GA_OPTIMIZER_LAMB:
      lamb(o, lr, t, g, tensor);
      break;
    case GA_OPTIMIZER_LARS:
      lars(o, lr, g, tensor);
      break;
    case GA_OPTIMIZER_ADAFACTOR:
      adafactor(o, lr, t, g, tensor);
      break;
    case GA_OPTIMIZER_MUON:
      muon(o, lr, g, tensor);
      break;
    case GA_OPTIMIZER_ROWWISE_ADAGRAD:
      rowwise_adagrad(o, lr, g, tensor);
      break;
    default:  // updated element by element
      for (size_t i = 0; i < g.size(); ++i) update(o, lr, t, gradient[i], tensor.elements[i]);
      return;
  }
  for (Element& e : tensor.elements) e.started = true;
}

void update_row(const ga_optimizer& o, double lr, int64_t t, const std::vector<Real>& gradient,
                Tensor& tensor, int64_t row) {
  const auto columns = static_cast<int64_t>(gradient.size());
  const auto first = tensor.elements.begin() + static_cast<std::ptrdiff_t>(row * columns);
  Tensor own = {{1, columns}, {first, first + static_cast<std::ptrdiff_t>(columns)}, {}, {}};
  update(o, lr, t, gradient, own);
  std::copy(own.elements.begin(), own.elements.end(), first);
}

// ---- EMA ----------------------------------------------------------------------------------------

Real follow(const ga_ema& ema, int64_t t, bool begun, const Real& average, const Real& p) {
  if (!begun) return p;
  const double decay = ema.kind == GA_EMA_TORCH
                           ? ema.decay
                           : std::pow(1 - 1 / static_cast<double>(t), ema.gamma + 1);
  return average + scalar(1 - decay) * (p - average);
}

// ---- Schedules ----------------------------------------------------------------------------------

double learning_rate(const ga_schedule& schedule, double lr, int64_t applied) {
  const int64_t s = std::max<int64_t>(applied - schedule.first_step, 0);
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
