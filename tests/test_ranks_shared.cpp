// SPDX-License-Identifier: Apache-2.0
//
// What all ranks share follows from what they share: the numbers that scale a window, the lists that ranks
// compare, and the bytes that they save. Values are computed here by hand.
#include <gtest/gtest.h>

#include <cmath>

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

}  // namespace
}  // namespace ga::test
