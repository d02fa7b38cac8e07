// SPDX-License-Identifier: Apache-2.0
// Parallel loops: on OpenMP's threads, on the program's own (ga_config.parallel_for), or on the
// calling thread alone.
#pragma once

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>

#include "gradaccum/gradaccum.h"

namespace ga::cpu {

class Threads {
 public:
  explicit Threads(const ga_config& config);

  int count() const { return count_; }
  bool is_one() const { return count_ == 1 && !parallel_for_; }

  // Whether a loop that takes one thread so many nanoseconds takes all of them less. Handing work to OpenMP's
  // threads costs a microsecond where they spin, and tens of them where they have to be woken, so it is measured
  // now and then; of the program's threads the former is assumed.
  bool pay(double nanoseconds);

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
  void run_openmp(int64_t items, ga_task body, void* data);
  void measure();

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
  std::unique_ptr<std::atomic<unsigned char>[]> taken_;  // by item: whether parallel_for_ ran it
  int64_t capacity_ = 0;
  // The last hand-overs, in nanoseconds. Their mean counts: if other programs use the processors, few hand-overs
  // take long, but then a thousand times as long. The first one makes the threads.
  std::array<double, 3> hand_over_ = {HUGE_VAL, HUGE_VAL, HUGE_VAL};
  int64_t asked_ = 0, due_ = 0;  // how often pay() asked, and when it measures
};

}  // namespace ga::cpu
