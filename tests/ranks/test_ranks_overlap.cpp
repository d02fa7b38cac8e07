// SPDX-License-Identifier: Apache-2.0
//
// ga_params_ready and gradients that are exchanged in the background. That the bits are those of ga_step
// alone, for every optimizer and every way to accumulate, test_ranks.cpp says.
#include <atomic>
#include <chrono>

#include "files.hpp"
#include "ranks.hpp"

namespace ga::test {

using namespace over_ranks;

namespace {

ga_comm_options overlapped() {
  ga_comm_options o = comm_options();
  o.overlap = 1;
  return o;
}

// Two parameters of 140000 elements, which travel in a slice each, and their gradients.
struct Pair {
  std::vector<float> p = std::vector<float>(140000, 1), q = p;
  std::vector<float> g = std::vector<float>(140000, 0.5f);

  void add_to(Context& ctx) {
    const ga_group group = ctx.group(plain_sgd());
    ctx.param(group, "p", p.data(), 140000);
    ctx.param(group, "q", q.data(), 140000);
  }
  void part(ga_context* ctx, ga_param id) const {
    ASSERT_OK(ga_accumulate_part(ctx, id, g.data()));
  }
  static void ready(ga_context* ctx, ga_param id) { ASSERT_OK(ga_params_ready(ctx, &id, 1)); }
};

TEST(RanksOverlap, WhatIsReadyTravelsBeforeTheStep) {
  OneRank comm;
  Pair pair;
  Context ctx;
  pair.add_to(ctx);
  const ga_comm_options o = overlapped();
  ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
  step(ctx);  // of an empty window: the first one tells how many parameters there are
  for (int w = 0; w < 3; ++w) {
    const int begin = comm.calls;
    ASSERT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
    pair.part(ctx, 0);
    ASSERT_OK(ga_micro_end(ctx));
    ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
    pair.part(ctx, 1);
    EXPECT_EQ(comm.calls, begin);
    pair.ready(ctx,
               1);  // the newer parameter travels first: the agreement, and two calls for a slice
    EXPECT_TRUE(comes_true([&] { return comm.calls == begin + 3; })) << comm.calls;
    EXPECT_NE(comm.thread.load(), std::this_thread::get_id());
    pair.part(ctx, 0);
    ASSERT_OK(ga_micro_end(ctx));
    EXPECT_EQ(comm.calls, begin + 3);
    const ga_step_result r = step(ctx);
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    EXPECT_EQ(r.weight, 2);
    EXPECT_EQ(comm.calls, begin + 3 + 2 + 2);  // the other slice, and the two small ones of a step
  }
  EXPECT_EQ(pair.p[5], 1 - 3 * 0.5f);
  EXPECT_EQ(pair.q[5], 1 - 3 * 0.25f);
}

TEST(RanksOverlap, NothingTravelsBeforeTheLastMicroBatch) {
  OneRank comm;
  Pair pair;
  ga_config c = config();
  c.accum_steps = 2;
  Context ctx(c);
  pair.add_to(ctx);
  const ga_comm_options o = overlapped();
  ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
  const int begin = comm.calls;
  ASSERT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
  pair.part(ctx, 1);
  pair.ready(ctx, 1);
  pair.part(ctx, 0);
  ASSERT_OK(ga_micro_end(ctx));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(comm.calls, begin);
  ASSERT_OK(ga_micro_begin(ctx, -1, 1, nullptr));  // the K-th
  EXPECT_TRUE(comes_true([&] { return comm.calls == begin + 3; }));
  ASSERT_OK(ga_micro_end(ctx));
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(pair.q[5], 1 - 0.25f);
}

TEST(RanksOverlap, NothingMoreComesToWhatIsReady) {
  for (const bool overlap : {false, true}) {
    SCOPED_TRACE(overlap);
    OneRank comm;
    Pair pair;
    Context ctx;
    pair.add_to(ctx);
    const ga_comm_options o = overlap ? overlapped() : comm_options();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
    pair.part(ctx, 0);
    pair.part(ctx, 1);
    ga_accumulator a;
    ASSERT_OK(ga_accumulator_init(&a, sizeof a));
    ASSERT_OK(ga_accumulator_acquire(ctx, 0, &a));
    const ga_param both[] = {1, 0};
    expect_failure(ga_params_ready(ctx, both, 2), "acquired", GA_ERROR_INVALID_STATE);
    ASSERT_OK(ga_accumulator_release(ctx, 0));
    const ga_param unknown[] = {1, 2};
    EXPECT_EQ(ga_params_ready(ctx, unknown, 2), GA_ERROR_INVALID_ARGUMENT);
    pair.part(ctx, 1);  // which neither call has made ready
    ASSERT_OK(ga_params_ready(ctx, nullptr, 0));
    EXPECT_EQ(ga_params_ready(ctx, nullptr, 1), GA_ERROR_INVALID_ARGUMENT);
    pair.ready(ctx, 1);
    pair.ready(ctx, 1);  // again
    const char* const late = "parameter \"q\": it has got a contribution after ga_params_ready";
    expect_failure(ga_accumulate_part(ctx, 1, pair.g.data()), late, GA_ERROR_INVALID_STATE);
    expect_failure(ga_accumulator_acquire(ctx, 1, &a), late, GA_ERROR_INVALID_STATE);
    if (overlap) {
      expect_failure(ga_save(ctx, "state", nullptr), "being exchanged", GA_ERROR_INVALID_STATE);
      EXPECT_EQ(ga_micro_abort(ctx), GA_ERROR_INVALID_STATE);
    }
    ASSERT_OK(ga_micro_end(ctx));
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(pair.q[7], 1 - 2 * 0.5f);
    ctx.accumulate({pair.g.data(), pair.g.data()});  // a window later it is legal again
    EXPECT_EQ(step(ctx).steps, 2);
  }
}

TEST(RanksOverlap, WholeMicroBatchesAreRefusedToo) {
  Pair pair;
  Context ctx;
  pair.add_to(ctx);
  ctx.accumulate({pair.g.data(), pair.g.data()});
  pair.ready(ctx, 1);
  const void* const list[] = {pair.g.data(), pair.g.data()};
  expect_failure(ga_accumulate(ctx, list, 2, 1, nullptr), "\"q\"", GA_ERROR_INVALID_STATE);
  ctx.accumulate({pair.g.data(), nullptr});
  const ga_step_result r = step(ctx);
  EXPECT_EQ(r.micro_batches, 2);
  EXPECT_EQ(pair.q[0], 1 - 0.25f);
}

// A call for what is ready is legal if it brings nothing: in a micro-batch of weight 0, or to a frozen
// parameter.
TEST(RanksOverlap, WhatBringsNothingIsNotRefused) {
  for (const bool overlap : {false, true}) {
    SCOPED_TRACE(overlap);
    OneRank comm;
    Pair pair;
    Context ctx;
    pair.add_to(ctx);
    const ga_comm_options o = overlap ? overlapped() : comm_options();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    ASSERT_OK(ga_param_set_frozen(ctx, 0, 1));
    const auto bring = [&](ga_param id) {
      pair.part(ctx, id);
      ga_accumulator a;
      ASSERT_OK(ga_accumulator_init(&a, sizeof a));
      ASSERT_OK(ga_accumulator_acquire(ctx, id, &a));
      EXPECT_EQ(a.data, nullptr);
      ASSERT_OK(ga_accumulator_release(ctx, id));
    };
    const void* const list[] = {pair.g.data(), pair.g.data()};
    ctx.accumulate({pair.g.data(), pair.g.data()});
    pair.ready(ctx, 0);
    pair.ready(ctx, 1);
    ASSERT_OK(ga_accumulate(ctx, list, 2, 0, nullptr));
    ASSERT_OK(ga_micro_begin(ctx, -1, 0, nullptr));
    bring(0);
    bring(1);
    ASSERT_OK(ga_micro_end(ctx));
    ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
    bring(0);
    expect_failure(ga_accumulate_part(ctx, 1, pair.g.data()), "\"q\"", GA_ERROR_INVALID_STATE);
    ASSERT_OK(ga_micro_end(ctx));
    EXPECT_EQ(step(ctx).weight, 2);
    EXPECT_EQ(pair.q[5], 1 - 0.25f);
    EXPECT_EQ(pair.p[5], 1);
  }
}

TEST(RanksOverlap, WhereOneDiscardsNoneSteps) {
  on_ranks(3, [&](int32_t r, ga_comm* comm) {
    Pair pair;
    Context ctx;
    pair.add_to(ctx);
    const ga_comm_options o = overlapped();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    for (int w = 0; w < 3; ++w) {
      ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
      pair.part(ctx, 1);
      if (r != 2) pair.ready(ctx, 1);
      pair.part(ctx, 0);
      ASSERT_OK(ga_micro_end(ctx));
      if (w == 1 && r == 1) {
        ASSERT_OK(ga_discard(ctx));
      } else {
        EXPECT_EQ(step(ctx).outcome, w == 1 ? GA_STEP_SKIPPED_DISCARD : GA_STEP_APPLIED);
      }
      EXPECT_EQ(window(ctx).state, GA_WINDOW_EMPTY);
    }
    EXPECT_EQ(pair.p, std::vector<float>(140000, 0));
    EXPECT_EQ(window(ctx).steps, 2);
  });
}

// Ranks that would cut other slices find it out before anything moves.
TEST(RanksOverlap, AFrozenParameterIsNamed) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Pair pair;
    Context ctx;
    pair.add_to(ctx);
    const ga_comm_options o = overlapped();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    if (r == 1) {
      ASSERT_OK(ga_param_set_frozen(ctx, 0, 1));
    }
    ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
    pair.part(ctx, 1);
    pair.ready(ctx, 1);
    ASSERT_OK(ga_micro_end(ctx));
    expect_failure(ga_step(ctx, nullptr),
                   "\"parameter.p\", frozen is 1 on rank 1, but 0 on rank 0");
    EXPECT_EQ(window(ctx).state, GA_WINDOW_FULL);
    EXPECT_EQ(pair.q, std::vector<float>(140000, 1));
  });
}

TEST(RanksOverlap, AFailureComesOutOfTheStep) {
  for (int at = 0; at < 3; ++at) {
    SCOPED_TRACE(at);
    OneRank comm;
    Pair pair;
    Context ctx;
    pair.add_to(ctx);
    const ga_comm_options o = overlapped();
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
    pair.part(ctx, 1);
    comm.fail_at = comm.calls + at;
    pair.ready(ctx, 1);
    pair.part(ctx, 0);
    ASSERT_OK(ga_micro_end(ctx));
    expect_failure(ga_step(ctx, nullptr), "the cable is out (42)");
    EXPECT_EQ(window(ctx).state, at == 0 ? GA_WINDOW_FULL : GA_WINDOW_INVALID);
    EXPECT_EQ(pair.q, std::vector<float>(140000, 1));
    ASSERT_OK(ga_discard(ctx));
    ASSERT_OK(ga_context_set_comm(ctx, nullptr, nullptr));
    ctx.accumulate({pair.g.data(), pair.g.data()});
    EXPECT_EQ(step(ctx).steps, 1);
  }
}

// It would make another micro-batch the last one.
TEST(RanksOverlap, TheLastMicroBatchStaysOnceItsGradientsTravel) {
  OneRank comm;
  Pair pair;
  Context ctx;
  pair.add_to(ctx);
  const ga_comm_options o = overlapped();
  ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
  ctx.accumulate({pair.g.data(), pair.g.data()});
  ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
  ASSERT_OK(ga_micro_abort(ctx));
  ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
  pair.ready(ctx, 1);
  EXPECT_EQ(ga_micro_abort(ctx), GA_ERROR_INVALID_STATE);
  ASSERT_OK(ga_micro_end(ctx));
  EXPECT_EQ(step(ctx).micro_batches, 2);
}

// Destroyed while the other rank has not come: nobody waits for it.
TEST(RanksOverlap, AContextEndsWhileItExchanges) {
  std::atomic<bool> gone{false};
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Pair pair;
    {
      Context ctx;
      pair.add_to(ctx);
      const ga_comm_options o = overlapped();
      ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
      ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
      pair.part(ctx, 1);
      if (r == 0) pair.ready(ctx, 1);
      if (r == 1) {
        EXPECT_TRUE(comes_true([&] { return gone.load(); }));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(r == 0 ? 20 : 0));  // it is in a call
    }
    gone = gone || r == 0;
  });
}

// Large enough for several slices, so that other tensors would change where they are cut.
TEST(RanksOverlap, NormsDoNotDependOnWhatElseTravels) {
  const Layout l = Layout::of({{3000021}, {70000}, {9}});
  Options s;
  s.optimizer = plain_sgd(0.01);
  s.config.accumulation = GA_ACCUMULATE_RUNNING_MEAN;  // so that everything is packed, in f32
  Shares shares(6);  // for a norm in double may have the same bits by chance
  Random random(7);
  for (auto& window : shares)
    for (int r = 0; r < 2; ++r) {
      Block g = parameters(l, 3);
      for (float& x : g) x = static_cast<float>(random.signed_unit());
      window.push_back({{g, 1, {1, 2}}});
    }
  const Block start = parameters(l, 3);
  const std::vector<Ended> ended = run(l, s, shares, start);
  s.options.overlap = 1;
  expect_alike(ended, run(l, s, shares, start));
}

// ---- A transport that adds ---------------------------------------------------------------------------

TEST(RanksAdder, TheTableAdds) {
  for (const bool shard : {false, true}) {
    OneRank comm(OneRank::kAdds);
    const Layout l = Layout::of({{140001}, {7}, {33, 5}});
    const Block start = parameters(l, 3);
    Block alone = start, block = start;
    ga_step_result results[2];
    for (const bool over_ranks : {false, true}) {
      Context ctx;
      add_all(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), l, over_ranks ? block : alone);
      const ga_clip c = clip(GA_CLIP_GLOBAL, 3, GA_FLAVOR_KERAS, 0.05);
      ASSERT_OK(ga_context_set_clip(ctx, &c));
      ga_comm_options o = comm_options();
      o.adder = GA_COMM_ADDER_TRANSPORT;
      o.shard = shard ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
      if (over_ranks) {
        ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
      }
      for (uint64_t w = 0; w < 3; ++w) {
        const Block g = gradients(l, 9, w);
        ctx.accumulate(pointers(l, g), 2);
        results[over_ranks] = step(ctx);
      }
    }
    EXPECT_TRUE(same_bits(block, alone)) << shard;
    EXPECT_NEAR(results[1].norm, results[0].norm, 1e-7 * results[0].norm);
    EXPECT_NEAR(results[1].clip_factor, results[0].clip_factor, 1e-7);
    EXPECT_EQ(comm.added, shard ? 3 : 3 * 2);  // one packed slice; the large one as it lies
  }
}

TEST(RanksAdder, WhoAddsNothingIsRefused) {
  on_ranks(2, [&](int32_t, ga_comm* comm) {
    Context ctx;
    ga_comm_options o = comm_options();
    o.adder = GA_COMM_ADDER_TRANSPORT;
    expect_failure(ga_context_set_comm(ctx, comm, &o), "adds nothing up", GA_ERROR_UNSUPPORTED);
  });
}

}  // namespace
}  // namespace ga::test
