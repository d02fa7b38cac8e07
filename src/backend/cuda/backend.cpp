// SPDX-License-Identifier: Apache-2.0
// The CUDA backend: every call queues work on the context's stream and returns. What runs there is
// in the kernels; here it is decided how it is launched.
#include "backend/cuda/backend.hpp"

#include <cuda_runtime.h>
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#endif

#include <algorithm>
#include <memory>

#include "backend/cuda/batchnorm.hpp"
#include "backend/cuda/kernels.hpp"
#include "backend/cuda/lists.hpp"
#include "backend/cuda/matmul.hpp"
#include "backend/cuda/plain.hpp"
#include "backend/cuda/results.hpp"
#include "backend/cuda/rows.hpp"
#include "backend/cuda/runtime.hpp"
#include "tensor.hpp"

namespace ga::cuda {
namespace {

// A range that profilers show. Without one it costs next to nothing.
class Range {
 public:
#ifdef NVTX_VERSION
  explicit Range(const char* name) noexcept { nvtxRangePushA(name); }
  ~Range() { nvtxRangePop(); }
#else
  explicit Range(const char*) noexcept {}
  ~Range() {}
#endif
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(int32_t ordinal, cudaStream_t stream)
      : runtime_(ordinal, stream),
        chunks_(runtime_),
        lists_(runtime_, chunks_),
        plain_(runtime_, chunks_),
        rows_(runtime_),
        matmul_(runtime_),
        results_(runtime_),
        batch_norms_(runtime_) {}

  // ---- Memory ----

  void* allocate(size_t bytes) override {
    return runtime_.call([&] { return runtime_.allocate(bytes); });
  }

  void free(void* data, size_t bytes) noexcept override { runtime_.free(data, bytes); }

  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes == 0) return;
    runtime_.call([&] {
      runtime_.check(
          cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, runtime_.queue().stream),
          "a copy on the device");
    });
  }

  void read(void* to, const void* from, size_t bytes) override {
    if (bytes == 0) return;
    runtime_.call([&] {
      runtime_.require_no_capture("this call waits for the device");
      runtime_.check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, runtime_.stream()),
                     "a copy from the device");
      runtime_.wait();
    });
  }

  Mirror mirror(size_t bytes) override {
    return runtime_.call([&] { return runtime_.mirror(bytes); });
  }

  void free(Mirror& mirror) noexcept override { runtime_.free(mirror); }

  void upload(const Mirror& mirror, size_t offset, size_t bytes) override {
    if (bytes == 0) return;
    runtime_.call([&] { runtime_.upload(mirror, offset, bytes); });
    lists_.written(static_cast<const char*>(mirror.host) + offset, bytes);
  }

  void upload(Span<const Word> words) override {
    runtime_.call([&] { cuda::upload(runtime_.queue(), words); });
  }

  void write(void* to, const void* from, size_t bytes) override {
    runtime_.call([&] { runtime_.write(to, from, bytes); });
  }

  void wait() override {
    runtime_.call([&] { runtime_.wait(); });
  }

  bool capturing() override {
    return runtime_.call([&] { return runtime_.capturing(); });
  }

  void check_memory(const void* data, const char* what) override {
    runtime_.call([&] { runtime_.check_memory(data, what); });
  }

  void reserve(int64_t chunks, int64_t params, int64_t) override {
    runtime_.call([&] {
      chunks_.reserve(chunks, params);
      lists_.reserve(chunks, params);
      plain_.reserve(params);
      if (const auto n = static_cast<size_t>(params); n > most_params_) {
        counters_.reserve(runtime_, 3 * n * sizeof(unsigned));
        most_params_ = n;
      }
    });
  }

  bool passes_are_cut() const override { return false; }
  int64_t cache_bytes() const override { fail_cut(); }

  int64_t table_bytes(int64_t) const override { return runtime_.own_bytes(); }

  int64_t row_bytes() const override { return rows_.entry_bytes(); }

  void set_tables(const ScalarTables& tables, const TaskTables& tasks) override {
    tables_ = tables;
    tasks_ = tasks;
    chunks_.set_tasks(tasks, tables.params);
    lists_.set_tasks(tasks, tables.params);
  }

  // ---- Scalars ----

  void decide(const WindowTotals& totals, const StepSums& sums) override {
    traced("gradaccum decide", [&](const Queue& queue) {
      const NormChunks norms = norms_of(sums.norms);
      const UnitPieces units = units_of(sums.units);
      const FactorPieces factors = factors_of(sums.factored);
      cuda::decide(queue, tables_, totals, results_.ring(), norms, units, factors);
    });
  }

  void open_micro(Span<const MicroInput> inputs, MicroPlan* plans) override {
    traced("gradaccum open_micro",
           [&](const Queue& queue) { cuda::open_micro(queue, tables_, list_of(inputs, plans)); });
  }

  void judge_micro(Span<const MicroInput> inputs, MicroPlan* plans, const Micro& micro,
                   int64_t index) override {
    traced("gradaccum judge_micro", [&](const Queue& queue) {
      cuda::judge_micro(queue, tables_, list_of(inputs, plans), micro, index);
    });
  }

  void clear_window() override {
    runtime_.call([&] { cuda::clear_window(runtime_.queue(), tables_); });
  }

  const Control* known() override { return nullptr; }

  bool result_of(int64_t ticket, ga_step_result& out) override {
    return results_.of_ticket(ticket, out);
  }

  bool result(int64_t window, bool wait, ga_step_result& out) override {
    return runtime_.call([&] { return results_.get(window, wait, out); });
  }

  // ---- Loops ----

  void accumulate(Span<const AccumulateTask> tasks) override {
    if (tasks.size == 0) return;
    runtime_.call([&] {
      const Range range("gradaccum accumulate");
      plain_.accumulate(tasks);
    });
  }

  void norm(Span<const NormTask> tasks) override {
    if (tasks.size == 0) return;
    traced("gradaccum norm", [&](const Queue& queue) { cuda::norm(queue, tasks); });
  }

  void finish(Span<const FinishTask> tasks) override {
    if (tasks.size == 0) return;
    runtime_.call([&] { cuda::finish(runtime_.queue(), tasks); });
  }

  void measure(Params params) override {
    if (params.size == 0) return;
    traced("gradaccum measure", [&](const Queue& queue) {
      const auto parts = lists_.get(ListKind::kMeasure, params);
      for (size_t k = 0; k < parts.size; ++k) {
        const ListPart& p = parts.data[k];
        if (p.op >= 0)
          cuda::measure(queue, p.op, p.f64, tasks_.measures_at, p.chunks, p.chunk_count, tables_,
                        p.params, p.param_count);
      }
    });
  }

  void update(Params params) override {
    if (params.size == 0) return;
    traced("gradaccum update", [&](const Queue& queue) {
      const auto parts = lists_.get(ListKind::kUpdate, params);
      for (size_t k = 0; k < parts.size; ++k) {
        const ListPart& p = parts.data[k];
        // Rows first: the pass over all chunks moves the averages of what they have become.
        if (p.param_count > 0)
          update_rows(queue, p.op, p.f64, tasks_.updates_at, p.params, p.param_count);
        cuda::update(queue, p.op, p.f64, tasks_.updates_at, p.chunks, p.chunk_count);
      }
    });
  }

  void clip_units(Params params) override {
    if (params.size == 0) return;
    traced("gradaccum clip_units",
           [&](const Queue& queue) { cuda::clip_units(queue, units_of(params)); });
  }

  void update_factored(Params params) override {
    if (params.size == 0) return;
    traced("gradaccum update_factored",
           [&](const Queue& queue) { cuda::update_factored(queue, factors_of(params)); });
  }

  void settle_units(Params, bool) override { fail_cut(); }
  void update_by_units(Params, bool) override { fail_cut(); }

  // ---- Rows, matrix products ----

  int64_t check_rows(const RowsTask& task) override {
    rows_.check(task);
    return -1;
  }

  void prepare_rows(const RowsTask& task, int64_t waiting) override {
    runtime_.call([&] { rows_.prepare(task, waiting); });
  }

  void accumulate_rows(const RowsTask& task) override {
    runtime_.call([&] {
      const Range range("gradaccum accumulate_rows");
      rows_.accumulate(task, tables_.control);
    });
  }

  void clear_rows(Span<RowSet* const> sets) override {
    if (sets.size == 0) return;
    runtime_.call([&] { rows_.clear(sets); });
  }

  void free_rows(RowSet* set) noexcept override { rows_.free(set); }

  void prepare_matmul(int64_t) override {
    runtime_.call([&] { matmul_.open(); });
  }

  bool matmul(const MatmulTask& task) override {
    runtime_.call([&] {
      const Range range("gradaccum matmul");
      matmul_.multiply(task);
    });
    return false;
  }

  void orthogonalize(const OrthogonalizeTask& task) override {
    runtime_.call([&] {
      const Range range("gradaccum orthogonalize");
      matmul_.orthogonalize(task);
    });
  }

  // ---- Batch normalisation ----

  void bn_reserve(int64_t channels) override {
    runtime_.call([&] { batch_norms_.reserve(channels); });
  }

  int64_t bn_bytes() const override { return batch_norms_.bytes(); }

  void bn_statistics(const BnTask& task) override {
    traced("gradaccum bn_statistics",
           [&](const Queue& queue) { cuda::bn_statistics(queue, task, batch_norms_.workspace()); });
  }

  void bn_take(const BnTask& task, const BnGiven& given) override {
    runtime_.call([&] { cuda::bn_take(runtime_.queue(), task, given); });
  }

  void bn_finalize(const BnTask& task) override {
    runtime_.call([&] { cuda::bn_finalize(runtime_.queue(), task); });
  }

  void bn_forward(const BnTask& task, bool taking) override {
    traced("gradaccum bn_forward", [&](const Queue& queue) {
      if (taking) cuda::bn_statistics(queue, task, batch_norms_.workspace());
      cuda::bn_normalise(queue, task);
    });
  }

  void bn_backward_sums(const BnTask& task) override {
    traced("gradaccum bn_backward_sums", [&](const Queue& queue) {
      cuda::bn_gradient_sums(queue, task, batch_norms_.workspace());
    });
  }

  void bn_backward(const BnTask& task, bool summing) override {
    traced("gradaccum bn_backward", [&](const Queue& queue) {
      if (summing) cuda::bn_gradient_sums(queue, task, batch_norms_.workspace());
      if (task.weight == 0)
        clear(task.out, task.dtype, task.count());
      else
        cuda::bn_input_gradient(queue, task);
    });
  }

 private:
  // f(queue) as a range of that name.
  template <class F>
  void traced(const char* name, F&& f) {
    runtime_.call([&] {
      const Range range(name);
      f(runtime_.queue());
    });
  }

  // Of such lists there is one part.
  NormChunks norms_of(Params params) {
    const auto parts = lists_.get(ListKind::kNorm, params);
    if (parts.size == 0) return {};
    const TasksAt tasks = {tasks_.updates_at, tasks_.measures_at, tasks_.units_at};
    return {tasks, parts.data[0].chunks, parts.data[0].chunk_count};
  }

  UnitPieces units_of(Params params) {
    const auto parts = lists_.get(ListKind::kUnits, params);
    if (parts.size == 0) return {};
    const ListPart& p = parts.data[0];
    return {tasks_.units_at, p.chunks,      p.chunk_count,
            p.params,        p.param_count, counters_.at<unsigned>()};
  }

  FactorPieces factors_of(Params params) {
    const auto parts = lists_.get(ListKind::kFactor, params);
    if (parts.size == 0) return {};
    const ListPart& p = parts.data[0];
    auto* const counters = counters_.at<unsigned>(most_params_ * sizeof(unsigned));
    return {tasks_.factored_at, p.chunks, p.chunk_count, p.columns,
            p.column_count,     p.params, p.param_count, counters};
  }

  MicroList list_of(Span<const MicroInput> inputs, MicroPlan* plans) {
    const auto count = static_cast<int64_t>(inputs.size);
    if (inputs.size <= kMostInputs) return {inputs.data, nullptr, count, plans};
    const size_t bytes = inputs.size * sizeof(MicroInput);
    inputs_.reserve(runtime_, std::max(bytes, std::min(2 * inputs_.bytes(), 2 * bytes)));
    runtime_.write(inputs_.at<MicroInput>(), inputs.data, bytes);
    return {nullptr, inputs_.at<MicroInput>(), count, plans};
  }

  [[noreturn]] static void fail_cut() {
    fail(GA_ERROR_INTERNAL, "passes were cut for a cache that a device does not have");
  }

  void clear(void* data, int32_t dtype, int64_t count) {
    if (count == 0) return;
    const auto bytes = static_cast<size_t>(count) * static_cast<size_t>(dtype_info(dtype).size);
    runtime_.check(cudaMemsetAsync(data, 0, bytes, runtime_.queue().stream), "zeroing memory");
  }

  Runtime runtime_;  // first: it outlives what is allocated from it
  AllChunks chunks_;
  ParamLists lists_;
  PlainTargets plain_;
  Rows rows_;
  MatmulEngine matmul_;
  Results results_;
  BatchNorms batch_norms_;
  Buffer counters_;  // of pieces: for each parameter of units, then two for rows and columns
  size_t most_params_ = 0;
  Buffer inputs_;  // of micro-batches with more contributions than a launch takes
  ScalarTables tables_ = {};
  TaskTables tasks_;
};

}  // namespace

Backend* make_backend(int32_t ordinal, void* stream) {
  return std::make_unique<CudaBackend>(ordinal, static_cast<cudaStream_t>(stream)).release();
}

}  // namespace ga::cuda
