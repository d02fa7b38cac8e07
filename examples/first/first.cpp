// first.c in C++: see there.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "gradaccum/gradaccum.hpp"

namespace {

float x[71][3], y[71];

std::vector<float> backward(int first, int end, const std::vector<float>& w) {
  std::vector<float> dw(3);
  for (int i = first; i < end; ++i) {
    const float error = w[0] * x[i][0] + w[1] * x[i][1] + w[2] * x[i][2] - y[i];
    for (int j = 0; j < 3; ++j) {
      dw[static_cast<std::size_t>(j)] += 2 * error * x[i][j] / static_cast<float>(end - first);
    }
  }
  return dw;
}

}  // namespace

int main() {
  for (int i = 0; i < 71; ++i) {
    y[i] = static_cast<float>(i % 5);
    for (int j = 0; j < 3; ++j) x[i][j] = static_cast<float>(i * (j + 2) % 7) / 4;
  }
  std::vector<float> w = {1, 1, 1};
  std::vector<float> batch = backward(0, 71, w);
  for (float& element : batch) element = 1 - 0.1F * element;

  // begin
  gradaccum::Context context;
  ga_optimizer sgd = gradaccum::default_optimizer(GA_OPTIMIZER_SGD);
  sgd.lr = 0.1;
  const gradaccum::Group group = context.add_group(sgd);
  context.add_param(group, "w", w.data(), {3});
  for (int first = 0; first < 71; first += 32) {  // 32, 32 and 7 samples
    const int end = std::min(first + 32, 71);
    const std::vector<float> dw = backward(first, end, w);  // your code: a mean over these
    context.accumulate({dw.data()}, end - first);
  }
  context.step();  // updates w as one batch of 71 would
  // end

  std::printf("w = %.6f %.6f %.6f\n", w[0], w[1], w[2]);
  for (std::size_t j = 0; j < 3; ++j) {
    if (!(std::fabs(w[j] - batch[j]) <= 1e-6F)) return 1;
  }
  return 0;
}
