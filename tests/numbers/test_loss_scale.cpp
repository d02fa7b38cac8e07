// SPDX-License-Identifier: Apache-2.0
//
// The dynamic loss scale step by step, long runs of infinities, and what each policy for non-finite
// gradients leaves unchanged.
#include <cstdlib>
#include <functional>

#include "formats.hpp"

namespace ga::test {
namespace {

ga_loss_scaler scaler() {
  ga_loss_scaler s;
  EXPECT_OK(ga_loss_scaler_init(&s, sizeof s));
  return s;
}

ga_ema average() {
  ga_ema e;
  EXPECT_OK(ga_ema_init(&e, sizeof e));
  return e;
}

double loss_scale(const ga_context* ctx) {
  double scale = NAN;
  const void* device = &scale;
  EXPECT_OK(ga_loss_scale(ctx, &scale, &device));
  EXPECT_EQ(device != nullptr, std::getenv("GA_TEST_DEVICE") != nullptr);
  return scale;
}

// The rule of torch.amp.GradScaler (_amp_update_scale_), with the hysteresis of Megatron's
// DynamicGradScaler, a floor and a ceiling.
struct Rule {
  explicit Rule(const ga_loss_scaler& s)
      : s(s), scale(static_cast<float>(s.initial_scale)), left(s.hysteresis) {}
  void found_none() {
    if (++good < s.growth_interval) return;
    good = 0;
    left = s.hysteresis;
    scale = static_cast<float>(std::min(scale * s.growth_factor, s.max_scale));
  }
  void found_nonfinite() {
    good = 0;
    if (--left <= 0) scale = static_cast<float>(std::max(scale * s.backoff_factor, s.min_scale));
  }
  ga_loss_scaler s;
  double scale;
  int64_t good = 0;
  int32_t left;
};

// One scalar parameter, whose gradient is that of a loss of slope 1 under the current scale, or
// infinite.
class Scaled {
 public:
  explicit Scaled(const ga_loss_scaler& s, ga_config c = config()) : ctx(c), rule(s) {
    ctx.group(plain_sgd(0x1p-10));
    ctx.param(0, "p", &p, 1);
    EXPECT_OK(ga_context_set_loss_scaler(ctx, &s));
  }
  ga_step_result window(bool finite) {
    const double scale = loss_scale(ctx);
    EXPECT_EQ(scale, rule.scale);
    const float g = finite ? static_cast<float>(scale) : INFINITY, before = p;
    ctx.accumulate({&g});
    EXPECT_EQ(loss_scale(ctx), scale) << "moved within a window";
    ctx.accumulate({&g});
    const ga_step_result r = step(ctx);
    EXPECT_EQ(r.loss_scale, scale);
    EXPECT_EQ(r.outcome, finite ? GA_STEP_APPLIED : GA_STEP_SKIPPED_NONFINITE);
    if (finite) {
      // The roundings of the inverse, a product and the update, and of p itself.
      EXPECT_NEAR(before - p, 0x1p-10, 0x1p-24 * (3 * 0x1p-10 + std::abs(static_cast<double>(p))));
      rule.found_none();
    } else {
      EXPECT_EQ(p, before);
      rule.found_nonfinite();
    }
    ++windows;
    skipped += !finite;
    EXPECT_EQ(r.windows, windows);
    EXPECT_EQ(r.skipped, skipped);
    EXPECT_EQ(r.steps, windows - skipped);
    EXPECT_EQ(r.dropped, 0);
    EXPECT_EQ(loss_scale(ctx), rule.scale);
    return r;
  }
  float p = 0;
  Context ctx;
  Rule rule;
  int64_t windows = 0, skipped = 0;
};

TEST(LossScale, Defaults) {
  ga_loss_scaler s;
  memset(&s, 0xee, sizeof s);
  ASSERT_OK(ga_loss_scaler_init(&s, sizeof s));
  EXPECT_EQ(s.struct_size, sizeof s);
  EXPECT_EQ(s.initial_scale, 65536);
  EXPECT_EQ(s.growth_factor, 2);
  EXPECT_EQ(s.backoff_factor, 0.5);
  EXPECT_EQ(s.min_scale, 0x1p-126);
  EXPECT_EQ(s.max_scale, 0x1p127);
  EXPECT_EQ(s.growth_interval, 2000);
  EXPECT_EQ(s.hysteresis, 1);
  EXPECT_EQ(s.reserved, 0);
}

// As torch's GradScaler keeps it: a program that multiplies its loss in f32 multiplies by the number
// that the library divides by.
TEST(LossScale, IsAnF32) {
  ga_loss_scaler s = scaler();
  s.initial_scale = 1000.1;
  s.growth_factor = 1.1;
  s.backoff_factor = 0.3;
  s.growth_interval = 1;
  Scaled run(s);
  for (int t = 0; t < 12; ++t) {
    const double scale = loss_scale(run.ctx);
    EXPECT_EQ(scale, static_cast<float>(scale));
    run.window(t % 5 != 3);
  }
}

TEST(LossScale, GrowsAfterTheInterval) {
  Scaled run(scaler());
  for (int i = 0; i < 2000; ++i) {
    EXPECT_EQ(loss_scale(run.ctx), 65536);
    run.window(true);
  }
  EXPECT_EQ(loss_scale(run.ctx), 131072);
}

TEST(LossScale, AWindowThatIsSkippedBeginsTheCountAnew) {
  ga_loss_scaler s = scaler();
  s.growth_interval = 3;
  Scaled run(s);
  for (const bool finite : {true, true, false, true, true, true, true, true, true}) {
    run.window(finite);
  }
  EXPECT_EQ(loss_scale(run.ctx), 65536 * 0.5 * 2 * 2);
}

// Long random runs of every kind follow the rule.
TEST(LossScale, FollowsTheRule) {
  for (const int32_t hysteresis : {1, 2, 3, 5}) {
    for (const int64_t interval : {int64_t{1}, int64_t{4}, int64_t{7}}) {
      for (const double bad : {0.1, 0.3, 0.7}) {
        ga_loss_scaler s = scaler();
        s.hysteresis = hysteresis;
        s.growth_interval = interval;
        s.initial_scale = 1024;
        s.min_scale = 0x1p-3;
        s.max_scale = 0x1p20;
        Scaled run(s);
        Random random(static_cast<uint64_t>(hysteresis * 100 + interval));
        for (int i = 0; i < 300; ++i) run.window(random.unit() >= bad);
        if (testing::Test::HasFailure()) {
          FAIL() << "hysteresis " << hysteresis << ", interval " << interval << ", " << bad;
        }
      }
    }
  }
}

TEST(LossScale, OtherFactors) {
  ga_loss_scaler s = scaler();
  s.growth_factor = 1.5;
  s.backoff_factor = 0.25;
  s.growth_interval = 2;
  s.initial_scale = 100;
  Scaled run(s);
  for (const bool finite : {true, true, false, true, true, true, true, false, false}) {
    run.window(finite);
  }
}

TEST(LossScale, FloorAndCeiling) {
  ga_loss_scaler s = scaler();
  s.growth_interval = 1;
  s.initial_scale = 8;
  s.min_scale = 2;
  s.max_scale = 32;
  Scaled run(s);
  for (int i = 0; i < 5; ++i) run.window(true);
  EXPECT_EQ(loss_scale(run.ctx), 32);
  for (int i = 0; i < 6; ++i) run.window(false);
  EXPECT_EQ(loss_scale(run.ctx), 2);
  for (int i = 0; i < 3; ++i) run.window(true);
  EXPECT_EQ(loss_scale(run.ctx), 16);
}

// The scale never grows beyond a finite f32; the count of steps begins anew.
TEST(LossScale, NeverGrowsToInfinity) {
  ga_loss_scaler s = scaler();
  s.growth_interval = 1;
  s.initial_scale = 0x1p125;
  Context ctx;
  float p = 0;
  ctx.group(plain_sgd());
  ctx.param(0, "p", &p, 1);
  ASSERT_OK(ga_context_set_loss_scaler(ctx, &s));
  const float g = 0;
  for (int i = 0; i < 6; ++i) {
    ctx.accumulate({&g});
    step(ctx);
    EXPECT_TRUE(std::isfinite(static_cast<float>(loss_scale(ctx))));
  }
  EXPECT_EQ(loss_scale(ctx), 0x1p127);
}

TEST(LossScale, NeverFallsToZero) {
  Scaled run(scaler());
  for (int i = 0; i < 200; ++i) run.window(false);
  EXPECT_EQ(loss_scale(run.ctx), 0x1p-126);
  EXPECT_EQ(run.window(true).outcome, GA_STEP_APPLIED) << "the scale cannot be divided out";
}

TEST(LossScale, EmptyWindowsMoveNothing) {
  ga_loss_scaler s = scaler();
  s.growth_interval = 2;
  Scaled run(s);
  run.window(true);
  EXPECT_EQ(step(run.ctx).outcome, GA_STEP_SKIPPED_EMPTY);
  const float g = 1;
  run.ctx.accumulate({&g});
  EXPECT_OK(ga_discard(run.ctx));
  EXPECT_EQ(loss_scale(run.ctx), 65536);
  run.windows = 2;
  run.skipped = 1;
  run.window(true);
  EXPECT_EQ(loss_scale(run.ctx), 131072);
}

TEST(LossScale, TakesThePlaceOfTheConfigured) {
  ga_config c = config();
  c.loss_scale = 10;
  float p = 0;
  Context ctx(c);
  ctx.group(plain_sgd());
  ctx.param(0, "p", &p, 1);
  EXPECT_EQ(loss_scale(ctx), 10);
  ga_loss_scaler s = scaler();
  s.initial_scale = 4;
  EXPECT_OK(ga_context_set_loss_scaler(ctx, &s));
  EXPECT_EQ(loss_scale(ctx), 4);
  const float g = 8;
  ctx.accumulate({&g});
  EXPECT_EQ(ga_context_set_loss_scaler(ctx, nullptr), GA_ERROR_INVALID_STATE);
  EXPECT_EQ(step(ctx).loss_scale, 4);
  EXPECT_EQ(p, -2);
  EXPECT_OK(ga_context_set_loss_scaler(ctx, nullptr));
  EXPECT_EQ(loss_scale(ctx), 10);
  const float h = 20;
  ctx.accumulate({&h});
  EXPECT_EQ(step(ctx).loss_scale, 10);
  EXPECT_EQ(p, -4);
  // A micro-batch may bring a scale of its own.
  EXPECT_OK(ga_context_set_loss_scaler(ctx, &s));
  const double own = 2;
  const void* list[] = {&g};
  EXPECT_OK(ga_accumulate(ctx, list, 1, 1, MicroOptions(own)));
  EXPECT_EQ(step(ctx).loss_scale, 4);
  EXPECT_EQ(p, -8);
}

// The inverse is computed in double: a scale that is not a power of two costs one rounding.
TEST(LossScale, IsDividedOutAgain) {
  ga_loss_scaler s = scaler();
  s.initial_scale = 3e6;
  s.max_scale = 3e6;
  const int64_t n = 1000;
  Tensor p(GA_F32, n), g(GA_F32, n);
  for (int64_t i = 0; i < n; ++i) g.set(i, 3e6 * (1 + static_cast<double>(i)));
  Context ctx;
  ctx.group(plain_sgd());
  add(ctx, 0, p);
  ASSERT_OK(ga_context_set_loss_scaler(ctx, &s));
  accumulate(ctx, {&g});
  step(ctx);
  for (int64_t i = 0; i < n; ++i) {
    const double want = -(1 + static_cast<double>(i));
    ASSERT_NEAR(p.get(i), want, 3 * 0x1p-24 * -want);
  }
}

// ---- Storms -------------------------------------------------------------------------------------

// All numbers of a context. They are the same after the same finite windows, whatever came between.
struct State {
  std::vector<double> numbers;
  static State of(ga_context* ctx, const std::vector<Tensor>& p) {
    State s;
    for (size_t i = 0; i < p.size(); ++i) {
      Tensor e(GA_F32, p[i].count());
      EXPECT_OK(ga_ema_copy_to(ctx, static_cast<ga_param>(i), e.data(), GA_F32));
      for (int64_t j = 0; j < p[i].count(); ++j) {
        s.numbers.push_back(p[i].get(j));
        s.numbers.push_back(e.get(j));
      }
    }
    s.numbers.push_back(group_lr(ctx));
    s.numbers.push_back(static_cast<double>(test::window(ctx).steps));
    return s;
  }
  bool operator==(const State& other) const { return numbers == other.numbers; }
};

// Two contexts, of which only one gets non-finite windows.
class Storm {
 public:
  explicit Storm(int32_t policy) {
    ga_config c = config();
    c.nonfinite = policy;
    c.loss_scale = 8;
    for (int i = 0; i < 2; ++i) {
      contexts_[i] = std::make_unique<Context>(c);
      Context& ctx = *contexts_[i];
      ga_optimizer adamw = optimizer(GA_OPTIMIZER_ADAMW), sgd = optimizer(GA_OPTIMIZER_SGD);
      adamw.lr = 0.01;
      sgd.momentum = 0.9;
      sgd.weight_decay = 0.1;
      ctx.group(adamw);
      ctx.group(sgd);
      ga_schedule cosine = schedule(GA_SCHEDULE_COSINE);
      cosine.warmup_steps = 4;
      cosine.total_steps = 100;
      EXPECT_OK(ga_group_set_schedule(ctx, 0, &cosine));
      p_[i].reserve(3);
      p_[i].push_back(random_tensor(GA_F32, 70001, 1));
      p_[i].push_back(random_tensor(GA_F32, 17, 2));
      p_[i].push_back(random_tensor(GA_BF16, 100, 3));
      for (ga_group g = 0; g < 3; ++g) {
        add(ctx, g % 2, p_[i][static_cast<size_t>(g)], {}, options(GA_F32));
      }
      ga_ema e = average();
      e.kind = GA_EMA_KARRAS;
      EXPECT_OK(ga_context_set_ema(ctx, &e));
    }
  }
  void finite() {
    ++round_;
    for (int i = 0; i < 2; ++i) EXPECT_EQ(run(i, {}).outcome, GA_STEP_APPLIED);
  }
  // bad: for each micro-batch of a window, whether it is non-finite.
  ga_step_result infinite(const std::vector<bool>& bad) {
    const State before = state(0);
    const ga_step_result r = run(0, bad);
    EXPECT_TRUE(state(0) == before);
    return r;
  }
  State state(int i) { return State::of(*contexts_[i], p_[i]); }
  Context& ctx() { return *contexts_[0]; }

  ga_step_result run(int which, const std::vector<bool>& bad) {
    std::vector<Tensor> g;
    g.reserve(20);
    for (uint64_t k = 0; k < 3; ++k) {
      std::vector<const Tensor*> list;
      for (const Tensor& p : p_[which]) {
        g.push_back(random_tensor(GA_F32, p.count(), 10 * round_ + k));
        list.push_back(&g.back());
      }
      if (k < bad.size() && bad[k]) g[g.size() - 1 - k % 3].set(16, k % 2 ? NAN : INFINITY);
      accumulate(*contexts_[which], list, 1 + static_cast<double>(k));
    }
    return step(*contexts_[which]);
  }

 private:
  uint64_t round_ = 0;
  std::vector<Tensor> p_[2];
  std::unique_ptr<Context> contexts_[2];
};

TEST(Storms, EveryWindowEverySecondAndAtRandom) {
  Random random(4);
  const std::function<int(int)> storms[] = {[](int i) { return i == 3 ? 40 : 0; },
                                            [](int) { return 1; },
                                            [&](int) { return static_cast<int>(random.below(3)); }};
  for (const auto& storm : storms) {
    for (const int32_t policy : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
      Storm run(policy);
      int64_t skipped = 0;
      for (int i = 0; i < 12; ++i) {
        run.finite();
        for (int k = storm(i); k-- > 0;) {
          const ga_step_result r = run.infinite({true, true, true});
          EXPECT_EQ(r.outcome, policy == GA_NONFINITE_SKIP_STEP ? GA_STEP_SKIPPED_NONFINITE
                                                                : GA_STEP_SKIPPED_EMPTY);
          EXPECT_EQ(r.skipped, ++skipped);
          EXPECT_EQ(r.steps, i + 1);
          EXPECT_EQ(r.lr, 0);
        }
      }
      EXPECT_TRUE(run.state(0) == run.state(1)) << "bad windows left a trace, policy " << policy;
    }
  }
}

// FAIL keeps the window for the program to inspect; after ga_discard nothing of it is left.
TEST(Storms, FailLeavesNothing) {
  Storm run(GA_NONFINITE_FAIL);
  for (int i = 0; i < 5; ++i) {
    run.finite();
    const State before = run.state(0);
    const Tensor a(GA_F32, 70001, 1), b(GA_F32, 17, NAN), c(GA_F32, 100, 1);
    accumulate(run.ctx(), {&a, &b, &c});
    const ga_window_info window = test::window(run.ctx());
    for (int twice = 0; twice < 2; ++twice) {
      ga_step_result r;
      memset(&r, 0x55, sizeof r);
      r.struct_size = sizeof r;
      EXPECT_EQ(ga_step(run.ctx(), &r), GA_ERROR_NONFINITE);
    }
    EXPECT_TRUE(same_window(test::window(run.ctx()), window));
    EXPECT_OK(ga_discard(run.ctx()));
    EXPECT_TRUE(run.state(0) == before);
  }
  EXPECT_TRUE(run.state(0) == run.state(1));
}

TEST(Storms, IgnoreMakesTheStep) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_IGNORE;
  Tensor p(GA_F32, 100, 1), g(GA_F32, 100, 1);
  g.set(7, INFINITY);
  g.set(50, NAN);
  Context ctx(c);
  ctx.group(plain_sgd());
  add(ctx, 0, p);
  ga_loss_scaler s = scaler();
  s.initial_scale = 1;
  s.growth_interval = 1;
  ASSERT_OK(ga_context_set_loss_scaler(ctx, &s));
  accumulate(ctx, {&g});
  const ga_step_result r = step(ctx);
  EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
  EXPECT_EQ(r.steps, 1);
  EXPECT_EQ(r.skipped, 0);
  EXPECT_EQ(p.get(7), -INFINITY);
  EXPECT_TRUE(std::isnan(p.get(50)));
  EXPECT_EQ(p.get(8), 0);
  EXPECT_EQ(loss_scale(ctx), 2) << "IGNORE does not check gradients";
}

// A window that ga_step refuses keeps its scale. Its ga_discard backs the scale off once, however
// often the step was tried; discarding other windows does not.
TEST(LossScale, FailBacksOffWhereTheWindowIsDiscarded) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_FAIL;
  float p = 0;
  const float bad = NAN;
  Context ctx(c);
  ctx.group(plain_sgd());
  ctx.param(0, "p", &p, 1);
  const ga_loss_scaler s = scaler();
  ASSERT_OK(ga_context_set_loss_scaler(ctx, &s));
  ctx.accumulate({&bad});
  EXPECT_EQ(ga_step(ctx, nullptr), GA_ERROR_NONFINITE);
  EXPECT_EQ(ga_step(ctx, nullptr), GA_ERROR_NONFINITE);
  EXPECT_EQ(loss_scale(ctx), 65536) << "the window is still there";
  EXPECT_OK(ga_discard(ctx));
  EXPECT_EQ(loss_scale(ctx), 32768);
  EXPECT_OK(ga_discard(ctx));
  ctx.accumulate({&bad});
  EXPECT_OK(ga_discard(ctx)) << "this window was not checked";
  EXPECT_EQ(loss_scale(ctx), 32768);
  for (int w = 0; w < 3; ++w) {
    ctx.accumulate({&bad});
    EXPECT_EQ(ga_step(ctx, nullptr), GA_ERROR_NONFINITE);
    EXPECT_OK(ga_discard(ctx));
  }
  EXPECT_EQ(loss_scale(ctx), 4096);
  const float good = 1;
  ctx.accumulate({&good});
  const ga_step_result r = step(ctx);
  EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
  EXPECT_EQ(r.loss_scale, 4096);
  EXPECT_EQ(r.windows, 1) << "discarded windows do not count";
  EXPECT_EQ(p, -1.0f / 4096);
}

// ---- Dropped micro-batches ----------------------------------------------------------------------

// One parameter of each kind: f32, bf16 with master weights, a table of rows, f64.
class Dropping {
 public:
  explicit Dropping(int32_t life = GA_GRADIENTS_CONSUMED, int64_t accum_steps = 0) {
    ga_config c = config();
    c.nonfinite = GA_NONFINITE_DROP_MICRO;
    c.gradient_life = life;
    c.accum_steps = accum_steps;
    ctx = std::make_unique<Context>(c);
    ctx->group(optimizer(GA_OPTIMIZER_ADAM));
    p.reserve(4);
    p.push_back(random_tensor(GA_F32, 70001, 1));
    p.push_back(random_tensor(GA_BF16, 300, 2));
    p.push_back(random_tensor(GA_F32, 300, 3));
    p.push_back(random_tensor(GA_F64, 100, 4));
    for (size_t i = 0; i < p.size(); ++i) {
      ga_param_options o = options();
      if (i == 2) o.rows = GA_ROWS_DENSE;
      add(*ctx, 0, p[i], i == 2 ? std::vector<int64_t>{30, 10} : std::vector<int64_t>{}, o);
    }
    ga_loss_scaler s = scaler();
    s.initial_scale = 256;
    s.growth_interval = 1000;
    EXPECT_OK(ga_context_set_loss_scaler(*ctx, &s));
    kept.reserve(10000);
  }

  // Accumulates the k-th gradients, with one bad number in parameter `where`.
  void micro(uint64_t k, double weight, bool by_part, int where = -1, double bad = INFINITY) {
    std::vector<const void*> list;
    for (size_t i = 0; i < p.size(); ++i) {
      kept.push_back(random_tensor(p[i].dtype(), p[i].count(), 7 * k + i));
      if (static_cast<int>(i) == where) kept.back().set(p[i].count() - 1, bad);
      list.push_back(kept.back().data());
    }
    if (!by_part) {
      EXPECT_OK(ga_accumulate(*ctx, list.data(), list.size(), weight, nullptr));
      return;
    }
    const int32_t indices[] = {3,  17, 3,  5,  29, 0,  1,  2,  4,  9,  8,  7,  6,  10, 11,
                               12, 13, 14, 15, 16, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27};
    EXPECT_OK(ga_micro_begin(*ctx, window(*ctx).micro_batches, weight, nullptr));
    for (size_t i = 0; i < p.size(); ++i) {
      const auto param = static_cast<ga_param>(i);
      if (i == 2) {
        EXPECT_OK(ga_accumulate_rows(*ctx, param, indices, GA_I32, 30, list[i]));
      } else {
        EXPECT_OK(ga_accumulate_part(*ctx, param, list[i]));
      }
      if (i == 0) {
        EXPECT_OK(ga_accumulate_part(*ctx, param, list[i]));
      }
    }
    EXPECT_OK(ga_micro_end(*ctx));
  }

  std::vector<Tensor> p;
  std::vector<Tensor> kept;
  std::unique_ptr<Context> ctx;
};

// The step is bit for bit that of the window without the bad micro-batch, wherever it comes.
TEST(Drop, EqualsTheWindowWithoutIt) {
  for (const bool by_part : {false, true}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      if (by_part && life == GA_GRADIENTS_LIVE) continue;  // the test passes a buffer twice
      for (int bad = 0; bad < 3; ++bad) {
        SCOPED_TRACE("by part " + std::to_string(by_part) + ", micro-batch " + std::to_string(bad));
        for (const double value : {double{INFINITY}, -double{INFINITY}, double{NAN}}) {
          Dropping dropped(life), without(life);
          for (int round = 0; round < 2; ++round) {
            for (int k = 0; k < 3; ++k) {
              const auto number = static_cast<uint64_t>(3 * round + k);
              if (k != bad) without.micro(number, 1 + k, by_part);
              dropped.micro(number, 1 + k, by_part, k == bad ? (bad + round) % 4 : -1, value);
            }
            const ga_step_result a = step(*dropped.ctx), b = step(*without.ctx);
            EXPECT_EQ(a.outcome, GA_STEP_APPLIED);
            EXPECT_EQ(a.weight, b.weight);
            EXPECT_EQ(a.norm, b.norm);
            EXPECT_EQ(a.micro_batches, 3);
            EXPECT_EQ(a.window_dropped, 1);
            EXPECT_EQ(a.dropped, round + 1);
            EXPECT_EQ(a.skipped, 0);
            EXPECT_EQ(b.window_dropped, 0);
            EXPECT_EQ(loss_scale(*dropped.ctx), 256 / std::pow(2, round + 1));
            EXPECT_EQ(a.loss_scale, 256 / std::pow(2, round));
            // Give both the same scale, so that they get the same gradients.
            const double next = 256 / std::pow(2, round + 1);
            ga_loss_scaler s = scaler();
            s.initial_scale = next;
            EXPECT_OK(ga_context_set_loss_scaler(*without.ctx, &s));
          }
          for (size_t i = 0; i < dropped.p.size(); ++i) {
            EXPECT_TRUE(dropped.p[i] == without.p[i]) << "parameter " << i;
          }
        }
      }
    }
  }
}

// Contributions to one parameter in one micro-batch add up, both in the first micro-batch that is
// not dropped and in later ones. All numbers are exact in f32.
TEST(Drop, ContributionsOfOneMicroBatchAddUp) {
  for (const int32_t mode : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN}) {
    for (const bool rows_first : {false, true}) {
      SCOPED_TRACE("mode " + std::to_string(mode) + ", rows first " + std::to_string(rows_first));
      const bool rows = mode == GA_ACCUMULATE_PLAIN;
      ga_config c = config();
      c.nonfinite = GA_NONFINITE_DROP_MICRO;
      c.accumulation = mode;
      Tensor p(GA_F32, 8), table(GA_F32, 8), four(GA_F32, 8, 4), eight(GA_F32, 8, 8),
          bad(GA_F32, 8, INFINITY);
      Context ctx(c);
      ctx.group(plain_sgd());
      add(ctx, 0, p);
      ga_param_options o = options();
      if (rows) o.rows = GA_ROWS_DENSE;
      add(ctx, 0, table, {4, 2}, o);
      const int32_t second[] = {1, 1};
      const auto add_rows = [&] {
        if (!rows) return;
        EXPECT_OK(ga_accumulate_rows(ctx, 1, second, GA_I32, 2, eight.data()));
      };
      const auto micro = [&](int64_t index, double weight, const Tensor& last) {
        EXPECT_OK(ga_micro_begin(ctx, index, weight, nullptr));
        EXPECT_OK(ga_accumulate_part(ctx, 0, four.data()));
        EXPECT_OK(ga_accumulate_part(ctx, 0, eight.data()));
        EXPECT_OK(ga_accumulate_part(ctx, 0, last.data()));
        if (rows_first) add_rows();
        EXPECT_OK(ga_accumulate_part(ctx, 1, four.data()));
        if (!rows_first) add_rows();
        EXPECT_OK(ga_micro_end(ctx));
      };
      micro(0, 5, bad);
      micro(1, 1, four);   // the first one that is not dropped
      micro(2, 3, eight);  // added to the first
      const ga_step_result r = step(ctx);
      EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
      EXPECT_EQ(r.window_dropped, 1);
      EXPECT_EQ(r.weight, 4);
      for (int64_t i = 0; i < 8; ++i) {
        EXPECT_EQ(p.get(i), -(1 * (4 + 8 + 4) + 3 * (4 + 8 + 8)) / 4.0) << i;
        const bool twice = rows && (i == 2 || i == 3);  // elements of row 1
        EXPECT_EQ(table.get(i), twice ? -(4 + 8 + 8) : -4) << i;
      }
    }
  }
}

// In every other window, a parameter's only gradient comes in the first micro-batch, which is
// dropped.
void expect_none_of_a_dropped_gradient(const ga_config& c, const ga_optimizer& o) {
  const Layout layout({17, 70001});
  Block p = parameters(layout, 1);
  Model model(layout, {o}, c, p);
  Context ctx(c);
  ctx.group(o);
  add_all(ctx, 0, layout, p);
  for (uint64_t t = 0; t < 5; ++t) {
    const bool drops = t % 2 == 1;
    const Block g = even_gradients(layout, 2, 2 * t);
    Block other = even_gradients(layout, 2, 2 * t + 1);
    if (drops) other[static_cast<size_t>(layout.offsets[0] + 16)] = INFINITY;
    const std::vector<const void*> whole = pointers(layout, other), list = pointers(layout, g);
    const Block before = p;
    ctx.accumulate({whole[0], drops ? nullptr : whole[1]}, 2);
    ctx.accumulate({nullptr, list[1]}, 1);
    EXPECT_EQ(step(ctx).window_dropped, drops);
    if (!drops) model.accumulate(other, 2);
    model.accumulate(g, 1, 1, {0});
    model.step();
    ASSERT_TRUE(model.matches(p)) << t;
    const auto first = static_cast<size_t>(layout.offsets[0]);
    const bool stays = memcmp(&p[first], &before[first], 17 * sizeof(float)) == 0;
    EXPECT_EQ(stays, drops && c.missing == GA_MISSING_SKIP) << t;
  }
}

// Adam and momentum then leave the parameter and its own count of updates unchanged, or update it
// with a gradient of zeros.
TEST(Drop, AGradientThatWasDroppedIsNone) {
  for (const int32_t missing : {GA_MISSING_SKIP, GA_MISSING_ZERO}) {
    for (const int32_t mode : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN}) {
      SCOPED_TRACE("missing " + std::to_string(missing) + ", mode " + std::to_string(mode));
      ga_config c = config();
      c.nonfinite = GA_NONFINITE_DROP_MICRO;
      c.missing = missing;
      c.accumulation = mode;
      ga_optimizer adam = optimizer(GA_OPTIMIZER_ADAM), sgd = optimizer(GA_OPTIMIZER_SGD);
      adam.lr = sgd.lr = 0.01;
      sgd.momentum = 0.9;
      expect_none_of_a_dropped_gradient(c, adam);
      expect_none_of_a_dropped_gradient(c, sgd);
    }
  }
}

TEST(Drop, AllOfThem) {
  for (const bool by_part : {false, true}) {
    Dropping run;
    run.micro(9, 1, by_part);
    EXPECT_EQ(step(*run.ctx).outcome, GA_STEP_APPLIED);
    const std::vector<Tensor> before = run.p;
    for (uint64_t k = 0; k < 4; ++k) run.micro(k, 1, by_part, static_cast<int>(k));
    EXPECT_EQ(loss_scale(*run.ctx), 256) << "moved within a window";
    const ga_step_result r = step(*run.ctx);
    EXPECT_EQ(r.outcome, GA_STEP_SKIPPED_EMPTY);
    EXPECT_EQ(r.weight, 0);
    EXPECT_EQ(r.window_dropped, 4);
    EXPECT_EQ(r.micro_batches, 4);
    EXPECT_EQ(r.norm, 0);
    EXPECT_EQ(loss_scale(*run.ctx), 128) << "a window backs off once";
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(run.p[i] == before[i]);
  }
}

// A window that lost some of its micro-batches backs off once, and begins the count anew.
TEST(Drop, BacksOffOncePerWindow) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  ga_loss_scaler s = scaler();
  s.growth_interval = 3;
  Rule rule(s);
  float p = 0;
  Context ctx(c);
  ctx.group(plain_sgd());
  ctx.param(0, "p", &p, 1);
  ASSERT_OK(ga_context_set_loss_scaler(ctx, &s));
  const float good = 1, bad = NAN;
  Random random(2);
  int64_t dropped = 0;
  for (int t = 0; t < 200; ++t) {
    int64_t here = 0;
    for (int k = 0; k < 4; ++k) {
      const bool drop = random.below(8) == 0;
      ctx.accumulate({drop ? &bad : &good});
      here += drop;
    }
    const ga_step_result r = step(ctx);
    EXPECT_EQ(r.window_dropped, here);
    EXPECT_EQ(r.dropped, dropped += here);
    EXPECT_EQ(r.outcome, here == 4 ? GA_STEP_SKIPPED_EMPTY : GA_STEP_APPLIED);
    if (here > 0) {
      rule.found_nonfinite();
    } else {
      rule.found_none();
    }
    ASSERT_EQ(loss_scale(ctx), rule.scale) << t;
  }
}

// A dropped micro-batch counts toward K.
// Bit i of the result is micro-batch i, up to the 64th; the next window begins anew.
TEST(Drop, WhichOnes) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  float p = 0;
  const float good = 1, bad = NAN;
  Context ctx(c);
  ctx.group(plain_sgd());
  ctx.param(0, "p", &p, ref::Shape{});
  for (int i = 0; i < 70; ++i) ctx.accumulate({i == 2 || i == 63 || i > 66 ? &bad : &good});
  ga_step_result r = step(ctx);
  EXPECT_EQ(r.window_dropped, 5);
  EXPECT_EQ(r.dropped_micros, (uint64_t{1} << 2) | (uint64_t{1} << 63));
  for (int i = 0; i < 3; ++i) ctx.accumulate({i == 0 ? &bad : &good});
  ASSERT_OK(ga_discard(ctx));
  for (int i = 0; i < 3; ++i) ctx.accumulate({i == 1 ? &bad : &good});
  r = step(ctx);
  EXPECT_EQ(r.dropped_micros, 2u);
  ctx.accumulate({&good});
  EXPECT_EQ(step(ctx).dropped_micros, 0u);
}

TEST(Drop, CountsTowardK) {
  Dropping run(GA_GRADIENTS_CONSUMED, 3);
  run.micro(0, 1, false, 0);
  EXPECT_EQ(window(*run.ctx).micro_batches, 1);
  EXPECT_EQ(window(*run.ctx).weight, 0);
  run.micro(1, 2, false);
  run.micro(2, 3, true, 3, NAN);
  const ga_window_info info = window(*run.ctx);
  EXPECT_EQ(info.state, GA_WINDOW_FULL);
  EXPECT_EQ(info.micro_batches, 3);
  EXPECT_EQ(info.weight, 2);
  EXPECT_EQ(step(*run.ctx).window_dropped, 2);
}

TEST(Drop, WhatIsNotReadCannotBeBad) {
  Dropping run;
  EXPECT_OK(ga_param_set_frozen(*run.ctx, 1, 1));
  run.micro(0, 1, false, 1);  // frozen
  run.micro(1, 0, false, 0);  // of weight 0
  run.micro(2, 1, true, 1);
  EXPECT_EQ(step(*run.ctx).window_dropped, 0);
}

// If finite gradients have a non-finite sum, no micro-batch is at fault, and the step is skipped.
TEST(Drop, ASumThatOverflowsIsSkipped) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  Tensor p(GA_F32, 100, 1), g(GA_F32, 100, 3e38);
  Context ctx(c);
  ctx.group(plain_sgd());
  add(ctx, 0, p);
  const ga_loss_scaler s = [] {
    ga_loss_scaler x = scaler();
    x.initial_scale = 1;
    return x;
  }();
  ASSERT_OK(ga_context_set_loss_scaler(ctx, &s));
  accumulate(ctx, {&g});
  accumulate(ctx, {&g});
  const ga_step_result r = step(ctx);
  EXPECT_EQ(r.outcome, GA_STEP_SKIPPED_NONFINITE);
  EXPECT_EQ(r.window_dropped, 0);
  EXPECT_EQ(p.get(0), 1);
  EXPECT_EQ(loss_scale(ctx), 0.5);
}

// A dropped gradient is left out, not multiplied by 0, because 0 times infinity is NaN. If nothing
// valid came before, the next valid gradient overwrites the accumulator.
TEST(Drop, LeavesNothingInTheAccumulator) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  for (const int32_t mode : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN,
                             GA_ACCUMULATE_COMPENSATED, GA_ACCUMULATE_STOCHASTIC}) {
    c.accumulation = mode;
    Tensor p(GA_F32, 100), bad(GA_F32, 100, INFINITY), g(GA_F32, 100, 2);
    Context ctx(c);
    ctx.group(plain_sgd());
    add(ctx, 0, p, {}, options(0, GA_BF16));
    accumulate(ctx, {&bad}, 5);
    accumulate(ctx, {&g}, 4);
    accumulate(ctx, {&bad}, 7);
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(p.get(99), -2) << mode;
  }
}

// ga_discard forgets the dropped micro-batches of a window.
TEST(Drop, DiscardedWindowsBackNothingOff) {
  Dropping run;
  run.micro(0, 1, false, 0);
  EXPECT_OK(ga_discard(*run.ctx));
  run.micro(1, 1, false);
  const ga_step_result r = step(*run.ctx);
  EXPECT_EQ(r.window_dropped, 0);
  EXPECT_EQ(loss_scale(*run.ctx), 256);
}

TEST(Drop, OtherWaysToContributeAreRefused) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  Tensor p(GA_F32, 16), g(GA_F32, 16, 1);
  Context ctx(c);
  ctx.group(plain_sgd());
  add(ctx, 0, p, {4, 4});
  EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
  EXPECT_OK(ga_accumulate_part(ctx, 0, g.data()));
  ga_accumulator out;
  out.struct_size = sizeof out;
  EXPECT_TRUE(refused(ga_accumulator_acquire(ctx, 0, &out), GA_ERROR_UNSUPPORTED, {"DROP_MICRO"}));
  EXPECT_TRUE(refused(ga_accumulate_matmul(ctx, 0, 4, g.data(), 4, GA_NO_TRANSPOSE, g.data(), 4,
                                           GA_NO_TRANSPOSE, GA_F32),
                      GA_ERROR_UNSUPPORTED, {"DROP_MICRO"}));
  EXPECT_OK(ga_micro_end(ctx));
  const ga_window_info before = window(ctx);
  EXPECT_TRUE(refused(ga_micro_begin(ctx, 0, 1, nullptr), GA_ERROR_UNSUPPORTED, {"DROP_MICRO"}));
  EXPECT_TRUE(same_window(window(ctx), before));
  step(ctx);
  EXPECT_EQ(p.get(15), -1);
}

// ---- Wrong numbers ------------------------------------------------------------------------------

TEST(LossScale, WrongNumbersChangeNothing) {
  struct Bad {
    const char* what;
    std::function<void(ga_loss_scaler&)> change;
    std::vector<std::string> words;
  };
  using S = ga_loss_scaler&;
  const double inf = INFINITY, nan = NAN;
  const std::vector<Bad> list = {
      {"scale 0", [](S s) { s.initial_scale = 0; }, {"initial_scale", "0"}},
      {"scale -1", [](S s) { s.initial_scale = -1; }, {"initial_scale", "-1"}},
      {"scale inf", [=](S s) { s.initial_scale = inf; }, {"initial_scale", "inf"}},
      {"scale NaN", [=](S s) { s.initial_scale = nan; }, {"initial_scale", "nan"}},
      {"scale below the floor",
       [](S s) { s.initial_scale = 1, s.min_scale = 2; },
       {"initial_scale", "1", "2"}},
      {"scale above the ceiling",
       [](S s) { s.initial_scale = 9, s.max_scale = 8; },
       {"initial_scale", "9", "8"}},
      {"growth 1", [](S s) { s.growth_factor = 1; }, {"growth_factor", "1"}},
      {"growth inf", [=](S s) { s.growth_factor = inf; }, {"growth_factor", "inf"}},
      {"growth NaN", [=](S s) { s.growth_factor = nan; }, {"growth_factor", "nan"}},
      {"backoff 1", [](S s) { s.backoff_factor = 1; }, {"backoff_factor", "1"}},
      {"backoff 0", [](S s) { s.backoff_factor = 0; }, {"backoff_factor", "0"}},
      {"backoff NaN", [=](S s) { s.backoff_factor = nan; }, {"backoff_factor", "nan"}},
      {"floor 0", [](S s) { s.min_scale = 0; }, {"min_scale", "0"}},
      {"floor NaN", [=](S s) { s.min_scale = nan; }, {"min_scale", "nan"}},
      {"ceiling inf", [=](S s) { s.max_scale = inf; }, {"max_scale", "inf"}},
      {"ceiling 1e39", [](S s) { s.max_scale = 1e39; }, {"max_scale", "1e+39"}},
      {"interval 0", [](S s) { s.growth_interval = 0; }, {"growth_interval", "0"}},
      {"interval -1", [](S s) { s.growth_interval = -1; }, {"growth_interval", "-1"}},
      {"hysteresis 0", [](S s) { s.hysteresis = 0; }, {"hysteresis", "0"}},
      {"hysteresis -2", [](S s) { s.hysteresis = -2; }, {"hysteresis", "-2"}},
      {"reserved", [](S s) { s.reserved = 1; }, {"reserved"}}};
  Context ctx;
  ga_loss_scaler good = scaler();
  good.initial_scale = 12;
  ASSERT_OK(ga_context_set_loss_scaler(ctx, &good));
  for (const Bad& bad : list) {
    SCOPED_TRACE(bad.what);
    ga_loss_scaler s = scaler();
    bad.change(s);
    const ga_status status = ga_context_set_loss_scaler(ctx, &s);
    EXPECT_TRUE(refused(status,
                        s.reserved != 0 && status == GA_ERROR_UNSUPPORTED
                            ? GA_ERROR_UNSUPPORTED
                            : GA_ERROR_INVALID_ARGUMENT,
                        bad.words));
    EXPECT_EQ(loss_scale(ctx), 12);
  }
  double out = 0;
  EXPECT_EQ(ga_context_set_loss_scaler(nullptr, &good), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_loss_scale(nullptr, &out, nullptr), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_loss_scale(ctx, nullptr, nullptr), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_OK(ga_loss_scale(ctx, &out, nullptr));
  EXPECT_EQ(ga_loss_scaler_init(nullptr, sizeof good), GA_ERROR_INVALID_ARGUMENT);
}

// The static scale of a micro-batch and of a context.
TEST(LossScale, ZeroInfinityAndNaNAreRefused) {
  float p = 1;
  const float g = 1;
  Context ctx;
  ctx.group(plain_sgd());
  ctx.param(0, "p", &p, 1);
  const void* list[] = {&g};
  for (const double bad : {0.0, double{INFINITY}, -double{INFINITY}, double{NAN}}) {
    ga_config c = config();
    c.loss_scale = bad;
    ga_context* none = nullptr;
    EXPECT_TRUE(
        refused(ga_context_create(&c, &none), GA_ERROR_INVALID_ARGUMENT, {"loss", "scale"}));
    EXPECT_EQ(none, nullptr);
    if (bad == 0) continue;  // in a ga_micro_options, the scale of the context
    const ga_window_info before = window(ctx);
    EXPECT_TRUE(refused(ga_accumulate(ctx, list, 1, 1, MicroOptions(bad)),
                        GA_ERROR_INVALID_ARGUMENT, {"loss", "scale"}));
    EXPECT_TRUE(refused(ga_micro_begin(ctx, 0, 1, MicroOptions(bad)), GA_ERROR_INVALID_ARGUMENT,
                        {"loss", "scale"}));
    EXPECT_TRUE(same_window(window(ctx), before));
  }
}

}  // namespace
}  // namespace ga::test
