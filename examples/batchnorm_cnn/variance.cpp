// SPDX-License-Identifier: Apache-2.0
#include "variance.hpp"

#include <algorithm>
#include <cmath>

RunningVariances::RunningVariances(const Cnn& network) {
  for (const Cnn::Normalised& from : network.normalised()) {
    layers_.emplace_back().channels.resize(static_cast<std::size_t>(from.channels));
  }
}

void RunningVariances::add(const Cnn& network, const Micro& micro) {
  const std::vector<Cnn::Normalised> inputs = network.normalised();
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const Cnn::Normalised& input = inputs[i];
    const double count = static_cast<double>(micro.samples * input.positions);
    for (std::int64_t c = 0; c < input.channels; ++c) {
      // Means are about as large as deviations here, so plain sums of squares in double are exact
      // enough.
      double sum = 0, squares = 0;
      for (std::int64_t s = micro.first; s < micro.first + micro.samples; ++s) {
        const float* const x = input.x + (s * input.channels + c) * input.positions;
        for (std::int64_t p = 0; p < input.positions; ++p) {
          sum += x[p];
          squares += double{x[p]} * x[p];
        }
      }
      Channel& channel = layers_[i].channels[static_cast<std::size_t>(c)];
      channel.sum += sum;
      channel.squares += squares;
      channel.variances += squares / count - (sum / count) * (sum / count);
    }
    layers_[i].count += count;
  }
  ++micros_;
}

void RunningVariances::step() {
  constexpr double kMomentum = 0.1;  // torch's
  for (Layer& layer : layers_) {
    for (Channel& channel : layer.channels) {
      const double mean = channel.sum / layer.count;
      const double m2 = channel.squares - layer.count * mean * mean;
      channel.exact += kMomentum * (m2 / (layer.count - 1) - channel.exact);
      channel.biased += kMomentum * (m2 / layer.count - channel.biased);
      channel.averaged += kMomentum * (channel.variances / micros_ - channel.averaged);
      channel.sum = channel.squares = channel.variances = 0;
    }
    layer.count = 0;
  }
  micros_ = 0;
}

std::vector<LayerVariance> RunningVariances::compare(const Cnn& network, std::int64_t micro,
                                                     const gradaccum::Context& context) const {
  std::vector<LayerVariance> all;
  const std::vector<Cnn::Normalised> inputs = network.normalised();
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const std::vector<Channel>& channels = layers_[i].channels;
    std::vector<double> librarys(channels.size());
    context.bn_running<double>(inputs[i].id, nullptr, librarys.data());
    LayerVariance result{inputs[i].name, micro * inputs[i].positions, 0, 0};
    for (std::size_t c = 0; c < channels.size(); ++c) {
      const double error = std::abs(librarys[c] / channels[c].exact - 1);
      if (!(error <= result.error)) result.error = error;  // keeps a NaN too
      result.averaged +=
          channels[c].averaged / channels[c].biased / static_cast<double>(channels.size());
    }
    all.push_back(result);
  }
  return all;
}
