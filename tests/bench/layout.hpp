// SPDX-License-Identifier: Apache-2.0
//
// Shapes of models, on a CPU or a GPU.
#ifndef GRADACCUM_TESTS_BENCH_LAYOUT_HPP_
#define GRADACCUM_TESTS_BENCH_LAYOUT_HPP_

#include <gradaccum/gradaccum.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace bench {

inline void check(ga_status status) {
  if (status != GA_OK) {
    throw std::runtime_error(std::string(ga_status_name(status)) + ": " + ga_last_error());
  }
}

using Shape = std::vector<int64_t>;
using Pointers = std::vector<const void*>;

inline int64_t elements(const Shape& shape) {
  int64_t n = 1;
  for (int64_t dimension : shape) n *= dimension;
  return n;
}

// Tensors one after the other in a block, each at a multiple of 64 bytes.
struct Layout {
  explicit Layout(std::vector<Shape> from) : shapes(std::move(from)) {
    for (const Shape& shape : shapes) {
      offsets.push_back(n);
      n += (elements(shape) + 15) / 16 * 16;
    }
  }

  template <class T>
  Pointers pointers(const T* block) const {
    Pointers result;
    for (int64_t offset : offsets) result.push_back(block + offset);
    return result;
  }

  std::vector<Shape> shapes;
  std::vector<int64_t> offsets;
  int64_t n = 0;  // elements of the block
};

// GPT-2 with 124 M parameters at 12 layers, or fewer with fewer layers.
inline Layout gpt2(int layers) {
  const int64_t d = 768;
  std::vector<Shape> shapes = {{50257, d}, {1024, d}};
  for (int layer = 0; layer < layers; ++layer) {
    const std::vector<Shape> block = {{d}, {d}, {d, 3 * d}, {3 * d}, {d, d},     {d},
                                      {d}, {d}, {d, 4 * d}, {4 * d}, {4 * d, d}, {d}};
    shapes.insert(shapes.end(), block.begin(), block.end());
  }
  shapes.push_back({d});
  shapes.push_back({d});
  return Layout(std::move(shapes));
}

}  // namespace bench

#endif  // GRADACCUM_TESTS_BENCH_LAYOUT_HPP_
