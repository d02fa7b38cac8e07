// SPDX-License-Identifier: Apache-2.0
//
// A file that is written is the old one or the new one, as a whole, whatever fails: the process,
// any system call, the power.
#include <csignal>
#include <set>

#include "child.hpp"
#include "faults.hpp"
#include "posix_files.hpp"
#include "power_loss.hpp"

namespace ga::test {
namespace {

// ---- Killed processes ---------------------------------------------------------------------------

TEST(DiskFaults, KilledAtRandomMoments) {
  const Folder folder;
  const std::string path = folder / "x";
  save(path, version(1));
  unsigned random = 12345;
  int left = 0;
  for (int k = 0; k < 100; ++k) {
    fflush(stdout);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (int i = 0;; ++i) save(path, version(1 + i % 1000));
    }
    random = random * 1664525 + 1013904223;
    usleep(500 + random / 65536 % 8000);
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "the child ended by itself";
    const std::string text = load(path);
    ASSERT_TRUE(is_whole(text)) << text.size() << " bytes";
    left += !folder.temporaries().empty();
    save(path, text);
    ASSERT_EQ(folder.names(), std::set<std::string>{"x"});
  }
  EXPECT_GT(left, 0) << "no child was killed while it wrote";
}

TEST(DiskFaults, KilledAtEachCall) {
  const Folder folder(in_memory());
  const std::string path = folder / "x";
  std::set<std::string> outcomes;
  int left = 0;
  for (int at = 0;; ++at) {
    put(path, "old");
    fflush(stdout);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      SystemCalls calls;
      int number = 0;
      calls.before = [&](Call, int64_t) {
        if (number++ == at) raise(SIGKILL);
      };
      save(path, "new");
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    const std::string text = load(path);
    EXPECT_TRUE(text == "old" || text == "new") << at;
    outcomes.insert(text);
    left += !folder.temporaries().empty();
    save(path, "next");
    ASSERT_EQ(folder.names(), std::set<std::string>{"x"}) << at;
    if (WIFEXITED(status)) break;
  }
  EXPECT_EQ(outcomes.size(), 2u);
  EXPECT_GT(left, 5);
}

// ---- Every system call fails --------------------------------------------------------------------

struct Failure {
  int error;
  int64_t times;
};
constexpr Failure kFailures[] = {{EIO, 1},   {EIO, INT64_MAX}, {ENOSPC, 1},
                                 {EINTR, 1}, {EINTR, 20},      {ENOSPC, INT64_MAX}};
constexpr Failure kShortTransfers[] = {{kShort, 1}, {kShort, INT64_MAX}};

std::vector<Failure> failures_of(Call call) {
  std::vector<Failure> result(std::begin(kFailures), std::end(kFailures));
  if (call == Call::kPwrite || call == Call::kPread)
    result.insert(result.end(), std::begin(kShortTransfers), std::end(kShortTransfers));
  return result;
}

// After each failure the path holds the new file or, with an error, the old one. Nothing else is
// left, unless it could not be removed, and the next writer removes that too.
TEST(DiskFaults, EveryCallOfAWriterFails) {
  const Folder folder(in_memory());
  const std::string path = folder / "x", link = folder / "link";
  fs::create_symlink("x", link);
  const std::string abandoned = prefix_of(folder, "x") + "1-0.tmp";
  const std::string old = version(3), text = version(5);
  constexpr Call kAll[] = {Call::kOpenat,  Call::kFstat,     Call::kFstatat,   Call::kReadlinkat,
                           Call::kFlock,   Call::kFdopendir, Call::kReaddir,   Call::kFchown,
                           Call::kFchmod,  Call::kGetrlimit, Call::kFallocate, Call::kPwrite,
                           Call::kFsync,   Call::kFcntl,     Call::kClose,     Call::kRenameat,
                           Call::kUnlinkat};
  const std::set<int> open_before = descriptors();
  for (const bool exists : {true, false}) {
    for (const Call call : kAll) {
      for (const Failure& failure : failures_of(call)) {
        int errors = 0;
        for (int64_t k = 0;; ++k) {
          SCOPED_TRACE(testing::Message()
                       << kCallNames[static_cast<int>(call)] << " number " << k << ", "
                       << failure.times << " times: " << strerror(failure.error)
                       << (exists ? ", an old file" : ", no old file"));
          ASSERT_LT(k, 1000) << "no end of calls";
          fs::remove(path);
          if (exists) put(path, old);
          put(folder / abandoned, "half");
          Result result;
          bool reached = false;
          {
            const int64_t last = failure.times == INT64_MAX ? INT64_MAX : k + failure.times;
            const SystemCalls calls({call, k, last, failure.error});
            errno = 4711;
            result = result_of([&] { save(link, text); });
            reached = calls.count(call) > k;
          }
          const bool in_place = result.has("the new file is in place");
          if (result.status != GA_OK) {
            ++errors;
            EXPECT_TRUE(reached);
            EXPECT_EQ(result.status, GA_ERROR_IO);
            EXPECT_TRUE(result.has(strerror(failure.error))) << result.text;
            EXPECT_TRUE(result.has(link)) << result.text;
          }
          if (in_place) {
            EXPECT_EQ(call, Call::kFsync);
          }
          if (result.status == GA_OK || in_place) {
            EXPECT_EQ(contents(path), text);
          } else if (exists) {
            EXPECT_EQ(contents(path), old);
          } else {
            EXPECT_FALSE(fs::exists(path));
          }
          std::set<std::string> left = folder.temporaries();
          left.erase(abandoned);
          if (call != Call::kUnlinkat) {
            EXPECT_TRUE(left.empty()) << *left.begin() << ", " << result.text;
          }
          ASSERT_EQ(descriptors(), open_before);
          save(link, text);
          ASSERT_TRUE(folder.temporaries().empty());
          ASSERT_EQ(contents(path), text);
          if (!reached) {
            const bool optional = call == Call::kFchmod || call == Call::kFchown;
            EXPECT_TRUE(k > 0 || (optional && !exists)) << "the library does not make this call";
            break;
          }
        }
        // What must not be ignored.
        const bool serious = call == Call::kPwrite || call == Call::kFsync ||
                             call == Call::kRenameat || call == Call::kClose ||
                             call == Call::kOpenat || (call == Call::kFchmod && exists);
        if (serious && failure.error == EIO) {
          EXPECT_GT(errors, 0) << kCallNames[static_cast<int>(call)];
        }
        // Each of the two: the halves of the file, or the file and the folder.
        if ((call == Call::kPwrite || call == Call::kFsync) && failure.error == EIO) {
          EXPECT_EQ(errors, 2) << kCallNames[static_cast<int>(call)];
        }
        if (failure.error == kShort ||
            (failure.error == EINTR &&
             (call == Call::kPwrite || call == Call::kFsync || call == Call::kClose))) {
          EXPECT_EQ(errors, 0) << kCallNames[static_cast<int>(call)];
        }
      }
    }
  }
}

// Errors that say that the file system lacks something are none.
TEST(DiskFaults, WhatAFileSystemMayLack) {
  const Folder folder(in_memory());
  const std::string path = folder / "x";
  put(path, "old");
  int number = 0;
  const auto saves = [&](const Fault& fault) {
    const std::string text = version(++number);
    const SystemCalls calls(fault);
    const Result result = result_of([&] { save(path, text); });
    EXPECT_EQ(result.status, GA_OK) << result.text;
    EXPECT_GT(calls.count(fault.call), fault.from);
    EXPECT_EQ(contents(path), text);
  };
  for (const int error : {EINVAL, EOPNOTSUPP, ENOSYS}) saves({Call::kFsync, 1, 2, error});
  for (const int error : {EINVAL, EOPNOTSUPP, ENOSYS, EIO}) saves({Call::kFallocate, 0, 1, error});
  for (const int error : {EPERM, EOPNOTSUPP, ENOSYS}) saves({Call::kFchmod, 0, 1, error});
  for (const int error : {EPERM, EIO}) saves({Call::kFchown, 0, 2, error});
  saves({Call::kGetrlimit, 0, INT64_MAX, EPERM});
  for (const int error : {ENOSPC, EDQUOT, EFBIG}) {
    const SystemCalls calls({Call::kFallocate, 0, 1, error});
    expect_io_error({"could not be reserved", strerror(error)}, [&] { save(path, "new"); });
  }
  EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
}

TEST(DiskFaults, EveryCallOfAReaderFails) {
  const Folder folder(in_memory());
  const std::string path = folder / "x", text = version(5);
  put(path, text);
  const std::set<int> open_before = descriptors();
  for (const Call call : {Call::kOpen, Call::kFstat, Call::kPread, Call::kClose}) {
    for (const Failure& failure : failures_of(call)) {
      for (int64_t k = 0;; ++k) {
        SCOPED_TRACE(testing::Message()
                     << kCallNames[static_cast<int>(call)] << " number " << k << ", "
                     << failure.times << " times: " << strerror(failure.error));
        ASSERT_LT(k, 1000) << "no end of calls";
        std::string loaded;
        Result result;
        bool reached = false;
        {
          const int64_t last = failure.times == INT64_MAX ? INT64_MAX : k + failure.times;
          const SystemCalls calls({call, k, last, failure.error});
          errno = 4711;
          result = result_of([&] { loaded = load(path); });
          reached = calls.count(call) > k;
        }
        const bool harmless = call == Call::kClose || failure.error == kShort ||
                              (failure.error == EINTR && call != Call::kFstat);
        EXPECT_EQ(result.status, reached && !harmless ? GA_ERROR_IO : GA_OK) << result.text;
        if (result.status == GA_OK) {
          EXPECT_EQ(loaded, text);
        } else {
          EXPECT_TRUE(result.has(strerror(failure.error)) && result.has(path)) << result.text;
        }
        ASSERT_EQ(descriptors(), open_before);
        if (!reached) {
          EXPECT_GT(k, 0) << "the library does not make this call";
          break;
        }
      }
    }
  }
}
// ---- Power loss ---------------------------------------------------------------------------------

TEST(DiskFaults, PowerLoss) {
  for (const bool exists : {true, false}) {
    const Folder folder;
    const std::string path = folder / "x";
    const std::string first = version(3), text = version(5);
    std::optional<std::string> old;
    if (exists) {
      put(path, first);
      old = first;
    }
    const ModelDisk disk(static_cast<int64_t>(stat_of(folder.path()).st_ino),
                         exists ? static_cast<int64_t>(stat_of(path).st_ino) : -1, "x", first);
    std::vector<DiskEvent> events;
    {
      SystemCalls calls({Call::kPwrite, 0, 2, kShort});
      calls.record = &events;
      save(path, text);
    }
    int writes = 0, renames = 0;
    std::vector<size_t> syncs;
    for (size_t i = 0; i < events.size(); ++i) {
      writes += events[i].call == Call::kPwrite;
      renames += events[i].call == Call::kRenameat;
      if (events[i].call == Call::kFsync) syncs.push_back(i);
    }
    ASSERT_EQ(writes, 4);
    ASSERT_EQ(renames, 1);
    ASSERT_EQ(contents(path), text);

    const Losses real = losses(events, disk, "x", old, text);
    EXPECT_GT(real.outcomes, 10);
    EXPECT_EQ(real.broken, 0);
    EXPECT_EQ(real.lost, 0);

    // The model finds what a writer could forget.
    ASSERT_EQ(syncs.size(), 2u);
    std::vector<DiskEvent> forgets = events;
    forgets.erase(forgets.begin() + static_cast<ptrdiff_t>(syncs[0]));
    EXPECT_GT(losses(forgets, disk, "x", old, text).broken, 0) << "without fsync() of the file";
    forgets = events;
    forgets.erase(forgets.begin() + static_cast<ptrdiff_t>(syncs[1]));
    EXPECT_EQ(losses(forgets, disk, "x", old, text).broken, 0);
    EXPECT_GT(losses(forgets, disk, "x", old, text).lost, 0) << "without fsync() of the folder";
    forgets = events;
    std::swap(forgets[syncs[0]], forgets[syncs[0] + 1]);
    EXPECT_GT(losses(forgets, disk, "x", old, text).broken, 0) << "renamed before fsync()";
    forgets = events;
    std::swap(forgets[syncs[0]], forgets[syncs[0] - 1]);
    EXPECT_GT(losses(forgets, disk, "x", old, text).broken, 0) << "written after fsync()";
  }
}

}  // namespace
}  // namespace ga::test
