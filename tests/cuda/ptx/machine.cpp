// SPDX-License-Identifier: Apache-2.0
// Runs the blocks of a grid, one after the other. Of the lanes of a warp those run together that have the lowest
// address of all that can run: they meet again behind a branch, and in a function before they return.
#include <algorithm>
#include <bit>
#include <cstring>

#include "ptx.hpp"

namespace ga::ptx {
namespace {

constexpr uint32_t kNever = ~uint32_t{0};

enum class State : uint8_t { kRuns, kAtBarrier, kAtWarp, kEnded };

struct Running : Warp {
  uint32_t next[kLanes] = {};  // the address of each lane's instruction
  State state[kLanes] = {};
};

// Memory that the next grid has again.
class Pool {
 public:
  char* take(size_t size) {
    if (size > size_) {
      ::operator delete[](memory_, kAlignment);
      memory_ = nullptr;
      size_ = 0;
      memory_ = static_cast<char*>(::operator new[](size, kAlignment));
      size_ = size;
    }
    return memory_;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  char* memory_ = nullptr;
  size_t size_ = 0;
};
Pool register_pool, lane_pool, shared_pool;

class Grid {
 public:
  Grid(const Kernel& kernel, unsigned blocks) : kernel_(kernel), blocks_(blocks) {
    const size_t warps = (kernel.threads + kLanes - 1) / kLanes;
    const size_t registers = size_t{kernel.registers} * kLanes;
    lane_bytes_ = (kernel.lane_bytes + 63) / 64 * 64;
    auto* const all_registers =
        reinterpret_cast<uint64_t*>(register_pool.take(warps * registers * sizeof(uint64_t)));
    char* const all_lanes = lane_pool.take(warps * kLanes * lane_bytes_);
    shared_at_ = shared_pool.take(kernel.shared_bytes + 1);
    warps_.resize(warps);
    for (unsigned w = 0; w < warps; ++w) {
      Running& warp = warps_[w];
      warp.kernel = &kernel;
      warp.index = w;
      warp.registers = all_registers + w * registers;
      warp.shared = shared_at_;
      for (int l = 0; l < kLanes; ++l)
        warp.memory[l] = all_lanes + (w * kLanes + static_cast<size_t>(l)) * lane_bytes_;
      for (const auto& [reg, bits] : kernel.constants) std::fill_n(warp.lanes(reg), kLanes, bits);
    }
  }

  void run(unsigned block) {
    std::memset(shared_at_, 0xcd, kernel_.shared_bytes);
    for (Running& warp : warps_) start(warp, block);
    for (;;) {
      for (Running& warp : warps_) advance(warp);
      if (!pass_barrier()) return;
    }
  }

 private:
  void start(Running& warp, unsigned block) {
    for (unsigned l = 0; l < kLanes; ++l) {
      const unsigned thread = warp.index * kLanes + l;
      warp.next[l] = kernel_.entry;
      warp.state[l] = thread < kernel_.threads ? State::kRuns : State::kEnded;
      for (const auto& [reg, what] : kernel_.specials) {
        warp.lanes(reg)[l] = what == Special::kThread    ? thread
                             : what == Special::kBlock   ? block
                             : what == Special::kThreads ? kernel_.threads
                             : what == Special::kBlocks  ? blocks_
                                                         : l;
      }
    }
  }

  // Until all lanes wait at a barrier or have ended.
  void advance(Running& warp) {
    for (;;) {
      uint32_t first = kNever, second = kNever, lanes = 0;
      for (int l = 0; l < kLanes; ++l) {
        if (warp.state[l] != State::kRuns) continue;
        const uint32_t next = warp.next[l];
        if (next < first) {
          second = first;
          first = next;
          lanes = uint32_t{1} << l;
        } else if (next == first) {
          lanes |= uint32_t{1} << l;
        } else {
          second = std::min(second, next);
        }
      }
      if (lanes != 0) {
        go(warp, lanes, first, second);
      } else if (!meet(warp)) {
        return;
      }
    }
  }

  // Runs these lanes until they part, wait, or come to where another lane is.
  void go(Running& warp, uint32_t lanes, uint32_t at, uint32_t until) {
    const auto leave = [&](uint32_t some, uint32_t next, State state) {
      for (; some != 0; some &= some - 1) {
        warp.next[std::countr_zero(some)] = next;
        warp.state[std::countr_zero(some)] = state;
      }
    };
    while (at < until) {
      const Instruction& i = kernel_.code[at];
      uint32_t those = lanes;
      if (i.guard != 0) {
        const uint64_t* guard = warp.lanes(i.guard);
        uint32_t set = 0;
        for (int l = 0; l < kLanes; ++l) set |= static_cast<uint32_t>(guard[l] & 1) << l;
        those &= i.negated ? ~set : set;
      }
      switch (i.kind) {
        case Kind::kPlain:
          if (those != 0) i.run(warp, i, those);
          ++at;
          continue;
        case Kind::kBranch:
          if (those == lanes) {
            at = i.target;
            // A loop may go below lanes that have not come so far.
            continue;
          }
          if (those == 0) {
            ++at;
            continue;
          }
          leave(those, i.target, State::kRuns);
          leave(lanes & ~those, at + 1, State::kRuns);
          return;
        case Kind::kCall:
          for (uint32_t some = lanes; some != 0; some &= some - 1)
            warp.lanes(i.to[0])[std::countr_zero(some)] = at + 1;
          at = i.target;
          continue;
        case Kind::kReturn:
          leave(lanes & ~those, at + 1, State::kRuns);
          for (; those != 0; those &= those - 1) {
            const int l = std::countr_zero(those);
            warp.next[l] = i.from[0] == 0 ? 0 : static_cast<uint32_t>(warp.lanes(i.from[0])[l]);
            warp.state[l] = i.from[0] == 0 ? State::kEnded : State::kRuns;
          }
          return;
        case Kind::kBarrier:
        case Kind::kWarp:
          leave(lanes & ~those, at + 1, State::kRuns);
          leave(those, at, i.kind == Kind::kBarrier ? State::kAtBarrier : State::kAtWarp);
          return;
      }
    }
    leave(lanes, at, State::kRuns);
  }

  // Runs a warp operation for the lanes of a mask that have all come to it.
  bool meet(Running& warp) {
    bool any = false;
    for (int l = 0; l < kLanes; ++l) {
      if (warp.state[l] != State::kAtWarp) continue;
      any = true;
      const Instruction& i = kernel_.code[warp.next[l]];
      const auto mask = static_cast<uint32_t>(warp.lanes(i.from[4])[l]);
      bool all = (mask >> l & 1) != 0;
      for (uint32_t some = mask; some != 0; some &= some - 1) {
        const int other = std::countr_zero(some);
        all = all && warp.state[other] == State::kAtWarp && warp.next[other] == warp.next[l] &&
              static_cast<uint32_t>(warp.lanes(i.from[4])[other]) == mask;
      }
      if (!all) continue;
      if (i.run) i.run(warp, i, mask);
      for (uint32_t some = mask; some != 0; some &= some - 1) {
        ++warp.next[std::countr_zero(some)];
        warp.state[std::countr_zero(some)] = State::kRuns;
      }
      return true;
    }
    if (any) {
      for (int l = 0; l < kLanes; ++l)
        if (warp.state[l] == State::kAtWarp)
          warp.fail(kernel_.code[warp.next[l]], l, "waits for lanes that do not come");
    }
    return false;
  }

  // False if the block has ended.
  bool pass_barrier() {
    bool any = false, ended = false, result = false;
    const Instruction* one = nullptr;
    for (Running& warp : warps_) {
      for (unsigned l = 0; l < kLanes; ++l) {
        if (warp.index * kLanes + l >= kernel_.threads) continue;
        if (warp.state[l] == State::kEnded) {
          ended = true;
          continue;
        }
        const Instruction& i = kernel_.code[warp.next[l]];
        if (any && (one->to[0] == 0) != (i.to[0] == 0))
          warp.fail(i, static_cast<int>(l), "waits at a barrier of another kind");
        any = true;
        one = &i;
        if (i.to[0] != 0) result = result || warp.lanes(i.from[0])[l] != 0;
      }
    }
    if (any && ended)
      throw Error(kernel_.name + ": some threads have ended, others wait at a barrier");
    for (Running& warp : warps_) {
      for (int l = 0; l < kLanes; ++l) {
        if (warp.state[l] != State::kAtBarrier) continue;
        const Instruction& i = kernel_.code[warp.next[l]++];
        if (i.to[0] != 0) warp.lanes(i.to[0])[l] = result;
        warp.state[l] = State::kRuns;
      }
    }
    return any;
  }

  const Kernel& kernel_;
  unsigned blocks_;
  size_t lane_bytes_;
  char* shared_at_;
  std::vector<Running> warps_;
};

}  // namespace

void Warp::fail(const Instruction& i, int lane, const std::string& what) const {
  const char* end = i.text;
  while (*end != ';' && *end != 0) ++end;
  throw Error(kernel->name + ": thread " + std::to_string(static_cast<int>(index) * kLanes + lane) +
              " " + what + ": " + std::string(i.text, end));
}

void run(const Kernel& kernel, unsigned blocks) {
  Grid grid(kernel, blocks);
  for (unsigned block = 0; block < blocks; ++block) grid.run(block);
}

}  // namespace ga::ptx
