// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process. In a collective call every rank shows its buffers, waits until
// all have, copies what it is to receive, and waits until all have copied.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/os/system.hpp"
#include "core/tensor.hpp"
#include "ranks/comm/comm.hpp"

namespace ga {
namespace {

using Id = std::array<unsigned char, GA_COMM_ID_SIZE>;
using Clock = std::chrono::steady_clock;

enum class Call { kAllToAll, kAllGather, kBroadcast };
enum Failure : int32_t { kNone, kLate, kLeft, kAborted, kDifferent, kFailedBefore };

// What a rank shows to the others during a call.
struct Shown {
  Call call;
  const void* send;
  int64_t stride, count;
  int32_t dtype, root;

  bool matches(const Shown& s) const {
    return call == s.call && stride == s.stride && count == s.count && dtype == s.dtype &&
           root == s.root;
  }
};

class Group {
 public:
  explicit Group(int32_t ranks) : members_(static_cast<size_t>(ranks)) {}

  int32_t ranks() const { return static_cast<int32_t>(members_.size()); }

  void join(int32_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Member& m = members_[static_cast<size_t>(rank)];
    if (m.joined)
      fail(GA_ERROR_INVALID_ARGUMENT, "rank %d has joined this communicator already", rank);
    m.joined = true;
  }

  void leave(int32_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    members_[static_cast<size_t>(rank)].left = true;
    changed_.notify_all();
  }

  void attend(int32_t rank, bool comes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Member& m = members_[static_cast<size_t>(rank)];
    m.attends = comes;
    m.contexts += comes;
    changed_.notify_all();
  }

  void abort(int32_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    end(kAborted, "ga_comm_abort was called on rank " + std::to_string(rank));
  }

  // Makes a call as that rank; copy(shown by all ranks) runs while all buffers stay in place.
  template <class Copy>
  int32_t run(int32_t rank, const Shown& shown, double timeout, Copy&& copy) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (failure_ != kNone) return kFailedBefore;
    Member& me = members_[static_cast<size_t>(rank)];
    me.shown = shown;
    const int64_t call = ++me.arrived;
    changed_.notify_all();
    const auto deadline = Clock::now() + limit(timeout);
    int32_t failure = wait(lock, deadline, timeout, rank, call, &Member::arrived);
    if (failure == kNone) failure = failure_;  // a rank that found it has gone, with what it showed
    if (failure != kNone) {
      changed_.wait(lock, [&] { return copying_ == 0; });
      return failure;
    }
    for (const Member& m : members_)
      if (!m.shown.matches(shown)) {
        end(kDifferent, "ranks exchange different things: they call in different orders");
        return kDifferent;
      }
    ++copying_;
    lock.unlock();
    copy(members_);
    lock.lock();
    --copying_;
    me.done = call;
    changed_.notify_all();
    failure = wait(lock, deadline, timeout, rank, call, &Member::done);
    // Another rank may still read what this one shows.
    changed_.wait(lock, [&] { return copying_ == 0 || failure == kNone; });
    return failure;
  }

  std::string reason() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reason_;
  }

  struct Member {
    bool joined = false, left = false;
    bool attends = false;           // its newest context makes calls
    int64_t contexts = 0;           // that have come so far
    int64_t arrived = 0, done = 0;  // number of the last call in which it has come so far
    Shown shown = {};
  };

 private:
  static Clock::duration limit(double seconds) {
    constexpr double kMost = 1e8;  // three years, for steady_clock::time_point has an end
    return std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(std::min(seconds, kMost)));
  }

  void end(Failure failure, std::string reason) {
    if (failure_ == kNone) {
      failure_ = failure;
      reason_ = std::move(reason);
    }
    changed_.notify_all();
  }

  // Waits until every rank has come as far as this call.
  int32_t wait(std::unique_lock<std::mutex>& lock, Clock::time_point deadline, double timeout,
               int32_t rank, int64_t call, int64_t Member::*stage) {
    const auto behind = [&](const Member& m) { return m.*stage < call; };
    const int64_t contexts = members_[static_cast<size_t>(rank)].contexts;
    // Whether the context is gone that was to make the call. A rank that has had fewer may still bring it.
    const auto gone = [&](const Member& m) {
      return m.contexts > contexts || (m.contexts == contexts && !m.attends);
    };
    for (;;) {
      std::string missing, left;
      bool destroyed = true;
      for (size_t q = 0; q < members_.size(); ++q) {
        const Member& m = members_[q];
        if (!behind(m)) continue;
        missing += (missing.empty() ? "" : ", ") + std::to_string(q);
        if (!m.left && !gone(m)) continue;
        left += (left.empty() ? "" : ", ") + std::to_string(q);
        destroyed = destroyed && m.left;
      }
      if (missing.empty()) return kNone;
      if (failure_ != kNone) return failure_;
      if (!left.empty()) {
        end(kLeft, "rank " + left + " has left: its " +
                       (destroyed ? "ga_comm and its context were destroyed"
                                  : "context was destroyed or given another communicator"));
        return kLeft;
      }
      if (changed_.wait_until(lock, deadline) != std::cv_status::timeout) continue;
      if (std::none_of(members_.begin(), members_.end(), behind)) return kNone;
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, "%g", timeout);
      end(kLate, "rank " + std::to_string(rank) + " waited " + seconds + " s for rank " + missing);
      return kLate;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Member> members_;
  int copying_ = 0;
  Failure failure_ = kNone;
  std::string reason_;
};

// The groups of this process, by id. A group lives as long as some rank is in it.
struct Groups {
  std::mutex mutex;
  std::map<Id, std::weak_ptr<Group>> by_id;
  uint64_t made = 0;
};
Groups& groups() {
  static Groups* const all = new Groups;  // never freed: threads may outlive static objects
  return *all;
}

// A rank's end.
struct End {
  std::shared_ptr<Group> group;
  int32_t rank;
  double timeout;
  std::string text;
};

size_t bytes_of(int64_t count, int32_t dtype) {
  return static_cast<size_t>(count) * static_cast<size_t>(dtype_info(dtype).size);
}

void move_block(void* to, const void* from, size_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

template <class Copy>
int32_t run(void* user, const Shown& shown, Copy&& copy) {
  End& end = *static_cast<End*>(user);
  return end.group->run(
      end.rank, shown, end.timeout, [&](const std::vector<Group::Member>& members) {
        for (size_t q = 0; q < members.size(); ++q)
          copy(q, static_cast<const char*>(members[q].shown.send), static_cast<size_t>(end.rank));
      });
}

int32_t all_to_all(void* user, const void* send, int64_t stride, void* recv, int64_t count,
                   int32_t dtype, void*) {
  const size_t block = bytes_of(count, dtype), step = bytes_of(stride, dtype);
  return run(user, {Call::kAllToAll, send, stride, count, dtype, 0},
             [&](size_t q, const char* theirs, size_t rank) {
               move_block(static_cast<char*>(recv) + q * block, theirs + rank * step, block);
             });
}

int32_t all_gather(void* user, const void* send, void* recv, int64_t stride, int64_t count,
                   int32_t dtype, void*) {
  const size_t block = bytes_of(count, dtype), step = bytes_of(stride, dtype);
  return run(user, {Call::kAllGather, send, stride, count, dtype, 0},
             [&](size_t q, const char* theirs, size_t) {
               move_block(static_cast<char*>(recv) + q * step, theirs, block);
             });
}

int32_t broadcast(void* user, void* data, int64_t count, int32_t dtype, int32_t root, void*) {
  return run(user, {Call::kBroadcast, data, count, count, dtype, root},
             [&](size_t q, const char* theirs, size_t) {
               if (static_cast<int32_t>(q) == root)
                 move_block(data, theirs, bytes_of(count, dtype));
             });
}

void abort(void* user) {
  End& end = *static_cast<End*>(user);
  end.group->abort(end.rank);
}

const char* error_text(void* user, int32_t) {
  End& end = *static_cast<End*>(user);
  end.text = end.group->reason();
  return end.text.c_str();
}

}  // namespace

void make_local_id(void* out) {
  Id id = {};
  Groups& all = groups();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const uint64_t words[] = {++all.made, static_cast<uint64_t>(os::process_id())};
  std::memcpy(id.data(), words, sizeof words);
  std::memcpy(out, id.data(), id.size());
}

Transport join_local(const ga_comm_config& config) {
  Id id;
  std::memcpy(id.data(), config.id, id.size());
  std::shared_ptr<Group> group;
  {
    Groups& all = groups();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (auto at = all.by_id.begin(); at != all.by_id.end();)
      at = at->second.expired() ? all.by_id.erase(at) : std::next(at);
    std::weak_ptr<Group>& known = all.by_id[id];
    group = known.lock();
    if (!group) known = group = std::make_shared<Group>(config.ranks);
  }
  if (group->ranks() != config.ranks)
    fail(GA_ERROR_INVALID_ARGUMENT, "ranks was %d, but other ranks of this communicator said %d",
         config.ranks, group->ranks());
  group->join(config.rank);
  auto* const end = new End{std::move(group), config.rank, config.timeout, {}};
  ga_comm_table table = {sizeof table, end,     all_to_all, all_gather, broadcast, abort,
                         error_text,   nullptr, nullptr,    1,          0};
  Transport transport = {table,
                         config.rank,
                         config.ranks,
                         [end] {
                           end->group->leave(end->rank);
                           delete end;
                         },
                         false,
                         false};
  transport.attend = [end](bool comes) { end->group->attend(end->rank, comes); };
  return transport;
}

}  // namespace ga
