// SPDX-License-Identifier: Apache-2.0
#include "cnn.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <random>
#include <unordered_map>

#include "../common/cross_entropy.hpp"

namespace {

using dnnl::memory;

// ---- oneDNN -------------------------------------------------------------------------------------

// oneDNN 3 removed the descriptors of operations.
template <typename Primitive, typename... Arguments>
auto describe(const dnnl::engine& engine, const Arguments&... arguments) {
#if DNNL_VERSION_MAJOR >= 3
  return typename Primitive::primitive_desc(engine, arguments...);
#else
  return typename Primitive::primitive_desc(typename Primitive::desc(arguments...), engine);
#endif
}

template <typename Primitive, typename Forward, typename... Arguments>
Primitive make_backward(const dnnl::engine& engine, const Forward& forward,
                        const Arguments&... arguments) {
#if DNNL_VERSION_MAJOR >= 3
  return Primitive(typename Primitive::primitive_desc(engine, arguments..., forward));
#else
  return Primitive(
      typename Primitive::primitive_desc(typename Primitive::desc(arguments...), engine, forward));
#endif
}

// What a layer computes from its input: a convolution or a dense product. All tensors are plain:
// NCHW, OIHW.
struct Map {
  std::int64_t in, in_size;  // channels; height, which is also the width
  std::int64_t out, out_size;
  std::int64_t kernel, stride;  // of the convolution; kernel 0: a dense layer

  std::int64_t in_count() const { return in * in_size * in_size; }
  std::int64_t positions() const { return out_size * out_size; }
  std::int64_t out_count() const { return out * positions(); }
  std::int64_t fan_in() const { return kernel ? in * kernel * kernel : in_count(); }
};

// The oneDNN primitives of a layer, for a given number of samples.
struct Kernels {
  memory::desc src, weight, bias, dst;
  dnnl::primitive forward, data, weights;

  Kernels(const dnnl::engine& engine, const Map& map, bool has_bias, std::int64_t samples) {
    const auto plain = [](const memory::dims& dims, memory::format_tag tag) {
      return memory::desc(dims, memory::data_type::f32, tag);
    };
    const auto kTraining = dnnl::prop_kind::forward_training;
    using Tag = memory::format_tag;
    if (has_bias) bias = plain({map.out}, Tag::a);
    if (map.kernel == 0) {
      src = plain({samples, map.in_count()}, Tag::ab);
      weight = plain({map.out, map.in_count()}, Tag::ab);
      dst = plain({samples, map.out}, Tag::ab);
      const auto described =
          describe<dnnl::inner_product_forward>(engine, kTraining, src, weight, bias, dst);
      forward = dnnl::inner_product_forward(described);
      data = make_backward<dnnl::inner_product_backward_data>(engine, described, src, weight, dst);
      weights = make_backward<dnnl::inner_product_backward_weights>(engine, described, src, weight,
                                                                    bias, dst);
      return;
    }
    src = plain({samples, map.in, map.in_size, map.in_size}, Tag::abcd);
    weight = plain({map.out, map.in, map.kernel, map.kernel}, Tag::abcd);
    dst = plain({samples, map.out, map.out_size, map.out_size}, Tag::abcd);
    const auto kDirect = dnnl::algorithm::convolution_direct;
    const memory::dims stride = {map.stride, map.stride};
    const memory::dims before = {map.kernel / 2, map.kernel / 2};
    const std::int64_t last = (map.out_size - 1) * map.stride + map.kernel - 1;  // row that is read
    const std::int64_t behind = std::max<std::int64_t>(0, last - before[0] - map.in_size + 1);
    const memory::dims after = {behind, behind};
    const auto described = describe<dnnl::convolution_forward>(
        engine, kTraining, kDirect, src, weight, bias, dst, stride, before, after);
    forward = dnnl::convolution_forward(described);
    data = make_backward<dnnl::convolution_backward_data>(engine, described, kDirect, src, weight,
                                                          dst, stride, before, after);
    weights = make_backward<dnnl::convolution_backward_weights>(
        engine, described, kDirect, src, weight, bias, dst, stride, before, after);
  }
};

struct Parameter {
  std::vector<float> values, gradient;
  gradaccum::Param id = gradaccum::no_param;

  Parameter(std::int64_t count, float value)
      : values(static_cast<std::size_t>(count), value), gradient(values.size()) {}
};

}  // namespace

// ---- One layer ----------------------------------------------------------------------------------

class Cnn::Layer {
 public:
  Layer(std::string name, const Map& map, bool normalised, std::int32_t mode, std::int64_t room,
        std::mt19937_64& random)
      : name_(std::move(name)),
        map_(map),
        normalised_(normalised),
        windowed_(normalised && mode == GA_BN_WINDOW),
        mode_(mode),
        weight_(map.out * map.fan_in(), 0),
        bias_(normalised ? 0 : map.out, 0),  // normalisation would subtract it again
        gamma_(normalised ? map.out : 0, 1),
        beta_(normalised ? map.out : 0, 0),
        x_(static_cast<std::size_t>(room * map.out_count())),
        y_(normalised ? x_.size() : 0),
        gradient_(x_.size()) {
    // He et al. 2015: preserves the variance from layer to layer under ReLU.
    std::normal_distribution<float> draw(0, std::sqrt(2.0F / static_cast<float>(map.fan_in())));
    for (float& w : weight_.values) w = draw(random);
  }

  void add_to(gradaccum::Context& context, gradaccum::Group group) {
    const auto add = [&](const char* what, Parameter& parameter) {
      const auto count = static_cast<std::int64_t>(parameter.values.size());
      if (count == 0) return;
      parameter.id = context.add_param(group, name_ + what, parameter.values.data(),
                                       {map_.out, count / map_.out});
    };
    add(".weight", weight_);
    add(".bias", bias_);
    add(".gamma", gamma_);
    add(".beta", beta_);
    if (!normalised_) return;
    ga_bn_options options = gradaccum::default_bn_options();
    options.mode = mode_;
    bn_ = context.add_batch_norm(name_, map_.out, gamma_.id, beta_.id, options);
  }

  // in holds all samples that the tensors have room for; a Micro says where its samples are.
  void forward(const float* in, const std::vector<Micro>& sweep, gradaccum::Context& context) {
    for (const Micro& micro : sweep) compute(in, micro);
    if (windowed_) {
      for (const Micro& micro : sweep) {
        context.bn_accumulate(bn_, x(micro), micro.samples, map_.positions());
      }
      context.bn_finalize(bn_);
    }
    if (!normalised_) return;
    for (const Micro& micro : sweep) {
      context.bn_forward(bn_, x(micro), micro.samples, map_.positions(), y(micro));
      relu(micro);
    }
  }

  void infer(const float* in, std::int64_t samples, gradaccum::Context& context) {
    const Micro all = {0, 0, samples};
    compute(in, all);
    if (!normalised_) return;
    context.bn_infer(bn_, x(all), samples, map_.positions(), y(all));
    relu(all);
  }

  // Contributes the gradients of the parameters and, unless in_gradient is null, computes the
  // gradient of in, both from the gradient of output().
  void backward(const float* in, float* in_gradient, const std::vector<Micro>& sweep,
                gradaccum::Context& context) {
    // The weight is the number of samples, because gradients are means over the micro-batch.
    const auto begin = [&context](const Micro& micro) {
      return context.micro_begin(micro.index, static_cast<double>(micro.samples));
    };
    if (normalised_) {
      for (const Micro& micro : sweep) mask(micro);
    }
    if (windowed_) {
      for (const Micro& micro : sweep) {
        gradaccum::MicroBatch open = begin(micro);
        open.bn_backward_accumulate(bn_, x(micro), gradient(micro), micro.samples,
                                    map_.positions());
      }
    }
    for (const Micro& micro : sweep) {
      gradaccum::MicroBatch open = begin(micro);
      if (normalised_) {
        open.bn_backward(bn_, x(micro), gradient(micro), micro.samples, map_.positions(),
                         gradient(micro));
      }
      contribute(in, micro, open);
      open.end();
      if (in_gradient) compute_in_gradient(in_gradient, micro);
    }
  }

  const float* output() const { return normalised_ ? y_.data() : x_.data(); }
  float* gradient() { return gradient_.data(); }
  const Map& map() const { return map_; }
  bool is_normalised() const { return normalised_; }
  Normalised normalised() const { return {name_, map_.out, map_.positions(), bn_, x_.data()}; }

  void append_parameters(std::vector<float>& all) const {
    for (const Parameter* p : {&weight_, &bias_, &gamma_, &beta_}) {
      all.insert(all.end(), p->values.begin(), p->values.end());
    }
  }
  std::size_t activations() const { return x_.size() + y_.size() + gradient_.size(); }

 private:
  // The start of a micro-batch's samples in a tensor.
  float* at(std::vector<float>& tensor, const Micro& micro) {
    return tensor.data() + micro.first * map_.out_count();
  }
  float* x(const Micro& micro) { return at(x_, micro); }
  float* y(const Micro& micro) { return at(y_, micro); }
  float* gradient(const Micro& micro) { return at(gradient_, micro); }

  void compute(const float* in, const Micro& micro) {
    const Kernels& k = kernels(micro.samples);
    run(k.forward, {{DNNL_ARG_SRC, view(k.src, in + micro.first * map_.in_count())},
                    {DNNL_ARG_WEIGHTS, view(k.weight, weight_.values.data())},
                    {DNNL_ARG_BIAS, view(k.bias, bias_.values.data())},
                    {DNNL_ARG_DST, view(k.dst, x(micro))}});
  }

  void contribute(const float* in, const Micro& micro, gradaccum::MicroBatch& open) {
    const Kernels& k = kernels(micro.samples);
    run(k.weights, {{DNNL_ARG_SRC, view(k.src, in + micro.first * map_.in_count())},
                    {DNNL_ARG_DIFF_DST, view(k.dst, gradient(micro))},
                    {DNNL_ARG_DIFF_WEIGHTS, view(k.weight, weight_.gradient.data())},
                    {DNNL_ARG_DIFF_BIAS, view(k.bias, bias_.gradient.data())}});
    open.accumulate_part(weight_.id, weight_.gradient.data());
    if (bias_.id != gradaccum::no_param) open.accumulate_part(bias_.id, bias_.gradient.data());
  }

  void compute_in_gradient(float* in_gradient, const Micro& micro) {
    const Kernels& k = kernels(micro.samples);
    run(k.data, {{DNNL_ARG_DIFF_DST, view(k.dst, gradient(micro))},
                 {DNNL_ARG_WEIGHTS, view(k.weight, weight_.values.data())},
                 {DNNL_ARG_DIFF_SRC, view(k.src, in_gradient + micro.first * map_.in_count())}});
  }

  void relu(const Micro& micro) {
    float* const values = y(micro);
    for (std::int64_t i = 0; i < micro.samples * map_.out_count(); ++i) {
      values[i] = values[i] > 0 ? values[i] : 0;
    }
  }

  // Multiplies by the derivative of ReLU, which is known from ReLU's output.
  void mask(const Micro& micro) {
    const float* const values = y(micro);
    float* const gradients = gradient(micro);
    for (std::int64_t i = 0; i < micro.samples * map_.out_count(); ++i) {
      gradients[i] = values[i] > 0 ? gradients[i] : 0;
    }
  }

  // Creates the primitives on first use and keeps them.
  const Kernels& kernels(std::int64_t samples) {
    const auto known = kernels_.find(samples);
    if (known != kernels_.end()) return known->second;
    return kernels_.try_emplace(samples, engine_, map_, !normalised_, samples).first->second;
  }
  memory view(const memory::desc& desc, const float* data) const {
    return {desc, engine_, const_cast<float*>(data)};  // inputs are only read
  }
  void run(const dnnl::primitive& primitive, const std::unordered_map<int, memory>& arguments) {
    primitive.execute(stream_, arguments);
    stream_.wait();
  }

  const std::string name_;
  const Map map_;
  const bool normalised_, windowed_;
  const std::int32_t mode_;
  Parameter weight_, bias_, gamma_, beta_;
  gradaccum::BatchNorm bn_{-1};
  std::vector<float> x_;         // output of the map
  std::vector<float> y_;         // x_ after normalisation and ReLU
  std::vector<float> gradient_;  // of y; backward() overwrites it with the gradient of x
  const dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::map<std::int64_t, Kernels> kernels_;
};

// ---- The network --------------------------------------------------------------------------------

Cnn::Cnn(std::uint64_t seed, std::int32_t mode, std::int64_t room)
    : input_(static_cast<std::size_t>(room * kPixels)) {
  std::mt19937_64 random(seed);
  const auto add = [&](const char* name, const Map& map, bool normalised) {
    layers_.push_back(std::make_unique<Layer>(name, map, normalised, mode, room, random));
  };
  add("conv1", {1, 28, 16, 14, 3, 2}, true);
  add("conv2", {16, 14, 32, 7, 3, 2}, true);
  add("fc1", {32, 7, 64, 1, 0, 1}, true);
  add("fc2", {64, 1, 10, 1, 0, 1}, false);
}

Cnn::~Cnn() = default;

void Cnn::add_to(gradaccum::Context& context, gradaccum::Group group) {
  for (const auto& layer : layers_) layer->add_to(context, group);
}

void Cnn::forward(const std::vector<Micro>& sweep, gradaccum::Context& context) {
  const float* in = input_.data();
  for (const auto& layer : layers_) {
    layer->forward(in, sweep, context);
    in = layer->output();
  }
}

void Cnn::infer(std::int64_t samples, gradaccum::Context& context) {
  const float* in = input_.data();
  for (const auto& layer : layers_) {
    layer->infer(in, samples, context);
    in = layer->output();
  }
}

Cnn::Score Cnn::score(const Micro& micro, const std::uint8_t* labels) {
  Layer& last = *layers_.back();
  const std::int64_t classes = last.map().out;
  Score score;
  for (std::int64_t i = 0; i < micro.samples; ++i) {
    const float* const logits = last.output() + (micro.first + i) * classes;
    float* const gradient = last.gradient() + (micro.first + i) * classes;
    score.loss +=
        cross_entropy(logits, classes, labels[i], 1 / static_cast<double>(micro.samples), gradient);
    score.correct += std::max_element(logits, logits + classes) - logits == labels[i];
  }
  return score;
}

void Cnn::backward(const std::vector<Micro>& sweep, gradaccum::Context& context) {
  for (std::size_t i = layers_.size(); i-- > 0;) {
    const float* const in = i > 0 ? layers_[i - 1]->output() : input_.data();
    float* const in_gradient = i > 0 ? layers_[i - 1]->gradient() : nullptr;
    layers_[i]->backward(in, in_gradient, sweep, context);
  }
}

std::vector<float> Cnn::parameters() const {
  std::vector<float> all;
  for (const auto& layer : layers_) layer->append_parameters(all);
  return all;
}

std::vector<Cnn::Normalised> Cnn::normalised() const {
  std::vector<Normalised> all;
  for (const auto& layer : layers_) {
    if (layer->is_normalised()) all.push_back(layer->normalised());
  }
  return all;
}

std::int64_t Cnn::activation_bytes() const {
  std::size_t count = input_.size();
  for (const auto& layer : layers_) count += layer->activations();
  return static_cast<std::int64_t>(count * sizeof(float));
}
