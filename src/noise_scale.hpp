// SPDX-License-Identifier: Apache-2.0
// The simple noise scale of gradients (McCandlish et al. 2018, appendix A.1). The mean over a batch
// of b samples has E|g|^2 = |G|^2 + tr(S) / b. A window of K micro-batches of b_k samples, B in
// all, has two such numbers, which give the two unknowns:
//   sum_k (b_k / B) |g_k|^2 = |G|^2 + tr(S) K / B      of the micro-batches, weighted by their size
//   |g|^2                   = |G|^2 + tr(S) / B        of the window
#pragma once

#include <cmath>
#include <cstdint>

namespace ga {

class NoiseScale {
 public:
  // micros: the first of the sums above; window: the second.
  void add(double micros, double window, int64_t micro_batches, double samples, double smoothing) {
    const double trace = (micros - window) * samples / static_cast<double>(micro_batches - 1);
    const double signal = window - trace / samples;
    weight_ = smoothing * weight_ + (1 - smoothing);
    trace_ = smoothing * trace_ + (1 - smoothing) * trace;
    signal_ = smoothing * signal_ + (1 - smoothing) * signal;
  }

  // NaN before the first.
  double trace() const { return weight_ > 0 ? trace_ / weight_ : NAN; }
  double signal() const { return weight_ > 0 ? signal_ / weight_ : NAN; }
  double scale() const { return trace() / signal(); }

 private:
  double weight_ = 0, trace_ = 0, signal_ = 0;
};

}  // namespace ga
