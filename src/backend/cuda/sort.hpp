// SPDX-License-Identifier: Apache-2.0
// Row numbers into order, by CUB.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace ga::cuda {

struct SortTask {
  const uint32_t* keys;
  const uint32_t* values;
  uint32_t* sorted_keys;
  uint32_t* sorted_values;
  int32_t count;
  int bits;  // of the keys, from the lowest on, that they are sorted by
};

// Stable. storage NULL: only storage_bytes <- what it needs.
cudaError_t sort_pairs(const SortTask& task, void* storage, size_t& storage_bytes,
                       cudaStream_t stream);

}  // namespace ga::cuda
