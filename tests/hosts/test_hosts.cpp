// SPDX-License-Identifier: Apache-2.0
//
// Programs that move to the library as docs/hosts.md says, beside their own update, which is computed here
// in double, from whole batches.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "hosts.h"

namespace {

using Vector = std::vector<double>;

// Makes the update of one window: parameters, mean gradient, t from 1.
using Update = std::function<void(Vector&, const Vector&, int t)>;

float start(int64_t j) { return 0.5F + static_cast<float>(j) / 256; }

// lr: what bounds the length of an update. In a window, a parameter is rounded twice, when it decays and when
// it is updated, and its update is off by a few units in the last place.
void expect_as_in_double(void (*train)(float*), const Update& update, double lr, bool ends_short) {
  std::vector<float> parameters(PARAMETERS);
  Vector expected(PARAMETERS);
  for (int64_t j = 0; j < PARAMETERS; ++j) expected[j] = parameters[j] = start(j);
  train(parameters.data());
  for (int64_t w = 0; w < WINDOWS; ++w) {
    const int64_t end = window_end(w, ends_short);
    Vector g(PARAMETERS);
    for (int64_t j = 0; j < PARAMETERS; ++j) {
      for (int64_t i = WINDOW * w; i < end; ++i) g[j] += sample_gradient(i, j);
      g[j] /= static_cast<double>(end - WINDOW * w);
    }
    update(expected, g, static_cast<int>(w + 1));
  }
  for (int64_t j = 0; j < PARAMETERS; ++j) {
    const double bound = WINDOWS * (std::abs(expected[j]) * 0x1p-23 + lr * 0x1p-20);
    ASSERT_LT(bound, 1e-2 * lr) << "a bound that means nothing";
    ASSERT_NEAR(parameters[j], expected[j], bound) << "parameter " << j;
  }
}

// kann_RMSprop(), without SSE.
TEST(Hosts, Kann) {
  Vector r(PARAMETERS);
  const auto update = [&](Vector& p, const Vector& g, int) {
    for (size_t j = 0; j < p.size(); ++j) {
      r[j] = 0.1 * g[j] * g[j] + 0.9 * r[j];
      p[j] -= 0.001 / std::sqrt(1e-6 + r[j]) * g[j];
    }
  };
  expect_as_in_double(train_kann, update, 0.004, true);
}

// AdamW as llm.c has it: the decay is that of the old parameter.
Update adamw(double decay) {
  return [decay, m = Vector(PARAMETERS), v = Vector(PARAMETERS)](Vector& p, const Vector& g,
                                                                 int t) mutable {
    for (size_t j = 0; j < p.size(); ++j) {
      m[j] = 0.9 * m[j] + 0.1 * g[j];
      v[j] = 0.999 * v[j] + 0.001 * g[j] * g[j];
      const double m_hat = m[j] / (1 - std::pow(0.9, t)), v_hat = v[j] / (1 - std::pow(0.999, t));
      p[j] -= 0.001 * (m_hat / (std::sqrt(v_hat) + 1e-8) + decay * p[j]);
    }
  };
}

TEST(Hosts, LlmC) { expect_as_in_double(train_gpt2, adamw(0.1), 0.001, false); }

// update_convolutional_layer(): what is kept is the negated sum over the images of the window.
TEST(Hosts, Darknet) {
  Vector updates(PARAMETERS);
  const auto update = [&](Vector& p, const Vector& g, int) {
    for (size_t j = 0; j < p.size(); ++j) {
      updates[j] -= g[j] * WINDOW;
      if (j < p.size() / 2) updates[j] -= 0.0005F * WINDOW * p[j];
      p[j] += 0.01F / WINDOW * updates[j];
      updates[j] *= 0.9F;
    }
  };
  expect_as_in_double(train_network, update, 0.1, false);
}

// The weight decay of ggml's AdamW is that of the old parameter, too.
TEST(Hosts, Ggml) { expect_as_in_double(train_ggml, adamw(0.01), 0.001, true); }

}  // namespace
