// SPDX-License-Identifier: Apache-2.0
// Which loops go to several threads.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

#include "backend/cpu/threads.hpp"
#include "support.hpp"

namespace ga::test {
namespace {

using cpu::Threads;
using cpu::Trial;

class ThreadsPay : public testing::Test {
 protected:
  void SetUp() override { setenv("GA_CPU_HAND_OVER", "5000", 1); }
  void TearDown() override { setenv("GA_CPU_HAND_OVER", "0", 1); }

  static ga_config with(int32_t count) {
    ga_config c = config();
    c.num_threads = count;
    return c;
  }
  // Whether a pass that takes one thread so long is for all.
  static bool pays(Threads& threads, double nanoseconds) {
    bool together = false;
    threads.run_pass(0, nanoseconds, [&](bool way) { together = way; });
    return together;
  }
};

TEST_F(ThreadsPay, IfTheySaveMoreThanAHandOver) {
  Threads two(with(2)), four(with(4));
  EXPECT_FALSE(pays(two, 9900));
  EXPECT_TRUE(pays(two, 10100));
  EXPECT_FALSE(pays(four, 6600));
  EXPECT_TRUE(pays(four, 6700));
}

TEST_F(ThreadsPay, NeverOrAlwaysWhateverAHandOverTakes) {
  for (const char* hand_over : {"0", "1e9"}) {
    setenv("GA_CPU_HAND_OVER", hand_over, 1);
    Threads two(with(2)), one(with(1));
    EXPECT_FALSE(pays(two, 1500));
    EXPECT_TRUE(pays(two, 210e3));
    EXPECT_FALSE(pays(one, 1e9));
  }
}

TEST_F(ThreadsPay, WhenTheyAreThePrograms) {
  ga_config c = with(1);
  c.parallel_for = [](void*, int64_t count, ga_task task, void* data) {
    for (int64_t i = 0; i < count; ++i) task(data, i);
  };
  Threads threads(c);
  EXPECT_FALSE(pays(threads, 9900));
  EXPECT_TRUE(pays(threads, 10100));
}

// Passes of a thousand nanoseconds on one thread and as many as given together.
double average(Trial& trial, int passes, double together, int kind = 0, double alone = 1000) {
  double total = 0;
  for (int i = 0; i < passes; ++i) {
    const double taken = trial.next() ? together : alone;
    trial.took(kind, taken);
    total += taken;
  }
  return total / passes;
}

TEST(Trial, GoesTheFasterWay) {
  for (const double together : {500.0, 900.0, 1100.0, 2000.0, 50000.0}) {
    Trial trial;
    average(trial, 100, together);
    EXPECT_LE(average(trial, 20000, together), 1.03 * std::min(1000.0, together)) << together;
  }
}

TEST(Trial, FollowsWhatChanges) {
  Trial trial;
  for (int round = 0; round < 3; ++round) {
    average(trial, 10000, 500);
    EXPECT_LE(average(trial, 20000, 500), 510);
    // Another program takes the cores: a few passes show it, and few try again.
    EXPECT_LE(average(trial, 100, 5e6), 5e6 * 8 / 100 + 1000);
    average(trial, 10000, 5e6);
    EXPECT_LE(average(trial, 20000, 5e6), 6e6 * 5 / 20000 + 1000);
  }
}

// What threads gain in one kind of pass they may lose in another.
TEST(Trial, JudgesKindsTogether) {
  for (const double other : {1500.0, 2000.0}) {
    Trial trial;
    double total = 0;
    for (int i = 0; i < 5000; ++i) total += average(trial, 1, 400, 1) + average(trial, 1, other, 2);
    const double together = 400 + other;
    EXPECT_LE(total / 5000, 1.02 * std::min(2000.0, together)) << other;
  }
}

TEST(Trial, ForgivesAPassThatWasHeldUp) {
  Trial trial;
  average(trial, 1000, 500);
  trial.next();
  trial.took(0, 1e5);
  average(trial, 1000, 500);
  EXPECT_LE(average(trial, 1000, 500), 520);
}

// Without the variable it is tried.
TEST_F(ThreadsPay, IfPassesHaveTakenLessTime) {
  unsetenv("GA_CPU_HAND_OVER");
  for (const int slower : {0, 1}) {
    Threads two(with(2));
    int together = 0;
    for (int i = 0; i < 2000; ++i) {
      two.run_pass(0, 3000, [&](bool way) {
        together += way;
        const auto end = std::chrono::steady_clock::now() +
                         std::chrono::microseconds(way == (slower == 1) ? 30 : 3);
        while (std::chrono::steady_clock::now() < end) {
        }
      });
    }
    if (slower == 1) together = 2000 - together;
    EXPECT_GT(together, 1500) << slower;
    EXPECT_LT(together, 2000) << slower;
  }
}

}  // namespace
}  // namespace ga::test
