// SPDX-License-Identifier: Apache-2.0
//
// The state of a parameter by name: which arrays there are, that a run goes on from them as if it had
// not been interrupted, and that a state put back to the beginning is that of a new parameter.
#include <iterator>
#include <sstream>

#include "formats.hpp"

namespace ga::test {
namespace {

struct StateArray {
  int32_t dtype;
  int64_t count;
  std::string bytes;
};

std::vector<std::string> names(const ga_context* ctx, ga_param param) {
  std::vector<std::string> list;
  for (const ga_state_info& s : states_of(ctx, param)) list.push_back(s.name);
  return list;
}

// Everything that the library keeps for a parameter, as a program would save it.
std::vector<std::pair<std::string, StateArray>> saved(ga_context* ctx, ga_param param) {
  std::vector<std::pair<std::string, StateArray>> list;
  for (const ga_state_info& s : states_of(ctx, param))
    list.emplace_back(s.name, StateArray{s.dtype, s.count, state_bytes(ctx, param, s)});
  return list;
}

void restore(ga_context* ctx, ga_param param,
             const std::vector<std::pair<std::string, StateArray>>& list) {
  for (const auto& [name, a] : list)
    EXPECT_OK(ga_state_set(ctx, param, name.c_str(), a.bytes.data(), a.dtype, a.count)) << name;
}

// Parameters of one group in several dtypes, trained from gradients that depend on the step alone.
class Training {
 public:
  Training(const ga_optimizer& o, bool matrices, bool ema) : matrices_(matrices) {
    ctx.group(o);
    if (ema) {
      ga_ema e;
      EXPECT_OK(ga_ema_init(&e, sizeof e));
      e.decay = 0.75;
      EXPECT_OK(ga_context_set_ema(ctx, &e));
    }
    std::vector<int32_t> dtypes = {GA_F32, GA_BF16, GA_F16};
    if (o.state_dtype == 0 && !matrices) dtypes.push_back(GA_F64);
    p.reserve(dtypes.size());  // the library keeps their addresses
    for (const int32_t dtype : dtypes) {
      p.push_back(random_tensor(dtype, 24 * 20, 5));
      add(ctx, 0, p.back(), matrices ? std::vector<int64_t>{24, 20} : std::vector<int64_t>{480});
    }
  }

  void train(int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      std::vector<Tensor> g;
      std::vector<const Tensor*> list;
      for (const Tensor& x : p)
        g.push_back(random_tensor(x.dtype(), x.count(), 100 + static_cast<uint64_t>(t)));
      // The first parameter misses some steps, so that its own counter differs.
      for (size_t i = 0; i < p.size(); ++i) list.push_back(i == 0 && t % 3 == 1 ? nullptr : &g[i]);
      accumulate(ctx, list);
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    }
  }

  Context ctx;
  std::vector<Tensor> p;

 private:
  bool matrices_;
};

struct Case {
  std::string name;
  ga_optimizer optimizer;
  bool matrices, ema;
};

std::vector<Case> cases() {
  std::vector<Case> list;
  for (const NamedOptimizer& n : good_optimizers()) {
    for (const bool matrices : {false, true})
      list.push_back({n.name + (matrices ? "_matrices" : ""), n.optimizer, matrices, matrices});
  }
  ga_optimizer bf16 = optimizer(GA_OPTIMIZER_ADAMW);
  bf16.state_dtype = GA_BF16;
  list.push_back({"AdamW_bf16", bf16, false, true});
  return list;
}

class States : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(All, States, testing::Range<size_t>(0, cases().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return identifier(cases()[info.param].name);
                         });

// A second context gets parameters and state after 5 steps, and makes the 4 that follow with the bits
// of the first.
TEST_P(States, CarryARun) {
  const Case c = cases()[GetParam()];
  Training whole(c.optimizer, c.matrices, c.ema), resumed(c.optimizer, c.matrices, c.ema);
  whole.train(0, 5);
  for (size_t i = 0; i < whole.p.size(); ++i) {
    const auto id = static_cast<ga_param>(i);
    Tensor& to = resumed.p[i];
    memcpy(to.data(), whole.p[i].data(), static_cast<size_t>(to.count()) * to.size());
    restore(resumed.ctx, id, saved(whole.ctx, id));
  }
  ASSERT_OK(ga_context_set_steps(resumed.ctx, 5));
  whole.train(5, 9);
  resumed.train(5, 9);
  for (size_t i = 0; i < whole.p.size(); ++i) {
    EXPECT_TRUE(whole.p[i] == resumed.p[i]) << "parameter " << i;
    const auto a = saved(whole.ctx, static_cast<ga_param>(i)),
               b = saved(resumed.ctx, static_cast<ga_param>(i));
    ASSERT_EQ(a.size(), b.size());
    for (size_t k = 0; k < a.size(); ++k)
      EXPECT_EQ(a[k].second.bytes, b[k].second.bytes) << a[k].first;
  }
}

// After a reset, training from the first gradient on gives what it gave at first.
TEST_P(States, GoBackToTheBeginning) {
  const Case c = cases()[GetParam()];
  Training run(c.optimizer, c.matrices, c.ema), twin(c.optimizer, c.matrices, c.ema);
  const std::vector<Tensor> start = run.p;
  run.train(0, 4);
  for (size_t i = 0; i < run.p.size(); ++i) {
    memcpy(run.p[i].data(), start[i].data(),
           static_cast<size_t>(start[i].count()) * start[i].size());
    ASSERT_OK(ga_state_reset(run.ctx, static_cast<ga_param>(i)));
  }
  // The steps of the context are those of the optimizers that count them.
  ASSERT_OK(ga_context_set_steps(run.ctx, 0));
  run.train(0, 4);
  twin.train(0, 4);
  for (size_t i = 0; i < run.p.size(); ++i) {
    EXPECT_TRUE(run.p[i] == twin.p[i]) << "parameter " << i;
    const auto a = saved(run.ctx, static_cast<ga_param>(i)),
               b = saved(twin.ctx, static_cast<ga_param>(i));
    for (size_t k = 0; k < a.size(); ++k)
      EXPECT_EQ(a[k].second.bytes, b[k].second.bytes) << a[k].first;
  }
}

// Whatever the average held: NaN, or what a query has shown before the first one.
TEST(States, AveragesBeginWithTheParameter) {
  ga_ema ema;
  ASSERT_OK(ga_ema_init(&ema, sizeof ema));
  float p = 1, e = NAN;
  const float zero = 0;
  Context ctx;
  ctx.group(plain_sgd());
  ASSERT_OK(ga_context_set_ema(ctx, &ema));
  ctx.param(0, "p", &p, ref::Shape{});
  ASSERT_OK(ga_state_set(ctx, 0, "ema", &e, GA_F32, 1));
  ASSERT_OK(ga_state_reset(ctx, 0));
  ASSERT_OK(ga_state_get(ctx, 0, "ema", &e, GA_F32, 1));
  EXPECT_EQ(e, 1);
  p = 0x1p-30f;
  ctx.accumulate({&zero});
  step(ctx);
  ASSERT_OK(ga_state_get(ctx, 0, "ema", &e, GA_F32, 1));
  EXPECT_EQ(e, 0x1p-30f);
}

// A refused call makes no arrays.
TEST(States, RefusedCallsAllocateNothing) {
  Block p(1000, 1);
  Context ctx;
  ctx.group(optimizer(GA_OPTIMIZER_NADAM));
  ctx.param(0, "p", p.data(), 1000);
  const ga_memory before = memory(ctx);
  const int64_t wrong = -1, huge = INT64_MAX;
  const double product = 2;
  const ga_status calls[] = {ga_state_get(ctx, 0, "exp_avg", nullptr, GA_F32, 1000),
                             ga_state_set(ctx, 0, "exp_avg", nullptr, GA_F32, 1000),
                             ga_state_set(ctx, 0, "step", &wrong, GA_I64, 1),
                             ga_state_set(ctx, 0, "step", &huge, GA_I64, 1),
                             ga_state_set(ctx, 0, "mu_product", &product, GA_F64, 1),
                             ga_context_set_steps(ctx, huge)};
  for (const ga_status status : calls) EXPECT_EQ(status, GA_ERROR_INVALID_ARGUMENT);
  const ga_memory after = memory(ctx);
  EXPECT_EQ(0, memcmp(&before, &after, sizeof after));
  ga_ema ema;
  ASSERT_OK(ga_ema_init(&ema, sizeof ema));
  ASSERT_OK(ga_context_set_ema(ctx, &ema));
  // A step that leaves 0 begins the product, too.
  int64_t five = 5;
  double got = 0;
  ASSERT_OK(ga_state_set(ctx, 0, "step", &five, GA_I64, 1));
  ASSERT_OK(ga_state_get(ctx, 0, "mu_product", &got, GA_F64, 1));
  EXPECT_EQ(got, 1);
}

// The names are torch's, as the table of optimizers has them, and counters only where a parameter has
// its own.
TEST(StateNames, AreThoseOfTorch) {
  for (const OptimizerRow& row : optimizer_rows()) {
    for (const OptimizerRow::Good& good : row.good) {
      for (const bool matrix : {false, true}) {
        if (row.matrices_only && !matrix) continue;
        SCOPED_TRACE(good.name);
        ga_optimizer o = optimizer(row.kind, good.flavor);
        good.set(o);
        Tensor p(GA_F32, 12), half(GA_BF16, 12);
        Context ctx;
        if (ga_group_add(ctx, &o, nullptr) == GA_ERROR_UNSUPPORTED) continue;  // no matrix engine
        add(ctx, 0, p, matrix ? std::vector<int64_t>{3, 4} : std::vector<int64_t>{12});
        add(ctx, 0, half, matrix ? std::vector<int64_t>{3, 4} : std::vector<int64_t>{12});
        const auto words = [](const char* text) {
          std::istringstream stream(text);
          return std::vector<std::string>(std::istream_iterator<std::string>(stream), {});
        };
        std::vector<std::string> expected = words(row.state(o, matrix));
        std::vector<std::string> numbers;
        if (good.flavor == GA_FLAVOR_TORCH) numbers = words(row.numbers);
        expected.insert(expected.end(), numbers.begin(), numbers.end());
        if (good.flavor == GA_FLAVOR_TORCH) expected.push_back("step");
        EXPECT_EQ(names(ctx, 0), expected);
        expected.push_back("master");
        EXPECT_EQ(names(ctx, 1), expected);
        for (const ga_state_info& s : states_of(ctx, 1)) {
          const std::string name = s.name;
          const bool number = std::count(numbers.begin(), numbers.end(), name) > 0;
          if (name == "step" || number || name == "master") {
            EXPECT_EQ(s.count, name == "master" ? 12 : 1);
          }
          EXPECT_EQ(s.dtype, name == "step" ? GA_I64 : number ? GA_F64 : GA_F32);
        }
      }
    }
  }
  Context ctx;
  Tensor p(GA_F32, 3);
  ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
  add(ctx, 0, p);
  EXPECT_TRUE(names(ctx, 0).empty());
}

TEST(States, AreWhatTheFormulaSays) {
  float p = 1;
  const float g = 0.5f;
  Context ctx;
  ctx.group(optimizer(GA_OPTIMIZER_ADAM));
  ctx.param(0, "p", &p, ref::Shape{});
  float m = -7, v = -7;
  int64_t steps = -7;
  ASSERT_OK(ga_state_get(ctx, 0, "exp_avg", &m, GA_F32, 1));
  EXPECT_EQ(m, 0);
  for (int t = 0; t < 2; ++t) {
    ctx.accumulate({&g});
    step(ctx);
  }
  ASSERT_OK(ga_state_get(ctx, 0, "exp_avg", &m, GA_F32, 1));
  ASSERT_OK(ga_state_get(ctx, 0, "exp_avg_sq", &v, GA_F32, 1));
  ASSERT_OK(ga_state_get(ctx, 0, "step", &steps, GA_I64, 1));
  EXPECT_NEAR(m, 0.5 * (1 - 0.81), 1e-7);
  EXPECT_NEAR(v, 0.25 * (1 - 0.999 * 0.999), 1e-9);
  EXPECT_EQ(steps, 2);
}

// torch's SGD saves a momentum_buffer and no step: written alone it is not taken for that of a
// parameter before its first update, which would overwrite it.
TEST(States, AMomentumThatIsWrittenCounts) {
  ga_optimizer o = plain_sgd();
  o.momentum = 0.5;
  float p = 0;
  const float g = 1, buffer = 8;
  Context ctx;
  ctx.group(o);
  ctx.param(0, "p", &p, ref::Shape{});
  ASSERT_OK(ga_state_set(ctx, 0, "momentum_buffer", &buffer, GA_F32, 1));
  int64_t steps = -7;
  ASSERT_OK(ga_state_get(ctx, 0, "step", &steps, GA_I64, 1));
  EXPECT_EQ(steps, 1);
  ctx.accumulate({&g});
  step(ctx);
  EXPECT_EQ(p, -5);
}

// The average before the first step is the parameter; one that is written is the one that moves.
TEST(States, Averages) {
  ga_ema ema;
  ASSERT_OK(ga_ema_init(&ema, sizeof ema));
  ema.decay = 0.5;
  Tensor p(GA_BF16, 3, 1.5), g(GA_BF16, 3, 1);
  Context ctx;
  ctx.group(plain_sgd(0.5));
  ASSERT_OK(ga_context_set_ema(ctx, &ema));
  add(ctx, 0, p);
  float e[3] = {};
  ASSERT_OK(ga_state_get(ctx, 0, "ema", e, GA_F32, 3));
  EXPECT_EQ(e[2], 1.5f);
  const float written[] = {3, 3, 3};
  ASSERT_OK(ga_state_set(ctx, 0, "ema", written, GA_F32, 3));
  accumulate(ctx, {&g});
  step(ctx);
  ASSERT_OK(ga_state_get(ctx, 0, "ema", e, GA_F32, 3));
  EXPECT_EQ(e[0], 2);  // halfway from 3 to 1
}

TEST(States, Masters) {
  Tensor p(GA_BF16, 2, 1), g(GA_BF16, 2, 1);
  Context ctx;
  ctx.group(plain_sgd(0x1p-12));
  add(ctx, 0, p);
  ASSERT_OK(ga_prepare(ctx));
  p.fill(2);  // after ga_prepare, before the first contribution: the master is of this value
  float master[2] = {};
  ASSERT_OK(ga_state_get(ctx, 0, "master", master, GA_F32, 2));
  EXPECT_EQ(master[1], 2);
  const float finer[] = {2 + 0x1p-10f, 2};
  ASSERT_OK(ga_state_set(ctx, 0, "master", finer, GA_F32, 2));
  accumulate(ctx, {&g});
  step(ctx);
  ASSERT_OK(ga_state_get(ctx, 0, "master", master, GA_F32, 2));
  EXPECT_EQ(master[0], 2 + 0x1p-10f - 0x1p-12f);
  p.fill(5);
  ASSERT_OK(ga_state_reset(ctx, 0));
  ASSERT_OK(ga_state_get(ctx, 0, "master", master, GA_F32, 2));
  EXPECT_EQ(master[0], 5);
}

TEST(Prepare, MakesAllArrays) {
  Block p(5000, 1), q(5000, 1), g(5000, 1);
  Context ctx;
  ctx.group(optimizer(GA_OPTIMIZER_ADAM));
  ctx.param(0, "p", p.data(), 5000);
  ctx.param(0, "q", q.data(), 5000);
  ASSERT_OK(ga_param_set_frozen(ctx, 1, 1));
  ASSERT_OK(ga_prepare(ctx));
  const ga_memory made = memory(ctx);
  ASSERT_OK(ga_prepare(ctx));
  ctx.accumulate({g.data(), nullptr});
  EXPECT_EQ(memory(ctx).total, made.total);
  step(ctx);
  ga_ema ema;
  ASSERT_OK(ga_ema_init(&ema, sizeof ema));
  EXPECT_TRUE(refused(ga_context_set_ema(ctx, &ema), GA_ERROR_INVALID_STATE, {"ga_prepare"}));
  float m = 0;
  EXPECT_TRUE(refused(ga_state_get(ctx, 1, "exp_avg", &m, GA_F32, 5000), GA_ERROR_INVALID_STATE,
                      {"q", "frozen"}));
}

TEST(States, WrongCallsChangeNothing) {
  float p[3] = {1, 2, 3};
  const float g[] = {1, 1, 1};
  Context ctx, twin;
  float q[3] = {1, 2, 3};
  for (const auto& [x, data] : {std::make_pair(&ctx, p), std::make_pair(&twin, q)}) {
    x->group(optimizer(GA_OPTIMIZER_NADAM));
    x->param(0, "p", data, 3);
    x->accumulate({g});
    step(*x);
  }
  float out[3] = {-7, -7, -7};
  int64_t number = -1;
  double product = 2;
  ga_state_info info;
  ASSERT_OK(ga_state_info_init(&info, sizeof info));
  const ga_status wrong = GA_ERROR_INVALID_ARGUMENT;
  EXPECT_TRUE(refused(ga_state_get(ctx, 0, "exp_sum", out, GA_F32, 3), wrong,
                      {"exp_sum", "exp_avg, exp_avg_sq, mu_product, step"}));
  EXPECT_TRUE(refused(ga_state_get(ctx, 0, nullptr, out, GA_F32, 3), wrong, {"name"}));
  EXPECT_TRUE(refused(ga_state_get(ctx, 0, "exp_avg", nullptr, GA_F32, 3), wrong, {"out"}));
  EXPECT_TRUE(refused(ga_state_get(ctx, 0, "exp_avg", out, GA_F64, 3), wrong, {"dtype", "f32"}));
  EXPECT_TRUE(refused(ga_state_get(ctx, 0, "exp_avg", out, 77, 3), wrong, {"dtype"}));
  EXPECT_TRUE(refused(ga_state_get(ctx, 0, "exp_avg", out, GA_F32, 2), wrong, {"count", "2", "3"}));
  EXPECT_TRUE(refused(ga_state_set(ctx, 0, "exp_avg", nullptr, GA_F32, 3), wrong, {"data"}));
  EXPECT_TRUE(refused(ga_state_set(ctx, 0, "master", out, GA_F32, 3), wrong, {"master"}));
  EXPECT_TRUE(refused(ga_state_set(ctx, 0, "ema", out, GA_F32, 3), wrong, {"ema"}));
  EXPECT_TRUE(refused(ga_state_set(ctx, 0, "step", &number, GA_I64, 1), wrong, {"step", "-1"}));
  EXPECT_TRUE(
      refused(ga_state_set(ctx, 0, "mu_product", &product, GA_F64, 1), wrong, {"mu_product", "2"}));
  EXPECT_TRUE(refused(ga_state_set(ctx, 1, "step", &number, GA_I64, 1), wrong, {"1"}));
  EXPECT_TRUE(refused(ga_state_describe(ctx, 0, 4, &info), wrong, {"index", "4"}));
  EXPECT_TRUE(refused(ga_state_describe(ctx, 0, -1, &info), wrong, {"index", "-1"}));
  EXPECT_TRUE(refused(ga_state_describe(ctx, 0, 0, nullptr), wrong, {"ga_state_info"}));
  EXPECT_TRUE(refused(ga_state_count(ctx, 0, nullptr), wrong, {"out"}));
  EXPECT_TRUE(refused(ga_state_reset(ctx, 7), wrong, {"7"}));
  EXPECT_TRUE(refused(ga_context_set_steps(ctx, -1), wrong, {"steps", "-1"}));
  EXPECT_TRUE(refused(ga_prepare(nullptr), wrong, {"ctx"}));
  ctx.accumulate({g});
  const ga_status now = GA_ERROR_INVALID_STATE;
  EXPECT_TRUE(refused(ga_state_get(ctx, 0, "exp_avg", out, GA_F32, 3), now, {"ga_state_get"}));
  EXPECT_TRUE(refused(ga_state_set(ctx, 0, "exp_avg", out, GA_F32, 3), now, {"ga_state_set"}));
  EXPECT_TRUE(refused(ga_state_reset(ctx, 0), now, {"ga_state_reset"}));
  EXPECT_TRUE(refused(ga_context_set_steps(ctx, 3), now, {"ga_context_set_steps"}));
  EXPECT_EQ(out[0], -7);
  twin.accumulate({g});
  step(ctx);
  step(twin);
  EXPECT_EQ(0, memcmp(p, q, sizeof p));
}

TEST(Steps, SetBeforeTheGroups) {
  float p = 1, q = 1;
  const float g = 0.5f;
  Context early, late;
  ASSERT_OK(ga_context_set_steps(early, 1000));
  for (const auto& [x, data] : {std::make_pair(&early, &p), std::make_pair(&late, &q)}) {
    x->group(optimizer(GA_OPTIMIZER_ADAM, GA_FLAVOR_KERAS));
    x->param(0, "p", data, ref::Shape{});
  }
  ASSERT_OK(ga_context_set_steps(late, 1000));
  for (Context* x : {&early, &late}) {
    x->accumulate({&g});
    EXPECT_EQ(step(*x).steps, 1001);
  }
  EXPECT_EQ(p, q);
}

// Schedules, lengths of windows and optimizers that count the context's steps go on from there.
TEST(Steps, GoOnFromElsewhere) {
  float p = 1, q = 1;
  const float g = 0.5f;
  Context ctx, whole;
  const int64_t from[] = {0, 40}, lengths[] = {1, 3};
  ga_schedule s = schedule(GA_SCHEDULE_LINEAR);
  s.total_steps = 100;
  for (const auto& [x, data] : {std::make_pair(&ctx, &p), std::make_pair(&whole, &q)}) {
    for (const int32_t kind : {GA_OPTIMIZER_ADAM, GA_OPTIMIZER_NADAM})
      x->group(optimizer(kind, GA_FLAVOR_KERAS));
    x->param(0, "p", data, ref::Shape{});
    ASSERT_OK(ga_group_set_schedule(*x, 0, &s));
    ASSERT_OK(ga_context_set_accum_schedule(*x, from, lengths, 2));
  }
  ASSERT_OK(ga_context_set_steps(ctx, 40));
  EXPECT_EQ(window(ctx).steps, 40);
  EXPECT_EQ(window(ctx).windows, 0);
  EXPECT_EQ(window(ctx).accum_steps, 3);
  EXPECT_EQ(group_lr(ctx), 1e-3 * 0.6);
  for (int t = 0; t < 40; ++t) {
    whole.accumulate({&g});
    step(whole);
  }
  // Adam's moments are of the parameter; only the bias corrections are of the context.
  float m, v;
  ASSERT_OK(ga_state_get(whole, 0, "exp_avg", &m, GA_F32, 1));
  ASSERT_OK(ga_state_get(whole, 0, "exp_avg_sq", &v, GA_F32, 1));
  ASSERT_OK(ga_state_set(ctx, 0, "exp_avg", &m, GA_F32, 1));
  ASSERT_OK(ga_state_set(ctx, 0, "exp_avg_sq", &v, GA_F32, 1));
  p = q;
  for (Context* x : {&ctx, &whole}) x->accumulate({&g});
  const ga_step_result r = step(ctx);
  step(whole);
  EXPECT_EQ(r.steps, 41);
  EXPECT_EQ(r.windows, 1);
  EXPECT_EQ(r.skipped, 0);
  EXPECT_EQ(p, q);
  ASSERT_OK(ga_context_set_steps(ctx, 7));
  EXPECT_EQ(window(ctx).steps, 7);
  EXPECT_EQ(window(ctx).windows, 1);
  EXPECT_EQ(window(ctx).accum_steps, 1);
}

}  // namespace
}  // namespace ga::test
