// SPDX-License-Identifier: Apache-2.0
// Threads of the library for its parallel passes, in place of OpenMP's. All contexts of a process share them. They
// sleep between calls, and the first passes of a process start them.
#pragma once

#include <cstddef>
#include <vector>

namespace ga {

// As many threads as OMP_NUM_THREADS says, which programs set for OpenMP, or else as the calling thread may have
// processors.
int default_thread_count();

// A team works on the passes of one context. It consists of the calling thread and of workers, which it has for the
// length of a pass. It takes the same workers each time, unless another team has them, because their caches hold what
// they worked on last.
class Team {
 public:
  using Share = void (*)(void* data, int self);

  // Reserves room for that many threads; starts none.
  explicit Team(int threads) : workers_(static_cast<size_t>(threads > 1 ? threads - 1 : 0)) {}

  // Calls share(data, 0) on the calling thread, and share(data, self) with self in [1, threads) on workers that are
  // free, as far as they begin before the calling thread is through. So a share takes work until none is left: nobody
  // waits for a thread that another program, or another team, keeps from working. A share must not throw.
  void run(int threads, Share share, void* data);

 private:
  class Pool;
  class Worker;
  struct Pass;

  std::vector<Worker*> workers_;  // of the last pass, by self - 1; NULL: none
};

}  // namespace ga
