// SPDX-License-Identifier: Apache-2.0
// A += scale g and its sums of squares in another order of memory than the library's. There each 8-lane group
// reads a tile of its own, so that the sums are those of the CPU, and a block reads 32 runs of 128 bytes, 4 KiB
// apart. Here a block reads 4 KiB in one piece. What the two differ by is what the library's order costs.
#include "backend/cuda/loops.hpp"
#include "contiguous.hpp"

namespace bench {
namespace {

using namespace ga::cuda;

struct AccumulateContiguous {
  static constexpr int kBlocks = 4;  // of a multiprocessor at a time: the library's
  float* target;
  const float* gradient;
  int64_t count;
  float scale;
  double* squares;  // of each chunk

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED double totals[kLaneGroups];
    for (int64_t k = block.index(); k < ga::chunk_count(count); k += block.count()) {
      PerThread<Quad> lanes;
      block.each([&](int thread) {
        const Squares<float, float> sums = add(k, thread);
        for (int l = 0; l < 4; ++l) lanes[thread].lane[l] = sums.lane(l);
      });
      block.lane_group_totals(lanes,
                              [&](int lane_group, double total) { totals[lane_group] = total; });
      block.each_warp(1, [&](int64_t, const Warp& warp) {
        const double total = warp.sum(kLaneGroups, [&](int64_t t) { return totals[t]; });
        if (warp.leader()) squares[k] = total;
      });
    }
  }

  GA_DEVICE Squares<float, float> add(int64_t chunk, int thread) const {
    constexpr int kStep = 4 * kThreads;
    float* const a = target + chunk * ga::kChunk;
    const float* const g = gradient + chunk * ga::kChunk;
    const int n = chunk_length(count, chunk);
    Squares<float, float> sums;
    const auto use = [&](int i, int some, Four<float> old, const Four<float>& given) {
      for (int l = 0; l < 4; ++l) old.x[l] += given.x[l] * scale;
      store_some<float, GA_F32>(a, true, i, some, old);
      sums.add(old, some);
    };
    int i = 4 * thread;
    GA_ROLLED
    for (; i + (kStepsAhead - 1) * kStep + 4 <= n; i += kStepsAhead * kStep) {
      Four<float> old[kStepsAhead], given[kStepsAhead];
      for (int s = 0; s < kStepsAhead; ++s) {
        given[s] = load_whole<float, GA_F32>(g, i + s * kStep);
        old[s] = load_whole<float, GA_F32>(a, i + s * kStep);
      }
      for (int s = 0; s < kStepsAhead; ++s) use(i + s * kStep, 4, old[s], given[s]);
    }
    GA_ROLLED
    for (; i < n; i += kStep) {
      const int some = n - i < 4 ? n - i : 4;
      use(i, some, load_some<float, GA_F32>(a, true, i, some),
          load_some<float, GA_F32>(g, true, i, some));
    }
    return sums;
  }
};

}  // namespace

void accumulate_contiguous(float* target, const float* gradient, int64_t count, float scale,
                           double* squares, int64_t blocks, cudaStream_t stream) {
  launch(AccumulateContiguous{target, gradient, count, scale, squares},
         smaller(ga::chunk_count(count), blocks), stream);
}

}  // namespace bench
