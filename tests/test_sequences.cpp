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

#include "gradaccum/gradaccum.h"
#include "sequences/layer_calls.hpp"

namespace {

using ga::model::Model;
using ga::test::sequences::LayerCalls;
using ga::test::sequences::World;

#if defined(__has_feature)
#define GA_HAS_FEATURE(name) __has_feature(name)
#else
#define GA_HAS_FEATURE(name) 0
#endif
#if defined(GA_ASAN) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || \
    GA_HAS_FEATURE(address_sanitizer) || GA_HAS_FEATURE(thread_sanitizer) ||             \
    GA_HAS_FEATURE(memory_sanitizer) || GA_HAS_FEATURE(undefined_behavior_sanitizer)
constexpr int kSequences = 50;
#else
constexpr int kSequences = 1000;
#endif
constexpr int kShards = 5;
constexpr int64_t kSeedsPerShard = 1000000;
constexpr int kCalls = 45;

constexpr const char* kPolicies[] = {"SkipStep", "Fail", "DropMicro", "Ignore"};

class Sequence : public LayerCalls {
 public:
  using LayerCalls::LayerCalls;

  // Returns true if the library and the model agree to the end.
  bool run() {
    worlds_.reserve(2);
    for (const double p : {1.0, 0.2}) {
      if (!chance(p)) continue;
      set_up();
      if (chance(0.4)) bn_add(worlds_.back());
    }
    for (int i = 0; i < kCalls && difference_.empty() && !over_; ++i) {
      World& w = worlds_[static_cast<size_t>(below(static_cast<int64_t>(worlds_.size())))];
      act(w);
      if (difference_.empty() && !over_) compare_window(w);
    }
    return difference_.empty();
  }

 private:
  void act(World& w) {
    const Model& m = *w.model;
    using Call = void (Sequence::*)(World&);
    struct Choice {
      int share;
      Call call;
    };
    const bool open = m.open() >= 0, full = m.full(), empty = m.empty(), held = !w.held.empty();
    const int rare = 1;
    const bool only_discard = m.failed();
    if (only_discard) return chance(0.6) ? discard(w) : step(w);
    const Choice choices[] = {
        {open || full ? rare : 24, &Sequence::accumulate},
        {open   ? rare
         : full ? 4
                : 14,
         &Sequence::begin},
        {open ? 22 : rare, &Sequence::part},
        {open ? 14 : rare, &Sequence::rows},
        {open ? 6 : rare, &Sequence::acquire},
        {held ? 20 : rare, &Sequence::release},
        {open ? held ? 4 : 18 : rare, &Sequence::end},
        {open    ? rare
         : full  ? 40
         : empty ? 3
                 : 14,
         &Sequence::step},
        {empty ? rare : 2, &Sequence::discard},
        {m.layers().empty() ? rare : 22, &Sequence::bn_call},
        {empty ? 3 : rare, &Sequence::set_frozen},
        {empty ? 3 : rare, &Sequence::changed},
        {empty ? 3 : rare, &Sequence::state},
        {empty ? 2 : rare, &Sequence::ema_swap},
        {open ? 5 : rare, &Sequence::abort},
        {rare, &Sequence::prepare},
        {2, &Sequence::set_scale},
        {2, &Sequence::set_optimizer},
        {rare, &Sequence::set_group_frozen},
        {rare, &Sequence::remove},
        {empty ? 2 : rare, &Sequence::bind},
        {empty ? 5 : 2, &Sequence::write},
        {empty ? 2 : rare, &Sequence::set_accum_steps},
        {empty ? 2 : rare, &Sequence::set_scaler},
        {rare, &Sequence::set_ema},
        {2, &Sequence::set_clip},
        {2, &Sequence::set_rates},
        {rare, &Sequence::add_group},
        {empty ? 2 : rare, &Sequence::add_params},
        {rare, &Sequence::ask_result},
        {rare, &Sequence::refused},
    };
    int total = 0;
    for (const Choice& c : choices) total += c.share;
    auto at = static_cast<int>(below(total));
    for (const Choice& c : choices) {
      if ((at -= c.share) >= 0) continue;
      return (this->*c.call)(w);
    }
  }
};

class Sequences : public testing::TestWithParam<std::tuple<int32_t, int>> {};

int64_t environment(const char* name, int64_t otherwise) {
  const char* const value = getenv(name);
  return value ? atoll(value) : otherwise;
}

// Runs a sequence once more to describe it.
std::string describe(uint64_t seed, int32_t policy) {
  Sequence again(seed, policy, true);
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
    Sequence sequence(static_cast<uint64_t>(seed), policy, false);
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
