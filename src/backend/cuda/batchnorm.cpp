// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/batchnorm.hpp"

#include <algorithm>

namespace ga::cuda {

BatchNorms::~BatchNorms() { runtime_.free(block_, bytes_); }

void BatchNorms::reserve(int64_t channels) {
  const int64_t partials = std::max(partials_, bn_slices(channels) * channels);
  const int64_t counters = std::max(counters_, channels);
  if (partials == partials_ && counters == counters_) return;
  const size_t bytes = static_cast<size_t>(partials) * sizeof(BnPartial) +
                       static_cast<size_t>(counters) * sizeof(unsigned);
  auto* const block = static_cast<char*>(runtime_.allocate(bytes));
  runtime_.free(block_, bytes_);
  block_ = block;
  bytes_ = bytes;
  partials_ = partials;
  counters_ = counters;
}

BnWorkspace BatchNorms::workspace() const {
  auto* const partials = reinterpret_cast<BnPartial*>(block_);
  return {partials, reinterpret_cast<unsigned*>(partials + partials_)};
}

}  // namespace ga::cuda
