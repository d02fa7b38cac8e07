// SPDX-License-Identifier: Apache-2.0
// What libgradaccum_cuda.so offers the core: devices, and backends on them. Both are built together
// with one compiler: classes and exceptions cross between them.
#pragma once

#include <cstdint>

#include "backend/backend.hpp"

namespace ga {

// Goes up with every change of CudaModule.
constexpr int32_t kCudaAbi = 1;

// Tells one layout of what the two share from another, as far as sizes do.
constexpr uint64_t cuda_layout() {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const uint64_t size :
       {sizeof(Settings),
        sizeof(GroupInput),
        sizeof(GroupState),
        sizeof(ParamInput),
        sizeof(ParamState),
        sizeof(ParamPlan),
        sizeof(Control),
        sizeof(WindowTotals),
        sizeof(Composites),
        sizeof(AccumulateTask),
        sizeof(RowsTask),
        sizeof(NormTask),
        sizeof(UnitTask),
        sizeof(UpdateTask),
        sizeof(FinishTask),
        sizeof(FactorTask),
        sizeof(MatmulTask),
        sizeof(OrthogonalizeTask),
        sizeof(UnitPattern),
        sizeof(MicroInput),
        sizeof(MicroPlan),
        sizeof(TaskTables),
        sizeof(ScalarTables),
        sizeof(ga_step_result),
        static_cast<size_t>(10000 * GA_VERSION_MAJOR + 100 * GA_VERSION_MINOR + GA_VERSION_PATCH)})
    hash = (hash ^ size) * 0x100000001b3;
  return hash;
}

struct CudaModule {
  int32_t abi;       // kCudaAbi
  uint64_t layout;   // cuda_layout()
  const char* text;  // "CUDA 13.0 for sm_80, sm_90"

  // Both throw Error. device_count: GA_ERROR_UNSUPPORTED with the reason where there is none.
  int32_t (*device_count)();
  // On that device and the program's stream, a cudaStream_t; NULL: the default stream. The program
  // keeps it until the backend is deleted.
  Backend* (*make)(int32_t ordinal, void* stream);
};

}  // namespace ga
