// SPDX-License-Identifier: Apache-2.0
// Files and folders, as files/disk.cpp needs them to replace a file as a whole and to read one.
//
// Paths and names are in UTF-8. A function that returns an int returns 0 or the number of an error, as errno or
// GetLastError() has it; explain() puts that into words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace ga::os {

// Owns an open file or folder: a file descriptor, or a HANDLE of Windows. Closing it keeps the number of the thread's
// last error.
class Handle {
 public:
  explicit Handle(intptr_t value = -1) noexcept : value_(value) {}
  ~Handle() { reset(); }
  Handle(Handle&& other) noexcept : value_(other.release()) {}
  Handle& operator=(Handle&& other) noexcept {
    reset(other.release());
    return *this;
  }

  intptr_t get() const noexcept { return value_; }
  explicit operator bool() const noexcept { return value_ != -1; }
  void reset(intptr_t value = -1) noexcept;
  intptr_t release() noexcept { return std::exchange(value_, -1); }

 private:
  intptr_t value_;
};

// An open folder. Where calls of the system take no handle of a folder, its path is kept too, which stays that of the
// folder because nobody can rename or remove a folder that is open like this.
struct Folder {
  Handle handle;
  std::string path = {};
};

// What a name stands for.
enum class Kind { kNothing, kFile, kFolder, kLink, kFifo, kSocket, kDevice, kOther };
struct Entry {
  Kind kind = Kind::kNothing;
  int64_t size = 0;
  uint32_t user = 0, group = 0, mode = 0;  // not on Windows, which has lists of rights
};

// ---- Errors -------------------------------------------------------------------------------------

std::string explain(int error);

// Errors that the library finds without the system.
extern const int kInputOutput, kExists, kTooLarge, kTooManyLinks;

// ---- Names --------------------------------------------------------------------------------------

// Where the name of a file begins in a path; name is "" if the path is that of a folder.
void split(const std::string& path, std::string* folder, std::string* name);

// Opens a folder; a relative path begins at `from` if that is open, else at the current folder. out may be &from.
int open_folder(const Folder& from, const std::string& path, Folder* out);

// Tells what has a name in a folder, and does not follow a link.
int examine(const Folder& folder, const std::string& name, Entry* out);
// The path that a link leads to; of any kind that open_folder() and split() take.
int read_link(const Folder& folder, const std::string& name, std::string* out);
// An error unless the process may write to the file. A file that has been removed is no error.
int check_writable(const Folder& folder, const std::string& name);

// f(name) for the files in a folder, as far as they can be listed.
void each_name(const Folder& folder, const std::function<void(const char*)>& f) noexcept;

// ---- Writing ------------------------------------------------------------------------------------

// Creates a file that is locked for as long as it is open, also against other processes. Returns kTaken if a file has
// this name already, or another process has removed the new file before it was locked. is_private: nobody else may
// open the file before copy_permissions(). If an error comes after the file was made, it is open.
constexpr int kTaken = -1;
int create_locked(const Folder& folder, const std::string& name, bool is_private, Handle* file);
// Removes a file unless somebody has it locked.
void remove_unlocked(const Folder& folder, const char* name) noexcept;
// Removes a file of create_locked(), which the caller closes next. Keeps the number of the thread's last error.
void remove_own(const Folder& folder, const std::string& name, const Handle& file) noexcept;

// Gives a new file the rights of another one, and its owner as far as the process may.
int copy_permissions(const Folder& folder, const std::string& name, const Entry& from,
                     const Handle& to);

// The largest file that the process may write without a signal; UINT64_MAX if there is no such limit.
uint64_t file_size_limit();
// Finds room for that many bytes on the disk; the size of the file stays. Returns an error only if there is no room:
// not every file system can tell.
int reserve_room(const Handle& file, int64_t bytes);
// Writes what goes at once. Bytes before the offset that were never written are 0.
int write_at(const Handle& file, int64_t offset, const void* data, size_t size, size_t* written);
// Has everything that was written to a file reach the disk.
int synchronize(const Handle& file);
// Returns what some file systems report only when a file is closed. The file stays open.
int check_close(const Handle& file);
// Gives the open file the name of another one, which it replaces in one step.
int rename_over(const Folder& folder, const std::string& from, const std::string& to,
                const Handle& file);
// Has the names in a folder reach the disk, where the file system can be asked to.
int synchronize(const Folder& folder);

// ---- Reading ------------------------------------------------------------------------------------

// Opens anything but does not wait: a FIFO could keep the caller for ever. describe() tells what it is.
int open_for_reading(const char* path, Handle* file);
int describe(const Handle& file, Entry* out);
// Reads what comes at once; 0 bytes at the end of the file.
int read_at(const Handle& file, int64_t offset, void* data, size_t size, size_t* got);

}  // namespace ga::os
