// SPDX-License-Identifier: Apache-2.0
// What the kernels over elements have in common: tasks in the arguments of a launch, chunks, and
// sums of squares in the same order as on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "backend/cuda/formats.hpp"
#include "backend/cuda/kernels.hpp"

namespace ga::cuda {

// ---- Chunks -------------------------------------------------------------------------------------

constexpr int kTile = 1024;
constexpr int kTiles = static_cast<int>(kChunk / kTile);  // of a chunk
constexpr int kLaneGroups = kThreads / 8;

inline int64_t blocks_for(const Queue& queue, int64_t items) {
  return smaller(items, queue.blocks);
}

// The number of blocks that the device holds at a time.
template <class Kernel>
int64_t held_blocks(const Queue& queue) {
  return Kernel::kBlocks * queue.multiprocessors;
}

// The number of blocks of a grid over chunks that take long: one for each, which the device starts when another one
// ends. If there are very many chunks, a block has several.
template <class Kernel>
int64_t chunk_blocks(const Queue& queue, int64_t chunks) {
  constexpr int64_t kRounds = 8;
  return smaller(chunks, kRounds * held_blocks<Kernel>(queue));
}

// A dtype that the code is compiled for; 0: any.
template <int32_t kFormat>
using Known = std::integral_constant<int32_t, kFormat>;

// Elements of a chunk.
GA_HD int chunk_length(int64_t count, int64_t chunk) {
  return static_cast<int>(smaller(kChunk, count - chunk * kChunk));
}

// Launches the smallest Kernel<kSize> that holds `count` items in its arguments, so that few items
// do not carry the arguments of many. fill(kernel) writes what is used of it and returns the number
// of blocks.
template <template <size_t> class Kernel, size_t... kSizes, class Fill>
void launch_sized(const Queue& queue, size_t count, Fill fill) {
  bool done = false;
  const auto try_size = [&](auto size) {
    if (done || count > size) return;
    Kernel<decltype(size)::value> kernel;
    const int64_t blocks = fill(kernel);
    launch(kernel, blocks, queue.stream);
    done = true;
  };
  (try_size(std::integral_constant<size_t, kSizes>()), ...);
}

// The tasks of a launch, in its arguments, and the number of chunks before each.
template <class Task, size_t kMost>
struct Tasks {
  int64_t count;
  int64_t before[kMost + 1];
  Task tasks[kMost];

  // f(task, chunk) for the chunks of a block.
  template <class F>
  GA_DEVICE void each_chunk(const Block& block, F f) const {
    GA_ROLLED
    for (int64_t k = block.index(); k < before[count]; k += block.count()) {
      int64_t low = 0, high = count;  // before[low] <= k < before[high]
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (before[middle] <= k ? low : high) = middle;
      }
      f(tasks[low], k - before[low]);
    }
  }
};

// Launches Kernel<kMost>, whose list is its Tasks, over all tasks.
template <template <size_t> class Kernel, class Task>
void launch_tasks(const Queue& queue, Span<const Task> tasks) {
  constexpr size_t kMost = (kMostArguments - 64) / (sizeof(Task) + sizeof(int64_t));
  for (size_t first = 0; first < tasks.size; first += kMost) {
    const size_t end = std::min(tasks.size, first + kMost);
    launch_sized<Kernel, 8, kMost>(queue, end - first, [&](auto& kernel) {
      auto& list = kernel.list;
      list.count = 0;
      int64_t chunks = 0;
      for (size_t t = first; t < end; ++t) {
        if (tasks.data[t].count == 0) continue;
        list.before[list.count] = chunks;
        list.tasks[list.count++] = tasks.data[t];
        chunks += chunk_count(tasks.data[t].count);
      }
      list.before[list.count] = chunks;
      return blocks_for(queue, chunks);
    });
  }
}

// ---- Sums of squares ----------------------------------------------------------------------------

// A thread's share of a tile: four lanes, which are of type Sum; whether all values in them are finite, if
// these are doubles; and the bits of all values, if lanes are floats.
template <class T, class Sum>
struct Squares {
  Sum lanes[4] = {};
  bool finite = true;
  uint32_t any = 0;

  GA_DEVICE void add(int lane, T value) {
    const Sum x = static_cast<Sum>(value);
    if constexpr (std::is_same_v<Sum, float>) any |= bits_of(value);
#ifdef __CUDACC__
    if constexpr (!std::is_same_v<
                      T, Sum>) {  // the square is exact, so this rounds as the other way does
      lanes[lane] = __fma_rn(x, x, lanes[lane]);
      return;
    }
#endif
    lanes[lane] += x * x;
    if constexpr (std::is_same_v<T, double>) finite = finite && x * 0.0 == 0;
  }

  // As a double. Where not all values are 0, the first lane is not either, though all squares may be: what makes
  // it so is lost beside any other float.
  GA_DEVICE double lane(int l) const {
    const double sum = static_cast<double>(lanes[l]);
    return l == 0 && sum == 0 && any << 1 != 0 ? 1e-300 : sum;
  }

  GA_DEVICE void add(const Four<T>& four, int count) {
    for (int l = 0; l < 4; ++l) {
      if (l < count) add(l, four.x[l]);
    }
  }
};

template <class T, int kSums, class Sum = T>
struct SquaresOf {
  Squares<T, Sum> of[kSums];
};

// The totals of a chunk's tiles, shared by the threads of a block.
template <int kSums>
struct ChunkTotals {
  double totals[kSums][kTiles];
  int nonfinite;  // in the first sum, where that is of doubles
};

// f(i, count) for thread q of a lane group over its elements of a tile of n.
template <class F>
GA_DEVICE void each_step(int n, int q, F f) {
  const int whole = n / kLanes * kLanes;
  GA_ROLLED
  for (int i = 4 * q; i < whole; i += kLanes) f(i, 4);
  const int rest = n - whole - 4 * q;
  if (rest > 0) f(whole + 4 * q, rest < 4 ? rest : 4);
}

// As each_step, but use(i, count, loaded) gets the result of load(i, count), which is called kAhead
// steps at a time.
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
  for (; i < n; i += kLanes) {  // only the last step may be a part
    const int count = n - i < 4 ? n - i : 4;
    use(i, count, load(i, count));
  }
}
constexpr int kStepsAhead = 2;

// One round of sum_lane_groups(): the first pass, or kAnew the second.
template <class T, class Sum, bool kAnew, int kSums, int kMost, class Body>
GA_DEVICE void sum_round(Block& block, int round, int count, int sums,
                         double (&totals)[kSums][kMost], Body body) {
  // Whether sum k of a lane group is none, or was taken in floats and can be trusted.
  const auto is_done = [&](int k, int lane_group) {
    if (round + lane_group >= count || k >= sums) return true;
    const double total = totals[k][round + lane_group];
    return kAnew && (is_trusted(total) || total == 0);
  };
  const auto is_left = [&](int lane_group) {
    return !is_done(0, lane_group) || (kSums > 1 && !is_done(kSums - 1, lane_group));
  };
  if (kAnew && !block.any([&](int thread) { return is_left(thread / 8); })) return;
  PerThread<Quad> lanes[kSums];
  block.each([&](int thread) {
    SquaresOf<T, kSums, Sum> squares;
    if (is_left(thread / 8)) squares = body(round + thread / 8, thread % 8, Sum());
    for (int k = 0; k < kSums; ++k) {
      for (int l = 0; l < 4; ++l) lanes[k][thread].lane[l] = squares.of[k].lane(l);
    }
  });
  for (int k = 0; k < kSums; ++k) {
    block.lane_group_totals(lanes[k], [&](int lane_group, double total) {
      if (!is_done(k, lane_group)) totals[k][round + lane_group] = total;
    });
  }
}

// totals[k][t] <- sum k of the SquaresOf<T, kSums, Sum> that body(t, q, Sum()) returns in thread q of the
// lane group which has tile t, for t < count and k < sums. Tiles of floats whose total is not trusted get
// body(t, q, double()) in a second pass, where the arrays that the first one has written are only read. Ends
// with a barrier.
template <class T, class Sum = T, int kSums, int kMost, class Body>
GA_DEVICE void sum_lane_groups(Block& block, int count, int sums, double (&totals)[kSums][kMost],
                               Body body) {
  static_assert(kMost % kLaneGroups == 0);
  static_assert(kSums <= 2);
  GA_ROLLED
  for (int round = 0; round < count; round += kLaneGroups) {
    sum_round<T, Sum, false>(block, round, count, sums, totals, body);
    if constexpr (std::is_same_v<Sum, float>)
      sum_round<T, double, true>(block, round, count, sums, totals, body);
  }
}

// sum_lane_groups() over the tiles of a chunk of `count` elements: body(first, n, q, Sum()) sums the n
// elements from `first` on.
template <class T, class Sum = T, int kSums, class Body>
GA_DEVICE void sum_tiles(Block& block, int count, int sums, ChunkTotals<kSums>& shared, Body body) {
  if constexpr (std::is_same_v<T, double>) block.once([&] { shared.nonfinite = 0; });
  sum_lane_groups<T, Sum>(block, (count + kTile - 1) / kTile, sums, shared.totals,
                          [&](int tile, int q, auto sum) {
                            const int first = tile * kTile, left = count - first;
                            const auto squares = body(first, left < kTile ? left : kTile, q, sum);
                            if (std::is_same_v<T, double> && !squares.of[0].finite)
                              shared.nonfinite = 1;
                            return squares;
                          });
}

// f(total, finite) in one thread after sum_tiles, where total[k] is sum k of the chunk, for k < sums. Ends
// with a barrier.
template <class T, int kSums, class F>
GA_DEVICE void take_totals(Block& block, int count, int sums, const ChunkTotals<kSums>& shared,
                           F f) {
  const int tiles = (count + kTile - 1) / kTile;
  block.each_warp(1, [&](int64_t, const Warp& warp) {
    double total[kSums] = {};
    for (int k = 0; k < kSums && k < sums; ++k)
      total[k] = warp.sum(tiles, [&](int64_t t) { return shared.totals[k][t]; });
    if (!warp.leader()) return;
    const bool finite = std::is_same_v<T, float> ? is_finite(total[0]) : shared.nonfinite == 0;
    f(total, finite);
  });
}

}  // namespace ga::cuda
