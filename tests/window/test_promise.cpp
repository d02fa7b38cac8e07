// SPDX-License-Identifier: Apache-2.0
//
// The promise: N micro-batches and a step give what one batch N times as large gives. Compared with
// float64 for every optimizer, window length, tail, weighting and reduction, and bit for bit
// between all ways of handing a gradient over.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <tuple>

#include "support.hpp"

namespace ga::test {
namespace {

struct Micro {
  Block gradients;
  double weight;
  double loss_scale;
};
using Window = std::vector<Micro>;

enum class Route { kWhole, kFlat, kParts, kAcquire };
constexpr Route kRoutes[] = {Route::kWhole, Route::kFlat, Route::kParts, Route::kAcquire};

void register_parameters(Context& ctx, ga_group group, const Layout& layout, Route route,
                         Block& block) {
  if (route != Route::kFlat) {
    for (size_t i = 0; i < layout.size(); ++i) {
      ctx.param(group, "p" + std::to_string(i), block.data() + layout.offsets[i], layout.counts[i]);
    }
    return;
  }
  std::vector<ga_flat_entry> entries;
  std::vector<std::string> names;
  for (size_t i = 0; i < layout.size(); ++i) names.push_back("p" + std::to_string(i));
  for (size_t i = 0; i < layout.size(); ++i) {
    entries.push_back(flat_entry(names[i].c_str(), group, 1, &layout.counts[i], layout.offsets[i]));
  }
  EXPECT_OK(ga_params_add_flat(ctx, block.data(), GA_F32, entries.data(), entries.size(), nullptr,
                               nullptr));
}

// Does what a program's own kernel does with an accumulator: rows x columns, with a leading
// dimension.
void write_accumulator(const ga_accumulator& a, const float* g) {
  const auto alpha = static_cast<float>(a.alpha);
  if (a.rows == 0) return;
  Block data = from_library(a.data, (a.rows - 1) * a.leading_dimension + a.columns);
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < a.columns; ++c) {
      float& x = data[static_cast<size_t>(r * a.leading_dimension + c)];
      const float term = alpha * g[r * a.columns + c];
      x = a.beta == 0 ? term : term + x;
    }
  }
  to_library(a.data, data);
}

// Hands over a micro-batch by one of the routes. Parts come in reverse order, as in a backward
// pass.
void hand_over(ga_context* ctx, const Layout& layout, Route route, const Block& gradients,
               double weight, double loss_scale, int64_t index) {
  if (route == Route::kWhole) {
    const auto list = pointers(layout, gradients);
    ASSERT_OK(ga_accumulate(ctx, list.data(), list.size(), weight, MicroOptions(loss_scale)));
    return;
  }
  if (route == Route::kFlat) {
    const void* list[] = {gradients.data()};
    ASSERT_OK(ga_accumulate(ctx, list, 1, weight, MicroOptions(loss_scale)));
    return;
  }
  ASSERT_OK(ga_micro_begin(ctx, index, weight, MicroOptions(loss_scale)));
  for (size_t i = layout.size(); i-- > 0;) {
    const auto param = static_cast<ga_param>(i);
    const float* g = gradients.data() + layout.offsets[i];
    if (route == Route::kParts) {
      ASSERT_OK(ga_accumulate_part(ctx, param, g));
      continue;
    }
    ga_accumulator a;
    a.struct_size = sizeof a;
    ASSERT_OK(ga_accumulator_acquire(ctx, param, &a));
    if (weight == 0) {
      EXPECT_EQ(a.data, nullptr);
    } else {
      EXPECT_EQ(a.rows * a.columns, layout.counts[i]);
      write_accumulator(a, g);
    }
    ASSERT_OK(ga_accumulator_release(ctx, param));
  }
  ASSERT_OK(ga_micro_end(ctx));
}

// Runs windows through the library. Overwrites a gradient's memory with NaN as soon as the contract
// allows it.
Block run(const Layout& layout, const ga_optimizer& o, const ga_config& config, Route route,
          const std::vector<Window>& windows, const Block& start) {
  Block block = start;
  Context ctx(config);
  register_parameters(ctx, ctx.group(o), layout, route, block);
  const Block nan(start.size(), NAN);
  std::vector<Block> buffers;

  for (const Window& window : windows) {
    buffers.resize(window.size());
    double weight = 0;
    int first = -1;  // the micro-batch of the first contributions, as long as they must live
    for (size_t k = 0; k < window.size(); ++k) {
      const Micro& micro = window[k];
      buffers[k] = micro.weight == 0 ? nan : micro.gradients;
      hand_over(ctx, layout, route, buffers[k], micro.weight, micro.loss_scale,
                static_cast<int64_t>(k));
      if (testing::Test::HasFatalFailure()) return block;
      weight += micro.weight;
      const bool opened = first < 0 && micro.weight > 0;
      if (opened && config.gradient_life != GA_GRADIENTS_CONSUMED) {
        first = static_cast<int>(k);
      } else if (micro.weight > 0) {
        buffers[k] = nan;
        if (first >= 0 && config.gradient_life == GA_GRADIENTS_LIVE)
          buffers[static_cast<size_t>(first)] = nan;
      }
    }
    const ga_step_result result = step(ctx);
    EXPECT_EQ(result.outcome, weight == 0 ? GA_STEP_SKIPPED_EMPTY : GA_STEP_APPLIED);
    EXPECT_EQ(result.micro_batches, static_cast<int64_t>(window.size()));
    EXPECT_DOUBLE_EQ(result.weight, weight);
  }
  return block;
}

// The single batch that equals each window, rounded to float32 once. Its loss scale is chosen so
// that no gradient is subnormal, which would lose digits that the window still has.
std::vector<Window> one_batch_each(const Layout& layout, const std::vector<Window>& windows,
                                   int32_t gradient_kind) {
  std::vector<Window> result;
  for (const Window& window : windows) {
    double weight = 0;
    for (const Micro& micro : window) weight += micro.weight;
    std::vector<double> sum(static_cast<size_t>(layout.total));
    for (const Micro& micro : window) {
      if (micro.weight == 0) continue;
      const double share = gradient_kind == GA_GRADIENT_MEAN ? micro.weight / weight : 1;
      for (size_t i = 0; i < sum.size(); ++i) {
        sum[i] += share * static_cast<double>(micro.gradients[i]) / micro.loss_scale;
      }
    }
    constexpr double kScale = 0x1p60;
    for (double& x : sum) x *= kScale;
    result.push_back({Micro{Block(sum.begin(), sum.end()), weight, kScale}});
  }
  return result;
}

void accumulate_all(Model& model, const std::vector<Window>& windows) {
  for (const Window& window : windows) {
    for (const Micro& micro : window) {
      model.accumulate(micro.gradients, micro.weight, micro.loss_scale);
    }
    model.step();
  }
}

enum class Weighting { kEqual, kUneven, kSomeZero, kTokens };

// Four windows of n micro-batches; with a tail the third is cut short.
std::vector<Window> make_windows(const Layout& layout, int n, bool tail, Weighting weighting,
                                 int count = 4) {
  static constexpr double kUneven[] = {20, 0.125, 7, 4};
  static constexpr double kTokens[] = {11, 101, 1037, 4096};
  static constexpr double kScales[] = {1, 1024, 3};
  std::vector<Window> windows;
  uint64_t round = 0;
  for (int w = 0; w < count; ++w) {
    Window window;
    const int length = tail && w == count / 2 ? (n + 1) / 2 : n;
    for (int k = 0; k < length; ++k, ++round) {
      Micro micro{gradients(layout, 7, round), 1, 1};
      switch (weighting) {
        case Weighting::kEqual:
          break;
        case Weighting::kUneven:
          micro.weight = kUneven[round % 4];
          break;
        case Weighting::kSomeZero:
          micro.weight = round % 3 == 1 ? 0 : 2;
          break;
        case Weighting::kTokens:
          micro.weight = kTokens[round % 4];
          micro.loss_scale = kScales[round % 3];
          break;
      }
      window.push_back(std::move(micro));
    }
    windows.push_back(std::move(window));
  }
  return windows;
}

// One optimizer for each kernel that differs: with none to three values of state per element, and
// with norms of the parameter, of the gradient and of the update.
std::vector<size_t> one_of_each_loop() {
  std::vector<size_t> result;
  const auto all = good_optimizers();
  for (size_t i = 0; i < all.size(); ++i) {
    for (const char* name : {"SgdDecay", "SgdKerasNesterov", "AdamW", "AdamDecayAmsgrad", "Lamb",
                             "LarsNesterov", "Adafactor"}) {
      if (all[i].name == name) result.push_back(i);
    }
  }
  return result;
}

using Case = std::tuple<size_t, const char*>;  // optimizer, instruction set level

std::string case_name(const testing::TestParamInfo<Case>& info) {
  return good_optimizers()[std::get<0>(info.param)].name + "_" +
         identifier(std::get<1>(info.param));
}

class Promise : public testing::TestWithParam<Case> {
 protected:
  Promise() : isa_(std::get<1>(GetParam())) {}
  void SetUp() override {
    if (!Isa::available())
      GTEST_SKIP() << "this build or this processor has no " << std::get<1>(GetParam());
    optimizer_ = good_optimizers()[std::get<0>(GetParam())].optimizer;
  }

  Isa isa_;
  ga_optimizer optimizer_{};
};

// One optimizer of each kernel goes through every combination; the others, which differ only in
// their formula, through the combinations that could affect a formula.
TEST_P(Promise, SmallTensorsEveryWay) {
  const std::vector<size_t> loops = one_of_each_loop();
  const bool every = std::count(loops.begin(), loops.end(), std::get<0>(GetParam())) > 0;
  const Layout layout({0, 1, 15, 16, 17, 1023, 64});
  const Block start = parameters(layout, 1);
  for (const int n : {1, 2, 3, 8}) {
    for (const bool tail : {false, true}) {
      if ((tail && n == 1) || (!every && (n == 2 || n == 8))) continue;
      for (const Weighting weighting :
           {Weighting::kEqual, Weighting::kUneven, Weighting::kSomeZero, Weighting::kTokens}) {
        if (!every && weighting != Weighting::kTokens) continue;
        const auto windows = make_windows(layout, n, tail, weighting);
        for (const int32_t kind : {GA_GRADIENT_MEAN, GA_GRADIENT_SUM}) {
          for (const int32_t reduce : {GA_REDUCE_MEAN, GA_REDUCE_SUM}) {
            if (!every && kind != reduce) continue;
            SCOPED_TRACE(testing::Message() << n << " micro-batches, tail " << tail
                                            << ", weighting " << static_cast<int>(weighting)
                                            << ", kind " << kind << ", reduce " << reduce);
            ga_config c = config();
            c.gradient_kind = kind;
            c.reduce = reduce;
            Model model(layout, {optimizer_}, c, start);
            accumulate_all(model, windows);
            const Block first = run(layout, optimizer_, c, Route::kWhole, windows, start);
            ASSERT_TRUE(model.matches(first));

            const auto whole = one_batch_each(layout, windows, kind);
            ASSERT_TRUE(model.matches(run(layout, optimizer_, c, Route::kWhole, whole, start)))
                << "as one batch";

            for (const int32_t life :
                 {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE, GA_GRADIENTS_LENT}) {
              for (const Route route : kRoutes) {
                c.gradient_life = life;
                c.accum_steps = route == Route::kFlat ? 0 : n;
                ASSERT_TRUE(same_bits(first, run(layout, optimizer_, c, route, windows, start)))
                    << "route " << static_cast<int>(route) << ", life " << life;
              }
            }
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Promise,
                         testing::Combine(testing::Range<size_t>(0, good_optimizers().size()),
                                          testing::ValuesIn(kIsaLevels)),
                         case_name);

class PromiseLarge : public Promise {};

TEST_P(PromiseLarge, ManyChunksOnSomeThreads) {
  const Layout layout({65535, 65536, 65537, (1 << 20) + 3});
  const Block start = parameters(layout, 2);
  const auto windows = make_windows(layout, 3, true, Weighting::kUneven, 2);
  ga_config c = config();
  Model model(layout, {optimizer_}, c, start);
  accumulate_all(model, windows);

  Block first;
  for (const int32_t threads : {1, 2, 3}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE, GA_GRADIENTS_LENT}) {
      c.num_threads = threads;
      c.gradient_life = life;
      const Route route = kRoutes[(threads + life) % 4];
      const Block got = run(layout, optimizer_, c, route, windows, start);
      if (first.empty()) {
        first = got;
        ASSERT_TRUE(model.matches(first));
      }
      ASSERT_TRUE(same_bits(first, got)) << threads << " threads, life " << life;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PromiseLarge,
                         testing::Combine(testing::ValuesIn(one_of_each_loop()),
                                          testing::ValuesIn(kIsaLevels)),
                         case_name);

// If float32 rounds nothing (small integers, and powers of two for weights and their sum), the
// promise holds without a tolerance.
class PromiseExact : public testing::TestWithParam<size_t> {};

TEST_P(PromiseExact, SameBitsWhereSumsAreExact) {
  const ga_optimizer o = good_optimizers()[GetParam()].optimizer;
  const Layout layout({3, 70000});
  const Block start = parameters(layout, 3);
  Random random(4);
  for (const int n : {2, 4, 8}) {
    std::vector<Window> windows;
    for (int w = 0; w < 6; ++w) {
      Window window;
      for (int k = 0; k < n; ++k) {
        Block g(static_cast<size_t>(layout.total));
        for (float& x : g) x = static_cast<float>(random.below(2001) - 1000) / 256;
        window.push_back({std::move(g), 4, k % 2 == 0 ? 1.0 : 0.5});
      }
      windows.push_back(std::move(window));
    }
    const ga_config c = config();
    const Block many = run(layout, o, c, Route::kWhole, windows, start);
    const auto whole = one_batch_each(layout, windows, c.gradient_kind);
    EXPECT_TRUE(same_bits(many, run(layout, o, c, Route::kWhole, whole, start)));
  }
}

INSTANTIATE_TEST_SUITE_P(All, PromiseExact, testing::Range<size_t>(0, good_optimizers().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return good_optimizers()[info.param].name;
                         });

// ---- Defects of other systems, each with numbers that show it -----------------------------------

// One parameter of one element, which plain SGD with lr 1 moves by minus the reduced gradient.
struct Scalar {
  explicit Scalar(const ga_config& config, const ga_optimizer& o = plain_sgd()) : ctx(config) {
    ctx.param(ctx.group(o), "p", &p, 1);
  }
  void accumulate(float g, double weight = 1) { ctx.accumulate({&g}, weight); }

  float p = 0;
  Context ctx;
};

TEST(KnownDefects, ShortTailIsDividedByWhatItHolds) {
  for (const int tail : {1, 2, 3}) {
    ga_config c = config();
    c.accum_steps = 4;
    Scalar s(c);
    for (int k = 0; k < tail; ++k) s.accumulate(1);
    step(s.ctx);
    EXPECT_EQ(s.p, -1) << "a tail of " << tail << " of 4";
  }
}

TEST(KnownDefects, TailDoesNotLeakIntoTheNextWindow) {
  ga_config c = config();
  c.accum_steps = 4;
  Scalar s(c);
  s.accumulate(1000);
  step(s.ctx);
  EXPECT_EQ(s.p, -1000);
  for (int k = 0; k < 4; ++k) s.accumulate(1);
  step(s.ctx);
  EXPECT_EQ(s.p, -1001);
}

TEST(KnownDefects, UnevenMicroBatchesAverageBySamples) {
  Scalar s(config());
  for (const double samples : {20., 20., 20., 4.}) {
    s.accumulate(samples == 4 ? 16.0f : 0.0f, samples);
  }
  step(s.ctx);
  EXPECT_EQ(s.p, -1);  // 4 * 16 / 64
}

TEST(KnownDefects, TokenMeansAverageByTokens) {
  Scalar s(config());
  s.accumulate(112, 11);
  s.accumulate(0, 101);
  step(s.ctx);
  EXPECT_FLOAT_EQ(s.p, -11);
}

TEST(KnownDefects, SumsOfTokensAreDividedByTokens) {
  ga_config c = config();
  c.gradient_kind = GA_GRADIENT_SUM;
  Scalar s(c);
  s.accumulate(100, 12);
  s.accumulate(28, 116);
  step(s.ctx);
  EXPECT_EQ(s.p, -1);
}

TEST(KnownDefects, GradientsStoredNegated) {
  ga_config c = config();
  c.loss_scale = -2;
  Scalar s(c);
  s.accumulate(-6);
  s.accumulate(-2);
  step(s.ctx);
  EXPECT_EQ(s.p, -2);
}

// Momentum, second moments and step counts must not move with micro-batches: 16 windows of 5 equal
// micro-batches are 16 steps, bit for bit.
TEST(KnownDefects, StateDoesNotMoveWithMicroBatches) {
  for (const NamedOptimizer& named : good_optimizers()) {
    Scalar one(config(), named.optimizer), four(config(), named.optimizer);
    for (int w = 0; w < 16; ++w) {
      const float g = w % 3 == 0 ? -0.75f : 0.5f;
      one.accumulate(g);
      for (int k = 0; k < 4; ++k) four.accumulate(g);
      EXPECT_EQ(step(one.ctx).steps, w + 1);
      EXPECT_EQ(step(four.ctx).steps, w + 1);
      EXPECT_EQ(one.p, four.p) << named.name << ", step " << w;
    }
  }
}

TEST(KnownDefects, ManyEqualTermsKeepTheirSum) {
  Scalar s(config());
  for (int k = 0; k < 1024; ++k) s.accumulate(1);
  step(s.ctx);
  EXPECT_EQ(s.p, -1);
}

TEST(KnownDefects, NoNanSurvivesAWindow) {
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = config();
    c.gradient_life = life;
    Scalar s(c, optimizer(GA_OPTIMIZER_ADAMW)), clean(c, optimizer(GA_OPTIMIZER_ADAMW));
    for (int w = 0; w < 6; ++w) {
      const float nan = w % 2 ? NAN : -INFINITY, good = 0.25f, better = 0.5f;
      s.ctx.accumulate({&good});
      s.ctx.accumulate({&nan});
      EXPECT_EQ(step(s.ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
      s.ctx.accumulate({&good});
      s.ctx.accumulate({&better});
      clean.ctx.accumulate({&good});
      clean.ctx.accumulate({&better});
      EXPECT_EQ(step(s.ctx).outcome, GA_STEP_APPLIED);
      step(clean.ctx);
      EXPECT_EQ(s.p, clean.p);
    }
  }
}

// ---- Gradients by part --------------------------------------------------------------------------

TEST(Promise, TiedWeightsAddUp) {
  const Layout layout({70001});
  for (const int32_t kind : {GA_GRADIENT_MEAN, GA_GRADIENT_SUM}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE, GA_GRADIENTS_LENT}) {
      ga_config c = config();
      c.gradient_kind = kind;
      c.gradient_life = life;
      Block block = parameters(layout, 5);
      Model model(layout, {optimizer(GA_OPTIMIZER_ADAMW)}, c, block);
      Context ctx(c);
      register_parameters(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), layout, Route::kWhole,
                          block);
      uint64_t round = 0;
      for (int w = 0; w < 3; ++w) {
        std::vector<Block> alive;
        for (int k = 0; k < 2; ++k) {
          const double weight = k + 1;
          model.accumulate(block, weight, 1, {0});  // counts the weight without a gradient
          ASSERT_OK(ga_micro_begin(ctx, k, weight, nullptr));
          for (int part = 0; part < 3; ++part) {
            alive.push_back(gradients(layout, 6, round++));
            model.accumulate_part(0, alive.back(), weight);
            const float* g = alive.back().data() + layout.offsets[0];
            if (part == 1) {
              ga_accumulator a;
              a.struct_size = sizeof a;
              ASSERT_OK(ga_accumulator_acquire(ctx, 0, &a));
              EXPECT_EQ(a.beta, 1);
              write_accumulator(a, g);
              ASSERT_OK(ga_accumulator_release(ctx, 0));
            } else {
              ASSERT_OK(ga_accumulate_part(ctx, 0, g));
            }
          }
          ASSERT_OK(ga_micro_end(ctx));
        }
        EXPECT_EQ(step(ctx).weight, 3);
        model.step();
      }
      EXPECT_TRUE(model.matches(block));
    }
  }
}

// A program whose backward pass does +=, in its own buffers over a whole window or in the library's
// accumulators: the bits of a program that hands over every micro-batch.
TEST(Promise, ProgramsThatAddUpThemselves) {
  const Layout layout({5, 1023, 70001});
  const double weights[] = {3, 0.5, 2};
  ga_config c = config();
  c.gradient_kind = GA_GRADIENT_SUM;
  Block each = parameters(layout, 5), own = each, acquired = each;
  Context by_each(c), by_acquired(c);
  c.gradient_life = GA_GRADIENTS_LIVE;
  Context by_own(c);
  const ga_optimizer adamw = optimizer(GA_OPTIMIZER_ADAMW);
  register_parameters(by_each, by_each.group(adamw), layout, Route::kWhole, each);
  register_parameters(by_own, by_own.group(adamw), layout, Route::kWhole, own);
  register_parameters(by_acquired, by_acquired.group(adamw), layout, Route::kWhole, acquired);
  std::vector<void*> addresses(layout.size());
  uint64_t round = 0;
  for (int w = 0; w < 3; ++w) {
    Block sum(each.size(), 0);
    for (int k = 0; k < 3; ++k) {
      const Block g = gradients(layout, 8, round++);
      by_each.accumulate(pointers(layout, g), weights[k]);

      for (size_t i = 0; i < g.size(); ++i) sum[i] += g[i];
      if (k < 2) {
        ASSERT_OK(ga_micro_begin(by_own, -1, weights[k], nullptr));
        ASSERT_OK(ga_micro_end(by_own));
      } else {
        by_own.accumulate(pointers(layout, sum), weights[k]);
      }

      ASSERT_OK(ga_micro_begin(by_acquired, -1, weights[k], nullptr));
      for (size_t i = 0; i < layout.size(); ++i) {
        ga_accumulator a;
        ASSERT_OK(ga_accumulator_init(&a, sizeof a));
        ASSERT_OK(ga_accumulator_acquire(by_acquired, static_cast<ga_param>(i), &a));
        if (w == 0 && k == 0) addresses[i] = a.data;
        EXPECT_EQ(a.data, addresses[i]);
        EXPECT_EQ(a.alpha, 1);
        EXPECT_EQ(a.leading_dimension, a.columns);
        Block sums = from_library(a.data, a.rows * a.columns);
        if (a.beta == 0) sums.assign(sums.size(), 0);
        for (size_t j = 0; j < sums.size(); ++j)
          sums[j] += g[static_cast<size_t>(layout.offsets[i]) + j];
        to_library(a.data, sums);
        ASSERT_OK(ga_accumulator_release(by_acquired, static_cast<ga_param>(i)));
      }
      ASSERT_OK(ga_micro_end(by_acquired));
    }
    for (Context* ctx : {&by_each, &by_own, &by_acquired}) {
      const ga_step_result r = step(*ctx);
      EXPECT_EQ(r.weight, 5.5);
      EXPECT_EQ(r.micro_batches, 3);
    }
    const ga_memory m = memory(by_own);
    const bool on_device = std::getenv("GA_TEST_DEVICE") != nullptr;
    EXPECT_EQ(m.total - m.resident, on_device ? 0 : m.accumulators) << "what is only planned";
    ASSERT_TRUE(same_bits(each, own)) << "window " << w;
    ASSERT_TRUE(same_bits(each, acquired)) << "window " << w;
  }
}

// Sums over units (AGC, a factored second moment, a state by rows) have the bits of the accumulator's
// also where a live gradient has none, at weights and loss scales that round.
TEST(Promise, UnitsOfLiveGradients) {
  const Layout layout = Layout::of({{7, 33}, {3, 5, 64}, {40, 1023}, {17}});
  for (const NamedOptimizer& named : good_optimizers()) {
    for (const int32_t units : {-1, +GA_AGC_TF, +GA_AGC_TORCH}) {
      ga_clip mode = clip(units < 0 ? GA_CLIP_NONE : GA_CLIP_AGC, 0);
      mode.agc_units = std::max(units, 0);
      for (const int micro_batches : {1, 2}) {
        Block blocks[3];
        for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE, GA_GRADIENTS_LENT}) {
          ga_config c = config();
          c.gradient_life = life;
          Block& block = blocks[life];
          block = parameters(layout, 5);
          Context ctx(c);
          register_parameters(ctx, ctx.group(named.optimizer), layout, Route::kWhole, block);
          ASSERT_OK(ga_context_set_clip(ctx, &mode));
          const double loss_scale = 3;
          uint64_t round = 0;
          for (int w = 0; w < 3; ++w) {
            std::vector<Block> alive;
            for (int k = 0; k < micro_batches; ++k) {
              alive.push_back(gradients(layout, 7, round++));
              const auto list = pointers(layout, alive.back());
              ASSERT_OK(ga_accumulate(ctx, list.data(), list.size(), 0.3 * (k + 1),
                                      MicroOptions(loss_scale)));
            }
            step(ctx);
          }
        }
        for (const int life : {GA_GRADIENTS_LIVE, GA_GRADIENTS_LENT})
          ASSERT_TRUE(same_bits(blocks[0], blocks[life]))
              << named.name << ", AGC by " << units << ", " << micro_batches
              << " micro-batches, life " << life;
      }
    }
  }
}

// A parameter's first contribution may come in any micro-batch; the divisor is still the window's
// sum of weights.
TEST(Promise, ParametersTouchedInSomeMicroBatchesOnly) {
  const Layout layout({5, 33, 1023, 7});
  const std::vector<std::vector<size_t>> missing = {{1, 3}, {0, 2, 3}, {0, 3}};
  for (const NamedOptimizer& named : good_optimizers()) {
    for (const int32_t policy : {GA_MISSING_SKIP, GA_MISSING_ZERO}) {
      for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE, GA_GRADIENTS_LENT}) {
        ga_config c = config();
        c.missing = policy;
        c.gradient_life = life;
        Block block = parameters(layout, 8);
        Model model(layout, {named.optimizer}, c, block);
        Context ctx(c);
        register_parameters(ctx, ctx.group(named.optimizer), layout, Route::kWhole, block);
        uint64_t round = 0;
        for (int w = 0; w < 4; ++w) {
          std::vector<Block> alive;
          for (size_t k = 0; k < missing.size(); ++k) {
            alive.push_back(gradients(layout, 9, round++));
            // In the second window all gradients are there, in the others tensor 3 never has one.
            const auto absent = w == 1 ? std::vector<size_t>() : missing[k];
            auto list = pointers(layout, alive.back());
            for (const size_t i : absent) list[i] = nullptr;
            ctx.accumulate(list, static_cast<double>(k + 1));
            model.accumulate(alive.back(), static_cast<double>(k + 1), 1, absent);
          }
          step(ctx);
          model.step();
        }
        ASSERT_TRUE(model.matches(block)) << named.name << ", missing " << policy;
      }
    }
  }
}

// A real problem, least squares, whose gradients the test computes: the whole batch against its
// parts.
TEST(Promise, LeastSquaresBatchInParts) {
  constexpr int kSamples = 60, kFeatures = 9;
  Random random(11);
  std::vector<std::vector<double>> x(kSamples, std::vector<double>(kFeatures));
  std::vector<double> y(kSamples);
  for (int s = 0; s < kSamples; ++s) {
    for (double& value : x[static_cast<size_t>(s)]) value = random.signed_unit();
    y[static_cast<size_t>(s)] = random.signed_unit();
  }
  const auto mean_gradient = [&](const Block& w, int first, int last) {
    std::vector<double> g(kFeatures);
    for (int s = first; s < last; ++s) {
      const auto& row = x[static_cast<size_t>(s)];
      double residual = -y[static_cast<size_t>(s)];
      for (size_t i = 0; i < kFeatures; ++i) residual += static_cast<double>(w[i]) * row[i];
      for (size_t i = 0; i < kFeatures; ++i) g[i] += residual * row[i] / (last - first);
    }
    return Block(g.begin(), g.end());
  };
  const auto train = [&](int micro_batch) {  // 60 = 3 * 16 + 12: the last one of 16 is short
    Block w(kFeatures, 0.5f);
    Context ctx;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), "w", w.data(), kFeatures);
    for (int epoch = 0; epoch < 50; ++epoch) {
      for (int s = 0; s < kSamples; s += micro_batch) {
        const int last = std::min(s + micro_batch, kSamples);
        const Block g = mean_gradient(w, s, last);
        ctx.accumulate({g.data()}, last - s);
      }
      step(ctx);
    }
    return w;
  };
  const Block full = train(60), parts = train(16), singles = train(1);
  for (size_t i = 0; i < kFeatures; ++i) {
    // 50 updates of at most lr = 1e-3 each. In each, a gradient differs by at most 60 roundings of
    // terms of order 1, and the ratio m / sqrt(v) by at most four times as much: 50 * 1e-3 * 4 * 60
    // * 2^-24, and 50 roundings of w.
    const double bound = 50 * (1e-3 * 4 * 60 + 1) * ref::kHalfUlp;
    EXPECT_NEAR(full[i], parts[i], bound);
    EXPECT_NEAR(full[i], singles[i], bound);
  }
}

}  // namespace
}  // namespace ga::test
