// SPDX-License-Identifier: Apache-2.0
#include "schedule.hpp"

#include <algorithm>
#include <cmath>

#include "error.hpp"

namespace ga {
namespace {

constexpr double kPi = 3.14159265358979323846;

void check_number(const char* name, double value) {
  if (!(value >= 0) || !std::isfinite(value))
    fail(GA_ERROR_INVALID_ARGUMENT, "schedule: %s was %g, expected a finite number >= 0", name,
         value);
}

void check_count(const char* name, int64_t value, int64_t low) {
  if (value < low)
    fail(GA_ERROR_INVALID_ARGUMENT, "schedule: %s was %lld, expected >= %lld", name,
         static_cast<long long>(value), static_cast<long long>(low));
}

void check_kind(int32_t kind) {
  if (kind < GA_SCHEDULE_CONSTANT || kind > GA_SCHEDULE_BERT)
    fail(GA_ERROR_INVALID_ARGUMENT, "schedule kind was %d, expected 0 to %d (ga_schedule_kind)",
         kind, GA_SCHEDULE_BERT);
}

}  // namespace

ga_schedule Schedule::defaults(int32_t kind) {
  check_kind(kind);
  ga_schedule s = {};
  s.struct_size = sizeof s;
  s.kind = kind;
  s.power = 1;
  s.gamma = kind == GA_SCHEDULE_STEP ? 0.1 : 1;
  return s;
}

Schedule::Schedule(const ga_schedule& s) : data_(s) {
  check_kind(s.kind);
  check_count("warmup_steps", s.warmup_steps, 0);
  check_number("end_factor", s.end_factor);
  check_number("power", s.power);
  check_number("gamma", s.gamma);
  switch (s.kind) {
    case GA_SCHEDULE_LINEAR:
    case GA_SCHEDULE_COSINE:
    case GA_SCHEDULE_POLYNOMIAL:
      if (s.total_steps <= s.warmup_steps)
        fail(GA_ERROR_INVALID_ARGUMENT,
             "schedule: total_steps was %lld, expected more than warmup_steps, %lld",
             static_cast<long long>(s.total_steps), static_cast<long long>(s.warmup_steps));
      break;
    case GA_SCHEDULE_BERT:
      check_count("total_steps", s.total_steps, std::max<int64_t>(s.warmup_steps, 1));
      break;
    case GA_SCHEDULE_STEP:
      check_count("step_size", s.step_size, 1);
      break;
    case GA_SCHEDULE_TABLE:
      check_count("table_size", s.table_size, 1);
      if (!s.table) fail(GA_ERROR_INVALID_ARGUMENT, "schedule: table was NULL");
      table_.assign(s.table, s.table + s.table_size);
      for (int64_t i = 0; i < s.table_size; ++i)
        if (!(s.table[i] >= 0) || !std::isfinite(s.table[i]))
          fail(GA_ERROR_INVALID_ARGUMENT,
               "schedule: table[%lld] was %g, expected a finite number >= 0",
               static_cast<long long>(i), s.table[i]);
      break;
    default:
      break;
  }
  data_.table = nullptr;
}

double Schedule::rate(double lr, int64_t step) const {
  const double s = static_cast<double>(step);
  const double warmup = static_cast<double>(data_.warmup_steps);
  const double total = static_cast<double>(data_.total_steps);
  if (data_.kind == GA_SCHEDULE_TABLE)
    return table_[static_cast<size_t>(std::min(step, static_cast<int64_t>(table_.size()) - 1))];
  if (data_.kind == GA_SCHEDULE_BERT)
    return s < warmup ? lr * s / warmup : lr * (1 - std::min(s, total) / total);
  if (s < warmup) return lr * (s + 1) / warmup;

  const double end = data_.end_factor * lr;
  const double x = std::clamp((s - warmup) / (total - warmup), 0.0, 1.0);
  switch (data_.kind) {
    case GA_SCHEDULE_LINEAR:
      return end + (lr - end) * (1 - x);
    case GA_SCHEDULE_COSINE:
      return end + (lr - end) * (1 + std::cos(kPi * x)) / 2;
    case GA_SCHEDULE_POLYNOMIAL:
      return end + (lr - end) * std::pow(1 - x, data_.power);
    case GA_SCHEDULE_INVERSE_SQRT: {
      const double c = std::max(warmup, 1.0);
      return lr * std::sqrt(c / (c + s - warmup));
    }
    case GA_SCHEDULE_STEP:
      return lr *
             std::pow(data_.gamma, std::floor((s - warmup) / static_cast<double>(data_.step_size)));
    case GA_SCHEDULE_EXPONENTIAL:
      return lr * std::pow(data_.gamma, s - warmup);
    default:
      return lr;
  }
}

}  // namespace ga
