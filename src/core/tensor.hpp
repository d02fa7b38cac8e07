// SPDX-License-Identifier: Apache-2.0
// Names and sizes of dtypes; shapes as messages have them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gradaccum/gradaccum.h"

namespace ga {

struct DtypeInfo {
  const char* name;
  int32_t size;           // bytes of an element; 0: no such dtype
  bool floating;          // false for dtypes of indices
  const char* file_name;  // in safetensors
};

// Any dtype is legal; unknown ones have size 0.
inline DtypeInfo dtype_info(int32_t dtype) {
  static constexpr DtypeInfo table[] = {{"unknown", 0, false, ""}, {"f32", 4, true, "F32"},
                                        {"f64", 8, true, "F64"},   {"f16", 2, true, "F16"},
                                        {"bf16", 2, true, "BF16"}, {"i32", 4, false, "I32"},
                                        {"i64", 8, false, "I64"},  {"u8", 1, false, "U8"}};
  return table[dtype >= GA_F32 && dtype <= GA_U8 ? dtype : 0];
}

inline int64_t count_of(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

inline std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

}  // namespace ga
