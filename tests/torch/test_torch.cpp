// SPDX-License-Identifier: Apache-2.0
//
// torch.hpp: windows of gradaccum::torch::Optimizer against torch's own optimizers, which have the
// whole batch, in float64.
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gradaccum/torch.hpp"

namespace {

namespace optim = torch::optim;
using gradaccum::Error;
using gradaccum::torch::GroupOptions;
using gradaccum::torch::Optimizer;
using gradaccum::torch::Options;
using torch::Tensor;
using Model = torch::nn::Sequential;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Of sums in another order, in float64.
constexpr double kRounding = 1e-13;

Model make_model(torch::Dtype dtype = torch::kDouble) {
  torch::manual_seed(3);
  Model model(torch::nn::Linear(6, 9), torch::nn::Tanh(), torch::nn::Linear(9, 4));
  model->to(torch::kDouble);
  model->to(dtype);
  return model;
}

// The batch of a window: 24 samples.
Tensor batch_of(int window) {
  torch::manual_seed(100 + static_cast<std::uint64_t>(window));
  return torch::randn({24, 6}, torch::kDouble);
}

// A mean over the samples.
Tensor loss_of(Model& model, const Tensor& x) {
  const Tensor in = x.to(model->parameters()[0].scalar_type());
  return (model->forward(in) - in.slice(1, 0, 4).sin()).square().sum(1).mean();
}

double samples(const Tensor& x) { return static_cast<double>(x.size(0)); }

// Micro-batches of unequal sizes; the number differs from window to window.
std::vector<Tensor> cut(const Tensor& batch, int window) {
  return window % 2 == 0 ? batch.split_with_sizes({11, 1, 12}) : batch.split_with_sizes({5, 19});
}

double farthest(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const Tensor difference = a[i].to(torch::kDouble) - b[i].to(torch::kDouble);
    const double here = difference.abs().max().item<double>();
    most = std::isnan(here) ? here : std::max(most, here);
  }
  return most;
}

bool same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) return false;
  }
  return true;
}

std::vector<Tensor> copies_of(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> copies;
  for (const Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

// Runs a call that must throw an Error with this status and these words.
void refuses(ga_status status, const std::string& words, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "was taken: " << words;
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

// ---- Against torch's own optimizers -------------------------------------------------------------

// An optimizer of torch, with options in which each hyper-parameter matters.
struct Rule {
  const char* name;
  std::shared_ptr<optim::OptimizerOptions> options;
  std::function<std::unique_ptr<optim::Optimizer>(std::vector<Tensor>)> make;
};

template <typename TorchOptimizer, typename TorchOptions>
Rule rule(const char* name, const TorchOptions& options) {
  return {name, std::make_shared<TorchOptions>(options), [options](std::vector<Tensor> params) {
            return std::make_unique<TorchOptimizer>(std::move(params), options);
          }};
}

std::vector<Rule> rules() {
  return {
      rule<optim::SGD>("Sgd", optim::SGDOptions(0.1).weight_decay(0.02)),
      rule<optim::SGD>("SgdNesterov", optim::SGDOptions(0.05).momentum(0.9).nesterov(true)),
      rule<optim::SGD>("SgdDampening", optim::SGDOptions(0.05).momentum(0.8).dampening(0.3)),
      rule<optim::Adam>("Adam", optim::AdamOptions(1e-2).weight_decay(0.1).eps(1e-4)),
      rule<optim::Adam>("AdamAmsgrad",
                        optim::AdamOptions(1e-2).amsgrad(true).betas({0.5, 0.6}).eps(1e-4)),
      rule<optim::AdamW>("AdamW", optim::AdamWOptions(1e-2).weight_decay(0.3).eps(1e-4)),
      rule<optim::RMSprop>("RMSprop", optim::RMSpropOptions(1e-3)
                                          .alpha(0.9)
                                          .momentum(0.5)
                                          .centered(true)
                                          .eps(1e-3)
                                          .weight_decay(0.1)),
      rule<optim::Adagrad>(
          "Adagrad",
          optim::AdagradOptions(0.05).lr_decay(0.1).initial_accumulator_value(0.2).weight_decay(
              0.01)),
  };
}

enum class Way { kByHook, kByCall, kAtStep };

class Rules : public testing::TestWithParam<std::tuple<std::size_t, Way>> {};

TEST_P(Rules, EqualTheWholeBatch) {
  const Rule rule = rules()[std::get<0>(GetParam())];
  const Way way = std::get<1>(GetParam());
  Model model = make_model(), whole = make_model();
  Options options;
  if (way == Way::kAtStep) options.config.accum_steps = 3;
  Optimizer optimizer(model->parameters(), *rule.options, options);
  const auto reference = rule.make(whole->parameters());
  const std::vector<Tensor> before = copies_of(whole->parameters());
  for (int window = 0; window < 8; ++window) {
    const Tensor batch = batch_of(window);
    reference->zero_grad();
    loss_of(whole, batch).backward();
    reference->step();
    for (const Tensor& x : way == Way::kAtStep ? batch.split(8) : cut(batch, window)) {
      if (way == Way::kByHook) {
        optimizer.backward(loss_of(model, x), samples(x));
        continue;
      }
      optimizer.zero_grad();
      loss_of(model, x).backward();
      if (way == Way::kByCall) {
        optimizer.accumulate(samples(x));
      } else {
        optimizer.step();
      }
    }
    if (way != Way::kAtStep) optimizer.step();
    EXPECT_LE(farthest(model->parameters(), whole->parameters()), kRounding) << window;
  }
  EXPECT_EQ(optimizer.result()->steps, 8);
  EXPECT_EQ(optimizer.result()->weight, way == Way::kAtStep ? 3 : 24);
  EXPECT_GT(farthest(before, whole->parameters()), 1e-3);
}

std::string name_of_rule(const testing::TestParamInfo<Rules::ParamType>& info) {
  static const char* const ways[] = {"_ByHook", "_ByCall", "_AtStep"};
  return std::string(rules()[std::get<0>(info.param)].name) +
         ways[static_cast<int>(std::get<1>(info.param))];
}

INSTANTIATE_TEST_SUITE_P(Torch, Rules,
                         testing::Combine(testing::Range<std::size_t>(0, rules().size()),
                                          testing::Values(Way::kByHook, Way::kByCall,
                                                          Way::kAtStep)),
                         name_of_rule);

// The gradient of (w c).sum() is c, whatever the dtype.
class Dtypes : public testing::TestWithParam<torch::Dtype> {};

TEST_P(Dtypes, RoundFromTheMasterWeights) {
  const torch::Dtype dtype = GetParam();
  torch::manual_seed(1);
  const Tensor start = torch::randn({7, 5}, dtype);
  Tensor w = start.clone().requires_grad_();
  Tensor exact = start.to(torch::kDouble).requires_grad_();
  Optimizer optimizer(std::vector<Tensor>{w}, optim::AdamWOptions(1e-3));
  optim::AdamW reference(std::vector<Tensor>{exact}, optim::AdamWOptions(1e-3));
  for (int window = 0; window < 20; ++window) {
    Tensor mean = torch::zeros({7, 5}, torch::kDouble);
    for (const double weight : {3.0, 1.0, 4.0}) {
      const Tensor c = torch::randn({7, 5}, dtype);
      optimizer.backward((w * c).sum(), weight);
      mean += weight / 8 * c.to(torch::kDouble);
    }
    optimizer.step();
    exact.mutable_grad() = mean;
    reference.step();
  }
  // Half a unit in the last place of numbers below 4, and what f32 makes of 20 steps.
  const double ulp = dtype == torch::kBFloat16 ? 1.0 / 64 : dtype == torch::kHalf ? 1.0 / 512 : 0;
  EXPECT_LE(farthest({w}, {exact}), ulp / 2 + 2e-6);
  EXPECT_GE(farthest({w}, {start}), 5e-3);
}

std::string name_of_dtype(const testing::TestParamInfo<Dtypes::ParamType>& info) {
  return std::string(c10::toString(info.param));
}

INSTANTIATE_TEST_SUITE_P(Torch, Dtypes,
                         testing::Values(torch::kFloat, torch::kHalf, torch::kBFloat16),
                         name_of_dtype);

TEST(Torch, ClipsTheWindowAsTorchClipsTheBatch) {
  Model model = make_model(), whole = make_model();
  Options options;
  options.clip = gradaccum::default_clip();
  options.clip->scope = GA_CLIP_GLOBAL;
  options.clip->max_norm = 0.25;
  Optimizer optimizer(model->parameters(), optim::SGDOptions(0.5), options);
  optim::SGD reference(whole->parameters(), optim::SGDOptions(0.5));
  for (int window = 0; window < 5; ++window) {
    const Tensor batch = batch_of(window);
    reference.zero_grad();
    loss_of(whole, batch).backward();
    const double norm = torch::nn::utils::clip_grad_norm_(whole->parameters(), 0.25);
    reference.step();
    for (const Tensor& x : cut(batch, window)) optimizer.backward(loss_of(model, x), samples(x));
    optimizer.step();
    EXPECT_NEAR(optimizer.result()->norm, norm, 1e-11);
    EXPECT_LT(optimizer.result()->clip_factor, 1);
    EXPECT_LE(farthest(model->parameters(), whole->parameters()), kRounding);
  }
}

TEST(Torch, SchedulesAndWritesToGroupsHold) {
  Model model = make_model(), whole = make_model();
  const auto groups = [](Model& of) {
    std::vector<optim::OptimizerParamGroup> made;
    made.emplace_back(std::vector<Tensor>{of->parameters()[0], of->parameters()[1]});
    made.emplace_back(std::vector<Tensor>{of->parameters()[2], of->parameters()[3]},
                      std::make_unique<optim::AdamWOptions>(0.02));
    return made;
  };
  Optimizer optimizer(groups(model), optim::AdamWOptions(0.01));
  optim::AdamW reference(groups(whole), optim::AdamWOptions(0.01));
  optim::StepLR schedule(optimizer, 2, 0.3), reference_schedule(reference, 2, 0.3);
  for (int window = 0; window < 6; ++window) {
    const Tensor batch = batch_of(window);
    reference.zero_grad();
    loss_of(whole, batch).backward();
    reference.step();
    reference_schedule.step();
    for (const Tensor& x : cut(batch, window)) optimizer.backward(loss_of(model, x), samples(x));
    optimizer.step();
    schedule.step();
    if (window == 3) {
      for (optim::Optimizer* each : {static_cast<optim::Optimizer*>(&optimizer),
                                     static_cast<optim::Optimizer*>(&reference)}) {
        static_cast<optim::AdamWOptions&>(each->param_groups()[1].options()).weight_decay(0.9);
      }
    }
    EXPECT_LE(farthest(model->parameters(), whole->parameters()), kRounding) << window;
  }
  EXPECT_DOUBLE_EQ(optimizer.param_groups()[1].options().get_lr(), 0.02 * 0.09);
}

TEST(Torch, ClosuresAreCalledWithGradients) {
  Model model = make_model(), whole = make_model();
  Options options;
  options.config.accum_steps = 2;
  Optimizer optimizer(model->parameters(), optim::SGDOptions(0.1), options);
  optim::SGD reference(whole->parameters(), optim::SGDOptions(0.1));
  const Tensor batch = batch_of(0);
  const torch::NoGradGuard without;
  const Tensor expected = reference.step([&] {
    reference.zero_grad();
    const Tensor loss = loss_of(whole, batch);
    loss.backward();
    return loss;
  });
  double mean = 0;
  for (const Tensor& x : batch.split(12)) {
    const Tensor loss = optimizer.step([&] {
      optimizer.zero_grad();
      const Tensor made = loss_of(model, x);
      made.backward();
      return made;
    });
    mean += loss.item<double>() / 2;
  }
  EXPECT_NEAR(mean, expected.item<double>(), kRounding);
  EXPECT_LE(farthest(model->parameters(), whole->parameters()), kRounding);
}

TEST(Torch, TheTailOfAnEpochIsFlushed) {
  Model model = make_model(), whole = make_model();
  Options options;
  options.config.accum_steps = 4;
  Optimizer optimizer(model->parameters(), optim::SGDOptions(0.1), options);
  optim::SGD reference(whole->parameters(), optim::SGDOptions(0.1));
  const Tensor batch = batch_of(0);
  loss_of(whole, batch).backward();
  reference.step();
  for (const Tensor& x : batch.split(8)) {  // 3 micro-batches
    loss_of(model, x).backward();
    optimizer.step();
  }
  EXPECT_FALSE(optimizer.result());
  EXPECT_TRUE(optimizer.flush());
  EXPECT_FALSE(optimizer.flush());
  EXPECT_LE(farthest(model->parameters(), whole->parameters()), kRounding);
}

TEST(Torch, OptimizersThatTorchLacks) {
  Tensor a = torch::tensor({1.0, -2.0}, torch::kDouble).requires_grad_();
  Tensor b = torch::tensor({3.0, 4.0}, torch::kDouble).requires_grad_();
  Optimizer optimizer(std::vector<Tensor>{a}, GroupOptions(GA_OPTIMIZER_LION, 0.125));
  optimizer.add_param_group(
      optim::OptimizerParamGroup({b}, std::make_unique<optim::SGDOptions>(0.5)));
  const Tensor c = torch::tensor({0.25, -8.0}, torch::kDouble);
  optimizer.backward((a * c).sum() + (b * c).sum(), 2);
  optimizer.backward((b * c).sum() * 3, 2);
  optimizer.step();
  EXPECT_TRUE(torch::equal(a, torch::tensor({0.875, -1.875}, torch::kDouble)));  // by the sign
  EXPECT_TRUE(torch::equal(b, torch::tensor({2.75, 12.0}, torch::kDouble)));
  EXPECT_EQ(optimizer.context().state_get<double>(optimizer.param(a), "exp_avg").size(), 2U);
}

// ---- Loss scale ---------------------------------------------------------------------------------

TEST(LossScale, AWindowThatOverflowsIsSkipped) {
  Model model = make_model(), whole = make_model();
  Options options;
  options.loss_scaler = gradaccum::default_loss_scaler();
  options.loss_scaler->initial_scale = 1024;
  options.loss_scaler->growth_interval = 3;
  Optimizer optimizer(model->parameters(), optim::AdamWOptions(1e-2), options);
  optim::AdamW reference(whole->parameters(), optim::AdamWOptions(1e-2));
  std::vector<double> scales;
  for (int window = 0; window < 6; ++window) {
    const Tensor batch = batch_of(window);
    const bool overflows = window == 2;
    if (!overflows) {
      reference.zero_grad();
      loss_of(whole, batch).backward();
      reference.step();
    }
    const std::vector<Tensor> before = copies_of(model->parameters());
    for (const Tensor& x : cut(batch, window)) {
      const Tensor loss = loss_of(model, x);
      optimizer.backward(overflows && x.size(0) == 1 ? loss * kInfinity : loss, samples(x));
    }
    optimizer.step();
    EXPECT_EQ(optimizer.result()->outcome, overflows ? GA_STEP_SKIPPED_NONFINITE : GA_STEP_APPLIED);
    EXPECT_EQ(same_bits(model->parameters(), before), overflows);
    EXPECT_LE(farthest(model->parameters(), whole->parameters()), kRounding) << window;
    scales.push_back(optimizer.context().loss_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{1024, 1024, 512, 512, 512, 1024}));
}

// In torch's way: scale the loss, and take .grad.
TEST(LossScale, ScaledLossesOfTheLoopAreUndone) {
  Tensor w = torch::ones({4}).requires_grad_();
  Options options;
  options.loss_scaler = gradaccum::default_loss_scaler();
  Optimizer optimizer(std::vector<Tensor>{w}, optim::SGDOptions(0.5), options);
  optimizer.scale_loss(w.sum()).backward();
  EXPECT_TRUE(torch::equal(w.grad(), torch::full({4}, 65536.0)));
  optimizer.step();
  EXPECT_TRUE(torch::equal(w, torch::full({4}, 0.5)));
}

TEST(LossScale, ADroppedMicroBatchLeavesTheOthers) {
  Model model = make_model(), whole = make_model();
  Options options;
  options.config.nonfinite = GA_NONFINITE_DROP_MICRO;
  Optimizer optimizer(model->parameters(), optim::SGDOptions(0.1), options);
  optim::SGD reference(whole->parameters(), optim::SGDOptions(0.1));
  const std::vector<Tensor> parts = batch_of(0).split_with_sizes({10, 4, 10});
  loss_of(whole, torch::cat({parts[0], parts[2]})).backward();
  reference.step();
  for (const Tensor& x : parts) {
    const Tensor loss = loss_of(model, x);
    optimizer.backward(x.size(0) == 4 ? loss * kInfinity : loss, samples(x));
  }
  optimizer.step();
  EXPECT_EQ(optimizer.result()->window_dropped, 1);
  EXPECT_LE(farthest(model->parameters(), whole->parameters()), kRounding);
}

// ---- Parameters ---------------------------------------------------------------------------------

TEST(Parameters, TiedOnesAreOne) {
  torch::manual_seed(5);
  const Tensor start = torch::randn({6, 6}, torch::kDouble);
  Tensor w = start.clone().requires_grad_(), reference_w = start.clone().requires_grad_();
  Optimizer optimizer(std::vector<Tensor>{w, w}, optim::SGDOptions(0.1).momentum(0.9));
  optim::SGD reference(std::vector<Tensor>{reference_w}, optim::SGDOptions(0.1).momentum(0.9));
  EXPECT_EQ(optimizer.context().param_count(), 1);
  const auto loss = [](const Tensor& of, const Tensor& x) {
    return torch::tanh(torch::tanh(x.matmul(of)).matmul(of.t())).square().sum(1).mean();
  };
  for (int window = 0; window < 4; ++window) {
    const Tensor batch = batch_of(window);
    reference.zero_grad();
    loss(reference_w, batch).backward();
    reference.step();
    for (const Tensor& x : cut(batch, window)) optimizer.backward(loss(w, x), samples(x));
    optimizer.step();
    EXPECT_LE(farthest({w}, {reference_w}), kRounding);
  }
}

TEST(Parameters, OverlapIsRefusedByName) {
  const Tensor w = torch::ones({4}).requires_grad_();
  const Tensor view = w.detach().slice(0, 1, 3).requires_grad_();
  torch::OrderedDict<std::string, Tensor> named;
  named.insert("first", w);
  named.insert("second", view);
  refuses(GA_ERROR_INVALID_ARGUMENT, "\"second\"",
          [&] { Optimizer(named, optim::SGDOptions(0.1)); });
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{w});
  groups.emplace_back(std::vector<Tensor>{w});
  refuses(GA_ERROR_INVALID_ARGUMENT,
          "parameter \"param1\" was in an earlier group too, as \"param0\"",
          [&] { Optimizer(groups, optim::SGDOptions(0.1)); });
}

// An embedding that gives sparse gradients, beside a dense one in a batch of all.
class Sparse : public testing::TestWithParam<bool> {};

TEST_P(Sparse, RowsEqualTheDenseBatch) {
  const bool by_hook = GetParam();
  for (const ga_rows rows : {GA_ROWS_LAZY, GA_ROWS_DENSE}) {
    torch::manual_seed(2);
    const Tensor start = torch::randn({12, 3}, torch::kDouble);
    Tensor table = start.clone().requires_grad_(), reference_table = start.clone().requires_grad_();
    // Rows without a gradient move by momentum and weight decay, unless they are lazy.
    const auto sgd = rows == GA_ROWS_LAZY ? optim::SGDOptions(0.2)
                                          : optim::SGDOptions(0.2).momentum(0.9).weight_decay(0.1);
    GroupOptions options{sgd};
    options.params = gradaccum::default_param_options();
    options.params->rows = rows;
    Optimizer optimizer(std::vector<Tensor>{table}, options);
    optim::SGD reference(std::vector<Tensor>{reference_table}, sgd);
    for (int window = 0; window < 4; ++window) {
      const Tensor words = torch::randint(0, 9, {24}, torch::kLong);
      reference.zero_grad();
      torch::embedding(reference_table, words).sin().sum(1).mean().backward();
      reference.step();
      for (const Tensor& part : cut(words, window)) {
        const Tensor loss =
            torch::embedding(table, part, -1, false, /*sparse=*/true).sin().sum(1).mean();
        if (by_hook) {
          optimizer.backward(loss, samples(part));
        } else {
          loss.backward();
          EXPECT_TRUE(table.grad().is_sparse());
          optimizer.accumulate(samples(part));
        }
      }
      optimizer.step();
      EXPECT_LE(farthest({table}, {reference_table}), kRounding);
    }
  }
}

std::string name_of_way(const testing::TestParamInfo<Sparse::ParamType>& info) {
  return info.param ? "ByHook" : "ByCall";
}

INSTANTIATE_TEST_SUITE_P(Torch, Sparse, testing::Bool(), name_of_way);

TEST(Parameters, SparseGradientsNeedRows) {
  Tensor table = torch::ones({5, 2}).requires_grad_();
  torch::OrderedDict<std::string, Tensor> named;
  named.insert("table", table);
  Optimizer optimizer(named, optim::SGDOptions(0.1));
  const auto loss = [&table] {
    return torch::embedding(table, torch::tensor({1}), -1, false, true).sum();
  };
  const char* const words = "parameter \"table\" had a sparse gradient: give its group";
  refuses(GA_ERROR_INVALID_ARGUMENT, words, [&] { optimizer.backward(loss()); });
  EXPECT_FALSE(table.grad().defined());
  loss().backward();
  refuses(GA_ERROR_INVALID_ARGUMENT, words, [&] { optimizer.accumulate(); });
  EXPECT_TRUE(table.grad().defined());
  EXPECT_EQ(optimizer.window().micro_batches, 0);
  EXPECT_TRUE(torch::equal(table, torch::ones({5, 2})));
}

TEST(Parameters, AnyOrderOfDimensions) {
  torch::manual_seed(4);
  const Tensor start = torch::randn({4, 3, 2, 2}, torch::kDouble);
  Tensor w = start.clone(at::MemoryFormat::ChannelsLast).requires_grad_();
  Tensor reference_w = start.clone().requires_grad_();
  ASSERT_FALSE(w.is_contiguous());
  Optimizer optimizer(std::vector<Tensor>{w}, optim::AdamWOptions(0.1));
  optim::AdamW reference(std::vector<Tensor>{reference_w}, optim::AdamWOptions(0.1));
  const Tensor c = torch::randn({4, 3, 2, 2}, torch::kDouble);
  for (int window = 0; window < 3; ++window) {
    reference.zero_grad();
    (reference_w * c).sin().sum().backward();
    reference.step();
    optimizer.backward((w * c).sin().sum());
    optimizer.backward((w * c).sin().sum(), 3);
    optimizer.step();
    EXPECT_LE(farthest({w}, {reference_w}), kRounding);
  }
  // A gradient in another order than its parameter.
  for (Tensor* each : {&w, &reference_w}) each->mutable_grad() = c;
  optimizer.accumulate();
  optimizer.step();
  reference.step();
  EXPECT_LE(farthest({w}, {reference_w}), kRounding);

  GroupOptions rows{optim::SGDOptions(0.1)};
  rows.params = gradaccum::default_param_options();
  rows.params->rows = GA_ROWS_DENSE;
  refuses(GA_ERROR_INVALID_ARGUMENT, "goes by rows and columns",
          [&] { Optimizer(std::vector<Tensor>{w}, rows); });
  const auto adafactor = GroupOptions(GA_OPTIMIZER_ADAFACTOR, 0.1);
  refuses(GA_ERROR_INVALID_ARGUMENT, "goes by rows and columns",
          [&] { Optimizer(std::vector<Tensor>{w}, adafactor); });
  Tensor gaps = torch::zeros({4, 4}).slice(1, 0, 2).detach().requires_grad_();
  refuses(GA_ERROR_INVALID_ARGUMENT, "which are not dense",
          [&] { Optimizer(std::vector<Tensor>{gaps}, optim::SGDOptions(0.1)); });
}

TEST(Parameters, MayMoveBetweenWindowsAlone) {
  Tensor w = torch::ones({3}).requires_grad_();
  Optimizer optimizer(std::vector<Tensor>{w}, optim::SGDOptions(0.5));
  w.set_data(torch::full({3}, 2.0));
  optimizer.backward(w.sum());
  optimizer.step();
  EXPECT_TRUE(torch::equal(w, torch::full({3}, 1.5)));
  optimizer.backward(w.sum());
  const Tensor before = w.data(), after = torch::full({3}, 7.0);
  w.set_data(after);
  refuses(GA_ERROR_INVALID_STATE, "\"param0\" has moved while a window was open",
          [&] { optimizer.step(); });
  EXPECT_EQ(optimizer.window().micro_batches, 1);
  w.set_data(before);
  optimizer.step();
  EXPECT_TRUE(torch::equal(w, torch::full({3}, 1.0)));
  EXPECT_TRUE(torch::equal(after, torch::full({3}, 7.0)));
  w.set_data(torch::ones({3}, torch::kDouble));
  refuses(GA_ERROR_INVALID_STATE, "convert a model before its optimizer is made",
          [&] { optimizer.backward(w.sum()); });
}

// The master weights of a bf16 parameter follow what the program writes, by .data too.
TEST(Parameters, MasterWeightsFollowTheProgram) {
  for (const ga_rounding rounding : {GA_ROUND_NEAREST, GA_ROUND_STOCHASTIC}) {
    Tensor w = torch::ones({3}, torch::kBFloat16).requires_grad_();
    Options options;
    options.params.rounding = rounding;
    Optimizer optimizer(std::vector<Tensor>{w}, optim::SGDOptions(0.5), options);
    optimizer.backward(w.sum());
    optimizer.step();
    EXPECT_TRUE(torch::equal(w, torch::full({3}, 0.5, torch::kBFloat16)));
    {
      const torch::NoGradGuard without;
      w.fill_(8);
    }
    optimizer.backward(w.sum());
    optimizer.step();
    EXPECT_TRUE(torch::equal(w, torch::full({3}, 7.5, torch::kBFloat16)));
  }
}

TEST(Parameters, AutogradKnowsThatTheyWereWritten) {
  Tensor w = torch::ones({3}).requires_grad_(), other = torch::ones({3}).requires_grad_();
  Optimizer optimizer(std::vector<Tensor>{w, other}, optim::SGDOptions(0.5));
  const Tensor early = (w * w).sum(), unmoved = (other * other).sum();
  optimizer.backward(w.sum());
  optimizer.step();
  unmoved.backward();
  try {
    early.backward();
    ADD_FAILURE() << "torch did not see that the parameter was written";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("inplace operation"), std::string::npos);
  }
}

// ---- Save and load ------------------------------------------------------------------------------

struct Training {
  explicit Training(torch::Dtype dtype) : model(make_model(dtype)) {
    Options options;
    options.loss_scaler = gradaccum::default_loss_scaler();
    options.loss_scaler->initial_scale = 256;
    options.loss_scaler->growth_interval = 2;
    optimizer =
        std::make_unique<Optimizer>(model->named_parameters(), optim::AdamWOptions(1e-2), options);
    schedule = std::make_unique<optim::StepLR>(*optimizer, 1, 0.9);
  }
  void micro(int window, std::size_t index) {
    const Tensor x = cut(batch_of(window), window)[index];
    optimizer->backward(loss_of(model, x), samples(x));
  }
  void step() {
    optimizer->step();
    schedule->step();
  }

  Model model;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<optim::StepLR> schedule;
};

// Whether the run stops in the middle of a window; and whether the model is loaded before its
// optimizer.
using Stop = std::tuple<torch::Dtype, bool, bool>;

class Resume : public testing::TestWithParam<Stop> {};

TEST_P(Resume, GoesOnWithTheSameBits) {
  const auto [dtype, in_window, model_first] = GetParam();
  Training run(dtype);
  for (int window = 0; window < 3; ++window) {
    run.micro(window, 0);
    run.micro(window, 1);
    run.step();
  }
  for (std::size_t i = 0; in_window && i < 2; ++i) run.micro(4, i);
  std::stringstream model_file, optimizer_file;
  torch::save(run.model, model_file);
  torch::save(*run.optimizer, optimizer_file);

  Training other(dtype);
  if (model_first) torch::load(other.model, model_file);
  torch::load(*other.optimizer, optimizer_file);
  EXPECT_DOUBLE_EQ(other.optimizer->param_groups()[0].options().get_lr(), 1e-2 * 0.81);
  EXPECT_EQ(other.optimizer->context().loss_scale(), 512);
  EXPECT_EQ(other.optimizer->window().micro_batches, in_window ? 2 : 0);
  if (!model_first) {
    torch::load(other.model, model_file);  // moves the parameters
    if (in_window) {
      const char* const words = "\"0.weight\" has moved while a window was open. torch::load()";
      refuses(GA_ERROR_INVALID_STATE, words, [&other = other] { other.micro(4, 2); });
      refuses(GA_ERROR_INVALID_STATE, words, [&other = other] { other.step(); });
      return;
    }
  }
  for (Training* each : {&run, &other}) {
    for (std::size_t i = in_window ? 2 : 0; i < 3; ++i) each->micro(4, i);
    each->optimizer->step();
    EXPECT_EQ(each->optimizer->result()->steps, 4);
    EXPECT_EQ(each->optimizer->result()->weight, 24);
    each->micro(5, 0);
    each->optimizer->step();
  }
  EXPECT_TRUE(same_bits(run.model->parameters(), other.model->parameters()));
}

std::string name_of_stop(const testing::TestParamInfo<Stop>& info) {
  return std::string(c10::toString(std::get<0>(info.param))) +
         (std::get<1>(info.param) ? "_InWindow" : "_BetweenWindows") +
         (std::get<2>(info.param) ? "_ModelFirst" : "_OptimizerFirst");
}

INSTANTIATE_TEST_SUITE_P(Torch, Resume,
                         testing::Combine(testing::Values(torch::kDouble, torch::kFloat,
                                                          torch::kBFloat16),
                                          testing::Bool(), testing::Bool()),
                         name_of_stop);

// Newton-Schulz rows of one's own, in a group of Muon.
TEST(Archive, HasTheHyperParametersOfTheLibrary) {
  Tensor w = torch::eye(3).requires_grad_();
  const auto make = [&w](double lr, double momentum) {
    GroupOptions muon(GA_OPTIMIZER_MUON, lr);
    muon.optimizer.momentum = momentum;
    muon.ns_table = {3, -4, 2, 2, -1.5, 0.5};
    return std::make_unique<Optimizer>(std::vector<Tensor>{w}, muon);
  };
  const auto from = make(0.25, 0.5), to = make(0.125, 0.75);
  auto& written = static_cast<GroupOptions&>(from->param_groups()[0].options());
  written.ns_table = {1, 2, 3};
  std::stringstream file;
  torch::save(*from, file);
  torch::load(*to, file);
  const auto& read = static_cast<const GroupOptions&>(to->param_groups()[0].options());
  EXPECT_EQ(read.optimizer.lr, 0.25);
  EXPECT_EQ(read.optimizer.momentum, 0.5);
  EXPECT_EQ(read.ns_table, (std::vector<double>{1, 2, 3}));
  const ga_optimizer inside = to->context().optimizer(gradaccum::Group{0});
  EXPECT_EQ(inside.lr, 0.25);
  ASSERT_EQ(inside.ns_rows, 1);
  EXPECT_EQ(inside.ns_table[2], 3);
}

// Master weights are saved as the program has left the parameter, also one that has moved.
TEST(Archive, HasWhatTheProgramHasWritten) {
  Tensor w = torch::ones({3}, torch::kBFloat16).requires_grad_();
  Tensor other = torch::full({3}, 8.0, torch::kBFloat16).requires_grad_();
  Optimizer from(std::vector<Tensor>{w}, optim::SGDOptions(0.5));
  Optimizer to(std::vector<Tensor>{other}, optim::SGDOptions(0.5));
  from.backward(w.sum());
  from.step();
  w.set_data(torch::full({3}, 8.0, torch::kBFloat16));
  std::stringstream file;
  torch::save(from, file);
  torch::load(to, file);
  EXPECT_TRUE(torch::equal(other, torch::full({3}, 8.0, torch::kBFloat16)));
  to.backward(other.sum());
  to.step();
  EXPECT_TRUE(torch::equal(other, torch::full({3}, 7.5, torch::kBFloat16)));
}

TEST(Archive, WhatDoesNotFitChangesNothing) {
  Tensor w = torch::ones({3}).requires_grad_();
  const auto make = [](const std::string& name, const Tensor& of, const auto& options) {
    torch::OrderedDict<std::string, Tensor> named;
    named.insert(name, of);
    auto optimizer = std::make_unique<Optimizer>(named, options);
    optimizer->backward(of.sum());
    optimizer->step();
    return optimizer;
  };
  const auto file_of = [](auto& optimizer) {
    std::stringstream file;
    torch::save(optimizer, file);
    return file.str();
  };
  const auto optimizer = make("w", w, optim::AdamWOptions(0.5));
  const std::vector<Tensor> before = copies_of({w});
  const std::string good = file_of(*optimizer);
  const auto fails = [&](ga_status status, const std::string& words, const std::string& file) {
    refuses(status, words, [&] {
      std::stringstream stream(file);
      torch::load(*optimizer, stream);
    });
    EXPECT_TRUE(same_bits(before, {w}));
    EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), 0.5);
    EXPECT_EQ(optimizer->context().lr(gradaccum::Group{0}), 0.5);
    EXPECT_EQ(optimizer->window().steps, 1);
  };

  optim::AdamW of_torch(std::vector<Tensor>{w}, optim::AdamWOptions(0.125));
  fails(GA_ERROR_FORMAT, "the archive has no \"gradaccum\"", file_of(of_torch));
  const Tensor other = torch::ones({3}).requires_grad_();
  fails(GA_ERROR_INVALID_ARGUMENT, "the context has no place for \"v.exp_avg\"",
        file_of(*make("v", other, optim::AdamWOptions(0.125))));
  fails(GA_ERROR_INVALID_ARGUMENT, "group 0 of the archive has another optimizer",
        file_of(*make("w", other, optim::SGDOptions(0.125))));
  const Tensor longer = torch::ones({4}).requires_grad_();
  fails(GA_ERROR_INVALID_ARGUMENT, "\"w.exp_avg\"",
        file_of(*make("w", longer, optim::AdamWOptions(0.125))));
  const auto two = make("w", other, optim::AdamWOptions(0.125));
  two->add_param_group(optim::OptimizerParamGroup({longer}));
  fails(GA_ERROR_INVALID_ARGUMENT, "the archive has 2 groups, but the optimizer has 1",
        file_of(*two));
  fails(GA_ERROR_UNSUPPORTED, "amsgrad",
        file_of(*make("w", other, optim::AdamWOptions(0.125).amsgrad(true))));

  GroupOptions up{optim::AdamWOptions(0.125)};
  up.optimizer.maximize = 1;
  fails(GA_ERROR_INVALID_ARGUMENT, "group 0 of the archive has maximize = 1, for which",
        file_of(*make("w", other, up)));

  torch::serialize::InputArchive whole;
  std::stringstream stream(good);
  whole.load_from(stream);
  Tensor bytes;
  whole.read("gradaccum", bytes);
  {
    // As good, but with a byte of the state turned.
    bytes = bytes.clone();
    bytes[bytes.numel() - 1] = 255 - bytes[bytes.numel() - 1];
    torch::serialize::OutputArchive damaged;
    damaged.write("gradaccum", bytes);
    damaged.write("is_explicit", c10::IValue(false));
    damaged.write("groups", c10::IValue(std::int64_t{1}));
    torch::serialize::OutputArchive group(damaged.compilation_unit());
    GroupOptions(optim::AdamWOptions(0.125)).serialize(group);
    damaged.write("group0", group);
    std::stringstream file;
    damaged.save_to(file);
    fails(GA_ERROR_FORMAT, "", file.str());
  }

  optimizer->backward(w.sum());
  fails(GA_ERROR_INVALID_STATE, "load() was called within a window: discard() drops it", good);
  EXPECT_EQ(optimizer->window().micro_batches, 1);
}

// ---- What the loop does -------------------------------------------------------------------------

TEST(Loop, AnExceptionDropsTheMicroBatchOrTheWindow) {
  Tensor w = torch::ones({2}).requires_grad_();
  Optimizer optimizer(std::vector<Tensor>{w}, optim::SGDOptions(0.5));
  optimizer.backward(w.sum() * 2);
  const auto before_any = [] { throw std::domain_error("before"); };
  EXPECT_THROW(optimizer.micro_batch(1, before_any), std::domain_error);
  EXPECT_EQ(optimizer.window().micro_batches, 1);
  const auto after_some = [&w] {
    w.sum().backward();
    throw std::domain_error("after");
  };
  EXPECT_THROW(optimizer.micro_batch(1, after_some), std::domain_error);
  EXPECT_EQ(optimizer.window().micro_batches, 0);
  EXPECT_FALSE(w.grad().defined());
  optimizer.backward(w.sum());
  optimizer.step();
  EXPECT_TRUE(torch::equal(w, torch::full({2}, 0.5)));
}

TEST(Loop, SeveralBackwardsAreOneMicroBatch) {
  Tensor w = torch::ones({2}).requires_grad_(), other = torch::ones({2}).requires_grad_();
  Optimizer optimizer(std::vector<Tensor>{other, w}, optim::SGDOptions(0.5));
  optimizer.micro_batch(4, [&] {
    w.sum().backward();
    ((w + other).sum() * 2).backward();
    EXPECT_FALSE(w.grad().defined() || other.grad().defined());  // freed at once
  });
  EXPECT_EQ(optimizer.window().micro_batches, 1);
  optimizer.step();
  EXPECT_TRUE(torch::equal(w, torch::full({2}, -0.5)));
}

TEST(Loop, WrongOrdersAreRefused) {
  Tensor w = torch::ones({2}).requires_grad_();
  Options options;
  options.config.accum_steps = 2;
  Optimizer optimizer(std::vector<Tensor>{w}, optim::SGDOptions(0.5), options);
  for (const double weight : {-1.0, std::nan(""), kInfinity}) {
    refuses(GA_ERROR_INVALID_ARGUMENT, "weight", [&] { optimizer.backward(w.sum(), weight); });
    w.mutable_grad() = torch::ones({2});
    refuses(GA_ERROR_INVALID_ARGUMENT, "weight", [&] { optimizer.accumulate(weight); });
    EXPECT_TRUE(w.grad().defined());
    optimizer.zero_grad();
  }
  refuses(GA_ERROR_INVALID_ARGUMENT, "the loss was undefined", [&] { optimizer.backward({}); });
  w.mutable_grad() = torch::ones({2});
  refuses(GA_ERROR_INVALID_STATE, "has a .grad of an earlier backward",
          [&] { optimizer.backward(w.sum()); });
  optimizer.zero_grad();
  EXPECT_EQ(optimizer.window().micro_batches, 0);

  // What was refused leaves the window to step().
  w.sum().backward();
  optimizer.step();
  EXPECT_EQ(optimizer.window().micro_batches, 1);
  refuses(GA_ERROR_INVALID_ARGUMENT, "weight", [&] { optimizer.backward(w.sum(), -1); });
  w.sum().backward();
  optimizer.step();
  EXPECT_EQ(optimizer.window().steps, 1);
  EXPECT_TRUE(torch::equal(w, torch::full({2}, 0.5)));

  const std::vector<std::pair<const char*, std::function<void()>>> calls = {
      {"step()", [&] { optimizer.step(); }},
      {"flush()", [&] { optimizer.flush(); }},
      {"discard()", [&] { optimizer.discard(); }},
      {"accumulate()", [&] { optimizer.accumulate(); }},
      {"save()",
       [&] {
         torch::serialize::OutputArchive archive;
         optimizer.save(archive);
       }},
      {"micro_batch()", [&] { optimizer.backward(w.sum()); }}};
  for (const auto& [name, call] : calls) {
    const std::string words = std::string(name) + " was called in an open micro-batch";
    refuses(GA_ERROR_INVALID_STATE, words, [&, &made = call] { optimizer.micro_batch(1, made); });
  }
  optimizer.backward(w.sum());
  w.sum().backward();
  refuses(GA_ERROR_INVALID_STATE, "step() found gradients in .grad", [&] { optimizer.step(); });
  EXPECT_TRUE(w.grad().defined());
  optimizer.accumulate();
  refuses(GA_ERROR_WINDOW_FULL, "", [&] { optimizer.backward(w.sum()); });
  EXPECT_EQ(optimizer.window().micro_batches, 2);
  optimizer.step();
  EXPECT_TRUE(torch::equal(w, torch::full({2}, 0.0)));
}

TEST(Loop, GroupsThatWereChangedAreRefused) {
  Tensor a = torch::ones({2}).requires_grad_(), b = torch::ones({2}).requires_grad_();
  Optimizer optimizer(std::vector<Tensor>{a}, optim::SGDOptions(0.5));
  optimizer.param_groups()[0].params().push_back(b);
  refuses(GA_ERROR_INVALID_STATE, "the parameters of group 0 were changed",
          [&] { optimizer.backward(a.sum()); });
  optimizer.param_groups()[0].params().pop_back();
  static_cast<optim::Optimizer&>(optimizer).add_param_group(optim::OptimizerParamGroup({b}));
  refuses(GA_ERROR_INVALID_STATE, "param_groups() has 2 groups, but the optimizer has 1",
          [&] { optimizer.backward(a.sum()); });
  optimizer.param_groups().pop_back();
  optimizer.backward(a.sum());
  const auto add = [&] { optimizer.add_param_group(optim::OptimizerParamGroup({b})); };
  refuses(GA_ERROR_INVALID_STATE, "a group was added within a window", add);
  EXPECT_EQ(optimizer.param_groups().size(), 1U);
  optimizer.step();
  add();
  optimizer.backward((a + b).sum());
  optimizer.step();
  EXPECT_TRUE(torch::equal(a, torch::zeros({2})));
  EXPECT_TRUE(torch::equal(b, torch::full({2}, 0.5)));

  // Half-way: the second of two tensors is refused, and the first may come again.
  Tensor c = torch::ones({2}).requires_grad_();
  const optim::OptimizerParamGroup overlapping({c, c.detach().requires_grad_()});
  refuses(GA_ERROR_INVALID_ARGUMENT, "param3", [&] { optimizer.add_param_group(overlapping); });
  optimizer.add_param_group(optim::OptimizerParamGroup({c}));
  optimizer.backward(c.sum());
  optimizer.step();
  (a + b + c).sum().backward();
  optimizer.accumulate();
  optimizer.step();
  EXPECT_TRUE(torch::equal(c, torch::zeros({2})));
  EXPECT_TRUE(torch::equal(b, torch::zeros({2})));
}

TEST(Loop, WhatTheLibraryCannotUseIsRefusedByName) {
  const auto make = [](const Tensor& tensor, const optim::OptimizerOptions& of,
                       const Options& options) {
    torch::OrderedDict<std::string, Tensor> named;
    named.insert("w", tensor);
    Optimizer(named, of, options);
  };
  const optim::SGDOptions sgd(0.5);
  const Tensor w = torch::ones({2}).requires_grad_();
  const auto refuses_tensor = [&](const std::string& words, const Tensor& tensor) {
    refuses(GA_ERROR_INVALID_ARGUMENT, words, [&] { make(tensor, sgd, {}); });
  };
  refuses_tensor("parameter \"w\" was on meta, expected the CPU", torch::empty({2}, torch::kMeta));
  refuses_tensor("parameter \"w\" was Long, expected", torch::ones({2}, torch::kLong));
  refuses_tensor("parameter \"w\" was Sparse, expected", torch::ones({2}).to_sparse());
  refuses(GA_ERROR_UNSUPPORTED, "LBFGSOptions", [&] { make(w, optim::LBFGSOptions(1), {}); });
  refuses(GA_ERROR_INVALID_ARGUMENT, "lr", [&] { make(w, optim::SGDOptions(-1), {}); });

  Options options;
  options.config.eager = 1;
  refuses(GA_ERROR_UNSUPPORTED, "config.eager", [&] { make(w, sgd, options); });
  options = {};
  options.config.gradient_life = GA_GRADIENTS_LENT;
  options.config.nonfinite = GA_NONFINITE_DROP_MICRO;
  refuses(GA_ERROR_UNSUPPORTED, "GA_GRADIENTS_LENT", [&] { make(w, sgd, options); });
  options = {};
  options.config.device = GA_DEVICE_CUDA;
  refuses(GA_ERROR_UNSUPPORTED, "config.device", [&] { make(w, sgd, options); });
  options = {};
  options.params.gradient_dtype = GA_F32;
  refuses(GA_ERROR_INVALID_ARGUMENT, "gradient_dtype", [&] { make(w, sgd, options); });
  Optimizer optimizer(std::vector<Tensor>{w}, sgd);
  refuses(GA_ERROR_INVALID_ARGUMENT, "not a parameter of this optimizer",
          [&] { optimizer.param(torch::ones({2})); });
}

TEST(Loop, TwoHabitsAreWarnedOfOnce) {
  struct Warnings : c10::WarningHandler {
    void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
    std::vector<std::string> texts;
  } warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  Tensor w = torch::ones({2}).requires_grad_(), other = torch::ones({2}).requires_grad_();
  Options options;
  options.loss_scaler = gradaccum::default_loss_scaler();
  Optimizer optimizer(std::vector<Tensor>{w}, optim::SGDOptions(0.5), options);
  for (int i = 0; i < 2; ++i) optimizer.backward(other.sum());
  ASSERT_EQ(warnings.texts.size(), 1U);
  EXPECT_NE(warnings.texts[0].find("gave no gradient to any parameter"), std::string::npos);
  optimizer.backward(w.sum());
  EXPECT_EQ(warnings.texts.size(), 1U);
  for (int i = 0; i < 2; ++i) {
    w.sum().backward();
    optimizer.accumulate();
  }
  ASSERT_EQ(warnings.texts.size(), 2U);
  EXPECT_NE(warnings.texts[1].find("scale_loss() was not called"), std::string::npos);
}

TEST(Loop, ThePageRuns) {
#include "libtorch.inc"
  EXPECT_EQ(optimizer.result()->outcome, GA_STEP_APPLIED);
  EXPECT_EQ(optimizer.result()->weight, 39);
  const std::vector<Tensor> matrices = {model->weight}, others = {model->bias};
  {
#include "libtorch_groups.inc"
    EXPECT_EQ(optimizer.context().optimizer(gradaccum::Group{0}).kind, GA_OPTIMIZER_MUON);
    EXPECT_EQ(optimizer.context().optimizer(gradaccum::Group{1}).kind, GA_OPTIMIZER_ADAMW);
    EXPECT_EQ(optimizer.context().lr(gradaccum::Group{1}), 3e-4);
  }
}

// ---- Gradients that live until the step, or are lent ---------------------------------------------

// Windows of one and of several micro-batches; each window takes its gradients in another way.
std::vector<Tensor> train_with(ga_gradient_life life) {
  Model model = make_model(torch::kFloat);
  Options options;
  options.config.gradient_life = life;
  Optimizer optimizer(model->parameters(), optim::AdamWOptions(0.01), options);
  for (int window = 0; window < 8; ++window) {
    const Tensor batch = batch_of(window);
    for (const Tensor& x : window % 4 < 2 ? cut(batch, window) : std::vector<Tensor>{batch}) {
      const Tensor loss = loss_of(model, x);
      if (window % 2 == 0) {
        optimizer.backward(loss, samples(x));
      } else {
        loss.backward();
        optimizer.accumulate(samples(x));
      }
      batch_of(99).clone();  // takes the memory of gradients that were freed
    }
    optimizer.step();
  }
  return copies_of(model->parameters());
}

TEST(GradientLife, DoesNotChangeBits) {
  const std::vector<Tensor> consumed = train_with(GA_GRADIENTS_CONSUMED);
  EXPECT_TRUE(same_bits(train_with(GA_GRADIENTS_LIVE), consumed));
  EXPECT_TRUE(same_bits(train_with(GA_GRADIENTS_LENT), consumed));
}

// How many owners the memory of a gradient has after each of its window's calls, the test's among them.
TEST(GradientLife, IsAsLongAsTheLibraryReads) {
  struct Case {
    ga_gradient_life life;
    std::vector<std::size_t>
        owners;  // of the first gradient, after the first and second accumulate() and step()
  };
  for (const auto& [life, owners] :
       {Case{GA_GRADIENTS_CONSUMED, {1, 1, 1}}, Case{GA_GRADIENTS_LIVE, {2, 1, 1}},
        Case{GA_GRADIENTS_LENT, {2, 2, 1}}}) {
    for (const bool by_hooks : {false, true}) {
      const Tensor w = torch::ones({5}).requires_grad_(), x = torch::rand({5});
      Options options;
      options.config.gradient_life = life;
      Optimizer optimizer(std::vector<Tensor>{w}, optim::SGDOptions(0.5), options);
      Tensor first;
      w.register_hook([&first](const Tensor& gradient) {
        if (!first.defined()) first = gradient.detach();
      });
      const auto micro_batch = [&] {
        if (by_hooks) return optimizer.backward((w * x).sum());
        (w * x).sum().backward();
        optimizer.accumulate();
      };
      std::vector<std::size_t> found;
      micro_batch();
      found.push_back(first.storage().use_count());
      micro_batch();
      found.push_back(first.storage().use_count());
      optimizer.step();
      found.push_back(first.storage().use_count());
      EXPECT_EQ(found, owners) << life << " by hooks: " << by_hooks;
    }
  }
}

// While it lives, allocation number `which` of this thread fails, counted from 1.
class OutOfMemory {
 public:
  explicit OutOfMemory(int which) { left = which; }
  OutOfMemory(const OutOfMemory&) = delete;
  ~OutOfMemory() { left = 0; }

  static inline thread_local int left = 0;  // allocations up to the one that fails; 0: none does
};

// The memory of a gradient, which the test does not own.
using Memory = c10::weak_intrusive_ptr<c10::StorageImpl>;

TEST(GradientLife, OutlivesAMicroBatchThatIsDropped) {
  const Tensor w = torch::ones({5}).requires_grad_();
  Options options;
  options.config.gradient_life = GA_GRADIENTS_LIVE;
  Optimizer optimizer(std::vector<Tensor>{w}, optim::SGDOptions(0.5), options);
  (w * torch::full({5}, 3)).sum().backward();
  const Memory memory = w.grad().storage().getWeakStorageImpl();
  optimizer.accumulate();
  EXPECT_THROW(optimizer.micro_batch(1, [] { throw std::runtime_error("none"); }),
               std::runtime_error);
  EXPECT_FALSE(memory.expired());
  optimizer.step();
  EXPECT_TRUE(memory.expired());
  EXPECT_TRUE(torch::equal(w, torch::full({5}, -0.5)));
}

// A window of two parameters whose first gradients, 3 and 4, live.
struct LiveWindow {
  LiveWindow() {
    (a * torch::full({5}, 3) + b * torch::full({5}, 4)).sum().backward();
    of_a = a.grad().storage().getWeakStorageImpl();
    of_b = b.grad().storage().getWeakStorageImpl();
    optimizer.accumulate();
  }
  static Options options() {
    Options live;
    live.config.gradient_life = GA_GRADIENTS_LIVE;
    return live;
  }

  const Tensor a = torch::ones({5}).requires_grad_(), b = torch::ones({5}).requires_grad_();
  Optimizer optimizer{std::vector<Tensor>{a, b}, optim::SGDOptions(0.5), options()};
  std::optional<Memory> of_a, of_b;
};

TEST(GradientLife, EndsWithinTheSecondMicroBatch) {
  LiveWindow w;
  w.optimizer.micro_batch(1, [&w] {
    (w.a * torch::full({5}, 1)).sum().backward();
    EXPECT_TRUE(w.of_a->expired());
    EXPECT_FALSE(w.of_b->expired());
    (w.b * torch::full({5}, 2)).sum().backward();
    EXPECT_TRUE(w.of_b->expired());
  });
  w.optimizer.step();
  EXPECT_TRUE(torch::equal(w.a, torch::full({5}, 0.)));
  EXPECT_TRUE(torch::equal(w.b, torch::full({5}, -0.5)));
}

TEST(GradientLife, EndsWithAWindowThatAnExceptionDrops) {
  LiveWindow w;
  const auto body = [&w] {
    (w.a * torch::full({5}, 1)).sum().backward();  // is added to the first one
    throw std::runtime_error("behind the backward");
  };
  EXPECT_THROW(w.optimizer.micro_batch(1, body), std::runtime_error);
  EXPECT_TRUE(w.of_b->expired());
  EXPECT_EQ(w.optimizer.window().micro_batches, 0);
}

TEST(GradientLife, LosesNothingWhenMemoryRunsOut) {
  for (const bool by_part : {false, true}) {
    bool ran_out = true;
    for (int allocation = 1; ran_out; ++allocation) {
      SCOPED_TRACE(testing::Message() << "by part: " << by_part << ", allocation " << allocation);
      std::vector<Tensor> parameters(40);
      for (Tensor& w : parameters) w = torch::ones({4, 2}).requires_grad_();
      GroupOptions group{optim::SGDOptions(0.5)};
      group.params = gradaccum::default_param_options();
      group.params->rows = GA_ROWS_DENSE;
      Optimizer optimizer(parameters, group, LiveWindow::options());
      for (Tensor& w : parameters) w.mutable_grad() = torch::full({4, 2}, 3.);
      if (by_part) parameters[0].mutable_grad() = parameters[0].grad().to_sparse(1);
      const Memory memory = parameters[39].grad().storage().getWeakStorageImpl();
      try {
        const OutOfMemory from_here(allocation);
        optimizer.accumulate();
        ran_out = false;
      } catch (const std::exception&) {
        EXPECT_EQ(optimizer.window().micro_batches, 0);
      }
      if (ran_out) optimizer.accumulate();
      EXPECT_FALSE(memory.expired());
      optimizer.step();
      EXPECT_TRUE(memory.expired());
      for (const Tensor& w : parameters) {
        EXPECT_TRUE(torch::equal(w, torch::full({4, 2}, -0.5)));
      }
    }
  }
}

// ---- Hooks --------------------------------------------------------------------------------------

struct Count : torch::autograd::PostAccumulateGradHook {
  explicit Count(int* calls) : calls_(calls) {}
  void operator()(const torch::autograd::Variable& tensor) override {
    EXPECT_TRUE(tensor.grad().defined());
    ++*calls_;
  }
  int* calls_;
};

TEST(Hooks, LeaveOthersAndGradientsAlone) {
  Tensor w = torch::ones({2}).requires_grad_();
  int calls = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(w, std::make_unique<Count>(&calls));
  for (int i = 0; i < 3; ++i) {
    Optimizer gone(std::vector<Tensor>{w}, optim::SGDOptions(0.5));
    gone.backward(w.sum());
  }
  EXPECT_EQ(calls, 3);
  Optimizer first(std::vector<Tensor>{w}, optim::SGDOptions(0.5));
  Optimizer second(std::vector<Tensor>{w}, optim::SGDOptions(0.25));
  first.backward(w.sum());
  second.backward(w.sum());
  EXPECT_FALSE(w.grad().defined());
  w.sum().backward();  // of neither
  EXPECT_EQ(calls, 6);
  EXPECT_TRUE(torch::equal(w.grad(), torch::ones({2})));
  first.zero_grad();
  first.step();
  second.step();
  EXPECT_TRUE(torch::equal(w, torch::full({2}, 0.25)));
}

TEST(Hooks, FollowAnOptimizerThatMoves) {
  Tensor w = torch::ones({2}).requires_grad_();
  Optimizer made(std::vector<Tensor>{w}, optim::SGDOptions(0.5));
  made.backward(w.sum());
  Optimizer optimizer(std::move(made));
  optimizer.backward(w.sum() * 2, 3);
  optimizer.step();
  EXPECT_TRUE(torch::equal(w, torch::full({2}, 1 - 0.5 * 7 / 4)));
}

TEST(Hooks, ComeWithParametersThatAreUnfrozen) {
  Tensor w = torch::ones({2}).requires_grad_(), frozen = torch::ones({2});
  Optimizer optimizer(std::vector<Tensor>{w, frozen}, optim::SGDOptions(0.5));
  optimizer.backward((w * frozen).sum());
  optimizer.step();
  EXPECT_TRUE(torch::equal(frozen, torch::ones({2})));
  frozen.requires_grad_();
  optimizer.backward((w * frozen).sum());
  EXPECT_FALSE(frozen.grad().defined());
  optimizer.step();
  EXPECT_TRUE(torch::equal(frozen, torch::full({2}, 0.75)));
}

}  // namespace

// Of the whole program: see OutOfMemory.
void* operator new(std::size_t size) {
  if (OutOfMemory::left > 0 && --OutOfMemory::left == 0) throw std::bad_alloc();
  if (void* const memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
