// SPDX-License-Identifier: Apache-2.0
// A loss scale that follows the gradients: the rule stands at ga_loss_scaler in gradaccum.h.
#pragma once

#include <cstdint>

#include "gradaccum/gradaccum.h"

namespace ga {

class LossScaler {
 public:
  // Throws Error for a number out of its range.
  explicit LossScaler(const ga_loss_scaler& s);

  static ga_loss_scaler defaults();

  double scale() const { return scale_; }
  // A window had a gradient that was not finite.
  void back_off();
  // A step was applied.
  void advance();

 private:
  ga_loss_scaler data_;
  double scale_;
  int64_t good_steps_ = 0;   // since the scale last moved, or a window backed it off
  int32_t bad_windows_ = 0;  // since it last grew
};

}  // namespace ga
