// SPDX-License-Identifier: Apache-2.0
// The library's own memory on the CPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace ga::cpu {

// See Backend::allocate.
void* allocate(size_t bytes);
void free(void* data, size_t bytes) noexcept;

// Makes room for size elements, and at least doubles the room.
template <class T>
void grow(std::vector<T>& v, size_t size) {
  if (size > v.capacity()) v.reserve(std::max(size, 2 * v.capacity()));
}

}  // namespace ga::cpu
