/* The first page of the documentation in C: 71 samples in micro-batches of 32, 32 and 7 make the step of one batch.
 * The program makes the step of that batch too, and fails if the parameters differ.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <math.h>
#include <stdio.h>

#include "gradaccum/gradaccum.h"

static float x[71][3], y[71];

/* Stores the gradient of the mean squared error of samples [first, end). */
static void backward(int first, int end, const float* w, float* dw) {
  for (int j = 0; j < 3; ++j) dw[j] = 0;
  for (int i = first; i < end; ++i) {
    const float error = w[0] * x[i][0] + w[1] * x[i][1] + w[2] * x[i][2] - y[i];
    for (int j = 0; j < 3; ++j) dw[j] += 2 * error * x[i][j] / (float)(end - first);
  }
}

int main(void) {
  for (int i = 0; i < 71; ++i) {
    y[i] = (float)(i % 5);
    for (int j = 0; j < 3; ++j) x[i][j] = (float)(i * (j + 2) % 7) / 4;
  }
  float w[3] = {1, 1, 1}, dw[3], batch[3];
  backward(0, 71, w, batch);
  for (int j = 0; j < 3; ++j) batch[j] = w[j] - 0.1F * batch[j];

  /* begin */
  ga_context* ctx;
  ga_context_create(NULL, &ctx);
  ga_optimizer sgd;
  ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH);
  sgd.lr = 0.1;
  ga_group group;
  ga_group_add(ctx, &sgd, &group);
  ga_param_add(ctx, group, "w", w, GA_F32, 1, (int64_t[]){3}, NULL, NULL);
  for (int first = 0; first < 71; first += 32) { /* 32, 32 and 7 samples */
    const int end = first + 32 < 71 ? first + 32 : 71;
    backward(first, end, w, dw); /* your code: a mean over the micro-batch */
    ga_accumulate(ctx, (const void*[]){dw}, 1, end - first, NULL);
  }
  ga_step(ctx, NULL); /* updates w as one batch of 71 would */
  /* end */

  ga_context_destroy(ctx);
  printf("w = %.6f %.6f %.6f\n", w[0], w[1], w[2]);
  for (int j = 0; j < 3; ++j) {
    if (!(fabsf(w[j] - batch[j]) <= 1e-6F)) return 1;
  }
  return 0;
}
