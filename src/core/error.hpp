// SPDX-License-Identifier: Apache-2.0
// Errors inside the library are thrown as Error; guard() turns them into a status at the C
// boundary.
#pragma once

#include <cstddef>
#include <exception>
#include <new>
#include <string_view>

#include "gradaccum/gradaccum.h"

namespace ga {

class Error : public std::exception {
 public:
  Error(ga_status status, std::string_view text) noexcept;
  ga_status status() const noexcept { return status_; }
  const char* what() const noexcept override { return text_; }

 private:
  ga_status status_;
  char text_[1024];  // no allocation, because the error may be that memory ran out
};

// Memory that the program's allocator has not given.
class AllocatorFailed : public std::bad_alloc {
 public:
  AllocatorFailed(const char* what, size_t bytes) noexcept;
  const char* what() const noexcept override { return text_; }

 private:
  char text_[128];
};

// Throws Error with a printf-formatted message.
[[noreturn]] void fail(ga_status status, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

// What a message is about. The message begins with «function: kind "name": », or without the
// function if that is NULL.
struct Subject {
  const char* kind;  // "parameter", "layer", "tensor" or "file"
  const char* name;
  const char* function = nullptr;

  [[noreturn]] void fail(ga_status status, const char* format, ...) const
      __attribute__((format(printf, 3, 4)));
};

// An argument for %lld.
inline long long ll(int64_t x) { return static_cast<long long>(x); }

// Each check throws GA_ERROR_INVALID_ARGUMENT unless the value is as its comment says.
void check_choice(const char* name, int32_t value, int32_t last, const char* type);  // in [0, last]
void check_rate(const char* name, double value);                                     // finite, >= 0
void check_positive(const char* name, double value);                                 // finite, > 0

// The calling thread's message for ga_last_error().
const char* last_error() noexcept;
ga_status set_last_error(ga_status status, const char* text) noexcept;

// Runs body and turns what it throws into a status: no exception leaves the library.
template <class Body>
ga_status guard(Body&& body) noexcept {
  try {
    body();
    return GA_OK;
  } catch (const Error& e) {
    return set_last_error(e.status(), e.what());
  } catch (const AllocatorFailed& e) {
    return set_last_error(GA_ERROR_OUT_OF_MEMORY, e.what());
  } catch (const std::bad_alloc&) {
    return set_last_error(GA_ERROR_OUT_OF_MEMORY, "memory for the library's own tables ran out");
  } catch (const std::exception& e) {
    return set_last_error(GA_ERROR_INTERNAL, e.what());
  } catch (...) {
    return set_last_error(GA_ERROR_INTERNAL, "an unknown exception was thrown in the library");
  }
}

}  // namespace ga
