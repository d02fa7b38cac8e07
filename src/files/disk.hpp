// SPDX-License-Identifier: Apache-2.0
// Files that are written as a whole or not at all, and files that are read without trust in them.
//
// All errors of the system are GA_ERROR_IO, with a message that names the file, what failed and
// why. Nothing here blocks on what is not a regular file, and nothing changes state of the process,
// such as its umask or what it does on a signal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/os/files.hpp"

namespace ga {

// A path for a message: its end, which says more than its beginning, if it is long.
std::string shown(const std::string& path);

// Replaces a file as a whole. Until commit() has renamed the new file to the path, and whatever
// happens before, a power failure included, the path holds what it held; when commit() has
// returned, the path holds the new file, also after a power failure.
//
// The new file is written under a temporary name in the same folder. A writer that is destroyed
// without commit() removes it. What a killed process has left there is removed by the next writer
// of the same path, if the file system has flock(). Each writer has a temporary file of its own: if
// several write one path at a time, the last commit() wins.
//
// A symbolic link stays, and the file that it leads to is replaced. The new file has the permission
// bits of the old one, and its owner and group where the process may set them; other hard links to
// the old file keep the old contents. A file that the process may not write is not replaced, even
// if its folder would allow that. The process must be allowed to read the folder.
//
// One thread at a time. A function that has thrown has removed the temporary file and ended the
// writer.
class FileWriter {
 public:
  // Changes to the current folder after this call do not matter.
  explicit FileWriter(const char* path);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  // Finds out early whether the disk has room for a file of this size, where the file system can
  // tell. The size of the file is what is written.
  void reserve(int64_t size);

  // In any order. Bytes that are never written, before one that is, are 0.
  void write(int64_t offset, const void* data, size_t size);

  // If only the last step has failed, to make the renaming itself durable, the message says that
  // the new file is in place. In all other errors the old one is.
  void commit();

 private:
  FileWriter() = default;

  os::Entry find_target();
  void remove_abandoned() const noexcept;
  void create_temporary(bool is_private);
  void require_open() const;
  void require_allowed(int64_t end);
  void discard() noexcept;
  [[noreturn]] void give_up(const char* what, int error);

  std::string path_;       // as the caller wrote it, for messages
  os::Folder folder_;      // of the target
  std::string name_;       // of the target in the folder
  std::string prefix_;     // of the temporary names of all writers of the target
  std::string temporary_;  // the name of this writer's, which exists while file_ is open
  os::Handle file_;
};

// Removes a file, if there is one and it can be removed.
void remove_file(const char* path) noexcept;

// Reads a regular file. Another process may replace the file meanwhile: the reader keeps the old
// one.
class FileReader {
 public:
  explicit FileReader(const char* path);

  // When the file was opened: it may be changed since.
  int64_t size() const noexcept { return size_; }

  // Fills data completely or throws. May be called by many threads at a time.
  void read(int64_t offset, void* data, size_t size) const;

 private:
  std::string path_;
  os::Handle file_;
  int64_t size_ = 0;
};

}  // namespace ga
