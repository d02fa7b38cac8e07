// SPDX-License-Identifier: Apache-2.0
// Variables of the environment. One with a value that means nothing is taken as not set, and ga_context_create
// writes that to the log.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace ga {

// A variable that is 0 or 1.
inline std::optional<bool> flag_variable(const char* name) {
  const char* const value = std::getenv(name);
  if (!value || (std::strcmp(value, "0") != 0 && std::strcmp(value, "1") != 0)) return {};
  return *value == '1';
}

// A variable that is a number >= 0.
inline std::optional<double> number_variable(const char* name) {
  const char* const value = std::getenv(name);
  if (!value) return {};
  char* end = nullptr;
  const double number = std::strtod(value, &end);
  if (end == value || *end != '\0' || !(number >= 0) || !std::isfinite(number)) return {};
  return number;
}

// f(name, value, expected) for each variable that is set to what means nothing.
template <class F>
void each_ignored_variable(F&& f) {
  for (const char* name : {"GA_CPU_PREFETCH", "GA_VERBOSE"}) {
    const char* const value = std::getenv(name);
    if (value && *value && !flag_variable(name)) f(name, value, "0 or 1");
  }
  constexpr const char* kHandOver = "GA_CPU_HAND_OVER";
  const char* const value = std::getenv(kHandOver);
  if (value && *value && !number_variable(kHandOver)) f(kHandOver, value, "nanoseconds");
}

}  // namespace ga
