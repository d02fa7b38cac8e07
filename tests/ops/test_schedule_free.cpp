// SPDX-License-Identifier: Apache-2.0
//
// The average of the Schedule-Free optimizers: its numbers, by the paper's algorithm 1 in float64, and its exchange
// with the parameters. The formulas of the steps are in test_optimizers.cpp and test_vectors.cpp.
#include "formats.hpp"

namespace ga::test {
namespace {

constexpr int64_t kCount = 3001;

ga_optimizer schedule_free(int32_t kind) {
  ga_optimizer o = optimizer(kind);
  o.lr = kind == GA_OPTIMIZER_SCHEDULE_FREE_SGD ? 0.125 : 0.0625;
  o.weight_decay = 0.125;
  o.average_power = 1;
  return o;
}

// x, y and z of one element.
struct Sequences {
  double x, y, z, v = 0, weights = 0, highest = 0;

  explicit Sequences(double p) : x(p), y(p), z(p) {}

  void step(const ga_optimizer& o, double lr, int t, double g) {
    const bool adam = o.kind == GA_OPTIMIZER_SCHEDULE_FREE_ADAMW;
    double d = g;
    if (adam) {
      v = o.beta2 * v + (1 - o.beta2) * g * g;
      d = g / (std::sqrt(v / (1 - std::pow(o.beta2, t))) + o.eps);
    }
    z -= lr * (d + o.weight_decay * y);
    highest = std::max(highest, lr);
    const double weight = std::pow(t, o.average_power) * std::pow(highest, o.average_lr_power);
    weights += weight;
    x += weight / weights * (z - x);
    const double beta = adam ? o.beta1 : o.momentum;
    y = (1 - beta) * z + beta * x;
  }
};

// A context with a parameter, and steps whose learning rate rises and falls.
class Training {
 public:
  Training(const ga_optimizer& o, int32_t dtype, int32_t master, int64_t count = kCount,
           bool follows = false)
      : optimizer_(o), dtype_(dtype), p(random_tensor(dtype, count, 5)) {
    ctx.group(o);
    ga_param_options options;
    EXPECT_OK(ga_param_options_init(&options, sizeof options));
    options.master = master;
    options.follow_data = follows;
    add(ctx, 0, p, {}, options);
  }

  double lr(int t) const { return optimizer_.lr * (t == 2 ? 2 : t == 3 ? 0.25 : 1); }
  Tensor gradient(int t) const {
    return random_tensor(dtype_, p.count(), static_cast<uint64_t>(100 + t));
  }
  void step() {
    ++t_;
    EXPECT_OK(ga_group_set_lr(ctx, 0, lr(t_)));
    const Tensor g = gradient(t_);
    accumulate(ctx, {&g});
    EXPECT_EQ(test::step(ctx).outcome, GA_STEP_APPLIED);
  }
  Tensor average(int32_t dtype) const {
    Tensor out(dtype, p.count());
    EXPECT_OK(ga_ema_copy_to(ctx, 0, out.data(), dtype));
    EXPECT_TRUE(out.canaries());
    return out;
  }

 private:
  const ga_optimizer optimizer_;
  const int32_t dtype_;
  int t_ = 0;

 public:
  Tensor p;
  Context ctx;
};

class Averages : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(ScheduleFree, Averages,
                         testing::Values(GA_OPTIMIZER_SCHEDULE_FREE_ADAMW,
                                         GA_OPTIMIZER_SCHEDULE_FREE_SGD),
                         [](const auto& info) {
                           return info.param == GA_OPTIMIZER_SCHEDULE_FREE_SGD ? "sgd" : "adamw";
                         });

TEST_P(Averages, AreThoseOfThePaper) {
  const ga_optimizer o = schedule_free(GetParam());
  for (const int32_t dtype : {GA_F32, GA_F64, GA_F16, GA_BF16}) {
    SCOPED_TRACE(format(dtype).name);
    Training run(o, dtype, GA_MASTER_F32);
    std::vector<Sequences> want;
    for (int64_t i = 0; i < kCount; ++i) want.emplace_back(run.p.get(i));
    for (int t = 1; t <= 6; ++t) {
      run.step();
      const Tensor g = run.gradient(t);
      for (int64_t i = 0; i < kCount; ++i)
        want[static_cast<size_t>(i)].step(o, run.lr(t), t, g.get(i));
    }
    // Each step has some ten roundings, of numbers below 4; x doubles those of y and z.
    const double bound = (dtype == GA_F64 ? 0x1p-53 : 0x1p-24) * 4 * 10 * 6 * 2;
    const Tensor got = run.average(GA_F64);
    double most = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      const Sequences& s = want[static_cast<size_t>(i)];
      ASSERT_LT(std::max(std::abs(s.x), std::abs(s.z)), 4);
      ASSERT_NEAR(got.get(i), s.x, bound) << i;
      most = std::max(most, std::abs(s.x - s.y));
    }
    EXPECT_GT(most, 100 * bound) << "the average is far from the parameter";
    std::vector<double> z(static_cast<size_t>(kCount));
    if (dtype == GA_F64) {
      ASSERT_OK(ga_state_get(run.ctx, 0, "z", z.data(), GA_F64, kCount));
      for (int64_t i = 0; i < kCount; ++i)
        ASSERT_NEAR(z[static_cast<size_t>(i)], want[static_cast<size_t>(i)].z, bound);
    }
    double weights = 0, highest = 0;
    ASSERT_OK(ga_state_get(run.ctx, 0, "weight_sum", &weights, GA_F64, 1));
    ASSERT_OK(ga_state_get(run.ctx, 0, "lr_max", &highest, GA_F64, 1));
    EXPECT_NEAR(weights, want[0].weights, 1e-12);
    EXPECT_EQ(highest, 2 * o.lr);
  }
}

// Whatever it holds, each parameter becomes its average as ga_ema_copy_to writes it, and then what it was.
TEST_P(Averages, ThereAndBack) {
  for (const int32_t dtype : {GA_F32, GA_F64, GA_F16, GA_BF16}) {
    for (const int32_t master : {GA_MASTER_F32, GA_MASTER_NONE}) {
      SCOPED_TRACE(testing::Message() << format(dtype).name << ' ' << master);
      Training run(schedule_free(GetParam()), dtype, master, 70001),
          twin(schedule_free(GetParam()), dtype, master, 70001);
      const Tensor start = run.p;
      ASSERT_OK(ga_ema_swap(run.ctx, 1));
      EXPECT_TRUE(run.p == start) << "before the first step, an average is the parameter";
      ASSERT_OK(ga_ema_swap(run.ctx, 0));
      for (int t = 0; t < 3; ++t) run.step(), twin.step();
      const Tensor before = run.p, average = run.average(dtype), wide = run.average(GA_F64);
      const ga_memory calm = memory(run.ctx);
      ASSERT_OK(ga_ema_swap(run.ctx, 1));
      EXPECT_TRUE(run.p == average);
      EXPECT_TRUE(run.p != before);
      EXPECT_TRUE(run.average(dtype) == average) << "the average is the same wherever it lies";
      if (dtype == GA_F64 || (master == GA_MASTER_F32 && format(dtype).size == 2)) {
        EXPECT_TRUE(run.average(GA_F64) == wide);
      }
      EXPECT_EQ(memory(run.ctx).averages - calm.averages,
                (70001 * static_cast<int64_t>(format(dtype).size) + 63) / 64 * 64);
      ASSERT_OK(ga_ema_swap(run.ctx, 0));
      EXPECT_TRUE(run.p == before);
      EXPECT_EQ(memory(run.ctx).total, calm.total);
      run.step(), twin.step();
      EXPECT_TRUE(run.p == twin.p);
      EXPECT_TRUE(run.average(GA_F64) == twin.average(GA_F64));
    }
  }
}

// What the program writes to a parameter moves the average that it becomes, and is there again afterwards.
TEST_P(Averages, FollowTheProgram) {
  const ga_optimizer o = schedule_free(GetParam());
  const double beta = o.kind == GA_OPTIMIZER_SCHEDULE_FREE_ADAMW ? o.beta1 : o.momentum;
  for (const bool swapped : {true, false}) {
    Training run(o, GA_BF16, GA_MASTER_F32, kCount, true);
    for (int t = 0; t < 3; ++t) run.step();
    for (int64_t i = 0; i < kCount; i += 7) run.p.set(i, run.p.get(i) + 1);
    const Tensor written = run.p;
    std::vector<float> z(static_cast<size_t>(kCount));
    ASSERT_OK(ga_state_get(run.ctx, 0, "z", z.data(), GA_F32, kCount));
    if (swapped) {
      ASSERT_OK(ga_ema_swap(run.ctx, 1));
    }
    const Tensor average = swapped ? run.p : run.average(GA_BF16);
    for (int64_t i = 0; i < kCount; i += 7) {
      const double x = (written.get(i) - (1 - beta) * z[static_cast<size_t>(i)]) / beta;
      ASSERT_NEAR(average.get(i), x, std::abs(x) * 0x1p-8 + 1e-5) << i;
    }
    if (swapped) {
      ASSERT_OK(ga_ema_swap(run.ctx, 0));
    }
    EXPECT_TRUE(run.p == written);
  }
}

TEST(ScheduleFree, OtherGroupsStayAsTheyAre) {
  Context ctx;
  Tensor p(GA_F32, 9, 1), q(GA_F32, 9, 1);
  const Tensor g(GA_F32, 9, 1);
  ctx.group(schedule_free(GA_OPTIMIZER_SCHEDULE_FREE_SGD));
  ctx.group(plain_sgd(0.5));
  add(ctx, 0, p);
  add(ctx, 1, q);
  for (int t = 0; t < 2; ++t) {
    accumulate(ctx, {&g, &g});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  }
  const Tensor first = p, other = q;
  ASSERT_OK(ga_ema_swap(ctx, 1));
  EXPECT_TRUE(p != first);
  EXPECT_TRUE(q == other);
  Tensor out(GA_F32, 9);
  ASSERT_OK(ga_ema_copy_to(ctx, 1, out.data(), GA_F32));
  EXPECT_TRUE(out == other);
  EXPECT_EQ(ga_step(ctx, nullptr), GA_ERROR_INVALID_STATE);
  EXPECT_NE(std::string(ga_last_error()).find("averages"), std::string::npos) << ga_last_error();
  ASSERT_OK(ga_ema_swap(ctx, 0));
  EXPECT_TRUE(p == first);
}

TEST(ScheduleFree, AnEmaOfTheContextComesFirst) {
  ga_ema ema;
  ASSERT_OK(ga_ema_init(&ema, sizeof ema));
  ema.decay = 0;
  Context ctx;
  Tensor p(GA_F32, 9, 1), out(GA_F32, 9);
  const Tensor g(GA_F32, 9, 1);
  ctx.group(schedule_free(GA_OPTIMIZER_SCHEDULE_FREE_SGD));
  ASSERT_OK(ga_context_set_ema(ctx, &ema));
  add(ctx, 0, p);
  for (int t = 0; t < 2; ++t) {
    accumulate(ctx, {&g});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  }
  ASSERT_OK(ga_ema_copy_to(ctx, 0, out.data(), GA_F32));
  EXPECT_TRUE(out == p);
}

}  // namespace
}  // namespace ga::test
