// SPDX-License-Identifier: Apache-2.0
// Errors inside the library are thrown as Error; guard() turns them into a status at the C
// boundary.
#pragma once

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
  char text_[1024];  // no allocation: an error about failed memory must get out
};

// Throws Error with a printf-formatted sentence.
[[noreturn]] void fail(ga_status status, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

// Throw GA_ERROR_INVALID_ARGUMENT unless value is one of [0, last], of that type; or finite and >= 0.
void check_choice(const char* name, int32_t value, int32_t last, const char* type);
void check_rate(const char* name, double value);

// The calling thread's sentence for ga_last_error().
const char* last_error() noexcept;
ga_status set_last_error(ga_status status, const char* text) noexcept;

// Runs body and translates what it throws: nothing leaves the library but a status.
template <class Body>
ga_status guard(Body&& body) noexcept {
  try {
    body();
    return GA_OK;
  } catch (const Error& e) {
    return set_last_error(e.status(), e.what());
  } catch (const std::bad_alloc&) {
    return set_last_error(GA_ERROR_OUT_OF_MEMORY, "memory for the library's own tables ran out");
  } catch (const std::exception& e) {
    return set_last_error(GA_ERROR_INTERNAL, e.what());
  } catch (...) {
    return set_last_error(GA_ERROR_INTERNAL, "an unknown exception was thrown in the library");
  }
}

}  // namespace ga
