// SPDX-License-Identifier: Apache-2.0
// The CUDA backend: every call queues work on the context's stream and returns.
#include <cuda_runtime.h>
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#endif

#include <algorithm>
#include <memory>

#include "backend/cuda/kernels.hpp"
#include "backend/cuda/lists.hpp"
#include "backend/cuda/matmul.hpp"
#include "backend/cuda/plain.hpp"
#include "backend/cuda/results.hpp"
#include "backend/cuda/rows.hpp"
#include "backend/cuda/runtime.hpp"
#include "backend/cuda/transfer.hpp"
#include "core/tensor.hpp"

namespace ga::cuda {
namespace {

// A range that profilers show.
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

class CudaBackend final : public Backend, public DeviceWork {
 public:
  explicit CudaBackend(const ga_config& config)
      : runtime_(config),
        chunks_(runtime_),
        lists_(runtime_, chunks_),
        plain_(runtime_, chunks_),
        rows_(runtime_),
        matmul_(runtime_),
        results_(runtime_) {}
  ~CudaBackend() override { runtime_.free(bn_.partials); }

  // ---- Memory ----

  DeviceWork* device() override { return this; }

  void* allocate(size_t bytes) override {
    return runtime_.call([&] { return runtime_.allocate(bytes); });
  }

  void free(void* data, size_t) noexcept override { runtime_.free(data); }

  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes == 0) return;
    runtime_.call([&] {
      runtime_.check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, queue().stream),
                     "a copy on the device");
    });
  }

  void read(void* to, const void* from, size_t bytes) override {
    if (bytes == 0) return;
    runtime_.call([&] {
      runtime_.require_no_capture("this call waits for the device");
      if (runtime_.is_watched()) runtime_.wait();  // a copy to pageable memory would wait by itself
      runtime_.check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, runtime_.stream()),
                     "a copy from the device");
      runtime_.wait();
    });
  }

  void read_pieces(Span<const Region> regions, const TakePiece& take) override {
    transfer_.read(regions, take);
  }
  void write_pieces(Span<const Region> regions, const FillPiece& fill) override {
    transfer_.write(regions, fill);
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
    runtime_.call([&] { cuda::upload(queue(), words); });
  }

  void write(void* to, const void* from, size_t bytes) override {
    constexpr size_t kSmall = 65536;  // beyond, a copy and a wait take less time than many launches
    runtime_.call([&] {
      if (bytes <= kSmall || runtime_.capturing()) return runtime_.write(to, from, bytes);
      if (runtime_.is_watched()) runtime_.wait();
      runtime_.check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, queue().stream),
                     "a copy to the device");
      runtime_.wait();
    });
  }

  void wait() override {
    runtime_.call([&] { runtime_.wait(); });
  }

  bool capturing() override {
    return runtime_.call([&] { return runtime_.capturing(); });
  }

  void set_window_open(bool open) noexcept override { runtime_.set_window_open(open); }

  void check_memory(const Subject& of, const char* what, const void* data) override {
    runtime_.call([&] { runtime_.check_memory(of, what, data); });
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

  int64_t table_bytes(int64_t) const override { return runtime_.own_bytes(); }

  int64_t row_bytes() const override { return rows_.entry_bytes(); }

  void set_tables(const ScalarTables& tables, const TaskTables& tasks) override {
    tables_ = tables;
    tasks_ = tasks;
    chunks_.set_tasks(tasks, tables.params);
    lists_.set_tasks(tasks, tables.params);
  }

  // ---- Scalars ----

  void sum_rank(const WindowTotals& totals, const uint64_t* brought, double* out) override {
    traced("gradaccum sum_rank", [&] { cuda::sum_rank(queue(), tables_, totals, brought, out); });
  }

  void add_ranks(const double* records, int64_t words, int32_t ranks) override {
    traced("gradaccum add_ranks",
           [&] { cuda::add_ranks(queue(), tables_, records, words, ranks); });
  }

  void sum_pieces(double* out) override {
    traced("gradaccum sum_pieces",
           [&] { cuda::sum_pieces(queue(), tables_, tasks_.units_at, out); });
  }

  void add_pieces(const double* sums, int32_t ranks) override {
    traced("gradaccum add_pieces", [&] { cuda::add_pieces(queue(), tables_, sums, ranks); });
  }

  void set_watch(std::function<void(double seconds)> watch) override {
    if (!watch) return runtime_.set_watch({});
    // The seconds are those since the last window that has ended, for many may have been queued.
    runtime_.set_watch([this, watch, last = int64_t{-1}, from = 0.0](double seconds) mutable {
      const int64_t latest = results_.latest();
      if (seconds < from || latest != last) from = seconds;
      last = latest;
      watch(seconds - from);
    });
  }

  void aside(const std::function<void()>& work) override {
    runtime_.call([&] { runtime_.aside(work); });
  }

  void join_aside() override {
    runtime_.call([&] { runtime_.join_aside(); });
  }

  void set_stream(void* stream) override {
    runtime_.call([&] { runtime_.set_stream(static_cast<cudaStream_t>(stream)); });
  }

  int64_t done(int64_t number) override {
    return runtime_.call([&] { return runtime_.done(number); });
  }

  void with_stream(const std::function<void(void* stream)>& work) override {
    traced("gradaccum exchange", [&] { work(queue().stream); });
  }

  // What other ranks bring is there before, so nothing has to run between sums and decision.
  void decide(const WindowTotals& totals, const StepSums& sums, const OverRanks&) override {
    traced("gradaccum decide", [&] {
      const NormChunks norms = {{part_of(ListKind::kNorm, sums.norms)},
                                {tasks_.updates_at, tasks_.measures_at, tasks_.units_at}};
      const UnitPieces units = units_of(sums.units);
      const FactorPieces factors = factors_of(sums.factored);
      cuda::decide(queue(), tables_, totals, results_.ring(), norms, units, factors);
    });
  }

  void open_micro(Span<const MicroInput> inputs, MicroPlan* plans) override {
    traced("gradaccum open_micro",
           [&] { cuda::open_micro(queue(), tables_, list_of(inputs, plans)); });
  }

  void decide_micro(Span<const MicroInput> inputs, MicroPlan* plans, const Micro& micro,
                    int64_t index) override {
    traced("gradaccum decide_micro",
           [&] { cuda::decide_micro(queue(), tables_, list_of(inputs, plans), micro, index); });
  }

  void clear_window() override {
    runtime_.call([&] { cuda::clear_window(queue(), tables_); });
  }

  void restore(const Control& control) override {
    write(tables_.control, &control, sizeof control);
    runtime_.call([&] { results_.restore(control.result); });
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
    if (tasks.size > 0) traced("gradaccum accumulate", [&] { plain_.accumulate(tasks); });
  }

  void norm(Span<const NormTask> tasks) override {
    if (tasks.size > 0) traced("gradaccum norm", [&] { cuda::norm(queue(), tasks); });
  }

  void finish(Span<const FinishTask> tasks) override {
    if (tasks.size > 0) traced("gradaccum finish", [&] { cuda::finish(queue(), tasks); });
  }

  void measure(Params params, const OverRanks&) override {
    if (params.size == 0) return;
    traced("gradaccum measure", [&] {
      const auto parts = lists_.get(ListKind::kMeasure, params);
      for (size_t k = 0; k < parts.size; ++k) {
        const ListPart& part = parts.data[k];
        if (part.op < 0) continue;
        const auto launch = part.coded ? cuda::measure_coded
                            : part.f64 ? cuda::measure<double>
                                       : cuda::measure<float>;
        launch(queue(), tasks_.measures_at, part, tables_);
      }
    });
  }

  void update(Params params) override {
    if (params.size == 0) return;
    traced("gradaccum update", [&] {
      const auto parts = lists_.get(ListKind::kUpdate, params);
      for (size_t k = 0; k < parts.size; ++k) {
        const ListPart& part = parts.data[k];
        const auto launch = part.coded   ? cuda::update_coded
                            : part.mixed ? cuda::update_mixed
                            : part.f64   ? cuda::update<double>
                                         : cuda::update<float>;
        launch(queue(), tasks_.updates_at, part);
      }
    });
  }

  void clip_units(Params params) override {
    if (params.size == 0) return;
    traced("gradaccum clip_units", [&] { cuda::clip_units(queue(), units_of(params)); });
  }

  void update_factored(Params params) override {
    if (params.size == 0) return;
    traced("gradaccum update_factored",
           [&] { cuda::update_factored(queue(), factors_of(params)); });
  }

  // ---- Rows, matrix products ----

  int64_t check_rows(const RowsTask& task) override {
    rows_.check(task);
    return -1;
  }

  void prepare_rows(const RowsTask& task, int64_t waiting) override {
    runtime_.call([&] { rows_.prepare(task, waiting); });
  }

  void accumulate_rows(const RowsTask& task) override {
    traced("gradaccum accumulate_rows", [&] { rows_.accumulate(task, tables_.control); });
  }

  void clear_rows(Span<RowSet* const> sets) override {
    if (sets.size == 0) return;
    runtime_.call([&] { rows_.clear(sets); });
  }

  void free_rows(RowSet* set) noexcept override { rows_.free(set); }

  void prepare_matmul(int64_t, ga_precision) override {
    runtime_.call([&] { matmul_.open(); });
  }

  bool matmul(const MatmulTask& task) override {
    traced("gradaccum matmul", [&] { matmul_.multiply(task); });
    return false;
  }

  void orthogonalize(const OrthogonalizeTask& task) override {
    traced("gradaccum orthogonalize", [&] { matmul_.orthogonalize(task); });
  }

  // ---- Batch normalisation ----

  void bn_reserve(int64_t channels) override {
    runtime_.call([&] {
      const int64_t partials = std::max(bn_partials_, bn_slices(channels) * channels);
      const int64_t counters = std::max(bn_counters_, channels);
      if (partials == bn_partials_ && counters == bn_counters_) return;
      auto* const block = static_cast<BnPartial*>(
          runtime_.allocate(static_cast<size_t>(bn_bytes_for(partials, counters))));
      runtime_.free(bn_.partials);
      bn_ = {block, reinterpret_cast<unsigned*>(block + partials)};
      bn_partials_ = partials;
      bn_counters_ = counters;
    });
  }

  int64_t bn_bytes() const override { return bn_bytes_for(bn_partials_, bn_counters_); }

  void bn_statistics(const BnTask& task) override {
    traced("gradaccum bn_statistics", [&] { cuda::bn_statistics(queue(), task, bn_); });
  }

  void bn_take(const BnTask& task, const BnGiven& given) override {
    runtime_.call([&] { cuda::bn_take(queue(), task, given); });
  }

  void bn_finalize(const BnTask& task) override {
    runtime_.call([&] { cuda::bn_finalize(queue(), task); });
  }

  void bn_write_record(const BnTask& task, const BnPassEnd& end, double* record) override {
    runtime_.call([&] { cuda::bn_write_record(queue(), task, end, record); });
  }

  void bn_merge_records(const BnTask& task, const BnPassEnd& end,
                        const BnRecords& records) override {
    runtime_.call([&] { cuda::bn_merge_records(queue(), task, end, records, tables_.control); });
  }

  void bn_forward(const BnTask& task, bool taking) override {
    traced("gradaccum bn_forward", [&] {
      if (taking) cuda::bn_statistics(queue(), task, bn_);
      cuda::bn_normalise(queue(), task);
    });
  }

  void bn_backward_sums(const BnTask& task) override {
    traced("gradaccum bn_backward_sums", [&] { cuda::bn_gradient_sums(queue(), task, bn_); });
  }

  void bn_backward(const BnTask& task, bool summing) override {
    traced("gradaccum bn_backward", [&] {
      if (summing) cuda::bn_gradient_sums(queue(), task, bn_);
      if (task.weight == 0)
        clear(task.out, task.dtype, task.count());
      else
        cuda::bn_input_gradient(queue(), task);
    });
  }

 private:
  const Queue& queue() { return runtime_.queue(); }

  // Runs work() within a range of that name.
  template <class Work>
  void traced(const char* name, Work&& work) {
    runtime_.call([&] {
      const Range range(name);
      work();
    });
  }

  // The only part of a list whose kind does not depend on the Ops.
  ListPart part_of(ListKind kind, Params params) {
    const auto parts = lists_.get(kind, params);
    return parts.size > 0 ? parts.data[0] : ListPart{};
  }

  UnitPieces units_of(Params params) {
    return {{part_of(ListKind::kUnits, params)}, tasks_.units_at, counters_.at<unsigned>()};
  }

  FactorPieces factors_of(Params params) {
    return {{part_of(ListKind::kFactor, params)},
            tasks_.factored_at,
            counters_.at<unsigned>(most_params_ * sizeof(unsigned))};
  }

  static int64_t bn_bytes_for(int64_t partials, int64_t counters) {
    return partials * int64_t{sizeof(BnPartial)} + counters * int64_t{sizeof(unsigned)};
  }

  MicroList list_of(Span<const MicroInput> inputs, MicroPlan* plans) {
    const auto count = static_cast<int64_t>(inputs.size);
    if (inputs.size <= kMostInputs) return {inputs.data, nullptr, count, plans};
    const size_t bytes = inputs.size * sizeof(MicroInput);
    inputs_.reserve(runtime_, std::max(bytes, std::min(2 * inputs_.bytes(), 2 * bytes)));
    runtime_.write(inputs_.at<MicroInput>(), inputs.data, bytes);
    return {nullptr, inputs_.at<MicroInput>(), count, plans};
  }

  void clear(void* data, int32_t dtype, int64_t count) {
    if (count == 0) return;
    const auto bytes = static_cast<size_t>(count) * static_cast<size_t>(dtype_info(dtype).size);
    runtime_.check(cudaMemsetAsync(data, 0, bytes, queue().stream), "zeroing memory");
  }

  Runtime runtime_;  // first, because it outlives what is allocated from it
  AllChunks chunks_;
  ParamLists lists_;
  PlainTargets plain_;
  Rows rows_;
  MatmulEngine matmul_;
  Results results_;
  Transfer transfer_{runtime_};
  Buffer counters_;  // for each parameter one for pieces of units, then two for rows and columns
  size_t most_params_ = 0;
  Buffer inputs_;        // of a micro-batch with more contributions than a launch takes
  BnWorkspace bn_ = {};  // shared by all layers with batch normalisation; one block
  int64_t bn_partials_ = 0, bn_counters_ = 0;
  ScalarTables tables_ = {};
  TaskTables tasks_;
};

}  // namespace

Backend* make_backend(const ga_config& config) {
  return std::make_unique<CudaBackend>(config).release();
}

}  // namespace ga::cuda
