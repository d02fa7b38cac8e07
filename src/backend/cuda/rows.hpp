// SPDX-License-Identifier: Apache-2.0
// Row-sparse contributions: the rows that a window has touched, and the sort by which those of one
// call that go to the same row are added in their order.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "backend/backend.hpp"
#include "backend/cuda/kernels.hpp"
#include "backend/cuda/runtime.hpp"
#include "backend/cuda/sort.hpp"

namespace ga::cuda {

class Rows {
 public:
  explicit Rows(Runtime& runtime) : runtime_(runtime) {}
  ~Rows();
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  void check(const RowsTask& task) const;  // throws where it is larger than a device takes
  void prepare(const RowsTask& task, int64_t waiting);
  void accumulate(const RowsTask& task, Control* control);
  void clear(Span<RowSet* const> sets);
  void free(RowSet* set) noexcept;
  int64_t entry_bytes() const { return entry_bytes_; }

 private:
  // What the host knows of a set: how many rows it has is known to the device alone.
  struct Known {
    RowEntry* entries = nullptr;
    int64_t capacity = 0;
    int64_t most = 0;  // contributions since it was empty, so it has at most so many rows
  };
  // What a call needs to sort its rows, in one block.
  struct Workspace {
    uint32_t *keys, *positions, *sorted_keys, *sorted_positions, *starts, *entries, *found;
    int64_t* distinct;
    int32_t* bad;
    char* storage;  // of CUB
  };

  void grow_set(const RowsTask& task, int64_t rows);
  size_t storage_for(int64_t count, int64_t rows);
  void grow_workspace(int64_t count, size_t storage);
  Workspace workspace() const;
  static SortTask sort_task(const Workspace& w, int64_t count, int64_t rows);

  Runtime& runtime_;
  std::unordered_map<const RowSet*, Known> sets_;
  int64_t entry_bytes_ = 0;  // of all sets
  char* block_ = nullptr;
  size_t bytes_ = 0;
  size_t storage_bytes_ = 0;
  int64_t capacity_ = 0;  // contributions of a call
};

}  // namespace ga::cuda
