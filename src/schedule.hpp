// SPDX-License-Identifier: Apache-2.0
// Learning rate as a function of applied steps. The formulas stand at ga_schedule_kind in
// gradaccum.h.
#pragma once

#include <cstdint>
#include <vector>

#include "gradaccum/gradaccum.h"

namespace ga {

class Schedule {
 public:
  // Throws Error for a number out of its range.
  explicit Schedule(const ga_schedule& s);
  Schedule() = default;  // constant

  static ga_schedule defaults(int32_t kind);

  // The rate of step s (0 is the first to be applied) for the group's rate lr.
  double rate(double lr, int64_t s) const;

 private:
  ga_schedule data_ = {};
  std::vector<double> table_;
};

}  // namespace ga
