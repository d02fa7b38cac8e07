/* Training in bf16: a line is fitted to noisy samples of y = 3 x + 1. The optimizer updates master
 * weights in f32, the default for 16-bit parameters; their moving average (EMA) is evaluated.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "gradaccum/gradaccum.h"

enum { STEPS = 10000, MICROS = 8 }; /* windows of 8 micro-batches of one sample */

typedef union Float {
  float value;
  uint32_t bits;
} Float;

static float to_float(uint16_t bf16) { return (Float){.bits = (uint32_t)bf16 << 16}.value; }
static uint16_t to_bf16(float x) { return (uint16_t)(((Float){.value = x}.bits + 0x8000) >> 16); }

static void check(ga_status status) {
  if (status != GA_OK) {
    fprintf(stderr, "%s: %s\n", ga_status_name(status), ga_last_error());
    exit(EXIT_FAILURE);
  }
}

/* Stores the gradient of the squared error for a noisy sample, multiplied by the loss scale. */
static void backward(const uint16_t w[2], float scale, uint16_t gradient[2]) {
  const float x = (float)(rand() % 3 - 1), noise = (float)(rand() % 3 - 1), y = 3 * x + 1 + noise;
  const float dloss = scale * 2 * (to_float(w[0]) * x + to_float(w[1]) - y);
  gradient[0] = to_bf16(dloss * x);
  gradient[1] = to_bf16(dloss);
}

int main(void) {
  ga_context* ctx;
  check(ga_context_create(NULL, &ctx));
  ga_optimizer adam;
  check(ga_optimizer_init(&adam, sizeof adam, GA_OPTIMIZER_ADAM, GA_FLAVOR_TORCH));
  adam.lr = 0.05;
  ga_group group;
  check(ga_group_add(ctx, &adam, &group));
  uint16_t w[2] = {0}, gradient[2];
  check(ga_param_add(ctx, group, "line", w, GA_BF16, 1, (int64_t[]){2}, NULL, NULL));
  ga_schedule cosine;
  check(ga_schedule_init(&cosine, sizeof cosine, GA_SCHEDULE_COSINE));
  cosine.warmup_steps = 100;
  cosine.total_steps = 2 * STEPS; /* evaluated half-way, while weights still move */
  check(ga_group_set_schedule(ctx, group, &cosine));
  ga_clip clip;
  check(ga_clip_init(&clip, sizeof clip));
  clip.scope = GA_CLIP_GLOBAL;
  clip.max_norm = 1;
  check(ga_context_set_clip(ctx, &clip));
  ga_loss_scaler scaler; /* begins with 65536 */
  check(ga_loss_scaler_init(&scaler, sizeof scaler));
  check(ga_context_set_loss_scaler(ctx, &scaler));
  ga_ema ema;
  check(ga_ema_init(&ema, sizeof ema));
  check(ga_context_set_ema(ctx, &ema));

  double scale;
  for (int micro = 1; micro <= STEPS * MICROS; ++micro) {
    check(ga_loss_scale(ctx, &scale, NULL));
    backward(w, (float)scale, gradient);
    check(ga_accumulate(ctx, (const void*[]){gradient}, 1, 1, NULL));
    if (micro % MICROS == 0) check(ga_step(ctx, NULL));
  }
  const uint16_t old[2] = {w[0], w[1]};
  check(ga_ema_swap(ctx, 1));
  const float slope = to_float(w[0]), offset = to_float(w[1]); /* of the EMA */
  check(ga_ema_swap(ctx, 0));
  ga_context_destroy(ctx);
  printf("EMA %.3f and %.3f, should be 3 and 1; loss scale %.0f\n", slope, offset, scale);
  if (w[0] == old[0] && w[1] == old[1] && hypotf(slope - 3, offset - 1) < 0.1F) return EXIT_SUCCESS;
  fprintf(stderr, "the EMA is wrong, or the weights were not restored\n");
  return EXIT_FAILURE;
}
