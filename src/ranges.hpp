// SPDX-License-Identifier: Apache-2.0
// Memory that the program's gradients, parameters and outputs must not overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gradaccum/gradaccum.h"

namespace ga {

class MemoryRanges {
 public:
  struct Range {
    uintptr_t begin, end;
    ga_param param;  // -1: memory of the library
  };

  // Makes room for so many more ranges, so that adding them cannot fail.
  void reserve_more(size_t count);
  void add(const void* begin, size_t bytes, ga_param param = -1);
  void remove(const void* begin);
  void remove_params_from(ga_param first);  // this parameter and all after it

  // A range that the memory overlaps, other than that of parameter `except`; NULL if there is none.
  const Range* overlap(const void* data, int64_t bytes, ga_param except = -1) const;

 private:
  template <class Predicate>
  void remove_if(Predicate&& predicate);

  std::vector<Range> ranges_;  // sorted, without overlaps
};

}  // namespace ga
