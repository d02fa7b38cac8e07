/* SPDX-License-Identifier: Apache-2.0
 *
 * A libgradaccum_onednn.so whose products fail, or whose function table has version FAKE_ABI. */
#include <stddef.h>

#include "backend/cpu/matmul_module.h"

#ifndef FAKE_ABI
#define FAKE_ABI GA_MATMUL_ABI
#endif

static const char* multiply(int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                            int64_t lda, int transpose_a, const float* b, int64_t ldb,
                            int transpose_b, float beta, float* c, int64_t ldc, float* workspace) {
  (void)m, (void)n, (void)k, (void)alpha, (void)a, (void)lda, (void)transpose_a, (void)b, (void)ldb;
  (void)transpose_b, (void)beta, (void)ldc, (void)workspace;
  c[0] = 42; /* a partial result */
  return "the engine broke";
}

const void* ga_module_onednn(char* error, size_t error_size);

#ifdef FAKE_NEEDS_RUNTIME
void dnnl_sgemm(void);
#endif

const void* ga_module_onednn(char* error, size_t error_size) {
  static const ga_matmul_module module = {FAKE_ABI, "a fake oneDNN", multiply, NULL, 0};
  (void)error, (void)error_size;
#ifdef FAKE_NEEDS_RUNTIME
  dnnl_sgemm();
#endif
  return &module;
}
