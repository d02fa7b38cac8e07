// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace ga::cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kCacheLine = 64;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Pages have 4 KiB on x86-64, and 4, 16 or 64 KiB on AArch64. munmap() takes whole pages only.
size_t page() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

bool is_large(size_t bytes) { return bytes >= kHugePage / 2; }

}  // namespace

void* allocate(size_t bytes) {
  if (!is_large(bytes)) {
    void* data = nullptr;
    if (posix_memalign(&data, kCacheLine, std::max<size_t>(bytes, 1)) != 0) throw std::bad_alloc();
    std::memset(data, 0, bytes);
    return data;
  }
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  const size_t length = round_up(bytes, page());
  char* raw = static_cast<char*>(mmap(nullptr, length + kHugePage, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* base = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(raw), kHugePage));
  if (base != raw) munmap(raw, static_cast<size_t>(base - raw));
  munmap(base + length, kHugePage - static_cast<size_t>(base - raw));
  madvise(base, length, MADV_HUGEPAGE);
  return base;
}

void free(void* data, size_t bytes) noexcept {
  if (!data) return;
  if (is_large(bytes))
    munmap(data, round_up(bytes, page()));
  else
    std::free(data);
}

}  // namespace ga::cpu
