/* The training loop of libgradaccum with parameters and gradients in GPU memory: the model of
 * minimal.c, with windows of 16 micro-batches of 4 samples. Nothing in the loop waits for the GPU.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "gradaccum/gradaccum.h"

enum { SAMPLES = 1024, WEIGHTS = 9, MICRO = 4, WINDOW = 16, EPOCHS = 20, SKIPPED = 77 };

static void check(ga_status status) {
  if (status == GA_OK) return;
  fprintf(stderr, "%s: %s\n", ga_status_name(status), ga_last_error());
  exit(EXIT_FAILURE);
}

static void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", cudaGetErrorName(error), cudaGetErrorString(error));
  exit(EXIT_FAILURE);
}

/* Stores the mean squared error of samples [first, end) and its gradient, one thread per weight. */
__global__ void backward(const float* x, const float* y, int first, int end, const float* w,
                         float* dw, float* loss) {
  const int j = (int)threadIdx.x;
  const float n = (float)(end - first);
  float gradient = 0, mean = 0;
  for (int i = first; i < end; ++i) {
    float error = -y[i];
    for (int k = 0; k < WEIGHTS; ++k) error += w[k] * x[i * WEIGHTS + k];
    gradient += 2 * error * x[i * WEIGHTS + j] / n;
    mean += error * error / n;
  }
  dw[j] = gradient;
  if (j == 0) *loss = mean;
}

static float uniform() { return 2.0F * (float)rand() / (float)RAND_MAX - 1.0F; }

int main() {
  int32_t devices = 0;
  if (ga_device_count(GA_DEVICE_CUDA, &devices) != GA_OK || devices == 0) {
    printf("skipped: no GPU: %s\n", ga_last_error());
    return SKIPPED;
  }

  /* A real program would have these on the GPU already: samples, parameters and gradients. */
  static float features[SAMPLES][WEIGHTS], targets[SAMPLES];
  const size_t bytes = WEIGHTS * sizeof(float);
  for (int i = 0; i < SAMPLES; ++i) { /* targets = sum of (j + 1) * feature j, plus 0.5 */
    features[i][WEIGHTS - 1] = 1;     /* the input of the last weight, the bias */
    targets[i] = 0.5F;
    for (int j = 0; j < WEIGHTS - 1; ++j) {
      targets[i] += (float)(j + 1) * (features[i][j] = uniform());
    }
  }
  float *x, *y, *w, *dw, *loss;
  check(cudaMalloc(&x, sizeof features));
  check(cudaMalloc(&y, sizeof targets));
  check(cudaMalloc(&w, bytes));
  check(cudaMalloc(&dw, bytes));
  check(cudaMalloc(&loss, sizeof(float)));
  check(cudaMemcpy(x, features, sizeof features, cudaMemcpyDefault));
  check(cudaMemcpy(y, targets, sizeof targets, cudaMemcpyDefault));
  check(cudaMemset(w, 0, bytes));
  const auto whole_loss = [&] {
    float value = 0;
    backward<<<1, WEIGHTS>>>(x, y, 0, SAMPLES, w, dw, loss);
    check(cudaGetLastError());
    check(cudaMemcpy(&value, loss, sizeof value, cudaMemcpyDefault));
    return value;
  };

  ga_config config;
  check(ga_config_init(&config, sizeof config));
  config.device = GA_DEVICE_CUDA; /* config.stream stays NULL: the default stream */
  ga_context* ctx;
  check(ga_context_create(&config, &ctx));
  ga_optimizer sgd;
  check(ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH));
  sgd.lr = 0.1;
  sgd.momentum = 0.9;
  ga_group group;
  check(ga_group_add(ctx, &sgd, &group));
  const int64_t shape[1] = {WEIGHTS};
  check(ga_param_add(ctx, group, "w", w, GA_F32, 1, shape, NULL, NULL));

  printf("loss before %.3g\n", whole_loss());
  const void* const gradients[1] = {dw};
  for (int epoch = 0; epoch < EPOCHS; ++epoch) {
    for (int first = 0; first < SAMPLES; first += WINDOW * MICRO) {
      for (int micro = first; micro < first + WINDOW * MICRO; micro += MICRO) {
        backward<<<1, WEIGHTS>>>(x, y, micro, micro + MICRO, w, dw, loss);
        check(ga_accumulate(ctx, gradients, 1, MICRO, NULL));
      }
      check(ga_step(ctx, NULL));
    }
  }
  check(ga_synchronize(ctx));
  const float end = whole_loss();
  printf("loss after %d steps %.3g\n", EPOCHS * SAMPLES / (WINDOW * MICRO), end);

  ga_context_destroy(ctx);
  for (float* memory : {x, y, w, dw, loss}) check(cudaFree(memory));
  return end < 1e-6F ? EXIT_SUCCESS : EXIT_FAILURE;
}
