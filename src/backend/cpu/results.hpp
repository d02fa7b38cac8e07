// SPDX-License-Identifier: Apache-2.0
// What the last windows came to.
#pragma once

#include "error.hpp"

namespace ga::cpu {

class Results {
 public:
  void keep(const ga_step_result& result) { kept_[result.windows % kKept] = result; }

  // That of a window out of `windows` ones, 0: of the last; see Backend::result.
  const ga_step_result& get(int64_t window, int64_t windows) const {
    const int64_t wanted = window == 0 ? windows : window;
    if (wanted < 1 || wanted > windows || kept_[wanted % kKept].windows != wanted)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "the result of window %lld was asked for, but kept are those of the last %d windows up "
           "to %lld",
           static_cast<long long>(window), kKept, static_cast<long long>(windows));
    return kept_[wanted % kKept];
  }

 private:
  static constexpr int kKept = 64;
  ga_step_result kept_[kKept] = {};
};

}  // namespace ga::cpu
