// A multilayer perceptron with ReLU and softmax cross-entropy, forward and backward by oneDNN. It
// computes gradients; what becomes of them is libgradaccum's part.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

#include "gradaccum/gradaccum.hpp"

class Mlp {
 public:
  struct Score {
    double loss = 0;  // sum over the samples
    std::int64_t correct = 0;
  };

  // widths: of the input, of the hidden layers, of the output. Weights are drawn from seed.
  Mlp(const std::vector<std::int64_t>& widths, std::int64_t max_samples, std::uint64_t seed);

  // Tells the library about all weights and biases.
  void add_to(gradaccum::Context& context, ga_group group);

  // max_samples rows of widths[0]; forward() reads the first rows of it.
  float* input() { return activations_.front().data(); }

  // Runs samples rows of input() through the network and keeps what backward() needs.
  Score forward(std::int64_t samples, const std::uint8_t* labels);

  // After forward(), within a micro-batch: contributes the gradients of the mean loss of these
  // samples. A weight's gradient is stored nowhere: the matrix product goes to its accumulator.
  void backward(std::int64_t samples, gradaccum::Context& context);

  // All weights and biases, one tensor after the other.
  std::vector<const std::vector<float>*> parameters() const;

  std::int64_t parameter_bytes() const;
  std::int64_t activation_bytes() const;  // what grows with max_samples

 private:
  struct Layer {
    std::int64_t in, out;
    std::vector<float> weight, bias;  // [out, in], [out]
    ga_param weight_id = -1, bias_id = -1;
  };
  struct Product {
    dnnl::primitive primitive;
    std::unordered_map<int, dnnl::memory> arguments;
  };
  struct Kernels {
    std::vector<Product> forward;  // [layer]: activations_[i + 1] = relu(activations_[i] W^T + b)
    std::vector<Product>
        backward;  // [layer]: gradients_[i] = gradients_[i + 1] W; none for the first
  };

  const Kernels& kernels(std::int64_t samples);  // made on first use, kept

  std::vector<Layer> layers_;
  std::vector<std::vector<float>> activations_;  // [layer]: its input; at the end the logits
  std::vector<std::vector<float>> gradients_;    // of the same; the first stays empty
  std::vector<float> bias_gradient_;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::map<std::int64_t, Kernels> kernels_;
};
