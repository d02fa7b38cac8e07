// SPDX-License-Identifier: Apache-2.0
//
// Learning-rate schedules: their formulas, and that only applied steps move them.
#include "support.hpp"

namespace ga::test {
namespace {

struct NamedSchedule {
  std::string name;
  ga_schedule schedule;
};

const double kTable[] = {0.5, 0, 0.25, 0.125};

std::vector<NamedSchedule> good_schedules() {
  std::vector<NamedSchedule> list;
  const auto add = [&](const char* name, int32_t kind, auto change) {
    ga_schedule s = schedule(kind);
    change(s);
    list.push_back({name, s});
  };
  using S = ga_schedule&;
  add("Constant", GA_SCHEDULE_CONSTANT, [](S) {});
  add("ConstantWarmup", GA_SCHEDULE_CONSTANT, [](S s) { s.warmup_steps = 5; });
  add("Linear", GA_SCHEDULE_LINEAR, [](S s) { s.total_steps = 20; });
  add("LinearWarmupEnd", GA_SCHEDULE_LINEAR,
      [](S s) { s.warmup_steps = 3, s.total_steps = 17, s.end_factor = 0.1; });
  add("LinearRising", GA_SCHEDULE_LINEAR, [](S s) { s.total_steps = 9, s.end_factor = 2; });
  add("LinearShortest", GA_SCHEDULE_LINEAR, [](S s) { s.warmup_steps = 6, s.total_steps = 7; });
  add("Cosine", GA_SCHEDULE_COSINE, [](S s) { s.total_steps = 24; });
  add("CosineWarmupEnd", GA_SCHEDULE_COSINE,
      [](S s) { s.warmup_steps = 4, s.total_steps = 25, s.end_factor = 0.01; });
  add("Polynomial", GA_SCHEDULE_POLYNOMIAL, [](S s) { s.total_steps = 15; });
  add("PolynomialSquare", GA_SCHEDULE_POLYNOMIAL,
      [](S s) { s.warmup_steps = 1, s.total_steps = 19, s.power = 2, s.end_factor = 0.05; });
  add("PolynomialPowerZero", GA_SCHEDULE_POLYNOMIAL, [](S s) { s.total_steps = 5, s.power = 0; });
  add("InverseSqrt", GA_SCHEDULE_INVERSE_SQRT, [](S) {});
  add("InverseSqrtWarmup", GA_SCHEDULE_INVERSE_SQRT, [](S s) { s.warmup_steps = 8; });
  add("Step", GA_SCHEDULE_STEP, [](S s) { s.step_size = 4; });
  add("StepWarmup", GA_SCHEDULE_STEP,
      [](S s) { s.warmup_steps = 2, s.step_size = 7, s.gamma = 0.5; });
  add("StepGammaZero", GA_SCHEDULE_STEP, [](S s) { s.step_size = 3, s.gamma = 0; });
  add("Exponential", GA_SCHEDULE_EXPONENTIAL, [](S) {});
  add("ExponentialWarmup", GA_SCHEDULE_EXPONENTIAL, [](S s) { s.warmup_steps = 3, s.gamma = 0.9; });
  add("Table", GA_SCHEDULE_TABLE, [](S s) { s.table = kTable, s.table_size = 4; });
  add("Bert", GA_SCHEDULE_BERT, [](S s) { s.warmup_steps = 6, s.total_steps = 21; });
  add("BertNoWarmup", GA_SCHEDULE_BERT, [](S s) { s.total_steps = 10; });
  add("LinearLater", GA_SCHEDULE_LINEAR,
      [](S s) { s.warmup_steps = 3, s.total_steps = 11, s.first_step = 7; });
  add("TableLater", GA_SCHEDULE_TABLE,
      [](S s) { s.table = kTable, s.table_size = 4, s.first_step = 2; });
  add("BertAllWarmup", GA_SCHEDULE_BERT, [](S s) { s.warmup_steps = 8, s.total_steps = 8; });
  return list;
}

class Schedule : public testing::TestWithParam<NamedSchedule> {};

INSTANTIATE_TEST_SUITE_P(All, Schedule, testing::ValuesIn(good_schedules()),
                         [](const testing::TestParamInfo<NamedSchedule>& info) {
                           return info.param.name;
                         });

TEST_P(Schedule, FollowsItsFormula) {
  const ga_schedule& s = GetParam().schedule;
  const double peak = 0.3;
  float p = 0;
  Context ctx;
  ctx.param(ctx.group(plain_sgd(peak)), "p", &p, 1);
  ASSERT_OK(ga_group_set_schedule(ctx, 0, &s));
  double moved = 0;
  for (int64_t t = 0; t < 40; ++t) {
    const double want = ref::learning_rate(s, peak, t);
    // Relative to the peak, because a cosine that ends at 0 cancels.
    const double tolerance = ref::kHost * std::max(peak, want);
    EXPECT_NEAR(group_lr(ctx), want, tolerance) << "before step " << t + 1;
    const float g = 1;
    ctx.accumulate({&g});
    EXPECT_NEAR(group_lr(ctx), want, tolerance) << "a micro-batch moved it";
    EXPECT_NEAR(step(ctx).lr, want, tolerance) << "in step " << t + 1;
    moved += want;
    EXPECT_NEAR(p, -moved, static_cast<double>(t + 1) * (moved + 1) * 2 * ref::kHalfUlp);
  }
}

TEST_P(Schedule, MovesWithAppliedStepsOnly) {
  const ga_schedule& s = GetParam().schedule;
  float p = 0;
  ga_config c = config();
  c.accum_steps = 3;
  Context ctx(c);
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  ASSERT_OK(ga_group_set_schedule(ctx, 0, &s));
  const float good = 1, nan = NAN;
  for (int64_t applied = 0; applied < 12; ++applied) {
    const double want = ref::learning_rate(s, 1, applied);
    EXPECT_EQ(step(ctx).lr, 0) << "empty windows use no rate";
    for (int k = 0; k < 3; ++k) ctx.accumulate({k == 1 ? &nan : &good});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
    for (int k = 0; k < 2; ++k) ctx.accumulate({&good});
    EXPECT_OK(ga_discard(ctx));
    for (int k = 0; k < 3; ++k) ctx.accumulate({&nan}, 0);
    EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_EMPTY);
    EXPECT_NEAR(group_lr(ctx), want, ref::kHost * std::max(1.0, want));
    for (int k = 0; k < 3; ++k) ctx.accumulate({&good});
    EXPECT_NEAR(step(ctx).lr, want, ref::kHost * std::max(1.0, want));
  }
}

TEST(Schedules, WrittenOutByHand) {
  const auto rate = [](const ga_schedule& s, int64_t applied) {
    return ref::learning_rate(s, 1, applied);
  };
  ga_schedule s = schedule(GA_SCHEDULE_COSINE);
  s.warmup_steps = 4;
  s.total_steps = 12;
  EXPECT_DOUBLE_EQ(rate(s, 0), 0.25);
  EXPECT_DOUBLE_EQ(rate(s, 3), 1);
  EXPECT_DOUBLE_EQ(rate(s, 4), 1);
  EXPECT_DOUBLE_EQ(rate(s, 8), 0.5);
  EXPECT_NEAR(rate(s, 12), 0, 1e-15);
  EXPECT_NEAR(rate(s, 99), 0, 1e-15);
  s = schedule(GA_SCHEDULE_BERT);
  s.warmup_steps = 2;
  s.total_steps = 10;
  EXPECT_DOUBLE_EQ(rate(s, 0), 0);
  EXPECT_DOUBLE_EQ(rate(s, 1), 0.5);
  EXPECT_DOUBLE_EQ(rate(s, 2), 0.8);
  EXPECT_DOUBLE_EQ(rate(s, 10), 0);
  s.first_step = 5;
  EXPECT_DOUBLE_EQ(rate(s, 4), 0);
  EXPECT_DOUBLE_EQ(rate(s, 6), 0.5);
  EXPECT_DOUBLE_EQ(rate(s, 15), 0);
  s = schedule(GA_SCHEDULE_INVERSE_SQRT);
  s.warmup_steps = 4;
  EXPECT_DOUBLE_EQ(rate(s, 4), 1);
  EXPECT_DOUBLE_EQ(rate(s, 16), 0.5);
}

TEST(Schedules, GroupsHaveTheirOwn) {
  float p[3] = {0, 0, 0};
  Context ctx;
  for (int i = 0; i < 3; ++i) {
    ctx.param(ctx.group(plain_sgd(i + 1)), std::to_string(i), &p[i], 1);
  }
  ga_schedule warm = schedule(GA_SCHEDULE_CONSTANT);
  warm.warmup_steps = 2;
  ga_schedule table = schedule(GA_SCHEDULE_TABLE);
  table.table = kTable;
  table.table_size = 4;
  ASSERT_OK(ga_group_set_schedule(ctx, 1, &warm));
  ASSERT_OK(ga_group_set_schedule(ctx, 2, &table));
  const float g = 1;
  ctx.accumulate({&g, &g, &g});
  EXPECT_EQ(step(ctx).lr, 1);  // of group 0
  EXPECT_EQ(p[0], -1);
  EXPECT_EQ(p[1], -1);  // 2 * 1/2
  EXPECT_EQ(p[2], -0.5f);
}

TEST(Schedules, SetInTheMiddleAndTakenAway) {
  float p = 0;
  Context ctx;
  ctx.param(ctx.group(plain_sgd(8)), "p", &p, 1);
  const float g = 0;
  for (int t = 0; t < 5; ++t) {
    ctx.accumulate({&g});
    step(ctx);
  }
  ga_schedule s = schedule(GA_SCHEDULE_LINEAR);
  s.total_steps = 10;
  ctx.accumulate({&g});
  ASSERT_OK(ga_group_set_schedule(ctx, 0, &s));  // legal at any time
  EXPECT_DOUBLE_EQ(group_lr(ctx), 4);  // the context's steps count, not the schedule's age
  ASSERT_OK(ga_group_set_lr(ctx, 0, 2));
  EXPECT_DOUBLE_EQ(group_lr(ctx), 1);  // without a schedule, the peak that was set
  EXPECT_DOUBLE_EQ(step(ctx).lr, 1);
  ASSERT_OK(ga_group_set_schedule(ctx, 0, nullptr));
  EXPECT_EQ(group_lr(ctx), 2);
}

TEST(Schedules, TableIsCopied) {
  float p = 0;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  {
    std::vector<double> table = {3, 5};
    ga_schedule s = schedule(GA_SCHEDULE_TABLE);
    s.table = table.data();
    s.table_size = 2;
    ASSERT_OK(ga_group_set_schedule(ctx, 0, &s));
    table.assign(2, NAN);
  }
  const float g = 0;
  EXPECT_EQ(group_lr(ctx), 3);
  for (int t = 0; t < 3; ++t) {
    ctx.accumulate({&g});
    step(ctx);
    EXPECT_EQ(group_lr(ctx), 5);
  }
}

TEST(Schedules, Defaults) {
  for (int32_t kind = GA_SCHEDULE_CONSTANT; kind <= GA_SCHEDULE_BERT; ++kind) {
    ga_schedule s;
    memset(&s, 0xee, sizeof s);
    ASSERT_OK(ga_schedule_init(&s, sizeof s, kind));
    EXPECT_EQ(s.struct_size, sizeof s);
    EXPECT_EQ(s.kind, kind);
    EXPECT_EQ(s.warmup_steps, 0);
    EXPECT_EQ(s.end_factor, 0);
    EXPECT_EQ(s.reserved, 0);
    if (kind == GA_SCHEDULE_POLYNOMIAL) {
      EXPECT_EQ(s.power, 1);
    }
    if (kind == GA_SCHEDULE_STEP) {
      EXPECT_EQ(s.gamma, 0.1);
    }
    if (kind == GA_SCHEDULE_EXPONENTIAL) {
      EXPECT_EQ(s.gamma, 1);
    }
  }
}

TEST(Schedules, WrongNumbersChangeNothing) {
  struct Bad {
    const char* what;
    int32_t kind;
    void (*spoil)(ga_schedule&);
    std::vector<const char*> words;
  };
  static const double kNan[] = {1, NAN}, kNegative[] = {-0.5}, kInfinite[] = {1, 2, INFINITY};
  using S = ga_schedule&;
  const Bad list[] = {
      {"kind 42", GA_SCHEDULE_CONSTANT, [](S s) { s.kind = 42; }, {"kind", "42"}},
      {"kind -1", GA_SCHEDULE_CONSTANT, [](S s) { s.kind = -1; }, {"kind", "-1"}},
      {"warm-up -3",
       GA_SCHEDULE_CONSTANT,
       [](S s) { s.warmup_steps = -3; },
       {"warmup_steps", "-3"}},
      {"first step -1", GA_SCHEDULE_CONSTANT, [](S s) { s.first_step = -1; }, {"first_step", "-1"}},
      {"no total", GA_SCHEDULE_LINEAR, [](S s) { s.total_steps = 0; }, {"total_steps", "0"}},
      {"total = warm-up",
       GA_SCHEDULE_COSINE,
       [](S s) { s.warmup_steps = 11, s.total_steps = 11; },
       {"total_steps", "11"}},
      {"total < warm-up",
       GA_SCHEDULE_POLYNOMIAL,
       [](S s) { s.warmup_steps = 11, s.total_steps = 7; },
       {"total_steps", "7", "11"}},
      {"BERT total 0", GA_SCHEDULE_BERT, [](S s) { s.total_steps = 0; }, {"total_steps", "0"}},
      {"BERT total < warm-up",
       GA_SCHEDULE_BERT,
       [](S s) { s.warmup_steps = 13, s.total_steps = 12; },
       {"total_steps", "12", "13"}},
      {"end -1",
       GA_SCHEDULE_LINEAR,
       [](S s) { s.total_steps = 5, s.end_factor = -1; },
       {"end_factor", "-1"}},
      {"end NaN",
       GA_SCHEDULE_COSINE,
       [](S s) { s.total_steps = 5, s.end_factor = NAN; },
       {"end_factor", "nan"}},
      {"power -2",
       GA_SCHEDULE_POLYNOMIAL,
       [](S s) { s.total_steps = 5, s.power = -2; },
       {"power", "-2"}},
      {"power NaN",
       GA_SCHEDULE_POLYNOMIAL,
       [](S s) { s.total_steps = 5, s.power = NAN; },
       {"power", "nan"}},
      {"gamma -0.5",
       GA_SCHEDULE_STEP,
       [](S s) { s.step_size = 1, s.gamma = -0.5; },
       {"gamma", "-0.5"}},
      {"gamma NaN", GA_SCHEDULE_EXPONENTIAL, [](S s) { s.gamma = NAN; }, {"gamma", "nan"}},
      {"step size 0", GA_SCHEDULE_STEP, [](S s) { s.step_size = 0; }, {"step_size", "0"}},
      {"step size -4", GA_SCHEDULE_STEP, [](S s) { s.step_size = -4; }, {"step_size", "-4"}},
      {"table NULL",
       GA_SCHEDULE_TABLE,
       [](S s) { s.table = nullptr, s.table_size = 3; },
       {"table"}},
      {"table empty",
       GA_SCHEDULE_TABLE,
       [](S s) { s.table = kTable, s.table_size = 0; },
       {"table_size", "0"}},
      {"table size -1",
       GA_SCHEDULE_TABLE,
       [](S s) { s.table = kTable, s.table_size = -1; },
       {"table_size", "-1"}},
      {"table with NaN",
       GA_SCHEDULE_TABLE,
       [](S s) { s.table = kNan, s.table_size = 2; },
       {"table", "nan"}},
      {"table with -0.5",
       GA_SCHEDULE_TABLE,
       [](S s) { s.table = kNegative, s.table_size = 1; },
       {"table", "-0.5"}},
      {"table with infinity",
       GA_SCHEDULE_TABLE,
       [](S s) { s.table = kInfinite, s.table_size = 3; },
       {"table", "inf"}},
  };
  float p = 0;
  Context ctx;
  ctx.param(ctx.group(plain_sgd(8)), "p", &p, 1);
  ga_schedule good = schedule(GA_SCHEDULE_LINEAR);
  good.total_steps = 4;
  ASSERT_OK(ga_group_set_schedule(ctx, 0, &good));
  const float g = 0;
  ctx.accumulate({&g});
  step(ctx);
  for (const Bad& bad : list) {
    SCOPED_TRACE(bad.what);
    ga_schedule s = schedule(bad.kind);
    bad.spoil(s);
    EXPECT_EQ(ga_group_set_schedule(ctx, 0, &s), GA_ERROR_INVALID_ARGUMENT);
    const std::string text = ga_last_error();
    for (const char* word : bad.words) {
      EXPECT_NE(text.find(word), std::string::npos) << '"' << text << "\" lacks " << word;
    }
    EXPECT_DOUBLE_EQ(group_lr(ctx), 6);
  }
  EXPECT_EQ(ga_group_set_schedule(ctx, 1, &good), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_group_set_schedule(ctx, -1, &good), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_group_set_schedule(nullptr, 0, &good), GA_ERROR_INVALID_ARGUMENT);
  ga_schedule s;
  EXPECT_EQ(ga_schedule_init(&s, sizeof s, 9), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_schedule_init(&s, sizeof s, -1), GA_ERROR_INVALID_ARGUMENT);
}

// Numbers near the limits of int64 must not overflow in intermediate results.
TEST(Schedules, VeryLong) {
  float p = 0;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  ga_schedule s = schedule(GA_SCHEDULE_COSINE);
  s.warmup_steps = int64_t{1} << 61;
  s.total_steps = INT64_MAX;
  ASSERT_OK(ga_group_set_schedule(ctx, 0, &s));
  EXPECT_DOUBLE_EQ(group_lr(ctx), 0x1p-61);
  s = schedule(GA_SCHEDULE_STEP);
  s.step_size = INT64_MAX;
  ASSERT_OK(ga_group_set_schedule(ctx, 0, &s));
  EXPECT_EQ(group_lr(ctx), 1);
}

}  // namespace
}  // namespace ga::test
