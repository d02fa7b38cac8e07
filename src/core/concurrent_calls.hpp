// SPDX-License-Identifier: Apache-2.0
// Threads in ga_accumulate_part and ga_params_ready of one context at once, which ga_config.eager allows. A
// thread holds the lock while it reads or changes what the context knows, and lets go of it (Unlocked) while it
// passes over the data of its own parameters. So the passes run at the same time.
#pragma once

#include <atomic>
#include <mutex>

namespace ga {

class ConcurrentCalls {
 public:
  using Lock = std::unique_lock<std::mutex>;

  Lock lock() { return Lock(mutex_); }
  // With the lock. The first thread takes the context for all of them; enter() returns false if another call has
  // the context. The last thread gives it back.
  bool enter(std::atomic<bool>& in_use) {
    if (count_ == 0 && in_use.exchange(true, std::memory_order_acquire)) return false;
    ++count_;
    return true;
  }
  void leave(std::atomic<bool>& in_use) {
    if (--count_ == 0) in_use.store(false, std::memory_order_release);
  }

 private:
  std::mutex mutex_;
  int count_ = 0;
};

// Releases a lock for as long as this object exists, and takes it again at the end. Where only one thread may use the
// context, there is a lock without a mutex, and nothing happens.
class Unlocked {
 public:
  explicit Unlocked(ConcurrentCalls::Lock& lock) : lock_(lock) {
    if (lock_.mutex()) lock_.unlock();
  }
  ~Unlocked() {
    if (lock_.mutex()) lock_.lock();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  ConcurrentCalls::Lock& lock_;
};

}  // namespace ga
