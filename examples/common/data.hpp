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

  // Writes one image as network input: mean 0 and variance 1 over the training set.
  void image_to(std::int64_t index, float* out) const;
};

// The folder with the four files: the one that is named, else the first of the usual ones that has
// them. Throws std::runtime_error, naming the package to install.
std::string find_fashion_mnist(const std::string& folder);

// which: "train" (60000 images) or "t10k" (10000). Throws std::runtime_error for a file that is not
// what it should be.
Dataset load_fashion_mnist(const std::string& folder, const std::string& which);
