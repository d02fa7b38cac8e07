// SPDX-License-Identifier: Apache-2.0
//
// Files that are replaced as a whole, by one writer or several, and files of all kinds that are
// read. test_disk_faults.cpp is about failures.
#include <grp.h>
#include <sys/socket.h>
#include <sys/sysmacros.h>
#include <sys/un.h>

#include <atomic>
#include <climits>
#include <map>
#include <memory>
#include <thread>

#include "child.hpp"
#include "faults.hpp"
#include "posix_files.hpp"

namespace ga::test {
namespace {

TEST(Disk, NothingIsReplacedWithoutCommit) {
  const Folder folder;
  put(folder / "old", "old");
  for (const char* name : {"old", "new"}) {
    auto writer = std::make_unique<FileWriter>((folder / name).c_str());
    writer->write(0, "half", 4);
    EXPECT_EQ(folder.temporaries().size(), 1u);
    EXPECT_EQ(contents(folder / "old"), "old");
    const SystemCalls calls({Call::kUnlinkat, 0, name[0] == 'o' ? 0 : INT64_MAX, EIO});
    errno = 1234;
    writer.reset();
    EXPECT_EQ(errno, 1234);
    EXPECT_EQ(calls.count(Call::kUnlinkat), 1);
  }
  FileWriter((folder / "new").c_str());  // removes the one that could not be removed
  EXPECT_EQ(folder.names(), std::set<std::string>{"old"});
  EXPECT_EQ(contents(folder / "old"), "old");
}

// ---- Links, permissions, names ------------------------------------------------------------------

TEST(Disk, SymbolicLinksStay) {
  const Folder folder;
  fs::create_directories(folder / "far/below");
  const std::string target = folder / "far/target";
  const std::map<std::string, std::string> links = {
      {"absolute", target},
      {"relative", "far/target"},
      {"chain", "relative"},
      {"longer", "far/below/up"},
      {"far/below/up", "../below/../target"},
  };
  for (const auto& [name, to] : links) fs::create_symlink(to, folder / name);
  int number = 0;
  for (const bool dangling : {true, false}) {
    for (const auto& [name, to] : links) {
      SCOPED_TRACE(name);
      if (dangling) fs::remove(target);
      const std::string text = version(++number);
      save(folder / name, text);
      EXPECT_EQ(fs::read_symlink(folder / name), to);
      EXPECT_FALSE(fs::is_symlink(target));
      EXPECT_EQ(contents(target), text);
      EXPECT_EQ(load(folder / name), text);
    }
  }
  const std::set<std::string> far = {"below", "target"};
  for (const auto& entry : fs::directory_iterator(folder / "far"))
    EXPECT_TRUE(far.count(entry.path().filename())) << entry;
  EXPECT_TRUE(folder.temporaries().empty());

  fs::create_symlink("loop", folder / "loop");
  fs::create_symlink("far/", folder / "to_folder");
  fs::create_symlink("missing/target", folder / "to_missing");
  expect_io_error({"loop", strerror(ELOOP)}, [&] { save(folder / "loop", "x"); });
  expect_io_error({"loop", strerror(ELOOP)}, [&] { load(folder / "loop"); });
  expect_io_error({"to_folder", "folder"}, [&] { save(folder / "to_folder", "x"); });
  expect_io_error({"to_missing", "folder could not be opened", strerror(ENOENT)},
                  [&] { save(folder / "to_missing", "x"); });
}

// A chain is as long as Linux allows.
TEST(Disk, ChainsOfLinks) {
  const Folder folder;
  for (int i = 0; i < 41; ++i)
    fs::create_symlink(std::to_string(i), folder / std::to_string(i + 1));
  save(folder / "40", "new");
  EXPECT_EQ(contents(folder / "0"), "new");
  EXPECT_EQ(load(folder / "40"), "new");
  expect_io_error({strerror(ELOOP)}, [&] { save(folder / "41", "x"); });
  expect_io_error({strerror(ELOOP)}, [&] { load(folder / "41"); });
}

TEST(Disk, OtherHardLinksKeepTheOldContents) {
  const Folder folder;
  put(folder / "x", "old");
  fs::create_hard_link(folder / "x", folder / "y");
  save(folder / "x", "new");
  EXPECT_EQ(contents(folder / "x"), "new");
  EXPECT_EQ(contents(folder / "y"), "old");
}

TEST(Disk, PermissionsStay) {
  const Folder folder;
  const std::string path = folder / "x";
  put(path, "old");
  for (const mode_t mode : {0600u, 0640u, 0666u, 0755u, 0700u, 0622u}) {
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
    FileWriter writer(path.c_str());
    EXPECT_EQ(stat_of(folder / *folder.temporaries().begin()).st_mode & 0777, mode);
    writer.commit();
    EXPECT_EQ(stat_of(path).st_mode & 07777, mode);
  }
  // Before the mode is set, nobody else can read the file.
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  {
    SystemCalls calls;
    int checked = 0;
    calls.before = [&](Call call, int64_t) {
      if (call != Call::kFchown && call != Call::kFchmod) return;
      EXPECT_EQ(stat_of(folder / *folder.temporaries().begin()).st_mode & 0777, 0600u);
      ++checked;
    };
    save(path, "new");
    EXPECT_GE(checked, 2);
  }
  in_child([&] {
    for (const mode_t mask : {022u, 077u, 027u, 0u}) {
      umask(mask);
      fs::remove(path);
      save(path, "new");
      EXPECT_EQ(stat_of(path).st_mode & 07777, 0666 & ~mask);
      EXPECT_EQ(umask(mask), mask);
    }
  });
}

TEST(Disk, OwnersStay) {
  if (geteuid() != 0) GTEST_SKIP() << "only root may give files to other users";
  const Folder folder;
  const std::string path = folder / "x";
  put(path, "old");
  ASSERT_EQ(chown(path.c_str(), 65534, 65533), 0);
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  save(path, "new");
  EXPECT_EQ(stat_of(path).st_uid, 65534u);
  EXPECT_EQ(stat_of(path).st_gid, 65533u);
  EXPECT_EQ(stat_of(path).st_mode & 07777, 0640u);
}

// Runs body as a user who is not root.
template <class Body>
void as_user(Body&& body) {
  in_child([&] {
    if (geteuid() == 0) {
      ASSERT_EQ(setgroups(0, nullptr), 0);
      ASSERT_EQ(setgid(65534), 0);
      ASSERT_EQ(setuid(65534), 0);
    }
    body();
  });
}

TEST(Disk, WithoutPermission) {
  const Folder folder;
  const std::string kDenied = strerror(EACCES);
  ASSERT_EQ(chmod(folder.path().c_str(), 0777), 0);
  const mode_t modes[] = {0555, 0333, 0};
  for (const mode_t mode : modes) {
    const std::string name = std::to_string(mode);
    fs::create_directory(folder / name);
    put(folder / (name + "/x"), "old");
    ASSERT_EQ(chmod((folder / (name + "/x")).c_str(), 0666), 0);
    if (geteuid() == 0) {
      ASSERT_EQ(chown((folder / name).c_str(), 65534, 65534), 0);
    }
    ASSERT_EQ(chmod((folder / name).c_str(), mode), 0);
  }
  put(folder / "protected", "old");
  ASSERT_EQ(chmod((folder / "protected").c_str(), 0444), 0);
  put(folder / "secret", "old");
  ASSERT_EQ(chmod((folder / "secret").c_str(), 0), 0);
  as_user([&] {
    for (const mode_t mode : modes) {
      for (const char* name : {"/x", "/new"}) {
        const std::string path = folder / (std::to_string(mode) + name);
        expect_io_error({path, kDenied}, [&] { save(path, "new"); });
      }
    }
    expect_io_error({"a temporary file could not be created", kDenied},
                    [&] { save(folder / "365/new", "new"); });
    expect_io_error({"opened for writing", kDenied}, [&] { save(folder / "protected", "new"); });
    expect_io_error({"opened", kDenied}, [&] { load(folder / "secret"); });
    EXPECT_EQ(load(folder / "protected"), "old");
    save(folder / "mine", "new");  // the user can write here
    EXPECT_EQ(load(folder / "mine"), "new");
  });
  for (const mode_t mode : modes) {
    const std::string name = std::to_string(mode);
    ASSERT_EQ(chmod((folder / name).c_str(), 0777), 0);
    EXPECT_EQ(contents(folder / (name + "/x")), "old");
    for (const auto& entry : fs::directory_iterator(folder / name))
      EXPECT_EQ(entry.path().filename(), "x");
  }
  EXPECT_TRUE(folder.temporaries().empty());
}

// A user may replace the file of another one who lets him write it.
TEST(Disk, FilesOfOtherUsers) {
  if (geteuid() != 0) GTEST_SKIP() << "only root may make files of other users";
  const Folder folder;
  ASSERT_EQ(chmod(folder.path().c_str(), 0777), 0);
  put(folder / "x", "old");
  ASSERT_EQ(chmod((folder / "x").c_str(), 0666), 0);
  as_user([&] { save(folder / "x", "new"); });
  EXPECT_EQ(contents(folder / "x"), "new");
  EXPECT_EQ(stat_of(folder / "x").st_uid, 65534u);
  EXPECT_EQ(stat_of(folder / "x").st_mode & 07777, 0666u);
}

TEST(Disk, WhatIsNotAFile) {
  const Folder folder;
  fs::create_directory(folder / "folder");
  put(folder / "file", "old");
  ASSERT_EQ(mkfifo((folder / "fifo").c_str(), 0666), 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  ASSERT_LT((folder / "socket").size(), sizeof address.sun_path);
  strcpy(address.sun_path, (folder / "socket").c_str());
  const os::Handle listening(socket(AF_UNIX, SOCK_STREAM, 0));
  ASSERT_EQ(bind(static_cast<int>(listening.get()), reinterpret_cast<sockaddr*>(&address),
                 sizeof address),
            0);
  fs::create_symlink("fifo", folder / "link");
  // Not those of /dev, which a defect would replace, if the user may.
  std::string device = "/dev/null";
  if (geteuid() == 0) {
    device = folder / "device";
    if (mknod(device.c_str(), S_IFCHR | 0666, makedev(1, 3)) != 0) device = "";
  }
  ASSERT_EQ(mkfifo((folder / (prefix_of(folder, "y") + "1-0.tmp")).c_str(), 0666), 0);
  const auto before = folder.names();

  in_child([&] {  // its alarm ends an open() that waits for the other end of a FIFO
    const auto refused = [](const std::string& path, const std::string& why,
                            const std::string& reader_why) {
      SCOPED_TRACE(path);
      expect_io_error({path, why}, [&] { save(path, "new"); });
      expect_io_error({path, reader_why}, [&] { load(path); });
    };
    refused(folder / "folder", "it is a folder", "it is a folder");
    refused(folder / "fifo", "it is a FIFO", "it is a FIFO");
    refused(folder / "link", "it is a FIFO", "it is a FIFO");
    refused(folder / "socket", "it is a socket", strerror(ENXIO));
    if (!device.empty()) refused(device, "it is a device", "it is a device");
    for (const char* path : {"/folder/", "/.", "/..", "/folder/."})
      refused(folder.path() + path, "that of a folder", "it is a folder");
    for (const char* path : {"/", ".", "..", "./"}) refused(path, "that of a folder", "folder");
    refused(folder / "file/", "that of a folder", strerror(ENOTDIR));
    refused(folder / "file/x", strerror(ENOTDIR), strerror(ENOTDIR));
    refused(folder / "missing/x", strerror(ENOENT), strerror(ENOENT));
    expect_io_error({"could not be opened", strerror(ENOENT)}, [&] { load(folder / "missing"); });
    save(folder / "y", "new");  // though a FIFO has the name of an abandoned file
    fs::remove(folder / "y");
  });
  EXPECT_EQ(folder.names(), before);
  in_child([&] {  // a FIFO takes the place of a file that has been examined
    SystemCalls calls;
    calls.before = [&](Call call, int64_t number) {
      if (call == Call::kOpenat && number == 1) fs::rename(folder / "fifo", folder / "file");
    };
    expect_io_error({"opened for writing", strerror(ENXIO)}, [&] { save(folder / "file", "new"); });
    EXPECT_TRUE(fs::is_fifo(folder / "file"));
  });
  EXPECT_TRUE(fs::is_empty(folder / "folder"));
  EXPECT_EQ(folder.temporaries().size(), 1u);
}

TEST(Disk, RemovedWhileItIsReplaced) {
  const Folder folder;
  put(folder / "x", "old");
  SystemCalls calls;
  calls.before = [&](Call call, int64_t number) {
    if (call == Call::kOpenat && number == 1) fs::remove(folder / "x");
  };
  save(folder / "x", "new");
  EXPECT_EQ(contents(folder / "x"), "new");
}

TEST(Disk, LongNames) {
  const Folder folder;
  const std::string longest(NAME_MAX, 'n');
  save(folder / longest, "new");
  save(folder / longest, "newer");
  EXPECT_EQ(load(folder / longest), "newer");
  EXPECT_EQ(folder.names(), std::set<std::string>{longest});
  for (const size_t size : {NAME_MAX + 1, PATH_MAX, 100000}) {
    const std::string path = folder / std::string(size, 'n');
    expect_io_error({"n\"", strerror(ENAMETOOLONG)}, [&] { save(path, "new"); });
    expect_io_error({"n\"", strerror(ENAMETOOLONG)}, [&] { load(path); });
  }
  // A message is cut between characters.
  for (int shift = 0; shift < 2; ++shift) {
    std::string path(static_cast<size_t>(shift), 'n');
    for (int i = 0; i < 1000; ++i) path += "\u00e4";
    path += "n";
    const Result result = result_of([&] { load(path); });
    const size_t from = result.text.find("...");
    ASSERT_NE(from, std::string::npos);
    EXPECT_EQ(result.text.compare(from + 3, 2, "\u00e4"), 0);
    EXPECT_LT(result.text.size(), 1023u);
  }
}

TEST(Disk, RelativePaths) {
  const Folder folder;
  fs::create_directory(folder / "sub");
  fs::create_directory(folder / "other");
  in_child([&] {
    ASSERT_EQ(chdir(folder.path().c_str()), 0);
    for (const std::string path : {"x", "./y", "sub/z", "sub/../w", "sub//v"}) {
      save(path, "old");
      save(path, path);
      EXPECT_EQ(load(path), path);
    }
    // The current folder, and where the folder is, matter no more.
    FileWriter writer("sub/x");
    writer.write(0, "new", 3);
    ASSERT_EQ(chdir("other"), 0);
    fs::rename(folder / "sub", folder / "moved");
    writer.commit();
  });
  EXPECT_EQ(contents(folder / "moved/x"), "new");
  EXPECT_TRUE(fs::is_empty(folder / "other"));
  EXPECT_EQ(folder.names(), (std::set<std::string>{"x", "y", "w", "moved", "other"}));
}

TEST(Disk, Descriptors) {
  const Folder folder;
  put(folder / "x", "old");
  const std::set<int> before = descriptors();
  {
    FileWriter writer((folder / "x").c_str());
    const FileReader reader((folder / "x").c_str());
    int opened = 0;
    for (const int fd : descriptors()) {
      if (before.count(fd)) continue;
      ++opened;
      EXPECT_TRUE(fcntl(fd, F_GETFD) & FD_CLOEXEC) << fd;
    }
    EXPECT_EQ(opened, 3);
    writer.commit();
  }
  EXPECT_EQ(descriptors(), before);
}

// ---- Limits -------------------------------------------------------------------------------------

// The process lives, though the kernel sends SIGXFSZ to those that write beyond their limit.
TEST(Disk, LimitOfTheProcess) {
  const Folder folder;
  put(folder / "x", "old");
  in_child([&] {
    const rlimit limit = {100000, 100000};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    const std::string most = std::string(100000, 'm');
    const std::vector<std::string> parts = {"beyond 100000 bytes", strerror(EFBIG)};
    const std::string path = folder / "x";
    expect_io_error(parts, [&] { save(path, most + "m"); });
    expect_io_error(parts, [&] { FileWriter(path.c_str()).reserve(100001); });
    expect_io_error(parts, [&] {
      FileWriter writer(path.c_str());
      writer.write(0, most.data(), most.size());
      writer.write(100000, "m", 1);
    });
    expect_io_error(parts, [&] {
      FileWriter writer(path.c_str());
      writer.write(int64_t{1} << 40, "m", 1);
    });
    EXPECT_EQ(load(path), "old");
    EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
    save(path, most);
    EXPECT_EQ(load(path), most);
  });
}

TEST(Disk, FullDisk) {
  const Folder folder;
  fs::create_directory(folder / "small");
  const bool mounted = on_small_disk(folder / "small", [&] {
    const std::string path = folder / "small/x";
    const std::string small(20000, 's'), large(100000, 'l');
    const std::string kFull = strerror(ENOSPC);
    const auto unchanged = [&] {
      EXPECT_EQ(load(path), small);
      EXPECT_EQ(std::distance(fs::directory_iterator(folder / "small"), {}), 1);
    };
    save(path, small);
    expect_io_error({path, "could not be reserved", kFull}, [&] { save(path, large); });
    unchanged();
    for (const size_t piece : {large.size(), size_t{1000}}) {
      FileWriter writer(path.c_str());
      expect_io_error({path, "could not be written", kFull}, [&] {
        for (size_t i = 0; i < large.size(); i += piece)
          writer.write(static_cast<int64_t>(i), large.data() + i, piece);
      });
      unchanged();
    }
    save(path, small);
    unchanged();
  });
  if (!mounted) GTEST_SKIP() << "this process may not mount a small disk";
}

TEST(Disk, FilesThatChangeWhileTheyAreRead) {
  const Folder folder;
  const std::string path = folder / "x";
  const std::string old = version(1);
  put(path, old);
  std::string text(old.size(), '?');
  {  // is replaced
    const FileReader reader(path.c_str());
    save(path, "new");
    reader.read(0, text.data(), text.size());
    EXPECT_EQ(text, old);
  }
  put(path, old);
  const FileReader reader(path.c_str());
  fs::resize_file(path, 500);
  EXPECT_EQ(reader.size(), static_cast<int64_t>(old.size()));
  expect_io_error({path, "ended before byte 500"},
                  [&] { reader.read(0, text.data(), text.size()); });
  reader.read(0, text.data(), 500);
  EXPECT_EQ(text.substr(0, 500), old.substr(0, 500));
}

// ---- Several writers ----------------------------------------------------------------------------

constexpr int kSaves = 2000;  // enough for the reader to get its turns on a busy machine

// Reads until the writers have ended. Every content is whole, and many are seen.
template <class Done>
void expect_whole_until(const std::string& path, Done&& done) {
  std::set<std::string> seen;
  while (!done()) {
    const std::string text = load(path);
    ASSERT_TRUE(is_whole(text)) << text.size() << " bytes";
    seen.insert(text.substr(0, text.find('\n')));
  }
  EXPECT_GT(seen.size(), 3u);
}

TEST(Disk, ThreadsThatWriteOneFile) {
  const Folder folder(in_memory());
  const std::string path = folder / "x";
  save(path, version(0));
  std::atomic<int> left{2};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      const Result result = result_of([&] {
        for (int i = 0; i < kSaves; ++i) save(path, version(1000 * t + i));
      });
      EXPECT_EQ(result.status, GA_OK) << result.text;
      --left;
    });
  }
  expect_whole_until(path, [&] { return left == 0; });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
}

TEST(Disk, ProcessesThatWriteOneFile) {
  const Folder folder(in_memory());
  const std::string path = folder / "x";
  save(path, version(0));
  std::vector<pid_t> children;
  for (int t = 0; t < 2; ++t) {
    fflush(stdout);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);
      const Result result = result_of([&] {
        for (int i = 0; i < kSaves; ++i) save(path, version(1000 * t + i));
      });
      if (result.status != GA_OK) fprintf(stderr, "%s\n", result.text.c_str());
      _exit(result.status);
    }
    children.push_back(child);
  }
  size_t ended = 0;
  expect_whole_until(path, [&] {
    int status = 0;
    while (ended < children.size() && waitpid(children[ended], &status, WNOHANG) != 0) {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == GA_OK) << "status " << status;
      ++ended;
    }
    return ended == children.size();
  });
  EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
}

TEST(Disk, AbandonedFilesAreRemoved) {
  const Folder folder;
  const std::string x = prefix_of(folder, "x"), y = prefix_of(folder, "y");
  EXPECT_NE(x, y);
  ASSERT_TRUE(folder.names().empty());
  put(folder / (x + "1-0.tmp"), "half");
  put(folder / (x + "1-1.tmp"), "");
  ASSERT_EQ(chmod((folder / (x + "1-1.tmp")).c_str(), 0200), 0);
  // Names and kinds of files that no writer of x has made: all of them stay.
  const std::set<std::string> others = {y + "1-0.tmp", x + "1-0.tmp~", x,
                                        x + "2-0.tmp", x + "2-1.tmp",  "x.tmp"};
  for (const std::string& name : others) {
    if (name == x + "2-0.tmp")
      fs::create_directory(folder / name);
    else if (name == x + "2-1.tmp")
      fs::create_symlink("x.tmp", folder / name);
    else
      put(folder / name, "other");
  }
  const std::string path = folder / "x";
  FileWriter writer(path.c_str());
  writer.write(0, "live", 4);
  save(path, "new");  // this writer, too, leaves the file of a live one
  std::set<std::string> names = folder.names();
  EXPECT_EQ(names.erase("x"), 1u);
  EXPECT_EQ(names.size(), others.size() + 1);
  for (const std::string& name : others) EXPECT_TRUE(names.count(name)) << name;
  writer.commit();
  EXPECT_EQ(contents(path), "live");
  names = folder.names();
  EXPECT_EQ(names.erase("x"), 1u);
  EXPECT_EQ(names, others);
}

TEST(Disk, WithoutLocksNothingIsRemoved) {
  const Folder folder;
  const std::string abandoned = prefix_of(folder, "x") + "1-0.tmp";
  put(folder / abandoned, "half");
  for (const int error : {EOPNOTSUPP, ENOLCK, ENOSYS, EINVAL}) {
    const SystemCalls calls({Call::kFlock, 0, INT64_MAX, error});
    save(folder / "x", "new");
    EXPECT_EQ(calls.count(Call::kFlock), 2);
    EXPECT_EQ(folder.names(), (std::set<std::string>{"x", abandoned}));
  }
  save(folder / "x", "new");
  EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
}

// Where locks do not work, a name that is in use is left alone too.
TEST(Disk, TemporaryNamesInUse) {
  const Folder folder;
  const std::string prefix = prefix_of(folder, "x") + std::to_string(getpid()) + "-";
  std::string last;
  {
    const FileWriter writer((folder / "x").c_str());
    last = *folder.temporaries().begin();
  }
  const int number = atoi(last.c_str() + prefix.size());
  std::set<std::string> used;
  for (int i = 1; i <= 20; ++i) {
    used.insert(prefix + std::to_string(number + i) + ".tmp");
  }
  for (const std::string& name : used) put(folder / name, "used");
  const SystemCalls calls({Call::kFlock, 0, INT64_MAX, EOPNOTSUPP});
  save(folder / "x", "new");
  EXPECT_EQ(contents(folder / "x"), "new");
  EXPECT_EQ(folder.temporaries(), used);
  for (const std::string& name : used) EXPECT_EQ(contents(folder / name), "used");
}

// A name that looks abandoned becomes that of another file before it is locked.
TEST(Disk, AbandonedNamesThatAreUsedAgain) {
  const Folder folder;
  const std::string temporary = folder / (prefix_of(folder, "x") + "1-0.tmp");
  put(temporary, "first");
  {
    SystemCalls calls;
    calls.before = [&](Call call, int64_t number) {
      if (call != Call::kFlock || number != 0) return;
      fs::rename(temporary, folder / "x");
      put(temporary, "second");
    };
    save(folder / "x", "new");
  }
  EXPECT_EQ(contents(folder / "x"), "new");
  EXPECT_EQ(contents(temporary), "second");
}

// Another writer saves the same file between two system calls of a writer. A temporary file that is
// not locked yet is removed by it, and the writer makes a new one; one that is locked stays.
TEST(Disk, AnotherWriterBetweenTwoCalls) {
  const Folder folder(in_memory());
  const std::string path = folder / "x";
  put(path, "old");
  SystemCalls calls;
  int removed = 0, others = 0;
  // Before flock() only three times, or the writer would never end.
  calls.before = [&](Call call, int64_t) {
    if (call == Call::kFlock && removed++ < 3) {
      EXPECT_EQ(folder.temporaries().size(), 1u);
      save(path, version(removed));
      EXPECT_TRUE(folder.temporaries().empty()) << "a file without a lock stayed";
    } else if (call == Call::kPwrite || call == Call::kFsync || call == Call::kFcntl ||
               call == Call::kRenameat) {
      const auto before = folder.temporaries();
      save(path, version(++others));
      EXPECT_EQ(folder.temporaries(), before);
    }
  };
  save(path, "new");
  EXPECT_EQ(removed, 4);
  EXPECT_GE(others, 5);
  EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
}
}  // namespace
}  // namespace ga::test
