// SPDX-License-Identifier: Apache-2.0
// Side modules: parts of the library that need what a host may not have (oneDNN, CUDA, NCCL), each
// opened when first used. A module is libgradaccum_<name>.so and exports one function,
// ga_module_<name>, of the type ModuleEntry.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ga {

// Returns the module's table, whose first field is its ABI version as an int32_t; or NULL, with the
// reason in error.
using ModuleEntry = const void* (*)(char* error, size_t error_size);

// The table of module `name`, for the life of the process. Looks in the folder GA_MODULE_PATH if
// that is set, and only there; else beside this library (for the static one: beside the program),
// then where the loader looks. Throws GA_ERROR_UNSUPPORTED; may be tried again then. Any thread.
const void* open_module(const char* name, int32_t abi);

}  // namespace ga
