// SPDX-License-Identifier: Apache-2.0
// Dynamic loss scaling. The rule: ga_loss_scaler in gradaccum.h.
#pragma once

#include <cstdint>

#include "core/hd.hpp"
#include "gradaccum/gradaccum.h"

namespace ga {

ga_loss_scaler default_loss_scaler();
void check_loss_scaler(const ga_loss_scaler& s);  // throws Error if a number is out of range

// A scale as programs multiply by it, in f32, so that the same number is divided out.
GA_HD double as_f32(double scale) {
  return scale >= 0x1p-126 ? static_cast<double>(static_cast<float>(scale)) : scale;
}

struct ScalerState {
  double scale;
  int64_t good_steps;   // applied since the scale last grew and since the last bad window
  int32_t bad_windows;  // since the scale last grew

  // To be called when a window had a gradient that was not finite.
  GA_HD void back_off(const ga_loss_scaler& s) {
    good_steps = 0;
    if (bad_windows < s.hysteresis) ++bad_windows;
    if (bad_windows < s.hysteresis) return;
    const double less = scale * s.backoff_factor;
    scale = as_f32(less > s.min_scale ? less : s.min_scale);
  }

  // To be called when a step was applied.
  GA_HD void advance(const ga_loss_scaler& s) {
    if (++good_steps < s.growth_interval) return;
    good_steps = 0;
    bad_windows = 0;
    const double more = scale * s.growth_factor;
    scale = as_f32(more < s.max_scale ? more : s.max_scale);
  }
};

}  // namespace ga
