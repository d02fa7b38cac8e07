/* How long windows are, what they hold, and how they end without a step.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <math.h>

#include "example.h"

/* example: ga_context_set_accum_schedule */
/* Windows of 2 micro-batches for the first 1000 steps, then of 8. */
static void grow_the_batch(ga_context* ctx) {
  const int64_t from_steps[2] = {0, 1000}, accum_steps[2] = {2, 8};
  ga_context_set_accum_schedule(ctx, from_steps, accum_steps, 2);
}
/* end */

/* example: ga_window */
/* Steps when the library has counted K micro-batches. */
static void step_if_full(ga_context* ctx) {
  ga_window_info window;
  ga_window_info_init(&window, sizeof window);
  ga_window(ctx, &window);
  if (window.state == GA_WINDOW_FULL) ga_step(ctx, NULL);
}
/* end */

/* example: ga_micro_options_init */
/* The last micro-batch of an epoch ends its window, however many are in it. */
static void accumulate_last(ga_context* ctx, const float* gradient, double weight) {
  ga_micro_options last;
  ga_micro_options_init(&last, sizeof last);
  last.flags = GA_MICRO_LAST;
  ga_accumulate(ctx, (const void*[]){gradient}, 1, weight, &last);
}
/* end */

/* example: ga_discard */
/* Under GA_NONFINITE_FAIL, ga_step leaves a window that is not finite as it is. */
static int step_or_drop(ga_context* ctx) {
  if (ga_step(ctx, NULL) != GA_ERROR_NONFINITE) return 1;
  fprintf(stderr, "%s\n", ga_last_error());
  ga_discard(ctx); /* parameters, state and counters are as before the window */
  return 0;
}
/* end */

static int64_t steps_of(ga_context* ctx) {
  ga_window_info window;
  ga_window_info_init(&window, sizeof window);
  ga_window(ctx, &window);
  return window.state == GA_WINDOW_EMPTY ? window.steps : -1;
}

int main(void) {
  float w = 1, dw = 1;
  ga_config config;
  ga_config_init(&config, sizeof config);
  config.nonfinite = GA_NONFINITE_FAIL;
  ga_context* ctx = context_of(&config, &w, 1);
  grow_the_batch(ctx);
  for (int micro = 0; micro < 5; ++micro) {
    ga_accumulate(ctx, (const void*[]){&dw}, 1, 1, NULL);
    step_if_full(ctx);
  }
  int right = steps_of(ctx) == -1; /* two steps, and one micro-batch in the third window */
  accumulate_last(ctx, &dw, 1);
  step_if_full(ctx);
  right = right && steps_of(ctx) == 3;

  ga_context_set_steps(ctx, 1000);
  for (int micro = 0; micro < 3; ++micro) {
    ga_accumulate(ctx, (const void*[]){&dw}, 1, 1, NULL);
    step_if_full(ctx);
  }
  accumulate_last(ctx, &dw, 1);
  step_if_full(ctx);
  right = right && steps_of(ctx) == 1001 && near(w, 1 - 4 * 0.1);
  if (result(right) != EXIT_SUCCESS) return EXIT_FAILURE;

  dw = INFINITY;
  accumulate_last(ctx, &dw, 1);
  right = !step_or_drop(ctx) && steps_of(ctx) == 1001 && near(w, 0.6);
  dw = 1;
  accumulate_last(ctx, &dw, 1);
  right = right && step_or_drop(ctx) && steps_of(ctx) == 1002 && near(w, 0.5);
  ga_context_destroy(ctx);
  return right ? EXIT_SUCCESS : EXIT_FAILURE;
}
