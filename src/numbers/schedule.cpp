// SPDX-License-Identifier: Apache-2.0
#include "numbers/schedule.hpp"

#include <algorithm>
#include <cmath>

#include "core/error.hpp"

namespace ga {
namespace {

void check_kind(int32_t kind) {
  check_choice("schedule kind", kind, GA_SCHEDULE_BERT, "ga_schedule_kind");
}

void check_count(const char* name, int64_t value, int64_t low) {
  if (value < low)
    fail(GA_ERROR_INVALID_ARGUMENT, "schedule: %s was %lld, expected >= %lld", name, ll(value),
         ll(low));
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
  check_count("first_step", s.first_step, 0);
  check_rate("schedule: end_factor", s.end_factor);
  check_rate("schedule: power", s.power);
  check_rate("schedule: gamma", s.gamma);
  switch (s.kind) {
    case GA_SCHEDULE_LINEAR:
    case GA_SCHEDULE_COSINE:
    case GA_SCHEDULE_POLYNOMIAL:
      if (s.total_steps <= s.warmup_steps)
        fail(GA_ERROR_INVALID_ARGUMENT,
             "schedule: total_steps was %lld, expected more than warmup_steps, %lld",
             ll(s.total_steps), ll(s.warmup_steps));
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
               "schedule: table[%lld] was %g, expected a finite number >= 0", ll(i), s.table[i]);
      break;
    default:
      break;
  }
}

}  // namespace ga
