// SPDX-License-Identifier: Apache-2.0
//
// What all ranks share follows from what they share: the numbers that scale a window, the lists that ranks
// compare, and the bytes that they save. Values are computed here by hand.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <thread>

#include "ranks.hpp"

namespace ga::test {
namespace {

ga_param_options param_options(int32_t rows) {
  ga_param_options o;
  EXPECT_OK(ga_param_options_init(&o, sizeof o));
  o.rows = rows;
  return o;
}

std::vector<char> saved(ga_context* ctx) {
  size_t size = 0;
  EXPECT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));
  std::vector<char> file(size);
  EXPECT_OK(ga_save_to_memory(ctx, nullptr, file.data(), size, &size));
  return file;
}

// ---- The weight of a window ---------------------------------------------------------------------

class RanksShared : public testing::TestWithParam<int32_t> {};

// Weights 4 and 1 bring the means 0.8 and 0.16, of which 0.5 and 0.16 are left, whose norm becomes 0.1.
TEST_P(RanksShared, RowsAreClampedByTheMeanOfAllRanks) {
  const double norm = std::sqrt(0.5 * 0.5 + 0.16 * 0.16);
  const double factor = 0.1 / (norm + 1e-6);
  float parameters[2][2] = {};
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    ga_config c = config();
    c.nonfinite = GA_NONFINITE_DROP_MICRO;
    Context ctx(c);
    const ga_param_options o = param_options(GA_ROWS_DENSE);
    const ga_param p = ctx.param(ctx.group(plain_sgd()), "p", parameters[r], ref::Shape{2, 1}, &o);
    const ga_clip both = clip(GetParam(), 0.1, GA_FLAVOR_TORCH, 0.5);
    ASSERT_OK(ga_context_set_clip(ctx, &both));
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    const float gradient = r == 0 ? 1.0f : 0.8f;
    ASSERT_OK(ga_micro_begin(ctx, -1, r == 0 ? 4 : 1, nullptr));
    ASSERT_OK(ga_accumulate_rows(ctx, p, &r, GA_I32, 1, &gradient));
    ASSERT_OK(ga_micro_end(ctx));
    ASSERT_OK(ga_step(ctx, nullptr));
  });
  for (const auto& of_rank : parameters) {
    EXPECT_NEAR(of_rank[0], -0.5 * factor, 1e-7);   // -0.0952
    EXPECT_NEAR(of_rank[1], -0.16 * factor, 1e-7);  // -0.0305
  }
  EXPECT_EQ(memcmp(parameters[0], parameters[1], sizeof parameters[0]), 0);
}

INSTANTIATE_TEST_SUITE_P(Clips, RanksShared, testing::Values(GA_CLIP_GLOBAL, GA_CLIP_PER_TENSOR),
                         [](const auto& info) {
                           return info.param == GA_CLIP_GLOBAL ? "Global" : "PerTensor";
                         });

// ---- Arrays that one rank alone has made ----------------------------------------------------------

// Before its parameter "one" is frozen, rank 1 alone makes arrays, in a window that all ranks discard. Then
// f(rank, context) runs.
void with_arrays_on_one_rank(int32_t shard, int64_t check_every,
                             const std::function<void(int32_t, ga_context*)>& f) {
  float parameters[2][2][3] = {{{1, 2, 3}, {4, 5, 6}}, {{1, 2, 3}, {4, 5, 6}}};
  on_ranks(
      2,
      [&](int32_t r, ga_comm* comm) {
        Context ctx;
        ga_ema ema;
        ASSERT_OK(ga_ema_init(&ema, sizeof ema));
        ASSERT_OK(ga_context_set_ema(ctx, &ema));
        const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
        ctx.param(group, "zero", parameters[r][0], 3);
        ga_comm_options o = comm_options();
        o.shard = shard;
        o.check_every = check_every;
        ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
        const ga_param one = ctx.param(group, "one", parameters[r][1], 3);
        const float gradient[] = {1, 1, 1};
        if (r == 1) ctx.accumulate({gradient, gradient});
        ASSERT_OK(ga_discard(ctx));
        ASSERT_OK(ga_param_set_frozen(ctx, one, 1));
        f(r, ctx);
      },
      20);
  EXPECT_EQ(memcmp(parameters[0], parameters[1], sizeof parameters[0]), 0);
}

class RanksArrays : public testing::TestWithParam<int32_t> {};

TEST_P(RanksArrays, AreThereForWhatIsCompared) {
  with_arrays_on_one_rank(GetParam(), 1, [&](int32_t, ga_context* ctx) {
    const float gradient[] = {1, 2, 3};
    const void* const list[] = {gradient, nullptr};
    for (int k = 0; k < 2; ++k) {
      ASSERT_OK(ga_accumulate(ctx, list, 2, 1, nullptr));
      ASSERT_OK(ga_step(ctx, nullptr));
    }
    ASSERT_OK(ga_param_set_frozen(ctx, 1, 0));
    ASSERT_OK(ga_accumulate(ctx, list, 2, 1, nullptr));
    ASSERT_OK(ga_step(ctx, nullptr));
  });
}

TEST_P(RanksArrays, AreThereForWhatIsSaved) {
  std::vector<char> files[2];
  with_arrays_on_one_rank(GetParam(), 0, [&](int32_t r, ga_context* ctx) {
    files[r] = saved(ctx);
    ASSERT_OK(ga_load_from_memory(ctx, files[r].data(), files[r].size(), nullptr));
  });
  EXPECT_EQ(files[0], files[1]);
}

TEST_P(RanksArrays, AreThereForStateByName) {
  with_arrays_on_one_rank(GetParam(), 0, [&](int32_t, ga_context* ctx) {
    float state[3] = {9, 9, 9}, average[3] = {};
    ASSERT_OK(ga_step(ctx, nullptr));  // collective also where the optimizer is not sharded
    ASSERT_OK(ga_state_get(ctx, 0, "exp_avg", state, GA_F32, 3));
    EXPECT_EQ(state[0], 0);
    ASSERT_OK(ga_state_get(ctx, 1, "exp_avg", state, GA_F32, 3));
    EXPECT_EQ(state[0], 0);
    ASSERT_OK(ga_ema_copy_to(ctx, 1, average, GA_F32));
    EXPECT_EQ(average[0], 4);
  });
}

// The EMA of a frozen parameter begins with its arrays, in the same step on every rank.
TEST_P(RanksArrays, BeginTheAverageTogether) {
  float averages[2][3] = {};
  with_arrays_on_one_rank(GetParam(), 0, [&](int32_t r, ga_context* ctx) {
    const float gradient[] = {1, 2, 3};
    const void* const first[] = {gradient, nullptr};
    const void* const both[] = {gradient, gradient};
    ASSERT_OK(ga_accumulate(ctx, first, 2, 1, nullptr));
    ASSERT_OK(ga_step(ctx, nullptr));
    ASSERT_OK(ga_param_set_frozen(ctx, 1, 0));
    ASSERT_OK(ga_group_set_lr(ctx, 0, 1));
    ASSERT_OK(ga_accumulate(ctx, both, 2, 1, nullptr));
    ASSERT_OK(ga_step(ctx, nullptr));
    ASSERT_OK(ga_ema_copy_to(ctx, 1, averages[r], GA_F32));
  });
  EXPECT_EQ(memcmp(averages[0], averages[1], sizeof averages[0]), 0);
}

INSTANTIATE_TEST_SUITE_P(Shards, RanksArrays, testing::Values(GA_SHARD_NONE, GA_SHARD_OPTIMIZER),
                         [](const auto& info) {
                           return info.param == GA_SHARD_NONE ? "Whole" : "Sharded";
                         });

// ---- Parameters that ranks divide at different times ----------------------------------------------

// Rank 1 alone divides some parameters before others are added, as its first contribution needs. One of them is
// removed before rank 0 has divided it.
TEST_P(RanksArrays, AreDividedAlikeWhateverCameFirst) {
  const int64_t large = 70001;
  std::vector<std::vector<float>> of_ranks[2];
  on_ranks(
      2,
      [&](int32_t r, ga_comm* comm) {
        Context ctx;
        const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_ADAM));
        const ga_group factored = ctx.group(optimizer(GA_OPTIMIZER_ADAFACTOR));
        ga_comm_options o = comm_options();
        o.shard = GetParam();
        std::vector<std::vector<float>>& values = of_ranks[r];
        values.assign(9, std::vector<float>(large, 1));
        const std::vector<float> gradient(large, 1);
        std::vector<const void*> list;
        const auto add = [&](int64_t count, ga_group to) {
          const size_t k = list.size();
          ctx.param(to, "p" + std::to_string(k), values[k].data(), count);
          list.push_back(gradient.data());
        };
        add(3, group);
        ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
        for (int k = 0; k < 2; ++k) {
          add(large, group);
          add(5, group);
          add(large, factored);
          add(k == 0 ? 20000 : 7, factored);
          if (r == 1) ctx.accumulate(list);
          ASSERT_OK(ga_discard(ctx));
          if (k == 0) {
            ASSERT_OK(ga_param_remove(ctx, 2));
          }
          list[2] = nullptr;
        }
        ctx.accumulate(list);
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      },
      20);
  EXPECT_EQ(of_ranks[0], of_ranks[1]);
}

// ---- Files ----------------------------------------------------------------------------------------

// Rank 0's last micro-batch was dropped, rank 1's was not.
TEST(RanksFiles, HaveTheSameBytesAfterADroppedMicroBatch) {
  std::vector<char> files[2];
  float parameters[2][2] = {};
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    ga_config c = config();
    c.nonfinite = GA_NONFINITE_DROP_MICRO;
    Context ctx(c);
    ctx.param(ctx.group(plain_sgd()), "p", parameters[r], 2);
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    const float gradient[] = {1, r == 0 ? NAN : 1};
    ctx.accumulate({gradient});
    ASSERT_OK(ga_step(ctx, nullptr));
    files[r] = saved(ctx);
  });
  EXPECT_EQ(files[0], files[1]);
}

// A load makes arrays also for parameters that are frozen, if the file has state of them. If it fails then, since another
// rank has failed, they are no less frozen than before.
TEST(RanksFiles, AFailureOfAnotherRankLeavesParametersFrozen) {
  const auto make = [](ga_context* ctx, ga_group group, float* p) {
    const int64_t shape[] = {3};
    ga_param id = -1;
    for (const char* name : {"a", "b"})
      EXPECT_OK(
          ga_param_add(ctx, group, name, p + 3 * (name[0] - 'a'), GA_F32, 1, shape, nullptr, &id));
    return id;
  };
  ga_config c = config();
  c.missing = GA_MISSING_ZERO;
  const float gradient[] = {1, 2, 3};
  std::vector<char> file;
  {
    float p[6] = {1, 2, 3, 4, 5, 6};
    Context ctx(c);
    make(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), p);
    ctx.accumulate({gradient, gradient});
    ASSERT_OK(ga_step(ctx, nullptr));
    file = saved(ctx);
  }
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    float p[6] = {1, 2, 3, 4, 5, 6};
    Context ctx(c);
    const ga_param b = make(ctx, ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), p);
    ASSERT_OK(ga_param_set_frozen(ctx, b, 1));
    ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
    ga_state_options o;
    ASSERT_OK(ga_state_options_init(&o, sizeof o));
    o.settings = GA_SETTINGS_KEEP;
    EXPECT_NE(ga_load_from_memory(ctx, file.data(), r == 1 ? 9 : file.size(), &o), GA_OK);
    ctx.accumulate({gradient, gradient});
    ga_step_result result = {};
    result.struct_size = sizeof result;
    ASSERT_OK(ga_step(ctx, &result));
    EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
    EXPECT_NE(p[0], 1);
    for (int k = 3; k < 6; ++k) EXPECT_EQ(p[k], static_cast<float>(k + 1));
    int64_t step = -1;
    ASSERT_OK(ga_state_get(ctx, b, "step", &step, GA_I64, 1));
    EXPECT_EQ(step, 0);
  });
}

// ---- Ranks that leave ------------------------------------------------------------------------------

// A context with one parameter.
class Small {
 public:
  Small() { ctx_.param(ctx_.group(plain_sgd()), "p", &p_, 1); }
  operator ga_context*() const { return ctx_; }
  void join(ga_comm* comm) { ASSERT_OK(ga_context_set_comm(ctx_, comm, nullptr)); }

 private:
  float p_ = 1;
  Context ctx_;
};

// Runs body(rank, comm) on ranks that would wait ten minutes, and expects them to end within seconds.
void on_patient_ranks(int32_t ranks, const std::function<void(int32_t, ga_comm*)>& body) {
  const auto begin = std::chrono::steady_clock::now();
  on_ranks(ranks, body, 600);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST(RanksLeave, AContextThatIsDestroyedIsNotWaitedFor) {
  std::atomic<int> failed{0};
  on_patient_ranks(3, [&](int32_t r, ga_comm* comm) {
    auto ctx = std::make_unique<Small>();
    ctx->join(comm);
    step(*ctx);
    if (r == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the others wait by then
      ctx.reset();
      EXPECT_TRUE(comes_true([&] { return failed == 2; }));  // and its ga_comm lives on
      return;
    }
    expect_failure(ga_step(*ctx, nullptr),
                   "rank 1 has left: its context was destroyed or given another communicator");
    expect_failure(ga_step(*ctx, nullptr), "rank 1 has left");  // and so do later calls
    ++failed;
  });
}

TEST(RanksLeave, AContextThatGoesOnAloneIsNotWaitedFor) {
  std::atomic<bool> failed{false};
  on_patient_ranks(2, [&](int32_t r, ga_comm* comm) {
    Small ctx;
    ctx.join(comm);
    if (r == 1) {
      ASSERT_OK(ga_context_set_comm(ctx, nullptr, nullptr));
      step(ctx);
      EXPECT_TRUE(comes_true([&] { return failed.load(); }));
      return;
    }
    expect_failure(ga_step(ctx, nullptr), "rank 1 has left");
    failed = true;
  });
}

TEST(RanksLeave, ARankThatLeavesAltogetherIsNotWaitedFor) {
  // A communicator that all ranks have left by then would be another one.
  std::atomic<bool> joined{false};
  on_patient_ranks(2, [&](int32_t r, ga_comm* comm) {
    if (r == 1) {
      EXPECT_TRUE(comes_true([&] { return joined.load(); }));
      return;
    }
    joined = true;
    Small ctx;
    expect_failure(ga_context_set_comm(ctx, comm, nullptr),
                   "rank 1 has left: its ga_comm and its context were destroyed");
  });
}

TEST(RanksLeave, AnAbortNamesItsRank) {
  on_patient_ranks(2, [&](int32_t r, ga_comm* comm) {
    Small ctx;
    ctx.join(comm);
    if (r == 1) {
      EXPECT_OK(ga_comm_abort(comm));
      return;
    }
    expect_failure(ga_step(ctx, nullptr), "ga_comm_abort was called on rank 1");
  });
}

// Ranks that have no more to do leave one by one, and none of them fails.
TEST(RanksLeave, InAnyOrderAfterTheLastCall) {
  for (int round = 0; round < 50; ++round)
    on_patient_ranks(3, [&](int32_t r, ga_comm* comm) {
      Small ctx;
      ctx.join(comm);
      step(ctx);
      if (r == round % 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      ga_context_set_comm(ctx, nullptr, nullptr);
    });
}

// The next context over the same ga_comm is waited for, although the one before was destroyed.
TEST(RanksLeave, AContextMayFollowAnother) {
  for (int round = 0; round < 50; ++round)
    on_patient_ranks(3, [&](int32_t r, ga_comm* comm) {
      for (int k = 0; k < 4; ++k) {
        Small ctx;
        if ((r + k + round) % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        ctx.join(comm);
        step(ctx);
      }
    });
}

// A rank that joins late, or whose first attempt is refused before it has exchanged anything.
TEST(RanksLeave, AContextThatComesLateIsWaitedFor) {
  on_patient_ranks(2, [&](int32_t r, ga_comm* comm) {
    Small ctx;
    if (r == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      ga_comm_options adds = comm_options();
      adds.adder = GA_COMM_ADDER_TRANSPORT;
      EXPECT_EQ(ga_context_set_comm(ctx, comm, &adds), GA_ERROR_UNSUPPORTED);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    ctx.join(comm);
    step(ctx);
  });
}

}  // namespace
}  // namespace ga::test
