// SPDX-License-Identifier: Apache-2.0
//
// Ranks that are threads of the test.
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "support.hpp"

namespace ga::test {

class Comm {
 public:
  explicit Comm(const ga_comm_config& config) { EXPECT_OK(ga_comm_create(&config, &comm_)); }
  ~Comm() { ga_comm_destroy(comm_); }
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;
  operator ga_comm*() const { return comm_; }
  void leave() {
    ga_comm_destroy(comm_);
    comm_ = nullptr;
  }

 private:
  ga_comm* comm_ = nullptr;
};

inline ga_comm_config comm_config(int32_t kind) {
  ga_comm_config c;
  EXPECT_OK(ga_comm_config_init(&c, sizeof c, kind));
  return c;
}

inline ga_comm_options comm_options() {
  ga_comm_options o;
  EXPECT_OK(ga_comm_options_init(&o, sizeof o));
  return o;
}

// Runs body(rank, comm) as each of these ranks, in a thread of its own.
inline void on_ranks(int32_t ranks, const std::function<void(int32_t, ga_comm*)>& body,
                     double timeout = 60) {
  unsigned char id[GA_COMM_ID_SIZE];
  EXPECT_OK(ga_comm_unique_id(GA_COMM_LOCAL, id, sizeof id));
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      ga_comm_config config = comm_config(GA_COMM_LOCAL);
      config.rank = r;
      config.ranks = ranks;
      config.timeout = timeout;
      config.id = id;
      const Comm comm(config);
      body(r, comm);
    });
  for (std::thread& t : threads) t.join();
}

// Expects a failure that every rank has, with this message.
inline void expect_failure(ga_status status, const char* words) {
  EXPECT_EQ(status, GA_ERROR_COMMUNICATION);
  EXPECT_NE(std::string(ga_last_error()).find(words), std::string::npos) << ga_last_error();
}

// A transport of the program for a single rank, which counts what it is asked to move.
struct Counting {
  int64_t bytes = 0;
  int calls = 0;
  int32_t fail_at = -1;

  int32_t move(const void* send, void* recv, int64_t count, int32_t dtype) {
    if (calls++ == fail_at) return 42;
    const int64_t size = dtype == GA_F64 || dtype == GA_I64 ? 8 : dtype == GA_F32 ? 4 : 2;
    bytes += count * size;
    if (send != recv) memcpy(recv, send, static_cast<size_t>(count * size));
    return 0;
  }
};

inline ga_comm_table table_of(Counting& counting) {
  ga_comm_table t = {};
  t.struct_size = sizeof t;
  t.user = &counting;
  t.all_to_all =
      t.all_gather = [](void* user, const void* send, void* recv, int64_t count, ga_dtype dtype) {
        return static_cast<Counting*>(user)->move(send, recv, count, dtype);
      };
  t.broadcast = [](void*, void*, int64_t, ga_dtype, int32_t) { return 0; };
  t.error_text = [](void*, int32_t code) { return code == 42 ? "the cable is out" : "?"; };
  return t;
}

}  // namespace ga::test
