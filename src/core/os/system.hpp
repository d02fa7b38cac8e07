// SPDX-License-Identifier: Apache-2.0
// What the library asks of the operating system, beside files (files.hpp). Only this folder knows which system that is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ga::os {

// ---- Memory -------------------------------------------------------------------------------------

// Of any contents, at a multiple of a power of two. Throws std::bad_alloc.
void* allocate_aligned(size_t bytes, size_t alignment);
void free_aligned(void* data) noexcept;

// Whole pages of zeros, in huge pages where the system has them to spare, from a multiple of kHugePage on.
// Throws std::bad_alloc.
constexpr size_t kHugePage = size_t{2} << 20;
void* map_pages(size_t bytes);
void unmap_pages(void* data, size_t bytes) noexcept;

// ---- Processors ---------------------------------------------------------------------------------

// Bytes of the second-level cache of a core; 0 if the system does not tell.
int64_t second_level_cache();
// Bytes of the largest cache that a core reads through, which it may share with its neighbours; 0 if the system does
// not tell.
int64_t last_level_cache();
// On how many processors the calling thread may run; 1 if the system does not tell.
int usable_processors();

// ---- Libraries ----------------------------------------------------------------------------------

// The folder of the library or program that this code is part of, with a separator at its end; "" if the system does
// not tell.
std::string own_folder();
// The file of a library of ours: "libgradaccum_onednn.so".
std::string library_file(const char* name);
bool file_exists(const char* path);
// NULL if it cannot be opened. Hides the symbols of the library from others. It is never closed.
void* open_library(const char* path);
// NULL if the library has none of that name.
void* find_symbol(void* library, const char* name);
// Why the last of these two failed; NULL if the system gives no reason.
const char* library_error();

// ---- Threads ------------------------------------------------------------------------------------

// Runs run(data) on a new thread, on which no handler of the program runs for what is sent to the process. Nobody waits
// for its end. Returns false if the system has no thread to spare.
bool start_thread(void (*run)(void*), void* data);

// ---- The process --------------------------------------------------------------------------------

int64_t process_id();
// A variable of the environment; NULL if it is not set, or if the program has more rights than the user who set it.
const char* trusted_variable(const char* name);
// Has in_child called in each process that this one forks, and that they fork. Throws std::bad_alloc.
void at_fork(void (*in_child)());

}  // namespace ga::os
