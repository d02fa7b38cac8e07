// SPDX-License-Identifier: Apache-2.0
// How far the steps of a context have come: counters of the host, and what the steps have left in the tables.
#pragma once

#include <cstdint>
#include <vector>

#include "model/tables.hpp"

namespace ga {

constexpr int64_t kMostSteps = int64_t{1} << 53;  // the largest number of steps

class Progress {
 public:
  Progress(Backend& backend, const ContextTables& tables) : backend_(backend), tables_(tables) {}

  int64_t windows() const { return windows_; }  // calls of ga_step that returned GA_OK
  void count_window() { ++windows_; }
  // Every end of a window has a number of its own, by which the backend keeps its result.
  int64_t next_ticket() const { return tickets_ + 1; }
  void take_ticket() { ++tickets_; }

  // The control block as the last step left it; waits for that step.
  const Control& control() const;
  int64_t steps() const { return control().steps; }  // applied ones
  int64_t steps_seen() const;                        // as far as they are known without a wait
  // How many steps the program or a file has set last.
  int64_t steps_set() const { return steps_set_; }
  void set_steps(int64_t steps, int64_t after_windows);
  void restore(int64_t windows, int64_t steps, int64_t after_windows);

  // What the steps know of a parameter.
  ParamState param_state(size_t param) const;
  std::vector<ParamState> param_states() const;  // of those in the tables
  void set_param_state(size_t param, const ParamState& state);

 private:
  Backend& backend_;
  const ContextTables& tables_;
  mutable Control last_control_ = {};  // as last read from a device
  int64_t windows_ = 0, tickets_ = 0;
  int64_t steps_set_ = 0, steps_set_after_ = 0;  // that, after so many windows
};

}  // namespace ga
