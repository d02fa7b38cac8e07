// SPDX-License-Identifier: Apache-2.0
//
// Every optimizer against its formula in float64, over many steps, and every wrong hyper-parameter.
#include "support.hpp"

namespace ga::test {
namespace {

class Optimizer : public testing::TestWithParam<size_t> {
 protected:
  const ga_optimizer optimizer_ = good_optimizers()[GetParam()].optimizer;
};

INSTANTIATE_TEST_SUITE_P(All, Optimizer, testing::Range<size_t>(0, good_optimizers().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return good_optimizers()[info.param].name;
                         });

TEST_P(Optimizer, TwoHundredSteps) {
  const Layout layout({1, 17, 1023});
  Block block = parameters(layout, 1);
  Model model(layout, {optimizer_}, config(), block);
  Context ctx;
  const ga_group group = ctx.group(optimizer_);
  for (size_t i = 0; i < layout.size(); ++i) {
    ctx.param(group, std::to_string(i), block.data() + layout.offsets[i], layout.counts[i]);
  }
  for (uint64_t t = 0; t < 200; ++t) {
    const Block g = gradients(layout, 2, t);
    ctx.accumulate(pointers(layout, g));
    const ga_step_result result = step(ctx);
    EXPECT_EQ(result.steps, static_cast<int64_t>(t + 1));
    EXPECT_EQ(result.lr, optimizer_.lr);
    model.accumulate(g, 1);
    model.step();
    ASSERT_TRUE(model.matches(block)) << "step " << t + 1;
  }
}

// The rate moves in every step: it lies inside of Keras's velocity, outside of torch's buffer.
TEST_P(Optimizer, LearningRateThatMoves) {
  const Layout layout({40});
  Block block = parameters(layout, 3);
  Model model(layout, {optimizer_}, config(), block);
  Context ctx;
  ctx.param(ctx.group(optimizer_), "p", block.data() + layout.offsets[0], layout.counts[0]);
  for (uint64_t t = 0; t < 30; ++t) {
    const double lr = t == 7 ? 0 : optimizer_.lr * (1 + std::sin(static_cast<double>(t)));
    EXPECT_OK(ga_group_set_lr(ctx, 0, lr));
    EXPECT_EQ(group_lr(ctx), lr);
    const Block g = gradients(layout, 4, t);
    ctx.accumulate(pointers(layout, g));
    EXPECT_EQ(step(ctx).lr, lr);
    model.accumulate(g, 1);
    model.step(lr);
    ASSERT_TRUE(model.matches(block)) << "step " << t + 1;
  }
}

// Torch counts a parameter's own updates, the others the context's steps; neither counts windows.
TEST_P(Optimizer, StepCountOfARarelyUsedParameter) {
  const Layout layout({9, 9});
  for (const int32_t missing : {GA_MISSING_SKIP, GA_MISSING_ZERO}) {
    ga_config c = config();
    c.missing = missing;
    Block block = parameters(layout, 5);
    Model model(layout, {optimizer_}, c, block);
    Context ctx(c);
    const ga_group group = ctx.group(optimizer_);
    for (size_t i = 0; i < layout.size(); ++i) {
      ctx.param(group, std::to_string(i), block.data() + layout.offsets[i], layout.counts[i]);
    }
    for (uint64_t t = 0; t < 24; ++t) {
      const Block g = gradients(layout, 6, t);
      auto list = pointers(layout, g);
      const Block before = block;
      const bool rare = t % 5 != 3;
      if (rare) list[1] = nullptr;
      ctx.accumulate(list);
      step(ctx);
      model.accumulate(g, 1, 1, rare ? std::vector<size_t>{1} : std::vector<size_t>());
      model.step();
      ASSERT_TRUE(model.matches(block)) << "step " << t + 1;
      if (rare && missing == GA_MISSING_SKIP) {
        EXPECT_EQ(0, memcmp(&before[static_cast<size_t>(layout.offsets[1])],
                            &block[static_cast<size_t>(layout.offsets[1])], 9 * sizeof(float)));
      }
    }
  }
}

// Groups live side by side, each with its own formula, numbers and state.
TEST(Groups, AllOptimizersInOneContext) {
  const auto all = good_optimizers();
  std::vector<int64_t> counts;
  std::vector<ga_optimizer> optimizers;
  for (size_t i = 0; i < all.size(); ++i) {
    counts.push_back(static_cast<int64_t>(20 + i));
    optimizers.push_back(all[i].optimizer);
  }
  const Layout layout(counts);
  Block block = parameters(layout, 7);
  Model model(layout, optimizers, config(), block);
  const ga_clip norm = clip(GA_CLIP_GLOBAL, 3.0);
  Context ctx;
  EXPECT_OK(ga_context_set_clip(ctx, &norm));
  std::vector<ga_group> groups;
  for (const NamedOptimizer& named : all) groups.push_back(ctx.group(named.optimizer));
  for (size_t i = 0; i < layout.size(); ++i) {
    EXPECT_EQ(groups[i], static_cast<ga_group>(i));
    ctx.param(groups[i], all[i].name, block.data() + layout.offsets[i], layout.counts[i]);
  }
  for (uint64_t t = 0; t < 60; ++t) {
    const Block g = gradients(layout, 8, t);
    ctx.accumulate(pointers(layout, g), 2);
    const ga_step_result result = step(ctx);
    EXPECT_EQ(result.lr, optimizers[0].lr);
    model.accumulate(g, 2);
    model.step(NAN, &norm);
    EXPECT_NEAR(result.norm, model.norm(), 4 * ref::kHalfUlp * model.norm());
    EXPECT_NEAR(result.clip_factor, model.clip_factor(), 8 * ref::kHalfUlp * model.clip_factor());
    ASSERT_TRUE(model.matches(block)) << "step " << t + 1;
  }
}

TEST(Groups, WeightDecayCanChange) {
  const Layout layout({50});
  for (const NamedOptimizer& named : good_optimizers()) {
    ga_optimizer o = named.optimizer;
    Block block = parameters(layout, 9);
    Context ctx;
    ctx.param(ctx.group(o), "p", block.data() + layout.offsets[0], layout.counts[0]);
    // A model for each stretch would lose the state, so one model whose optimizer is changed
    // between steps.
    Model first(layout, {o}, config(), block);
    for (uint64_t t = 0; t < 10; ++t) {
      const Block g = gradients(layout, 10, t);
      ctx.accumulate(pointers(layout, g));
      step(ctx);
      first.accumulate(g, 1);
      first.step();
      o.weight_decay = 0.02 * static_cast<double>(t % 3);
      EXPECT_OK(ga_group_set_weight_decay(ctx, 0, o.weight_decay));
      first.set_optimizer(0, o);
      ASSERT_TRUE(first.matches(block)) << named.name << ", step " << t + 1;
    }
  }
}

TEST(Groups, LearningRateZeroMovesNothingButState) {
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
  o.lr = 0;
  Block p = {0.1f, -3e-30f, 7};
  const Block before = p;
  Context ctx;
  ctx.param(ctx.group(o), "p", p.data(), 3);
  const Block g = {1, 2, 3};
  ctx.accumulate({g.data()});
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  EXPECT_TRUE(same_bits(before, p));
}

// ---- Defaults -----------------------------------------------------------------------------------

TEST(Defaults, OfEachFramework) {
  struct Row {
    int32_t kind, flavor;
    double lr, weight_decay, beta1, beta2, eps;
  };
  const double any = NAN;  // the framework has none
  const Row rows[] = {
      {GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH, 1e-3, 0, any, any, any},
      {GA_OPTIMIZER_SGD, GA_FLAVOR_KERAS, 1e-2, 0, any, any, any},
      {GA_OPTIMIZER_ADAM, GA_FLAVOR_TORCH, 1e-3, 0, 0.9, 0.999, 1e-8},
      {GA_OPTIMIZER_ADAM, GA_FLAVOR_KERAS, 1e-3, 0, 0.9, 0.999, 1e-7},
      {GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH, 1e-3, 1e-2, 0.9, 0.999, 1e-8},
      {GA_OPTIMIZER_ADAMW, GA_FLAVOR_KERAS, 1e-3, 4e-3, 0.9, 0.999, 1e-7},
      {GA_OPTIMIZER_ADAMW, GA_FLAVOR_BERT, any, 1e-2, 0.9, 0.999, 1e-6},
  };
  for (const Row& row : rows) {
    ga_optimizer o;
    memset(&o, 0xee, sizeof o);
    ASSERT_OK(ga_optimizer_init(&o, sizeof o, row.kind, row.flavor));
    EXPECT_EQ(o.struct_size, sizeof o);
    EXPECT_EQ(o.kind, row.kind);
    EXPECT_EQ(o.flavor, row.flavor);
    const auto check = [&](const char* what, double got, double want) {
      EXPECT_TRUE(std::isnan(want) ? std::isfinite(got) && got >= 0 : got == want)
          << what << " of optimizer " << row.kind << ", flavor " << row.flavor << " is " << got;
    };
    check("lr", o.lr, row.lr);
    check("weight_decay", o.weight_decay, row.weight_decay);
    check("beta1", o.beta1, row.beta1);
    check("beta2", o.beta2, row.beta2);
    check("eps", o.eps, row.eps);
    EXPECT_EQ(o.momentum, 0);
    EXPECT_EQ(o.dampening, 0);
    EXPECT_EQ(o.nesterov, 0);
    EXPECT_EQ(o.amsgrad, 0);
    EXPECT_EQ(o.maximize, 0);
    EXPECT_EQ(o.reserved, 0);
    Context ctx;
    EXPECT_EQ(ctx.group(o), 0);
  }
}

TEST(Defaults, FlavorsThatDoNotExist) {
  ga_optimizer o;
  for (const int32_t kind : {GA_OPTIMIZER_SGD, GA_OPTIMIZER_ADAM}) {
    EXPECT_EQ(ga_optimizer_init(&o, sizeof o, kind, GA_FLAVOR_BERT), GA_ERROR_UNSUPPORTED);
    EXPECT_STRNE(ga_last_error(), "");
  }
}

// ---- Wrong hyper-parameters ---------------------------------------------------------------------

struct BadOptimizer {
  const char* what;
  int32_t kind, flavor;
  void (*spoil)(ga_optimizer&);
  ga_status status;
  std::vector<const char*> words;  // the sentence has the name and the value
};

std::vector<BadOptimizer> bad_optimizers() {
  using O = ga_optimizer&;
  const int32_t sgd = GA_OPTIMIZER_SGD, adam = GA_OPTIMIZER_ADAM, adamw = GA_OPTIMIZER_ADAMW;
  const int32_t torch = GA_FLAVOR_TORCH, keras = GA_FLAVOR_KERAS, bert = GA_FLAVOR_BERT;
  const ga_status invalid = GA_ERROR_INVALID_ARGUMENT, unsupported = GA_ERROR_UNSUPPORTED;
  return {
      {"lr -1", sgd, torch, [](O o) { o.lr = -1; }, invalid, {"lr", "-1"}},
      {"lr NaN", adam, torch, [](O o) { o.lr = NAN; }, invalid, {"lr", "nan"}},
      {"lr inf", adam, torch, [](O o) { o.lr = INFINITY; }, invalid, {"lr", "inf"}},
      {"decay -0.5",
       adamw,
       torch,
       [](O o) { o.weight_decay = -0.5; },
       invalid,
       {"weight_decay", "-0.5"}},
      {"decay NaN",
       sgd,
       keras,
       [](O o) { o.weight_decay = NAN; },
       invalid,
       {"weight_decay", "nan"}},
      {"decay inf",
       adam,
       keras,
       [](O o) { o.weight_decay = INFINITY; },
       invalid,
       {"weight_decay", "inf"}},
      {"momentum -0.25",
       sgd,
       torch,
       [](O o) { o.momentum = -0.25; },
       invalid,
       {"momentum", "-0.25"}},
      {"momentum NaN", sgd, keras, [](O o) { o.momentum = NAN; }, invalid, {"momentum", "nan"}},
      {"dampening -1",
       sgd,
       torch,
       [](O o) { o.momentum = 0.5, o.dampening = -1; },
       invalid,
       {"dampening", "-1"}},
      {"dampening 1.5",
       sgd,
       torch,
       [](O o) { o.momentum = 0.5, o.dampening = 1.5; },
       invalid,
       {"dampening", "1.5"}},
      {"dampening NaN",
       sgd,
       torch,
       [](O o) { o.momentum = 0.5, o.dampening = NAN; },
       invalid,
       {"dampening", "nan"}},
      {"Keras dampening",
       sgd,
       keras,
       [](O o) { o.momentum = 0.5, o.dampening = 0.25; },
       invalid,
       {"dampening", "0.25"}},
      {"beta1 1", adam, torch, [](O o) { o.beta1 = 1; }, invalid, {"beta1", "1"}},
      {"beta1 -0.1", adam, keras, [](O o) { o.beta1 = -0.1; }, invalid, {"beta1", "-0.1"}},
      {"beta1 NaN", adamw, bert, [](O o) { o.beta1 = NAN; }, invalid, {"beta1", "nan"}},
      {"beta2 1", adamw, torch, [](O o) { o.beta2 = 1; }, invalid, {"beta2", "1"}},
      {"beta2 1.5", adamw, keras, [](O o) { o.beta2 = 1.5; }, invalid, {"beta2", "1.5"}},
      {"beta2 NaN", adam, torch, [](O o) { o.beta2 = NAN; }, invalid, {"beta2", "nan"}},
      {"eps -1e-8", adam, torch, [](O o) { o.eps = -1e-8; }, invalid, {"eps", "-1e-08"}},
      {"eps NaN", adamw, bert, [](O o) { o.eps = NAN; }, invalid, {"eps", "nan"}},
      {"nesterov 2",
       sgd,
       torch,
       [](O o) { o.momentum = 0.5, o.nesterov = 2; },
       invalid,
       {"nesterov", "2"}},
      {"nesterov alone",
       sgd,
       torch,
       [](O o) { o.nesterov = 1; },
       invalid,
       {"nesterov", "momentum"}},
      {"nesterov and dampening",
       sgd,
       torch,
       [](O o) { o.momentum = 0.5, o.nesterov = 1, o.dampening = 0.125; },
       invalid,
       {"nesterov", "dampening", "0.125"}},
      {"Keras nesterov alone",
       sgd,
       keras,
       [](O o) { o.nesterov = 1; },
       invalid,
       {"nesterov", "momentum"}},
      {"amsgrad -1", adam, torch, [](O o) { o.amsgrad = -1; }, invalid, {"amsgrad", "-1"}},
      {"BERT amsgrad", adamw, bert, [](O o) { o.amsgrad = 1; }, invalid, {"amsgrad"}},
      {"maximize 3", adamw, torch, [](O o) { o.maximize = 3; }, invalid, {"maximize", "3"}},
      {"kind 99", sgd, torch, [](O o) { o.kind = 99; }, invalid, {"kind", "99"}},
      {"kind -1", sgd, torch, [](O o) { o.kind = -1; }, invalid, {"kind", "-1"}},
      {"flavor 7", sgd, torch, [](O o) { o.flavor = 7; }, invalid, {"flavor", "7"}},
      {"SGD of BERT", sgd, torch, [](O o) { o.flavor = GA_FLAVOR_BERT; }, unsupported, {}},
      {"Adam of BERT", adam, torch, [](O o) { o.flavor = GA_FLAVOR_BERT; }, unsupported, {}},
  };
}

TEST(BadOptimizers, StatusSentenceAndNothingChanged) {
  Block p = {1, 2}, twin_p = p;
  Context ctx, twin;
  ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), "p", p.data(), 2);
  twin.param(twin.group(optimizer(GA_OPTIMIZER_ADAMW)), "p", twin_p.data(), 2);
  for (const BadOptimizer& bad : bad_optimizers()) {
    SCOPED_TRACE(bad.what);
    ga_optimizer o = optimizer(bad.kind, bad.flavor);
    bad.spoil(o);
    ga_group out = -7;
    const ga_memory before = memory(ctx);
    EXPECT_EQ(ga_group_add(ctx, &o, &out), bad.status);
    EXPECT_EQ(out, -7) << "written by a call that failed";
    const std::string text = ga_last_error();
    for (const char* word : bad.words) {
      EXPECT_NE(text.find(word), std::string::npos) << '"' << text << "\" lacks " << word;
    }
    const ga_memory after = memory(ctx);
    EXPECT_EQ(0, memcmp(&before, &after, sizeof before));

    const Block g = {0.5f, -1};
    ctx.accumulate({g.data()});
    twin.accumulate({g.data()});
    step(ctx);
    step(twin);
    EXPECT_TRUE(same_bits(p, twin_p));
  }
  EXPECT_EQ(ctx.group(optimizer(GA_OPTIMIZER_SGD)), 1) << "a failed call used up an id";
}

TEST(BadOptimizers, Setters) {
  float p = 1;
  Context ctx;
  ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), "p", &p, 1);
  for (const double bad : {-1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    for (const ga_group group : {0, 1, -1}) {
      EXPECT_EQ(ga_group_set_lr(ctx, group, bad), GA_ERROR_INVALID_ARGUMENT);
      EXPECT_EQ(ga_group_set_weight_decay(ctx, group, bad), GA_ERROR_INVALID_ARGUMENT);
    }
  }
  EXPECT_EQ(ga_group_set_lr(ctx, 1, 0.5), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_group_set_weight_decay(ctx, -1, 0.5), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(group_lr(ctx), 1e-3);
}

}  // namespace
}  // namespace ga::test
