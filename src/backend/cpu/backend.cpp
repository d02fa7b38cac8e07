// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/allocator.hpp"
#include "backend/cpu/batchnorm.hpp"
#include "backend/cpu/kernels.hpp"
#include "backend/cpu/lists.hpp"
#include "backend/cpu/matmul.hpp"
#include "backend/cpu/memory.hpp"
#include "backend/cpu/predictor.hpp"
#include "backend/cpu/results.hpp"
#include "backend/cpu/rows.hpp"
#include "backend/cpu/thread_group.hpp"
#include "backend/cpu/threads.hpp"
#include "backend/decide.hpp"
#include "core/os/system.hpp"

namespace ga {
namespace cpu {
namespace {

int64_t last_level_cache() {
  const int64_t bytes = os::last_level_cache();
  return bytes > 0 ? bytes : int64_t{32} << 20;
}

class CpuBackend final : public Backend, public HostWork {
 public:
  explicit CpuBackend(const ga_config& config) : CpuBackend(config, choose_isa()) {}

  HostWork* host() override { return this; }

  void* allocate(size_t bytes) override {
    if (!allocator_.is_set()) return cpu::allocate(bytes);
    // With a page more, large blocks begin with a page, as those of the library's own do.
    const size_t slack = bytes >= kLarge ? kPage : 0;
    void* const given = allocator_.allocate(bytes + slack);
    void* data = given;
    size_t room = bytes + slack;
    std::align(slack > 0 ? kPage : 1, bytes, data, room);
    try {
      if (slack > 0) given_.emplace(data, given);
    } catch (...) {
      allocator_.free(given, bytes + slack);
      throw;
    }
    std::memset(data, 0, bytes);
    return data;
  }
  void keep_memory() noexcept override { keeps_memory_ = true; }
  void free(void* data, size_t bytes) noexcept override {
    if (keeps_memory_) return;
    if (!allocator_.is_set()) return cpu::free(data, bytes);
    if (!data) return;
    if (bytes < kLarge) return allocator_.free(data, bytes);
    const auto given = given_.find(data);
    allocator_.free(given->second, bytes + kPage);
    given_.erase(given);
  }
  void copy(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void write(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void read(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void read_pieces(Span<const Region> regions, const TakePiece& take) override {
    each_piece(regions, take);
  }
  void write_pieces(Span<const Region> regions, const FillPiece& fill) override {
    each_piece(regions, fill);
  }
  Mirror mirror(size_t bytes) override {
    void* const data = cpu::allocate(bytes);
    return {data, data, bytes};
  }
  void free(Mirror& mirror) noexcept override {
    cpu::free(mirror.at, mirror.bytes);
    mirror = Mirror();
  }
  void upload(const Mirror&, size_t, size_t) override {}
  void upload(Span<const Word>) override {}
  void wait() override {}
  bool capturing() override { return false; }
  void check_memory(const Subject&, const char*, const void*) override {}

  void reserve(int64_t chunks, int64_t params, int64_t accumulator_bytes) override {
    if (eager_) predictor_.reserve(static_cast<size_t>(params));
    // A factored second moment takes two sums of every tensor; the matrix engine copies in pieces
    // of a quarter of a chunk.
    lists_.reserve(2 * static_cast<size_t>(chunks));
    grow(unit_tasks_, 2 * static_cast<size_t>(chunks));
    threads_.reserve(4 * chunks + 1);
    // If gradients and accumulators exceed the cache, stores of a window bypass it.
    stream_ = 2 * accumulator_bytes > cache_;
  }

  int64_t cache_bytes() const override { return cache_; }

  int64_t table_bytes(int64_t chunks) const override {
    return 2 * chunks * static_cast<int64_t>(Lists::kBytes + sizeof(UnitTask)) +
           Threads::reserve_bytes(4 * chunks + 1) + matmul_.bytes() + rows_.bytes();
  }

  int64_t row_bytes() const override { return rows_.entry_bytes(); }
  int64_t ahead_bytes(size_t params) const override {
    return eager_ ? Predictor::bytes(params) : 0;
  }

  void set_tables(const ScalarTables& tables, const TaskTables& tasks) override {
    tables_ = tables;
    tasks_ = tasks;
  }

  void decide(const WindowTotals& totals, const StepSums& sums,
              const OverRanks& over_ranks) override {
    for (size_t k = 0; k < sums.norms.size; ++k) set_limit(totals, sums.norms.data[k]);
    take_norms(Norms{*this, sums.norms});
    ThreadGroup threads;
    sum_window(threads, tables_, totals);
    if (over_ranks) over_ranks();
    decide_window(threads, tables_, totals.last);
  }

  // A norm that is measured in the same pass as the update costs no reading of its own, but the plan cannot know
  // it.
  void update_ahead(const WindowTotals& totals, Span<const ReadyParam> params) override {
    for (size_t k = 0; k < params.size; ++k)
      if (params.data[k].measured) set_limit(totals, params.data[k].param);
    take_norms(NormsBefore{*this, params});
    run_binned(SumsBefore{params});
    predictor_.plan(tables_, totals, params);
    lists_.run(ReadyUpdates{tasks_.updates, params}, [&](const UpdateTask& task, const Work& w) {
      const ReadyParam& ready = params.data[w.task];
      if (ready.in_passes) return;
      if (ready.measured && !clips_itself(ready.param))
        kernels_.norm(norm_of(ready.param), w.offset, w.count);
      update_chunk(task, w.offset, w.count);
    });
    for (size_t k = 0; k < params.size; ++k)
      if (params.data[k].in_passes) update_in_passes(params.data[k].param);
  }

  bool matches(ga_param param) override {
    if (!predictor_.matches(tables_, param)) return false;
    tables_.plans[param].actions = 0;
    return true;
  }

  void settle_units(Params params, bool last) override {
    ThreadGroup threads;
    threads.each_warp(static_cast<int64_t>(params.size), [&](int64_t k, Warp& warp) {
      const UnitTask& task = tasks_.units[params.data[k]];
      if (task.param.data) total_units(task, warp);
    });
    const auto count = static_cast<int64_t>(params.size);
    sum_units(threads, tables_, tasks_.units, params.data, count);
    ga::settle_units(threads, tables_, params.data, count, last);
  }

  void open_micro(Span<const MicroInput> inputs, MicroPlan* plans) override {
    ThreadGroup threads;
    ga::open_micro(threads, tables_, {inputs.data, plans, static_cast<int64_t>(inputs.size)});
  }

  void decide_micro(Span<const MicroInput> inputs, MicroPlan* plans, const Micro& micro,
                    int64_t index) override {
    const Contributions of = {inputs.data, plans, static_cast<int64_t>(inputs.size)};
    ThreadGroup threads;
    sum_micro(threads, of);
    ga::decide_micro(threads, tables_, of, micro, index);
  }

  void clear_window() override {
    ThreadGroup threads;
    ga::clear_window(threads, tables_);
  }

  void restore(const Control& control) override {
    *tables_.control = control;
    results_ = Results();
    if (control.result.windows > 0) results_.keep(control.result);
  }

  const Control* known() override { return tables_.control; }

  bool result_of(int64_t, ga_step_result& out) override {
    out = tables_.control->result;
    results_.keep(out);
    return true;
  }

  bool result(int64_t window, bool, ga_step_result& out) override {
    out = results_.get(window, tables_.control->windows);
    return true;
  }

  void accumulate(Span<const AccumulateTask> tasks) override {
    lists_.run(Given<AccumulateTask>{tasks}, [this](const AccumulateTask& task, const Work& w) {
      kernels_.accumulate(task, w.offset, w.count, stream_);
    });
  }

  void norm(Span<const NormTask> tasks) override { take_norms(Given<NormTask>{tasks}); }
  void sum_binned(Span<const BinnedTask> tasks) override { run_binned(Given<BinnedTask>{tasks}); }

  void measure(Params params, const OverRanks& over_ranks) override {
    measure_layers(Listed<UpdateTask>{tasks_.measures, params});
    ThreadGroup threads;
    const auto count = static_cast<int64_t>(params.size);
    sum_layers(threads, tables_, tasks_.measures, params.data, count);
    if (over_ranks) over_ranks();
    fold_layers(threads, tables_, params.data, count);
  }

  void update(Params params) override {
    lists_.run(
        Listed<UpdateTask>{tasks_.updates, params},
        [this](const UpdateTask& task, const Work& w) { update_chunk(task, w.offset, w.count); });
    for (size_t k = 0; k < params.size; ++k) {
      const UpdateTask& task = tasks_.updates[params.data[k]];
      if (task.rows && (task.plan->actions & kUpdateRows) != 0) rows_.update(task);
    }
  }

  void update_by_units(Params params, bool last) override {
    const Listed<UpdateTask> tasks = {tasks_.updates, params};
    const auto pattern_of = [&](size_t t) { return tasks_.units[params.data[t]].pattern; };
    lists_.run_pieces(tasks, pattern_of, [this](const UpdateTask& task, const Work& w) {
      const UnitTask& units = tasks_.units[&task - tasks_.updates];
      const UnitPattern& pattern = *units.pattern;
      const int64_t piece = w.offset, slab = pattern.slab();
      kernels_.unit_norms(units, piece);
      for (int64_t u = pattern.first_unit(piece); u < pattern.first_unit(piece + 1); ++u)
        store_agc_factor(units, u);
      update_chunk(task, pattern.begin(piece) * slab,
                   (pattern.begin(piece + 1) - pattern.begin(piece)) * slab);
    });
    settle_units(params, last);
  }

  void finish(Span<const FinishTask> tasks) override {
    lists_.run(Given<FinishTask>{tasks}, [this](const FinishTask& task, const Work& w) {
      kernels_.finish(task, w.offset, w.count);
    });
  }

  void clip_units(Params params) override {
    compute_factors(Listed<UnitTask>{tasks_.units, params});
  }

  void update_factored(Params params) override {
    std::vector<UnitTask>& norms = unit_tasks_;
    norms.clear();
    for (size_t k = 0; k < params.size; ++k) {
      const FactorTask& task = tasks_.factored[params.data[k]];
      if ((task.plan->actions & kUpdate) == 0) continue;
      norms.push_back(sums_of(task, true));
      if (task.columns) norms.push_back(sums_of(task, false));
    }
    unit_norms(Given<UnitTask>{{norms.data(), norms.size()}});
    ThreadGroup threads;
    for (size_t k = 0; k < params.size; ++k) blend(threads, tasks_.factored[params.data[k]]);
  }

  int64_t check_rows(const RowsTask& task) override { return rows_.check(task); }
  void prepare_rows(const RowsTask& task, int64_t waiting) override {
    rows_.prepare(task, waiting);
  }
  void accumulate_rows(const RowsTask& task) override { rows_.accumulate(task); }
  void clear_rows(Span<RowSet* const> sets) override {
    for (size_t k = 0; k < sets.size; ++k) sets.data[k]->size = 0;
  }

  void free_rows(RowSet* set) noexcept override { rows_.free(set); }
  void prepare_matmul(int64_t converted, ga_precision precision) override {
    matmul_.open(converted, precision);
  }

  bool matmul(const MatmulTask& task) override { return matmul_.run(task, kernels_, stream_); }

  void orthogonalize(const OrthogonalizeTask& task) override {
    if ((task.plan->actions & kUpdate) != 0) matmul_.orthogonalize(task, kernels_);
  }

  void bn_reserve(int64_t channels) override { batchnorm_.reserve(channels); }
  int64_t bn_bytes() const override { return batchnorm_.bytes(); }
  void bn_statistics(const BnTask& task) override { batchnorm_.statistics(task); }
  void bn_take(const BnTask& task, const BnGiven& given) override { batchnorm_.take(task, given); }
  void bn_finalize(const BnTask& task) override { batchnorm_.finalize(task); }
  void bn_write_record(const BnTask& task, const BnPassEnd& end, double* record) override {
    batchnorm_.write_record(task, end, record);
  }
  void bn_merge_records(const BnTask& task, const BnPassEnd& end,
                        const BnRecords& records) override {
    batchnorm_.merge_records(task, end, records);
  }
  void bn_forward(const BnTask& task, bool taking) override { batchnorm_.forward(task, taking); }
  void bn_backward_sums(const BnTask& task) override { batchnorm_.backward_sums(task); }
  void bn_backward(const BnTask& task, bool summing) override {
    batchnorm_.backward(task, summing);
  }

 private:
  CpuBackend(const ga_config& config, const Isa& isa)
      : allocator_(config),
        eager_(config.eager != 0),
        kernels_(isa.kernels()),
        threads_(config),
        matmul_(threads_, isa.products()),
        cache_(last_level_cache()),
        batchnorm_(threads_, isa.batchnorm(), cache_) {}

  // f(piece, bytes) for pieces that stay in a core's cache from one reader of them to the next.
  template <class F>
  static void each_piece(Span<const Region> regions, F&& f) {
    constexpr size_t kPiece = size_t{256} << 10;
    for (size_t k = 0; k < regions.size; ++k) {
      const Region& r = regions.data[k];
      for (size_t at = 0; at < r.bytes; at += kPiece)
        f(static_cast<char*>(r.data) + at, std::min(kPiece, r.bytes - at));
    }
  }

  // The norm tasks of a step.
  struct Norms {
    const CpuBackend& self;
    Params params;
    size_t size() const { return params.size; }
    NormTask operator[](size_t k) const { return self.norm_of(params.data[k]); }
  };

  // The norm tasks of update_ahead() that have to run before it plans: a parameter has one if its own norm clips
  // it, or if its update takes several passes, and else a task without elements.
  struct NormsBefore {
    const CpuBackend& self;
    Span<const ReadyParam> params;
    size_t size() const { return params.size; }
    NormTask operator[](size_t k) const {
      const ReadyParam& ready = params.data[k];
      if (!ready.measured || !(ready.in_passes || self.clips_itself(ready.param))) return {};
      return self.norm_of(ready.param);
    }
  };

  // The sums of squares of update_ahead() for other ranks.
  struct SumsBefore {
    Span<const ReadyParam> params;
    size_t size() const { return params.size; }
    BinnedTask operator[](size_t k) const {
      return params.data[k].sum ? *params.data[k].sum : BinnedTask();
    }
  };

  struct ReadyUpdates {
    const UpdateTask* table;
    Span<const ReadyParam> params;
    size_t size() const { return params.size; }
    const UpdateTask& operator[](size_t k) const { return table[params.data[k].param]; }
  };

  // Whether the norm of a parameter clips the parameter alone.
  bool clips_itself(ga_param param) const {
    const ga_group group = tables_.param_inputs[param].group;
    return tables_.group_inputs[group].clip.scope == GA_CLIP_PER_TENSOR;
  }

  NormTask norm_of(ga_param param) const {
    return norm_task(tables_, tasks_, param, &tables_.plans[param].raw);
  }

  // Sets what a norm task clips by value with.
  void set_limit(const WindowTotals& totals, ga_param param) {
    if (tables_.param_inputs[param].clamped)
      tables_.plans[param].raw = raw_numbers(tables_, mean_of(tables_, totals), param);
  }

  template <class Tasks>
  void run_binned(const Tasks& tasks) {
    lists_.run(tasks, [this](const BinnedTask& task, const Work& w) {
      kernels_.binned(task, w.offset, w.count);
    });
  }

  template <class Tasks>
  void take_norms(const Tasks& tasks) {
    lists_.run(tasks, [this](const NormTask& task, const Work& w) {
      kernels_.norm(task, w.offset, w.count);
    });
  }

  // An update ahead that needs sums over units, over rows and columns, or over the parameter first. To write a
  // shadow arrays, its passes run copies of the tasks; what a first pass emits goes there too, since the gradient may
  // be needed again.
  void update_in_passes(ga_param id) {
    const Targets* const targets = tables_.plans[id].targets;
    UpdateTask update = tasks_.updates[id], measure = tasks_.measures[id];
    if (tables_.param_inputs[id].by_units) {
      const UnitTask& units = tasks_.units[id];
      compute_factors(Given<UnitTask>{{&units, 1}});
      if (op_info(update.op).reads_gradient_norm) {
        Warp warp;
        total_units(units, warp);
        predictor_.settle_units(tables_, tasks_.units, id);
      }
    }
    OuterProduct outer;
    if (tasks_.factored[id].row_pattern) {
      FactorTask factor = tasks_.factored[id];
      if (targets) {
        factor = factor_out_of_place(factor, *targets);
        outer = {factor.rows, factor.columns, factor.scales, factor.row_count, factor.column_count};
        update.state[0].data = measure.state[0].data = &outer;
      }
      update_factor(factor);
    }
    if (op_info(update.op).norms > 0) {
      if (targets && measure.emitted)
        update.gradient.source.data = measure.emitted = targets->emitted.data;
      measure_layers(Given<UpdateTask>{{&measure, 1}});
      predictor_.settle_layer(tables_, tasks_.measures, id);
    }
    lists_.run(Given<UpdateTask>{{&update, 1}}, [this](const UpdateTask& task, const Work& w) {
      update_chunk(task, w.offset, w.count);
    });
  }

  // Updates a chunk, after delivering its gradient or without an update, as the plan's actions say.
  void update_chunk(const UpdateTask& task, int64_t offset, int64_t count) const {
    const int32_t actions = task.plan->actions;
    if ((actions & kDeliver) != 0) {
      FinishTask deliver = {};
      deliver.gradient = task.gradient;
      deliver.f64 = task.f64;
      deliver.target = task.delivered;
      kernels_.finish(deliver, offset, count);
    }
    if ((actions & kUpdate) != 0)
      kernels_.update[task.f64][task.op](task, offset, count);
    else if ((actions & kFollow) != 0 && (actions & kUpdateRows) == 0)
      kernels_.follow(task, offset, count);
  }

  template <class Tasks>
  void measure_layers(const Tasks& tasks) {
    lists_.run_stretches(tasks, [this](const UpdateTask& task, const Work& w) {
      if ((task.plan->actions & kUpdate) != 0)
        kernels_.measure[task.f64][task.op](task, w.offset, w.count);
    });
  }

  template <class Tasks>
  void compute_factors(const Tasks& tasks) {
    unit_norms(tasks);
    for (size_t t = 0; t < tasks.size(); ++t)
      for (int64_t u = 0; u < tasks[t].pattern->units; ++u) store_agc_factor(tasks[t], u);
  }

  // Sums over units; the sums of all pieces are added to those of the first, in the order of the
  // pieces.
  template <class Tasks>
  void unit_norms(const Tasks& tasks) {
    const auto pattern_of = [&](size_t t) { return tasks[t].pattern; };
    lists_.run_pieces(tasks, pattern_of, [this](const UnitTask& task, const Work& w) {
      kernels_.unit_norms(task, w.offset);
    });
    for (size_t t = 0; t < tasks.size(); ++t) {
      const UnitTask& task = tasks[t];
      add_pieces(*task.pattern, task.sums);
      if (task.param.data) add_pieces(*task.pattern, task.param_sums);
    }
  }

  void update_factor(const FactorTask& task) {
    UnitTask sums[] = {sums_of(task, true), {}};
    if (task.columns) sums[1] = sums_of(task, false);
    unit_norms(Given<UnitTask>{{sums, task.columns ? size_t{2} : size_t{1}}});
    ThreadGroup threads;
    blend(threads, task);
  }

  // The task for shadow arrays, which get the state as it is. The state is of f32.
  static FactorTask factor_out_of_place(FactorTask task, const Targets& targets) {
    const auto move = [&](void*& from, int slot, int64_t count) {
      void* const to = targets.state[slot].data;
      std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
      from = to;
    };
    move(task.rows, 0, task.matrices * task.row_count);
    if (!task.columns) return task;
    move(task.columns, 1, task.matrices * task.column_count);
    task.scales = targets.state[2].data;
    return task;
  }

  static void add_pieces(const UnitPattern& pattern, double* sums) {
    if (pattern.shared) return;
    for (int64_t piece = 1; piece < pattern.pieces; ++piece)
      for (int64_t u = 0; u < pattern.units; ++u) sums[u] += sums[piece * pattern.units + u];
  }

  static constexpr size_t kLarge = size_t{1} << 20;

  const Allocator allocator_;
  std::map<void*, void*> given_;  // a large block, and the program's address of it
  const bool eager_;
  const Kernels& kernels_;
  Threads threads_;
  Lists lists_{threads_, eager_};
  Rows rows_{kernels_, threads_, lists_};
  MatmulEngine matmul_;
  int64_t cache_;
  BatchNorm batchnorm_;
  bool stream_ = false;
  bool keeps_memory_ = false;
  ScalarTables tables_ = {};
  TaskTables tasks_;
  Results results_;
  Predictor predictor_;
  std::vector<UnitTask> unit_tasks_;
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Backend> make_cpu_backend(const ga_config& config) {
  return std::make_unique<cpu::CpuBackend>(config);
}

}  // namespace ga
