// SPDX-License-Identifier: Apache-2.0
// What a rank has of parameters that several ranks have in parts (GA_SHARD_PARAMETERS), as ranks tell it to each other
// and as state files keep it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ga {

class ParamList;

// The elements [first, first + shape) of a parameter of shape `whole`.
struct OwnPart {
  int32_t dtype, group, copies;  // copies: ranks that have the same part
  std::vector<int64_t> whole, first, shape;

  bool is_same(const OwnPart& other) const { return first == other.first && shape == other.shape; }
  // Whether they have an element in common.
  bool overlaps(const OwnPart& other) const;
  int64_t count() const;
};

// Which of the samples of all ranks a rank has.
struct Samples {
  int32_t data_ranks = 1, data_rank = 0;
  double reduced_over = 1;  // gradients are means over so many ranks, of what was to be a sum

  bool operator==(const Samples& o) const {
    return data_ranks == o.data_ranks && data_rank == o.data_rank && reduced_over == o.reduced_over;
  }
};

struct OwnParts {
  Samples samples;
  std::map<std::string, OwnPart> parts;  // by name

  static OwnParts of(const ParamList& params, const Samples& samples);
  OwnParts whole() const;  // the same parameters, whole, of a context alone
  std::string text() const;
  // Throws GA_ERROR_FORMAT.
  static OwnParts from(const std::string& text);
  // The part of that name; NULL: there is none.
  const OwnPart* find(const std::string& name) const {
    const auto found = parts.find(name);
    return found == parts.end() ? nullptr : &found->second;
  }
  bool has_parts_of(const OwnParts& other) const;
};

}  // namespace ga
