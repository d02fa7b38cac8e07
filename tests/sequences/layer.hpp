// SPDX-License-Identifier: Apache-2.0
//
// What a layer with batch normalisation should keep and compute while micro-batches come in any
// order, in float64, written from the manual in gradaccum.h. The layer keeps the statistics of
// every micro-batch of the window by its number; layers.hpp decides which calls are legal.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

#include "batchnorm_reference.hpp"
#include "gradaccum/gradaccum.h"

namespace ga::model {

// The moments of one channel of one micro-batch.
struct Moments {
  double count = 0;
  long double mean = 0;
  long double squares = 0;  // sum of squared deviations
  double largest = 0;       // upper bound of the deviations from the mean

  bool operator==(const Moments& o) const {
    return count == o.count && mean == o.mean && squares == o.squares;
  }
};

inline Moments moments_of(const std::vector<double>& elements) {
  Moments m;
  for (const double x : elements) m.mean += x;
  m.count = static_cast<double>(elements.size());
  if (elements.empty()) return m;
  m.mean /= m.count;
  for (const double x : elements) {
    const long double d = x - m.mean;
    m.squares += d * d;
    m.largest = std::max(m.largest, static_cast<double>(std::abs(d)));
  }
  return m;
}

// Chan, Golub & LeVeque 1979. The bounds are those of ref::statistics().
inline ref::Statistics merge(const std::vector<const Moments*>& parts) {
  ref::Statistics s;
  long double mean = 0, squares = 0;
  for (const Moments* m : parts) {
    s.count += m->count;
    mean += m->count * m->mean;
  }
  if (s.count == 0) return s;
  mean /= s.count;
  double largest = 0;
  for (const Moments* m : parts) {
    if (m->count == 0) continue;
    const long double d = m->mean - mean;
    squares += m->squares + m->count * d * d;
    largest = std::max(largest, m->largest + static_cast<double>(std::abs(d)));
  }
  s.mean = static_cast<double>(mean);
  s.squares = static_cast<double>(squares);
  const double n = s.count, merges = static_cast<double>(parts.size());
  const double u = ref::kSumUnit;
  s.mean_error =
      u * ((n + 2 + 4 * merges) * 2 * largest + (merges + 1) * (std::abs(s.mean) + largest));
  s.squares_error = u * ((3 * n + 8) * 4 + 4 * merges) * n * largest * largest +
                    (merges > 1 ? 8 * n * largest * s.mean_error : 0);
  return s;
}

struct Layer {
  int64_t channels = 1;
  ga_param gamma = -1, beta = -1;
  ga_bn_options options{};
  bool frozen = false;
  std::vector<ref::BnRunning> running;

  // The open window.
  struct Micro {
    std::vector<Moments> channel;
    bool given = false;  // the statistics came from ga_bn_accumulate or ga_bn_accumulate_stats
  };
  std::map<int64_t, Micro> micros;
  std::vector<bool> summed;       // micro-batches whose sums for gamma and beta were added
  int64_t forwarded = -1;         // micro-batch of the last forward pass, or -1
  std::vector<double> forward_x;  // input of the last forward pass
  int64_t forward_samples = 0, forward_positions = 0;
  std::vector<ref::Statistics> normalised_by;  // statistics of the last forward pass

  // Of a micro-batch that is aborted, the newest.
  void forget(int64_t micro) {
    micros.erase(micro);
    if (static_cast<size_t>(micro) < summed.size()) summed[static_cast<size_t>(micro)] = false;
    if (forwarded == micro && !frozen) forwarded = -1;
  }
  void forget() {
    micros.clear();
    summed.clear();
    forwarded = -1;
  }

  size_t at(int64_t sample, int64_t channel, int64_t position, int64_t positions) const {
    return static_cast<size_t>(
        ref::BnShape{channels, positions, options.layout}.at(sample, channel, position));
  }

  std::vector<double> channel_of(const std::vector<double>& x, int64_t channel, int64_t samples,
                                 int64_t positions) const {
    std::vector<double> list;
    for (int64_t s = 0; s < samples; ++s)
      for (int64_t p = 0; p < positions; ++p) list.push_back(x[at(s, channel, p, positions)]);
    return list;
  }

  std::vector<Moments> moments(const std::vector<double>& x, int64_t samples,
                               int64_t positions) const {
    std::vector<Moments> list;
    for (int64_t c = 0; c < channels; ++c)
      list.push_back(moments_of(channel_of(x, c, samples, positions)));
    return list;
  }

  // Whether a micro-batch that has not been opened yet has other statistics than these.
  bool differs(int64_t index, const std::vector<Moments>& now) const {
    const auto it = micros.find(index);
    return it != micros.end() && !(it->second.channel == now);
  }

  // The statistics of the micro-batches from first to last; those without statistics are left out.
  std::vector<ref::Statistics> merged(int64_t first, int64_t last) const {
    std::vector<ref::Statistics> list;
    for (int64_t c = 0; c < channels; ++c) {
      std::vector<const Moments*> parts;
      for (const auto& [index, micro] : micros)
        if (index >= first && index <= last)
          parts.push_back(&micro.channel[static_cast<size_t>(c)]);
      list.push_back(merge(parts));
    }
    return list;
  }

  // The statistics that normalise micro-batch index.
  std::vector<ref::Statistics> statistics_for(int64_t index) const {
    if (!frozen) return merged(options.mode == GA_BN_CUMULATIVE ? 0 : index, index);
    std::vector<ref::Statistics> list;
    for (const ref::BnRunning& r : running) {
      ref::Statistics s;  // with a count of 1, squares is the variance
      s.count = 1;
      s.mean = r.mean.value;
      s.squares = r.variance.value;
      s.mean_error = r.mean.tolerance;
      s.squares_error = r.variance.tolerance;
      list.push_back(s);
    }
    return list;
  }

  // Updates the running statistics in an applied step.
  void commit(int64_t micro_batches) {
    if (frozen) return;
    const std::vector<ref::Statistics> all = merged(0, micro_batches - 1);
    for (size_t c = 0; c < all.size(); ++c)
      running[c].move(all[c], options.momentum, options.biased != 0);
  }

  std::vector<ref::Near> normalised(const std::vector<double>& x, int64_t samples,
                                    int64_t positions, const std::vector<ref::Statistics>& by,
                                    const std::vector<double>& gammas,
                                    const std::vector<double>& betas) const {
    const ref::BnArithmetic a = ref::bn_arithmetic(options.dtype);
    std::vector<ref::Near> y(x.size());
    for (int64_t c = 0; c < channels; ++c) {
      const auto k = static_cast<size_t>(c);
      const ref::Statistics& s = by[k];
      const double beta = betas.empty() ? 0 : betas[k];
      const double scale = (gammas.empty() ? 1 : gammas[k]) * s.rstd(options.eps);
      for (int64_t sample = 0; sample < samples; ++sample) {
        for (int64_t p = 0; p < positions; ++p) {
          const size_t i = at(sample, c, p, positions);
          const double d = x[i] - s.mean, value = d * scale + beta;
          const double error =
              std::abs(scale) * (ref::deviation_error(d, s, a.unit) +
                                 std::abs(d) * (s.rstd_error(options.eps) + 2 * a.unit)) +
              a.unit * (std::abs(value) + std::abs(beta));
          y[i] = {value, error + a.least * (1 + std::abs(d))};
        }
      }
    }
    return y;
  }

  std::vector<ref::ChannelSums> sums(const std::vector<double>& x, const std::vector<double>& dy,
                                     int64_t samples, int64_t positions,
                                     const std::vector<ref::Statistics>& by) const {
    std::vector<ref::ChannelSums> list;
    for (int64_t c = 0; c < channels; ++c)
      list.push_back(ref::sums(channel_of(x, c, samples, positions),
                               channel_of(dy, c, samples, positions), by[static_cast<size_t>(c)],
                               options.eps, ref::bn_arithmetic(options.dtype).unit));
    return list;
  }

  std::vector<ref::Near> derivative(const std::vector<double>& x, const std::vector<double>& dy,
                                    int64_t samples, int64_t positions,
                                    const std::vector<ref::Statistics>& by,
                                    const std::vector<ref::ChannelSums>& sums,
                                    const std::vector<double>& gammas) const {
    const ref::BnArithmetic a = ref::bn_arithmetic(options.dtype);
    std::vector<ref::Near> dx(x.size());
    for (int64_t c = 0; c < channels; ++c) {
      const auto k = static_cast<size_t>(c);
      const ref::Statistics& s = by[k];
      const double rstd = s.rstd(options.eps), rstd_error = s.rstd_error(options.eps);
      const double scale = (gammas.empty() ? 1 : gammas[k]) * rstd;
      const double n = s.count;
      for (int64_t sample = 0; sample < samples; ++sample) {
        for (int64_t p = 0; p < positions; ++p) {
          const size_t i = at(sample, c, p, positions);
          if (frozen) {
            dx[i] = {scale * dy[i], std::abs(scale * dy[i]) * (3 * a.unit + rstd_error) + a.least};
            continue;
          }
          const double d = x[i] - s.mean, d_error = ref::deviation_error(d, s, a.unit);
          const double shift = sums[k].dbeta / n, slope = rstd * sums[k].dgamma / n;
          const double slope_error = rstd * sums[k].dgamma_error / n + std::abs(slope) * rstd_error;
          const double centred = dy[i] - shift, inner = centred - d * slope;
          const double error = sums[k].dbeta_error / n +
                               a.unit * (std::abs(shift) + std::abs(centred)) +
                               d_error * std::abs(slope) +
                               std::abs(d) * (slope_error + 2 * a.unit * std::abs(slope)) +
                               std::abs(inner) * (3 * a.unit + rstd_error);
          dx[i] = {scale * inner, std::abs(scale) * error + a.least * (1 + std::abs(inner))};
        }
      }
    }
    return dx;
  }
};

}  // namespace ga::model
