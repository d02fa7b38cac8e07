// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/memory.hpp"

#include <cstring>

#include "backend/backend.hpp"
#include "core/os/system.hpp"

namespace ga::cpu {
namespace {

constexpr size_t kCacheLine = 64;

bool is_large(size_t bytes) { return bytes >= os::kHugePage / 2; }

}  // namespace

void* allocate(size_t bytes) {
  if (is_large(bytes)) return os::map_pages(bytes);
  void* const data = os::allocate_aligned(bytes, bytes >= kPagedBytes ? kPage : kCacheLine);
  std::memset(data, 0, bytes);
  return data;
}

void free(void* data, size_t bytes) noexcept {
  if (!data) return;
  if (is_large(bytes))
    os::unmap_pages(data, bytes);
  else
    os::free_aligned(data);
}

}  // namespace ga::cpu
