// SPDX-License-Identifier: Apache-2.0
#include "mlp.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

namespace {

using dnnl::memory;

memory::desc matrix(std::int64_t rows, std::int64_t columns) {
  return {{rows, columns}, memory::data_type::f32, memory::format_tag::ab};
}

memory::desc transposed(std::int64_t rows, std::int64_t columns) {
  return {{rows, columns}, memory::data_type::f32, memory::format_tag::ba};
}

dnnl::primitive_attr with_relu(bool relu) {
  dnnl::primitive_attr attributes;
  if (relu) {
    dnnl::post_ops post_ops;
#if DNNL_VERSION_MAJOR >= 3
    post_ops.append_eltwise(dnnl::algorithm::eltwise_relu, 0, 0);
#else
    post_ops.append_eltwise(1, dnnl::algorithm::eltwise_relu, 0, 0);
#endif
    attributes.set_post_ops(post_ops);
  }
  return attributes;
}

// c = relu(a b + bias); bias may be the empty descriptor.
dnnl::matmul make_matmul(const dnnl::engine& engine, const memory::desc& a, const memory::desc& b,
                         const memory::desc& bias, const memory::desc& c, bool relu) {
#if DNNL_VERSION_MAJOR >= 3
  return dnnl::matmul(dnnl::matmul::primitive_desc(engine, a, b, bias, c, with_relu(relu)));
#else
  return dnnl::matmul(
      dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, bias, c), with_relu(relu), engine));
#endif
}

// out[c] = sum of column c.
void sum_rows(const float* matrix, std::int64_t rows, std::int64_t columns, float* out) {
  std::fill_n(out, columns, 0.0F);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) out[c] += matrix[r * columns + c];
  }
}

// The derivative of ReLU, from what ReLU gave.
void mask(const float* activations, std::int64_t count, float* gradients) {
  for (std::int64_t i = 0; i < count; ++i) gradients[i] = activations[i] > 0 ? gradients[i] : 0.0F;
}

// Softmax cross-entropy of one sample; gradient: of scale times the loss.
double cross_entropy(const float* logits, std::int64_t classes, std::int64_t label, double scale,
                     float* gradient) {
  const double largest = *std::max_element(logits, logits + classes);
  double sum = 0;
  for (std::int64_t c = 0; c < classes; ++c) sum += std::exp(logits[c] - largest);
  for (std::int64_t c = 0; c < classes; ++c) {
    const double probability = std::exp(logits[c] - largest) / sum;
    gradient[c] = static_cast<float>(scale * (probability - (c == label ? 1 : 0)));
  }
  return std::log(sum) + largest - logits[label];
}

}  // namespace

Mlp::Mlp(const std::vector<std::int64_t>& widths, std::int64_t max_samples, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::int64_t widest = 0;
  for (std::size_t i = 0; i < widths.size(); ++i) {
    const auto size = static_cast<std::size_t>(max_samples * widths[i]);
    activations_.emplace_back(size);
    gradients_.emplace_back(i == 0 ? 0 : size);
    widest = std::max(widest, widths[i]);
    if (i == 0) continue;
    const std::int64_t in = widths[i - 1], out = widths[i];
    Layer layer{in, out, std::vector<float>(static_cast<std::size_t>(out * in)),
                std::vector<float>(static_cast<std::size_t>(out))};
    // He et al. 2015: keeps the variance from layer to layer under ReLU.
    std::normal_distribution<float> weights(0, std::sqrt(2.0F / static_cast<float>(in)));
    for (float& w : layer.weight) w = weights(random);
    layers_.push_back(std::move(layer));
  }
  bias_gradient_.resize(static_cast<std::size_t>(widest));
}

void Mlp::add_to(gradaccum::Context& context, ga_group group) {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    const std::string name = "fc" + std::to_string(i + 1);
    layer.weight_id =
        context.add_param(group, name + ".weight", layer.weight.data(), {layer.out, layer.in});
    layer.bias_id = context.add_param(group, name + ".bias", layer.bias.data(), {layer.out});
  }
}

const Mlp::Kernels& Mlp::kernels(std::int64_t samples) {
  const auto known = kernels_.find(samples);
  if (known != kernels_.end()) return known->second;
  Kernels kernels;
  const auto view = [this](const memory::desc& desc, std::vector<float>& data) {
    return memory(desc, engine_, data.data());
  };
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    const memory::desc x = matrix(samples, layer.in), y = matrix(samples, layer.out);
    const memory::desc weight = matrix(layer.out, layer.in),
                       weight_t = transposed(layer.in, layer.out);
    const memory::desc bias = matrix(1, layer.out);
    kernels.forward.push_back({make_matmul(engine_, x, weight_t, bias, y, i + 1 < layers_.size()),
                               {{DNNL_ARG_SRC, view(x, activations_[i])},
                                {DNNL_ARG_WEIGHTS, view(weight_t, layer.weight)},
                                {DNNL_ARG_BIAS, view(bias, layer.bias)},
                                {DNNL_ARG_DST, view(y, activations_[i + 1])}}});
    if (i == 0) {
      kernels.backward.emplace_back();
      continue;
    }
    kernels.backward.push_back({make_matmul(engine_, y, weight, {}, x, false),
                                {{DNNL_ARG_SRC, view(y, gradients_[i + 1])},
                                 {DNNL_ARG_WEIGHTS, view(weight, layer.weight)},
                                 {DNNL_ARG_DST, view(x, gradients_[i])}}});
  }
  return kernels_.emplace(samples, std::move(kernels)).first->second;
}

Mlp::Score Mlp::forward(std::int64_t samples, const std::uint8_t* labels) {
  for (const Product& product : kernels(samples).forward) {
    product.primitive.execute(stream_, product.arguments);
  }
  stream_.wait();
  Score score;
  const std::int64_t classes = layers_.back().out;
  for (std::int64_t i = 0; i < samples; ++i) {
    const float* logits = activations_.back().data() + i * classes;
    score.loss += cross_entropy(logits, classes, labels[i], 1.0 / static_cast<double>(samples),
                                gradients_.back().data() + i * classes);
    score.correct += std::max_element(logits, logits + classes) - logits == labels[i];
  }
  return score;
}

void Mlp::backward(std::int64_t samples, gradaccum::Context& context) {
  const Kernels& kernels = this->kernels(samples);
  for (std::size_t i = layers_.size(); i-- > 0;) {
    const Layer& layer = layers_[i];
    const float* x = activations_[i].data();
    const float* dy = gradients_[i + 1].data();
    context.accumulate_matmul(layer.weight_id, samples, dy, layer.out, GA_TRANSPOSE, x, layer.in,
                              GA_NO_TRANSPOSE);
    sum_rows(dy, samples, layer.out, bias_gradient_.data());
    context.accumulate_part(layer.bias_id, bias_gradient_.data());
    if (i == 0) break;
    kernels.backward[i].primitive.execute(stream_, kernels.backward[i].arguments);
    stream_.wait();
    mask(x, samples * layer.in, gradients_[i].data());
  }
}

std::vector<const std::vector<float>*> Mlp::parameters() const {
  std::vector<const std::vector<float>*> all;
  for (const Layer& layer : layers_) {
    all.push_back(&layer.weight);
    all.push_back(&layer.bias);
  }
  return all;
}

std::int64_t Mlp::parameter_bytes() const {
  std::size_t count = 0;
  for (const std::vector<float>* tensor : parameters()) count += tensor->size();
  return static_cast<std::int64_t>(count * sizeof(float));
}

std::int64_t Mlp::activation_bytes() const {
  std::size_t count = 0;
  for (const auto& tensor : activations_) count += tensor.size();
  for (const auto& tensor : gradients_) count += tensor.size();
  return static_cast<std::int64_t>(count * sizeof(float));
}
