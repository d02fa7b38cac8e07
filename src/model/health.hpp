// SPDX-License-Identifier: Apache-2.0
// Whether a context can still be used: a pass over parameters and state that fails half-way leaves them in a state
// that nobody knows.
#pragma once

#include <optional>

#include "core/error.hpp"

namespace ga {

class Health {
 public:
  // Throws if only destroying the context is legal.
  void check() const {
    if (failure_) throw *failure_;
  }
  // From now on every call throws this error.
  void end(const Error& failure) { failure_ = failure; }

  // Runs a pass over parameters and state. If it fails half-way, the context is of no use after it.
  template <class Work>
  void or_break(Work&& work) {
    try {
      work();
    } catch (const Error& e) {
      if (e.status() == GA_ERROR_FAULT) failure_ = e;
      throw;
    }
  }

  // Runs an exchange in the middle of an update. If it fails, the context is of no use after it.
  template <class Work>
  void or_end(Work&& work) {
    try {
      work();
    } catch (const Error& e) {
      failure_ = e;
      throw;
    }
  }

 private:
  std::optional<Error> failure_;
};

}  // namespace ga
