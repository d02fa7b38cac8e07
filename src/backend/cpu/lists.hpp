// SPDX-License-Identifier: Apache-2.0
// Cuts tasks into chunks, and groups the chunks into the items of a parallel loop.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cpu/memory.hpp"
#include "backend/cpu/threads.hpp"

namespace ga::cpu {

constexpr int64_t kAlone = 16384;             // elements for which a second thread does not pay
constexpr double kElement = 0.1, kTask = 20;  // nanoseconds that one thread takes at least
constexpr int64_t kSmallestItem = 4096;       // elements, so that an item pays

// A chunk of a task.
struct Work {
  int32_t task;
  int32_t count;
  int64_t offset;
};

// Tasks of a table.
template <class Task>
struct Listed {
  const Task* table;
  Params params;
  size_t size() const { return params.size; }
  const Task& operator[](size_t k) const { return table[params.data[k]]; }
};
// All tasks of a call.
template <class Task>
struct Given {
  Span<const Task> tasks;
  size_t size() const { return tasks.size; }
  const Task& operator[](size_t k) const { return tasks.data[k]; }
};

class Lists {
 public:
  // shared: several threads may be in run() at once. One of them has the threads, and the others work alone.
  Lists(Threads& threads, bool shared) : threads_(threads), shared_(shared) {}

  // Makes room for so many chunks.
  void reserve(size_t chunks) {
    grow(work_, chunks);
    grow(items_, chunks + 1);
  }
  static constexpr size_t kBytes = sizeof(Work) + sizeof(int64_t);  // of a chunk

  // Runs loop(task, work) for all chunks of the tasks, without idle tasks unless `busy`. Items are
  // of similar size: many small tensors make one item, and there are enough items for every thread.
  template <class Tasks, class Loop>
  void run(const Tasks& tasks, Loop loop, bool busy = false) {
    run_all(kind_of(tasks), tasks, loop, busy, whole);
  }

  // Runs loop(task, work) for updates whose chunks begin anew after every UpdateTask::stretch() elements.
  template <class Tasks, class Loop>
  void run_stretches(const Tasks& tasks, Loop loop) {
    run_all(kMeasure, tasks, loop, false, [](const UpdateTask& task, auto&& take) {
      for (int64_t at = 0; at < task.count; at += task.stretch())
        take(at, std::min(task.stretch(), task.count - at));
    });
  }

  // Runs loop(task, work) for all chunks of these rows of one task, as far as its elements are of them.
  template <class Task, class Loop>
  void run_rows(const Task& task, Span<const RowEntry> rows, Loop loop) {
    const int64_t total = static_cast<int64_t>(rows.size) * task.columns;
    begin(total);
    for (size_t r = 0; r < rows.size; ++r) {
      const int64_t at = rows.data[r].row * task.columns - task.first;
      if (at >= 0 && at < task.count) cut(0, at, task.columns);
    }
    run_items(Given<Task>{{&task, 1}}, total <= kAlone, loop);
  }

  // Runs loop(task, work) for the pieces of the patterns of tasks; work.offset is the number of a piece. An item
  // is one piece, or several of small tensors.
  template <class Tasks, class PatternOf, class Loop>
  void run_pieces(const Tasks& tasks, PatternOf pattern_of, Loop loop) {
    const Turn turn(taken_);
    if (turn.is_mine()) {
      const int64_t total = cut_pieces(tasks, pattern_of);
      return run_items(tasks, total <= kAlone, loop);
    }
    for (size_t t = 0; t < tasks.size(); ++t) {
      if (idle(tasks[t])) continue;
      for (int64_t piece = 0; piece < pattern_of(t)->pieces; ++piece)
        loop(tasks[t], Work{static_cast<int32_t>(t), 0, piece});
    }
  }

 private:
  // Returns the number of elements.
  template <class Tasks, class PatternOf>
  int64_t cut_pieces(const Tasks& tasks, PatternOf pattern_of) {
    work_.clear();
    items_.clear();
    int64_t total = 0, begun = kSmallestItem;
    for (size_t t = 0; t < tasks.size(); ++t) {
      if (idle(tasks[t])) continue;
      const UnitPattern& pattern = *pattern_of(t);
      for (int64_t piece = 0; piece < pattern.pieces; ++piece) {
        if (begun >= kSmallestItem) {
          items_.push_back(static_cast<int64_t>(work_.size()));
          begun = 0;
        }
        add(t, 0, piece);
        begun += pattern.count / pattern.pieces;
      }
      total += pattern.count;
    }
    return total;
  }

  // Runs loop(task, work) for the items that were cut. alone: on the calling thread.
  template <class Tasks, class Loop>
  void run_items(const Tasks& tasks, bool alone, Loop loop) {
    if (items_.empty()) return;
    const int64_t items = static_cast<int64_t>(items_.size());
    items_.push_back(static_cast<int64_t>(work_.size()));
    const auto body = [&](int64_t item) {
      const int64_t* const bounds = &items_[static_cast<size_t>(item)];
      for (int64_t w = bounds[0]; w < bounds[1]; ++w) {
        const Work& work = work_[static_cast<size_t>(w)];
        loop(tasks[static_cast<size_t>(work.task)], work);
      }
    };
    threads_.run(items, alone, body);
  }

  // Of passes, for their trial.
  enum Kind { kAccumulate, kUpdateAll, kMeasure, kOther };
  template <class Tasks>
  static int kind_of(const Tasks& tasks) {
    using Task = std::decay_t<decltype(tasks[0])>;
    return std::is_same_v<Task, AccumulateTask> ? kAccumulate
           : std::is_same_v<Task, UpdateTask>   ? kUpdateAll
                                                : kOther;
  }

  // Whoever finds the flag clear has it until the end of the scope.
  class Turn {
   public:
    explicit Turn(std::atomic_flag& taken)
        : taken_(taken), is_mine_(!taken.test_and_set(std::memory_order_acquire)) {}
    ~Turn() {
      if (is_mine_) taken_.clear(std::memory_order_release);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    bool is_mine() const { return is_mine_; }

   private:
    std::atomic_flag& taken_;
    const bool is_mine_;
  };

  static bool idle(const UpdateTask& task) { return (task.plan->actions & ~kUpdateRows) == 0; }
  template <class Task>
  static bool idle(const Task&) {
    return false;
  }

  static constexpr auto whole = [](const auto& task, auto&& take) { take(0, task.count); };

  // each_stretch(task, take) calls take(first, elements) for the parts of a task.
  template <class Tasks, class Loop, class Stretches>
  [[gnu::always_inline]] void run_all(int kind, const Tasks& tasks, Loop& loop, bool busy,
                                      Stretches&& each_stretch) {
    if (shared_) return run_shared(kind, tasks, loop, busy, each_stretch);
    run_cut(kind, tasks, loop, busy, each_stretch);
  }

  template <class Tasks, class Loop, class Stretches>
  [[gnu::always_inline]] void run_cut(int kind, const Tasks& tasks, Loop& loop, bool busy,
                                      Stretches&& each_stretch) {
    int64_t total = 0;
    for (size_t t = 0; t < tasks.size(); ++t) total += tasks[t].count;
    const double work =
        kElement * static_cast<double>(total) + kTask * static_cast<double>(tasks.size());
    threads_.run_pass(kind, work, [&](bool together) {
      if (together) begin(total);
      for (size_t t = 0; t < tasks.size(); ++t) {
        const auto& task = tasks[t];
        if (!busy && idle(task)) continue;
        each_stretch(task, [&](int64_t first, int64_t elements) {
          if (together) return cut(t, first, elements);
          for (int64_t offset = 0; offset < elements; offset += kChunk)  // no list
            loop(task,
                 Work{static_cast<int32_t>(t),
                      static_cast<int32_t>(std::min(kChunk, elements - offset)), first + offset});
        });
      }
      if (together) run_items(tasks, false, loop);
    });
  }

  // A function of its own, so that the compiler inlines the rest where there is but one thread at a time.
  template <class Tasks, class Loop, class Stretches>
  [[gnu::noinline]] void run_shared(int kind, const Tasks& tasks, Loop& loop, bool busy,
                                    Stretches& each_stretch) {
    const Turn turn(taken_);
    if (turn.is_mine()) return run_cut(kind, tasks, loop, busy, each_stretch);
    for (size_t t = 0; t < tasks.size(); ++t) {
      const auto& task = tasks[t];
      if (!busy && idle(task)) continue;
      each_stretch(task, [&](int64_t first, int64_t elements) {
        for (int64_t offset = 0; offset < elements; offset += kChunk)
          loop(task,
               Work{static_cast<int32_t>(t),
                    static_cast<int32_t>(std::min(kChunk, elements - offset)), first + offset});
      });
    }
  }

  // Cuts elements into chunks, and these into items of similar size: begin() with the elements of all.
  void begin(int64_t total) {
    item_ = std::clamp(total / (4 * threads_.count()), kSmallestItem, kChunk);
    begun_ = item_end_ = 0;
    work_.clear();
    items_.clear();
  }
  void cut(size_t task, int64_t first, int64_t elements) {
    for (int64_t offset = 0; offset < elements; offset += kChunk) {
      if (begun_ >= item_end_) {
        items_.push_back(static_cast<int64_t>(work_.size()));
        item_end_ = begun_ + item_;
      }
      const int64_t count = std::min(kChunk, elements - offset);
      add(task, count, first + offset);
      begun_ += count;
    }
  }

  // In place: a Work that is put together first and copied then makes the copy wait for its stores
  // (measured: a tenth of the time of a pass over small tensors).
  void add(size_t task, int64_t count, int64_t offset) {
    Work& work = work_.emplace_back();
    work.task = static_cast<int32_t>(task);
    work.count = static_cast<int32_t>(count);
    work.offset = offset;
  }

  Threads& threads_;
  const bool shared_;
  std::atomic_flag taken_ = ATOMIC_FLAG_INIT;
  std::vector<Work> work_;
  std::vector<int64_t> items_;
  int64_t item_, begun_, item_end_;  // of begin() and cut()
};

}  // namespace ga::cpu
