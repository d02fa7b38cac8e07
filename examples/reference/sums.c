/* A program whose backward pass adds up by itself, over the whole window.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "example.h"

static float w[2], sums[2];

/* As in llm.c: gradient += the sum over the samples. */
static void backward(int samples) {
  for (int i = 0; i < 2; ++i) sums[i] += (float)(samples * (i + 1));
}

int main(void) {
  /* example: ga_gradient_life */
  ga_config config;
  ga_config_init(&config, sizeof config);
  config.gradient_kind = GA_GRADIENT_SUM;
  config.gradient_life = GA_GRADIENTS_LIVE; /* sums are read where they are */
  /* end */
  ga_context* ctx = context_of(&config, w, 2);

  /* example: ga_micro_end */
  /* backward adds to sums; the micro-batches before the last one are only counted. */
  for (int micro = 0; micro < 3; ++micro) {
    backward(16);
    ga_micro_begin(ctx, -1, 16, NULL);
    ga_micro_end(ctx);
  }
  backward(7);
  ga_accumulate(ctx, (const void*[]){sums}, 1, 7, NULL);
  ga_step(ctx, NULL);    /* divides by 16 + 16 + 16 + 7 */
  sums[0] = sums[1] = 0; /* for the next window */
  /* end */

  ga_context_destroy(ctx);
  return result(near(w[0], -0.1) && near(w[1], -0.2));
}
