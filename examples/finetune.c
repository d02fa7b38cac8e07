/* Fine-tuning of y = head * tanh(weight * x + bias): first the head is trained on a frozen body, then
 * both are, the body at a tenth of the head's learning rate. The bias has no weight decay.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gradaccum/gradaccum.h"

enum { SAMPLES = 256, WINDOW = 64, MICRO = 8, EPOCHS = 200 };

typedef struct Network {
  float weight, bias, head;
} Network;

static void check(ga_status status) {
  if (status != GA_OK) {
    fprintf(stderr, "%s: %s\n", ga_status_name(status), ga_last_error());
    exit(EXIT_FAILURE);
  }
}

static float uniform(void) { return 2.0F * (float)rand() / (float)RAND_MAX - 1.0F; }

/* Trains on samples of y = 3 tanh(2 x - 1); returns the mean squared error in the last epoch. */
static float train(ga_context* ctx, const Network* net, int epochs) {
  float loss = 0;
  for (int i = 0; i < epochs * SAMPLES; i += MICRO) {
    Network gradient = {0};
    const void* gradients[3] = {&gradient.weight, &gradient.bias, &gradient.head};
    if (i % SAMPLES == 0) loss = 0;
    for (int n = 0; n < MICRO; ++n) {
      const float x = uniform(), h = tanhf(net->weight * x + net->bias);
      const float error = net->head * h - 3 * tanhf(2 * x - 1), dy = 2 * error / MICRO;
      loss += error * error / SAMPLES;
      gradient.weight += dy * net->head * (1 - h * h) * x;
      gradient.bias += dy * net->head * (1 - h * h);
      gradient.head += dy * h;
    }
    check(ga_accumulate(ctx, gradients, 3, MICRO, NULL));
    if ((i + MICRO) % WINDOW == 0) check(ga_step(ctx, NULL));
  }
  return loss;
}

int main(void) {
  Network net = {1.5F, -0.5F, 0}; /* the body has been trained before, the head has not */
  const Network pretrained = net;

  ga_context* ctx;
  check(ga_context_create(NULL, &ctx));
  ga_optimizer adamw;
  check(ga_optimizer_init(&adamw, sizeof adamw, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH));
  adamw.lr = 0.02;
  adamw.weight_decay = 0.01;
  ga_group body, head;
  check(ga_group_add(ctx, &adamw, &body));
  check(ga_group_add(ctx, &adamw, &head));
  ga_param weight, bias;
  check(ga_param_add(ctx, body, "body.weight", &net.weight, GA_F32, 0, NULL, NULL, &weight));
  check(ga_param_add(ctx, body, "body.bias", &net.bias, GA_F32, 0, NULL, NULL, &bias));
  check(ga_param_add(ctx, head, "head.weight", &net.head, GA_F32, 0, NULL, NULL, NULL));
  check(ga_param_set_lr_scale(ctx, weight, 0.1));
  check(ga_param_set_lr_scale(ctx, bias, 0.1));
  check(ga_param_set_weight_decay_scale(ctx, bias, 0));

  check(ga_group_set_frozen(ctx, body, 1));
  const float first = train(ctx, &net, 1), frozen = train(ctx, &net, EPOCHS);
  const int kept = memcmp(&net, &pretrained, offsetof(Network, head)) == 0;
  check(ga_group_set_frozen(ctx, body, 0));
  const float all = train(ctx, &net, EPOCHS);
  ga_context_destroy(ctx);
  printf("loss: %.3g at first, %.3g with the head trained, %.3g with all\n", first, frozen, all);
  if (kept && frozen < first && all < frozen) return EXIT_SUCCESS;
  fprintf(stderr, kept ? "the loss has not fallen\n" : "the frozen body has changed\n");
  return EXIT_FAILURE;
}
