// SPDX-License-Identifier: Apache-2.0
#include "log.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace ga {

std::unique_ptr<Log> Log::of(const ga_config& config) {
  const char* const verbose = std::getenv("GA_VERBOSE");
  const bool to_stderr = !config.log && verbose && std::strcmp(verbose, "1") == 0;
  if (!config.log && !to_stderr) return nullptr;
  return std::unique_ptr<Log>(new Log(config, to_stderr));
}

void Log::append(const char* format, ...) noexcept {
  va_list args;
  va_start(args, format);
  const int written = std::vsnprintf(notes_ + length_, sizeof notes_ - length_, format, args);
  va_end(args);
  if (written > 0) length_ = std::min(length_ + static_cast<size_t>(written), sizeof notes_ - 1);
}

void Log::note(const char* key, double value) noexcept {
  append("%s%s:%.9g", length_ > 0 ? " " : "", key, value);
}

void Log::note(const char* key, const char* value) noexcept {
  append("%s%s:%s", length_ > 0 ? " " : "", key, value ? value : "NULL");
}

void Log::write(const char* function, ga_status status, double milliseconds) noexcept {
  char line[768];
  std::snprintf(line, sizeof line, "gradaccum,%s,%s,%s,%s,%.3f", device_, function, notes_,
                ga_status_name(status), milliseconds);
  if (to_stderr_) {
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
