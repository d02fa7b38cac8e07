// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

// Returns the softmax cross-entropy of one sample and stores the gradient of scale times this loss.
inline double cross_entropy(const float* logits, std::int64_t classes, std::int64_t label,
                            double scale, float* gradient) {
  const double largest = *std::max_element(logits, logits + classes);
  double sum = 0;
  for (std::int64_t c = 0; c < classes; ++c) sum += std::exp(logits[c] - largest);
  for (std::int64_t c = 0; c < classes; ++c) {
    const double probability = std::exp(logits[c] - largest) / sum;
    gradient[c] = static_cast<float>(scale * (probability - (c == label ? 1 : 0)));
  }
  return std::log(sum) + largest - logits[label];
}
