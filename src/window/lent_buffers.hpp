// SPDX-License-Identifier: Apache-2.0
// The buffers that gradients were lent in (GA_GRADIENTS_LENT), lest two parameters have one accumulator. Most programs
// lend the same buffers in each window, which takes a comparison for each.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "gradaccum/gradaccum.h"

namespace ga {

class LentBuffers {
 public:
  // Makes room for so many parameters.
  void reserve(size_t params) {
    if (params > last_.size()) last_.resize(params);
  }

  // A parameter lends a buffer in call number `call`. lends(other): whether another parameter has lent its own in this
  // window. Returns the parameter that has lent some of the same memory, in this window or in this call; -1: none.
  template <class Lends>
  ga_param take(ga_param param, const void* data, int64_t bytes, uint64_t call, Lends&& lends) {
    Last& last = last_[static_cast<size_t>(param)];
    if (last.data != data || last.bytes != bytes) {
      const auto begin = reinterpret_cast<uintptr_t>(data);
      const ga_param other = make_room(
          begin, begin + static_cast<uintptr_t>(bytes), param,
          [&](ga_param p) { return last_[static_cast<size_t>(p)].call == call || lends(p); });
      if (other >= 0) return other;
      move(last, begin, param);
      last.data = data;
      last.bytes = bytes;
    }
    last.call = call;
    return -1;
  }

 private:
  struct Last {
    const void* data = nullptr;  // NULL: none
    int64_t bytes = 0;
    uint64_t call = 0;
  };

  uintptr_t end_of(ga_param param) const {
    const Last& last = last_[static_cast<size_t>(param)];
    return reinterpret_cast<uintptr_t>(last.data) + static_cast<uintptr_t>(last.bytes);
  }

  // Forgets the buffers of other parameters that overlap this one. Returns the first that is still lent, having
  // forgotten nothing of it; -1: none.
  template <class Lends>
  ga_param make_room(uintptr_t begin, uintptr_t end, ga_param param, Lends&& still_lent) {
    auto at = by_address_.lower_bound(begin);
    if (at != by_address_.begin() && end_of(std::prev(at)->second) > begin) --at;
    while (at != by_address_.end() && at->first < end) {
      const ga_param other = at->second;
      if (other != param) {
        if (still_lent(other)) return other;
        last_[static_cast<size_t>(other)] = {};
        at = by_address_.erase(at);
      } else {
        ++at;
      }
    }
    return -1;
  }

  // Gives the parameter's entry another address, in the node that it has.
  void move(const Last& last, uintptr_t begin, ga_param param) {
    if (!last.data) {
      by_address_.emplace(begin, param);
      return;
    }
    auto node = by_address_.extract(reinterpret_cast<uintptr_t>(last.data));
    node.key() = begin;
    by_address_.insert(std::move(node));
  }

  std::vector<Last> last_;                    // by parameter
  std::map<uintptr_t, ga_param> by_address_;  // the beginnings of these; none overlaps another
};

}  // namespace ga
