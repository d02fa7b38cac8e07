// SPDX-License-Identifier: Apache-2.0
#include "schedule.hpp"

#include <algorithm>
#include <cmath>

#include "error.hpp"

namespace ga {
namespace {

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

ga_schedule default_schedule(int32_t kind) {
  check_kind(kind);
  ga_schedule s = {};
  s.struct_size = sizeof s;
  s.kind = kind;
  s.power = 1;
  s.gamma = kind == GA_SCHEDULE_STEP ? 0.1 : 1;
  return s;
}

void check_schedule(const ga_schedule& s) {
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
      for (int64_t i = 0; i < s.table_size; ++i)
        if (!(s.table[i] >= 0) || !std::isfinite(s.table[i]))
          fail(GA_ERROR_INVALID_ARGUMENT,
               "schedule: table[%lld] was %g, expected a finite number >= 0",
               static_cast<long long>(i), s.table[i]);
      break;
    default:
      break;
  }
}

}  // namespace ga
