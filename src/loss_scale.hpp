// SPDX-License-Identifier: Apache-2.0
// A loss scale that follows the gradients: the rule stands at ga_loss_scaler in gradaccum.h.
#pragma once

#include <cstdint>

#include "gradaccum/gradaccum.h"
#include "hd.hpp"

namespace ga {

ga_loss_scaler default_loss_scaler();
void check_loss_scaler(const ga_loss_scaler& s);  // throws Error for a number out of its range

struct ScalerState {
  double scale;
  int64_t good_steps;   // since the scale last moved, or a window backed it off
  int32_t bad_windows;  // since it last grew

  // A window had a gradient that was not finite.
  GA_HD void back_off(const ga_loss_scaler& s) {
    good_steps = 0;
    if (bad_windows < s.hysteresis) ++bad_windows;
    if (bad_windows < s.hysteresis) return;
    const double less = scale * s.backoff_factor;
    scale = less > s.min_scale ? less : s.min_scale;
  }

  // A step was applied.
  GA_HD void advance(const ga_loss_scaler& s) {
    if (++good_steps < s.growth_interval) return;
    good_steps = 0;
    bad_windows = 0;
    const double more = scale * s.growth_factor;
    scale = more < s.max_scale ? more : s.max_scale;
  }
};

}  // namespace ga
