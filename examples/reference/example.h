/* What the programs of this folder share. The reference of the C functions shows what stands in them between
 * "example: <functions>" and "end"; statuses are left out there, so each program ends with result(), which fails if
 * a call of the library has failed, or if a number is not the one that was computed by hand.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef GRADACCUM_EXAMPLES_REFERENCE_EXAMPLE_H_
#define GRADACCUM_EXAMPLES_REFERENCE_EXAMPLE_H_

#include <stdio.h>
#include <stdlib.h>

#include "gradaccum/gradaccum.h"

static inline int result(int numbers_are_right) {
  const char* message = ga_last_error();
  if (message[0]) fprintf(stderr, "a call has failed: %s\n", message);
  if (!numbers_are_right) fprintf(stderr, "a number is wrong\n");
  return message[0] || !numbers_are_right ? EXIT_FAILURE : EXIT_SUCCESS;
}

static inline int near(double x, double y) { return x - y < 1e-5 && y - x < 1e-5; }

/* A context with one parameter "w" of n elements, which SGD updates with the learning rate 0.1. config may be NULL. */
static inline ga_context* context_of(const ga_config* config, float* w, int64_t n) {
  ga_context* ctx = NULL;
  ga_context_create(config, &ctx);
  ga_optimizer sgd;
  ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH);
  sgd.lr = 0.1;
  ga_group group;
  ga_group_add(ctx, &sgd, &group);
  ga_param_add(ctx, group, "w", w, GA_F32, 1, &n, NULL, NULL);
  return ctx;
}

#endif /* GRADACCUM_EXAMPLES_REFERENCE_EXAMPLE_H_ */
