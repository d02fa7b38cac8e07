/* A context, groups, parameters, and a window.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <math.h>

#include "example.h"

static float w[2][3], b[2], dw[2][3], db[2];

/* Gradients of a loss of which micro-batch `micro` has the mean slope micro + 1 in every direction. */
static void backward(int micro) {
  for (int i = 0; i < 2; ++i) {
    db[i] = (float)(micro + 1);
    for (int j = 0; j < 3; ++j) dw[i][j] = (float)(micro + 1);
  }
}

int main(void) {
  /* example: ga_context_create */
  ga_config config;
  ga_config_init(&config, sizeof config);
  config.nonfinite = GA_NONFINITE_DROP_MICRO; /* leave out what holds a NaN */
  config.accum_steps = 3;                     /* a full window has 3 micro-batches */
  ga_context* ctx;
  ga_context_create(&config, &ctx);
  /* end */

  /* example: ga_group_add */
  ga_optimizer adamw;
  ga_optimizer_init(&adamw, sizeof adamw, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH);
  adamw.lr = 3e-4;
  ga_group weights, biases;
  ga_group_add(ctx, &adamw, &weights);
  adamw.weight_decay = 0; /* biases do not decay: a group of their own */
  ga_group_add(ctx, &adamw, &biases);
  /* end */

  /* example: ga_param_add */
  const int64_t shape[2] = {2, 3}; /* w is [outputs, inputs], b is [outputs] */
  ga_param weight, bias;
  ga_param_add(ctx, weights, "fc1.weight", w, GA_F32, 2, shape, NULL, &weight);
  ga_param_add(ctx, biases, "fc1.bias", b, GA_F32, 1, shape, NULL, &bias);
  /* end */

  /* example: ga_accumulate */
  const int samples[3] = {32, 32, 7};
  for (int micro = 0; micro < 3; ++micro) {
    backward(micro);                     /* your code: means over its samples */
    const void* gradients[2] = {dw, db}; /* in the order of ga_param_add */
    ga_accumulate(ctx, gradients, 2, samples[micro], NULL);
  }
  /* end */

  /* example: ga_step */
  ga_step_result step;
  ga_step_result_init(&step, sizeof step);
  ga_step(ctx, &step);
  if (step.outcome == GA_STEP_APPLIED) {
    printf("step of %g samples, norm %g\n", step.weight, step.norm);
  } else {
    printf("skipped: outcome %d\n", (int)step.outcome);
  }
  /* end */

  const double mean = (32 * 1 + 32 * 2 + 7 * 3) / 71.0; /* of each of the 8 elements */
  int right = weight == 0 && bias == 1 && step.outcome == GA_STEP_APPLIED &&
              near(step.weight, 71) && near(step.norm * step.norm / 8, mean * mean) &&
              near(w[1][2], -3e-4) && near(b[0], -3e-4); /* Adam's first step is lr */

  ga_window_info window;
  ga_window_info_init(&window, sizeof window);
  for (int micro = 0; micro < 3; ++micro) {
    backward(micro);
    if (micro == 1) db[0] = NAN;
    ga_accumulate(ctx, (const void*[]){dw, db}, 2, 1, NULL);
  }
  ga_window(ctx, &window);
  ga_step(ctx, &step);
  right = right && window.state == GA_WINDOW_FULL && step.outcome == GA_STEP_APPLIED &&
          step.window_dropped == 1;
  ga_context_destroy(ctx);
  return result(right);
}
