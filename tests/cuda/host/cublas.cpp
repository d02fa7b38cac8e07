// SPDX-License-Identifier: Apache-2.0
// The functions of cublas_v2.h.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <vector>

#include "cublas_v2.h"
#include "engine.hpp"

using namespace ga::sim;

struct cublasContext {
  int device;
  cudaStream_t stream = nullptr;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  void* workspace = nullptr;
  size_t workspace_size = 0;
};

namespace {

struct Half {
  uint16_t bits;
};

struct Bfloat {
  uint16_t bits;
};

template <class T>
T value(T x) {
  return x;
}

// An f32 as a tensor core takes it in a product of TF32: to the nearest number of 11 significant bits.
struct Tf32 {
  float x;
};

float value(Tf32 t) {
  if (!std::isfinite(t.x)) return t.x;
  int exponent = 0;
  const float fraction = std::frexp(t.x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, 11)), exponent - 11);
}

float value(Bfloat x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

float value(Half x) {
  const int exponent = (x.bits >> 10) & 31;
  const int fraction = x.bits & 1023;
  float magnitude;
  if (exponent == 31) {
    magnitude = fraction == 0 ? HUGE_VALF : std::nanf("");
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  }
  return (x.bits & 0x8000) != 0 ? -magnitude : magnitude;
}

struct Product {
  bool transpose_a, transpose_b;
  int64_t m, n, k;
  const void* a;
  const void* b;
  void* c;
  int64_t lda, ldb, ldc;
};

// Returns op(x), rows x columns, in the type of the product, column by column.
template <class In, class Real>
std::vector<Real> panel(const void* x, bool transpose, int64_t rows, int64_t columns, int64_t ld) {
  std::vector<Real> result(static_cast<size_t>(rows * columns));
  const auto* from = static_cast<const In*>(x);
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = 0; i < rows; ++i) {
      result[static_cast<size_t>(j * rows + i)] = value(from[transpose ? i * ld + j : j * ld + i]);
    }
  }
  return result;
}

// If alpha is 0, a and b are not read; if beta is 0, c is not read.
template <class In, class Real>
void multiply(const Product& p, Real alpha, Real beta) {
  std::vector<Real> sum(static_cast<size_t>(p.m));
  std::vector<Real> a, b;
  const int64_t k = alpha == Real{0} ? 0 : p.k;
  if (k > 0) {
    a = panel<In, Real>(p.a, p.transpose_a, p.m, p.k, p.lda);
    b = panel<In, Real>(p.b, p.transpose_b, p.k, p.n, p.ldb);
  }
  for (int64_t j = 0; j < p.n; ++j) {
    std::fill(sum.begin(), sum.end(), Real{0});
    for (int64_t l = 0; l < k; ++l) {
      const Real factor = b[static_cast<size_t>(j * k + l)];
      const Real* column = a.data() + l * p.m;
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += column[i] * factor;
    }
    Real* out = static_cast<Real*>(p.c) + j * p.ldc;
    for (size_t i = 0; i < sum.size(); ++i) {
      out[i] = beta == Real{0} ? alpha * sum[i] : alpha * sum[i] + beta * out[i];
    }
  }
}

template <class In, class Real>
cublasStatus_t queue(cublasContext* handle, const Product& product, const void* alpha,
                     const void* beta) {
  const auto* alpha_at = static_cast<const Real*>(alpha);
  const auto* beta_at = static_cast<const Real*>(beta);
  const bool on_host = handle->pointers == CUBLAS_POINTER_MODE_HOST;
  const Real alpha_now = on_host ? *alpha_at : Real{0};
  const Real beta_now = on_host ? *beta_at : Real{0};
  void* const workspace = handle->workspace;
  const size_t scratch = std::min(handle->workspace_size, size_t{4096});
  const cudaError_t error = library_call(
      "cublasGemmEx",
      [=] {
        if (scratch > 0) std::memset(workspace, 0xcd, scratch);
        multiply<In, Real>(product, on_host ? alpha_now : *alpha_at, on_host ? beta_now : *beta_at);
      },
      handle->stream);
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

// The handles that have been created and not yet destroyed.
std::list<std::unique_ptr<cublasContext>>& handles() {
  static std::list<std::unique_ptr<cublasContext>> list;
  return list;
}

}  // namespace

cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  const std::lock_guard<std::recursive_mutex> lock(Engine::get().mutex);
  if (entry_error() != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
  void* memory = nullptr;  // cuBLAS' own memory, an allocation that can fail like any other
  if (cudaMalloc(&memory, 256) != cudaSuccess) return CUBLAS_STATUS_ALLOC_FAILED;
  Engine::get().release(static_cast<char*>(memory));
  handles().push_back(std::make_unique<cublasContext>(cublasContext{current_device()}));
  *handle = handles().back().get();
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (Engine::get().config.driver != cudaSuccess) std::abort();  // crashes without a driver
  {
    const std::lock_guard<std::recursive_mutex> lock(Engine::get().mutex);
    handles().remove_if([&](const auto& known) { return known.get() == handle; });
  }
  return cudaDeviceSynchronize() == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                : CUBLAS_STATUS_INTERNAL_ERROR;
}

cublasStatus_t cublasGetVersion(cublasHandle_t, int* version) {
  *version = 130000;
  return CUBLAS_STATUS_SUCCESS;
}

// Setting a stream restores cuBLAS' own workspace.
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  handle->workspace = nullptr;
  handle->workspace_size = 0;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t* stream) {
  *stream = handle->stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void* workspace, size_t size) {
  const std::lock_guard<std::recursive_mutex> lock(Engine::get().mutex);
  const bool none = workspace == nullptr && size == 0;
  const Allocation* a = Engine::get().find(workspace);
  if (!none &&
      (a == nullptr || a->memory != Memory::kDevice || !Engine::get().valid(workspace, size) ||
       reinterpret_cast<uintptr_t>(workspace) % 256 != 0)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  handle->workspace = workspace;
  handle->workspace_size = size;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode) {
  handle->pointers = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = handle->pointers;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  handle->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = handle->math;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetAtomicsMode(cublasHandle_t, cublasAtomicsMode_t) {
  return CUBLAS_STATUS_SUCCESS;
}

const char* cublasGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR:
      return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_LICENSE_ERROR:
      return "CUBLAS_STATUS_LICENSE_ERROR";
  }
  return "unknown";
}

const char* cublasGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "an invalid value was used as an argument";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "the function failed to launch on the GPU";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "the functionality requested is not supported";
    default:
      return "an internal operation failed";
  }
}

cublasStatus_t cublasGemmEx_64(cublasHandle_t handle, cublasOperation_t op_a,
                               cublasOperation_t op_b, int64_t m, int64_t n, int64_t k,
                               const void* alpha, const void* a, cudaDataType type_a, int64_t lda,
                               const void* b, cudaDataType type_b, int64_t ldb, const void* beta,
                               void* c, cudaDataType type_c, int64_t ldc,
                               cublasComputeType_t compute, cublasGemmAlgo_t) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  const bool transpose_a = op_a != CUBLAS_OP_N;
  const bool transpose_b = op_b != CUBLAS_OP_N;
  if (m < 0 || n < 0 || k < 0 || lda < std::max<int64_t>(1, transpose_a ? k : m) ||
      ldb < std::max<int64_t>(1, transpose_b ? n : k) || ldc < std::max<int64_t>(1, m) ||
      alpha == nullptr || beta == nullptr) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (handle->device != current_device()) return CUBLAS_STATUS_EXECUTION_FAILED;
  if (m == 0 || n == 0) return CUBLAS_STATUS_SUCCESS;
  if (type_a != type_b) return CUBLAS_STATUS_NOT_SUPPORTED;
  const Product product{transpose_a, transpose_b, m, n, k, a, b, c, lda, ldb, ldc};
  const bool in_double = compute == CUBLAS_COMPUTE_64F || compute == CUBLAS_COMPUTE_64F_PEDANTIC;
  if (in_double && type_a == CUDA_R_64F && type_c == CUDA_R_64F) {
    return queue<double, double>(handle, product, alpha, beta);
  }
  if (in_double || type_c != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  switch (type_a) {
    case CUDA_R_32F:
      return compute == CUBLAS_COMPUTE_32F_FAST_TF32
                 ? queue<Tf32, float>(handle, product, alpha, beta)
                 : queue<float, float>(handle, product, alpha, beta);
    case CUDA_R_16F:
      return queue<Half, float>(handle, product, alpha, beta);
    case CUDA_R_16BF:
      return queue<Bfloat, float>(handle, product, alpha, beta);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasGemmStridedBatchedEx_64(
    cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int64_t m, int64_t n,
    int64_t k, const void* alpha, const void* a, cudaDataType type_a, int64_t lda,
    long long int stride_a, const void* b, cudaDataType type_b, int64_t ldb, long long int stride_b,
    const void* beta, void* c, cudaDataType type_c, int64_t ldc, long long int stride_c,
    int64_t batch, cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  if (batch < 0) return CUBLAS_STATUS_INVALID_VALUE;
  const auto at = [](const void* matrices, cudaDataType type, int64_t elements) {
    const int64_t size = type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2;
    return static_cast<const char*>(matrices) + size * elements;
  };
  for (int64_t i = 0; i < batch; ++i) {
    void* const to = const_cast<char*>(at(c, type_c, i * stride_c));
    const cublasStatus_t status = cublasGemmEx_64(
        handle, op_a, op_b, m, n, k, alpha, at(a, type_a, i * stride_a), type_a, lda,
        at(b, type_b, i * stride_b), type_b, ldb, beta, to, type_c, ldc, compute, algorithm);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  return CUBLAS_STATUS_SUCCESS;
}
