// SPDX-License-Identifier: Apache-2.0
// Batch normalisation (Ioffe & Szegedy 2015) under accumulation: the state of a layer's channel,
// and the formulas for a channel and for an element. The backends loop over channels and elements.
//
// The statistics of a micro-batch are sums of x - shift and (x - shift)^2 in double, where shift is
// an element of the channel. Since (shift - mean)^2 <= M2, the shift costs M2 at most n ulps,
// whatever the data. Micro-batches are merged by count, mean and M2 (Chan, Golub & LeVeque 1983).
//
// MICRO and CUMULATIVE mode keep the statistics of every micro-batch of the window, since a
// micro-batch may be visited again.
#pragma once

#include <math.h>

#include <cstdint>

#include "core/hd.hpp"
#include "gradaccum/gradaccum.h"

namespace ga {

// The mean of count numbers, and the sum of squared deviations from the mean.
struct Moments {
  double count, mean, m2;
};

GA_HD Moments moments_of(int64_t count, double shift, double sum, double sum_squares) {
  if (count == 0) return {0, 0, 0};
  const double n = static_cast<double>(count);
  const double m2 = sum_squares - sum * sum / n;
  return {n, shift + sum / n, m2 < 0 ? 0 : m2};  // lets NaN pass
}

GA_HD Moments merge(const Moments& a, const Moments& b) {
  if (a.count == 0) return b;
  if (b.count == 0) return a;
  const double n = a.count + b.count;
  const double d = b.mean - a.mean;
  return {n, a.mean + d * (b.count / n), a.m2 + b.m2 + d * d * (a.count * b.count / n)};
}

// The statistics of one channel by micro-batch; entries holds those of all channels of the layer.
struct BnHistory {
  Moments* entries;
  int64_t channels, channel;

  GA_HD Moments& operator[](int64_t micro) const { return entries[micro * channels + channel]; }
};

// The state of a layer's channel. Initially zeros, but for running_variance.
struct BnChannel {
  Moments window;  // WINDOW mode: the micro-batches so far; else micro-batches [0, merged)
  int64_t merged;
  int64_t taken;  // the history holds micro-batches [0, taken); later entries are stale
  // The statistics that normalise x now, as in the last forward pass, and their element count.
  double count, mean, variance, rstd;
  double dbeta, dgamma;  // sums of dy and dy x^ over the same elements
  double running_mean, running_variance;
  int64_t steps;  // updates of the running statistics
};
static_assert(sizeof(BnChannel) == 14 * 8);

// Sets c.window to the merged micro-batches [0, index) of the history.
GA_HD void merge_up_to(BnChannel& c, const BnHistory& history, int64_t index) {
  if (index < c.merged) {
    c.window = {0, 0, 0};
    c.merged = 0;
  }
  for (; c.merged < index && c.merged < c.taken; ++c.merged)
    c.window = merge(c.window, history[c.merged]);
}

GA_HD void normalise_by(BnChannel& c, const Moments& m, double eps) {
  c.count = m.count;
  c.mean = m.mean;
  c.variance = m.count > 0 ? m.m2 / m.count : 0;
  c.rstd = 1 / sqrt(c.variance + eps);
}

// Stores m as the statistics of micro-batch `index`, and sets the statistics that normalise x in
// this mode. WINDOW mode has no history and sets them in finalize().
GA_HD void take(BnChannel& c, const BnHistory& history, int64_t index, const Moments& m,
                int32_t mode, double eps) {
  if (mode == GA_BN_WINDOW) {
    c.window = merge(c.window, m);
    return;
  }
  for (; c.taken <= index; ++c.taken) history[c.taken] = {0, 0, 0};
  history[index] = m;
  merge_up_to(c, history, index);
  normalise_by(c, mode == GA_BN_MICRO ? m : merge(c.window, m), eps);
}

// Removes the statistics of micro-batch `index` from the window. A layer that normalises by them, as the
// newest, has none any more.
GA_HD void drop(BnChannel& c, const BnHistory& history, int64_t index) {
  if (index >= c.taken) return;
  history[index] = {0, 0, 0};
  if (index + 1 == c.taken) c.count = 0;
}

// Ends the first pass of WINDOW mode. m: the statistics of all ranks, of which c.window keeps this
// rank's, so that the end of the window merges each rank's once.
GA_HD void finalize(BnChannel& c, const Moments& m, double eps) {
  normalise_by(c, m, eps);
  c.dbeta = c.dgamma = 0;
}
GA_HD void finalize(BnChannel& c, double eps) { finalize(c, c.window, eps); }

// The end of a pass of WINDOW mode over several ranks, each of which writes a record for the others: the
// number of the end, and for each channel count, mean and M2 of the first pass, or the backward sums.
struct BnPassEnd {
  int32_t layer;  // -1: none, because the rank ends its window without the call
  bool backward;

  GA_HD double number() const { return 2.0 * layer + backward; }
  GA_HD int64_t width() const { return backward ? 2 : 3; }
  GA_HD int64_t words(int64_t channels) const { return 1 + channels * width(); }

  GA_HD void write(const BnChannel& channel, int64_t index, double* record) const {
    double* const out = record + words(index);
    if (backward) {
      out[0] = channel.dbeta;
      out[1] = channel.dgamma;
    } else {
      out[0] = channel.window.count;
      out[1] = channel.window.mean;
      out[2] = channel.window.m2;
    }
  }
};

// The records of all ranks, `words` from one to the next.
struct BnRecords {
  const double* data;
  int64_t words;
  int32_t ranks;

  // Whether the ranks have ended different passes.
  GA_HD bool differ() const {
    for (int32_t q = 1; q < ranks; ++q)
      if (data[q * words] != data[0]) return true;
    return false;
  }

  // Merges the ranks' numbers of a channel, in the order of the ranks.
  GA_HD void merge_into(BnChannel& channel, int64_t index, const BnPassEnd& end, double eps) const {
    const double* numbers = data + end.words(index);
    Moments merged = {0, 0, 0};
    double dbeta = 0, dgamma = 0;
    for (int32_t q = 0; q < ranks; ++q, numbers += words) {
      if (end.backward) {
        dbeta += numbers[0];
        dgamma += numbers[1];
      } else {
        merged = merge(merged, {numbers[0], numbers[1], numbers[2]});
      }
    }
    if (end.backward) {
      channel.dbeta = dbeta;
      channel.dgamma = dgamma;
    } else {
      finalize(channel, merged, eps);
    }
  }
};

// Ends a window of that many micro-batches: updates the running statistics. Entries from
// micro_batches on belong to a micro-batch that was never opened and do not count.
GA_HD void commit(BnChannel& c, const BnHistory& history, int64_t micro_batches, double momentum,
                  bool biased) {
  merge_up_to(c, history, micro_batches);
  const Moments& m = c.window;
  if (!(m.count > 0) || !(fabs(m.mean) <= 1.7976931348623157e308) ||
      !(m.m2 <= 1.7976931348623157e308))
    return;
  c.running_mean += momentum * (m.mean - c.running_mean);
  const double divisor = biased ? m.count : m.count - 1;
  if (divisor > 0) c.running_variance += momentum * (m.m2 / divisor - c.running_variance);
  ++c.steps;
}
GA_HD void forget(BnChannel& c) {
  c.window = {0, 0, 0};
  c.merged = c.taken = 0;
}

// A mean in two parts, for the deviation of x: low holds what high loses of a large mean.
template <class T>
struct Centre {
  T high, low;

  Centre() = default;
  GA_HD explicit Centre(double mean)
      : high(static_cast<T>(mean)), low(static_cast<T>(mean - static_cast<double>(high))) {}
  // X: T or a vector register of T
  template <class X, class Y>
  GA_HD static X deviation(X x, Y high, Y low) {
    return (x - high) - low;
  }
};

// y = (x - mean) scale + shift
template <class T>
struct BnForward {
  Centre<T> centre;
  T scale, shift;

  BnForward() = default;
  GA_HD BnForward(double mean, double rstd, double gamma, double beta)
      : centre(mean), scale(static_cast<T>(gamma * rstd)), shift(static_cast<T>(beta)) {}
  template <class X, class Y>
  GA_HD static X apply(X x, Y high, Y low, Y scale, Y shift) {
    return Centre<T>::deviation(x, high, low) * scale + shift;
  }
};

// dx = scale ((dy - shift) - (x - mean) slope), with shift = dbeta / (a n) and
// slope = rstd dgamma / (a n), where a is the weight of this micro-batch's dy in the sums.
template <class T>
struct BnBackward {
  Centre<T> centre;
  T scale, shift, slope;

  BnBackward() = default;
  GA_HD BnBackward(double mean, double rstd, double gamma, double dbeta, double dgamma, double an)
      : centre(mean),
        scale(static_cast<T>(gamma * rstd)),
        shift(static_cast<T>(dbeta / an)),
        slope(static_cast<T>(rstd * dgamma / an)) {}
  template <class X, class Y>
  GA_HD static X apply(X x, X dy, Y high, Y low, Y scale, Y shift, Y slope) {
    return ((dy - shift) - Centre<T>::deviation(x, high, low) * slope) * scale;
  }
};

}  // namespace ga
