/* Updates while backward runs, and gradients whose memory may go early.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "example.h"

enum { LAYERS = 3 };

static float weights[LAYERS], gradients[LAYERS];
static ga_param params[LAYERS];
static int freed;

static void backward(int layer) { gradients[layer] = 1; }

/* example: ga_gradients_kept */
/* Gives back the gradients that the library will not read again, by their numbers. */
static void free_gradients(ga_context* ctx, void (*give_back)(int64_t number)) {
  static int64_t next = 1;
  ga_kept_info kept;
  ga_kept_info_init(&kept, sizeof kept);
  ga_gradients_kept(ctx, next, &kept);
  for (; next < kept.oldest; ++next) give_back(next);
}
/* end */

static void give_back(int64_t number) { freed += number == freed + 1; }

int main(void) {
  ga_config config;
  ga_config_init(&config, sizeof config);
  config.eager = 1;
  ga_context* ctx = NULL;
  ga_context_create(&config, &ctx);
  ga_optimizer sgd;
  ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH);
  sgd.lr = 0.5;
  ga_group group;
  ga_group_add(ctx, &sgd, &group);
  const char* const names[LAYERS] = {"1", "2", "3"};
  for (int layer = 0; layer < LAYERS; ++layer) {
    ga_param_add(ctx, group, names[layer], &weights[layer], GA_F32, 0, NULL, NULL, &params[layer]);
  }

  ga_step_result step;
  ga_step_result_init(&step, sizeof step);
  /* example: ga_params_ready */
  ga_micro_options last; /* with ga_config.eager = 1 */
  ga_micro_options_init(&last, sizeof last);
  last.flags = GA_MICRO_LAST; /* updates begin when no micro-batch is to follow */
  ga_micro_begin(ctx, -1, 32, &last);
  for (int layer = LAYERS - 1; layer >= 0; --layer) {
    backward(layer);
    ga_accumulate_part(ctx, params[layer], &gradients[layer]);
    ga_params_ready(ctx, &params[layer], 1); /* no more gradients come to it */
  }
  ga_micro_end(ctx);
  ga_step(ctx, &step); /* decides, and does what is left */
  /* end */
  free_gradients(ctx, give_back);

  int right = step.eager == LAYERS && freed == LAYERS;
  for (int layer = 0; layer < LAYERS; ++layer) right &= near(weights[layer], -0.5);
  ga_context_destroy(ctx);
  return result(right);
}
