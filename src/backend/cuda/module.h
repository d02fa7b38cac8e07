// SPDX-License-Identifier: Apache-2.0
// What libgradaccum_cuda.so offers the core: devices, and backends on them. One compiler builds
// both together, because classes and exceptions cross the boundary.
#pragma once

#include <cstdint>

#include "backend/backend.hpp"

namespace ga {

// Goes up with every change of CudaModule or of the functions of Backend.
constexpr int32_t kCudaAbi = 4;

// The C++ runtime, whose types and exceptions cross the boundary too.
#if defined(_LIBCPP_ABI_VERSION)
constexpr size_t kCxxRuntime = 1000 + _LIBCPP_ABI_VERSION;
#elif defined(_GLIBCXX_USE_CXX11_ABI)
constexpr size_t kCxxRuntime = 2000 + _GLIBCXX_USE_CXX11_ABI;
#else
constexpr size_t kCxxRuntime = 0;
#endif

// A hash that tells C++ runtimes apart, and different layouts of the shared types, as far as their sizes differ.
template <class... Type>
constexpr uint64_t layout_of() {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const uint64_t value :
       {sizeof(Type)..., kCxxRuntime,
        static_cast<size_t>(10000 * GA_VERSION_MAJOR + 100 * GA_VERSION_MINOR + GA_VERSION_PATCH)})
    hash = (hash ^ value) * 0x100000001b3;
  return hash;
}

constexpr uint64_t cuda_layout() {
  return layout_of<Settings, GroupInput, GroupState, ParamInput, ParamState, ParamPlan, Control,
                   WindowTotals, Composites, AccumulateTask, RowsTask, NormTask, UnitTask,
                   UpdateTask, FinishTask, FactorTask, MatmulTask, OrthogonalizeTask, UnitPattern,
                   MicroInput, MicroPlan, TaskTables, ScalarTables, RankRecord, ga_step_result,
                   ga_config>();
}

struct CudaModule {
  int32_t abi;       // kCudaAbi
  uint64_t layout;   // cuda_layout()
  const char* text;  // "CUDA 13.0 for sm_80, sm_90"

  // Both throw Error. device_count: GA_ERROR_UNSUPPORTED with the reason if there is no device.
  int32_t (*device_count)();
  // The program's stream must outlive the backend, or be replaced by another (Backend::set_stream).
  Backend* (*make)(const ga_config& config);
  // As CUDA has them: 1000 * major + 10 * minor; 0: there is no driver.
  void (*versions)(int32_t& runtime, int32_t& driver);
};

}  // namespace ga
