// SPDX-License-Identifier: Apache-2.0
#include "core/log.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>

#include "core/environment.hpp"
#include "core/fp_mode.hpp"

namespace ga {
namespace {

// A number with a point, whatever the locale of the program.
struct Text {
  char text[64];

  Text(double value, std::chars_format format, int digits) noexcept {
    *std::to_chars(text, text + sizeof text - 1, std::min(value, 1e15), format, digits).ptr = '\0';
  }
};

}  // namespace

std::unique_ptr<Log> Log::of(const ga_config& config) {
  if (!config.log && !flag_variable("GA_VERBOSE").value_or(false)) return nullptr;
  return std::unique_ptr<Log>(new Log(config));
}

thread_local Log::Line* Log::Line::innermost = nullptr;

// Cuts what does not fit, and keeps the parts of a line apart whatever the text.
void Log::Line::append(const char* text) noexcept {
  for (; *text && length_ + 1 < sizeof text_; ++text) {
    const auto c = static_cast<unsigned char>(*text);
    text_[length_++] = c == ',' ? ';' : c < ' ' ? '?' : *text;
  }
  text_[length_] = '\0';
}

void Log::note(const char* key, const char* value) noexcept {
  Line& line = *Line::innermost;
  if (!line.empty()) line.append(" ");
  line.append(key);
  line.append(":");
  line.append(value ? value : "NULL");
}

void Log::note(const char* key, double value) noexcept {
  note(key, Text(value, std::chars_format::general, 9).text);
}

void Log::write(const Line& of, const char* function, ga_status status,
                double milliseconds) noexcept {
  char line[768];
  std::snprintf(line, sizeof line, "gradaccum,%s,%s,%s,%s,%s", device_, function, of.text(),
                ga_status_name(status), Text(milliseconds, std::chars_format::fixed, 3).text);
  const ProgramFpMode programs;
  if (!log_) {
    std::fprintf(stderr, "%s\n", line);
    return;
  }
  // The message of the call outlives what the program's function does.
  char message[1024];
  std::snprintf(message, sizeof message, "%s", last_error());
  try {
    log_(user_, line);
  } catch (...) {
  }
  set_last_error(status, message);
}

}  // namespace ga
