// SPDX-License-Identifier: Apache-2.0
// After fork() the child has the memory of its parent, but neither its threads nor its devices. So
// the child cannot use the contexts of the parent, and must not use OpenMP: gcc's waits in the
// child for threads that only the parent has. The library's own threads (thread_pool.hpp) start anew there.
#pragma once

#include <atomic>
#include <cstdint>

namespace ga {

// Registers a handler that counts forks; throws std::bad_alloc. Called when the library is loaded,
// because the program may use OpenMP before it has a context, and for every context.
void watch_forks();

// The number of forks between the process that loaded the library and this one.
extern std::atomic<uint32_t> fork_generation;

inline uint32_t process_generation() { return fork_generation.load(std::memory_order_relaxed); }

}  // namespace ga
