// A multilayer perceptron with ReLU and softmax cross-entropy, forward and backward. It computes
// gradients; what becomes of them is libgradaccum's part. One is in the CPU's memory and computes by
// oneDNN (mlp_onednn.cpp), another in a GPU's and computes by cuBLAS (mlp_cuda.cu).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
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
  using Values = std::vector<std::vector<float>>;  // of all weights and biases, one by one

  virtual ~Mlp() = default;

  // Tells the library about all weights and biases.
  virtual void add_to(gradaccum::Context& context, ga_group weights, ga_group biases) = 0;

  // In the CPU's memory, max_samples rows of widths[0]; forward() reads the first rows of it, and
  // another may be the next ones' place.
  virtual float* input() = 0;

  // Runs samples rows of input() through the network, adds to the score, and keeps what backward()
  // needs: the gradient of their mean loss, times the loss scale of the context, if there is one.
  virtual void forward(std::int64_t samples, const std::uint8_t* labels,
                       const gradaccum::Context* context) = 0;

  // After forward(), within a micro-batch: contributes the gradients. Where the precision allows it, a
  // weight's gradient is stored nowhere: the matrix product goes to its accumulator.
  virtual void backward(std::int64_t samples, gradaccum::Context& context) = 0;

  // The score since it was last taken; on a GPU this waits for it, and nothing above does.
  virtual Score take_score() = 0;

  // After a step: takes over what the library has made of the parameters.
  virtual void read_parameters() = 0;

  virtual Values parameters() = 0;
  // The library's averages of the same; and exchanges the network's for others.
  virtual Values averages(gradaccum::Context& context) = 0;
  virtual void exchange(Values& values) = 0;

  virtual std::int64_t parameter_bytes() const = 0;
  virtual std::int64_t activation_bytes() const = 0;  // what grows with max_samples
};

// widths: of the input, of the hidden layers, of the output. Weights are drawn from seed, the same ones
// on every device. Throws std::runtime_error where this program has nothing for the device.
std::unique_ptr<Mlp> make_mlp(ga_device device, const std::vector<std::int64_t>& widths,
                              std::int64_t max_samples, std::uint64_t seed,
                              const Precision& precision);

// ---- For those who implement it -----------------------------------------------------------------

struct LayerStart {
  std::string name;
  std::int64_t in, out;
  std::vector<float> weight;  // [out, in]; the bias starts with zeros
};
using Start = std::vector<LayerStart>;

std::unique_ptr<Mlp> make_onednn_mlp(const Start& start, std::int64_t max_samples,
                                     const Precision& precision);
std::unique_ptr<Mlp> make_cuda_mlp(const Start& start, std::int64_t max_samples,
                                   const Precision& precision);
