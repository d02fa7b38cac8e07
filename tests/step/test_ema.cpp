// SPDX-License-Identifier: Apache-2.0
//
// The exponential moving average of the parameters: both kinds against float64, which parameters
// take part, and what does not move it.
#include <functional>

#include "formats.hpp"

namespace ga::test {
namespace {

ga_ema average(int32_t kind = GA_EMA_TORCH, double number = NAN, int32_t dtype = 0) {
  ga_ema e;
  EXPECT_OK(ga_ema_init(&e, sizeof e));
  e.kind = kind;
  e.dtype = dtype;
  if (!std::isnan(number)) (kind == GA_EMA_TORCH ? e.decay : e.gamma) = number;
  return e;
}

double decay_of(const ga_ema& e, int64_t t) {
  return e.kind == GA_EMA_TORCH ? e.decay : std::pow(1 - 1 / static_cast<double>(t), e.gamma + 1);
}

std::vector<double> copy(ga_context* ctx, ga_param param, int64_t count, int32_t dtype = GA_F64) {
  Tensor out(dtype, count);
  EXPECT_OK(ga_ema_copy_to(ctx, param, out.data(), dtype));
  EXPECT_TRUE(out.canaries());
  std::vector<double> result;
  for (int64_t i = 0; i < count; ++i) result.push_back(out.get(i));
  return result;
}

// The EMA of one parameter in float64, with a bound on the rounding of its dtype.
class Model {
 public:
  Model(const ga_ema& ema, const Format& format) : ema_(ema), format_(format) {}

  // Called after an applied step that left the parameter at p.
  void step(const Tensor& p) {
    ++t_;
    const double d = decay_of(ema_, t_);
    const double unit = format_.size == 8 ? 0x1p-53 : 0x1p-24;
    if (t_ == 1) {
      value_.assign(static_cast<size_t>(p.count()), 0);
      error_.assign(value_.size(), 0);
    }
    for (size_t i = 0; i < value_.size(); ++i) {
      const double x = p.get(static_cast<int64_t>(i)), old = value_[i];
      value_[i] = t_ == 1 ? x : old + (1 - d) * (x - old);
      // The roundings of a difference, a product with a rounded factor and a sum; a 16-bit EMA is
      // then rounded by up to a spacing.
      error_[i] = t_ == 1 ? 0
                          : d * error_[i] + unit * (3 * (1 - d) * std::abs(x - old) +
                                                    std::abs(value_[i]) + error_[i]);
      if (format_.size == 2) error_[i] += 1.01 * format_.spacing(std::abs(value_[i]) + error_[i]);
    }
  }
  testing::AssertionResult matches(const std::vector<double>& got) const {
    for (size_t i = 0; i < value_.size(); ++i) {
      if (std::abs(got[i] - value_[i]) <= 1.01 * error_[i]) continue;
      return testing::AssertionFailure()
             << "element " << i << " is " << got[i] << ", not " << value_[i] << " to " << error_[i];
    }
    return testing::AssertionSuccess();
  }
  const std::vector<double>& values() const { return value_; }

 private:
  ga_ema ema_;
  Format format_;
  int64_t t_ = 0;
  std::vector<double> value_, error_;
};

TEST(Ema, Defaults) {
  ga_ema e;
  memset(&e, 0xee, sizeof e);
  ASSERT_OK(ga_ema_init(&e, sizeof e));
  EXPECT_EQ(e.struct_size, sizeof e);
  EXPECT_EQ(e.kind, GA_EMA_TORCH);
  EXPECT_EQ(e.dtype, 0);
  EXPECT_EQ(e.decay, 0.999);
  EXPECT_EQ(e.gamma, 6.94);
}

struct Case {
  std::string name;
  ga_ema ema;
  int32_t parameter;
};

std::vector<Case> cases() {
  std::vector<Case> list;
  const std::pair<const char*, ga_ema> kinds[] = {{"torch", average(GA_EMA_TORCH, 0.9)},
                                                  {"torch_0", average(GA_EMA_TORCH, 0)},
                                                  {"torch_1", average(GA_EMA_TORCH, 1)},
                                                  {"karras", average(GA_EMA_KARRAS)},
                                                  {"karras_0", average(GA_EMA_KARRAS, 0)}};
  for (const auto& [name, ema] : kinds) {
    for (const int32_t parameter : {GA_F32, GA_F64}) {
      for (const int32_t dtype : {0, static_cast<int32_t>(GA_BF16)}) {
        if (parameter == GA_F64 && dtype == GA_BF16) continue;
        ga_ema e = ema;
        e.dtype = dtype;
        list.push_back(
            {std::string(name) + "_of_" + format(parameter).name + (dtype ? "_in_bf16" : ""), e,
             parameter});
      }
    }
  }
  return list;
}

class Averages : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Ema, Averages, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// Parameters that have a gradient in each window, in some, and in none; a frozen one, and one
// without elements.
TEST_P(Averages, FollowTheFormula) {
  const Case& which = GetParam();
  const int64_t sizes[] = {2 * 65536 + 7, 17, 300, 15, 0};
  std::vector<Tensor> p;
  std::vector<Model> models;
  for (const int64_t n : sizes) {
    p.push_back(random_tensor(which.parameter, n, 1));
    models.emplace_back(which.ema, format(which.ema.dtype ? which.ema.dtype : which.parameter));
  }
  Context ctx;
  ga_optimizer sgd = plain_sgd(0.1);
  sgd.momentum = 0.5;
  ctx.group(sgd);
  for (Tensor& t : p) add(ctx, 0, t);
  ASSERT_OK(ga_context_set_ema(ctx, &which.ema));
  EXPECT_OK(ga_param_set_frozen(ctx, 3, 1));
  for (uint64_t t = 0; t < 9; ++t) {
    std::vector<Tensor> g;
    g.reserve(p.size());
    std::vector<const Tensor*> list;
    for (size_t i = 0; i < p.size(); ++i) {
      g.push_back(random_tensor(which.parameter, p[i].count(), 10 * t + i));
      const bool missing = i == 2 || (i == 1 && t % 2 == 1);
      list.push_back(missing ? nullptr : &g.back());
    }
    if (t == 0) {  // before the first step the EMA is the parameter
      for (size_t i = 0; i < p.size(); ++i) {
        const auto got = copy(ctx, static_cast<ga_param>(i), p[i].count());
        for (int64_t j = 0; j < p[i].count(); ++j) {
          ASSERT_EQ(got[static_cast<size_t>(j)], p[i].get(j));
        }
      }
    }
    accumulate(ctx, list);
    ASSERT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    for (size_t i = 0; i < p.size(); ++i) {
      models[i].step(p[i]);
      ASSERT_TRUE(models[i].matches(copy(ctx, static_cast<ga_param>(i), p[i].count())))
          << "parameter " << i << ", step " << t + 1;
    }
  }
  // The mean of the rounding errors of all elements is near 0: each of 9 steps adds at most the
  // variance of a fair coin toss, with the spacing of the largest number.
  if (which.ema.dtype == GA_BF16) {
    const auto got = copy(ctx, 0, p[0].count());
    double mean = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      mean += (got[i] - models[0].values()[i]) / static_cast<double>(got.size());
    }
    EXPECT_NEAR(mean, 0, 6 * 0x1p-8 / 2 * std::sqrt(9 / static_cast<double>(got.size())));
  }
}

// Skipped and discarded windows move neither the EMA nor its step count t.
TEST_P(Averages, StayInSkippedSteps) {
  const Case& which = GetParam();
  if (which.ema.dtype == GA_BF16) return;  // random numbers depend on the number of windows
  Tensor p[2] = {random_tensor(which.parameter, 1000, 1), random_tensor(which.parameter, 1000, 1)};
  Context ctx, twin;
  for (Context* c : {&ctx, &twin}) {
    c->group(plain_sgd(0.1));
    add(*c, 0, p[c == &twin]);
    ASSERT_OK(ga_context_set_ema(*c, &which.ema));
  }
  const Tensor bad(which.parameter, 1000, NAN);
  for (uint64_t t = 0; t < 6; ++t) {
    const Tensor g = random_tensor(which.parameter, 1000, t);
    for (Context* c : {&ctx, &twin}) {
      accumulate(*c, {&g});
      step(*c);
    }
    const auto before = copy(ctx, 0, 1000);
    accumulate(ctx, {&bad});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
    EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_EMPTY);
    accumulate(ctx, {&g});
    EXPECT_OK(ga_discard(ctx));
    EXPECT_EQ(copy(ctx, 0, 1000), before);
  }
  EXPECT_EQ(copy(ctx, 0, 1000), copy(twin, 0, 1000));
}

// Lazily updated rows take part with and without a gradient.
TEST(Ema, LazilyUpdatedRows) {
  const ga_ema ema = average(GA_EMA_TORCH, 0.5);
  const int64_t rows = 100, columns = 10;
  Tensor p = random_tensor(GA_F32, rows * columns, 1);
  Model model(ema, format(GA_F32));
  Context ctx;
  ctx.group(optimizer(GA_OPTIMIZER_ADAM));
  ga_param_options o = options();
  o.rows = GA_ROWS_LAZY;
  add(ctx, 0, p, {rows, columns}, o);
  ASSERT_OK(ga_context_set_ema(ctx, &ema));
  for (int32_t t = 0; t < 6; ++t) {
    // A row that has moved once keeps moving its EMA.
    const int32_t indices[] = {t, t + 50};
    const Tensor values(GA_F32, 2 * columns, 1);
    EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
    EXPECT_OK(ga_accumulate_rows(ctx, 0, indices, GA_I32, 2, values.data()));
    EXPECT_OK(ga_micro_end(ctx));
    step(ctx);
    model.step(p);
    ASSERT_TRUE(model.matches(copy(ctx, 0, rows * columns))) << t;
  }
}

// The program updates external parameters itself; ga_step averages the values that it finds.
TEST(Ema, ExternalParameters) {
  const ga_ema ema = average(GA_EMA_TORCH, 0.5);
  Tensor p(GA_F32, 3, 8), g(GA_F32, 3, 1);
  Context ctx;
  ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
  add(ctx, 0, p);
  ASSERT_OK(ga_context_set_ema(ctx, &ema));
  accumulate(ctx, {&g});
  step(ctx);
  EXPECT_EQ(copy(ctx, 0, 3)[2], 8);
  p.fill(4);
  accumulate(ctx, {&g});
  step(ctx);
  EXPECT_EQ(copy(ctx, 0, 3)[2], 6);
}

// For 16-bit parameters the EMA is in f32 and keeps what their rounding loses.
TEST(Ema, ParametersOf16Bits) {
  const ga_ema ema = average(GA_EMA_TORCH, 0.75);
  for (const int32_t dtype : {GA_F16, GA_BF16}) {
    for (const int32_t master : {GA_MASTER_F32, GA_MASTER_NONE}) {
      Tensor p(dtype, 500);
      for (int64_t i = 0; i < 500; ++i) p.set(i, 1 + static_cast<double>(i) / 500);
      Tensor wide(GA_F32, 500);
      for (int64_t i = 0; i < 500; ++i) wide.set(i, p.get(i));
      Model of_parameter(ema, format(GA_F32)), of_master(ema, format(GA_F32));
      Context ctx;
      ctx.group(plain_sgd(0x1p-6));
      ga_param_options o = options(GA_F32);
      o.master = master;
      add(ctx, 0, p, {}, o);
      ASSERT_OK(ga_context_set_ema(ctx, &ema));
      double worst = 0;
      for (uint64_t t = 0; t < 10; ++t) {
        const Tensor g = random_tensor(GA_F32, 500, t);
        accumulate(ctx, {&g});
        step(ctx);
        for (int64_t i = 0; i < 500; ++i) wide.set(i, wide.get(i) - 0x1p-6 * g.get(i));
        of_parameter.step(p);
        of_master.step(wide);
      }
      const auto got = copy(ctx, 0, 500);
      if (master == GA_MASTER_NONE) {
        EXPECT_TRUE(of_parameter.matches(got));
        continue;
      }
      // The EMA of the master weights or of their copy, which is within half a spacing.
      for (size_t i = 0; i < got.size(); ++i) {
        const double want = of_master.values()[i];
        worst = std::max(worst, std::abs(got[i] - want) / format(dtype).spacing(2));
      }
      EXPECT_LE(worst, 0.51);
    }
  }
}

// The pass that moves only the EMA does not change the parameter, whatever its rounding.
TEST(Ema, FrozenParametersStay) {
  for (const int32_t dtype : {GA_F16, GA_BF16, GA_F32, GA_F64}) {
    for (const int32_t master : {GA_MASTER_F32, GA_MASTER_NONE}) {
      Tensor p = random_tensor(dtype, 1000, 1), missing = p, other(GA_F32, 1);
      const Tensor before = p, g(GA_F32, 1, 1);
      Context ctx;
      ctx.group(plain_sgd());
      ga_param_options o = options();
      if (format(dtype).size == 2) {
        o.master = master;
        o.rounding = GA_ROUND_STOCHASTIC;
      }
      const ga_param frozen = add(ctx, 0, p, {}, o);
      add(ctx, 0, missing, {}, o);
      add(ctx, 0, other);
      EXPECT_OK(ga_param_set_frozen(ctx, frozen, 1));
      const ga_ema e = average(GA_EMA_TORCH, 0.5);
      ASSERT_OK(ga_context_set_ema(ctx, &e));
      for (int t = 0; t < 3; ++t) {
        accumulate(ctx, {nullptr, nullptr, &g});
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      }
      EXPECT_TRUE(p == before);
      EXPECT_TRUE(missing == before);
      const auto got = copy(ctx, frozen, 1000);
      for (int64_t i = 0; i < 1000; ++i) ASSERT_EQ(got[static_cast<size_t>(i)], p.get(i));
    }
  }
}

// The EMA of a parameter begins when it gets its arrays, not with the first step of the context.
TEST(Ema, BeginsWhereAParameterUnfreezes) {
  Tensor p(GA_F32, 10, 3), q(GA_F32, 10, 3);
  const Tensor g(GA_F32, 10, 1);
  Context ctx;
  ctx.group(plain_sgd());
  add(ctx, 0, p);
  const ga_param later = add(ctx, 0, q);
  ASSERT_OK(ga_param_set_frozen(ctx, later, 1));
  const ga_ema e = average(GA_EMA_TORCH, 0.5);
  ASSERT_OK(ga_context_set_ema(ctx, &e));
  accumulate(ctx, {&g, nullptr});
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  ASSERT_OK(ga_param_set_frozen(ctx, later, 0));
  for (const double expected : {2.0, 1.5}) {  // of parameters 2 and 1
    accumulate(ctx, {&g, &g});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(copy(ctx, later, 10), std::vector<double>(10, expected));
  }
}

// Parameters are exchanged with their averages and back, to the last bit, for every pair of dtypes; the
// run goes on as one without the exchange.
TEST(EmaSwap, ThereAndBack) {
  for (const int32_t dtype : {GA_F32, GA_F64, GA_F16, GA_BF16}) {
    for (const int32_t of_average : {0, static_cast<int32_t>(GA_BF16)}) {
      if (dtype == GA_F64 && of_average != 0) continue;
      for (const int32_t master : {GA_MASTER_F32, GA_MASTER_NONE}) {
        SCOPED_TRACE(testing::Message()
                     << format(dtype).name << ' ' << of_average << ' ' << master);
        ga_ema ema = average(GA_EMA_TORCH, 0.75);
        ema.dtype = of_average;
        // More than one piece of the exchange, the last one not whole.
        const bool large = dtype == GA_F32 && of_average == 0 && master == GA_MASTER_F32;
        const int64_t counts[] = {700, large ? (int64_t{1} << 20) + 77 : 5000};
        Context ctx, twin;
        std::vector<Tensor> p, q;
        ga_param_options o = options();
        o.master = master;
        for (const int64_t n : counts) {
          p.push_back(random_tensor(dtype, n, 3));
          q.push_back(p.back());
        }
        for (const auto& [x, list] : {std::make_pair(&ctx, &p), std::make_pair(&twin, &q)}) {
          x->group(plain_sgd(0.25));
          ASSERT_OK(ga_context_set_ema(*x, &ema));
          list->reserve(2);
          for (Tensor& t : *list) add(*x, 0, t, {}, o);
        }
        const auto train = [&](ga_context* x, uint64_t t) {
          const Tensor a = random_tensor(dtype, counts[0], t),
                       b = random_tensor(dtype, counts[1], t);
          accumulate(x, {&a, &b});
          EXPECT_EQ(step(x).outcome, GA_STEP_APPLIED);
        };
        for (uint64_t t = 0; t < 2; ++t) {
          train(ctx, t);
          train(twin, t);
        }
        const std::vector<Tensor> before = {p[0], p[1]};
        const ga_memory calm = memory(ctx);
        ASSERT_OK(ga_ema_swap(ctx, 1));
        const bool in_place = dtype == (of_average        ? of_average
                                        : dtype == GA_F64 ? GA_F64
                                                          : GA_F32);
        EXPECT_EQ(memory(ctx).averages > calm.averages, !in_place);
        for (int i = 0; i < 2; ++i) {
          Tensor want(dtype, counts[i]), still(dtype, counts[i]);
          ASSERT_OK(ga_ema_copy_to(twin, i, want.data(), dtype));
          EXPECT_TRUE(p[static_cast<size_t>(i)] == want) << i;
          ASSERT_OK(ga_ema_copy_to(ctx, i, still.data(), dtype));
          EXPECT_TRUE(still == want) << "the average is the same wherever it lies";
          EXPECT_TRUE(p[static_cast<size_t>(i)] != before[static_cast<size_t>(i)]);
          EXPECT_TRUE(p[static_cast<size_t>(i)].canaries());
        }
        ASSERT_OK(ga_ema_swap(ctx, 1)) << "once more changes nothing";
        ASSERT_OK(ga_ema_swap(ctx, 0));
        ASSERT_OK(ga_ema_swap(ctx, 0));
        EXPECT_EQ(memory(ctx).total, calm.total);
        for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(p[i] == before[i]) << i;
        train(ctx, 2);
        train(twin, 2);
        for (int i = 0; i < 2; ++i) {
          Tensor a(GA_F64, counts[i]), b(GA_F64, counts[i]);
          ASSERT_OK(ga_ema_copy_to(ctx, i, a.data(), GA_F64));
          ASSERT_OK(ga_ema_copy_to(twin, i, b.data(), GA_F64));
          EXPECT_TRUE(a == b);
          EXPECT_TRUE(p[static_cast<size_t>(i)] == q[static_cast<size_t>(i)]);
        }
      }
    }
  }
}

// Before the first step an average is the parameter, also where master weights have yet to be taken
// from it.
TEST(Ema, BeforeTheMasterWeights) {
  Tensor p(GA_BF16, 3, 1.5), g(GA_BF16, 3, 0.5);
  Context ctx;
  ctx.group(plain_sgd());
  const ga_ema ema = average(GA_EMA_TORCH, 0.5);
  ASSERT_OK(ga_context_set_ema(ctx, &ema));
  add(ctx, 0, p);
  ASSERT_OK(ga_prepare(ctx));
  EXPECT_EQ(copy(ctx, 0, 3)[2], 1.5);
  accumulate(ctx, {&g});
  step(ctx);
  p.fill(4);
  ASSERT_OK(ga_state_reset(ctx, 0));
  EXPECT_EQ(copy(ctx, 0, 3)[2], 4);
}

// While averages are in place, a program may ask and normalise for inference, and nothing else.
TEST(EmaSwap, OnlyAsking) {
  float p[2] = {1, 2};
  const float g[2] = {1, 1};
  Context ctx;
  ctx.group(plain_sgd(0.25));
  ctx.param(0, "p", p, 2);
  EXPECT_TRUE(refused(ga_ema_swap(ctx, 1), GA_ERROR_INVALID_STATE, {"EMA"}));
  const ga_ema ema = average(GA_EMA_TORCH, 0.5);
  ASSERT_OK(ga_context_set_ema(ctx, &ema));
  ASSERT_OK(ga_bn_add(ctx, "layer", 2, 0, -1, nullptr, nullptr));
  ASSERT_OK(ga_ema_swap(ctx, 1)) << "before the first average it changes nothing";
  EXPECT_EQ(p[1], 2);
  ASSERT_OK(ga_ema_swap(ctx, 0));
  ctx.accumulate({g});
  EXPECT_TRUE(refused(ga_ema_swap(ctx, 1), GA_ERROR_INVALID_STATE, {"ga_ema_swap"}));
  step(ctx);
  ctx.accumulate({g});
  step(ctx);
  EXPECT_TRUE(refused(ga_ema_swap(ctx, 2), GA_ERROR_INVALID_ARGUMENT, {"on", "2"}));
  EXPECT_EQ(p[0], 0.5f);
  ASSERT_OK(ga_ema_swap(ctx, 1));
  EXPECT_EQ(p[0], 0.625f);
  const ga_optimizer o = plain_sgd();
  const ga_status calls[] = {ga_accumulate(ctx, nullptr, 1, 0, nullptr),
                             ga_micro_begin(ctx, -1, 1, nullptr),
                             ga_step(ctx, nullptr),
                             ga_discard(ctx),
                             ga_group_set_lr(ctx, 0, 1),
                             ga_group_add(ctx, &o, nullptr),
                             ga_param_changed(ctx, 0),
                             ga_param_remove(ctx, 0),
                             ga_param_set_frozen(ctx, 0, 1),
                             ga_state_reset(ctx, 0),
                             ga_prepare(ctx),
                             ga_context_set_ema(ctx, nullptr),
                             ga_context_set_steps(ctx, 1),
                             ga_bn_set_frozen(ctx, 0, 1)};
  for (size_t k = 0; k < sizeof calls / sizeof *calls; ++k)
    EXPECT_EQ(calls[k], GA_ERROR_INVALID_STATE) << k;
  EXPECT_TRUE(refused(ga_step(ctx, nullptr), GA_ERROR_INVALID_STATE, {"ga_step", "ga_ema_swap"}));
  window(ctx);
  memory(ctx);
  EXPECT_EQ(group_lr(ctx), 0.25);
  ASSERT_OK(ga_synchronize(ctx));
  ga_step_result r;
  ASSERT_OK(ga_step_result_init(&r, sizeof r));
  ASSERT_OK(ga_step_result_get(ctx, 0, 1, &r));
  const float x[2] = {1, 1};
  float y[2];
  ASSERT_OK(ga_bn_infer(ctx, 0, x, 1, 1, y));
  EXPECT_NEAR(y[0], 0.625, 1e-5) << "gamma is the average";
  ASSERT_OK(ga_ema_swap(ctx, 0));
  EXPECT_EQ(p[0], 0.5f);
  ctx.accumulate({g});
  step(ctx);
  EXPECT_EQ(p[0], 0.25f);
}

TEST(Ema, CopiesToEveryDtype) {
  const ga_ema ema = average(GA_EMA_TORCH, 0.3);
  for (const int32_t parameter : {GA_F32, GA_F64}) {
    const int64_t n = 65536 + 9;
    Tensor p = random_tensor(parameter, n, 1);
    Context ctx;
    ctx.group(plain_sgd(0.1));
    add(ctx, 0, p);
    ASSERT_OK(ga_context_set_ema(ctx, &ema));
    for (uint64_t t = 0; t < 3; ++t) {
      const Tensor g = random_tensor(parameter, n, t);
      accumulate(ctx, {&g});
      step(ctx);
    }
    const auto exact = copy(ctx, 0, n, GA_F64);
    for (const int32_t dtype : {GA_F32, GA_F16, GA_BF16}) {
      const auto got = copy(ctx, 0, n, dtype);
      for (size_t i = 0; i < got.size(); ++i) {
        const double want = dtype == GA_F32 ? static_cast<double>(static_cast<float>(exact[i]))
                                            : to_nearest(exact[i], format(dtype));
        // An f64 number within 2^-29 of a midpoint may be rounded twice, by way of f32.
        const double twice =
            parameter == GA_F64 && dtype != GA_F32
                ? to_nearest(static_cast<double>(static_cast<float>(exact[i])), format(dtype))
                : want;
        ASSERT_TRUE(got[i] == want || got[i] == twice)
            << exact[i] << " became " << got[i] << " in " << format(dtype).name;
      }
    }
  }
}

TEST(Ema, TakesMemoryAndGivesItBack) {
  Tensor p(GA_F32, 100000), half(GA_BF16, 100000), wide(GA_F64, 1000);
  Context ctx;
  ctx.group(plain_sgd());
  add(ctx, 0, p);
  add(ctx, 0, half);
  EXPECT_EQ(memory(ctx).averages, 0);
  ga_ema e = average();
  EXPECT_OK(ga_context_set_ema(ctx, &e));
  ga_memory m = memory(ctx);
  EXPECT_GE(m.averages, 800000);
  EXPECT_LE(m.averages, 800000 + 16384);
  EXPECT_EQ(m.total,
            m.accumulators + m.optimizer_state + m.workspace + m.masters + m.averages + m.rows);
  e.dtype = GA_BF16;
  EXPECT_OK(ga_context_set_ema(ctx, &e));
  m = memory(ctx);
  EXPECT_GE(m.averages, 400000);
  EXPECT_LE(m.averages, 400000 + 16384);
  EXPECT_OK(ga_context_set_ema(ctx, nullptr));
  EXPECT_EQ(memory(ctx).averages, 0);
}

TEST(Ema, SameBitsForAnyThreadsAndIsa) {
  for (const int32_t dtype : {0, static_cast<int32_t>(GA_BF16)}) {
    const auto run = [&](int32_t threads) {
      ga_config c = config();
      c.num_threads = threads;
      Tensor p = random_tensor(GA_F32, 3 * 65536 + 5, 1);
      Context ctx(c);
      ctx.group(optimizer(GA_OPTIMIZER_ADAM));
      add(ctx, 0, p);
      const ga_ema e = average(GA_EMA_KARRAS, 2, dtype);
      EXPECT_OK(ga_context_set_ema(ctx, &e));
      static const Tensor g = random_tensor(GA_F32, p.count(), 2);
      for (int t = 0; t < 4; ++t) {
        accumulate(ctx, {t == 2 ? nullptr : &g});
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      }
      return copy(ctx, 0, p.count());
    };
    const auto one = run(1);
    EXPECT_TRUE(run(3) == one);
    on_every_isa([&] { EXPECT_TRUE(run(2) == one); });
  }
}

TEST(Ema, WrongCallsChangeNothing) {
  Tensor p(GA_F32, 8, 1), g(GA_F32, 8, 1), wide(GA_F64, 8), out(GA_F32, 8, 7);
  Context ctx;
  ctx.group(plain_sgd());
  const ga_param id = add(ctx, 0, p);
  const ga_status invalid = GA_ERROR_INVALID_ARGUMENT;
  EXPECT_EQ(ga_ema_copy_to(ctx, id, out.data(), GA_F32), GA_ERROR_INVALID_STATE);

  struct Bad {
    std::function<void(ga_ema&)> change;
    std::vector<std::string> words;
  };
  using E = ga_ema&;
  const std::vector<Bad> list = {
      {[](E e) { e.kind = 2; }, {"kind", "2"}},
      {[](E e) { e.kind = -1; }, {"kind", "-1"}},
      {[](E e) { e.decay = 1.5; }, {"decay", "1.5"}},
      {[](E e) { e.decay = -0.5; }, {"decay", "-0.5"}},
      {[](E e) { e.decay = NAN; }, {"decay", "nan"}},
      {[](E e) { e.kind = GA_EMA_KARRAS, e.gamma = -1; }, {"gamma", "-1"}},
      {[](E e) { e.kind = GA_EMA_KARRAS, e.gamma = NAN; }, {"gamma", "nan"}},
      {[](E e) { e.kind = GA_EMA_KARRAS, e.gamma = INFINITY; }, {"gamma", "inf"}},
      {[](E e) { e.dtype = 99; }, {"dtype", "99"}}};
  for (const Bad& bad : list) {
    ga_ema e = average();
    bad.change(e);
    EXPECT_TRUE(refused(ga_context_set_ema(ctx, &e), invalid, bad.words));
    EXPECT_EQ(memory(ctx).averages, 0);
  }
  for (const int32_t dtype : {GA_F16, GA_F64, GA_I32}) {
    const ga_ema e = average(GA_EMA_TORCH, 0.5, dtype);
    const ga_status status = ga_context_set_ema(ctx, &e);
    EXPECT_TRUE(status == invalid || status == GA_ERROR_UNSUPPORTED) << dtype;
    EXPECT_NE(std::string(ga_last_error()).find("dtype"), std::string::npos) << ga_last_error();
  }
  // A bf16 EMA and f64 parameters, in both orders.
  const ga_ema narrow = average(GA_EMA_TORCH, 0.5, GA_BF16), good = average(GA_EMA_TORCH, 0.5);
  EXPECT_OK(ga_context_set_ema(ctx, &narrow));
  EXPECT_TRUE(refused(try_add(ctx, 0, "wide", wide.data(), GA_F64, {8}, options()),
                      GA_ERROR_UNSUPPORTED, {"\"wide\"", "f64"}));
  EXPECT_OK(ga_context_set_ema(ctx, &good));
  EXPECT_OK(try_add(ctx, 0, "wide", wide.data(), GA_F64, {8}, options()));
  EXPECT_TRUE(refused(ga_context_set_ema(ctx, &narrow), GA_ERROR_UNSUPPORTED, {"\"wide\"", "f64"}));
  EXPECT_EQ(ga_context_set_ema(nullptr, &good), invalid);
  EXPECT_EQ(ga_ema_init(nullptr, sizeof good), invalid);

  accumulate(ctx, {&g, nullptr});
  EXPECT_EQ(ga_context_set_ema(ctx, &good), GA_ERROR_INVALID_STATE);
  EXPECT_EQ(ga_context_set_ema(ctx, nullptr), GA_ERROR_INVALID_STATE);
  step(ctx);
  EXPECT_EQ(ga_context_set_ema(ctx, &good), GA_ERROR_INVALID_STATE) << "not after the first";
  accumulate(ctx, {&g, nullptr});
  step(ctx);
  const Tensor before = p;
  const auto to = [&](ga_param param, void* data, int32_t dtype) {
    return ga_ema_copy_to(ctx, param, data, dtype);
  };
  EXPECT_TRUE(refused(to(2, out.data(), GA_F32), invalid, {"2"}));
  EXPECT_TRUE(refused(to(-1, out.data(), GA_F32), invalid, {"-1"}));
  EXPECT_TRUE(refused(to(0, nullptr, GA_F32), invalid, {"out"}));
  EXPECT_TRUE(refused(to(0, out.data(), 0), invalid, {"dtype", "0"}));
  EXPECT_TRUE(refused(to(0, out.data(), 12), invalid, {"dtype", "12"}));
  EXPECT_NE(to(0, out.data(), GA_I32), GA_OK);
  EXPECT_TRUE(refused(to(0, static_cast<char*>(out.data()) + 1, GA_F32), invalid, {"out"}));
  EXPECT_NE(to(0, p.data(), GA_F32), GA_OK) << "onto a parameter";
  EXPECT_NE(to(0, wide.at(4), GA_F32), GA_OK) << "onto another parameter";
  EXPECT_EQ(ga_ema_copy_to(nullptr, 0, out.data(), GA_F32), invalid);
  EXPECT_TRUE(p == before);
  EXPECT_EQ(out.get(0), 7);
  EXPECT_OK(to(0, out.data(), GA_F32));
  EXPECT_EQ(out.get(7), -0.5);  // 0 and then -1
}

// Parameters may be added later: the EMA of each begins in its first step, with the parameter's
// value, and goes on with the context's t.
TEST(Ema, ParametersThatComeLater) {
  for (const ga_ema& e : {average(GA_EMA_TORCH, 0.5), average(GA_EMA_KARRAS)}) {
    for (const bool missing : {false, true}) {  // its first step brings it no gradient
      SCOPED_TRACE("kind " + std::to_string(e.kind) + ", missing " + std::to_string(missing));
      Tensor first(GA_F32, 4), second(GA_F32, 4, 5), g(GA_F32, 4, 1);
      Context ctx;
      ctx.group(plain_sgd());
      add(ctx, 0, first);
      ASSERT_OK(ga_context_set_ema(ctx, &e));
      Model of_first(e, format(GA_F32));
      for (int t = 0; t < 3; ++t) {
        accumulate(ctx, {&g});
        step(ctx);
        of_first.step(first);
      }
      const ga_param late = add(ctx, 0, second);
      EXPECT_EQ(copy(ctx, late, 4)[0], 5) << "before the first step the EMA is the parameter";
      accumulate(ctx, {&g, missing ? nullptr : &g});
      step(ctx);
      of_first.step(first);
      const double p4 = missing ? 5 : 4, p5 = p4 - 1;
      ASSERT_EQ(second.get(0), p4);
      EXPECT_EQ(copy(ctx, late, 4)[0], p4);
      EXPECT_TRUE(of_first.matches(copy(ctx, 0, 4)));
      accumulate(ctx, {&g, &g});
      step(ctx);
      of_first.step(first);
      EXPECT_NEAR(copy(ctx, late, 4)[0], p4 + (1 - decay_of(e, 5)) * (p5 - p4), 8 * 0x1p-24);
      EXPECT_TRUE(of_first.matches(copy(ctx, 0, 4)));
    }
  }
}

}  // namespace
}  // namespace ga::test
