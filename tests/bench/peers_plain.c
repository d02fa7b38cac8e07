// SPDX-License-Identifier: Apache-2.0
//
// CMakeLists.txt compiles this file once for each set of flags, with the name of its table in
// PLAIN_LOOPS.
#include "peers_plain.h"

#include <math.h>

static void add(float* a, const float* g, int64_t n) {
  for (int64_t i = 0; i < n; ++i) a[i] += g[i];
}

static float squares(const float* g, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += g[i] * g[i];
  return sum;
}

static void scale(float* g, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) g[i] *= factor;
}

// What does not depend on i is computed once: one quotient and one square root for each element.
static void adamw(float* p, float* m, float* v, const float* g, int64_t n,
                  const struct plain_adamw* with) {
  const float beta1 = with->beta1, beta2 = with->beta2, eps = with->eps;
  const float size = with->lr / (1 - powf(beta1, (float)with->step));
  const float root = 1 / sqrtf(1 - powf(beta2, (float)with->step));
  const float keep = 1 - with->lr * with->weight_decay;
  for (int64_t i = 0; i < n; ++i) {
    m[i] = beta1 * m[i] + (1 - beta1) * g[i];
    v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
    p[i] = keep * p[i] - size * m[i] / (root * sqrtf(v[i]) + eps);
  }
}

// As the formula is stated: the bias corrections, with their powers, are inside the loop.
static void llmc_update(float* p, float* m, float* v, const float* g, int64_t n,
                        const struct plain_adamw* with) {
  const struct plain_adamw w = *with;
  for (int64_t i = 0; i < n; ++i) {
    const float mean = w.beta1 * m[i] + (1 - w.beta1) * g[i];
    const float square = w.beta2 * v[i] + (1 - w.beta2) * g[i] * g[i];
    const float corrected_mean = mean / (1 - powf(w.beta1, (float)w.step));
    const float corrected_square = square / (1 - powf(w.beta2, (float)w.step));
    m[i] = mean;
    v[i] = square;
    p[i] -= w.lr * (corrected_mean / (sqrtf(corrected_square) + w.eps) + w.weight_decay * p[i]);
  }
}

const struct plain_loops PLAIN_LOOPS = {add, squares, scale, adamw, llmc_update};
