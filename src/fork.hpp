// SPDX-License-Identifier: Apache-2.0
// fork(): the child has the memory of its parent, but neither its threads nor its devices. So the
// contexts of the parent cannot be used there, and OpenMP must not be: gcc's waits in the child for
// threads that the parent has.
#pragma once

#include <atomic>
#include <cstdint>

namespace ga {

// Throws std::bad_alloc where forks cannot be watched. Called when the library is loaded, since the
// program may have threads of OpenMP before it has a context, and with every context.
void watch_forks();

// How many forks there were between the process that loaded the library and this one.
extern std::atomic<uint32_t> fork_generation;

inline uint32_t process_generation() { return fork_generation.load(std::memory_order_relaxed); }

}  // namespace ga
