// SPDX-License-Identifier: Apache-2.0
// Contributions to some rows of a matrix, sorted by row: where each row begins, its entry in the
// set, and the sums. No float is added by an atomic, because one group of threads has a row.
#include <cub/cub.cuh>

#include "backend/cuda/kernels.hpp"
#include "backend/cuda/loops.hpp"

namespace ga::cuda {
namespace {

struct Gather {
  const void* indices;
  RowLists lists;
  int64_t rows;
  Control* control;
  int32_t dtype;

  GA_DEVICE void operator()(Block& block) const {
    block.each([&](int thread) {
      const int64_t step = block.count() * kThreads;
      for (int64_t k = block.index() * kThreads + thread; k < lists.count; k += step) {
        const int64_t row = dtype == GA_I32 ? static_cast<const int32_t*>(indices)[k]
                                            : static_cast<const int64_t*>(indices)[k];
        const bool good = row >= 0 && row < rows;
        lists.rows[k] = good ? static_cast<uint32_t>(row) : 0;
        lists.positions[k] = static_cast<uint32_t>(k);
        if (good) continue;
        *lists.bad = 1;
        control->failed = true;
      }
    });
  }
};

struct Reset {
  int32_t* flag;

  GA_DEVICE void operator()(Block& block) const {
    block.once([&] { *flag = 0; });
  }
};

// What the kernels after the sort share.
struct Call {
  RowLists lists;
  RowSet* set;
  const MicroPlan* plan;
  bool dense;

  GA_DEVICE bool is_off() const { return *lists.bad != 0 || (plan && !plan->active); }
  GA_DEVICE bool is_first(int64_t k) const {
    return k == 0 || lists.sorted_rows[k] != lists.sorted_rows[k - 1];
  }
  // The entry that the set had for a row before the call, or -1.
  GA_DEVICE int64_t known(int64_t row) const {
    const int64_t slot = set->slots[row];
    return slot < set->size && set->entries[slot].row == row ? slot : -1;
  }
};

// By thread of a segment: how many rows, and how many new ones, begin in the thread's share; then
// before it.
struct Heads {
  uint32_t rows[kThreads + 1], added[kThreads + 1];
};

constexpr int kShare = static_cast<int>(RowLists::kSegment) / kThreads;

// f(k, is_new) in each thread for the places k of its share of a segment where a row begins.
template <class F>
GA_DEVICE void each_head(const Call& call, int64_t segment, int thread, F f) {
  const int64_t first = segment * RowLists::kSegment + thread * kShare;
  for (int64_t k = first; k < first + kShare && k < call.lists.count; ++k) {
    if (call.is_first(k)) f(k, !call.dense && call.known(call.lists.sorted_rows[k]) < 0);
  }
}

// Leaves in heads the rows that begin before each thread's share; at kThreads, those of the
// segment.
GA_DEVICE void count_heads(Block& block, const Call& call, int64_t segment, Heads& heads) {
  block.each([&](int thread) {
    uint32_t rows = 0, added = 0;
    each_head(call, segment, thread, [&](int64_t, bool is_new) {
      ++rows;
      added += is_new ? 1 : 0;
    });
    heads.rows[thread] = rows;
    heads.added[thread] = added;
  });
  block.once([&] {
    uint32_t rows = 0, added = 0;
    for (int t = 0; t <= kThreads; ++t) {
      const uint32_t r = t < kThreads ? heads.rows[t] : 0, a = t < kThreads ? heads.added[t] : 0;
      heads.rows[t] = rows;
      heads.added[t] = added;
      rows += r;
      added += a;
    }
  });
}

// Counts the rows that begin in each segment; the last block turns the counts into totals before.
struct FindRows {
  Call call;
  unsigned* counter;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED Heads heads;
    if (call.is_off()) return;
    uint32_t* const found = call.lists.found;
    const int64_t segments = RowLists::segments(call.lists.count);
    for (int64_t s = block.index(); s < segments; s += block.count()) {
      count_heads(block, call, s, heads);
      block.once([&] {
        found[2 * s] = heads.rows[kThreads];
        found[2 * s + 1] = heads.added[kThreads];
      });
    }
    if (!block.last(counter)) return;
    block.once([&] {
      uint32_t rows = 0, added = 0;
      for (int64_t s = 0; s < segments; ++s) {
        const uint32_t r = found[2 * s], a = found[2 * s + 1];
        found[2 * s] = rows;
        found[2 * s + 1] = added;
        rows += r;
        added += a;
      }
      call.lists.distinct[0] = rows;
      call.lists.distinct[1] = added;
    });
  }
};

// Writes where each row begins, and its entry, which new rows get here. The size of the set does
// not change yet.
struct EnterRows {
  Call call;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED Heads heads;
    if (call.is_off()) return;
    const RowLists& lists = call.lists;
    const int64_t segments = RowLists::segments(lists.count);
    for (int64_t s = block.index(); s < segments; s += block.count()) {
      count_heads(block, call, s, heads);
      block.each([&](int thread) {
        uint32_t d = lists.found[2 * s] + heads.rows[thread];
        int64_t next =
            call.dense ? 0 : call.set->size + lists.found[2 * s + 1] + heads.added[thread];
        each_head(call, s, thread, [&](int64_t k, bool is_new) {
          const int64_t row = lists.sorted_rows[k];
          lists.starts[d] = static_cast<uint32_t>(k);
          if (is_new) {
            call.set->slots[row] = static_cast<uint32_t>(next);
            call.set->entries[next].row = row;
            lists.entries[d] = static_cast<uint32_t>(next++);
          } else if (!call.dense) {
            lists.entries[d] = static_cast<uint32_t>(call.known(row));
          }
          ++d;
        });
      });
    }
  }
};

struct RowTotals {
  ChunkTotals<1> sums;
  int nonfinite[kLaneGroups];  // by row
  Partial whole;
};

// Adds the contributions to each row, whose partial is that of a tensor of its own.
template <class T>
struct AddRows {
  static constexpr int kBlocks = 3;
  Call call;
  T* target;
  int64_t columns;
  Source values;
  unsigned* counter;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED RowTotals shared;
    if (call.is_off()) return;
    const int64_t rows = call.lists.distinct[0];
    int group = 8;  // threads to a row
    while (group < kThreads && 4 * group < columns) group *= 2;
    const int together = kThreads / group;
    for (int64_t d = block.index() * together; d < rows; d += block.count() * together) {
      block.each([&](int thread) {
        if (d + thread / group < rows) add_row(d + thread / group, thread % group, group);
      });
      if (call.dense) continue;
      if (columns <= kTile)
        take_rows(block, d, static_cast<int>(smaller(together, rows - d)), shared);
      else
        take_row(block, d, shared);
    }
    if (call.dense || !block.last(counter)) return;
    block.once([&] { call.set->size += call.lists.distinct[1]; });
  }

 private:
  GA_DEVICE int64_t row_of(int64_t d) const {
    return static_cast<int64_t>(call.lists.sorted_rows[call.lists.starts[d]]);
  }

  // Thread `lane` of `group`.
  GA_DEVICE void add_row(int64_t d, int lane, int group) const {
    constexpr int kAhead = 4;
    const RowLists& lists = call.lists;
    const int64_t first = lists.starts[d];
    const int64_t end = d + 1 < lists.distinct[0] ? lists.starts[d + 1] : lists.count;
    const bool kept = call.dense || lists.entries[d] < call.set->size;
    const T scale = static_cast<T>(call.plan ? call.plan->scale : scale_of(values));
    T* const row = target + row_of(d) * columns;
    const bool aligned = is_aligned(row, native<T>);
    const bool aligned_values = columns % 4 == 0 && is_aligned(values.data, values.format);
    const auto load = [&](int64_t k, int64_t i, int count) {
      const void* const at =
          advanced(values.data, values.format, lists.sorted_positions[k] * columns + i);
      return load_plain<T>(at, values.format, aligned_values, 0, count);
    };
    for (int64_t i = 4 * lane; i < columns; i += 4 * group) {
      const int count = static_cast<int>(smaller(4, columns - i));
      Four<T> x = {};
      if (kept) x = load_some<T, native<T>>(row + i, aligned, 0, count);
      bool keep = kept;
      const auto add = [&](const Four<T>& value) {
        for (int l = 0; l < 4; ++l) {
          const T c = value.x[l] * scale;
          x.x[l] = keep ? x.x[l] + c : c;
        }
        keep = true;
      };
      int64_t k = first;
      GA_ROLLED
      for (; k + kAhead <= end; k += kAhead) {
        Four<T> loaded[kAhead];
        for (int j = 0; j < kAhead; ++j) loaded[j] = load(k + j, i, count);
        for (int j = 0; j < kAhead; ++j) add(loaded[j]);
      }
      GA_ROLLED
      for (; k < end; ++k) add(load(k, i, count));
      store_some<T, native<T>>(row + i, aligned, 0, count, x);
    }
  }

  GA_DEVICE void store_partial(int64_t d, double sum_squares, bool finite) const {
    call.set->entries[call.lists.entries[d]].partial = {sum_squares, 0, 0, finite ? 0 : 1};
  }

  template <class Sum>
  GA_DEVICE SquaresOf<T, 1, Sum> squares_of(const T* at, int n, int q) const {
    SquaresOf<T, 1, Sum> squares;
    const bool aligned = is_aligned(at, native<T>);
    each_step(n, q, [&](int i, int count) {
      squares.of[0].add(load_some<T, native<T>>(at, aligned, i, count), count);
    });
    return squares;
  }

  // The partials of rows of one tile each, with eight threads to a row.
  GA_DEVICE void take_rows(Block& block, int64_t d, int rows, RowTotals& shared) const {
    block.each_item(rows, [&](int64_t r) { shared.nonfinite[r] = 0; });
    sum_lane_groups<T>(block, rows, 1, shared.sums.totals, [&](int r, int q, auto sum) {
      const auto squares =
          squares_of<decltype(sum)>(target + row_of(d + r) * columns, static_cast<int>(columns), q);
      if (!squares.of[0].finite) shared.nonfinite[r] = 1;
      return squares;
    });
    block.each_item(rows, [&](int64_t r) {
      const double total = shared.sums.totals[0][r];
      store_partial(d + r, total,
                    std::is_same_v<T, float> ? is_finite(total) : shared.nonfinite[r] == 0);
    });
  }

  // The partial of a longer row, chunk by chunk.
  GA_DEVICE void take_row(Block& block, int64_t d, RowTotals& shared) const {
    block.once([&] { shared.whole = {0, 0, 0, 0}; });
    const T* const row = target + row_of(d) * columns;
    for (int64_t chunk = 0; chunk < chunk_count(columns); ++chunk) {
      const int count = chunk_length(columns, chunk);
      sum_tiles<T>(block, count, 1, shared.sums, [&](int first, int n, int q, auto sum) {
        return squares_of<decltype(sum)>(row + chunk * kChunk + first, n, q);
      });
      take_totals<T>(block, count, 1, shared.sums, [&](const double* total, bool finite) {
        shared.whole.sum_squares += total[0];
        if (!finite) shared.whole.nonfinite = 1;
      });
    }
    block.once([&] { store_partial(d, shared.whole.sum_squares, shared.whole.nonfinite == 0); });
  }
};

template <class T>
void launch_add(const Queue& queue, const RowsTask& task, const Call& call) {
  launch(AddRows<T>{call, static_cast<T*>(task.target.data), task.columns, task.values,
                    queue.counters},
         blocks_for(queue, task.count), queue.stream);
}

template <size_t kMost>
struct ClearRows {
  int64_t count;
  RowSet* sets[kMost];

  GA_DEVICE void operator()(Block& block) const {
    block.each_item(count, [&](int64_t i) { sets[i]->size = 0; });
  }
};

}  // namespace

cudaError_t sort_rows(const RowLists& lists, int64_t rows, size_t& storage_bytes,
                      cudaStream_t stream) {
  int bits = 1;
  while (bits < 32 && (rows - 1) >> bits != 0) ++bits;
  return cub::DeviceRadixSort::SortPairs(lists.storage, storage_bytes, lists.rows,
                                         lists.sorted_rows, lists.positions, lists.sorted_positions,
                                         static_cast<int32_t>(lists.count), 0, bits, stream);
}

void gather_rows(const Queue& queue, const RowsTask& task, const RowLists& lists,
                 Control* control) {
  launch(Reset{lists.bad}, 1, queue.stream);
  launch(Gather{task.indices, lists, task.rows, control, task.index_dtype},
         blocks_for(queue, (task.count + kThreads - 1) / kThreads), queue.stream);
}

void accumulate_rows(const Queue& queue, const RowsTask& task, const RowLists& lists) {
  const Call call = {lists, task.set, task.plan, task.dense};
  const int64_t blocks = blocks_for(queue, RowLists::segments(lists.count));
  launch(FindRows{call, queue.counters}, blocks, queue.stream);
  launch(EnterRows{call}, blocks, queue.stream);
  if (task.target.format == GA_F64)
    launch_add<double>(queue, task, call);
  else
    launch_add<float>(queue, task, call);
}

void clear_row_sets(const Queue& queue, Span<RowSet* const> sets) {
  constexpr size_t kMost = 4000;
  for (size_t first = 0; first < sets.size; first += kMost) {
    const size_t count = std::min(sets.size - first, kMost);
    launch_sized<ClearRows, 64, kMost>(queue, count, [&](auto& kernel) {
      kernel.count = static_cast<int64_t>(count);
      std::copy_n(sets.data + first, count, kernel.sets);
      return 1;
    });
  }
}

}  // namespace ga::cuda
