// SPDX-License-Identifier: Apache-2.0
// Functions that run in turns in a thread, each on a stack of its own. One of them runs at a time, and another
// thread may continue what one thread has begun.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>

namespace ga::sim {

class Fibres {
 public:
  // Stacks of that many bytes, a multiple of the size of pages, before each of which lies a page without access.
  Fibres(unsigned most, size_t stack_bytes) : stack_bytes_(stack_bytes) {
    void* const stacks = mmap(nullptr, most * stack_bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) fail();
    stacks_ = static_cast<char*>(stacks);
  }
  Fibres(const Fibres&) = delete;
  Fibres& operator=(const Fibres&) = delete;

  const char* stacks() const { return stacks_; }
  unsigned current() const { return current_; }  // the one that runs

  // Begins body() in fibre i, or continues it where it pauses. Returns when it pauses or returns.
  void run(unsigned i, const std::function<void()>& body) {
    while (fibres_.size() <= i) make();
    current_ = i;
    body_ = &body;
    swap(outside_, fibres_[i]);
  }
  // Called by a fibre. The next one to run is up to the caller of run().
  void pause() {
    const unsigned me = current_;
    swap(fibres_[me], outside_);
  }

 private:
  struct Place {
    jmp_buf at;
  };

  [[noreturn]] static void fail() {
    std::perror("fibres");
    std::abort();
  }

  // Much faster than swapcontext(), which makes a call of the system.
  [[gnu::noinline]] static void swap(Place& from, Place& to) {
    if (_setjmp(from.at) == 0) _longjmp(to.at, 1);
  }

  void make() {
    current_ = static_cast<unsigned>(fibres_.size());
    fibres_.emplace_back();
    char* const stack = stacks_ + current_ * stack_bytes_;
    if (mprotect(stack, 4096, PROT_NONE) != 0) fail();
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size =
        stack_bytes_ - current_ * 320 % 32768;  // not all in the same sets of the cache
    context.uc_link = nullptr;
    made_ = this;
    makecontext(&context, live, 0);
    swapcontext(&maker_, &context);
  }

  static void live() {
    Fibres& all = *made_;
    const unsigned me = all.current_;
    if (_setjmp(all.fibres_[me].at) == 0) setcontext(&all.maker_);
    for (;;) {
      (*all.body_)();
      swap(all.fibres_[me], all.outside_);
    }
  }

  static inline thread_local Fibres* made_ = nullptr;
  size_t stack_bytes_;
  char* stacks_ = nullptr;
  std::deque<Place> fibres_;
  Place outside_;
  ucontext_t maker_;
  unsigned current_ = 0;
  const std::function<void()>* body_ = nullptr;
};

}  // namespace ga::sim
