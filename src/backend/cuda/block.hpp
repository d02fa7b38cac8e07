// SPDX-License-Identifier: Apache-2.0
// What kernels are written against. A kernel is a struct of plain data, its arguments, with a body
// in phases; each phase ends with a barrier, so that the next one sees what it has written:
//
//     struct Scale {
//       double* data;
//       int64_t count;
//       double factor;
//       GA_DEVICE void operator()(Block& block) const {
//         GA_SHARED double part[kThreads];
//         block.each([&](int thread) { ... part[thread] = ...; });
//         block.each_item(count, [&](int64_t i) { data[i] *= factor; });
//       }
//     };
//     launch(Scale{data, count, 2.0}, blocks, stream);
//
// nvcc compiles it to a kernel for the GPU, any other compiler to loops over the blocks and their
// threads, with the same bits if the body follows the rules in docs/architecture.md.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#ifndef __CUDACC__
#include <typeinfo>
#endif

#include "backend/cuda/kernels.hpp"
#include "core/error.hpp"
#include "core/hd.hpp"

// GA_APART: a function that is not inlined. GA_ROLLED: a loop that is not unrolled, to save
// registers.
#ifdef __CUDACC__
#define GA_SHARED __shared__
#define GA_APART __device__ __noinline__
#define GA_ROLLED _Pragma("unroll 1")
#else
#define GA_SHARED
#define GA_APART __attribute__((noinline))
#define GA_ROLLED
#endif

namespace ga::cuda {

constexpr int kThreads = 256;  // of a block
// Threads of a block that is a grid alone and uses only each_item, each_warp, each_lane_group and once: it waits for
// memory at each step, and more threads take fewer steps. Its kernel has kWide = true.
constexpr int kWideThreads = 1024;
constexpr int kLanes = 32;  // of a warp

// Bytes, from CUDA 12.1 and compute capability 7.0 on.
constexpr size_t kMostArguments = 32764;

struct Quad {
  double lane[4];
};

// One T for each thread of a block, not initialised: a register, or an array on the host.
template <class T>
class PerThread {
 public:
#ifdef __CUDACC__
  GA_DEVICE T& operator[](int) { return value_; }
  GA_DEVICE const T& operator[](int) const { return value_; }

 private:
  T value_;
#else
  GA_DEVICE T& operator[](int thread) { return values_[thread]; }
  GA_DEVICE const T& operator[](int thread) const { return values_[thread]; }

 private:
  T values_[kThreads];
#endif
};

// kSize lanes of a warp that share an item: 32 where there are few items of many numbers, 8 where there are
// many items of few. Every lane takes part in each call and gets its result, which does not depend on kSize.
template <int kSize>
class Team {
 public:
  // Number j mod 32 of 32 sums adds its f(j) in order of j; the sums are then added by the tree of
  // distances 16, 8, 4, 2, 1.
  template <class F>
  GA_DEVICE double sum(int64_t n, F f) const {
#ifdef __CUDACC__
    constexpr int kSums = kLanes / kSize;  // of a lane, kSize apart
    double sums[kSums] = {};
    GA_ROLLED
    for (int64_t j = lane(); j < n; j += kAhead * kSize) {
      double x[kAhead];
      for (int a = 0; a < kAhead; ++a) x[a] = j + a * kSize < n ? f(j + a * kSize) : 0.0;
      for (int a = 0; a < kAhead; ++a) sums[a % kSums] += x[a];
    }
    for (int half = kSums / 2; half > 0; half /= 2) {
      for (int s = 0; s < half; ++s) sums[s] += sums[s + half];
    }
    double total = sums[0];
    for (int distance = kSize / 2; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(mask(), total, distance);
    }
    return total;
#else
    double lanes[kLanes] = {};
    if (n <= kLanes) {
      for (int64_t j = 0; j < n; ++j) lanes[j] += f(j);
    } else {
      for (int64_t j = 0; j < n; ++j) lanes[j % kLanes] += f(j);
    }
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      for (int l = 0; l < distance; ++l) lanes[l] += lanes[l + distance];
    }
    return lanes[0];
#endif
  }

  // Whether f(j) for some j < n. f may not be called for all of them.
  template <class F>
  GA_DEVICE bool any(int64_t n, F f) const {
    return first(n, f) >= 0;
  }

  // The least f(j), +inf for none; NaN is passed over, and a zero is +0.
  template <class F>
  GA_DEVICE double smallest(int64_t n, F f) const {
    double least = HUGE_VAL;
#ifdef __CUDACC__
    GA_ROLLED
    for (int64_t j = lane(); j < n; j += kAhead * kSize) {
      double x[kAhead];
      for (int a = 0; a < kAhead; ++a) x[a] = j + a * kSize < n ? f(j + a * kSize) : HUGE_VAL;
      for (int a = 0; a < kAhead; ++a) least = smaller(x[a], least);
    }
    for (int distance = kSize / 2; distance > 0; distance /= 2) {
      least = smaller(__shfl_xor_sync(mask(), least, distance), least);
    }
#else
    for (int64_t j = 0; j < n; ++j) least = smaller(f(j), least);
#endif
    return least + 0.0;  // the order decides which of -0 and +0 is found
  }

  // The least j < n with f(j), or -1. f may be called for larger j too.
  template <class F>
  GA_DEVICE int64_t first(int64_t n, F f) const {
#ifdef __CUDACC__
    GA_ROLLED
    for (int64_t start = 0; start < n; start += kAhead * kSize) {
      bool is[kAhead];
      for (int a = 0; a < kAhead; ++a) {
        const int64_t j = start + a * kSize + lane();
        is[a] = j < n && f(j);
      }
      for (int a = 0; a < kAhead; ++a) {
        const unsigned found = __ballot_sync(mask(), is[a]) >> place();
        if (found != 0) return start + a * kSize + __ffs(static_cast<int>(found)) - 1;
      }
    }
#else
    for (int64_t j = 0; j < n; ++j) {
      if (f(j)) return j;
    }
#endif
    return -1;
  }

  // True in the one lane that writes a result.
  GA_DEVICE bool leader() const {
#ifdef __CUDACC__
    return lane() == 0;
#else
    return true;
#endif
  }

 private:
  GA_DEVICE static double smaller(double a, double b) { return a < b ? a : b; }

#ifdef __CUDACC__
  static constexpr int kAhead = 4;  // f(j) that a lane asks for before it uses the first

  GA_DEVICE static int lane() { return static_cast<int>(threadIdx.x) % kSize; }
  // Of the first lane in its warp.
  GA_DEVICE static int place() { return static_cast<int>(threadIdx.x) % kLanes / kSize * kSize; }
  GA_DEVICE static unsigned mask() { return 0xffffffffu >> (kLanes - kSize) << place(); }
#endif
};
using Warp = Team<kLanes>;
using LaneGroup = Team<8>;

class Block {
 public:
#ifdef __CUDACC__
  GA_DEVICE int64_t index() const { return blockIdx.x; }
  GA_DEVICE int64_t count() const { return gridDim.x; }
#else
  Block(int64_t index, int64_t count) : index_(index), count_(count) {}
  GA_DEVICE int64_t index() const { return index_; }
  GA_DEVICE int64_t count() const { return count_; }
#endif

  // f(thread) in all threads.
  template <class F>
  GA_DEVICE void each(F f) {
#ifdef __CUDACC__
    f(static_cast<int>(threadIdx.x));
    __syncthreads();
#else
    sim::each_thread(kThreads, f);
    sim::end_phase();
#endif
  }

  // f(i) for i in [0, n), neighbours in neighbouring threads.
  template <class F>
  GA_DEVICE void each_item(int64_t n, F f) {
#ifdef __CUDACC__
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) f(i);
    __syncthreads();
#else
    sim::each_thread(n < kThreads ? n : kThreads, [&](int thread) {
      for (int64_t i = thread; i < n; i += kThreads) f(i);
    });
    sim::end_phase();
#endif
  }

  // f(i, warp) for i in [0, n), in all lanes of a warp, neighbours in neighbouring ones.
  template <class F>
  GA_DEVICE void each_warp(int64_t n, F f) {
    each_team<kLanes>(n, f);
  }

  // f(i, lane group) for i in [0, n), in 8 lanes, neighbours in neighbouring ones.
  template <class F>
  GA_DEVICE void each_lane_group(int64_t n, F f) {
    each_team<8>(n, f);
  }

  // f() in one thread.
  template <class F>
  GA_DEVICE void once(F f) {
#ifdef __CUDACC__
    if (threadIdx.x == 0) f();
    __syncthreads();
#else
    f();
    sim::end_phase();
#endif
  }

  // True in all threads of the block that calls this last, which then sees what all blocks have
  // written before. The counter is in device memory, starts at 0 and is 0 again afterwards, for the
  // next launch or for a replay. All blocks of the grid have to call.
  GA_DEVICE bool last(unsigned* counter) { return last(counter, count()); }

  // The last of `blocks` blocks that share a counter.
  GA_DEVICE bool last(unsigned* counter, int64_t blocks) {
#ifdef __CUDACC__
    __shared__ bool last;
    const unsigned most = static_cast<unsigned>(blocks) - 1;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(counter, most) == most;
    __syncthreads();
    __threadfence();  // later reads see the writes of the other blocks
    return last;
#else
    if (static_cast<int64_t>(++*counter) < blocks) return false;
    *counter = 0;
    return true;
#endif
  }

  // Whether f(thread) in any thread; the same in all threads. A barrier.
  template <class F>
  GA_DEVICE bool any(F f) {
#ifdef __CUDACC__
    return __syncthreads_or(f(static_cast<int>(threadIdx.x)) ? 1 : 0) != 0;
#else
    bool any = false;
    sim::each_thread(kThreads, [&](int thread) { any = f(thread) || any; });
    sim::end_phase();
    return any;
#endif
  }

  // take(o, total) with the sum of the 32 lanes of lane group o, for o < kThreads / 8, in one of its threads.
  // Lane group o has the threads from 8o to 8o + 7, its thread q the lanes from 4q to 4q + 3. The lanes are
  // added by the tree of distances 16, 8, 4, 2, 1.
  template <class F>
  GA_DEVICE void lane_group_totals(const PerThread<Quad>& lanes, F take) {
#ifdef __CUDACC__
    const int thread = static_cast<int>(threadIdx.x);
    Quad quad = lanes[thread];
    for (int distance = 4; distance > 0; distance /= 2) {
      for (double& lane : quad.lane) lane += __shfl_xor_sync(0xffffffffu, lane, distance);
    }
    if (thread % 8 == 0) take(thread / 8, total(quad));
    __syncthreads();
#else
    sim::each_thread(kThreads / 8, [&](int lane_group) {
      Quad quads[8];
      for (int q = 0; q < 8; ++q) quads[q] = lanes[8 * lane_group + q];
      for (int distance = 4; distance > 0; distance /= 2) {
        for (int q = 0; q < distance; ++q) {
          for (int l = 0; l < 4; ++l) quads[q].lane[l] += quads[q + distance].lane[l];
        }
      }
      take(lane_group, total(quads[0]));
    });
    sim::end_phase();
#endif
  }

 private:
  GA_DEVICE static double total(const Quad& quad) {
    return (quad.lane[0] + quad.lane[2]) + (quad.lane[1] + quad.lane[3]);
  }

  template <int kSize, class F>
  GA_DEVICE void each_team(int64_t n, F f) {
    Team<kSize> team;
#ifdef __CUDACC__
    for (int64_t i = threadIdx.x / kSize; i < n; i += blockDim.x / kSize) f(i, team);
    __syncthreads();
#else
    constexpr int64_t kTeams = kThreads / kSize;
    sim::each_thread(n < kTeams ? n : kTeams, [&](int first) {
      for (int64_t i = first; i < n; i += kTeams) f(i, team);
    });
    sim::end_phase();
#endif
  }

#ifndef __CUDACC__
  int64_t index_;
  int64_t count_;
#endif
};

#ifdef __CUDACC__
// The least number of blocks that a multiprocessor must hold: Kernel::kBlocks, or 1. It limits the
// registers of a thread.
template <class Kernel, class = void>
constexpr int kResident = 1;
template <class Kernel>
constexpr int kResident<Kernel, std::void_t<decltype(Kernel::kBlocks)>> = Kernel::kBlocks;

template <class Kernel, class = void>
constexpr int kThreadsOf = kThreads;
template <class Kernel>
constexpr int kThreadsOf<Kernel, std::void_t<decltype(Kernel::kWide)>> =
    Kernel::kWide ? kWideThreads : kThreads;

template <class Kernel>
__global__ void __launch_bounds__(kThreadsOf<Kernel>, kResident<Kernel>)
    run(const __grid_constant__ Kernel kernel) {
  Block block;
  kernel(block);
}
#endif

// CUDA loads a kernel at its first launch, which may then wait for the device: a deadlock where the device
// waits for the host. So a context loads all kernels that this module launches when it is made.
class Loading {
 public:
  using Load = cudaError_t (*)();
  explicit Loading(Load load) : load_(load), next_(first_) { first_ = this; }
  static cudaError_t all() {
    cudaError_t error = cudaSuccess;
    for (const Loading* l = first_; l && error == cudaSuccess; l = l->next_) error = l->load_();
    return error;
  }

 private:
  static inline const Loading* first_ = nullptr;
  Load load_;
  const Loading* next_;
};

template <class Kernel>
cudaError_t load() {
#ifdef __CUDACC__
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, run<Kernel>);
#else
  return sim::load(typeid(Kernel));
#endif
}
template <class Kernel>
const Loading loading(load<Kernel>);

// Queues a copy of the kernel on the stream. Does nothing for 0 blocks.
template <class Kernel>
void launch(const Kernel& kernel, int64_t blocks, cudaStream_t stream) {
  static_cast<void>(&loading<Kernel>);
  static_assert(std::is_trivially_copyable_v<Kernel>, "a kernel is plain data");
  static_assert(sizeof(Kernel) <= kMostArguments, "a kernel's data travels as its arguments");
  if (blocks == 0) return;
  if (blocks < 0 || blocks > INT32_MAX) {
    fail(GA_ERROR_INTERNAL, "a kernel was to be launched with %lld blocks",
         static_cast<long long>(blocks));
  }
#ifdef __CUDACC__
  // Not <<<>>> with cudaGetLastError(), which would report an error that the program has left.
  void* arguments[] = {const_cast<Kernel*>(&kernel)};
  // The type is named because CUDA 12's header has a const here that g++ does not deduce.
  const cudaError_t error =
      cudaLaunchKernel<void(Kernel)>(run<Kernel>, dim3(static_cast<unsigned>(blocks)),
                                     dim3(kThreadsOf<Kernel>), arguments, 0, stream);
#else
  // The simulator that replaces CUDA in such a build.
  const cudaError_t error = sim::launch(
      typeid(Kernel), &kernel, sizeof(Kernel), blocks,
      [kernel](int64_t index, int64_t count) {
        Block block(index, count);
        kernel(block);
      },
      stream);
#endif
  if (error != cudaSuccess) {
    cudaGetLastError();  // reported here, so the program does not find it later
    fail(is_capture_error(error) ? GA_ERROR_INVALID_STATE : GA_ERROR_FAULT,
         "a kernel could not be launched: %s (%s)", cudaGetErrorString(error),
         cudaGetErrorName(error));
  }
}

}  // namespace ga::cuda
