// SPDX-License-Identifier: Apache-2.0
// Finds data races of kernels: two accesses to the same byte, not both of them reads or atomic, with no order
// between them. What orders the accesses of a launch is as in PTX's memory model:
//
//   - the order of the program, in a thread;
//   - a barrier, in a block;
//   - a fence, then an atomic operation that writes to an address; another one that reads what it wrote, then a
//     fence. Atomic operations are relaxed: without the two fences there is no order. The fence and the atomic
//     operation may be in two threads with a barrier between them, as in Block::last().
//
// Nothing else: not the order in which threads of a warp or blocks happen to run. Launches are in order.
//
// Also found: shared memory that is read before its block has written it, and a store that the host may see
// before or after a volatile one to the same pinned memory, because no system fence is between them.
//
// Two stores of the same value are no race: both orders leave the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "executor.hpp"

namespace ga::sim {

// Called by the executor.
void begin_grid(const Grid& grid);
void begin_block(unsigned block);
void enter_thread(unsigned thread);  // the one that runs from now on
void leave_thread();
void pass_barrier();  // of all threads of the block
void pass_fence(bool system);
void pass_atomic(const void* at, const void* code);  // before the operation
void note_access(const void* at, size_t size, bool writes, const void* code);

enum class Space { kGlobal, kShared, kLocal };
Space space_of(const void* p);
void set_stacks(const char* begin, size_t each, unsigned count);
uintptr_t module_offset(const void* code);

// Prints what was found and where; code: the address of an instruction.
[[gnu::format(printf, 2, 3)]] void found(const void* code, const char* format, ...);
// As found(), and ends the process at once.
[[noreturn, gnu::format(printf, 2, 3)]] void found_fatal(const void* code, const char* format, ...);

}  // namespace ga::sim
