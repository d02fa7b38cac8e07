// SPDX-License-Identifier: Apache-2.0
//
// A piece of a test in a child process.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

namespace ga::test {

// Runs body in a fork of this process. What fails there fails the test, and so does a child that
// hangs: it is ended by its alarm.
template <class Body>
void in_child(Body&& body) {
  fflush(stdout);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);
    body();
    fflush(stdout);
    _exit(testing::Test::HasFailure() ? 1 : 0);  // nothing of the parent is to be ended here
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFSIGNALED(status))
    ADD_FAILURE() << "the child " << (WTERMSIG(status) == SIGALRM ? "hung" : "crashed");
  else
    EXPECT_EQ(WEXITSTATUS(status), 0) << "something failed in the child";
}

}  // namespace ga::test
