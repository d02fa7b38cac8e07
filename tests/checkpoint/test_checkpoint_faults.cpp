// SPDX-License-Identifier: Apache-2.0
//
// Saving and loading while system calls fail, processes are killed, disks are full, and others change
// the file: the file is an old state or the new one, and a context that could not load is as it was,
// or says that it is of no use.
#include <chrono>
#include <optional>

#include "child.hpp"
#include "faults.hpp"
#include "posix_files.hpp"
#include "small_run.hpp"

namespace ga::test {
namespace {

std::string text_of(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }

// A state of a run after so many windows and half of one.
Bytes state_after(With with, uint64_t windows) {
  SmallRun run(with);
  run.windows(0, windows);
  run.accumulate(2 * windows);
  return saved(run.ctx);
}

// ---- Every system call fails --------------------------------------------------------------------

struct Failure {
  int error;
  int64_t times;
};
std::vector<Failure> failures_of(Call call) {
  std::vector<Failure> result = {{EIO, 1}, {EIO, INT64_MAX}, {EINTR, 1}};
  if (call == Call::kPwrite || call == Call::kPread)
    result.insert(result.end(), {{kShort, 1}, {kShort, INT64_MAX}});
  return result;
}
int64_t end_of(const Failure& failure, int64_t first) {
  return failure.times == INT64_MAX ? INT64_MAX : first + failure.times;
}

testing::Message describe(Call call, int64_t number, const Failure& failure) {
  return testing::Message() << kCallNames[static_cast<int>(call)] << " number " << number << ", "
                            << failure.times << " times: "
                            << (failure.error == kShort ? "short" : strerror(failure.error));
}

class CheckpointFaults : public testing::TestWithParam<With> {};
INSTANTIATE_TEST_SUITE_P(All, CheckpointFaults, testing::ValuesIn(kRuns));

TEST_P(CheckpointFaults, EveryCallOfASaveFails) {
  const Folder folder(in_memory());
  const std::string path = folder / "x";
  SmallRun run(GetParam());
  run.train();
  const Bytes bytes = saved(run.ctx);
  const std::set<int> open_before = descriptors();
  constexpr Call kAll[] = {Call::kOpenat,    Call::kFstat,     Call::kFstatat, Call::kFlock,
                           Call::kFdopendir, Call::kReaddir,   Call::kFchown,  Call::kFchmod,
                           Call::kGetrlimit, Call::kFallocate, Call::kPwrite,  Call::kFsync,
                           Call::kFcntl,     Call::kClose,     Call::kRenameat};
  for (const Call call : kAll) {
    for (const Failure& failure : failures_of(call)) {
      int errors = 0;
      for (int64_t k = 0;; ++k) {
        SCOPED_TRACE(describe(call, k, failure));
        ASSERT_LT(k, 1000) << "no end of calls";
        put(path, "old");
        bool reached = false;
        ga_status status;
        {
          const SystemCalls calls({call, k, end_of(failure, k), failure.error});
          status = ga_save(run.ctx, path.c_str(), nullptr);
          reached = calls.count(call) > k;
        }
        const std::string error = status == GA_OK ? "" : ga_last_error();
        if (status != GA_OK) {
          ++errors;
          ASSERT_TRUE(reached);
          ASSERT_EQ(status, GA_ERROR_IO) << error;
          ASSERT_NE(error.find(strerror(failure.error)), std::string::npos) << error;
        }
        const bool in_place = error.find("the new file is in place") != std::string::npos;
        ASSERT_EQ(contents(path), status == GA_OK || in_place ? text_of(bytes) : "old") << error;
        ASSERT_EQ(folder.names(), std::set<std::string>{"x"});
        ASSERT_EQ(descriptors(), open_before);
        ASSERT_EQ(saved(run.ctx), bytes);
        ASSERT_OK(ga_save(run.ctx, path.c_str(), nullptr));
        ASSERT_EQ(contents(path), text_of(bytes));
        if (!reached) {
          EXPECT_GT(k, 0) << "the library does not make this call";
          break;
        }
      }
      if (call == Call::kPwrite) {
        EXPECT_EQ(errors >= 2, failure.error == EIO) << errors;
      }
    }
  }
}

TEST_P(CheckpointFaults, EveryCallOfALoadFails) {
  const Folder folder(in_memory());
  const std::string path = folder / "x";
  const Bytes bytes = state_after(GetParam(), 2);
  put(path, text_of(bytes));
  std::optional<SmallRun> run;
  Bytes before;
  const auto renew = [&] {
    run.emplace(GetParam());
    run->windows(5, 6);
    before = saved(run->ctx);
  };
  renew();
  const std::set<int> open_before = descriptors();
  for (const Call call : {Call::kOpen, Call::kFstat, Call::kPread, Call::kClose}) {
    for (const Failure& failure : failures_of(call)) {
      int errors = 0, faults = 0;
      for (int64_t k = 0;; ++k) {
        SCOPED_TRACE(describe(call, k, failure));
        ASSERT_LT(k, 1000) << "no end of calls";
        bool reached = false;
        ga_status status;
        {
          const SystemCalls calls({call, k, end_of(failure, k), failure.error});
          status = ga_load(run->ctx, path.c_str(), nullptr);
          reached = calls.count(call) > k;
        }
        const std::string error = status == GA_OK ? "" : ga_last_error();
        ASSERT_EQ(descriptors(), open_before);
        if (status == GA_OK) {
          ASSERT_TRUE(!reached || faults == 0 || failure.error != EIO)
              << "a reading does not matter";
          ASSERT_EQ(saved(run->ctx), bytes);
          renew();
        } else if (status == GA_ERROR_IO) {
          ++errors;
          ASSERT_EQ(faults, 0) << "the first reading after the second";
          ASSERT_EQ(saved(run->ctx), before);
        } else {
          ++faults;
          ASSERT_EQ(status, GA_ERROR_FAULT) << error;
          ASSERT_EQ(call, Call::kPread);
          size_t size;
          ASSERT_EQ(ga_step(run->ctx, nullptr), GA_ERROR_FAULT);
          ASSERT_EQ(ga_load(run->ctx, path.c_str(), nullptr), GA_ERROR_FAULT);
          ASSERT_EQ(ga_save_to_memory(run->ctx, nullptr, nullptr, 0, &size), GA_ERROR_FAULT);
          renew();
        }
        if (status != GA_OK) {
          ASSERT_TRUE(reached);
          ASSERT_NE(error.find(strerror(failure.error)), std::string::npos) << error;
        }
        if (!reached) {
          EXPECT_GT(k, 0) << "the library does not make this call";
          break;
        }
      }
      if (call == Call::kPread && failure.error == EIO) {
        // The length, the header and the data; the data once more.
        EXPECT_GE(errors, 3);
        EXPECT_GE(faults, 1);
      } else if (call == Call::kClose || failure.error != EIO) {
        EXPECT_EQ(faults, 0);
      }
    }
  }
}

// ---- Files that change while they are loaded ----------------------------------------------------

// Loads a file that change() changes before the k-th reading of it, for every k. The context then has
// one state or the other, is as it was, or is of no use.
void expect_whole(With with, const std::string& path, const Bytes& a, const Bytes& b,
                  const std::function<void()>& change, std::set<ga_status>& statuses) {
  for (int64_t k = 0;; ++k) {
    SCOPED_TRACE(testing::Message() << "before reading " << k);
    put(path, text_of(a));
    SmallRun run(with);
    run.windows(5, 6);
    const Bytes before = saved(run.ctx);
    bool reached = false;
    ga_status status;
    {
      SystemCalls calls;
      calls.before = [&](Call call, int64_t number) {
        if (call != Call::kPread || number != k) return;
        reached = true;
        change();
      };
      status = ga_load(run.ctx, path.c_str(), nullptr);
    }
    statuses.insert(status);
    if (status == GA_OK) {
      const Bytes after = saved(run.ctx);
      ASSERT_TRUE(after == a || after == b);
    } else if (status == GA_ERROR_FAULT) {
      ASSERT_EQ(ga_step(run.ctx, nullptr), GA_ERROR_FAULT);
    } else {
      ASSERT_TRUE(status == GA_ERROR_IO || status == GA_ERROR_FORMAT) << ga_last_error();
      ASSERT_EQ(saved(run.ctx), before);
    }
    if (!reached) {
      ASSERT_OK(status);
      return;
    }
  }
}

TEST_P(CheckpointFaults, FilesThatChangeWhileTheyAreLoaded) {
  const With with = GetParam();
  const Folder folder(in_memory());
  const std::string path = folder / "x", other = folder / "y";
  const Bytes a = state_after(with, 2), b = state_after(with, 3);
  using Statuses = std::set<ga_status>;
  {
    SCOPED_TRACE("replaced");
    Statuses statuses;
    expect_whole(
        with, path, a, a, [&] { save(path, text_of(b)); }, statuses);
    EXPECT_EQ(statuses, Statuses{GA_OK});
  }
  {
    SCOPED_TRACE("removed");
    Statuses statuses;
    expect_whole(
        with, path, a, a, [&] { fs::remove(path); }, statuses);
    EXPECT_EQ(statuses, Statuses{GA_OK});
  }
  {
    SCOPED_TRACE("made longer");
    Statuses statuses;
    const auto append = [&] { std::ofstream(path, std::ios::app | std::ios::binary) << "more"; };
    expect_whole(with, path, a, a, append, statuses);
    EXPECT_EQ(statuses, Statuses{GA_OK});
  }
  for (const size_t left : {size_t{0}, size_t{5}, a.size() / 2, a.size() - 1}) {
    SCOPED_TRACE(testing::Message() << "cut to " << left << " bytes");
    Statuses statuses;
    expect_whole(
        with, path, a, a, [&] { fs::resize_file(path, left); }, statuses);
    EXPECT_EQ(statuses.count(GA_ERROR_IO) + statuses.count(GA_ERROR_FAULT), 2u);
  }
  {
    SCOPED_TRACE("overwritten by another state");
    Statuses statuses;
    expect_whole(
        with, path, a, b, [&] { put(path, text_of(b)); }, statuses);
    EXPECT_EQ(statuses.count(GA_ERROR_FAULT), 1u);
  }
  {
    SCOPED_TRACE("overwritten by zeros");
    Statuses statuses;
    expect_whole(
        with, path, a, a, [&] { put(path, std::string(a.size(), '\0')); }, statuses);
    EXPECT_EQ(statuses.count(GA_ERROR_FORMAT) + statuses.count(GA_ERROR_FAULT), 2u);
  }
}

// ---- Killed processes ---------------------------------------------------------------------------

TEST(CheckpointKilled, AtRandomMoments) {
  const With with = With::kRows;
  const Folder folder;
  const std::string path = folder / "x";
  const Bytes a = state_after(with, 2), b = state_after(with, 3);
  SmallRun last(with);
  ASSERT_OK(load(last.ctx, a));
  const auto start = std::chrono::steady_clock::now();
  ASSERT_OK(ga_save(last.ctx, path.c_str(), nullptr));
  const auto one_save = std::chrono::duration_cast<std::chrono::microseconds>(
      std::chrono::steady_clock::now() - start);
  const int64_t longest = 5000 + 4 * int64_t{one_save.count()};  // microseconds
  Random random(7);
  int left = 0, counts[2] = {0, 0};
  for (int k = 0; k < 200; ++k) {
    fflush(stdout);
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);
      SmallRun first(with), second(with);
      if (load(first.ctx, a) != GA_OK || load(second.ctx, b) != GA_OK) _exit(1);
      if (write(ready[1], "r", 1) != 1) _exit(1);
      for (;;)
        for (ga_context* ctx : {first.ctx, second.ctx})
          if (ga_save(ctx, path.c_str(), nullptr) != GA_OK) _exit(1);
    }
    char byte;
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
    usleep(static_cast<useconds_t>(200 + random.below(longest)));
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "the child ended by itself";
    left += !folder.temporaries().empty();
    SmallRun run(with);
    ASSERT_OK(ga_load(run.ctx, path.c_str(), nullptr)) << k;
    const Bytes found = saved(run.ctx);
    ASSERT_TRUE(found == a || found == b) << k;
    ++counts[found == b];
  }
  EXPECT_GT(left, 0) << "no child was killed while it wrote";
  EXPECT_GT(counts[0], 0);
  EXPECT_GT(counts[1], 0);
  ASSERT_OK(ga_save(last.ctx, path.c_str(), nullptr));
  EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
  EXPECT_EQ(contents(path), text_of(a));
}

// ---- Full disks ---------------------------------------------------------------------------------

TEST(CheckpointDisk, AFullDiskKeepsTheOldState) {
  const Folder folder;
  fs::create_directory(folder / "small");
  const bool mounted = on_small_disk(folder / "small", [&] {
    const std::string path = folder / "small/x";
    SmallRun run(With::kAdopted);
    run.train();
    const Bytes bytes = saved(run.ctx);
    ASSERT_OK(ga_save(run.ctx, path.c_str(), nullptr));
    // Leaves less than a state.
    put(folder / "small/filler", std::string(64000 - 4096 * (2 + bytes.size() / 4096), 'f'));
    run.go_on();
    const Bytes next = saved(run.ctx);
    for (const bool reserves : {true, false}) {
      const int error = reserves ? 0 : EOPNOTSUPP;
      {
        const SystemCalls calls({Call::kFallocate, 0, reserves ? 0 : INT64_MAX, error});
        EXPECT_EQ(ga_save(run.ctx, path.c_str(), nullptr), GA_ERROR_IO);
      }
      EXPECT_NE(std::string(ga_last_error()).find(strerror(ENOSPC)), std::string::npos)
          << ga_last_error();
      EXPECT_EQ(contents(path), text_of(bytes));
      EXPECT_EQ(std::distance(fs::directory_iterator(folder / "small"), {}), 2);
      EXPECT_EQ(saved(run.ctx), next);
    }
    fs::remove(folder / "small/filler");
    EXPECT_OK(ga_save(run.ctx, path.c_str(), nullptr));
    EXPECT_EQ(contents(path), text_of(next));
  });
  if (!mounted) GTEST_SKIP() << "this process may not mount a small disk";
}

}  // namespace
}  // namespace ga::test
