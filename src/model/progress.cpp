// SPDX-License-Identifier: Apache-2.0
#include "model/progress.hpp"

namespace ga {

int64_t Progress::steps_seen() const {
  if (const Control* c = backend_.known()) return c->steps;
  ga_step_result r = {};
  const bool known = windows_ > 0 && backend_.result(0, false, r);
  return known && r.windows > steps_set_after_ ? r.steps : steps_set_;
}

const Control& Progress::control() const {
  if (const Control* c = backend_.known()) return *c;
  backend_.read(&last_control_, tables_.control.at(), sizeof last_control_);
  return last_control_;
}

void Progress::set_steps(int64_t steps, int64_t after_windows) {
  steps_set_ = steps;
  steps_set_after_ = after_windows;
}

void Progress::restore(int64_t windows, int64_t steps, int64_t after_windows) {
  windows_ = windows;
  set_steps(steps, after_windows);
}

ParamState Progress::param_state(size_t i) const {
  ParamState state = {};
  if (i < tables_.params()) backend_.read(&state, tables_.param_states.at(i), sizeof state);
  return state;
}

std::vector<ParamState> Progress::param_states() const {
  std::vector<ParamState> states(tables_.params());
  if (!states.empty())
    backend_.read(states.data(), tables_.param_states.at(), states.size() * sizeof(ParamState));
  return states;
}

void Progress::set_param_state(size_t i, const ParamState& state) {
  backend_.write(tables_.param_states.at(i), &state, sizeof state);
}

}  // namespace ga
