/* The same program in C, C++, Java, C# and Python: a small network learns Fashion-MNIST, and its
 * parameters end with the same bits in all languages.
 * SPDX-License-Identifier: Apache-2.0
 *
 *   same_bits <folder of Fashion-MNIST> <file to write the parameters to>
 *
 * What keeps the bits: sums are in double, in one order; products are not contracted to fused
 * multiply-adds; no function of a mathematical library is called; the first weights come from an
 * integer generator. The library gives the same bits by itself.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "gradaccum/gradaccum.h"

enum { IMAGES = 500, PIXELS = 784, HIDDEN = 32, CLASSES = 10, WINDOW = 64, MICRO = 16, EPOCHS = 3 };

static unsigned char pixels[IMAGES][PIXELS], labels[IMAGES];
static float w1[HIDDEN][PIXELS], b1[HIDDEN], w2[CLASSES][HIDDEN], b2[CLASSES];
static double sum_w1[HIDDEN][PIXELS], sum_b1[HIDDEN], sum_w2[CLASSES][HIDDEN], sum_b2[CLASSES];
static float dw1[HIDDEN][PIXELS], db1[HIDDEN], dw2[CLASSES][HIDDEN], db2[CLASSES];

static void check(ga_status status) {
  if (status != GA_OK) {
    fprintf(stderr, "%s: %s\n", ga_status_name(status), ga_last_error());
    exit(EXIT_FAILURE);
  }
}

static void read_file(const char* folder, const char* name, int header, void* out, unsigned size) {
  char path[4096];
  unsigned char skipped[16];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  gzFile file = gzopen(path, "rb");
  if (!file || gzread(file, skipped, (unsigned)header) != header ||
      gzread(file, out, size) != (int)size) {
    fprintf(stderr, "%s could not be read\n", path);
    exit(EXIT_FAILURE);
  }
  gzclose(file);
}

/* Uniform in [-scale / 2, scale / 2), in steps that a float holds. */
static void fill(float* values, int count, double scale, uint64_t* state) {
  for (int i = 0; i < count; ++i) {
    *state = *state * 6364136223846793005U + 1442695040888963407U;
    values[i] = (float)(((double)(*state >> 40) / 16777216 - 0.5) * scale);
  }
}

static void means(const double* sums, float* out, int count, int samples) {
  for (int i = 0; i < count; ++i) out[i] = (float)(sums[i] / samples);
}

/* Stores the mean gradients of samples [first, end), and returns the sum of their losses. */
static double backward(int first, int end) {
  double loss = 0;
  memset(sum_w1, 0, sizeof sum_w1);
  memset(sum_b1, 0, sizeof sum_b1);
  memset(sum_w2, 0, sizeof sum_w2);
  memset(sum_b2, 0, sizeof sum_b2);
  for (int i = first; i < end; ++i) {
    double x[PIXELS], h[HIDDEN], dh[HIDDEN] = {0};
    for (int p = 0; p < PIXELS; ++p) x[p] = pixels[i][p] / 256.0;
    for (int j = 0; j < HIDDEN; ++j) {
      double sum = b1[j];
      for (int p = 0; p < PIXELS; ++p) sum += w1[j][p] * x[p];
      h[j] = sum > 0 ? sum : 0;
    }
    for (int c = 0; c < CLASSES; ++c) {
      double y = b2[c];
      for (int j = 0; j < HIDDEN; ++j) y += w2[c][j] * h[j];
      const double error = y - (c == labels[i] ? 1 : 0);
      loss += error * error;
      sum_b2[c] += 2 * error;
      for (int j = 0; j < HIDDEN; ++j) {
        sum_w2[c][j] += 2 * error * h[j];
        dh[j] += 2 * error * w2[c][j];
      }
    }
    for (int j = 0; j < HIDDEN; ++j) {
      if (h[j] > 0) {
        sum_b1[j] += dh[j];
        for (int p = 0; p < PIXELS; ++p) sum_w1[j][p] += dh[j] * x[p];
      }
    }
  }
  means(&sum_w1[0][0], &dw1[0][0], HIDDEN * PIXELS, end - first);
  means(sum_b1, db1, HIDDEN, end - first);
  means(&sum_w2[0][0], &dw2[0][0], CLASSES * HIDDEN, end - first);
  means(sum_b2, db2, CLASSES, end - first);
  return loss;
}

static int smaller(int a, int b) { return a < b ? a : b; }

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: same_bits <folder of Fashion-MNIST> <file>\n");
    return EXIT_FAILURE;
  }
  read_file(argv[1], "train-images-idx3-ubyte.gz", 16, pixels, sizeof pixels);
  read_file(argv[1], "train-labels-idx1-ubyte.gz", 8, labels, sizeof labels);
  uint64_t state = 1;
  fill(&w1[0][0], HIDDEN * PIXELS, 0.125, &state);
  fill(&w2[0][0], CLASSES * HIDDEN, 0.5, &state);

  ga_context* ctx;
  check(ga_context_create(NULL, &ctx));
  ga_optimizer adamw;
  check(ga_optimizer_init(&adamw, sizeof adamw, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH));
  adamw.lr = 1.0 / 512;
  ga_group group;
  check(ga_group_add(ctx, &adamw, &group));
  ga_clip clip;
  check(ga_clip_init(&clip, sizeof clip));
  clip.scope = GA_CLIP_GLOBAL;
  clip.max_norm = 1;
  check(ga_context_set_clip(ctx, &clip));
  check(ga_param_add(ctx, group, "fc1.weight", w1, GA_F32, 2, (int64_t[]){HIDDEN, PIXELS}, NULL,
                     NULL));
  check(ga_param_add(ctx, group, "fc1.bias", b1, GA_F32, 1, (int64_t[]){HIDDEN}, NULL, NULL));
  check(ga_param_add(ctx, group, "fc2.weight", w2, GA_F32, 2, (int64_t[]){CLASSES, HIDDEN}, NULL,
                     NULL));
  check(ga_param_add(ctx, group, "fc2.bias", b2, GA_F32, 1, (int64_t[]){CLASSES}, NULL, NULL));
  const void* gradients[4] = {dw1, db1, dw2, db2};

  for (int epoch = 1; epoch <= EPOCHS; ++epoch) {
    double loss = 0;
    for (int window = 0; window < IMAGES; window += WINDOW) {
      const int end = smaller(window + WINDOW, IMAGES);
      for (int first = window; first < end; first += MICRO) {
        const int last = smaller(first + MICRO, end);
        loss += backward(first, last);
        check(ga_accumulate(ctx, gradients, 4, last - first, NULL));
      }
      check(ga_step(ctx, NULL));
    }
    printf("epoch %d: loss %.4f\n", epoch, loss / IMAGES);
  }
  ga_context_destroy(ctx);

  FILE* out = fopen(argv[2], "wb");
  if (!out || fwrite(w1, sizeof w1, 1, out) != 1 || fwrite(b1, sizeof b1, 1, out) != 1 ||
      fwrite(w2, sizeof w2, 1, out) != 1 || fwrite(b2, sizeof b2, 1, out) != 1 || fclose(out)) {
    fprintf(stderr, "%s could not be written\n", argv[2]);
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
