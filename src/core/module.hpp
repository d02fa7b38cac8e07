// SPDX-License-Identifier: Apache-2.0
// Side modules: parts of the library that need libraries that a host may not have (oneDNN, CUDA,
// MPI, NCCL), each opened when it is first used. A module is libgradaccum_<name>.so and exports one
// function, ga_module_<name>, of the type ModuleEntry.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ga {

// Returns the module's table, whose first field is its ABI version as an int32_t; or NULL, with the
// reason in error.
using ModuleEntry = const void* (*)(char* error, size_t error_size);

// Returns the table of module `name`, valid for the life of the process. Looks only in the folder
// GA_MODULE_PATH if that is set, else beside this library (or beside the program if the library is
// static), then where the loader looks. Throws GA_ERROR_UNSUPPORTED, after which it may be called
// again. Callable from any thread.
const void* open_module(const char* name, int32_t abi);
// As open_module(), but returns NULL if the module's file is nowhere.
const void* find_module(const char* name, int32_t abi);

}  // namespace ga
