// SPDX-License-Identifier: Apache-2.0
// Memory of the library's own on the CPU.
#pragma once

#include <cstddef>
#include <vector>

namespace ga::cpu {

// See Backend::allocate.
void* allocate(size_t bytes);
void free(void* data, size_t bytes) noexcept;

// Room for size elements, more than doubled when it is short.
template <class T>
void grow(std::vector<T>& v, size_t size) {
  if (size > v.capacity()) v.reserve(size > 2 * v.capacity() ? size : 2 * v.capacity());
}

}  // namespace ga::cpu
