// A small convolutional network for Fashion-MNIST: three layers with batch normalisation and ReLU,
// then one without. oneDNN computes convolutions and matrix products, forward and backward;
// libgradaccum normalises, and takes the gradients.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gradaccum/gradaccum.hpp"

// A micro-batch.
struct Micro {
  std::int64_t index;    // in its window
  std::int64_t first;    // index of its first sample in the network's tensors
  std::int64_t samples;  // number of samples
};

class Cnn {
 public:
  struct Score {
    double loss = 0;  // sum over the samples
    std::int64_t correct = 0;
  };
  // The input of a layer's normalisation: [samples, channels, positions].
  struct Normalised {
    std::string name;
    std::int64_t channels, positions;
    gradaccum::BatchNorm id;
    const float* x;
  };

  // mode: ga_bn_mode. room: number of samples that the tensors hold.
  Cnn(std::uint64_t seed, std::int32_t mode, std::int64_t room);
  ~Cnn();

  // Registers all parameters and normalised layers with the library.
  void add_to(gradaccum::Context& context, gradaccum::Group group);

  // The place of sample i of the input, 28 x 28 pixels.
  float* input(std::int64_t i) { return input_.data() + i * kPixels; }

  // Runs all micro-batches of the sweep through the network, layer by layer. In WINDOW mode a sweep
  // is the whole window.
  void forward(const std::vector<Micro>& sweep, gradaccum::Context& context);

  // Called between forward and backward: computes the loss and the gradient of the micro-batch's
  // mean.
  Score score(const Micro& micro, const std::uint8_t* labels);

  // Contributes the gradients of the sweep's micro-batches to the window, layer by layer.
  void backward(const std::vector<Micro>& sweep, gradaccum::Context& context);

  // Runs samples through the network with the running statistics.
  void infer(std::int64_t samples, gradaccum::Context& context);

  std::vector<float> parameters() const;
  std::vector<Normalised> normalised() const;
  std::int64_t activation_bytes() const;  // of activations and their gradients

 private:
  static constexpr std::int64_t kPixels = 28 * 28;
  class Layer;

  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<float> input_;
};
