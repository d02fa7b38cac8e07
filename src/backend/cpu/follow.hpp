// SPDX-License-Identifier: Apache-2.0
// Master weights that follow what the program writes to their parameters. Included in the same way as vectors.hpp.
#pragma once

#include "backend/cpu/formats.hpp"

// Has the master weights of a tile be those of a parameter that the program may have written (kFollowed), and
// returns whether it has.
[[gnu::noinline]] bool follow_tile(const Array& copy, int64_t offset, int64_t count,
                                   float* masters) {
  alignas(64) uint16_t rounded[kTile];
  store<float>({rounded, copy.format}, 0, count, masters, 0, {false, 0});
  const uint16_t* const x = static_cast<const uint16_t*>(copy.data) + offset;
  if (std::memcmp(rounded, x, static_cast<size_t>(count) * sizeof *x) == 0) return false;
  const bool bf16 = copy.format == GA_BF16;
  for (int64_t i = 0; i < count; ++i)
    if (rounded[i] != x[i]) masters[i] = bf16 ? from_bf16(x[i]) : from_f16(x[i]);
  return true;
}

// UpdateTask::follows, for a tile.
GA_INLINE void follow_data(const UpdateTask& task, int64_t offset, int64_t count) {
  if (task.follows)
    follow_tile(task.copy, offset, count, static_cast<float*>(task.param.data) + offset);
}

template <class T>
const T* load_followed(const void* data, int64_t offset, int64_t count, T* tile) {
  const UpdateTask& update = *static_cast<const UpdateTask*>(data);
  alignas(64) float masters[kTile];
  std::memcpy(masters, static_cast<const float*>(update.param.data) + offset,
              static_cast<size_t>(count) * sizeof(float));
  follow_tile(update.copy, offset, count, masters);
  for (int64_t i = 0; i < count; ++i) tile[i] = static_cast<T>(masters[i]);
  return tile;
}
template <class T>
const T* load_followed_whole(const void* data, int64_t offset, int64_t count, T* tile) {
  return load_followed<T>(data, offset - static_cast<const UpdateTask*>(data)->first, count, tile);
}
