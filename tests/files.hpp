// SPDX-License-Identifier: Apache-2.0
//
// What the suites about files have in common.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "child.hpp"
#include "core/error.hpp"
#include "files/disk.hpp"

namespace ga::test {

namespace fs = std::filesystem;

// ---- Files and folders --------------------------------------------------------------------------

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void put(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  ASSERT_TRUE(file.flush()) << path;
}

// A folder that is removed with all that is in it.
class Folder {
 public:
  explicit Folder(const std::string& in = testing::TempDir()) : path_(in + "/gradaccum_XXXXXX") {
    if (!mkdtemp(path_.data())) ADD_FAILURE() << "no folder in " << in << ": " << strerror(errno);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

  std::set<std::string> names() const {
    std::set<std::string> result;
    for (const auto& entry : fs::directory_iterator(path_)) result.insert(entry.path().filename());
    return result;
  }
  std::set<std::string> temporaries() const {
    std::set<std::string> result;
    for (const std::string& name : names())
      if (name.compare(0, 11, ".gradaccum-") == 0) result.insert(name);
    return result;
  }

 private:
  std::string path_;
};

inline struct stat stat_of(const std::string& path) {
  struct stat result = {};
  EXPECT_EQ(stat(path.c_str(), &result), 0) << path;
  return result;
}

// Where synchronizing costs nothing, for what is done thousands of times.
inline std::string in_memory() {
  return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : testing::TempDir();
}

inline std::set<int> descriptors() {
  std::set<int> listed, result;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd"))
    listed.insert(std::stoi(entry.path().filename()));
  for (const int fd : listed)
    if (fcntl(fd, F_GETFD) >= 0) result.insert(fd);  // not the one that has listed them
  return result;
}

// Mounts a disk of 64 KiB for this process. Returns false if the process may not.
inline bool mount_small(const std::string& path) {
  const uid_t user = geteuid();
  const gid_t group = getegid();
  if (unshare(CLONE_NEWNS | (user == 0 ? 0 : CLONE_NEWUSER)) != 0) return false;
  if (user != 0) {
    std::ofstream("/proc/self/setgroups") << "deny";
    std::ofstream("/proc/self/uid_map") << "0 " << user << " 1";
    std::ofstream("/proc/self/gid_map") << "0 " << group << " 1";
  }
  return mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("small", path.c_str(), "tmpfs", 0, "size=64k") == 0;
}

// Runs body in a child process that has mount_small() at this path. Returns false if it may not mount.
template <class Body>
bool on_small_disk(const std::string& path, Body&& body) {
  const pid_t child = fork();
  if (child == 0) _exit(mount_small(path) ? 0 : 1);
  int status = 1;
  if (child < 0 || waitpid(child, &status, 0) != child || status != 0) return false;
  in_child([&] {
    ASSERT_TRUE(mount_small(path));
    body();
  });
  return true;
}

// ---- Writers and readers ------------------------------------------------------------------------

// The second half first. Reserves, so that all functions are used.
inline void save(const std::string& path, const std::string& text) {
  FileWriter writer(path.c_str());
  writer.reserve(static_cast<int64_t>(text.size()));
  const size_t half = text.size() / 2;
  writer.write(static_cast<int64_t>(half), text.data() + half, text.size() - half);
  writer.write(0, text.data(), half);
  writer.commit();
}

inline std::string load(const std::string& path) {
  const FileReader reader(path.c_str());
  std::string text(static_cast<size_t>(reader.size()), '?');
  reader.read(0, text.data(), text.size());
  return text;
}

// The error that body throws, or GA_OK.
struct Result {
  ga_status status = GA_OK;
  std::string text;
  bool has(const std::string& part) const { return text.find(part) != std::string::npos; }
};
template <class Body>
Result result_of(Body&& body) {
  try {
    body();
    return {};
  } catch (const Error& error) {
    return {error.status(), error.what()};
  }
}

// Expects GA_ERROR_IO, with a message that has these parts.
template <class Body>
void expect_io_error(const std::vector<std::string>& parts, Body&& body) {
  const Result result = result_of(body);
  EXPECT_EQ(result.status, GA_ERROR_IO) << result.text;
  for (const std::string& part : parts)
    EXPECT_TRUE(result.has(part)) << "no \"" << part << "\" in: " << result.text;
}

// A content that tells by itself whether it is whole.
inline std::string version(int number) {
  const std::string head = std::to_string(number) + "\n";
  return head + std::string(static_cast<size_t>(1000 + number * 7919 % 60000),
                            static_cast<char>('a' + number % 26));
}

inline bool is_whole(const std::string& text) {
  return !text.empty() && text.find('\n') != std::string::npos &&
         text == version(atoi(text.c_str()));
}

// The beginning of the temporary names for a target.
inline std::string prefix_of(const Folder& folder, const std::string& name) {
  const FileWriter writer((folder / name).c_str());
  const std::string temporary = *folder.temporaries().begin();
  return temporary.substr(0, temporary.find('-', 11) + 1);
}

}  // namespace ga::test
