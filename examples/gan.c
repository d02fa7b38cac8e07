/* A GAN. The data are numbers of mean 1 and standard deviation 0.5, which the generator learns: it
 * makes x = g[0] + g[1] * noise. The discriminator learns to tell the data from x. Each network has
 * a context of its own, as it would have an optimizer of its own in other frameworks, so that each
 * counts its own steps and windows, and neither has to be frozen while the other one trains.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "gradaccum/gradaccum.h"

enum { STEPS = 1000, MICROS = 4, MICRO = 16 }; /* windows of 4 micro-batches of 16 samples */

static void check(ga_status status) {
  if (status != GA_OK) {
    fprintf(stderr, "%s: %s\n", ga_status_name(status), ga_last_error());
    exit(EXIT_FAILURE);
  }
}

static float uniform(void) { return 2.0F * (float)rand() / (float)RAND_MAX - 1.0F; }

static float noise(void) { return uniform() + uniform() + uniform(); } /* standard deviation 1 */

/* Returns the discriminator's estimate of the probability that x is one of the data. */
static float discriminate(const float d[3], float x) {
  return 1.0F / (1.0F + expf(-(d[0] + d[1] * x + d[2] * x * x)));
}

static ga_context* make_context(float* network, int64_t size, double lr, double weight_decay) {
  ga_context* ctx;
  check(ga_context_create(NULL, &ctx));
  ga_optimizer sgd;
  check(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
  sgd.lr = lr;
  sgd.weight_decay = weight_decay;
  ga_group group;
  check(ga_group_add(ctx, &sgd, &group));
  check(ga_param_add(ctx, group, "network", network, GA_F32, 1, &size, NULL, NULL));
  return ctx;
}

int main(void) {
  float g[2] = {-1, 1}, d[3] = {0};
  ga_context* train_g = make_context(g, 2, 0.05, 0);
  ga_context* train_d = make_context(d, 3, 0.2, 0.3); /* decay keeps the two from circling */
  for (int step = 1; step <= STEPS; ++step) {
    for (int micro = 0; micro < MICROS; ++micro) { /* loss: -log(d(data)) - log(1 - d(x)) */
      float gradient[3] = {0};
      for (int i = 0; i < 2 * MICRO; ++i) {
        const int real = i % 2;
        const float x = real ? 1.0F + 0.5F * noise() : g[0] + g[1] * noise();
        const float dscore = (discriminate(d, x) - (float)real) / MICRO;
        for (int j = 0; j < 3; ++j) gradient[j] += dscore * powf(x, (float)j);
      }
      check(ga_accumulate(train_d, (const void*[]){gradient}, 1, MICRO, NULL));
    }
    check(ga_step(train_d, NULL));

    for (int micro = 0; micro < MICROS; ++micro) { /* loss: -log(d(x)) */
      float gradient[2] = {0};
      for (int i = 0; i < MICRO; ++i) {
        const float z = noise(), x = g[0] + g[1] * z;
        const float dx = (discriminate(d, x) - 1) / MICRO * (d[1] + 2 * d[2] * x);
        gradient[0] += dx;
        gradient[1] += dx * z;
      }
      check(ga_accumulate(train_g, (const void*[]){gradient}, 1, MICRO, NULL));
    }
    check(ga_step(train_g, NULL));
  }
  ga_context_destroy(train_g);
  ga_context_destroy(train_d);
  printf("mean %.3f, should be 1; standard deviation %.3f, should be 0.5\n", g[0], g[1]);
  if (fabsf(g[0] - 1) < 0.1F && fabsf(g[1] - 0.5F) < 0.1F) return EXIT_SUCCESS;
  fprintf(stderr, "the generator has not learned the data\n");
  return EXIT_FAILURE;
}
