// SPDX-License-Identifier: Apache-2.0
// The parameters with master weights, of all contexts of the process. An optimizer updates the
// master in place of its parameter, so two masters of the same memory would diverge, each
// overwriting the parameter that the other one has written.
#pragma once

#include <cstddef>

namespace ga {

class MasterClaims {
 public:
  MasterClaims() = default;
  ~MasterClaims() { clear(); }
  MasterClaims(const MasterClaims&) = delete;
  MasterClaims& operator=(const MasterClaims&) = delete;

  // Throws GA_ERROR_INVALID_STATE if another context has a master of a parameter that overlaps
  // [data, data + bytes). name: of the parameter.
  void add(const void* data, size_t bytes, const char* name);
  void remove(const void* data) noexcept;
  void clear() noexcept;  // removes all claims of this context

 private:
  bool any_ = false;
};

}  // namespace ga
