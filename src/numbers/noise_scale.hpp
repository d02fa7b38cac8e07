// SPDX-License-Identifier: Apache-2.0
// The simple noise scale of gradients (McCandlish et al. 2018, appendix A.1). The mean over a batch
// of b samples has E|g|^2 = |G|^2 + tr(S) / b. A window of K micro-batches of b_k samples, B in
// all, has two such numbers, which determine the two unknowns:
//   sum_k (b_k / B) |g_k|^2 = |G|^2 + tr(S) K / B      of the micro-batches, weighted by their size
//   |g|^2                   = |G|^2 + tr(S) / B        of the window
#pragma once

#include <math.h>

#include <cstdint>

#include "core/hd.hpp"

namespace ga {

// Exponential moving averages; all zeros before the first window.
struct NoiseScale {
  double weight_sum, trace_sum, signal_sum;

  // micros, window: the left sides of the two equations above.
  GA_HD void add(double micros, double window, int64_t micro_batches, double samples,
                 double smoothing) {
    const double trace = (micros - window) * samples / static_cast<double>(micro_batches - 1);
    const double signal = window - trace / samples;
    weight_sum = smoothing * weight_sum + (1 - smoothing);
    trace_sum = smoothing * trace_sum + (1 - smoothing) * trace;
    signal_sum = smoothing * signal_sum + (1 - smoothing) * signal;
  }

  // NaN before the first window.
  GA_HD double trace() const { return mean(trace_sum); }
  GA_HD double signal() const { return mean(signal_sum); }
  GA_HD double scale() const { return trace() / signal(); }

 private:
  GA_HD double mean(double sum) const { return weight_sum > 0 ? sum / weight_sum : NAN; }
};

}  // namespace ga
