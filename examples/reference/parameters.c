/* Parameters with options, in one block of memory, and an optimizer of the program's own.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <string.h>

#include "example.h"

int main(void) {
  ga_context* ctx = NULL;
  ga_context_create(NULL, &ctx);
  ga_optimizer sgd;
  ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH);
  sgd.lr = 0.5;
  ga_group group;
  ga_group_add(ctx, &sgd, &group);

  /* example: ga_param_options_init */
  uint16_t half[4] = {0}; /* bf16, with gradients in f32 and without master weights */
  ga_param_options options;
  ga_param_options_init(&options, sizeof options);
  options.gradient_dtype = GA_F32;
  options.master = GA_MASTER_NONE;
  options.rounding = GA_ROUND_STOCHASTIC; /* so that small updates count on average */
  ga_param_add(ctx, group, "half", half, GA_BF16, 1, (int64_t[]){4}, &options, NULL);
  /* end */

  float block[6] = {0};
  /* example: ga_params_add_flat */
  const int64_t matrix[2] = {2, 2}, vector[1] = {2};
  ga_flat_entry entries[2];
  for (int i = 0; i < 2; ++i) {
    ga_flat_entry_init(&entries[i], sizeof entries[i]);
    entries[i].group = group;
  }
  entries[0].name = "weight";
  entries[0].rank = 2;
  entries[0].shape = matrix;
  entries[1].name = "bias";
  entries[1].rank = 1;
  entries[1].shape = vector;
  entries[1].offset = 4; /* elements from the start of the block, of gradients too */
  ga_param weight;       /* the bias is weight + 1 */
  ga_params_add_flat(ctx, block, GA_F32, entries, 2, NULL, &weight);
  /* end */

  const float dhalf[4] = {1, 1, 1, 1}, dblock[6] = {1, 1, 1, 1, 1, 1};
  /* example: ga_param_set_frozen */
  ga_param_set_frozen(ctx, weight, 1); /* not updated, its gradient is not read */
  /* end */
  /* example: ga_param_set_lr_scale */
  ga_param_set_lr_scale(ctx, weight + 1, 0.5); /* half of its group's learning rate */
  /* end */
  ga_accumulate(ctx, (const void*[]){dhalf, dblock}, 2, 1, NULL);
  ga_step(ctx, NULL);
  int right = half[0] == 0xbf00 && near(block[0], 0) && near(block[5], -0.25); /* bf16's -0.5 */

  /* example: ga_param_bind */
  float* grown = malloc(12 * sizeof *grown); /* the program moves the block */
  memcpy(grown, block, sizeof block);
  ga_param_bind(ctx, weight, grown);
  ga_param_bind(ctx, weight + 1, grown + 4);
  /* end */
  ga_accumulate(ctx, (const void*[]){dhalf, dblock}, 2, 1, NULL);
  ga_step(ctx, NULL);
  right = right && near(block[5], -0.25) && near(grown[5], -0.5);

  /* example: ga_group_set_optimizer */
  ga_optimizer now;
  ga_optimizer_init(&now, sizeof now, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH);
  ga_group_optimizer(ctx, group, &now);
  now.lr = 0.25;
  now.weight_decay = 0.01;
  ga_group_set_optimizer(ctx, group, &now);
  /* end */
  ga_context_destroy(ctx);
  free(grown);

  float w[2] = {1, 1};
  const float dw[2] = {3, 4};
  ctx = NULL;
  ga_context_create(NULL, &ctx);
  /* example: ga_gradient */
  ga_optimizer external; /* the library does all but the update */
  ga_optimizer_init(&external, sizeof external, GA_OPTIMIZER_EXTERNAL, GA_FLAVOR_TORCH);
  ga_group_add(ctx, &external, &group);
  ga_param param;
  ga_param_add(ctx, group, "w", w, GA_F32, 1, (int64_t[]){2}, NULL, &param);
  ga_accumulate(ctx, (const void*[]){dw}, 1, 32, NULL);

  ga_step_result step;
  ga_step_result_init(&step, sizeof step);
  ga_step(ctx, &step);
  if (step.outcome == GA_STEP_APPLIED) {
    const void* gradient; /* averaged, unscaled, reduced over ranks, clipped */
    int64_t count;
    ga_gradient(ctx, param, &gradient, NULL, &count);
    for (int64_t i = 0; i < count; ++i) w[i] -= 0.1F * ((const float*)gradient)[i];
  }
  /* end */
  right = right && near(w[0], 0.7) && near(w[1], 0.6);
  ga_context_destroy(ctx);
  return result(right);
}
