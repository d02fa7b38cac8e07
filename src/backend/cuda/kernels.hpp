// SPDX-License-Identifier: Apache-2.0
// The launches of the CUDA backend, one function each: what a task is stands in backend.hpp. All
// pointers are the device's but those of Span and of what is said to be the host's; everything that
// is the host's travels by value, as arguments of a kernel. All throw GA_ERROR_FAULT.
#pragma once

#include <cuda_runtime.h>

#include "backend/backend.hpp"

namespace ga::cuda {

// Where launches go, and how many blocks keep the device busy.
struct Queue {
  cudaStream_t stream;
  int64_t blocks;      // of a grid whose blocks each take several chunks
  unsigned* counters;  // kCounters of zeros, of Block::last
};
constexpr int kCounters = 4;

// Chunk `chunk` of the parameter's or the task's, or piece of a pattern.
struct ChunkRef {
  int32_t item, chunk;
};

// ---- Accumulate, norm, finish ----

// What a parameter's plain contributions have in common: target of the type computed in, keep 0 or
// 1 or a contribution of the same format before it that was not stored, no noise.
struct PlainTarget {
  void* target;
  Partial* partials;
  int64_t count;
  int32_t format, gradient_format;
};

// scale / *divisor
struct PlainScale {
  double scale;
  const double* divisor;

  GA_HD double value() const { return divisor ? scale / *divisor : scale; }
  bool operator==(const PlainScale& s) const { return scale == s.scale && divisor == s.divisor; }
};

// Plain contributions to some of the parameters [first, first + kMostGradients).
struct PlainCall {
  const PlainTarget* targets;       // by parameter
  const ChunkRef* chunks;           // of all parameters in their order
  int64_t first_chunk, last_chunk;  // [first_chunk, last_chunk) of them
  ga_param first;
  PlainScale of, before;
};

constexpr size_t kMostGradients = 4000;

// gradients (the host's): of the parameters from first on, no more than kMostGradients; 0: none; the
// lowest bit is set where the target is kept. before (the host's): of as many, those that came before
// and were not stored; then no more than half. NULL: none.
void accumulate_plain(const Queue& queue, const PlainCall& call, Span<const uintptr_t> gradients,
                      const uintptr_t* before);

// Any others. As many launches as their arguments need; composite formats' data is the device's.
void accumulate(const Queue& queue, Span<const AccumulateTask> tasks);
void norm(const Queue& queue, Span<const NormTask> tasks);
void finish(const Queue& queue, Span<const FinishTask> tasks);

// ---- Parameters ----

// tasks[chunk.item] for each of the chunks; all of them have that Op (-1: none).
void update(const Queue& queue, int op, bool f64, const UpdateTask* tasks, const ChunkRef* chunks,
            int64_t count);
// Likewise, then folds the Ops of these parameters anew (fold_layers).
void measure(const Queue& queue, int op, bool f64, const UpdateTask* tasks, const ChunkRef* chunks,
             int64_t count, const ScalarTables& tables, const ga_param* params,
             int64_t param_count);
// kUpdateRows of tasks of that Op: of the rows that their set has when it runs.
void update_rows(const Queue& queue, int op, bool f64, const UpdateTask* tasks,
                 const ga_param* params, int64_t count);

// Pieces of the patterns of parameters, as ChunkRef, and these parameters in their order.
struct UnitPieces {
  const UnitTask* tasks;
  const ChunkRef* pieces;
  int64_t count;
  const ga_param* params;
  int64_t param_count;
  unsigned* counters;  // by parameter, of Block::last
};
struct FactorPieces {
  const FactorTask* tasks;
  const ChunkRef* rows;
  int64_t row_count;
  const ChunkRef* columns;
  int64_t column_count;
  const ga_param* params;
  int64_t param_count;
  unsigned* counters;  // two by parameter, of rows and of columns

  GA_HD int64_t count() const { return row_count + column_count; }
  GA_HD bool is_row(int64_t k) const { return k < row_count; }
  GA_HD const ChunkRef& piece(int64_t k) const {
    return is_row(k) ? rows[k] : columns[k - row_count];
  }
  GA_HD unsigned* counter(int64_t k) const {
    return &counters[2 * int64_t{piece(k).item} + (is_row(k) ? 0 : 1)];
  }
};

// Sums over units; then the factors where the task has a parameter to compare with.
void clip_units(const Queue& queue, const UnitPieces& units);
// Both sums over rows and columns, then the blend.
void update_factored(const Queue& queue, const FactorPieces& pieces);

// ---- Scalars: decide.hpp ----

// A place in the ring of results, in pinned memory that the device writes: the result, then window.
struct RingSlot {
  ga_step_result result;
  int64_t ticket;        // WindowTotals::ticket of the call, replays of which repeat it
  int64_t window;        // ga_step_result.windows of it; 0: none yet; written last
  int64_t nonfinite_at;  // Control::nonfinite_at
};
struct Ring {
  RingSlot* slots;  // as the device sees them; slot window % size
  int64_t size;
};

// Tasks of parameters, on the device.
struct TasksAt {
  const UpdateTask* updates;
  const UpdateTask* measures;
  const UnitTask* units;
};
// Chunks of which norms are taken.
struct NormChunks {
  TasksAt tasks;
  const ChunkRef* chunks;
  int64_t count;
};

// Sums, decides and publishes. Each of the sums may be over nothing.
void decide(const Queue& queue, const ScalarTables& tables, const WindowTotals& totals,
            const Ring& ring, const NormChunks& norms, const UnitPieces& units,
            const FactorPieces& factors);
void clear_window(const Queue& queue, const ScalarTables& tables);
// The contributions of a micro-batch: no more than kMostInputs from the host, which travel as
// arguments of the launch, or any number of them on the device.
constexpr size_t kMostInputs = 1000;
struct MicroList {
  const MicroInput* host;
  const MicroInput* at;  // NULL: those of the host
  int64_t count;
  MicroPlan* plans;
};
void open_micro(const Queue& queue, const ScalarTables& tables, const MicroList& list);
void judge_micro(const Queue& queue, const ScalarTables& tables, const MicroList& list,
                 const Micro& micro, int64_t index);

// ---- Batch normalisation ----

// Sums over a part of a channel's elements.
struct alignas(16) BnPartial {
  double first, second;
};

// Parts that the elements of a channel are cut into, at most: fewer of more channels, so that there
// is enough to do in parallel at a bounded size.
GA_HD constexpr int64_t bn_slices(int64_t channels) {
  const int64_t few = 32768 / channels;
  return few < 64 ? 64 : few > 512 ? 512 : few;
}

// For any task of so many channels: bn_slices(channels) * channels partials, and `channels` counters
// of Block::last.
struct BnWorkspace {
  BnPartial* partials;
  unsigned* counters;
};

// One launch each, what Backend says of them.
void bn_statistics(const Queue& queue, const BnTask& task, const BnWorkspace& workspace);
void bn_take(const Queue& queue, const BnTask& task, const BnGiven& given);
void bn_finalize(const Queue& queue, const BnTask& task);
void bn_normalise(const Queue& queue, const BnTask& task);
void bn_gradient_sums(const Queue& queue, const BnTask& task, const BnWorkspace& workspace);
void bn_input_gradient(const Queue& queue, const BnTask& task);

// ---- Memory ----

// bytes, from the host's `from`, to device memory: by the arguments of kernels, so nothing is to be
// kept for it and a captured graph holds it.
void upload(const Queue& queue, void* to, const void* from, size_t bytes);
void upload(const Queue& queue, Span<const Word> words);  // the host's span

// ---- Rows ----

// Of a RowsTask's call, its contributions sorted by row (stable): rows[k], positions[k] for k <
// count. Adds those of each row in order of position; new rows are appended to the set, in order of
// their index. Nothing is done where *bad != 0.
struct SortedRows {
  const uint32_t* rows;
  const uint32_t* positions;
  int64_t count;
  const int32_t* bad;
  // Room for what accumulate_rows finds on the way: of the distinct rows, where each begins in the
  // above and its entry in the set, count of each; 2 segments(count) numbers; how many rows are
  // distinct, and how many of these are new, 2 numbers.
  uint32_t* starts;
  uint32_t* entries;
  uint32_t* found;
  int64_t* distinct;

  static constexpr int64_t kSegment = 4096;
  GA_HD static int64_t segments(int64_t count) { return (count + kSegment - 1) / kSegment; }
};
// keys[k] <- indices[k], positions[k] <- k; *bad <- whether one is outside of [0, rows), and then
// control->failed.
void gather_rows(const Queue& queue, const RowsTask& task, uint32_t* keys, uint32_t* positions,
                 int32_t* bad, Control* control);
void accumulate_rows(const Queue& queue, const RowsTask& task, const SortedRows& sorted);
void clear_row_sets(const Queue& queue, Span<RowSet* const> sets);  // the host's span

// x <- scale / *divisor x (what Newton-Schulz begins with, plan.orthogonal_scale), and y <- a x.
void scale(const Queue& queue, const float* from, double factor, const double* plan_factor,
           float* to, int64_t count);
// alpha_beta[0] <- scale / *divisor, [1] <- beta: what a matrix product reads on the device.
void scale_alpha(const Queue& queue, double scale, const double* divisor, float beta,
                 float* alpha_beta);

}  // namespace ga::cuda
