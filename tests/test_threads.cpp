// SPDX-License-Identifier: Apache-2.0
// Which loops go to several threads.
#include <gtest/gtest.h>

#include <cstdlib>

#include "backend/cpu/threads.hpp"
#include "support.hpp"

namespace ga::test {
namespace {

using cpu::Threads;

class ThreadsPay : public testing::Test {
 protected:
  void SetUp() override { setenv("GA_CPU_HAND_OVER", "5000", 1); }
  void TearDown() override { setenv("GA_CPU_HAND_OVER", "0", 1); }

  static ga_config with(int32_t count) {
    ga_config c = config();
    c.num_threads = count;
    return c;
  }
};

TEST_F(ThreadsPay, IfTheySaveMoreThanAHandOver) {
  Threads two(with(2)), four(with(4));
  if (two.is_one()) GTEST_SKIP() << "built without OpenMP";
  EXPECT_FALSE(two.pay(9900));
  EXPECT_TRUE(two.pay(10100));
  EXPECT_FALSE(four.pay(6600));
  EXPECT_TRUE(four.pay(6700));
}

TEST_F(ThreadsPay, NeverOrAlwaysWhateverAHandOverTakes) {
  for (const char* hand_over : {"0", "1e9"}) {
    setenv("GA_CPU_HAND_OVER", hand_over, 1);
    Threads two(with(2)), one(with(1));
    if (two.is_one()) GTEST_SKIP() << "built without OpenMP";
    EXPECT_FALSE(two.pay(1500));
    EXPECT_TRUE(two.pay(210e3));
    EXPECT_FALSE(one.pay(1e9));
  }
}

TEST_F(ThreadsPay, WhenTheyAreThePrograms) {
  ga_config c = with(1);
  c.parallel_for = [](void*, int64_t count, ga_task task, void* data) {
    for (int64_t i = 0; i < count; ++i) task(data, i);
  };
  Threads threads(c);
  EXPECT_FALSE(threads.pay(1500));
  EXPECT_TRUE(threads.pay(1700));
}

// Without the variable, the first loops find out. The threads have yet to be made for the first one.
TEST_F(ThreadsPay, OnceMeasured) {
  unsetenv("GA_CPU_HAND_OVER");
  Threads two(with(2));
  if (two.is_one()) GTEST_SKIP() << "built without OpenMP";
  EXPECT_FALSE(two.pay(1e5));
  bool paid = false;
  for (int i = 0; i < 100000 && !paid; ++i) paid = two.pay(199e3);
  EXPECT_TRUE(paid) << "a hand-over took 0.1 ms on the average, again and again";
}

}  // namespace
}  // namespace ga::test
