// SPDX-License-Identifier: Apache-2.0
// A line for each call on a context, for ga_config.log or, under GA_VERBOSE=1, stderr.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "error.hpp"

namespace ga {

class Log {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // NULL: the context has none.
  static std::unique_ptr<Log> of(const ga_config& config);

  // Runs body() as the call of that function and writes its line: «gradaccum,cpu,ga_step,outcome:0
  // norm:1.5,GA_OK,0.042», with the milliseconds at the end. Returns the status.
  template <class Body>
  ga_status call(const char* function, Body&& body,
                 Time start = std::chrono::steady_clock::now()) noexcept {
    length_ = 0;
    notes_[0] = '\0';
    const ga_status status = guard(body);
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    write(function, status, taken.count());
    return status;
  }

  // Adds what matters of the call to its line.
  void note(const char* key, double value) noexcept;
  void note(const char* key, const char* value) noexcept;

 private:
  explicit Log(const ga_config& config)
      : log_(config.log),
        user_(config.log_user),
        device_(config.device == GA_DEVICE_CUDA ? "cuda" : "cpu") {}
  void write(const char* function, ga_status status, double milliseconds) noexcept;
  void append(const char* text) noexcept;

  ga_log log_;  // NULL: stderr
  void* user_;
  const char* device_;
  char notes_[512] = "";
  size_t length_ = 0;
};

}  // namespace ga
