// SPDX-License-Identifier: Apache-2.0
//
// GA_SHARD_OPTIMIZER: every rank keeps a part of the state, and all have the bits that they would have if
// each kept the whole. That every optimizer and every way to accumulate has them, test_ranks.cpp says.
#include "files.hpp"
#include "ranks.hpp"

namespace ga::test {

using namespace over_ranks;

namespace {

ga_comm_options sharded(bool on = true) {
  ga_comm_options o = comm_options();
  o.shard = on ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
  o.check_every = 1;
  return o;
}

// All state of a parameter, by name.
std::map<std::string, std::string> state_of(ga_context* ctx, ga_param id) {
  std::map<std::string, std::string> all;
  for (const ga_state_info& s : states_of(ctx, id)) all[s.name] = state_bytes(ctx, id, s);
  return all;
}

// ---- 16 bits, averages, state by name --------------------------------------------------------------

struct Mix {
  const char* name;
  int32_t dtype, accumulator, state, average, rounding, master;
  int32_t kind = GA_OPTIMIZER_ADAMW;
  int32_t by_units = -1;  // ga_clip.when
  bool by_rows = false;   // units are rows, of a matrix
  bool own = false;       // the average is the optimizer's own, and no EMA
};
class RanksShardedMix : public testing::TestWithParam<std::tuple<Mix, int32_t>> {};

// Three parameters: divided, whole on one rank, and a scalar.
TEST_P(RanksShardedMix, HasTheBitsOfWholeState) {
  const Mix& mix = std::get<0>(GetParam());
  const int32_t ranks = std::get<1>(GetParam());
  const std::vector<ref::Shape> shapes = mix.by_rows
                                             ? std::vector<ref::Shape>{{331, 453}, {27, 19}, {1}}
                                             : std::vector<ref::Shape>{{150001}, {513}, {1}};
  std::vector<int64_t> counts;
  for (const ref::Shape& s : shapes) counts.push_back(s[0] * (s.size() > 1 ? s[1] : 1));
  struct Outcome {
    std::vector<std::vector<uint16_t>> parameters;
    std::vector<std::map<std::string, std::string>> states;
    std::vector<float> average, swapped;
  };
  std::vector<Outcome> outcomes;
  for (const bool shard : {false, true}) {
    std::vector<Outcome> of_ranks(static_cast<size_t>(ranks));
    on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
      Outcome& out = of_ranks[static_cast<size_t>(r)];
      ga_config c = config();
      c.seed = 5;
      Context ctx(c);
      ga_ema ema;
      ASSERT_OK(ga_ema_init(&ema, sizeof ema));
      ema.dtype = mix.average;
      ema.decay = 0.7;
      ASSERT_OK(ga_context_set_ema(ctx, mix.own ? nullptr : &ema));
      ga_optimizer o = optimizer(mix.kind);
      o.lr = 0.02;
      o.state_dtype = mix.state;
      const ga_group group = ctx.group(o);
      ga_param_options options;
      ASSERT_OK(ga_param_options_init(&options, sizeof options));
      options.accumulator_dtype = mix.accumulator;
      options.rounding = mix.rounding;
      options.master = mix.master;
      Random random(9);
      for (const int64_t count : counts) {
        out.parameters.emplace_back(static_cast<size_t>(count));
        for (uint16_t& x : out.parameters.back())
          x = static_cast<uint16_t>(0x3f80 - random.below(64));  // about 1 in bf16
      }
      for (size_t i = 0; i < 3; ++i)
        ASSERT_OK(ga_param_add(ctx, group, std::string(1, static_cast<char>('a' + i)).c_str(),
                               out.parameters[i].data(), mix.dtype,
                               static_cast<int32_t>(shapes[i].size()), shapes[i].data(), &options,
                               nullptr));
      if (mix.by_units >= 0) {
        ga_clip by_units = clip(GA_CLIP_AGC, 0);
        by_units.when = mix.by_units;
        if (mix.by_rows) by_units.agc_units = GA_AGC_TORCH;
        ASSERT_OK(ga_context_set_clip(ctx, &by_units));
      }
      const ga_comm_options sharding = sharded(shard);
      ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
      for (int w = 0; w < 3; ++w) {
        std::vector<std::vector<uint16_t>> g;
        Random of_rank(static_cast<uint64_t>(10 * w + r));
        for (const int64_t count : counts) {
          g.emplace_back(static_cast<size_t>(count));
          for (uint16_t& x : g.back())
            x = static_cast<uint16_t>((of_rank.below(2) << 15) + 0x3f00 + of_rank.below(128));
        }
        ctx.accumulate({g[0].data(), g[1].data(), w == 1 ? nullptr : g[2].data()}, r + 1);
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      }
      for (ga_param id = 0; id < 3; ++id) out.states.push_back(state_of(ctx, id));
      out.average.resize(static_cast<size_t>(counts[0]));
      ASSERT_OK(ga_ema_copy_to(ctx, 0, out.average.data(), GA_F32));
      const auto parameters = out.parameters;
      ASSERT_OK(ga_ema_swap(ctx, 1));
      EXPECT_NE(out.parameters[0], parameters[0]);
      out.swapped.resize(out.average.size());
      for (size_t j = 0; j < out.swapped.size(); ++j) out.swapped[j] = out.parameters[0][j];
      ASSERT_OK(ga_ema_swap(ctx, 0));
      EXPECT_EQ(out.parameters, parameters);
    });
    outcomes.insert(outcomes.end(), of_ranks.begin(), of_ranks.end());
  }
  for (size_t k = 1; k < outcomes.size(); ++k) {
    const size_t n = static_cast<size_t>(ranks);
    SCOPED_TRACE((k < n ? "whole, rank " : "sharded, rank ") + std::to_string(k % n));
    EXPECT_EQ(outcomes[k].parameters, outcomes[0].parameters);
    EXPECT_EQ(outcomes[k].states, outcomes[0].states);
    EXPECT_EQ(outcomes[k].average, outcomes[0].average);
    EXPECT_EQ(outcomes[k].swapped, outcomes[0].swapped);
  }
}

const Mix kMixes[] = {
    {"masters", GA_BF16, GA_F32, 0, 0, GA_ROUND_NEAREST, GA_MASTER_F32},
    {"by_chance", GA_BF16, GA_F32, GA_BF16, GA_BF16, GA_ROUND_STOCHASTIC, GA_MASTER_NONE},
    {"masters_by_chance", GA_BF16, GA_F32, GA_BF16, 0, GA_ROUND_STOCHASTIC, GA_MASTER_F32},
    {"narrow_accumulators", GA_BF16, GA_BF16, 0, GA_BF16, GA_ROUND_NEAREST, GA_MASTER_F32},
    {"lamb", GA_BF16, GA_F32, 0, 0, GA_ROUND_NEAREST, GA_MASTER_F32, GA_OPTIMIZER_LAMB},
    {"lamb_narrow_accumulators", GA_BF16, GA_BF16, 0, 0, GA_ROUND_NEAREST, GA_MASTER_F32,
     GA_OPTIMIZER_LAMB},
    {"lars_narrow_accumulators", GA_BF16, GA_BF16, 0, 0, GA_ROUND_NEAREST, GA_MASTER_F32,
     GA_OPTIMIZER_LARS},
    {"adafactor", GA_BF16, GA_BF16, 0, 0, GA_ROUND_NEAREST, GA_MASTER_F32, GA_OPTIMIZER_ADAFACTOR},
    {"by_units", GA_BF16, GA_F32, 0, 0, GA_ROUND_NEAREST, GA_MASTER_F32, GA_OPTIMIZER_ADAMW,
     GA_CLIP_WHEN_STEP},
    {"micro_batches_by_units", GA_BF16, GA_F32, 0, 0, GA_ROUND_NEAREST, GA_MASTER_F32,
     GA_OPTIMIZER_ADAMW, GA_CLIP_WHEN_MICRO},
    {"micro_batches_by_units_by_chance", GA_BF16, GA_F32, 0, 0, GA_ROUND_STOCHASTIC, GA_MASTER_NONE,
     GA_OPTIMIZER_ADAMW, GA_CLIP_WHEN_MICRO},
    {"by_rows", GA_BF16, GA_F32, GA_BF16, 0, GA_ROUND_STOCHASTIC, GA_MASTER_F32, GA_OPTIMIZER_ADAMW,
     GA_CLIP_WHEN_STEP, true},
    {"by_rows_narrow_accumulators", GA_BF16, GA_BF16, GA_BF16, GA_BF16, GA_ROUND_STOCHASTIC,
     GA_MASTER_NONE, GA_OPTIMIZER_ADAMW, GA_CLIP_WHEN_STEP, true},
    {"lamb_by_rows", GA_BF16, GA_BF16, 0, 0, GA_ROUND_NEAREST, GA_MASTER_F32, GA_OPTIMIZER_LAMB,
     GA_CLIP_WHEN_STEP, true},
    {"state_by_rows", GA_BF16, GA_F32, 0, 0, GA_ROUND_NEAREST, GA_MASTER_F32,
     GA_OPTIMIZER_ROWWISE_ADAGRAD, -1, true},
    {"state_by_rows_by_rows", GA_BF16, GA_BF16, 0, GA_BF16, GA_ROUND_STOCHASTIC, GA_MASTER_NONE,
     GA_OPTIMIZER_ROWWISE_ADAGRAD, GA_CLIP_WHEN_STEP, true},
    {"schedule_free", GA_BF16, GA_F32, 0, 0, GA_ROUND_NEAREST, GA_MASTER_F32,
     GA_OPTIMIZER_SCHEDULE_FREE_ADAMW, -1, false, true},
    {"schedule_free_without_masters", GA_BF16, GA_F32, 0, 0, GA_ROUND_STOCHASTIC, GA_MASTER_NONE,
     GA_OPTIMIZER_SCHEDULE_FREE_ADAMW, -1, false, true},
    {"schedule_free_with_an_ema", GA_BF16, GA_F32, 0, 0, GA_ROUND_NEAREST, GA_MASTER_F32,
     GA_OPTIMIZER_SCHEDULE_FREE_ADAMW},
    {"codes", GA_BF16, GA_F32, GA_STATE_8BIT, 0, GA_ROUND_NEAREST, GA_MASTER_F32},
    {"codes_by_chance", GA_BF16, GA_BF16, GA_STATE_8BIT, GA_BF16, GA_ROUND_STOCHASTIC,
     GA_MASTER_NONE, GA_OPTIMIZER_ADEMAMIX},
    {"codes_by_rows", GA_BF16, GA_F32, GA_STATE_8BIT, 0, GA_ROUND_NEAREST, GA_MASTER_F32,
     GA_OPTIMIZER_ADAMW, GA_CLIP_WHEN_STEP, true},
    {"codes_of_lamb", GA_BF16, GA_F32, GA_STATE_8BIT, 0, GA_ROUND_NEAREST, GA_MASTER_F32,
     GA_OPTIMIZER_LAMB}};

INSTANTIATE_TEST_SUITE_P(All, RanksShardedMix,
                         testing::Combine(testing::ValuesIn(kMixes), testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

// ---- Optimizers that need a whole tensor -----------------------------------------------------------

TEST(RanksSharded, Muon) {
  if (!has_onednn()) GTEST_SKIP() << "no oneDNN in this build";
  const Layout l = Layout::of({{40, 30}, {300, 256}, {7, 7}, {5, 12, 7}});
  for (const ga_precision precision : {GA_PRECISION_F32, GA_PRECISION_BF16})
    for (const int32_t ranks : {1, 2, 3, 4}) {
      SCOPED_TRACE(testing::Message() << "ns_precision " << precision << ", " << ranks << " ranks");
      Options s;
      s.optimizer = optimizer(GA_OPTIMIZER_MUON);
      s.optimizer.beta2 = 0.5;  // whose state the ranks are to share
      s.optimizer.ns_precision = precision;
      Context ctx;
      if (ga_group_add(ctx, &s.optimizer, nullptr) == GA_ERROR_UNSUPPORTED)
        continue;  // this processor
      const Shares shares = make_shares(l, ranks, 3);
      const Block start = parameters(l, 3);
      const std::vector<Ended> whole = run(l, s, shares, start);
      s.options.shard = GA_SHARD_OPTIMIZER;
      expect_alike(whole, run(l, s, shares, start));
    }
}

// Many large tensors, each of which travels to its owner alone, and one that is too large for that.
TEST(RanksSharded, TensorsWithOwners) {
  std::vector<ref::Shape> shapes(7, ref::Shape{100, 700});
  shapes.push_back({150, 1600});
  const Layout l = Layout::of(shapes);
  const Shares shares = make_shares(l, 3, 2);
  const Block start = parameters(l, 3);
  for (const int32_t kind : {GA_OPTIMIZER_ADAFACTOR, GA_OPTIMIZER_MUON, GA_OPTIMIZER_LAMB})
    for (const int32_t accumulation : {GA_ACCUMULATE_PLAIN, GA_ACCUMULATE_RUNNING_MEAN}) {
      SCOPED_TRACE(std::to_string(kind) + " " + std::to_string(accumulation));
      if (kind == GA_OPTIMIZER_MUON && !has_onednn()) continue;
      Options s;
      s.config.accumulation = accumulation;
      s.optimizer = optimizer(kind);
      const bool clamps = accumulation == GA_ACCUMULATE_RUNNING_MEAN;
      s.clip = clip(GA_CLIP_GLOBAL, 0.5, GA_FLAVOR_TORCH, clamps ? 0.01 : HUGE_VAL);
      expect_the_bits(run(l, s, shares, start), l, s, shares, start);
    }
}

// A tensor is clipped by units by the rank that keeps it, or by each rank that keeps whole units of it; the
// smallest factor is in every rank's result. Norms of gradients after that clip, of each tensor (LARS) and of
// all (LAMB), are in every rank's update. One tensor has fewer rows than there are ranks.
TEST(RanksSharded, ClippedByUnits) {
  // Tensors of several chunks take long, so each case has them with one way to clip, and each way in some cases.
  const Layout layouts[] = {
      Layout::of({{301, 260}, {7}, {130, 600}, {33, 5}, {70001}, {3, 30000}, {5, 53, 300}}),
      Layout::of({{31, 26}, {7}, {13, 60}, {33, 5}, {701}, {3, 300}, {5, 5, 30}})};
  size_t turn = 0;
  struct Case {
    int32_t kind, ranks;
    double bound = 0;
  };
  constexpr Case kCases[] = {{GA_OPTIMIZER_SGD, 2},
                             {GA_OPTIMIZER_SGD, 4},
                             {GA_OPTIMIZER_ADAMW, 2},
                             {GA_OPTIMIZER_ADAMW, 3},
                             {GA_OPTIMIZER_LAMB, 2, 0.1},
                             {GA_OPTIMIZER_LAMB, 3},
                             {GA_OPTIMIZER_LAMB, 4, 0.1},
                             {GA_OPTIMIZER_LARS, 3},
                             {GA_OPTIMIZER_LARS, 4},
                             {GA_OPTIMIZER_ADAFACTOR, 2},
                             {GA_OPTIMIZER_ADAFACTOR, 3},
                             {GA_OPTIMIZER_ROWWISE_ADAGRAD, 3},
                             {GA_OPTIMIZER_ROWWISE_ADAGRAD, 4}};
  for (const auto& [kind, ranks, bound] : kCases) {
    ++turn;
    for (const int32_t units : {GA_AGC_TF, GA_AGC_TORCH})
      for (const int32_t when : {GA_CLIP_WHEN_STEP, GA_CLIP_WHEN_MICRO}) {
        const Layout& l = layouts[turn++ % 4 == 0 ? 0 : 1];
        const Block start = parameters(l, 3);
        SCOPED_TRACE(std::to_string(kind) + " " + std::to_string(units) + " " +
                     std::to_string(when) + ", " + std::to_string(ranks) + " ranks");
        Options s;
        s.optimizer = optimizer(kind);
        if (bound > 0) s.optimizer.max_grad_norm = bound;
        if (kind == GA_OPTIMIZER_LARS) s.optimizer.weight_decay = 0.01;  // else it takes no norms
        s.clip = clip(GA_CLIP_AGC, 0);
        s.clip.agc_units = units;
        s.clip.when = when;
        const Shares shares = make_shares(l, ranks, 2, 1);
        const std::vector<Ended> whole = run(l, s, shares, start);
        expect_the_bits(whole, l, s, shares, start);
        const Ended alone = run_alone(l, s, shares, start);
        EXPECT_LT(distance(l, whole[0].parameters, alone.parameters), 1e-4);
        for (size_t w = 0; w < shares.size(); ++w) {
          EXPECT_NEAR(whole[0].results[w].clip_factor, alone.results[w].clip_factor, 1e-5);
          if (when == GA_CLIP_WHEN_STEP) {
            EXPECT_LT(whole[0].results[w].clip_factor, 0.5);
          }
        }
      }
  }
}

// Units of any axes, of which the outermost are kept: pieces end between indices of all of these together, also
// behind an axis of length 1. The clip is set after the communicator is. In f64, the reference is alone.
TEST(RanksSharded, ClippedByUnitsOfChosenAxes) {
  struct Of {
    ref::Shape shape;
    uint32_t reduced;
  };
  const Of kinds[] = {
      {{5, 53, 300}, 4}, {{5, 53, 300}, 2}, {{1, 301, 260}, 4}, {{37, 8, 17, 15}, 10}};
  constexpr size_t kTensors = 4;
  for (const int32_t ranks : {2, 3, 4})
    for (const int32_t kind : {GA_OPTIMIZER_SGD, GA_OPTIMIZER_ADAM, GA_OPTIMIZER_LARS}) {
      SCOPED_TRACE(std::to_string(kind) + ", " + std::to_string(ranks) + " ranks");
      struct Outcome {
        std::vector<double> parameters[kTensors];
        std::vector<ga_step_result> results;
      };
      const auto body = [&](Outcome& out, int32_t first, int32_t end, ga_comm* comm, bool shard) {
        Context ctx;
        ga_optimizer o = optimizer(kind);
        o.weight_decay = 0.01;  // LARS takes norms
        const ga_group group = ctx.group(o);
        ga_param_options options;
        ASSERT_OK(ga_param_options_init(&options, sizeof options));
        Random random(4);
        for (size_t i = 0; i < kTensors; ++i) {
          int64_t count = 1;
          for (const int64_t d : kinds[i].shape) count *= d;
          for (int64_t j = 0; j < count; ++j) out.parameters[i].push_back(random.signed_unit());
          options.agc_axes = kinds[i].reduced;
          ASSERT_OK(ga_param_add(ctx, group, std::to_string(i).c_str(), out.parameters[i].data(),
                                 GA_F64, static_cast<int32_t>(kinds[i].shape.size()),
                                 kinds[i].shape.data(), &options, nullptr));
        }
        if (comm) {
          const ga_comm_options sharding = sharded(shard);
          ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
        }
        const ga_clip by_units = clip(GA_CLIP_AGC, 0);
        ASSERT_OK(ga_context_set_clip(ctx, &by_units));
        for (int w = 0; w < 2; ++w) {
          for (int32_t r = first; r < end; ++r) {
            Random of_rank(static_cast<uint64_t>(10 * w + r));
            std::vector<double> g[kTensors];
            std::vector<const void*> list;
            for (size_t i = 0; i < kTensors; ++i) {
              for (size_t j = 0; j < out.parameters[i].size(); ++j)
                g[i].push_back(of_rank.signed_unit() * (j % 97 == 0 ? 100 : 1));
              list.push_back(g[i].data());
            }
            ctx.accumulate(list, 1 + r % 2);
          }
          out.results.push_back(step(ctx));
        }
      };
      Outcome alone;
      body(alone, 0, ranks, nullptr, false);
      std::vector<Outcome> ended;
      for (const bool shard : {false, true}) {
        std::vector<Outcome> of_ranks(static_cast<size_t>(ranks));
        on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
          body(of_ranks[static_cast<size_t>(r)], r, r + 1, comm, shard);
        });
        ended.insert(ended.end(), of_ranks.begin(), of_ranks.end());
      }
      for (size_t k = 0; k < ended.size(); ++k) {
        SCOPED_TRACE(k);
        for (size_t i = 0; i < kTensors; ++i) {
          EXPECT_TRUE(ended[k].parameters[i] == ended[0].parameters[i]) << i;
          for (size_t j = 0; j < alone.parameters[i].size(); ++j)
            ASSERT_NEAR(ended[k].parameters[i][j], alone.parameters[i][j], 1e-9) << i << " " << j;
        }
        for (size_t w = 0; w < 2; ++w) {
          EXPECT_EQ(ended[k].results[w].norm, ended[0].results[w].norm);
          EXPECT_EQ(ended[k].results[w].clip_factor, ended[0].results[w].clip_factor);
          EXPECT_NEAR(ended[k].results[w].clip_factor, alone.results[w].clip_factor, 1e-9);
          EXPECT_LT(alone.results[w].clip_factor, 0.5);
        }
      }
    }
}

// Tensors that are missing count as zeros, and an optimizer with norms moves them all the same.
TEST(RanksSharded, Missing) {
  const Layout l = layout();
  constexpr int32_t kCases[][2] = {
      // accumulator, ranks
      {GA_F32, 1}, {GA_F32, 2}, {GA_F32, 4}, {GA_BF16, 1}, {GA_BF16, 2}, {GA_BF16, 3}};
  for (const auto& [accumulator, ranks] : kCases) {
    SCOPED_TRACE(std::to_string(accumulator) + ", " + std::to_string(ranks) + " ranks");
    std::vector<Block> ended;
    for (const bool shard : {false, true}) {
      std::vector<Block> blocks(static_cast<size_t>(ranks), parameters(l, 3));
      on_ranks(ranks, [&, accumulator = accumulator](int32_t r, ga_comm* comm) {
        ga_config c = config();
        c.missing = GA_MISSING_ZERO;
        Context ctx(c);
        ga_param_options options;
        ASSERT_OK(ga_param_options_init(&options, sizeof options));
        options.accumulator_dtype = accumulator;
        const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_LAMB));
        Block& block = blocks[static_cast<size_t>(r)];
        for (size_t i = 0; i < l.size(); ++i)
          ctx.param(group, "p" + std::to_string(i), block.data() + l.offsets[i], l.shapes[i],
                    &options);
        const ga_comm_options sharding = sharded(shard);
        ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
        for (uint64_t w = 0; w < 3; ++w) {
          const Block g = gradients(l, 5, w);
          auto list = pointers(l, g);
          if (w != 1) list[1] = list[2] = nullptr;
          ctx.accumulate(list);
          step(ctx);
        }
      });
      ended.insert(ended.end(), blocks.begin(), blocks.end());
    }
    for (size_t k = 1; k < ended.size(); ++k) EXPECT_TRUE(same_bits(ended[k], ended[0])) << k;
  }
}

TEST(RanksSharded, Rows) {
  constexpr int64_t kRows = 901, kColumns = 101;  // large enough to be divided
  struct Case {
    int32_t rows, ranks;
    bool clipped = false;  // by units, which are rows
  };
  constexpr Case kCases[] = {
      {GA_ROWS_LAZY, 1},       {GA_ROWS_LAZY, 3},        {GA_ROWS_LAZY, 4},
      {GA_ROWS_LAZY, 3, true}, {GA_ROWS_DENSE, 1},       {GA_ROWS_DENSE, 2},
      {GA_ROWS_DENSE, 3},      {GA_ROWS_DENSE, 2, true}, {GA_ROWS_DENSE, 4, true}};
  for (const int32_t kind :
       {GA_OPTIMIZER_ADAM, GA_OPTIMIZER_ADAGRAD, GA_OPTIMIZER_ROWWISE_ADAGRAD, GA_OPTIMIZER_LAMB})
    for (const auto& [rows, ranks, clipped] : kCases) {
      if (rows == GA_ROWS_LAZY && on_device()) continue;  // which exchanges all rows
      if (rows == GA_ROWS_LAZY && kind == GA_OPTIMIZER_LAMB) continue;
      SCOPED_TRACE(std::to_string(kind) + " " + std::to_string(rows) + ", " +
                   std::to_string(ranks) + " ranks" + (clipped ? ", clipped" : ""));
      std::vector<std::vector<float>> ended;
      std::vector<std::map<std::string, std::string>> states;
      for (const bool shard : {false, true}) {
        const auto n = static_cast<size_t>(ranks);
        std::vector<std::vector<float>> tables(n, std::vector<float>(kRows * kColumns, 1));
        std::vector<std::map<std::string, std::string>> of_ranks(n);
        on_ranks(ranks, [&, rows = rows, ranks = ranks, clipped = clipped](int32_t r,
                                                                           ga_comm* comm) {
          Context ctx;
          ga_clip by_rows = clip(GA_CLIP_AGC, 0);
          by_rows.agc_units = GA_AGC_TORCH;
          if (clipped) {
            ASSERT_OK(ga_context_set_clip(ctx, &by_rows));
          }
          ga_param_options o;
          ASSERT_OK(ga_param_options_init(&o, sizeof o));
          o.rows = rows;
          ctx.param(ctx.group(optimizer(
                        kind, kind == GA_OPTIMIZER_ADAM ? GA_FLAVOR_KERAS : GA_FLAVOR_TORCH)),
                    "e", tables[static_cast<size_t>(r)].data(), ref::Shape{kRows, kColumns}, &o);
          const ga_comm_options sharding = sharded(shard);
          ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
          for (int w = 0; w < 4; ++w) {
            Random random(static_cast<uint64_t>(10 * w + r));
            std::vector<int64_t> indices;
            for (int k = 0; k < (7 * r + 5 * w) % 15; ++k) indices.push_back(random.below(kRows));
            std::vector<float> values(indices.size() * kColumns);
            for (float& x : values) x = static_cast<float>(random.signed_unit());
            ASSERT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
            ASSERT_OK(ga_accumulate_rows(ctx, 0, indices.data(), GA_I64,
                                         static_cast<int64_t>(indices.size()), values.data()));
            ASSERT_OK(ga_micro_end(ctx));
            if (w == 2 && r == ranks - 1) {
              const std::vector<float> all(kRows * kColumns, 0.5f);
              ctx.accumulate({all.data()});
            }
            step(ctx);
          }
          of_ranks[static_cast<size_t>(r)] = state_of(ctx, 0);
        });
        ended.insert(ended.end(), tables.begin(), tables.end());
        states.insert(states.end(), of_ranks.begin(), of_ranks.end());
      }
      for (size_t k = 1; k < ended.size(); ++k) {
        EXPECT_TRUE(same_bits(ended[k], ended[0])) << k;
        EXPECT_TRUE(states[k] == states[0]) << k;
      }
    }
}

// A large embedding is cut between rows.
TEST(RanksSharded, RowsHaveTheirPartOfTheState) {
  on_ranks(3, [&](int32_t, ga_comm* comm) {
    std::vector<float> table(1000 * 301);
    Context ctx;
    ga_param_options o;
    ASSERT_OK(ga_param_options_init(&o, sizeof o));
    o.rows = GA_ROWS_LAZY;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM, GA_FLAVOR_KERAS)), "e", table.data(),
              ref::Shape{1000, 301}, &o);
    const ga_comm_options sharding = sharded();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
    EXPECT_NEAR(static_cast<double>(memory(ctx).optimizer_state), 8 * 1000 * 301 / 3.0,
                2 * 8 * 301);
  });
}

// ---- Memory and bytes ----------------------------------------------------------------------------

TEST(RanksSharded, EachRankHasItsPartOfTheState) {
  for (const int32_t ranks : {2, 3, 4}) {
    std::vector<ga_memory> of_ranks(static_cast<size_t>(ranks));
    constexpr int64_t kLarge = 1000001, kSmall = 1000;
    int64_t elements = 0;
    on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
      std::vector<uint16_t> large(kLarge), small(64 * kSmall);
      Context ctx;
      ga_ema ema;
      ASSERT_OK(ga_ema_init(&ema, sizeof ema));
      ASSERT_OK(ga_context_set_ema(ctx, &ema));
      const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
      const auto add = [&](const std::string& name, uint16_t* data, int64_t count) {
        ASSERT_OK(
            ga_param_add(ctx, group, name.c_str(), data, GA_BF16, 1, &count, nullptr, nullptr));
      };
      add("large", large.data(), kLarge);
      for (int k = 0; k < 64; ++k)
        add("small." + std::to_string(k), small.data() + k * kSmall, kSmall);
      const ga_comm_options sharding = sharded();
      ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
      const ga_memory planned = memory(ctx);
      ASSERT_OK(ga_prepare(ctx));
      of_ranks[static_cast<size_t>(r)] = memory(ctx);
      EXPECT_EQ(planned.optimizer_state, of_ranks[static_cast<size_t>(r)].optimizer_state);
      if (r == 0) elements = kLarge + 64 * kSmall;
    });
    for (const auto& [member, bytes] : {std::pair{&ga_memory::optimizer_state, 8},
                                        {&ga_memory::masters, 4},
                                        {&ga_memory::averages, 4}}) {
      int64_t sum = 0;
      for (const ga_memory& m : of_ranks) {
        sum += m.*member;
        EXPECT_NEAR(static_cast<double>(m.*member), static_cast<double>(elements * bytes) / ranks,
                    0.01 * static_cast<double>(elements * bytes) / ranks);
      }
      EXPECT_NEAR(static_cast<double>(sum), static_cast<double>(elements * bytes),
                  0.01 * static_cast<double>(elements * bytes));
    }
    for (const ga_memory& m : of_ranks) EXPECT_GE(m.accumulators, 4 * elements);
  }
}

TEST(RanksSharded, EachRankHasItsPartOfWhatIsClippedByUnits) {
  for (const int32_t when : {GA_CLIP_WHEN_STEP, GA_CLIP_WHEN_MICRO})
    on_ranks(4, [&](int32_t, ga_comm* comm) {
      constexpr int64_t kTensors = 8, kCount = 300 * 300;
      std::vector<float> p(kTensors * kCount, 1);
      Context ctx;
      ga_clip by_units = clip(GA_CLIP_AGC, 0);
      by_units.when = when;
      ASSERT_OK(ga_context_set_clip(ctx, &by_units));
      const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
      for (int64_t i = 0; i < kTensors; ++i)
        ctx.param(group, "p" + std::to_string(i), &p[static_cast<size_t>(i * kCount)],
                  ref::Shape{300, 300});
      const ga_comm_options sharding = sharded();
      ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
      ASSERT_OK(ga_prepare(ctx));
      const double part = 8.0 * kTensors * kCount / 4;
      EXPECT_NEAR(static_cast<double>(memory(ctx).optimizer_state), part, 0.01 * part);
      // Another limit changes nothing of who has what; when it applies, and whether, does.
      by_units.agc_factor = 0.5;
      ASSERT_OK(ga_context_set_clip(ctx, &by_units));
      if (when == GA_CLIP_WHEN_STEP) {
        expect_failure(ga_context_set_clip(ctx, nullptr), "lies whole on one rank",
                       GA_ERROR_UNSUPPORTED);
      } else {
        ASSERT_OK(ga_context_set_clip(ctx, nullptr));
      }
    });
}

// A tensor whose units are rows, or whose state is by rows, is cut between rows: a rank never has more than the
// rows that do not divide evenly, and no rank has the whole.
TEST(RanksSharded, EachRankHasItsRows) {
  constexpr int64_t kColumns = 30000;
  for (const bool clipped : {true, false})
    for (const int64_t rows : {3, 10, 11})
      for (const int32_t ranks : {2, 3, 4}) {
        SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(ranks) + " ranks" +
                     (clipped ? ", clipped" : ""));
        on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
          std::vector<uint16_t> p(static_cast<size_t>(rows * kColumns));
          Context ctx;
          ga_ema ema;
          ASSERT_OK(ga_ema_init(&ema, sizeof ema));
          ASSERT_OK(ga_context_set_ema(ctx, &ema));
          ga_clip by_rows = clip(GA_CLIP_AGC, 0);
          by_rows.agc_units = GA_AGC_TORCH;
          if (clipped) {
            ASSERT_OK(ga_context_set_clip(ctx, &by_rows));
          }
          const int64_t shape[] = {rows, kColumns};
          const ga_group group =
              ctx.group(optimizer(clipped ? GA_OPTIMIZER_ADAMW : GA_OPTIMIZER_ROWWISE_ADAGRAD));
          ASSERT_OK(ga_param_add(ctx, group, "p", p.data(), GA_BF16, 2, shape, nullptr, nullptr));
          const ga_comm_options sharding = sharded();
          ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
          ASSERT_OK(ga_prepare(ctx));
          const int64_t most = (rows + ranks - 1) / ranks;
          const int64_t own = std::clamp<int64_t>(rows - r * most, 0, most);
          const ga_memory m = memory(ctx);
          const auto lines = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
          EXPECT_EQ(m.masters, lines(own * kColumns * 4));
          EXPECT_EQ(m.averages, lines(own * kColumns * 4));
          EXPECT_EQ(m.optimizer_state, clipped ? 2 * lines(own * kColumns * 4) : lines(own * 4));
        });
      }
}

// Gradients travel to where state is, and parameters back: no more than gradients and their sums do.
TEST(RanksSharded, BytesOfTensorsWithOwners) {
  constexpr size_t kTensors = 8;
  constexpr int64_t kCount = 300 * 300;
  for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_ADAFACTOR,
                             GA_OPTIMIZER_ROWWISE_ADAGRAD, GA_OPTIMIZER_LAMB, GA_OPTIMIZER_MUON}) {
    if (kind == GA_OPTIMIZER_MUON && !has_onednn()) continue;
    OneRank comm;
    Context ctx;
    std::vector<float> p(kTensors * kCount, 1), g(kCount, 1);
    const ga_group group = ctx.group(optimizer(kind));
    for (size_t i = 0; i < kTensors; ++i)
      ctx.param(group, "p" + std::to_string(i), &p[i * kCount], ref::Shape{300, 300});
    const ga_comm_options sharding = sharded();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
    for (int w = 0; w < 2; ++w) {
      comm.bytes = 0;
      ctx.accumulate(std::vector<const void*>(kTensors, g.data()));
      step(ctx);
    }
    EXPECT_LE(comm.bytes, 1.02 * 2 * 4 * kTensors * kCount) << kind;
    EXPECT_GE(comm.bytes, 2 * 4 * int64_t{kTensors} * kCount) << kind;
  }
}

// ---- State on disk -------------------------------------------------------------------------------

TEST(RanksSharded, FilesAreThoseOfWholeState) {
  const Folder folder;
  const Layout l = Layout::of({{7}, {140001}, {33, 5}, {331, 263}, {1}, {3, 4, 5}});
  const Block start = parameters(l, 3);
  const Shares shares = make_shares(l, 3, 6);
  enum { kAdamByRows = -1 };
  for (const int32_t kind :
       {int32_t{GA_OPTIMIZER_ADAM}, int32_t{GA_OPTIMIZER_LAMB}, int32_t{GA_OPTIMIZER_ADAFACTOR},
        int32_t{GA_OPTIMIZER_ROWWISE_ADAGRAD}, int32_t{kAdamByRows}}) {
    SCOPED_TRACE(kind);
    Options s;
    s.optimizer = optimizer(kind == kAdamByRows ? GA_OPTIMIZER_ADAM : kind);
    if (kind == kAdamByRows) {
      s.clip = clip(GA_CLIP_AGC, 0);
      s.clip.agc_units = GA_AGC_TORCH;
    }
    const std::vector<Ended> whole = run(l, s, shares, start);
    const auto part = [&](int32_t ranks, bool shard, size_t begin, size_t end,
                          const std::string& load, const std::string& save) {
      std::vector<Block> ended(static_cast<size_t>(ranks), start);
      on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
        Context ctx(s.config);
        build(ctx, l, s, ended[static_cast<size_t>(r)]);
        const ga_comm_options sharding = sharded(shard);
        ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
        if (!load.empty()) {
          ASSERT_OK(ga_load(ctx, (folder / load).c_str(), nullptr));
        }
        for (size_t w = begin; w < end; ++w) {
          for (size_t k = static_cast<size_t>(r); k < 3; k += static_cast<size_t>(ranks))
            contribute(ctx, l, shares[w][k]);
          step(ctx);
        }
        if (save.empty()) return;
        ASSERT_OK(ga_save(ctx, (folder / save).c_str(), nullptr));
        size_t size = 0;
        ASSERT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));
        std::string bytes(size, '\0');
        ASSERT_OK(ga_save_to_memory(ctx, nullptr, bytes.data(), size, &size));
        EXPECT_TRUE(bytes == contents(folder / save));
      });
      return ended;
    };
    part(3, false, 0, 3, "", "whole");
    part(3, true, 0, 3, "", "sharded");
    EXPECT_TRUE(contents(folder / "sharded") == contents(folder / "whole"));
    for (const bool shard : {false, true}) {
      EXPECT_TRUE(same_bits(part(3, shard, 3, 6, "sharded", "")[1], whole[0].parameters)) << shard;
      EXPECT_LT(distance(l, part(2, shard, 3, 6, "sharded", "")[1], whole[0].parameters), 1e-5);
    }
    // A load and a save that follow each other change nothing.
    part(2, true, 0, 0, "sharded", "again");
    EXPECT_TRUE(contents(folder / "again") == contents(folder / "sharded"));
  }
}

// Settings that a file brings divide nothing anew: clipping by units is set before, or not at all.
TEST(RanksSharded, FilesDivideNothingAnew) {
  const Folder folder;
  const ga_clip by_units = clip(GA_CLIP_AGC, 0);
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    const ga_comm_options sharding = sharded();
    const std::vector<float> g(90000, static_cast<float>(r + 1));
    ga_state_options take;
    ASSERT_OK(ga_state_options_init(&take, sizeof take));
    take.settings = GA_SETTINGS_TAKE;
    enum Part { kSaves, kRefuses, kLoads };
    for (const Part part : {kSaves, kRefuses, kLoads}) {
      std::vector<float> p(90000, 1);
      Context ctx;
      ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), 90000);
      if (part != kRefuses) {
        ASSERT_OK(ga_context_set_clip(ctx, &by_units));
      }
      ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
      const auto load = [&] { return ga_load(ctx, (folder / "state").c_str(), &take); };
      if (part == kRefuses)
        expect_failure(load(), "lies in parts on the ranks", GA_ERROR_UNSUPPORTED);
      if (part == kLoads) {
        ASSERT_OK(load());
      }
      ctx.accumulate({g.data()});
      EXPECT_EQ(step(ctx).steps, part == kLoads ? 2 : 1);
      if (part == kSaves) {
        ASSERT_OK(ga_save(ctx, (folder / "state").c_str(), nullptr));
      }
    }
  });
}

// The disk of rank 0 is full, or its program cancels, in the middle of what the ranks exchange.
TEST(RanksSharded, ASaveThatFailsIsThatOfAll) {
  const Folder folder;
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    std::vector<float> p(600000, 1), g(600000, 1);
    Context ctx;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), 600000);
    const ga_comm_options sharding = sharded();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
    ctx.accumulate({g.data()});
    step(ctx);
    ga_state_options o;
    ASSERT_OK(ga_state_options_init(&o, sizeof o));
    o.progress = [](void*, int64_t done, int64_t total) { return done > total / 2 ? 1 : 0; };
    if (r == 0)
      expect_failure(ga_save(ctx, (folder / "state").c_str(), &o), "cancelled", GA_ERROR_CANCELLED);
    else
      expect_failure(ga_save(ctx, (folder / "state").c_str(), nullptr), "rank 0 failed");
    EXPECT_FALSE(fs::exists(folder / "state"));
    if (r == 0)
      expect_failure(ga_save(ctx, (folder / "no/state").c_str(), nullptr), "no/state", GA_ERROR_IO);
    else
      expect_failure(ga_save(ctx, (folder / "state").c_str(), nullptr), "rank 0 failed");
    ASSERT_OK(ga_save(ctx, (folder / "state").c_str(), nullptr));
    ctx.accumulate({g.data()});
    EXPECT_EQ(step(ctx).steps, 2);
  });
}

TEST(RanksSharded, RankZeroHandsOut) {
  std::vector<std::vector<float>> ended(2);
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    std::vector<float>& p = ended[static_cast<size_t>(r)];
    p.assign(90000, static_cast<float>(r + 1));
    Context ctx;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), 90000);
    ga_comm_options o = sharded();
    o.hand_out = 1;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    EXPECT_EQ(p, std::vector<float>(90000, 1));
    const std::vector<float> g(90000, 1);
    ctx.accumulate({g.data()});
    EXPECT_EQ(step(ctx).steps, 1);
  });
  EXPECT_TRUE(same_bits(ended[0], ended[1]));
}

// ---- Changes while training ------------------------------------------------------------------------

TEST(RanksSharded, ParametersComeAndGo) {
  std::vector<std::vector<float>> ended;
  for (const bool shard : {false, true}) {
    std::vector<std::vector<float>> of_ranks(2);
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      std::vector<float>& all = of_ranks[static_cast<size_t>(r)];
      all.assign(400000, 1);
      std::vector<float> g(100000), elsewhere(100000, 3);
      for (size_t j = 0; j < g.size(); ++j) g[j] = static_cast<float>(j % 7) - 3;
      Context ctx;
      ga_param_options options;
      ASSERT_OK(ga_param_options_init(&options, sizeof options));
      options.accumulator_dtype = GA_BF16;
      const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_ADAM));
      const auto add = [&](const char* name, size_t at, int64_t count) {
        return ctx.param(group, name, all.data() + at, ref::Shape{count}, &options);
      };
      add("a", 0, 100000);
      add("b", 100000, 50);
      const ga_comm_options sharding = sharded(shard);
      ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
      const auto window = [&](std::vector<const void*> list) {
        ASSERT_OK(ga_accumulate(ctx, list.data(), list.size(), 1, nullptr));
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      };
      window({g.data(), g.data()});
      add("c", 200000, 100000);
      add("d", 300000, 33);
      window({g.data(), nullptr, g.data(), g.data()});
      ASSERT_OK(ga_param_set_frozen(ctx, 0, 1));
      window({nullptr, g.data(), g.data(), g.data()});
      ASSERT_OK(ga_param_set_frozen(ctx, 0, 0));
      ASSERT_OK(ga_param_remove(ctx, 1));
      window({g.data(), nullptr, g.data(), g.data()});
      ASSERT_OK(ga_state_reset(ctx, 2));
      ASSERT_OK(ga_param_bind(ctx, 0, elsewhere.data()));
      window({g.data(), nullptr, g.data(), nullptr});
      std::copy(elsewhere.begin(), elsewhere.end(), all.begin());
    });
    ended.insert(ended.end(), of_ranks.begin(), of_ranks.end());
  }
  for (size_t k = 1; k < ended.size(); ++k) EXPECT_TRUE(same_bits(ended[k], ended[0])) << k;
}

TEST(RanksSharded, StateIsSetByName) {
  on_ranks(2, [&](int32_t, ga_comm* comm) {
    std::vector<float> p(80000, 1), g(80000, 1), m(80000), back(80000);
    for (size_t j = 0; j < m.size(); ++j) m[j] = static_cast<float>(j);
    Context ctx;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), 80000);
    const ga_comm_options sharding = sharded();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
    ASSERT_OK(ga_state_set(ctx, 0, "exp_avg", m.data(), GA_F32, 80000));
    ASSERT_OK(ga_state_get(ctx, 0, "exp_avg", back.data(), GA_F32, 80000));
    EXPECT_EQ(back, m);
  });
}

TEST(RanksSharded, StateByRowsIsSetByName) {
  on_ranks(3, [&](int32_t, ga_comm* comm) {
    std::vector<float> p(401 * 300, 1), g(p.size(), 2), sums(401), back(401);
    for (size_t j = 0; j < sums.size(); ++j) sums[j] = static_cast<float>(j);
    Context ctx;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ROWWISE_ADAGRAD)), "p", p.data(),
              ref::Shape{401, 300});
    const ga_comm_options sharding = sharded();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
    ASSERT_OK(ga_state_set(ctx, 0, "sum", sums.data(), GA_F32, 401));
    ASSERT_OK(ga_state_get(ctx, 0, "sum", back.data(), GA_F32, 401));
    EXPECT_EQ(back, sums);
    ctx.accumulate({g.data()});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    ASSERT_OK(ga_state_get(ctx, 0, "sum", back.data(), GA_F32, 401));
    for (float& x : sums) x += 4;
    EXPECT_EQ(back, sums);
  });
}

// ---- What is refused ---------------------------------------------------------------------------------

TEST(RanksSharded, IsChosenBeforeThereAreArrays) {
  on_ranks(2, [&](int32_t, ga_comm* comm) {
    std::vector<float> p(80000, 1), g(80000, 1);
    Context ctx;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), 80000);
    ASSERT_OK(ga_prepare(ctx));
    const ga_comm_options sharding = sharded();
    expect_failure(ga_context_set_comm(ctx, comm, &sharding), "before", GA_ERROR_INVALID_STATE);
  });
  on_ranks(2, [&](int32_t, ga_comm* comm) {
    std::vector<float> p(80000, 1), g(80000, 1);
    Context ctx;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), 80000);
    const ga_comm_options sharding = sharded();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
    const ga_clip by_units = clip(GA_CLIP_AGC, 1);
    ASSERT_OK(ga_context_set_clip(ctx, &by_units));  // there are no arrays yet
    ASSERT_OK(ga_context_set_clip(ctx, nullptr));
    ctx.accumulate({g.data()});
    step(ctx);
    expect_failure(ga_context_set_clip(ctx, &by_units), "lies in parts on the ranks",
                   GA_ERROR_UNSUPPORTED);
    EXPECT_EQ(ga_context_set_comm(ctx, nullptr, nullptr), GA_ERROR_INVALID_STATE);
    ctx.accumulate({g.data()});
    EXPECT_EQ(step(ctx).steps, 2);
  });
  // Units that would be cut.
  on_ranks(2, [&](int32_t, ga_comm* comm) {
    std::vector<float> p(301 * 300, 1), g(p.size(), 1);
    Context ctx;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), ref::Shape{301, 300});
    const ga_comm_options sharding = sharded();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
    ga_clip by_rows = clip(GA_CLIP_AGC, 1);
    by_rows.agc_units = GA_AGC_TORCH;
    ctx.accumulate({g.data()});
    step(ctx);
    expect_failure(ga_context_set_clip(ctx, &by_rows), "it would lie in other parts",
                   GA_ERROR_UNSUPPORTED);
    ctx.accumulate({g.data()});
    EXPECT_EQ(step(ctx).steps, 2);
  });
}

TEST(RanksSharded, IsTheSameOnAllRanks) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    std::vector<float> p(80000, 1);
    Context ctx;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), 80000);
    const ga_comm_options sharding = sharded(r == 0);
    expect_failure(ga_context_set_comm(ctx, comm, &sharding),
                   "shard is 0 on rank 1, but 1 on rank 0");
    EXPECT_EQ(memory(ctx).optimizer_state, 2 * 4 * 80000);  // it is alone again
  });
}

TEST(RanksSharded, OtherArraysAreAnotherCall) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    std::vector<float> p(80000, 1), q(80000, 1), m(80000);
    Context ctx;
    const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_ADAM));
    ctx.param(group, "p", p.data(), 80000);
    ctx.param(group, "q", q.data(), 80000);
    const ga_comm_options sharding = sharded();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &sharding));
    expect_failure(ga_state_get(ctx, r, "exp_avg", m.data(), GA_F32, 80000), "another call");
    ASSERT_OK(ga_state_get(ctx, 0, "exp_avg", m.data(), GA_F32, 80000));
  });
}

}  // namespace
}  // namespace ga::test
