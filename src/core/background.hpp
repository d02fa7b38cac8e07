// SPDX-License-Identifier: Apache-2.0
// A thread that runs the items 0, 1, 2, ... of a list in their order, as far as they have been released.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace ga {

class Background {
 public:
  explicit Background(std::function<void(size_t)> run)
      : run_(std::move(run)), thread_([this] { work(); }) {}
  // Waits for the item that runs.
  ~Background() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Items before `end` may run.
  void release(size_t end) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      end_ = end;
    }
    changed_.notify_all();
  }
  // No other item runs. Returns whether one still does.
  bool close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    end_ = 0;
    return running_;
  }
  // Waits for the item that runs, and begins anew: nothing is released. Returns how many items have run;
  // throws what the last of them has thrown.
  size_t stop() {
    std::unique_lock<std::mutex> lock(mutex_);
    end_ = 0;
    changed_.wait(lock, [&] { return !running_; });
    const size_t done = next_;
    next_ = 0;
    const std::exception_ptr failure = failure_;
    failure_ = nullptr;
    if (failure) std::rethrow_exception(failure);
    return done;
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return over_ || (next_ < end_ && !failure_); });
      if (over_) return;
      running_ = true;
      const size_t item = next_;
      lock.unlock();
      std::exception_ptr failure;
      try {
        run_(item);
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      running_ = false;
      failure_ = failure;
      ++next_;
      changed_.notify_all();
    }
  }

  const std::function<void(size_t)> run_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t next_ = 0, end_ = 0;
  bool running_ = false, over_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace ga
