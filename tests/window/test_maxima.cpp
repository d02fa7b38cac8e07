// SPDX-License-Identifier: Apache-2.0
//
// GA_REDUCE_MAX: maxima in place of sums, against a reference in float64; what they take no part in;
// and what is refused for them. Maxima over ranks: test_ranks.cpp.
#include <memory>

#include "formats.hpp"

namespace ga::test {
namespace {

ga_param_options maximum(int32_t gradient_dtype = 0, int32_t accumulator_dtype = 0) {
  ga_param_options o = options(gradient_dtype, accumulator_dtype);
  o.reduce = GA_REDUCE_MAX;
  return o;
}

ga_optimizer external() { return optimizer(GA_OPTIMIZER_EXTERNAL); }

// What one parameter should collect: the largest g / S of each element, a NaN once there was one.
// Loss scales in these tests are powers of two, so that only the accumulator rounds.
class Expected {
 public:
  void add(const Tensor& g, double loss_scale = 1) {
    const bool first = values_.empty();
    values_.resize(static_cast<size_t>(g.count()));
    for (int64_t i = 0; i < g.count(); ++i) {
      double& largest = values_[static_cast<size_t>(i)];
      const double x = g.get(i) / loss_scale;
      if (first || std::isnan(x) || x > largest) largest = x;
    }
  }
  void clear() { values_.clear(); }
  bool empty() const { return values_.empty(); }

  // Compares with what ga_gradient returns.
  testing::AssertionResult matches(ga_context* ctx, ga_param id) const {
    const void* data = nullptr;
    int32_t dtype = 0;
    int64_t count = -1;
    if (ga_gradient(ctx, id, &data, &dtype, &count) != GA_OK)
      return testing::AssertionFailure() << ga_last_error();
    if (count != static_cast<int64_t>(values_.size()))
      return testing::AssertionFailure() << count << " elements, not " << values_.size();
    const std::vector<double> all = external_gradient(ctx, id, count);
    for (size_t i = 0; i < all.size(); ++i) {
      const double got = all[i], want = to_nearest(values_[i], format(dtype));
      if (got == want || (std::isnan(got) && std::isnan(want))) continue;
      return testing::AssertionFailure() << "element " << i << " is " << got << ", not " << want;
    }
    return testing::AssertionSuccess();
  }

 private:
  std::vector<double> values_;
};

Tensor of(int32_t dtype, const std::vector<double>& values) {
  Tensor t(dtype, static_cast<int64_t>(values.size()));
  for (size_t i = 0; i < values.size(); ++i) t.set(static_cast<int64_t>(i), values[i]);
  return t;
}

// Numbers around `centre`, which tells windows apart.
Tensor around(double centre, int32_t dtype, int64_t count, uint64_t seed) {
  Tensor t = random_tensor(dtype, count, seed);
  for (int64_t i = 0; i < count; ++i) t.set(i, t.get(i) + centre);
  return t;
}

// A parameter that collects maxima and one that plain SGD moves by minus its gradient.
struct Beside {
  explicit Beside(const ga_config& c = config(), bool with = true, int64_t count = 40,
                  const ga_param_options& o = maximum(), int32_t dtype = GA_F32)
      : ctx(c), a(dtype, count), w(GA_F32, 40) {
    const ga_group sgd = ctx.group(plain_sgd()), amax = ctx.group(external());
    const auto add = [&](ga_group group, const char* name, Tensor& t, const ga_param_options& of,
                         ga_param& id) {
      EXPECT_OK(try_add(ctx, group, name, t.data(), t.dtype(), {t.count()}, of, &id));
    };
    if (with) add(amax, "amax", a, o, amax_id);
    add(sgd, "w", w, options(), w_id);
  }
  // In one micro-batch; NULL: none.
  void micro(const Tensor* of_a, const Tensor* of_w, double weight = 1, double loss_scale = 0) {
    std::vector<const Tensor*> list = {of_w};
    if (amax_id >= 0) list.insert(list.begin(), of_a);
    accumulate(ctx, list, weight, loss_scale);
  }

  Context ctx;
  ga_param amax_id = -1, w_id = -1;
  Tensor a, w;
};

// ---- Numbers ------------------------------------------------------------------------------------

struct Mix {
  int32_t param, gradient, accumulator;
};
const Mix kMixes[] = {{GA_F32, GA_F32, GA_F32},   {GA_F32, GA_BF16, GA_F32},
                      {GA_BF16, GA_BF16, GA_F32}, {GA_F16, GA_F16, GA_F16},
                      {GA_F32, GA_F32, GA_BF16},  {GA_F32, GA_F32, GA_F16},
                      {GA_F64, GA_F64, GA_F64},   {GA_F64, GA_F32, GA_F64}};

const char* const kModes[] = {"plain", "running_mean", "compensated", "stochastic"};

class MaximaOf : public testing::TestWithParam<std::tuple<Mix, int32_t>> {};

TEST_P(MaximaOf, AllContributions) {
  const auto& [mix, accumulation] = GetParam();
  ga_config c = config();
  c.accumulation = accumulation;
  struct Micro {
    double weight, loss_scale;
  };
  const std::vector<Micro> windows[] = {
      {{3, 1}, {0.25, 4}, {0, 1}, {1e6, -2}, {1e-6, 0.5}}, {{1, -1}, {5, 2}}, {{2, 8}}};
  for (const int64_t count : {1, 16, 17, 1023, 1500, 70001}) {
    SCOPED_TRACE(count);
    Beside run(c, true, count, maximum(mix.gradient, mix.accumulator), mix.param);
    Beside plain(c, false);
    double centre = 3;
    uint64_t seed = 0;
    for (const auto& window : windows) {
      Expected expected;
      for (const Micro& m : window) {
        // A later window has smaller numbers, which those of the window before must not outlive.
        Tensor g = around(m.loss_scale < 0 ? -centre : centre, mix.gradient, count, ++seed);
        const Tensor other = random_tensor(GA_F32, 40, seed);
        if (m.weight == 0) g.set(0, NAN);
        run.micro(&g, &other, m.weight, m.loss_scale);
        plain.micro(nullptr, &other, m.weight, m.loss_scale);
        if (m.weight > 0) expected.add(g, m.loss_scale);
      }
      const ga_step_result r = step(run.ctx), of_plain = step(plain.ctx);
      EXPECT_EQ(memcmp(&r, &of_plain, sizeof r), 0);
      EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
      EXPECT_TRUE(expected.matches(run.ctx, run.amax_id));
      EXPECT_TRUE(run.w == plain.w);
      EXPECT_TRUE(run.a == Tensor(mix.param, count)) << "the parameter is the program's to update";
      centre -= 20;
    }
    int32_t dtype = 0;
    const void* data = nullptr;
    EXPECT_OK(ga_gradient(run.ctx, run.amax_id, &data, &dtype, nullptr));
    EXPECT_EQ(dtype, mix.accumulator);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Mix, MaximaOf,
    testing::Combine(testing::ValuesIn(kMixes),
                     testing::Values(GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN,
                                     GA_ACCUMULATE_COMPENSATED, GA_ACCUMULATE_STOCHASTIC)),
    [](const auto& info) {
      const Mix& mix = std::get<0>(info.param);
      return std::string(format(mix.param).name) + "_" + format(mix.gradient).name + "_" +
             format(mix.accumulator).name + "_" + kModes[std::get<1>(info.param)];
    });

TEST(Maxima, SameOnEveryIsa) {
  on_every_isa([] {
    for (const int32_t dtype : {GA_F32, GA_BF16, GA_F16}) {
      Beside run(config(), true, 2000, maximum(dtype, dtype));
      Expected expected;
      for (uint64_t k = 0; k < 4; ++k) {
        const Tensor g = around(-2, dtype, 2000, k);
        run.micro(&g, nullptr);
        expected.add(g);
      }
      step(run.ctx);
      EXPECT_TRUE(expected.matches(run.ctx, run.amax_id));
    }
  });
}

// Means, and so weights, and sums are not about maxima.
TEST(Maxima, DoNotDependOnTheReductionOfTheContext) {
  for (const int32_t kind : {GA_GRADIENT_MEAN, GA_GRADIENT_SUM})
    for (const int32_t reduce : {GA_REDUCE_MEAN, GA_REDUCE_SUM}) {
      ga_config c = config();
      c.gradient_kind = kind;
      c.reduce = reduce;
      c.loss_scale = -4;
      Beside run(c, true, 3);
      const Tensor first = of(GA_F32, {4, -8, 12}), second = of(GA_F32, {-4, -16, 20});
      run.micro(&first, nullptr, 5);
      run.micro(&second, nullptr, 3);
      step(run.ctx);
      EXPECT_EQ(external_gradient(run.ctx, run.amax_id, 3), (std::vector<double>{1, 4, -3}));
    }
}

// The weights of a window may be too small to divide by; maxima are not divided.
TEST(Maxima, OfWeightsThatNothingCanBeDividedBy) {
  Beside run;
  const Tensor a(GA_F32, 40, -5), w(GA_F32, 40, 1);
  run.micro(&a, nullptr, 0x1p-200);
  EXPECT_EQ(step(run.ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(external_gradient(run.ctx, run.amax_id, 40), std::vector<double>(40, -5));
  run.micro(&a, &w, 0x1p-200);
  EXPECT_EQ(step(run.ctx).outcome, GA_STEP_SKIPPED_WEIGHT);
}

TEST(Maxima, OfADynamicLossScale) {
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE})
    for (const int32_t nonfinite : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
      ga_config c = config();
      c.gradient_life = life;
      c.nonfinite = nonfinite;
      Beside run(c);
      ga_loss_scaler scaler;
      ASSERT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
      scaler.initial_scale = 4;
      scaler.growth_interval = 1;
      ASSERT_OK(ga_context_set_loss_scaler(run.ctx, &scaler));
      double scale = 4;
      for (int w = 0; w < 3; ++w, scale *= 2) {
        Expected expected;
        const Tensor first = around(-3, GA_F32, 40, 2), second = around(-3, GA_F32, 40, 3);
        const Tensor other(GA_F32, 40, 1), another(GA_F32, 40, 2);
        for (int k = 0; k <= w; ++k) {
          run.micro(k == 1 ? &second : &first, k == 1 ? &another : &other, 2);
          expected.add(k == 1 ? second : first, scale);
          if (life == GA_GRADIENTS_LIVE && k == 1) break;
        }
        EXPECT_EQ(step(run.ctx).outcome, GA_STEP_APPLIED);
        EXPECT_TRUE(expected.matches(run.ctx, run.amax_id));
      }
    }
}

// ---- Numbers that are none ----------------------------------------------------------------------

// A NaN is never lost: in any place of a vector, in any contribution, before and behind larger
// numbers.
TEST(Maxima, ANaNStays) {
  for (const int32_t dtype : {GA_F32, GA_F64, GA_F16, GA_BF16})
    for (const int64_t count : {1, 5, 70}) {
      ga_config c = config();
      c.nonfinite = GA_NONFINITE_IGNORE;
      const int32_t param = dtype == GA_F64 ? GA_F64 : GA_F32;
      Beside ignoring(c, true, count, maximum(dtype, dtype), param);
      Beside skipping(config(), true, count, maximum(dtype, dtype), param);
      for (int64_t at = 0; at < count; ++at)
        for (int bad = 0; bad < 3; ++bad) {
          Expected expected;
          for (int k = 0; k < 3; ++k) {
            Tensor g = around(-2, dtype, count, static_cast<uint64_t>(3 * at + k));
            if (k == bad) g.set(at, NAN);
            ignoring.micro(&g, nullptr);
            skipping.micro(&g, nullptr);
            expected.add(g);
          }
          EXPECT_EQ(step(ignoring.ctx).outcome, GA_STEP_APPLIED);
          ASSERT_TRUE(expected.matches(ignoring.ctx, ignoring.amax_id)) << at << " " << bad;
          const ga_step_result r = step(skipping.ctx);
          ASSERT_EQ(r.outcome, GA_STEP_SKIPPED_NONFINITE) << at << " " << bad;
          EXPECT_EQ(r.norm, 0) << "maxima are outside of the norm";
        }
    }
}

TEST(Maxima, InfinitiesAreTheLargestAndTheSmallest) {
  Beside run(config(), true, 3);
  const Tensor infinite = of(GA_F32, {-INFINITY, -INFINITY, 1}), numbers = of(GA_F32, {-7, 5, -1});
  for (const auto& order : {std::pair{&infinite, &numbers}, std::pair{&numbers, &infinite}}) {
    run.micro(order.first, nullptr);
    run.micro(order.second, nullptr);
    EXPECT_EQ(step(run.ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(external_gradient(run.ctx, run.amax_id, 3), (std::vector<double>{-7, 5, 1}));
  }
  run.micro(&infinite, nullptr);  // nothing larger comes
  EXPECT_EQ(step(run.ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
  const Tensor large = of(GA_F32, {INFINITY, 1, 1});
  run.micro(&large, nullptr);
  run.micro(&numbers, nullptr);
  EXPECT_EQ(step(run.ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
  // What is too large for the accumulator.
  Beside half(config(), true, 1, maximum(GA_F32, GA_F16));
  const Tensor beyond(GA_F32, 1, 70000);
  half.micro(&beyond, nullptr);
  EXPECT_EQ(step(half.ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
}

TEST(Maxima, FailNamesThem) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_FAIL;
  Beside run(c);
  const Tensor bad(GA_F32, 40, NAN), good(GA_F32, 40, 1);
  run.micro(&bad, &good);
  EXPECT_TRUE(refused(ga_step(run.ctx, nullptr), GA_ERROR_NONFINITE, {"\"amax\""}));
  EXPECT_OK(ga_discard(run.ctx));
  run.micro(&good, &good);
  EXPECT_EQ(step(run.ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(external_gradient(run.ctx, run.amax_id, 40), std::vector<double>(40, 1));
}

// ---- What maxima take no part in ----------------------------------------------------------------

struct Apart {
  const char* name;
  void (*set)(ga_config&);
  ga_clip clip;
  bool of_group;  // the clip is that of the group of the maxima
};

class MaximaApart : public testing::TestWithParam<Apart> {};

ga_clip of_micros(ga_clip c) {
  c.when = GA_CLIP_WHEN_MICRO;
  return c;
}

// With maxima in the window, everything else has the bits that it has without them.
TEST_P(MaximaApart, NormsClipsAndNoise) {
  ga_config c = config();
  c.measure_norm = 1;
  GetParam().set(c);
  Beside run(c), plain(c, false);
  for (ga_context* const ctx :
       {static_cast<ga_context*>(run.ctx), static_cast<ga_context*>(plain.ctx)}) {
    ASSERT_OK(GetParam().of_group ? ga_group_set_clip(ctx, 1, &GetParam().clip)
                                  : ga_context_set_clip(ctx, &GetParam().clip));
  }
  for (uint64_t w = 0; w < 3; ++w) {
    Expected expected;
    std::vector<Tensor> gradients, others;  // which may live until the step
    for (uint64_t k = 0; k < 3; ++k) {
      gradients.push_back(around(-1e6, GA_F32, 40, 3 * w + k));
      others.push_back(random_tensor(GA_F32, 40, 100 + 3 * w + k));
      expected.add(gradients.back());
    }
    for (size_t k = 0; k < 3; ++k) {
      const auto weight = static_cast<double>(1 + k);
      run.micro(&gradients[k], &others[k], weight);
      plain.micro(nullptr, &others[k], weight);
    }
    const ga_step_result r = step(run.ctx), of_plain = step(plain.ctx);
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    EXPECT_EQ(memcmp(&r, &of_plain, sizeof r), 0);
    EXPECT_TRUE(run.w == plain.w);
    EXPECT_TRUE(expected.matches(run.ctx, run.amax_id));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, MaximaApart,
    testing::Values(
        Apart{"global", [](ga_config&) {}, clip(GA_CLIP_GLOBAL, 0.1), false},
        Apart{"global_keras", [](ga_config&) {}, clip(GA_CLIP_GLOBAL, 0.1, GA_FLAVOR_KERAS), false},
        Apart{"per_tensor", [](ga_config&) {}, clip(GA_CLIP_PER_TENSOR, 0.1), false},
        Apart{"of_the_group", [](ga_config&) {}, clip(GA_CLIP_GLOBAL, 0), true},
        Apart{"per_tensor_of_the_group", [](ga_config&) {}, clip(GA_CLIP_PER_TENSOR, 0), true},
        Apart{"by_value", [](ga_config&) {}, clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 0.1), false},
        Apart{"by_value_then_norm", [](ga_config&) {},
              clip(GA_CLIP_GLOBAL, 0.1, GA_FLAVOR_TORCH, 0.1), false},
        Apart{"by_units", [](ga_config&) {}, clip(GA_CLIP_AGC, 0), false},
        Apart{"of_micro_batches", [](ga_config&) {}, of_micros(clip(GA_CLIP_GLOBAL, 0.1)), false},
        Apart{"of_micro_batches_in_the_group", [](ga_config&) {},
              of_micros(clip(GA_CLIP_PER_TENSOR, 0.1, GA_FLAVOR_TORCH, 0.1)), true},
        Apart{"micro_batches_by_units", [](ga_config&) {}, of_micros(clip(GA_CLIP_AGC, 0)), false},
        Apart{"running_mean_of_micro_batches",
              [](ga_config& c) { c.accumulation = GA_ACCUMULATE_RUNNING_MEAN; },
              of_micros(clip(GA_CLIP_GLOBAL, 0.1)), false},
        Apart{"noise", [](ga_config& c) { c.noise_scale = 1; }, clip(GA_CLIP_NONE, 0), false},
        Apart{"noise_of_micro_batches", [](ga_config& c) { c.noise_scale = 1; },
              of_micros(clip(GA_CLIP_GLOBAL, 0.1)), false},
        Apart{"ignored", [](ga_config& c) { c.nonfinite = GA_NONFINITE_IGNORE; },
              clip(GA_CLIP_GLOBAL, 0.1), false},
        Apart{"live", [](ga_config& c) { c.gradient_life = GA_GRADIENTS_LIVE; },
              clip(GA_CLIP_GLOBAL, 0.1), false}),
    [](const auto& info) { return info.param.name; });

// Two contributions to a maximum in one micro-batch, also a dropped one, do not spoil the estimate of the
// noise scale, which two gradients of a parameter would.
TEST(Maxima, DoNotCountForTheNoiseScale) {
  ga_config c = config();
  c.noise_scale = 1;
  for (const bool drops : {false, true}) {
    c.nonfinite = drops ? GA_NONFINITE_DROP_MICRO : GA_NONFINITE_SKIP_STEP;
    Beside run(c);
    const Tensor a(GA_F32, 40, 2), bad(GA_F32, 40, NAN);
    for (uint64_t k = 0; k < (drops ? 3 : 2); ++k) {
      const Tensor w = random_tensor(GA_F32, 40, k);
      ASSERT_OK(ga_micro_begin(run.ctx, -1, 1, nullptr));
      ASSERT_OK(ga_accumulate_part(run.ctx, run.amax_id, a.data()));
      ASSERT_OK(ga_accumulate_part(run.ctx, run.w_id, w.data()));
      ASSERT_OK(ga_accumulate_part(run.ctx, run.amax_id, k == 2 ? bad.data() : a.data()));
      ASSERT_OK(ga_micro_end(run.ctx));
    }
    const ga_step_result r = step(run.ctx);
    EXPECT_EQ(r.window_dropped, drops ? 1 : 0);
    EXPECT_FALSE(std::isnan(r.noise_trace));
  }
}

// A maximum that nobody has measured leaves the norm of the others known.
TEST(Maxima, ThatNothingHasMeasured) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_IGNORE;
  c.gradient_life = GA_GRADIENTS_LIVE;
  Beside run(c);
  const Tensor a(GA_F32, 40, NAN), w(GA_F32, 40, 3), more(GA_F32, 40, 5);
  run.micro(&a, &w);
  run.micro(nullptr, &more);
  const ga_step_result r = step(run.ctx);
  EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
  EXPECT_NEAR(r.norm, 4 * std::sqrt(40), 1e-6);
  EXPECT_TRUE(std::isnan(external_gradient(run.ctx, run.amax_id, 40)[39]));
}

TEST(Maxima, AreNotTurnedByMaximize) {
  ga_optimizer o = external();
  o.maximize = 1;
  Context ctx;
  Tensor p(GA_F32, 2);
  const ga_param id = add(ctx, ctx.group(o), p, {}, maximum());
  const Tensor g = of(GA_F32, {3, -4});
  accumulate(ctx, {&g});
  step(ctx);
  EXPECT_EQ(external_gradient(ctx, id, 2), (std::vector<double>{3, -4}));
}

// The maximum of nothing is not zero, under GA_MISSING_ZERO either.
TEST(Maxima, OfNothing) {
  for (const int32_t missing : {GA_MISSING_SKIP, GA_MISSING_ZERO}) {
    ga_config c = config();
    c.missing = missing;
    Beside run(c);
    const Tensor a(GA_F32, 40, -1), w(GA_F32, 40, 1), bad(GA_F32, 40, NAN);
    for (int k = 0; k < 2; ++k) {
      run.micro(nullptr, &w);
      run.micro(&bad, nullptr, 0);
      EXPECT_EQ(step(run.ctx).outcome, GA_STEP_APPLIED);
      const void* data = nullptr;
      EXPECT_TRUE(refused(ga_gradient(run.ctx, run.amax_id, &data, nullptr, nullptr),
                          GA_ERROR_INVALID_STATE, {"\"amax\""}));
      run.micro(&a, nullptr);
      EXPECT_EQ(step(run.ctx).outcome, GA_STEP_APPLIED);
      EXPECT_EQ(external_gradient(run.ctx, run.amax_id, 40), std::vector<double>(40, -1));
    }
    ASSERT_OK(ga_param_set_frozen(run.ctx, run.amax_id, 1));
    run.micro(&bad, &w);
    EXPECT_EQ(step(run.ctx).outcome, GA_STEP_APPLIED);
  }
}

TEST(Maxima, OfNoElements) {
  Context ctx;
  ga_param id = -1;
  ASSERT_OK(try_add(ctx, ctx.group(external()), "empty", nullptr, GA_F32, {0}, maximum(), &id));
  const float none = 0;
  ctx.accumulate({&none});
  ctx.accumulate({&none});
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
}

// In one block of memory with parameters that add up.
TEST(Maxima, InAFlatBlock) {
  Context ctx;
  ctx.group(external());
  const int64_t two = 2;
  const ga_param_options largest = maximum();
  ga_flat_entry entries[] = {flat_entry("sum", 0, 1, &two, 0),
                             flat_entry("largest", 0, 1, &two, 2)};
  entries[1].options = &largest;
  float p[4] = {};
  ASSERT_OK(ga_params_add_flat(ctx, p, GA_F32, entries, 2, nullptr, nullptr));
  for (const auto& g : {of(GA_F32, {1, 2, -3, -4}), of(GA_F32, {5, 6, -7, -2})})
    accumulate(ctx, {&g});
  step(ctx);
  EXPECT_EQ(external_gradient(ctx, 0, 2), (std::vector<double>{3, 4}));
  EXPECT_EQ(external_gradient(ctx, 1, 2), (std::vector<double>{-3, -2}));
}

// ---- Ways to accumulate -------------------------------------------------------------------------

TEST(Maxima, ByPart) {
  for (const int32_t nonfinite : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO})
    for (const bool clipped : {false, true}) {
      ga_config c = config();
      c.nonfinite = nonfinite;
      Beside run(c, true, 4);
      if (clipped) {
        const ga_clip micros = of_micros(clip(GA_CLIP_GLOBAL, 0.5));
        ASSERT_OK(ga_context_set_clip(run.ctx, &micros));
      }
      const Tensor parts[] = {of(GA_F32, {-9, -2, -3, -8}), of(GA_F32, {-5, -7, -4, -6}),
                              of(GA_F32, {-6, -6, -6, -6})};
      const Tensor w(GA_F32, 40, 1);
      Expected expected;
      const auto part = [&](const Tensor& g) {
        ASSERT_OK(ga_accumulate_part(run.ctx, run.amax_id, g.data()));
        expected.add(g);
      };
      ASSERT_OK(ga_micro_begin(run.ctx, -1, 7, nullptr));
      part(parts[0]);
      part(parts[1]);
      ASSERT_OK(ga_accumulate_part(run.ctx, run.w_id, w.data()));
      ASSERT_OK(ga_micro_end(run.ctx));
      if (!clipped && nonfinite == GA_NONFINITE_SKIP_STEP) {
        ASSERT_OK(ga_micro_begin(run.ctx, 0, 7, nullptr));  // once more
      } else {
        ASSERT_OK(ga_micro_begin(run.ctx, -1, 3, nullptr));
      }
      part(parts[2]);
      ASSERT_OK(ga_micro_end(run.ctx));
      EXPECT_EQ(step(run.ctx).outcome, GA_STEP_APPLIED);
      EXPECT_TRUE(expected.matches(run.ctx, run.amax_id));
    }
}

// A micro-batch is dropped as a whole. Whatever the accumulators hold after that, the next one
// overwrites it.
TEST(Maxima, OfDroppedMicroBatches) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  for (const int32_t accumulation : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN}) {
    c.accumulation = accumulation;
    Beside run(c, true, 2);
    const Tensor w(GA_F32, 40, 1), bad_w(GA_F32, 40, NAN),
        large = of(GA_F32, {100, 100}), small = of(GA_F32, {-3, -5}),
        smaller = of(GA_F32, {-4, -2}), bad = of(GA_F32, {1, -INFINITY});
    for (const int first : {0, 1, 2}) {
      int dropped = 0;
      const auto drop = [&] {
        run.micro(&large, &bad_w, 2);
        run.micro(&bad, &w, 2);
        dropped += 2;
      };
      if (first == 0) drop();
      run.micro(&small, &w);
      if (first == 1) drop();
      run.micro(&smaller, &w, 3);
      if (first == 2) drop();
      const ga_step_result r = step(run.ctx);
      EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
      EXPECT_EQ(r.window_dropped, dropped);
      EXPECT_EQ(external_gradient(run.ctx, run.amax_id, 2), (std::vector<double>{-3, -2})) << first;
      EXPECT_EQ(run.w.get(0), -1);
      run.w.fill(0);
    }
    run.micro(&large, &bad_w);  // of a window in which all are dropped
    EXPECT_EQ(step(run.ctx).outcome, GA_STEP_SKIPPED_EMPTY);
    run.micro(&small, nullptr);
    EXPECT_EQ(step(run.ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(external_gradient(run.ctx, run.amax_id, 2), (std::vector<double>{-3, -5}));
  }
}

// The first contribution is read where the program has it, and nothing of it is written there.
TEST(Maxima, OfGradientsThatLive) {
  for (const int32_t dtype : {GA_F32, GA_F64, GA_BF16})
    for (const int contributions : {1, 2, 3}) {
      ga_config c = config();
      c.gradient_life = GA_GRADIENTS_LIVE;
      Beside run(c, true, 3000, maximum(dtype, dtype), dtype == GA_F64 ? GA_F64 : GA_F32);
      std::vector<Tensor> gradients;
      gradients.reserve(3);
      for (uint64_t k = 0; k < 3; ++k) gradients.push_back(around(-4, dtype, 3000, k));
      const std::vector<Tensor> before = gradients;
      for (int w = 0; w < 2; ++w) {
        Expected expected;
        for (int k = 0; k < contributions; ++k) {
          const Tensor& g = gradients[static_cast<size_t>(k)];
          run.micro(&g, nullptr, 3, k == 1 ? -2 : 4);
          expected.add(g, k == 1 ? -2 : 4);
        }
        EXPECT_EQ(step(run.ctx).outcome, GA_STEP_APPLIED);
        EXPECT_TRUE(expected.matches(run.ctx, run.amax_id));
        for (size_t k = 0; k < 3; ++k) EXPECT_TRUE(gradients[k] == before[k]);
      }
      if (dtype == GA_BF16) continue;  // is copied, because its accumulator has 16 bits
      run.micro(&gradients[0], nullptr);
      const void* const again[] = {gradients[0].data(), nullptr};
      EXPECT_TRUE(refused(ga_accumulate(run.ctx, again, 2, 1, nullptr), GA_ERROR_INVALID_ARGUMENT,
                          {"\"amax\"", "overlaps"}));
    }
}

// ---- State --------------------------------------------------------------------------------------

std::vector<char> save(ga_context* ctx) {
  size_t size = 0;
  EXPECT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));
  std::vector<char> bytes(size);
  EXPECT_OK(ga_save_to_memory(ctx, nullptr, bytes.data(), size, &size));
  return bytes;
}

// A run that stops in an open window goes on as if it had not.
TEST(Maxima, SavedInAnOpenWindow) {
  for (const int32_t accumulation : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN,
                                     GA_ACCUMULATE_COMPENSATED, GA_ACCUMULATE_STOCHASTIC})
    for (const int32_t nonfinite : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO})
      for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE})
        for (const int32_t dtype : {GA_F32, GA_BF16}) {
          ga_config c = config();
          c.accumulation = accumulation;
          c.nonfinite = nonfinite;
          c.gradient_life = life;
          std::vector<Tensor> gradients;
          gradients.reserve(4);
          for (uint64_t k = 0; k < 4; ++k) gradients.push_back(around(-2, dtype, 70001, k));
          for (const int stop : {1, 2}) {
            Expected expected;
            const auto make = [&] {
              return std::make_unique<Beside>(c, true, 70001, maximum(dtype, dtype));
            };
            auto run = make();
            for (int k = 0; k < 4; ++k) {
              if (k == stop) {
                const std::vector<char> bytes = save(run->ctx);
                run = make();
                ASSERT_OK(ga_load_from_memory(run->ctx, bytes.data(), bytes.size(), nullptr));
              }
              const Tensor& g = gradients[static_cast<size_t>(k)];
              run->micro(&g, nullptr, 2, -2);
              expected.add(g, -2);
            }
            EXPECT_EQ(step(run->ctx).outcome, GA_STEP_APPLIED);
            EXPECT_TRUE(expected.matches(run->ctx, run->amax_id)) << accumulation << " " << stop;
          }
        }
}

// Neither twice the memory of COMPENSATED, nor random bits that depend on the order of parameters.
TEST(Maxima, TakeOneAccumulator) {
  ga_config c = config();
  c.accumulation = GA_ACCUMULATE_COMPENSATED;
  Beside run(c, true, 6400, maximum(GA_F32, GA_BF16));
  EXPECT_EQ(memory(run.ctx).accumulators, 6400 * 2 + 192);  // w: 40 elements of f32, in cache lines
  c.accumulation = GA_ACCUMULATE_STOCHASTIC;
  Beside first(c, true, 40, maximum(GA_F32, GA_BF16));
  const std::vector<char> bytes = save(first.ctx);
  Context other(c);
  const ga_group sgd = other.group(plain_sgd()), own = other.group(external());
  Tensor a(GA_F32, 40), w(GA_F32, 40);
  ASSERT_OK(try_add(other, sgd, "w", w.data(), GA_F32, {40}, options()));
  ASSERT_OK(try_add(other, own, "amax", a.data(), GA_F32, {40}, maximum(GA_F32, GA_BF16)));
  EXPECT_OK(ga_load_from_memory(other, bytes.data(), bytes.size(), nullptr));
}

// A sum is not a maximum, whatever a load does about settings.
TEST(Maxima, ALoadComparesTheReduction) {
  const Tensor g(GA_F32, 40, 1);
  for (const bool file_has : {true, false}) {
    Beside from(config(), true, 40, file_has ? maximum() : options());
    from.micro(&g, &g);
    const std::vector<char> open = save(from.ctx);
    step(from.ctx);
    const std::vector<char> empty = save(from.ctx);
    const auto load = [&](const std::vector<char>& bytes, int32_t settings) {
      Beside to(config(), true, 40, file_has ? options() : maximum());
      ga_state_options o;
      EXPECT_OK(ga_state_options_init(&o, sizeof o));
      o.settings = settings;
      return ga_load_from_memory(to.ctx, bytes.data(), bytes.size(), &o);
    };
    for (const int32_t settings : {GA_SETTINGS_COMPARE, GA_SETTINGS_TAKE}) {
      EXPECT_TRUE(refused(load(empty, settings), GA_ERROR_INVALID_ARGUMENT,
                          {"parameter.amax", "reduce is ", file_has ? "2" : "0"}));
    }
    EXPECT_OK(load(empty, GA_SETTINGS_KEEP));
    EXPECT_TRUE(refused(load(open, GA_SETTINGS_KEEP), GA_ERROR_INVALID_ARGUMENT,
                        {"open window", "parameter.amax", "reduce is ", file_has ? "2" : "0"}));
  }
}

// ---- What is refused ----------------------------------------------------------------------------

TEST(Maxima, AreForSingleParametersOfTheProgramsOwnOptimizers) {
  ga_config c = config();
  c.reduce = GA_REDUCE_MAX;
  ga_context* none = nullptr;
  EXPECT_TRUE(refused(ga_context_create(&c, &none), GA_ERROR_INVALID_ARGUMENT,
                      {"GA_REDUCE_MAX", "ga_param_options.reduce"}));
  Context ctx;
  const ga_group sgd = ctx.group(plain_sgd()), own = ctx.group(external());
  Tensor p(GA_F32, 4);
  const auto try_with = [&](ga_group group, const ga_param_options& o) {
    return try_add(ctx, group, "p", p.data(), GA_F32, {2, 2}, o);
  };
  EXPECT_TRUE(refused(try_with(sgd, maximum()), GA_ERROR_UNSUPPORTED,
                      {"\"p\"", "GA_REDUCE_MAX", "SGD", "GA_OPTIMIZER_EXTERNAL", "ga_gradient"}));
  ga_param_options o = maximum();
  o.rows = GA_ROWS_DENSE;
  EXPECT_TRUE(refused(try_with(own, o), GA_ERROR_UNSUPPORTED, {"\"p\"", "GA_REDUCE_MAX", "rows"}));
  for (const int32_t reduce : {1, -1, 3}) {  // GA_REDUCE_SUM and none
    o = options();
    o.reduce = reduce;
    EXPECT_TRUE(refused(try_with(own, o), GA_ERROR_INVALID_ARGUMENT,
                        {"\"p\"", "reduce was " + std::to_string(reduce), "ga_config.reduce"}));
  }
  EXPECT_OK(try_with(own, maximum()));
}

TEST(Maxima, AreOfWholeTensors) {
  Beside run(config(), true, 2);
  ASSERT_OK(ga_micro_begin(run.ctx, -1, 1, nullptr));
  const float values[2] = {1, 2};
  const int32_t row = 0;
  EXPECT_TRUE(refused(ga_accumulate_rows(run.ctx, run.amax_id, &row, GA_I32, 1, values),
                      GA_ERROR_UNSUPPORTED, {"ga_accumulate_rows", "\"amax\"", "GA_REDUCE_MAX"}));
  EXPECT_TRUE(refused(ga_accumulate_matmul(run.ctx, run.amax_id, 1, values, 1, GA_NO_TRANSPOSE,
                                           values, 1, GA_NO_TRANSPOSE, GA_F32),
                      GA_ERROR_UNSUPPORTED, {"ga_accumulate_matmul", "\"amax\"", "GA_REDUCE_MAX"}));
  ga_accumulator a;
  ASSERT_OK(ga_accumulator_init(&a, sizeof a));
  EXPECT_TRUE(refused(ga_accumulator_acquire(run.ctx, run.amax_id, &a), GA_ERROR_UNSUPPORTED,
                      {"ga_accumulator_acquire", "\"amax\"", "GA_REDUCE_MAX"}));
  const Tensor g(GA_F32, 2, -1);  // the micro-batch goes on
  EXPECT_OK(ga_accumulate_part(run.ctx, run.amax_id, g.data()));
  EXPECT_OK(ga_micro_end(run.ctx));
  EXPECT_EQ(step(run.ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(external_gradient(run.ctx, run.amax_id, 2), (std::vector<double>{-1, -1}));
  for (const bool of_gamma : {true, false}) {
    const ga_param gamma = of_gamma ? run.amax_id : -1, beta = of_gamma ? -1 : run.amax_id;
    EXPECT_TRUE(refused(ga_bn_add(run.ctx, "layer", 2, gamma, beta, nullptr, nullptr),
                        GA_ERROR_UNSUPPORTED,
                        {"\"layer\"", of_gamma ? "gamma" : "beta", "\"amax\"", "GA_REDUCE_MAX"}));
  }
}

// ---- Random windows -----------------------------------------------------------------------------

// Micro-batches as a whole and by part, dropped, aborted and of weight 0, windows discarded, steps, and
// saves and loads, in random order.
TEST(Maxima, OfRandomWindows) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const auto chance = [&](double p) { return random.unit() < p; };
    ga_config c = config();
    c.accumulation = static_cast<int32_t>(random.below(4));
    c.nonfinite = chance(0.4) ? GA_NONFINITE_DROP_MICRO : GA_NONFINITE_SKIP_STEP;
    c.gradient_life = chance(0.3) ? GA_GRADIENTS_LIVE : GA_GRADIENTS_CONSUMED;
    c.missing = static_cast<int32_t>(random.below(2));
    const Mix& mix = kMixes[random.below(8)];
    const int64_t count = 1 + random.below(40);
    const bool clipped = chance(0.2), drops = c.nonfinite == GA_NONFINITE_DROP_MICRO;
    const auto make = [&] {
      auto made = std::make_unique<Beside>(c, true, count, maximum(mix.gradient, mix.accumulator),
                                           mix.param);
      const ga_clip micros = of_micros(clip(GA_CLIP_GLOBAL, 0.5));
      if (clipped) {
        EXPECT_OK(ga_context_set_clip(made->ctx, &micros));
      }
      return made;
    };
    auto run = make();
    Expected expected;
    bool nan = false;
    int64_t applied = 0;
    std::vector<std::unique_ptr<Tensor>> alive;  // until the window ends
    const Tensor w(GA_F32, 40, 1);
    for (int call = 0; call < 60; ++call) {
      const bool bad = chance(0.05);
      const double weight = chance(0.1) ? 0 : random.unit() + 0.1;
      const double scale = std::ldexp(chance(0.5) ? 1 : -1, static_cast<int>(random.below(5)) - 2);
      std::vector<const Tensor*> given;
      const auto new_gradient = [&] {
        alive.push_back(std::make_unique<Tensor>(
            around(8 * random.signed_unit(), mix.gradient, count, random.bits())));
        if (bad && given.empty()) alive.back()->set(random.below(count), NAN);
        given.push_back(alive.back().get());
        return alive.back().get();
      };
      const auto took = [&] {
        if (weight == 0 || (bad && drops)) return;
        for (const Tensor* const g : given) expected.add(*g, scale);
        nan = nan || (bad && !given.empty());
      };
      const int64_t what = random.below(10);
      if (what < 4) {
        const Tensor* const g = new_gradient();
        run->micro(g, nullptr, weight, scale);
        took();
      } else if (what < 7) {
        ASSERT_OK(ga_micro_begin(run->ctx, -1, weight, MicroOptions(scale)));
        const bool aborted = chance(0.2) && (drops || clipped);
        for (int64_t k = random.below(4); k > 0; --k)
          ASSERT_OK(ga_accumulate_part(run->ctx, run->amax_id, new_gradient()->data()));
        ASSERT_OK(aborted ? ga_micro_abort(run->ctx) : ga_micro_end(run->ctx));
        if (!aborted) took();
      } else if (what == 7) {
        const std::vector<char> bytes = save(run->ctx);
        run = make();
        ASSERT_OK(ga_load_from_memory(run->ctx, bytes.data(), bytes.size(), nullptr));
      } else {
        if (chance(0.2)) {
          ASSERT_OK(ga_discard(run->ctx));
        } else {
          const ga_step_result r = step(run->ctx);
          if (nan) {
            ASSERT_EQ(r.outcome, GA_STEP_SKIPPED_NONFINITE);
          } else if (!expected.empty()) {
            ASSERT_EQ(r.outcome, GA_STEP_APPLIED);
            ASSERT_TRUE(expected.matches(run->ctx, run->amax_id)) << "call " << call;
            ++applied;
          } else {
            const void* data = nullptr;
            ASSERT_EQ(ga_gradient(run->ctx, run->amax_id, &data, nullptr, nullptr),
                      GA_ERROR_INVALID_STATE);
          }
        }
        expected.clear();
        nan = false;
        alive.clear();
      }
    }
    EXPECT_GT(applied, 0);
  }
}

}  // namespace
}  // namespace ga::test
