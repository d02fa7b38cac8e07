// SPDX-License-Identifier: Apache-2.0
// The results of the last windows.
#pragma once

#include "backend/results.hpp"

namespace ga::cpu {

class Results {
 public:
  void keep(const ga_step_result& result) { kept_[result.windows % kKept] = result; }

  // The result of a window, 0: of the last one, after `windows` windows; see Backend::result.
  const ga_step_result& get(int64_t window, int64_t windows) const {
    const int64_t wanted = window == 0 ? windows : window;
    if (wanted < 1 || wanted > windows || kept_[wanted % kKept].windows != wanted)
      fail_unknown_result(window, windows, kKept);
    return kept_[wanted % kKept];
  }

 private:
  static constexpr int kKept = 64;
  ga_step_result kept_[kKept] = {};
};

}  // namespace ga::cpu
