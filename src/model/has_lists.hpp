// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace ga {

// A stage with lists that are as long as the list of parameters, so that no call in a window allocates. Preparation
// makes them longer.
class HasLists {
 public:
  // Throws std::bad_alloc or std::length_error.
  virtual void reserve(size_t params) = 0;

 protected:
  ~HasLists() = default;
};

}  // namespace ga
