// SPDX-License-Identifier: Apache-2.0
//
// Makes system calls of the library fail or be short, calls the test before they are made, and
// records what they change on the disk. For programs that are linked with ga_wrap_system_calls()
// and have one source file that includes this header.
//
// The calls are those that the archive makes by these names: a test must expect that the ones that
// it is about are made at all, because the C library may come to use other names, such as pwrite64.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace ga::test {

enum class Call {
  kOpen,
  kOpenat,
  kFstat,
  kFstatat,
  kReadlinkat,
  kFlock,
  kFdopendir,
  kReaddir,
  kFchown,
  kFchmod,
  kGetrlimit,
  kFallocate,
  kPwrite,
  kPread,
  kFsync,
  kFcntl,
  kClose,
  kRenameat,
  kUnlinkat
};
constexpr const char* kCallNames[] = {"open",      "openat",    "fstat",    "fstatat", "readlinkat",
                                      "flock",     "fdopendir", "readdir",  "fchown",  "fchmod",
                                      "getrlimit", "fallocate", "pwrite",   "pread",   "fsync",
                                      "fcntl",     "close",     "renameat", "unlinkat"};
constexpr size_t kCalls = std::size(kCallNames);

// The calls of one name with numbers in [from, to), counted from 0, fail with an error or transfer
// fewer bytes than asked for.
struct Fault {
  Call call;
  int64_t from, to;
  int error;
};
constexpr int kShort = -1;  // in place of an error; for kPwrite and kPread

// A call that has changed something on the disk or has synchronized it.
struct DiskEvent {
  Call call;
  int64_t inode = -1;         // of the file, or of the folder that is synchronized
  int64_t offset = 0;         // kPwrite
  std::string data = {};      // kPwrite
  std::string name = {};      // kOpenat: that was created; kRenameat: the old one; kUnlinkat
  std::string new_name = {};  // kRenameat
};

// While one exists, it counts the system calls of its thread. At most one for each thread.
class SystemCalls {
 public:
  SystemCalls() { active() = this; }
  explicit SystemCalls(const Fault& fault) : fault_(fault) { active() = this; }
  ~SystemCalls() { active() = nullptr; }
  SystemCalls(const SystemCalls&) = delete;
  SystemCalls& operator=(const SystemCalls&) = delete;

  // Is called before each call with its number among those of its name. Its own calls do not count.
  std::function<void(Call call, int64_t number)> before;
  std::vector<DiskEvent>* record = nullptr;

  int64_t count(Call call) const { return counts_[static_cast<size_t>(call)]; }

  // What the wrappers below use. begin() returns the error of the call, kShort, or 0.
  static int begin(Call call) {
    SystemCalls* const self = active();
    if (!self) return 0;
    const int64_t number = self->counts_[static_cast<size_t>(call)]++;
    if (self->before) {
      active() = nullptr;
      const int error = errno;
      self->before(call, number);
      errno = error;
      active() = self;
    }
    const Fault& f = self->fault_;
    return call == f.call && number >= f.from && number < f.to ? f.error : 0;
  }
  static void changed(DiskEvent event, int fd = -1) {
    SystemCalls* const self = active();
    if (!self || !self->record) return;
    if (fd >= 0) event.inode = inode(fd);
    self->record->push_back(std::move(event));
  }

 private:
  static SystemCalls*& active() {
    thread_local SystemCalls* pointer = nullptr;
    return pointer;
  }
  static int64_t inode(int fd);

  Fault fault_ = {Call::kOpen, 0, 0, 0};
  int64_t counts_[kCalls] = {};
};

// Sets errno and returns what a failed call returns.
template <class Result = int>
Result failed(int error, Result result = Result(-1)) {
  errno = error;
  return result;
}

}  // namespace ga::test

extern "C" {

#define GA_WRAP(result, name, ...)   \
  result __real_##name(__VA_ARGS__); \
  result __wrap_##name(__VA_ARGS__)

int __real_open(const char* path, int flags, ...);
int __wrap_open(const char* path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  const mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
  va_end(args);
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kOpen)) return failed(error);
  return __real_open(path, flags, mode);
}

int __real_openat(int folder, const char* path, int flags, ...);
int __wrap_openat(int folder, const char* path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  const mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
  va_end(args);
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kOpenat)) return failed(error);
  const int fd = __real_openat(folder, path, flags, mode);
  if (fd >= 0 && flags & O_CREAT) {
    DiskEvent event = {Call::kOpenat};
    event.name = path;
    SystemCalls::changed(event, fd);
  }
  return fd;
}

GA_WRAP(int, fstat, int fd, struct stat* out) {
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kFstat)) return failed(error);
  return __real_fstat(fd, out);
}

GA_WRAP(int, fstatat, int folder, const char* path, struct stat* out, int flags) {
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kFstatat)) return failed(error);
  return __real_fstatat(folder, path, out, flags);
}

GA_WRAP(ssize_t, readlinkat, int folder, const char* path, char* out, size_t size) {
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kReadlinkat)) return failed(error);
  return __real_readlinkat(folder, path, out, size);
}

GA_WRAP(int, flock, int fd, int operation) {
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kFlock)) return failed(error);
  return __real_flock(fd, operation);
}

GA_WRAP(DIR*, fdopendir, int fd) {
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kFdopendir)) return failed<DIR*>(error, nullptr);
  return __real_fdopendir(fd);
}

GA_WRAP(dirent*, readdir, DIR* list) {
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kReaddir)) return failed<dirent*>(error, nullptr);
  return __real_readdir(list);
}

GA_WRAP(int, fchown, int fd, uid_t user, gid_t group) {
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kFchown)) return failed(error);
  return __real_fchown(fd, user, group);
}

GA_WRAP(int, fchmod, int fd, mode_t mode) {
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kFchmod)) return failed(error);
  return __real_fchmod(fd, mode);
}

#ifdef __GLIBC__
GA_WRAP(int, getrlimit, __rlimit_resource_t resource, struct rlimit* out) {
#else
GA_WRAP(int, getrlimit, int resource, struct rlimit* out) {
#endif
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kGetrlimit)) return failed(error);
  return __real_getrlimit(resource, out);
}

GA_WRAP(int, fallocate, int fd, int mode, off_t offset, off_t size) {
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kFallocate)) return failed(error);
  return __real_fallocate(fd, mode, offset, size);
}

GA_WRAP(ssize_t, pwrite, int fd, const void* data, size_t size, off_t offset) {
  using namespace ga::test;
  const int error = SystemCalls::begin(Call::kPwrite);
  if (error > 0) return failed(error);
  const size_t asked = error == kShort ? std::max<size_t>(size / 2, 1) : size;
  const ssize_t n = __real_pwrite(fd, data, asked, offset);
  if (n > 0) {
    DiskEvent event = {Call::kPwrite};
    event.offset = offset;
    event.data.assign(static_cast<const char*>(data), static_cast<size_t>(n));
    SystemCalls::changed(event, fd);
  }
  return n;
}

GA_WRAP(ssize_t, pread, int fd, void* data, size_t size, off_t offset) {
  using namespace ga::test;
  const int error = SystemCalls::begin(Call::kPread);
  if (error > 0) return failed(error);
  return __real_pread(fd, data, error == kShort ? std::max<size_t>(size / 2, 1) : size, offset);
}

GA_WRAP(int, fsync, int fd) {
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kFsync)) return failed(error);
  const int result = __real_fsync(fd);
  if (result == 0) SystemCalls::changed({Call::kFsync}, fd);
  return result;
}

int __real_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...) {
  va_list args;
  va_start(args, command);
  void* const argument = va_arg(args, void*);
  va_end(args);
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kFcntl)) return failed(error);
  return __real_fcntl(fd, command, argument);
}

// Linux closes the descriptor whatever it returns.
GA_WRAP(int, close, int fd) {
  using namespace ga::test;
  const int error = SystemCalls::begin(Call::kClose);
  const int result = __real_close(fd);
  return error ? failed(error) : result;
}

GA_WRAP(int, renameat, int from, const char* name, int to, const char* new_name) {
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kRenameat)) return failed(error);
  const int result = __real_renameat(from, name, to, new_name);
  if (result == 0) {
    DiskEvent event = {Call::kRenameat};
    event.name = name;
    event.new_name = new_name;
    struct stat file;
    if (__real_fstatat(to, new_name, &file, AT_SYMLINK_NOFOLLOW) == 0)
      event.inode = static_cast<int64_t>(file.st_ino);
    SystemCalls::changed(event);
  }
  return result;
}

GA_WRAP(int, unlinkat, int folder, const char* name, int flags) {
  using namespace ga::test;
  if (const int error = SystemCalls::begin(Call::kUnlinkat)) return failed(error);
  const int result = __real_unlinkat(folder, name, flags);
  if (result == 0) {
    DiskEvent event = {Call::kUnlinkat};
    event.name = name;
    SystemCalls::changed(event);
  }
  return result;
}

#undef GA_WRAP

}  // extern "C"

inline int64_t ga::test::SystemCalls::inode(int fd) {
  struct stat file;
  return __real_fstat(fd, &file) == 0 ? static_cast<int64_t>(file.st_ino) : -1;
}
