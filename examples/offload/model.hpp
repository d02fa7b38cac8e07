// The shapes of a transformer, and a backward pass over them that takes as long as asked.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

struct Tensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::size_t offset = 0;  // of its first element
};

// What backward completes at once: a transformer block, the last norm, or the embedding.
struct Layer {
  std::string name;
  std::size_t first_tensor, end_tensor;
  std::size_t first, end;  // elements
};

// A quadratic loss stands for the network, h / 2 |p - target|^2, so that each layer's gradient
// h (p - target) depends on its parameters and costs next to nothing. Tensors are bf16, one after
// another in a single block.
class Model {
 public:
  Model(int blocks, int width);

  std::size_t size() const { return target_.size(); }
  const std::vector<Tensor>& tensors() const { return tensors_; }
  const std::vector<Layer>& layers() const { return layers_; }  // in the order of forward

  // Writes the gradient of one layer; returns its part of the loss.
  double backward(const Layer& layer, const std::uint16_t* p, std::uint16_t* gradient) const;

 private:
  using Shapes = std::vector<std::pair<std::string, std::vector<std::int64_t>>>;
  void add_layer(const std::string& name, const Shapes& shapes);

  std::vector<Tensor> tensors_;
  std::vector<Layer> layers_;
  std::vector<std::uint16_t> target_;
  float h_;
};
