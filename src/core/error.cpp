// SPDX-License-Identifier: Apache-2.0
#include "core/error.hpp"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "core/utf8.hpp"

namespace ga {
namespace {

thread_local char last_text[1024] = "";

// Copies what is UTF-8 and fits, and a 0 behind it. What is left out is the half of a character where a message or a
// name in it was cut. `to` may be where the text is.
void copy_characters(char* to, size_t room, std::string_view text) noexcept {
  const char* const end = text.data() + text.size();
  for (const char* p = text.data(); p < end;) {
    const size_t size = utf8_character(p, end);
    if (size >= room) break;
    std::memmove(to, p, size);
    to += size;
    room -= size;
    p += size > 0 ? size : 1;
  }
  *to = '\0';
}

// With the first `start` characters of the message written already.
Error formatted(ga_status status, char (&text)[1024], int start, const char* format, va_list args) {
  const size_t n = std::min(static_cast<size_t>(start), sizeof text - 1);
  std::vsnprintf(text + n, sizeof text - n, format, args);
  return Error(status, text);
}

}  // namespace

Error::Error(ga_status status, std::string_view text) noexcept : status_(status) {
  copy_characters(text_, sizeof text_, text);
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
  copy_characters(last_text, sizeof last_text, text);
  return status;
}

}  // namespace ga
