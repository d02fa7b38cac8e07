// SPDX-License-Identifier: Apache-2.0
// The results of windows, which the device writes into a ring in memory that both sides see.
#pragma once

#include <cstdint>

#include "backend/cuda/kernels.hpp"
#include "backend/cuda/runtime.hpp"

namespace ga::cuda {

class Results {
 public:
  explicit Results(Runtime& runtime);

  const Ring& ring() const { return ring_; }
  // Waits, and forgets all results but this one.
  void restore(const ga_step_result& last);
  // See Backend::result.
  bool get(int64_t window, bool wait, ga_step_result& out);
  // See Backend::result_of.
  bool of_ticket(int64_t ticket, ga_step_result& out) const;
  int64_t latest() const;  // window; 0: none

 private:
  static bool read(const RingSlot& slot, RingSlot& out);
  bool find(int64_t window, ga_step_result& out) const;

  Runtime& runtime_;
  RingSlot* slots_;  // as the host sees them
  Ring ring_;
};

}  // namespace ga::cuda
