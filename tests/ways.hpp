// SPDX-License-Identifier: Apache-2.0
//
// Options of contexts, for suites that make the same windows in many ways.
#pragma once

#include <functional>

#include "support.hpp"

namespace ga::test::ways {

// What is done to the configuration of a context, and to the context when it has its parameters.
using Configure = std::function<void(ga_config&)>;
using Prepare = std::function<void(ga_context*)>;

inline constexpr auto as_is = [](auto&&) {};
inline void live(ga_config& c) { c.gradient_life = GA_GRADIENTS_LIVE; }
inline void ignoring(ga_config& c) { c.nonfinite = GA_NONFINITE_IGNORE; }

inline Prepare clipped(int32_t scope, double max_norm, int32_t flavor = GA_FLAVOR_TORCH,
                       double max_value = INFINITY) {
  return [c = clip(scope, max_norm, flavor, max_value)](ga_context* ctx) {
    EXPECT_OK(ga_context_set_clip(ctx, &c));
  };
}
inline void averaged(ga_context* ctx) {
  ga_ema ema;
  EXPECT_OK(ga_ema_init(&ema, sizeof ema));
  EXPECT_OK(ga_context_set_ema(ctx, &ema));
}
inline void scaled(ga_context* ctx) {
  ga_loss_scaler s;
  EXPECT_OK(ga_loss_scaler_init(&s, sizeof s));
  s.initial_scale = 4;
  EXPECT_OK(ga_context_set_loss_scaler(ctx, &s));
}

}  // namespace ga::test::ways
