// SPDX-License-Identifier: Apache-2.0
// Calls of functions that the program has given.
#pragma once

#include <exception>
#include <utility>

#include "core/error.hpp"
#include "core/fp_mode.hpp"

namespace ga {

// Returns call(), which runs a function of the program, in the program's floating-point mode. An exception
// becomes an Error that names the function.
template <class Call>
decltype(auto) call_program(const char* function, Call&& call) {
  try {
    const ProgramFpMode programs;
    return std::forward<Call>(call)();
  } catch (const std::exception& e) {
    fail(GA_ERROR_FAULT, "the program's %s threw an exception: %s", function, e.what());
  } catch (...) {
    fail(GA_ERROR_FAULT, "the program's %s threw an exception", function);
  }
}

}  // namespace ga
