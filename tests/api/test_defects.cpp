// SPDX-License-Identifier: Apache-2.0
//
// Known defects of other systems, one test each. The comments say what the system does, in which
// version, how large the error was (measured by running the system if a number is given), and what
// this library does. The last section has wrong input that must not be accepted silently.
#include <sys/mman.h>

#include <functional>

#include "formats.hpp"

namespace ga::test {
namespace {

ga_schedule linear(int64_t total) {
  ga_schedule s = schedule(GA_SCHEDULE_LINEAR);
  s.total_steps = total;
  return s;
}

// One scalar parameter of plain SGD.
class Scalar {
 public:
  explicit Scalar(const ga_config& c = config(), const ga_optimizer& o = plain_sgd()) : ctx(c) {
    ctx.group(o);
    ctx.param(0, "p", &p, 1);
  }
  void micro(float g, double weight = 1) { ctx.accumulate({&g}, weight); }
  float p = 0;
  Context ctx;
};

// ---- optax.MultiSteps [0.2.8] -------------------------------------------------------------------

// One NaN or infinity makes the update NaN at once, and the accumulator, a running mean, never
// recovers. Here the window is skipped and the next one is not affected.
TEST(Optax, OneNaNStaysForEver) {
  Scalar run;
  for (const float bad : {NAN, INFINITY}) {
    for (int k = 0; k < 4; ++k) run.micro(k == 1 ? bad : 1);
    EXPECT_EQ(step(run.ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
    EXPECT_EQ(run.p, 0);
  }
  for (int k = 0; k < 4; ++k) run.micro(1);
  EXPECT_EQ(step(run.ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(run.p, -1);
}

// skip_not_finite does not count the micro-batch, so all later windows are shifted by one. Here the
// micro-batch counts toward K.
TEST(Optax, SkippingSlipsTheWindow) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  c.accum_steps = 4;
  Scalar run(c);
  for (int k = 0; k < 4; ++k) run.micro(k == 2 ? INFINITY : 3);
  EXPECT_EQ(window(run.ctx).state, GA_WINDOW_FULL);
  EXPECT_EQ(step(run.ctx).window_dropped, 1);
  EXPECT_EQ(run.p, -3) << "not the mean of the other three";
  for (int k = 0; k < 4; ++k) run.micro(1);
  EXPECT_EQ(window(run.ctx).state, GA_WINDOW_FULL);
}

// Casts its f32 accumulator back to the dtype of the gradients: rms error 1.6e-3 in bf16. Here the
// mean of bf16 gradients is in f32, with an error of at most K + 4 roundings of f32.
TEST(Optax, CastsTheAccumulatorBack) {
  const int64_t n = 4096;
  const int terms = 8;
  Tensor p(GA_F32, n);
  std::vector<Tensor> g;
  g.reserve(terms);
  Context ctx;
  ctx.group(plain_sgd());
  add(ctx, 0, p, {}, options(GA_BF16));
  for (uint64_t k = 0; k < terms; ++k) {
    g.push_back(random_tensor(GA_BF16, n, k));
    accumulate(ctx, {&g.back()});
  }
  step(ctx);
  for (int64_t i = 0; i < n; ++i) {
    double sum = 0, magnitude = 0;
    for (const Tensor& each : g) sum += each.get(i), magnitude += std::abs(each.get(i));
    ASSERT_NEAR(-p.get(i), sum / terms, (terms + 4) * 0x1p-24 * magnitude / terms);
  }
}

// ---- Keras 3 gradient_accumulation_steps [3.15] -------------------------------------------------

// The schedule gets the micro-batch counter: updates 1, 2, 3 of 4 micro-batches each use the rates
// of steps 3, 7 and 11. Here the schedule counts applied steps.
TEST(Keras, ScheduleCountsMicroBatches) {
  Scalar run;
  const ga_schedule s = linear(100);
  EXPECT_OK(ga_group_set_schedule(run.ctx, 0, &s));
  for (int t = 0; t < 3; ++t) {
    for (int k = 0; k < 4; ++k) run.micro(1);
    EXPECT_DOUBLE_EQ(step(run.ctx).lr, 1 - t / 100.0);
  }
}

// The EMA is updated after every micro-batch, with parameters that did not move: an error of 47.7
// %. Here it moves once per applied step.
TEST(Keras, AveragesMoveWithMicroBatches) {
  Scalar run;
  ga_ema ema;
  EXPECT_OK(ga_ema_init(&ema, sizeof ema));
  ema.decay = 0.5;
  EXPECT_OK(ga_context_set_ema(run.ctx, &ema));
  double want = 0;
  for (int t = 1; t <= 5; ++t) {
    for (int k = 0; k < 4; ++k) run.micro(-1);
    step(run.ctx);
    want = t == 1 ? 1 : (want + t) / 2;
    double average = 0;
    EXPECT_OK(ga_ema_copy_to(run.ctx, 0, &average, GA_F64));
    EXPECT_EQ(average, want);
  }
}

// The loss scale grows with the number of micro-batches, even within a window, so gradients of two
// scales are added up. Here the scaler counts applied steps, and one scale holds for a window.
TEST(Keras, LossScaleGrowsWithMicroBatches) {
  Scalar run;
  ga_loss_scaler s;
  EXPECT_OK(ga_loss_scaler_init(&s, sizeof s));
  s.growth_interval = 2;
  EXPECT_OK(ga_context_set_loss_scaler(run.ctx, &s));
  for (int t = 0; t < 4; ++t) {
    double scale = 0;
    for (int k = 0; k < 4; ++k) {
      EXPECT_OK(ga_loss_scale(run.ctx, &scale, nullptr));
      EXPECT_EQ(scale, t < 2 ? 65536 : 131072) << "window " << t << ", micro-batch " << k;
      run.micro(static_cast<float>(scale));
    }
    step(run.ctx);
    EXPECT_EQ(run.p, static_cast<float>(-(t + 1)));
  }
}

// bf16 variables get bf16 accumulators: rms error 1.65e-2. Here accumulators are f32 unless the
// program chooses another dtype.
TEST(Keras, AccumulatorsHaveTheDtypeOfTheVariable) {
  Tensor p(GA_BF16, 1), g(GA_BF16, 1, 1);
  Context ctx;
  ctx.group(plain_sgd());
  add(ctx, 0, p);
  for (int k = 0; k < 1000; ++k) accumulate(ctx, {&g});  // a bf16 sum would stall at 256
  step(ctx);
  EXPECT_EQ(p.get(0), -1);
}

// The incomplete window at the end of an epoch leaks into the next epoch. Here ga_step applies it,
// divided by its own weights, or ga_discard drops it.
TEST(Keras, TheTailLeaksIntoTheNextEpoch) {
  ga_config c = config();
  c.accum_steps = 4;
  Scalar run(c);
  run.micro(2);
  run.micro(4);
  EXPECT_EQ(step(run.ctx).micro_batches, 2);
  EXPECT_EQ(run.p, -3);
  for (int k = 0; k < 4; ++k) run.micro(1);
  EXPECT_EQ(window(run.ctx).state, GA_WINDOW_FULL);
  step(run.ctx);
  EXPECT_EQ(run.p, -4);
  run.micro(100);
  EXPECT_OK(ga_discard(run.ctx));
  for (int k = 0; k < 4; ++k) run.micro(1);
  step(run.ctx);
  EXPECT_EQ(run.p, -5);
}

// A gradient that is None in the last micro-batch discards the window's sum for that variable. Here
// a missing gradient changes nothing.
TEST(Keras, AMissingGradientLosesTheWindow) {
  float p[2] = {0, 0};
  const float g = 4;
  Context ctx;
  ctx.group(plain_sgd());
  ctx.param(0, "a", &p[0], 1);
  ctx.param(0, "b", &p[1], 1);
  ctx.accumulate({&g, &g});
  ctx.accumulate({&g, nullptr});
  step(ctx);
  EXPECT_EQ(p[0], -4);
  EXPECT_EQ(p[1], -2);
}

// Clips before the gradients are summed. Here clipping comes after the sum: gradients of 6 and -4
// have the mean 1, which is not clipped.
TEST(Keras, ClipsBeforeTheSum) {
  Scalar run;
  const ga_clip c = clip(GA_CLIP_GLOBAL, 1.5, GA_FLAVOR_KERAS);
  EXPECT_OK(ga_context_set_clip(run.ctx, &c));
  run.micro(6);
  run.micro(-4);
  EXPECT_EQ(step(run.ctx).clip_factor, 1);
  EXPECT_EQ(run.p, -1);
}

// ---- GradientAccumulateOptimizer [0.5.2, TensorFlow 2.15] ---------------------------------------

// Runs the inner optimizer with zero gradients in every micro-batch except the last of a window:
// SGD with momentum moved 1.36 times the exact distance, Adam 1.68, RMSprop 1.20; 61 of 64
// micro-batches moved weights instead of 16; its counter stood at 80. Here 64 micro-batches in
// windows of 4 are 16 steps, bit for bit those of 16 whole batches.
TEST(GradientAccumulateOptimizer, StepsWithZeroGradients) {
  ga_optimizer momentum = optimizer(GA_OPTIMIZER_SGD);
  momentum.momentum = 0.9;
  for (const ga_optimizer& o :
       {momentum, optimizer(GA_OPTIMIZER_ADAM), optimizer(GA_OPTIMIZER_RMSPROP)}) {
    Scalar parts(config(), o), whole(config(), o);
    int moved = 0;
    for (int t = 0; t < 16; ++t) {
      const float g[4] = {1.0f * static_cast<float>(t), 2, -3, 5};
      for (int k = 0; k < 4; ++k) {
        const float before = parts.p;
        parts.micro(g[k]);
        moved += parts.p != before;
      }
      whole.micro((g[0] + g[1] + g[2] + g[3]) / 4);
      const float before = parts.p;
      const ga_step_result r = step(parts.ctx);
      moved += parts.p != before;
      step(whole.ctx);
      EXPECT_EQ(r.steps, t + 1);
      EXPECT_EQ(parts.p, whole.p) << "optimizer " << o.kind << ", step " << t;
    }
    EXPECT_EQ(moved, 16);
  }
}

// The sparse path appends rows to the accumulated slices and applies all of them again in each
// window. Here a window applies its own rows only.
TEST(GradientAccumulateOptimizer, SparseRowsGrow) {
  Tensor p(GA_F32, 10), g(GA_F32, 2, 1);
  Context ctx;
  ctx.group(plain_sgd());
  ga_param_options o = options();
  o.rows = GA_ROWS_LAZY;
  add(ctx, 0, p, {5, 2}, o);
  for (int32_t t = 0; t < 5; ++t) {
    for (int k = 0; k < 2; ++k) {
      EXPECT_OK(ga_micro_begin(ctx, k, 1, nullptr));
      EXPECT_OK(ga_accumulate_rows(ctx, 0, &t, GA_I32, 1, g.data()));
      EXPECT_OK(ga_micro_end(ctx));
    }
    step(ctx);
    for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(p.get(i), i / 2 <= t ? -1 : 0);
  }
}

// ---- GradientAccumulator's model wrapper [0.5.2] ------------------------------------------------

// Micro-batches of 20, 20, 20 and 4 samples have the same weight: an error of 39.7 % of the step.
// Here the program gives each micro-batch its weight.
TEST(GradientAccumulator, UnevenMicroBatchesWeighTheSame) {
  Scalar run;
  const double sizes[] = {20, 20, 20, 4};
  const float means[] = {1, -1, 0.5f, 8};
  double sum = 0;
  for (int k = 0; k < 4; ++k) {
    run.micro(means[k], sizes[k]);
    sum += sizes[k] * static_cast<double>(means[k]);
  }
  step(run.ctx);
  EXPECT_NEAR(run.p, -sum / 64, 8 * 0x1p-24);
}

// AGC clips each micro-batch and not the window: it moved 0.288 where 0.131 was right. Here the
// window is clipped, as the full batch would have been; GA_CLIP_WHEN_MICRO gives the other behaviour.
TEST(GradientAccumulator, AgcClipsMicroBatches) {
  for (const int32_t when : {GA_CLIP_WHEN_STEP, GA_CLIP_WHEN_MICRO}) {
    Scalar run;
    run.p = 1;
    ga_clip c = clip(GA_CLIP_AGC, 0);
    c.when = when;
    EXPECT_OK(ga_context_set_clip(run.ctx, &c));
    run.micro(1);
    run.micro(-0.995f);
    step(run.ctx);
    // The mean is 0.0025, below 0.01 of the weight; clipped alone, each gradient becomes 0.01.
    EXPECT_NEAR(1 - run.p, when == GA_CLIP_WHEN_STEP ? 0.0025 : 0, 2e-7);
  }
}

// The tail of an epoch is not applied and leaks, as in Keras above. Here it is applied, with its
// own weights.
TEST(GradientAccumulator, TheTailIsDividedByItsOwnWeight) {
  Scalar run;
  for (int k = 0; k < 3; ++k) run.micro(1, 20);
  run.micro(1, 4);
  EXPECT_EQ(step(run.ctx).weight, 64);
  run.micro(5, 7);
  EXPECT_EQ(step(run.ctx).weight, 7);
  EXPECT_FLOAT_EQ(run.p, -6);
}

// AccumBatchNormalization takes the mean of its micro-batches' variances for the window's variance,
// and so leaves out the variance between their means. On 4 micro-batches of 20 samples it was 0.962
// of the exact variance with unsorted rows, 0.129 with sorted rows, and 0 with one sample per
// micro-batch. For the normal numbers of this test: 0.961, 0.138, 0. This library's ratio is 1.
TEST(GradientAccumulator, AveragesVariances) {
  constexpr int64_t kChannels = 400;
  struct Case {
    const char* name;
    int64_t samples;  // per micro-batch
    bool sorted;
    double low, high;  // bounds of the ratio to the exact variance
  };
  // Unsorted: (1 - 1 / n) / (1 - 1 / (4 n)) on average, here over 400 channels.
  for (const Case& c :
       {Case{"unsorted", 20, false, 0.957, 0.967}, Case{"sorted", 20, true, 0.133, 0.143},
        Case{"one sample", 1, false, 0, 0}}) {
    SCOPED_TRACE(c.name);
    const int64_t rows = 4 * c.samples;
    Random random(1);
    std::vector<double> x(static_cast<size_t>(rows * kChannels));  // [channel][row]
    for (double& number : x) {
      const double length = std::sqrt(-2 * std::log(1 - random.unit()));
      number = length * std::cos(6.283185307179586 * random.unit());  // normal: Box & Muller 1958
    }
    const auto mean = [](const double* from, int64_t n) {
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += from[i];
      return sum / static_cast<double>(n);
    };
    const auto variance = [&](const double* from, int64_t n) {
      const double centre = mean(from, n);
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += (from[i] - centre) * (from[i] - centre);
      return sum / static_cast<double>(n);
    };
    std::vector<double> exact;
    double theirs = 0;
    for (int64_t channel = 0; channel < kChannels; ++channel) {
      double* const of = x.data() + channel * rows;
      if (c.sorted) std::sort(of, of + rows);
      exact.push_back(variance(of, rows));
      double sum = 0;
      for (int64_t k = 0; k < 4; ++k) sum += variance(of + k * c.samples, c.samples);
      theirs += sum / 4 / exact.back() / static_cast<double>(kChannels);
    }
    EXPECT_GE(theirs, c.low);
    EXPECT_LE(theirs, c.high);

    Context ctx;
    ga_bn_options o;
    EXPECT_OK(ga_bn_options_init(&o, sizeof o, GA_FLAVOR_KERAS));
    o.dtype = GA_F64;
    o.momentum = 1;  // the running statistics are the window's
    ga_bn bn = -1;
    EXPECT_OK(ga_bn_add(ctx, "bn", kChannels, -1, -1, &o, &bn));
    for (int64_t k = 0; k < 4; ++k) {
      Block64 micro, y(static_cast<size_t>(c.samples * kChannels));
      for (int64_t s = 0; s < c.samples; ++s)
        for (int64_t channel = 0; channel < kChannels; ++channel)
          micro.push_back(x[static_cast<size_t>(channel * rows + k * c.samples + s)]);
      EXPECT_OK(ga_bn_forward(ctx, bn, micro.data(), c.samples, 1, y.data()));
      EXPECT_OK(ga_micro_begin(ctx, k, static_cast<double>(c.samples), nullptr));
      EXPECT_OK(ga_micro_end(ctx));
    }
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    std::vector<double> ours(kChannels);
    EXPECT_OK(ga_bn_running(ctx, bn, nullptr, ours.data(), GA_F64, nullptr));
    for (size_t channel = 0; channel < kChannels; ++channel)
      EXPECT_NEAR(ours[channel] / exact[channel], 1, 80 * 0x1p-52);
  }
}

// ---- accelerate [1.15], Lightning, Run:AI [0.4.1], transformers before October 2024 -------------

// A short last window is divided by N: with 2 of 4 micro-batches it moves 0.5 of the distance, with
// 1 of 4 it moves 0.25.
TEST(Accelerate, AShortTailIsDividedByN) {
  ga_config c = config();
  c.accum_steps = 4;
  for (int held = 1; held <= 4; ++held) {
    Scalar run(c);
    for (int k = 0; k < held; ++k) run.micro(1);
    step(run.ctx);
    EXPECT_NEAR(run.p, -1, 3 * 0x1p-24) << held << " of 4";
  }
}

// Uneven micro-batches have an error of 14 %, as in GradientAccumulator above. transformers took
// the mean of the means over tokens: 11 and 101 tokens had weights of 0.5 and 0.5.
TEST(Transformers, TheMeanOfTokenMeans) {
  Scalar means;
  means.micro(1, 11);
  means.micro(0, 101);
  step(means.ctx);
  EXPECT_NEAR(means.p, -11.0 / 112, 4 * 0x1p-24);

  ga_config c = config();  // the same with sums as gradients
  c.gradient_kind = GA_GRADIENT_SUM;
  Scalar sums(c);
  sums.micro(11, 11);
  sums.micro(0, 101);
  step(sums.ctx);
  EXPECT_NEAR(sums.p, -11.0 / 112, 4 * 0x1p-24);
}

// Run:AI's wrapper for torch sums gradients of mean losses: steps of SGD are N times too long.
TEST(RunAi, SumsMeans) {
  for (const int n : {1, 2, 8}) {
    Scalar run;
    for (int k = 0; k < n; ++k) run.micro(0.5);
    step(run.ctx);
    EXPECT_EQ(run.p, -0.5);
  }
}

// ---- torch.amp, DeepSpeed -----------------------------------------------------------------------

// Clipping before GradScaler.unscale_ compares a scaled norm with the threshold; unscaling twice
// divides twice. Both come from calls in the wrong order, which is not possible here: gradients are
// unscaled when they are accumulated.
TEST(TorchAmp, ClipsBeforeUnscalingOrUnscalesTwice) {
  ga_config c = config();
  c.loss_scale = 65536;
  Scalar run(c);
  const ga_clip norm = clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_KERAS);
  EXPECT_OK(ga_context_set_clip(run.ctx, &norm));
  for (int k = 0; k < 2; ++k) run.micro(0.5f * 65536);
  ga_step_result r = step(run.ctx);
  EXPECT_EQ(r.norm, 0.5);
  EXPECT_EQ(r.clip_factor, 1);
  EXPECT_EQ(run.p, -0.5);
  run.micro(2 * 65536);
  r = step(run.ctx);
  EXPECT_EQ(r.norm, 2);
  EXPECT_EQ(r.clip_factor, 0.5);
}

// scheduler.step() follows scaler.step() whether or not the step was skipped, so every skipped step
// advances the schedule. Here the schedule counts applied steps.
TEST(TorchAmp, ScheduleAdvancesInSkippedSteps) {
  Scalar run;
  const ga_schedule s = linear(10);
  EXPECT_OK(ga_group_set_schedule(run.ctx, 0, &s));
  for (int t = 0; t < 5; ++t) {
    run.micro(INFINITY);
    EXPECT_EQ(step(run.ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
    EXPECT_DOUBLE_EQ(group_lr(run.ctx), 1 - t / 10.0);
    run.micro(1);
    EXPECT_DOUBLE_EQ(step(run.ctx).lr, 1 - t / 10.0);
  }
}

// DeepSpeed's ZeRO-1 casts the f32 accumulator to 16 bits for the reduction: a window whose sum is
// too large or too small for f16 is lost. Here gradients are never narrowed below the accumulator's
// dtype.
TEST(DeepSpeed, CastsTheAccumulatorToTheDtypeOfTheModel) {
  Tensor p(GA_F32, 2), g(GA_F16, 2);
  g.set(0, 60000);
  g.set(1, 0x1p-24);
  ga_config c = config();
  c.reduce = GA_REDUCE_SUM;
  c.loss_scale = 16;
  Context ctx(c);
  ctx.group(plain_sgd());
  add(ctx, 0, p, {}, options(GA_F16));
  for (int k = 0; k < 64; ++k) accumulate(ctx, {&g});
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(p.get(0), -64 * 60000.0 / 16);
  EXPECT_EQ(p.get(1), -64 * 0x1p-28);
}

// ---- ggml-opt, caffe, llm.c ---------------------------------------------------------------------

// ggml-opt's window counter advances in validation passes too, and a short window is divided by
// opt_period. Here only micro-batches count, and a pass that accumulates nothing is not a
// micro-batch.
TEST(Ggml, ValidationPassesCount) {
  ga_config c = config();
  c.accum_steps = 4;
  Scalar run(c);
  run.micro(1);
  run.micro(1);
  for (int pass = 0; pass < 10; ++pass) {  // what a program asks between training passes
    EXPECT_EQ(window(run.ctx).micro_batches, 2);
    EXPECT_EQ(group_lr(run.ctx), 1);
    EXPECT_OK(ga_synchronize(run.ctx));
  }
  run.micro(3);
  EXPECT_EQ(window(run.ctx).state, GA_WINDOW_OPEN);
  run.micro(3);
  EXPECT_EQ(window(run.ctx).state, GA_WINDOW_FULL);
  step(run.ctx);
  EXPECT_EQ(run.p, -2);
}

// caffe compares the threshold with the norm of the sum over iter_size passes, which grows with
// their number. Here the threshold is compared with the norm of the mean.
TEST(Caffe, ClipsTheSum) {
  for (const int n : {1, 4, 64}) {
    Scalar run;
    const ga_clip c = clip(GA_CLIP_GLOBAL, 2, GA_FLAVOR_KERAS);
    EXPECT_OK(ga_context_set_clip(run.ctx, &c));
    for (int k = 0; k < n; ++k) run.micro(1);
    const ga_step_result r = step(run.ctx);
    EXPECT_EQ(r.norm, 1);
    EXPECT_EQ(r.clip_factor, 1);
  }
}

// llm.c accumulates bf16 gradients in bf16: of 1024 equal terms 61 % are lost. Here they accumulate
// in f32, or, to save memory, in a pair of bf16 numbers (test_modes.cpp).
TEST(LlmC, AccumulatesInBf16) {
  Tensor p(GA_BF16, 1), g(GA_BF16, 1, 1.109375);
  Context ctx;
  ctx.group(plain_sgd());
  add(ctx, 0, p);
  for (int k = 0; k < 1024; ++k) accumulate(ctx, {&g});
  step(ctx);
  EXPECT_EQ(p.get(0), -1.109375);
}

// llm.c has 32-bit indices. Here a parameter of more than 2^32 elements has the right count, and
// rows beyond 2^31 the right numbers. (The memory is only reserved: nothing is allocated before a
// contribution.)
TEST(LlmC, IndicesOf32Bits) {
  const int64_t rows = (int64_t{1} << 32) + 3;
  const auto bytes = static_cast<size_t>(rows) * sizeof(float);
  void* map = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) GTEST_SKIP() << "no address space for 16 GiB";
  {
    Context ctx;
    ctx.group(plain_sgd());
    const int64_t shape[] = {rows};
    ASSERT_OK(ga_param_add(ctx, 0, "p", map, GA_F32, 1, shape, nullptr, nullptr));
    EXPECT_GE(memory(ctx).accumulators, 4 * rows);
    EXPECT_LE(memory(ctx).accumulators, 4 * rows + 65536);
  }
  munmap(map, bytes);
}

// ---- Wrong input that must not be accepted silently ---------------------------------------------

TEST(BadInput, FlavorsThatAnOptimizerDoesNotHave) {
  Context ctx;
  for (const OptimizerRow& row : optimizer_rows()) {
    for (const int32_t flavor : {GA_FLAVOR_TORCH, GA_FLAVOR_KERAS, GA_FLAVOR_BERT}) {
      if (row.has(flavor)) continue;
      const int32_t kind = row.kind;
      SCOPED_TRACE(row.name + (", flavor " + std::to_string(flavor)));
      ga_optimizer o, untouched;
      memset(&o, 0x5a, sizeof o);
      untouched = o;
      EXPECT_TRUE(
          refused(ga_optimizer_init(&o, sizeof o, kind, flavor), GA_ERROR_UNSUPPORTED, {"flavor"}));
      EXPECT_EQ(memcmp(&o, &untouched, sizeof o), 0);
      ga_optimizer changed = optimizer(kind);
      changed.flavor = flavor;
      ga_group group = -7;
      EXPECT_TRUE(refused(ga_group_add(ctx, &changed, &group), GA_ERROR_UNSUPPORTED, {"flavor"}));
      EXPECT_EQ(group, -7);
    }
  }
  EXPECT_EQ(ctx.group(plain_sgd()), 0) << "groups that were refused have no number";
}

TEST(BadInput, NesterovWithDampeningOrWithoutMomentum) {
  Context ctx;
  for (const int32_t kind : {GA_OPTIMIZER_SGD, GA_OPTIMIZER_LARS}) {
    ga_optimizer o = optimizer(kind);
    o.nesterov = 1;
    o.momentum = 0.9;
    o.dampening = 0.1;
    EXPECT_TRUE(refused(ga_group_add(ctx, &o, nullptr), GA_ERROR_INVALID_ARGUMENT,
                        {"nesterov", "dampening"}));
    o.dampening = 0;
    o.momentum = 0;
    EXPECT_TRUE(refused(ga_group_add(ctx, &o, nullptr), GA_ERROR_INVALID_ARGUMENT,
                        {"nesterov", "momentum"}));
  }
  EXPECT_EQ(ctx.group(plain_sgd()), 0);
}

TEST(BadInput, StateThatTheOptimizerRefuses) {
  Tensor wide(GA_F64, 4);
  Context ctx;
  ga_optimizer o;
  for (const OptimizerRow& row : optimizer_rows()) {
    if (row.bf16_state) continue;
    o = optimizer(row.kind);
    o.state_dtype = GA_BF16;
    EXPECT_TRUE(refused(ga_group_add(ctx, &o, nullptr), GA_ERROR_UNSUPPORTED, {"state_dtype"}));
  }
  for (const int32_t dtype : std::vector<int32_t>{GA_F16, GA_F64, GA_I32, 99, -1}) {
    o = optimizer(GA_OPTIMIZER_ADAM);
    o.state_dtype = dtype;
    EXPECT_NE(ga_group_add(ctx, &o, nullptr), GA_OK) << dtype;
    EXPECT_NE(std::string(ga_last_error()).find("state_dtype"), std::string::npos)
        << ga_last_error();
  }
  o = optimizer(GA_OPTIMIZER_ADAM);
  o.state_dtype = GA_BF16;
  const ga_group narrow = ctx.group(o);
  EXPECT_EQ(narrow, 0);
  EXPECT_TRUE(refused(try_add(ctx, narrow, "w", wide.data(), GA_F64, {4}, options()),
                      GA_ERROR_UNSUPPORTED, {"\"w\"", "f64"}));
}

// Fields of a struct that this library does not know, and reserved fields.
TEST(BadInput, ReservedFields) {
  ga_config c = config();
  c.reserved2 = 1;
  ga_context* none = nullptr;
  EXPECT_NE(ga_context_create(&c, &none), GA_OK);
  EXPECT_EQ(none, nullptr);
  Context ctx;
  ga_optimizer o = optimizer(GA_OPTIMIZER_SGD);
  o.reserved = 1;
  EXPECT_NE(ga_group_add(ctx, &o, nullptr), GA_OK);
  EXPECT_NE(std::string(ga_last_error()).find("reserved"), std::string::npos) << ga_last_error();
}

TEST(BadInput, MatrixProductsInto16Bits) {
  Tensor p(GA_BF16, 4);
  Context ctx;
  add(ctx, ctx.group(plain_sgd()), p, {2, 2}, options(0, GA_BF16));
  const float m[4] = {};
  EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
  EXPECT_TRUE(refused(ga_accumulate_matmul(ctx, 0, 2, m, 2, 0, m, 2, 0, GA_F32),
                      GA_ERROR_UNSUPPORTED, {"f32 accumulators", "bf16"}));
}

}  // namespace
}  // namespace ga::test
