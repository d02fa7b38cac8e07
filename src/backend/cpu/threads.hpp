// SPDX-License-Identifier: Apache-2.0
// Parallel loops: on OpenMP's threads or, in a build without OpenMP, on the library's own; on the program's
// (ga_config.parallel_for); or on the calling thread alone.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "backend/cpu/trial.hpp"
#include "core/thread_pool.hpp"
#include "gradaccum/gradaccum.h"

namespace ga::cpu {

class Threads {
 public:
  explicit Threads(const ga_config& config);

  int count() const { return count_; }
  bool is_one() const { return count_ == 1 && !parallel_for_; }

  // Runs pass(together), a pass of some kind that takes one thread about so many nanoseconds: on all threads,
  // together, if they take less than one.
  template <class Pass>
  void run_pass(int kind, double nanoseconds, Pass&& pass) {
    bool together = false;
    Trial* const trial = find_trial(nanoseconds, together);
    if (!trial) return pass(together);
    const auto begin = std::chrono::steady_clock::now();
    pass(trial->next());
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
    trial->took(kind, taken.count());
  }

  // Makes room for loops of that many items.
  void reserve(int64_t items);
  static int64_t reserve_bytes(int64_t items) { return items; }

  // Runs body(i) for i in [0, items). alone: on the calling thread. Throws GA_ERROR_FAULT if the
  // program's parallel_for threw, left items out, or asked for an item twice, which runs only once.
  template <class Body>
  void run(int64_t items, bool alone, Body& body) {
    const ga_task task = [](void* data, int64_t i) { (*static_cast<Body*>(data))(i); };
    run_tasks(items, alone, task, const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  void run_tasks(int64_t items, bool alone, ga_task body, void* data);
  void run_shared(int64_t items, ga_task body, void* data);
  void run_own(int64_t items, ga_task body, void* data);
  Trial* find_trial(double nanoseconds, bool& together);

  // The items of a thread. A thread that has finished its own takes those of others, so that it
  // finds in its cache the chunks that it had in the last pass, and a delayed thread delays nobody.
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };

  int count_;
  ga_parallel_for parallel_for_;
  void* user_;
  std::unique_ptr<Range[]> ranges_;
  Team team_{1};                                         // where OpenMP has none
  std::unique_ptr<std::atomic<unsigned char>[]> taken_;  // by item: whether parallel_for_ ran it
  int64_t capacity_ = 0;
  double hand_over_ = -1;        // nanoseconds, from the environment; negative: it does not tell
  std::array<Trial, 8> trials_;  // by the size of passes
};

}  // namespace ga::cpu
