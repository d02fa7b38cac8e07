// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/rows.hpp"

#include <algorithm>
#include <cstring>

#include "backend/decide.hpp"
#include "core/tensor.hpp"

namespace ga::cpu {
namespace {

int64_t row_of(const RowsTask& task, int64_t i) {
  return task.index_dtype == GA_I32 ? static_cast<const int32_t*>(task.indices)[i]
                                    : static_cast<const int64_t*>(task.indices)[i];
}

}  // namespace

int64_t Rows::check(const RowsTask& task) const {
  for (int64_t i = 0; i < task.count; ++i) {
    const int64_t row = row_of(task, i);
    if (row < 0 || row >= task.rows) return i;
  }
  return -1;
}

void Rows::prepare(const RowsTask& task, int64_t waiting) {
  if (!task.set) return;  // no elements
  const auto count = static_cast<size_t>(task.count);
  const int64_t most = task.set->size + waiting + task.count;
  if (most > task.set->capacity) make_room(*task.set, std::max(most, 2 * task.set->capacity));
  grow(chains_, static_cast<size_t>(most));
  grow(order_, count);
  const auto batch = static_cast<size_t>(std::min<int64_t>(most, kRowBatch));
  const size_t rows_of_chunks =
      batch * static_cast<size_t>(std::max<int64_t>(1, chunk_count(task.columns)));
  lists_.reserve(rows_of_chunks);
  next_.resize(std::max(next_.size(), count));
  threads_.reserve(task.count);
}

void Rows::accumulate(const RowsTask& task) {
  // Chains the contributions to each row in their order; the rows are in the order of their first
  // one.
  if (task.plan && !task.plan->active) return;
  RowSet& set = *task.set;
  const auto known = task.dense ? size_t{0} : static_cast<size_t>(set.size);
  order_.clear();
  chains_.resize(known, {-1, -1});
  for (int64_t i = 0; i < task.count; ++i) {
    const int64_t row = row_of(task, i);
    uint32_t slot = set.slots[row];
    if (slot >= set.size || set.entries[slot].row != row) {
      slot = static_cast<uint32_t>(set.size);
      set.slots[row] = slot;
      set.entries[set.size++] = {row, {}};
      chains_.push_back({-1, -1});
    }
    Chain& chain = chains_[slot];
    if (chain.first < 0) {
      order_.push_back({slot, task.dense || slot < known});
      chain.first = i;
    } else {
      next_[static_cast<size_t>(chain.last)] = i;
    }
    chain.last = i;
    next_[static_cast<size_t>(i)] = -1;
  }
  const auto rows = static_cast<int64_t>(order_.size());
  const int64_t item = std::max<int64_t>(1, kSmallestItem / std::max<int64_t>(task.columns, 1));
  const auto body = [&](int64_t index) {
    const int64_t end = std::min(rows, (index + 1) * item);
    for (int64_t r = index * item; r < end; ++r) add(task, r);
  };
  if (rows > 0) threads_.run((rows + item - 1) / item, task.count * task.columns <= kAlone, body);
  for (const Touched& touched : order_) chains_[touched.slot].first = -1;
  if (task.dense) set.size = 0;
}

void Rows::free(RowSet* set) noexcept {
  if (!set) return;
  cpu::free(set->entries, static_cast<size_t>(set->capacity) * sizeof(RowEntry));
  capacity_ -= set->capacity;
}

// Gives a row set larger entries, and keeps what the set holds.
void Rows::make_room(RowSet& set, int64_t capacity) {
  auto* const entries =
      static_cast<RowEntry*>(allocate(static_cast<size_t>(capacity) * sizeof(RowEntry)));
  if (set.size > 0)
    std::memcpy(entries, set.entries, static_cast<size_t>(set.size) * sizeof(RowEntry));
  cpu::free(set.entries, static_cast<size_t>(set.capacity) * sizeof(RowEntry));
  capacity_ += capacity - set.capacity;
  set.entries = entries;
  set.capacity = capacity;
}

void Rows::add(const RowsTask& task, int64_t index) {
  const Touched& touched = order_[static_cast<size_t>(index)];
  RowEntry& entry = task.set->entries[touched.slot];
  const int64_t size = task.target.format == GA_F64 ? 8 : 4;
  bool keep = touched.keep;
  for (int64_t i = chains_[touched.slot].first; i >= 0; i = next_[static_cast<size_t>(i)]) {
    AccumulateTask add = {};
    add.target = {static_cast<char*>(task.target.data) + entry.row * task.columns * size,
                  task.target.format};
    add.count = task.columns;
    add.source[0] = task.values;
    if (task.plan) {
      add.source[0].scale = task.plan->scale;
      add.source[0].divisor = nullptr;
    }
    add.sources = 1;
    add.keep = keep ? 1 : 0;
    Partial whole = {}, partial = {};
    add.partials = &partial;
    const int64_t value_size = dtype_info(task.values.format).size;
    const char* const values =
        static_cast<const char*>(task.values.data) + i * task.columns * value_size;
    char* const row = static_cast<char*>(add.target.data);
    for (int64_t offset = 0; offset < task.columns; offset += kChunk) {
      add.target.data = row + offset * size;
      add.source[0].data = values + offset * value_size;
      kernels_.accumulate(add, 0, std::min(kChunk, task.columns - offset), false);
      whole.sum_squares += partial.sum_squares;
      whole.nonfinite |= partial.nonfinite;
    }
    entry.partial = whole;
    keep = true;
  }
}

void Rows::update(const UpdateTask& given) {
  UpdateTask task = given;
  task.average.data = nullptr;
  task.padded_state = false;
  if (task.gradient.source.format == kSparse) {  // all rows that are updated have a gradient
    task.gradient.source.data = static_cast<const SparseRows*>(given.gradient.source.data)->data;
    task.gradient.source.format = task.f64 ? GA_F64 : GA_F32;
  }
  const RowSet& set = *task.rows;
  for (int64_t first = 0; first < set.size; first += kRowBatch) {
    const auto count = static_cast<size_t>(std::min<int64_t>(kRowBatch, set.size - first));
    const Span<const RowEntry> rows = {set.entries + first, count};
    if (task.row_state) add_means(task, rows);
    lists_.run_rows(task, rows, [this](const UpdateTask& t, const Work& w) {
      kernels_.update[t.f64][t.op](t, w.offset, w.count);
    });
  }
  if (!given.average.data) return;
  lists_.run(
      Given<UpdateTask>{{&given, 1}},
      [this](const UpdateTask& average, const Work& w) {
        kernels_.follow(average, w.offset, w.count);
      },
      true);
}

// A row is a piece of its own, and summed with its first chunk.
void Rows::add_means(const UpdateTask& task, Span<const RowEntry> rows) {
  UnitTask sums = sums_of(*task.row_state, true);
  UnitPattern pattern = *sums.pattern;
  pattern.pieces = task.row_state->row_count;
  sums.pattern = &pattern;
  lists_.run_rows(task, rows, [&](const UpdateTask& t, const Work& w) {
    if (w.offset % t.columns != 0) return;
    const int64_t row = w.offset / t.columns;
    kernels_.unit_norms(sums, row);
    (t.f64 ? add_row_mean<double> : add_row_mean<float>)(*t.row_state, row);
  });
}

}  // namespace ga::cpu
