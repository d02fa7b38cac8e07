// Running variances computed by this program itself from the inputs of the normalised layers: the
// reference for the library's, and what the usual average of variances gives.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "cnn.hpp"
#include "train.hpp"

class RunningVariances {
 public:
  explicit RunningVariances(const Cnn& network);

  // Called after the forward pass of a micro-batch, while the layers still hold their inputs.
  void add(const Cnn& network, const Micro& micro);
  void step();

  std::vector<LayerVariance> compare(const Cnn& network, std::int64_t micro,
                                     const gradaccum::Context& context) const;

 private:
  struct Channel {
    double sum = 0, squares = 0;  // over the window
    double variances = 0;         // sum of its micro-batches' biased variances
    double exact = 1;             // running variance, unbiased: torch's convention
    double biased = 1;            // running variance, biased: Keras' convention
    double averaged = 1;          // running mean of the micro-batches' variances
  };
  struct Layer {
    std::vector<Channel> channels;
    double count = 0;  // elements of a channel in the window
  };
  std::vector<Layer> layers_;
  double micros_ = 0;  // in the window
};
