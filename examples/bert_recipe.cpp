// BERT's training recipe, to copy: gradients of micro-batches accumulated to a mean, clipping by
// the global norm of the mean, AdamWeightDecay without decay of LayerNorm and biases, and a
// learning rate with linear warm-up and decay. setup() and train() are the recipe. The model is a
// small stand-in: it guesses the masked middle word of a sentence of three words, in a language
// where each word has one usual successor. main() trains with whole batches and with micro-batches,
// and compares the parameters.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gradaccum/gradaccum.hpp"

namespace {

constexpr int kWords = 32, kWidth = 32, kHidden = 64;  // the model
constexpr int kSteps = 500, kWarmup = 50, kWindow = 64, kAccumulate = 4;
constexpr double kPeakLr = 5e-3;

using Random = std::mt19937;

struct Sentence {
  int left, masked, right;
};

// One word in twenty is random, so no model can guess every word.
Sentence read_sentence(Random& random) {
  const auto after = [&](int word) {
    return random() % 20 == 0 ? static_cast<int>(random() % kWords) : (word * 5 + 3) % kWords;
  };
  const auto first = static_cast<int>(random() % kWords);
  const int second = after(first);
  return {first, second, after(second)};
}

// ---- The model ------------------------------------------------------------------------------------

struct Tensor {
  Tensor(std::string tensor_name, std::vector<std::int64_t> tensor_shape, float first = 0)
      : name(std::move(tensor_name)), shape(std::move(tensor_shape)) {
    std::size_t count = 1;
    for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
    value.assign(count, first);
    gradient.assign(count, 0);
  }
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<float> value, gradient;
};

// y = x kernel + bias
void dense(const Tensor& kernel, const Tensor& bias, const float* x, float* y) {
  const std::size_t in = kernel.value.size() / bias.value.size(), out = bias.value.size();
  for (std::size_t o = 0; o < out; ++o) y[o] = bias.value[o];
  for (std::size_t i = 0; i < in; ++i) {
    for (std::size_t o = 0; o < out; ++o) y[o] += x[i] * kernel.value[i * out + o];
  }
}

void dense_backward(Tensor& kernel, Tensor& bias, const float* x, const float* dy, float* dx) {
  const std::size_t in = kernel.value.size() / bias.value.size(), out = bias.value.size();
  for (std::size_t o = 0; o < out; ++o) bias.gradient[o] += dy[o];
  for (std::size_t i = 0; i < in; ++i) {
    dx[i] = 0;
    for (std::size_t o = 0; o < out; ++o) {
      kernel.gradient[i * out + o] += x[i] * dy[o];
      dx[i] += dy[o] * kernel.value[i * out + o];
    }
  }
}

struct Model {
  Tensor left{"embeddings/left", {kWords, kWidth}}, right{"embeddings/right", {kWords, kWidth}};
  Tensor gamma{"embeddings/LayerNorm/gamma", {kWidth}, 1},
      beta{"embeddings/LayerNorm/beta", {kWidth}};
  Tensor hidden{"hidden/kernel", {kWidth, kHidden}}, hidden_bias{"hidden/bias", {kHidden}};
  Tensor output{"output/kernel", {kHidden, kWords}}, output_bias{"output/bias", {kWords}};

  explicit Model(Random& random) {
    std::normal_distribution<float> initial(0, 0.1F);
    for (Tensor* tensor : {&left, &right, &hidden, &output}) {
      for (float& x : tensor->value) x = initial(random);
    }
  }

  std::array<Tensor*, 8> tensors() {
    return {&left, &right, &gamma, &beta, &hidden, &hidden_bias, &output, &output_bias};
  }

  // Adds the gradient of scale times the loss of one sentence to the gradients; returns the loss.
  float learn(const Sentence& sentence, float scale) {
    const auto l = static_cast<std::size_t>(sentence.left * kWidth);
    const auto r = static_cast<std::size_t>(sentence.right * kWidth);
    std::array<float, kWidth> x, y, dy;
    float mean = 0, variance = 0;
    for (std::size_t i = 0; i < kWidth; ++i) mean += x[i] = left.value[l + i] + right.value[r + i];
    mean /= kWidth;
    for (const float v : x) variance += (v - mean) * (v - mean) / kWidth;
    const float inverse = 1 / std::sqrt(variance + 1e-12F);
    for (std::size_t i = 0; i < kWidth; ++i) {
      x[i] = (x[i] - mean) * inverse;
      y[i] = gamma.value[i] * x[i] + beta.value[i];
    }
    std::array<float, kHidden> u, a, da;
    dense(hidden, hidden_bias, y.data(), u.data());
    const auto cdf = [](float v) {
      return 0.5F * (1 + std::erf(v * 0.70710678F));
    };  // GELU: v cdf(v)
    for (std::size_t i = 0; i < kHidden; ++i) a[i] = u[i] * cdf(u[i]);
    std::array<float, kWords> z;
    dense(output, output_bias, a.data(), z.data());

    float sum = 0;
    for (float& v : z) sum += v = std::exp(v);
    const float loss = std::log(sum / z[static_cast<std::size_t>(sentence.masked)]);

    for (float& v : z) v *= scale / sum;  // softmax cross-entropy: probability - target
    z[static_cast<std::size_t>(sentence.masked)] -= scale;
    dense_backward(output, output_bias, a.data(), z.data(), da.data());
    for (std::size_t i = 0; i < kHidden; ++i) {
      da[i] *= cdf(u[i]) + u[i] * 0.39894228F * std::exp(-u[i] * u[i] / 2);
    }
    dense_backward(hidden, hidden_bias, y.data(), da.data(), dy.data());
    float sum_d = 0, sum_dx = 0;
    for (std::size_t i = 0; i < kWidth; ++i) {
      gamma.gradient[i] += dy[i] * x[i];
      beta.gradient[i] += dy[i];
      dy[i] *= gamma.value[i];
      sum_d += dy[i];
      sum_dx += dy[i] * x[i];
    }
    for (std::size_t i = 0; i < kWidth; ++i) {
      const float d = inverse * (dy[i] - (sum_d + x[i] * sum_dx) / kWidth);
      left.gradient[l + i] += d;
      right.gradient[r + i] += d;
    }
    return loss;
  }
};

// ---- The recipe -----------------------------------------------------------------------------------

// BERT excludes parameters from weight decay by their names.
bool decays(const std::string& name) {
  for (const char* excluded : {"LayerNorm", "layer_norm", "bias"}) {
    if (name.find(excluded) != std::string::npos) return false;
  }
  return true;
}

void setup(gradaccum::Context& context, Model& model) {
  ga_optimizer adam = gradaccum::default_optimizer(GA_OPTIMIZER_ADAMW, GA_FLAVOR_BERT);
  adam.lr = kPeakLr;
  adam.weight_decay = 0.01;
  const gradaccum::Group decayed = context.add_group(adam);
  adam.weight_decay = 0;
  const gradaccum::Group spared = context.add_group(adam);

  // Schedules count steps, not micro-batches. BERT's first learning rate is 0.
  ga_schedule schedule = gradaccum::default_schedule(GA_SCHEDULE_BERT);
  schedule.warmup_steps = kWarmup;
  schedule.total_steps = kSteps;
  for (const gradaccum::Group group : {decayed, spared}) context.set_schedule(group, schedule);

  // One norm over both groups, of the mean over the window, as in tf.clip_by_global_norm. The
  // gradient of a single micro-batch is noisier, and would be clipped where the whole batch is not.
  ga_clip clip = gradaccum::default_clip();
  clip.scope = GA_CLIP_GLOBAL;
  clip.flavor = GA_FLAVOR_KERAS;
  clip.max_norm = 1.0;
  context.set_clip(clip);

  for (Tensor* tensor : model.tensors()) {
    context.add_param(decays(tensor->name) ? decayed : spared, tensor->name, tensor->value.data(),
                      tensor->shape);
  }
}

// Trains with windows of kWindow sentences in micro-batches of `micro`. Returns the model.
Model train(int micro) {
  Random random(1);
  Model model(random);
  gradaccum::Context context;
  setup(context, model);

  std::vector<const float*> gradients;
  for (const Tensor* tensor : model.tensors()) gradients.push_back(tensor->gradient.data());

  std::printf("windows of %d x %d sentences\n", kWindow / micro, micro);
  double loss = 0;  // sum since the last line of output
  int steps = 0;
  for (int step = 1; step <= kSteps; ++step) {
    for (int done = 0; done < kWindow; done += micro) {
      // Only the gradient of this micro-batch's mean loss: the library does the accumulation.
      for (Tensor* tensor : model.tensors()) {
        std::fill(tensor->gradient.begin(), tensor->gradient.end(), 0.0F);
      }
      for (int i = 0; i < micro; ++i) {
        loss += model.learn(read_sentence(random), 1.0F / static_cast<float>(micro));
      }
      context.accumulate(gradients, micro);
    }
    const ga_step_result result = context.step();
    ++steps;
    if (step <= 2 || step % 100 == 0) {
      std::printf("  step %3d: loss %.3f, lr %.6f, gradient norm %.2f, clipped to %.2f\n", step,
                  loss / (steps * kWindow), result.lr, result.norm,
                  result.norm * result.clip_factor);
      loss = steps = 0;
    }
  }
  return model;
}

float largest_difference(Model& a, Model& b) {
  float largest = 0;
  for (std::size_t t = 0; t < a.tensors().size(); ++t) {
    for (std::size_t i = 0; i < a.tensors()[t]->value.size(); ++i) {
      const float d = std::abs(a.tensors()[t]->value[i] - b.tensors()[t]->value[i]);
      if (!(d <= largest)) largest = d;  // keeps a NaN too
    }
  }
  return largest;
}

}  // namespace

int main() try {
  Model whole = train(kWindow), accumulated = train(kWindow / kAccumulate);
  // The probability of a word's usual successor, and of each other word.
  const double usual = 0.95 + 0.05 / kWords, other = 0.05 / kWords;
  const float difference = largest_difference(whole, accumulated);
  std::printf(
      "Guessing at random has the loss %.3f; a model that saw the left word alone could reach "
      "%.3f.\n"
      "The parameters of both trainings are %.1g apart at most: the rounding of %d steps.\n",
      std::log(static_cast<double>(kWords)),
      -usual * std::log(usual) - (kWords - 1) * other * std::log(other), difference, kSteps);
  return difference < 1e-3F ? EXIT_SUCCESS : EXIT_FAILURE;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bert_recipe: %s\n", error.what());
  return EXIT_FAILURE;
}
