// SPDX-License-Identifier: Apache-2.0
// The library's own threads, which serve where there is no OpenMP.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include "child.hpp"
#include "core/thread_pool.hpp"

namespace ga::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// A pass of a team whose threads wait for each other, for at most that long.
struct Meeting {
  int expected;
  milliseconds patience;
  std::atomic<int> present{0};
  std::atomic<uint64_t> selves{0};
  std::atomic<int> workers_that_hear_signals{0};

  static void share(void* data, int self) {
    Meeting& m = *static_cast<Meeting*>(data);
    m.selves.fetch_or(uint64_t{1} << self);
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    if (self > 0 && (sigismember(&blocked, SIGUSR1) == 0 || sigismember(&blocked, SIGTERM) == 0))
      ++m.workers_that_hear_signals;
    m.present.fetch_add(1);
    const auto end = Clock::now() + m.patience;
    while (m.present.load() < m.expected && Clock::now() < end) std::this_thread::yield();
  }
};

// How many threads of a team work at once, if as many as expected are given time to come.
int meet(Team& team, int expected, milliseconds patience = milliseconds(10000)) {
  Meeting meeting = {expected, patience};
  team.run(expected, Meeting::share, &meeting);
  EXPECT_EQ(meeting.workers_that_hear_signals, 0);
  return meeting.present;
}

TEST(ThreadPool, WorkersComeEachWithItsNumber) {
  Team team(4);
  for (const int threads : {4, 1, 3, 2, 4}) {
    Meeting meeting = {threads, milliseconds(10000)};
    team.run(threads, Meeting::share, &meeting);
    EXPECT_EQ(meeting.present, threads);
    EXPECT_EQ(meeting.selves, (uint64_t{1} << threads) - 1);
  }
}

// Shares of items that several threads take, as a pass has them.
struct Items {
  static constexpr int kCount = 64;
  std::atomic<int> next{0};
  int done[kCount] = {};  // not atomic: ThreadSanitizer sees whether run() waits

  static void share(void* data, int) {
    Items& items = *static_cast<Items*>(data);
    for (int i; (i = items.next.fetch_add(1)) < kCount;) ++items.done[i];
  }
};

TEST(ThreadPool, EveryItemOnceWhoeverElseCalls) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&wrong, c] {
      Team team(2 + c % 3);
      for (int round = 0; round < 3000; ++round) {
        Items items;
        team.run(2 + c % 3, Items::share, &items);
        for (const int done : items.done) wrong += done != 1;
        // Some callers find workers awake, others asleep.
        if (c % 2 == 1 && round % 100 == 0) std::this_thread::sleep_for(milliseconds(1));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// The calling thread leaves while a worker has its share of the pass still to do.
TEST(ThreadPool, WaitsForAWorkerThatIsSlow) {
  struct Slow {
    std::atomic<bool> begun{false};
    int result = 0;  // not atomic
    static void share(void* data, int self) {
      Slow& slow = *static_cast<Slow*>(data);
      if (self == 0) {
        const auto end = Clock::now() + milliseconds(10000);
        while (!slow.begun && Clock::now() < end) std::this_thread::yield();
        return;
      }
      slow.begun = true;
      std::this_thread::sleep_for(milliseconds(30));
      slow.result = 1;
    }
  };
  Team team(2);
  for (int round = 0; round < 5; ++round) {
    Slow slow;
    team.run(2, Slow::share, &slow);
    EXPECT_EQ(slow.result, 1);
  }
}

// A pass within a pass takes workers that are free, and waits for none.
TEST(ThreadPool, PassWithinAPass) {
  struct Outer {
    std::atomic<int> inner{0};
    static void share(void* data, int) {
      Outer& outer = *static_cast<Outer*>(data);
      Team team(3);
      Items items;
      team.run(3, Items::share, &items);
      for (const int done : items.done) outer.inner += done;
    }
  };
  Team team(3);
  for (int round = 0; round < 100; ++round) {
    Outer outer;
    team.run(3, Outer::share, &outer);
    EXPECT_EQ(outer.inner % Items::kCount, 0);
    EXPECT_GE(outer.inner, Items::kCount);
  }
}

double processor_seconds() {
  timespec t = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

TEST(ThreadPool, IdleWorkersUseNoProcessor) {
  Team team(4);
  ASSERT_EQ(meet(team, 4), 4);
  std::this_thread::sleep_for(milliseconds(50));  // until they are asleep, on a busy machine too
  const double before = processor_seconds();
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_LT(processor_seconds() - before, 0.03);
  EXPECT_EQ(meet(team, 4), 4) << "they do not wake";
}

// A signal to the process waits for a thread of the program, whatever threads the library has.
TEST(ThreadPool, SignalsAreThePrograms) {
  static std::atomic<int> handled{0};
  struct sigaction act = {}, old_act = {};
  act.sa_handler = [](int) { ++handled; };
  ASSERT_EQ(sigaction(SIGUSR1, &act, &old_act), 0);
  Team team(3);
  ASSERT_EQ(meet(team, 3), 3);
  sigset_t one, old_mask;
  sigemptyset(&one);
  sigaddset(&one, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &one, &old_mask);
  EXPECT_EQ(sigismember(&old_mask, SIGUSR1), 0) << "the pool has changed the mask of its caller";
  kill(getpid(), SIGUSR1);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(handled, 0);
  pthread_sigmask(SIG_SETMASK, &old_mask, nullptr);
  EXPECT_EQ(handled, 1);
  sigaction(SIGUSR1, &old_act, nullptr);
}

TEST(ThreadPool, ChildrenHaveWorkersOfTheirOwn) {
  Team parents(3);
  ASSERT_EQ(meet(parents, 3), 3);
  in_child([] {
    Team childs(3);
    EXPECT_EQ(meet(childs, 3), 3);
    in_child([] {
      Team team(2);
      EXPECT_EQ(meet(team, 2), 2);
    });
    EXPECT_EQ(meet(childs, 3), 3);
  });
  EXPECT_EQ(meet(parents, 3), 3);
}

// A fork while other threads have passes, whose workers and locks the child then sees half-way.
TEST(ThreadPool, ForksInTheMidstOfPasses) {
  std::atomic<bool> over{false};
  std::vector<std::thread> callers;
  for (int c = 0; c < 2; ++c) {
    callers.emplace_back([&] {
      Team team(3);
      while (!over) {
        Items items;
        team.run(3, Items::share, &items);
      }
    });
  }
  for (int round = 0; round < 10; ++round)
    in_child([] {
      Team team(3);
      EXPECT_EQ(meet(team, 3), 3);
    });
  over = true;
  for (std::thread& caller : callers) caller.join();
}

// The system refuses threads, and then allows them again.
TEST(ThreadPool, FewerWorkersIfTheSystemHasNone) {
  in_child([] {
    rlimit before = {};
    getrlimit(RLIMIT_NPROC, &before);
    if (geteuid() == 0) {  // for whom there is no limit
      ASSERT_EQ(setuid(65534), 0);
    }
    const rlimit none = {0, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NPROC, &none), 0);
    Team team(3);
    EXPECT_EQ(meet(team, 3, milliseconds(20)), 1);
    Items items;
    team.run(3, Items::share, &items);
    for (const int done : items.done) EXPECT_EQ(done, 1);
    ASSERT_EQ(setrlimit(RLIMIT_NPROC, &before), 0);
    int came = 0;
    for (int i = 0; i < 100 && came < 3; ++i) came = meet(team, 3, milliseconds(100));
    EXPECT_EQ(came, 3);
  });
}

TEST(ThreadPool, NumberOfThreadsByDefault) {
  const char* const old = std::getenv("OMP_NUM_THREADS");
  const std::string before = old ? old : "";
  const auto with = [](const char* value) {
    setenv("OMP_NUM_THREADS", value, 1);
    return default_thread_count();
  };
  EXPECT_EQ(with("3"), 3);
  EXPECT_EQ(with("5,2"), 5);
  EXPECT_EQ(with("99999"), 4096);
  cpu_set_t usable;
  ASSERT_EQ(sched_getaffinity(0, sizeof usable, &usable), 0);
  for (const char* nothing : {"", "0", "-2", "many"}) EXPECT_EQ(with(nothing), CPU_COUNT(&usable));
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; CPU_COUNT(&one) == 0; ++cpu)
      if (CPU_ISSET(cpu, &usable)) CPU_SET(cpu, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(default_thread_count(), 1);
  }).join();
  if (old)
    setenv("OMP_NUM_THREADS", before.c_str(), 1);
  else
    unsetenv("OMP_NUM_THREADS");
}

}  // namespace
}  // namespace ga::test
