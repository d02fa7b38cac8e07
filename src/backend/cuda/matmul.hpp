// SPDX-License-Identifier: Apache-2.0
// Matrix products by cuBLAS, which the first product of a context opens.
#pragma once

#include <cublas_v2.h>

#include "backend/backend.hpp"
#include "backend/cuda/kernels.hpp"
#include "backend/cuda/runtime.hpp"

namespace ga::cuda {

class MatmulEngine {
 public:
  explicit MatmulEngine(Runtime& runtime) : runtime_(runtime) {}
  ~MatmulEngine();
  MatmulEngine(const MatmulEngine&) = delete;
  MatmulEngine& operator=(const MatmulEngine&) = delete;

  // Throws GA_ERROR_UNSUPPORTED, std::bad_alloc, or GA_ERROR_INVALID_STATE while the stream is
  // being captured. Does nothing after the first success. The other functions need it.
  void open();
  void multiply(const MatmulTask& task);
  void orthogonalize(const OrthogonalizeTask& task);

 private:
  class Iterations;
  void check(cublasStatus_t status, const char* doing) const;
  cublasStatus_t choose_stream(cublasHandle_t handle);

  Runtime& runtime_;
  cublasHandle_t handle_ = nullptr;
  cudaStream_t stream_ = nullptr;  // of the handle
  void* workspace_ = nullptr;
  float* alpha_beta_ = nullptr;  // for a product whose scale only the device knows
};

}  // namespace ga::cuda
