// SPDX-License-Identifier: Apache-2.0
//
// Random sequences of calls, legal and illegal, compared with a model of the library
// (sequences/model.hpp). The model predicts the status of every call, and after every step the
// parameters, EMAs, running statistics, counters and results. A call that failed and still changed
// something is found at the next comparison.
//
// One number, the seed, determines a sequence. A failure prints the seed and all calls;
// GA_SEQUENCE_SEED=<number> runs that sequence alone, GA_SEQUENCE_COUNT=<number> sets the number of
// sequences in each case.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "build.hpp"
#include "gradaccum/gradaccum.h"
#include "sequences/sequence.hpp"

namespace {

using ga::test::sequences::Chance;
using ga::test::sequences::Sequence;

const int kSequences =
    ga::test::is_sanitized() || ga::test::refuses_undefined_behaviour() ? 50 : 1000;
constexpr int kShards = 5;
constexpr int64_t kSeedsPerShard = 1000000;

constexpr const char* kPolicies[] = {"SkipStep", "Fail", "DropMicro", "Ignore"};

class Sequences : public testing::TestWithParam<std::tuple<int32_t, int>> {};

int64_t environment(const char* name, int64_t otherwise) {
  const char* const value = getenv(name);
  return value ? atoll(value) : otherwise;
}

// Runs a sequence once more to describe it.
std::string describe(uint64_t seed, int32_t policy) {
  Sequence again(Chance(seed), policy, true);
  const bool right = again.run();
  return "GA_SEQUENCE_SEED=" + std::to_string(seed) + ": " +
         (right ? "the second run passed" : again.difference()) + "\n" + again.log();
}

TEST_P(Sequences, AgreeWithTheModel) {
  const auto [policy, shard] = GetParam();
  const int64_t only = environment("GA_SEQUENCE_SEED", -1);
  const int64_t count = environment("GA_SEQUENCE_COUNT", kSequences);
  int failures = 0;
  for (int64_t i = 0; i < (only < 0 ? count : 1) && failures < 3; ++i) {
    const int64_t seed = only < 0 ? (shard * kSeedsPerShard + i) * 4 + policy : only;
    if (seed % 4 != policy || seed / 4 / kSeedsPerShard != shard) return;
    Sequence sequence(Chance(static_cast<uint64_t>(seed)), policy, false);
    if (sequence.run()) continue;
    ++failures;
    ADD_FAILURE() << sequence.difference() << "\n" << describe(static_cast<uint64_t>(seed), policy);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Sequences,
                         testing::Combine(testing::Range<int32_t>(0, 4),
                                          testing::Range(0, kShards)),
                         [](const auto& info) {
                           return std::string(kPolicies[std::get<0>(info.param)]) +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
