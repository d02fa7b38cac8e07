// SPDX-License-Identifier: Apache-2.0
// What the sums of layers with batch normalisation need beside their tensors: one workspace for all
// of them, since they run one after the other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/kernels.hpp"
#include "backend/cuda/runtime.hpp"

namespace ga::cuda {

class BatchNorms {
 public:
  explicit BatchNorms(Runtime& runtime) : runtime_(runtime) {}
  ~BatchNorms();
  BatchNorms(const BatchNorms&) = delete;
  BatchNorms& operator=(const BatchNorms&) = delete;

  // Throws std::bad_alloc and is as before then.
  void reserve(int64_t channels);
  int64_t bytes() const { return static_cast<int64_t>(bytes_); }
  BnWorkspace workspace() const;

 private:
  Runtime& runtime_;
  char* block_ = nullptr;  // partials, then counters
  size_t bytes_ = 0;
  int64_t partials_ = 0, counters_ = 0;
};

}  // namespace ga::cuda
