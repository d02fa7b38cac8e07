// SPDX-License-Identifier: Apache-2.0
// The window as a state machine: which micro-batches it holds, with which weights, and what is
// legal next. It knows no tensors. The picture is at the top of gradaccum.h.
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "gradaccum/gradaccum.h"

namespace ga {

struct Micro {
  double weight;
  double loss_scale;
};

class Window {
 public:
  // K of this window: latched when it opens.
  void set_accum_steps(int64_t k) { accum_steps_ = k; }
  int64_t accum_steps() const { return accum_steps_; }

  ga_window_state state() const;
  bool empty() const { return micros_.empty() && !invalid_; }
  int64_t size() const { return static_cast<int64_t>(micros_.size()); }
  double weight() const { return weight_; }  // sum, in the order of the micro-batches
  int64_t open_index() const { return open_; }
  const Micro& open_micro() const { return micros_[static_cast<size_t>(open_)]; }
  const Micro& micro(int64_t index) const { return micros_[static_cast<size_t>(index)]; }

  // Each throws GA_ERROR_INVALID_STATE or GA_ERROR_INVALID_ARGUMENT and changes nothing when the
  // call is not legal.
  void check_whole() const;                       // a whole micro-batch may be added
  void begin(int64_t index, const Micro& micro);  // opens or resumes
  void check_part(const char* what) const;        // a micro-batch is open
  void end();
  void check_step() const;
  void check_valid() const;
  void check_empty(const char* what) const;  // the function, or the change, that needs it

  // Room for one more micro-batch, so that adding it cannot fail.
  void reserve_one() {
    if (micros_.size() == micros_.capacity()) micros_.reserve(2 * micros_.size() + 16);
  }
  void add(const Micro& micro);  // after check_whole
  void drop_last();              // the last micro-batch counts from now on with weight 0
  int64_t dropped() const { return dropped_; }
  int64_t weighted() const { return weighted_; }  // micro-batches of weight > 0
  void clear();

  // Runs a pass over data of the window. If it breaks off half-way, the window is invalid:
  // parameters and state are untouched, accumulators are not.
  template <class Work>
  void or_invalidate(Work&& work) {
    try {
      work();
    } catch (const std::exception&) {
      break_off();
    }
  }

 private:
  [[noreturn]] void break_off();  // of the exception being handled

  std::vector<Micro> micros_;
  int64_t open_ = -1;
  int64_t accum_steps_ = 0;
  double weight_ = 0, weight_before_last_ = 0;
  int64_t weighted_ = 0;
  int64_t dropped_ = 0;
  bool invalid_ = false;
};

}  // namespace ga
