// SPDX-License-Identifier: Apache-2.0
// Executes kernels as a GPU does, as far as it matters for synchronisation: each thread of a block is a fibre
// with a stack of its own, and waits at barriers and in warp operations for those that have to come. Threads run
// in a random order, and blocks one after the other in a random order [GA_EXECUTOR_SEED].
//
// That finds what a test sees: wrong results, threads that wait for ever, a lane that a mask does not name. Data
// races are found whether or not the order makes them visible: the kernels are compiled with -fsanitize=thread,
// which calls a function at each access to memory, and these functions know the order that CUDA promises
// (races.hpp). ThreadSanitizer's own runtime does not know fences, and has no blocks of 1024 threads.
//
// What is found is printed, and the process ends with status 66.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace ga::sim {

struct Grid {
  const char* kernel;  // its type
  const void* code;    // an address in the module
  unsigned blocks, threads;
};

// Runs thread() in all threads of all blocks.
void execute(const Grid& grid, const std::function<void()>& thread);

struct Index {
  unsigned x;
};
Index thread_index();
Index block_index();
Index block_size();
Index grid_size();

bool barrier(bool any);  // whether any thread gave true
void fence(bool system);
double shuffle_xor(unsigned mask, double x, int lanes);
unsigned ballot(unsigned mask, bool x);
unsigned atomic_inc(unsigned* at, unsigned most);
bool is_global(const void* p);
void assume(bool condition);                                 // a promise to the compiler, checked
void store_vector(void* to, const void* from, size_t size);  // to an aligned address

}  // namespace ga::sim
