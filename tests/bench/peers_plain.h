// SPDX-License-Identifier: Apache-2.0
//
// The loops that a C programmer writes instead of using the library.
#ifndef GRADACCUM_TESTS_BENCH_PEERS_PLAIN_H_
#define GRADACCUM_TESTS_BENCH_PEERS_PLAIN_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct plain_adamw {
  float lr, beta1, beta2, eps, weight_decay;
  int step; /* 1 in the first update */
};

typedef void plain_update(float* p, float* m, float* v, const float* g, int64_t n,
                          const struct plain_adamw* with);

struct plain_loops {
  void (*add)(float* a, const float* g, int64_t n);
  float (*squares)(const float* g, int64_t n); /* their sum */
  void (*scale)(float* g, float factor, int64_t n);
  plain_update* adamw;
  plain_update* llmc_update; /* the formula of gpt2_update in llm.c */
};

/* -O3 -march=native -fno-math-errno; -Ofast -march=native, which are llm.c's flags too. */
extern const struct plain_loops plain_o3, plain_ofast;

#ifdef __cplusplus
}
#endif

#endif  // GRADACCUM_TESTS_BENCH_PEERS_PLAIN_H_
