// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "backend/tasks.hpp"

namespace ga {

// Tasks for a backend, written in place, field by field: one that is put together first and copied
// then makes the copy wait for its stores (measured: two thirds of the time of Context::add_task).
template <class Task>
class TaskList {
 public:
  void reserve(size_t capacity) {
    if (capacity > tasks_.size()) tasks_.resize(capacity);
  }
  void clear() { size_ = 0; }
  Task& add() { return tasks_[size_++]; }  // holds what a former list left there
  Span<const Task> span() const { return {tasks_.data(), size_}; }

 private:
  std::vector<Task> tasks_;
  size_t size_ = 0;
};

}  // namespace ga
