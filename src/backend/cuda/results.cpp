// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/results.hpp"

#include <algorithm>
#include <cstring>

#include "backend/results.hpp"

namespace ga::cuda {

constexpr int64_t kSlots = 64;

Results::Results(Runtime& runtime) : runtime_(runtime) {
  runtime_.call([&] {
    void* at = nullptr;
    slots_ = static_cast<RingSlot*>(runtime_.allocate_pinned(kSlots * sizeof(RingSlot), &at));
    ring_ = {static_cast<RingSlot*>(at), kSlots};
  });
}

void Results::restore(const ga_step_result& last) {
  runtime_.wait();
  std::fill(slots_, slots_ + kSlots, RingSlot());
  if (last.windows > 0) slots_[last.windows % kSlots] = {last, 0, last.windows, -1};
}

// The device writes the window last, so a slot is whole if its window is the same before and after.
bool Results::read(const RingSlot& slot, RingSlot& out) {
  const int64_t window = __atomic_load_n(&slot.window, __ATOMIC_ACQUIRE);
  if (window == 0) return false;
  std::memcpy(&out, &slot, sizeof out);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  out.window = window;
  return __atomic_load_n(&slot.window, __ATOMIC_RELAXED) == window;
}

int64_t Results::latest() const {
  int64_t latest = 0;
  for (int64_t k = 0; k < kSlots; ++k)
    latest = std::max(latest, __atomic_load_n(&slots_[k].window, __ATOMIC_ACQUIRE));
  return latest;
}

bool Results::find(int64_t window, ga_step_result& out) const {
  RingSlot slot;
  if (window == 0) window = latest();
  if (window == 0 || !read(slots_[window % kSlots], slot) || slot.window != window) return false;
  out = slot.result;
  return true;
}

bool Results::of_ticket(int64_t ticket, ga_step_result& out) const {
  RingSlot slot;
  for (int64_t k = 0; k < kSlots; ++k)
    if (read(slots_[k], slot) && slot.ticket == ticket) {
      out = slot.result;
      return true;
    }
  return false;
}

bool Results::get(int64_t window, bool wait, ga_step_result& out) {
  if (window < 0) fail_unknown_result(window, latest(), kSlots);
  // Only a wait tells which window is the last one.
  if (!(window == 0 && wait) && find(window, out)) return true;
  if (wait) {
    runtime_.wait();
    if (find(window, out)) return true;
  }
  const int64_t last = latest();
  if (wait || (window > 0 && last >= window + kSlots)) fail_unknown_result(window, last, kSlots);
  return false;
}

}  // namespace ga::cuda
