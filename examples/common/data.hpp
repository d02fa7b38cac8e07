// Fashion-MNIST, as Debian's package dataset-fashion-mnist installs it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct Dataset {
  std::int64_t count = 0;
  std::int64_t pixels = 0;           // of one image
  std::vector<std::uint8_t> images;  // count x pixels
  std::vector<std::uint8_t> labels;  // count, each in [0, 10)

  // Writes one image as network input, scaled to mean 0 and variance 1 over the training set.
  void image_to(std::int64_t index, float* out) const;
};

// Returns the folder with the four files: the given one, or, if folder is empty, the first of the
// standard data directories that has them. Throws std::runtime_error with the package to install.
std::string find_fashion_mnist(const std::string& folder);

// which: "train" (60000 images) or "t10k" (10000). Throws std::runtime_error if a file is missing
// or malformed.
Dataset load_fashion_mnist(const std::string& folder, const std::string& which);
