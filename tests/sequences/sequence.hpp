// SPDX-License-Identifier: Apache-2.0
//
// One sequence of calls: which call comes next.
#pragma once

#include <cstdint>

#include "gradaccum/gradaccum.h"
#include "sequences/layer_calls.hpp"

namespace ga::test::sequences {

class Sequence : public LayerCalls {
 public:
  using LayerCalls::LayerCalls;

  // Returns true if the library and the model agree to the end.
  bool run() {
    worlds_.reserve(2);
    for (const double p : {1.0, 0.2}) {
      if (!chance(p)) continue;
      set_up();
      if (chance(0.4)) bn_add(worlds_.back());
    }
    for (int i = 0; i < kCalls && difference_.empty() && !over_ && !random_.ended(); ++i) {
      World& w = worlds_[static_cast<size_t>(below(static_cast<int64_t>(worlds_.size())))];
      act(w);
      if (difference_.empty() && !over_) compare_window(w);
      if (difference_.empty() && !over_) overwrite_rest(w);
    }
    return difference_.empty();
  }

 private:
  static constexpr int kCalls = 45;

  void act(World& w) {
    const Model& m = *w.model;
    using Call = void (Sequence::*)(World&);
    struct Choice {
      int share;
      Call call;
    };
    const bool open = m.open() >= 0, full = m.full(), empty = m.empty(), held = !w.held.empty();
    const int rare = 1;
    const bool only_discard = m.failed();
    if (only_discard) return chance(0.6) ? discard(w) : step(w);
    const Choice choices[] = {
        {open || full ? rare : 24, &Sequence::accumulate},
        {open   ? rare
         : full ? 4
                : 14,
         &Sequence::begin},
        {open ? 22 : rare, &Sequence::part},
        {open ? 14 : rare, &Sequence::rows},
        {open ? 6 : rare, &Sequence::acquire},
        {held ? 20 : rare, &Sequence::release},
        {open ? held ? 4 : 18 : rare, &Sequence::end},
        {open    ? rare
         : full  ? 40
         : empty ? 3
                 : 14,
         &Sequence::step},
        {empty ? rare : 2, &Sequence::discard},
        {m.layers().empty() ? rare : 22, &Sequence::bn_call},
        {empty ? 3 : rare, &Sequence::set_frozen},
        {empty ? 3 : rare, &Sequence::changed},
        {empty ? 3 : rare, &Sequence::state},
        {empty ? 3 : rare, &Sequence::save_and_load},
        {empty ? 2 : rare, &Sequence::ema_swap},
        {open ? 5 : rare, &Sequence::abort},
        {open ? 3 : rare, &Sequence::ready},
        {rare, &Sequence::prepare},
        {2, &Sequence::set_scale},
        {2, &Sequence::set_optimizer},
        {rare, &Sequence::set_group_frozen},
        {rare, &Sequence::remove},
        {empty ? 2 : rare, &Sequence::bind},
        {empty ? 5 : 2, &Sequence::write},
        {empty ? 2 : rare, &Sequence::set_accum_steps},
        {empty ? 2 : rare, &Sequence::set_scaler},
        {rare, &Sequence::set_ema},
        {2, &Sequence::set_clip},
        {2, &Sequence::set_rates},
        {rare, &Sequence::add_group},
        {empty ? 2 : rare, &Sequence::add_params},
        {rare, &Sequence::ask_result},
        {2, &Sequence::ask_gradient},
        {rare, &Sequence::refused},
    };
    int total = 0;
    for (const Choice& c : choices) total += c.share;
    auto at = static_cast<int>(below(total));
    for (const Choice& c : choices) {
      if ((at -= c.share) >= 0) continue;
      return (this->*c.call)(w);
    }
  }
};

}  // namespace ga::test::sequences
