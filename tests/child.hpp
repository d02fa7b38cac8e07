// SPDX-License-Identifier: Apache-2.0
//
// Runs a part of a test in a child process.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

namespace ga::test {

// Runs body in a fork of this process. A failure in the child fails the test, and so does a child
// that hangs, which its alarm ends.
template <class Body>
void in_child(Body&& body) {
  fflush(stdout);
  const bool failed_before = testing::Test::HasFailure();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);
    body();
    fflush(stdout);
    // Without the parent's destructors and exit handlers.
    _exit(testing::Test::HasFailure() && !failed_before ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFSIGNALED(status))
    ADD_FAILURE() << "the child " << (WTERMSIG(status) == SIGALRM ? "hung" : "crashed");
  else
    EXPECT_EQ(WEXITSTATUS(status), 0) << "a check failed in the child";
}

}  // namespace ga::test
