// SPDX-License-Identifier: Apache-2.0
//
// Updates ahead of ga_step (ga_config.eager) on ranks with parameters of their own.
#include <algorithm>
#include <cstdlib>
#include <tuple>

#include "own_parameters.hpp"

namespace ga::test {
namespace {

// So few that the norm clips nothing, unless it is said.
Options unclipped() {
  Options o;
  o.max_norm = 1e6;
  return o;
}
Options eager(Options o, int32_t threads) {
  o.by_parts = true;
  o.config.eager = 1;
  o.config.eager_threads = threads;
  return o;
}

int64_t parameters_of(int32_t rank, int32_t ranks) {
  int64_t count = 0;
  for (const Whole& w : kModel)
    count += w.is_at(rank, ranks) && count_of(w.box(rank, ranks).shape) > 0;
  return count;
}

using Training = std::tuple<double, ga_optimizer_kind>;  // max_norm, and an optimizer

class OwnEagerTraining : public testing::TestWithParam<Training> {};

// The bits of ga_step alone, with as many threads as there may be: clipped or not, for each optimizer that others
// treat in another way, in windows of which one has a NaN.
TEST_P(OwnEagerTraining, HasTheBitsOfOneUpdateAtTheEnd) {
  const auto [max_norm, kind] = GetParam();
  for (const int32_t ranks : {1, 2, 4}) {
    Options o = unclipped();
    o.max_norm = max_norm;
    o.optimizer = optimizer(kind);
    o.nan_in = 1;
    const Outcome want = train(o, ranks, "", 0, kWindows * kMicros, "");
    EXPECT_EQ(want.results[1].outcome, GA_STEP_SKIPPED_NONFINITE);
    for (const int32_t threads : {0, 1, 2}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, " << threads << " threads");
      const Outcome got = train(eager(o, threads), ranks, "", 0, kWindows * kMicros, "");
      expect_same(got, want);
      if (threads > 0) continue;  // which may be late
      EXPECT_EQ(got.results[0].eager, parameters_of(0, ranks));
      EXPECT_EQ(got.results[2].eager_redone, max_norm == 0.01 ? got.results[2].eager : 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, OwnEagerTraining,
                         testing::Combine(testing::Values(0.0, 1e6, 0.01),
                                          testing::Values(GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_SGD,
                                                          GA_OPTIMIZER_ADOPT)));

// A window that some rank discards, and one whose weight is 0 on a rank or on all.
TEST(OwnEager, WindowsThatEndOtherwise) {
  for (const int32_t threads : {0, 1}) {
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      Rank rank(eager(unclipped(), threads), r, 2);
      rank.join(comm);
      const std::vector<Tensor> before = rank.parts;
      rank.accumulate(0, kMicros - 1);
      if (r == 0) {
        ASSERT_OK(ga_discard(rank.ctx));
      } else {
        EXPECT_EQ(step(rank.ctx).outcome, GA_STEP_SKIPPED_DISCARD);
      }
      EXPECT_TRUE(rank.parts == before);
      rank.accumulate(1, kMicros - 1);
      const ga_step_result result = step(rank.ctx);
      EXPECT_EQ(result.outcome, GA_STEP_APPLIED);
      EXPECT_EQ(result.weight, 12);
      EXPECT_TRUE(rank.parts != before);
    });
  }
}

// An open window that is loaded ends as it would have, updated ahead.
TEST(OwnEager, AfterALoad) {
  const std::string path = testing::TempDir() + "own_eager.ga";
  const Outcome want = train(unclipped(), 2, "", 0, 2 * kMicros, "");
  train(eager(unclipped(), 1), 2, "", 0, 2 * kMicros - 1, path);
  const Outcome rest = train(eager(unclipped(), 0), 4, path, 2 * kMicros - 1, 2 * kMicros, "");
  EXPECT_GT(rest.results[0].eager, 0);
  EXPECT_EQ(rest.results[0].eager_redone, 0);
  for (size_t i = 0; i < kModel.size(); ++i)
    EXPECT_TRUE(rest.parameters[i] == want.parameters[i]) << kModel[i].name;
}

// Where some ranks update ahead and others do not, or open another micro-batch, all hear of it, and go on.
TEST(OwnEager, RanksThatDiffer) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Rank rank(r == 0 ? eager(unclipped(), 0) : unclipped(), r, 2);
    ga_comm_options o = comm_options();
    o.shard = GA_SHARD_PARAMETERS;
    expect_failure(ga_context_set_comm(rank.ctx, comm, &o),
                   "eager is 0 on rank 1, but 1 on rank 0");
  });
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Rank rank(eager(unclipped(), 0), r, 2);
    rank.join(comm);
    ga_micro_options last;
    ASSERT_OK(ga_micro_options_init(&last, sizeof last));
    last.flags = GA_MICRO_LAST;
    if (r == 0)
      expect_failure(ga_micro_begin(rank.ctx, -1, 1, &last), "makes another call");
    else
      expect_failure(ga_step(rank.ctx, nullptr), "makes another call");
    EXPECT_EQ(window(rank.ctx).micro_batches, 0);
    EXPECT_EQ(window(rank.ctx).open_micro, -1);
    rank.accumulate(0, kMicros - 1);
    EXPECT_EQ(step(rank.ctx).outcome, GA_STEP_APPLIED);
  });
}

// A last micro-batch that was aborted is opened again, with another weight and with a parameter that has come since.
TEST(OwnEager, OpenedAgainWithOneMoreParameter) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    ga_config c = summing();
    c.eager = 1;
    Context ctx(c);
    ctx.group(plain_sgd());
    constexpr int64_t kFew = 1000, kMany = 300000;
    std::vector<float> p(kFew), q(kMany), g(kMany, 2.0f);
    const auto add = [&](const char* name, std::vector<float>& data) {
      const auto count = static_cast<int64_t>(data.size());
      const ga_param id = ctx.param(0, name, data.data(), ref::Shape{count});
      const int64_t whole = 2 * count, first = count * r;
      EXPECT_OK(ga_param_set_part(ctx, id, &whole, &first, 1));
      return id;
    };
    std::vector<ga_param> ids = {add("few", p)};
    ga_comm_options o = comm_options();
    o.shard = GA_SHARD_PARAMETERS;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    ga_micro_options last;
    ASSERT_OK(ga_micro_options_init(&last, sizeof last));
    last.flags = GA_MICRO_LAST;
    ASSERT_OK(ga_micro_begin(ctx, -1, 1, &last));
    ASSERT_OK(ga_micro_abort(ctx));
    ids.push_back(add("many", q));
    ASSERT_OK(ga_micro_begin(ctx, -1, 4, &last));
    for (const ga_param id : ids) ASSERT_OK(ga_accumulate_part(ctx, id, g.data()));
    ASSERT_OK(ga_params_ready(ctx, ids.data(), 2));
    ASSERT_OK(ga_micro_end(ctx));
    // The mean over 2 ranks, times 2 / 8.
    const ga_step_result result = step(ctx);
    EXPECT_EQ(result.weight, 8);
    EXPECT_EQ(result.norm, 0.5 * std::sqrt(2.0 * (kFew + kMany)));
    EXPECT_EQ(result.eager, 2);
    EXPECT_EQ(result.eager_redone, 2)
        << "they were computed with the weight of the micro-batch before";
    EXPECT_EQ(p, std::vector<float>(kFew, -0.5f));
    EXPECT_EQ(q, std::vector<float>(kMany, -0.5f));
  });
}

// What is summed ahead is not summed again: the norm is that of the gradients that were ready, also where the test
// writes to the accumulator before ga_step, which tells who reads it.
TEST(OwnEager, SquaresAreSummedOnce) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    constexpr int64_t kCount = 1000;
    ga_config c = summing();
    c.eager = 1;
    std::vector<std::pair<float*, size_t>> arrays;
    c.allocate = [](void* user, size_t bytes, ga_device, void*) {
      const size_t whole = (bytes + 63) / 64 * 64;
      void* const memory = std::aligned_alloc(64, whole);
      static_cast<decltype(arrays)*>(user)->emplace_back(static_cast<float*>(memory),
                                                         bytes / sizeof(float));
      return memory;
    };
    c.free = [](void*, void* memory, size_t, ga_device, void*) { std::free(memory); };
    c.allocator_user = &arrays;
    Context ctx(c);
    ctx.group(plain_sgd());
    std::vector<float> p(kCount), g(kCount, 2.0f);
    const ga_param id = ctx.param(0, "w", p.data(), ref::Shape{kCount});
    const int64_t whole = 2 * kCount, first = kCount * r;
    ASSERT_OK(ga_param_set_part(ctx, id, &whole, &first, 1));
    ga_comm_options o = comm_options();
    o.shard = GA_SHARD_PARAMETERS;
    ASSERT_OK(ga_context_set_comm(ctx, comm, &o));
    ga_micro_options last;
    ASSERT_OK(ga_micro_options_init(&last, sizeof last));
    last.flags = GA_MICRO_LAST;
    ASSERT_OK(ga_micro_begin(ctx, -1, 1, &last));
    ASSERT_OK(ga_accumulate_part(ctx, id, g.data()));
    ASSERT_OK(ga_params_ready(ctx, &id, 1));
    ASSERT_OK(ga_micro_end(ctx));
    int written = 0;
    for (const auto& [array, count] : arrays) {
      float* const end = array + count;
      float* const at = std::search_n(array, end, kCount, 2.0f);
      if (at == end) continue;
      std::fill_n(at, kCount, 3.0f);
      ++written;
    }
    EXPECT_EQ(written, 1);
    EXPECT_EQ(step(ctx).norm, 2 * std::sqrt(2000));
  });
}

// The weight of the window before is not taken for that of the next one.
TEST(OwnEager, EachWindowHasAWeightOfItsOwn) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Rank rank(eager(unclipped(), 0), r, 2);
    rank.join(comm);
    for (int64_t window = 0; window < 3; ++window) {
      for (int64_t micro = window; micro < kMicros; ++micro) rank.accumulate(window, micro);
      const ga_step_result result = step(rank.ctx);
      EXPECT_EQ(result.weight, 12 * (kMicros - window));
      EXPECT_EQ(result.eager, parameters_of(r, 2));
      EXPECT_EQ(result.eager_redone, 0);
    }
  });
}

}  // namespace
}  // namespace ga::test
