// SPDX-License-Identifier: Apache-2.0
//
// The parts of a model of a context: access to numbers in memory, arithmetic that tracks whether
// its results are exact, and the records that the model keeps. This file includes nothing of the
// library but its public header.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <set>
#include <vector>

#include "gradaccum/gradaccum.h"
#include "reference.hpp"

namespace ga::model {

using ref::Real;

using Statuses = unsigned;  // bit k: the ga_status k
inline constexpr Statuses kArgument = 1u << GA_ERROR_INVALID_ARGUMENT;
inline constexpr Statuses kState = 1u << GA_ERROR_INVALID_STATE;
inline constexpr Statuses kUnsupported = 1u << GA_ERROR_UNSUPPORTED;
inline constexpr Statuses kNonfinite = 1u << GA_ERROR_NONFINITE;
inline constexpr Statuses kFull = 1u << GA_ERROR_WINDOW_FULL;

// The square of a larger gradient may overflow in an optimizer that computes in f32.
inline constexpr double kLargest = 1e15;

// ---- Numbers in memory --------------------------------------------------------------------------

inline int64_t size_of(int32_t dtype) {
  return dtype == GA_F64 || dtype == GA_I64 ? 8 : dtype == GA_F32 || dtype == GA_I32 ? 4 : 2;
}

inline double load(const void* data, int32_t dtype, int64_t i) {
  const char* const at = static_cast<const char*>(data) + i * size_of(dtype);
  if (dtype == GA_F64) {
    double x;
    memcpy(&x, at, sizeof x);
    return x;
  }
  uint32_t bits = 0;
  if (dtype == GA_F32) {
    memcpy(&bits, at, sizeof bits);
  } else {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    bits = static_cast<uint32_t>(half) << 16;
  }
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// A bf16 number is the upper half of an f32: rounded to nearest, ties to even.
inline uint16_t to_bf16(double x) {
  const auto f = static_cast<float>(x);
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  if (std::isnan(f)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline double through_bf16(double x) {
  const uint16_t bits = to_bf16(x);
  return load(&bits, GA_BF16, 0);
}

inline int64_t load_index(const void* data, int32_t dtype, int64_t i) {
  return dtype == GA_I32 ? static_cast<const int32_t*>(data)[i]
                         : static_cast<const int64_t*>(data)[i];
}

// ---- Arithmetic that tracks exactness -----------------------------------------------------------

inline bool in_f64() { return ref::arithmetic.half_ulp == ref::kHalfUlp64; }

// Returns x, or NaN if x is too large for the format.
inline Real bounded(Real x) {
  if (!std::isfinite(x.value) || (!in_f64() && std::abs(x.value) >= 0x1p128)) return {NAN, 0};
  return x;
}

// Whether x is exact and representable in the format. residue: the rounding error of x in float64.
inline bool held(double x, double residue) {
  return residue == 0 && (in_f64() || static_cast<double>(static_cast<float>(x)) == x);
}

inline Real plus(const Real& a, const Real& b) {
  if (std::isnan(a.value) || std::isnan(b.value)) return {NAN, 0};
  Real sum = a + b;
  const double v = a.value + b.value, t = v - a.value;
  if (a.error == 0 && b.error == 0 && held(v, (a.value - (v - t)) + (b.value - t))) sum = {v, 0};
  return bounded(sum);
}

// The larger of two contributions to a maximum. NaN stays; infinities are ordinary numbers.
inline Real larger(const Real& a, const Real& b) {
  if (std::isnan(a.value) || std::isnan(b.value)) return {NAN, 0};
  if (std::isfinite(a.value) && std::isfinite(b.value)) return ref::max(a, b);
  return a.value > b.value ? a : b;
}

inline Real times(const Real& a, const Real& b) {
  if (std::isnan(a.value) || std::isnan(b.value)) return {NAN, 0};
  Real product = a * b;
  const double v = a.value * b.value;
  if (a.error == 0 && b.error == 0 && held(v, std::fma(a.value, b.value, -v)) &&
      (v != 0 || a.value == 0 || b.value == 0))
    product = {v, 0};
  return bounded(product);
}

// A scalar that the host computes and rounds once.
inline Real scalar(double x) {
  if (held(x, 0) && (in_f64() || std::abs(x) < 0x1p128)) return {x, 0};
  return bounded(ref::scalar(x));
}

// ---- What the model keeps -----------------------------------------------------------------------

struct Range {
  uintptr_t begin = 0, end = 0;
  Range() = default;
  Range(const void* data, int64_t bytes)
      : begin(reinterpret_cast<uintptr_t>(data)), end(begin + static_cast<uintptr_t>(bytes)) {}
  bool overlaps(const Range& o) const {
    return begin < end && o.begin < o.end && begin < o.end && o.begin < end;
  }
  bool empty() const { return begin == end; }
};

struct Param {
  ga_group group = 0;
  void* data = nullptr;
  int32_t dtype = GA_F32;
  int64_t count = 0, rows = 1, columns = 1, offset = 0;
  int32_t rows_option = GA_ROWS_NONE;
  bool maximum = false;   // GA_REDUCE_MAX
  bool external = false;  // its group has GA_OPTIMIZER_EXTERNAL
  bool has_master = false;
  bool frozen = false;
  bool removed = false;  // then it is frozen, too, and nothing is allocated
  double lr_scale = 1, weight_decay_scale = 1;

  bool allocated = false;              // the state, the EMA and the master weights exist
  bool master_stale = false;           // ga_param_changed was called
  std::vector<ref::Element> elements;  // p is used only with master weights
  int64_t updates = 0;
  std::vector<Real> ema;
  bool ema_started = false;
  bool unknown = false;  // values are not predicted: NaN or infinities were added

  // The open window.
  std::vector<Real> sum;
  bool touched = false, dense = false, nonfinite = false, acquired = false, ready = false;
  std::set<int64_t> rows_seen;
  Range live_gradient;     // GA_GRADIENTS_LIVE, GA_GRADIENTS_LENT: the memory of the first gradient
  double live_factor = 0;  // of that gradient

  // The result of the last step.
  bool moved = false;
  bool delivered = false;    // ga_gradient returns `wanted`
  std::vector<Real> wanted;  // the parameter, or its gradient if it is external
  std::vector<bool> written;

  Range range() const { return {data, count * size_of(dtype)}; }
  const ref::Arithmetic& arithmetic() const {
    return dtype == GA_F64 ? ref::kFloat64 : ref::kFloat32;
  }
  Real now(int64_t i) const {
    return has_master && allocated ? elements[static_cast<size_t>(i)].p
                                   : ref::exact(load(data, dtype, i));
  }
};

struct Group {
  ga_optimizer optimizer;
  std::optional<ga_schedule> schedule;
  std::optional<ga_clip> clip;
};

struct Micro {
  double weight = 0, loss_scale = 1;
  bool last = false;  // GA_MICRO_LAST
  bool dropped = false;
};

// A part of a micro-batch: a whole gradient, or rows of one.
struct Contribution {
  ga_param param = 0;
  std::vector<Real> values;
  bool by_rows = false;
  std::vector<int64_t> rows;
  const void* data = nullptr;  // the program's memory, for whole gradients
  double factor = 0;           // of such a gradient, to the sum
  bool finite = true;          // the program's gradient was finite
};

struct StepResult {
  int32_t outcome = GA_STEP_APPLIED;
  int64_t windows = 0, steps = 0, micro_batches = 0, skipped = 0, dropped = 0, window_dropped = 0;
  double weight = 0, lr = 0, loss_scale = 1;
  Real norm, clip_factor{1, 0};
  bool norm_known = true;   // false: norm and clip_factor are not predicted
  bool unmeasured = false;  // the norm may be NaN
  // A norm that clips is computed from numbers whose squares are out of the range of float64.
  bool out_of_range = false;
};

// The rule of ga_loss_scaler.
struct Scaler {
  ga_loss_scaler rule;
  double scale;
  int64_t good = 0, bad = 0;

  explicit Scaler(const ga_loss_scaler& r) : rule(r), scale(r.initial_scale) {}
  void applied() {
    if (++good < rule.growth_interval) return;
    good = 0;
    bad = 0;
    scale = std::min(scale * rule.growth_factor, rule.max_scale);
  }
  void failed() {
    good = 0;
    if (++bad >= rule.hysteresis) scale = std::max(scale * rule.backoff_factor, rule.min_scale);
  }
};

}  // namespace ga::model
