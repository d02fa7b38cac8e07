// A small convolutional network for Fashion-MNIST: three layers with batch normalisation and ReLU,
// then one without. oneDNN computes convolutions and products, forward and backward;
// normalisation, and what becomes of the gradients, is libgradaccum's part.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gradaccum/gradaccum.hpp"

// Samples of a window that go through the network together.
struct Micro {
  std::int64_t index;    // in its window
  std::int64_t first;    // where its samples are in the network's tensors
  std::int64_t samples;  // how many
};

class Cnn {
 public:
  struct Score {
    double loss = 0;  // sum over the samples
    std::int64_t correct = 0;
  };
  // A layer's input to its normalisation: [samples, channels, positions].
  struct Normalised {
    std::string name;
    std::int64_t channels, positions;
    ga_bn id;
    const float* x;
  };

  // mode: ga_bn_mode. room: for how many samples there are tensors.
  Cnn(std::uint64_t seed, std::int32_t mode, std::int64_t room);
  ~Cnn();

  // Tells the library about all parameters and normalised layers.
  void add_to(gradaccum::Context& context, ga_group group);

  // Where sample number i of the tensors goes, 28 x 28 pixels.
  float* input(std::int64_t i) { return input_.data() + i * kPixels; }

  // All micro-batches of the sweep, layer by layer. In WINDOW mode the sweep is the whole window.
  void forward(const std::vector<Micro>& sweep, gradaccum::Context& context);

  // Between forward and backward: the loss, and its gradient, of the mean over the micro-batch.
  Score score(const Micro& micro, const std::uint8_t* labels);

  // Contributes the gradients of the sweep's micro-batches to the window, layer by layer.
  void backward(const std::vector<Micro>& sweep, gradaccum::Context& context);

  // With the running statistics.
  void infer(std::int64_t samples, gradaccum::Context& context);

  std::vector<float> parameters() const;
  std::vector<Normalised> normalised() const;
  std::int64_t activation_bytes() const;  // with their gradients

 private:
  static constexpr std::int64_t kPixels = 28 * 28;
  class Layer;

  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<float> input_;
};
