// Running variances as this program itself finds them, from what the layers normalise: to compare the
// library's with, and to show what the usual way of accumulating gives.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "cnn.hpp"
#include "train.hpp"

class RunningVariances {
 public:
  explicit RunningVariances(const Cnn& network);

  // After the forward pass of a micro-batch, while the layers' inputs are there.
  void add(const Cnn& network, const Micro& micro);
  void step();

  std::vector<LayerVariance> compare(const Cnn& network, std::int64_t micro,
                                     const gradaccum::Context& context) const;

 private:
  struct Channel {
    double sum = 0, squares = 0;      // of the window
    double variances = 0;             // of its micro-batches, biased, added up
    double exact = 1;                 // running, unbiased: torch's convention
    double biased = 1, averaged = 1;  // running: Keras' convention, exact and by averaging
  };
  struct Layer {
    std::vector<Channel> channels;
    double count = 0;  // elements of a channel in the window
  };
  std::vector<Layer> layers_;
  double micros_ = 0;  // in the window
};
