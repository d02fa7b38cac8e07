// SPDX-License-Identifier: Apache-2.0
#include "model/ranges.hpp"

#include <algorithm>

#include "model/param.hpp"

namespace ga {

// By doubling: else each of many calls would move all ranges.
void MemoryRanges::reserve_more(size_t count) {
  const size_t size = ranges_.size() + count;
  if (size > ranges_.capacity()) ranges_.reserve(std::max(size, 2 * ranges_.capacity()));
}

void MemoryRanges::add(const void* data, size_t bytes, ga_param param) {
  if (bytes == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const auto at = std::upper_bound(ranges_.begin(), ranges_.end(), begin,
                                   [](uintptr_t value, const Range& r) { return value < r.begin; });
  ranges_.insert(at, {begin, begin + bytes, param});
}

template <class Predicate>
void MemoryRanges::remove_if(Predicate&& predicate) {
  ranges_.erase(std::remove_if(ranges_.begin(), ranges_.end(), predicate), ranges_.end());
}

void MemoryRanges::remove(const void* begin) {
  remove_if([&](const Range& r) { return r.begin == reinterpret_cast<uintptr_t>(begin); });
}

void MemoryRanges::remove_params_from(ga_param first) {
  remove_if([&](const Range& r) { return r.param >= first; });
}

const MemoryRanges::Range* MemoryRanges::overlap(const void* data, int64_t bytes,
                                                 ga_param except) const {
  if (bytes == 0) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + static_cast<uintptr_t>(bytes);
  // Ranges do not overlap, so their ends are sorted too.
  auto it = std::upper_bound(ranges_.begin(), ranges_.end(), begin,
                             [](uintptr_t value, const Range& r) { return value < r.end; });
  for (; it != ranges_.end() && it->begin < end; ++it)
    if (it->param != except || except < 0) return &*it;
  return nullptr;
}

void MemoryRanges::check_readable(const Subject& of, const char* what, const void* data,
                                  int64_t count, int32_t size) const {
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(size) != 0)
    of.fail(GA_ERROR_INVALID_ARGUMENT,
            "%s was at address %p, expected a multiple of the element size, %d bytes", what, data,
            size);
  if (config_.device != GA_DEVICE_CPU && count > 0) backend_.check_memory(of, what, data);
}

void MemoryRanges::check_disjoint(const Subject& of, const char* what, const void* data,
                                  int64_t bytes, ga_param self) const {
  const Range* const r = overlap(data, bytes, self);
  if (!r) return;
  const bool library = r->param < 0;
  of.fail(GA_ERROR_INVALID_ARGUMENT, "%s at %p overlaps %s%s%s", what, data,
          library ? "memory of the library, not of a parameter" : "parameter \"",
          library ? "" : params_.name(r->param), library ? "" : "\"");
}

}  // namespace ga
