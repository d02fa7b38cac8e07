// SPDX-License-Identifier: Apache-2.0
// What the kernels over elements have in common: tasks in the arguments of a launch, chunks, and
// sums of squares in the order that the CPU takes them in.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backend/cuda/formats.hpp"
#include "backend/cuda/kernels.hpp"

namespace ga::cuda {

// ---- Chunks -------------------------------------------------------------------------------------

constexpr int kTile = 1024;
constexpr int kTiles = static_cast<int>(kChunk / kTile);  // of a chunk
constexpr int kOctets = kThreads / 8;

inline int64_t blocks_for(const Queue& queue, int64_t items) {
  return smaller(items, queue.blocks);
}

// Elements of a chunk.
GA_HD int chunk_length(int64_t count, int64_t chunk) {
  return static_cast<int>(smaller(kChunk, count - chunk * kChunk));
}

// Tasks of a launch, as its arguments, and how many chunks come before each.
template <class Task, int kMost>
struct Tasks {
  int64_t count;
  int64_t before[kMost + 1];
  Task tasks[kMost];

  GA_DEVICE int64_t chunks() const { return before[count]; }
  GA_DEVICE int64_t task_of(int64_t chunk) const {
    int64_t low = 0, high = count;  // before[low] <= chunk < before[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (before[middle] <= chunk ? low : high) = middle;
    }
    return low;
  }
};

// The most tasks that fit the arguments of a launch beside their counts.
template <class Task>
constexpr int most_tasks = static_cast<int>((kMostArguments - 64) /
                                            (sizeof(Task) + sizeof(int64_t)));

// Launches of Kernel<kMost>, whose list is its Tasks, over all tasks: few of them do not carry the
// arguments of many.
template <template <int> class Kernel, class Task, int kMost>
void launch_some(const Queue& queue, const Task* tasks, size_t count) {
  Kernel<kMost> kernel;  // only what is used of it is written
  auto& list = kernel.list;
  list.count = 0;
  int64_t chunks = 0;
  for (size_t t = 0; t < count; ++t) {
    if (tasks[t].count == 0) continue;
    list.before[list.count] = chunks;
    list.tasks[list.count++] = tasks[t];
    chunks += chunk_count(tasks[t].count);
  }
  list.before[list.count] = chunks;
  launch(kernel, blocks_for(queue, chunks), queue.stream);
}

template <template <int> class Kernel, class Task>
void launch_tasks(const Queue& queue, Span<const Task> tasks) {
  constexpr size_t kMost = most_tasks<Task>, kFew = 8;
  for (size_t first = 0; first < tasks.size; first += kMost) {
    const size_t count = tasks.size - first < kMost ? tasks.size - first : kMost;
    if (count <= kFew)
      launch_some<Kernel, Task, kFew>(queue, tasks.data + first, count);
    else
      launch_some<Kernel, Task, kMost>(queue, tasks.data + first, count);
  }
}

// ---- Sums of squares ----------------------------------------------------------------------------

// A thread's share of a tile: its four lanes, and whether all it has seen is finite.
template <class T>
struct Squares {
  Quad quad;
  bool finite;

  GA_DEVICE void clear() {
    for (double& lane : quad.lane) lane = 0;
    finite = true;
  }

  GA_DEVICE void add(int lane, T value) {
    const double x = static_cast<double>(value);
    if constexpr (std::is_same_v<T, float>) {
      // The square is exact: fused or not, this rounds once. The squares of finite floats cannot
      // overflow a double either: their sum tells whether they are finite.
#ifdef __CUDACC__
      quad.lane[lane] = __fma_rn(x, x, quad.lane[lane]);
#else
      quad.lane[lane] += x * x;
#endif
    } else {
      quad.lane[lane] += x * x;
      finite = finite && x * 0.0 == 0;
    }
  }

  GA_DEVICE void add(const Four<T>& four, int count) {
    for (int l = 0; l < 4; ++l) {
      if (l < count) add(l, four.x[l]);
    }
  }
};

// The same of several sums.
template <class T, int kSums>
struct SquaresOf {
  Squares<T> of[kSums];

  GA_DEVICE void clear() {
    for (Squares<T>& s : of) s.clear();
  }
};

// Of the block; totals of tiles. Shared.
template <int kSums>
struct ChunkTotals {
  double totals[kSums][kTiles];
  int nonfinite;  // of the first sum, where that is of doubles
};

// f(i, count) for thread q of an octet over its elements of a tile of n.
template <class F>
GA_DEVICE void each_step(int n, int q, F f) {
  const int whole = n / kLanes * kLanes;
  GA_ROLLED
  for (int i = 4 * q; i < whole; i += kLanes) f(i, 4);
  const int rest = n - whole - 4 * q;
  if (rest > 0) f(whole + 4 * q, rest < 4 ? rest : 4);
}

// The same with what load(i, count) gives, several steps ahead: use(i, count, loaded).
constexpr int kStepsAhead = 2;
template <int kAhead, class Load, class Use>
GA_DEVICE void each_step_ahead(int n, int q, Load load, Use use) {
  const int whole = n / kLanes * kLanes;
  int i = 4 * q;
  GA_ROLLED
  for (; i + (kAhead - 1) * kLanes < whole; i += kAhead * kLanes) {
    decltype(load(0, 4)) loaded[kAhead];
    for (int k = 0; k < kAhead; ++k) loaded[k] = load(i + k * kLanes, 4);
    for (int k = 0; k < kAhead; ++k) use(i + k * kLanes, 4, loaded[k]);
  }
  GA_ROLLED
  for (; i < n; i += kLanes) {  // the last step alone may be a part
    const int count = n - i < 4 ? n - i : 4;
    use(i, count, load(i, count));
  }
}

// Tiles of a chunk of `count` elements: body(first, n, q) for thread q of the octet that has the n
// elements from `first` on, in steps as above; it returns their SquaresOf<T, kSums>. Ends with a
// barrier.
template <class T, int kSums, class Body>
GA_DEVICE void sum_tiles(Block& block, int count, ChunkTotals<kSums>& sums, Body body) {
  if constexpr (std::is_same_v<T, double>) block.once([&] { sums.nonfinite = 0; });
  GA_ROLLED
  for (int round = 0; round * kTile < count; round += kOctets) {
    PerThread<Quad> lanes[kSums];
    block.each([&](int thread) {
      SquaresOf<T, kSums> squares;
      squares.clear();
      const int first = (round + thread / 8) * kTile;
      const int left = count - first;
      if (left > 0) squares = body(first, left < kTile ? left : kTile, thread % 8);
      for (int k = 0; k < kSums; ++k) lanes[k][thread] = squares.of[k].quad;
      if (std::is_same_v<T, double> && !squares.of[0].finite) sums.nonfinite = 1;
    });
    for (int k = 0; k < kSums; ++k) block.octet_totals(lanes[k], sums.totals[k] + round);
  }
}

// f(total) in one thread, with total(k) the sum k of the chunk, after sum_tiles. Ends with a
// barrier.
template <class T, int kSums, class F>
GA_DEVICE void take_totals(Block& block, int count, const ChunkTotals<kSums>& sums, F f) {
  const int tiles = (count + kTile - 1) / kTile;
  block.each_warp(1, [&](int64_t, const Warp& warp) {
    double total[kSums];
    for (int k = 0; k < kSums; ++k)
      total[k] = warp.sum(tiles, [&](int64_t t) { return sums.totals[k][t]; });
    if (!warp.leader()) return;
    const bool finite = std::is_same_v<T, float> ? is_finite(total[0]) : sums.nonfinite == 0;
    f(total, finite);
  });
}

}  // namespace ga::cuda
