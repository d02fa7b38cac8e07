/* SPDX-License-Identifier: Apache-2.0
 * What libgradaccum_onednn.so offers the core: matrix products on the CPU. Plain C: the two may be
 * built by different compilers. product.cpp has a table of the same kind. */
#ifndef GA_BACKEND_CPU_MATMUL_MODULE_H_
#define GA_BACKEND_CPU_MATMUL_MODULE_H_

#include <stdint.h>

/* Goes up with every change of the table. */
#define GA_MATMUL_ABI 3

typedef struct ga_matmul_module {
  int32_t abi;         /* GA_MATMUL_ABI */
  const char* version; /* "oneDNN 2.6.3": the one that is loaded */

  /* c [m x n] <- alpha op(a) op(b) + beta c, f32 and row-major, on the calling thread alone; may be
     called from several threads at once. op(a) is m x k and op(b) k x n; lda, ldb, ldc: elements
     from row to row as stored. With beta 0, c is not read. m, n and k may be 0. The workspace is as
     below, and the caller's. Returns NULL, or what went wrong: a static string, not a whole sentence. */
  const char* (*multiply)(int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                          int transpose_a, const float* b, int64_t ldb, int transpose_b, float beta,
                          float* c, int64_t ldc, float* workspace);

  /* c [m x n] <- op(a) op(b), with a and b of bf16 and c of f32; everything else is as for multiply.
     NULL if the processor has no instructions for such products, which would be slower than those of
     f32. */
  const char* (*multiply_bf16)(int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t lda,
                               int transpose_a, const uint16_t* b, int64_t ldb, int transpose_b,
                               float* c, int64_t ldc);

  int64_t workspace; /* elements that a call of multiply has for itself, from that pointer on */
} ga_matmul_module;

#endif
