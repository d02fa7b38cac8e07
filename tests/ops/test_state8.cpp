// SPDX-License-Identifier: Apache-2.0
//
// Optimizer state in 8 bits: its arrays, that its steps follow those of f32 state, and that a run goes on from a file
// with the same bits.
#include <algorithm>
#include <array>
#include <map>

#include "files.hpp"
#include "formats.hpp"
#include "small_run.hpp"

namespace ga::test {
namespace {

constexpr int64_t kBlock = 256;

ga_optimizer coded(ga_optimizer o) {
  o.state_dtype = GA_STATE_8BIT;
  return o;
}

std::map<std::string, ga_state_info> states(const ga_context* ctx, ga_param param) {
  std::map<std::string, ga_state_info> list;
  for (const ga_state_info& s : states_of(ctx, param)) list[s.name] = s;
  return list;
}

std::vector<uint8_t> codes(ga_context* ctx, const char* name, int64_t count) {
  std::vector<uint8_t> list(static_cast<size_t>(count));
  EXPECT_OK(ga_state_get(ctx, 0, name, list.data(), GA_U8, count));
  return list;
}

std::vector<float> numbers(ga_context* ctx, const char* name, int64_t count) {
  std::vector<float> list(static_cast<size_t>(count));
  EXPECT_OK(ga_state_get(ctx, 0, name, list.data(), GA_F32, count));
  return list;
}

std::vector<float> scales(ga_context* ctx, const char* name, int64_t count) {
  return numbers(ctx, name, (count + kBlock - 1) / kBlock);
}

// The number of a code, apart from the library's reading of it.
double number(uint8_t code, bool has_sign, double scale) {
  const int top = has_sign ? 127 : 255, c = code & top;
  if (c == 0) return 0;
  const int octave = (top - c + 7) / 8, step = octave * 8 - (top - c);
  return std::ldexp(1 + step / 8.0, -octave) * scale * (code > top ? -1 : 1);
}

double of(double x) { return static_cast<double>(static_cast<float>(x)); }

// ---- Arrays ---------------------------------------------------------------------------------------

TEST(State8, HasCodesAndScales) {
  const int64_t n = 4097;
  Tensor p(GA_F32, n, 1), small(GA_F32, 4096, 1);
  Random random(1);
  Tensor g(GA_F32, n), h(GA_F32, 4096, 0.5);
  for (int64_t i = 0; i < n; ++i) g.set(i, random.signed_unit());
  Context ctx;
  ctx.group(coded(optimizer(GA_OPTIMIZER_ADAMW)));
  add(ctx, 0, p);
  add(ctx, 0, small);
  accumulate(ctx, {&g, &h});
  step(ctx);
  const auto list = states(ctx, 0);
  ASSERT_EQ(list.size(), 5u);
  EXPECT_EQ(list.at("exp_avg").dtype, GA_U8);
  EXPECT_EQ(list.at("exp_avg").count, n);
  EXPECT_EQ(list.at("exp_avg_scale").dtype, GA_F32);
  EXPECT_EQ(list.at("exp_avg_scale").count, 17);
  EXPECT_EQ(list.at("exp_avg_sq").dtype, GA_U8);
  EXPECT_EQ(list.at("exp_avg_sq_scale").count, 17);
  EXPECT_EQ(states(ctx, 1).at("exp_avg").dtype, GA_F32);
  EXPECT_EQ(states(ctx, 1).count("exp_avg_scale"), 0u);

  for (const bool has_sign : {true, false}) {
    const char* const name = has_sign ? "exp_avg" : "exp_avg_sq";
    const std::vector<uint8_t> raw = codes(ctx, name, n);
    const std::vector<float> x = numbers(ctx, name, n);
    const std::vector<float> s = scales(ctx, (name + std::string("_scale")).c_str(), n);
    for (int64_t b = 0; b < n; b += kBlock) {
      double largest = 0;
      for (int64_t i = b; i < std::min(b + kBlock, n); ++i) {
        const auto k = static_cast<size_t>(i);
        const double m =
            has_sign ? of(of(1 - 0.9) * g.get(i)) : of(of(1 - 0.999) * of(g.get(i) * g.get(i)));
        largest = std::max(largest, std::abs(m));
        const double is = number(raw[k], has_sign, s[static_cast<size_t>(b / kBlock)]);
        ASSERT_EQ(x[k], static_cast<float>(is));
        // Between the two codes beside it, which are an eighth of their octave apart.
        ASSERT_NEAR(is, m, std::max(std::abs(m) / 8, has_sign ? 2e-5 * largest : 3e-10 * largest));
        ASSERT_EQ(std::signbit(is), std::signbit(m));
      }
      ASSERT_EQ(s[static_cast<size_t>(b / kBlock)], static_cast<float>(largest));
    }
  }
}

TEST(State8, TakesTwoBytesAnElement) {
  const int64_t n = 1 << 20;
  Tensor p(GA_F32, n);
  Context ctx;
  ctx.group(coded(optimizer(GA_OPTIMIZER_ADAMW)));
  add(ctx, 0, p);
  const int64_t bytes = memory(ctx).optimizer_state;
  EXPECT_GE(bytes, 2 * (n + n / 64));
  EXPECT_LE(bytes, 2 * (n + n / 64) + 8192);
}

// ---- Steps ----------------------------------------------------------------------------------------

// What the parameters moved by in so many steps of noisy gradients whose mean is not 0. Those of every third element
// are small beside the others'.
std::vector<double> path(const ga_optimizer& o, int steps, int64_t rows, int64_t columns) {
  const int64_t n = rows * columns;
  Tensor p(GA_F32, n), g(GA_F32, n);
  Context ctx;
  ctx.group(o);
  add(ctx, 0, p, {rows, columns});
  Random random(3);
  for (int64_t i = 0; i < n; ++i) p.set(i, 0.1 * random.signed_unit());
  const Tensor start = p;
  for (int t = 0; t < steps; ++t) {
    for (int64_t i = 0; i < n; ++i)
      g.set(i, (i % 3 == 0 ? 0.02 : 1) * (0.5 * (i % 2 == 0 ? 1 : -1) + random.signed_unit()));
    accumulate(ctx, {&g});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  }
  std::vector<double> moved;
  for (int64_t i = 0; i < n; ++i) moved.push_back(p.get(i) - start.get(i));
  return moved;
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double squares = 0, of_b = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    squares += (a[i] - b[i]) * (a[i] - b[i]);
    of_b += b[i] * b[i];
  }
  return std::sqrt(squares / of_b);
}

struct Way {
  friend void PrintTo(const Way& way, std::ostream* os) { *os << way.name; }
  const char* name;
  ga_optimizer o;
  double most;  // distance from the path of f32 state, relative to that path, in 60 steps
};

std::vector<Way> ways() {
  std::vector<Way> list;
  const auto way = [&](const char* name, int32_t kind, double most,
                       const std::function<void(ga_optimizer&)>& set = {}) {
    ga_optimizer o = optimizer(kind);
    o.lr = 1e-3;
    if (set) set(o);
    list.push_back({name, o, most});
  };
  way("SGD", GA_OPTIMIZER_SGD, 0.045, [](ga_optimizer& o) { o.momentum = 0.9; });
  way("Nesterov", GA_OPTIMIZER_SGD, 0.04,
      [](ga_optimizer& o) { o.momentum = 0.9, o.nesterov = 1; });
  way("Adam", GA_OPTIMIZER_ADAM, 0.06);
  way("AMSGrad", GA_OPTIMIZER_ADAM, 0.06, [](ga_optimizer& o) { o.amsgrad = 1; });
  way("AdamW", GA_OPTIMIZER_ADAMW, 0.06);
  way("RMSprop", GA_OPTIMIZER_RMSPROP, 0.06, [](ga_optimizer& o) { o.momentum = 0.9; });
  way("CenteredRMSprop", GA_OPTIMIZER_RMSPROP, 0.05,
      [](ga_optimizer& o) { o.momentum = 0.9, o.centered = 1; });
  way("Adagrad", GA_OPTIMIZER_ADAGRAD, 0.05, [](ga_optimizer& o) { o.initial_accumulator = 0.1; });
  way("Lion", GA_OPTIMIZER_LION, 0.1);
  way("LAMB", GA_OPTIMIZER_LAMB, 0.06);
  way("LARS", GA_OPTIMIZER_LARS, 0.045, [](ga_optimizer& o) { o.momentum = 0.9; });
  way("AdEMAMix", GA_OPTIMIZER_ADEMAMIX, 0.06);
  way("Muon", GA_OPTIMIZER_MUON, 0.35);
  way("ADOPT", GA_OPTIMIZER_ADOPT, 0.05);
  way("NAdam", GA_OPTIMIZER_NADAM, 0.05);
  way("RAdam", GA_OPTIMIZER_RADAM, 0.05);
  return list;
}

class State8Of : public testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Optimizer, State8Of, testing::ValuesIn(ways()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(State8Of, FollowsF32) {
  const Way& way = GetParam();
  const std::vector<double> exact = path(way.o, 60, 73, 70);
  const std::vector<double> is = path(coded(way.o), 60, 73, 70);
  const double far = distance(is, exact);
  EXPECT_LE(far, way.most);
  EXPECT_GT(far, 0) << "is its state f32?";
  // Rounding errors are 0 on average: the way along the path of f32 is as long as that, with small gradients too.
  for (const size_t small : {0, 1}) {
    double along = 0, whole = 0;
    for (size_t i = 0; i < is.size(); ++i) {
      if ((i % 3 == 0) != (small == 1)) continue;
      along += is[i] * exact[i];
      whole += exact[i] * exact[i];
    }
    EXPECT_NEAR(along / whole, 1, way.most / 3) << small;
  }
}

// An update ahead of ga_step, which writes a second set of arrays, and one by several threads have the same bits, also
// where every window is clipped, so that updates ahead are made again.
TEST_P(State8Of, HasTheSameBitsByThreadsAndAhead) {
  const Way& way = GetParam();
  enum { kPlain, kThreads, kAhead };
  for (const double most : {1e9, 150.0}) {
    SCOPED_TRACE(most);
    std::vector<std::vector<float>> runs;
    for (const int by : {kPlain, kThreads, kAhead}) {
      const int64_t rows = 300, columns = 450;
      Tensor p(GA_F32, rows * columns, 0.1), g(GA_F32, rows * columns);
      ga_config c = config();
      if (by == kThreads) c.num_threads = 3;
      if (by == kAhead) c.eager = 1;
      Context ctx(c);
      ctx.group(coded(way.o));
      const ga_param id = add(ctx, 0, p, {rows, columns});
      const ga_clip norm = clip(GA_CLIP_GLOBAL, most);
      EXPECT_OK(ga_context_set_clip(ctx, &norm));
      Random random(3);
      int64_t ahead = 0;
      for (int t = 0; t < 6; ++t) {
        for (int64_t i = 0; i < p.count(); ++i) g.set(i, random.signed_unit());
        EXPECT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
        EXPECT_OK(ga_accumulate_part(ctx, id, g.data()));
        if (by == kAhead) {
          EXPECT_OK(ga_params_ready(ctx, &id, 1));
        }
        EXPECT_OK(ga_micro_end(ctx));
        const ga_step_result r = step(ctx);
        EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
        ahead += r.eager;
      }
      EXPECT_EQ(ahead > 0, by == kAhead && way.o.kind != GA_OPTIMIZER_MUON);
      std::vector<float> values;
      for (int64_t i = 0; i < p.count(); ++i) values.push_back(static_cast<float>(p.get(i)));
      for (const auto& [name, info] : states(ctx, 0)) {
        if (info.dtype != GA_F32 && info.dtype != GA_U8) continue;
        const std::vector<float> state = numbers(ctx, name.c_str(), info.count);
        values.insert(values.end(), state.begin(), state.end());
      }
      runs.push_back(values);
    }
    EXPECT_TRUE(same_bits(runs[kPlain], runs[kThreads]));
    EXPECT_TRUE(same_bits(runs[kPlain], runs[kAhead]));
  }
}

// Four micro-batches whose sum is exact are one batch, in every bit.
TEST(State8, MicroBatchesAreOneBatch) {
  const int64_t n = 70000;
  std::vector<std::vector<uint8_t>> of_m;
  std::vector<Tensor> parameters;
  for (const int micros : {1, 4}) {
    Tensor p(GA_F32, n, 0.5);
    Context ctx;
    ctx.group(coded(optimizer(GA_OPTIMIZER_ADAMW)));
    add(ctx, 0, p);
    Random random(8);
    for (int t = 0; t < 5; ++t) {
      Tensor whole(GA_F32, n);
      std::vector<Tensor> parts(4, Tensor(GA_F32, n));
      for (int64_t i = 0; i < n; ++i) {
        double sum = 0;
        for (Tensor& part : parts) {
          const auto x = static_cast<double>(random.below(65) - 32) / 64;
          part.set(i, x);
          sum += x;
        }
        whole.set(i, sum / 4);
      }
      if (micros == 1)
        accumulate(ctx, {&whole});
      else
        for (const Tensor& part : parts) accumulate(ctx, {&part});
      step(ctx);
    }
    of_m.push_back(codes(ctx, "exp_avg", n));
    parameters.push_back(p);
  }
  EXPECT_TRUE(parameters[0] == parameters[1]);
  EXPECT_EQ(of_m[0], of_m[1]);
}

// An element whose state is 0 keeps its bits with a gradient of 0, whatever is beside it.
TEST(State8, ElementsWithoutGradientStay) {
  const int64_t n = 5000;
  Tensor p(GA_F32, n, 0.3), g(GA_F32, n);
  Random random(4);
  Context ctx;
  ctx.group(coded(optimizer(GA_OPTIMIZER_ADAM)));
  add(ctx, 0, p);
  for (int t = 0; t < 50; ++t) {
    for (int64_t i = 0; i < n; ++i) g.set(i, i % 2 == 0 ? 0 : random.signed_unit());
    accumulate(ctx, {&g});
    step(ctx);
  }
  for (int64_t i = 0; i < n; ++i) ASSERT_EQ(p.get(i) == of(0.3), i % 2 == 0) << i;
}

// ---- States that change slowly ------------------------------------------------------------------------

// A state of which a step changes less than half a step of its code, which is 3 % or more: 0.1 % with a beta2 of 0.999.
struct Slow {
  friend void PrintTo(const Slow& slow, std::ostream* os) { *os << slow.name; }
  const char* name;
  ga_optimizer o;
  const char* state;
  double later;  // gradient after the first 500 steps
};

std::vector<Slow> slow_states() {
  std::vector<Slow> list;
  const auto slow = [&](const char* name, int32_t kind, const char* state,
                        const std::function<void(ga_optimizer&)>& set = {}, double later = 0) {
    ga_optimizer o = optimizer(kind);
    o.lr = 1e-3;
    if (set) set(o);
    list.push_back({name, o, state, later});
  };
  slow("Adam", GA_OPTIMIZER_ADAM, "exp_avg_sq");
  slow("AdamsFirst", GA_OPTIMIZER_ADAM, "exp_avg");
  slow("AdEMAMix", GA_OPTIMIZER_ADEMAMIX, "exp_avg_sq");
  slow("ADOPT", GA_OPTIMIZER_ADOPT, "exp_avg_sq", [](ga_optimizer& o) { o.beta2 = 0.9999; });
  slow("RMSprop", GA_OPTIMIZER_RMSPROP, "square_avg", [](ga_optimizer& o) { o.rho = 0.999; });
  slow("SGD", GA_OPTIMIZER_SGD, "momentum_buffer", [](ga_optimizer& o) { o.momentum = 0.999; });
  slow("Lion", GA_OPTIMIZER_LION, "exp_avg");
  slow(
      "Adagrad", GA_OPTIMIZER_ADAGRAD, "sum", [](ga_optimizer& o) { o.initial_accumulator = 1; },
      0.03);
  return list;
}

class State8Slow : public testing::TestWithParam<Slow> {};
INSTANTIATE_TEST_SUITE_P(Optimizer, State8Slow, testing::ValuesIn(slow_states()),
                         [](const auto& info) { return std::string(info.param.name); });

// The first element of each block has a gradient of 1 all the time, so that the scale does not bring the others down
// with it. These have, on average, the state of f32.
TEST_P(State8Slow, FollowsF32For10000Steps) {
  const Slow& slow = GetParam();
  const int64_t n = 20 * kBlock;
  Tensor p(GA_F32, n), q(GA_F32, n), one(GA_F32, n, 1), later(GA_F32, n, slow.later);
  for (int64_t i = 0; i < n; i += kBlock) later.set(i, 1);
  Context ctx;
  ctx.group(slow.o);
  ctx.group(coded(slow.o));
  const ga_param f32 = add(ctx, 0, p), codes = add(ctx, 1, q);
  const auto mean = [&](ga_param id) {
    std::vector<float> x(static_cast<size_t>(n));
    EXPECT_OK(ga_state_get(ctx, id, slow.state, x.data(), GA_F32, n));
    double sum = 0;
    for (int64_t i = 0; i < n; ++i)
      if (i % kBlock != 0) sum += static_cast<double>(x[static_cast<size_t>(i)]);
    return sum / static_cast<double>(n - n / kBlock);
  };
  for (int t = 1; t <= 10000; ++t) {
    const Tensor& g = t <= 500 ? one : later;
    accumulate(ctx, {&g, &g});
    step(ctx);
    if (t == 500 || t == 1000 || t == 3000 || t == 10000) {
      EXPECT_NEAR(mean(codes), mean(f32), 0.05 * mean(f32) + 1e-6) << t;
    }
  }
}

// A block with gradients from 1e-8 to 1, and then zeros: no update is more than 1.25 times that of f32 state. A code is
// at most an eighth of itself off, and the least code of m comes with the least of v, which is as far below 1.
TEST(State8, UpdatesAreNoLarger) {
  const int64_t n = 20 * kBlock;
  std::array<std::vector<double>, 2> moved;
  Tensor p[] = {Tensor(GA_F32, n), Tensor(GA_F32, n)};
  Tensor g(GA_F32, n), zero(GA_F32, n);
  for (int64_t i = 0; i < n; ++i)
    g.set(i, std::pow(10, -8 * static_cast<double>(i % kBlock) / (kBlock - 1)));
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADAM);
  o.eps = 0;
  Context ctx;
  ctx.group(o);
  ctx.group(coded(o));
  add(ctx, 0, p[0]);
  add(ctx, 1, p[1]);
  for (int t = 0; t < 300; ++t) {
    p[0].fill(0), p[1].fill(0);
    if (t == 0)
      accumulate(ctx, {&g, &g});
    else
      accumulate(ctx, {&zero, &zero});
    step(ctx);
    for (int64_t i = 0; i < n; ++i)
      ASSERT_LE(std::abs(p[1].get(i)), 1.25 * std::abs(p[0].get(i))) << t << ' ' << i;
  }
}

// The largest second moment so far is not raised by rounding.
TEST(State8, TheLargestSoFarDoesNotGrow) {
  const int64_t n = 20 * kBlock;
  Tensor p[] = {Tensor(GA_F32, n), Tensor(GA_F32, n)};
  Tensor g(GA_F32, n);
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADAM);
  o.amsgrad = 1;
  o.beta2 = 0.99;
  Context ctx;
  ctx.group(o);
  ctx.group(coded(o));
  add(ctx, 0, p[0]);
  add(ctx, 1, p[1]);
  Random random(6);
  for (int t = 0; t < 2000; ++t) {
    for (int64_t i = 0; i < n; ++i) g.set(i, 0.5 + random.signed_unit());
    accumulate(ctx, {&g, &g});
    step(ctx);
  }
  std::vector<float> largest[2];
  for (const int k : {0, 1}) {
    largest[k].resize(static_cast<size_t>(n));
    EXPECT_OK(ga_state_get(ctx, k, "max_exp_avg_sq", largest[k].data(), GA_F32, n));
  }
  EXPECT_EQ(largest[0], largest[1]);
}

// Gradients whose squares overflow leave a state that is saved, read and goes on.
TEST(State8, SurvivesSquaresThatOverflow) {
  Tensor p(GA_F32, 5000, 1), q(GA_F32, 5000, 1), g(GA_F32, 5000, 0.5);
  Context ctx, other;
  for (ga_context* const c : {static_cast<ga_context*>(ctx), static_cast<ga_context*>(other)}) {
    const ga_optimizer adam = coded(optimizer(GA_OPTIMIZER_ADAM));
    EXPECT_OK(ga_group_add(c, &adam, nullptr));
    Tensor& of = c == ctx ? p : q;
    EXPECT_OK(try_add(c, 0, "p", of.data(), GA_F32, {5000}, options()));
  }
  g.set(700, 3e19);
  accumulate(ctx, {&g});
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  const std::vector<float> v = numbers(ctx, "exp_avg_sq", 5000);
  EXPECT_EQ(v[700], std::numeric_limits<float>::max());
  ASSERT_OK(ga_state_set(ctx, 0, "exp_avg_sq", v.data(), GA_F32, 5000));
  ASSERT_OK(load(other, saved(ctx)));
  g.set(700, 0.5);
  for (ga_context* const c : {static_cast<ga_context*>(ctx), static_cast<ga_context*>(other)})
    for (int t = 0; t < 3; ++t) {
      accumulate(c, {&g});
      step(c);
    }
  EXPECT_TRUE(p == q);
  EXPECT_EQ(saved(ctx), saved(other));
  for (int64_t i = 0; i < 5000; ++i) ASSERT_TRUE(std::isfinite(p.get(i))) << i;
}

// An infinity takes the block that it is in, and nothing else.
TEST(State8, AnInfinityIsOfItsBlock) {
  const int64_t n = 20 * kBlock;
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_IGNORE;
  Tensor p(GA_F32, n, 1), g(GA_F32, n, 0.5);
  Context ctx(c);
  ctx.group(coded(optimizer(GA_OPTIMIZER_ADAM)));
  add(ctx, 0, p);
  accumulate(ctx, {&g});
  step(ctx);
  g.set(3 * kBlock + 7, INFINITY);
  for (int t = 0; t < 3; ++t) {
    accumulate(ctx, {&g});
    step(ctx);
    g.fill(0.5);
  }
  for (int64_t i = 0; i < n; ++i) {
    if (i == 3 * kBlock + 7) {
      EXPECT_TRUE(std::isnan(p.get(i)));
      continue;
    }
    ASSERT_TRUE(std::isfinite(p.get(i))) << i;
    if (i / kBlock != 3) {
      ASSERT_LT(p.get(i), 0.998) << i;
    }
  }
}

// ---- Files and state by name ------------------------------------------------------------------------

struct Training {
  Tensor p = Tensor(GA_BF16, 30000, 0.25), q = Tensor(GA_F32, 5001, -0.5);
  Context ctx;
  Random random{9};

  explicit Training(int32_t kind = GA_OPTIMIZER_ADAMW, int32_t state = GA_STATE_8BIT) {
    ga_optimizer o = optimizer(kind);
    o.state_dtype = state;
    ctx.group(o);
    ga_param_options options;
    EXPECT_OK(ga_param_options_init(&options, sizeof options));
    options.master = GA_MASTER_NONE;
    options.rounding = GA_ROUND_STOCHASTIC;
    EXPECT_OK(try_add(ctx, 0, "p", p.data(), GA_BF16, {100, 300}, options));
    EXPECT_OK(try_add(ctx, 0, "q", q.data(), GA_F32, {q.count()}, test::options()));
  }
  void bring() {
    Tensor g(GA_BF16, p.count()), h(GA_F32, q.count());
    for (int64_t i = 0; i < g.count(); ++i) g.set(i, random.signed_unit());
    for (int64_t i = 0; i < h.count(); ++i) h.set(i, random.signed_unit());
    accumulate(ctx, {&g, &h});
  }
  void window() {
    bring();
    bring();
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  }
};

TEST(State8, GoesOnFromAFile) {
  for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_ADEMAMIX, GA_OPTIMIZER_LION}) {
    Training whole(kind), other(kind);
    for (int t = 0; t < 3; ++t) whole.window();
    whole.bring();  // in the middle of a window
    const Bytes file = saved(whole.ctx);
    ASSERT_OK(load(other.ctx, file));
    EXPECT_EQ(saved(other.ctx), file);
    other.random = whole.random;
    for (Training* const run : {&whole, &other}) {
      run->bring();
      step(run->ctx);
      run->window();
    }
    EXPECT_TRUE(whole.p == other.p);
    EXPECT_TRUE(whole.q == other.q);
    EXPECT_EQ(saved(whole.ctx), saved(other.ctx));
  }
}

// A file with one array of 5001 codes, their scales and a step, as another program may write it.
Bytes of_another_program(const std::vector<float>& scales) {
  const size_t n = 5001;
  const std::string at[] = {std::to_string(n), std::to_string(n + 80), std::to_string(n + 88)};
  std::string header =
      R"({"p1.momentum_buffer":{"dtype":"U8","shape":[5001],"data_offsets":[0,)" + at[0] +
      R"(]},"p1.momentum_buffer_scale":{"dtype":"F32","shape":[20],"data_offsets":[)" + at[0] +
      "," + at[1] + R"(]},"p1.step":{"dtype":"I64","shape":[],"data_offsets":[)" + at[1] + "," +
      at[2] + "]}}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  Bytes file(8 + header.size() + n + 88);
  const uint64_t size = header.size();
  std::memcpy(file.data(), &size, 8);
  std::copy(header.begin(), header.end(), file.begin() + 8);
  char* const data = file.data() + 8 + header.size();
  std::fill_n(data, n, char{64});
  std::memcpy(data + n, scales.data(), 80);
  data[n + 80] = 1;
  return file;
}

TEST(State8, ReadsFilesOfOthersAndRefusesBadScales) {
  Tensor p(GA_F32, 5001, 1);
  ga_optimizer sgd = plain_sgd();
  sgd.momentum = 0.9;
  Context ctx;
  ctx.group(coded(sgd));
  EXPECT_OK(try_add(ctx, 0, "p1", p.data(), GA_F32, {5001}, options()));
  ga_state_options parts;
  EXPECT_OK(ga_state_options_init(&parts, sizeof parts));
  parts.parts = GA_STATE_LIBRARY;
  parts.unmarked = 1;
  std::vector<float> scales(20, 2);
  ASSERT_OK(load(ctx, of_another_program(scales), &parts));
  const std::vector<float> before = numbers(ctx, "momentum_buffer", 5001);
  EXPECT_EQ(before, std::vector<float>(5001, static_cast<float>(number(64, true, 2))));
  // Codes without scales, however much may be missing.
  Bytes alone = of_another_program(scales);
  const std::string name = "momentum_buffer_scale";
  std::copy_n("momentum_buffer_other", name.size(),
              std::search(alone.begin(), alone.end(), name.begin(), name.end()));
  parts.allow_missing = parts.allow_extra = 1;
  EXPECT_EQ(load(ctx, alone, &parts), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(ga_last_error()).find("only one of codes and scales"), std::string::npos)
      << ga_last_error();
  EXPECT_EQ(numbers(ctx, "momentum_buffer", 5001), before);
  for (const float bad : {-1.0f, 1e-40f, INFINITY, NAN}) {
    scales[7] = bad;
    EXPECT_EQ(load(ctx, of_another_program(scales), &parts), GA_ERROR_FORMAT);
    EXPECT_NE(std::string(ga_last_error()).find("\"p1.momentum_buffer_scale\" has the scale"),
              std::string::npos)
        << ga_last_error();
    EXPECT_EQ(numbers(ctx, "momentum_buffer", 5001), before);
  }
}

TEST(State8, RefusesFilesThatDoNotFit) {
  Training wide(GA_OPTIMIZER_ADAMW, 0), run;
  wide.window();
  run.window();
  const Bytes before = saved(run.ctx);
  EXPECT_EQ(load(run.ctx, saved(wide.ctx)), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(ga_last_error()).find("is F32 in the file, but U8 here"), std::string::npos)
      << ga_last_error();
  EXPECT_EQ(saved(run.ctx), before);
  EXPECT_EQ(load(wide.ctx, before), GA_ERROR_INVALID_ARGUMENT);
}

TEST(State8, ReadsAndTakesNumbers) {
  Training run, other;
  run.window();
  const int64_t n = run.p.count();
  for (const char* const name : {"exp_avg", "exp_avg_sq"}) {
    // Numbers of codes become the same codes, and their scales.
    const std::vector<float> x = numbers(run.ctx, name, n);
    ASSERT_OK(ga_state_set(other.ctx, 0, name, x.data(), GA_F32, n));
    EXPECT_EQ(codes(other.ctx, name, n), codes(run.ctx, name, n));
    const std::string of_blocks = std::string(name) + "_scale";
    const std::vector<float> s = scales(run.ctx, of_blocks.c_str(), n);
    EXPECT_EQ(scales(other.ctx, of_blocks.c_str(), n), s);

    // So do the codes themselves.
    Training third;
    const std::vector<uint8_t> raw = codes(run.ctx, name, n);
    ASSERT_OK(ga_state_set(third.ctx, 0, name, raw.data(), GA_U8, n));
    ASSERT_OK(ga_state_set(third.ctx, 0, of_blocks.c_str(), s.data(), GA_F32,
                           static_cast<int64_t>(s.size())));
    EXPECT_EQ(numbers(third.ctx, name, n), x);

    const auto refused = [&](std::vector<float> bad, const char* which, float value) {
      bad[5] = value;
      EXPECT_EQ(
          ga_state_set(run.ctx, 0, which, bad.data(), GA_F32, static_cast<int64_t>(bad.size())),
          GA_ERROR_INVALID_ARGUMENT);
      EXPECT_NE(std::string(ga_last_error()).find("element 5 of \"" + std::string(which)),
                std::string::npos)
          << ga_last_error();
      EXPECT_EQ(numbers(run.ctx, name, n), x);
    };
    refused(x, name, NAN);
    refused(x, name, INFINITY);
    for (const float bad : {-1.0f, 1e-40f, INFINITY, NAN}) refused(s, of_blocks.c_str(), bad);
    if (name == std::string("exp_avg_sq")) refused(x, name, -1);
  }
  std::vector<double> wrong(static_cast<size_t>(n));
  EXPECT_EQ(ga_state_get(run.ctx, 0, "exp_avg", wrong.data(), GA_F64, n),
            GA_ERROR_INVALID_ARGUMENT);
}

// A reset state is that of a new parameter, also where that is not 0.
TEST(State8, IsResetToItsBeginning) {
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADAGRAD);
  o.initial_accumulator = 0.1;
  Tensor p(GA_F32, 5000, 1), g(GA_F32, 5000, 0.5);
  Context ctx;
  ctx.group(coded(o));
  add(ctx, 0, p);
  const std::vector<float> fresh = numbers(ctx, "sum", 5000);
  EXPECT_EQ(fresh, std::vector<float>(5000, 0.1f));
  accumulate(ctx, {&g});
  step(ctx);
  EXPECT_EQ(numbers(ctx, "sum", 5000), std::vector<float>(5000, 0.1f + 0.25f));
  EXPECT_OK(ga_state_reset(ctx, 0));
  EXPECT_EQ(numbers(ctx, "sum", 5000), fresh);
}

// What f32 cannot begin with, a file must be able to hold.
TEST(State8, BeginsWithAScale) {
  for (const double initial : {1e-39, 1e39}) {
    ga_optimizer o = optimizer(GA_OPTIMIZER_ADAGRAD);
    o.initial_accumulator = initial;
    Tensor p(GA_F32, 5000, 1);
    Context ctx;
    ctx.group(coded(o));
    add(ctx, 0, p);
    const float want = initial < 1 ? 0 : std::numeric_limits<float>::max();
    EXPECT_EQ(numbers(ctx, "sum", 5000), std::vector<float>(5000, want));
    EXPECT_OK(load(ctx, saved(ctx)));
  }
}

// ---- What is refused ----------------------------------------------------------------------------------

TEST(State8, IsRefusedWhereStateCannotBe) {
  Context ctx;
  for (const int32_t kind : {GA_OPTIMIZER_ADAFACTOR, GA_OPTIMIZER_ADADELTA, GA_OPTIMIZER_ADAMAX,
                             GA_OPTIMIZER_ROWWISE_ADAGRAD, GA_OPTIMIZER_SCHEDULE_FREE_ADAMW}) {
    const ga_optimizer o = coded(optimizer(kind));
    EXPECT_EQ(ga_group_add(ctx, &o, nullptr), GA_ERROR_UNSUPPORTED) << kind;
    EXPECT_NE(std::string(ga_last_error()).find("GA_STATE_8BIT"), std::string::npos)
        << ga_last_error();
  }
  const ga_group group = ctx.group(coded(optimizer(GA_OPTIMIZER_ADAM)));
  ga_optimizer wide = optimizer(GA_OPTIMIZER_ADAM);
  EXPECT_EQ(ga_group_set_optimizer(ctx, group, &wide), GA_ERROR_UNSUPPORTED);
  std::vector<double> p(5000);
  const int64_t shape[] = {50, 100};
  EXPECT_EQ(ga_param_add(ctx, group, "p", p.data(), GA_F64, 2, shape, nullptr, nullptr),
            GA_ERROR_UNSUPPORTED);
  ga_param_options rows;
  EXPECT_OK(ga_param_options_init(&rows, sizeof rows));
  rows.rows = GA_ROWS_LAZY;
  EXPECT_EQ(ga_param_add(ctx, group, "p", p.data(), GA_F32, 2, shape, &rows, nullptr),
            GA_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(ga_last_error()).find("a multiple of 16 elements, but it has 100"),
            std::string::npos)
      << ga_last_error();
  // An optimizer without state has none that lies in two rows.
  const ga_group plain = ctx.group(coded(plain_sgd()));
  EXPECT_OK(ga_param_add(ctx, plain, "p", p.data(), GA_F32, 2, shape, &rows, nullptr));
}

// Rows are updated alone, and have blocks of their own: the state of the others keeps its bits.
class State8OfRows : public testing::TestWithParam<std::pair<int64_t, int64_t>> {};
INSTANTIATE_TEST_SUITE_P(Columns, State8OfRows,
                         testing::Values(std::pair(512, 256), std::pair(384, 128),
                                         std::pair(64, 64), std::pair(96, 32), std::pair(48, 16)));
TEST_P(State8OfRows, LeaveTheOthers) {
  const auto [columns, block] = GetParam();
  const int64_t rows = 100, n = rows * columns;
  Tensor p(GA_F32, n, 1);
  ga_param_options options;
  EXPECT_OK(ga_param_options_init(&options, sizeof options));
  options.rows = GA_ROWS_LAZY;
  Context ctx;
  ctx.group(coded(optimizer(GA_OPTIMIZER_ADAM)));
  add(ctx, 0, p, {rows, columns}, options);
  ASSERT_EQ(states(ctx, 0).at("exp_avg_sq_scale").count, n / block);
  Random random(2);
  std::vector<std::vector<uint8_t>> after;
  std::map<int64_t, double> largest;  // by block
  for (const int64_t row : {int64_t{3}, int64_t{17}}) {
    std::vector<float> g(static_cast<size_t>(columns));
    for (float& x : g) x = static_cast<float>(random.signed_unit());
    for (int64_t i = 0; i < columns; ++i) {
      double& most = largest[(row * columns + i) / block];
      most = std::max(most, of(of(1 - 0.999) *
                               of(of(g[static_cast<size_t>(i)]) * of(g[static_cast<size_t>(i)]))));
    }
    EXPECT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
    EXPECT_OK(ga_accumulate_rows(ctx, 0, &row, GA_I64, 1, g.data()));
    EXPECT_OK(ga_micro_end(ctx));
    step(ctx);
    after.push_back(codes(ctx, "exp_avg_sq", n));
  }
  const std::vector<float> s = numbers(ctx, "exp_avg_sq_scale", n / block);
  for (int64_t b = 0; b < n / block; ++b)
    EXPECT_EQ(s[static_cast<size_t>(b)], largest.count(b) ? largest[b] : 0) << b;
  for (int64_t i = 0; i < n; ++i) {
    const auto k = static_cast<size_t>(i);
    const int64_t row = i / columns;
    ASSERT_EQ(after[1][k] != 0, row == 3 || row == 17) << i;
    if (row == 3) {
      ASSERT_EQ(after[0][k], after[1][k]);
    }
  }
}

}  // namespace
}  // namespace ga::test
