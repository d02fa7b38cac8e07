// SPDX-License-Identifier: Apache-2.0
// What travels together between ranks. Parameters are cut into buckets, each of which one exchange moves: a
// block of every rank, or to every rank, of at most some MiB in all. A large parameter travels where it
// lies; small ones, and what has to be converted, are packed into buckets.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "model/division.hpp"
#include "numbers/reduction.hpp"

namespace ga {

// Rows of sparse gradients travel by themselves: at most so many bytes in one exchange.
constexpr int64_t kRowBytes = int64_t{8} << 20;

// A part of a parameter in a bucket. Packed: it begins at element `at` of the bucket. In place: `first`
// counts from the beginning of each rank's piece. As a whole: `first` is of the parameter.
struct Segment {
  ga_param param;
  int64_t first, count, at;
  int32_t rank;  // whose piece it is
};

// Of the memory of a group: the bytes for what a bucket sends, for what it receives, and for its sums; or where these
// begin.
struct Room {
  size_t sent, received, added;
};
struct Needs {
  Room room;
  size_t calls;  // of the transport's operations, in one exchange
};

struct Bucket {
  int32_t dtype;
  bool packed;    // else of one parameter, where it lies
  bool gathered;  // every rank gets the sums
  Reduction reduction;
  size_t first, end;   // of segments()
  int64_t block;       // elements of each rank
  int64_t stride;      // from a rank's block to the next one; 0: of one block, which is not divided
  bool joins = false;  // the group of the bucket before it
  Room at = {};        // where its arrays begin
};

// How a parameter travels: where it lies, in pieces or as a whole; packed.
enum class Travel { kNot, kInPlace, kAsAWhole, kPacked };

class Buckets {
 public:
  explicit Buckets(int32_t ranks) : ranks_(ranks), queues_(static_cast<size_t>(ranks)) {}

  void clear() {
    buckets_.clear();
    segments_.clear();
  }
  // Adds the buckets of the parameters that travel in a dtype; travel(id) says how. The newest parameters
  // come first, as in backward. What a rank has of a parameter is cut at the same places whatever else
  // travels, so that its partial sums of squares have the same bits.
  void add(const std::vector<Division>& divisions, const std::vector<int64_t>& counts,
           int32_t dtype, bool gathered, Reduction reduction,
           const std::function<Travel(ga_param)>& travel);

  // Makes groups of buckets that come one after the other. One exchange moves a group, and groups use the same memory
  // in turn: returns the bytes that the largest one needs. A group of several buckets needs at most so many bytes and
  // calls.
  size_t group(size_t most_bytes, size_t most_calls,
               const std::function<Needs(const Bucket&)>& needs_of);
  size_t end_of_group(size_t first) const {
    size_t end = first + 1;
    while (end < buckets_.size() && buckets_[end].joins) ++end;
    return end;
  }

  const std::vector<Bucket>& list() const { return buckets_; }
  const std::vector<Segment>& segments() const { return segments_; }

 private:
  void pack_queues(const Bucket& like, int64_t most, int64_t grain);

  const int32_t ranks_;
  std::vector<Bucket> buckets_;
  std::vector<Segment> segments_;
  std::vector<std::vector<Segment>> queues_;  // by rank: what it has of the next packed buckets
};

}  // namespace ga
