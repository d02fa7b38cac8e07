// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/matmul.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <mutex>
#include <string>

#include "backend/newton_schulz.hpp"

namespace ga::cuda {
namespace {

// Bytes of our own workspace for cuBLAS, so that a captured graph holds it and no product
// allocates.
constexpr size_t kWorkspace = size_t{32} << 20;

// The functions of cuBLAS that are used. cuBLAS is opened at run time: it has 550 MB that most
// programs never need, and only matrix products fail without it.
struct Cublas {
  decltype(&cublasCreate) create;
  decltype(&cublasDestroy) destroy;
  decltype(&cublasSetStream) set_stream;
  decltype(&cublasSetWorkspace) set_workspace;
  decltype(&cublasSetPointerMode) set_pointer_mode;
  decltype(&cublasGemmEx_64) gemm;
  decltype(&cublasGemmStridedBatchedEx_64) gemm_batched;
  decltype(&cublasGetStatusString) status_string;
};

#ifdef GA_CUBLAS_LINKED

const Cublas& cublas() {
  static constexpr Cublas functions = {&cublasCreate,
                                       &cublasDestroy,
                                       &cublasSetStream,
                                       &cublasSetWorkspace,
                                       &cublasSetPointerMode,
                                       &cublasGemmEx_64,
                                       &cublasGemmStridedBatchedEx_64,
                                       &cublasGetStatusString};
  return functions;
}

#else

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool open_library(const char* file, Cublas& functions, std::string& reasons) {
  reasons += reasons.empty() ? "" : "; ";
  // Never closed, because all contexts of the process use it.
  void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library && find(library, "cublasCreate_v2", functions.create) &&
      find(library, "cublasDestroy_v2", functions.destroy) &&
      find(library, "cublasSetStream_v2", functions.set_stream) &&
      find(library, "cublasSetWorkspace_v2", functions.set_workspace) &&
      find(library, "cublasSetPointerMode_v2", functions.set_pointer_mode) &&
      find(library, "cublasGemmEx_64", functions.gemm) &&
      find(library, "cublasGemmStridedBatchedEx_64", functions.gemm_batched) &&
      find(library, "cublasGetStatusString", functions.status_string))
    return true;
  const char* const text = dlerror();
  reasons += text ? text : file;
  return false;
}

// Tries the major version of the build first, then the others that have the same functions.
const Cublas& cublas() {
  static std::mutex mutex;
  static bool found = false;
  static Cublas functions;
  const std::lock_guard<std::mutex> lock(mutex);
  if (found) return functions;
  std::string reasons;
  constexpr int kBuilt = CUDART_VERSION / 1000;
  for (const int major : {kBuilt, 13, 12}) {
    if (found || (major == kBuilt && !reasons.empty())) continue;
    found = open_library(("libcublas.so." + std::to_string(major)).c_str(), functions, reasons);
  }
  if (!found)
    fail(GA_ERROR_UNSUPPORTED, "matrix products on CUDA need cuBLAS 12 or later: %s",
         reasons.c_str());
  return functions;
}

#endif

cudaDataType type_of(int32_t dtype) {
  return dtype == GA_F16 ? CUDA_R_16F : dtype == GA_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

}  // namespace

MatmulEngine::~MatmulEngine() {
  if (handle_) {
    const DeviceScope scope(runtime_.context());
    const RelaxedCapture relaxed;
    // At the end of a process the driver may be gone before the context, and its memory with it.
    if (scope.error() == cudaSuccess) cublas().destroy(handle_);
  }
  runtime_.free(alpha_beta_);
  runtime_.free(workspace_);
}

void MatmulEngine::check(cublasStatus_t status, const char* doing) const {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  if (status == CUBLAS_STATUS_ALLOC_FAILED) throw std::bad_alloc();
  cudaGetLastError();
  fail(GA_ERROR_FAULT, "CUDA device %d: %s by cuBLAS failed: %s", runtime_.ordinal(), doing,
       cublas().status_string(status));
}

void MatmulEngine::open() {
  if (handle_) return;
  const Cublas& functions = cublas();
  runtime_.require_no_capture(
      "cuBLAS is to be set up for the first matrix product (run one before the capture)");
  if (!workspace_) {
    workspace_ = runtime_.allocate(kWorkspace);
    runtime_.count_own(kWorkspace);
  }
  if (!alpha_beta_) {
    alpha_beta_ = static_cast<float*>(runtime_.allocate(2 * sizeof(float)));
    runtime_.count_own(2 * sizeof(float));
  }
  const RelaxedCapture relaxed;  // cuBLAS allocates
  cublasHandle_t handle = nullptr;
  if (const cublasStatus_t status = functions.create(&handle); status != CUBLAS_STATUS_SUCCESS) {
    cudaGetLastError();
    if (status == CUBLAS_STATUS_ALLOC_FAILED) throw std::bad_alloc();
    fail(GA_ERROR_UNSUPPORTED, "cuBLAS cannot be used on CUDA device %d: %s", runtime_.ordinal(),
         functions.status_string(status));
  }
  const cublasStatus_t status = choose_stream(handle);
  if (status != CUBLAS_STATUS_SUCCESS) functions.destroy(handle);
  check(status, "setting up products");
  handle_ = handle;
}

// Has products run on the stream that the context has now (Backend::set_stream).
cublasStatus_t MatmulEngine::choose_stream(cublasHandle_t handle) {
  // In this order, because the choice of a stream resets the workspace.
  cublasStatus_t status = cublas().set_stream(handle, runtime_.stream());
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublas().set_workspace(handle, workspace_, kWorkspace);
  if (status == CUBLAS_STATUS_SUCCESS) stream_ = runtime_.stream();
  return status;
}

// A row-major matrix is the transpose of a column-major one, so C' = B' A'. In the default math
// mode cuBLAS multiplies f32 as f32 and as TF32 only where the task says so.
void MatmulEngine::multiply(const MatmulTask& t) {
  if (t.m == 0 || t.n == 0) return;
  const Queue& queue = runtime_.queue();
  if (t.k == 0) {  // an empty sum: a and b may be NULL
    if (!t.keep)
      runtime_.check(
          cudaMemsetAsync(t.target, 0,
                          static_cast<size_t>(t.m) * static_cast<size_t>(t.n) * sizeof(float),
                          queue.stream),
          "zeroing a product");
    return;
  }
  const auto alpha = static_cast<float>(t.scale);
  const float beta = t.keep ? 1 : 0;
  if (stream_ != queue.stream) check(choose_stream(handle_), "choosing the stream of products");
  const bool known = t.divisor == nullptr;  // else only the device knows the scale
  if (!known) scale_alpha(queue, t.scale, t.divisor, beta, alpha_beta_);
  check(cublas().set_pointer_mode(handle_,
                                  known ? CUBLAS_POINTER_MODE_HOST : CUBLAS_POINTER_MODE_DEVICE),
        "a matrix product");
  const cudaDataType type = type_of(t.dtype);
  const auto op = [](bool transpose) { return transpose ? CUBLAS_OP_T : CUBLAS_OP_N; };
  // For one row the caller may pass any stride, but cuBLAS checks the stride all the same.
  const int64_t lda = std::max(t.lda, t.transpose_a ? t.m : t.k);
  const int64_t ldb = std::max(t.ldb, t.transpose_b ? t.k : t.n);
  const float* const scale = known ? &alpha : alpha_beta_;
  const float* const keep = known ? &beta : alpha_beta_ + 1;
  const auto compute = t.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  if (t.batch > 1)
    check(cublas().gemm_batched(handle_, op(t.transpose_b), op(t.transpose_a), t.n, t.m, t.k, scale,
                                t.b, type, ldb, t.b_stride, t.a, type, lda, t.a_stride, keep,
                                t.target, CUDA_R_32F, t.n, t.target_stride, t.batch, compute,
                                CUBLAS_GEMM_DEFAULT),
          "a batch of matrix products");
  else
    check(cublas().gemm(handle_, op(t.transpose_b), op(t.transpose_a), t.n, t.m, t.k, scale, t.b,
                        type, ldb, t.a, type, lda, keep, t.target, CUDA_R_32F, t.n, compute,
                        CUBLAS_GEMM_DEFAULT),
          "a matrix product");
}

// The engine of NewtonSchulz.
class MatmulEngine::Iterations {
 public:
  explicit Iterations(MatmulEngine& engine) : engine_(engine), queue_(engine.runtime_.queue()) {}

  void multiply(const MatmulTask& task) { engine_.multiply(task); }
  void combine(const Combination& pass) { cuda::combine(queue_, pass); }
  void pack(const Cut& cut, float* x, int64_t first, int64_t count, float* to) {
    cuda::pack(queue_, cut, x, first, count, to, false);
  }
  void unpack(const Cut& cut, float* from, float* x, int64_t first, int64_t count) {
    cuda::pack(queue_, cut, x, first, count, from, true);
  }
  void scales(const MatrixRun& run, double eps, double* room, double* out) {
    sum_squares(queue_, run.x, run.size(), run.matrices, room, out);
    cuda::line_scales(queue_, out, run.matrices, eps);
  }
  void line_squares(const MatrixRun& run, bool of_columns, double* room, double* out) {
    if (of_columns)
      sum_columns(queue_, run, room, out);
    else
      sum_squares(queue_, run.x, run.columns, run.matrices * run.rows, room, out);
  }
  void line_scales(double* out, int64_t count, double eps) {
    cuda::line_scales(queue_, out, count, eps);
  }
  void variance_scales(const OrthogonalizeTask& task, int64_t first, int64_t matrices,
                       double* ratios, double* out) {
    cuda::variance_scales(queue_, task, first, matrices, ratios, out);
  }
  void scale_lines(const MatrixRun& run, const double* by_row, const double* by_column) {
    cuda::scale_lines(queue_, run, by_row, by_column);
  }

 private:
  MatmulEngine& engine_;
  const Queue& queue_;
};

void MatmulEngine::orthogonalize(const OrthogonalizeTask& task) {
  Iterations iterations(*this);
  const int64_t most = OrthogonalizeTask::at_once(task.cut);
  for (int64_t i = 0; i < task.cut.matrices; i += most)
    NewtonSchulz(task, iterations, i, std::min(most, task.cut.matrices - i), task.scratch).run();
}

}  // namespace ga::cuda
