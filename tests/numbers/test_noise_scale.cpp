// SPDX-License-Identifier: Apache-2.0
//
// The gradient noise scale: the algebra by hand, the estimator on distributions of known noise, and
// the windows that bring no estimate.
#include "formats.hpp"

namespace ga::test {
namespace {

ga_config noisy(double smoothing = 0) {
  ga_config c = config();
  c.noise_scale = 1;
  c.noise_smoothing = smoothing;
  return c;
}

// Two parameters of two elements and of one.
class Toy {
 public:
  explicit Toy(const ga_config& c, int32_t gradient_dtype = GA_F32, int32_t accumulator = 0)
      : dtype_(gradient_dtype), ctx(c) {
    ctx.group(plain_sgd(0));
    add(ctx, 0, a_, {}, options(gradient_dtype, accumulator));
    add(ctx, 0, b_, {}, options(gradient_dtype, accumulator));
    kept_.reserve(1000);
  }
  void micro(double a0, double a1, double b, double weight = 1, double scale = 0) {
    kept_.emplace_back(dtype_, 2);
    kept_.back().set(0, a0);
    kept_.back().set(1, a1);
    kept_.emplace_back(dtype_, 1, b);
    accumulate(ctx, {&kept_[kept_.size() - 2], &kept_.back()}, weight, scale);
  }

 private:
  int32_t dtype_;
  Tensor a_{GA_F32, 2}, b_{GA_F32, 1};
  std::vector<Tensor> kept_;

 public:
  Context ctx;
};

void expect_estimate(const ga_step_result& r, double trace, double signal) {
  EXPECT_NEAR(r.noise_trace, trace, 1e-6 * std::abs(trace));
  EXPECT_NEAR(r.noise_signal, signal, 1e-6 * std::abs(signal));
  EXPECT_NEAR(r.noise_scale, trace / signal, 2e-6 * std::abs(trace / signal));
}

void expect_none(const ga_step_result& r) {
  EXPECT_TRUE(std::isnan(r.noise_trace));
  EXPECT_TRUE(std::isnan(r.noise_signal));
  EXPECT_TRUE(std::isnan(r.noise_scale));
}

// Gradients (1, 2, 2) and (3, 0, 0): squares 9 and 9, mean (2, 1, 1) with square 6.
TEST(NoiseScale, ByHand) {
  Toy run(noisy());
  run.micro(1, 2, 2);
  run.micro(3, 0, 0);
  expect_estimate(step(run.ctx), 6, 3);  // (9 - 6) / (1 - 1/2) and 6 - 6 / 2
  // With micro-batches of two samples each, the noise of one sample is twice as large.
  run.micro(1, 2, 2, 2);
  run.micro(3, 0, 0, 2);
  expect_estimate(step(run.ctx), 12, 3);
  // With 1 and 3 samples: mean (2.5, 0.5, 0.5), its square 6.75; weighted mean square (9 + 27) / 4
  // = 9. With n samples in K micro-batches: trace = (9 - 6.75) n / (K - 1), signal = 6.75 - trace /
  // n.
  run.micro(1, 2, 2, 1);
  run.micro(3, 0, 0, 3);
  expect_estimate(step(run.ctx), 9, 4.5);
  // Without noise.
  for (int k = 0; k < 3; ++k) run.micro(1, 2, 2, 1 + k);
  const ga_step_result r = step(run.ctx);
  EXPECT_NEAR(r.noise_trace, 0, 9 * 6 * 0x1p-22);
  EXPECT_NEAR(r.noise_signal, 9, 1e-5);
  // Noise alone: the mean is 0, and the estimate of its square is negative.
  run.micro(2, 0, 0);
  run.micro(-2, 0, 0);
  expect_estimate(step(run.ctx), 8, -4);
}

// The estimate does not depend on how gradients are handed over or added up.
TEST(NoiseScale, ForEveryKindAndMode) {
  for (const int32_t kind : {GA_GRADIENT_MEAN, GA_GRADIENT_SUM}) {
    for (const int32_t reduce : {GA_REDUCE_MEAN, GA_REDUCE_SUM}) {
      for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
        for (const double scale : {1.0, 1024.0, -8.0}) {
          for (const int32_t mode : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN,
                                     GA_ACCUMULATE_COMPENSATED, GA_ACCUMULATE_STOCHASTIC}) {
            ga_config c = noisy();
            c.gradient_kind = kind;
            c.reduce = reduce;
            c.gradient_life = life;
            c.accumulation = mode;
            if (mode == GA_ACCUMULATE_RUNNING_MEAN &&
                (kind == GA_GRADIENT_SUM || reduce == GA_REDUCE_SUM)) {
              continue;
            }
            SCOPED_TRACE("kind " + std::to_string(kind) + " reduce " + std::to_string(reduce) +
                         " mode " + std::to_string(mode) + " scale " + std::to_string(scale));
            for (const int32_t dtype : {GA_F32, GA_F16, GA_BF16}) {
              for (const int32_t accumulator : {GA_F32, GA_BF16}) {
                Toy run(c, dtype, accumulator);
                const double s1 = scale * (kind == GA_GRADIENT_SUM ? 1 : 1);
                const double s3 = scale * (kind == GA_GRADIENT_SUM ? 3 : 1);
                run.micro(1 * s1, 2 * s1, 2 * s1, 1, scale);
                run.micro(3 * s3, 0, 0, 3, scale);
                expect_estimate(step(run.ctx), 9, 4.5);
              }
            }
          }
        }
      }
    }
  }
}

TEST(NoiseScale, OfF64) {
  Tensor p(GA_F64, 3), a(GA_F64, 3), b(GA_F64, 3);
  const double first[] = {1, 2, 2}, second[] = {3, 0, 0};
  for (int64_t i = 0; i < 3; ++i) {
    a.set(i, 1e-30 * first[i]);
    b.set(i, 1e-30 * second[i]);
  }
  Context ctx(noisy());
  ctx.group(plain_sgd(0));
  add(ctx, 0, p);
  accumulate(ctx, {&a});
  accumulate(ctx, {&b}, 3);
  const ga_step_result r = step(ctx);
  EXPECT_NEAR(r.noise_trace, 9e-60, 1e-73);
  EXPECT_NEAR(r.noise_signal, 4.5e-60, 1e-73);
  EXPECT_NEAR(r.noise_scale, 2, 1e-12);
}

// A parameter without a gradient in a micro-batch counts as zeros.
TEST(NoiseScale, MissingGradientsAreZeros) {
  Toy with(noisy()), without(noisy());
  const float a[] = {1, 2};
  without.ctx.accumulate({a, nullptr}, 2);
  without.micro(3, 0, 5, 1);
  with.micro(1, 2, 0, 2);
  with.micro(3, 0, 5, 1);
  const ga_step_result r = step(with.ctx), s = step(without.ctx);
  EXPECT_FALSE(std::isnan(r.noise_scale));
  EXPECT_DOUBLE_EQ(r.noise_trace, s.noise_trace);
  EXPECT_DOUBLE_EQ(r.noise_signal, s.noise_signal);
}

// The estimate is that of the gradient before clipping.
TEST(NoiseScale, IsBeforeClipping) {
  Toy run(noisy());
  const ga_clip c = clip(GA_CLIP_GLOBAL, 0.1, GA_FLAVOR_TORCH, 1.5);
  EXPECT_OK(ga_context_set_clip(run.ctx, &c));
  run.micro(1, 2, 2);
  run.micro(3, 0, 0);
  expect_estimate(step(run.ctx), 6, 3);
}

// Contributions by part, one per parameter and micro-batch, in micro-batches filled in turns.
TEST(NoiseScale, ByPart) {
  Tensor a(GA_F32, 2), b(GA_F32, 1);
  const float first[] = {1, 2}, second[] = {3, 0}, two = 2, zero = 0;
  for (const bool turns : {false, true}) {
    Context ctx(noisy());
    ctx.group(plain_sgd(0));
    add(ctx, 0, a);
    add(ctx, 0, b);
    const auto part = [&](int64_t k, ga_param param, const float* g) {
      EXPECT_OK(ga_micro_begin(ctx, k, k == 0 ? 1 : 3, nullptr));
      EXPECT_OK(ga_accumulate_part(ctx, param, g));
      EXPECT_OK(ga_micro_end(ctx));
    };
    part(0, 0, first);
    if (!turns) part(0, 1, &two);
    part(1, 0, second);
    if (turns) part(0, 1, &two);
    part(1, 1, &zero);
    expect_estimate(step(ctx), 9, 4.5);
  }
}

// ---- Distributions whose noise is known ---------------------------------------------------------

double normal(Random& random) {
  return std::sqrt(-2 * std::log(1 - random.unit())) * std::cos(2 * M_PI * random.unit());
}

struct Estimate {
  double mean = 0, deviation = 0;  // deviation is that of the mean
  explicit Estimate(const std::vector<double>& x) {
    const auto n = static_cast<double>(x.size());
    for (const double v : x) mean += v / n;
    double variance = 0;
    for (const double v : x) variance += (v - mean) * (v - mean) / (n - 1);
    deviation = std::sqrt(variance / n);
  }
};

// Over many windows without smoothing, the mean of the estimates is within six standard deviations
// of the true value. The deviation is small enough to exclude the obvious wrong estimators (the
// biased |g|^2 of the window, unweighted means of |g_k|^2, K instead of K - 1).
void expect_unbiased(const std::vector<double>& weights, double mean_size, int32_t kind) {
  const int64_t n = 48;
  const int windows = 6000;
  Random random(static_cast<uint64_t>(weights.size()) * 31 + static_cast<uint64_t>(kind));
  std::vector<double> truth(n), spread(n);
  double signal = 0, trace = 0;
  for (size_t i = 0; i < n; ++i) {
    truth[i] = mean_size * random.signed_unit();
    spread[i] = 0.2 + random.unit();
    signal += truth[i] * truth[i];
    trace += spread[i] * spread[i];
  }
  ga_config c = noisy();
  c.gradient_kind = kind;
  Tensor p(GA_F32, 32), q(GA_F32, n - 32), g(GA_F32, 32), h(GA_F32, n - 32);
  Context ctx(c);
  ctx.group(plain_sgd(0));
  add(ctx, 0, p);
  add(ctx, 0, q);
  std::vector<double> traces, signals;
  for (int t = 0; t < windows; ++t) {
    for (const double weight : weights) {
      for (size_t i = 0; i < n; ++i) {
        const double mean = truth[i] + spread[i] * normal(random) / std::sqrt(weight);
        const double x = kind == GA_GRADIENT_SUM ? weight * mean : mean;
        if (i < 32) {
          g.set(static_cast<int64_t>(i), x);
        } else {
          h.set(static_cast<int64_t>(i) - 32, x);
        }
      }
      accumulate(ctx, {&g, &h}, weight);
    }
    const ga_step_result r = step(ctx);
    EXPECT_DOUBLE_EQ(r.noise_scale, r.noise_trace / r.noise_signal);
    traces.push_back(r.noise_trace);
    signals.push_back(r.noise_signal);
  }
  const Estimate of_trace(traces), of_signal(signals);
  EXPECT_NEAR(of_trace.mean, trace, 6 * of_trace.deviation);
  EXPECT_NEAR(of_signal.mean, signal, 6 * of_signal.deviation);
  EXPECT_LT(6 * of_trace.deviation, 0.03 * trace);
}

TEST(NoiseScale, IsUnbiased) { expect_unbiased({1, 1, 1, 1}, 0.5, GA_GRADIENT_MEAN); }
TEST(NoiseScale, IsUnbiasedForSums) { expect_unbiased({4, 4, 4, 4, 4, 4}, 0.5, GA_GRADIENT_SUM); }
TEST(NoiseScale, IsUnbiasedForUnequalSizes) {
  expect_unbiased({1, 2, 5, 8}, 0.5, GA_GRADIENT_MEAN);
  expect_unbiased({16, 1, 3}, 0.5, GA_GRADIENT_SUM);
}
TEST(NoiseScale, IsUnbiasedWhereThereIsNoSignal) { expect_unbiased({2, 3}, 0, GA_GRADIENT_MEAN); }

// ---- Over steps ---------------------------------------------------------------------------------

// The results are means of the estimates, each weighted by smoothing to the power of its age;
// noise_scale is the ratio of the means, not the mean of the ratios.
TEST(NoiseScale, Smoothing) {
  for (const double smoothing : {0.0, 0.5, 0.9}) {
    Toy run(noisy(smoothing));
    double traces = 0, signals = 0, weight = 0;
    Random random(1);
    for (int t = 0; t < 30; ++t) {
      const double x = std::floor(8 * random.signed_unit()), y = std::floor(8 * random.unit());
      run.micro(x, y, 2);
      run.micro(3, y, 9);
      const double squares = (x * x + y * y + 4 + 9 + y * y + 81) / 2;
      const double mean = std::pow((x + 3) / 2, 2) + y * y + std::pow(5.5, 2);
      const double trace = (squares - mean) * 2, signal = mean - trace / 2;
      traces = smoothing * traces + trace;
      signals = smoothing * signals + signal;
      weight = smoothing * weight + 1;
      expect_estimate(step(run.ctx), traces / weight, signals / weight);
    }
  }
}

// A window that brings no estimate leaves the last estimate, and no result is NaN after the first.
TEST(NoiseScale, WindowsThatSayNothing) {
  Toy run(noisy(0.5));
  const double first_trace = 6, first_signal = 3;
  const float one[2] = {1, 1}, single = 1;
  const auto say_nothing = [&](auto check) {
    run.micro(7, 7, 7);  // one micro-batch
    check(step(run.ctx));
    run.micro(7, 7, 7);  // one with a weight
    run.micro(1, 1, 1, 0);
    check(step(run.ctx));
    check(step(run.ctx));  // empty
    run.micro(7, 7, NAN);
    run.micro(7, 7, 7);
    check(step(run.ctx));  // skipped
    run.micro(7, 7, 7);
    run.micro(5, 5, 5);
    EXPECT_OK(ga_discard(run.ctx));
    EXPECT_OK(ga_micro_begin(run.ctx, 0, 1, nullptr));  // a parameter twice in a micro-batch
    EXPECT_OK(ga_accumulate_part(run.ctx, 0, one));
    EXPECT_OK(ga_accumulate_part(run.ctx, 1, &single));
    EXPECT_OK(ga_accumulate_part(run.ctx, 1, &single));
    EXPECT_OK(ga_micro_end(run.ctx));
    run.micro(7, 7, 7);
    check(step(run.ctx));
    run.micro(7, 7, 7);  // a parameter twice, in a micro-batch opened again
    run.micro(5, 5, 5);
    EXPECT_OK(ga_micro_begin(run.ctx, 0, 1, nullptr));
    EXPECT_OK(ga_accumulate_part(run.ctx, 0, one));
    EXPECT_OK(ga_micro_end(run.ctx));
    check(step(run.ctx));
  };
  say_nothing([](const ga_step_result& r) { expect_none(r); });
  run.micro(1, 2, 2);
  run.micro(3, 0, 0);
  expect_estimate(step(run.ctx), first_trace, first_signal);
  say_nothing([&](const ga_step_result& r) { expect_estimate(r, first_trace, first_signal); });
}

TEST(NoiseScale, IsNaNWithoutTheOption) {
  Toy run(config());
  run.micro(1, 2, 2);
  run.micro(3, 0, 0);
  expect_none(step(run.ctx));
}

// A dropped micro-batch does not count.
TEST(NoiseScale, OfWhatWasNotDropped) {
  ga_config c = noisy();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  Toy run(c);
  run.micro(1, 2, 2, 1);
  run.micro(NAN, 2, 2, 5);
  run.micro(3, 0, 0, 3);
  run.micro(1, INFINITY, 0, 3);
  expect_estimate(step(run.ctx), 9, 4.5);
  run.micro(1, 2, 2, 1);
  run.micro(3, 0, INFINITY, 3);
  expect_estimate(step(run.ctx), 9, 4.5);  // one micro-batch is left, so the last estimate stays
}

// With a dropped micro-batch, all accumulation modes give the same estimate, that of the algebra in
// float64, for numbers that are not powers of two.
TEST(NoiseScale, OfWhatWasNotDroppedInEveryMode) {
  for (const int32_t mode : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN,
                             GA_ACCUMULATE_COMPENSATED, GA_ACCUMULATE_STOCHASTIC}) {
    for (const int32_t policy : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
      SCOPED_TRACE("mode " + std::to_string(mode) + ", policy " + std::to_string(policy));
      ga_config c = noisy();
      c.accumulation = mode;
      c.nonfinite = policy;
      Toy run(c);
      Random random(3);
      const double weights[] = {3, 0.7, 5, 1.9};
      for (int t = 0; t < 3; ++t) {
        double sum[3] = {}, micros = 0, samples = 0;
        for (int k = 0; k < 4; ++k) {
          float x[3];
          for (float& v : x) v = static_cast<float>(2 + random.signed_unit());
          const bool drop = policy == GA_NONFINITE_DROP_MICRO && k == t;
          run.micro(drop ? INFINITY : x[0], x[1], x[2], weights[k]);
          if (drop) continue;
          samples += weights[k];
          for (int i = 0; i < 3; ++i) {
            sum[i] += weights[k] * x[i];
            micros += weights[k] * x[i] * x[i];
          }
        }
        const int kept = policy == GA_NONFINITE_DROP_MICRO ? 3 : 4;
        micros /= samples;
        double window = 0;
        for (const double s : sum) window += s / samples * (s / samples);
        const double trace = (micros - window) * samples / (kept - 1);
        const ga_step_result r = step(run.ctx);
        // The difference of two sums of order 12, each with a few roundings in f32.
        const double off = 12 * 8 * 0x1p-24 * samples;
        EXPECT_NEAR(r.noise_trace, trace, off);
        EXPECT_NEAR(r.noise_signal, window - trace / samples, off);
      }
    }
  }
}

// The option does not change the training run itself.
TEST(NoiseScale, ChangesNothingElse) {
  Tensor p[2] = {random_tensor(GA_F32, 70001, 1), random_tensor(GA_F32, 70001, 1)};
  for (int i = 0; i < 2; ++i) {
    Context ctx(i == 0 ? config() : noisy(0.9));
    ctx.group(optimizer(GA_OPTIMIZER_ADAM));
    add(ctx, 0, p[i]);
    for (uint64_t t = 0; t < 4; ++t) {
      const Tensor a = random_tensor(GA_F32, 70001, 2 * t),
                   b = random_tensor(GA_F32, 70001, 2 * t + 1);
      accumulate(ctx, {&a}, 3);
      accumulate(ctx, {&b}, 5);
      step(ctx);
    }
  }
  EXPECT_TRUE(p[0] == p[1]);
}

TEST(NoiseScale, SameBitsForAnyThreadsAndIsa) {
  const int64_t n = 3 * 65536 + 5;
  static const Tensor a = random_tensor(GA_F32, n, 1), b = random_tensor(GA_F32, n, 2);
  const auto run = [&](int32_t threads) {
    ga_config c = noisy();
    c.num_threads = threads;
    Tensor p(GA_F32, n);
    Context ctx(c);
    ctx.group(plain_sgd(0));
    add(ctx, 0, p);
    accumulate(ctx, {&a}, 0.7);
    accumulate(ctx, {&b}, 1.9);
    const ga_step_result r = step(ctx);
    return std::make_pair(r.noise_trace, r.noise_signal);
  };
  const auto one = run(1);
  EXPECT_TRUE(run(3) == one);
  on_every_isa([&] { EXPECT_TRUE(run(2) == one); });
}

// ---- What does not go together ------------------------------------------------------------------

TEST(NoiseScale, WrongNumbers) {
  const auto create = [](const ga_config& c) {
    ga_context* ctx = nullptr;
    const ga_status status = ga_context_create(&c, &ctx);
    ga_context_destroy(ctx);
    return status;
  };
  const ga_status invalid = GA_ERROR_INVALID_ARGUMENT;
  for (const int32_t on : {-1, 2}) {
    ga_config c = noisy();
    c.noise_scale = on;
    EXPECT_TRUE(refused(create(c), invalid, {"noise_scale", std::to_string(on)}));
  }
  for (const double smoothing : {-0.1, 1.0, 1.5, double{NAN}, double{INFINITY}}) {
    EXPECT_TRUE(refused(create(noisy(smoothing)), invalid, {"noise_smoothing"}));
  }
}

TEST(NoiseScale, WaysToContributeWithoutMicroBatchNorms) {
  Tensor p(GA_F32, 16), table(GA_F32, 16), g(GA_F32, 16, 1);
  Context ctx(noisy());
  ctx.group(plain_sgd());
  add(ctx, 0, p, {4, 4});
  ga_param_options o = options();
  o.rows = GA_ROWS_DENSE;
  const ga_status added = try_add(ctx, 0, "table", table.data(), GA_F32, {4, 4}, o);
  EXPECT_TRUE(added == GA_OK || added == GA_ERROR_UNSUPPORTED);
  EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
  const ga_window_info before = window(ctx);
  const ga_status unsupported = GA_ERROR_UNSUPPORTED;
  ga_accumulator out;
  out.struct_size = sizeof out;
  EXPECT_TRUE(refused(ga_accumulator_acquire(ctx, 0, &out), unsupported, {"noise_scale"}));
  EXPECT_TRUE(refused(ga_accumulate_matmul(ctx, 0, 4, g.data(), 4, GA_NO_TRANSPOSE, g.data(), 4,
                                           GA_NO_TRANSPOSE, GA_F32),
                      unsupported, {"noise_scale"}));
  if (added == GA_OK) {
    const int32_t row = 0;
    EXPECT_TRUE(refused(ga_accumulate_rows(ctx, 1, &row, GA_I32, 1, g.data()), unsupported,
                        {"noise_scale"}));
  }
  EXPECT_TRUE(same_window(window(ctx), before));
  EXPECT_OK(ga_accumulate_part(ctx, 0, g.data()));
  EXPECT_OK(ga_micro_end(ctx));
  step(ctx);
  EXPECT_EQ(p.get(15), -1);
}

}  // namespace
}  // namespace ga::test
