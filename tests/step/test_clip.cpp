// SPDX-License-Identifier: Apache-2.0
//
// Clipping of the reduced gradient, its norm, and the gradient that an external optimizer sees.
#include "support.hpp"

namespace ga::test {
namespace {

// Parameters at 0 that plain SGD with lr 1 moves by minus the clipped gradient.
class Probe {
 public:
  explicit Probe(std::vector<Block> gradients, const ga_config& c = config())
      : ctx(c), gradients_(std::move(gradients)) {
    ctx.group(plain_sgd());
    for (size_t i = 0; i < gradients_.size(); ++i) {
      blocks_.emplace_back(gradients_[i].size(), 0.0f);
      ctx.param(0, std::to_string(i), blocks_[i].data(), size_of(i));
    }
  }

  void accumulate(double weight = 1) {
    std::vector<const void*> list;
    for (const Block& g : gradients_) list.push_back(g.data());
    ctx.accumulate(list, weight);
  }

  ga_step_result run(const ga_clip& c, double weight = 1) {
    for (Block& block : blocks_) std::fill(block.begin(), block.end(), 0.0f);
    EXPECT_OK(ga_context_set_clip(ctx, &c));
    accumulate(weight);
    return step(ctx);
  }

  float gradient(size_t i, size_t j = 0) const { return -blocks_[i][j]; }

  Context ctx;

 private:
  int64_t size_of(size_t i) const { return static_cast<int64_t>(gradients_[i].size()); }
  std::vector<Block> gradients_;
  std::vector<Block> blocks_;
};

TEST(Clip, TorchsDefinition) {
  Probe probe({Block{3}, Block{4}});
  ga_step_result r = probe.run(clip(GA_CLIP_GLOBAL, 2.5));
  EXPECT_DOUBLE_EQ(r.norm, 5);
  EXPECT_DOUBLE_EQ(r.clip_factor, 2.5 / (5 + 1e-6));
  EXPECT_FLOAT_EQ(probe.gradient(0), static_cast<float>(3 * 2.5 / (5 + 1e-6)));
  EXPECT_FLOAT_EQ(probe.gradient(1), static_cast<float>(4 * 2.5 / (5 + 1e-6)));
  r = probe.run(clip(GA_CLIP_GLOBAL, 5));  // a norm of exactly C is scaled slightly
  EXPECT_DOUBLE_EQ(r.clip_factor, 5 / (5 + 1e-6));
  r = probe.run(clip(GA_CLIP_GLOBAL, 100));
  EXPECT_EQ(r.clip_factor, 1);
  EXPECT_EQ(probe.gradient(0), 3);
}

TEST(Clip, TensorFlowsDefinition) {
  Probe probe({Block{3}, Block{4}});
  ga_step_result r = probe.run(clip(GA_CLIP_GLOBAL, 2.5, GA_FLAVOR_KERAS));
  EXPECT_DOUBLE_EQ(r.clip_factor, 0.5);
  EXPECT_EQ(probe.gradient(0), 1.5);
  EXPECT_EQ(probe.gradient(1), 2);
  r = probe.run(clip(GA_CLIP_GLOBAL, 5, GA_FLAVOR_KERAS));
  EXPECT_EQ(r.clip_factor, 1);
  EXPECT_EQ(probe.gradient(1), 4);
}

TEST(Clip, ToZero) {
  for (const int32_t flavor : {GA_FLAVOR_TORCH, GA_FLAVOR_KERAS}) {
    for (const int32_t scope : {GA_CLIP_GLOBAL, GA_CLIP_PER_TENSOR}) {
      Probe probe({Block{3}, Block{0, 0}});
      const ga_step_result r = probe.run(clip(scope, 0, flavor));
      EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
      EXPECT_EQ(r.clip_factor, 0);
      EXPECT_EQ(probe.gradient(0), 0);
      EXPECT_EQ(probe.gradient(1), 0) << "0/0";
    }
  }
}

TEST(Clip, AGradientOfZeroStaysZero) {
  for (const int32_t flavor : {GA_FLAVOR_TORCH, GA_FLAVOR_KERAS}) {
    for (const double max_norm : {0.0, 1.0}) {
      Probe probe({Block{0, 0}, Block{0}});
      const ga_step_result r = probe.run(clip(GA_CLIP_GLOBAL, max_norm, flavor));
      EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
      EXPECT_EQ(r.norm, 0);
      EXPECT_FALSE(std::isnan(r.clip_factor));
      EXPECT_EQ(probe.gradient(0), 0);
    }
  }
}

TEST(Clip, PerTensor) {
  Probe probe({Block{3, 4}, Block{0.3f, 0.4f}, Block{-20}});
  const ga_step_result r = probe.run(clip(GA_CLIP_PER_TENSOR, 1, GA_FLAVOR_KERAS));
  EXPECT_NEAR(r.norm, std::sqrt(25 + 0.25 + 400), 1e-6);
  EXPECT_DOUBLE_EQ(r.clip_factor, 0.05);  // the smallest
  EXPECT_FLOAT_EQ(probe.gradient(0, 0), 0.6f);
  EXPECT_FLOAT_EQ(probe.gradient(0, 1), 0.8f);
  EXPECT_EQ(probe.gradient(1, 0), 0.3f);
  EXPECT_EQ(probe.gradient(2), -1);
}

TEST(Clip, ByValue) {
  Probe probe({Block{-3, 0.25f, 1}, Block{7}});
  const ga_step_result r = probe.run(clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 0.5));
  EXPECT_DOUBLE_EQ(r.norm, std::sqrt(9 + 0.0625 + 1 + 49));  // before clipping
  EXPECT_EQ(r.clip_factor, 1);
  EXPECT_EQ(probe.gradient(0, 0), -0.5);
  EXPECT_EQ(probe.gradient(0, 1), 0.25);
  EXPECT_EQ(probe.gradient(0, 2), 0.5);
  EXPECT_EQ(probe.gradient(1), 0.5);
}

TEST(Clip, ByValueThenByNorm) {
  for (const int32_t scope : {GA_CLIP_GLOBAL, GA_CLIP_PER_TENSOR}) {
    Probe probe({Block{-30, 4}, Block{0, 0}});
    const ga_step_result r = probe.run(clip(scope, 2.5, GA_FLAVOR_KERAS, 3));  // (-3, 3)
    const double factor = 2.5 / std::sqrt(18.0);
    EXPECT_DOUBLE_EQ(r.norm, std::sqrt(916.0));
    EXPECT_NEAR(r.clip_factor, factor, 1e-12);
    EXPECT_FLOAT_EQ(probe.gradient(0, 0), static_cast<float>(-3 * factor));
    EXPECT_FLOAT_EQ(probe.gradient(0, 1), static_cast<float>(3 * factor));
  }
}

// Clipping by value sees the gradient that the optimizer would see: averaged and unscaled.
TEST(Clip, SeesTheReducedUnscaledGradient) {
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = config();
    c.loss_scale = 1024;
    c.gradient_life = life;
    Probe probe({Block{3 * 1024}, Block{4 * 1024}}, c);
    ga_clip norm = clip(GA_CLIP_GLOBAL, 5, GA_FLAVOR_KERAS);
    EXPECT_OK(ga_context_set_clip(probe.ctx, &norm));
    // Two micro-batches would alias in LIVE mode, so one of weight 7.
    ga_step_result r = probe.run(norm, 7);
    EXPECT_DOUBLE_EQ(r.norm, 5);
    EXPECT_EQ(r.clip_factor, 1);
    EXPECT_EQ(r.loss_scale, 1024);
    EXPECT_FLOAT_EQ(probe.gradient(0), 3);
    r = probe.run(clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 3.5), 7);
    EXPECT_FLOAT_EQ(probe.gradient(0), 3);
    EXPECT_FLOAT_EQ(probe.gradient(1), 3.5);
  }
}

TEST(Clip, ComparesTheMeanNotTheSum) {
  Probe probe({Block{3}, Block{4}});
  const ga_clip norm = clip(GA_CLIP_GLOBAL, 5, GA_FLAVOR_KERAS);
  EXPECT_OK(ga_context_set_clip(probe.ctx, &norm));
  for (int k = 0; k < 8; ++k) probe.accumulate();
  const ga_step_result r = step(probe.ctx);
  EXPECT_DOUBLE_EQ(r.norm, 5);
  EXPECT_EQ(r.clip_factor, 1);
}

TEST(Clip, GroupsOfTheirOwn) {
  float p[4] = {0, 0, 0, 0};
  const float g[4] = {3, 4, 12, 100};
  Context ctx;
  for (int i = 0; i < 4; ++i) ctx.param(ctx.group(plain_sgd()), std::to_string(i), &p[i], 1);
  const ga_clip all = clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_KERAS);
  const ga_clip own = clip(GA_CLIP_GLOBAL, 6, GA_FLAVOR_KERAS);
  const ga_clip none = clip(GA_CLIP_NONE, 0);
  EXPECT_OK(ga_context_set_clip(ctx, &all));
  EXPECT_OK(ga_group_set_clip(ctx, 2, &own));
  EXPECT_OK(ga_group_set_clip(ctx, 3, &none));
  ctx.accumulate({&g[0], &g[1], &g[2], &g[3]});
  ga_step_result r = step(ctx);
  EXPECT_DOUBLE_EQ(r.norm, std::sqrt(9 + 16 + 144 + 10000.0));  // of the whole gradient
  EXPECT_DOUBLE_EQ(r.clip_factor, 0.2);
  EXPECT_FLOAT_EQ(p[0], -0.6f);  // 3/5, by the norm of the groups that share the context's clipping
  EXPECT_FLOAT_EQ(p[1], -0.8f);
  EXPECT_FLOAT_EQ(p[2], -6);
  EXPECT_EQ(p[3], -100);

  memset(p, 0, sizeof p);
  EXPECT_OK(ga_group_set_clip(ctx, 2, nullptr));
  EXPECT_OK(ga_group_set_clip(ctx, 3, nullptr));
  ctx.accumulate({&g[0], &g[1], &g[2], &g[3]});
  r = step(ctx);
  EXPECT_FLOAT_EQ(p[3], static_cast<float>(-100 / r.norm));

  memset(p, 0, sizeof p);
  EXPECT_OK(ga_context_set_clip(ctx, nullptr));
  ctx.accumulate({&g[0], &g[1], &g[2], &g[3]});
  r = step(ctx);
  EXPECT_EQ(r.clip_factor, 1);
  EXPECT_EQ(p[3], -100);
}

TEST(Clip, OneNormOverAGroupOfSeveral) {
  float p[3] = {0, 0, 0};
  const float g[3] = {3, 4, 1000};
  Context ctx;
  ctx.group(plain_sgd());
  ctx.group(plain_sgd());
  ctx.param(0, "a", &p[0], 1);
  ctx.param(0, "b", &p[1], 1);
  ctx.param(1, "c", &p[2], 1);
  const ga_clip own = clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_KERAS);
  EXPECT_OK(ga_group_set_clip(ctx, 0, &own));
  ctx.accumulate({&g[0], &g[1], &g[2]});
  EXPECT_DOUBLE_EQ(step(ctx).clip_factor, 0.2);
  EXPECT_FLOAT_EQ(p[0], -0.6f);
  EXPECT_FLOAT_EQ(p[1], -0.8f);
  EXPECT_EQ(p[2], -1000);
}

// Every mode with every optimizer follows the model over whole runs.
TEST(Clip, EveryModeWithEveryOptimizer) {
  const Layout layout({1, 100, 1023});
  const ga_clip modes[] = {clip(GA_CLIP_GLOBAL, 1),
                           clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_KERAS),
                           clip(GA_CLIP_PER_TENSOR, 0.5),
                           clip(GA_CLIP_PER_TENSOR, 20, GA_FLAVOR_KERAS),
                           clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 0.125),
                           clip(GA_CLIP_GLOBAL, 3, GA_FLAVOR_TORCH, 2)};
  for (const NamedOptimizer& named : good_optimizers()) {
    for (const ga_clip& mode : modes) {
      for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
        ga_config c = config();
        c.gradient_life = life;
        Block block = parameters(layout, 1);
        Model model(layout, {named.optimizer}, c, block);
        Context ctx(c);
        const ga_group group = ctx.group(named.optimizer);
        for (size_t i = 0; i < layout.size(); ++i) {
          ctx.param(group, std::to_string(i), block.data() + layout.offsets[i], layout.counts[i]);
        }
        EXPECT_OK(ga_context_set_clip(ctx, &mode));
        for (uint64_t t = 0; t < 12; ++t) {
          const Block a = gradients(layout, 2, 2 * t), b = gradients(layout, 2, 2 * t + 1);
          ctx.accumulate(pointers(layout, a), 3);
          model.accumulate(a, 3);
          if (t % 3 != 2) {
            ctx.accumulate(pointers(layout, b), 5);
            model.accumulate(b, 5);
          }
          step(ctx);
          model.step(NAN, &mode);
        }
        ASSERT_TRUE(model.matches(block))
            << named.name << ", scope " << mode.scope << ", flavor " << mode.flavor << ", value "
            << mode.max_value << ", life " << life;
      }
    }
  }
}

// ---- The norm -----------------------------------------------------------------------------------

double norm_of(const Block& g, int32_t life, int n = 1) {
  ga_config c = config();
  c.gradient_life = life;
  Block p(g.size());
  Context ctx(c);
  ctx.param(ctx.group(plain_sgd(0)), "p", p.data(), static_cast<int64_t>(g.size()));
  std::vector<Block> copies(static_cast<size_t>(n), g);
  for (const Block& copy : copies) ctx.accumulate({copy.data()});
  const ga_step_result r = step(ctx);
  EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
  return r.norm;
}

double norm(const Block& g) {
  long double squares = 0;
  for (const float x : g) squares += static_cast<long double>(x) * static_cast<long double>(x);
  return static_cast<double>(std::sqrt(squares));
}

class Norm : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Life, Norm, testing::Values(GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE));

TEST_P(Norm, FourMillionEqualElements) {
  for (const float x : {0.1f, 1e-22f}) {
    const Block g((1 << 22) + 5, x);
    const double want = std::sqrt(static_cast<double>(g.size())) * x;
    EXPECT_NEAR(norm_of(g, GetParam()), want, ref::kNorm * want);  // all are rounded alike
    EXPECT_NEAR(norm_of(g, GetParam(), 2), want, ref::kNorm * want);
  }
}

TEST_P(Norm, HugeTinyAndMixed) {
  // Squares over- or underflow in float32 from 2^64 and below 2^-63, and vanish below 2^-75; their sum over
  // 1024 elements is small enough for a second look below 2^-45.
  for (const float x : {3e38f, 1e25f, 0x1.1p64f, 0x1.fp63f, 0x1p59f, 0x1p-39f, 0x1p-41f, 0x1p-44f,
                        0x1p-46f, 0x1p-62f, 0x1p-65f, 0x1p-74f, 1e-25f, 1e-38f, 1e-45f}) {
    for (const size_t n : {size_t{1}, size_t{17}, size_t{1023}, size_t{70000}}) {
      const Block g(n, x);
      const double want = std::sqrt(static_cast<double>(n)) * x;
      EXPECT_NEAR(norm_of(g, GetParam()), want, ref::kNorm * want) << x << ", " << n;
    }
  }
  Random random(1);
  Block g(200001);
  for (float& x : g)
    x = static_cast<float>(random.signed_unit() * std::pow(10.0, 60 * random.unit() - 30));
  EXPECT_NEAR(norm_of(g, GetParam()), norm(g), ref::kUsualNorm * norm(g));
  // Two equal micro-batches sum to 2 g and average to g exactly, so the norm must be that of g, unless a tile
  // is looked at again in one of the two.
  EXPECT_EQ(norm_of(g, GetParam(), 2), norm_of(g, GetParam(), 1));
  // Tiles of elements whose squares vanish in float32, or every second one's, and tiles of zeros.
  for (size_t i = 0; i < g.size(); ++i) {
    const size_t tile = i / 1024 % 4;
    g[i] = tile == 0 ? 1e-23f : tile == 1 ? (i % 2 ? 1e-23f : 3e-23f) : tile == 2 ? -1e-23f : 0;
  }
  EXPECT_NEAR(norm_of(g, GetParam()), norm(g), ref::kNorm * norm(g));
}

// One square of 1 in each lane of float32, then 31 that are each just too small to be added to it.
TEST_P(Norm, WhatRoundsOneWay) {
  for (const size_t n : {size_t{1024}, size_t{100 * 1024}}) {
    Block g(n, 0x1.fffffep-13f);
    for (size_t i = 0; i < n; ++i)
      if (i % 1024 < 32) g[i] = 1;
    EXPECT_NEAR(norm_of(g, GetParam()), norm(g), ref::kNorm * norm(g));
  }
}

TEST_P(Norm, MissingGradientsHaveNone) {
  ga_config c = config();
  c.gradient_life = GetParam();
  for (const int32_t missing : {GA_MISSING_SKIP, GA_MISSING_ZERO}) {
    c.missing = missing;
    float p[2] = {0, 0};
    const float first[2] = {3, 4}, second[2] = {6, 8};
    Context ctx(c);
    ctx.group(plain_sgd());
    ctx.param(0, "a", &p[0], 1);
    ctx.param(0, "b", &p[1], 1);
    ctx.accumulate({&first[0], &first[1]});
    EXPECT_DOUBLE_EQ(step(ctx).norm, 5);
    ctx.accumulate({&second[0], nullptr});  // b's gradient of the last window must not count
    EXPECT_DOUBLE_EQ(step(ctx).norm, 6);
    ctx.accumulate({nullptr, nullptr});
    EXPECT_EQ(step(ctx).norm, 0);
  }
}

// The finite check looks at the accumulated gradient: finite gradients can sum to infinity, and
// large gradients need not have an infinite norm.
TEST_P(Norm, NonfiniteIsFoundInTheAccumulator) {
  ga_config c = config();
  c.gradient_life = GetParam();
  for (const size_t n : {size_t{1}, size_t{100000}}) {
    Block p(n, 1);
    Context ctx(c);
    ctx.param(ctx.group(plain_sgd(0)), "p", p.data(), static_cast<int64_t>(n));
    const Block a(n, 3e38f), b(n, 3e38f);
    ctx.accumulate({a.data()});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED) << "finite, but its square overflows float32";
    ctx.accumulate({a.data()}, 4);
    const ga_step_result over = step(ctx);
    EXPECT_EQ(over.outcome, GA_STEP_SKIPPED_NONFINITE) << "4 * 3e38 is too large for float32";
    EXPECT_FALSE(std::isfinite(over.norm));
    ctx.accumulate({a.data()});
    ctx.accumulate({b.data()});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
  }
}

// The norm and the finite check include what the program's own kernel writes: alone, and before and
// after a contribution that the library adds.
TEST_P(Norm, OfWhatTheProgramWrote) {
  ga_config c = config();
  c.gradient_life = GetParam();
  const size_t n = 65536 + 9;
  const Block ours(n, 0.5f), more(n, 0.25f);
  Block p(n, 0);
  Context ctx(c);
  ctx.param(ctx.group(plain_sgd(0)), "p", p.data(), static_cast<int64_t>(n));
  const ga_clip half = clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_KERAS);
  EXPECT_OK(ga_context_set_clip(ctx, &half));
  // A window is spelled in letters: l and m, the library adds 0.5 and 0.25; p, the program adds 2.
  const auto run = [&](const std::string& order, float theirs) {
    EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
    for (const char who : order) {
      if (who != 'p') {
        EXPECT_OK(ga_accumulate_part(ctx, 0, who == 'l' ? ours.data() : more.data()));
        continue;
      }
      ga_accumulator a;
      a.struct_size = sizeof a;
      EXPECT_OK(ga_accumulator_acquire(ctx, 0, &a));
      Block data = from_library(a.data, static_cast<int64_t>(n));
      for (float& x : data) x = a.beta == 0 ? 2.0f : x + 2.0f;
      data[n - 2] = std::isnan(theirs) ? theirs : data[n - 2];
      to_library(a.data, data);
      EXPECT_OK(ga_accumulator_release(ctx, 0));
    }
    EXPECT_OK(ga_micro_end(ctx));
    return step(ctx);
  };
  for (const std::string order : {"p", "lp", "pl", "plp", "lpm", "ppm", "lmp", "p"}) {
    double element = 0;
    for (const char who : order) element += who == 'p' ? 2 : who == 'l' ? 0.5 : 0.25;
    const double want = element * std::sqrt(static_cast<double>(n));
    ga_step_result r = run(order, 2);
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    EXPECT_NEAR(r.norm, want, ref::kUsualNorm * want) << order;
    EXPECT_NEAR(r.clip_factor, 1 / want, 2 * ref::kUsualNorm / want) << order;
    r = run(order, NAN);
    EXPECT_EQ(r.outcome, GA_STEP_SKIPPED_NONFINITE) << order;
  }
}

// One non-finite element at each end, in the middle, and at the borders of chunks.
TEST_P(Norm, OneNonfiniteElementAnywhere) {
  ga_config c = config();
  c.gradient_life = GetParam();
  const size_t n = 2 * 65536 + 9;
  Block p(n, 1), g(n, 0.5f), other(n, 0.25f);
  Context ctx(c);
  ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), "p", p.data(), static_cast<int64_t>(n));
  for (const size_t at : {size_t{0}, size_t{7}, size_t{65535}, size_t{65536}, size_t{131071},
                          size_t{131072}, n - 1}) {
    for (const float bad : {NAN, INFINITY, -INFINITY, -NAN}) {
      for (const int order : {0, 1, 2}) {  // the bad gradient alone, first, last
        const Block before = p;
        g[at] = bad;
        if (order == 2) ctx.accumulate({other.data()});
        ctx.accumulate({g.data()});
        if (order == 1) ctx.accumulate({other.data()});
        const ga_step_result r = step(ctx);
        g[at] = 0.5f;
        ASSERT_EQ(r.outcome, GA_STEP_SKIPPED_NONFINITE) << at << ", " << bad << ", " << order;
        ASSERT_FALSE(std::isfinite(r.norm));
        ASSERT_TRUE(same_bits(before, p));
      }
    }
  }
}

// ---- External optimizers ------------------------------------------------------------------------

TEST(External, SeesTheReducedClippedGradient) {
  const Layout layout({0, 1, 17, 70003});
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = config();
    c.gradient_life = life;
    c.loss_scale = 8;
    Block block = parameters(layout, 1);
    const Block start = block;
    Context ctx(c);
    ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
    for (size_t i = 0; i < layout.size(); ++i) {
      ctx.param(0, std::to_string(i), block.data() + layout.offsets[i], layout.counts[i]);
    }
    for (const int n : {1, 3}) {
      for (const double max_norm : {1e-3, 1e9}) {
        const ga_clip norm = clip(GA_CLIP_GLOBAL, max_norm);
        EXPECT_OK(ga_context_set_clip(ctx, &norm));
        // From 0, the model's p - g is minus the gradient, with its tolerance.
        Model model(layout, {plain_sgd(-1)}, c, Block(block.size(), 0));
        std::vector<Block> alive;
        for (int k = 0; k < n; ++k) {
          alive.push_back(gradients(layout, 2, static_cast<uint64_t>(k)));
          ctx.accumulate(pointers(layout, alive.back()), k + 1);
          model.accumulate(alive.back(), k + 1, 8);
        }
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
        model.step(NAN, &norm);
        Block seen(block.size(), kCanary);
        for (size_t i = 0; i < layout.size(); ++i) {
          const void* data = nullptr;
          int32_t dtype = 0;
          ASSERT_OK(ga_gradient(ctx, static_cast<ga_param>(i), &data, i == 2 ? nullptr : &dtype,
                                nullptr));
          EXPECT_EQ(dtype, i == 2 ? 0 : GA_F32);
          if (layout.counts[i] > 0) {
            copy(&seen[static_cast<size_t>(layout.offsets[i])], data,
                 static_cast<size_t>(layout.counts[i]) * sizeof(float));
          }
        }
        EXPECT_TRUE(model.matches(seen)) << n << " micro-batches, clipped to " << max_norm;
        EXPECT_TRUE(same_bits(start, block)) << "the library moved an external parameter";
      }
    }
    EXPECT_EQ(window(ctx).steps, 4);
    for (int t = 0; t < 3; ++t) {  // gradients are in the library's memory, not in the caller's
      const Block g = gradients(layout, 3, static_cast<uint64_t>(t)), before = g;
      ctx.accumulate(pointers(layout, g));
      step(ctx);
      EXPECT_TRUE(same_bits(before, g)) << "a gradient was written";
    }
  }
}

TEST(External, PerTensorAndByValue) {
  float p[2] = {0, 0};
  const float g[2] = {-8, 0.5f};
  Context ctx;
  ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
  ctx.param(0, "a", &p[0], 1);
  ctx.param(0, "b", &p[1], 1);
  const ga_clip both = clip(GA_CLIP_PER_TENSOR, 2, GA_FLAVOR_KERAS, 4);
  EXPECT_OK(ga_context_set_clip(ctx, &both));
  ctx.accumulate({&g[0], &g[1]});
  EXPECT_DOUBLE_EQ(step(ctx).clip_factor, 0.5);
  const void* data = nullptr;
  ASSERT_OK(ga_gradient(ctx, 0, &data, nullptr, nullptr));
  EXPECT_EQ(from_library(data, 1), Block{-2});
  ASSERT_OK(ga_gradient(ctx, 1, &data, nullptr, nullptr));
  EXPECT_EQ(from_library(data, 1), Block{0.5});
}

TEST(External, LegalAfterAnAppliedStepOnly) {
  float p = 0, q = 0, w = 0;
  const float g = 2, nan = NAN;
  Context ctx;
  const ga_group external = ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
  const ga_group sgd = ctx.group(plain_sgd());
  const ga_param a = ctx.param(external, "a", &p, 1);
  const ga_param b = ctx.param(external, "b", &q, 1);
  const ga_param c = ctx.param(sgd, "c", &w, 1);
  const void* data = &w;
  const auto illegal = [&](ga_param param) {
    const void* before = data;
    EXPECT_EQ(ga_gradient(ctx, param, &data, nullptr, nullptr), GA_ERROR_INVALID_STATE);
    EXPECT_EQ(data, before) << "written by a call that failed";
  };
  illegal(a);  // nothing yet
  ctx.accumulate({&g, nullptr, &g});
  illegal(a);  // the window is open
  step(ctx);
  EXPECT_OK(ga_gradient(ctx, a, &data, nullptr, nullptr));
  EXPECT_EQ(from_library(data, 1), Block{2});
  EXPECT_OK(ga_gradient(ctx, a, &data, nullptr, nullptr));  // any number of times
  illegal(b);                                               // no gradient in this window
  EXPECT_NE(ga_gradient(ctx, c, &data, nullptr, nullptr), GA_OK) << "the group is not external";
  EXPECT_EQ(ga_gradient(ctx, 3, &data, nullptr, nullptr), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_gradient(ctx, -1, &data, nullptr, nullptr), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_gradient(ctx, a, nullptr, nullptr, nullptr), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_OK(ga_gradient(ctx, a, &data, nullptr, nullptr));  // the failures above changed nothing
  step(ctx);
  illegal(a);  // a skipped step
  ctx.accumulate({&g, &g, &g});
  step(ctx);
  EXPECT_OK(ga_gradient(ctx, b, &data, nullptr, nullptr));
  EXPECT_OK(ga_discard(ctx));
  illegal(a);
  ctx.accumulate({&g, &g, &g});
  step(ctx);
  ctx.accumulate({&g, &g, &g});
  illegal(a);
  ctx.accumulate({&nan, &g, &g});
  EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
  illegal(a);
}

TEST(External, MissingAsZero) {
  ga_config c = config();
  c.missing = GA_MISSING_ZERO;
  float p = 0, q = 0;
  const float g = 2;
  Context ctx(c);
  ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
  ctx.param(0, "a", &p, 1);
  ctx.param(0, "b", &q, 1);
  const void* data = nullptr;
  ctx.accumulate({&g, &g});
  step(ctx);
  ctx.accumulate({&g, nullptr});
  step(ctx);
  // Both answers are correct: without a gradient the header says INVALID_STATE, and under ZERO the
  // gradient is zero.
  const ga_status status = ga_gradient(ctx, 1, &data, nullptr, nullptr);
  if (status == GA_OK) {
    EXPECT_EQ(from_library(data, 1), Block{0});
  } else {
    EXPECT_EQ(status, GA_ERROR_INVALID_STATE);
  }
}

// A program's own plain SGD on the external gradient gives what the library's SGD gives.
TEST(External, OwnSgdEqualsTheLibrarys) {
  const Layout layout({33, 66000});
  Block ours = parameters(layout, 4), theirs = ours;
  Context a, b;
  const ga_clip norm = clip(GA_CLIP_GLOBAL, 2);
  ga_optimizer sgd = plain_sgd(0.25);
  a.group(sgd);
  b.group(optimizer(GA_OPTIMIZER_EXTERNAL));
  EXPECT_OK(ga_context_set_clip(a, &norm));
  EXPECT_OK(ga_context_set_clip(b, &norm));
  for (size_t i = 0; i < layout.size(); ++i) {
    a.param(0, std::to_string(i), ours.data() + layout.offsets[i], layout.counts[i]);
    b.param(0, std::to_string(i), theirs.data() + layout.offsets[i], layout.counts[i]);
  }
  for (uint64_t t = 0; t < 5; ++t) {
    for (uint64_t k = 0; k < 2; ++k) {
      const Block g = gradients(layout, 5, 2 * t + k);
      a.accumulate(pointers(layout, g));
      b.accumulate(pointers(layout, g));
    }
    step(a);
    step(b);
    for (size_t i = 0; i < layout.size(); ++i) {
      const void* data = nullptr;
      ASSERT_OK(ga_gradient(b, static_cast<ga_param>(i), &data, nullptr, nullptr));
      const Block g = from_library(data, layout.counts[i]);
      for (size_t j = 0; j < g.size(); ++j)
        theirs[static_cast<size_t>(layout.offsets[i]) + j] -= 0.25f * g[j];
    }
  }
  EXPECT_TRUE(same_bits(ours, theirs));
}

// ---- Wrong numbers ------------------------------------------------------------------------------

TEST(Clip, WrongNumbersChangeNothing) {
  struct Bad {
    const char* what;
    ga_clip clip;
    std::vector<const char*> words;
  };
  const Bad list[] = {
      {"scope 4", clip(4, 1), {"scope", "4"}},
      {"scope -1", clip(-1, 1), {"scope", "-1"}},
      {"BERT", clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_BERT), {"flavor"}},
      {"flavor 9", clip(GA_CLIP_GLOBAL, 1, 9), {"flavor", "9"}},
      {"norm -1", clip(GA_CLIP_GLOBAL, -1), {"max_norm", "-1"}},
      {"norm NaN", clip(GA_CLIP_PER_TENSOR, NAN), {"max_norm", "nan"}},
      {"value 0", clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 0), {"max_value", "0"}},
      {"value -2", clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, -2), {"max_value", "-2"}},
      {"value NaN", clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_TORCH, NAN), {"max_value", "nan"}},
  };
  float p = 0;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  const ga_clip good = clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_KERAS);
  ASSERT_OK(ga_context_set_clip(ctx, &good));
  const float g = 2;
  for (const Bad& bad : list) {
    SCOPED_TRACE(bad.what);
    for (const bool of_group : {false, true}) {
      const ga_status status =
          of_group ? ga_group_set_clip(ctx, 0, &bad.clip) : ga_context_set_clip(ctx, &bad.clip);
      EXPECT_TRUE(status == GA_ERROR_INVALID_ARGUMENT ||
                  (status == GA_ERROR_UNSUPPORTED && bad.clip.flavor == GA_FLAVOR_BERT));
      const std::string text = ga_last_error();
      for (const char* word : bad.words) {
        EXPECT_NE(text.find(word), std::string::npos) << '"' << text << "\" lacks " << word;
      }
    }
    ctx.accumulate({&g});
    EXPECT_EQ(step(ctx).clip_factor, 0.5);
  }
  EXPECT_EQ(ga_group_set_clip(ctx, 1, &good), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_group_set_clip(ctx, -1, nullptr), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_context_set_clip(nullptr, &good), GA_ERROR_INVALID_ARGUMENT);
  // max_norm is not read if nothing is clipped by norm.
  const ga_clip unread = clip(GA_CLIP_NONE, NAN);
  EXPECT_OK(ga_context_set_clip(ctx, &unread));
}

TEST(Clip, Defaults) {
  ga_clip c;
  memset(&c, 0xee, sizeof c);
  ASSERT_OK(ga_clip_init(&c, sizeof c));
  EXPECT_EQ(c.struct_size, sizeof c);
  EXPECT_EQ(c.scope, GA_CLIP_NONE);
  EXPECT_EQ(c.flavor, GA_FLAVOR_TORCH);
  EXPECT_EQ(c.max_value, INFINITY);
}

}  // namespace
}  // namespace ga::test
