// SPDX-License-Identifier: Apache-2.0
//
// What the executor finds, and what it must not take for an error. Compiled as the kernels are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/cuda/block.hpp"
#include "simulator.hpp"

namespace ga::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffu;

class Executor : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("GA_EXECUTOR_HALT", "1", 1);
    sim::reset();
  }
  void TearDown() override { sim::reset(); }

  template <class Kernel>
  static void run(const Kernel& kernel, int64_t blocks = 1) {
    launch(kernel, blocks, nullptr);
    sim::finish();
  }

  template <class T>
  static T* device(size_t n) {
    void* p = nullptr;
    EXPECT_EQ(cudaMalloc(&p, n * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemset(p, 0, n * sizeof(T)), cudaSuccess);
    return static_cast<T*>(p);
  }
};

#define EXPECT_FOUND(statement, text) EXPECT_EXIT(statement, ::testing::ExitedWithCode(66), text)

// Each thread reads what its neighbour has written.
struct Neighbours {
  int* numbers;
  bool waits;

  GA_DEVICE void operator()(Block&) const {
    const unsigned thread = threadIdx.x;
    numbers[thread] = 1;
    if (waits) __syncthreads();
    numbers[kThreads + thread] = numbers[(thread + 1) % kThreads];
  }
};

TEST_F(Executor, ABarrierOrdersABlock) {
  int* const numbers = device<int>(2 * kThreads);
  run(Neighbours{numbers, true});
  EXPECT_FOUND(run(Neighbours{numbers, false}), "data race: a (read|write) of 4 bytes of global");
}

// The last block reads what all threads of the others have written. counters: one, or one for each block.
struct Message {
  int* numbers;
  unsigned* counters;
  bool release, waits, acquire, one;

  GA_DEVICE void operator()(Block& block) const {
    __shared__ bool last;
    const unsigned thread = threadIdx.x, blocks = gridDim.x;
    numbers[blockIdx.x * kThreads + thread] = 1;
    if (release) __threadfence();
    if (waits) __syncthreads();
    if (thread == 0) {
      const unsigned before = atomicInc(counters + (one ? 0 : blockIdx.x), blocks - 1);
      last = one ? before == blocks - 1 : block.index() == 0;
    }
    __syncthreads();
    if (acquire) __threadfence();
    if (!last) return;
    int sum = 0;
    for (unsigned b = 0; b < blocks; ++b) sum += numbers[b * kThreads + thread];
    numbers[blocks * kThreads + thread] = sum;
  }
};

TEST_F(Executor, FencesAndAnAtomicOperationOrderBlocks) {
  int* const numbers = device<int>(4 * kThreads);
  unsigned* const counters = device<unsigned>(3);
  run(Message{numbers, counters, true, true, true, true}, 3);
  EXPECT_FOUND(run(Message{numbers, counters, false, true, true, true}, 3), "data race");
  EXPECT_FOUND(run(Message{numbers, counters, true, false, true, true}, 3), "data race");
  EXPECT_FOUND(run(Message{numbers, counters, true, true, false, true}, 3), "data race");
  // Atomic operations on other addresses order nothing.
  EXPECT_FOUND(run(Message{numbers, counters, true, true, true, false}, 3), "data race");
}

// A fence tells nothing of what comes after it.
struct Late {
  int* numbers;
  unsigned* counter;
  bool late;

  GA_DEVICE void operator()(Block& block) const {
    if (threadIdx.x != 0) return;
    if (!late) numbers[block.index()] = 1;
    __threadfence();
    if (late) numbers[block.index()] = 1;
    const bool last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
    if (last) numbers[2] = numbers[0] + numbers[1];
  }
};

TEST_F(Executor, AFenceTellsWhatIsBeforeIt) {
  int* const numbers = device<int>(3);
  unsigned* const counter = device<unsigned>(1);
  run(Late{numbers, counter, false}, 2);
  EXPECT_FOUND(run(Late{numbers, counter, true}, 2), "data race");
}

struct Flag {
  int* flag;
  bool same;

  GA_DEVICE void operator()(Block&) const { *flag = same ? 1 : static_cast<int>(threadIdx.x); }
};

TEST_F(Executor, StoresOfTheSameValueAreNoRace) {
  int* const flag = device<int>(1);
  run(Flag{flag, true}, 2);
  EXPECT_FOUND(run(Flag{flag, false}), "data race: a write .* after a write of another value");
}

// Bytes of a word.
struct Bytes {
  unsigned char* bytes;
  unsigned distance;

  GA_DEVICE void operator()(Block&) const {
    bytes[threadIdx.x / distance] = static_cast<unsigned char>(threadIdx.x);
  }
};

TEST_F(Executor, BytesAreApart) {
  auto* const bytes = device<unsigned char>(kThreads);
  run(Bytes{bytes, 1});
  EXPECT_FOUND(run(Bytes{bytes, 2}), "data race");
}

struct Unwritten {
  int* number;

  GA_DEVICE void operator()(Block& block) const {
    __shared__ int x[2];
    if (block.index() == 0) x[0] = x[1] = 1;
    if (threadIdx.x == 0) *number = x[0];
  }
};

TEST_F(Executor, SharedMemoryIsOfABlock) {
  int* const number = device<int>(1);
  EXPECT_FOUND(run(Unwritten{number}, 2), "a read of shared memory that its block has not written");
}

struct Lanes {
  double* sums;
  unsigned mask;

  GA_DEVICE void operator()(Block&) const {
    sums[threadIdx.x] = __shfl_xor_sync(mask, static_cast<double>(threadIdx.x), 1);
  }
};

TEST_F(Executor, MasksNameTheLanes) {
  auto* const sums = device<double>(kThreads);
  run(Lanes{sums, kAll});
  std::vector<double> got(kThreads);
  sim::peek(got.data(), sums, kThreads * sizeof(double));
  for (int t = 0; t < kThreads; ++t) EXPECT_EQ(got[static_cast<size_t>(t)], t ^ 1);
  EXPECT_FOUND(run(Lanes{sums, kAll >> 1}), "is not in its mask 7fffffff");
}

struct Some {
  int threads;
  bool votes;

  GA_DEVICE void operator()(Block&) const {
    if (static_cast<int>(threadIdx.x) >= threads) return;
    if (votes)
      __ballot_sync(kAll, 1);
    else
      __syncthreads();
  }
};

// Sums, least and first numbers of x by teams of both sizes.
struct Teams {
  const double* x;
  const int64_t* n;
  int64_t items;
  double* found;  // three of each item

  template <class Team>
  GA_DEVICE void take(int64_t i, const Team& team, double* to) const {
    const double sum = team.sum(n[i], [&](int64_t j) { return x[j]; });
    const double least = team.smallest(n[i], [&](int64_t j) { return x[j]; });
    const int64_t first = team.first(n[i], [&](int64_t j) { return x[j] < 0; });
    if (!team.leader()) return;
    to[3 * i] = sum;
    to[3 * i + 1] = least;
    to[3 * i + 2] = static_cast<double>(first);
  }
  GA_DEVICE void operator()(Block& block) const {
    block.each_warp(items, [&](int64_t i, const Warp& warp) { take(i, warp, found); });
    block.each_lane_group(items, [&](int64_t i, const LaneGroup& lane_group) {
      take(i, lane_group, found + 3 * items);
    });
  }
};

TEST_F(Executor, TeamsAddInOneOrder) {
  std::vector<double> x(500);
  for (size_t j = 0; j < x.size(); ++j) x[j] = std::exp(static_cast<double>(j * 7919 % 500) / 20);
  x[301] = -1;
  x[302] = -2;
  std::vector<int64_t> n;
  for (int64_t i = 0; i < 77; ++i) n.push_back(i < 70 ? i : 83 * (i - 70));
  const auto items = static_cast<int64_t>(n.size());
  auto* const numbers = device<double>(x.size());
  auto* const counts = device<int64_t>(n.size());
  auto* const found = device<double>(6 * n.size());
  sim::poke(numbers, x.data(), x.size() * sizeof(double));
  sim::poke(counts, n.data(), n.size() * sizeof(int64_t));
  run(Teams{numbers, counts, items, found});
  std::vector<double> got(6 * n.size());
  sim::peek(got.data(), found, got.size() * sizeof(double));
  for (size_t i = 0; i < n.size(); ++i) {
    SCOPED_TRACE(n[i]);
    double sums[32] = {}, least = HUGE_VAL;
    int64_t first = -1;
    for (int64_t j = 0; j < n[i]; ++j) {
      const double value = x[static_cast<size_t>(j)];
      sums[j % 32] += value;
      least = std::min(least, value);
      if (first < 0 && value < 0) first = j;
    }
    for (int distance = 16; distance > 0; distance /= 2)
      for (int l = 0; l < distance; ++l) sums[l] += sums[l + distance];
    for (const size_t team : {size_t{0}, n.size()}) {
      EXPECT_EQ(got[3 * (team + i)], sums[0]);
      EXPECT_EQ(got[3 * (team + i) + 1], least);
      EXPECT_EQ(got[3 * (team + i) + 2], static_cast<double>(first));
    }
  }
}

TEST_F(Executor, AllThreadsMustCome) {
  run(Some{kThreads, false});
  run(Some{kThreads - 32, true});
  EXPECT_FOUND(run(Some{100, false}), "wait for ever: 100 at a barrier, .* 156 have returned");
  EXPECT_FOUND(run(Some{100, true}), "wait for ever: .* 4 for the lanes of a mask");
}

}  // namespace
}  // namespace ga::cuda
