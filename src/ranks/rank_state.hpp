// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "files/fields.hpp"

namespace ga {

// The settings and the state of a context, as ranks compare them and hand them out.
class RankState {
 public:
  virtual ~RankState() = default;

  using Items = std::vector<std::pair<std::string, std::string>>;
  using Settings = std::vector<std::pair<std::string, Fields>>;

  // All that changes numbers, by key: in the order of groups, then of parameters and layers.
  virtual Settings settings_of_context() const = 0;
  virtual Settings settings_of_tensors() const = 0;
  // Texts that tell whether two contexts have the same parameters and state, whatever their open windows hold: by name
  // of each tensor its checksum, and the counters.
  virtual Items items() = 0;
  // All state as a file in memory, of `size` bytes. what: the function that was called.
  virtual std::vector<uint64_t> write(const char* what, int64_t& size) = 0;
  virtual void read(const char* what, const std::vector<uint64_t>& file, int64_t size) = 0;
};

}  // namespace ga
