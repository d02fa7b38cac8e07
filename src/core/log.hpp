// SPDX-License-Identifier: Apache-2.0
// A line for each call on a context, for ga_config.log or, under GA_VERBOSE=1, stderr.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "core/error.hpp"

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
    Line line;
    const ga_status status = guard(body);
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    write(line, function, status, taken.count());
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

  // What a call notes, on the stack of its thread: calls of several threads may run at once, and a callback of
  // the program may call another context.
  class Line {
   public:
    Line() : outer_(innermost) { innermost = this; }
    ~Line() { innermost = outer_; }
    Line(const Line&) = delete;
    Line& operator=(const Line&) = delete;
    void append(const char* text) noexcept;
    const char* text() const { return text_; }
    bool empty() const { return length_ == 0; }

    static thread_local Line* innermost;

   private:
    Line* const outer_;
    char text_[512] = "";
    size_t length_ = 0;
  };

  void write(const Line& line, const char* function, ga_status status,
             double milliseconds) noexcept;

  ga_log log_;  // NULL: stderr
  void* user_;
  const char* device_;
};

}  // namespace ga
