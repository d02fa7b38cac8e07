/* SPDX-License-Identifier: Apache-2.0
 *
 * A program outside the tree, in strict C99: two windows of training, compared with numbers
 * computed by hand. With the argument "matmul" it also needs the matrix engine. Exits with 1 if a
 * number is wrong.
 */
#include <gradaccum/gradaccum.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static int failures = 0;

static void expect_ok(ga_status status, const char* call) {
  if (status != GA_OK) {
    printf("%s: %s: %s\n", call, ga_status_name(status), ga_last_error());
    failures++;
  }
}

static void expect_near(double value, double expected, double tolerance, const char* what) {
  if (!(fabs(value - expected) <= tolerance)) {
    printf("%s is %.9g, expected %.9g\n", what, value, expected);
    failures++;
  }
}

/* Plain SGD on numbers that are exact in binary: (3 (1, 0, -1) + (5, 2, 3)) / 4 = (2, 0.5, 0). */
static void train_sgd(void) {
  float p[3] = {1, 2, 3};
  float g1[3] = {1, 0, -1}, g2[3] = {5, 2, 3}, nan3[3] = {0, (float)NAN, 0};
  const void *first = g1, *second = g2, *bad = nan3;
  int64_t shape[1] = {3};
  ga_context* ctx = NULL;
  ga_optimizer sgd;
  ga_group group;
  ga_step_result result;

  result.struct_size = sizeof result;
  expect_ok(ga_context_create(NULL, &ctx), "ga_context_create");
  expect_ok(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH),
            "ga_optimizer_init");
  sgd.lr = 0.5;
  expect_ok(ga_group_add(ctx, &sgd, &group), "ga_group_add");
  expect_ok(ga_param_add(ctx, group, "p", p, GA_F32, 1, shape, NULL, NULL), "ga_param_add");

  expect_ok(ga_accumulate(ctx, &first, 1, 3, NULL), "ga_accumulate");
  expect_ok(ga_accumulate(ctx, &second, 1, 1, NULL), "ga_accumulate");
  expect_ok(ga_step(ctx, &result), "ga_step");
  expect_near(result.outcome, GA_STEP_APPLIED, 0, "outcome");
  expect_near(result.weight, 4, 0, "weight");
  expect_near(result.norm, sqrt(4.25), 1e-12, "norm");
  expect_near(p[0], 0, 0, "p[0]");
  expect_near(p[1], 1.75, 0, "p[1]");
  expect_near(p[2], 3, 0, "p[2]");

  expect_ok(ga_accumulate(ctx, &bad, 1, 1, NULL), "ga_accumulate");
  expect_ok(ga_step(ctx, &result), "ga_step");
  expect_near(result.outcome, GA_STEP_SKIPPED_NONFINITE, 0, "outcome of the window with a NaN");
  expect_near((double)result.steps, 1, 0, "steps");
  expect_near(p[1], 1.75, 0, "p[1] after the skipped step");
  ga_context_destroy(ctx);
}

/* First step of AdamW: m / sqrt(v) is the sign of the gradient, so p -= lr (weight_decay p + 1). */
static void train_adamw(void) {
  float p = 2, g = 0.25f;
  const void* gradient = &g;
  ga_context* ctx = NULL;
  ga_optimizer adamw;
  ga_group group;

  expect_ok(ga_context_create(NULL, &ctx), "ga_context_create");
  expect_ok(ga_optimizer_init(&adamw, sizeof adamw, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH),
            "ga_optimizer_init");
  adamw.lr = 0.125;
  adamw.weight_decay = 0.5;
  adamw.eps = 0;
  expect_ok(ga_group_add(ctx, &adamw, &group), "ga_group_add");
  expect_ok(ga_param_add(ctx, group, "p", &p, GA_F32, 0, NULL, NULL, NULL), "ga_param_add");
  expect_ok(ga_accumulate(ctx, &gradient, 1, 1, NULL), "ga_accumulate");
  expect_ok(ga_accumulate(ctx, &gradient, 1, 1, NULL), "ga_accumulate");
  expect_ok(ga_step(ctx, NULL), "ga_step");
  expect_near(p, 1.75, 1e-6, "p after AdamW"); /* 8 units in the last place of a float */
  ga_context_destroy(ctx);
}

/* dy^T x of a layer with 2 outputs and 3 inputs, batch 2, through the side module. */
static void train_matmul(void) {
  float w[6] = {0, 0, 0, 0, 0, 0};
  float dy[4] = {1, 2, 3, 4}, x[6] = {1, 0, 2, 0, 1, 1};
  const float expected[6] = {-1, -3, -5, -2, -4, -8};
  int64_t shape[2] = {2, 3};
  ga_context* ctx = NULL;
  ga_optimizer sgd;
  ga_group group;
  ga_param param;
  int i;

  expect_ok(ga_context_create(NULL, &ctx), "ga_context_create");
  expect_ok(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH),
            "ga_optimizer_init");
  sgd.lr = 1;
  expect_ok(ga_group_add(ctx, &sgd, &group), "ga_group_add");
  expect_ok(ga_param_add(ctx, group, "w", w, GA_F32, 2, shape, NULL, &param), "ga_param_add");
  expect_ok(ga_micro_begin(ctx, 0, 1, NULL), "ga_micro_begin");
  expect_ok(ga_accumulate_matmul(ctx, param, 2, dy, 2, GA_TRANSPOSE, x, 3, GA_NO_TRANSPOSE, GA_F32),
            "ga_accumulate_matmul");
  expect_ok(ga_micro_end(ctx), "ga_micro_end");
  expect_ok(ga_step(ctx, NULL), "ga_step");
  for (i = 0; i < 6; i++) expect_near(w[i], expected[i], 0, "w");
  ga_context_destroy(ctx);
}

int main(int argc, char** argv) {
  if (ga_version() != 10000 * GA_VERSION_MAJOR + 100 * GA_VERSION_MINOR + GA_VERSION_PATCH) {
    printf("header and library have different versions\n");
    return 1;
  }
  train_sgd();
  train_adamw();
  if (argc > 1 && strcmp(argv[1], "matmul") == 0) train_matmul();
  return failures == 0 ? 0 : 1;
}
