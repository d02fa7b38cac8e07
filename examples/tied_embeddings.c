/* Tied embeddings: the input reads some rows of e, whose gradients come by rows; the output scores
 * every word by e, whose gradient comes whole. Words of one topic should score 1, others 0. Batches
 * of 32 words and micro-batches of 12, 12 and 8 words give the same parameters, to rounding.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "gradaccum/gradaccum.h"

enum { WORDS = 16, TOPICS = 4, WIDTH = 8, BATCH = 32, STEPS = 200 };

static void check(ga_status status) {
  if (status != GA_OK) {
    fprintf(stderr, "%s: %s\n", ga_status_name(status), ga_last_error());
    exit(EXIT_FAILURE);
  }
}

/* Runs a micro-batch on the matrix e and returns the sum of its squared errors. */
static float run(ga_context* ctx, ga_param id, const float* e, const int32_t* words, int count) {
  float loss = 0, all[WORDS][WIDTH] = {{0}}, rows[BATCH][WIDTH] = {{0}};
  for (int i = 0; i < count; ++i) {
    const float* vector = e + words[i] * WIDTH;
    for (int k = 0; k < WORDS; ++k) {
      float error = k % TOPICS == words[i] % TOPICS ? -1 : 0; /* score - target */
      for (int j = 0; j < WIDTH; ++j) error += e[k * WIDTH + j] * vector[j];
      for (int j = 0; j < WIDTH; ++j) {
        all[k][j] += 2 * error * vector[j] / (float)count;
        rows[i][j] += 2 * error * e[k * WIDTH + j] / (float)count;
      }
      loss += error * error;
    }
  }
  check(ga_micro_begin(ctx, -1, count, NULL)); /* weighted by its words */
  check(ga_accumulate_part(ctx, id, all));
  check(ga_accumulate_rows(ctx, id, words, GA_I32, count, rows));
  check(ga_micro_end(ctx));
  return loss;
}

/* Trains e from random numbers and returns the ratio of the last loss to the first. */
static float train(float* e, int micro) {
  srand(1);
  for (int i = 0; i < WORDS * WIDTH; ++i) e[i] = (float)rand() / (float)RAND_MAX - 0.5F;
  ga_context* ctx;
  check(ga_context_create(NULL, &ctx));
  ga_optimizer sgd;
  check(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
  sgd.lr = 0.02;
  ga_group group;
  check(ga_group_add(ctx, &sgd, &group));
  ga_param_options options;
  check(ga_param_options_init(&options, sizeof options));
  options.rows = GA_ROWS_DENSE;
  ga_param id;
  check(ga_param_add(ctx, group, "e", e, GA_F32, 2, (int64_t[]){WORDS, WIDTH}, &options, &id));
  float loss[STEPS] = {0};
  for (int step = 0; step < STEPS; ++step) {
    int32_t words[BATCH];
    for (int i = 0; i < BATCH; ++i) words[i] = rand() % WORDS;
    for (int i = 0; i < BATCH; i += micro)
      loss[step] += run(ctx, id, e, words + i, i + micro < BATCH ? micro : BATCH - i);
    check(ga_step(ctx, NULL));
  }
  ga_context_destroy(ctx);
  return loss[STEPS - 1] / loss[0];
}

int main(void) {
  float whole[WORDS * WIDTH], cut[WORDS * WIDTH], apart = 0;
  const float loss = train(whole, BATCH), loss_cut = train(cut, 12);
  for (int i = 0; i < WORDS * WIDTH; ++i) apart = fmaxf(apart, fabsf(whole[i] - cut[i]));
  printf("loss: %.3g and %.3g of the first; parameters differ by %.3g\n", loss, loss_cut, apart);
  if (loss < 0.1F && loss_cut < 0.1F && apart < 1e-5F) return EXIT_SUCCESS;
  fprintf(stderr, "the loss has not fallen, or the parameters differ\n");
  return EXIT_FAILURE;
}
