// SPDX-License-Identifier: Apache-2.0
// Compares headers of safetensors files.
#pragma once

#include "files/safetensors.hpp"

namespace ga::test {

inline bool same(const safetensors::Tensor& a, const safetensors::Tensor& b) {
  return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.begin == b.begin &&
         a.end == b.end;
}

inline bool same(const safetensors::Header& a, const safetensors::Header& b) {
  if (a.metadata != b.metadata || a.tensors.size() != b.tensors.size()) return false;
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    if (!same(a.tensors[i], b.tensors[i])) return false;
  }
  return true;
}

// The JSON text in what write() returns.
inline std::string_view json_of(std::string_view written) {
  return written.substr(safetensors::kLengthBytes);
}

}  // namespace ga::test
