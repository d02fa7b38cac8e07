// SPDX-License-Identifier: Apache-2.0
// The learning rate as a function of applied steps. Formulas: ga_schedule_kind in gradaccum.h.
#pragma once

#include <math.h>

#include <cstdint>

#include "core/elementary.hpp"
#include "gradaccum/gradaccum.h"

namespace ga {

ga_schedule default_schedule(int32_t kind);
void check_schedule(const ga_schedule& s);  // throws Error if a number is out of range

// cos(pi x) for x in [0, 1], by its Taylor series about 0 or 1, with an error of 2^-52. The bits
// are the same on every platform, which no mathematical library promises.
GA_HD double cos_pi(double x) {
  const bool upper = x > 0.5;
  const double y = 3.14159265358979323846 * (upper ? 1 - x : x);
  double sum = 0;
  for (int n = 28; n > 0; n -= 2) sum = (1 - sum) * (y * y / (n * (n - 1)));
  return upper ? sum - 1 : 1 - sum;
}

// All zeros: a constant rate.
struct ScheduleData {
  ga_schedule s;
  const double* table;  // of GA_SCHEDULE_TABLE, in the memory of whoever computes the rate

  // The rate of a step; 0 is the first step that is applied. lr: the group's rate.
  GA_HD double rate(double lr, int64_t steps) const {
    const int64_t step = steps > s.first_step ? steps - s.first_step : 0;
    const double t = static_cast<double>(step);
    const double warmup = static_cast<double>(s.warmup_steps);
    const double total = static_cast<double>(s.total_steps);
    if (s.kind == GA_SCHEDULE_TABLE) return table[step < s.table_size ? step : s.table_size - 1];
    if (s.kind == GA_SCHEDULE_BERT)
      return t < warmup ? lr * t / warmup : lr * (1 - (t < total ? t : total) / total);
    if (t < warmup) return lr * (t + 1) / warmup;

    const double end = s.end_factor * lr;
    double x = (t - warmup) / (total - warmup);
    x = x < 0 ? 0 : x > 1 ? 1 : x;
    switch (s.kind) {
      case GA_SCHEDULE_LINEAR:
        return end + (lr - end) * (1 - x);
      case GA_SCHEDULE_COSINE:
        return end + (lr - end) * (1 + cos_pi(x)) / 2;
      case GA_SCHEDULE_POLYNOMIAL:
        return end + (lr - end) * real_power(1 - x, s.power);
      case GA_SCHEDULE_INVERSE_SQRT: {
        const double c = warmup > 1 ? warmup : 1;
        return lr * sqrt(c / (c + t - warmup));
      }
      case GA_SCHEDULE_STEP:
        return lr * real_power(s.gamma, floor((t - warmup) / static_cast<double>(s.step_size)));
      case GA_SCHEDULE_EXPONENTIAL:
        return lr * real_power(s.gamma, t - warmup);
      default:
        return lr;
    }
  }
};

}  // namespace ga
