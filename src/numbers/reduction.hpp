// SPDX-License-Identifier: Apache-2.0
// How the contributions to a parameter come together, within a window and over ranks: what ga_param_options.reduce makes
// different is said here. Elsewhere are the checks of the options that go with it, in model/options.cpp and
// context/parameters.cpp, and the kernels, in backend/cpu/accumulate.hpp and backend/cuda/accumulate.cu.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/hd.hpp"
#include "gradaccum/gradaccum.h"

namespace ga {

enum class Reduction : uint8_t { kSum, kMaximum };
constexpr Reduction kReductions[] = {Reduction::kMaximum, Reduction::kSum};

// reduce: ga_param_options.reduce.
inline Reduction reduction_of(int32_t reduce) {
  return reduce == GA_REDUCE_MAX ? Reduction::kMaximum : Reduction::kSum;
}
// Whether contributions are added up. Weights, norms, clipping, means and the roundings of sums are for sums alone, and
// only the sum of nothing is zero.
GA_HD constexpr bool is_sum(Reduction r) { return r == Reduction::kSum; }
// As the program calls it.
inline const char* name_of(Reduction r) { return is_sum(r) ? "GA_REDUCE_SUM" : "GA_REDUCE_MAX"; }
// The number that changes nothing when it is reduced with another.
inline double neutral_of(Reduction r) { return is_sum(r) ? 0 : -HUGE_VAL; }

// AccumulateTask::keep and MicroPlan::keep of a maximum: of the target and the source, or of two sources.
constexpr double kMaximum = -1;
GA_HD constexpr double keep_of(Reduction r) { return is_sum(r) ? 1 : kMaximum; }

}  // namespace ga
