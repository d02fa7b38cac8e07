/* A first program: a linear model, trained on windows of 64 samples in micro-batches of 4. The last
 * window of an epoch holds 40 of the 1000 samples, and ga_step divides by 40.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "gradaccum/gradaccum.h"

enum { SAMPLES = 1000, FEATURES = 8, WINDOW = 64, MICRO = 4, EPOCHS = 20 };

static float features[SAMPLES][FEATURES], targets[SAMPLES];

static void check(ga_status status) {
  if (status != GA_OK) {
    fprintf(stderr, "%s: %s\n", ga_status_name(status), ga_last_error());
    exit(EXIT_FAILURE);
  }
}

static float uniform(void) { return 2.0F * (float)rand() / (float)RAND_MAX - 1.0F; }

/* Returns the mean squared error of samples [first, end) and stores its gradients. */
static float backward(int first, int end, const float* w, float b, float* dw, float* db) {
  const float n = (float)(end - first);
  float loss = 0;
  *db = 0;
  for (int j = 0; j < FEATURES; ++j) dw[j] = 0;
  for (int i = first; i < end; ++i) {
    float error = b - targets[i];
    for (int j = 0; j < FEATURES; ++j) error += w[j] * features[i][j];
    loss += error * error / n;
    *db += 2 * error / n;
    for (int j = 0; j < FEATURES; ++j) dw[j] += 2 * error * features[i][j] / n;
  }
  return loss;
}

int main(void) {
  for (int i = 0; i < SAMPLES; ++i) { /* targets = sum of (j + 1) * feature j, plus 0.5 */
    targets[i] = 0.5F;
    for (int j = 0; j < FEATURES; ++j) targets[i] += (float)(j + 1) * (features[i][j] = uniform());
  }

  ga_context* ctx;
  check(ga_context_create(NULL, &ctx));
  ga_optimizer sgd;
  check(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
  sgd.lr = 0.1;
  sgd.momentum = 0.9;
  ga_group group;
  check(ga_group_add(ctx, &sgd, &group));

  float w[FEATURES] = {0}, b = 0, dw[FEATURES], db;
  check(ga_param_add(ctx, group, "w", w, GA_F32, 1, (int64_t[]){FEATURES}, NULL, NULL));
  check(ga_param_add(ctx, group, "b", &b, GA_F32, 0, NULL, NULL, NULL));
  const void* gradients[2] = {dw, &db};

  for (int epoch = 1; epoch <= EPOCHS; ++epoch) {
    float loss = 0;
    for (int window = 0; window < SAMPLES; window += WINDOW) {
      const int end = window + WINDOW < SAMPLES ? window + WINDOW : SAMPLES;
      for (int first = window; first < end; first += MICRO) {
        const int last = first + MICRO < end ? first + MICRO : end;
        loss += backward(first, last, w, b, dw, &db) * (float)(last - first) / SAMPLES;
        check(ga_accumulate(ctx, gradients, 2, last - first, NULL));
      }
      check(ga_step(ctx, NULL));
    }
    if (epoch % 5 == 0) printf("epoch %2d: loss %.3g\n", epoch, loss);
  }
  ga_context_destroy(ctx);
  for (int j = 0; j < FEATURES; ++j) printf("w[%d] = %.4f, should be %d\n", j, w[j], j + 1);
  printf("b    = %.4f, should be 0.5\n", b);
  if (fabsf(b - 0.5F) < 1e-3F) return EXIT_SUCCESS;
  fprintf(stderr, "b is not 0.5\n");
  return EXIT_FAILURE;
}
