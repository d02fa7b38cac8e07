// SPDX-License-Identifier: Apache-2.0
// Files of Linux and macOS.
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <system_error>

#include "core/os/files.hpp"

namespace ga::os {
namespace {

int fd_of(const Handle& handle) { return static_cast<int>(handle.get()); }
int fd_of(const Folder& folder) { return fd_of(folder.handle); }

// Calls again what a signal has interrupted.
template <class Call>
auto retry(Call&& call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

template <class Call>
int error_of(Call&& call) {
  return retry(call) < 0 ? errno : 0;
}

Kind kind_of(mode_t mode) {
  if (S_ISREG(mode)) return Kind::kFile;
  if (S_ISDIR(mode)) return Kind::kFolder;
  if (S_ISLNK(mode)) return Kind::kLink;
  if (S_ISFIFO(mode)) return Kind::kFifo;
  if (S_ISSOCK(mode)) return Kind::kSocket;
  if (S_ISCHR(mode) || S_ISBLK(mode)) return Kind::kDevice;
  return Kind::kOther;
}

Entry entry_of(const struct stat& file) {
  return {kind_of(file.st_mode), file.st_size, file.st_uid, file.st_gid, file.st_mode & 0777u};
}

// The kernel releases the lock of a process that ends.
int lock(int fd) {
  return retry([&] { return flock(fd, LOCK_EX | LOCK_NB); });
}

enum class Named { kYes, kNo, kUnknown };

// Whether the name in the folder still is that of the open file.
Named is_named(int folder, const char* name, int fd) {
  struct stat file, entry;
  if (fstat(fd, &file) != 0) return Named::kUnknown;
  if (fstatat(folder, name, &entry, AT_SYMLINK_NOFOLLOW) != 0)
    return errno == ENOENT ? Named::kNo : Named::kUnknown;
  return file.st_dev == entry.st_dev && file.st_ino == entry.st_ino ? Named::kYes : Named::kNo;
}

constexpr int kOpenToWrite = O_WRONLY | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW | O_CLOEXEC;

}  // namespace

void Handle::reset(intptr_t value) noexcept {
  if (*this) {
    const int error = errno;
    close(fd_of(*this));  // never again if interrupted: Linux has closed it
    errno = error;
  }
  value_ = value;
}

// ---- Errors -------------------------------------------------------------------------------------

std::string explain(int error) { return std::generic_category().message(error); }

const int kInputOutput = EIO, kExists = EEXIST, kTooLarge = EFBIG, kTooManyLinks = ELOOP;

// ---- Names --------------------------------------------------------------------------------------

void split(const std::string& path, std::string* folder, std::string* name) {
  const size_t slash = path.rfind('/');
  *folder = slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
  *name = path.substr(slash + 1);  // npos + 1 is 0
  if (*name == "." || *name == "..") name->clear();
}

int open_folder(const Folder& from, const std::string& path, Folder* out) {
  const int at = from.handle ? fd_of(from) : AT_FDCWD;
  const int fd =
      retry([&] { return openat(at, path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (fd < 0) return errno;
  out->handle.reset(fd);
  return 0;
}

int examine(const Folder& folder, const std::string& name, Entry* out) {
  struct stat file;
  *out = {};
  if (fstatat(fd_of(folder), name.c_str(), &file, AT_SYMLINK_NOFOLLOW) != 0)
    return errno == ENOENT ? 0 : errno;
  *out = entry_of(file);
  return 0;
}

int read_link(const Folder& folder, const std::string& name, std::string* out) {
  char link[PATH_MAX];
  const ssize_t length = readlinkat(fd_of(folder), name.c_str(), link, sizeof link);
  if (length < 0) return errno;
  out->assign(link, static_cast<size_t>(length));
  return 0;
}

int check_writable(const Folder& folder, const std::string& name) {
  const Handle file(retry([&] { return openat(fd_of(folder), name.c_str(), kOpenToWrite); }));
  return file || errno == ENOENT ? 0 : errno;
}

void each_name(const Folder& folder, const std::function<void(const char*)>& f) noexcept {
  Handle copy(openat(fd_of(folder), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  DIR* const list = copy ? fdopendir(fd_of(copy)) : nullptr;
  if (!list) return;
  copy.release();  // to the list
  while (const dirent* entry = readdir(list)) f(entry->d_name);
  closedir(list);
}

// ---- Writing ------------------------------------------------------------------------------------

int create_locked(const Folder& folder, const std::string& name, bool is_private, Handle* file) {
  const int fd = retry([&] {
    return openat(fd_of(folder), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                  is_private ? 0600 : 0666);
  });
  if (fd < 0) return errno == EEXIST ? kTaken : errno;
  file->reset(fd);

  // Between openat() and lock(), another writer may take the file for an abandoned one.
  const bool taken = lock(fd) != 0 && errno == EWOULDBLOCK;
  const Named named = taken ? Named::kNo : is_named(fd_of(folder), name.c_str(), fd);
  if (named == Named::kYes) return 0;
  if (named == Named::kUnknown) return errno;
  file->reset();
  return kTaken;
}

void remove_unlocked(const Folder& folder, const char* name) noexcept {
  const Handle file(openat(fd_of(folder), name, kOpenToWrite));
  // A writer may have renamed the file to its target since, and unlocked it.
  if (file && lock(fd_of(file)) == 0 && is_named(fd_of(folder), name, fd_of(file)) == Named::kYes)
    unlinkat(fd_of(folder), name, 0);
}

void remove_own(const Folder& folder, const std::string& name, const Handle&) noexcept {
  const int error = errno;
  unlinkat(fd_of(folder), name.c_str(), 0);
  errno = error;
}

int copy_permissions(const Folder&, const std::string&, const Entry& from, const Handle& to) {
  // Only root may give a file to another user; other processes may set some groups.
  const bool owned = fchown(fd_of(to), from.user, from.group) == 0 ||
                     fchown(fd_of(to), static_cast<uid_t>(-1), from.group) == 0;
  static_cast<void>(owned);
  // The file systems that have no permission bits refuse to change them.
  if (fchmod(fd_of(to), static_cast<mode_t>(from.mode)) != 0 && errno != EPERM &&
      errno != EOPNOTSUPP && errno != ENOSYS)
    return errno;
  return 0;
}

uint64_t file_size_limit() {
  rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
  return limit.rlim_cur;
}

int reserve_room(const Handle& file, int64_t bytes) {
#ifdef __linux__
  const int error = error_of([&] { return fallocate(fd_of(file), FALLOC_FL_KEEP_SIZE, 0, bytes); });
#else
  fstore_t room = {F_ALLOCATEALL, F_PEOFPOSMODE, 0, bytes, 0};
  const int error = error_of([&] { return fcntl(fd_of(file), F_PREALLOCATE, &room); });
#endif
  return error == ENOSPC || error == EDQUOT || error == EFBIG ? error : 0;
}

int write_at(const Handle& file, int64_t offset, const void* data, size_t size, size_t* written) {
  const ssize_t n = retry([&] { return pwrite(fd_of(file), data, size, offset); });
  if (n < 0) return errno;
  *written = static_cast<size_t>(n);
  return 0;
}

int synchronize(const Handle& file) {
#ifdef F_FULLFSYNC  // fsync() of macOS leaves data in the cache of the disk; some file systems have no more
  if (fcntl(fd_of(file), F_FULLFSYNC) == 0) return 0;
#endif
  return error_of([&] { return fsync(fd_of(file)); });
}

// By closing a copy: the lock of the file must last until its temporary name is gone.
int check_close(const Handle& file) {
  const int copy = fcntl(fd_of(file), F_DUPFD_CLOEXEC, 0);
  return copy < 0 || (close(copy) != 0 && errno != EINTR) ? errno : 0;
}

int rename_over(const Folder& folder, const std::string& from, const std::string& to,
                const Handle&) {
  return renameat(fd_of(folder), from.c_str(), fd_of(folder), to.c_str()) != 0 ? errno : 0;
}

int synchronize(const Folder& folder) {
  const int error = synchronize(folder.handle);
  return error == EINVAL || error == EOPNOTSUPP || error == ENOSYS ? 0 : error;
}

// ---- Reading ------------------------------------------------------------------------------------

int open_for_reading(const char* path, Handle* file) {
  // O_NONBLOCK: opening a FIFO would wait for a writer. Reading a regular file ignores the flag.
  const int fd = retry([&] { return open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC); });
  if (fd < 0) return errno;
  file->reset(fd);
  return 0;
}

int describe(const Handle& file, Entry* out) {
  struct stat found;
  if (fstat(fd_of(file), &found) != 0) return errno;
  *out = entry_of(found);
  return 0;
}

int read_at(const Handle& file, int64_t offset, void* data, size_t size, size_t* got) {
  const ssize_t n = retry([&] { return pread(fd_of(file), data, size, offset); });
  if (n < 0) return errno;
  *got = static_cast<size_t>(n);
  return 0;
}

}  // namespace ga::os
