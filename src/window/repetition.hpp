// SPDX-License-Identifier: Apache-2.0
// Most programs bring the same arrays in every window. Then gradients need not be checked again, the tasks that add them
// are in the list, and the tables have what the window brings. This class finds out whether a call brings what an earlier
// one did. It forgets all as soon as the program calls anything but ga_accumulate and ga_step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace ga {

class Repetition {
 public:
  // What a ga_accumulate does with its gradients. kBorrows: it is the first of a window, and leaves all of them in the
  // program's buffers. kAdds: it adds all of them, by the tasks of the list.
  enum class Call { kOther, kBorrows, kAdds };

  void reserve(size_t count) {
    borrowed_.reserve(count);
    added_.reserve(count);
  }

  // Returns what the ga_accumulate with that number repeats. opens: it is the first of its window. borrows: the first of
  // a window leaves gradients where they are. gradients NULL: it brings none. One of the next two functions must be called
  // when the call has done its work.
  Call find(uint64_t call, bool opens, bool borrows, const void* const* gradients, size_t count) {
    if (last_ + 1 != call) forget();
    last_ = 0;  // in case the call fails
    const auto is = [&](const Gradients& known) {
      return gradients && known.size() == count &&
             std::equal(known.begin(), known.end(), gradients);
    };
    if (opens && borrows) return is(borrowed_) ? Call::kBorrows : Call::kOther;
    return is(added_) ? Call::kAdds : Call::kOther;
  }

  // Whether the tasks of the list have run in this window before.
  bool has_added() const { return window_.adds; }

  // The call has repeated what find() returned. scale: that of its gradients.
  void repeat(uint64_t call, Call what, double scale) {
    last_ = call;
    if (what == Call::kAdds) window_.adds = true;
    if (what == Call::kBorrows) window_.scale = scale;
  }
  // The call has done something new, and the list has its tasks.
  void keep(uint64_t call, Call what, const void* const* gradients, size_t count) {
    last_ = call;
    window_ = {what == Call::kAdds, NAN};
    added_.clear();
    Gradients& known = what == Call::kAdds ? added_ : borrowed_;
    if (what != Call::kOther && count <= known.capacity())
      known.assign(gradients, gradients + count);
  }

  // Whether all calls of the window that the ga_step with that number ends have repeated those of the window before.
  bool is_whole(uint64_t call) const {
    return last_ + 1 == call && window_.adds == before_.adds && window_.scale == before_.scale;
  }
  void end_window(uint64_t call) {
    if (last_ + 1 != call) return forget();
    last_ = call;
    before_ = window_;
    window_ = {};
  }

 private:
  using Gradients = std::vector<const void*>;
  // What the calls of a window have done.
  struct Window {
    bool adds = false;
    double scale = 0;  // of the gradients that were borrowed; NaN: something was new
  };

  void forget() {
    last_ = 0;
    window_ = before_ = {false, NAN};
    borrowed_.clear();
    added_.clear();
  }

  uint64_t last_ =
      0;  // number of the last ga_accumulate or ga_step; 0: it failed, or there was none
  Gradients borrowed_, added_;
  Window window_ = {false, NAN}, before_ = {false, NAN};
};

}  // namespace ga
