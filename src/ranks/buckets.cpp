// SPDX-License-Identifier: Apache-2.0
#include "ranks/buckets.hpp"

#include <algorithm>

namespace ga {

constexpr int64_t kBucketBytes = int64_t{8} << 20;
constexpr int64_t kInPlaceBytes = int64_t{512} << 10;  // smaller parameters are packed
constexpr size_t kAlignment = 256;  // of arrays in the memory of a group, in bytes

void Buckets::add(const std::vector<Division>& divisions, const std::vector<int64_t>& counts,
                  int32_t dtype, bool gathered, Reduction reduction,
                  const std::function<Travel(ga_param)>& travel) {
  const int64_t size = dtype_info(dtype).size;
  const int64_t most = std::max(kBucketBytes / size / ranks_, int64_t{1});
  const int64_t grain = std::min(most, kChunk);
  for (auto& queue : queues_) queue.clear();
  for (size_t i = divisions.size(); i-- > 0;) {
    const auto id = static_cast<ga_param>(i);
    Travel how = travel(id);
    if (how == Travel::kNot) continue;
    const Division& d = divisions[i];
    const int64_t count = counts[i];
    if (count * size < kInPlaceBytes || d.piece == 0) how = Travel::kPacked;
    const auto add_slice = [&](int64_t first, int64_t block, int64_t stride) {
      segments_.push_back({id, first, block, 0, 0});
      buckets_.push_back({dtype, false, gathered, reduction, segments_.size() - 1, segments_.size(),
                          block, stride});
    };
    int64_t done = 0;
    if (how == Travel::kAsAWhole)
      for (int64_t block; done < count; done += block) {
        block = std::min(most * ranks_, count - done);
        add_slice(done, block, 0);
      }
    if (how == Travel::kAsAWhole) continue;
    // In place, but for the end of the pieces, where some ranks have no more.
    if (how == Travel::kInPlace)
      for (int64_t last = d.range(ranks_ - 1, count).count, block; done < last; done += block) {
        block = std::min(most / grain * grain, last - done);
        add_slice(done, block, d.piece);
      }
    for (int32_t q = 0; q < ranks_; ++q) {
      const Range r = d.range(q, count);
      if (r.count > done)
        queues_[static_cast<size_t>(q)].push_back({id, r.first + done, r.count - done, done, q});
    }
  }
  pack_queues({dtype, true, gathered, reduction, 0, 0, 0, 0}, most, grain);
}

// Buckets of what is in the queues, one for each rank, whose segments know where they begin in what the rank
// has of the parameter (`at`).
void Buckets::pack_queues(const Bucket& like, int64_t most, int64_t grain) {
  std::vector<size_t> next(queues_.size(), 0);
  for (;;) {
    const size_t begin = segments_.size();
    int64_t block = 0;
    for (size_t q = 0; q < queues_.size(); ++q) {
      int64_t filled = 0;
      while (next[q] < queues_[q].size()) {
        Segment& s = queues_[q][next[q]];
        int64_t count = std::min(s.count, most - filled);
        if (count < s.count) count = (s.at + count) / grain * grain - s.at;
        if (count <= 0) break;
        segments_.push_back({s.param, s.first, count, filled, s.rank});
        s.first += count;
        s.at += count;
        s.count -= count;
        filled += count;
        if (s.count == 0) ++next[q];
      }
      block = std::max(block, filled);
    }
    if (block == 0) return;
    for (size_t k = begin; k < segments_.size(); ++k) segments_[k].at += segments_[k].rank * block;
    buckets_.push_back(like);
    buckets_.back().first = begin;
    buckets_.back().end = segments_.size();
    buckets_.back().block = buckets_.back().stride = block;
  }
}

size_t Buckets::group(size_t most_bytes, size_t most_calls,
                      const std::function<Needs(const Bucket&)>& needs_of) {
  const auto padded = [](size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  size_t needed = 0, bytes = 0, calls = 0;
  for (size_t k = 0; k < buckets_.size(); ++k) {
    Bucket& b = buckets_[k];
    const Needs needs = needs_of(b);
    const size_t sent = padded(needs.room.sent), received = padded(needs.room.received);
    const size_t all = sent + received + padded(needs.room.added);
    b.joins = k > 0 && b.reduction == buckets_[k - 1].reduction &&
              b.gathered == buckets_[k - 1].gathered && bytes + all <= most_bytes &&
              calls + needs.calls <= most_calls;
    if (!b.joins) bytes = calls = 0;
    b.at = {bytes, bytes + sent, bytes + sent + received};
    bytes += all;
    calls += needs.calls;
    needed = std::max(needed, bytes);
  }
  return needed;
}

}  // namespace ga
