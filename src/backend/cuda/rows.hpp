// SPDX-License-Identifier: Apache-2.0
// Row-sparse contributions: the sets of rows that a window has touched, and the memory in which the
// contributions of a call are sorted by row.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "backend/backend.hpp"
#include "backend/cuda/kernels.hpp"
#include "backend/cuda/runtime.hpp"

namespace ga::cuda {

class Rows {
 public:
  explicit Rows(Runtime& runtime) : runtime_(runtime) {}
  ~Rows();
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  void check(const RowsTask& task) const;  // throws if the task is larger than a device takes
  void prepare(const RowsTask& task, int64_t waiting);
  void accumulate(const RowsTask& task, Control* control);
  void clear(Span<RowSet* const> sets);
  void free(RowSet* set) noexcept;
  int64_t entry_bytes() const { return entry_bytes_; }

 private:
  // What the host knows of a set. Only the device knows its number of rows.
  struct Known {
    RowEntry* entries = nullptr;
    int64_t capacity = 0;
    int64_t most = 0;  // contributions since the set was empty: a bound of its rows
  };

  void grow_set(const RowsTask& task, int64_t rows);
  size_t storage_for(int64_t count, int64_t rows) const;
  void grow_workspace(int64_t count, size_t storage);
  RowLists lists(int64_t count) const;

  Runtime& runtime_;
  std::unordered_map<const RowSet*, Known> sets_;
  int64_t entry_bytes_ = 0;  // of all sets
  char* block_ = nullptr;    // the arrays of RowLists
  size_t bytes_ = 0;
  size_t storage_bytes_ = 0;
  int64_t capacity_ = 0;  // contributions of a call
};

}  // namespace ga::cuda
