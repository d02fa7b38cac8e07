// SPDX-License-Identifier: Apache-2.0
// libgradaccum_onednn.so: matrix products by oneDNN 2.6 or 3.x. Only this file includes oneDNN.
//
// The products use oneDNN's sgemm, not its matmul primitive with a sum post-op: alpha and beta are
// arguments of the call, nothing is created or kept per shape, and sgemm was measured to be as fast
// or faster in both major versions (1024 x 1024 from a batch of 64: the same; from 16: 0.6 of the
// time; 768 x 3072 from 1024: 0.45). It runs on the calling thread, and the core cuts a product
// into one piece per thread: as sgemm cuts, threads share cache lines of C (2.5 times the time at
// 512 x 784 from a batch of 4 on two threads), and the program may have threads of its own.

#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <cstdio>
#include <type_traits>

#include "backend/cpu/matmul_module.h"
#include "core/module.hpp"

// Functions of the OpenMP that oneDNN uses, whichever that is; NULL if oneDNN uses none. Weak, and
// not those of the compiler's OpenMP, which may be another one.
extern "C" {
__attribute__((weak)) int omp_get_max_threads();
__attribute__((weak)) void omp_set_num_threads(int);
}

namespace {

// oneDNN asks OpenMP how many threads to use; the number belongs to the calling thread.
class OneThread {
 public:
  OneThread() : before_(is_openmp() ? omp_get_max_threads() : 0) {
    if (before_ > 1) omp_set_num_threads(1);
  }
  ~OneThread() {
    if (before_ > 1) omp_set_num_threads(before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  static bool is_openmp() { return omp_get_max_threads && omp_set_num_threads; }
  int before_;
};

const char* text_of(dnnl_status_t status) {
  return status == dnnl_success             ? nullptr
         : status == dnnl_out_of_memory     ? "out of memory"
         : status == dnnl_invalid_arguments ? "arguments refused"
         : status == dnnl_unimplemented     ? "not implemented for this product"
                                            : "failed while it ran";
}

const char* multiply(int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                     int transpose_a, const float* b, int64_t ldb, int transpose_b, float beta,
                     float* c, int64_t ldc, float*) noexcept {
  if (m == 0 || n == 0) return nullptr;
  if (k == 0) {  // an empty sum, for which oneDNN would still check a and b
    if (beta == 0)
      for (int64_t row = 0; row < m; ++row) std::fill_n(c + row * ldc, n, 0.0f);
    return nullptr;
  }
  try {
    const OneThread one_thread;
    return text_of(dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', m, n, k, alpha, a,
                              lda, b, ldb, beta, c, ldc));
  } catch (...) {
    return "threw an exception";
  }
}

// An object of oneDNN, which belongs to this one.
template <class T, dnnl_status_t (*kDestroy)(T)>
class Owned {
 public:
  Owned() = default;
  ~Owned() {
    if (object_) kDestroy(object_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  T* out() { return &object_; }
  operator T() const { return object_; }

 private:
  T object_ = nullptr;
};

#if DNNL_VERSION_MAJOR >= 3
using Form = Owned<dnnl_memory_desc_t, dnnl_memory_desc_destroy>;
#else
class Form {
 public:
  dnnl_memory_desc_t* out() { return &form_; }
  operator const dnnl_memory_desc_t*() const { return &form_; }

 private:
  dnnl_memory_desc_t form_ = {};
};
constexpr auto dnnl_memory_desc_create_with_strides = dnnl_memory_desc_init_by_strides;
#endif

// A matrix in the memory of the program, for an engine of the CPU.
class Matrix {
 public:
  dnnl_status_t create(dnnl_engine_t engine, const void* data, dnnl_data_type_t type, int64_t rows,
                       int64_t columns, int64_t ld, bool transposed) {
    const dnnl_dims_t shape = {rows, columns};
    const dnnl_dims_t strides = {transposed ? 1 : ld, transposed ? ld : 1};
    const dnnl_status_t status =
        dnnl_memory_desc_create_with_strides(form.out(), 2, shape, type, strides);
    if (status != dnnl_success) return status;
    return dnnl_memory_create(memory.out(), form, engine, const_cast<void*>(data));
  }

  Form form;
  Owned<dnnl_memory_t, dnnl_memory_destroy> memory;
};

// By oneDNN's matmul primitive, since its interface has no gemm of bf16. oneDNN keeps what it made
// for a shape: from the second one on, a product takes 2 us more than its arithmetic.
const char* multiply_bf16(int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t lda,
                          int transpose_a, const uint16_t* b, int64_t ldb, int transpose_b,
                          float* c, int64_t ldc) noexcept {
  try {
    const OneThread one_thread;
    Owned<dnnl_engine_t, dnnl_engine_destroy> engine;
    Owned<dnnl_stream_t, dnnl_stream_destroy> stream;
    Owned<dnnl_primitive_desc_t, dnnl_primitive_desc_destroy> form;
    Owned<dnnl_primitive_t, dnnl_primitive_destroy> product;
    Matrix x, y, z;
    dnnl_status_t status = dnnl_engine_create(engine.out(), dnnl_cpu, 0);
    const auto then = [&](auto&& call) {
      if (status == dnnl_success) status = call();
    };
    then([&] { return dnnl_stream_create(stream.out(), engine, dnnl_stream_default_flags); });
    then([&] { return x.create(engine, a, dnnl_bf16, m, k, lda, transpose_a != 0); });
    then([&] { return y.create(engine, b, dnnl_bf16, k, n, ldb, transpose_b != 0); });
    then([&] { return z.create(engine, c, dnnl_f32, m, n, ldc, false); });
#if DNNL_VERSION_MAJOR >= 3
    then([&] {
      return dnnl_matmul_primitive_desc_create(form.out(), engine, x.form, y.form, nullptr, z.form,
                                               nullptr);
    });
#else
    dnnl_matmul_desc_t matmul = {};
    then([&] { return dnnl_matmul_desc_init(&matmul, x.form, y.form, nullptr, z.form); });
    then([&] { return dnnl_primitive_desc_create(form.out(), &matmul, nullptr, engine, nullptr); });
#endif
    then([&] { return dnnl_primitive_create(product.out(), form); });
    then([&] {
      const dnnl_exec_arg_t of[] = {
          {DNNL_ARG_SRC, x.memory}, {DNNL_ARG_WEIGHTS, y.memory}, {DNNL_ARG_DST, z.memory}};
      return dnnl_primitive_execute(product, stream, 3, of);
    });
    then([&] { return dnnl_stream_wait(stream); });
    return text_of(status);
  } catch (...) {
    return "threw an exception";
  }
}

// Without instructions for them, oneDNN widens the factors of a product of bf16 first. A set of
// instructions has the bits of every set that it includes.
bool has_products_of_bf16() {
  return (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_bf16) ==
         dnnl_cpu_isa_avx512_core_bf16;
}

// The file that contains a function.
const char* file_of(void* function) {
  Dl_info info;
  return dladdr(function, &info) != 0 && info.dli_fname ? info.dli_fname : "?";
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const void* ga_module_onednn(char* error,
                                                                               size_t error_size) {
  static_assert(std::is_same_v<decltype(&ga_module_onednn), ga::ModuleEntry>);
  // Before any other call: oneDNN's symbols have no versions, so if the program has loaded another
  // major version, our calls go there, with arguments that it does not understand.
  const dnnl_version_t& version = *dnnl_version();
  if (version.major != DNNL_VERSION_MAJOR) {
    std::snprintf(error, error_size,
                  "it was built for oneDNN %d.%d.%d, but its calls would end up in oneDNN %d.%d.%d "
                  "(%s), which this program has already loaded",
                  DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR, DNNL_VERSION_PATCH, version.major,
                  version.minor, version.patch, file_of(reinterpret_cast<void*>(&dnnl_version)));
    return nullptr;
  }
  struct Module {
    char text[64];
    ga_matmul_module table;
    explicit Module(const dnnl_version_t& v)
        : text{},
          table{GA_MATMUL_ABI, text, multiply, has_products_of_bf16() ? multiply_bf16 : nullptr,
                0} {
      std::snprintf(text, sizeof text, "oneDNN %d.%d.%d", v.major, v.minor, v.patch);
    }
  };
  static const Module module(version);
  return &module.table;
}
