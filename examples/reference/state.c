/* State by name, and state on disk.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <string.h>

#include "example.h"

enum { N = 3 };

/* A context with AdamW, for which the program has the state of another run. */
static ga_context* new_run(float* w) {
  ga_context* ctx = NULL;
  ga_context_create(NULL, &ctx);
  ga_optimizer adamw;
  ga_optimizer_init(&adamw, sizeof adamw, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH);
  ga_group_add(ctx, &adamw, NULL);
  ga_param_add(ctx, 0, "w", w, GA_F32, 1, (int64_t[]){N}, NULL, NULL);
  return ctx;
}

/* example: ga_state_describe */
/* Prints what the library keeps of a parameter, such as "exp_avg: 512 elements". */
static int list_state(ga_context* ctx, ga_param param) {
  int32_t count = 0;
  ga_state_count(ctx, param, &count);
  for (int32_t i = 0; i < count; ++i) {
    ga_state_info info;
    ga_state_info_init(&info, sizeof info);
    ga_state_describe(ctx, param, i, &info);
    printf("%s: %lld elements\n", info.name, (long long)info.count);
  }
  return count;
}
/* end */

int main(int argc, char** argv) {
  const char* const path = argc > 1 ? argv[1] : "state_example.safetensors";
  float w[N] = {1, 2, 3};
  const float dw[N] = {1, -1, 1};
  ga_context* ctx = new_run(w);
  const ga_param param = 0;

  /* example: ga_state_set */
  /* Goes on from step 1000 of a run of torch.optim.AdamW. */
  const float exp_avg[N] = {0.1F, 0.2F, 0.3F}, exp_avg_sq[N] = {0.01F, 0.02F, 0.03F};
  const int64_t torch_steps = 1000;
  ga_state_set(ctx, param, "exp_avg", exp_avg, GA_F32, N);
  ga_state_set(ctx, param, "exp_avg_sq", exp_avg_sq, GA_F32, N);
  ga_state_set(ctx, param, "step", &torch_steps, GA_I64, 1); /* last */
  /* end */
  int right = list_state(ctx, param) == 3;
  ga_accumulate(ctx, (const void*[]){dw}, 1, 32, NULL);
  ga_step(ctx, NULL);

  /* example: ga_state_get */
  float moment[N];
  ga_state_get(ctx, param, "exp_avg", moment, GA_F32, N);
  /* end */
  right = right && near(moment[0], 0.9 * 0.1 + 0.1) && near(moment[1], 0.9 * 0.2 - 0.1);

  /* example: ga_save */
  ga_state_options options;
  ga_state_options_init(&options, sizeof options);
  options.note = "epoch 3, sample 4096"; /* where the program goes on in its data */
  ga_save(ctx, path, &options);
  /* end */
  ga_accumulate(ctx, (const void*[]){dw}, 1, 32, NULL);
  ga_step(ctx, NULL);

  float resumed[N] = {0};
  ga_context* other = new_run(resumed);
  /* example: ga_load */
  /* other has the same groups and parameters as the context that was saved. */
  if (ga_load(other, path, NULL) != GA_OK) {
    fprintf(stderr, "%s\n", ga_last_error()); /* nothing has changed */
  }
  /* end */
  /* example: ga_state_note */
  char note[64];
  size_t size;
  ga_state_note(path, note, sizeof note, &size);
  /* end */
  ga_accumulate(other, (const void*[]){dw}, 1, 32, NULL);
  ga_step(other, NULL);
  right = right && strcmp(note, "epoch 3, sample 4096") == 0 &&
          size == sizeof "epoch 3, sample 4096" && memcmp(resumed, w, sizeof w) == 0;
  ga_context_destroy(other);
  remove(path);

  /* example: ga_save_to_memory */
  size_t bytes; /* the size first, then the state */
  ga_save_to_memory(ctx, NULL, NULL, 0, &bytes);
  void* copy = malloc(bytes);
  ga_save_to_memory(ctx, NULL, copy, bytes, &bytes);
  /* end */
  other = new_run(resumed);
  ga_load_from_memory(other, copy, bytes, NULL);
  right = right && memcmp(resumed, w, sizeof w) == 0;
  ga_context_destroy(other);
  free(copy);
  ga_context_destroy(ctx);
  return result(right);
}
