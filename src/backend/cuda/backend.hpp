// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backend/backend.hpp"

namespace ga::cuda {

// See CudaModule::make.
Backend* make_backend(int32_t ordinal, void* stream);

}  // namespace ga::cuda
