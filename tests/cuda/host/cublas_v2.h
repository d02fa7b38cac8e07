// SPDX-License-Identifier: Apache-2.0
// Replaces NVIDIA's header, as cuda_runtime.h in this folder does: matrix products.
#pragma once

#include <cuda_runtime.h>

typedef enum cudaDataType_t {
  CUDA_R_32F = 0,
  CUDA_R_64F = 1,
  CUDA_R_16F = 2,
  CUDA_R_16BF = 14
} cudaDataType;

typedef enum {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_NOT_INITIALIZED = 1,
  CUBLAS_STATUS_ALLOC_FAILED = 3,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_ARCH_MISMATCH = 8,
  CUBLAS_STATUS_MAPPING_ERROR = 11,
  CUBLAS_STATUS_EXECUTION_FAILED = 13,
  CUBLAS_STATUS_INTERNAL_ERROR = 14,
  CUBLAS_STATUS_NOT_SUPPORTED = 15,
  CUBLAS_STATUS_LICENSE_ERROR = 16
} cublasStatus_t;

typedef enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1, CUBLAS_OP_C = 2 } cublasOperation_t;
typedef enum { CUBLAS_POINTER_MODE_HOST = 0, CUBLAS_POINTER_MODE_DEVICE = 1 } cublasPointerMode_t;
typedef enum { CUBLAS_ATOMICS_NOT_ALLOWED = 0, CUBLAS_ATOMICS_ALLOWED = 1 } cublasAtomicsMode_t;
typedef enum { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 } cublasGemmAlgo_t;
typedef enum {
  CUBLAS_DEFAULT_MATH = 0,
  CUBLAS_PEDANTIC_MATH = 2,
  CUBLAS_TF32_TENSOR_OP_MATH = 3,
  CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
} cublasMath_t;
typedef enum {
  CUBLAS_COMPUTE_32F = 68,
  CUBLAS_COMPUTE_32F_PEDANTIC = 69,
  CUBLAS_COMPUTE_64F = 70,
  CUBLAS_COMPUTE_64F_PEDANTIC = 71,
  CUBLAS_COMPUTE_32F_FAST_TF32 = 77
} cublasComputeType_t;

typedef struct cublasContext* cublasHandle_t;

cublasStatus_t cublasCreate(cublasHandle_t* handle);
cublasStatus_t cublasDestroy(cublasHandle_t handle);
cublasStatus_t cublasGetVersion(cublasHandle_t handle, int* version);
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t* stream);
cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void* workspace, size_t size);
cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode);
cublasStatus_t cublasGetPointerMode(cublasHandle_t handle, cublasPointerMode_t* mode);
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode);
cublasStatus_t cublasSetAtomicsMode(cublasHandle_t handle, cublasAtomicsMode_t mode);
const char* cublasGetStatusName(cublasStatus_t status);
const char* cublasGetStatusString(cublasStatus_t status);

// c = alpha op(a) op(b) + beta c, column-major. a and b have the same type, f32, f16 or bf16, with
// c and the product in f32; or all are f64.
cublasStatus_t cublasGemmEx_64(cublasHandle_t handle, cublasOperation_t op_a,
                               cublasOperation_t op_b, int64_t m, int64_t n, int64_t k,
                               const void* alpha, const void* a, cudaDataType type_a, int64_t lda,
                               const void* b, cudaDataType type_b, int64_t ldb, const void* beta,
                               void* c, cudaDataType type_c, int64_t ldc,
                               cublasComputeType_t compute, cublasGemmAlgo_t algorithm);

// As many of them, whose matrices are so many elements apart.
cublasStatus_t cublasGemmStridedBatchedEx_64(
    cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int64_t m, int64_t n,
    int64_t k, const void* alpha, const void* a, cudaDataType type_a, int64_t lda,
    long long int stride_a, const void* b, cudaDataType type_b, int64_t ldb, long long int stride_b,
    const void* beta, void* c, cudaDataType type_c, int64_t ldc, long long int stride_c,
    int64_t batch, cublasComputeType_t compute, cublasGemmAlgo_t algorithm);

inline cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a,
                                   cublasOperation_t op_b, int m, int n, int k, const void* alpha,
                                   const void* a, cudaDataType type_a, int lda, const void* b,
                                   cudaDataType type_b, int ldb, const void* beta, void* c,
                                   cudaDataType type_c, int ldc, cublasComputeType_t compute,
                                   cublasGemmAlgo_t algorithm) {
  return cublasGemmEx_64(handle, op_a, op_b, m, n, k, alpha, a, type_a, lda, b, type_b, ldb, beta,
                         c, type_c, ldc, compute, algorithm);
}

inline cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t op_a,
                                  cublasOperation_t op_b, int m, int n, int k, const float* alpha,
                                  const float* a, int lda, const float* b, int ldb,
                                  const float* beta, float* c, int ldc) {
  return cublasGemmEx_64(handle, op_a, op_b, m, n, k, alpha, a, CUDA_R_32F, lda, b, CUDA_R_32F, ldb,
                         beta, c, CUDA_R_32F, ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

inline cublasStatus_t cublasDgemm(cublasHandle_t handle, cublasOperation_t op_a,
                                  cublasOperation_t op_b, int m, int n, int k, const double* alpha,
                                  const double* a, int lda, const double* b, int ldb,
                                  const double* beta, double* c, int ldc) {
  return cublasGemmEx_64(handle, op_a, op_b, m, n, k, alpha, a, CUDA_R_64F, lda, b, CUDA_R_64F, ldb,
                         beta, c, CUDA_R_64F, ldc, CUBLAS_COMPUTE_64F, CUBLAS_GEMM_DEFAULT);
}
