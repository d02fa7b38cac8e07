// SPDX-License-Identifier: Apache-2.0
//
// Ranks that are threads of the test.
#pragma once

#include <atomic>
#include <cstdlib>
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

ga_comm_config comm_config(int32_t kind);

ga_comm_options comm_options();

// Runs body(config of the rank) for each of these ranks, in a thread of its own.
void each_rank(int32_t kind, int32_t ranks, double timeout,
               const std::function<void(const ga_comm_config&)>& body);

// Runs body(rank, comm) as each of these ranks.
void on_ranks(int32_t ranks, const std::function<void(int32_t, ga_comm*)>& body,
              double timeout = 60);

// Whether contexts are made on a device (device.cpp).
inline bool on_device() { return std::getenv("GA_TEST_DEVICE") != nullptr; }

// Expects a failure of every rank with this message.
void expect_failure(ga_status status, const char* words,
                    ga_status expected = GA_ERROR_COMMUNICATION);

// A transport of the program for a single rank, which counts what it is asked to move, and a communicator
// over it. It may be called from any thread.
class OneRank {
 public:
  enum Adder { kMoves, kAdds };

  explicit OneRank(Adder adder = kMoves) : comm_(config(fill(adder))) {}
  operator ga_comm*() const { return comm_; }
  const ga_comm_table& table() const { return table_; }

  std::atomic<int64_t> bytes{0};
  std::atomic<int> calls{0}, added{0};  // added: calls that add up
  std::atomic<int> fail_at{-1};         // the call that fails
  std::atomic<std::thread::id> thread;  // of the last call

 private:
  int32_t move(const void* send, void* recv, int64_t count, int32_t dtype);
  static int64_t size_of(ga_dtype dtype) {
    return dtype == GA_F64 || dtype == GA_I64 ? 8 : dtype == GA_F32 ? 4 : 2;
  }
  static OneRank& of(void* user) { return *static_cast<OneRank*>(user); }

  const ga_comm_table& fill(Adder adder);
  static ga_comm_config config(const ga_comm_table& table);

  ga_comm_table table_;
  const Comm comm_;
};

// Windows of several parameters, to which each rank brings any number of micro-batches.
namespace over_ranks {

// A tensor that is divided among the ranks and is no whole number of pieces, and smaller ones that travel
// together.
inline Layout layout() { return Layout::of({{7}, {140001}, {33, 5}, {1}, {3, 4, 5}}); }

struct Micro {
  Block gradients;
  double weight;
  std::vector<size_t> missing;
};
// [window][rank][micro-batch]
using Shares = std::vector<std::vector<std::vector<Micro>>>;

// Shares of any size, none included. Tensor 0 has a gradient on rank 0 alone, tensor 3 never on it. In window
// number w, rank r has (r + w + 1) % 4 micro-batches; first: the number of the first window.
Shares make_shares(const Layout& l, int32_t ranks, size_t windows, size_t first = 0);

void contribute(ga_context* ctx, const Layout& l, const std::vector<Micro>& micros);

// In parts, the last tensor first. Ranks tell differently what is ready: one after each part, and of what
// has no gradient before; one all at the end of the window; one nothing.
void contribute_ready(ga_context* ctx, const Layout& l, const std::vector<Micro>& micros,
                      int32_t rank);

struct Options {
  ga_config config = test::config();
  ga_optimizer optimizer = plain_sgd();
  ga_clip clip = test::clip(GA_CLIP_NONE, 1);
  ga_comm_options options = comm_options();
};

// Of tensors with more than two axes, Muon takes the last two as matrices.
void build(Context& ctx, const Layout& l, const Options& s, Block& block);

struct Ended {
  Block parameters;
  std::vector<ga_step_result> results;
};

// Runs the windows on these ranks.
std::vector<Ended> run(const Layout& l, const Options& s, const Shares& shares, const Block& start);

// What one context makes of all micro-batches, rank by rank.
Ended run_alone(const Layout& l, const Options& s, const Shares& shares, const Block& start);

void expect_alike(const Ended& a, const Ended& b);

// Every rank of `ended`, and of `more` if there are some, has the bits of the first one.
void expect_alike(const std::vector<Ended>& ended, const std::vector<Ended>& more = {});

// Sharded or not, in the background or not: the bits are those of `ended`, which was neither.
void expect_the_bits(const std::vector<Ended>& ended, const Layout& l, Options s,
                     const Shares& shares, const Block& start);

// The largest distance, in units of the largest number.
double distance(const Layout& l, const Block& a, const Block& b);

}  // namespace over_ranks

}  // namespace ga::test
