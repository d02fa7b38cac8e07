// SPDX-License-Identifier: Apache-2.0
// One parallel loop: OpenMP's threads, the program's own (ga_config.parallel_for), or the calling
// thread alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "gradaccum/gradaccum.h"

namespace ga::cpu {

class Threads {
 public:
  explicit Threads(const ga_config& config);

  int count() const { return count_; }

  // Room for loops of that many items.
  void reserve(int64_t items);
  static int64_t reserve_bytes(int64_t items) { return items; }

  // Runs body(data, i) for i in [0, items). alone: on the calling thread. Throws GA_ERROR_FAULT
  // when the program's parallel_for threw, left items out, or ran one twice (which is not done
  // twice).
  void run(int64_t items, bool alone, ga_task body, void* data);

 private:
  void run_shared(int64_t items, ga_task body, void* data);
  void run_openmp(int64_t items, ga_task body, void* data);

  // A thread's own items; whoever is done with its own takes from the others. So a thread finds the
  // chunks it had in the last pass in its cache, and a thread that is held up delays nobody.
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };

  int count_;
  ga_parallel_for parallel_for_;
  void* user_;
  std::unique_ptr<Range[]> ranges_;
  std::unique_ptr<std::atomic<unsigned char>[]> taken_;  // items that parallel_for_ has run
  int64_t capacity_ = 0;
};

}  // namespace ga::cpu
