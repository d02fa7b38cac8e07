// same_bits.c in C++: see there.
// SPDX-License-Identifier: Apache-2.0
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "gradaccum/gradaccum.hpp"

namespace {

constexpr int kImages = 500, kPixels = 784, kHidden = 32, kClasses = 10;
constexpr int kWindow = 64, kMicro = 16, kEpochs = 3;

std::vector<std::uint8_t> read_file(const std::string& path, int header, int size) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(header + size));
  const gzFile file = gzopen(path.c_str(), "rb");
  const bool ok = file && gzread(file, bytes.data(), static_cast<unsigned>(bytes.size())) ==
                              static_cast<int>(bytes.size());
  if (file) gzclose(file);
  if (!ok) throw std::runtime_error(path + " could not be read");
  bytes.erase(bytes.begin(), bytes.begin() + header);
  return bytes;
}

// A parameter and its gradient, which is the mean of sums in double.
struct Layer {
  Layer(int rows, int columns)
      : columns(columns), values(static_cast<std::size_t>(rows * columns)) {
    sums.resize(values.size());
    gradient.resize(values.size());
  }

  // Uniform in [-scale / 2, scale / 2), in steps that a float holds.
  void fill(double scale, std::uint64_t& state) {
    for (float& value : values) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      value = static_cast<float>((static_cast<double>(state >> 40) / 16777216 - 0.5) * scale);
    }
  }
  void clear() { std::fill(sums.begin(), sums.end(), 0.0); }
  void mean(int samples) {
    for (std::size_t i = 0; i < sums.size(); ++i) {
      gradient[i] = static_cast<float>(sums[i] / samples);
    }
  }
  double at(int row, int column) const { return values[index(row, column)]; }
  double& sum(int row, int column) { return sums[index(row, column)]; }
  std::size_t index(int row, int column) const {
    return static_cast<std::size_t>(row * columns + column);
  }

  int columns;
  std::vector<float> values, gradient;
  std::vector<double> sums;
};

struct Network {
  std::vector<std::uint8_t> pixels, labels;
  Layer w1{kHidden, kPixels}, b1{1, kHidden}, w2{kClasses, kHidden}, b2{1, kClasses};

  // Stores the mean gradients of samples [first, end), and returns the sum of their losses.
  double backward(int first, int end) {
    double loss = 0;
    for (Layer* layer : {&w1, &b1, &w2, &b2}) layer->clear();
    for (int i = first; i < end; ++i) {
      double x[kPixels], h[kHidden], dh[kHidden] = {};
      for (int p = 0; p < kPixels; ++p) {
        x[p] = pixels[static_cast<std::size_t>(i * kPixels + p)] / 256.0;
      }
      for (int j = 0; j < kHidden; ++j) {
        double sum = b1.at(0, j);
        for (int p = 0; p < kPixels; ++p) sum += w1.at(j, p) * x[p];
        h[j] = sum > 0 ? sum : 0;
      }
      for (int c = 0; c < kClasses; ++c) {
        double y = b2.at(0, c);
        for (int j = 0; j < kHidden; ++j) y += w2.at(c, j) * h[j];
        const double error = y - (c == labels[static_cast<std::size_t>(i)] ? 1 : 0);
        loss += error * error;
        b2.sum(0, c) += 2 * error;
        for (int j = 0; j < kHidden; ++j) {
          w2.sum(c, j) += 2 * error * h[j];
          dh[j] += 2 * error * w2.at(c, j);
        }
      }
      for (int j = 0; j < kHidden; ++j) {
        if (h[j] > 0) {
          b1.sum(0, j) += dh[j];
          for (int p = 0; p < kPixels; ++p) w1.sum(j, p) += dh[j] * x[p];
        }
      }
    }
    for (Layer* layer : {&w1, &b1, &w2, &b2}) layer->mean(end - first);
    return loss;
  }
};

void run(const std::string& folder, const std::string& path) {
  Network net;
  net.pixels = read_file(folder + "/train-images-idx3-ubyte.gz", 16, kImages * kPixels);
  net.labels = read_file(folder + "/train-labels-idx1-ubyte.gz", 8, kImages);
  std::uint64_t state = 1;
  net.w1.fill(0.125, state);
  net.w2.fill(0.5, state);

  gradaccum::Context context;
  ga_optimizer adamw = gradaccum::default_optimizer(GA_OPTIMIZER_ADAMW);
  adamw.lr = 1.0 / 512;
  const gradaccum::Group group = context.add_group(adamw);
  ga_clip clip = gradaccum::default_clip();
  clip.scope = GA_CLIP_GLOBAL;
  clip.max_norm = 1;
  context.set_clip(clip);
  context.add_param(group, "fc1.weight", net.w1.values.data(), {kHidden, kPixels});
  context.add_param(group, "fc1.bias", net.b1.values.data(), {kHidden});
  context.add_param(group, "fc2.weight", net.w2.values.data(), {kClasses, kHidden});
  context.add_param(group, "fc2.bias", net.b2.values.data(), {kClasses});

  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    double loss = 0;
    for (int window = 0; window < kImages; window += kWindow) {
      const int end = std::min(window + kWindow, kImages);
      for (int first = window; first < end; first += kMicro) {
        const int last = std::min(first + kMicro, end);
        loss += net.backward(first, last);
        context.accumulate({net.w1.gradient.data(), net.b1.gradient.data(), net.w2.gradient.data(),
                            net.b2.gradient.data()},
                           last - first);
      }
      context.step();
    }
    std::printf("epoch %d: loss %.4f\n", epoch, loss / kImages);
  }

  std::ofstream out(path, std::ios::binary);
  for (const Layer* layer : {&net.w1, &net.b1, &net.w2, &net.b2}) {
    out.write(reinterpret_cast<const char*>(layer->values.data()),
              static_cast<std::streamsize>(layer->values.size() * sizeof(float)));
  }
  if (!out.flush()) throw std::runtime_error(path + " could not be written");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: same_bits <folder of Fashion-MNIST> <file>\n");
    return EXIT_FAILURE;
  }
  try {
    run(argv[1], argv[2]);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
