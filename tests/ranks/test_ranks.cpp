// SPDX-License-Identifier: Apache-2.0
//
// One window over several ranks: the promise for any number of ranks and any shares of them, the same
// bits on all of them, common outcomes, and what happens where ranks differ or fail.
#include <atomic>
#include <chrono>
#include <thread>

#include "files.hpp"
#include "formats.hpp"
#include "ranks.hpp"

namespace ga::test {

using namespace over_ranks;

// Four windows as make_shares() gives them, with even_gradients().
Shares make_even_shares(const Layout& l, int32_t ranks) {
  Shares shares = make_shares(l, ranks, 4);
  for (auto& window : shares)
    for (auto& share : window)
      for (Micro& m : share) m.gradients = even_gradients(l, 7, static_cast<uint64_t>(m.weight));
  return shares;
}

namespace {

// ---- The promise --------------------------------------------------------------------------------

class RanksPromise : public testing::TestWithParam<std::tuple<NamedOptimizer, int32_t>> {};

TEST_P(RanksPromise, AnySharesAreOneBatch) {
  const auto& [named, ranks] = GetParam();
  const Layout l = layout();
  Options s;
  s.optimizer = named.optimizer;
  s.clip = clip(GA_CLIP_GLOBAL, 50);
  // Rank 0 brings nothing to the first window. Two windows of four ranks take as long as three of two.
  const Shares shares = make_shares(l, ranks, ranks == 4 ? 2 : 3, 3);
  const Block start = parameters(l, 3);
  Model model(l, {s.optimizer}, s.config, start);
  for (const auto& window : shares) {
    for (const auto& micros : window)
      for (const Micro& m : micros) model.accumulate(m.gradients, m.weight, 1, m.missing);
    model.step(NAN, &s.clip);
  }
  const std::vector<Ended> ended = run(l, s, shares, start);
  EXPECT_TRUE(model.matches(ended[0].parameters));
  EXPECT_LT(model.vague(), 0.2);
  expect_the_bits(ended, l, s, shares, start);
  for (size_t w = 0; w < shares.size(); ++w) {
    double weight = 0;
    int64_t micros = 0;
    for (const auto& share : shares[w])
      for (const Micro& m : share) weight += m.weight, ++micros;
    const ga_step_result& r = ended[0].results[w];
    EXPECT_EQ(r.weight, weight);
    EXPECT_EQ(r.micro_batches, micros);
    EXPECT_EQ(r.outcome, weight > 0 ? GA_STEP_APPLIED : GA_STEP_SKIPPED_EMPTY);
  }
}

std::vector<NamedOptimizer> optimizers() {
  return named_optimizers([](const OptimizerRow& row, const ga_optimizer&) {
    return row.kind != GA_OPTIMIZER_MUON && row.kind != GA_OPTIMIZER_EXTERNAL;
  });
}

INSTANTIATE_TEST_SUITE_P(All, RanksPromise,
                         testing::Combine(testing::ValuesIn(optimizers()),
                                          testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           return identifier(std::get<0>(info.param).name) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

// ---- Ways to accumulate -------------------------------------------------------------------------

struct Way {
  const char* name;
  double tolerance;
  std::function<void(Options&)> set;
};
class RanksWays : public testing::TestWithParam<Way> {};

TEST_P(RanksWays, AreThoseOfOneContext) {
  const Layout l = layout();
  Options s;
  s.optimizer = optimizer(GA_OPTIMIZER_SGD);
  s.optimizer.momentum = 0.9;
  s.optimizer.lr = 0.1;
  GetParam().set(s);
  for (const int32_t ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    const Shares shares = make_even_shares(l, ranks);
    const Block start = parameters(l, 3);
    const Ended alone = run_alone(l, s, shares, start);
    const std::vector<Ended> ended = run(l, s, shares, start);
    expect_the_bits(ended, l, s, shares, start);
    EXPECT_LE(distance(l, ended[0].parameters, alone.parameters), GetParam().tolerance);
    for (size_t w = 0; w < shares.size(); ++w) {
      EXPECT_NEAR(ended[0].results[w].norm, alone.results[w].norm, 1e-5 * alone.results[w].norm);
      EXPECT_NEAR(ended[0].results[w].clip_factor, alone.results[w].clip_factor, 1e-5);
      EXPECT_EQ(ended[0].results[w].weight, alone.results[w].weight);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, RanksWays,
    testing::Values(
        Way{"sums", 1e-5,
            [](Options& s) {
              s.config.gradient_kind = GA_GRADIENT_SUM;
              s.config.reduce = GA_REDUCE_SUM;
              s.optimizer.lr = 0.01;
            }},
        Way{"zeros_where_missing", 1e-6, [](Options& s) { s.config.missing = GA_MISSING_ZERO; }},
        Way{"running_mean", 1e-5,
            [](Options& s) { s.config.accumulation = GA_ACCUMULATE_RUNNING_MEAN; }},
        Way{"checked", 1e-6, [](Options& s) { s.config.nonfinite = GA_NONFINITE_DROP_MICRO; }},
        Way{"checked_running_mean", 1e-5,
            [](Options& s) {
              s.config.nonfinite = GA_NONFINITE_DROP_MICRO;
              s.config.accumulation = GA_ACCUMULATE_RUNNING_MEAN;
            }},
        Way{"live", 1e-6, [](Options& s) { s.config.gradient_life = GA_GRADIENTS_LIVE; }},
        Way{"per_tensor", 1e-6, [](Options& s) { s.clip = clip(GA_CLIP_PER_TENSOR, 0.5); }},
        Way{"by_value_then_norm", 1e-6,
            [](Options& s) { s.clip = clip(GA_CLIP_GLOBAL, 3, GA_FLAVOR_KERAS, 0.05); }},
        Way{"by_unit", 1e-6, [](Options& s) { s.clip = clip(GA_CLIP_AGC, 1); }},
        Way{"each_micro_batch", 1e-6,
            [](Options& s) {
              s.clip = clip(GA_CLIP_GLOBAL, 3);
              s.clip.when = GA_CLIP_WHEN_MICRO;
            }},
        Way{"bf16_on_the_wire", 4e-3, [](Options& s) { s.options.wire = GA_COMM_WIRE_BF16; }}),
    [](const auto& info) { return info.param.name; });

// Accumulators of 16 bits: their sums over ranks are in f32, and so not further from the exact sum than
// the ranks' own accumulators are.
TEST(Ranks, SixteenBits) {
  for (const int32_t dtype : {GA_F16, GA_BF16})
    for (const int32_t way : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN,
                              GA_ACCUMULATE_COMPENSATED, GA_ACCUMULATE_STOCHASTIC}) {
      SCOPED_TRACE(std::to_string(dtype) + " " + std::to_string(way));
      constexpr int64_t kCount = 200003;
      std::vector<std::vector<float>> ended(3, std::vector<float>(kCount));
      const auto gradient = [](int32_t rank, int64_t j) {
        return static_cast<float>((rank + 1) * (j % 11 - 5)) / 64;  // exact in 16 bits
      };
      on_ranks(3, [&](int32_t r, ga_comm* comm) {
        std::vector<float>& p = ended[static_cast<size_t>(r)];
        ga_config c = config();
        c.accumulation = way;
        Context ctx(c);
        ga_param_options o;
        ASSERT_OK(ga_param_options_init(&o, sizeof o));
        o.accumulator_dtype = dtype;
        ctx.param(ctx.group(plain_sgd()), "p", p.data(), ref::Shape{kCount}, &o);
        ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
        std::vector<float> g(kCount);
        for (int64_t j = 0; j < kCount; ++j) g[static_cast<size_t>(j)] = gradient(r, j);
        ctx.accumulate({g.data()});
        const ga_step_result result = step(ctx);
        EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
      });
      for (int64_t j = 0; j < kCount; ++j) {
        const float sum = gradient(0, j) + gradient(1, j) + gradient(2, j);
        ASSERT_FLOAT_EQ(ended[0][static_cast<size_t>(j)], -sum / 3) << j;
      }
      EXPECT_TRUE(same_bits(ended[1], ended[0]) && same_bits(ended[2], ended[0]));
    }
}

// A pair of 16-bit arrays: what its second one holds is added too.
TEST(Ranks, BothHalvesOfAPair) {
  on_ranks(2, [&](int32_t, ga_comm* comm) {
    std::vector<float> p(1000);
    ga_config c = config();
    c.accumulation = GA_ACCUMULATE_COMPENSATED;
    c.reduce = GA_REDUCE_SUM;
    Context ctx(c);
    ga_param_options o;
    ASSERT_OK(ga_param_options_init(&o, sizeof o));
    o.accumulator_dtype = GA_BF16;
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), ref::Shape{1000}, &o);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    const std::vector<float> large(1000, 1), small(1000, 0x1p-12f);
    ctx.accumulate({large.data()});
    ctx.accumulate({small.data()});
    step(ctx);
    EXPECT_EQ(p, std::vector<float>(1000, -2 * (1 + 0x1p-12f)));
  });
}

// Stochastic accumulation: ranks round with random bits of their own.
TEST(Ranks, RoundByBitsOfTheirOwn) {
  std::vector<std::vector<float>> ended(2, std::vector<float>(1000));
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    ga_config c = config();
    c.accumulation = GA_ACCUMULATE_STOCHASTIC;
    c.reduce = GA_REDUCE_SUM;
    Context ctx(c);
    ga_param_options o;
    ASSERT_OK(ga_param_options_init(&o, sizeof o));
    o.accumulator_dtype = GA_BF16;
    ctx.param(ctx.group(plain_sgd()), "p", ended[static_cast<size_t>(r)].data(), ref::Shape{1000},
              &o);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    const std::vector<float> g(1000, 1 + 0x1p-8f);  // half-way between two numbers of bf16
    ctx.accumulate({g.data()});
    step(ctx);
  });
  int apart = 0;  // elements for which one rank rounded up and the other down
  for (const float p : ended[0]) apart += p == -2 - 0x1p-7f;
  EXPECT_GT(apart, 400);
  EXPECT_LT(apart, 600);
}

TEST(Ranks, F64) {
  std::vector<std::vector<double>> ended(2, std::vector<double>(70001, 1));
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx;
    ctx.param(ctx.group(plain_sgd()), "p", ended[static_cast<size_t>(r)].data(), ref::Shape{70001});
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    std::vector<double> g(70001);
    for (size_t j = 0; j < g.size(); ++j) g[j] = (r + 1) * 1e-3 * static_cast<double>(j);
    ctx.accumulate({g.data()}, r + 1);
    step(ctx);
  });
  for (size_t j = 0; j < 70001; ++j)
    ASSERT_NEAR(ended[0][j], 1 - (1 * 1 + 2 * 2) * 1e-3 * static_cast<double>(j) / 3, 1e-13) << j;
  EXPECT_TRUE(same_bits(ended[0], ended[1]));
}

TEST(Ranks, AnOptimizerOfTheProgram) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    std::vector<float> p(5);
    Context ctx;
    ga_optimizer o = optimizer(GA_OPTIMIZER_EXTERNAL);
    const ga_param id = ctx.param(ctx.group(o), "p", p.data(), 5);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    const std::vector<float> g(5, r == 0 ? 1.0f : 4.0f);
    ctx.accumulate({g.data()}, r == 0 ? 2 : 1);
    step(ctx);
    const void* sum = nullptr;
    ASSERT_OK(ga_gradient(ctx, id, &sum, nullptr, nullptr));
    EXPECT_EQ(from_library(sum, 5), Block(5, 2));
  });
}

// ---- Maxima -------------------------------------------------------------------------------------

struct Maximum {
  const char* name;
  int32_t param, gradient, accumulator;
  std::function<void(Options&)> set;
};
class RanksMaxima : public testing::TestWithParam<std::tuple<Maximum, int32_t>> {};

// Two parameters, one that is exchanged where it lies and one that travels with others. In each window
// some ranks bring nothing for one of them, once none does, and all numbers are negative, so that a zero
// of theirs would be the maximum. One rank alone has what it brings, not what it had in an earlier window.
TEST_P(RanksMaxima, AreOfTheRanksThatHaveSome) {
  const auto& [m, ranks] = GetParam();
  Options s;
  s.clip = clip(GA_CLIP_GLOBAL, 0.5);
  m.set(s);
  const int64_t counts[] = {200003, 37};
  constexpr int kWindows = 4;
  const bool brings[kWindows][2][3] = {{{true, true, true}, {false, true, true}},
                                       {{false, true, false}, {true, false, true}},
                                       {{true, false, true}, {false, false, false}},
                                       {{false, false, true}, {false, true, false}}};
  // Exact in the accumulator; not exact in bf16, but where the accumulator is.
  const double unit = m.accumulator == GA_BF16 ? 64 : 1024;
  const auto number = [&](int w, size_t i, int32_t r, int k, int64_t j) {
    const int64_t at = 7 * j + 13 * r + 5 * k + 3 * w + static_cast<int64_t>(i);
    return -1 - static_cast<double>(at % (m.accumulator == GA_BF16 ? 61 : 1021)) / unit;
  };
  double weights = 0, squares = 0;
  for (int32_t r = 0; r < ranks; ++r) weights += r + 1, squares += (r + 1) * (r + 1);
  std::vector<std::vector<std::vector<double>>> ended(static_cast<size_t>(ranks));
  on_ranks(ranks, [&, &m = m, ranks = ranks](int32_t r, ga_comm* comm) {
    Context ctx(s.config);
    const ga_group own = ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL)), sgd = ctx.group(plain_sgd());
    ga_param_options o = options(m.gradient, m.accumulator);
    o.reduce = GA_REDUCE_MAX;
    Tensor large(m.param, counts[0]), small(m.param, counts[1]), w(GA_F32, 5);
    const ga_param ids[] = {ga_param{0}, ga_param{1}};
    ASSERT_OK(try_add(ctx, own, "large", large.data(), m.param, {counts[0]}, o));
    ASSERT_OK(try_add(ctx, own, "small", small.data(), m.param, {counts[1]}, o));
    ASSERT_OK(try_add(ctx, sgd, "w", w.data(), GA_F32, {5}, options()));
    ASSERT_OK(ga_context_set_clip(ctx, &s.clip));
    ASSERT_OK(ga_context_set_comm(ctx, comm, &s.options));
    for (int window = 0; window < kWindows; ++window) {
      std::vector<Tensor> gradients;  // which live until the step
      gradients.reserve(6);
      for (int k = 0; k < 2; ++k) {
        std::vector<const Tensor*> list;
        for (size_t i = 0; i < 2; ++i) {
          Tensor& g = gradients.emplace_back(m.gradient, counts[i]);
          for (int64_t j = 0; j < counts[i]; ++j) g.set(j, -2 * number(window, i, r, k, j));
          list.push_back(brings[window][i][r] ? &g : nullptr);
        }
        list.push_back(&gradients.emplace_back(GA_F32, 5, -2 * (r + 1)));
        accumulate(ctx, list, r + 1, -2);
      }
      const ga_step_result result = step(ctx);
      EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
      EXPECT_EQ(result.weight, 2 * weights);
      const double mean = squares / weights;  // of w: all that norm and clip are about
      EXPECT_NEAR(result.norm, std::sqrt(5) * mean, 1e-5);
      EXPECT_NEAR(result.clip_factor, 0.5 / result.norm, 1e-6);
      for (const ga_param id : ids) {
        const bool* const of_ranks = brings[window][id];
        const bool any = std::any_of(of_ranks, of_ranks + ranks, [](bool b) { return b; });
        const void* data = nullptr;
        if (any)
          ended[static_cast<size_t>(r)].push_back(external_gradient(ctx, id, counts[id]));
        else
          EXPECT_EQ(ga_gradient(ctx, id, &data, nullptr, nullptr), GA_ERROR_INVALID_STATE);
      }
    }
    EXPECT_NEAR(w.get(0), -kWindows * 0.5 / std::sqrt(5), 1e-4);
  });
  size_t at = 0;
  for (int window = 0; window < kWindows; ++window)
    for (size_t i = 0; i < 2; ++i) {
      std::vector<double> want(static_cast<size_t>(counts[i]), -INFINITY);
      bool any = false;
      for (int32_t r = 0; r < ranks; ++r)
        for (int k = 0; brings[window][i][r] && k < 2; ++k, any = true)
          for (int64_t j = 0; j < counts[i]; ++j)
            want[static_cast<size_t>(j)] =
                std::max(want[static_cast<size_t>(j)], number(window, i, r, k, j));
      if (!any) continue;
      for (const auto& got : ended) {
        ASSERT_LT(at, got.size());
        EXPECT_TRUE(got[at] == want) << window << " " << i;
      }
      ++at;
    }
}

const Maximum kMaxima[] = {{"f32", GA_F32, GA_F32, GA_F32, [](Options&) {}},
                           {"f64", GA_F64, GA_F64, GA_F64, [](Options&) {}},
                           {"f16", GA_F16, GA_F16, GA_F16, [](Options&) {}},
                           {"bf16", GA_F32, GA_F32, GA_BF16, [](Options&) {}},
                           {"bf16_on_the_wire", GA_F32, GA_F32, GA_F32,
                            [](Options& s) { s.options.wire = GA_COMM_WIRE_BF16; }},
                           {"running_mean", GA_F32, GA_F32, GA_F16,
                            [](Options& s) { s.config.accumulation = GA_ACCUMULATE_RUNNING_MEAN; }},
                           {"compensated", GA_F32, GA_F32, GA_F16,
                            [](Options& s) { s.config.accumulation = GA_ACCUMULATE_COMPENSATED; }},
                           {"checked", GA_F32, GA_F32, GA_F32,
                            [](Options& s) { s.config.nonfinite = GA_NONFINITE_DROP_MICRO; }},
                           {"checked_running_mean", GA_F32, GA_F32, GA_F32,
                            [](Options& s) {
                              s.config.nonfinite = GA_NONFINITE_DROP_MICRO;
                              s.config.accumulation = GA_ACCUMULATE_RUNNING_MEAN;
                            }},
                           {"zeros_where_missing", GA_F32, GA_F32, GA_F32,
                            [](Options& s) { s.config.missing = GA_MISSING_ZERO; }},
                           {"live", GA_F32, GA_F32, GA_F32,
                            [](Options& s) { s.config.gradient_life = GA_GRADIENTS_LIVE; }}};

INSTANTIATE_TEST_SUITE_P(All, RanksMaxima,
                         testing::Combine(testing::ValuesIn(kMaxima), testing::Values(1, 2, 3)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

// On one rank of all, beside larger numbers on the others.
TEST(Ranks, MaximaThatAreNotNumbers) {
  for (const float bad : {NAN, INFINITY, -INFINITY})
    on_ranks(3, [&](int32_t r, ga_comm* comm) {
      float p[2] = {};
      Context ctx;
      ga_param_options o = options();
      o.reduce = GA_REDUCE_MAX;
      const ga_param id =
          ctx.param(ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL)), "p", p, ref::Shape{2}, &o);
      ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
      const float g[] = {static_cast<float>(-1 - r), r == 1 ? bad : static_cast<float>(-2 - r)};
      ctx.accumulate({g});
      if (bad != -INFINITY) {
        EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
      } else {
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
        EXPECT_EQ(external_gradient(ctx, id, 2), (std::vector<double>{-1, -2}));
        ctx.accumulate({r == 1 ? g : nullptr});  // nobody has a larger one
        EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
      }
      const float good[] = {static_cast<float>(r), -5};
      ctx.accumulate({good});
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      EXPECT_EQ(external_gradient(ctx, id, 2), (std::vector<double>{2, -5}));
    });
}

// Gradients of some rows: those of each rank, of one rank alone, of none, and beside a gradient of all rows.
TEST(Ranks, Rows) {
  for (const int32_t rows : {GA_ROWS_LAZY, GA_ROWS_DENSE})
    for (const bool clamped : {false, true}) {
      if (rows == GA_ROWS_LAZY && on_device()) continue;  // which exchanges all rows
      SCOPED_TRACE(std::to_string(rows) + (clamped ? " clamped" : ""));
      constexpr int64_t kRows = 500, kColumns = 37;
      const Layout l = Layout::of({{kRows, kColumns}});
      const Block start = parameters(l, 4);
      struct Share {
        std::vector<int64_t> indices;
        std::vector<float> values;
        bool dense;
      };
      const auto share = [&](int32_t r, int window) {
        Share s = {{}, {}, window == 3 && r == 1};
        Random random(static_cast<uint64_t>(10 * window + r));
        const int count = window == 1 && r != 2 ? 0 : 5 * r + 3;
        for (int k = 0; k < count; ++k) s.indices.push_back(random.below(kRows) / (r + 1));
        for (int64_t k = 0; k < count * kColumns; ++k)
          s.values.push_back(static_cast<float>(random.signed_unit()));
        return s;
      };
      const auto train = [&](ga_context* ctx, int window, std::initializer_list<int32_t> ranks) {
        for (const int32_t r : ranks) {
          const Share s = share(r, window);
          ASSERT_OK(ga_micro_begin(ctx, -1, r + 1, nullptr));
          ASSERT_OK(ga_accumulate_rows(ctx, 0, s.indices.data(), GA_I64,
                                       static_cast<int64_t>(s.indices.size()), s.values.data()));
          const Block all = even_gradients(l, 6, 1);
          if (s.dense) {
            ASSERT_OK(ga_accumulate_part(ctx, 0, all.data() + l.offsets[0]));
          }
          ASSERT_OK(ga_micro_end(ctx));
        }
      };
      const auto make = [&](Context& ctx, Block& block) {
        ga_param_options o;
        ASSERT_OK(ga_param_options_init(&o, sizeof o));
        o.rows = rows;
        ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAGRAD)), "e", block.data() + l.offsets[0],
                  ref::Shape{kRows, kColumns}, &o);
        const ga_clip c = clip(GA_CLIP_GLOBAL, 2, GA_FLAVOR_TORCH, clamped ? 0.3 : INFINITY);
        ASSERT_OK(ga_context_set_clip(ctx, &c));
      };
      Block alone = start;
      std::vector<ga_step_result> results;
      {
        Context ctx;
        make(ctx, alone);
        for (int w = 0; w < 5; ++w) {
          train(ctx, w, {0, 1, 2});
          results.push_back(step(ctx));
        }
      }
      std::vector<Block> ended(3, start);
      on_ranks(3, [&](int32_t r, ga_comm* comm) {
        Context ctx;
        make(ctx, ended[static_cast<size_t>(r)]);
        ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
        for (int w = 0; w < 5; ++w) {
          train(ctx, w, {r});
          const ga_step_result result = step(ctx);
          EXPECT_NEAR(result.norm, results[static_cast<size_t>(w)].norm, 1e-6 * result.norm) << w;
          EXPECT_NEAR(result.clip_factor, results[static_cast<size_t>(w)].clip_factor, 1e-6) << w;
        }
      });
      EXPECT_TRUE(same_bits(ended[1], ended[0]) && same_bits(ended[2], ended[0]));
      EXPECT_LT(distance(l, ended[0], alone), 1e-6);
    }
}

// Where micro-batches are checked, a rank without any updates the rows of the others.
TEST(Ranks, RowsOfCheckedMicroBatches) {
  std::vector<float> ended[2] = {std::vector<float>(12), std::vector<float>(12)};
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    ga_config c = config();
    c.nonfinite = GA_NONFINITE_DROP_MICRO;
    Context ctx(c);
    ga_param_options o;
    ASSERT_OK(ga_param_options_init(&o, sizeof o));
    o.rows = on_device() ? GA_ROWS_DENSE : GA_ROWS_LAZY;
    ctx.param(ctx.group(plain_sgd()), "e", ended[r].data(), ref::Shape{4, 3}, &o);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    for (int w = 0; w < 2; ++w) {
      const int32_t row = 2 + w;
      const float values[] = {1, 2, 4};
      if (r == w) {
        ASSERT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
        ASSERT_OK(ga_accumulate_rows(ctx, 0, &row, GA_I32, 1, values));
        ASSERT_OK(ga_micro_end(ctx));
      }
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    }
  });
  for (const auto& p : ended)
    EXPECT_EQ(p, (std::vector<float>{0, 0, 0, 0, 0, 0, -1, -2, -4, -1, -2, -4}));
}

// Also after a window in which a rank had micro-batches, and one in which it has none.
TEST(Ranks, TheNoiseScaleIsThatOfOneContext) {
  const Layout l = layout();
  Options s;
  s.config.noise_scale = 1;
  const Shares shares = make_even_shares(l, 3);
  const Block start = parameters(l, 3);
  const Ended alone = run_alone(l, s, shares, start);
  const std::vector<Ended> ended = run(l, s, shares, start);
  expect_alike(ended);
  for (size_t w = 0; w < shares.size(); ++w) {
    const ga_step_result &got = ended[0].results[w], &want = alone.results[w];
    EXPECT_NEAR(got.noise_trace, want.noise_trace, 1e-5 * std::abs(want.noise_trace)) << w;
    EXPECT_NEAR(got.noise_signal, want.noise_signal, 1e-5 * std::abs(want.noise_trace)) << w;
  }
}

// A window of which one rank has no estimate, because a parameter got two gradients in one micro-batch there,
// brings none to any rank, also where that micro-batch is dropped.
TEST(Ranks, AWindowThatOneRankHasNoNoiseScaleOf) {
  for (const bool dropped : {false, true})
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      ga_config c = config();
      c.noise_scale = 1;
      if (dropped) c.nonfinite = GA_NONFINITE_DROP_MICRO;
      std::vector<float> p(40);
      Context ctx(c);
      ctx.param(ctx.group(plain_sgd()), "p", p.data(), 40);
      ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
      const std::vector<float> bad(40, NAN);
      double trace = NAN;
      for (const bool twice : {true, false, true}) {
        for (int k = 0; k < 2 - r; ++k) {
          const std::vector<float> g(40, static_cast<float>(r + k + (twice ? 3 : 1)));
          ASSERT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
          ASSERT_OK(ga_accumulate_part(ctx, 0, g.data()));
          if (twice && r == 1) {
            ASSERT_OK(ga_accumulate_part(ctx, 0, dropped ? bad.data() : g.data()));
          }
          ASSERT_OK(ga_micro_end(ctx));
        }
        const ga_step_result result = step(ctx);
        EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
        EXPECT_EQ(result.weight, twice && dropped ? 2 : 3);
        if (!twice) {
          EXPECT_TRUE(std::isfinite(result.noise_trace));
          trace = result.noise_trace;
        } else if (std::isnan(trace)) {
          EXPECT_TRUE(std::isnan(result.noise_trace));
        } else {
          EXPECT_EQ(result.noise_trace, trace);
        }
      }
    });
}

TEST(Ranks, Muon) {
  if (!has_onednn()) GTEST_SKIP() << "no oneDNN in this build";
  const Layout l = Layout::of({{40, 30}, {16, 50}, {7, 7}, {5, 12, 7}});
  Options s;
  s.optimizer = optimizer(GA_OPTIMIZER_MUON);
  s.optimizer.beta2 = 0.5;  // whose state the ranks are to share
  const Block start = parameters(l, 3);
  Shares shares = make_even_shares(l, 2);
  for (auto& window : shares)
    for (auto& share : window)
      for (Micro& m : share) m.missing.clear();
  const Ended alone = run_alone(l, s, shares, start);
  const std::vector<Ended> ended = run(l, s, shares, start);
  expect_alike(ended);
  EXPECT_LT(distance(l, ended[0].parameters, alone.parameters), 1e-5);
}

// ---- Common outcomes ----------------------------------------------------------------------------

TEST(Ranks, OneNaNSkipsTheStepOfAll) {
  std::vector<std::vector<float>> ended(3, {1, 2, 3});
  std::atomic<int> skipped{0};
  on_ranks(3, [&](int32_t r, ga_comm* comm) {
    std::vector<float>& p = ended[static_cast<size_t>(r)];
    Context ctx;
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), 3);
    ga_loss_scaler scaler;
    ASSERT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
    scaler.initial_scale = 8;
    scaler.growth_interval = 1;
    ASSERT_OK(ga_context_set_loss_scaler(ctx, &scaler));
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    const std::vector<float> g = {8, r == 1 ? NAN : 8.0f, 8};
    ctx.accumulate({g.data()});
    skipped += step(ctx).outcome == GA_STEP_SKIPPED_NONFINITE;
    double scale = 0;
    ASSERT_OK(ga_loss_scale(ctx, &scale, nullptr));
    EXPECT_EQ(scale, 4);
    EXPECT_EQ(p, (std::vector<float>{1, 2, 3}));
    const std::vector<float> good = {4, 4, 4};
    ctx.accumulate({good.data()});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    ASSERT_OK(ga_loss_scale(ctx, &scale, nullptr));
    EXPECT_EQ(scale, 8);
    EXPECT_EQ(p, (std::vector<float>{0, 1, 2}));
  });
  EXPECT_EQ(skipped, 3);
}

// DROP_MICRO: the rank that brings it drops it, and the others count it.
TEST(Ranks, ADroppedMicroBatchIsOneOfAll) {
  std::vector<float> ended[2] = {{0}, {0}};
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    ga_config c = config();
    c.nonfinite = GA_NONFINITE_DROP_MICRO;
    Context ctx(c);
    ctx.param(ctx.group(plain_sgd()), "p", ended[r].data(), 1);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    const float bad = NAN, one = 1, four = 4;
    ctx.accumulate({r == 0 ? &bad : &one});
    ctx.accumulate({r == 0 ? &four : &one});
    const ga_step_result result = step(ctx);
    EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
    EXPECT_EQ(result.window_dropped, 1);
    EXPECT_EQ(result.weight, 3);
    EXPECT_EQ(result.micro_batches, 4);
    EXPECT_EQ(result.dropped_micros, r == 0 ? 1u : 0u);
  });
  EXPECT_EQ(ended[0][0], -2);
  EXPECT_EQ(ended[1][0], -2);
}

TEST(Ranks, FailIsCommonToo) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    ga_config c = config();
    c.nonfinite = GA_NONFINITE_FAIL;
    Context ctx(c);
    float p = 1;
    ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    const float g = r == 0 ? INFINITY : 1;
    ctx.accumulate({&g});
    EXPECT_EQ(ga_step(ctx, nullptr), GA_ERROR_NONFINITE);
    EXPECT_OK(ga_discard(ctx));
    const float good = 1;
    ctx.accumulate({&good});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(p, 0);
  });
}

TEST(Ranks, WhereOneDiscardsNoneSteps) {
  on_ranks(3, [&](int32_t r, ga_comm* comm) {
    Context ctx;
    float p = 1;
    ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    const float g = 1;
    ctx.accumulate({&g});
    if (r == 1) {
      EXPECT_OK(ga_discard(ctx));
    } else {
      const ga_step_result result = step(ctx);
      EXPECT_EQ(result.outcome, GA_STEP_SKIPPED_DISCARD);
      EXPECT_EQ(result.windows, 0);
    }
    EXPECT_EQ(p, 1);
    ctx.accumulate({&g});
    const ga_step_result result = step(ctx);
    EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
    EXPECT_EQ(result.steps, 1);
    EXPECT_EQ(p, 0);
  });
}

TEST(Ranks, NoiseScaleIsThatOfAllMicroBatches) {
  const Layout l({64});
  Options s;
  s.config.noise_scale = 1;
  Shares shares(1);
  for (int r = 0; r < 2; ++r)
    shares[0].push_back({{even_gradients(l, 1, static_cast<uint64_t>(2 * r)), 1, {}},
                         {even_gradients(l, 1, static_cast<uint64_t>(2 * r + 1)), 1, {}}});
  const Block start = parameters(l, 2);
  const Ended alone = run_alone(l, s, shares, start);
  const std::vector<Ended> ended = run(l, s, shares, start);
  ASSERT_FALSE(std::isnan(alone.results[0].noise_trace));
  EXPECT_NEAR(ended[0].results[0].noise_trace, alone.results[0].noise_trace, 1e-6);
  EXPECT_NEAR(ended[0].results[0].noise_signal, alone.results[0].noise_signal, 1e-6);
}

// Running statistics are those of the data of all ranks, of which one has none.
TEST(Ranks, RunningStatistics) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_CUMULATIVE}) {
    constexpr int64_t kSamples = 5;
    const auto data = [](int32_t rank, int64_t micro, int64_t j) {
      return static_cast<float>(100 * rank + 10 * micro + j * j % 7);
    };
    std::vector<double> all;
    for (int32_t r = 0; r < 2; ++r)
      for (int64_t k = 0; k <= r; ++k)
        for (int64_t j = 0; j < kSamples; ++j) all.push_back(data(r, k, j));
    double mean = 0, m2 = 0;
    for (const double x : all) mean += x / static_cast<double>(all.size());
    for (const double x : all) m2 += (x - mean) * (x - mean);
    on_ranks(3, [&](int32_t r, ga_comm* comm) {
      Context ctx;
      float p = 0;
      ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
      ga_bn_options o;
      ASSERT_OK(ga_bn_options_init(&o, sizeof o, GA_FLAVOR_TORCH));
      o.mode = mode;
      ga_bn bn = -1;
      ASSERT_OK(ga_bn_add(ctx, "bn", 1, -1, -1, &o, &bn));
      ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
      for (int64_t k = 0; r < 2 && k <= r; ++k) {
        std::vector<float> x(kSamples), y(kSamples);
        for (int64_t j = 0; j < kSamples; ++j) x[static_cast<size_t>(j)] = data(r, k, j);
        const float g = 1;
        ASSERT_OK(ga_bn_forward(ctx, bn, x.data(), kSamples, 1, y.data()));
        ctx.accumulate({&g});
      }
      if (r == 0) {  // a forward pass whose micro-batch never comes
        const std::vector<float> x(kSamples, 1e6f);
        std::vector<float> y(kSamples);
        ASSERT_OK(ga_bn_forward(ctx, bn, x.data(), kSamples, 1, y.data()));
      }
      step(ctx);
      double running_mean = 0, running_variance = 0;
      int64_t steps = 0;
      ASSERT_OK(ga_bn_running(ctx, bn, &running_mean, &running_variance, GA_F64, &steps));
      EXPECT_NEAR(running_mean, 0.1 * mean, 1e-9);
      EXPECT_NEAR(running_variance, 0.9 + 0.1 * m2 / static_cast<double>(all.size() - 1), 1e-9);
      EXPECT_EQ(steps, 1);
    });
  }
}

// ---- Known defects of others --------------------------------------------------------------------
//
// As in test_defects.cpp: what the system does, and beside it what this library does.

// What plain SGD with the learning rate 1 makes of a parameter that is 0, on each rank, in a window to
// which a rank contributes by bring(ctx, rank).
std::vector<float> moved(int32_t ranks, const std::function<void(Context&, int32_t)>& bring,
                         const ga_config& c = config(), const ga_param_options& o = options(),
                         const ga_clip& clipped = clip(GA_CLIP_NONE, 0)) {
  std::vector<float> p(static_cast<size_t>(ranks));
  on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
    Context ctx(c);
    ctx.param(ctx.group(plain_sgd()), "p", &p[static_cast<size_t>(r)], ref::Shape{1}, &o);
    ASSERT_OK(ga_context_set_clip(ctx, &clipped));
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    bring(ctx, r);
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  });
  return p;
}

// DistributedDataParallel averages the means of the ranks. With 11 tokens on one and 101 on the other,
// both count half, and here the step even goes the wrong way.
TEST(Ddp, AveragesRanksWithUnequalTokens) {
  const float means[] = {3, -1};
  const double tokens[] = {11, 101};
  const double theirs = -(3 - 1) / 2.0, exact = -(3 * 11 - 1 * 101) / 112.0;
  EXPECT_EQ(theirs, -1);
  EXPECT_NEAR(exact, 0.607, 1e-3);
  const std::vector<float> p =
      moved(2, [&](Context& ctx, int32_t r) { ctx.accumulate({&means[r]}, tokens[r]); });
  for (const float ours : p) EXPECT_FLOAT_EQ(ours, static_cast<float>(exact));
}

// It also divides the sum of each rank's micro-batches by a number that is the same on all ranks, and its
// hooks make one collective call for each backward pass: a rank with 5 micro-batches waits for ever for
// one with 2. Here a window is one exchange, whatever the ranks bring to it, also nothing.
TEST(Ddp, HangsWhereRanksHaveUnequalNumbersOfMicroBatches) {
  const int micros[][3] = {{0, 5, 2}, {1, 0, 0}, {3, 3, 1}, {0, 0, 0}, {2, 2, 2}};
  std::vector<float> ended[3];
  on_ranks(3, [&](int32_t r, ga_comm* comm) {
    Context ctx;
    float p = 0, exact = 0;
    ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    for (const auto& of_ranks : micros) {
      const float g = static_cast<float>(r + 1);
      for (int k = 0; k < of_ranks[r]; ++k) ctx.accumulate({&g});
      const float sum = static_cast<float>(of_ranks[0] + 2 * of_ranks[1] + 3 * of_ranks[2]);
      const int count = of_ranks[0] + of_ranks[1] + of_ranks[2];
      const ga_step_result result = step(ctx);
      EXPECT_EQ(result.outcome, count > 0 ? GA_STEP_APPLIED : GA_STEP_SKIPPED_EMPTY);
      EXPECT_EQ(result.micro_batches, count);
      if (count > 0) exact -= sum / static_cast<float>(count);
      EXPECT_FLOAT_EQ(p, exact);
      ended[r].push_back(p);
    }
  });
  EXPECT_TRUE(same_bits(ended[1], ended[0]) && same_bits(ended[2], ended[0]));
}

// A GradScaler looks at the gradients of its own rank. Where ranks do not share all gradients, one backs
// off while the others go on and grow, and soon each unscales by another number. Here the scale is that of
// the sum, on all ranks.
TEST(TorchAmp, LossScalersDriftApart) {
  struct Scaler {
    double scale = 1024;
    int good = 0;
    void update(bool overflow) {
      good = overflow ? 0 : good + 1;
      scale *= overflow ? 0.5 : good == 2 ? 2 : 1;
      if (good == 2) good = 0;
    }
  };
  constexpr int kWindows = 12;
  const auto overflows = [](int32_t r, int w) {
    return (r == 0 && w % 5 == 2) || (r == 1 && w % 4 == 3);
  };
  Scaler theirs[3], common;
  std::vector<double> want;
  for (int w = 0; w < kWindows; ++w) {
    for (int32_t r = 0; r < 3; ++r) theirs[r].update(overflows(r, w));
    common.update(overflows(0, w) || overflows(1, w) || overflows(2, w));
    want.push_back(common.scale);
  }
  EXPECT_EQ(theirs[0].scale, 8192);
  EXPECT_EQ(theirs[1].scale, 1024);
  EXPECT_EQ(theirs[2].scale, 65536);
  EXPECT_EQ(common.scale, 512);
  std::vector<float> ended(3);
  on_ranks(3, [&](int32_t r, ga_comm* comm) {
    float& p = ended[static_cast<size_t>(r)];
    Context ctx;
    ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
    ga_loss_scaler scaler;
    ASSERT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
    scaler.initial_scale = 1024;
    scaler.growth_interval = 2;
    ASSERT_OK(ga_context_set_loss_scaler(ctx, &scaler));
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    for (int w = 0; w < kWindows; ++w) {
      double scale = 0;
      ASSERT_OK(ga_loss_scale(ctx, &scale, nullptr));
      const float g = overflows(r, w) ? INFINITY : static_cast<float>(scale * (r + 1));
      ctx.accumulate({&g});
      const bool skipped = step(ctx).outcome == GA_STEP_SKIPPED_NONFINITE;
      EXPECT_EQ(skipped, overflows(0, w) || overflows(1, w)) << w;
      ASSERT_OK(ga_loss_scale(ctx, &scale, nullptr));
      EXPECT_EQ(scale, want[static_cast<size_t>(w)]) << w;
    }
  });
  EXPECT_EQ(ended, std::vector<float>(3, -2 * 8));  // of 12 windows, 4 overflowed on some rank
}

// ZeRO-1 casts the f32 accumulators of the ranks to the 16 bits of the model and adds them up in these.
// What needs more bits, or is larger, is lost. Here 16-bit accumulators are added up in f32, and f32 ones
// are not cast.
TEST(DeepSpeed, AddsRanksUpIn16Bits) {
  struct Case {
    int32_t dtype;
    std::vector<float> of_ranks;
    double theirs, exact;
  };
  const Case cases[] = {
      {GA_BF16, {256, 1, 1, 1, 1, 1, 1, 1}, 256, 263},
      {GA_BF16, {1, 0x1p-8f, 0x1p-8f, 0x1p-8f}, 1, 1 + 3 * 0x1p-8},
      {GA_F16, {2048, 1, 1, 1}, 2048, 2051},
      {GA_F16, {40000, 40000, 40000, 40000}, INFINITY, 160000},
  };
  ga_config sums = config();
  sums.reduce = GA_REDUCE_SUM;
  for (const Case& c : cases) {
    double theirs = 0;
    for (const float x : c.of_ranks)
      theirs = to_nearest(theirs + static_cast<double>(x), format(c.dtype));
    EXPECT_EQ(theirs, c.theirs);
    const auto ranks = static_cast<int32_t>(c.of_ranks.size());
    const std::vector<float> p = moved(
        ranks,
        [&](Context& ctx, int32_t r) { ctx.accumulate({&c.of_ranks[static_cast<size_t>(r)]}); },
        sums, options(GA_F32, c.dtype));
    for (const float ours : p) EXPECT_EQ(ours, -c.exact);
  }
  // Two micro-batches on each rank, whose sum of f32 has more bits than bf16.
  EXPECT_EQ(2 * to_nearest(1 + 0x1p-8, format(GA_BF16)), 2);
  const std::vector<float> p = moved(
      2,
      [&](Context& ctx, int32_t) {
        for (const float g : {1.0f, 0x1p-8f}) ctx.accumulate({&g});
      },
      sums);
  for (const float ours : p) EXPECT_EQ(ours, -2 * (1 + 0x1p-8f));
}

// Keras clips the gradients of each replica, then adds them up: of 6 and -4, clipped to 1.5, nothing is
// left. Their mean, 1, needs no clipping.
TEST(Keras, ClipsBeforeTheSumOverReplicas) {
  const float gradients[] = {6, -4};
  const std::vector<float> p = moved(
      2, [&](Context& ctx, int32_t r) { ctx.accumulate({&gradients[r]}); }, config(), options(),
      clip(GA_CLIP_GLOBAL, 1.5, GA_FLAVOR_KERAS));
  for (const float ours : p) EXPECT_EQ(ours, -1);
}

// ---- Agreement ----------------------------------------------------------------------------------

// A parameter that one rank lacks is named, not the one that stands in its place.
TEST(Ranks, AParameterThatARankLacksIsNamed) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx;
    float p = 1, d = 1;
    const ga_group group = ctx.group(plain_sgd());
    ctx.param(group, "w", &p, 1);
    if (r == 0) ctx.param(group, "d", &d, 1);
    expect_failure(ga_context_set_comm(ctx, comm, nullptr),
                   "rank 1 has none where rank 0 has parameter \"d\"");
  });
}

TEST(Ranks, TheFirstDifferenceIsNamed) {
  struct Case {
    const char* words;
    std::function<void(Context&, ga_optimizer&, float*)> differ;
  };
  const Case cases[] = {
      {"lr is 0.5 on rank 1, but 0.25 on rank 0",
       [](Context&, ga_optimizer& o, float*) { o.lr = 0.5; }},
      {"\"parameter p\", dimension_0 is 3 on rank 1, but 4 on rank 0",
       [](Context&, ga_optimizer&, float* p) { p[4] = 3; }},
      {"the values of \"p\" on rank 1 are not those of rank 0",
       [](Context&, ga_optimizer&, float* p) { p[1] = 7; }},
      {"rank 1 has \"loss_scaler\"",
       [](Context& ctx, ga_optimizer&, float*) {
         ga_loss_scaler scaler;
         ASSERT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
         ASSERT_OK(ga_context_set_loss_scaler(ctx, &scaler));
       }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    on_ranks(3, [&](int32_t r, ga_comm* comm) {
      Context ctx;
      ga_optimizer o = plain_sgd(0.25);
      float p[5] = {1, 2, 3, 4, 4};
      if (r == 1) c.differ(ctx, o, p);
      ctx.param(ctx.group(o), "p", p, static_cast<int64_t>(p[4]));
      expect_failure(ga_context_set_comm(ctx, comm, nullptr), c.words);
      // The context is alone, as it was.
      const float g[4] = {};
      ctx.accumulate({g});
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    });
  }
}

TEST(Ranks, AMaximumIsOneOnAllRanks) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx;
    float p = 0;
    ga_param_options o = options();
    o.reduce = r == 1 ? GA_REDUCE_MAX : 0;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL)), "p", &p, ref::Shape{1}, &o);
    expect_failure(ga_context_set_comm(ctx, comm, nullptr),
                   "of \"parameter.p\", reduce is 2 on rank 1, but 0 on rank 0");
  });
}

TEST(Ranks, RankZeroHandsOut) {
  std::vector<std::vector<float>> ended(3);
  on_ranks(3, [&](int32_t r, ga_comm* comm) {
    std::vector<float>& p = ended[static_cast<size_t>(r)];
    p.assign(100, static_cast<float>(r));
    Context ctx;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), 100);
    const std::vector<float> g(100, 1);
    for (int k = 0; r == 0 && k < 3; ++k) {  // so that it has state
      ctx.accumulate({g.data()});
      step(ctx);
    }
    ga_comm_options o = comm_options();
    expect_failure(ga_context_set_comm(ctx, comm, &o), "differ");
    o.hand_out = 1;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    ctx.accumulate({g.data()});
    EXPECT_EQ(step(ctx).steps, 4);
  });
  EXPECT_TRUE(same_bits(ended[1], ended[0]) && same_bits(ended[2], ended[0]));
}

TEST(Ranks, AChangeHoldsWhenAllHaveMadeIt) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx;
    float p = 0;
    const ga_group group = ctx.group(plain_sgd());
    const ga_param id = ctx.param(group, "p", &p, 1);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    const float g = 1;
    if (r == 0) {
      ASSERT_OK(ga_param_set_frozen(ctx, id, 1));
    }
    ctx.accumulate({&g});
    expect_failure(ga_step(ctx, nullptr), "frozen is 0 on rank 1, but 1 on rank 0");
    EXPECT_EQ(p, 0);
    // The window is as it was: with the change undone it can end.
    EXPECT_OK(ga_discard(ctx));
    if (r == 0) {
      ASSERT_OK(ga_param_set_frozen(ctx, id, 0));
    }
    ASSERT_OK(ga_group_set_lr(ctx, group, r == 0 ? 2 : 3));
    ctx.accumulate({&g});
    expect_failure(ga_step(ctx, nullptr), "lr is 3 on rank 1, but 2 on rank 0");
    ASSERT_OK(ga_group_set_lr(ctx, group, 3));
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(p, -3);
    // A parameter that comes later.
    float q = 0;
    ctx.param(group, "q", &q, 1);
    ctx.accumulate({&g, &g});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(q, -3);
  });
}

TEST(Ranks, ALayerIsFrozenOnAllOrNone) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx;
    float p = 0;
    ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
    ga_bn bn = -1;
    ASSERT_OK(ga_bn_add(ctx, "norm", 1, -1, -1, nullptr, &bn));
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    EXPECT_OK(ga_step(ctx, nullptr));
    if (r == 1) {
      ASSERT_OK(ga_bn_set_frozen(ctx, bn, 1));
    }
    expect_failure(ga_step(ctx, nullptr), "\"layer.norm\", frozen is 1 on rank 1, but 0 on rank 0");
    ASSERT_OK(ga_bn_set_frozen(ctx, bn, 1));
    EXPECT_OK(ga_step(ctx, nullptr));
  });
}

// Also where the ranks' windows differ, of which the comparison is not.
TEST(Ranks, DivergedParametersAreFound) {
  for (const int32_t nonfinite : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO})
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      ga_config config = test::config();
      config.nonfinite = nonfinite;
      Context ctx(config);
      float p[2] = {0, 0};
      ctx.param(ctx.group(plain_sgd()), "first", &p[0], 1);
      ctx.param(0, "second", &p[1], 1);
      ga_comm_options o = comm_options();
      o.check_every = 2;
      ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
      const float g = static_cast<float>(r + 1), bad = NAN;
      for (int k = 0; k < 2; ++k) {
        ctx.accumulate({&g, &g}, r + 1);
        if (nonfinite == GA_NONFINITE_DROP_MICRO && r == 0) ctx.accumulate({&bad, nullptr});
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      }
      if (r == 1) p[1] += 1;  // a program that writes where it should not
      ctx.accumulate({&g, &g}, r + 1);
      expect_failure(ga_step(ctx, nullptr),
                     "the values of \"second\" on rank 1 are not those of rank 0");
    });
}

// ---- Bad input and failures ---------------------------------------------------------------------

TEST(Ranks, BadConfigurations) {
  ga_comm* comm = nullptr;
  ga_comm_config c = comm_config(GA_COMM_LOCAL);
  const auto expect = [&](const char* words) {
    EXPECT_EQ(ga_comm_create(&c, &comm), GA_ERROR_INVALID_ARGUMENT) << words;
    EXPECT_NE(std::string(ga_last_error()).find(words), std::string::npos) << ga_last_error();
    EXPECT_EQ(comm, nullptr);
  };
  expect("ranks was 0");
  c.ranks = 2;
  c.rank = 2;
  expect("rank was 2, but ranks is 2");
  c.rank = -1;
  expect("rank was -1, but ranks is 2");
  c.rank = 1;
  expect("id was NULL");
  unsigned char id[GA_COMM_ID_SIZE];
  EXPECT_EQ(ga_comm_unique_id(GA_COMM_LOCAL, id, 16), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_comm_unique_id(GA_COMM_MPI, id, sizeof id), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_OK(ga_comm_unique_id(GA_COMM_LOCAL, id, sizeof id));
  c.id = id;
  c.timeout = 0;
  expect("timeout was 0");
  c.timeout = NAN;
  expect("timeout was nan");
  c.timeout = INFINITY;
  const Comm first(c);
  expect("rank 1 has joined this communicator already");
  c.rank = 2;
  c.ranks = 3;
  expect("ranks was 3, but other ranks of this communicator said 2");
  c.kind = 7;
  expect("kind was 7");
  c = comm_config(GA_COMM_TABLE);
  c.ranks = 1;
  expect("table was NULL");
  ga_comm_table table = {};
  table.struct_size = sizeof table;
  c.table = &table;
  expect("ga_comm_table.all_to_all was NULL");
  const OneRank one;
  c.table = &one.table();
  for (const int32_t rank : {-1, 1}) {
    c.rank = rank;
    expect("but ranks is 1");
  }
  c.rank = c.ranks = 0;
  expect("ranks was 0");
}

TEST(Ranks, OneCommunicatorForOneContext) {
  on_ranks(1, [&](int32_t, ga_comm* comm) {
    Context a, b;
    ASSERT_OK(ga_context_set_comm(a, comm, nullptr));
    EXPECT_EQ(ga_context_set_comm(b, comm, nullptr), GA_ERROR_INVALID_STATE);
    ASSERT_OK(ga_context_set_comm(a, nullptr, nullptr));
    EXPECT_OK(ga_context_set_comm(b, comm, nullptr));
    int32_t rank = -1, ranks = -1;
    EXPECT_OK(ga_comm_size(comm, &rank, &ranks));
    EXPECT_EQ(rank, 0);
    EXPECT_EQ(ranks, 1);
  });
}

// A rank that does not come: the others name it, and lose no more than the window.
TEST(Ranks, AMissingRankIsNamedInTime) {
  std::atomic<int> gave_up{0};
  on_ranks(
      3,
      [&](int32_t r, ga_comm* comm) {
        Context ctx;
        float p = 1;
        ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
        ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
        const float g = 1;
        ctx.accumulate({&g});
        if (r == 2) {
          while (gave_up < 2) std::this_thread::yield();
          EXPECT_EQ(ga_step(ctx, nullptr), GA_ERROR_COMMUNICATION);
        } else {
          const ga_status status = ga_step(ctx, nullptr);
          EXPECT_EQ(status, GA_ERROR_COMMUNICATION);
          EXPECT_NE(std::string(ga_last_error()).find("s for rank 2"), std::string::npos)
              << ga_last_error();
          ++gave_up;
        }
        EXPECT_EQ(p, 1);
        expect_failure(ga_step(ctx, nullptr), "rank");
        EXPECT_OK(ga_discard(ctx));
        ASSERT_OK(ga_context_set_comm(ctx, nullptr, nullptr));
        ctx.accumulate({&g});
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
        EXPECT_EQ(p, 0);
      },
      2);
}

TEST(Ranks, ARankThatLeavesIsNotWaitedFor) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx;
    float p = 1;
    ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    if (r == 1) return;
    expect_failure(ga_step(ctx, nullptr), "rank 1 has left");
  });
}

TEST(Ranks, AbortFreesAllWhoWait) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx;
    float p = 1;
    ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    if (r == 0) {
      expect_failure(ga_step(ctx, nullptr), "ga_comm_abort was called");
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      EXPECT_OK(ga_comm_abort(comm));
      expect_failure(ga_step(ctx, nullptr), "ga_comm_abort was called");
    }
  });
}

TEST(Ranks, AnotherOrderOfCalls) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx;
    float p = 1;
    ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    size_t size = 0;
    expect_failure(
        r == 0 ? ga_step(ctx, nullptr) : ga_save_to_memory(ctx, nullptr, nullptr, 0, &size),
        "rank 1 makes another call than rank 0");
    const float g = 1;  // nothing is lost
    ctx.accumulate({&g});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  });
}

// ---- State --------------------------------------------------------------------------------------

TEST(Ranks, OneFileForAnyNumberOfRanks) {
  const Folder folder;
  const std::string path = folder / "state";
  const Layout l = layout();
  const Block start = parameters(l, 3);
  const Shares shares = make_shares(l, 2, 6);
  Options s;
  s.optimizer = optimizer(GA_OPTIMIZER_ADAM);
  const std::vector<Ended> whole = run(l, s, shares, start);
  const auto half = [&](int32_t ranks, size_t begin, size_t end, bool load, bool save) {
    std::vector<Block> ended(static_cast<size_t>(ranks), start);
    on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
      Block& block = ended[static_cast<size_t>(r)];
      Context ctx(s.config);
      build(ctx, l, s, block);
      ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
      if (load) {
        ASSERT_OK(ga_load(ctx, path.c_str(), nullptr));
      }
      for (size_t w = begin; w < end; ++w) {
        for (size_t share = static_cast<size_t>(r); share < 2; share += static_cast<size_t>(ranks))
          contribute(ctx, l, shares[w][share]);
        step(ctx);
      }
      if (save) {
        ASSERT_OK(ga_save(ctx, path.c_str(), nullptr));
      }
    });
    return ended;
  };
  half(2, 0, 3, false, true);
  const std::vector<Block> same = half(2, 3, 6, true, false);
  EXPECT_TRUE(same_bits(same[0], whole[0].parameters) && same_bits(same[1], whole[0].parameters));
  const std::vector<Block> more = half(3, 3, 6, true, false);
  EXPECT_LT(distance(l, more[2], whole[0].parameters), 1e-5);
  EXPECT_TRUE(same_bits(more[0], more[2]));
  EXPECT_LT(distance(l, half(1, 3, 6, true, false)[0], whole[0].parameters), 1e-5);
}

// Where one rank cannot load, none has loaded.
TEST(Ranks, ALoadIsThatOfAllOrNone) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx;
    float p = 1;
    ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    size_t size = 0;
    ASSERT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));
    std::vector<char> saved(size);
    ASSERT_OK(ga_save_to_memory(ctx, nullptr, saved.data(), size, &size));
    const float g = 1;
    ctx.accumulate({&g});
    step(ctx);
    EXPECT_EQ(p, 0);
    if (r == 1) saved[saved.size() - 1] = static_cast<char>(saved.back() ^ 1);
    const ga_status status = ga_load_from_memory(ctx, saved.data(), size, nullptr);
    EXPECT_EQ(status, r == 1 ? GA_ERROR_FORMAT : GA_ERROR_COMMUNICATION) << ga_last_error();
    EXPECT_EQ(p, 0);
    ctx.accumulate({&g});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(p, -1);
    ctx.accumulate({&g});
    EXPECT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));  // of an open window
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  });
}

// ---- A table of the program ---------------------------------------------------------------------

// Exchanges of a window beside those of data. On a device, a transport of the host's memory first asks all
// ranks whether they agree.
const int kSmall = on_device() ? 3 : 2;

TEST(Ranks, WhatTravelsDoesNotDependOnMicroBatches) {
  for (const auto& [micros, shard] : {std::pair{1, GA_SHARD_NONE},
                                      {8, GA_SHARD_NONE},
                                      {1, GA_SHARD_OPTIMIZER},
                                      {8, GA_SHARD_OPTIMIZER}}) {
    OneRank comm;
    Context ctx;
    std::vector<float> p(1000000), g(1000000, 1);
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), 1000000);
    ga_comm_options o = comm_options();
    o.shard = shard;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    for (int w = 0; w < 2; ++w) {
      comm.bytes = comm.calls = 0;
      for (int k = 0; k < micros; ++k) ctx.accumulate({g.data()});
      step(ctx);
    }
    EXPECT_LE(comm.bytes, 2 * 4000000 + 1000);
    EXPECT_EQ(comm.calls, 2 + kSmall);
  }
}

// However large the parameters are, what is exchanged at a time is not.
TEST(Ranks, RoomForTheExchange) {
  constexpr int64_t kCount = 20000000, kMost = int64_t{64} << 20;
  for (const int32_t overlap : {0, 1}) {
    if (overlap && on_device()) continue;
    OneRank comm;
    std::vector<float> p(kCount), small(3000), g(kCount, 1);
    Context ctx;
    const ga_group group = ctx.group(plain_sgd());
    ctx.param(group, "p", p.data(), kCount);
    ctx.param(group, "small", small.data(), 3000);
    ASSERT_OK(ga_prepare(ctx));
    const int64_t before = memory(ctx).total;
    ga_comm_options o = comm_options();
    o.overlap = overlap;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    ctx.accumulate({g.data(), g.data()});
    step(ctx);
    EXPECT_LE(memory(ctx).total - before, kMost) << overlap;
    EXPECT_GT(memory(ctx).total - before, int64_t{1} << 20) << overlap;
  }
}

TEST(Ranks, AFailureOfATableIsTold) {
  for (int at = 0; at < 4; ++at) {
    OneRank comm;
    Context ctx;
    std::vector<float> p(100000, 1), g(100000, 1);
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), 100000);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    step(ctx);  // of an empty window: the first one tells how many parameters there are
    ctx.accumulate({g.data()});
    comm.fail_at = comm.calls + at;
    expect_failure(ga_step(ctx, nullptr), "the cable is out (42)");
    EXPECT_EQ(p, std::vector<float>(100000, 1));
    ga_window_info w;
    ASSERT_OK(ga_window_info_init(&w, sizeof w));
    ASSERT_OK(ga_window(ctx, &w));
    EXPECT_EQ(w.state, at == 0 ? GA_WINDOW_OPEN : GA_WINDOW_INVALID) << at;
    EXPECT_EQ(w.steps, 0);
    EXPECT_OK(ga_discard(ctx));
    ASSERT_OK(ga_context_set_comm(ctx, nullptr, nullptr));
    ctx.accumulate({g.data()});
    EXPECT_EQ(step(ctx).steps, 1);
  }
}

// Of a sharded context: this rank has updated its part when the others' do not come.
TEST(Ranks, ParametersThatDoNotComeEndTheContext) {
  OneRank comm;
  Context ctx;
  std::vector<float> p(100000, 1), g(100000, 1);
  ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), 100000);
  ga_comm_options o = comm_options();
  o.shard = GA_SHARD_OPTIMIZER;
  ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
  ctx.accumulate({g.data()});
  step(ctx);
  ctx.accumulate({g.data()});
  comm.fail_at = comm.calls + 1 + kSmall;
  expect_failure(ga_step(ctx, nullptr), "updated parameters: the cable is out (42)");
  expect_failure(ga_discard(ctx), "the cable is out (42)");
}

}  // namespace
}  // namespace ga::test
