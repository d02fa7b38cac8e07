/* A layer of batch normalisation over the micro-batches of a window.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <math.h>

#include "example.h"

enum { MICROS = 2, SAMPLES = 2, CHANNELS = 1 };

static float gamma_[CHANNELS] = {1}, beta[CHANNELS] = {0};
static float x[MICROS][SAMPLES] = {{0, 2}, {4, 6}}, y[MICROS][SAMPLES];
static float dy[MICROS][SAMPLES] = {{1, 0}, {0, 0}}, dx[MICROS][SAMPLES];

static ga_context* context(void) {
  ga_context* ctx = NULL;
  ga_context_create(NULL, &ctx);
  ga_optimizer sgd;
  ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH);
  sgd.lr = 0.1;
  ga_group_add(ctx, &sgd, NULL);
  ga_param_add(ctx, 0, "bn.weight", gamma_, GA_F32, 1, (int64_t[]){CHANNELS}, NULL, NULL);
  ga_param_add(ctx, 0, "bn.bias", beta, GA_F32, 1, (int64_t[]){CHANNELS}, NULL, NULL);
  return ctx;
}

/* Whether y is x, normalised by this mean and (biased) variance. */
static int is_normalised(const float* from, const float* to, double mean, double variance) {
  int right = 1;
  for (int i = 0; i < SAMPLES; ++i) right &= near(to[i], (from[i] - mean) / sqrt(variance + 1e-5));
  return right;
}

int main(void) {
  ga_context* ctx = context();
  ga_param gamma_id = 0, beta_id = 1;

  /* example: ga_bn_add */
  ga_bn_options options;
  ga_bn_options_init(&options, sizeof options, GA_FLAVOR_TORCH);
  options.mode = GA_BN_WINDOW; /* normalise by the statistics of the whole window */
  ga_bn bn;
  ga_bn_add(ctx, "bn", CHANNELS, gamma_id, beta_id, &options, &bn);
  /* end */

  /* example: ga_bn_finalize */
  /* Forward, in WINDOW mode: two passes over the micro-batches of the window. */
  for (int k = 0; k < MICROS; ++k) ga_bn_accumulate(ctx, bn, x[k], SAMPLES, 1);
  ga_bn_finalize(ctx, bn);
  for (int k = 0; k < MICROS; ++k) ga_bn_forward(ctx, bn, x[k], SAMPLES, 1, y[k]);
  /* end */
  int right = is_normalised(x[0], y[0], 3, 5) && is_normalised(x[1], y[1], 3, 5);

  /* example: ga_bn_backward_finalize */
  /* Backward, in WINDOW mode: two passes, each of which opens every micro-batch. */
  for (int k = 0; k < MICROS; ++k) {
    ga_micro_begin(ctx, k, SAMPLES, NULL);
    ga_bn_backward_accumulate(ctx, bn, x[k], dy[k], SAMPLES, 1);
    ga_micro_end(ctx);
  }
  ga_bn_backward_finalize(ctx, bn); /* required over several ranks only */
  for (int k = 0; k < MICROS; ++k) {
    ga_micro_begin(ctx, k, SAMPLES, NULL);
    ga_bn_backward(ctx, bn, x[k], dy[k], SAMPLES, 1, dx[k]);
    ga_micro_end(ctx);
  }
  ga_step(ctx, NULL); /* moves the running statistics too */
  /* end */
  right = right && near(beta[0], -0.1 * 0.5); /* dbeta: half the window has a mean of 1/2 ... */

  float mean[CHANNELS], variance[CHANNELS];
  /* example: ga_bn_running */
  int64_t steps;
  ga_bn_running(ctx, bn, mean, variance, GA_F32, &steps);
  /* end */
  right = right && near(mean[0], 0.1 * 3) && near(variance[0], 0.9 + 0.1 * 20 / 3) && steps == 1;
  ga_context_destroy(ctx);

  gamma_[0] = 1;
  beta[0] = 0;
  ctx = context();
  ga_bn_add(ctx, "bn", CHANNELS, gamma_id, beta_id, NULL, &bn);
  /* example: ga_bn_forward */
  /* In MICRO mode, the default: forward and backward in each micro-batch. */
  for (int k = 0; k < MICROS; ++k) {
    ga_bn_forward(ctx, bn, x[k], SAMPLES, 1, y[k]);
    ga_micro_begin(ctx, -1, SAMPLES, NULL);
    ga_bn_backward(ctx, bn, x[k], dy[k], SAMPLES, 1, dx[k]);
    ga_micro_end(ctx);
  }
  ga_step(ctx, NULL);
  /* end */
  right = right && is_normalised(x[0], y[0], 1, 1) && is_normalised(x[1], y[1], 5, 1);
  ga_bn_running(ctx, bn, mean, variance, GA_F32, &steps);
  right =
      right && near(mean[0], 0.1 * 3) && near(variance[0], 0.9 + 0.1 * 20 / 3); /* exact here too */
  ga_context_destroy(ctx);
  return result(right);
}
