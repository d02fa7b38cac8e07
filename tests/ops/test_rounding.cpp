// SPDX-License-Identifier: Apache-2.0
//
// What 16 bits would lose: master weights, stochastic rounding, and optimizer state in bf16.
#include "formats.hpp"

namespace ga::test {
namespace {

ga_param_options stochastic(int32_t master) {
  ga_param_options o = options(GA_F32);
  o.master = master;
  o.rounding = GA_ROUND_STOCHASTIC;
  return o;
}

// ---- Master weights -----------------------------------------------------------------------------

class MasterWeights : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Dtype, MasterWeights, testing::Values(GA_F16, GA_BF16),
                         [](const auto& info) { return format(info.param).name; });

// 1000 updates of a 16th of the spacing below 1.
struct TinyUpdates {
  static constexpr int kSteps = 1000;
  static constexpr int64_t kCount = 4096;
  explicit TinyUpdates(int32_t dtype)
      : move(std::ldexp(1.0, -format(dtype).precision) / 16), p(dtype, kCount, 1) {}
  void run(int32_t master, int32_t rounding) {
    Tensor g(GA_F32, kCount, move);
    ga_param_options o = options(GA_F32);
    o.master = master;
    o.rounding = rounding;
    ctx.group(plain_sgd());
    add(ctx, 0, p, {}, o);
    for (int t = 0; t < kSteps; ++t) {
      accumulate(ctx, {&g});
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    }
  }
  double mean() const {
    double sum = 0;
    for (int64_t i = 0; i < kCount; ++i) sum += p.get(i);
    return sum / kCount;
  }
  double move;
  Tensor p;
  Context ctx;
};

TEST_P(MasterWeights, KeepTinyUpdates) {
  TinyUpdates run(GetParam());
  run.run(GA_MASTER_F32, GA_ROUND_NEAREST);
  const double master = 1 - TinyUpdates::kSteps * run.move;  // exact in f32
  EXPECT_EQ(run.p.get(0), to_nearest(master, format(GetParam())));
  EXPECT_EQ(run.p.get(TinyUpdates::kCount - 1), run.p.get(0));
}

TEST_P(MasterWeights, WithoutOneTinyUpdatesAreLost) {
  TinyUpdates run(GetParam());
  run.run(GA_MASTER_NONE, GA_ROUND_NEAREST);
  EXPECT_EQ(run.mean(), 1);
}

// Without master weights, stochastic rounding keeps tiny updates on average. Each step rounds up
// with probability 15/16 and down with 1/16, so its variance is 15/256 of the squared spacing (an
// upper bound, because the spacing halves below 1/2). The tolerance is six standard deviations of
// the mean over all elements.
TEST_P(MasterWeights, WithoutOneStochasticRoundingKeepsThemOnAverage) {
  TinyUpdates run(GetParam());
  run.run(GA_MASTER_NONE, GA_ROUND_STOCHASTIC);
  const double spacing = 16 * run.move;
  const double deviation =
      spacing * std::sqrt(TinyUpdates::kSteps * 15.0 / 256 / TinyUpdates::kCount);
  EXPECT_NEAR(run.mean(), 1 - TinyUpdates::kSteps * run.move, 6 * deviation);
}

// With master weights, only the copy is rounded stochastically: each element is a neighbour of its
// master weight, and their mean equals it.
TEST_P(MasterWeights, StochasticCopies) {
  TinyUpdates run(GetParam());
  run.run(GA_MASTER_F32, GA_ROUND_STOCHASTIC);
  const double master = 1 - TinyUpdates::kSteps * run.move;
  const double spacing = format(GetParam()).spacing(master);
  double worst = 0;
  for (int64_t i = 0; i < TinyUpdates::kCount; ++i) {
    worst = std::max(worst, std::abs(run.p.get(i) - master));
  }
  EXPECT_LT(worst, spacing);
  EXPECT_GT(worst, 0);
  EXPECT_NEAR(run.mean(), master, 6 * spacing / 2 / std::sqrt(TinyUpdates::kCount));
}

TEST_P(MasterWeights, AreCountedAsMemory) {
  const int64_t n = 100000;
  for (const int32_t master : {GA_MASTER_F32, GA_MASTER_NONE}) {
    Tensor p(GetParam(), n), wide(GA_F32, n);
    Context ctx;
    ctx.group(optimizer(GA_OPTIMIZER_ADAM));
    ga_param_options o = options(0, GetParam());
    o.master = master;
    add(ctx, 0, p, {}, o);
    add(ctx, 0, wide);
    const ga_memory m = memory(ctx);
    // Per element, the accumulators have 2 and 4 bytes and each parameter two f32 numbers of state;
    // alignment adds a little.
    const auto near = [](int64_t bytes, int64_t want) {
      return bytes >= want && bytes <= want + 65536;
    };
    EXPECT_TRUE(near(m.accumulators, 6 * n)) << m.accumulators;
    EXPECT_TRUE(near(m.optimizer_state, 16 * n)) << m.optimizer_state;
    if (master == GA_MASTER_F32) {
      EXPECT_TRUE(near(m.masters, 4 * n)) << m.masters;
    } else {
      EXPECT_EQ(m.masters, 0);
    }
    EXPECT_EQ(m.averages, 0);
    EXPECT_EQ(m.rows, 0);
    EXPECT_EQ(m.total, m.accumulators + m.optimizer_state + m.workspace + m.masters);
  }
}

TEST_P(MasterWeights, ChangedByTheProgram) {
  Tensor p(GetParam(), 100, 1), g(GA_F32, 100, 0.25);
  Context ctx;
  ctx.group(plain_sgd());
  const ga_param id = add(ctx, 0, p, {}, options(GA_F32));
  p.fill(2);  // the library reads it at the first contribution
  accumulate(ctx, {&g});
  EXPECT_EQ(ga_param_changed(ctx, id), GA_ERROR_INVALID_STATE);
  step(ctx);
  EXPECT_EQ(p.get(50), 1.75);
  p.fill(5);
  accumulate(ctx, {&g});
  step(ctx);
  EXPECT_EQ(p.get(50), 1.5) << "the master weights did not move";
  p.fill(5);
  EXPECT_OK(ga_param_changed(ctx, id));
  accumulate(ctx, {&g});
  step(ctx);
  EXPECT_EQ(p.get(50), 4.75);
  // Moving the data does not change the master weights.
  Tensor moved(GetParam(), 100, 7);
  EXPECT_OK(ga_param_bind(ctx, id, moved.data()));
  accumulate(ctx, {&g});
  step(ctx);
  EXPECT_EQ(moved.get(50), 4.5);
  EXPECT_EQ(p.get(50), 4.75);
  EXPECT_TRUE(refused(ga_param_changed(ctx, 1), GA_ERROR_INVALID_ARGUMENT, {"1"}));
  EXPECT_TRUE(refused(ga_param_changed(ctx, -1), GA_ERROR_INVALID_ARGUMENT, {"-1"}));
  EXPECT_TRUE(refused(ga_param_changed(nullptr, 0), GA_ERROR_INVALID_ARGUMENT, {"ctx"}));
}

// A skipped step moves neither master weights nor their copy.
TEST_P(MasterWeights, StayInSkippedSteps) {
  Tensor p(GetParam(), 100, 1), g(GA_F32, 100, 0x1p-9), bad(GA_F32, 100, 1);
  bad.set(99, NAN);
  Tensor twin = p;
  Context ctx, other;
  for (Context* c : {&ctx, &other}) {
    c->group(optimizer(GA_OPTIMIZER_ADAM));
    add(*c, 0, c == &ctx ? p : twin, {}, options(GA_F32));
  }
  for (int t = 0; t < 20; ++t) {
    accumulate(ctx, {&g});
    accumulate(other, {&g});
    EXPECT_EQ(step(ctx).outcome, step(other).outcome);
    const Tensor before = p;
    accumulate(ctx, {&bad});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
    EXPECT_TRUE(p == before);
  }
  EXPECT_TRUE(p == twin);
}

// ---- Stochastic rounding ------------------------------------------------------------------------

// The fraction of parameters that are rounded up equals the distance of their value from the lower
// neighbour, in spacings.
TEST(Chance, IsTheFractionLost) {
  const int64_t n = 1 << 16;
  for (const int32_t dtype : {GA_F16, GA_BF16}) {
    const double spacing = format(dtype).spacing(1);
    for (const double fraction : {0x1p-8, 0.125, 0.375, 0.5, 0.75, 1 - 0x1p-8}) {
      for (const double sign : {1.0, -1.0}) {
        Tensor p(dtype, n), g(GA_F32, n, -sign * (1 + fraction * spacing));
        Context ctx;
        ctx.group(plain_sgd());
        add(ctx, 0, p, {}, stochastic(GA_MASTER_NONE));
        accumulate(ctx, {&g});
        step(ctx);
        double away = 0;
        for (int64_t i = 0; i < n; ++i) {
          away += p.get(i) == sign * (1 + spacing);
          ASSERT_TRUE(p.get(i) == sign * (1 + spacing) || p.get(i) == sign) << p.get(i);
        }
        EXPECT_NEAR(away, n * fraction, 6 * std::sqrt(n * fraction * (1 - fraction)))
            << format(dtype).name << " " << sign << " " << fraction;
      }
    }
  }
}

// Succeeds if two lists of coin tosses agree half of the time.
testing::AssertionResult independent(const std::vector<bool>& a, const std::vector<bool>& b) {
  double same = 0;
  for (size_t i = 0; i < a.size(); ++i) same += a[i] == b[i];
  const auto n = static_cast<double>(a.size());
  if (std::abs(same - n / 2) <= 6 * std::sqrt(n) / 2) return testing::AssertionSuccess();
  return testing::AssertionFailure() << same << " of " << n << " agree";
}

// For parameters half way between two numbers, and everything else that is rounded stochastically:
// the random numbers of elements, parameters, steps, seeds and purposes are independent.
TEST(Chance, IsDrawnAnewForEveryPurpose) {
  const int64_t n = 1 << 15;
  const double half = 1 + format(GA_BF16).spacing(1) / 2;
  std::vector<std::vector<bool>> draws;
  std::vector<std::string> names;
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32}) {
    ga_config c = config();
    c.seed = seed;
    c.accumulation = GA_ACCUMULATE_STOCHASTIC;
    Tensor a(GA_BF16, n), b(GA_BF16, n), s(GA_F32, n), g(GA_F32, n, -half);
    Context ctx(c);
    ctx.group(plain_sgd());
    ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
    add(ctx, 0, a, {}, stochastic(GA_MASTER_NONE));
    add(ctx, 0, b, {}, stochastic(GA_MASTER_NONE));
    add(ctx, 1, s, {}, options(GA_F32, GA_BF16));
    for (int t = 0; t < 2; ++t) {
      a.fill(0);
      b.fill(0);
      accumulate(ctx, {&g, &g, &g});
      step(ctx);
      const std::string where = " seed " + std::to_string(seed) + " step " + std::to_string(t);
      std::vector<bool> of_a, of_b, of_s;
      const std::vector<double> sums = external_gradient(ctx, 2, n);
      ASSERT_EQ(sums.size(), static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) {
        of_a.push_back(a.get(i) > half);
        of_b.push_back(b.get(i) > half);
        of_s.push_back(sums[static_cast<size_t>(i)] < -half);
      }
      draws.insert(draws.end(), {of_a, of_b, of_s});
      names.insert(names.end(),
                   {"first parameter" + where, "second" + where, "accumulator" + where});
    }
  }
  for (size_t i = 0; i < draws.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      EXPECT_TRUE(independent(draws[i], draws[j])) << names[i] << " and " << names[j];
    }
    for (const ptrdiff_t lag : {1, 2, 8, 16, 64, 4096}) {
      const std::vector<bool> shifted(draws[i].begin() + lag, draws[i].end());
      EXPECT_TRUE(independent(shifted, {draws[i].begin(), draws[i].end() - lag}))
          << names[i] << " and itself " << lag << " later";
    }
  }
}

// A bf16 EMA and the bf16 state of the same element use different random numbers: if both round the
// same number, their rounding errors are not correlated. After one step from 0 with a learning rate
// of 1, the momentum buffer is g, and parameter and EMA are -g; the next step, with a gradient of
// zero, moves the parameter by the buffer.
TEST(Chance, OfAnAverageIsNotThatOfTheState) {
  const int64_t n = 1 << 16;
  ga_optimizer o = plain_sgd();
  o.momentum = 1;
  o.state_dtype = GA_BF16;
  ga_ema e;
  EXPECT_OK(ga_ema_init(&e, sizeof e));
  e.dtype = GA_BF16;
  Random random(5);
  Tensor p(GA_F32, n), g(GA_F32, n), zero(GA_F32, n), average(GA_F32, n);
  for (int64_t i = 0; i < n; ++i) {
    g.set(i, 1 + 0x1p-15 * static_cast<double>(random.below(1 << 15)));
  }
  Context ctx;
  ctx.group(o);
  add(ctx, 0, p);
  ASSERT_OK(ga_context_set_ema(ctx, &e));
  accumulate(ctx, {&g});
  step(ctx);
  const Tensor after = p;
  EXPECT_OK(ga_ema_copy_to(ctx, 0, average.data(), GA_F32));
  accumulate(ctx, {&zero});
  step(ctx);
  double both = 0, of_average = 0, of_state = 0;
  for (int64_t i = 0; i < n; ++i) {
    ASSERT_EQ(after.get(i), -g.get(i));
    const double state = after.get(i) - p.get(i);
    const double a = -average.get(i) - g.get(i), s = state - g.get(i);
    both += a * s;
    of_average += a * a;
    of_state += s * s;
  }
  // At a fraction f of the spacing the error has the variance f (1 - f) spacing^2, on average 1/6.
  const double expected = format(GA_BF16).spacing(1) * format(GA_BF16).spacing(1) / 6;
  const auto elements = static_cast<double>(n);
  EXPECT_NEAR(of_average / elements, expected, expected / 20);
  EXPECT_NEAR(of_state / elements, expected, expected / 20);
  EXPECT_LE(std::abs(both) / std::sqrt(of_average * of_state), 6 / std::sqrt(elements));
}

// Micro-batches and contributions of one window use independent random numbers too: k times half a
// spacing is k / 2 spacings on average, with the variance of independent draws.
TEST(Chance, IsDrawnAnewForEveryContribution) {
  const int64_t n = 1 << 14;
  const double spacing = format(GA_BF16).spacing(1);
  for (const bool one_micro : {false, true}) {
    ga_config c = config();
    c.accumulation = GA_ACCUMULATE_STOCHASTIC;
    c.reduce = GA_REDUCE_SUM;
    Tensor p(GA_F32, n), one(GA_F32, n, 1), half(GA_F32, n, spacing / 2);
    Context ctx(c);
    ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
    add(ctx, 0, p, {}, options(GA_F32, GA_BF16));
    const int terms = 32;  // stays below 2: the spacing is the same throughout
    accumulate(ctx, {&one});
    if (one_micro) {
      EXPECT_OK(ga_micro_begin(ctx, 1, 1, nullptr));
    }
    for (int k = 0; k < terms; ++k) {
      if (one_micro) {
        EXPECT_OK(ga_accumulate_part(ctx, 0, half.data()));
      } else {
        accumulate(ctx, {&half});
      }
    }
    if (one_micro) {
      EXPECT_OK(ga_micro_end(ctx));
    }
    step(ctx);
    double mean = 0, variance = 0;
    for (const double x : external_gradient(ctx, 0, n)) {
      const double ups = (x - 1) / spacing - terms / 2.0;
      mean += ups / n;
      variance += ups * ups / n;
    }
    // A sum of 32 tosses of variance 1/4 has the variance 8, whose estimate has the deviation
    // 8 sqrt(2 / n). Every term needs a toss, because every sum lies between two numbers.
    EXPECT_NEAR(mean, 0, 6 * std::sqrt(8.0 / n));
    EXPECT_NEAR(variance, 8, 6 * 8 * std::sqrt(2.0 / n));
  }
}

// Everything that is rounded stochastically, in one run.
struct Everything {
  std::vector<Tensor> p;
  std::vector<double> numbers;

  bool operator==(const Everything& other) const {
    for (size_t i = 0; i < p.size(); ++i) {
      if (p[i] != other.p[i]) return false;
    }
    return numbers == other.numbers;
  }
};

Everything stochastic_run(ga_config c, uint64_t seed = 5) {
  c.accumulation = GA_ACCUMULATE_STOCHASTIC;
  c.seed = seed;
  const int64_t sizes[] = {2 * 65536 + 5, 17, 1023};
  Everything run;
  ga_optimizer narrow_adam = optimizer(GA_OPTIMIZER_ADAM);
  narrow_adam.state_dtype = GA_BF16;
  Context ctx(c);
  ctx.group(narrow_adam);
  run.p.reserve(100);
  for (const int32_t dtype : {GA_BF16, GA_F16, GA_F32}) {
    for (const int32_t accumulator : {GA_BF16, GA_F16}) {
      for (const int32_t master : {GA_MASTER_F32, GA_MASTER_NONE}) {
        if (dtype == GA_F32 && master == GA_MASTER_NONE) continue;
        for (const int64_t n : sizes) {
          run.p.push_back(random_tensor(dtype, n, 1));
          ga_param_options o = options(GA_F32, accumulator);
          o.master = master;
          o.rounding = dtype == GA_F32 ? GA_ROUND_NEAREST : GA_ROUND_STOCHASTIC;
          add(ctx, 0, run.p.back(), {}, o);
        }
      }
    }
  }
  ga_ema ema;
  EXPECT_OK(ga_ema_init(&ema, sizeof ema));
  ema.dtype = GA_BF16;
  ema.decay = 0.5;
  EXPECT_OK(ga_context_set_ema(ctx, &ema));
  for (uint64_t t = 0; t < 3; ++t) {
    for (uint64_t k = 0; k < 2; ++k) {
      std::vector<const Tensor*> list;
      const Tensor g[] = {random_tensor(GA_F32, sizes[0], 2 * t + k),
                          random_tensor(GA_F32, sizes[1], 2 * t + k),
                          random_tensor(GA_F32, sizes[2], 2 * t + k)};
      for (const Tensor& p : run.p) {
        list.push_back(&g[p.count() == sizes[0] ? 0 : p.count() == sizes[1] ? 1 : 2]);
      }
      accumulate(ctx, list, 0.7);
    }
    run.numbers.push_back(step(ctx).norm);
  }
  const size_t count = run.p.size();
  for (size_t i = 0; i < count; ++i) {
    Tensor average(GA_F32, run.p[i].count());
    EXPECT_OK(ga_ema_copy_to(ctx, static_cast<ga_param>(i), average.data(), GA_F32));
    run.p.push_back(average);
  }
  return run;
}

void backwards(void*, int64_t count, ga_task task, void* data) {
  for (int64_t i = count; i-- > 0;) task(data, i);
}

TEST(Chance, IsTheSameForAnyThreads) {
  const Everything one = stochastic_run(config());
  for (const int32_t threads : {2, 3, 8}) {
    ga_config c = config();
    c.num_threads = threads;
    EXPECT_TRUE(stochastic_run(c) == one) << threads;
  }
  ga_config c = config();
  c.num_threads = 4;
  c.parallel_for = backwards;
  EXPECT_TRUE(stochastic_run(c) == one) << "the program's own threads, in reverse order";
}

TEST(Chance, IsTheSameOnEveryIsa) {
  std::vector<Everything> runs;
  on_every_isa([&] { runs.push_back(stochastic_run(config())); });
  for (const Everything& run : runs) EXPECT_TRUE(run == runs[0]);
}

TEST(Chance, ComesFromTheSeed) {
  const Everything a = stochastic_run(config(), 5), b = stochastic_run(config(), 6);
  for (size_t i = 0; i < a.p.size(); ++i) {
    if (a.p[i].count() < 1000) continue;
    EXPECT_TRUE(a.p[i] != b.p[i]) << i;
  }
}

// ---- Optimizer state of 16 bits -----------------------------------------------------------------

// Both betas are 0.9 and the gradient is constant. A bf16 number has a relative error below 2^-7,
// so a moment has one below 2^-7 / (1 - beta) = 0.0782, and a step m / sqrt(v) one of at most
// 1.0782 / sqrt(1 - 0.0782) - 1 = 0.123. The errors are independent and 0 on average. Over 4096
// elements there remain 3/8 of the variance of v, which is 2^-16 / (1 - beta^2) = 8e-5, so 3e-5,
// and the deviation of the mean, below 0.02 / 64 per step.
TEST(State16, AdamFollowsF32) {
  const int64_t n = 4096;
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADAM);
  o.beta2 = 0.9;
  o.lr = 0x1p-4;
  Tensor wide(GA_F32, n), narrow(GA_F32, n), g(GA_F32, n, 0.7);
  Context ctx;
  ctx.group(o);
  o.state_dtype = GA_BF16;
  ctx.group(o);
  add(ctx, 0, wide);
  add(ctx, 1, narrow);
  for (int t = 0; t < 30; ++t) {
    const Tensor wide_before = wide, narrow_before = narrow;
    accumulate(ctx, {&g, &g});
    step(ctx);
    double mean = 0, worst = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double ratio =
          (narrow.get(i) - narrow_before.get(i)) / (wide.get(i) - wide_before.get(i));
      mean += ratio / n;
      worst = std::max(worst, std::abs(ratio - 1));
    }
    EXPECT_LE(worst, 0.123) << t;
    EXPECT_NEAR(mean, 1, 6 * 0.02 / 64) << t;
  }
}

// Rounded to nearest, v would never change with a beta2 of 0.999, because 0.1 % is less than half a
// spacing.
TEST(State16, SecondMomentDecays) {
  const int64_t n = 4096;
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADAM);
  o.beta1 = 0;
  o.eps = 0;
  o.lr = 1;
  o.state_dtype = GA_BF16;
  Tensor p(GA_F32, n), one(GA_F32, n, 1), zero(GA_F32, n), probe(GA_F32, n, 0x1p-20);
  Context ctx;
  ctx.group(o);
  add(ctx, 0, p);
  accumulate(ctx, {&one});
  step(ctx);
  int t = 1;
  for (; t <= 2000; ++t) {
    accumulate(ctx, {&zero});
    step(ctx);
  }
  // The size of a step gives v: p = -g / sqrt(v / (1 - beta2^t)).
  p.fill(0);
  accumulate(ctx, {&probe});
  step(ctx);
  ++t;
  double mean = 0;
  for (int64_t i = 0; i < n; ++i) mean += std::pow(0x1p-20 / p.get(i), 2) / n;
  const double v = mean * (1 - std::pow(o.beta2, t));
  const double want = (1 - o.beta2) * std::pow(o.beta2, 2001);
  EXPECT_NEAR(v, want, 0.05 * want);
}

TEST(State16, HalvesTheMemory) {
  const int64_t n = 100000;
  int64_t bytes[2];
  for (const int32_t dtype : {0, static_cast<int32_t>(GA_BF16)}) {
    ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
    o.state_dtype = dtype;
    Tensor p(GA_F32, n);
    Context ctx;
    ctx.group(o);
    add(ctx, 0, p);
    bytes[dtype != 0] = memory(ctx).optimizer_state;
  }
  EXPECT_GE(bytes[1], 4 * n);
  EXPECT_LE(bytes[1], bytes[0] / 2 + 8192);
}

TEST(State16, StaysInSkippedSteps) {
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADAM);
  o.state_dtype = GA_BF16;
  Tensor p(GA_F32, 1000, 1), g(GA_F32, 1000, 0.5), bad(GA_F32, 1000, INFINITY);
  Context ctx;
  ctx.group(o);
  add(ctx, 0, p);
  for (int t = 0; t < 10; ++t) {
    accumulate(ctx, {&g});
    step(ctx);
    const Tensor before = p;
    accumulate(ctx, {&bad});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
    EXPECT_TRUE(p == before);
  }
}

}  // namespace
}  // namespace ga::test
