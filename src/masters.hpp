// SPDX-License-Identifier: Apache-2.0
// The parameters that have a master, of all contexts of the process. A master is what an optimizer
// updates in place of its parameter, so two of them over the same memory would drift apart, each
// overwriting what the other has made of it.
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
  void clear() noexcept;  // all of this context

 private:
  bool any_ = false;
};

}  // namespace ga
