// SPDX-License-Identifier: Apache-2.0
#include "executor.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "../host/fibres.hpp"
#include "races.hpp"

namespace ga::sim {
namespace {

constexpr unsigned kLanes = 32;
constexpr unsigned kMostThreads = 1024;
constexpr size_t kStack = size_t{256}
                          << 10;  // of a thread, with a page at its end that cannot be accessed

// ---- Mutants ---------------------------------------------------------------------------------------

// The calls of a synchronising function, by the address after the call in the module.
struct Sites {
  std::set<uintptr_t> left_out;  // [GA_EXECUTOR_LEAVE_OUT], a list of such addresses
  std::map<std::pair<uintptr_t, const char*>, int64_t> counts;  // written to [GA_EXECUTOR_SITES]

  Sites() {
    const char* list = std::getenv("GA_EXECUTOR_LEAVE_OUT");
    while (list && *list) {
      char* end;
      left_out.insert(std::strtoull(list, &end, 16));
      list = *end ? end + 1 : end;
    }
    if (std::getenv("GA_EXECUTOR_SITES")) std::atexit(write);
  }
  static void write();
};
Sites& sites() {
  static auto* const all = new Sites;
  return *all;
}

void Sites::write() {
  FILE* const file = std::fopen(std::getenv("GA_EXECUTOR_SITES"), "w");
  if (!file) return;
  for (const auto& [site, count] : sites().counts)
    std::fprintf(file, "%s 0x%zx %lld\n", site.second, static_cast<size_t>(site.first),
                 static_cast<long long>(count));
  std::fclose(file);
}

// Counts a call; returns true if a mutant leaves it out.
bool left_out(const char* kind, const void* code) {
  Sites& all = sites();
  const uintptr_t at = module_offset(code);
  ++all.counts[{at, kind}];
  return !all.left_out.empty() && all.left_out.count(at) != 0;
}

// ---- Threads ---------------------------------------------------------------------------------------

enum class Doing { kReady, kBarrier, kWarp, kDone };

struct Thread {
  Doing doing = Doing::kDone;
  bool voted = false;          // at a barrier
  const void* code = nullptr;  // where it waits
  unsigned mask = 0;           // of lanes, where it waits for those
};

// What the lanes of a mask do together.
struct Meeting {
  unsigned mask;
  bool votes;  // a ballot, otherwise a shuffle
  unsigned here = 0, left = 0;
  double given[kLanes] = {};
  unsigned ballot = 0;
};

struct Executor {
  Grid grid = {};
  const std::function<void()>* body = nullptr;
  unsigned block = 0;
  std::vector<Thread> threads;
  std::vector<std::vector<Meeting>> warps;
  bool vote = false;  // of the last barrier
  Fibres fibres{kMostThreads, kStack};
  std::mt19937_64 random;

  Executor() {
    set_stacks(fibres.stacks(), kStack, kMostThreads);
    const char* seed = std::getenv("GA_EXECUTOR_SEED");
    random.seed(seed ? std::strtoull(seed, nullptr, 10) : 1);
  }
};
Executor& executor() {
  static auto* const all = new Executor;
  return *all;
}

void pause() {
  Executor& e = executor();
  leave_thread();
  e.fibres.pause();
  enter_thread(e.fibres.current());
}

// Nobody can go on: says who waits for what.
[[noreturn]] void stuck(Executor& e) {
  unsigned counts[4] = {};
  const Thread* warp = nullptr;
  const Thread* barrier = nullptr;
  for (unsigned t = 0; t < e.grid.threads; ++t) {
    const Thread& thread = e.threads[t];
    ++counts[static_cast<int>(thread.doing)];
    if (thread.doing == Doing::kWarp) warp = &thread;
    if (thread.doing == Doing::kBarrier) barrier = &thread;
  }
  found_fatal(
      warp ? warp->code : barrier->code,
      "threads wait for ever: %u at a barrier, %u for the lanes of a mask, %u have returned",
      counts[1], counts[2], counts[3]);
}

void run_block(Executor& e, unsigned block) {
  e.block = block;
  begin_block(block);
  for (unsigned t = 0; t < e.grid.threads; ++t) e.threads[t].doing = Doing::kReady;
  e.warps.assign((e.grid.threads + kLanes - 1) / kLanes, {});
  std::vector<unsigned> ready;
  const std::function<void()> body = [&e] {
    enter_thread(e.fibres.current());
    (*e.body)();
    leave_thread();
    e.threads[e.fibres.current()].doing = Doing::kDone;
  };
  for (;;) {
    ready.clear();
    unsigned done = 0, waiting = 0;
    for (unsigned t = 0; t < e.grid.threads; ++t) {
      const Doing doing = e.threads[t].doing;
      if (doing == Doing::kReady) ready.push_back(t);
      done += doing == Doing::kDone;
      waiting += doing == Doing::kBarrier;
    }
    if (done == e.grid.threads) return;
    if (ready.empty()) {
      if (waiting < e.grid.threads) stuck(e);
      e.vote = false;
      for (unsigned t = 0; t < e.grid.threads; ++t) {
        e.vote = e.vote || e.threads[t].voted;
        e.threads[t].doing = Doing::kReady;
      }
      pass_barrier();
      continue;
    }
    std::shuffle(ready.begin(), ready.end(), e.random);
    for (const unsigned t : ready) {
      e.fibres.run(t, body);
    }
  }
}

// ---- Warps -----------------------------------------------------------------------------------------

// Waits until all lanes of the mask are here; give(meeting, lane) leaves what this one brings, and take(meeting)
// makes the result.
template <class Give, class Take>
auto meet(unsigned mask, bool votes, const void* code, Give give, Take take) {
  Executor& e = executor();
  const unsigned lane = e.fibres.current() % kLanes, bit = 1u << lane;
  if (!(mask & bit)) found(code, "lane %u is not in its mask %08x", lane, mask);
  mask |= bit;
  std::vector<Meeting>& warp = e.warps[e.fibres.current() / kLanes];
  const auto mine = [&]() -> Meeting& {
    for (Meeting& m : warp) {
      if (m.mask == mask && m.votes == votes && !(m.left & bit) &&
          (m.here == mask) == ((m.here & bit) != 0))
        return m;
    }
    warp.push_back({mask, votes});
    return warp.back();
  };
  Meeting& meeting = mine();
  meeting.here |= bit;
  give(meeting, lane);
  Thread& me = e.threads[e.fibres.current()];
  if (meeting.here != mask) {
    me.doing = Doing::kWarp;
    me.code = code;
    me.mask = mask;
    pause();
  } else {
    for (unsigned l = 0; l < kLanes; ++l) {
      if (mask >> l & 1) e.threads[e.fibres.current() / kLanes * kLanes + l].doing = Doing::kReady;
    }
  }
  Meeting& met = mine();
  const auto result = take(met);
  met.left |= bit;
  if (met.left == mask) warp.erase(warp.begin() + (&met - warp.data()));
  return result;
}

}  // namespace

// ---- What kernels call -------------------------------------------------------------------------------

Index thread_index() { return {executor().fibres.current()}; }
Index block_index() { return {executor().block}; }
Index block_size() { return {executor().grid.threads}; }
Index grid_size() { return {executor().grid.blocks}; }

bool barrier(bool any) {
  const void* const code = __builtin_return_address(0);
  if (left_out("barrier", code)) return any;
  Executor& e = executor();
  Thread& me = e.threads[e.fibres.current()];
  me.doing = Doing::kBarrier;
  me.voted = any;
  me.code = code;
  pause();
  return e.vote;
}

void fence(bool system) {
  if (!left_out("fence", __builtin_return_address(0))) pass_fence(system);
}

double shuffle_xor(unsigned mask, double x, int lanes) {
  const void* const code = __builtin_return_address(0);
  const unsigned lane = executor().fibres.current() % kLanes,
                 from = lane ^ static_cast<unsigned>(lanes);
  if (left_out("mask", code)) mask = 1u << lane;
  if (from >= kLanes || !(mask >> from & 1))
    found(code, "lane %u reads from lane %u, which is not in its mask %08x", lane, from, mask);
  return meet(
      mask, false, code, [&](Meeting& m, unsigned l) { m.given[l] = x; },
      [&](Meeting& m) { return m.given[from % kLanes]; });
}

unsigned ballot(unsigned mask, bool x) {
  const void* const code = __builtin_return_address(0);
  if (left_out("mask", code)) mask = 1u << (executor().fibres.current() % kLanes);
  return meet(
      mask, true, code, [&](Meeting& m, unsigned l) { m.ballot |= x ? 1u << l : 0; },
      [&](Meeting& m) { return m.ballot; });
}

unsigned atomic_inc(unsigned* at, unsigned most) {
  pass_atomic(at, __builtin_return_address(0));
  const unsigned before = *at;
  *at = before >= most ? 0 : before + 1;
  return before;
}

bool is_global(const void* p) { return space_of(p) == Space::kGlobal; }

void assume(bool condition) {
  if (!condition) found(__builtin_return_address(0), "what the compiler may assume is not true");
}

void store_vector(void* to, const void* from, size_t size) {
  const void* const code = __builtin_return_address(0);
  if (reinterpret_cast<uintptr_t>(to) % size != 0)
    found(code, "a store of %zu bytes is not aligned", size);
  note_access(to, size, true, code);
  std::memcpy(to, from, size);
}

void execute(const Grid& grid, const std::function<void()>& thread) {
  Executor& e = executor();
  if (grid.threads == 0 || grid.threads > kMostThreads) std::abort();
  e.grid = grid;
  e.body = &thread;
  e.threads.resize(kMostThreads);
  begin_grid(grid);
  std::vector<unsigned> order(grid.blocks);
  for (unsigned b = 0; b < grid.blocks; ++b) order[b] = b;
  std::shuffle(order.begin(), order.end(), e.random);
  for (const unsigned b : order) run_block(e, b);
}

}  // namespace ga::sim
