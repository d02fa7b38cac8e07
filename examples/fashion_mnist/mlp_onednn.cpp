// The network in the CPU's memory, with oneDNN's matrix products.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <unordered_map>
#include <utility>

#include "../common/cross_entropy.hpp"
#include "mlp.hpp"
#include "numbers.hpp"

namespace {

using dnnl::memory;
constexpr auto kF32 = memory::data_type::f32, kBf16 = memory::data_type::bf16;

memory::desc matrix(std::int64_t rows, std::int64_t columns, memory::data_type dtype = kF32) {
  return {{rows, columns}, dtype, memory::format_tag::ab};
}

memory::desc transposed(std::int64_t rows, std::int64_t columns, memory::data_type dtype = kF32) {
  return {{rows, columns}, dtype, memory::format_tag::ba};
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

// Whether this oneDNN has a bf16 matrix product for this processor.
bool has_bf16_matmul(const dnnl::engine& engine) {
  try {
    const memory::desc any = matrix(16, 16, kBf16);
    make_matmul(engine, any, any, {}, any, false);
    return true;
  } catch (const dnnl::error&) {
    return false;
  }
}

// out[c] = sum of column c.
void sum_rows(const float* matrix, std::int64_t rows, std::int64_t columns, float* out) {
  std::fill_n(out, columns, 0.0F);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) out[c] += matrix[r * columns + c];
  }
}

// Multiplies by the derivative of ReLU, which is known from ReLU's output.
void mask(const float* activations, std::int64_t count, float* gradients) {
  for (std::int64_t i = 0; i < count; ++i) gradients[i] = activations[i] > 0 ? gradients[i] : 0.0F;
}

class OnednnMlp : public Mlp {
 public:
  OnednnMlp(const Start& start, std::int64_t max_samples, const Precision& precision);

  void add_to(gradaccum::Context& context, gradaccum::Group weights,
              gradaccum::Group biases) override;
  float* input() override { return activations_.front().data(); }
  void forward(std::int64_t samples, const std::uint8_t* labels,
               const gradaccum::Context* context) override;
  void backward(std::int64_t samples, gradaccum::MicroBatch& micro) override;
  Score take_score() override { return std::exchange(score_, {}); }
  void read_parameters() override;
  Values parameters() override;
  Values averages(gradaccum::Context& context) override;
  void exchange(Values& values) override;
  std::int64_t parameter_bytes() const override;
  std::int64_t activation_bytes() const override;

 private:
  struct Tensor {
    std::vector<float> values;      // what the network computes with
    std::vector<std::byte> stored;  // what the library updates; empty if it updates values itself
    gradaccum::Param id = gradaccum::no_param;
  };
  struct Layer {
    std::string name;
    std::int64_t in, out;
    Tensor weight, bias;  // [out, in], [out]
  };
  struct Product {
    dnnl::primitive primitive;
    std::unordered_map<int, dnnl::memory> arguments;
  };
  struct Kernels {
    // For layer i: activations_[i + 1] = relu(activations_[i] W^T + b)
    std::vector<Product> forward;
    // For layer i: gradients_[i] = gradients_[i + 1] W; none for the first
    std::vector<Product> backward;
    // For layer i: the weight's gradient; none if the library computes the product
    std::vector<Product> weight;
  };

  const Kernels& kernels(std::int64_t samples);  // created on first use and kept
  Product weight_product(std::size_t layer, std::int64_t samples);
  void contribute_weight(std::size_t layer, std::int64_t samples, gradaccum::MicroBatch& micro);
  const void* as_gradients(const float* values, std::int64_t count,
                           std::vector<std::byte>& buffer) const;

  const Precision precision_;

  std::vector<Layer> layers_;
  std::vector<std::vector<float>> activations_;  // the input of each layer, then the logits
  std::vector<std::vector<float>> gradients_;    // of activations_; the first stays empty
  std::vector<float> bias_gradient_, weight_gradient_;
  // In the gradients' dtype: the two factors of a weight's product, and any gradient. Empty for
  // f32.
  std::vector<std::byte> rounded_dy_, rounded_x_, rounded_gradient_;
  bool multiplies_bf16_ = false;  // oneDNN computes weight gradients in bf16, from bf16 factors
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::map<std::int64_t, Kernels> kernels_;
  Score score_;
};

OnednnMlp::OnednnMlp(const Start& start, std::int64_t max_samples, const Precision& precision)
    : precision_(precision) {
  const auto rows = [max_samples](std::int64_t width) {
    return static_cast<std::size_t>(max_samples * width);
  };
  activations_.emplace_back(rows(start.front().in));
  gradients_.emplace_back();
  std::int64_t widest = start.front().in, largest = 0;  // input or output, weight
  for (const LayerStart& from : start) {
    activations_.emplace_back(rows(from.out));
    gradients_.emplace_back(rows(from.out));
    widest = std::max(widest, from.out);
    largest = std::max(largest, from.in * from.out);
    Layer layer{from.name, from.in, from.out, {}, {}};
    layer.weight.values = from.weight;
    layer.bias.values.resize(static_cast<std::size_t>(from.out));
    layers_.push_back(std::move(layer));
  }
  bias_gradient_.resize(static_cast<std::size_t>(widest));

  const bool stores = !precision.allows_matmul();
  if (stores) weight_gradient_.resize(static_cast<std::size_t>(largest));
  if (precision.gradients == GA_F32) return;
  multiplies_bf16_ = stores && precision.gradients == GA_BF16 && has_bf16_matmul(engine_);
  const std::size_t bytes = bytes_of(precision.gradients);
  rounded_dy_.resize(static_cast<std::size_t>(max_samples * widest) * bytes);
  rounded_x_.resize(rounded_dy_.size());
  rounded_gradient_.resize(static_cast<std::size_t>(stores ? largest : widest) * bytes);
}

void OnednnMlp::add_to(gradaccum::Context& context, gradaccum::Group weights,
                       gradaccum::Group biases) {
  ga_param_options options = gradaccum::default_param_options();
  options.gradient_dtype = precision_.gradients;
  options.accumulator_dtype = precision_.accumulators;
  const auto add = [&](gradaccum::Group group, const std::string& name, Tensor& tensor,
                       const std::vector<std::int64_t>& shape) {
    void* data = tensor.values.data();
    if (precision_.parameters != GA_F32) {
      tensor.stored.resize(tensor.values.size() * bytes_of(precision_.parameters));
      data = tensor.stored.data();
      from_floats(tensor.values.data(), static_cast<std::int64_t>(tensor.values.size()),
                  precision_.parameters, data);
    }
    tensor.id = context.add_param(group, name, data, precision_.parameters, shape, &options);
  };
  for (Layer& layer : layers_) {
    add(weights, layer.name + ".weight", layer.weight, {layer.out, layer.in});
    add(biases, layer.name + ".bias", layer.bias, {layer.out});
  }
  read_parameters();
}

const OnednnMlp::Kernels& OnednnMlp::kernels(std::int64_t samples) {
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
                                {DNNL_ARG_WEIGHTS, view(weight_t, layer.weight.values)},
                                {DNNL_ARG_BIAS, view(bias, layer.bias.values)},
                                {DNNL_ARG_DST, view(y, activations_[i + 1])}}});
    if (!precision_.allows_matmul()) kernels.weight.push_back(weight_product(i, samples));
    if (i == 0) {
      kernels.backward.emplace_back();
      continue;
    }
    kernels.backward.push_back({make_matmul(engine_, y, weight, {}, x, false),
                                {{DNNL_ARG_SRC, view(y, gradients_[i + 1])},
                                 {DNNL_ARG_WEIGHTS, view(weight, layer.weight.values)},
                                 {DNNL_ARG_DST, view(x, gradients_[i])}}});
  }
  return kernels_.emplace(samples, std::move(kernels)).first->second;
}

// dy^T x
OnednnMlp::Product OnednnMlp::weight_product(std::size_t layer, std::int64_t samples) {
  const std::int64_t in = layers_[layer].in, out = layers_[layer].out;
  const memory::data_type dtype = multiplies_bf16_ ? kBf16 : kF32;
  const memory::desc dy = transposed(out, samples, dtype), x = matrix(samples, in, dtype);
  const memory::desc weight = matrix(out, in, dtype);
  const auto view = [this](const memory::desc& desc, std::vector<float>& f32,
                           std::vector<std::byte>& bf16) {
    return memory(
        desc, engine_,
        multiplies_bf16_ ? static_cast<void*>(bf16.data()) : static_cast<void*>(f32.data()));
  };
  return {make_matmul(engine_, dy, x, {}, weight, false),
          {{DNNL_ARG_SRC, view(dy, gradients_[layer + 1], rounded_dy_)},
           {DNNL_ARG_WEIGHTS, view(x, activations_[layer], rounded_x_)},
           {DNNL_ARG_DST, view(weight, weight_gradient_, rounded_gradient_)}}};
}

void OnednnMlp::forward(std::int64_t samples, const std::uint8_t* labels,
                        const gradaccum::Context* context) {
  for (const Product& product : kernels(samples).forward) {
    product.primitive.execute(stream_, product.arguments);
  }
  stream_.wait();
  const double scale = (context ? context->loss_scale() : 1) / static_cast<double>(samples);
  const std::int64_t classes = layers_.back().out;
  Score score;
  for (std::int64_t i = 0; i < samples; ++i) {
    const float* logits = activations_.back().data() + i * classes;
    score.loss +=
        cross_entropy(logits, classes, labels[i], scale, gradients_.back().data() + i * classes);
    score.correct += std::max_element(logits, logits + classes) - logits == labels[i];
  }
  score_.loss += score.loss;
  score_.correct += score.correct;
}

void OnednnMlp::backward(std::int64_t samples, gradaccum::MicroBatch& micro) {
  const Kernels& kernels = this->kernels(samples);
  for (std::size_t i = layers_.size(); i-- > 0;) {
    const Layer& layer = layers_[i];
    contribute_weight(i, samples, micro);
    sum_rows(gradients_[i + 1].data(), samples, layer.out, bias_gradient_.data());
    micro.accumulate_part(layer.bias.id,
                          as_gradients(bias_gradient_.data(), layer.out, rounded_gradient_));
    if (i == 0) break;
    kernels.backward[i].primitive.execute(stream_, kernels.backward[i].arguments);
    stream_.wait();
    mask(activations_[i].data(), samples * layer.in, gradients_[i].data());
  }
}

void OnednnMlp::contribute_weight(std::size_t i, std::int64_t samples,
                                  gradaccum::MicroBatch& micro) {
  const Layer& layer = layers_[i];
  const float* dy = gradients_[i + 1].data();
  const float* x = activations_[i].data();
  if (precision_.allows_matmul()) {
    micro.accumulate_matmul(layer.weight.id, samples,
                            as_gradients(dy, samples * layer.out, rounded_dy_), layer.out,
                            GA_TRANSPOSE, as_gradients(x, samples * layer.in, rounded_x_), layer.in,
                            GA_NO_TRANSPOSE, precision_.gradients);
    return;
  }
  if (multiplies_bf16_) {
    as_gradients(dy, samples * layer.out, rounded_dy_);
    as_gradients(x, samples * layer.in, rounded_x_);
  }
  const Product& product = kernels(samples).weight[i];
  product.primitive.execute(stream_, product.arguments);
  stream_.wait();
  micro.accumulate_part(layer.weight.id,
                        multiplies_bf16_ ? rounded_gradient_.data()
                                         : as_gradients(weight_gradient_.data(),
                                                        layer.out * layer.in, rounded_gradient_));
}

// Returns the gradients in the dtype that the library expects: rounded to buffer, or values for
// f32.
const void* OnednnMlp::as_gradients(const float* values, std::int64_t count,
                                    std::vector<std::byte>& buffer) const {
  if (precision_.gradients == GA_F32) return values;
  from_floats(values, count, precision_.gradients, buffer.data());
  return buffer.data();
}

void OnednnMlp::read_parameters() {
  for (Layer& layer : layers_) {
    for (Tensor* tensor : {&layer.weight, &layer.bias}) {
      if (tensor->stored.empty()) continue;
      to_floats(tensor->stored.data(), static_cast<std::int64_t>(tensor->values.size()),
                precision_.parameters, tensor->values.data());
    }
  }
}

Mlp::Values OnednnMlp::parameters() {
  Values all;
  for (const Layer& layer : layers_) {
    all.push_back(layer.weight.values);
    all.push_back(layer.bias.values);
  }
  return all;
}

Mlp::Values OnednnMlp::averages(gradaccum::Context& context) {
  Values all;
  for (const Layer& layer : layers_) {
    for (const Tensor* tensor : {&layer.weight, &layer.bias}) {
      all.emplace_back(tensor->values.size());
      context.ema_copy_to(tensor->id, all.back().data());
    }
  }
  return all;
}

void OnednnMlp::exchange(Values& values) {
  std::size_t i = 0;
  for (Layer& layer : layers_) {
    for (Tensor* tensor : {&layer.weight, &layer.bias}) {
      // Swap elements, not vectors: oneDNN and the library hold the addresses.
      std::swap_ranges(tensor->values.begin(), tensor->values.end(), values[i++].begin());
    }
  }
}

std::int64_t OnednnMlp::parameter_bytes() const {
  std::size_t bytes = 0;
  for (const Layer& layer : layers_) {
    for (const Tensor* tensor : {&layer.weight, &layer.bias}) {
      bytes += tensor->values.size() * sizeof(float) + tensor->stored.size();
    }
  }
  return static_cast<std::int64_t>(bytes);
}

std::int64_t OnednnMlp::activation_bytes() const {
  std::size_t count = 0;
  for (const auto& tensor : activations_) count += tensor.size();
  for (const auto& tensor : gradients_) count += tensor.size();
  return static_cast<std::int64_t>(count * sizeof(float) + rounded_dy_.size() + rounded_x_.size());
}

}  // namespace

std::unique_ptr<Mlp> make_onednn_mlp(const Start& start, std::int64_t max_samples,
                                     const Precision& precision) {
  return std::make_unique<OnednnMlp>(start, max_samples, precision);
}
