// SPDX-License-Identifier: Apache-2.0
#include "core/error.hpp"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace ga {
namespace {

thread_local char last_text[1024] = "";

// With the first `start` characters of the message written already.
Error formatted(ga_status status, char (&text)[1024], int start, const char* format, va_list args) {
  const size_t n = std::min(static_cast<size_t>(start), sizeof text - 1);
  std::vsnprintf(text + n, sizeof text - n, format, args);
  return Error(status, text);
}

}  // namespace

Error::Error(ga_status status, std::string_view text) noexcept : status_(status) {
  const size_t n = std::min(text.size(), sizeof text_ - 1);
  std::memcpy(text_, text.data(), n);
  text_[n] = '\0';
}

AllocatorFailed::AllocatorFailed(const char* what, size_t bytes) noexcept {
  std::snprintf(text_, sizeof text_,
                "ga_config.allocate, the program's allocator, %s for %zu bytes", what, bytes);
}

void fail(ga_status status, const char* format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  const Error error = formatted(status, text, 0, format, args);
  va_end(args);
  throw error;
}

void Subject::fail(ga_status status, const char* format, ...) const {
  char text[1024];
  const int start = std::snprintf(text, sizeof text, "%s%s%s \"%s\": ", function ? function : "",
                                  function ? ": " : "", kind, name);
  va_list args;
  va_start(args, format);
  const Error error = formatted(status, text, start, format, args);
  va_end(args);
  throw error;
}

void check_choice(const char* name, int32_t value, int32_t last, const char* type) {
  if (value < 0 || value > last)
    fail(GA_ERROR_INVALID_ARGUMENT, "%s was %d, expected 0 to %d (%s)", name, value, last, type);
}

void check_rate(const char* name, double value) {
  if (!(value >= 0) || !std::isfinite(value))
    fail(GA_ERROR_INVALID_ARGUMENT, "%s was %g, expected a finite number >= 0", name, value);
}

void check_positive(const char* name, double value) {
  if (!(value > 0) || !std::isfinite(value))
    fail(GA_ERROR_INVALID_ARGUMENT, "%s was %g, expected a finite number > 0", name, value);
}

const char* last_error() noexcept { return last_text; }

ga_status set_last_error(ga_status status, const char* text) noexcept {
  const size_t n = std::min(std::strlen(text), sizeof last_text - 1);
  std::memmove(last_text, text, n);
  last_text[n] = '\0';
  return status;
}

}  // namespace ga
