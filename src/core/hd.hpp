// SPDX-License-Identifier: Apache-2.0
// Functions for the host and for devices.
#pragma once

// Callable on host and device. Always inlined on the host: an object compiled for one ISA level
// must not export a function that the linker could pick for another. A long function that is called in many
// places is GA_CALLED: each object has its own.
#ifdef __CUDACC__
#define GA_HD __host__ __device__ __forceinline__
#define GA_CALLED static __host__ __device__ __attribute__((noinline)) inline
#define GA_DEVICE __device__ __forceinline__  // runs where the arrays live
#define GA_COLD GA_DEVICE                     // a part that the host's loops mostly skip
#else
#define GA_HD __attribute__((always_inline)) inline
#define GA_CALLED static __attribute__((noinline)) inline
#define GA_DEVICE GA_HD
#define GA_COLD __attribute__((noinline)) inline
#endif
