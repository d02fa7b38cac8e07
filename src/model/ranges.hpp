// SPDX-License-Identifier: Apache-2.0
// Memory that the program's gradients, parameters and outputs must not overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.hpp"
#include "core/error.hpp"

namespace ga {

class ParamList;

class MemoryRanges {
 public:
  MemoryRanges(const ga_config& config, Backend& backend, const ParamList& params)
      : config_(config), backend_(backend), params_(params) {}

  // Makes room for so many more ranges, so that adding them cannot fail.
  void reserve_more(size_t count);
  void add(const void* begin, size_t bytes, ga_param param = -1);
  void remove(const void* begin);
  void remove_params_from(ga_param first);  // this parameter and all after it

  // Throws GA_ERROR_INVALID_ARGUMENT, with the name of the array, unless it is aligned to its elements
  // and, as far as the backend can tell, in memory that the kernels can read.
  void check_readable(const Subject& of, const char* what, const void* data, int64_t count,
                      int32_t size) const;
  // Throws the same status if the array overlaps memory of the library or a parameter other than `self`.
  void check_disjoint(const Subject& of, const char* what, const void* data, int64_t bytes,
                      ga_param self = -1) const;
  // Both, of an array that a contribution comes from or that a call writes to.
  void check(const Subject& of, const char* what, const void* data, int64_t count,
             int32_t size) const {
    check_readable(of, what, data, count, size);
    check_disjoint(of, what, data, count * size);
  }

 private:
  struct Range {
    uintptr_t begin, end;
    ga_param param;  // -1: memory of the library
  };

  // A range that the memory overlaps, other than that of parameter `except`; NULL if there is none.
  const Range* overlap(const void* data, int64_t bytes, ga_param except) const;
  template <class Predicate>
  void remove_if(Predicate&& predicate);

  const ga_config& config_;
  Backend& backend_;
  const ParamList& params_;
  std::vector<Range> ranges_;  // sorted, without overlaps
};

}  // namespace ga
