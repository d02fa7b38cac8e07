// SPDX-License-Identifier: Apache-2.0
#include "mlp.hpp"

#include <cmath>
#include <random>
#include <stdexcept>

namespace {

// He et al. 2015: preserves the variance from layer to layer under ReLU.
Start draw(const std::vector<std::int64_t>& widths, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Start start;
  for (std::size_t i = 1; i < widths.size(); ++i) {
    const std::int64_t in = widths[i - 1], out = widths[i];
    LayerStart layer{"fc" + std::to_string(i), in, out, {}};
    layer.weight.resize(static_cast<std::size_t>(out * in));
    std::normal_distribution<float> weights(0, std::sqrt(2.0F / static_cast<float>(in)));
    for (float& w : layer.weight) w = weights(random);
    start.push_back(std::move(layer));
  }
  return start;
}

}  // namespace

std::unique_ptr<Mlp> make_mlp(ga_device device, const std::vector<std::int64_t>& widths,
                              std::int64_t max_samples, std::uint64_t seed,
                              const Precision& precision) {
  const Start start = draw(widths, seed);
#ifdef FASHION_MNIST_ONEDNN
  if (device == GA_DEVICE_CPU) return make_onednn_mlp(start, max_samples, precision);
#endif
#ifdef FASHION_MNIST_CUDA
  if (device == GA_DEVICE_CUDA) {
    if (gradaccum::device_count(device) == 0) throw std::runtime_error(ga_last_error());
    return make_cuda_mlp(start, max_samples, precision);
  }
#endif
  throw std::runtime_error(device == GA_DEVICE_CPU
                               ? "--device cpu needs oneDNN, but this program was built without it"
                               : "--device cuda needs CUDA, but this program was built without it");
}
