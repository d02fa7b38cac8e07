// SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>

#include "core/fork.hpp"
#include "core/os/system.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ga {
namespace {

constexpr int kMostThreads = 4096;  // as ga_config.num_threads

// How long a thread looks for what it waits for before it sleeps: about as long as it takes to wake one. So waiting
// takes at most twice as long as it would if the future were known, and the passes of a call find awake workers.
constexpr std::chrono::microseconds kSpin{50};

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Whether done() becomes true within kSpin.
template <class Done>
bool spin(Done&& done) {
  using Clock = std::chrono::steady_clock;
  for (Clock::time_point begin = {};;) {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      relax();
    }
    const Clock::time_point now = Clock::now();
    if (begin == Clock::time_point()) begin = now;
    if (now - begin >= kSpin) return false;
  }
}

}  // namespace

int default_thread_count() {
  if (const char* const text =
          std::getenv("OMP_NUM_THREADS")) {  // "8", or "8,2" for nested regions
    char* end = nullptr;
    const long count = std::strtol(text, &end, 10);
    if (count > 0 && end != text) return static_cast<int>(std::min<long>(count, kMostThreads));
  }
  return std::clamp(os::usable_processors(), 1, kMostThreads);
}

struct alignas(8) Team::Pass {
  Share share;
  void* data;
};

// A thread that lives as long as the process. Its state says who may do what:
//
//   kIdle, kAsleep   any team may take the worker, by putting kTaken there
//   kTaken           the team prepares its pass
//   pass             the worker may begin, and the team may take the pass back
//   pass + kBegun    the worker works; the pass is on the stack of the team's thread, which waits for it
//   ... + kAwaited   that thread sleeps meanwhile
class alignas(64) Team::Worker {
 public:
  bool hand_over(const Pass& pass, int self) {
    uintptr_t state = state_.load(std::memory_order_relaxed);
    do {
      if (state != kIdle && state != kAsleep) return false;
      // This fails when the worker falls asleep, or another team takes it, just then.
    } while (!state_.compare_exchange_weak(state, kTaken, std::memory_order_acq_rel,
                                           std::memory_order_relaxed));
    self_ = self;
    state_.store(address(pass), std::memory_order_release);
    if (state == kAsleep) notify();
    return true;
  }

  // Returns once the worker is through with the pass, or will not begin it.
  void finish(const Pass& pass) {
    uintptr_t state = address(pass);
    if (state_.compare_exchange_strong(state, kIdle, std::memory_order_acq_rel,
                                       std::memory_order_acquire))
      return;
    const uintptr_t begun = address(pass) + kBegun;
    const auto is_over = [&] { return state_.load(std::memory_order_acquire) != begun; };
    if (spin(is_over)) return;
    state = begun;
    if (!state_.compare_exchange_strong(state, begun + kAwaited, std::memory_order_acq_rel,
                                        std::memory_order_acquire))
      return;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return state_.load(std::memory_order_acquire) != begun + kAwaited; });
  }

  [[noreturn]] void work() {
    for (;;) {
      const Pass& pass = wait();
      pass.share(pass.data, self_);
      // From here on the pass may be gone.
      if (state_.exchange(kIdle, std::memory_order_acq_rel) & kAwaited) notify();
    }
  }

 private:
  static constexpr uintptr_t kIdle = 0, kAsleep = 1, kTaken = 2;
  static constexpr uintptr_t kBegun = 1, kAwaited = 2;  // beside an address

  static uintptr_t address(const Pass& pass) { return reinterpret_cast<uintptr_t>(&pass); }

  const Pass& wait() {
    for (;;) {
      uintptr_t state = kIdle;
      if (!spin([&] { return is_pass(state = state_.load(std::memory_order_relaxed)); })) {
        state = kIdle;
        if (state_.compare_exchange_strong(state, kAsleep, std::memory_order_acq_rel,
                                           std::memory_order_relaxed)) {
          std::unique_lock<std::mutex> lock(mutex_);
          changed_.wait(lock, [&] { return state_.load(std::memory_order_relaxed) != kAsleep; });
        }
        continue;
      }
      if (state_.compare_exchange_strong(state, state + kBegun, std::memory_order_acq_rel,
                                         std::memory_order_relaxed))
        return *reinterpret_cast<const Pass*>(state);
    }
  }

  static bool is_pass(uintptr_t state) { return state > kTaken; }

  // The lock keeps a thread that has just seen the former state from sleeping through this.
  void notify() {
    { const std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
  }

  std::atomic<uintptr_t> state_{kIdle};
  int self_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
};

// The workers of a process. They and what they use stay until it ends, when they may still be asleep.
class Team::Pool {
 public:
  // A child of fork() has none of its parent's threads, and gets a pool of its own.
  static Pool& of_process() {
    static std::atomic<Pool*> latest{nullptr};
    Pool* pool = latest.load(std::memory_order_acquire);
    while (!pool || pool->generation_ != process_generation()) {
      Pool* const fresh = new Pool(pool);
      if (latest.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
      delete fresh;
    }
    return *pool;
  }

  // Hands a pass to any worker that is free, and starts one if none is and the process has less than the `most`
  // workers that a team wants, or than processors. Returns NULL if there is no worker to be had.
  Worker* hand_over(const Pass& pass, int self, int most) {
    const int count = count_.load(std::memory_order_acquire);
    for (int i = 0; i < count; ++i)
      if (workers_[i]->hand_over(pass, self)) return workers_[i].get();
    if (count >= std::max(most, processors_ - 1)) return nullptr;
    Worker* const worker = start(count);
    return worker && worker->hand_over(pass, self) ? worker : nullptr;
  }

 private:
  explicit Pool(Pool* before)
      : before_(before), generation_(process_generation()), processors_(os::usable_processors()) {}

  // NULL if another thread has started one meanwhile, or if the system has no thread to spare: then it is not asked
  // again for a second.
  Worker* start(int count) {
    const std::unique_lock<std::mutex> lock(starting_, std::try_to_lock);
    if (!lock || count != count_.load(std::memory_order_relaxed) || count >= kMostThreads ||
        std::chrono::steady_clock::now() < not_before_)
      return nullptr;
    std::unique_ptr<Worker> worker(new (std::nothrow) Worker);
    const auto work = [](void* self) { static_cast<Worker*>(self)->work(); };
    if (!worker || !os::start_thread(work, worker.get())) {
      not_before_ = std::chrono::steady_clock::now() + std::chrono::seconds(1);
      return nullptr;
    }
    workers_[count] = std::move(worker);
    count_.store(count + 1, std::memory_order_release);
    return workers_[count].get();
  }

  [[maybe_unused]] Pool* const before_;  // of the parent, whose memory the child has still
  const uint32_t generation_;
  const int processors_;
  std::atomic<int> count_{0};
  std::unique_ptr<Worker> workers_[kMostThreads];
  std::mutex starting_;
  std::chrono::steady_clock::time_point not_before_{};
};

void Team::run(int threads, Share share, void* data) {
  const Pass pass = {share, data};
  Pool& pool = Pool::of_process();
  const auto wanted = std::min(static_cast<size_t>(std::max(threads - 1, 0)), workers_.size());
  // The workers of the last pass are asked first, so that none of them is given another's place.
  for (size_t i = 0; i < wanted; ++i)
    if (workers_[i] && !workers_[i]->hand_over(pass, static_cast<int>(i) + 1))
      workers_[i] = nullptr;
  for (size_t i = 0; i < wanted; ++i) {
    if (workers_[i]) continue;
    workers_[i] = pool.hand_over(pass, static_cast<int>(i) + 1, static_cast<int>(workers_.size()));
    if (!workers_[i]) break;
  }
  share(data, 0);
  for (size_t i = 0; i < wanted; ++i)
    if (workers_[i]) workers_[i]->finish(pass);
}

}  // namespace ga
