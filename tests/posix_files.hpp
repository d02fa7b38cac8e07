// SPDX-License-Identifier: Apache-2.0
//
// What the suites about files have in common that other systems than Linux do not have.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "child.hpp"
#include "files.hpp"

namespace ga::test {

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

}  // namespace ga::test
