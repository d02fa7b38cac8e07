// SPDX-License-Identifier: Apache-2.0
// K, the number of micro-batches of a window: one number, or a schedule by steps.
#pragma once

#include <cstdint>
#include <vector>

#include "model/progress.hpp"
#include "model/window.hpp"

namespace ga {

class WindowLength {
 public:
  WindowLength(ga_config& config, Backend& backend, const Progress& progress, Window& window)
      : config_(config), backend_(backend), progress_(progress), window_(window) {
    window.set_accum_steps(config.accum_steps);
  }

  // The functions ga_context_set_accum_*.
  void set(int64_t k);
  void set_schedule(const int64_t* from_steps, const int64_t* accum_steps, size_t count);

  // Gives the next window its K. If that depends on a step that may still be running, K is due, and found when the
  // window opens.
  void look_up();
  bool is_due() const { return due_; }
  // Finds K, if it is due; waits for the last step.
  void find() {
    if (due_) update();
  }
  // K of the window; 0 if the program decides when a window ends, or if K is due.
  int64_t known() const { return due_ ? 0 : window_.accum_steps(); }
  int64_t at(int64_t steps) const;  // K after so many steps
  bool is_fixed() const { return phases_.empty(); }

 private:
  void update();

  ga_config& config_;
  Backend& backend_;
  const Progress& progress_;
  Window& window_;
  std::vector<AccumPhase> phases_;
  bool due_ = false;  // the next window's K has to be looked up in phases_
};

}  // namespace ga
