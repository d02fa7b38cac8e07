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

}  // namespace ga::test
