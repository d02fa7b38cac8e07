// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/rows.hpp"

#include <algorithm>

namespace ga::cuda {
namespace {

constexpr size_t kAlign = 256;

size_t align_up(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

size_t list_bytes(int64_t count) { return align_up(static_cast<size_t>(count) * sizeof(uint32_t)); }

}  // namespace

void Rows::check(const RowsTask& task) const {
  if (task.rows > int64_t{UINT32_MAX} || task.count > INT32_MAX)
    fail(GA_ERROR_UNSUPPORTED,
         "%lld rows in one call, of a parameter with %lld rows: a CUDA device takes up to %d of up "
         "to %lld",
         static_cast<long long>(task.count), static_cast<long long>(task.rows), INT32_MAX,
         static_cast<long long>(UINT32_MAX));
}

void Rows::prepare(const RowsTask& task, int64_t waiting) {
  if (task.count == 0 || !task.set) return;  // a parameter without a set has no elements
  const Known& known = sets_[task.set];
  const int64_t wanted = std::min(task.rows, known.most + waiting + task.count);
  if (wanted > known.capacity) grow_set(task, wanted);
  const size_t storage = storage_for(task.count, task.rows);
  if (task.count > capacity_ || storage > storage_bytes_) grow_workspace(task.count, storage);
}

Rows::~Rows() {
  for (const auto& [set, known] : sets_) runtime_.free(known.entries);
  runtime_.free(block_);
}

void Rows::grow_set(const RowsTask& task, int64_t rows) {
  Known& known = sets_[task.set];
  const int64_t capacity = std::min(task.rows, std::max(rows, 2 * known.capacity));
  const size_t bytes = static_cast<size_t>(capacity) * sizeof(RowEntry);
  auto* const entries = static_cast<RowEntry*>(runtime_.allocate(bytes));
  const size_t before = static_cast<size_t>(known.capacity) * sizeof(RowEntry);
  RowEntry* const old = known.entries;
  try {
    if (old)
      runtime_.check(
          cudaMemcpyAsync(entries, old, before, cudaMemcpyDeviceToDevice, runtime_.stream()),
          "a copy of row entries");
    runtime_.write(&task.set->entries, &entries, sizeof entries);
    runtime_.write(&task.set->capacity, &capacity, sizeof capacity);
  } catch (...) {
    runtime_.free(entries);
    throw;
  }
  known.entries = entries;
  known.capacity = capacity;
  entry_bytes_ += static_cast<int64_t>(bytes) - static_cast<int64_t>(before);
  runtime_.free(old);
}

size_t Rows::storage_for(int64_t count, int64_t rows) const {
  RowLists lists = {};
  lists.count = count;
  size_t bytes = 0;
  runtime_.without_pending_error([&] { return sort_rows(lists, rows, bytes, runtime_.stream()); },
                                 "asking what a sort needs");
  return bytes;
}

void Rows::grow_workspace(int64_t count, size_t storage) {
  int64_t capacity = capacity_;
  if (count > capacity) capacity = std::min<int64_t>(INT32_MAX, std::max(count, 2 * capacity_));
  const size_t storage_bytes = std::max(storage, storage_for(capacity, int64_t{UINT32_MAX}));
  const size_t bytes = 7 * list_bytes(capacity) + 2 * kAlign + align_up(storage_bytes);
  auto* const block = static_cast<char*>(runtime_.allocate(bytes));
  runtime_.free(block_);
  runtime_.count_own(static_cast<int64_t>(bytes) - static_cast<int64_t>(bytes_));
  block_ = block;
  bytes_ = bytes;
  storage_bytes_ = storage_bytes;
  capacity_ = capacity;
}

RowLists Rows::lists(int64_t count) const {
  char* at = block_;
  RowLists lists = {};
  lists.count = count;
  for (uint32_t** list : {&lists.rows, &lists.positions, &lists.sorted_rows,
                          &lists.sorted_positions, &lists.starts, &lists.entries, &lists.found}) {
    *list = reinterpret_cast<uint32_t*>(at);
    at += list_bytes(capacity_);
  }
  lists.distinct = reinterpret_cast<int64_t*>(at);
  lists.bad = reinterpret_cast<int32_t*>(at + kAlign);
  lists.storage = at + 2 * kAlign;
  return lists;
}

void Rows::accumulate(const RowsTask& task, Control* control) {
  if (task.count == 0 || task.rows == 0) return;
  const Queue& queue = runtime_.queue();
  const RowLists lists = this->lists(task.count);
  gather_rows(queue, task, lists, control);
  size_t storage_bytes = storage_bytes_;
  runtime_.without_pending_error(
      [&] { return sort_rows(lists, task.rows, storage_bytes, queue.stream); }, "a sort");
  accumulate_rows(queue, task, lists);
  if (!task.dense) {
    Known& known = sets_[task.set];
    known.most = std::min(task.rows, known.most + task.count);
  }
}

void Rows::clear(Span<RowSet* const> sets) {
  clear_row_sets(runtime_.queue(), sets);
  for (size_t i = 0; i < sets.size; ++i)
    if (const auto known = sets_.find(sets.data[i]); known != sets_.end()) known->second.most = 0;
}

void Rows::free(RowSet* set) noexcept {
  const auto known = sets_.find(set);
  if (known == sets_.end()) return;
  runtime_.free(known->second.entries);
  entry_bytes_ -= known->second.capacity * static_cast<int64_t>(sizeof(RowEntry));
  sets_.erase(known);
}

}  // namespace ga::cuda
