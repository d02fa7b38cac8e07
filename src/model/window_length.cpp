// SPDX-License-Identifier: Apache-2.0
#include "model/window_length.hpp"

#include "core/error.hpp"
#include "core/tensor.hpp"

namespace ga {

void WindowLength::look_up() {
  due_ = !phases_.empty() && !backend_.known();
  if (!due_) update();
}

int64_t WindowLength::at(int64_t steps) const {
  int64_t k = config_.accum_steps;
  for (const AccumPhase& phase : phases_)
    if (phase.from_step <= steps) k = phase.accum_steps;
  return k;
}

// Waits for the last step if there is a schedule of K.
void WindowLength::update() {
  due_ = false;
  window_.set_accum_steps(at(phases_.empty() ? 0 : progress_.steps()));
}

void WindowLength::set(int64_t k) {
  window_.check_empty("ga_context_set_accum_steps");
  if (!phases_.empty())
    fail(GA_ERROR_INVALID_STATE,
         "ga_context_set_accum_steps was called while a schedule of accum_steps is set; "
         "ga_context_set_accum_schedule with count 0 removes the schedule");
  if (k < 0) fail(GA_ERROR_INVALID_ARGUMENT, "accum_steps was %lld, expected >= 0", ll(k));
  config_.accum_steps = k;
  update();
}

void WindowLength::set_schedule(const int64_t* from_steps, const int64_t* accum_steps,
                                size_t count) {
  window_.check_empty("ga_context_set_accum_schedule");
  if (count > 0 && !(from_steps && accum_steps))
    fail(GA_ERROR_INVALID_ARGUMENT, "%s was NULL, but count is %zu",
         from_steps ? "accum_steps" : "from_steps", count);
  std::vector<AccumPhase> phases;
  phases.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const int64_t from = from_steps[i];
    if (i == 0 ? from != 0 : from <= phases.back().from_step)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "from_steps[%zu] was %lld; the first is 0 and each is larger than the one before", i,
           ll(from));
    if (accum_steps[i] < 0)
      fail(GA_ERROR_INVALID_ARGUMENT, "accum_steps[%zu] was %lld, expected >= 0", i,
           ll(accum_steps[i]));
    phases.push_back({from, accum_steps[i]});
  }
  phases_.swap(phases);
  update();
}

}  // namespace ga
