// SPDX-License-Identifier: Apache-2.0
#include "model.hpp"

#include <algorithm>
#include <cmath>

#include "../fashion_mnist/halves.hpp"

Model::Model(int blocks, int width) {
  constexpr std::int64_t kVocabulary = 4096;
  const std::int64_t d = width;
  add_layer("embedding", {{"weight", {kVocabulary, d}}});
  for (int block = 1; block <= blocks; ++block)
    add_layer("block " + std::to_string(block), {{"norm1.weight", {d}},
                                                 {"norm1.bias", {d}},
                                                 {"qkv.weight", {3 * d, d}},
                                                 {"qkv.bias", {3 * d}},
                                                 {"projection.weight", {d, d}},
                                                 {"projection.bias", {d}},
                                                 {"norm2.weight", {d}},
                                                 {"norm2.bias", {d}},
                                                 {"fc1.weight", {4 * d, d}},
                                                 {"fc1.bias", {4 * d}},
                                                 {"fc2.weight", {d, 4 * d}},
                                                 {"fc2.bias", {d}}});
  add_layer("norm", {{"weight", {d}}, {"bias", {d}}});

  target_.resize(layers_.back().end);
  std::uint64_t state = 1;
  double squares = 0;
  for (std::uint16_t& x : target_) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    x = to_bf16((static_cast<float>(state >> 40) * 0x1p-24F - 0.5F) * 0.2F);
    squares += double{from_bf16(x)} * from_bf16(x);
  }
  h_ = static_cast<float>(1 / std::sqrt(squares));  // at p = 0 the gradient has norm 1
}

void Model::add_layer(const std::string& name, const Shapes& shapes) {
  const std::size_t first = layers_.empty() ? 0 : layers_.back().end;
  Layer layer = {name, tensors_.size(), tensors_.size(), first, first};
  for (const auto& [tensor, shape] : shapes) {
    tensors_.push_back({name + "." + tensor, shape, layer.end});
    std::size_t count = 1;
    for (const std::int64_t n : shape) count *= static_cast<std::size_t>(n);
    layer.end += count;
  }
  layer.end_tensor = tensors_.size();
  layers_.push_back(layer);
}

double Model::backward(const Layer& layer, const std::uint16_t* p, std::uint16_t* gradient) const {
  // Sums in several lanes, which the compiler turns into vectors.
  constexpr std::size_t kLanes = 16, kPiece = 4096;
  double squares = 0;
  for (std::size_t first = layer.first; first < layer.end; first += kPiece) {
    const std::size_t end = std::min(first + kPiece, layer.end);
    const auto element = [&](std::size_t i) {
      const float distance = from_bf16(p[i]) - from_bf16(target_[i]);
      gradient[i] = to_bf16(h_ * distance);
      return distance * distance;
    };
    float lanes[kLanes] = {};
    std::size_t i = first;
    for (; i + kLanes <= end; i += kLanes)
      for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += element(i + lane);
    for (; i < end; ++i) lanes[0] += element(i);
    for (const float lane : lanes) squares += double{lane};
  }
  return 0.5 * double{h_} * squares;
}
