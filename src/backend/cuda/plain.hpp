// SPDX-License-Identifier: Apache-2.0
// Plain contributions: one launch adds the gradients of any number of parameters.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/kernels.hpp"
#include "backend/cuda/lists.hpp"
#include "backend/cuda/runtime.hpp"

namespace ga::cuda {

class PlainTargets {
 public:
  PlainTargets(Runtime& runtime, AllChunks& chunks) : runtime_(runtime), chunks_(chunks) {}

  void reserve(int64_t params);
  // Plain tasks in one launch if they fit, then the others.
  void accumulate(Span<const AccumulateTask> tasks);

 private:
  bool is_plain(const AccumulateTask& task) const;
  void take(const AccumulateTask& task);
  void add(Span<const AccumulateTask> tasks, int sources);
  void launch(const AccumulateTask& like);

  Runtime& runtime_;
  AllChunks& chunks_;
  Buffer buffer_;  // a PlainTarget for each parameter
  size_t params_ = 0;
  std::vector<uintptr_t> gradients_, before_;    // by parameter, for accumulate_plain
  size_t first_ = 0, last_ = 0;                  // this call uses [first_, last_) of them
  size_t changed_first_ = 0, changed_last_ = 0;  // the targets to upload
  std::vector<unsigned long long> captures_;     // the last one in which a target was uploaded
  std::vector<AccumulateTask> others_;
};

}  // namespace ga::cuda
