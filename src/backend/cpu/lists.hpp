// SPDX-License-Identifier: Apache-2.0
// Tasks cut into chunks, and these into the items of a parallel loop.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cpu/memory.hpp"
#include "backend/cpu/threads.hpp"

namespace ga::cpu {

// Below this many elements a second thread costs more than it saves, and so does an item of its
// own.
constexpr int64_t kAlone = 16384;
constexpr int64_t kSmallestItem = 4096;

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
  explicit Lists(Threads& threads) : threads_(threads) {}

  // Room for so many chunks.
  void reserve(size_t chunks) {
    grow(work_, chunks);
    grow(items_, chunks + 1);
  }
  static constexpr size_t kBytes = sizeof(Work) + sizeof(int64_t);  // of a chunk

  // loop(task, work) for all chunks of the tasks, but not of idle ones unless busy. Items are of
  // similar size: many small tensors are one item, and there are enough of them for every thread.
  template <class Tasks, class Loop>
  void run(const Tasks& tasks, Loop loop, bool busy = false) {
    int64_t total = 0;
    for (size_t t = 0; t < tasks.size(); ++t) total += tasks[t].count;
    const int64_t item = std::clamp(total / (4 * threads_.count()), kSmallestItem, kChunk);
    work_.clear();
    items_.clear();
    int64_t begun = 0, item_end = 0;
    for (size_t t = 0; t < tasks.size(); ++t) {
      const auto& task = tasks[t];
      if (!busy && idle(task)) continue;
      for (int64_t offset = 0; offset < task.count; offset += kChunk) {
        if (begun >= item_end) {
          items_.push_back(static_cast<int64_t>(work_.size()));
          item_end = begun + item;
        }
        const int64_t count = std::min(kChunk, task.count - offset);
        add(t, count, offset);
        begun += count;
      }
    }
    run_items(tasks, total, loop);
  }

  // Cuts tasks into the pieces of their patterns: an item is one, or several of small tensors.
  // Returns their elements.
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

  // loop(task, work) for what was cut, total elements together.
  template <class Tasks, class Loop>
  void run_items(const Tasks& tasks, int64_t total, Loop loop) {
    if (items_.empty()) return;
    const int64_t items = static_cast<int64_t>(items_.size());
    items_.push_back(static_cast<int64_t>(work_.size()));

    struct Job {
      const Lists& lists;
      const Tasks& tasks;
      Loop loop;
    } job = {*this, tasks, loop};
    const ga_task body = [](void* data, int64_t item) {
      const Job& j = *static_cast<const Job*>(data);
      const auto end = static_cast<size_t>(j.lists.items_[static_cast<size_t>(item) + 1]);
      for (auto w = static_cast<size_t>(j.lists.items_[static_cast<size_t>(item)]); w < end; ++w) {
        const Work& work = j.lists.work_[w];
        j.loop(j.tasks[static_cast<size_t>(work.task)], work);
      }
    };
    threads_.run(items, total <= kAlone, body, &job);
  }

 private:
  static bool idle(const UpdateTask& task) { return (task.plan->duty & ~kUpdateRows) == 0; }
  template <class Task>
  static bool idle(const Task&) {
    return false;
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
  std::vector<Work> work_;
  std::vector<int64_t> items_;
};

}  // namespace ga::cpu
