// SPDX-License-Identifier: Apache-2.0
// CUDA devices on the host, for tests: cuda_runtime.h, cublas_v2.h and cub/cub.cuh beside this file
// are declared as NVIDIA's and work on these. What is simulated is what a program may rely on, so
// that one that relies on more is found out:
//
//   - Device memory lies in pages that can be read and written only while work of its device runs
//     (protect): host code that touches it, and work that touches another device's, crashes. Each
//     allocation ends before a page that is never accessible, its memory starts as 0xff, and freed
//     memory is never used again. The few bytes up to a page or an alignment are checked when it is
//     freed. Pinned memory likewise, but for the host. Where the processor has no protection keys
//     (GA_SIM_PROTECTION_KEYS=0: as if), each work costs about a microsecond per allocation.
//   - Work is run when something waits for it (deferred), stream by stream, or at once.
//   - Blocks run in order of their index, or in the reverse order.
//   - A fault stays: every call that needs the device returns it from then on.
//
// Not simulated: threads that run at the same time (racing lanes are not found), kernels that read
// plain host memory where pageable_access is off, pools, priorities, timing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace ga::sim {

// The variable of the environment in brackets sets what a process starts with.
struct Config {
  bool deferred = false;                // [GA_SIM_DEFERRED]
  bool protect = true;                  // [GA_SIM_PROTECT]
  bool reverse_blocks = false;          // [GA_SIM_REVERSE_BLOCKS]
  bool pageable_access = false;         // [GA_SIM_PAGEABLE_ACCESS]
  bool memory_pools = true;             // [GA_SIM_MEMORY_POOLS]
  int devices = 2;                      // [GA_SIM_DEVICES], at most 8; 0: as driver = 100
  int driver = cudaSuccess;             // [GA_SIM_DRIVER], what every call returns, as 35 or 100
  int driver_version = CUDART_VERSION;  // 0 with driver = 35
  int major = 9;                        // compute capability
  int minor = 0;
  int multiprocessors = 3;  // [GA_SIM_MULTIPROCESSORS]
  int l2_bytes = 4 << 20;
  size_t memory = size_t{16} << 30;  // of a device
};
Config config();
void configure(const Config& config);

// The n-th from now on fails, once; 0: none.
// An allocation of any kind of memory: cudaErrorMemoryAllocation.
void fail_allocation(int64_t n);
// A call that queues a kernel, a copy, a fill, a library's work, a host function or a graph.
void fail_call(int64_t n, cudaError_t error);
// A kernel, copy, fill or library's work when it runs: cudaErrorIllegalAddress, which stays.
void fail_execution(int64_t n);

struct Counters {
  int64_t launches = 0;                      // of kernels, by calls; recorded ones too, replays not
  std::map<std::string, int64_t> by_kernel;  // the same, by the kernel's type
  int64_t library_calls = 0;                 // of cuBLAS and CUB, which launch kernels of their own
  std::map<std::string, int64_t> by_library;
  int64_t graph_launches = 0;
  int64_t executed = 0;  // kernels that ran, replays too
  int64_t copies = 0;    // calls of cudaMemcpyAsync and cudaMemcpy
  int64_t copied_bytes = 0;
  int64_t pageable_copies = 0;  // those that CUDA may make wait: not pinned
  int64_t fills = 0;
  int64_t synchronizations = 0;  // calls that wait for work, cudaFree and cudaMemcpy too
  int64_t queries = 0;
  int64_t allocations = 0;  // calls, of any kind of memory
  int64_t frees = 0;
  int64_t device_bytes = 0;  // held now, on all devices; cudaMallocManaged's too
  int64_t device_bytes_peak = 0;
  int64_t pinned_bytes = 0;

  // Of the kernels whose type's name contains that.
  int64_t launches_of(std::string_view part) const;
};
Counters counters();
void reset_counters();  // device_bytes and pinned_bytes stay; the peak starts from there

// Runs what is queued everywhere, and counts as nothing.
void finish();
int64_t queued();  // works not run yet

// The state of a new process: what is queued is run, then memory, streams and events are gone, faults
// and errors forgotten, failures called off, the counters 0.
void reset();

// Reads or writes device memory as it is now; not in the order of any stream, counts as nothing.
void peek(void* to, const void* device, size_t size);
void poke(void* device, const void* from, size_t size);

}  // namespace ga::sim
