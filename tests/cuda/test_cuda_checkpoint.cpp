// SPDX-License-Identifier: Apache-2.0
//
// A run that is stopped on the CPU and goes on on a CUDA device, and back, after every micro-batch and
// every window: what it computes is still that of the float64 reference.
#include "pairs.hpp"

namespace ga::test {
namespace {

TEST(OtherDevice, EveryPairOfOptionsGoesOnThere) {
  int wrong = 0;
  for (const Case& c : cases(1)) {
    SCOPED_TRACE(describe(c));
    const Trial trial(c, Stops::kToTheOtherDevice);
    EXPECT_EQ(trial.status(), GA_OK) << trial.sentence();
    if (HasFailure() && ++wrong == 5) break;  // enough failures to read
  }
}

}  // namespace
}  // namespace ga::test
