// SPDX-License-Identifier: Apache-2.0
// Where arrays live and loops run. The context says what is to be done to which tensors (tasks.hpp); a
// backend cuts that into chunks of kChunk elements and does it. One call is one parallel pass over the
// data of all its tasks. No call but wait(), read() and those that say so waits for the work to be done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "backend/tasks.hpp"
#include "optimizer.hpp"
#include "window.hpp"

namespace ga {

using Params = Span<const ga_param>;

// The parameters over whose gradients something is summed up before a window is settled.
struct StepSums {
  Params norms;  // of which the accumulating passes have left no norm (norm_task)
  // Where passes are not cut for a cache, all whose units are clipped, and those with a factored
  // second moment of gradients that are not: clip_units and update_factored are not called for these later.
  Params units, factored;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // A block of zeros for the library's own arrays, 64-byte aligned, page-aligned from 1 MiB on;
  // throws std::bad_alloc. free(NULL) is legal; it may wait.
  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* data, size_t bytes) noexcept = 0;
  virtual void copy(void* to, const void* from, size_t bytes) = 0;  // within such blocks
  // From the host's `from`, which is not read any more when the call returns.
  virtual void write(void* to, const void* from, size_t bytes) = 0;
  // Copies from such a block to the host, or to the program's own memory there; waits.
  virtual void read(void* to, const void* from, size_t bytes) = 0;
  virtual Mirror mirror(size_t bytes) = 0;  // zeros; throws std::bad_alloc
  virtual void free(Mirror& mirror) noexcept = 0;
  // Makes the loops see what the host has written at [offset, offset + bytes).
  virtual void upload(const Mirror& mirror, size_t offset, size_t bytes) = 0;
  // The same of single words, of any mirrors. Not while the stream is being captured.
  virtual void upload(Span<const Word> words) = 0;
  virtual void wait() = 0;
  // Whether work is being recorded, to be replayed with what the tables then held.
  virtual bool capturing() = 0;

  // Whether memory of the program is where the loops can read it; throws GA_ERROR_INVALID_ARGUMENT
  // where the backend can tell that it is not. what: "parameter "x": its gradient".
  virtual void check_memory(const void* data, const char* what) = 0;

  // Room for calls with that many chunks and parameters, so that no later call allocates. With
  // accumulators of so many bytes in all, the backend knows whether a window stays in the caches.
  virtual void reserve(int64_t chunks, int64_t params, int64_t accumulator_bytes) = 0;
  // Whether passes over many parameters are cut, so that the next pass finds what the last one has
  // read in the last cache, which holds cache_bytes(). If not, cache_bytes() is not asked for.
  virtual bool passes_are_cut() const = 0;
  virtual int64_t cache_bytes() const = 0;
  // Bytes of the backend's own tables for that many chunks, and of what it has beside them.
  virtual int64_t table_bytes(int64_t chunks) const = 0;
  virtual int64_t row_bytes() const = 0;  // of the entries of row sets

  virtual void set_tables(const ScalarTables& tables, const TaskTables& tasks) = 0;

  // ---- Scalars: see decide.hpp ----

  // Settles what the end of a window is: outcome, norm, clip factors, clocks, folded Ops.
  virtual void decide(const WindowTotals& totals, const StepSums& sums) = 0;
  // Sets plans[i].view of inputs[i], which the norms of a micro-batch are taken through.
  virtual void open_micro(Span<const MicroInput> inputs, MicroPlan* plans) = 0;
  // With these norms: judges micro-batch number index, and sets the rest of plans[i].
  virtual void judge_micro(Span<const MicroInput> inputs, MicroPlan* plans, const Micro& micro,
                           int64_t index) = 0;
  // Counters and scaler of a window that was thrown away.
  virtual void clear_window() = 0;
  // The control block as the last decide left it, if no wait is needed to know; else NULL. The
  // host's.
  virtual const Control* known() = 0;
  // The result of the decide() with that ticket, if it is there already.
  virtual bool result_of(int64_t ticket, ga_step_result& out) = 0;
  // The result of that window (ga_step_result.windows; 0: of the last one): whether it is there,
  // after a wait if wanted. Throws GA_ERROR_INVALID_ARGUMENT where it is not kept any more.
  virtual bool result(int64_t window, bool wait, ga_step_result& out) = 0;

  // ---- Loops. All throw GA_ERROR_FAULT when the work broke off half-way. ----

  virtual void accumulate(Span<const AccumulateTask> tasks) = 0;
  virtual void norm(Span<const NormTask> tasks) = 0;
  virtual void finish(Span<const FinishTask> tasks) = 0;

  // By the task tables; a parameter whose plan has no duty is left alone.
  virtual void measure(Params params) = 0;  // and folds their Ops anew, with the norms
  virtual void update(Params params) = 0;
  virtual void clip_units(Params params) = 0;       // sums and factors of units
  virtual void update_factored(Params params) = 0;  // rows and columns of factored second moments
  // Where passes are cut for a cache alone, after decide(). last: these are the last of the step.
  // settle_units, after clip_units of these: norms and factors again. update_by_units: all three
  // where patterns are shared: no unit lies in two pieces of a tensor, so a piece is read but once.
  virtual void settle_units(Params params, bool last) = 0;
  virtual void update_by_units(Params params, bool last) = 0;

  // The position of the first index outside of [0, rows), or -1; on a device always -1, and the
  // call's rows are then left out and the window fails.
  virtual int64_t check_rows(const RowsTask& task) = 0;
  // Makes room in the set for the rows of a task, and for so many that wait: accumulate_rows does not
  // allocate.
  virtual void prepare_rows(const RowsTask& task, int64_t waiting) = 0;
  virtual void accumulate_rows(const RowsTask& task) = 0;
  virtual void clear_rows(Span<RowSet* const> sets) = 0;
  virtual void free_rows(RowSet* set) noexcept = 0;  // entries; NULL is legal

  // GA_ERROR_UNSUPPORTED, before anything is touched, where there is no matrix engine. converted:
  // elements of the matrices of the next product that are not f32.
  virtual void prepare_matmul(int64_t converted) = 0;
  // Returns whether the partials were stored; else they are stale.
  virtual bool matmul(const MatmulTask& task) = 0;
  virtual void orthogonalize(const OrthogonalizeTask& task) = 0;

  // Batch normalisation. Room for tasks of so many channels; tasks may then have any shape.
  virtual void bn_reserve(int64_t channels) = 0;
  virtual int64_t bn_bytes() const = 0;
  virtual void bn_statistics(const BnTask& task) = 0;  // of x
  virtual void bn_take(const BnTask& task, const BnGiven& given) = 0;
  virtual void bn_finalize(const BnTask& task) = 0;
  // taking: bn_statistics first, summing: bn_backward_sums first, in one pass where it can be.
  virtual void bn_forward(const BnTask& task, bool taking) = 0;
  virtual void bn_backward_sums(const BnTask& task) = 0;
  virtual void bn_backward(const BnTask& task, bool summing) = 0;
};

std::unique_ptr<Backend> make_cpu_backend(const ga_config& config);
// Throws GA_ERROR_UNSUPPORTED with what was looked for and why it failed.
std::unique_ptr<Backend> make_cuda_backend(const ga_config& config);
// 0 where make_cuda_backend would throw that; the sentence is then what ga_last_error() gives.
int32_t cuda_device_count();

}  // namespace ga
