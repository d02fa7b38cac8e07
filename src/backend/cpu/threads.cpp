// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/threads.hpp"

#include <algorithm>
#include <cmath>

#include "core/callback.hpp"
#include "core/environment.hpp"
#include "core/error.hpp"
#include "core/fork.hpp"
#include "core/fp_mode.hpp"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace ga::cpu {
namespace {

#ifdef _OPENMP
int default_count() { return omp_get_max_threads(); }
bool has_threads() { return process_generation() == 0; }  // see fork.hpp
#else
int default_count() { return default_thread_count(); }
bool has_threads() { return true; }
#endif

}  // namespace

Threads::Threads(const ga_config& config)
    : count_(config.num_threads > 0 ? config.num_threads : default_count()),
      parallel_for_(config.parallel_for),
      user_(config.parallel_for_user) {
  if (!parallel_for_ && !has_threads()) count_ = 1;
  if (!parallel_for_ && count_ > 1) {
    ranges_.reset(new Range[static_cast<size_t>(count_)]);
    team_ = Team(count_);
  }
  hand_over_ = number_variable("GA_CPU_HAND_OVER").value_or(-1);
}

void Threads::reserve(int64_t items) {
  if (!parallel_for_ || items <= capacity_) return;
  taken_.reset(new std::atomic<unsigned char>[static_cast<size_t>(items)]);
  capacity_ = items;
}

// The trial of passes of that size; NULL where it is plain whether they go together.
Trial* Threads::find_trial(double nanoseconds, bool& together) {
  constexpr double kLeast = 800;  // nanoseconds: to save less is never worth a hand-over,
  constexpr double kMost = 1e5;   // and to save more always is
  if (is_one()) return nullptr;
  const double saved = nanoseconds * (1 - 1.0 / std::max(count_, 2));
  together = saved > std::clamp(hand_over_, kLeast, kMost);
  if (hand_over_ >= 0 || saved <= kLeast || saved > kMost) return nullptr;
  return &trials_[static_cast<size_t>(std::ilogb(saved / kLeast))];
}

void Threads::run_tasks(int64_t items, bool alone, ga_task body, void* data) {
  if (alone || items == 1 || is_one()) {
    for (int64_t i = 0; i < items; ++i) body(data, i);
  } else if (parallel_for_) {
    run_shared(items, body, data);
  } else {
    run_own(items, body, data);
  }
}

void Threads::run_own(int64_t items, ga_task body, void* data) {
  struct Pass {
    Range* ranges;
    int threads;
    ga_task body;
    void* data;
  } pass = {ranges_.get(), static_cast<int>(std::min<int64_t>(count_, items)), body, data};
  for (int t = 0; t < pass.threads; ++t) {
    pass.ranges[t].next.store(items * t / pass.threads, std::memory_order_relaxed);
    pass.ranges[t].end = items * (t + 1) / pass.threads;
  }
  const auto share = [](void* shared, int self) {
    const Pass& p = *static_cast<const Pass*>(shared);
    const FpMode mode;
    for (int t = 0; t < p.threads; ++t) {
      Range& range = p.ranges[(self + t) % p.threads];
      while (range.next.load(std::memory_order_relaxed) < range.end) {
        const int64_t i = range.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= range.end) break;
        p.body(p.data, i);
      }
    }
  };
#ifdef _OPENMP
#pragma omp parallel num_threads(pass.threads)
  share(&pass, omp_get_thread_num());
#else
  team_.run(pass.threads, share, &pass);
#endif
}

void Threads::run_shared(int64_t items, ga_task body, void* data) {
  struct Job {
    ga_task body;
    void* data;
    int64_t items;
    std::atomic<unsigned char>* taken;
    std::atomic<int64_t> done;
    std::atomic<bool> wrong;
  } job = {body, data, items, taken_.get(), {0}, {false}};
  if (items > capacity_)
    fail(GA_ERROR_INTERNAL, "a loop of %lld items came where there was room for %lld",
         static_cast<long long>(items), static_cast<long long>(capacity_));
  for (int64_t i = 0; i < items; ++i)
    taken_[static_cast<size_t>(i)].store(0, std::memory_order_relaxed);
  const ga_task once = [](void* shared, int64_t i) {
    Job& j = *static_cast<Job*>(shared);
    if (i < 0 || i >= j.items || j.taken[i].exchange(1, std::memory_order_relaxed)) {
      j.wrong.store(true, std::memory_order_relaxed);
      return;
    }
    const FpMode mode;
    j.body(j.data, i);
    j.done.fetch_add(1, std::memory_order_release);
  };
  call_program("parallel_for", [&] { parallel_for_(user_, items, once, &job); });
  const int64_t done = job.done.load(std::memory_order_acquire);
  if (done != items || job.wrong.load(std::memory_order_relaxed))
    fail(GA_ERROR_FAULT,
         "the program's parallel_for ran %lld of %lld tasks%s; each is to be run exactly once",
         static_cast<long long>(done), static_cast<long long>(items),
         job.wrong.load(std::memory_order_relaxed) ? ", some of them twice or out of range" : "");
}

}  // namespace ga::cpu
