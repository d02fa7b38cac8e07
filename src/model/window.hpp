// SPDX-License-Identifier: Apache-2.0
// The window as a state machine: which micro-batches it holds, with which weights, and which call
// is legal next. The window knows no tensors. The state diagram is at the top of gradaccum.h.
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "gradaccum/gradaccum.h"
#include "numbers/control.hpp"

namespace ga {

// From applied step from_step on, windows have accum_steps micro-batches.
struct AccumPhase {
  int64_t from_step, accum_steps;
};

class Window {
 public:
  // K of this window.
  void set_accum_steps(int64_t k) { accum_steps_ = k; }
  int64_t accum_steps() const { return accum_steps_; }

  ga_window_state state() const;
  bool empty() const { return micros_.empty() && !invalid_; }
  int64_t size() const { return static_cast<int64_t>(micros_.size()); }
  double weight() const { return weight_; }  // sum, in the order of the micro-batches
  int64_t open_index() const { return open_; }
  const Micro& open_micro() const { return micros_[static_cast<size_t>(open_)]; }
  const Micro& micro(int64_t index) const { return micros_[static_cast<size_t>(index)]; }

  // Each of these throws GA_ERROR_INVALID_STATE, GA_ERROR_INVALID_ARGUMENT or GA_ERROR_WINDOW_FULL,
  // and changes nothing, if the call is not legal. what: the function that was called, or the change
  // that was wanted.
  void check_valid() const;
  void check_takes_more() const;                  // that ga_step has not rejected the window
  void check_whole() const;                       // that a whole micro-batch may be added
  void begin(int64_t index, const Micro& micro);  // opens a micro-batch, or resumes it
  void check_part(const char* what) const;        // that a micro-batch is open
  void end();
  void abort();  // drops the open micro-batch, which is the last
  void check_step() const { check_closed("ga_step"); }
  void check_closed(const char* what) const;  // that the window is valid and no micro-batch open
  void check_empty(const char* what) const;

  // Makes room for one more micro-batch, so that adding it cannot fail.
  void reserve_one() {
    if (micros_.size() == micros_.capacity()) micros_.reserve(2 * micros_.size() + 16);
  }
  void add(const Micro& micro);                   // after check_whole
  void drop_last();                               // sets the weight of the last micro-batch to 0
  int64_t weighted() const { return weighted_; }  // micro-batches of weight > 0
  void clear();
  // Parts of the accumulators are unknown: only ga_discard is legal.
  void invalidate() { invalid_ = true; }
  // ga_step has returned GA_ERROR_NONFINITE for this window.
  void reject() { rejected_ = true; }
  bool rejected() const { return rejected_; }
  void restore(std::vector<Micro> micros);  // makes an empty window one of these micro-batches

  // Runs a pass that changes accumulators. If the pass fails half-way, the window becomes invalid:
  // parameters and optimizer state are untouched, but accumulators are not.
  template <class Work>
  void or_invalidate(Work&& work) {
    try {
      work();
    } catch (const std::exception&) {
      break_off();
    }
  }

 private:
  void count(const Micro& micro);  // which has been put at the end
  [[noreturn]] void break_off();   // throws the exception being handled as GA_ERROR_FAULT

  std::vector<Micro> micros_;
  int64_t open_ = -1;
  int64_t accum_steps_ = 0;
  double weight_ = 0, weight_before_last_ = 0;
  int64_t weighted_ = 0;
  bool invalid_ = false, rejected_ = false;
};

}  // namespace ga
