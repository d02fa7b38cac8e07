// SPDX-License-Identifier: Apache-2.0
// CUDA devices on the host, for tests. cuda_runtime.h, cublas_v2.h and cub/cub.cuh in this folder
// have NVIDIA's declarations and work on these devices. The simulation guarantees only what CUDA
// guarantees, so that a program that relies on more fails:
//
//   - Device memory lies in pages that are accessible only while work of the device runs (protect):
//     host code that touches device memory crashes, and so does work that touches another device's
//     memory. Each allocation ends before a page that is never accessible, its memory starts as 0xff,
//     and freed memory is never used again. The few bytes between an allocation and a page or an
//     alignment are checked when it is freed. Pinned memory is guarded in the same way, but the host
//     can access it. Opening and closing a device costs next to nothing with protection keys in the
//     processor (GA_SIM_PROTECTION_KEYS=0 pretends that there are none), some microseconds where Linux
//     has guard pages (6.13; GA_SIM_GUARD_PAGES=0 pretends that it has none), and elsewhere about a
//     microsecond per allocation and more for its pages.
//   - Work runs when something waits for it (deferred), stream by stream, or at once.
//   - Some blocks run at a time, in order of their index or in reverse order: a phase of one, then a phase of
//     another. The threads of a phase run in any order. Where the compiler can do so, shared memory is filled with
//     a pattern at first. GA_SIM_SEED chooses the orders.
//   - A context loads a kernel at its first launch, which then waits for the device and breaks a capture,
//     unless the kernel was loaded before.
//   - Kernels, library calls and events need the context of their stream to be the thread's, and an older
//     driver or device takes kernels with 4 KB of arguments only.
//   - A fault stays: from then on every call that needs the device returns it.
//
// Not simulated: threads that run at the same time (executor/executor.hpp finds races between lanes), kernels
// that read plain host memory while pageable_access is off, pools, priorities, timing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace ga::sim {

// The environment variable in brackets sets the initial value of a process.
struct Config {
  bool deferred = false;         // [GA_SIM_DEFERRED]
  bool protect = true;           // [GA_SIM_PROTECT]
  bool reverse_blocks = false;   // [GA_SIM_REVERSE_BLOCKS]
  bool pageable_access = false;  // [GA_SIM_PAGEABLE_ACCESS]
  bool host_page_tables = true;  // what gives pageable_access; false: memory management of Linux
  bool registered_apart =
      false;                 // the device has registered memory at another address than the host
  bool known_only = false;   // asking about an address that CUDA does not know is an error
  bool memory_pools = true;  // [GA_SIM_MEMORY_POOLS]
  int devices = 2;           // [GA_SIM_DEVICES], at most 8; 0 acts as driver = 100
  int driver = cudaSuccess;  // [GA_SIM_DRIVER], error of every call, such as 35 or 100
  int driver_version = CUDART_VERSION;  // 0 with driver = 35
  int major = 9;                        // compute capability
  int minor = 0;
  int multiprocessors = 3;  // [GA_SIM_MULTIPROCESSORS]
  int l2_bytes = 4 << 20;
  size_t memory = size_t{16} << 30;  // of a device
};
Config config();
void configure(const Config& config);

// These functions make the n-th operation from now on fail, once; 0: none.
// An allocation of any kind of memory: cudaErrorMemoryAllocation.
void fail_allocation(int64_t n);
// A call that queues a kernel, a copy, a fill, a library's work, a host function or a graph.
void fail_call(int64_t n, cudaError_t error);
// A kernel, copy, fill or library's work when it runs: cudaErrorIllegalAddress, which is sticky.
void fail_execution(int64_t n);

// Contexts of the driver. A device has a primary one, which the runtime makes and uses where no other
// one is current in the thread, and which costs memory; the program can make others.
CUcontext make_context(int device);
bool has_primary_context(int device);
CUcontext current_context();  // of the calling thread; NULL: none
void set_current_context(CUcontext context);
// The n-th cuCtxSetCurrent from now on switches and then fails; 0: none.
void fail_switch(int64_t n = 1);

struct Counters {
  int64_t launches = 0;                      // calls that launch kernels, captured ones included
  std::map<std::string, int64_t> by_kernel;  // launches by the kernel's type
  int64_t library_calls = 0;                 // of cuBLAS and CUB, which launch kernels of their own
  std::map<std::string, int64_t> by_library;
  int64_t graph_launches = 0;
  int64_t executed = 0;    // kernels that ran, replays included
  int64_t late_loads = 0;  // launches of kernels that were not loaded, which wait for the device
  int64_t copies = 0;      // calls of cudaMemcpyAsync and cudaMemcpy
  int64_t copied_bytes = 0;
  int64_t pageable_copies = 0;  // copies of memory that is not pinned, for which CUDA may wait
  int64_t fills = 0;
  int64_t synchronizations = 0;  // calls that wait for work, cudaFree and cudaMemcpy included
  int64_t queries = 0;
  int64_t pointer_queries = 0;  // what memory an address is of
  int64_t allocations = 0;      // calls, of any kind of memory
  int64_t frees = 0;
  int64_t device_bytes = 0;  // allocated now, on all devices; cudaMallocManaged's included
  int64_t device_bytes_peak = 0;
  int64_t pinned_bytes = 0;

  // Launches of the kernels whose type name contains part.
  int64_t launches_of(std::string_view part) const;
};
Counters counters();
void reset_counters();  // device_bytes and pinned_bytes stay; the peak starts from there

// Runs all queued work on all devices; not counted.
void finish();
int64_t queued();  // works not run yet

// Restores the state of a new process: runs queued work, then removes memory, streams and events,
// clears faults and errors, cancels pending failures and resets the counters.
void reset();

// Reads or writes device memory at once, outside the order of any stream; not counted.
void peek(void* to, const void* device, size_t size);
void poke(void* device, const void* from, size_t size);

}  // namespace ga::sim
