/* SPDX-License-Identifier: Apache-2.0
 *
 * A plugin of some host, which trains. It is built twice: over the shared library, and with the archive in it.
 */
#include <gradaccum/gradaccum.h>
#include <stdio.h>
#include <stdlib.h>

#define GA_PLUGIN_EXPORT __attribute__((visibility("default")))

enum { kCount = 1 << 17 }; /* more than a thread takes alone */

static int ok(ga_status status, const char* call) {
  if (status != GA_OK) printf("%s: %s: %s\n", call, ga_status_name(status), ga_last_error());
  return status == GA_OK;
}

#define DO(call)                    \
  do {                              \
    if (!ok(call, #call)) return 0; \
  } while (0)

/* Two windows of plain SGD on several threads. Gradients are 1, so each window takes 0.5 from a parameter. */
static int train(ga_context* ctx, float* data, const float* gradient) {
  const int64_t shape[1] = {kCount};
  const void* gradients[1];
  ga_optimizer sgd;
  ga_group group;
  int window, i;
  gradients[0] = gradient;
  DO(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
  sgd.lr = 0.5;
  DO(ga_group_add(ctx, &sgd, &group));
  DO(ga_param_add(ctx, group, "p", data, GA_F32, 1, shape, NULL, NULL));
  for (window = 0; window < 2; window++) {
    DO(ga_accumulate(ctx, gradients, 1, 1, NULL));
    DO(ga_accumulate(ctx, gradients, 1, 3, NULL));
    DO(ga_step(ctx, NULL));
  }
  for (i = 0; i < kCount; i++) {
    if (data[i] != 0) {
      printf("element %d is %g, expected 0\n", i, data[i]);
      return 0;
    }
  }
  return 1;
}

/* A product through the module for oneDNN, which stays open. */
static int multiply(void) {
  const int64_t shape[2] = {1, 1};
  float w = 0;
  const float dy = 2, x = 3;
  ga_context* ctx;
  ga_optimizer sgd;
  ga_group group;
  ga_param param;
  DO(ga_context_create(NULL, &ctx));
  DO(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
  sgd.lr = 1;
  DO(ga_group_add(ctx, &sgd, &group));
  DO(ga_param_add(ctx, group, "w", &w, GA_F32, 2, shape, NULL, &param));
  DO(ga_micro_begin(ctx, 0, 1, NULL));
  DO(ga_accumulate_matmul(ctx, param, 1, &dy, 1, GA_TRANSPOSE, &x, 1, GA_NO_TRANSPOSE, GA_F32));
  DO(ga_micro_end(ctx));
  DO(ga_step(ctx, NULL));
  ga_context_destroy(ctx);
  if (w != -6) printf("w is %g, expected -6\n", w);
  return w == -6;
}

/* Leaves a context behind whose own thread updates a parameter while the plugin is closed. */
static int leave_behind(void) {
  const int64_t shape[1] = {kCount};
  float* data = calloc(2 * kCount, sizeof *data); /* not of the plugin, whose image may go */
  ga_config config;
  ga_context* ctx;
  ga_optimizer adamw;
  ga_micro_options last;
  ga_group group;
  ga_param param;
  if (!data) return 0;
  DO(ga_config_init(&config, sizeof config));
  config.eager = 1;
  config.eager_threads = 1;
  DO(ga_context_create(&config, &ctx));
  DO(ga_optimizer_init(&adamw, sizeof adamw, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH));
  DO(ga_group_add(ctx, &adamw, &group));
  DO(ga_param_add(ctx, group, "p", data, GA_F32, 1, shape, NULL, &param));
  DO(ga_micro_options_init(&last, sizeof last));
  last.flags = GA_MICRO_LAST;
  DO(ga_micro_begin(ctx, 0, 1, &last));
  DO(ga_accumulate_part(ctx, param, data + kCount));
  DO(ga_params_ready(ctx, &param, 1));
  return 1;
}

/* part: 0 trains with several threads, 1 multiplies, 2 leaves a context behind. Returns 1 for success. */
GA_PLUGIN_EXPORT int plugin_run(int part) {
  ga_config config;
  ga_context* ctx;
  float *data, *gradient;
  int i, trained;
  if (part == 1) return multiply();
  if (part == 2) return leave_behind();
  data = malloc(kCount * sizeof *data);
  gradient = malloc(kCount * sizeof *gradient);
  if (!data || !gradient) return 0;
  for (i = 0; i < kCount; i++) data[i] = gradient[i] = 1;
  DO(ga_config_init(&config, sizeof config));
  config.num_threads = 4;
  DO(ga_context_create(&config, &ctx));
  trained = train(ctx, data, gradient);
  ga_context_destroy(ctx);
  free(data);
  free(gradient);
  return trained;
}
