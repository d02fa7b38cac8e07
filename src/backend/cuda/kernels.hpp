// SPDX-License-Identifier: Apache-2.0
// The launches of the CUDA backend, one function each; tasks.hpp says what the tasks mean. Pointers
// are device addresses, except those of a Span and those that are said to be the host's. Host data
// travels by value, in the arguments of a kernel. Every function throws GA_ERROR_FAULT, or
// GA_ERROR_INVALID_STATE if the stream's capture is broken.
#pragma once

#include <cuda_runtime.h>

#include "backend/backend.hpp"

namespace ga::cuda {

inline bool is_capture_error(cudaError_t error) {
  return error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
}

// The stream to launch on, and how many blocks keep the device busy.
struct Queue {
  cudaStream_t stream;
  int64_t multiprocessors;
  int64_t blocks;      // of a grid whose blocks each take several chunks
  unsigned* counters;  // kCounters zeros, for Block::last
};
constexpr int kCounters = 4;

// A chunk of the parameter `item`, or a piece of its pattern.
struct ChunkRef {
  int32_t item, chunk;
};

// The chunks of a list of parameters which have the same Op, compute in the same type and are updated by the same
// kernel.
struct ListPart {
  int op;  // position in AllOps; -1: none
  bool f64;
  bool mixed;              // for update_mixed()
  bool coded;              // for update_coded() or measure_coded()
  const ChunkRef* chunks;  // for UnitTask the pieces of patterns, for FactorTask those of rows
  int64_t chunk_count;
  const ChunkRef* columns;  // for FactorTask: the pieces of columns
  int64_t column_count;
  const ga_param* params;  // the parameters in order; for updates only those with rows
  int64_t param_count;
};

cudaError_t load_kernels();  // all that this module launches; see Loading

// ---- Accumulate, norm, finish ----

// What the plain contributions to a parameter share. A contribution is plain if it makes no noise,
// the target has the type that is computed in, and the target is overwritten, kept as it is, or
// preceded by one contribution of the same format that was not stored.
struct PlainTarget {
  void* target;
  Partial* partials;
  int64_t count;
  int32_t format, gradient_format;
};

// Plain contributions to some of the parameters [first, first + kMostGradients).
struct PlainCall {
  const PlainTarget* targets;       // by parameter
  const ChunkRef* chunks;           // of all parameters in order
  int64_t first_chunk, last_chunk;  // [first_chunk, last_chunk) of them
  ga_param first;
  Source of, before;  // scale and divisor alone
};

constexpr size_t kMostGradients = 4000;

// gradients (the host's): one for each parameter from `first` on, at most kMostGradients; 0: none;
// the lowest bit is set if the target is kept. before (the host's): as many contributions that were
// not stored; the limit is then half. May be NULL.
void accumulate_plain(const Queue& queue, const PlainCall& call, Span<const uintptr_t> gradients,
                      const uintptr_t* before);

// Any tasks, in as many launches as their arguments need. Descriptors of composite formats are on
// the device.
void accumulate(const Queue& queue, Span<const AccumulateTask> tasks);
void norm(const Queue& queue, Span<const NormTask> tasks);
void finish(const Queue& queue, Span<const FinishTask> tasks);

// ---- Parameters ----

// The update of the parameters of a list that compute in T, which is float or double.
template <class T>
void update(const Queue& queue, const UpdateTask* tasks, const ListPart& list);
// Of a list of parameters with arrays of bf16, or arrays that are not aligned. Small ones do not need it.
void update_mixed(const Queue& queue, const UpdateTask* tasks, const ListPart& list);
// Whether a parameter, whose task is the host's, belongs to such a list.
bool is_mixed(const UpdateTask& task);
// The first pass of a layer-wise Op; afterwards the Ops are folded anew (fold_layers).
template <class T>
void measure(const Queue& queue, const UpdateTask* tasks, const ListPart& list,
             const ScalarTables& tables);
// update() and measure() of parameters whose state in 8 bits the pass reads or writes.
void update_coded(const Queue& queue, const UpdateTask* tasks, const ListPart& list);
void measure_coded(const Queue& queue, const UpdateTask* tasks, const ListPart& list,
                   const ScalarTables& tables);
// Whether a parameter, whose task is the host's, belongs to such a list.
bool is_coded(const UpdateTask& task, bool measuring);

struct UnitPieces : ListPart {
  const UnitTask* tasks;
  unsigned* counters;  // by parameter, for Block::last
};
struct FactorPieces : ListPart {
  const FactorTask* tasks;
  unsigned* counters;  // two by parameter, for rows and for columns

  GA_HD int64_t count() const { return chunk_count + column_count; }
  GA_HD bool is_row(int64_t k) const { return k < chunk_count; }
  GA_HD const ChunkRef& piece(int64_t k) const {
    return is_row(k) ? chunks[k] : columns[k - chunk_count];
  }
  GA_HD unsigned* counter(int64_t k) const {
    return &counters[2 * int64_t{piece(k).item} + (is_row(k) ? 0 : 1)];
  }
};

// The sums over units, then the factors of the tasks that have a parameter to compare with.
void clip_units(const Queue& queue, const UnitPieces& units);
// The sums over rows and over columns, then the blend.
void update_factored(const Queue& queue, const FactorPieces& pieces);

// ---- Scalars: decide.hpp ----

// A place in the ring of results, which is pinned memory that the device writes.
struct RingSlot {
  ga_step_result result;
  int64_t ticket;        // WindowTotals::ticket of the call; replays of the call repeat it
  int64_t window;        // ga_step_result.windows of the result; 0: none yet; written last
  int64_t nonfinite_at;  // Control::nonfinite_at
};
struct Ring {
  RingSlot* slots;  // as the device sees them; a window has slot window % size
  int64_t size;
};

// The chunks whose norms are taken.
struct NormChunks : ListPart {
  struct {
    const UpdateTask *updates, *measures;
    const UnitTask* units;
  } tasks;
};

// Sums, decides and publishes. Each of the three lists may be empty.
void decide(const Queue& queue, const ScalarTables& tables, const WindowTotals& totals,
            const Ring& ring, const NormChunks& norms, const UnitPieces& units,
            const FactorPieces& factors);
void clear_window(const Queue& queue, const ScalarTables& tables);
void sum_rank(const Queue& queue, const ScalarTables& tables, const WindowTotals& totals,
              const uint64_t* brought, double* out);
void add_ranks(const Queue& queue, const ScalarTables& tables, const double* records, int64_t words,
               int32_t ranks);
void sum_pieces(const Queue& queue, const ScalarTables& tables, const UnitTask* units, double* out);
void add_pieces(const Queue& queue, const ScalarTables& tables, const double* sums, int32_t ranks);
// The contributions of a micro-batch: at most kMostInputs from the host, which travel in the
// arguments of the launch, or any number on the device.
constexpr size_t kMostInputs = 1000;
struct MicroList {
  const MicroInput* host;
  const MicroInput* at;  // NULL: those of the host
  int64_t count;
  MicroPlan* plans;
};
void open_micro(const Queue& queue, const ScalarTables& tables, const MicroList& list);
void decide_micro(const Queue& queue, const ScalarTables& tables, const MicroList& list,
                  const Micro& micro, int64_t index);

// ---- Batch normalisation ----

// Sums over a part of a channel's elements.
struct alignas(16) BnPartial {
  double first, second;
};

// The most parts that the elements of a channel are cut into: the fewer, the more channels there
// are, so that the work is parallel and the memory bounded.
GA_HD constexpr int64_t bn_slices(int64_t channels) {
  const int64_t few = 32768 / channels;
  return few < 64 ? 64 : few > 512 ? 512 : few;
}

// For a task with `channels` channels: bn_slices(channels) * channels partials, and `channels`
// counters for Block::last.
struct BnWorkspace {
  BnPartial* partials;
  unsigned* counters;
};

// One launch each; see Backend.
void bn_statistics(const Queue& queue, const BnTask& task, const BnWorkspace& workspace);
void bn_take(const Queue& queue, const BnTask& task, const BnGiven& given);
void bn_finalize(const Queue& queue, const BnTask& task);
void bn_write_record(const Queue& queue, const BnTask& task, const BnPassEnd& end, double* record);
void bn_merge_records(const Queue& queue, const BnTask& task, const BnPassEnd& end,
                      const BnRecords& records, Control* control);
void bn_normalise(const Queue& queue, const BnTask& task);
void bn_gradient_sums(const Queue& queue, const BnTask& task, const BnWorkspace& workspace);
void bn_input_gradient(const Queue& queue, const BnTask& task);

// ---- Memory ----

// Writes bytes of the host's `from` to device memory. They travel in the arguments of kernels, so
// `from` may change after the call and a captured graph holds the bytes.
void upload(const Queue& queue, void* to, const void* from, size_t bytes);
void upload(const Queue& queue, Span<const Word> words);

// ---- Rows ----

// What the contributions of a RowsTask are sorted with. The caller provides the memory.
struct RowLists {
  int64_t count;                             // contributions
  uint32_t *rows, *positions;                // the row of each contribution; 0, 1, ..., count - 1
  uint32_t *sorted_rows, *sorted_positions;  // both lists sorted by row, stably
  uint32_t *starts, *entries;  // by distinct row: its first place in the sorted lists,
                               // and its entry in the set
  uint32_t* found;             // two numbers for each segment
  int64_t* distinct;           // the number of distinct rows, and of new ones among them
  int32_t* bad;                // not 0: an index is out of range, and nothing is added
  void* storage;               // for sort_rows

  static constexpr int64_t kSegment = 4096;
  GA_HD static int64_t segments(int64_t count) { return (count + kSegment - 1) / kSegment; }
};
// Fills rows, positions and bad; if an index is out of range, control->failed too.
void gather_rows(const Queue& queue, const RowsTask& task, const RowLists& lists, Control* control);
// rows: those of the matrix. If lists.storage is NULL, only sets storage_bytes to what a sort
// needs.
cudaError_t sort_rows(const RowLists& lists, int64_t rows, size_t& storage_bytes,
                      cudaStream_t stream);
// Adds the contributions to each row in order of position. New rows are appended to the set in
// order of their index.
void accumulate_rows(const Queue& queue, const RowsTask& task, const RowLists& lists);
void clear_row_sets(const Queue& queue, Span<RowSet* const> sets);

// ---- Matrix products ----

void combine(const Queue& queue, const Combination& task);
// Copies elements of the packed matrices, as many from number `first` on, from the tensor to `packed`, or
// back.
void pack(const Queue& queue, const Cut& cut, float* tensor, int64_t first, int64_t count,
          float* packed, bool back);
// out[i] <- sum of the squares of line i; a line is `each` elements that lie side by side. room: a number for
// each chunk of each line.
void sum_squares(const Queue& queue, const float* x, int64_t each, int64_t lines, double* room,
                 double* out);
// out[i] <- sum of the squares of column i, counted through all matrices. room: half as many numbers as the
// matrices have elements.
void sum_columns(const Queue& queue, const MatrixRun& run, double* room, double* out);
// What newton_schulz.hpp asks of an engine under these names.
void line_scales(const Queue& queue, double* out, int64_t count, double eps);
void variance_scales(const Queue& queue, const OrthogonalizeTask& task, int64_t first,
                     int64_t matrices, double* ratios, double* out);
void scale_lines(const Queue& queue, const MatrixRun& run, const double* by_row,
                 const double* by_column);
// alpha_beta[0] <- scale / *divisor, [1] <- beta: what a matrix product reads on the device.
void scale_alpha(const Queue& queue, double scale, const double* divisor, float beta,
                 float* alpha_beta);

}  // namespace ga::cuda
