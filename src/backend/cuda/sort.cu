// SPDX-License-Identifier: Apache-2.0
#include <cub/cub.cuh>

#include "backend/cuda/sort.hpp"

namespace ga::cuda {

cudaError_t sort_pairs(const SortTask& task, void* storage, size_t& storage_bytes,
                       cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(storage, storage_bytes, task.keys, task.sorted_keys,
                                         task.values, task.sorted_values, task.count, 0, task.bits,
                                         stream);
}

}  // namespace ga::cuda
