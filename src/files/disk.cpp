// SPDX-License-Identifier: Apache-2.0
#include "files/disk.hpp"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <string_view>

#include "core/error.hpp"
#include "core/os/system.hpp"

namespace ga {
namespace {

constexpr size_t kPiece = size_t{1} << 30;  // Linux reads and writes less than 2 GiB at a time
constexpr int kMostLinks = 40;              // as Linux follows
constexpr int kMostNames = 10000;           // tried for a temporary file
constexpr std::string_view kSuffix = ".tmp";

[[noreturn]] void fail_io(const std::string& path, const char* what) {
  Subject{"file", shown(path).c_str()}.fail(GA_ERROR_IO, "%s", what);
}

[[noreturn]] void fail_io(const std::string& path, const char* what, int error) {
  Subject{"file", shown(path).c_str()}.fail(GA_ERROR_IO, "%s: %s", what,
                                            os::explain(error).c_str());
}

const char* checked(const char* path) {
  if (!path) fail(GA_ERROR_INVALID_ARGUMENT, "path was NULL");
  if (!*path) fail(GA_ERROR_INVALID_ARGUMENT, "path was empty, expected the name of a file");
  return path;
}

void require_file(const std::string& path, os::Kind kind) {
  switch (kind) {
    case os::Kind::kFile:
      return;
    case os::Kind::kFolder:
      fail_io(path, "it is a folder, not a file");
    case os::Kind::kFifo:
      fail_io(path, "it is a FIFO, not a regular file");
    case os::Kind::kSocket:
      fail_io(path, "it is a socket, not a regular file");
    case os::Kind::kDevice:
      fail_io(path, "it is a device, not a regular file");
    default:
      fail_io(path, "it is not a regular file");
  }
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

}  // namespace

std::string shown(const std::string& path) {
  constexpr size_t kMost = 600;
  if (path.size() <= kMost) return path;
  size_t from = path.size() - kMost;
  while (from < path.size() && (path[from] & 0xC0) == 0x80) ++from;  // at a UTF-8 character
  return "..." + path.substr(from);
}

// ---- Writing ------------------------------------------------------------------------------------

// Delegates, so that the destructor runs if this constructor throws.
FileWriter::FileWriter(const char* path) : FileWriter() {
  path_ = checked(path);
  const os::Entry target = find_target();
  const bool exists = target.kind != os::Kind::kNothing;
  prefix_ = temporary_prefix(name_);
  remove_abandoned();
  create_temporary(exists);
  if (!exists) return;
  if (const int error = os::copy_permissions(folder_, name_, target, file_); error != 0)
    give_up("the permissions of the new file could not be set", error);
}

FileWriter::~FileWriter() { discard(); }

// Follows symbolic links to the folder and the name of the file itself. Later calls use the open
// folder: they do not depend on the current one, and the temporary file cannot come into another
// folder, or file system, than the target is in.
os::Entry FileWriter::find_target() {
  std::string path = path_;
  for (int links = 0; links <= kMostLinks; ++links) {
    std::string in;
    os::split(path, &in, &name_);
    if (name_.empty()) fail_io(path_, "the path is that of a folder, not of a file");
    if (const int error = os::open_folder(folder_, in, &folder_); error != 0)
      fail_io(path_, "its folder could not be opened", error);

    os::Entry target;
    if (const int error = os::examine(folder_, name_, &target); error != 0)
      fail_io(path_, "could not be examined", error);
    if (target.kind == os::Kind::kNothing) return target;
    if (target.kind != os::Kind::kLink) {
      require_file(path_, target.kind);
      if (const int error = os::check_writable(folder_, name_); error != 0)
        fail_io(path_, "could not be opened for writing", error);
      return target;
    }
    if (const int error = os::read_link(folder_, name_, &path); error != 0)
      fail_io(path_, "a symbolic link could not be read", error);
  }
  fail_io(path_, "could not be found", os::kTooManyLinks);
}

// Removes the temporary files of writers that have ended without removing them. If one cannot be
// removed, it stays for the next writer.
void FileWriter::remove_abandoned() const noexcept {
  os::each_name(folder_, [this](const char* name) {
    if (is_temporary(name, prefix_)) os::remove_unlocked(folder_, name);
  });
}

// A writer holds the lock of its temporary file for as long as that exists. is_private: until the
// permissions are copied, nobody else may read what perhaps nobody else may read.
void FileWriter::create_temporary(bool is_private) {
  static std::atomic<uint64_t> counter{0};
  constexpr const char* kFailed = "a temporary file could not be created beside it";
  for (int names = 0; names < kMostNames; ++names) {
    temporary_ =
        prefix_ + std::to_string(os::process_id()) + "-" + std::to_string(counter.fetch_add(1));
    temporary_ += kSuffix;
    const int error = os::create_locked(folder_, temporary_, is_private, &file_);
    if (error == 0) return;
    if (error != os::kTaken) give_up(kFailed, error);
  }
  fail_io(path_, kFailed, os::kExists);
}

void FileWriter::require_open() const {
  if (!file_) Subject{"file", shown(path_).c_str()}.fail(GA_ERROR_INTERNAL, "its writer has ended");
}

// A process that writes beyond its RLIMIT_FSIZE gets a signal that kills it, so it must not try.
void FileWriter::require_allowed(int64_t end) {
  const uint64_t limit = os::file_size_limit();
  if (end <= 0 || static_cast<uint64_t>(end) <= limit) return;
  char text[128];
  std::snprintf(text, sizeof text,
                "could not be written beyond %llu bytes, the limit of the process (RLIMIT_FSIZE)",
                static_cast<unsigned long long>(limit));
  give_up(text, os::kTooLarge);
}

void FileWriter::reserve(int64_t size) {
  require_open();
  if (size <= 0) return;
  require_allowed(size);
  if (const int error = os::reserve_room(file_, size); error != 0)
    give_up("room on the disk could not be reserved", error);
}

void FileWriter::write(int64_t offset, const void* data, size_t size) {
  require_open();
  const char* from = static_cast<const char*>(data);
  while (size > 0) {
    const size_t piece = std::min(size, kPiece);
    if (offset < 0 || offset > INT64_MAX - static_cast<int64_t>(piece))
      give_up("could not be written", os::kTooLarge);
    require_allowed(offset + static_cast<int64_t>(piece));
    size_t written = 0;
    const int error = os::write_at(file_, offset, from, piece, &written);
    if (error != 0 || written == 0)
      give_up("could not be written", error != 0 ? error : os::kInputOutput);
    from += written;
    offset += static_cast<int64_t>(written);
    size -= written;
  }
}

void FileWriter::commit() {
  require_open();
  if (const int error = os::synchronize(file_); error != 0)
    give_up("could not be synchronized with the disk", error);
  // Some file systems report errors of earlier writes when a file is closed.
  if (const int error = os::check_close(file_); error != 0) give_up("could not be closed", error);
  if (const int error = os::rename_over(folder_, temporary_, name_, file_); error != 0)
    give_up("could not be replaced by the new file", error);
  file_.reset();
  if (const int error = os::synchronize(folder_); error != 0)
    fail_io(
        path_,
        "the new file is in place, but its folder could not be synchronized with the disk, so a "
        "power failure may bring back the old file",
        error);
}

void FileWriter::discard() noexcept {
  if (!file_) return;
  os::remove_own(folder_, temporary_, file_);
  file_.reset();
}

void FileWriter::give_up(const char* what, int error) {
  discard();
  fail_io(path_, what, error);
}

void remove_file(const char* path) noexcept {
  try {
    std::string in, name;
    os::split(path, &in, &name);
    os::Folder folder;
    if (os::open_folder(folder, in, &folder) == 0) os::remove_unlocked(folder, name.c_str());
  } catch (...) {  // no memory: the file stays
  }
}

// ---- Reading ------------------------------------------------------------------------------------

FileReader::FileReader(const char* path) : path_(checked(path)) {
  if (const int error = os::open_for_reading(path, &file_); error != 0)
    fail_io(path_, "could not be opened", error);
  os::Entry file;
  if (const int error = os::describe(file_, &file); error != 0)
    fail_io(path_, "could not be examined", error);
  require_file(path_, file.kind);
  size_ = file.size;
}

void FileReader::read(int64_t offset, void* data, size_t size) const {
  char* to = static_cast<char*>(data);
  while (size > 0) {
    const size_t piece = std::min(size, kPiece);
    size_t got = 0;
    if (const int error = os::read_at(file_, offset, to, piece, &got); error != 0)
      fail_io(path_, "could not be read", error);
    if (got == 0) {
      char text[128];
      std::snprintf(text, sizeof text, "it ended before byte %lld, and %zu more were to be read",
                    ll(offset), size);
      fail_io(path_, text);
    }
    to += got;
    offset += static_cast<int64_t>(got);
    size -= got;
  }
}

}  // namespace ga
