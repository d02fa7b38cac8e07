// SPDX-License-Identifier: Apache-2.0
// A backend owns the memory of the arrays and runs the kernels. The context hands it tasks
// (tasks.hpp), which the backend cuts into chunks of kChunk elements. A call is one parallel pass
// over the data of all its tasks. Only wait(), read() and calls that say so wait for the work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "backend/tasks.hpp"
#include "core/error.hpp"
#include "numbers/optimizer.hpp"

namespace ga {

using Params = Span<const ga_param>;

// A parameter for update_ahead().
struct ReadyParam {
  ga_param param;
  bool measured;   // the norm of its gradient is taken too
  bool in_passes;  // its update takes passes over units, rows and columns, or the parameter first
  const BinnedTask* sum;  // NULL unless its squares are summed for other ranks
};

// The parameters whose gradients are read for sums before a window is decided.
struct StepSums {
  Params norms;  // those without partials from the accumulating passes (norm_task)
  // Where passes are not cut for a cache: parameters clipped by units, and other parameters with a
  // factored second moment. decide() includes their clip_units() and update_factored().
  Params units, factored;
};

// Tasks for a backend, written in place, field by field: one that is put together first and copied
// then makes the copy wait for its stores (measured: two thirds of the time of Accumulator::add_task).
template <class Task>
class TaskList {
 public:
  void reserve(size_t capacity) {
    if (capacity > tasks_.size()) tasks_.resize(capacity);
  }
  void clear() { size_ = 0; }
  Task& add() { return tasks_[size_++]; }  // holds what a former list left there
  Span<const Task> span() const { return {tasks_.data(), size_}; }
  Task* begin() { return tasks_.data(); }
  Task* end() { return tasks_.data() + size_; }

 private:
  std::vector<Task> tasks_;
  size_t size_ = 0;
};

// On the CPU, memory of the library's own of kPagedBytes and more begins with a page.
constexpr size_t kPage = 4096, kPagedBytes = size_t{64} << 10;

// Memory where the arrays live, of the library or of the program.
struct Region {
  void* data;
  size_t bytes;
};
using TakePiece = std::function<void(const void* piece, size_t bytes)>;
using FillPiece = std::function<void(void* piece, size_t bytes)>;

// What runs between the sums of an ending window and the decision on them; empty: nothing.
using OverRanks = std::function<void()>;

// What only a device does: its work is queued on a stream, and nobody waits for it.
class DeviceWork {
 public:
  // Over ranks, for a decide() with totals.over_ranks; all arrays are on the device.
  // Writes this rank's record of the window (RankRecord) to out, where brought has one bit for each
  // parameter, read where micro-batches are not checked; adds up those of all ranks, `words` from
  // one to the next. Writes what this rank has measured of its pieces, kPieceWords for each parameter; adds
  // up what all ranks have.
  virtual void sum_rank(const WindowTotals& totals, const uint64_t* brought, double* out) = 0;
  virtual void add_ranks(const double* records, int64_t words, int32_t ranks) = 0;
  virtual void sum_pieces(double* out) = 0;
  virtual void add_pieces(const double* sums, int32_t ranks) = 0;
  // From now on work is queued on that stream, a cudaStream_t, behind what the one before it has been given.
  // What it throws leaves everything as it was.
  virtual void set_stream(void* stream) = 0;
  // Runs work(stream), which queues work of a transport on the stream, with the device current.
  virtual void with_stream(const std::function<void(void* stream)>& work) = 0;
  // Gives all that is queued so far a number, not below the one before; returns the highest number of which the work is
  // known to be done. Asks the device, but does not wait.
  virtual int64_t done(int64_t number) = 0;
  // Runs work() with its kernels on a second stream, behind all that the stream has been given so far; then
  // join_aside() has the stream wait for them.
  virtual void aside(const std::function<void()>& work) = 0;
  virtual void join_aside() = 0;
  // From now on a wait for the device calls watch(seconds since it began, or since the last window that
  // ended meanwhile) again and again. What it throws ends the wait, and every later call. Empty: none.
  virtual void set_watch(std::function<void(double seconds)> watch) = 0;

 protected:
  ~DeviceWork() = default;
};

// What only the CPU does: passes over many parameters are cut to the size of the last-level cache, so that the next
// pass finds its data there, and parameters are updated before their window is decided.
class HostWork {
 public:
  virtual int64_t cache_bytes() const = 0;  // of the last-level cache
  virtual void sum_binned(Span<const BinnedTask> tasks) = 0;
  // Both after decide(). last: no other parameters follow. settle_units, after clip_units: computes norms and clip
  // factors again. update_by_units, for shared patterns, where no unit lies in two pieces: clips, updates and settles
  // in one reading.
  virtual void settle_units(Params params, bool last) = 0;
  virtual void update_by_units(Params params, bool last) = 0;
  // For parameters whose gradients are complete, when only the totals of the ending window and they are known: updates
  // them as decide() and update() would if the step is applied and not clipped by a norm over several parameters.
  // With ga_config.eager, several threads may be in this call and in accumulate() at once, for different parameters.
  virtual void update_ahead(const WindowTotals& totals, Span<const ReadyParam> params) = 0;
  // After a decide() that applies the step: whether update_ahead() has computed what update() would for a
  // parameter. If so, update() has nothing left to do for it.
  virtual bool matches(ga_param param) = 0;
  // Bytes of the plans that update_ahead() keeps for so many parameters.
  virtual int64_t ahead_bytes(size_t params) const = 0;

 protected:
  ~HostWork() = default;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // One of the two, and NULL for the other.
  virtual DeviceWork* device() { return nullptr; }
  virtual HostWork* host() { return nullptr; }

  // A block of zeros for arrays of the library, 64-byte aligned, on the CPU page-aligned from 1 MiB on;
  // throws std::bad_alloc. free(NULL) is legal; free() may wait.
  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* data, size_t bytes) noexcept = 0;
  // From now on free() gives nothing back: a transport may still write to the memory.
  virtual void keep_memory() noexcept {}
  virtual void copy(void* to, const void* from, size_t bytes) = 0;  // where the arrays live
  // Copies from the host, to a block; the program may overwrite `from` when the call returns.
  virtual void write(void* to, const void* from, size_t bytes) = 0;
  // Copies from a block to the host or to the program's own memory on the device; waits.
  virtual void read(void* to, const void* from, size_t bytes) = 0;
  // Read and write large arrays, one region after the other, piece by piece: take() gets each piece in
  // the host's memory, fill() puts the next one there. No piece belongs to two regions. What take() or
  // fill() throws ends the call. Both wait.
  virtual void read_pieces(Span<const Region> regions, const TakePiece& take) = 0;
  virtual void write_pieces(Span<const Region> regions, const FillPiece& fill) = 0;
  virtual Mirror mirror(size_t bytes) = 0;  // zeros; throws std::bad_alloc
  virtual void free(Mirror& mirror) noexcept = 0;
  // Makes the host's bytes [offset, offset + bytes) visible to the kernels.
  virtual void upload(const Mirror& mirror, size_t offset, size_t bytes) = 0;
  // Does so for single words of any mirrors. Illegal while the stream is being captured.
  virtual void upload(Span<const Word> words) = 0;
  virtual void wait() = 0;
  // Whether the stream is being captured into a graph, which replays the values of the tables.
  virtual bool capturing() = 0;
  // Whether a window has micro-batches. While it has some, no graph is replayed.
  virtual void set_window_open(bool) noexcept {}

  // Throws GA_ERROR_INVALID_ARGUMENT if the backend can tell that the kernels cannot read the
  // program's memory at data, which the message calls `what` of its subject: "its gradient".
  virtual void check_memory(const Subject& of, const char* what, const void* data) = 0;

  // Allocates for calls with that many chunks and parameters, so that no later call allocates.
  // accumulator_bytes, the total, tells the backend whether a window stays in the caches.
  virtual void reserve(int64_t chunks, int64_t params, int64_t accumulator_bytes) = 0;
  // Bytes of the backend's own tables for that many chunks and of its other buffers.
  virtual int64_t table_bytes(int64_t chunks) const = 0;
  virtual int64_t row_bytes() const = 0;  // entries of row sets

  virtual void set_tables(const ScalarTables& tables, const TaskTables& tasks) = 0;

  // ---- Scalars: see decide.hpp ----

  // Ends a window: decides its outcome, norm and clip factors, advances clocks, folds Ops.
  // over_ranks: on the CPU alone.
  virtual void decide(const WindowTotals& totals, const StepSums& sums,
                      const OverRanks& over_ranks) = 0;
  // Sets plans[i].view, through which norm() reads contribution inputs[i].
  virtual void open_micro(Span<const MicroInput> inputs, MicroPlan* plans) = 0;
  // After norm(): decides whether micro-batch number index is added, and sets the rest of plans[i].
  virtual void decide_micro(Span<const MicroInput> inputs, MicroPlan* plans, const Micro& micro,
                            int64_t index) = 0;
  // Resets the counters of a discarded window; lowers the loss scale if ga_step had rejected it.
  virtual void clear_window() = 0;
  // Takes this control block for that of the last decide(), and forgets the results of all windows but
  // the one in it.
  virtual void restore(const Control& control) = 0;
  // The control block after the last decide(), at a host address; NULL if reading it needs a wait.
  virtual const Control* known() = 0;
  // Returns whether the decide() with that ticket is done; if so, sets out.
  virtual bool result_of(int64_t ticket, ga_step_result& out) = 0;
  // Does so for a window (ga_step_result.windows; 0: the last one), after a wait if wanted. Throws
  // GA_ERROR_INVALID_ARGUMENT if the result of the window is not kept any more.
  virtual bool result(int64_t window, bool wait, ga_step_result& out) = 0;

  // ---- Kernels. All throw GA_ERROR_FAULT if the work stopped half-way. ----

  virtual void accumulate(Span<const AccumulateTask> tasks) = 0;
  virtual void norm(Span<const NormTask> tasks) = 0;
  virtual void finish(Span<const FinishTask> tasks) = 0;

  // The next four read the task tables and skip parameters whose plan has no actions.
  // Then folds the Ops again, with the norms. over_ranks runs in between, on the CPU alone.
  virtual void measure(Params params, const OverRanks& over_ranks) = 0;
  virtual void update(Params params) = 0;
  virtual void clip_units(Params params) = 0;       // sums and factors of units
  virtual void update_factored(Params params) = 0;  // FactorTask

  // Returns the position of the first index outside of [0, rows), or -1. A device always returns
  // -1; given a bad index, it adds no row of the call, and the window fails.
  virtual int64_t check_rows(const RowsTask& task) = 0;
  // Makes room in the set for the rows of the task and for `waiting` more, so that
  // accumulate_rows() does not allocate.
  virtual void prepare_rows(const RowsTask& task, int64_t waiting) = 0;
  virtual void accumulate_rows(const RowsTask& task) = 0;
  virtual void clear_rows(Span<RowSet* const> sets) = 0;
  virtual void free_rows(RowSet* set) noexcept = 0;  // frees the entries; NULL is legal

  // Throws GA_ERROR_UNSUPPORTED if there is no matrix engine, or none whose products of f32 matrices
  // have factors of that precision, before anything has changed. converted: number of elements in
  // matrices of the next matmul() that are not f32.
  virtual void prepare_matmul(int64_t converted, ga_precision precision) = 0;
  // Returns whether the partials were stored; if not, they are stale.
  virtual bool matmul(const MatmulTask& task) = 0;
  virtual void orthogonalize(const OrthogonalizeTask& task) = 0;

  // Batch normalisation. Allocates for tasks of that many channels and any other shape.
  virtual void bn_reserve(int64_t channels) = 0;
  virtual int64_t bn_bytes() const = 0;
  virtual void bn_statistics(const BnTask& task) = 0;  // of x
  virtual void bn_take(const BnTask& task, const BnGiven& given) = 0;
  virtual void bn_finalize(const BnTask& task) = 0;
  // Over ranks, in place of bn_finalize and for the backward sums: writes this rank's record; merges those
  // of all ranks. A device fails the window if they are of different passes. Without channels that is all.
  virtual void bn_write_record(const BnTask& task, const BnPassEnd& end, double* record) = 0;
  virtual void bn_merge_records(const BnTask& task, const BnPassEnd& end,
                                const BnRecords& records) = 0;
  // taking, summing: does bn_statistics or bn_backward_sums first, in the same pass if possible.
  virtual void bn_forward(const BnTask& task, bool taking) = 0;
  virtual void bn_backward_sums(const BnTask& task) = 0;
  virtual void bn_backward(const BnTask& task, bool summing) = 0;
};

std::unique_ptr<Backend> make_cpu_backend(const ga_config& config);
// Versions for ga_build; 0: the module could not be loaded, or there is no driver.
int32_t onednn_version();
void cuda_versions(int32_t& runtime, int32_t& driver);
// Throws GA_ERROR_UNSUPPORTED; the message names the module that was tried and why it failed.
std::unique_ptr<Backend> make_cuda_backend(const ga_config& config);
// 0 if make_cuda_backend would throw GA_ERROR_UNSUPPORTED; ga_last_error() then gives the message.
int32_t cuda_device_count();

}  // namespace ga
