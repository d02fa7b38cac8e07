// SPDX-License-Identifier: Apache-2.0
//
// Batch normalisation of a window in float64, written from Ioffe & Szegedy 2015, algorithm 1 and
// the gradients below it: as one big batch, or micro-batch by micro-batch, with means and variances
// in two passes. Every number has a bound on the error of the library's number. The bounds follow
// from its arithmetic alone (Higham 2002, sections 2.2, 3.1 and 4.2), to first order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gradaccum/gradaccum.h"

namespace ga::ref {

// ---- The one table of tolerances ----------------------------------------------------------------

// Sums over x and dy, and all that is kept for a channel, are in float64. This is half an ulp.
inline constexpr double kSumUnit = 0x1p-53;
// y and dx are computed in f32, or in f64 for f64 tensors, and rounded once more for a 16-bit
// dtype.
struct BnArithmetic {
  double unit;   // half an ulp of the type of the computation
  double round;  // half an ulp of the tensors' dtype, 0 if that is the same type
  double least;  // half the distance between the smallest numbers of the tensors
};
inline BnArithmetic bn_arithmetic(int32_t dtype) {
  switch (dtype) {
    case GA_F64:
      return {0x1p-53, 0, 0x1p-1074};
    case GA_F16:
      return {0x1p-24, 0x1p-11, 0x1p-25};
    case GA_BF16:
      return {0x1p-24, 0x1p-8, 0x1p-134};
    default:
      return {0x1p-24, 0, 0x1p-150};
  }
}
// Allows for second-order terms, the products of two relative errors. No error is above 2^-10
// (rounding to bf16 has 2^-8, but comes last).
inline constexpr double kSecondOrder = 1 + 0x1p-10;

struct Near {
  double value = 0;
  double tolerance = 0;

  bool holds(double x) const { return std::abs(x - value) <= kSecondOrder * tolerance; }
};

// ---- Input --------------------------------------------------------------------------------------

struct BnShape {
  int64_t channels = 1, positions = 1;
  int32_t layout = GA_BN_CHANNELS_FIRST;

  int64_t at(int64_t sample, int64_t channel, int64_t position) const {
    return layout == GA_BN_CHANNELS_LAST ? (sample * positions + position) * channels + channel
                                         : (sample * channels + channel) * positions + position;
  }
};

// share: the weight of this micro-batch's dy in the sums over the window; 0 if dy is not read.
struct BnMicro {
  int64_t samples = 0;
  std::vector<double> x, dy;
  double share = 1;
};

struct BnLayer {
  BnShape shape;
  int32_t mode = GA_BN_MICRO;
  double eps = 1e-5;
  std::vector<double> gamma, beta;  // empty: 1 and 0
};

// ---- One channel --------------------------------------------------------------------------------

// The mean and the sum of squared deviations of some elements, and the errors allowed to the
// library.
struct Statistics {
  double count = 0, mean = 0, squares = 0;
  double mean_error = 0, squares_error = 0;

  double variance() const { return count > 0 ? squares / count : 0; }
  double rstd(double eps) const { return 1 / std::sqrt(variance() + eps); }
  // The relative error of rstd.
  double rstd_error(double eps) const {
    return (count > 0 ? squares_error / count : 0) / (2 * (variance() + eps)) + 3 * kSumUnit;
  }
};

// The statistics of the elements of some micro-batches, one list each. The library sums t = x -
// shift, where shift is one of the elements, so |t| <= 2 D with D the largest deviation. These sums
// are rounded n times at most, and K of them are then merged to a mean.
inline Statistics statistics(const std::vector<const std::vector<double>*>& parts) {
  Statistics s;
  double sum = 0, merges = static_cast<double>(parts.size());
  for (const auto* part : parts) {
    s.count += static_cast<double>(part->size());
    for (const double x : *part) sum += x;
  }
  if (s.count == 0) return s;
  s.mean = sum / s.count;
  double rest = 0;
  for (const auto* part : parts)
    for (const double x : *part) rest += x - s.mean;
  s.mean += rest / s.count;
  double largest = 0;
  for (const auto* part : parts) {
    for (const double x : *part) {
      s.squares += (x - s.mean) * (x - s.mean);
      largest = std::max(largest, std::abs(x - s.mean));
    }
  }
  const double n = s.count;
  s.mean_error =
      kSumUnit * ((n + 2 + 4 * merges) * 2 * largest + (merges + 1) * (std::abs(s.mean) + largest));
  // A micro-batch has n_k numbers t^2 <= 4 D^2, and (sum of t)^2 / n_k. A merge adds d^2 n_a n_b /
  // n, where d <= 2 D is the difference of two means and as accurate as they are.
  s.squares_error = kSumUnit * ((3 * n + 8) * 4 + 4 * merges) * n * largest * largest +
                    (merges > 1 ? 8 * n * largest * s.mean_error : 0);
  if (largest == 0) s.squares_error = 0;  // every t is 0
  return s;
}

// The error of x - mean. The library subtracts the mean in two parts; the second part is at most
// unit times the first.
inline double deviation_error(double d, const Statistics& s, double unit) {
  return 2 * unit * std::abs(d) + 3 * unit * unit * std::abs(s.mean) + s.mean_error;
}

struct ChannelSums {
  double dbeta = 0, dgamma = 0, dbeta_error = 0, dgamma_error = 0;
};

// The sums over dy and dy (x - mean) rstd, where x - mean has the error of deviation_error.
inline ChannelSums sums(const std::vector<double>& x, const std::vector<double>& dy,
                        const Statistics& s, double eps, double unit) {
  ChannelSums r;
  double magnitude = 0, products = 0, errors = 0;
  const double rstd = s.rstd(eps);
  for (size_t i = 0; i < x.size(); ++i) {
    const double d = x[i] - s.mean;
    r.dbeta += dy[i];
    r.dgamma += dy[i] * d * rstd;
    magnitude += std::abs(dy[i]);
    products += std::abs(dy[i] * d) * rstd;
    errors += std::abs(dy[i]) * rstd * deviation_error(d, s, unit);
  }
  const double n = static_cast<double>(x.size());
  r.dbeta_error = kSumUnit * (n + 2) * magnitude;
  r.dgamma_error = kSumUnit * (n + 6) * products + errors + std::abs(r.dgamma) * s.rstd_error(eps);
  return r;
}

// ---- The window ---------------------------------------------------------------------------------

struct BnResult {
  std::vector<std::vector<Near>> y, dx;  // of each micro-batch, in the order of its tensors
  std::vector<Near> dgamma, dbeta;       // sums over the window, weighted by shares
  std::vector<Statistics> window;        // of each channel
};

// Gradients are accumulated in the type of the computation.
inline BnResult batch_norm(const BnLayer& layer, const std::vector<BnMicro>& window,
                           int32_t dtype) {
  const BnArithmetic a = bn_arithmetic(dtype);
  const double u = a.unit;
  const size_t K = window.size();
  BnResult result;
  for (const BnMicro& m : window) {
    result.y.emplace_back(m.x.size());
    result.dx.emplace_back(m.x.size());
  }
  for (int64_t c = 0; c < layer.shape.channels; ++c) {
    const auto channel = static_cast<size_t>(c);
    const double gamma = layer.gamma.empty() ? 1 : layer.gamma[channel];
    const double beta = layer.beta.empty() ? 0 : layer.beta[channel];
    std::vector<std::vector<double>> x(K), dy(K);
    for (size_t k = 0; k < K; ++k) {
      for (int64_t s = 0; s < window[k].samples; ++s) {
        for (int64_t p = 0; p < layer.shape.positions; ++p) {
          const auto i = static_cast<size_t>(layer.shape.at(s, c, p));
          x[k].push_back(window[k].x[i]);
          dy[k].push_back(window[k].share == 0 ? 0 : window[k].dy[i]);
        }
      }
    }
    // The statistics that normalise micro-batch k.
    std::vector<Statistics> of(K);
    std::vector<const std::vector<double>*> all;
    for (const auto& part : x) all.push_back(&part);
    for (size_t k = 0; k < K; ++k) {
      const bool to_here = layer.mode == GA_BN_CUMULATIVE, alone = layer.mode == GA_BN_MICRO;
      of[k] = statistics({all.begin() + static_cast<ptrdiff_t>(alone ? k : 0),
                          all.begin() + static_cast<ptrdiff_t>(alone || to_here ? k + 1 : K)});
    }
    result.window.push_back(statistics(all));

    std::vector<ChannelSums> of_micro;
    ChannelSums total;
    Near dgamma, dbeta;
    const double roundings = static_cast<double>(K) + 3;  // of the sum, the share and the additions
    for (size_t k = 0; k < K; ++k) {
      const ChannelSums s = sums(x[k], dy[k], of[k], layer.eps, u);
      const double share = window[k].share;
      of_micro.push_back(s);
      total.dbeta += share * s.dbeta;
      total.dgamma += share * s.dgamma;
      total.dbeta_error +=
          std::abs(share) * (s.dbeta_error + kSumUnit * roundings * std::abs(s.dbeta));
      total.dgamma_error +=
          std::abs(share) * (s.dgamma_error + kSumUnit * roundings * std::abs(s.dgamma));
      dbeta.tolerance += std::abs(share) * (s.dbeta_error + roundings * u * std::abs(s.dbeta));
      dgamma.tolerance += std::abs(share) * (s.dgamma_error + roundings * u * std::abs(s.dgamma));
    }
    dbeta.value = total.dbeta;
    dgamma.value = total.dgamma;
    result.dbeta.push_back(dbeta);
    result.dgamma.push_back(dgamma);

    for (size_t k = 0; k < K; ++k) {
      const Statistics& s = of[k];
      const double rstd = s.rstd(layer.eps), rstd_error = s.rstd_error(layer.eps);
      const double scale = gamma * rstd;
      const bool windowed = layer.mode == GA_BN_WINDOW;
      const ChannelSums& by = windowed ? total : of_micro[k];
      const double an = (windowed ? window[k].share : 1) * s.count;
      size_t next = 0;
      for (int64_t sample = 0; sample < window[k].samples; ++sample) {
        for (int64_t p = 0; p < layer.shape.positions; ++p, ++next) {
          const auto i = static_cast<size_t>(layer.shape.at(sample, c, p));
          const double d = x[k][next] - s.mean;
          const double d_error = deviation_error(d, s, u);
          const auto stored = [&](double value, double error) {
            return Near{value, error + a.round * (std::abs(value) + error) + a.least};
          };
          const double y = d * scale + beta;
          result.y[k][i] =
              stored(y, std::abs(scale) * (d_error + std::abs(d) * (rstd_error + 2 * u)) +
                            u * (std::abs(y) + std::abs(beta)));
          if (window[k].share == 0) continue;  // dx is 0, exactly
          const double g = dy[k][next];
          const double shift = by.dbeta / an, shift_error = by.dbeta_error / std::abs(an);
          const double slope = rstd * by.dgamma / an;
          const double slope_error =
              rstd * by.dgamma_error / std::abs(an) + std::abs(slope) * rstd_error;
          const double centred = g - shift, dx = centred - d * slope;
          const double error = shift_error + u * (std::abs(shift) + std::abs(centred)) +
                               d_error * std::abs(slope) +
                               std::abs(d) * (slope_error + 2 * u * std::abs(slope)) +
                               std::abs(dx) * (3 * u + rstd_error);
          result.dx[k][i] = stored(scale * dx, std::abs(scale) * error);
        }
      }
    }
  }
  return result;
}

// ---- Running statistics -------------------------------------------------------------------------

struct BnRunning {
  Near mean, variance{1, 0};
  int64_t steps = 0;

  // torch: momentum 0.1, M2 / (n - 1); Keras: momentum 1 - 0.99, M2 / n.
  void move(const Statistics& s, double momentum, bool biased) {
    if (s.count == 0) return;
    ++steps;
    toward(mean, s.mean, s.mean_error, momentum);
    const double divisor = biased ? s.count : s.count - 1;
    if (divisor > 0) toward(variance, s.squares / divisor, s.squares_error / divisor, momentum);
  }

 private:
  static void toward(Near& r, double to, double error, double momentum) {
    const double before = std::abs(r.value);
    r.value = (1 - momentum) * r.value + momentum * to;
    r.tolerance =
        (1 - momentum) * r.tolerance + momentum * error + kSumUnit * 4 * (before + std::abs(to));
  }
};

}  // namespace ga::ref
