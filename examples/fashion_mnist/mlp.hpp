// A multilayer perceptron with ReLU and softmax cross-entropy, forward and backward by oneDNN. It
// computes gradients; what becomes of them is libgradaccum's part.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>
#include <vector>

#include "gradaccum/gradaccum.hpp"

// What the library is given, and how it adds. The network itself computes in f32.
struct Precision {
  ga_dtype parameters = GA_F32, gradients = GA_F32;
  std::int32_t accumulators = 0;  // ga_dtype; 0: the library's default
  ga_accumulation accumulation = GA_ACCUMULATE_PLAIN;

  // Whether matrix products can go to the accumulators.
  bool allows_matmul() const {
    return parameters != GA_F64 && (accumulators == 0 || accumulators == GA_F32) &&
           accumulation == GA_ACCUMULATE_PLAIN;
  }
};

class Mlp {
 public:
  struct Score {
    double loss = 0;  // sum over the samples
    std::int64_t correct = 0;
  };

  // widths: of the input, of the hidden layers, of the output. Weights are drawn from seed.
  Mlp(const std::vector<std::int64_t>& widths, std::int64_t max_samples, std::uint64_t seed,
      const Precision& precision);

  // Tells the library about all weights and biases.
  void add_to(gradaccum::Context& context, ga_group weights, ga_group biases);

  // max_samples rows of widths[0]; forward() reads the first rows of it.
  float* input() { return activations_.front().data(); }

  // Runs samples rows of input() through the network and keeps what backward() needs.
  Score forward(std::int64_t samples, const std::uint8_t* labels, double loss_scale = 1);

  // After forward(), within a micro-batch: contributes the gradients of loss_scale times the mean
  // loss of these samples. Where the precision allows it, a weight's gradient is stored nowhere: the
  // matrix product goes to its accumulator.
  void backward(std::int64_t samples, gradaccum::Context& context);

  // After a step: takes over what the library has made of the parameters.
  void read_parameters();

  // All weights and biases, one tensor after the other.
  std::vector<const std::vector<float>*> parameters() const;

  // The library's averages of the same; and exchanges the network's for others.
  std::vector<std::vector<float>> averages(gradaccum::Context& context) const;
  void exchange(std::vector<std::vector<float>>& values);

  std::int64_t parameter_bytes() const;
  std::int64_t activation_bytes() const;  // what grows with max_samples

 private:
  struct Tensor {
    std::vector<float> values;  // what the network computes with
    std::vector<std::byte>
        stored;  // what the library updates; empty: values, which are f32 as well
    ga_param id = -1;
  };
  struct Layer {
    std::int64_t in, out;
    Tensor weight, bias;  // [out, in], [out]
  };
  struct Product {
    dnnl::primitive primitive;
    std::unordered_map<int, dnnl::memory> arguments;
  };
  struct Kernels {
    std::vector<Product> forward;  // [layer]: activations_[i + 1] = relu(activations_[i] W^T + b)
    std::vector<Product>
        backward;  // [layer]: gradients_[i] = gradients_[i + 1] W; none for the first
    std::vector<Product> weight;  // [layer]: its gradient; none where the library multiplies
  };

  const Kernels& kernels(std::int64_t samples);  // made on first use, kept
  Product weight_product(std::size_t layer, std::int64_t samples);
  void contribute_weight(std::size_t layer, std::int64_t samples, gradaccum::Context& context);
  const void* as_gradients(const float* values, std::int64_t count,
                           std::vector<std::byte>& buffer) const;

  const Precision precision_;

  std::vector<Layer> layers_;
  std::vector<std::vector<float>> activations_;  // [layer]: its input; at the end the logits
  std::vector<std::vector<float>> gradients_;    // of the same; the first stays empty
  std::vector<float> bias_gradient_, weight_gradient_;
  // In the gradients' dtype: the two sides of a weight's product, and any gradient. Empty for f32.
  std::vector<std::byte> rounded_dy_, rounded_x_, rounded_gradient_;
  bool multiplies_bf16_ = false;  // oneDNN makes weight_gradient_ in bf16, from bf16
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::map<std::int64_t, Kernels> kernels_;
};
