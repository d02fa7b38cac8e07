// SPDX-License-Identifier: Apache-2.0
#include "files/disk.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <climits>
#include <cstdio>
#include <string_view>
#include <system_error>

#include "core/error.hpp"
#include "core/os/system.hpp"

namespace ga {
namespace {

constexpr size_t kPiece = size_t{1} << 30;  // Linux reads and writes less than 2 GiB at a time
constexpr int kMostLinks = 40;              // as Linux follows
constexpr int kMostNames = 10000;           // tried for a temporary file
constexpr std::string_view kSuffix = ".tmp";

// Calls again what a signal has interrupted.
template <class Call>
auto retry(Call&& call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

[[noreturn]] void fail_io(const std::string& path, const char* what) {
  Subject{"file", shown(path).c_str()}.fail(GA_ERROR_IO, "%s", what);
}

[[noreturn]] void fail_io(const std::string& path, const char* what, int error) {
  Subject{"file", shown(path).c_str()}.fail(GA_ERROR_IO, "%s: %s", what,
                                            std::generic_category().message(error).c_str());
}

const char* checked(const char* path) {
  if (!path) fail(GA_ERROR_INVALID_ARGUMENT, "path was NULL");
  if (!*path) fail(GA_ERROR_INVALID_ARGUMENT, "path was empty, expected the name of a file");
  return path;
}

void require_regular(const std::string& path, mode_t mode) {
  if (S_ISREG(mode)) return;
  if (S_ISDIR(mode)) fail_io(path, "it is a folder, not a file");
  if (S_ISFIFO(mode)) fail_io(path, "it is a FIFO, not a regular file");
  if (S_ISSOCK(mode)) fail_io(path, "it is a socket, not a regular file");
  if (S_ISCHR(mode) || S_ISBLK(mode)) fail_io(path, "it is a device, not a regular file");
  fail_io(path, "it is not a regular file");
}

// What begins the temporary names for a target. Its own name could be too long to be a part of
// them.
std::string temporary_prefix(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  char text[32];
  std::snprintf(text, sizeof text, ".gradaccum-%016" PRIx64 "-", hash);
  return text;
}

bool is_temporary(std::string_view name, std::string_view prefix) {
  return name.size() > prefix.size() + kSuffix.size() && name.substr(0, prefix.size()) == prefix &&
         name.substr(name.size() - kSuffix.size()) == kSuffix;
}

// A writer holds this lock as long as its temporary file exists. The kernel releases the lock of a
// process that ends.
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

}  // namespace

std::string shown(const std::string& path) {
  constexpr size_t kMost = 600;
  if (path.size() <= kMost) return path;
  size_t from = path.size() - kMost;
  while (from < path.size() && (path[from] & 0xC0) == 0x80) ++from;  // at a UTF-8 character
  return "..." + path.substr(from);
}

void Descriptor::reset(int fd) noexcept {
  if (fd_ >= 0) {
    const int error = errno;
    close(fd_);  // never again if interrupted: Linux has closed it
    errno = error;
  }
  fd_ = fd;
}

// ---- Writing ------------------------------------------------------------------------------------

// Delegates, so that the destructor runs if this constructor throws.
FileWriter::FileWriter(const char* path) : FileWriter() {
  path_ = checked(path);
  struct stat target;
  const bool exists = find_target(&target);
  prefix_ = temporary_prefix(name_);
  remove_abandoned();
  create_temporary(exists);
  if (exists) copy_permissions(target);
}

FileWriter::~FileWriter() { discard(); }

// Follows symbolic links to the folder and the name of the file itself. Returns false if there is
// no such file yet. Later calls use the open folder: they do not depend on the current one, and the
// temporary file cannot come into another folder, or file system, than the target is in.
bool FileWriter::find_target(struct stat* target) {
  std::string path = path_;
  for (int links = 0; links <= kMostLinks; ++links) {
    const size_t slash = path.rfind('/');
    const std::string in =
        slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
    name_ = path.substr(slash + 1);  // npos + 1 is 0
    if (name_.empty() || name_ == "." || name_ == "..")
      fail_io(path_, "the path is that of a folder, not of a file");
    const int from = folder_ ? folder_.get() : AT_FDCWD;
    const int folder =
        retry([&] { return openat(from, in.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
    if (folder < 0) fail_io(path_, "its folder could not be opened", errno);
    folder_.reset(folder);

    if (fstatat(folder, name_.c_str(), target, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) return false;
      fail_io(path_, "could not be examined", errno);
    }
    if (!S_ISLNK(target->st_mode)) {
      require_regular(path_, target->st_mode);
      constexpr int kFlags = O_WRONLY | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW | O_CLOEXEC;
      const Descriptor writable(retry([&] { return openat(folder, name_.c_str(), kFlags); }));
      if (!writable && errno != ENOENT)  // removed since
        fail_io(path_, "could not be opened for writing", errno);
      return true;
    }
    char link[PATH_MAX];
    const ssize_t length = readlinkat(folder, name_.c_str(), link, sizeof link);
    if (length < 0) fail_io(path_, "a symbolic link could not be read", errno);
    path.assign(link, static_cast<size_t>(length));
  }
  fail_io(path_, "could not be found", ELOOP);
}

// Removes the temporary files of writers that have ended without removing them. If one cannot be
// removed, it stays for the next writer.
void FileWriter::remove_abandoned() const noexcept {
  Descriptor folder(openat(folder_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  DIR* const list = folder ? fdopendir(folder.get()) : nullptr;
  if (!list) return;
  folder.release();  // to the list
  while (const dirent* entry = readdir(list)) {
    const char* const name = entry->d_name;
    if (!is_temporary(name, prefix_)) continue;
    constexpr int kFlags = O_WRONLY | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW | O_CLOEXEC;
    const Descriptor file(openat(folder_.get(), name, kFlags));
    // A writer may have renamed the file to its target since, and unlocked it.
    if (file && lock(file.get()) == 0 && is_named(folder_.get(), name, file.get()) == Named::kYes)
      unlinkat(folder_.get(), name, 0);
  }
  closedir(list);
}

// is_private: until copy_permissions(), nobody else may read what perhaps nobody else may read.
void FileWriter::create_temporary(bool is_private) {
  static std::atomic<uint64_t> counter{0};
  constexpr const char* kFailed = "a temporary file could not be created beside it";
  for (int names = 0; names < kMostNames; ++names) {
    temporary_ =
        prefix_ + std::to_string(os::process_id()) + "-" + std::to_string(counter.fetch_add(1));
    temporary_ += kSuffix;
    const int fd = retry([&] {
      return openat(folder_.get(), temporary_.c_str(),
                    O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, is_private ? 0600 : 0666);
    });
    if (fd < 0 && errno == EEXIST) continue;
    if (fd < 0) fail_io(path_, kFailed, errno);
    file_.reset(fd);

    // Between openat() and lock(), another writer may take the file for an abandoned one.
    const bool taken = lock(fd) != 0 && errno == EWOULDBLOCK;
    const Named named = taken ? Named::kNo : is_named(folder_.get(), temporary_.c_str(), fd);
    if (named == Named::kYes) return;
    if (named == Named::kUnknown) give_up(kFailed, errno);
    file_.reset();
  }
  fail_io(path_, kFailed, EEXIST);
}

void FileWriter::copy_permissions(const struct stat& target) {
  // Only root may give a file to another user; other processes may set some groups.
  const bool owned = fchown(file_.get(), target.st_uid, target.st_gid) == 0 ||
                     fchown(file_.get(), static_cast<uid_t>(-1), target.st_gid) == 0;
  static_cast<void>(owned);
  // The file systems that have no permission bits refuse to change them.
  if (fchmod(file_.get(), target.st_mode & 0777) != 0 && errno != EPERM && errno != EOPNOTSUPP &&
      errno != ENOSYS)
    give_up("the permissions of the new file could not be set", errno);
}

void FileWriter::require_open() const {
  if (!file_) Subject{"file", shown(path_).c_str()}.fail(GA_ERROR_INTERNAL, "its writer has ended");
}

// A process that writes beyond its RLIMIT_FSIZE gets a signal that kills it, so it must not try.
void FileWriter::require_allowed(int64_t end) {
  rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || end <= 0 ||
      static_cast<uint64_t>(end) <= limit.rlim_cur)
    return;
  char text[128];
  std::snprintf(text, sizeof text,
                "could not be written beyond %llu bytes, the limit of the process (RLIMIT_FSIZE)",
                static_cast<unsigned long long>(limit.rlim_cur));
  give_up(text, EFBIG);
}

void FileWriter::reserve(int64_t size) {
  require_open();
  if (size <= 0) return;
  require_allowed(size);
  const int error = os::reserve_room(file_.get(), size);
  if (error == ENOSPC || error == EDQUOT || error == EFBIG)
    give_up("room on the disk could not be reserved", error);
}

void FileWriter::write(int64_t offset, const void* data, size_t size) {
  require_open();
  const char* from = static_cast<const char*>(data);
  while (size > 0) {
    const size_t piece = std::min(size, kPiece);
    if (offset < 0 || offset > INT64_MAX - static_cast<int64_t>(piece))
      give_up("could not be written", EFBIG);
    require_allowed(offset + static_cast<int64_t>(piece));
    const ssize_t n = retry([&] { return pwrite(file_.get(), from, piece, offset); });
    if (n <= 0) give_up("could not be written", n < 0 ? errno : EIO);
    from += n;
    offset += n;
    size -= static_cast<size_t>(n);
  }
}

void FileWriter::commit() {
  require_open();
  if (const int error = os::synchronize(file_.get()); error != 0)
    give_up("could not be synchronized with the disk", error);
  // Some file systems report errors of earlier writes when a descriptor is closed. The file itself
  // stays open, because the lock must last until the temporary name is gone.
  const int copy = fcntl(file_.get(), F_DUPFD_CLOEXEC, 0);
  if (copy < 0 || (close(copy) != 0 && errno != EINTR)) give_up("could not be closed", errno);
  if (renameat(folder_.get(), temporary_.c_str(), folder_.get(), name_.c_str()) != 0)
    give_up("could not be replaced by the new file", errno);
  file_.reset();
  // Some file systems have no fsync() of folders.
  const int error = os::synchronize(folder_.get());
  if (error != 0 && error != EINVAL && error != EOPNOTSUPP && error != ENOSYS)
    fail_io(
        path_,
        "the new file is in place, but its folder could not be synchronized with the disk, so a "
        "power failure may bring back the old file",
        error);
}

void FileWriter::discard() noexcept {
  if (!file_) return;
  const int error = errno;
  unlinkat(folder_.get(), temporary_.c_str(), 0);
  errno = error;
  file_.reset();
}

void FileWriter::give_up(const char* what, int error) {
  discard();
  fail_io(path_, what, error);
}

// ---- Reading ------------------------------------------------------------------------------------

FileReader::FileReader(const char* path) : path_(checked(path)) {
  // O_NONBLOCK: opening a FIFO would wait for a writer. Reading a regular file ignores the flag.
  file_.reset(retry([&] { return open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC); }));
  if (!file_) fail_io(path_, "could not be opened", errno);
  struct stat file;
  if (fstat(file_.get(), &file) != 0) fail_io(path_, "could not be examined", errno);
  require_regular(path_, file.st_mode);
  size_ = file.st_size;
}

void FileReader::read(int64_t offset, void* data, size_t size) const {
  char* to = static_cast<char*>(data);
  while (size > 0) {
    const size_t piece = std::min(size, kPiece);
    const ssize_t n = retry([&] { return pread(file_.get(), to, piece, offset); });
    if (n < 0) fail_io(path_, "could not be read", errno);
    if (n == 0) {
      char text[128];
      std::snprintf(text, sizeof text, "it ended before byte %lld, and %zu more were to be read",
                    ll(offset), size);
      fail_io(path_, text);
    }
    to += n;
    offset += n;
    size -= static_cast<size_t>(n);
  }
}

}  // namespace ga
