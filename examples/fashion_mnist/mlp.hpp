// A multilayer perceptron with ReLU and softmax cross-entropy, forward and backward. It computes
// gradients and hands them to libgradaccum. One implementation is in the CPU's memory and uses
// oneDNN (mlp_onednn.cpp), the other is in a GPU's memory and uses cuBLAS (mlp_cuda.cu).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gradaccum/gradaccum.hpp"

// Dtypes of what the library is given, and how it accumulates. The network itself computes in f32.
struct Precision {
  ga_dtype parameters = GA_F32, gradients = GA_F32;
  std::int32_t accumulators = 0;  // ga_dtype; 0: the library's default
  ga_accumulation accumulation = GA_ACCUMULATE_PLAIN;

  // Whether ga_accumulate_matmul supports these dtypes and this mode.
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

  // Registers all weights and biases with the library.
  virtual void add_to(gradaccum::Context& context, gradaccum::Group weights,
                      gradaccum::Group biases) = 0;

  // A buffer in the CPU's memory, max_samples rows of widths[0]. forward() reads its first rows;
  // after forward(), input() may return another buffer.
  virtual float* input() = 0;

  // Runs samples rows of input() through the network and adds to the score. For backward() it keeps
  // the gradient of the mean loss, times the context's loss scale unless context is null.
  virtual void forward(std::int64_t samples, const std::uint8_t* labels,
                       const gradaccum::Context* context) = 0;

  // Called after forward(): contributes the gradients to the micro-batch. If the precision allows
  // it, a weight's gradient is never stored: its matrix product goes straight to the accumulator.
  virtual void backward(std::int64_t samples, gradaccum::MicroBatch& micro) = 0;

  // Returns the score since the last call. On a GPU this call waits; the calls above do not.
  virtual Score take_score() = 0;

  // Called after a step: reads the parameters that the library has updated.
  virtual void read_parameters() = 0;

  virtual Values parameters() = 0;
  // The exponential moving averages of the parameters, from the library.
  virtual Values averages(gradaccum::Context& context) = 0;
  // Swaps the network's parameters for values.
  virtual void exchange(Values& values) = 0;

  virtual std::int64_t parameter_bytes() const = 0;
  virtual std::int64_t activation_bytes() const = 0;  // what grows with max_samples
};

// widths: of the input, the hidden layers and the output. Weights are drawn from seed and are the
// same on every device. Throws std::runtime_error if this program was built without support for the
// device.
std::unique_ptr<Mlp> make_mlp(ga_device device, const std::vector<std::int64_t>& widths,
                              std::int64_t max_samples, std::uint64_t seed,
                              const Precision& precision);

// ---- For implementations ------------------------------------------------------------------------

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
