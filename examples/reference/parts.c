/* Gradients that do not come as a whole: by layer, by row, as factors of a product, or from a kernel of the program.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "example.h"

enum { LAYERS = 3, BATCH = 2, IN = 2, OUT = 2, ROWS = 4, WIDTH = 2 };

static float weights[LAYERS], gradient;

static void backward(int layer) { gradient = (float)(layer + 1); }

/* What a kernel does: alpha * gradient + beta * data. */
static void kernel(const ga_accumulator* to) {
  float* data = to->data;
  for (int64_t i = 0; i < to->rows * to->columns; ++i) {
    data[i] = (float)to->alpha * (float)i + (to->beta == 0 ? 0 : (float)to->beta * data[i]);
  }
}

int main(void) {
  ga_context* ctx = NULL;
  ga_context_create(NULL, &ctx);
  ga_optimizer sgd;
  ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH);
  sgd.lr = 1;
  ga_group group;
  ga_group_add(ctx, &sgd, &group);
  ga_param params[LAYERS];
  const char* const names[LAYERS] = {"1", "2", "3"};
  for (int layer = 0; layer < LAYERS; ++layer) {
    ga_param_add(ctx, group, names[layer], &weights[layer], GA_F32, 0, NULL, NULL, &params[layer]);
  }

  /* example: ga_micro_begin */
  ga_micro_begin(ctx, -1, 32, NULL); /* the next micro-batch, of 32 samples */
  for (int layer = LAYERS - 1; layer >= 0; --layer) {
    backward(layer); /* one buffer serves all layers */
    ga_accumulate_part(ctx, params[layer], &gradient);
  }
  ga_micro_end(ctx);
  /* end */

  float table[ROWS][WIDTH] = {{0}};
  const float values[3][WIDTH] = {{1, 1}, {2, 2}, {4, 4}};

  ga_step(ctx, NULL);

  /* example: ga_accumulate_rows */
  ga_param_options by_rows;
  ga_param_options_init(&by_rows, sizeof by_rows);
  by_rows.rows = GA_ROWS_LAZY; /* rows without a gradient stay as they are */
  const int64_t shape[2] = {ROWS, WIDTH};
  ga_param embedding;
  ga_param_add(ctx, group, "embedding", table, GA_F32, 2, shape, &by_rows, &embedding);

  /* values[i] belongs to row tokens[i]; rows that come twice add up. */
  const int32_t tokens[3] = {3, 0, 3};
  ga_micro_begin(ctx, -1, 3, NULL);
  ga_accumulate_rows(ctx, embedding, tokens, GA_I32, 3, values);
  ga_micro_end(ctx);
  /* end */
  ga_step(ctx, NULL);

  float dense[OUT][IN] = {{0}}, own[OUT][IN] = {{0}};
  const float x[BATCH][IN] = {{1, 2}, {3, 4}}, dy[BATCH][OUT] = {{1, 0}, {2, 1}};
  const int64_t square[2] = {OUT, IN};
  ga_param matrix, written;
  ga_param_add(ctx, group, "dense", dense, GA_F32, 2, square, NULL, &matrix);
  ga_param_add(ctx, group, "own", own, GA_F32, 2, square, NULL, &written);

  /* example: ga_accumulate_matmul */
  /* y = x W^T, with x [BATCH, IN], dy [BATCH, OUT] and W [OUT, IN]: adds dy^T x. */
  ga_micro_begin(ctx, -1, BATCH, NULL);
  ga_accumulate_matmul(ctx, matrix, BATCH, dy, OUT, GA_TRANSPOSE, /* A = dy^T */
                       x, IN, GA_NO_TRANSPOSE, GA_F32);           /* B = x */
  ga_micro_end(ctx);
  /* end */

  /* example: ga_accumulator_acquire */
  ga_accumulator accumulator;
  ga_accumulator_init(&accumulator, sizeof accumulator);
  ga_micro_begin(ctx, -1, BATCH, NULL);
  ga_accumulator_acquire(ctx, written, &accumulator);
  /* data = alpha * gradient + beta * data */
  if (accumulator.data) kernel(&accumulator);
  ga_accumulator_release(ctx, written);
  ga_micro_end(ctx);
  /* end */
  ga_step(ctx, NULL); /* of 4 samples: each of the two gradients has come in one half of them */

  int right = 1;
  for (int layer = 0; layer < LAYERS; ++layer) right &= near(weights[layer], -(layer + 1));
  right &= near(table[0][0], -2) && near(table[1][0], 0) && near(table[3][1], -5);
  right &= near(dense[0][0], -3.5) && near(dense[1][1], -2);
  right &= near(own[0][1], -0.5) && near(own[1][1], -1.5);
  ga_context_destroy(ctx);
  return result(right);
}
