// SPDX-License-Identifier: Apache-2.0
//
// What a program changes between steps: the numbers of a group's optimizer, factors of single
// parameters, frozen groups, and parameters that go.
#include <functional>

#include "formats.hpp"

namespace ga::test {
namespace {

ga_optimizer optimizer_of(const ga_context* ctx, ga_group group) {
  ga_optimizer o;
  o.struct_size = sizeof o;
  EXPECT_OK(ga_group_optimizer(ctx, group, &o));
  return o;
}

// Other numbers, with the same state. NAdam's product of momenta is tested below.
ga_optimizer changed(ga_optimizer o) {
  o.lr *= 0.5;
  o.eps *= 2;
  // The average follows from these numbers of the Schedule-Free optimizers.
  const bool averages = ref::schedule_free(o);
  if (o.kind != GA_OPTIMIZER_NADAM && o.beta1 > 0 && !averages) o.beta1 = 0.85;
  if (o.beta2 > 0) o.beta2 = 0.96;
  if (o.momentum > 0 && !averages) o.momentum *= 0.75;
  if (o.rho > 0) o.rho = 0.8;
  if (o.weight_decay > 0) o.weight_decay *= 1.5;
  return o;
}

class Changed : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(All, Changed, testing::Range<size_t>(0, good_optimizers().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return identifier(good_optimizers()[info.param].name);
                         });

// Every optimizer goes on with other numbers, back and forth, as one in float64 whose bias corrections
// are 1 - beta^t with the beta of the step.
TEST_P(Changed, NumbersOfTheOptimizer) {
  const ga_optimizer first = good_optimizers()[GetParam()].optimizer, second = changed(first);
  const Layout layout({5, 1200});
  const Block start = parameters(layout, 1);
  Block p = start;
  Context ctx;
  ctx.group(first);
  add_all(ctx, 0, layout, p);
  Model model(layout, {first}, config(), start);
  for (uint64_t t = 0; t < 7; ++t) {
    const ga_optimizer& now = t / 2 % 2 == 0 ? first : second;
    ASSERT_OK(ga_group_set_optimizer(ctx, 0, &now));
    for (size_t i = 0; i < layout.size(); ++i) model.set_optimizer(i, now);
    const Block g = gradients(layout, 3, t);
    ctx.accumulate(pointers(layout, g));
    model.accumulate(g, 1);
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    model.step();
    ASSERT_TRUE(model.matches(p)) << "step " << t;
  }
  const ga_optimizer got = optimizer_of(ctx, 0);
  EXPECT_EQ(0, memcmp(&got, &second, sizeof got));
}

// mu_product, as torch.optim.NAdam keeps it: each step's momentum with the beta1 of that step.
TEST(SetOptimizer, NadamKeepsItsProduct) {
  ga_optimizer o = optimizer(GA_OPTIMIZER_NADAM);
  o.lr = 0.125;
  double p = 1, m = 0, v = 0, product = 1, expected = 1;
  Context ctx;
  ctx.group(o);
  ctx.param(0, "p", &p, ref::Shape{});
  for (int t = 1; t <= 6; ++t) {
    o.beta1 = t % 2 ? 0.9 : 0.8;
    ASSERT_OK(ga_group_set_optimizer(ctx, 0, &o));
    const double g = std::cos(t);
    ctx.accumulate({&g});
    step(ctx);
    const auto mu = [&](int s) { return o.beta1 * (1 - 0.5 * std::pow(0.96, s * 4e-3)); };
    product *= mu(t);
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double root = std::sqrt(v / (1 - std::pow(o.beta2, t))) + o.eps;
    expected -= 0.125 *
                ((1 - mu(t)) / (1 - product) * g + mu(t + 1) / (1 - product * mu(t + 1)) * m) /
                root;
    ASSERT_NEAR(p, expected, 1e-14) << "step " << t;
  }
}

TEST(SetOptimizer, WhatSaysWhichStateThereIsStays) {
  struct Refused {
    const char* field;
    int32_t kind;
    std::function<void(ga_optimizer&)> before, after;
  };
  const auto as_is = [](ga_optimizer&) {};
  const Refused list[] = {
      {"kind", GA_OPTIMIZER_ADAM, as_is, [](ga_optimizer& o) { o.kind = GA_OPTIMIZER_ADAMW; }},
      {"flavor", GA_OPTIMIZER_ADAM, as_is, [](ga_optimizer& o) { o.flavor = GA_FLAVOR_KERAS; }},
      {"state_dtype", GA_OPTIMIZER_ADAM, as_is, [](ga_optimizer& o) { o.state_dtype = GA_BF16; }},
      {"amsgrad", GA_OPTIMIZER_ADAM, as_is, [](ga_optimizer& o) { o.amsgrad = 1; }},
      {"centered", GA_OPTIMIZER_RMSPROP, [](ga_optimizer& o) { o.centered = 1; },
       [](ga_optimizer& o) { o.centered = 0, o.momentum = 0.5, o.amsgrad = 1; }},
      {"momentum", GA_OPTIMIZER_LARS, as_is, [](ga_optimizer& o) { o.momentum = 0.5; }},
      {"centered", GA_OPTIMIZER_RMSPROP, as_is, [](ga_optimizer& o) { o.centered = 1; }},
      {"momentum", GA_OPTIMIZER_RMSPROP, as_is, [](ga_optimizer& o) { o.momentum = 0.5; }},
      {"momentum", GA_OPTIMIZER_SGD, [](ga_optimizer& o) { o.momentum = 0.5; },
       [](ga_optimizer& o) { o.momentum = 0; }},
      {"initial_accumulator", GA_OPTIMIZER_ADAGRAD, as_is,
       [](ga_optimizer& o) { o.initial_accumulator = 0.5; }},
  };
  for (const Refused& r : list) {
    SCOPED_TRACE(r.field);
    ga_optimizer o = optimizer(r.kind);
    r.before(o);
    Context ctx;
    ctx.group(o);
    ga_optimizer other = o;
    r.after(other);
    EXPECT_TRUE(refused(ga_group_set_optimizer(ctx, 0, &other), GA_ERROR_UNSUPPORTED, {r.field}));
    const ga_optimizer got = optimizer_of(ctx, 0);
    EXPECT_EQ(0, memcmp(&got, &o, sizeof got));
  }
  Context ctx;
  ga_optimizer o = plain_sgd();
  o.momentum = 0.5;
  ctx.group(o);
  o.lr = -1;
  EXPECT_TRUE(refused(ga_group_set_optimizer(ctx, 0, &o), GA_ERROR_INVALID_ARGUMENT, {"lr", "-1"}));
  o.lr = 1;
  EXPECT_TRUE(refused(ga_group_set_optimizer(ctx, 1, &o), GA_ERROR_INVALID_ARGUMENT, {"1"}));
  EXPECT_TRUE(
      refused(ga_group_set_optimizer(ctx, 0, nullptr), GA_ERROR_INVALID_ARGUMENT, {"optimizer"}));
  float p[4] = {};
  ga_param_options rows = options();
  rows.rows = GA_ROWS_LAZY;
  ctx.param(0, "rows", p, ref::Shape{4}, &rows);
  o.dampening = 0.25;
  EXPECT_TRUE(
      refused(ga_group_set_optimizer(ctx, 0, &o), GA_ERROR_UNSUPPORTED, {"rows", "GA_ROWS_LAZY"}));
}

// The result of the iteration lies elsewhere after an odd number of steps.
TEST(SetOptimizer, StepsOfNewtonSchulz) {
  if (!has_onednn()) GTEST_SKIP() << "this build has no oneDNN";
  for (const NamedOptimizer& n : matrix_optimizers()) {
    ga_optimizer o = n.optimizer;
    const Layout layout = Layout::of({{12, 20}, {9, 4}});
    const Block start = parameters(layout, 1);
    Block p = start, q = start;
    Context ctx;
    ctx.group(o);
    add_all(ctx, 0, layout, p);
    for (const int32_t steps : {5, 6, 5}) {
      o.ns_steps = steps;
      ASSERT_OK(ga_group_set_optimizer(ctx, 0, &o));
      const Block g = even_gradients(layout, 3, static_cast<uint64_t>(steps));
      // One step of a context that has had this number from the beginning, with the same momentum.
      Context fresh;
      fresh.group(o);
      q = p;
      add_all(fresh, 0, layout, q);
      for (ga_param i = 0; i < 2; ++i) {
        const auto count = layout.counts[static_cast<size_t>(i)];
        Block buffer(static_cast<size_t>(count));
        ASSERT_OK(ga_state_get(ctx, i, "momentum_buffer", buffer.data(), GA_F32, count));
        ASSERT_OK(ga_state_set(fresh, i, "momentum_buffer", buffer.data(), GA_F32, count));
      }
      for (Context* x : {&ctx, &fresh}) {
        x->accumulate(pointers(layout, g));
        EXPECT_EQ(step(*x).outcome, GA_STEP_APPLIED);
      }
      EXPECT_TRUE(same_bits(p, q)) << n.name << ", " << steps;
    }
  }
}

// max_grad_norm is a sum over the groups that share it.
TEST(SetOptimizer, MaxGradNorm) {
  ga_optimizer o = optimizer(GA_OPTIMIZER_LAMB);
  o.max_grad_norm = 0;
  const Layout layout({40});
  const Block start = parameters(layout, 1);
  Block p = start;
  Context ctx;
  ctx.group(o);
  add_all(ctx, 0, layout, p);
  Model model(layout, {o}, config(), start);
  for (uint64_t t = 0; t < 4; ++t) {
    o.max_grad_norm = t % 2 ? 0 : 1e-2;
    ASSERT_OK(ga_group_set_optimizer(ctx, 0, &o));
    model.set_optimizer(0, o);
    const Block g = even_gradients(layout, 3, t);
    ctx.accumulate(pointers(layout, g));
    model.accumulate(g, 1);
    step(ctx);
    model.step();
    ASSERT_TRUE(model.matches(p)) << "step " << t;
  }
}

// ---- Factors of a parameter ---------------------------------------------------------------------

class Scales : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(All, Scales, testing::Range<size_t>(0, good_optimizers().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return identifier(good_optimizers()[info.param].name);
                         });

// A parameter with factors of its own has the bits of one in a group with these numbers: the factors
// are powers of 2, so that nothing rounds. (LAMB's norm goes over groups, LARS's and LAMB's decay of 0
// is that of a group too.)
TEST_P(Scales, AreThoseOfAGroup) {
  ga_optimizer o = good_optimizers()[GetParam()].optimizer;
  const Layout layout({700, 700, 700});
  const Block start = parameters(layout, 1);
  Block p = start, q = start;
  Context scaled, grouped;
  scaled.group(o);
  add_all(scaled, 0, layout, p);
  const double lr[] = {1, 0.25, 0.25}, decay[] = {1, 1, 0};
  for (int i = 0; i < 3; ++i) {
    ga_optimizer own = o;
    own.lr *= lr[i];
    own.weight_decay *= decay[i];
    grouped.group(own);
    grouped.param(i, "p" + std::to_string(i), q.data() + layout.offsets[static_cast<size_t>(i)],
                  700);
  }
  for (uint64_t t = 0; t < 3; ++t) {
    if (t == 1) {  // from here on, and from the first step of its state
      for (int i = 0; i < 3; ++i) {
        ASSERT_OK(ga_param_set_lr_scale(scaled, i, lr[i]));
        ASSERT_OK(ga_param_set_weight_decay_scale(scaled, i, decay[i]));
        ga_param_info info;
        ASSERT_OK(ga_param_info_init(&info, sizeof info));
        ASSERT_OK(ga_param_describe(scaled, i, &info));
        EXPECT_EQ(info.lr_scale, lr[i]);
        EXPECT_EQ(info.weight_decay_scale, decay[i]);
      }
    }
    if (t == 0) {
      for (int i = 0; i < 3; ++i) ASSERT_OK(ga_group_set_optimizer(grouped, i, &o));
    } else if (t == 1) {
      for (int i = 0; i < 3; ++i) {
        ASSERT_OK(ga_group_set_lr(grouped, i, o.lr * lr[i]));
        ASSERT_OK(ga_group_set_weight_decay(grouped, i, o.weight_decay * decay[i]));
      }
    }
    const Block g = gradients(layout, 3, t);
    scaled.accumulate(pointers(layout, g));
    grouped.accumulate(pointers(layout, g));
    step(scaled);
    step(grouped);
    ASSERT_TRUE(same_bits(p, q)) << "step " << t;
  }
  EXPECT_FALSE(same_bits(p, start));
}

TEST(Scales, BeforeTheFirstStepAndWrong) {
  float p = 1;
  const float g = 1;
  Context ctx;
  ctx.group(plain_sgd());
  ctx.param(0, "p", &p, ref::Shape{});
  ASSERT_OK(ga_param_set_lr_scale(ctx, 0, 0.25));
  for (const double wrong : {-1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    EXPECT_TRUE(
        refused(ga_param_set_lr_scale(ctx, 0, wrong), GA_ERROR_INVALID_ARGUMENT, {"lr_scale"}));
    EXPECT_TRUE(refused(ga_param_set_weight_decay_scale(ctx, 0, wrong), GA_ERROR_INVALID_ARGUMENT,
                        {"weight_decay_scale"}));
  }
  EXPECT_TRUE(refused(ga_param_set_lr_scale(ctx, 1, 1), GA_ERROR_INVALID_ARGUMENT, {"1"}));
  ctx.accumulate({&g});
  EXPECT_EQ(step(ctx).lr, 1) << "the group's";
  EXPECT_EQ(p, 0.75f);
  ctx.accumulate({&g});
  ASSERT_OK(ga_param_set_lr_scale(ctx, 0, 0)) << "within a window, too";
  step(ctx);
  EXPECT_EQ(p, 0.75f);
}

// ---- Learning rates of groups, and frozen groups ------------------------------------------------

TEST(Groups, LearningRateOfTheLastStep) {
  float p[2] = {};
  const float g = 1, bad = INFINITY;
  Context ctx;
  for (int k = 0; k < 2; ++k) {
    ctx.group(plain_sgd(k + 1));
    ctx.param(k, std::to_string(k), &p[k], ref::Shape{});
  }
  ga_schedule s = schedule(GA_SCHEDULE_EXPONENTIAL);
  s.gamma = 0.5;
  ASSERT_OK(ga_group_set_schedule(ctx, 1, &s));
  const auto last = [&](ga_group group) {
    double lr = -7;
    EXPECT_OK(ga_group_last_lr(ctx, group, &lr));
    return lr;
  };
  EXPECT_EQ(last(0), 0);
  for (int t = 0; t < 3; ++t) {
    ctx.accumulate({&g, &g});
    step(ctx);
    EXPECT_EQ(last(0), 1);
    EXPECT_EQ(last(1), 2 * std::pow(0.5, t));
    EXPECT_EQ(group_lr(ctx, 1), 2 * std::pow(0.5, t + 1)) << "of the step to come";
  }
  ctx.accumulate({&bad, &g});
  EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
  EXPECT_EQ(last(1), 0.5);
  double lr = -7;
  EXPECT_TRUE(refused(ga_group_last_lr(ctx, 2, &lr), GA_ERROR_INVALID_ARGUMENT, {"2"}));
  EXPECT_TRUE(refused(ga_group_last_lr(ctx, 0, nullptr), GA_ERROR_INVALID_ARGUMENT, {"out"}));
  EXPECT_EQ(lr, -7);
}

TEST(Groups, Frozen) {
  float p[3] = {};
  const float g = 1;
  Context ctx;
  ctx.group(plain_sgd());
  ctx.group(plain_sgd());
  for (int i = 0; i < 3; ++i) ctx.param(i / 2, std::to_string(i), &p[i], ref::Shape{});
  ASSERT_OK(ga_param_remove(ctx, 1));
  ASSERT_OK(ga_group_set_frozen(ctx, 0, 1));
  ctx.accumulate({&g, nullptr, &g});
  step(ctx);
  EXPECT_EQ(p[0], 0);
  EXPECT_EQ(p[2], -1);
  ctx.accumulate({&g, nullptr, &g});
  EXPECT_TRUE(
      refused(ga_group_set_frozen(ctx, 0, 0), GA_ERROR_INVALID_STATE, {"ga_group_set_frozen"}));
  step(ctx);
  ASSERT_OK(ga_group_set_frozen(ctx, 0, 0));
  ctx.accumulate({&g, nullptr, &g});
  step(ctx);
  EXPECT_EQ(p[0], -1);
  EXPECT_EQ(p[2], -3);
  EXPECT_TRUE(refused(ga_group_set_frozen(ctx, 2, 1), GA_ERROR_INVALID_ARGUMENT, {"2"}));
  EXPECT_TRUE(refused(ga_group_set_frozen(ctx, 0, 2), GA_ERROR_INVALID_ARGUMENT, {"frozen", "2"}));
}

// ---- Parameters that go -------------------------------------------------------------------------

// The others go on with the bits of a context that never had the one that is removed, whatever the
// library kept for it.
TEST(Remove, LeavesTheOthersAlone) {
  ga_ema ema;
  ASSERT_OK(ga_ema_init(&ema, sizeof ema));
  const ga_clip agc = clip(GA_CLIP_AGC, 0);
  for (const ga_clip* c : {static_cast<const ga_clip*>(nullptr), &agc}) {
    Tensor gone(GA_BF16, 900, 1), a(GA_BF16, 40, 1), b(GA_F32, 40, 1), twin_a = a, twin_b = b;
    Context ctx, twin;
    for (Context* x : {&ctx, &twin}) {
      x->group(optimizer(GA_OPTIMIZER_ADAMW));
      ASSERT_OK(ga_context_set_ema(*x, &ema));
      ASSERT_OK(ga_context_set_clip(*x, c));
    }
    ga_param_options rows = options();
    rows.rows = GA_ROWS_DENSE;
    const int64_t shape[] = {30, 30};
    ASSERT_OK(ga_param_add(ctx, 0, "gone", gone.data(), GA_BF16, 2, shape, &rows, nullptr));
    add(ctx, 0, a);
    add(ctx, 0, b);
    ASSERT_OK(ga_param_set_frozen(twin, add(twin, 0, gone), 1));  // another context has its master
    add(twin, 0, twin_a);
    add(twin, 0, twin_b);
    const Tensor g = random_tensor(GA_BF16, 900, 3), f = random_tensor(GA_F32, 40, 4);
    const auto window_of = [&](ga_context* x, const Tensor* first) {
      const void* list[] = {first ? first->data() : nullptr, g.data(), f.data()};
      EXPECT_OK(ga_accumulate(x, list, 3, 2, nullptr));
      EXPECT_EQ(step(x).outcome, GA_STEP_APPLIED);
    };
    window_of(ctx, &g);
    window_of(twin, nullptr);
    const Tensor before = gone;
    ASSERT_OK(ga_param_remove(ctx, 0));
    window_of(ctx, nullptr);
    window_of(ctx, &g);  // what comes in its slot is not read
    window_of(twin, nullptr);
    window_of(twin, nullptr);
    EXPECT_EQ(0, memcmp(gone.data(), before.data(), 900 * 2));
    EXPECT_EQ(0, memcmp(a.data(), twin_a.data(), 40 * 2));
    EXPECT_EQ(0, memcmp(b.data(), twin_b.data(), 40 * 4));
  }
}

TEST(Remove, TheIdIsGoneAndTheNameIsFree) {
  float p[3] = {}, gamma[2] = {}, other = 0;
  const float g = 1;
  Context ctx;
  ctx.group(plain_sgd());
  for (int i = 0; i < 3; ++i)
    ctx.param(0, std::string(1, static_cast<char>('a' + i)), &p[i], ref::Shape{});
  ctx.param(0, "gamma", gamma, 2);
  ASSERT_OK(ga_bn_add(ctx, "layer", 2, 3, -1, nullptr, nullptr));
  EXPECT_TRUE(refused(ga_param_remove(ctx, 3), GA_ERROR_INVALID_STATE, {"gamma", "layer"}));
  ctx.accumulate({&g, &g, &g, nullptr});
  EXPECT_TRUE(refused(ga_param_remove(ctx, 1), GA_ERROR_INVALID_STATE, {"ga_param_remove"}));
  step(ctx);
  ASSERT_OK(ga_param_remove(ctx, 1));

  ga_param_info info;
  ASSERT_OK(ga_param_info_init(&info, sizeof info));
  size_t slot = 0;
  int32_t id = -7, count = 0;
  uint64_t word = 0;
  ga_accumulator acquired;
  ASSERT_OK(ga_accumulator_init(&acquired, sizeof acquired));
  const auto gone = [&](ga_status status) {
    return refused(status, GA_ERROR_INVALID_ARGUMENT, {"1", "\"b\"", "removed"});
  };
  EXPECT_TRUE(gone(ga_param_remove(ctx, 1)));
  EXPECT_TRUE(gone(ga_param_describe(ctx, 1, &info)));
  EXPECT_TRUE(gone(ga_param_slot(ctx, 1, &slot)));
  EXPECT_TRUE(gone(ga_param_bind(ctx, 1, &other)));
  EXPECT_TRUE(gone(ga_param_changed(ctx, 1)));
  EXPECT_TRUE(gone(ga_param_set_frozen(ctx, 1, 0)));
  EXPECT_TRUE(gone(ga_param_set_lr_scale(ctx, 1, 1)));
  EXPECT_TRUE(gone(ga_param_set_weight_decay_scale(ctx, 1, 1)));
  EXPECT_TRUE(gone(ga_state_count(ctx, 1, &count)));
  EXPECT_TRUE(gone(ga_state_get(ctx, 1, "step", &word, GA_I64, 1)));
  EXPECT_TRUE(gone(ga_state_set(ctx, 1, "step", &word, GA_I64, 1)));
  EXPECT_TRUE(gone(ga_state_reset(ctx, 1)));
  EXPECT_TRUE(gone(ga_bn_add(ctx, "second", 2, 1, -1, nullptr, nullptr)));
  EXPECT_TRUE(refused(ga_param_find(ctx, "b", &id), GA_ERROR_INVALID_ARGUMENT, {"b"}));
  ASSERT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
  EXPECT_TRUE(gone(ga_accumulate_part(ctx, 1, &g)));
  EXPECT_TRUE(gone(ga_accumulator_acquire(ctx, 1, &acquired)));
  ASSERT_OK(ga_micro_end(ctx));
  ASSERT_OK(ga_discard(ctx));

  // Its memory may be anything now, another parameter included.
  EXPECT_EQ(ctx.param(0, "b", &p[1], ref::Shape{}), 4);
  ASSERT_OK(ga_param_find(ctx, "b", &id));
  EXPECT_EQ(id, 4);
  ASSERT_OK(ga_param_count(ctx, &count));
  EXPECT_EQ(count, 5);
  ctx.accumulate({&g, nullptr, &g, nullptr, &g});
  step(ctx);
  EXPECT_EQ(p[0], -2);
  EXPECT_EQ(p[1], -2);
}

// On the CPU, accumulators that no window writes take no memory, before and after.
TEST(Remove, AddsNothing) {
  ga_config c = config();
  c.gradient_life = GA_GRADIENTS_LIVE;
  c.accum_steps = 1;
  Block p(2 * 4096, 1), g(4096, 1);
  Context ctx(c);
  ctx.group(plain_sgd());
  ctx.param(0, "a", p.data(), 4096);
  ctx.param(0, "b", p.data() + 4096, 4096);
  ctx.accumulate({g.data(), g.data()});
  step(ctx);
  const ga_memory before = memory(ctx);
  ASSERT_OK(ga_param_remove(ctx, 1));
  EXPECT_LE(memory(ctx).accumulators, before.accumulators);
  EXPECT_LE(memory(ctx).resident, before.resident);
}

// Memory goes with the last parameter that had got its arrays by the same call.
TEST(Remove, FreesWhatWasMadeTogether) {
  Block p(3 * 4096, 1), g(4096, 1);
  Context ctx;
  ctx.group(optimizer(GA_OPTIMIZER_ADAM));
  ctx.param(0, "a", p.data(), 4096);
  ASSERT_OK(ga_prepare(ctx));
  const ga_memory one = memory(ctx);
  ctx.param(0, "b", p.data() + 4096, 4096);
  ctx.param(0, "c", p.data() + 2 * 4096, 4096);
  ASSERT_OK(ga_prepare(ctx));
  const ga_memory all = memory(ctx);
  EXPECT_EQ(all.optimizer_state, 3 * one.optimizer_state);
  ctx.accumulate({nullptr, g.data(), g.data()});  // memory that is never written is not there
  step(ctx);
  ASSERT_OK(ga_param_remove(ctx, 1));
  EXPECT_EQ(memory(ctx).optimizer_state, all.optimizer_state);
  ASSERT_OK(ga_param_remove(ctx, 2));
  EXPECT_EQ(memory(ctx).optimizer_state, one.optimizer_state);
  EXPECT_EQ(memory(ctx).accumulators, one.accumulators);
  const Block before = p;
  ctx.accumulate({g.data(), nullptr, nullptr});
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  EXPECT_NE(p[0], before[0]);
  EXPECT_EQ(p[4096], before[4096]);
}

}  // namespace
}  // namespace ga::test
