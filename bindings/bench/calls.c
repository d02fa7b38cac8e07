/* What calls cost in C; Calls.java and its like do the same in other languages. Prints a line for
 * each figure: its name and a number. Times are those of the processor, which other programs change
 * little.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "gradaccum/gradaccum.h"

enum { CALLS = 200000, TENSORS = 300, LARGE = 4 << 20, ROUNDS = 7 };

static void check(ga_status status) {
  if (status != GA_OK) {
    fprintf(stderr, "%s: %s\n", ga_status_name(status), ga_last_error());
    exit(EXIT_FAILURE);
  }
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

/* A context on one thread with that many parameters of that many elements. */
static ga_context* make(int tensors, int64_t elements, float* parameters) {
  ga_config config;
  check(ga_config_init(&config, sizeof config));
  config.num_threads = 1;
  ga_context* ctx;
  check(ga_context_create(&config, &ctx));
  ga_optimizer sgd;
  check(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
  ga_group group;
  check(ga_group_add(ctx, &sgd, &group));
  for (int i = 0; i < tensors; ++i) {
    char name[16];
    snprintf(name, sizeof name, "w%d", i);
    check(ga_param_add(ctx, group, name, parameters + i * elements, GA_F32, 1, &elements, NULL,
                       NULL));
  }
  return ctx;
}

static int ascending(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double median(double* rounds) {
  qsort(rounds, ROUNDS, sizeof *rounds, ascending);
  return rounds[ROUNDS / 2];
}

/* Nanoseconds of an accumulate. */
static double accumulates(int tensors, int64_t elements, int calls) {
  const size_t all = (size_t)tensors * (size_t)elements;
  float* parameters = malloc(all * sizeof *parameters);
  float* values = malloc(all * sizeof *values);
  const void* gradients[TENSORS];
  if (!parameters || !values) exit(EXIT_FAILURE);
  for (size_t i = 0; i < all; ++i) parameters[i] = values[i] = 1; /* pages of its own */
  for (int i = 0; i < tensors; ++i) gradients[i] = values + i * elements;
  ga_context* ctx = make(tensors, elements, parameters);
  double rounds[ROUNDS];
  for (int round = -1; round < ROUNDS; ++round) {
    const double start = now();
    for (int i = 0; i < calls; ++i) check(ga_accumulate(ctx, gradients, (size_t)tensors, 1, NULL));
    if (round >= 0) rounds[round] = (now() - start) / calls;
    check(ga_discard(ctx));
  }
  ga_context_destroy(ctx);
  free(values);
  free(parameters);
  return median(rounds);
}

static double steps(void) {
  float parameter = 0, gradient = 0;
  const void* gradients[1] = {&gradient};
  ga_context* ctx = make(1, 1, &parameter);
  ga_step_result result;
  check(ga_step_result_init(&result, sizeof result));
  double rounds[ROUNDS];
  for (int round = -1; round < ROUNDS; ++round) {
    const double start = now();
    for (int i = 0; i < CALLS; ++i) {
      check(ga_accumulate(ctx, gradients, 1, 1, NULL));
      check(ga_step(ctx, &result));
    }
    if (round >= 0) rounds[round] = (now() - start) / CALLS;
  }
  ga_context_destroy(ctx);
  return median(rounds);
}

int main(void) {
  printf("accumulate %.1f\n", accumulates(1, 1, CALLS));
  printf("accumulate_step %.1f\n", steps());
  printf("tensors %.1f\n", accumulates(TENSORS, 1, 2000));
  printf("large %.1f\n", accumulates(1, LARGE, 20));
  return EXIT_SUCCESS;
}
