// SPDX-License-Identifier: Apache-2.0
//
// How the NCCL module finds libnccl.so.2, in a program that does not link it. CMakeLists.txt runs the cases
// with that of host/nccl.cpp, with one that lacks functions, and with none where the loader looks.
#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "../child.hpp"
#include "../ranks.hpp"

namespace ga::test {
namespace {

ga_status create(void* nccl_comm = nullptr) {
  unsigned char id[GA_COMM_ID_SIZE] = "an id";
  ga_comm_config c = comm_config(GA_COMM_NCCL);
  c.id = id;
  c.ranks = 1;
  c.nccl_comm = nccl_comm;
  ga_comm* comm = nullptr;
  const ga_status status = ga_comm_create(&c, &comm);
  ga_comm_destroy(comm);
  return status;
}

bool is_loaded() { return dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD) != nullptr; }

void expect_refusal(ga_status status, const char* words) {
  expect_failure(status, words, GA_ERROR_UNSUPPORTED);
}

TEST(NcclFound, IsLoadedByName) {
  EXPECT_FALSE(is_loaded());
  EXPECT_OK(create()) << ga_last_error();
  EXPECT_TRUE(is_loaded());
}

TEST(NcclFound, MakesIds) {
  unsigned char id[GA_COMM_ID_SIZE], other[GA_COMM_ID_SIZE];
  EXPECT_OK(ga_comm_unique_id(GA_COMM_NCCL, id, sizeof id)) << ga_last_error();
  EXPECT_OK(ga_comm_unique_id(GA_COMM_NCCL, other, sizeof other));
  EXPECT_NE(memcmp(id, other, sizeof id), 0);
}

// The program's communicator is of a NCCL that the module does not see.
TEST(NcclFound, TheProgramUsesAnother) {
  int no_comm = 0;
  expect_refusal(create(&no_comm), "this process has not loaded libnccl.so.2");
  EXPECT_FALSE(is_loaded());
}

TEST(NcclFound, IsTooOld) {
  setenv("GA_FAKE_NCCL_VERSION", "21703", 1);
  expect_refusal(create(), "libnccl.so.2 is NCCL 2.17.3, but at least 2.18 is needed");
  unsigned char id[GA_COMM_ID_SIZE];
  expect_refusal(ga_comm_unique_id(GA_COMM_NCCL, id, sizeof id), "NCCL 2.17.3");
  setenv("GA_FAKE_NCCL_VERSION", "2708", 1);
  expect_refusal(create(), "libnccl.so.2 is NCCL 2.7.8, but at least 2.18 is needed");
  setenv("GA_FAKE_NCCL_VERSION", "21800", 1);
  EXPECT_OK(create()) << ga_last_error();
}

TEST(NcclIncomplete, LacksFunctions) {
  expect_refusal(create(), "libnccl.so.2 lacks the function ncclCommInitRankConfig");
}

TEST(NcclNotFound, IsRefused) {
  in_child([] {
    if (dlopen("libnccl.so.2", RTLD_NOW)) return;  // of this machine
    expect_refusal(create(), "libnccl.so.2 could not be loaded: libnccl.so.2: cannot open");
    unsigned char id[GA_COMM_ID_SIZE];
    expect_refusal(ga_comm_unique_id(GA_COMM_NCCL, id, sizeof id), "could not be loaded");
  });
}

// The one that the program has loaded, from wherever.
TEST(NcclNotFound, IsLoadedByTheProgram) {
  ASSERT_NE(dlopen(GA_TEST_NCCL, RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
  EXPECT_OK(create()) << ga_last_error();
}

}  // namespace
}  // namespace ga::test
