// SPDX-License-Identifier: Apache-2.0
// Most programs bring the same arrays in every window. Then gradients need not be checked again, the tasks that add them
// are in the list, and the tables have what the window brings. This class finds out whether a call brings what an earlier
// one did. It forgets all as soon as the program calls anything but ga_accumulate and ga_step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ga {

class Repetition {
 public:
  // What a ga_accumulate does with its gradients. kBorrows: it is the first of a window, and leaves all of them in the
  // program's buffers. kAdds: it adds all of them, by the tasks of the list.
  enum class Call { kOther, kBorrows, kAdds };

  void reserve(size_t count) {
    opening_.reserve(count);
    listed_.reserve(count);
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
    if (opens && borrows) return is(opening_) ? Call::kBorrows : Call::kOther;
    // The first addition of a window is to gradients that were borrowed, which it must not overlap.
    const bool checked = !borrows || window_.adds || (window_.borrows && follows_opening_);
    return checked && is(listed_) ? Call::kAdds : Call::kOther;
  }

  // Whether the tasks of the list have run in this window before.
  bool has_added() const { return window_.adds; }

  // The call has repeated what find() returned. scale: that of its gradients.
  void repeat(uint64_t call, Call what, double scale) {
    last_ = call;
    if (what == Call::kAdds) {
      window_.adds = true;
    } else {
      window_.borrows = true;
      window_.scale = scale;
    }
  }
  // The call has done something new, and the list has its tasks.
  void keep(uint64_t call, Call what, bool opens, const void* const* gradients, size_t count) {
    last_ = call;
    window_.is_new = true;
    if (what == Call::kAdds) {
      follows_opening_ = window_.borrows && !window_.adds;
      window_.adds = true;
    } else {
      window_.adds = false;
      window_.borrows = what == Call::kBorrows;
    }
    listed_.clear();
    if (opens || what == Call::kOther) opening_.clear();
    Gradients& known = what == Call::kAdds ? listed_ : opening_;
    if (what != Call::kOther && count <= known.capacity())
      known.assign(gradients, gradients + count);
  }

  // Whether all calls of the window that the ga_step with that number ends have repeated calls of the window before, so
  // that both have brought the same.
  bool is_same_window(uint64_t call) const {
    return last_ + 1 == call && !window_.is_new && !before_.is_new &&
           window_.adds == before_.adds && window_.borrows == before_.borrows &&
           window_.scale == before_.scale;
  }
  void end_window(uint64_t call) {
    if (last_ + 1 != call) return forget();
    last_ = call;
    before_ = window_;
    window_ = {false, false, false, 0};
  }

 private:
  using Gradients = std::vector<const void*>;
  // What the calls of a window have done.
  struct Window {
    bool is_new;   // some of them something new
    bool borrows;  // the first one has left its gradients where they are, with this scale
    bool adds;     // the tasks of the list have run
    double scale;
  };
  static constexpr Window kUnknown = {true, false, false, 0};

  void forget() {
    last_ = 0;
    window_ = before_ = kUnknown;
    opening_.clear();
    listed_.clear();
  }

  // The number of the last ga_accumulate or ga_step; 0: it failed, or there was none.
  uint64_t last_ = 0;
  Gradients opening_;  // of the first call of a window, which has borrowed them; empty: not known
  Gradients listed_;   // of the tasks in the list
  bool follows_opening_ = false;  // they were checked behind the first call, as the next addition
  Window window_ = kUnknown, before_ = kUnknown;
};

}  // namespace ga
