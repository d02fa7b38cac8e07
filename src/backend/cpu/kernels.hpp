// SPDX-License-Identifier: Apache-2.0
// The CPU's kernels, each over one chunk, compiled once per ISA level from kernels.cpp. All levels
// give the same bits.
#pragma once

#include "backend/cpu/batchnorm_kernels.hpp"
#include "backend/cpu/matmul_module.h"
#include "backend/tasks.hpp"

namespace ga::cpu {

using UpdateLoop = void (*)(const UpdateTask& task, int64_t offset, int64_t count);

struct Kernels {
  // Each works on chunk [offset, offset + count) of a task. stream: stores bypass the caches.
  void (*accumulate)(const AccumulateTask& task, int64_t offset, int64_t count, bool stream);
  void (*norm)(const NormTask& task, int64_t offset, int64_t count);
  void (*finish)(const FinishTask& task, int64_t offset, int64_t count);
  UpdateLoop follow;             // updates the EMA alone
  const UpdateLoop* update[2];   // [UpdateTask::f64][position in AllOps]
  const UpdateLoop* measure[2];  // as update; NULL if an Op has no such pass
  // Stores the sums of the squares of the units in a piece of a tensor.
  void (*unit_norms)(const UnitTask& task, int64_t piece);
  void (*binned)(const BinnedTask& task, int64_t offset, int64_t count);
};

struct Isa {
  const char* name;
  bool (*supported)();
  const Kernels& (*kernels)();
  const BnKernels& (*batchnorm)();
  const ga_matmul_module& (*products)();  // of f32, see product.cpp
};

// The level that GA_CPU_ISA names, else the best one of this processor. Throws Error.
const Isa& choose_isa();

}  // namespace ga::cpu
