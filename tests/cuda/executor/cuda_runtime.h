// SPDX-License-Identifier: Apache-2.0
// Replaces NVIDIA's header when kernels are compiled as nvcc compiles them, with __CUDACC__ defined, and
// executed on the host (executor.hpp). The runtime is that of the simulated devices.
#pragma once

#include "../host/cuda_runtime.h"
#include "executor.hpp"

#define __shared__ static
#define __noinline__
#undef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __builtin_assume(condition) ga::sim::assume(condition)

struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct cudaFuncAttributes {};

template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*)(Kernel)) {
  return ga::sim::load(typeid(Kernel));
}

template <class>
struct Argument;
template <class Kernel>
struct Argument<void(Kernel)> {
  using Type = Kernel;
};

template <class Function>
cudaError_t cudaLaunchKernel(Function* run, dim3 blocks, dim3 threads, void** arguments, size_t,
                             cudaStream_t stream) {
  using Kernel = typename Argument<Function>::Type;
  const Kernel kernel = *static_cast<const Kernel*>(*arguments);
  return ga::sim::launch_grid(
      typeid(Kernel), sizeof(Kernel), blocks.x,
      [=] {
        ga::sim::execute(
            {typeid(Kernel).name(), reinterpret_cast<const void*>(run), blocks.x, threads.x},
            [&] { run(kernel); });
      },
      stream);
}

// ---- What kernels call ---------------------------------------------------------------------------------

#define GA_INTRINSIC \
  __attribute__((always_inline)) inline  // so that a call tells the kernel's line

#define threadIdx (ga::sim::thread_index())
#define blockIdx (ga::sim::block_index())
#define blockDim (ga::sim::block_size())
#define gridDim (ga::sim::grid_size())

GA_INTRINSIC void __syncthreads() { ga::sim::barrier(false); }
GA_INTRINSIC int __syncthreads_or(int x) { return ga::sim::barrier(x != 0) ? 1 : 0; }
GA_INTRINSIC void __threadfence() { ga::sim::fence(false); }
GA_INTRINSIC void __threadfence_system() { ga::sim::fence(true); }
GA_INTRINSIC double __shfl_xor_sync(unsigned mask, double x, int lanes) {
  return ga::sim::shuffle_xor(mask, x, lanes);
}
GA_INTRINSIC unsigned __shfl_xor_sync(unsigned mask, unsigned x, int lanes) {
  return static_cast<unsigned>(ga::sim::shuffle_xor(mask, x, lanes));
}
GA_INTRINSIC unsigned __ballot_sync(unsigned mask, int x) { return ga::sim::ballot(mask, x != 0); }
GA_INTRINSIC unsigned atomicInc(unsigned* at, unsigned most) {
  return ga::sim::atomic_inc(at, most);
}
GA_INTRINSIC int __ffs(int x) { return __builtin_ffs(x); }
GA_INTRINSIC double __fma_rn(double x, double y, double z) { return __builtin_fma(x, y, z); }
// And whether the address is aligned, which a device demands of every access.
template <class T>
GA_INTRINSIC bool __isGlobal(const T* p) {
  return ga::sim::is_global(p) && reinterpret_cast<uintptr_t>(p) % alignof(T) == 0;
}
