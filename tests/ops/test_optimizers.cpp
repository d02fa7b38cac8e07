// SPDX-License-Identifier: Apache-2.0
//
// Every optimizer against its formula in float64, over many steps, and every wrong hyper-parameter.
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "numbers/optimizer.hpp"
#include "ops/all.hpp"
#include "support.hpp"

namespace ga::test {
namespace {

// ---- The rows and the library -------------------------------------------------------------------

template <class... Listed>
void expect_rows(TypeList<Listed...>) {
  static const int32_t kinds[] = {Listed::kind...};
  static const char* const names[] = {Listed::name...};
  const std::vector<OptimizerRow>& rows = optimizer_rows();
  ASSERT_EQ(rows.size(), sizeof...(Listed)) << "every optimizer has a row in optimizers.cpp";
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].kind, kinds[i]);
    EXPECT_STREQ(rows[i].name, names[i]);
  }
}

TEST(OptimizerRows, OneForEveryOptimizer) { expect_rows(Optimizers()); }

// Every flavor of every optimizer, with the options that choose what is kept.
template <class Body>
void for_each_state(Body body) {
  for (const OptimizerRow& row : optimizer_rows()) {
    for (const OptimizerRow::Defaults& defaults : row.defaults) {
      for (int bits = 0; bits < 32; ++bits) {
        ga_optimizer o = optimizer(row.kind, defaults.flavor);
        o.momentum = bits & 1 ? 0.9 : 0;
        o.weight_decay = bits & 2 ? 0.1 : 0;
        o.amsgrad = o.centered = bits & 4 ? 1 : 0;
        o.nesterov = bits & 8 ? 1 : 0;
        body(row, o, (bits & 16) != 0);
      }
    }
  }
}

TEST(OptimizerRows, StateHasTheNamesOfTorch) {
  for_each_state([](const OptimizerRow& row, const ga_optimizer& o, bool matrix) {
    const int op = optimizer_info(o.kind, o.flavor).op(o, matrix);
    std::string names;
    for (int k = 0; op >= 0 && k < kMaxSlots; ++k) {
      if (const char* name = op_info(op).slot_names.of[k])
        names += (k ? " " : "") + (name + std::string());
    }
    EXPECT_EQ(names, row.state(o, matrix))
        << row.name << ", flavor " << o.flavor << ", momentum " << o.momentum << ", amsgrad "
        << o.amsgrad << ", centered " << o.centered << ", matrix " << matrix;
  });
}

TEST(OptimizerRows, TellWhatTheLibraryDoes) {
  for_each_state([](const OptimizerRow& row, const ga_optimizer& o, bool matrix) {
    SCOPED_TRACE(row.name);
    const OptimizerInfo& info = optimizer_info(o.kind, o.flavor);
    const int op = info.op(o, matrix);
    EXPECT_EQ(row.layer_wise, op >= 0 && op_info(op).norms > 0);
    EXPECT_EQ(row.matrices_only, info.matrices_only);
    EXPECT_EQ(row.bf16_state, info.bf16_state);
    EXPECT_EQ(row.lazy(o), info.lazy(o));
  });
}

// The names of optimizers in the source of the example.
TEST(OptimizerRows, TheExampleHasThemAll) {
  std::stringstream source;
  source << std::ifstream(GA_TEST_EXAMPLE).rdbuf();
  const std::string text = source.str();
  const std::regex entry(R"re(\{"([a-z_]+)", GA_OPTIMIZER_)re");
  std::multiset<std::string> offered, expected;
  for (std::sregex_iterator i(text.begin(), text.end(), entry), end; i != end; ++i)
    offered.insert((*i)[1]);
  for (const OptimizerRow& row : optimizer_rows()) {
    if (row.example) expected.insert(row.example);
  }
  EXPECT_EQ(offered, expected);
}

// ---- Element by element -------------------------------------------------------------------------

// Sizes around the number of SIMD lanes, and ranks from 0 to 4 with dimensions of 1 and 0.
Layout tensors() {
  return Layout::of({{0},
                     {},
                     {1},
                     {15},
                     {16},
                     {17},
                     {1023},
                     {24, 16},
                     {16, 24},
                     {1, 9},
                     {9, 1},
                     {17, 33},
                     {4, 0},
                     {3, 5, 7},
                     {2, 1, 3, 4}});
}

template <class T>
using Source = std::vector<T> (*)(const Layout&, uint64_t, uint64_t);

// Compares the library with the model after every step. At most the share most_vague of the
// elements may have a tolerance above the given part of the distance that they have moved.
template <class T>
void follow(const ga_optimizer& o, const Layout& layout, Source<T> source, uint64_t steps,
            double most_vague = 0.1, double part = 1e-3) {
  std::vector<T> block = parameters<T>(layout, 1);
  Model model(layout, {o}, config(), block);
  Context ctx;
  add_all(ctx, ctx.group(o), layout, block);
  for (uint64_t t = 0; t < steps; ++t) {
    const std::vector<T> g = source(layout, 2, t);
    ctx.accumulate(pointers(layout, g));
    const ga_step_result result = step(ctx);
    ASSERT_EQ(result.steps, static_cast<int64_t>(t + 1));
    ASSERT_EQ(result.lr, o.lr);
    model.accumulate(g, 1);
    model.step();
    ASSERT_TRUE(model.matches(block)) << "step " << t + 1;
  }
  EXPECT_LT(model.vague(part), most_vague);
}

class Optimizer : public testing::TestWithParam<size_t> {
 protected:
  const ga_optimizer optimizer_ = good_optimizers()[GetParam()].optimizer;
};

std::string optimizer_name(const testing::TestParamInfo<size_t>& info) {
  return good_optimizers()[info.param].name;
}

INSTANTIATE_TEST_SUITE_P(All, Optimizer, testing::Range<size_t>(0, good_optimizers().size()),
                         optimizer_name);

// Four of thirteen elements have almost no gradient. L2 decay moves them to 0, where they oscillate
// with a sign that rounding decides. In float32, the norms of LARS make a few more uncertain.
constexpr double kMostVague = 0.36, kMostVague64 = 0.32;

TEST_P(Optimizer, TwoHundredSteps) {
  follow<float>(optimizer_, tensors(), gradients<float>, 200, kMostVague);
}

TEST_P(Optimizer, TwoHundredStepsInFloat64) {
  follow<double>(optimizer_, tensors(), gradients<double>, 200, kMostVague64);
}

// Gradients of order 1, so that every element counts in norms and means.
TEST_P(Optimizer, EvenGradients) {
  follow<float>(optimizer_, tensors(), even_gradients<float>, 60);
  follow<double>(optimizer_, tensors(), even_gradients<double>, 60);
}

// The learning rate changes in every step: Keras multiplies it into the velocity, torch applies it
// to the buffer.
TEST_P(Optimizer, LearningRateThatMoves) {
  const Layout layout = Layout::of({{40}, {5, 8}});
  Block block = parameters(layout, 3);
  Model model(layout, {optimizer_}, config(), block);
  Context ctx;
  add_all(ctx, ctx.group(optimizer_), layout, block);
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

// Maximizing equals minimizing with the negated gradient.
TEST_P(Optimizer, Maximize) {
  const Layout layout = Layout::of({{33}, {6, 7}, {2, 3, 4}});
  ga_optimizer other = optimizer_;
  other.maximize = !other.maximize;
  Block block = parameters(layout, 11), mirrored = block;
  Context ctx, mirror;
  add_all(ctx, ctx.group(optimizer_), layout, block);
  add_all(mirror, mirror.group(other), layout, mirrored);
  for (uint64_t t = 0; t < 10; ++t) {
    Block g = gradients(layout, 12, t);
    ctx.accumulate(pointers(layout, g));
    for (float& x : g) x = -x;
    mirror.accumulate(pointers(layout, g));
    step(ctx);
    step(mirror);
    ASSERT_TRUE(same_bits(block, mirrored)) << "step " << t + 1;
  }
}

// Torch counts a parameter's own updates, and the other flavors count the context's applied steps.
// Neither counts windows.
TEST_P(Optimizer, StepCountOfARarelyUsedParameter) {
  const Layout layout = Layout::of({{3, 3}, {3, 3}});
  for (const int32_t missing : {GA_MISSING_SKIP, GA_MISSING_ZERO}) {
    ga_config c = config();
    c.missing = missing;
    Block block = parameters(layout, 5);
    Model model(layout, {optimizer_}, c, block);
    Context ctx(c);
    add_all(ctx, ctx.group(optimizer_), layout, block);
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

// Every group of a context has its own formula, options and state.
TEST(Groups, AllOptimizersInOneContext) {
  const auto all = good_optimizers();
  std::vector<ref::Shape> shapes;
  std::vector<ga_optimizer> optimizers;
  for (size_t i = 0; i < all.size(); ++i) {
    const auto n = static_cast<int64_t>(i);
    shapes.push_back(i % 2 == 0 ? ref::Shape{20 + n} : ref::Shape{4, 5 + n});
    optimizers.push_back(all[i].optimizer);
  }
  const Layout layout = Layout::of(shapes);
  Block block = parameters(layout, 7);
  Model model(layout, optimizers, config(), block);
  const ga_clip norm = clip(GA_CLIP_GLOBAL, 3.0);
  Context ctx;
  EXPECT_OK(ga_context_set_clip(ctx, &norm));
  std::vector<ga_group> groups;
  for (const NamedOptimizer& named : all) groups.push_back(ctx.group(named.optimizer));
  for (size_t i = 0; i < layout.size(); ++i) {
    EXPECT_EQ(groups[i], static_cast<ga_group>(i));
    ctx.param(groups[i], all[i].name, block.data() + layout.offsets[i], layout.shapes[i]);
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

// A group that is added after applied steps shares the context's count of steps, with which all
// flavors except torch correct their moments. Torch counts a parameter's own updates. Skipped
// windows do not count.
TEST(Groups, AddedAfterAppliedSteps) {
  const int64_t n = 33;
  const Layout layout({n});
  for (NamedOptimizer each : good_optimizers()) {
    SCOPED_TRACE(each.name);
    ga_optimizer& o = each.optimizer;
    o.max_grad_norm = 0;  // another test covers the norm over groups
    Block first(static_cast<size_t>(n), 1.0f), second = parameters(layout, 3);
    Block bad(static_cast<size_t>(n), NAN);
    Context ctx;
    ctx.param(ctx.group(plain_sgd()), "first", first.data(), n);
    for (uint64_t t = 0; t < 4; ++t) {
      const Block g = even_gradients(layout, 1, t);
      ctx.accumulate({t == 1 ? bad.data() : g.data()});
      EXPECT_EQ(step(ctx).outcome, t == 1 ? GA_STEP_SKIPPED_NONFINITE : GA_STEP_APPLIED);
    }
    float* const p = second.data() + layout.offsets[0];
    ctx.param(ctx.group(o), "second", p, n);
    ref::Tensor tensor;
    tensor.shape = {n};
    tensor.elements.resize(static_cast<size_t>(n));
    for (size_t i = 0; i < tensor.elements.size(); ++i) tensor.elements[i].p = ref::exact(p[i]);
    for (int64_t update = 1; update <= 4; ++update) {
      const Block g = even_gradients(layout, 2, static_cast<uint64_t>(update));
      std::vector<ref::Real> exact;
      for (int64_t i = 0; i < n; ++i) {
        exact.push_back(ref::exact(g[static_cast<size_t>(layout.offsets[0] + i)]));
      }
      ctx.accumulate({g.data(), g.data() + layout.offsets[0]});
      EXPECT_EQ(step(ctx).steps, 3 + update);
      ref::update(o, o.lr, o.flavor == GA_FLAVOR_TORCH ? update : 3 + update, exact, tensor);
      for (size_t i = 0; i < tensor.elements.size(); ++i) {
        ASSERT_TRUE(ref::agrees(p[i], tensor.elements[i].p))
            << "update " << update << ", [" << i << "] is " << p[i] << ", not "
            << tensor.elements[i].p.value;
      }
    }
    ASSERT_TRUE(gaps_untouched(layout, second));
  }
}

TEST(Groups, WeightDecayCanChange) {
  const Layout layout = Layout::of({{50}, {7, 9}});
  for (const NamedOptimizer& named : good_optimizers()) {
    ga_optimizer o = named.optimizer;
    Block block = parameters(layout, 9);
    Context ctx;
    add_all(ctx, ctx.group(o), layout, block);
    // One model whose optimizer changes between steps, because a new model would lose the state.
    Model first(layout, {o}, config(), block);
    for (uint64_t t = 0; t < 10; ++t) {
      const Block g = gradients(layout, 10, t);
      ctx.accumulate(pointers(layout, g));
      step(ctx);
      first.accumulate(g, 1);
      first.step();
      o.weight_decay = 0.02 * static_cast<double>(t % 3);
      EXPECT_OK(ga_group_set_weight_decay(ctx, 0, o.weight_decay));
      for (size_t i = 0; i < layout.size(); ++i) first.set_optimizer(i, o);
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

// ---- Layer by layer -----------------------------------------------------------------------------

// One tensor that is updated with the given gradients.
template <class T = float>
std::vector<T> after(const ga_optimizer& o, std::vector<T> p,
                     const std::vector<std::vector<T>>& gradients, ref::Shape shape = {}) {
  if (shape.empty()) shape = {static_cast<int64_t>(p.size())};
  Context ctx;
  ctx.param(ctx.group(o), "p", p.data(), shape);
  for (const std::vector<T>& g : gradients) {
    ctx.accumulate({g.data()});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  }
  return p;
}

ga_optimizer lamb(double weight_decay, int32_t always_adapt, int32_t flavor = GA_FLAVOR_TORCH) {
  ga_optimizer o = optimizer(GA_OPTIMIZER_LAMB, flavor);
  o.lr = 0.125;
  o.eps = 0;  // the first update is then the sign of the gradient
  o.weight_decay = weight_decay;
  o.always_adapt = always_adapt;
  return o;
}

constexpr double kClose = 16 * ref::kHalfUlp;  // a few roundings of numbers of order 1

TEST(Lamb, RatioOfNorms) {
  const Block p = {3, -4}, g = {0.5f, 2};  // |p| = 5, |u| = sqrt(2)
  const double rate = 0.125 * 5 / std::sqrt(2);
  Block q = after(lamb(0, 1), p, {g});
  EXPECT_NEAR(q[0], 3 - rate, 3 * kClose);
  EXPECT_NEAR(q[1], -4 - rate, 4 * kClose);
  EXPECT_TRUE(same_bits(q, after(lamb(0, 0, GA_FLAVOR_KERAS), p, {g}))) << "Keras always adapts";
  q = after(lamb(0, 0), p, {g});
  EXPECT_NEAR(q[0], 3 - 0.125, 3 * kClose);
  EXPECT_NEAR(q[1], -4 - 0.125, 4 * kClose);
  // u = (1, 1) + p / 2 = (2.5, -1)
  q = after(lamb(0.5, 0), p, {g});
  const double with_decay = 0.125 * 5 / std::sqrt(7.25);
  EXPECT_NEAR(q[0], 3 - with_decay * 2.5, 3 * kClose);
  EXPECT_NEAR(q[1], -4 + with_decay, 4 * kClose);
  // Keras first multiplies p by 1 - 1/16, and u has no decay.
  q = after(lamb(0.5, 0, GA_FLAVOR_KERAS), p, {g});
  EXPECT_NEAR(q[0], 15.0 / 16 * (3 - rate), 3 * kClose);
  EXPECT_NEAR(q[1], 15.0 / 16 * -4 - 15.0 / 16 * rate, 4 * kClose);
}

TEST(Lamb, RatioIsOneBesideZero) {
  for (const int32_t flavor : {GA_FLAVOR_TORCH, GA_FLAVOR_KERAS}) {
    ga_optimizer o = lamb(0, flavor == GA_FLAVOR_TORCH, flavor);
    EXPECT_NEAR(after(o, Block{0, 0}, {{3, -1}})[0], -0.125, kClose);
    EXPECT_NEAR(after(o, Block{0, 0}, {{3, -1}})[1], 0.125, kClose);
    o.eps = 1e-6;  // avoids 0 / 0
    const Block p = {3, 0.1f};
    EXPECT_TRUE(same_bits(after(o, p, {{0, 0}, {0, 0}}), p));
  }
  // With weight decay in the update, u = p / 2 and the ratio is 2.
  ga_optimizer o = lamb(0.5, 0);
  o.eps = 1e-6;
  EXPECT_NEAR(after(o, Block{3, -1}, {{0, 0}})[0], 3 - 0.375, 3 * kClose);
}

// The norm covers all groups of LAMB and no others.
TEST(Lamb, MaxGradNorm) {
  ga_optimizer first = lamb(0.01, 0), second = lamb(0, 1);
  first.eps = second.eps = 1e-3;
  first.max_grad_norm = 1;
  second.max_grad_norm = 0.25;
  const Layout layout({20, 30, 10});
  for (const bool clipped : {false, true}) {
    Block block = parameters(layout, 1);
    Model model(layout, {first, second, plain_sgd(0.01)}, config(), block);
    Context ctx;
    for (const ga_optimizer& o : {first, second, plain_sgd(0.01)}) ctx.group(o);
    const ga_clip value = clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 0.25);
    EXPECT_OK(ga_context_set_clip(ctx, clipped ? &value : nullptr));
    for (size_t i = 0; i < layout.size(); ++i) {
      ctx.param(static_cast<ga_group>(i), std::to_string(i), block.data() + layout.offsets[i],
                layout.counts[i]);
    }
    for (uint64_t t = 0; t < 20; ++t) {
      Block g = even_gradients(layout, 2, t);
      for (float& x : g) x *= t % 3 == 0 ? 4 : 0.01f;
      ctx.accumulate(pointers(layout, g));
      EXPECT_EQ(step(ctx).clip_factor, 1) << "it is the optimizer's, not the clip's";
      model.accumulate(g, 1);
      model.step(NAN, clipped ? &value : nullptr);
      ASSERT_TRUE(model.matches(block)) << "step " << t + 1;
    }
  }
}

ga_optimizer lars(double weight_decay, int32_t always_adapt) {
  ga_optimizer o = optimizer(GA_OPTIMIZER_LARS);
  o.lr = 0.125;
  o.weight_decay = weight_decay;
  o.always_adapt = always_adapt;
  o.trust_coefficient = 0.5;
  o.eps = 0;
  return o;
}

TEST(Lars, RatioOfNorms) {
  const Block p = {3, -4}, g = {0, 2};
  EXPECT_NEAR(after(lars(0, 0), p, {g})[1], -4.25, 4 * kClose) << "SGD";
  EXPECT_NEAR(after(lars(0, 1), p, {g})[1], -4 - 0.25 * (0.5 * 5 / 2), 4 * kClose);
  const double ratio = 0.5 * 5 / (2 + 0.5 * 5);
  const Block q = after(lars(0.5, 0), p, {g});
  EXPECT_NEAR(q[0], 3 - 0.125 * ratio * 1.5, 3 * kClose);
  EXPECT_NEAR(q[1], -4 - 0.125 * ratio * 0, 4 * kClose);
}

TEST(Lars, RatioIsOneBesideZero) {
  EXPECT_EQ(after(lars(0.5, 0), Block{0, 0}, {{2, -4}})[1], 0.5);
  EXPECT_EQ(after(lars(0, 1), Block{0, 0}, {{2, -4}})[0], -0.25);
  const Block q = after(lars(0.5, 1), Block{4, -8}, {{0, 0}});
  EXPECT_EQ(q[0], 3.75);
  EXPECT_EQ(q[1], -7.5);
}

// The first update is the gradient's direction times min(lr, 1) max(eps2, rms p), its rms cut to 1.
TEST(Adafactor, FirstStep) {
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADAFACTOR);
  o.lr = 0.5;
  o.eps = 0;
  EXPECT_NEAR(after(o, Block{2}, {{-3}}, {1})[0], 2 + 0.5 * 2, 2 * kClose);
  const Block q = after(o, Block{3, -4}, {{5, -0.5f}});
  const double rate = 0.5 * std::sqrt(12.5);
  EXPECT_NEAR(q[0], 3 - rate, 3 * kClose);
  EXPECT_NEAR(q[1], -4 + rate, 4 * kClose);
  // The factors represent an outer product exactly.
  const Block matrix = after(o, Block{1, 1, 1, 1, 1, 1}, {{1, 2, -4, 3, -6, 12}}, {2, 3});
  const Block want = {0.5f, 0.5f, 1.5f, 0.5f, 1.5f, 0.5f};
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(matrix[i], want[i], 2 * kClose);
}

TEST(Adafactor, ScalarsOfRankZero) {
  const Layout layout = Layout::of({{}});
  for (const NamedOptimizer& named : good_optimizers()) {
    if (named.optimizer.kind != GA_OPTIMIZER_ADAFACTOR) continue;
    follow<float>(named.optimizer, layout, even_gradients<float>, 50);
    follow<double>(named.optimizer, layout, even_gradients<double>, 50);
  }
}

// A tensor of higher rank has a row and a column vector for each of its matrices.
TEST(Adafactor, KeepsNoFullSecondMoment) {
  const auto state = [](const ref::Shape& shape) {
    std::vector<float> p(static_cast<size_t>(ref::count_of(shape)));
    Context ctx;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAFACTOR)), "p", p.data(), shape);
    return memory(ctx).optimizer_state;
  };
  // Each vector takes whole cache lines, and the tensor one more.
  const auto expect = [&](const ref::Shape& shape, int64_t numbers) {
    EXPECT_GE(state(shape), 4 * numbers);
    EXPECT_LE(state(shape), 4 * numbers + 3 * 64);
  };
  expect({512, 256}, 512 + 256);
  expect({3, 64, 100}, 3 * (64 + 100));
  expect({2, 3, 8, 16}, 6 * (8 + 16));
  expect({1000}, 1000);
  expect({}, 1);
}

// A variance that rounding makes slightly negative must not become a NaN.
TEST(Rmsprop, CenteredWithAConstantGradient) {
  for (const int32_t flavor : {GA_FLAVOR_TORCH, GA_FLAVOR_KERAS}) {
    ga_optimizer o = optimizer(GA_OPTIMIZER_RMSPROP, flavor);
    o.centered = 1;
    o.rho = 0.5;
    Block p(64), g(64);
    Random random(3);
    for (float& x : g) x = static_cast<float>(random.signed_unit());
    Context ctx;
    ctx.param(ctx.group(o), "p", p.data(), 64);
    for (int t = 0; t < 100; ++t) {
      ctx.accumulate({g.data()});
      step(ctx);
    }
    for (const float x : p) EXPECT_TRUE(std::isfinite(x));
  }
}

// Liu et al. 2020: with beta2 = 0.999 the moving average is long enough from the sixth step on.
// Until then RAdam is momentum without adaptive scaling.
TEST(Radam, AdaptsFromTheSixthStepOn) {
  ga_optimizer o = optimizer(GA_OPTIMIZER_RADAM);
  o.lr = 1;
  float p = 0;
  const float g = 0.25;
  Context ctx;
  ctx.param(ctx.group(o), "p", &p, 1);
  for (int t = 1; t <= 6; ++t) {
    p = 0;
    ctx.accumulate({&g});
    step(ctx);
    if (t <= 5) {
      EXPECT_NEAR(p, -0.25, kClose) << "step " << t;
    } else {
      EXPECT_GT(std::abs(p + 0.25), 0.1) << "step " << t;
    }
  }
}

// ---- Muon ---------------------------------------------------------------------------------------

class Muon : public testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    has_onednn();  // whose products are used if it is there
  }
  const ga_optimizer optimizer_ = matrix_optimizers()[GetParam()].optimizer;
};

INSTANTIATE_TEST_SUITE_P(All, Muon, testing::Range<size_t>(0, matrix_optimizers().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return matrix_optimizers()[info.param].name;
                         });

Layout matrices() {
  return Layout::of({{24, 16}, {16, 24}, {17, 33}, {1, 1}, {1, 9}, {9, 1}, {5, 5}, {0, 4}, {4, 0}});
}

TEST_P(Muon, FollowsFloat64) {
  // The tolerance of the iteration is a fiftieth of its result, see FirstStepIsSharp.
  follow<float>(optimizer_, matrices(), even_gradients<float>, 40, 0.1, 0.02);
  // Which way elements go that hardly move, and so whether they decay, float64 does not tell.
  if (!optimizer_.cautious)
    follow<float>(optimizer_, matrices(), gradients<float>, 40, kMostVague, 0.02);
}

// The tolerance is small compared with the movement of the first step.
TEST_P(Muon, FirstStepIsSharp) {
  const Layout layout = matrices();
  const Block start = parameters(layout, 1);
  Block block = start;
  Model model(layout, {optimizer_}, config(), block);
  Context ctx;
  add_all(ctx, ctx.group(optimizer_), layout, block);
  const Block g = even_gradients(layout, 2, 0);
  ctx.accumulate(pointers(layout, g));
  step(ctx);
  model.accumulate(g, 1);
  model.step();
  EXPECT_TRUE(model.matches(block));
  for (size_t i = 0; i < layout.size(); ++i) {
    double squares = 0;
    for (int64_t j = layout.offsets[i]; j < layout.offsets[i] + layout.counts[i]; ++j) {
      const auto at = static_cast<size_t>(j);
      squares += (double{block[at]} - start[at]) * (double{block[at]} - start[at]);
    }
    EXPECT_LE(model.tensor(i).spread, 0.02 * std::sqrt(squares)) << "tensor " << i;
  }
}

// With a zero gradient, only weight decay moves the parameters.
TEST_P(Muon, ZeroGradient) {
  Block p(12, 1);
  Context ctx;
  ctx.param(ctx.group(optimizer_), "p", p.data(), {3, 4});
  const Block g(12, 0);
  ctx.accumulate({g.data()});
  step(ctx);
  for (const float x : p) {
    EXPECT_NEAR(x, 1 - optimizer_.lr * optimizer_.weight_decay, 2 * ref::kHalfUlp);
  }
}

// Micro-batches are added before the iteration, which is not linear.
TEST_P(Muon, WindowIsOneBatch) {
  const Layout layout = matrices();
  Block block = parameters(layout, 3);
  Model model(layout, {optimizer_}, config(), block);
  Context ctx;
  add_all(ctx, ctx.group(optimizer_), layout, block);
  for (uint64_t t = 0; t < 6; ++t) {
    for (uint64_t k = 0; k < 3; ++k) {
      const Block g = even_gradients(layout, 4, 3 * t + k);
      ctx.accumulate(pointers(layout, g), static_cast<double>(k + 1));
      model.accumulate(g, static_cast<double>(k + 1));
    }
    step(ctx);
    model.step();
    ASSERT_TRUE(model.matches(block)) << "step " << t + 1;
  }
}

TEST_P(Muon, BesideAdamW) {
  const Layout layout = Layout::of({{12, 20}, {20}});
  const ga_optimizer adamw = optimizer(GA_OPTIMIZER_ADAMW);
  Block block = parameters(layout, 5);
  Model model(layout, {optimizer_, adamw}, config(), block);
  Context ctx;
  ctx.param(ctx.group(optimizer_), "w", block.data() + layout.offsets[0], layout.shapes[0]);
  ctx.param(ctx.group(adamw), "b", block.data() + layout.offsets[1], layout.shapes[1]);
  const ga_clip norm = clip(GA_CLIP_GLOBAL, 1);
  EXPECT_OK(ga_context_set_clip(ctx, &norm));
  for (uint64_t t = 0; t < 20; ++t) {
    const Block g = even_gradients(layout, 6, t);
    ctx.accumulate(pointers(layout, g));
    step(ctx);
    model.accumulate(g, 1);
    model.step(NAN, &norm);
    ASSERT_TRUE(model.matches(block)) << "step " << t + 1;
  }
}

TEST_P(Muon, TakesMatricesOfFloat32) {
  Context ctx;
  const ga_group group = ctx.group(optimizer_);
  float p[8] = {};
  double q[8] = {};
  const auto refused = [&](void* data, int32_t dtype, const ref::Shape& shape, const char* word) {
    ga_param out = -7;
    EXPECT_EQ(ga_param_add(ctx, group, "name", data, dtype, static_cast<int32_t>(shape.size()),
                           shape.data(), nullptr, &out),
              GA_ERROR_UNSUPPORTED);
    EXPECT_EQ(out, -7);
    const std::string text = ga_last_error();
    EXPECT_NE(text.find("name"), std::string::npos) << text;
    EXPECT_NE(text.find(word), std::string::npos) << text;
  };
  refused(p, GA_F32, {}, "rank");
  refused(p, GA_F32, {8}, "rank");
  refused(p, GA_F32, {2, 2, 2}, "rank");
  refused(q, GA_F64, {2, 4}, "f64");
  EXPECT_EQ(ctx.param(group, "name", p, {2, 4}), 0);
}

// Without its module, the library multiplies by itself.
void step_without_module() {
  setenv("GA_MODULE_PATH", "/nonexistent", 1);
  ga_context* ctx = nullptr;
  const ga_config c = config();
  ga_context_create(&c, &ctx);
  const ga_optimizer o = optimizer(GA_OPTIMIZER_MUON);
  float p[4] = {1, 2, 3, 4};
  const float g[4] = {1, 1, -1, 1};
  const void* list[] = {g};
  const int64_t shape[] = {2, 2};
  ga_status status = ga_group_add(ctx, &o, nullptr);
  if (status == GA_OK) {
    status = ga_param_add(ctx, 0, "p", p, GA_F32, 2, shape, nullptr, nullptr);
  }
  if (status == GA_OK) status = ga_accumulate(ctx, list, 1, 1, nullptr);
  if (status == GA_OK) status = ga_step(ctx, nullptr);
  fprintf(stderr, "%s: %s; p is %g", ga_status_name(status), ga_last_error(),
          static_cast<double>(p[0]));
  ga_context_destroy(ctx);
  exit(0);
}

TEST(MuonDeathTest, WithoutItsModule) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // the child has not opened the module
  EXPECT_EXIT(step_without_module(), testing::ExitedWithCode(0), "GA_OK: ; p is 0\\.99");
}

// ---- State of 16 bits ---------------------------------------------------------------------------

ga_optimizer with_bf16_state(ga_optimizer o) {
  o.state_dtype = GA_BF16;
  return o;
}

// With beta2 = 0.999 a step of decay is less than half an ulp of bf16: rounded to nearest, v would
// never change. The test reads v from the step that a small gradient then makes.
TEST(StateOfBf16, SecondMomentDecays) {
  const size_t n = 4096;
  const double small = 0x1p-14;
  for (const int32_t kind : {GA_OPTIMIZER_RMSPROP, GA_OPTIMIZER_ADAM, GA_OPTIMIZER_ADAMW}) {
    ga_optimizer o = with_bf16_state(optimizer(kind));
    o.lr = 1;
    o.weight_decay = 0;
    o.rho = o.beta2 = 0.999;
    o.eps = 0x1p-100;
    Block p(n), g(n, 1);
    Context ctx;
    ctx.param(ctx.group(o), "p", p.data(), static_cast<int64_t>(n));
    for (int t = 0; t <= 2001; ++t) {
      if (t == 1) std::fill(g.begin(), g.end(), 0.0f);
      if (t == 2001) {
        std::fill(g.begin(), g.end(), static_cast<float>(small));
        std::fill(p.begin(), p.end(), 0.0f);
      }
      ctx.accumulate({g.data()});
      step(ctx);
    }
    // p = -m / sqrt(v), with bias correction if the flavor has one. m no longer depends on the
    // first step.
    const double m = kind == GA_OPTIMIZER_RMSPROP ? small : (1 - o.beta1) * small;
    const double correction = kind == GA_OPTIMIZER_RMSPROP ? 1 : 1 - std::pow(o.beta2, 2002);
    double v = 0;
    for (const float x : p) v += correction * (m / x) * (m / x) / n;
    const double want = std::pow(0.999, 2001) * 0.001 + 0.001 * small * small;
    EXPECT_NEAR(v, want, 0.05 * want) << "optimizer " << kind;
  }
}

class Bf16State : public Optimizer {};
INSTANTIATE_TEST_SUITE_P(All, Bf16State, testing::Range<size_t>(0, good_optimizers().size()),
                         optimizer_name);

// Equal elements are rounded stochastically and independently. Their mean must be the result of f32
// state, within five standard deviations and the bias from the curvature of 1 / sqrt(v): each of 30
// steps rounds v with a variance of at most (2^-7 v)^2 / 4, and 3/8 of the sum is added to the
// update, 2^-12. The bias is fourfold for Adadelta, whose updates are fed back. A maximum stays
// where it was rounded up, by 2^-7 at most.
TEST_P(Bf16State, LeadsToTheSamePlaceOnAverage) {
  if (!row_of(optimizer_).bf16_state) return;
  const size_t n = 4096;
  Block p(n, 0.5f), q(n, 0.5f);
  Context ctx, exact;
  ctx.param(ctx.group(with_bf16_state(optimizer_)), "p", p.data(), static_cast<int64_t>(n));
  exact.param(exact.group(optimizer_), "p", q.data(), static_cast<int64_t>(n));
  EXPECT_EQ(2 * memory(ctx).optimizer_state, memory(exact).optimizer_state);
  double distance = 0;
  for (int t = 0; t < 30; ++t) {
    const Block g(n, static_cast<float>(0.5 + 0.3 * std::sin(t)));
    const double before = q[0];
    ctx.accumulate({g.data()});
    exact.accumulate({g.data()});
    step(ctx);
    step(exact);
    distance += std::abs(q[0] - before);
  }
  double mean = 0, squares = 0;
  for (const float x : p) mean += x / static_cast<double>(n);
  for (const float x : p) squares += (x - mean) * (x - mean);
  const double deviation = std::sqrt(squares) / static_cast<double>(n);  // of the mean
  const bool maximum = optimizer_.amsgrad || optimizer_.kind == GA_OPTIMIZER_ADAMAX;
  EXPECT_NEAR(mean, q[0],
              5 * deviation + (maximum ? 0x1p-7 : 0x1p-10) * distance + 60 * ref::kHalfUlp);
  EXPECT_LT(deviation, 1e-2 * distance);
  if (memory(exact).optimizer_state > 0 && !row_of(optimizer_).by_sign) {
    EXPECT_GT(deviation, 0) << "all were rounded alike";
  }
}

TEST_P(Bf16State, SameSeedSameBits) {
  if (!row_of(optimizer_).bf16_state) return;
  const Layout layout = Layout::of({{1023}, {17, 33}});
  int64_t state = 0;
  const auto run = [&](uint64_t seed, int32_t threads) {
    ga_config c = config();
    c.seed = seed;
    c.num_threads = threads;
    Block block = parameters(layout, 1);
    Context ctx(c);
    add_all(ctx, ctx.group(with_bf16_state(optimizer_)), layout, block);
    state = memory(ctx).optimizer_state;
    for (uint64_t t = 0; t < 10; ++t) {
      const Block g = even_gradients(layout, 2, t);
      ctx.accumulate(pointers(layout, g));
      step(ctx);
    }
    return block;
  };
  const Block first = run(7, 1);
  EXPECT_TRUE(same_bits(first, run(7, 1)));
  EXPECT_TRUE(same_bits(first, run(7, 3)));
  if (state > 0 && !row_of(optimizer_).by_sign) {
    EXPECT_FALSE(same_bits(first, run(8, 1)));
  }
}

TEST(StateOfBf16, RefusedWhereItDoesNotGo) {
  Context ctx;
  for (const OptimizerRow& row : optimizer_rows()) {
    if (row.bf16_state) continue;
    const ga_optimizer o = with_bf16_state(optimizer(row.kind));
    EXPECT_EQ(ga_group_add(ctx, &o, nullptr), GA_ERROR_UNSUPPORTED);
    const std::string text = ga_last_error();
    EXPECT_NE(text.find("state_dtype"), std::string::npos) << text;
    EXPECT_NE(text.find(row.name), std::string::npos) << text;
  }
  const ga_group group = ctx.group(with_bf16_state(optimizer(GA_OPTIMIZER_ADAMW)));
  double p = 0;
  EXPECT_EQ(ga_param_add(ctx, group, "name", &p, GA_F64, 0, nullptr, nullptr, nullptr),
            GA_ERROR_UNSUPPORTED);
  const std::string text = ga_last_error();
  EXPECT_NE(text.find("name"), std::string::npos) << text;
  EXPECT_NE(text.find("state_dtype"), std::string::npos) << text;
}

// ---- Defaults -----------------------------------------------------------------------------------

TEST(Defaults, OfEachFramework) {
  using O = ga_optimizer;
  const OptimizerField zeros[] = {{"weight_decay", &O::weight_decay, 0.0},
                                  {"momentum", &O::momentum, 0.0},
                                  {"dampening", &O::dampening, 0.0},
                                  {"lr_decay", &O::lr_decay, 0.0},
                                  {"nesterov", &O::nesterov, 0},
                                  {"amsgrad", &O::amsgrad, 0},
                                  {"maximize", &O::maximize, 0},
                                  {"state_dtype", &O::state_dtype, 0},
                                  {"centered", &O::centered, 0},
                                  {"decoupled", &O::decoupled, 0},
                                  {"always_adapt", &O::always_adapt, 0},
                                  {"adjust_lr", &O::adjust_lr, 0},
                                  {"clip_exponent", &O::clip_exponent, 0.0},
                                  {"reserved", &O::reserved, 0},
                                  {"ns_precision", &O::ns_precision, 0},
                                  {"reserved2", &O::reserved2, 0},
                                  {"ns_rows", &O::ns_rows, 0},
                                  {"ns_preset", &O::ns_preset, 0},
                                  {"cautious", &O::cautious, 0},
                                  {"equilibrate", &O::equilibrate, 0}};
  for (const OptimizerRow& row : optimizer_rows()) {
    for (const OptimizerRow::Defaults& defaults : row.defaults) {
      SCOPED_TRACE(testing::Message() << row.name << ", flavor " << defaults.flavor);
      ga_optimizer o;
      memset(&o, 0xee, sizeof o);
      ASSERT_OK(ga_optimizer_init(&o, sizeof o, row.kind, defaults.flavor));
      EXPECT_EQ(o.struct_size, sizeof o);
      EXPECT_EQ(o.kind, row.kind);
      EXPECT_EQ(o.flavor, defaults.flavor);
      std::set<std::string> named;
      for (const OptimizerField& field : defaults.fields) {
        EXPECT_EQ(field.of(o), field.value) << field.name;
        named.insert(field.name);
      }
      for (const OptimizerField& field : zeros) {
        if (named.count(field.name) == 0) {
          EXPECT_EQ(field.of(o), 0) << field.name;
        }
      }
      EXPECT_TRUE(std::isfinite(o.lr) && o.lr >= 0);
      if (row.matrices_only && !has_onednn()) continue;
      Context ctx;
      EXPECT_EQ(ctx.group(o), 0);
    }
  }
}

// timm's Adopt, from its definition, for one number in float64. decay: decoupled.
std::vector<double> timms_adopt(double p, const std::vector<double>& gradients, double lr,
                                double beta1, double beta2, double eps, double decay,
                                double clip_exp) {
  std::vector<double> path;
  double m = 0, v = 0;
  for (size_t step = 0; step < gradients.size(); ++step) {
    const double g = gradients[step];
    if (step == 0) {
      v = g * g;
    } else {
      const double clip_value = std::pow(static_cast<double>(step), clip_exp);
      const double normed = g / std::max(std::sqrt(v), eps);
      p *= 1 - lr * decay;
      m = beta1 * m + (1 - beta1) * std::min(std::max(normed, -clip_value), clip_value);
      p -= lr * m;
      v = beta2 * v + (1 - beta2) * g * g;
    }
    path.push_back(p);
  }
  return path;
}

TEST(Adopt, ClipExponentIsThatOfTimm) {
  // The first gradient is small: all others are clipped.
  const std::vector<double> gradients = {1e-3, 2, -0.5, 3, 1, 4, 0.25, 1, -2, 5, 2, 1};
  double at_quarter = 0;
  for (const double exponent : {0.25, 0.333, 0.0, 1.5}) {
    SCOPED_TRACE(exponent);
    ga_optimizer o = optimizer(GA_OPTIMIZER_ADOPT);
    o.lr = 0.125;
    o.beta2 = 0.99;
    o.decoupled = 1;
    o.weight_decay = 0.1;
    o.clip_exponent = exponent;
    double p = 2;
    Context ctx;
    ctx.param(ctx.group(o), "p", &p, ref::Shape{1});
    const std::vector<double> want =
        timms_adopt(p, gradients, o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, exponent);
    for (size_t t = 0; t < gradients.size(); ++t) {
      ctx.accumulate({&gradients[t]});
      step(ctx);
      EXPECT_NEAR(p, want[t], 1e-14) << t;
    }
    if (exponent == 0.25)
      at_quarter = p;
    else
      EXPECT_GT(std::abs(p - at_quarter), 1e-2) << "the exponent made no difference";
  }
}

// Programs that were compiled without the field, and those that leave it as it is.
TEST(Adopt, AnOlderStructMeansOneQuarter) {
  const Block start = {2, -1};
  const std::vector<Block> gradients = {{1e-3f, 1}, {2, 1}, {1, -3}, {3, 2}};
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADOPT);
  EXPECT_EQ(o.clip_exponent, 0.25);
  const Block want = after(o, start, gradients);
  ga_optimizer older;
  memset(&older, 0x55, sizeof older);
  ASSERT_OK(ga_optimizer_init(&older, offsetof(ga_optimizer, clip_exponent), GA_OPTIMIZER_ADOPT,
                              GA_FLAVOR_TORCH));
  EXPECT_NE(older.clip_exponent, 0.25) << "written behind the caller's struct";
  EXPECT_TRUE(same_bits(after(older, start, gradients), want));
  o.clip_exponent = 0.333;
  EXPECT_FALSE(same_bits(after(o, start, gradients), want));
}

TEST(Muon, DefaultCoefficients) {
  const ga_optimizer o = optimizer(GA_OPTIMIZER_MUON);
  EXPECT_EQ(o.ns_coefficients[0], 3.4445);
  EXPECT_EQ(o.ns_coefficients[1], -4.775);
  EXPECT_EQ(o.ns_coefficients[2], 2.0315);
}

// ---- Wrong hyper-parameters ---------------------------------------------------------------------

// Options that every optimizer refuses. Unless the words say otherwise, the number is outside of
// the range that the header gives.
std::vector<OptimizerRow::Bad> refused_by_all() {
  using O = ga_optimizer&;
  const ga_status invalid = GA_ERROR_INVALID_ARGUMENT;
  const int32_t torch = GA_FLAVOR_TORCH;
  return {{torch, {"lr", "-1"}, [](O o) { o.lr = -1; }, invalid},
          {torch, {"lr", "nan"}, [](O o) { o.lr = NAN; }, invalid},
          {torch, {"lr", "inf"}, [](O o) { o.lr = INFINITY; }, invalid},
          {torch, {"weight_decay", "-0.5"}, [](O o) { o.weight_decay = -0.5; }, invalid},
          {torch, {"weight_decay", "nan"}, [](O o) { o.weight_decay = NAN; }, invalid},
          {torch, {"weight_decay", "inf"}, [](O o) { o.weight_decay = INFINITY; }, invalid},
          {torch, {"maximize", "3"}, [](O o) { o.maximize = 3; }, invalid},
          {torch, {"state_dtype"}, [](O o) { o.state_dtype = GA_I32; }, invalid},
          {torch, {"state_dtype", "99"}, [](O o) { o.state_dtype = 99; }, invalid},
          {torch, {"kind", "99"}, [](O o) { o.kind = 99; }, invalid},
          {torch, {"kind", "-1"}, [](O o) { o.kind = -1; }, invalid},
          {torch, {"flavor", "7"}, [](O o) { o.flavor = 7; }, invalid}};
}

TEST(BadOptimizers, StatusMessageAndNothingChanged) {
  Block p = {1, 2}, twin_p = p;
  Context ctx, twin;
  ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), "p", p.data(), 2);
  twin.param(twin.group(optimizer(GA_OPTIMIZER_ADAMW)), "p", twin_p.data(), 2);
  for (const OptimizerRow& row : optimizer_rows()) {
    std::vector<OptimizerRow::Bad> list = refused_by_all();
    list.insert(list.end(), row.bad.begin(), row.bad.end());
    for (const OptimizerRow::Bad& bad : list) {
      SCOPED_TRACE(std::string(row.name) + ", " + bad.words[0]);
      ga_optimizer o = optimizer(row.kind, bad.flavor);
      bad.set(o);
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

// ---- Options of one optimizer beside another ----------------------------------------------------

TEST(Groups, MaxGradNormIsLambsAlone) {
  float results[2];
  for (const bool also_elsewhere : {false, true}) {
    Context ctx;
    ga_optimizer lamb = optimizer(GA_OPTIMIZER_LAMB), sgd = plain_sgd(0.1);
    lamb.eps = 1e-3;
    if (also_elsewhere) sgd.max_grad_norm = 1;
    Block a(4, 1.0f), b(4, 1.0f), g(4, 3.0f), h(4, 100.0f);
    ctx.param(ctx.group(lamb), "a", a.data(), 4);
    ctx.param(ctx.group(sgd), "b", b.data(), 4);
    ctx.accumulate({g.data(), h.data()});
    step(ctx);
    EXPECT_EQ(b[0], -9.0f) << "1 - 0.1 * 100";
    results[also_elsewhere] = a[0];
  }
  EXPECT_EQ(results[0], results[1]);
}

// Muon copies matrices in smaller pieces than the passes use.
TEST(Muon, OnTheProgramsThreads) {
  has_onednn();  // whose products are used if it is there
  Block results[2];
  for (const bool own : {false, true}) {
    ga_config c = config();
    if (own) {
      c.num_threads = 1;
      c.parallel_for = [](void*, int64_t count, ga_task task, void* data) {
        for (int64_t i = count; i-- > 0;) task(data, i);
      };
    }
    Context ctx(c);
    const int64_t shape[] = {512, 384};
    Block p(512 * 384, 0.0f), g(p.size());
    Random random(3);
    for (float& x : g) x = static_cast<float>(random.signed_unit());
    EXPECT_OK(ga_param_add(ctx, ctx.group(optimizer(GA_OPTIMIZER_MUON)), "p", p.data(), GA_F32, 2,
                           shape, nullptr, nullptr));
    ctx.accumulate({g.data()});
    step(ctx);
    results[own] = p;
  }
  EXPECT_TRUE(same_bits(results[0], results[1])) << "one thread each, so cut alike";
}

TEST(Adafactor, MemoryIsReportedBeforeAllocation) {
  Context ctx;
  const int64_t shape[] = {3, 700, 300};
  Block p(3 * 700 * 300, 1.0f), g(p.size(), 1.0f);
  EXPECT_OK(ga_param_add(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAFACTOR)), "p", p.data(), GA_F32,
                         3, shape, nullptr, nullptr));
  const ga_memory before = memory(ctx);
  ctx.accumulate({g.data()});
  EXPECT_EQ(memory(ctx).total, before.total);
}

}  // namespace
}  // namespace ga::test
