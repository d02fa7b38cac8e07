// SPDX-License-Identifier: Apache-2.0
// Calls that bring the same arrays as calls before them, window after window, as those of most programs do. Then
// nothing is to be checked again, the list has the tasks, and the tables have what a window brings. So as long as the
// program calls nothing but ga_accumulate and ga_step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace ga {

class Repetition {
 public:
  // What a ga_accumulate does with the gradients that it gets: leaves all of them in the program's buffers, which the
  // first one of a window may do; or adds all of them, by the tasks of the list.
  enum class Call { kOther, kBorrows, kAdds };

  void reserve(size_t count) {
    borrowed_.reserve(count);
    added_.reserve(count);
  }

  // What call number `call` repeats. opens: it is the first one of its window. borrows: that one leaves gradients where
  // they are. gradients NULL: the call brings none.
  Call find(uint64_t call, bool opens, bool borrows, const void* const* gradients, size_t count) {
    if (last_ + 1 != call) forget();
    last_ = 0;  // unless keep() says that the call has ended
    const auto is = [&](const Gradients& known) {
      return gradients && known.size() == count &&
             std::equal(known.begin(), known.end(), gradients);
    };
    if (opens && borrows) return is(borrowed_) ? Call::kBorrows : Call::kOther;
    return is(added_) ? Call::kAdds : Call::kOther;
  }

  // Whether this window has used the tasks of the list before.
  bool has_added() const { return window_.adds; }

  // The call that find() was told of has repeated what it said. scale: of gradients that were borrowed.
  void repeat(uint64_t call, Call what, double scale) {
    last_ = call;
    if (what == Call::kAdds) window_.adds = true;
    if (what == Call::kBorrows) window_.scale = scale;
  }
  // It has done something new, so that the list has other tasks.
  void keep(uint64_t call, Call what, const void* const* gradients, size_t count) {
    last_ = call;
    window_ = {what == Call::kAdds, NAN};
    added_.clear();
    Gradients& known = what == Call::kAdds ? added_ : borrowed_;
    if (what != Call::kOther && count <= known.capacity())
      known.assign(gradients, gradients + count);
  }

  // Whether the window, which ga_step ends as call number `call`, has repeated the one before as a whole.
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

  uint64_t last_ = 0;  // the call before, which has told all that it did; 0: none
  Gradients borrowed_, added_;
  Window window_ = {false, NAN}, before_ = {false, NAN};
};

}  // namespace ga
