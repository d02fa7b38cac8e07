// SPDX-License-Identifier: Apache-2.0
#include "numbers/loss_scale.hpp"

#include <cfloat>
#include <cmath>

#include "core/error.hpp"

namespace ga {

ga_loss_scaler default_loss_scaler() {
  ga_loss_scaler s = {};
  s.struct_size = sizeof s;
  s.initial_scale = 65536;
  s.growth_factor = 2;
  s.backoff_factor = 0.5;
  s.min_scale = FLT_MIN;
  s.max_scale = 0x1p127;
  s.growth_interval = 2000;
  s.hysteresis = 1;
  return s;
}

void check_loss_scaler(const ga_loss_scaler& s) {
  if (!(s.min_scale > 0 && s.min_scale <= s.max_scale && s.max_scale <= FLT_MAX))
    fail(GA_ERROR_INVALID_ARGUMENT,
         "loss scaler: min_scale was %g and max_scale %g, expected 0 < min_scale <= max_scale <= "
         "%g, the largest f32",
         s.min_scale, s.max_scale, static_cast<double>(FLT_MAX));
  if (!(s.initial_scale >= s.min_scale && s.initial_scale <= s.max_scale))
    fail(GA_ERROR_INVALID_ARGUMENT,
         "loss scaler: initial_scale was %g, expected a number from min_scale, %g, to max_scale, "
         "%g",
         s.initial_scale, s.min_scale, s.max_scale);
  if (!(s.growth_factor > 1) || !std::isfinite(s.growth_factor))
    fail(GA_ERROR_INVALID_ARGUMENT,
         "loss scaler: growth_factor was %g, expected a finite number > 1", s.growth_factor);
  if (!(s.backoff_factor > 0 && s.backoff_factor < 1))
    fail(GA_ERROR_INVALID_ARGUMENT,
         "loss scaler: backoff_factor was %g, expected a number in (0, 1)", s.backoff_factor);
  if (s.growth_interval < 1)
    fail(GA_ERROR_INVALID_ARGUMENT, "loss scaler: growth_interval was %lld, expected > 0",
         ll(s.growth_interval));
  if (s.hysteresis < 1)
    fail(GA_ERROR_INVALID_ARGUMENT, "loss scaler: hysteresis was %d, expected > 0", s.hysteresis);
}

}  // namespace ga
