// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace bench {

constexpr int64_t kContiguousChunk = 65536;  // elements

// Adds `count` elements, scaled, to an aligned target. squares: of each chunk, on the device.
void accumulate_contiguous(float* target, const float* gradient, int64_t count, float scale,
                           double* squares, int64_t blocks, cudaStream_t stream);

}  // namespace bench
