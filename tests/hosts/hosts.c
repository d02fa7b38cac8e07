/* The blocks of docs/hosts.md as functions that train. The declarations of each program are as few as
 * its block needs.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "hosts.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gradaccum/gradaccum.h"

static void check(ga_status status) {
  if (status == GA_OK) return;
  fprintf(stderr, "%s: %s\n", ga_status_name(status), ga_last_error());
  exit(EXIT_FAILURE);
}

float sample_gradient(int64_t sample, int64_t j) {
  const int64_t bits = 32 + (sample * 7 + j * 13 + sample * j) % 32;
  return (j % 3 == 0 ? -1.0F : 1.0F) * (float)bits / 64.0F / (float)(1 << j % 16);
}

int64_t window_end(int64_t w, int ends_short) {
  return WINDOW * (w + 1) - (ends_short && w == WINDOWS - 1 ? 5 : 0);
}

static float sum_of_gradients(int64_t first, int64_t end, int64_t j) {
  float sum = 0;
  for (; first < end; ++first) sum += sample_gradient(first, j);
  return sum;
}

/* ---- KANN ---- */

typedef struct kann_t {
  float *x, *g;
  int64_t first, count; /* of the samples that were loaded */
} kann_t;

static int kann_size_var(const kann_t* ann) { return ann ? PARAMETERS : 0; }

static void load_samples(kann_t* ann, int first, int n) {
  ann->first = first;
  ann->count = n;
}

static float kann_cost(kann_t* ann, int label, int backward) {
  for (int64_t j = 0; j < PARAMETERS && backward; ++j)
    ann->g[j] = sum_of_gradients(ann->first, ann->first + ann->count, j) / (float)ann->count;
  return (float)label;
}

#define load load_samples
#include "kann.inc"
#undef load

void train_kann(float* parameters) {
  float g[PARAMETERS];
  kann_t ann = {parameters, g, 0, 0};
  ga_context* ctx = kann_windows(&ann, 0.001F);
  for (int w = 0; w < WINDOWS; ++w) kann_window(&ann, ctx, WINDOW * w, (int)window_end(w, true), 7);
  ga_context_destroy(ctx);
}

/* ---- llm.c ---- */

typedef struct GPT2 {
  size_t num_parameters;
  float *params_memory, *grads_memory;
  const int* inputs;
  int samples;
} GPT2;

typedef struct DataLoader {
  size_t B, T;
  int *inputs, *targets;
} DataLoader;

static void dataloader_next_batch(DataLoader* loader) {
  loader->inputs[0] += (int)(loader->B * loader->T);
}

static void gpt2_forward(GPT2* model, const int* inputs, const int* targets, size_t B, size_t T) {
  model->inputs = targets ? inputs : NULL;
  model->samples = (int)(B * T);
}

static void gpt2_zero_grad(GPT2* model) {
  memset(model->grads_memory, 0, model->num_parameters * sizeof(float));
}

static void gpt2_backward(GPT2* model) {
  const int first = model->inputs[0];
  for (size_t j = 0; j < model->num_parameters; ++j)
    model->grads_memory[j] +=
        sum_of_gradients(first, first + model->samples, (int64_t)j) / (float)model->samples;
}

#include "llmc.inc"

void train_gpt2(float* parameters) {
  float g[PARAMETERS];
  int first = -6, target = 0;
  GPT2 model = {PARAMETERS, parameters, g, NULL, 0};
  DataLoader loader = {2, 3, &first, &target};
  ga_context* ctx = gpt2_windows(&model, 0.001F, 0.1F);
  for (int w = 0; w < WINDOWS; ++w) gpt2_window(&model, ctx, &loader, WINDOW / 6);
  ga_context_destroy(ctx);
}

/* ---- darknet ---- */

typedef enum { CONVOLUTIONAL, CONNECTED, MAXPOOL } LAYER_TYPE;

typedef struct layer {
  LAYER_TYPE type;
  int n, nweights, inputs, outputs, batch_normalize;
  float *weights, *biases, *scales, *weight_updates, *bias_updates, *scale_updates;
} layer;

typedef struct network {
  int n, batch, subdivisions, train;
  size_t* seen;
  float learning_rate, momentum, decay;
  layer* layers;
} network;

static void load_images(const network* net) { (void)net; }
static void forward_network(const network* net) { (void)net; }

static void add_updates(float* updates, int64_t size, int64_t from, int64_t end, int64_t images) {
  for (int64_t j = 0; j < size; ++j) updates[j] -= sum_of_gradients(end - images, end, from + j);
}

static void backward_network(const network* net) {
  const int64_t end = (int64_t)*net->seen, half = PARAMETERS / 2;
  add_updates(net->layers[1].weight_updates, half, 0, end, net->batch);
  add_updates(net->layers[1].bias_updates, half, half, end, net->batch);
}

#define load load_images
#include "darknet.inc"
#undef load

void train_network(float* parameters) {
  enum { HALF = PARAMETERS / 2 };
  float updates[PARAMETERS] = {0};
  size_t seen = 0;
  layer layers[2] = {{MAXPOOL, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL},
                     {CONVOLUTIONAL, HALF, HALF, 0, 0, 0, parameters, parameters + HALF, NULL,
                      updates, updates + HALF, NULL}};
  network net = {2, 6, WINDOW / 6, 0, &seen, 0.01F, 0.9F, 0.0005F, layers};
  ga_context* ctx = network_windows(&net);
  for (int w = 0; w < WINDOWS; ++w) network_window(&net, ctx);
  ga_context_destroy(ctx);
}

/* ---- ggml ---- */

struct ggml_tensor {
  int64_t ne[4];
  void* data;
  char name[64];
};

typedef struct ggml_opt_context {
  int64_t first;
  struct ggml_tensor inputs, accumulators[2];
} * ggml_opt_context_t;

static void ggml_opt_alloc(ggml_opt_context_t opt, bool backward) {
  opt->first += backward ? 0 : opt->inputs.ne[1];
}

static void ggml_opt_reset(ggml_opt_context_t opt, bool optimizer) {
  for (int i = 0; i < 2 && !optimizer; ++i)
    memset(opt->accumulators[i].data, 0, PARAMETERS / 2 * sizeof(float));
}

static struct ggml_tensor* ggml_opt_inputs(ggml_opt_context_t opt) { return &opt->inputs; }
static void load_data(ggml_opt_context_t opt) { (void)opt; }

static struct ggml_tensor* ggml_opt_grad_acc(ggml_opt_context_t opt,
                                             const struct ggml_tensor* node) {
  return &opt->accumulators[node->name[0] - 'a'];
}

static void ggml_opt_eval(ggml_opt_context_t opt, void* result) {
  const int64_t n = opt->inputs.ne[1], half = PARAMETERS / 2;
  const float period = 1 << 30;
  for (int64_t j = 0; j < PARAMETERS && !result; ++j)
    ((float*)opt->accumulators[j / half].data)[j % half] +=
        sum_of_gradients(opt->first, opt->first + n, j) / ((float)n * period);
  opt->first += n;
}

#define load load_data
#include "ggml.inc"
#undef load

void train_ggml(float* parameters) {
  enum { HALF = PARAMETERS / 2 };
  float accumulators[PARAMETERS];
  struct ggml_tensor a = {{8, HALF / 8, 1, 1}, parameters, "a"},
                     b = {{HALF, 1, 1, 1}, parameters + HALF, "b"};
  struct ggml_opt_context opt = {0, a, {a, b}};
  opt.accumulators[0].data = accumulators;
  opt.accumulators[1].data = accumulators + HALF;
  struct ggml_tensor* params[2] = {&a, &b};
  const void* pointers[2];
  ga_context* ctx = ggml_windows(params, 2, 0.001F);
  for (int64_t w = 0; w < WINDOWS; ++w) {
    for (const int64_t end = window_end(w, true); opt.first < end;) {
      opt.inputs.ne[1] = end - opt.first < 7 ? end - opt.first : 7;
      ggml_micro_batch(&opt, ctx, params, pointers, 2);
    }
    check(ga_step(ctx, NULL));
  }
  ga_context_destroy(ctx);
}
