// SPDX-License-Identifier: Apache-2.0
//
// The end of a window in two steps (backend/decide.hpp). The sums of several ranks can be added,
// and the decision reads nothing of the gradients but these sums.
#include <functional>

#include "backend/cpu/thread_group.hpp"
#include "backend/decide.hpp"
#include "support.hpp"

namespace ga {
namespace {

using test::clip;
using test::optimizer;
using test::schedule;

constexpr int kParams = 4, kGroups = 2, kChunks = 2;

// The tables of one rank, which has a part of the chunks of every gradient.
struct Rank {
  Settings settings = {};
  Control control = {};
  GroupInput group_inputs[kGroups] = {};
  GroupState group_states[kGroups] = {};
  ParamInput param_inputs[kParams] = {};
  ParamState param_states[kParams] = {};
  ParamPlan plans[kParams] = {};
  Partial partials[kParams][kChunks] = {};
  RowEntry entries[1] = {};
  RowSet rows = {nullptr, entries, 0, 1};
  WindowTotals totals = {};
  cpu::ThreadGroup threads;

  Rank() {
    settings.reduce = GA_REDUCE_MEAN;
    settings.nonfinite = GA_NONFINITE_SKIP_STEP;
    settings.clips = settings.noise = settings.scaled = true;
    settings.noise_smoothing = 0.5;
    settings.bounded = -1;
    EXPECT_OK(ga_loss_scaler_init(&settings.scaler, sizeof settings.scaler));
    control.scaler.scale = 1024;
    for (GroupInput& g : group_inputs) {
      g.optimizer = optimizer(GA_OPTIMIZER_ADAMW);
      g.schedule = {schedule(GA_SCHEDULE_CONSTANT), nullptr};
      g.clip = clip(GA_CLIP_GLOBAL, 0.25);
    }
    group_inputs[1].own_clip = true;
    for (int i = 0; i < kParams; ++i) {
      ParamInput& p = param_inputs[i];
      p.partials = partials[i];
      p.rows = &rows;
      p.count = p.measured_count = kChunks * kChunk;
      p.weight = 1;
      p.group = i % kGroups;
      p.lazy = i == 3;
      p.op = optimizer_info(GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH)
                 .op(group_inputs[p.group].optimizer, true);
    }
    totals.ticket = 7;
    totals.noise_wanted = totals.last = true;
  }

  ScalarTables tables() {
    return {&settings,
            &control,
            group_inputs,
            group_states,
            param_inputs,
            param_states,
            plans,
            kGroups,
            kParams,
            nullptr,
            0};
  }

  // Gives this rank a chunk of a gradient. The numbers are sums of few powers of two, so their sum
  // is exact in any order.
  void hold(int param, int chunk, double squares, bool nonfinite = false) {
    param_inputs[param].held = Held::kStored;
    partials[param][chunk] = {squares, squares / 4, squares / 2, nonfinite};
  }
  void hold_rows(int param, double squares) {
    param_inputs[param].held = Held::kRows;
    entries[0].partial = {squares, squares / 4, squares / 2, 0};
    rows.size = 1;
  }
  void count(double weight, int64_t micro_batches, int64_t dropped) {
    totals.weight = control.weight = weight;
    totals.micro_batches = totals.weighted = control.weighted = micro_batches;
    control.window_dropped = dropped;
  }

  void sum() { sum_window(threads, tables(), totals); }

  // Overwrites everything that the decision must not read.
  void forget_gradients() {
    for (auto& chunks : partials)
      for (Partial& p : chunks) p = {NAN, NAN, NAN, 1};
    for (ParamInput& p : param_inputs) {
      p.partials = nullptr;
      p.rows = nullptr;
      p.held = static_cast<Held>(99);
    }
    for (ParamState& s : param_states) s.contributed = 99;
    control.weight = NAN;
    control.weighted = control.window_dropped = 99;
    totals = {};
  }
};

template <class Sums>
void add(Sums& to, const Sums& other) {
  static_assert(sizeof(Sums) % sizeof(double) == 0);
  double x[sizeof(Sums) / sizeof(double)], y[sizeof(Sums) / sizeof(double)];
  std::memcpy(x, &to, sizeof x);
  std::memcpy(y, &other, sizeof y);
  for (size_t k = 0; k < std::size(x); ++k) x[k] += y[k];
  std::memcpy(static_cast<void*>(&to), x, sizeof x);
}

// Adds up the sums of two ranks, as a communicator will do between the two steps.
void all_reduce(Rank& a, Rank& b) {
  add(a.control.sums, b.control.sums);
  b.control.sums = a.control.sums;
  for (int i = 0; i < kParams; ++i) {
    add(a.param_states[i].sums, b.param_states[i].sums);
    b.param_states[i].sums = a.param_states[i].sums;
  }
}

template <class T>
bool same(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

void expect_same(const Rank& rank, const Rank& whole) {
  const Control &c = rank.control, &expected = whole.control;
  EXPECT_EQ(c.result.outcome, expected.result.outcome);
  EXPECT_EQ(c.result.norm, expected.result.norm);
  EXPECT_EQ(c.result.weight, expected.result.weight);
  EXPECT_EQ(c.result.clip_factor, expected.result.clip_factor);
  EXPECT_TRUE(same(c.result, expected.result));
  EXPECT_TRUE(same(c.totals, expected.totals));
  EXPECT_TRUE(same(c.noise, expected.noise));
  EXPECT_TRUE(same(c.scaler, expected.scaler));
  EXPECT_EQ(c.go, expected.go);
  EXPECT_EQ(c.nonfinite_at, expected.nonfinite_at);
  for (int k = 0; k < kGroups; ++k)
    EXPECT_TRUE(same(rank.group_states[k], whole.group_states[k])) << "group " << k;
  for (int i = 0; i < kParams; ++i) {
    const ParamState &s = rank.param_states[i], &of_whole = whole.param_states[i];
    EXPECT_EQ(s.touched, of_whole.touched) << "parameter " << i;
    EXPECT_EQ(s.sum_squares, of_whole.sum_squares) << "parameter " << i;
    EXPECT_EQ(s.factor, of_whole.factor) << "parameter " << i;
    EXPECT_TRUE(same(s.clock, of_whole.clock)) << "parameter " << i;
    EXPECT_TRUE(same(rank.plans[i], whole.plans[i])) << "parameter " << i;
  }
}

// Two ranks that each have a part of every gradient, compared with one rank that has all of them.
class Ranks : public testing::Test {
 protected:
  Rank first, second, whole;

  void each(const std::function<void(Rank&)>& f) {
    for (Rank* rank : {&first, &second, &whole}) f(*rank);
  }
  void on(Rank& one, const std::function<void(Rank&)>& f) {
    f(one);
    f(whole);
  }

  Ranks() {
    on(first, [](Rank& r) { r.hold(0, 0, 3); });
    on(second, [](Rank& r) { r.hold(0, 1, 5); });
    on(second, [](Rank& r) { r.hold(1, 1, 0.75); });
    on(first, [](Rank& r) { r.hold_rows(3, 1.5); });
    first.count(3, 2, 0);
    second.count(5, 1, 1);
    whole.count(8, 3, 1);
  }

  void decide() {
    each([](Rank& r) { r.sum(); });
    all_reduce(first, second);
    each([](Rank& r) {
      r.forget_gradients();
      decide_window(r.threads, r.tables(), true);
    });
    expect_same(first, whole);
    expect_same(second, whole);
  }
};

TEST_F(Ranks, AppliedStep) {
  decide();
  EXPECT_EQ(whole.control.result.outcome, GA_STEP_APPLIED);
  EXPECT_EQ(whole.control.result.norm, std::sqrt(8 + 0.75 + 1.5) / 8);
  EXPECT_EQ(whole.control.result.micro_batches, 3);
  EXPECT_EQ(whole.control.result.window_dropped, 1);
  EXPECT_LT(whole.control.result.clip_factor, 1);
  EXPECT_EQ(whole.plans[0].actions, kUpdate);
  EXPECT_EQ(whole.plans[1].actions, kUpdate);
  EXPECT_EQ(whole.plans[2].actions, 0);
  EXPECT_EQ(whole.plans[3].actions, kUpdateRows);
}

TEST_F(Ranks, RowsOnOneRankAlone) {
  on(second, [](Rank& r) { r.hold(3, 1, 0.5); });
  whole.hold(3, 0, 1.5);
  decide();
  EXPECT_EQ(second.plans[3].actions, kUpdate);
}

TEST_F(Ranks, MissingGradientsAreZeros) {
  each([](Rank& r) { r.settings.missing = GA_MISSING_ZERO; });
  decide();
  EXPECT_EQ(first.plans[2].actions, kUpdate);
}

TEST_F(Ranks, NonfiniteOnOneRank) {
  on(second, [](Rank& r) { r.hold(1, 1, INFINITY, true); });
  decide();
  EXPECT_EQ(first.control.result.outcome, GA_STEP_SKIPPED_NONFINITE);
  EXPECT_EQ(first.control.nonfinite_at, 1);
  EXPECT_EQ(first.control.scaler.scale, 512);
}

TEST_F(Ranks, RejectedOnEveryRank) {
  each([](Rank& r) { r.settings.nonfinite = GA_NONFINITE_FAIL; });
  on(second, [](Rank& r) { r.hold(0, 1, INFINITY, true); });
  decide();
  EXPECT_TRUE(first.control.rejected);
  EXPECT_EQ(first.control.windows, 0);
}

TEST_F(Ranks, FailedOnOneRank) {
  on(first, [](Rank& r) { r.control.failed = true; });
  decide();
  EXPECT_EQ(second.control.result.outcome, GA_STEP_SKIPPED_ERROR);
}

TEST_F(Ranks, NoWeightOnOneRank) {
  first.count(0, 2, 0);
  first.totals.weighted = 0;
  whole.count(5, 3, 1);
  whole.totals.weighted = 1;
  decide();
  EXPECT_EQ(first.control.result.outcome, GA_STEP_APPLIED);
}

TEST_F(Ranks, NoEstimateOnOneRank) {
  on(second, [](Rank& r) { r.totals.noise_wanted = false; });
  decide();
  EXPECT_EQ(first.control.noise.weight_sum, 0);
}

TEST_F(Ranks, ClippedPerTensor) {
  each([](Rank& r) { r.group_inputs[0].clip = clip(GA_CLIP_PER_TENSOR, 0.25); });
  decide();
  EXPECT_LT(first.param_states[0].factor, 1);
}

TEST_F(Ranks, ClippedByValue) {
  each([](Rank& r) {
    r.group_inputs[0].clip = clip(GA_CLIP_GLOBAL, 0.25, GA_FLAVOR_TORCH, 0.5);
    r.param_inputs[0].clamped = true;
  });
  decide();
  EXPECT_EQ(first.param_states[0].sum_squares, 2);
}

TEST_F(Ranks, GroupsThatShareABound) {
  each([](Rank& r) {
    r.settings.bounded = GA_OPTIMIZER_ADAMW;
    r.group_inputs[1].optimizer.max_grad_norm = 0.125;
  });
  decide();
  EXPECT_LT(first.param_states[1].factor, first.param_states[0].factor);
}

// Under GA_NONFINITE_DROP_MICRO, micro-batches are checked before they are added. The weight and
// the counts of those that were added are then in the rank's Control and ParamState.
TEST_F(Ranks, DeferredMicroBatches) {
  each([](Rank& r) { r.settings.deferring = true; });
  on(first, [](Rank& r) { r.param_states[0].contributed = r.param_states[3].contributed = 1; });
  second.param_states[0].contributed = 1;
  each([](Rank& r) { r.totals.weight = NAN; });
  decide();
  EXPECT_EQ(first.control.result.weight, 8);
  EXPECT_EQ(first.plans[1].actions, 0);  // its only contribution was dropped
}

// The two norms that the first pass of a layer-wise Op computes.
TEST_F(Ranks, NormsOfALayer) {
  each([](Rank& r) {
    for (GroupInput& g : r.group_inputs) g.optimizer = optimizer(GA_OPTIMIZER_LAMB);
    for (ParamInput& p : r.param_inputs)
      p.op =
          optimizer_info(GA_OPTIMIZER_LAMB, GA_FLAVOR_TORCH).op(r.group_inputs[0].optimizer, true);
  });
  decide();
  const ga_param layer = 0;
  UpdateTask measure = {};
  const auto sum = [&](Rank& r, double x, double y) {
    r.partials[0][0] = {x, 4 * x, 0, 0};
    r.partials[0][1] = {y, 4 * y, 0, 0};
    measure.partials = r.partials[0];
    measure.count = r.param_inputs[0].count;
    sum_layers(r.threads, r.tables(), &measure, &layer, 1);
  };
  sum(first, 3, 0);
  sum(second, 0, 6);
  sum(whole, 3, 6);
  for (int k = 0; k < 2; ++k) {
    first.param_states[0].norm_squares[k] += second.param_states[0].norm_squares[k];
    second.param_states[0].norm_squares[k] = first.param_states[0].norm_squares[k];
  }
  each([&](Rank& r) {
    r.forget_gradients();
    fold_layers(r.threads, r.tables(), &layer, 1);
  });
  EXPECT_EQ(whole.plans[0].orthogonal_scale, 1.0 / 3);
  expect_same(first, whole);
  expect_same(second, whole);
}

// ---- Plans taken from a neighbour -----------------------------------------------------------------

// Plans every parameter by itself.
struct Anew : cpu::ThreadGroup {
  bool recall(const ScalarTables&, int64_t) { return false; }
};

// Two steps, with a threads each, of four parameters of one group, of which change() makes the second differ.
template <class ThreadGroup>
std::unique_ptr<Rank> two_steps(const std::function<void(Rank&)>& change) {
  auto rank = std::make_unique<Rank>();
  Rank& r = *rank;
  r.settings.noise = r.settings.scaled = false;
  r.group_inputs[1].own_clip = false;
  r.group_inputs[1].optimizer.lr = 0.5;
  for (int i = 0; i < kParams; ++i) {
    ParamInput& p = r.param_inputs[i];
    p.group = 0;
    p.lazy = false;
    p.lr_scale = p.weight_decay_scale = 1;
    r.param_states[i].held_weight = 2;
    r.param_states[i].contributed = 1;
    r.hold(i, 0, i == 1 ? 3 : 2);
  }
  r.count(8, 3, 0);
  change(r);
  for (int step = 0; step < 2; ++step) {
    ThreadGroup threads;
    for (ParamState& s : r.param_states) s.contributed = 1;
    r.control.weight = 8;
    sum_window(threads, r.tables(), r.totals);
    decide_window(threads, r.tables(), true);
    EXPECT_TRUE(r.control.go);
  }
  return rank;
}

TEST(Plans, NeighboursDifferInAnything) {
  const auto op_of = [](int32_t kind) {
    return optimizer_info(kind, GA_FLAVOR_TORCH).op(optimizer(kind), true);
  };
  const std::pair<const char*, std::function<void(Rank&)>> changes[] = {
      {"group", [](Rank& r) { r.param_inputs[1].group = 1; }},
      {"op", [&](Rank& r) { r.param_inputs[1].op = op_of(GA_OPTIMIZER_LION); }},
      {"f64", [](Rank& r) { r.param_inputs[1].f64 = true; }},
      {"by_units", [](Rank& r) { r.param_inputs[1].by_units = true; }},
      {"lr_scale", [](Rank& r) { r.param_inputs[1].lr_scale = 0.5; }},
      {"weight_decay_scale", [](Rank& r) { r.param_inputs[1].weight_decay_scale = 0.5; }},
      {"weight", [](Rank& r) { r.param_inputs[1].weight = 0.5; }},
      {"held_weight",
       [](Rank& r) {
         r.settings.deferring = r.settings.running_mean = true;
         r.param_states[1].held_weight = 0.5;
       }},
      {"factor", [](Rank& r) { r.group_inputs[0].clip = clip(GA_CLIP_PER_TENSOR, 0.125); }},
      {"step", [](Rank& r) { r.param_states[1].clock.step = 5; }},
      {"product",
       [&](Rank& r) {
         r.group_inputs[0].optimizer = optimizer(GA_OPTIMIZER_NADAM);
         for (ParamInput& p : r.param_inputs) p.op = op_of(GA_OPTIMIZER_NADAM);
         for (ParamState& s : r.param_states) s.clock = {3, {0.75}};
         r.param_states[1].clock.numbers[0] = 0.5;
       }},
      {"shape, in a layer-wise Op",
       [&](Rank& r) {
         r.group_inputs[0].optimizer = optimizer(GA_OPTIMIZER_MUON);
         for (ParamInput& p : r.param_inputs)
           p.op = op_of(GA_OPTIMIZER_MUON), p.outputs = p.inputs = 1024;
         r.param_inputs[1].outputs = 4096;
       }},
      {"maximum",
       [](Rank& r) {
         r.group_inputs[0].optimizer = optimizer(GA_OPTIMIZER_EXTERNAL);
         for (ParamInput& p : r.param_inputs) p.op = -1;
         r.param_inputs[1].reduction = Reduction::kMaximum;
       }},
  };
  for (const auto& [what, change] : changes) {
    SCOPED_TRACE(what);
    const auto taken = two_steps<cpu::ThreadGroup>(change), anew = two_steps<Anew>(change);
    for (int i = 0; i < kParams; ++i) {
      EXPECT_TRUE(same(taken->plans[i], anew->plans[i])) << "parameter " << i;
      EXPECT_TRUE(same(taken->param_states[i].clock, anew->param_states[i].clock));
    }
    EXPECT_FALSE(same(anew->plans[1], anew->plans[0]));
    EXPECT_TRUE(same(anew->plans[3], anew->plans[2]));
  }
}

}  // namespace
}  // namespace ga
