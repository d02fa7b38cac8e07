// SPDX-License-Identifier: Apache-2.0
// The decision about a window as a whole.
#pragma once

#include "backend/decide/plans.hpp"

namespace ga {

// Decides the step. last: no settle_units() follows.
template <class ThreadGroup>
GA_DEVICE void decide_window(ThreadGroup& threads, const ScalarTables& t, bool last) {
  const Settings& set = *t.settings;
  Control& c = *t.control;
  threads.once([&] { c.mean = mean_of(set, c.sums.weight); });
  threads.each_item(t.params, [&](int64_t i) { reduce_param(t, i); });
  total_params(threads, t);
  threads.once([&] {
    decide_outcome(t);
    count_window(t);
    estimate_noise(t);
  });
  // Asked before a thread may be in clear_window(), which changes what this reads.
  const bool clears = !c.rejected || c.sums.discarded != 0;
  threads.each_item(t.groups, [&](int64_t k) { plan_group(t, k); });
  const bool bounded = set.bounded >= 0;
  if (bounded) {
    threads.each_item(t.params, [&](int64_t i) { clip_param(t, i); });
    if (last) bound_groups(threads, t);
  }
  threads.each_item(t.params, [&](int64_t i) {
    if (!bounded) clip_param(t, i);
    plan_param(threads, t, i);
  });
  if (set.clips) take_smallest(threads, t);
  if (c.go)
    each_channel(threads, t, [&](BnChannel& channel, const BnInput& layer) {
      if (!layer.frozen)
        commit(channel, history_of(channel, layer), c.result.micro_batches, layer.momentum,
               layer.biased);
    });
  if (clears) clear_window(threads, t);
}

}  // namespace ga
