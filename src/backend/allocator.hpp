// SPDX-License-Identifier: Apache-2.0
// The program's allocator (ga_config.allocate), if it has given one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include "core/error.hpp"
#include "core/fp_mode.hpp"

namespace ga {

class Allocator {
 public:
  explicit Allocator(const ga_config& c)
      : allocate_(c.allocate),
        free_(c.free),
        user_(c.allocator_user),
        device_(c.device),
        stream_(c.stream) {}

  bool is_set() const { return allocate_ != nullptr; }
  void set_stream(void* stream) noexcept { stream_ = stream; }

  // Memory that is not zeroed; throws std::bad_alloc, also if the program's function has thrown.
  void* allocate(size_t bytes) const {
    constexpr uintptr_t kAlign = 64;
    void* data = nullptr;
    try {
      const ProgramFpMode programs;
      data = allocate_(user_, bytes, device_, stream_);
    } catch (...) {
      throw AllocatorFailed("threw an exception", bytes);
    }
    if (!data) throw AllocatorFailed("returned NULL", bytes);
    if (reinterpret_cast<uintptr_t>(data) % kAlign == 0) return data;
    free(data, bytes);
    fail(GA_ERROR_INVALID_ARGUMENT,
         "ga_config.allocate returned address %p for %zu bytes, expected a multiple of 64", data,
         bytes);
  }

  void free(void* data, size_t bytes) const noexcept {
    try {
      const ProgramFpMode programs;
      free_(user_, data, bytes, device_, stream_);
    } catch (...) {
    }
  }

 private:
  ga_allocate allocate_;
  ga_free free_;
  void* user_;
  ga_device device_;
  void* stream_;
};

}  // namespace ga
