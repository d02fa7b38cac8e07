// SPDX-License-Identifier: Apache-2.0
// Where the arrays of a parameter lie in the arenas that hold those of many.
//
// One kernel walks the arrays of a parameter all together with the parameter. Where the addresses of two streams are
// nearly alike in their low 12 bits, a core takes the load of one for depending on the store to the other (measured:
// half the speed), so the arrays of a large parameter lie 17 cache lines apart within a page, counted from the
// parameter. Small arrays lie side by side, each kind in an arena of its own, as the small parameters of many
// programs do: there the arenas begin 17 lines apart. On a device arrays begin with a line of its caches, which are 128
// bytes long.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/backend.hpp"

namespace ga {

// Sizes stay below what no address space holds.
inline size_t add_capped(size_t a, size_t b) {
  constexpr auto kMost = static_cast<size_t>(INTPTR_MAX);
  return a > kMost || b > kMost - a ? kMost : a + b;
}

class Placer {
 public:
  // param: where the parameter lies. placed: how many of its arrays lie in other arenas.
  Placer(bool on_device, const void* param, size_t placed = 0)
      : on_device_(on_device),
        wanted_(reinterpret_cast<uintptr_t>(param) / kLine * kLine + placed * kSpacing) {}

  // Returns where the next array begins in an arena of which `end` bytes are taken, and moves the end behind it.
  size_t place(size_t& end, size_t bytes) {
    size_t offset = end;
    wanted_ += kSpacing;
    if (on_device_ && bytes >= kPage)
      offset = add_capped(offset, (kDeviceLine - offset % kDeviceLine) % kDeviceLine);
    else if (!on_device_ && bytes >= kLarge)
      offset += (wanted_ - offset) % kPage;
    end = add_capped(offset, bytes);
    return offset;
  }
  // Where the first array of an arena with so many bytes is to begin, within a page, if it is the next one of this
  // parameter.
  size_t next_begin(size_t bytes) {
    wanted_ += kSpacing;
    return on_device_ || bytes < kPagedBytes ? 0 : wanted_ % kPage;
  }
  // The most that an array takes of an arena on the CPU.
  static size_t room(size_t bytes) { return bytes + (bytes >= kLarge ? kPage : 0); }

 private:
  static constexpr size_t kLine = 64, kDeviceLine = 128;
  static constexpr size_t kSpacing = 17 * kLine, kLarge = size_t{1} << 20;
  static_assert(kLarge >= kPagedBytes, "place() counts from the page that an arena begins with");

  const bool on_device_;
  size_t wanted_;  // where within a page the array that was placed last begins, as an address
};

}  // namespace ga
