// SPDX-License-Identifier: Apache-2.0
// Tests of the simulated CUDA that the CUDA backend is tested on, and of the phases of its kernels.
#include <cublas_v2.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <cub/cub.cuh>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "backend/cuda/block.hpp"
#include "simulator.hpp"

namespace ga::cuda {
namespace {

class Simulator : public ::testing::Test {
 protected:
  void SetUp() override { sim::reset(); }
  void TearDown() override { sim::reset(); }

  static void configure(bool deferred, bool protect = true) {
    sim::Config config = sim::config();
    config.deferred = deferred;
    config.protect = protect;
    sim::configure(config);
    EXPECT_EQ(Loading::all(), cudaSuccess);
  }
};

#define EXPECT_OK(call) EXPECT_EQ(call, cudaSuccess)

// Allocates device memory with the given values, or for n values that are not set.
template <class T>
T* device(int64_t n) {
  T* result = nullptr;
  EXPECT_OK(cudaMalloc(&result, static_cast<size_t>(n) * sizeof(T)));
  return result;
}

template <class T>
T* device(const std::vector<T>& values) {
  T* result = device<T>(static_cast<int64_t>(values.size()));
  sim::poke(result, values.data(), values.size() * sizeof(T));
  return result;
}

template <class T>
std::vector<T> now(const T* memory, int64_t n) {
  std::vector<T> result(static_cast<size_t>(n));
  sim::peek(result.data(), memory, result.size() * sizeof(T));
  return result;
}

template <class T>
T now(const T* memory) {
  return now(memory, 1)[0];
}

cudaStream_t stream() {
  cudaStream_t result = nullptr;
  EXPECT_OK(cudaStreamCreateWithFlags(&result, cudaStreamNonBlocking));
  return result;
}

std::vector<float> values(int64_t n) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> result(static_cast<size_t>(n));
  for (float& x : result) x = std::ldexp(normal(random), static_cast<int>(random() % 60) - 30);
  return result;
}

// Adds up n lanes, each half to the other until one is left.
double tree(std::vector<double> lanes) {
  for (size_t half = lanes.size() / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

double lane_sum(const float* x, int64_t n) {
  std::vector<double> lanes(32);
  for (int64_t i = 0; i < n; ++i) lanes[static_cast<size_t>(i % 32)] += double{x[i]};
  return tree(lanes);
}

// ---- Blocks ------------------------------------------------------------------------------------------

// The sums of tiles of 1024 elements, 32 in each block; the last block adds all of them.
struct TileSums {
  const float* x;
  double* tiles;
  double* total;
  unsigned* arrived;
  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED double totals[kThreads / 8];
    PerThread<Quad> lanes;
    const int64_t first = block.index() * (kThreads / 8);
    block.each([&](int thread) {
      Quad quad{};
      const float* tile = x + 1024 * (first + thread / 8);
      for (int step = 0; step < 32; ++step) {
        for (int l = 0; l < 4; ++l) quad.lane[l] += double{tile[32 * step + 4 * (thread % 8) + l]};
      }
      lanes[thread] = quad;
    });
    block.lane_group_totals(lanes,
                            [&](int lane_group, double total) { totals[lane_group] = total; });
    block.each_item(kThreads / 8, [&](int64_t i) { tiles[first + i] = totals[i]; });
    if (!block.last(arrived)) return;
    block.each_warp(1, [&](int64_t, Warp& warp) {
      const double sum =
          warp.sum(block.count() * (kThreads / 8), [&](int64_t j) { return tiles[j]; });
      if (warp.leader()) *total += sum;
    });
  }
};

TEST_F(Simulator, TilesAreAddedInTheOrderThatIsFixed) {
  constexpr int64_t blocks = 3;
  constexpr int64_t tiles = blocks * 32;
  const std::vector<float> x = values(1024 * tiles);
  std::vector<double> lanes(32);
  std::vector<double> expected;
  for (int64_t t = 0; t < tiles; ++t) {
    expected.push_back(lane_sum(x.data() + 1024 * t, 1024));
    lanes[static_cast<size_t>(t % 32)] += expected.back();
  }
  const TileSums kernel{device(x), device<double>(tiles), device(std::vector<double>{0.0}),
                        device(std::vector<unsigned>{0})};
  for (const bool reverse : {false, true}) {
    sim::Config config = sim::config();
    config.reverse_blocks = reverse;
    sim::configure(config);
    launch(kernel, blocks, nullptr);
    EXPECT_EQ(now(kernel.tiles, tiles), expected);
    EXPECT_EQ(now(kernel.total), (reverse ? 2 : 1) * tree(lanes));  // each launch has added once
    EXPECT_EQ(now(kernel.arrived), 0u);
  }
}

// Which thread of which block runs when, in phases whose order is no business of a real kernel.
struct Turns {
  static constexpr int kPhases = 4;
  int* count;
  int* threads;

  GA_DEVICE void operator()(Block& block) const {
    for (int phase = 0; phase < kPhases; ++phase)
      block.each([&](int thread) {
        threads[(*count)++] = static_cast<int>(block.index()) * kThreads + thread;
      });
  }
};

TEST_F(Simulator, ThreadsAndBlocksRunInNoOrder) {
  constexpr int kBlocks = 3, kPhases = kBlocks * Turns::kPhases;
  const Turns kernel = {device(std::vector<int>{0}), device(std::vector<int>(kPhases * kThreads))};
  launch(kernel, kBlocks, nullptr);
  const std::vector<int> threads = now(kernel.threads, kPhases * kThreads);
  int changes = 0, sorted = 0;
  for (int phase = 0; phase < kPhases; ++phase) {
    const auto begin = threads.begin() + phase * kThreads, end = begin + kThreads;
    const int block = *begin / kThreads;
    const std::set<int> all(begin, end);
    EXPECT_EQ(all.size(), size_t{kThreads});
    EXPECT_EQ(*all.begin(), block * kThreads);
    EXPECT_EQ(*all.rbegin(), block * kThreads + kThreads - 1);
    sorted += std::is_sorted(begin, end);
    if (phase > 0) changes += block != *(begin - 1) / kThreads;
  }
  EXPECT_LT(sorted, kPhases);
#ifndef GA_SANITIZED
  EXPECT_GE(changes, kBlocks);
#endif
}

struct WarpCalls {
  const float* x;
  const int64_t* n;
  int64_t items;
  double* sum;
  double* smallest;
  int64_t* negative;
  int* any;
  GA_DEVICE void operator()(Block& block) const {
    block.each_warp(items, [&](int64_t i, Warp& warp) {
      const double s = warp.sum(n[i], [&](int64_t j) { return double{x[j]}; });
      const double m = warp.smallest(n[i], [&](int64_t j) { return double{x[j]}; });
      const int64_t f = warp.first(n[i], [&](int64_t j) { return x[j] < 0.0f; });
      const bool a = warp.any(n[i], [&](int64_t j) { return x[j] > 1e30f; });
      if (!warp.leader()) return;
      sum[i] = s;
      smallest[i] = m;
      negative[i] = f;
      any[i] = a ? 1 : 0;
    });
  }
};

TEST_F(Simulator, WarpsAddInLanesAndFindTheFirstAndTheSmallest) {
  std::vector<float> x = values(1000);
  for (size_t i = 0; i < 40; ++i) x[i] = std::fabs(x[i]);
  x[40] = -1.0f;
  x[50] = NAN;
  x[999] = INFINITY;
  const std::vector<int64_t> n{0, 1, 31, 32, 33, 41, 51, 1000};
  const auto items = static_cast<int64_t>(n.size());
  const WarpCalls kernel{device(x),
                         device(n),
                         items,
                         device<double>(items),
                         device<double>(items),
                         device<int64_t>(items),
                         device<int>(items)};
  launch(kernel, 1, nullptr);
  for (size_t i = 0; i < n.size(); ++i) {
    SCOPED_TRACE(n[i]);
    const auto at = static_cast<int64_t>(i);
    const double sum = lane_sum(x.data(), n[i]);
    const double found = now(kernel.sum + at);
    EXPECT_TRUE(found == sum || (std::isnan(found) && std::isnan(sum)));
    double smallest = HUGE_VAL;
    for (int64_t j = 0; j < n[i]; ++j) smallest = std::fmin(smallest, x[static_cast<size_t>(j)]);
    EXPECT_EQ(now(kernel.smallest + at), smallest);
    EXPECT_EQ(now(kernel.negative + at), n[i] > 40 ? 40 : -1);
    EXPECT_EQ(now(kernel.any + at), n[i] == 1000 ? 1 : 0);
  }
}

// In every block, a phase begins when the one before it is complete.
struct Phases {
  int64_t* out;
  int64_t n;
  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED int64_t ids[kThreads];
    GA_SHARED int64_t sum;
    PerThread<int64_t> own;
    block.each([&](int thread) { ids[thread] = own[thread] = block.index() * kThreads + thread; });
    block.once([&] {
      sum = 0;
      for (const int64_t id : ids) sum += id;
    });
    block.each([&](int thread) { ids[thread] = sum + own[thread]; });
    block.each_item(n, [&](int64_t i) { out[block.index() * n + i] = ids[i % kThreads]; });
  }
};

TEST_F(Simulator, PhasesFollowOneAnother) {
  constexpr int64_t n = kThreads + 3;
  int64_t* out = device<int64_t>(2 * n);
  launch(Phases{out, n}, 2, nullptr);
  const std::vector<int64_t> found = now(out, 2 * n);
  for (int64_t i = 0; i < 2 * n; ++i) {
    const int64_t first = i / n * kThreads;
    const int64_t sum = kThreads * first + kThreads * (kThreads - 1) / 2;
    EXPECT_EQ(found[static_cast<size_t>(i)], sum + first + i % n % kThreads) << i;
  }
}

struct Largest {
  char bytes[kMostArguments - sizeof(char*)];
  char* out;
  GA_DEVICE void operator()(Block& block) const {
    block.each_item(sizeof bytes, [&](int64_t i) { out[i] = bytes[i]; });
  }
} __attribute__((packed));

TEST_F(Simulator, ArgumentsTravelWithTheLaunch) {
  static_assert(sizeof(Largest) == kMostArguments);
  configure(true);
  auto kernel = std::make_unique<Largest>();
  std::memset(kernel->bytes, 5, sizeof kernel->bytes);
  char* const out = device<char>(sizeof kernel->bytes);
  kernel->out = out;
  launch(*kernel, 1, nullptr);
  std::memset(kernel.get(), 6, sizeof *kernel);
  kernel.reset();
  sim::finish();
  EXPECT_EQ(now(out, sizeof(Largest::bytes)), std::vector<char>(sizeof(Largest::bytes), 5));
}

TEST_F(Simulator, NoBlocksAreNoLaunch) {
  launch(Phases{nullptr, 0}, 0, nullptr);
  EXPECT_EQ(sim::counters().launches, 0);
  EXPECT_EQ(sim::queued(), 0);
}

// ---- Streams -----------------------------------------------------------------------------------------

struct Add {
  int* at;
  int value;
  GA_DEVICE void operator()(Block& block) const {
    block.once([&] { *at += value; });
  }
};

struct Multiply {
  int* at;
  int factor;
  GA_DEVICE void operator()(Block& block) const {
    block.once([&] { *at *= factor; });
  }
};

TEST_F(Simulator, WorkIsPutOffUntilSomethingWaits) {
  configure(true);
  const cudaStream_t s = stream();
  int* x = device(std::vector<int>{1});
  int* pinned = nullptr;
  EXPECT_OK(cudaHostAlloc(&pinned, sizeof(int), cudaHostAllocMapped));
  *pinned = 5;
  launch(Add{x, 1}, 1, s);
  EXPECT_OK(cudaMemcpyAsync(x, pinned, sizeof(int), cudaMemcpyDefault, s));
  launch(Multiply{x, 10}, 1, s);
  EXPECT_EQ(sim::queued(), 3);
  EXPECT_EQ(now(x), 1);
  *pinned = 7;  // too early
  EXPECT_EQ(cudaStreamQuery(s), cudaErrorNotReady);
  EXPECT_EQ(now(x), 2);
  EXPECT_EQ(sim::counters().synchronizations, 0);
  EXPECT_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(now(x), 70);
  EXPECT_OK(cudaStreamQuery(s));
  EXPECT_EQ(sim::counters().synchronizations, 1);
  EXPECT_OK(cudaFree(x));
  EXPECT_OK(cudaFreeHost(pinned));
}

TEST_F(Simulator, AFirstLaunchWaitsUnlessTheKernelIsLoaded) {
  for (const bool loaded : {false, true}) {
    sim::reset();
    sim::Config config = sim::config();
    config.deferred = true;
    sim::configure(config);
    if (loaded) {
      EXPECT_OK(Loading::all());
    }
    const cudaStream_t s = stream();
    int* x = device(std::vector<int>{1});
    launch(Add{x, 1}, 1, s);
    EXPECT_EQ(now(x), 1);
    launch(Multiply{x, 10}, 1, s);
    EXPECT_EQ(now(x), loaded ? 1 : 2);
    launch(Multiply{x, 10}, 1, s);
    EXPECT_EQ(now(x), loaded ? 1 : 2);
    EXPECT_EQ(sim::counters().late_loads, loaded ? 0 : 2);
    EXPECT_OK(cudaStreamSynchronize(s));
    EXPECT_EQ(now(x), 200);
    EXPECT_OK(cudaFree(x));
  }
}

TEST_F(Simulator, EachContextLoadsItsOwnKernels) {
  std::thread([] {
    sim::set_current_context(sim::make_context(0));
    EXPECT_OK(Loading::all());
    const cudaStream_t s = stream();
    int* x = device(std::vector<int>{1});
    launch(Add{x, 1}, 1, s);
    EXPECT_EQ(sim::counters().late_loads, 0);
    sim::set_current_context(sim::make_context(0));
    launch(Add{x, 1}, 1, stream());
    EXPECT_EQ(sim::counters().late_loads, 1);
  }).join();
}

TEST_F(Simulator, ALateLoadBreaksACapture) {
  const cudaStream_t s = stream();
  int* x = device(std::vector<int>{1});
  cudaGraph_t graph;
  EXPECT_OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  EXPECT_THROW(launch(Add{x, 1}, 1, s), Error);
  EXPECT_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
  launch(Add{x, 1}, 1, s);
  EXPECT_OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  launch(Add{x, 1}, 1, s);
  EXPECT_OK(cudaStreamEndCapture(s, &graph));
  EXPECT_OK(cudaGraphDestroy(graph));
  EXPECT_OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  cudaError_t error = cudaSuccess;  // of another thread, which is not capturing
  std::thread([&] { error = Loading::all(); }).join();
  EXPECT_EQ(error, cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
}

// A thread of one context does not launch in a stream of another one, though both are of one device.
TEST_F(Simulator, StreamsAndEventsAreOfAContext) {
  std::thread([] {
    EXPECT_OK(cudaSetDevice(0));
    const cudaStream_t primary = stream();
    cudaEvent_t event = nullptr;
    EXPECT_OK(cudaEventCreate(&event));
    int* x = device(std::vector<int>{1});
    launch(Add{x, 1}, 1, primary);
    EXPECT_OK(cudaEventRecord(event, primary));
    sim::set_current_context(sim::make_context(0));
    const cudaStream_t own = stream();
    EXPECT_THROW(launch(Add{x, 1}, 1, primary), Error);
    EXPECT_EQ(cudaEventRecord(event, own), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaEventRecord(event, nullptr), cudaErrorInvalidResourceHandle);
    EXPECT_OK(cudaEventRecord(event, primary));  // by the stream, not by the thread
    EXPECT_OK(cudaStreamWaitEvent(own, event));
    launch(Add{x, 1}, 1, own);
    launch(Add{x, 1}, 1, nullptr);
    EXPECT_EQ(now(x), 4);
  }).join();
}

struct Large {
  int* to;
  char bytes[4096];
  GA_DEVICE void operator()(Block& block) const {
    block.once([&] { *to = bytes[4095]; });
  }
};

TEST_F(Simulator, OlderDriversAndDevicesTakeFewArguments) {
  int* x = device(std::vector<int>{1});
  Large large = {x, {}};
  large.bytes[4095] = 7;
  const auto with = [&](int driver, int major) {
    sim::Config config = sim::config();
    config.driver_version = driver;
    config.major = major;
    sim::configure(config);
  };
  with(12010, 7);
  launch(large, 1, nullptr);
  EXPECT_EQ(now(x), 7);
  for (const auto& [driver, major] : {std::pair(12000, 9), std::pair(13000, 6)}) {
    with(driver, major);
    EXPECT_THROW(launch(large, 1, nullptr), Error);
    launch(Add{x, 1}, 1, nullptr);
  }
  EXPECT_EQ(now(x), 9);
}

TEST_F(Simulator, FunctionsOfTheDriverHaveAVersion) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSuccess;
  const auto ask = [&](const char* name, unsigned version) {
    EXPECT_OK(
        cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result));
    return function != nullptr;
  };
  EXPECT_TRUE(ask("cuCtxGetCurrent", 13000));
  EXPECT_EQ(result, cudaDriverEntryPointSuccess);
  EXPECT_FALSE(ask("cuCtxGetCurrent", 13010));
  EXPECT_EQ(result, cudaDriverEntryPointVersionNotSufficent);
  EXPECT_FALSE(ask("cuNothing", 12000));
  EXPECT_EQ(result, cudaDriverEntryPointSymbolNotFound);
}

TEST_F(Simulator, PageableMemoryIsStagedOrWaitedFor) {
  configure(true);
  const cudaStream_t s = stream();
  int* x = device(std::vector<int>{1});
  int host = 5;
  EXPECT_OK(cudaMemcpyAsync(x, &host, sizeof host, cudaMemcpyHostToDevice, s));
  host = 6;
  EXPECT_EQ(sim::queued(), 1);
  EXPECT_EQ(sim::counters().synchronizations, 0);
  EXPECT_OK(cudaMemcpyAsync(&host, x, sizeof host, cudaMemcpyDeviceToHost, s));
  EXPECT_EQ(host, 5);
  const sim::Counters counters = sim::counters();
  EXPECT_EQ(counters.synchronizations, 1);
  EXPECT_EQ(counters.pageable_copies, 2);
  EXPECT_EQ(counters.copies, 2);
  EXPECT_EQ(counters.copied_bytes, 8);
}

TEST_F(Simulator, EventsOrderStreamsOfAllDevices) {
  configure(true);
  const cudaStream_t a = stream();
  EXPECT_OK(cudaSetDevice(1));
  const cudaStream_t b = stream();
  cudaEvent_t event;
  EXPECT_OK(cudaSetDevice(0));
  EXPECT_OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  int* pinned = nullptr;
  EXPECT_OK(cudaMallocHost(&pinned, sizeof(int)));
  *pinned = 1;
  EXPECT_OK(cudaEventQuery(event));  // the event was never recorded
  launch(Add{pinned, 2}, 1, a);
  EXPECT_OK(cudaEventRecord(event, a));
  launch(Add{pinned, 1000}, 1, a);
  EXPECT_OK(cudaSetDevice(1));
  EXPECT_OK(cudaStreamWaitEvent(b, event, 0));
  launch(Multiply{pinned, 10}, 1, b);
  EXPECT_OK(cudaStreamSynchronize(b));
  EXPECT_EQ(*pinned, 30);
  EXPECT_OK(cudaEventSynchronize(event));
  EXPECT_EQ(*pinned, 30);
  EXPECT_OK(cudaSetDevice(0));
  EXPECT_OK(cudaDeviceSynchronize());
  EXPECT_EQ(*pinned, 1030);
  EXPECT_OK(cudaEventDestroy(event));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  EXPECT_OK(cudaGetLastError());
}

TEST_F(Simulator, TheLegacyStreamWaitsForBlockingStreamsAndTheyForIt) {
  configure(true);
  cudaStream_t blocking;
  EXPECT_OK(cudaStreamCreate(&blocking));
  const cudaStream_t other = stream();
  int* x = device(std::vector<int>{1, 1});
  launch(Add{x, 1}, 1, blocking);
  launch(Add{x + 1, 1}, 1, other);
  launch(Multiply{x, 10}, 1, nullptr);
  launch(Add{x, 5}, 1, blocking);
  EXPECT_OK(cudaStreamSynchronize(blocking));
  EXPECT_EQ(now(x, 2), (std::vector<int>{25, 1}));
  launch(Add{x, 5}, 1, blocking);
  int host = 0;
  EXPECT_OK(cudaMemcpy(&host, x, sizeof host, cudaMemcpyDeviceToHost));
  EXPECT_EQ(host, 30);
  EXPECT_EQ(now(x + 1), 1);
  launch(Add{x, 1}, 1, other);
  EXPECT_OK(cudaStreamDestroy(other));
  EXPECT_EQ(cudaStreamQuery(other), cudaErrorInvalidResourceHandle);
  EXPECT_OK(cudaFree(x));  // waits for it
  EXPECT_EQ(sim::queued(), 0);
}

TEST_F(Simulator, HostFunctionsRunInOrderAndMayNotCall) {
  configure(true);
  const cudaStream_t s = stream();
  cudaError_t found = cudaSuccess;
  EXPECT_OK(cudaLaunchHostFunc(
      s, [](void* data) { *static_cast<cudaError_t*>(data) = cudaDeviceSynchronize(); }, &found));
  EXPECT_OK(found);
  EXPECT_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(found, cudaErrorNotPermitted);
}

TEST_F(Simulator, LaunchesAreCountedByKernel) {
  int* x = device(std::vector<int>{1});
  launch(Add{x, 1}, 1, nullptr);
  launch(Add{x, 1}, 2, nullptr);
  launch(Multiply{x, 1}, 1, nullptr);
  EXPECT_EQ(sim::counters().launches, 3);
  EXPECT_EQ(sim::counters().launches_of("::Add"), 2);
  EXPECT_EQ(sim::counters().launches_of("Multiply"), 1);
  EXPECT_EQ(sim::counters().executed, 3);
  sim::reset_counters();
  EXPECT_EQ(sim::counters().launches_of(""), 0);
  EXPECT_EQ(sim::counters().device_bytes, 4);
  EXPECT_OK(cudaFree(x));
  EXPECT_EQ(sim::counters().device_bytes, 0);
  EXPECT_EQ(sim::counters().device_bytes_peak, 4);
}

TEST_F(Simulator, ThreadsWithStreamsOfTheirOwn) {
  configure(true);
  std::vector<std::thread> threads;
  std::vector<int> results(2);
  for (size_t t = 0; t < 2; ++t) {
    threads.emplace_back([&results, t] {
      EXPECT_OK(cudaSetDevice(static_cast<int>(t)));
      const cudaStream_t s = stream();
      int* x = device(std::vector<int>{0});
      for (int i = 0; i < 200; ++i) launch(Add{x, 1}, 1, s);
      EXPECT_OK(cudaMemcpyAsync(&results[t], x, sizeof(int), cudaMemcpyDefault, s));
      EXPECT_OK(cudaStreamSynchronize(s));
      EXPECT_OK(cudaFree(x));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(results, (std::vector<int>{200, 200}));
}

// ---- Graphs ------------------------------------------------------------------------------------------

TEST_F(Simulator, AGraphIsReplayedWithTheBytesOfThatTime) {
  EXPECT_OK(Loading::all());
  const cudaStream_t s = stream();
  const std::vector<float> x(1024 * 64, 1.0f);
  const TileSums sums{device(x), device<double>(64), device(std::vector<double>{0.0}),
                      device(std::vector<unsigned>{0})};
  double* pinned = nullptr;
  EXPECT_OK(cudaMallocHost(&pinned, sizeof(double)));
  EXPECT_OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  EXPECT_OK(cudaMemcpyAsync(sums.total, pinned, sizeof(double), cudaMemcpyDefault, s));
  launch(sums, 2, s);
  EXPECT_OK(cudaMemsetAsync(sums.tiles, 0, sizeof(double), s));
  cudaStreamCaptureStatus status;
  unsigned long long id = 0;
  EXPECT_OK(cudaStreamGetCaptureInfo(s, &status, &id));
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  EXPECT_NE(id, 0u);
  cudaGraph_t graph;
  EXPECT_OK(cudaStreamEndCapture(s, &graph));
  EXPECT_OK(cudaStreamIsCapturing(s, &status));
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  EXPECT_EQ(now(sums.total), 0.0);  // nothing ran
  EXPECT_EQ(sim::counters().executed, 0);
  size_t nodes = 0;
  EXPECT_OK(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 3u);
  cudaGraphExec_t exec;
  EXPECT_OK(cudaGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
  EXPECT_OK(cudaGraphDestroy(graph));
  for (const double start : {1.0, 2.0}) {
    *pinned = start;
    EXPECT_OK(cudaGraphLaunch(exec, s));
    EXPECT_EQ(now(sums.total), start + 65536.0);
    EXPECT_EQ(now(sums.tiles), 0.0);
  }
  EXPECT_OK(cudaGraphExecDestroy(exec));
  EXPECT_EQ(sim::counters().launches, 1);
  EXPECT_EQ(sim::counters().executed, 2);
  EXPECT_EQ(sim::counters().graph_launches, 2);
}

TEST_F(Simulator, ACaptureSpreadsByEventsAndHasToBeJoined) {
  EXPECT_OK(Loading::all());
  const cudaStream_t a = stream();
  const cudaStream_t b = stream();
  int* x = device(std::vector<int>{1});
  cudaEvent_t event;
  EXPECT_OK(cudaEventCreate(&event));
  for (const bool join : {true, false}) {
    EXPECT_OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    launch(Add{x, 1}, 1, a);
    EXPECT_OK(cudaEventRecord(event, a));
    EXPECT_OK(cudaStreamWaitEvent(b, event, 0));
    launch(Multiply{x, 10}, 1, b);
    if (join) {
      EXPECT_OK(cudaEventRecord(event, b));
      EXPECT_OK(cudaStreamWaitEvent(a, event, 0));
    }
    cudaGraph_t graph;
    EXPECT_EQ(cudaStreamEndCapture(a, &graph), join ? cudaSuccess : cudaErrorStreamCaptureUnjoined);
    EXPECT_EQ(graph != nullptr, join);
    EXPECT_EQ(now(x), 1);
    EXPECT_OK(cudaGraphDestroy(graph));
  }
}

TEST_F(Simulator, WhatWaitsInvalidatesACapture) {
  const cudaStream_t s = stream();
  const cudaStream_t other = stream();
  int* x = device(std::vector<int>{1});
  cudaEvent_t outside, inside;
  EXPECT_OK(cudaEventCreate(&outside));
  EXPECT_OK(cudaEventCreate(&inside));
  EXPECT_OK(cudaEventRecord(outside, other));
  void* memory = nullptr;
  int host = 0;
  const std::vector<std::pair<cudaError_t, std::function<cudaError_t()>>> calls{
      {cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamSynchronize(s); }},
      {cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamQuery(s); }},
      {cudaErrorStreamCaptureUnsupported, [&] { return cudaDeviceSynchronize(); }},
      {cudaErrorStreamCaptureUnsupported, [&] { return cudaMalloc(&memory, 4); }},
      {cudaErrorStreamCaptureUnsupported, [&] { return cudaFree(x); }},
      {cudaErrorStreamCaptureUnsupported, [&] { return cudaHostAlloc(&memory, 4, 0); }},
      {cudaErrorStreamCaptureUnsupported,
       [&] { return cudaMemcpy(&host, x, 4, cudaMemcpyDeviceToHost); }},
      {cudaErrorStreamCaptureUnsupported, [&] { return cudaEventQuery(outside); }},
      {cudaErrorStreamCaptureIsolation, [&] { return cudaStreamWaitEvent(s, outside, 0); }},
      {cudaErrorCapturedEvent, [&] {
         EXPECT_OK(cudaEventRecord(inside, s));
         return cudaEventSynchronize(inside);
       }}};
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    EXPECT_EQ(calls[i].second(), calls[i].first);
    cudaStreamCaptureStatus status;
    EXPECT_OK(cudaStreamIsCapturing(s, &status));
    EXPECT_EQ(status, cudaStreamCaptureStatusInvalidated);
    EXPECT_THROW(launch(Add{x, 1}, 1, s), Error);
    EXPECT_OK(cudaGetLastError());
    cudaGraph_t graph;
    EXPECT_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
  }
  EXPECT_EQ(now(x), 1);
}

TEST_F(Simulator, TheModeOfACaptureSaysWhatIsForbidden) {
  const cudaStream_t s = stream();
  const auto allocate = [] {
    void* memory = nullptr;
    return cudaMalloc(&memory, 4);
  };
  const auto allocate_elsewhere = [&] {
    cudaError_t error = cudaErrorUnknown;
    std::thread([&] { error = allocate(); }).join();
    return error;
  };
  cudaGraph_t graph;
  EXPECT_OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
  EXPECT_OK(allocate());
  EXPECT_OK(allocate_elsewhere());
  EXPECT_OK(cudaStreamEndCapture(s, &graph));
  EXPECT_OK(cudaGraphDestroy(graph));
  EXPECT_OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  EXPECT_OK(allocate_elsewhere());
  EXPECT_EQ(allocate(), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  EXPECT_OK(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  EXPECT_OK(allocate());
  EXPECT_EQ(allocate_elsewhere(), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal),
            cudaErrorStreamCaptureUnsupported);
  cudaStream_t blocking;
  EXPECT_OK(cudaStreamCreate(&blocking));
  EXPECT_OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed));
  cudaStreamCaptureStatus status;
  EXPECT_EQ(cudaStreamIsCapturing(nullptr, &status), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cudaMemsetAsync(nullptr, 0, 0, nullptr), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cudaStreamEndCapture(blocking, &graph), cudaErrorStreamCaptureInvalidated);
}

// ---- Memory ------------------------------------------------------------------------------------------

using SimulatorDeathTest = Simulator;

TEST_F(SimulatorDeathTest, DeviceMemoryIsOutOfTheHostsReach) {
  int* x = device(std::vector<int>{1});
  EXPECT_DEATH(*x = 2, "");
  EXPECT_DEATH(EXPECT_EQ(*x, 1), "");
  launch(Add{x, 1}, 1, nullptr);
  EXPECT_DEATH(*x = 2, "");
  EXPECT_EQ(now(x), 2);
  configure(false, false);
  EXPECT_EQ(*x, 2);
}

TEST_F(SimulatorDeathTest, NeighboursFreedMemoryAndOtherDevicesAreOutOfReach) {
  int* x = device<int>(64);
  EXPECT_DEATH(launch(Add{x + 64, 1}, 1, nullptr), "");
  int* small = device<int>(1);
  EXPECT_DEATH(
      {
        launch(Add{small + 1, 1}, 1, nullptr);
        cudaFree(small);
      },
      "beside an allocation");
  int* freed = device<int>(1);
  EXPECT_OK(cudaFree(freed));
  EXPECT_DEATH(launch(Add{freed, 1}, 1, nullptr), "");
  EXPECT_OK(cudaSetDevice(1));
  EXPECT_DEATH(launch(Add{x, 1}, 1, nullptr), "");
  int* own = device<int>(1);
  launch(Add{own, 1}, 1, nullptr);
  EXPECT_OK(cudaMemcpy(own, x, sizeof(int), cudaMemcpyDeviceToDevice));
}

TEST_F(SimulatorDeathTest, PinnedMemoryThatIsFreedTooEarly) {
  configure(true);
  int* x = device<int>(1);
  int* pinned = nullptr;
  EXPECT_OK(cudaMallocHost(&pinned, sizeof(int)));
  EXPECT_OK(cudaMemcpyAsync(pinned, x, sizeof(int), cudaMemcpyDefault, nullptr));
  EXPECT_DEATH(
      {
        cudaFreeHost(pinned);
        cudaDeviceSynchronize();
      },
      "");
}

TEST_F(Simulator, PointersSayWhatTheyAre) {
  std::vector<int> host(4);
  EXPECT_OK(cudaSetDevice(1));
  int* x = device<int>(4);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(x) % 256, 0u);
  int *pinned, *managed;
  EXPECT_OK(cudaMallocHost(&pinned, 16));
  EXPECT_OK(cudaMallocManaged(&managed, 16));
  EXPECT_OK(cudaSetDevice(0));
  const auto type = [](const void* pointer, int device) {
    cudaPointerAttributes attributes;
    EXPECT_OK(cudaPointerGetAttributes(&attributes, pointer));
    EXPECT_EQ(attributes.device, device);
    return attributes.type;
  };
  EXPECT_EQ(type(x + 3, 1), cudaMemoryTypeDevice);
  EXPECT_EQ(type(x + 4, cudaInvalidDeviceId), cudaMemoryTypeUnregistered);
  EXPECT_EQ(type(pinned + 1, 1), cudaMemoryTypeHost);
  EXPECT_EQ(type(managed, 1), cudaMemoryTypeManaged);
  EXPECT_EQ(type(host.data(), cudaInvalidDeviceId), cudaMemoryTypeUnregistered);
  EXPECT_OK(cudaHostRegister(host.data(), 16, cudaHostRegisterDefault));
  EXPECT_EQ(type(host.data() + 3, 0), cudaMemoryTypeHost);
  EXPECT_OK(cudaHostUnregister(host.data()));
  EXPECT_EQ(type(host.data(), cudaInvalidDeviceId), cudaMemoryTypeUnregistered);
  EXPECT_EQ(cudaMemcpy(x, host.data(), 20, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(x, host.data(), 16, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(x + 1, 0, 16), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(x + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(x), cudaErrorInvalidValue);
  EXPECT_OK(cudaFree(nullptr));
}

TEST_F(Simulator, RegisteredMemoryMayBeElsewhereOnTheDevice) {
  std::vector<int> host(4);
  EXPECT_OK(cudaHostRegister(host.data(), 16, cudaHostRegisterMapped));
  for (const bool apart : {false, true}) {
    sim::Config config = sim::config();
    config.registered_apart = config.known_only = apart;
    sim::configure(config);
    cudaPointerAttributes attributes;
    EXPECT_OK(cudaPointerGetAttributes(&attributes, &host[1]));
    EXPECT_EQ(attributes.hostPointer, &host[1]);
    EXPECT_EQ(attributes.devicePointer == &host[1], !apart);
    int* there = nullptr;
    EXPECT_OK(cudaHostGetDevicePointer(&there, &host[1], 0));
    EXPECT_EQ(there, attributes.devicePointer);
    EXPECT_EQ(cudaPointerGetAttributes(&attributes, &config),
              apart ? cudaErrorInvalidValue : cudaSuccess);
  }
  const cudaStream_t s = stream();
  EXPECT_OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  EXPECT_EQ(cudaHostUnregister(host.data()), cudaErrorStreamCaptureUnsupported);
  cudaGraph_t graph;
  EXPECT_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_OK(cudaHostUnregister(host.data()));
}

TEST_F(Simulator, PoolsGiveAndTakeInTheOrderOfTheStream) {
  configure(true);
  const cudaStream_t s = stream();
  int* x;
  EXPECT_OK(cudaMallocAsync(&x, sizeof(int), s));
  EXPECT_OK(cudaMemsetAsync(x, 0, sizeof(int), s));
  launch(Add{x, 1}, 1, s);
  EXPECT_OK(cudaFreeAsync(x, s));
  EXPECT_EQ(sim::counters().device_bytes, 4);
  EXPECT_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(sim::counters().device_bytes, 0);
  EXPECT_EQ(sim::counters().synchronizations, 1);
  sim::Config config = sim::config();
  config.memory_pools = false;
  sim::configure(config);
  EXPECT_EQ(cudaMallocAsync(&x, sizeof(int), s), cudaErrorNotSupported);
}

TEST_F(Simulator, MemoryRunsOut) {
  sim::Config config = sim::config();
  config.memory = 1000;
  sim::configure(config);
  char* x = device<char>(600);
  size_t free = 0, total = 0;
  EXPECT_OK(cudaMemGetInfo(&free, &total));
  EXPECT_EQ(free, 400u);
  EXPECT_EQ(total, 1000u);
  char* y = nullptr;
  EXPECT_EQ(cudaMalloc(&y, 401), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_OK(cudaFree(x));
  EXPECT_OK(cudaMalloc(&y, 1000));
  EXPECT_OK(cudaFree(y));
  sim::fail_allocation(2);
  EXPECT_OK(cudaMalloc(&x, 1));
  EXPECT_EQ(cudaMallocHost(&y, 1), cudaErrorMemoryAllocation);
  EXPECT_OK(cudaMallocHost(&y, 1));
}

// ---- Failures ----------------------------------------------------------------------------------------

TEST_F(Simulator, AFaultStays) {
  for (const bool deferred : {false, true}) {
    sim::reset();
    configure(deferred);
    const cudaStream_t s = stream();
    int* x = device(std::vector<int>{1});
    sim::fail_execution(2);
    for (int i = 0; i < (deferred ? 3 : 2); ++i)
      launch(Add{x, 1}, 1, s);  // a later call reports the fault
    EXPECT_EQ(cudaStreamSynchronize(s), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaFree(x), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    try {
      launch(Add{x, 1}, 1, s);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), GA_ERROR_FAULT);
      EXPECT_STREQ(error.what(),
                   "a kernel could not be launched: an illegal memory access was encountered "
                   "(cudaErrorIllegalAddress)");
    }
    EXPECT_EQ(now(x), 2);
    EXPECT_OK(cudaSetDevice(1));  // the other device works
    launch(Add{device<int>(1), 1}, 1, nullptr);
    EXPECT_OK(cudaDeviceSynchronize());
  }
}

TEST_F(Simulator, ACallFails) {
  int* x = device(std::vector<int>{1});
  sim::fail_call(2, cudaErrorLaunchOutOfResources);
  launch(Add{x, 1}, 1, nullptr);
  EXPECT_THROW(launch(Add{x, 1}, 1, nullptr), Error);
  launch(Add{x, 1}, 1, nullptr);
  EXPECT_OK(cudaGetLastError());
  EXPECT_EQ(now(x), 3);
  // launch() neither clears nor reports an error that an earlier call of the program has left.
  EXPECT_EQ(cudaFree(x + 1), cudaErrorInvalidValue);
  launch(Add{x, 1}, 1, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  const cudaStream_t s = stream();
  EXPECT_OK(cudaSetDevice(1));
  EXPECT_THROW(launch(Add{x, 1}, 1, s), Error);  // a stream of another device
}

TEST_F(Simulator, NoDriverNoDevice) {
  for (const cudaError_t error : {cudaErrorInsufficientDriver, cudaErrorNoDevice}) {
    sim::Config config = sim::config();
    config.driver = error;
    sim::configure(config);
    int value = -1;
    EXPECT_EQ(cudaGetDeviceCount(&value), error);
    EXPECT_EQ(value, -1);
    EXPECT_EQ(cudaSetDevice(0), error);
    EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0), error);
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, 1), error);
    cublasHandle_t handle = nullptr;
    EXPECT_EQ(cublasCreate(&handle), CUBLAS_STATUS_NOT_INITIALIZED);
    EXPECT_EQ(cudaGetLastError(), error);
  }
}

TEST_F(Simulator, DevicesSayWhatTheyAre) {
  sim::Config config = sim::config();
  config.multiprocessors = 5;
  config.pageable_access = true;
  sim::configure(config);
  int value = 0;
  EXPECT_OK(cudaGetDeviceCount(&value));
  EXPECT_EQ(value, 2);
  EXPECT_OK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 1));
  EXPECT_EQ(value, 5);
  EXPECT_OK(cudaDeviceGetAttribute(&value, cudaDevAttrPageableMemoryAccess, 1));
  EXPECT_EQ(value, 1);
  EXPECT_OK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0));
  EXPECT_EQ(value, 9);
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 2), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  EXPECT_STREQ(cudaGetErrorName(cudaErrorInvalidDevice), "cudaErrorInvalidDevice");
}

// ---- Libraries -----------------------------------------------------------------------------------------

TEST_F(Simulator, CublasMultipliesColumnMajorInTheOrderOfTheStream) {
  configure(true);
  const cudaStream_t s = stream();
  cublasHandle_t handle;
  ASSERT_EQ(cublasCreate(&handle), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cublasSetStream(handle, s), CUBLAS_STATUS_SUCCESS);
  char* workspace = device<char>(1024);
  EXPECT_EQ(cublasSetWorkspace(handle, workspace, 1024), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cublasSetWorkspace(handle, workspace, 2048), CUBLAS_STATUS_INVALID_VALUE);
  constexpr int m = 2, n = 3, k = 2;
  // a (2 x 2, columns 3 apart), b transposed (3 x 2): 1.0, 0.5, 2.0, -1.0 and so on, in bf16 and
  // f16.
  const std::vector<uint16_t> a16{0x3f80, 0x3f00, 0x7fff, 0x4000, 0xbf80, 0x7fff};
  const std::vector<uint16_t> b16{0x3c00, 0x4000, 0x4200, 0xbc00, 0x3800, 0x0000};
  const std::vector<float> a{1.0f, 0.5f, NAN, 2.0f, -1.0f, NAN};
  const std::vector<float> b{1.0f, 2.0f, 3.0f, -1.0f, 0.5f, 0.0f};
  std::vector<float> expected;
  for (size_t j = 0; j < n; ++j) {
    for (size_t i = 0; i < m; ++i) expected.push_back(a[i] * b[j] + a[3 + i] * b[3 + j]);
  }
  float* c = device(std::vector<float>(m * n, NAN));
  const float one = 1.0f, zero = 0.0f;
  EXPECT_EQ(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_T, m, n, k, &one, device(a), 3, device(b), 3,
                        &zero, c, m),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_TRUE(std::isnan(now(c)));
  EXPECT_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(now(c, m * n), expected);

  EXPECT_EQ(cublasSetPointerMode(handle, CUBLAS_POINTER_MODE_DEVICE), CUBLAS_STATUS_SUCCESS);
  float* scalars = device(std::vector<float>{0.0f, 1.0f});
  const std::vector<uint16_t> half_a{0x3c00, 0x3800, 0x7fff, 0x4000, 0xbc00, 0x7fff};
  EXPECT_EQ(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_T, m, n, k, scalars, device(half_a),
                         CUDA_R_16F, 3, device(b16), CUDA_R_16F, 3, scalars + 1, c, CUDA_R_32F, m,
                         CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
            CUBLAS_STATUS_SUCCESS);
  sim::poke(scalars, &one, sizeof one);  // the scalars are read when the work runs
  EXPECT_OK(cudaStreamSynchronize(s));
  for (float& x : expected) x *= 2.0f;
  EXPECT_EQ(now(c, m * n), expected);

  EXPECT_EQ(cublasSetPointerMode(handle, CUBLAS_POINTER_MODE_HOST), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, 1, 1, 2, &one, device(a16), CUDA_R_16BF,
                         2, device(a16), CUDA_R_16BF, 2, &zero, c, CUDA_R_32F, 1,
                         CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(now(c), 1.25f);
  EXPECT_EQ(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 4, 1, 1, &one, c, 3, c, 1, &zero, c, 4),
            CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(sim::counters().library_calls, 3);
  EXPECT_EQ(cublasDestroy(handle), CUBLAS_STATUS_SUCCESS);
}

TEST_F(Simulator, CubSortsScansAndSelects) {
  configure(true);
  const cudaStream_t s = stream();
  const std::vector<int64_t> keys{5, -1, 5, 3, -1};
  const std::vector<int> order{0, 1, 2, 3, 4};
  const int n = 5;
  int64_t* sorted = device<int64_t>(n);
  int* permutation = device<int>(n);
  size_t bytes = 0;
  const auto sort = [&](void* storage, int end) {
    return cub::DeviceRadixSort::SortPairs(storage, bytes, device(keys), sorted, device(order),
                                           permutation, n, 0, end, s);
  };
  EXPECT_OK(sort(nullptr, 64));
  EXPECT_GT(bytes, 0u);
  EXPECT_EQ(sim::queued(), 0);
  char* storage = device<char>(static_cast<int64_t>(bytes));
  EXPECT_OK(sort(storage, 64));
  EXPECT_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(now(sorted, n), (std::vector<int64_t>{-1, -1, 3, 5, 5}));
  EXPECT_EQ(now(permutation, n), (std::vector<int>{1, 4, 3, 0, 2}));
  EXPECT_OK(sort(storage, 2));  // 5 = 1, -1 = 3 in two bits
  EXPECT_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(now(permutation, n), (std::vector<int>{0, 2, 1, 3, 4}));

  const int* flags = device(std::vector<int>{1, 0, 1, 1, 0});
  int* sums = device<int>(n);
  EXPECT_OK(cub::DeviceScan::ExclusiveSum(nullptr, bytes, flags, sums, n, s));
  storage = device<char>(static_cast<int64_t>(bytes));
  EXPECT_OK(cub::DeviceScan::ExclusiveSum(storage, bytes, flags, sums, n, s));
  EXPECT_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(now(sums, n), (std::vector<int>{0, 1, 1, 2, 3}));
  EXPECT_OK(cub::DeviceScan::InclusiveSum(storage, bytes, sums, sums, n, s));
  EXPECT_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(now(sums, n), (std::vector<int>{0, 1, 2, 4, 7}));
  int* selected = device<int>(1);
  EXPECT_OK(cub::DeviceSelect::Flagged(nullptr, bytes, permutation, flags, sums, selected, n, s));
  storage = device<char>(static_cast<int64_t>(bytes));
  EXPECT_OK(cub::DeviceSelect::Flagged(storage, bytes, permutation, flags, sums, selected, n, s));
  EXPECT_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(now(selected), 3);
  EXPECT_EQ(now(sums, 3), (std::vector<int>{0, 1, 3}));
}

}  // namespace
}  // namespace ga::cuda
