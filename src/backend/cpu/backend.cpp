// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backend/cpu/batchnorm.hpp"
#include "backend/cpu/crew.hpp"
#include "backend/cpu/kernels.hpp"
#include "backend/cpu/matmul.hpp"
#include "backend/cpu/threads.hpp"
#include "backend/decide.hpp"
#include "backend/numbers.hpp"
#include "error.hpp"
#include "tensor.hpp"

namespace ga {
namespace cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;
constexpr size_t kCacheLine = 64;

// Below this many elements a second thread costs more than it saves, and so does an item of its
// own.
constexpr int64_t kAlone = 16384;
constexpr int64_t kSmallestItem = 4096;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

bool is_large(size_t bytes) { return bytes >= kHugePage / 2; }

int64_t last_level_cache() {
  for (int name : {_SC_LEVEL4_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE, _SC_LEVEL2_CACHE_SIZE})
    if (const long bytes = sysconf(name); bytes > 0) return bytes;
  return int64_t{32} << 20;
}

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const ga_config& config) : CpuBackend(config, choose_isa()) {}

  void* allocate(size_t bytes) override {
    if (!is_large(bytes)) {
      void* data = nullptr;
      if (posix_memalign(&data, kCacheLine, std::max<size_t>(bytes, 1)) != 0)
        throw std::bad_alloc();
      std::memset(data, 0, bytes);
      return data;
    }
    if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
    const size_t length = round_up(bytes, kPage);
    char* raw = static_cast<char*>(mmap(nullptr, length + kHugePage, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (raw == MAP_FAILED) throw std::bad_alloc();
    char* base = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(raw), kHugePage));
    if (base != raw) munmap(raw, static_cast<size_t>(base - raw));
    munmap(base + length, kHugePage - static_cast<size_t>(base - raw));
    madvise(base, length, MADV_HUGEPAGE);
    return base;
  }

  void free(void* data, size_t bytes) noexcept override {
    if (!data) return;
    if (is_large(bytes))
      munmap(data, round_up(bytes, kPage));
    else
      std::free(data);
  }

  void copy(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void write(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void read(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  Mirror mirror(size_t bytes) override {
    void* const data = allocate(bytes);
    return {data, data, bytes};
  }
  void free(Mirror& mirror) noexcept override {
    free(mirror.at, mirror.bytes);
    mirror = Mirror();
  }
  void upload(const Mirror&, size_t, size_t) override {}
  void upload(Span<const Word>) override {}
  void wait() override {}
  bool capturing() override { return false; }
  void check_memory(const void*, const char*) override {}

  void reserve(int64_t chunks, int64_t, int64_t accumulator_bytes) override {
    // A factored second moment takes two sums of every tensor; what the matrix engine copies is in
    // four pieces to a chunk.
    grow(work_, 2 * static_cast<size_t>(chunks));
    grow(items_, 2 * static_cast<size_t>(chunks) + 1);
    grow(unit_tasks_, 2 * static_cast<size_t>(chunks));
    threads_.reserve(4 * chunks + 1);
    // Gradients and accumulators of a window against the cache: past it, written lines are not
    // wanted there.
    stream_ = 2 * accumulator_bytes > cache_;
  }

  bool passes_are_cut() const override { return true; }
  int64_t cache_bytes() const override { return cache_; }

  int64_t table_bytes(int64_t chunks) const override {
    return 2 * chunks * static_cast<int64_t>(sizeof(Work) + sizeof(int64_t) + sizeof(UnitTask)) +
           Threads::reserve_bytes(4 * chunks + 1) + matmul_.bytes() +
           static_cast<int64_t>(chains_.capacity() * sizeof(Chain) +
                                next_.capacity() * sizeof(int64_t) +
                                order_.capacity() * sizeof(Touched));
  }

  int64_t row_bytes() const override {
    return row_capacity_ * static_cast<int64_t>(sizeof(RowEntry)) +
           static_cast<int64_t>(row_tasks_.capacity() * sizeof(UpdateTask));
  }

  void set_tables(const ScalarTables& tables, const TaskTables& tasks) override {
    tables_ = tables;
    tasks_ = tasks;
  }

  void decide(const WindowTotals& totals, const StepSums& sums) override {
    for (size_t k = 0; k < sums.norms.size; ++k) {
      const ga_param param = sums.norms.data[k];
      if (tables_.param_inputs[param].clamped)
        tables_.plans[param].raw = raw_numbers(tables_, mean_of(tables_, totals), param);
    }
    run(Norms{*this, sums.norms}, take_norm);
    Crew crew;
    sum_window(crew, tables_, totals);
    judge_window(crew, tables_, totals.last);
  }

  void settle_units(Params params, bool last) override {
    Crew crew;
    crew.each_warp(static_cast<int64_t>(params.size), [&](int64_t k, Warp& warp) {
      const UnitTask& task = tasks_.units[params.data[k]];
      if (task.param.data) total_units(task, warp);
    });
    const auto count = static_cast<int64_t>(params.size);
    sum_units(crew, tables_, tasks_.units, params.data, count);
    ga::settle_units(crew, tables_, params.data, count, last);
  }

  void open_micro(Span<const MicroInput> inputs, MicroPlan* plans) override {
    Crew crew;
    ga::open_micro(crew, tables_, {inputs.data, plans, static_cast<int64_t>(inputs.size)});
  }

  void judge_micro(Span<const MicroInput> inputs, MicroPlan* plans, const Micro& micro,
                   int64_t index) override {
    const Contributions of = {inputs.data, plans, static_cast<int64_t>(inputs.size)};
    Crew crew;
    sum_micro(crew, of);
    ga::judge_micro(crew, tables_, of, micro, index);
  }

  void clear_window() override {
    Crew crew;
    ga::clear_window(crew, tables_);
  }

  const Control* known() override { return tables_.control; }

  bool result_of(int64_t, ga_step_result& out) override {
    out = tables_.control->result;
    kept_[out.windows % kKept] = out;
    return true;
  }

  bool result(int64_t window, bool, ga_step_result& out) override {
    const int64_t windows = tables_.control->windows;
    const int64_t wanted = window == 0 ? windows : window;
    if (wanted < 1 || wanted > windows || kept_[wanted % kKept].windows != wanted)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "the result of window %lld was asked for, but kept are those of the last %d windows up "
           "to %lld",
           static_cast<long long>(window), kKept, static_cast<long long>(windows));
    out = kept_[wanted % kKept];
    return true;
  }

  void accumulate(Span<const AccumulateTask> tasks) override {
    run(tasks, [](const CpuBackend& self, const AccumulateTask& task, const Work& w) {
      self.kernels_.accumulate(task, w.offset, w.count, self.stream_);
    });
  }

  void norm(Span<const NormTask> tasks) override { run(tasks, take_norm); }

  void measure(Params params) override {
    run(Listed<UpdateTask>{tasks_.measures, params},
        [](const CpuBackend& self, const UpdateTask& task, const Work& w) {
          if ((task.plan->duty & kUpdate) != 0)
            self.kernels_.measure[task.f64][task.op](task, w.offset, w.count);
        });
    Crew crew;
    const auto count = static_cast<int64_t>(params.size);
    sum_layers(crew, tables_, tasks_.measures, params.data, count);
    fold_layers(crew, tables_, params.data, count);
  }

  void update(Params params) override {
    run(Listed<UpdateTask>{tasks_.updates, params},
        [](const CpuBackend& self, const UpdateTask& task, const Work& w) {
          self.update_chunk(task, w.offset, w.count);
        });
    for (size_t k = 0; k < params.size; ++k) {
      const UpdateTask& task = tasks_.updates[params.data[k]];
      if (task.rows && (task.plan->duty & kUpdateRows) != 0) update_rows(task);
    }
  }

  void update_by_units(Params params, bool last) override {
    const Listed<UpdateTask> tasks = {tasks_.updates, params};
    const int64_t total =
        cut_pieces(tasks, [&](size_t t) { return tasks_.units[params.data[t]].pattern; });
    run_items(tasks, total, [](const CpuBackend& self, const UpdateTask& task, const Work& w) {
      const UnitTask& units = self.tasks_.units[&task - self.tasks_.updates];
      const UnitPattern& pattern = *units.pattern;
      const int64_t piece = w.offset, slab = pattern.slab();
      self.kernels_.unit_norms(units, piece);
      for (int64_t u = pattern.first_unit(piece); u < pattern.first_unit(piece + 1); ++u)
        store_agc_factor(units, u);
      self.update_chunk(task, pattern.begin(piece) * slab,
                        (pattern.begin(piece + 1) - pattern.begin(piece)) * slab);
    });
    settle_units(params, last);
  }

  void finish(Span<const FinishTask> tasks) override {
    run(tasks, [](const CpuBackend& self, const FinishTask& task, const Work& w) {
      self.kernels_.finish(task, w.offset, w.count);
    });
  }

  void clip_units(Params params) override {
    const Listed<UnitTask> tasks = {tasks_.units, params};
    unit_norms(tasks);
    for (size_t t = 0; t < tasks.size(); ++t)
      for (int64_t u = 0; u < tasks[t].pattern->units; ++u) store_agc_factor(tasks[t], u);
  }

  void update_factored(Params params) override {
    std::vector<UnitTask>& norms = unit_tasks_;
    norms.clear();
    for (size_t k = 0; k < params.size; ++k) {
      const FactorTask& task = tasks_.factored[params.data[k]];
      if ((task.plan->duty & kUpdate) == 0) continue;
      UnitTask sums = {};
      sums.gradient = task.gradient;
      sums.f64 = task.f64;
      sums.pattern = task.row_pattern;
      sums.sums = task.row_sums;
      norms.push_back(sums);
      sums.pattern = task.column_pattern;
      sums.sums = task.column_sums;
      norms.push_back(sums);
    }
    unit_norms(Span<const UnitTask>{norms.data(), norms.size()});
    for (size_t k = 0; k < params.size; ++k) {
      const FactorTask& task = tasks_.factored[params.data[k]];
      if ((task.plan->duty & kUpdate) != 0) task.f64 ? blend<double>(task) : blend<float>(task);
    }
  }

  int64_t check_rows(const RowsTask& task) override {
    for (int64_t i = 0; i < task.count; ++i) {
      const int64_t row = row_of(task, i);
      if (row < 0 || row >= task.rows) return i;
    }
    return -1;
  }

  void prepare_rows(const RowsTask& task, int64_t waiting) override {
    if (!task.set) return;  // no elements
    const auto count = static_cast<size_t>(task.count);
    const int64_t most = task.set->size + waiting + task.count;
    if (most > task.set->capacity) make_room(*task.set, std::max(most, 2 * task.set->capacity));
    grow(chains_, static_cast<size_t>(most));
    grow(order_, count);
    const auto batch = static_cast<size_t>(std::min<int64_t>(most, kRowBatch));
    const size_t rows_of_chunks =
        batch * static_cast<size_t>(std::max<int64_t>(1, chunk_count(task.columns)));
    grow(row_tasks_, batch);
    grow(work_, rows_of_chunks);
    grow(items_, rows_of_chunks + 1);
    next_.resize(std::max(next_.size(), count));
    threads_.reserve(task.count);
  }

  void accumulate_rows(const RowsTask& task) override {
    // The contributions to each row as a chain, in their order; rows in that of their first one.
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
    struct Job {
      CpuBackend& self;
      const RowsTask& task;
      int64_t rows, item;
    } job = {*this, task, rows, item};
    const ga_task body = [](void* data, int64_t index) {
      const Job& j = *static_cast<const Job*>(data);
      const int64_t end = std::min(j.rows, (index + 1) * j.item);
      for (int64_t r = index * j.item; r < end; ++r) j.self.add_row(j.task, r);
    };
    if (rows > 0)
      threads_.run((rows + item - 1) / item, task.count * task.columns <= kAlone, body, &job);
    for (const Touched& touched : order_) chains_[touched.slot].first = -1;
    if (task.dense) set.size = 0;
  }

  void clear_rows(Span<RowSet* const> sets) override {
    for (size_t k = 0; k < sets.size; ++k) sets.data[k]->size = 0;
  }

  void free_rows(RowSet* set) noexcept override {
    if (!set) return;
    free(set->entries, static_cast<size_t>(set->capacity) * sizeof(RowEntry));
    row_capacity_ -= set->capacity;
  }

  void prepare_matmul(int64_t converted) override { matmul_.open(converted); }

  bool matmul(const MatmulTask& task) override { return matmul_.run(task, kernels_, stream_); }

  void orthogonalize(const OrthogonalizeTask& task) override {
    if ((task.plan->duty & kUpdate) != 0) matmul_.orthogonalize(task, kernels_);
  }

  void bn_reserve(int64_t channels) override { batchnorm_.reserve(channels); }
  int64_t bn_bytes() const override { return batchnorm_.bytes(); }
  void bn_statistics(const BnTask& task) override { batchnorm_.statistics(task); }
  void bn_take(const BnTask& task, const BnGiven& given) override { batchnorm_.take(task, given); }
  void bn_finalize(const BnTask& task) override { batchnorm_.finalize(task); }
  void bn_forward(const BnTask& task, bool taking) override { batchnorm_.forward(task, taking); }
  void bn_backward_sums(const BnTask& task) override { batchnorm_.backward_sums(task); }
  void bn_backward(const BnTask& task, bool summing) override {
    batchnorm_.backward(task, summing);
  }

 private:
  CpuBackend(const ga_config& config, const Isa& isa)
      : kernels_(isa.kernels()),
        threads_(config),
        cache_(last_level_cache()),
        batchnorm_(threads_, isa.batchnorm(), cache_) {}

  // A chunk of a task.
  struct Work {
    int32_t task;
    int32_t count;
    int64_t offset;
  };

  // The contributions of one call to a row.
  struct Chain {
    int64_t first, last;
  };
  struct Touched {
    uint32_t slot;
    bool keep;  // the row holds something already
  };

  // Tasks of a table.
  template <class Task>
  struct Listed {
    const Task* table;
    Params params;
    size_t size() const { return params.size; }
    const Task& operator[](size_t k) const { return table[params.data[k]]; }
  };
  static bool idle(const UpdateTask& task) { return (task.plan->duty & ~kUpdateRows) == 0; }
  template <class Task>
  static bool idle(const Task&) {
    return false;
  }

  // Norms of a step.
  struct Norms {
    const CpuBackend& self;
    Params params;
    size_t size() const { return params.size; }
    NormTask operator[](size_t k) const {
      const ga_param param = params.data[k];
      return norm_task(self.tables_, self.tasks_, param, &self.tables_.plans[param].raw);
    }
  };

  static void take_norm(const CpuBackend& self, const NormTask& task, const Work& w) {
    self.kernels_.norm(task, w.offset, w.count);
  }

  // What a step does to a chunk.
  void update_chunk(const UpdateTask& task, int64_t offset, int64_t count) const {
    const int32_t duty = task.plan->duty;
    if ((duty & kDeliver) != 0) {
      FinishTask deliver = {};
      deliver.gradient = task.gradient;
      deliver.f64 = task.f64;
      deliver.target = task.delivered;
      kernels_.finish(deliver, offset, count);
    }
    if ((duty & kUpdate) != 0)
      kernels_.update[task.f64][task.op](task, offset, count);
    else if ((duty & kFollow) != 0 && (duty & kUpdateRows) == 0)
      kernels_.follow(task, offset, count);
  }

  // The rows with a gradient, so many at a time as there is room for, then the average.
  void update_rows(const UpdateTask& task) {
    UpdateTask whole = task;
    whole.average.data = nullptr;
    whole.padded_state = false;
    whole.count = task.columns;
    if (whole.gradient.source.format == kSparse) {  // the rows at hand are there
      whole.gradient.source.data = static_cast<const SparseRows*>(task.gradient.source.data)->data;
      whole.gradient.source.format = task.f64 ? GA_F64 : GA_F32;
    }
    const auto move = [](Array& a, int64_t elements) {
      if (a.data) a.data = static_cast<char*>(a.data) + elements * dtype_info(a.format).size;
    };
    const RowSet& rows = *task.rows;
    for (int64_t first = 0; first < rows.size; first += kRowBatch) {
      row_tasks_.clear();
      const int64_t end = std::min<int64_t>(rows.size, first + kRowBatch);
      for (int64_t r = first; r < end; ++r) {
        row_tasks_.push_back(whole);
        UpdateTask& row = row_tasks_.back();
        row.first = rows.entries[r].row * whole.count;
        move(row.param, row.first);
        move(row.copy, row.first);
        for (int k = 0; k < op_info(row.op).slots; ++k) move(row.state[k], row.first);
      }
      run(
          Span<const UpdateTask>{row_tasks_.data(), row_tasks_.size()},
          [](const CpuBackend& self, const UpdateTask& row, const Work& w) {
            self.kernels_.update[row.f64][row.op](row, w.offset, w.count);
          },
          true);
    }
    if (!task.average.data) return;
    run(
        Span<const UpdateTask>{&task, 1},
        [](const CpuBackend& self, const UpdateTask& average, const Work& w) {
          self.kernels_.follow(average, w.offset, w.count);
        },
        true);
  }

  // Cuts tasks into chunks, and these into items of similar size: many small tensors are one item,
  // and there are enough of them for every thread.
  template <class Tasks, class Loop>
  void run(const Tasks& tasks, Loop loop, bool busy = false) {
    int64_t total = 0;
    for (size_t t = 0; t < size_of(tasks); ++t) total += task_of(tasks, t).count;
    const int64_t item = std::clamp(total / (4 * threads_.count()), kSmallestItem, kChunk);
    work_.clear();
    items_.clear();
    int64_t begun = 0, item_end = 0;
    for (size_t t = 0; t < size_of(tasks); ++t) {
      const auto& task = task_of(tasks, t);
      if (!busy && idle(task)) continue;
      for (int64_t offset = 0; offset < task.count; offset += kChunk) {
        if (begun >= item_end) {
          items_.push_back(static_cast<int64_t>(work_.size()));
          item_end = begun + item;
        }
        const int64_t count = std::min(kChunk, task.count - offset);
        work_.push_back({static_cast<int32_t>(t), static_cast<int32_t>(count), offset});
        begun += count;
      }
    }
    run_items(tasks, total, loop);
  }

  // Cuts tasks into the pieces of their patterns: an item is one, or several of small tensors.
  // Returns their elements.
  template <class Tasks, class PatternOf>
  int64_t cut_pieces(const Tasks& tasks, PatternOf pattern_of) {
    work_.clear();
    items_.clear();
    int64_t total = 0, begun = kSmallestItem;
    for (size_t t = 0; t < size_of(tasks); ++t) {
      if (idle(task_of(tasks, t))) continue;
      const UnitPattern& pattern = *pattern_of(t);
      for (int64_t piece = 0; piece < pattern.pieces; ++piece) {
        if (begun >= kSmallestItem) {
          items_.push_back(static_cast<int64_t>(work_.size()));
          begun = 0;
        }
        work_.push_back({static_cast<int32_t>(t), 0, piece});
        begun += pattern.count / pattern.pieces;
      }
      total += pattern.count;
    }
    return total;
  }

  template <class Task>
  static size_t size_of(const Span<const Task>& tasks) {
    return tasks.size;
  }
  template <class Tasks>
  static size_t size_of(const Tasks& tasks) {
    return tasks.size();
  }
  template <class Task>
  static const Task& task_of(const Span<const Task>& tasks, size_t t) {
    return tasks.data[t];
  }
  template <class Tasks>
  static decltype(auto) task_of(const Tasks& tasks, size_t t) {
    return tasks[t];
  }

  // Runs items_, each some of work_, of total elements together.
  template <class Tasks, class Loop>
  void run_items(const Tasks& tasks, int64_t total, Loop loop) {
    if (items_.empty()) return;
    const int64_t items = static_cast<int64_t>(items_.size());
    items_.push_back(static_cast<int64_t>(work_.size()));

    struct Job {
      const CpuBackend& self;
      const Tasks& tasks;
      Loop loop;
    } job = {*this, tasks, loop};
    const ga_task body = [](void* data, int64_t item) {
      const Job& j = *static_cast<const Job*>(data);
      const auto end = static_cast<size_t>(j.self.items_[static_cast<size_t>(item) + 1]);
      for (auto w = static_cast<size_t>(j.self.items_[static_cast<size_t>(item)]); w < end; ++w) {
        const Work& work = j.self.work_[w];
        j.loop(j.self, task_of(j.tasks, static_cast<size_t>(work.task)), work);
      }
    };
    threads_.run(items, total <= kAlone, body, &job);
  }

  // Sums over units, those of all pieces into those of the first, in their order.
  template <class Tasks>
  void unit_norms(const Tasks& tasks) {
    const int64_t total = cut_pieces(tasks, [&](size_t t) { return task_of(tasks, t).pattern; });
    run_items(tasks, total, [](const CpuBackend& self, const UnitTask& task, const Work& w) {
      self.kernels_.unit_norms(task, w.offset);
    });
    for (size_t t = 0; t < size_of(tasks); ++t) {
      const UnitTask& task = task_of(tasks, t);
      add_pieces(*task.pattern, task.sums);
      if (task.param.data) add_pieces(*task.pattern, task.param_sums);
    }
  }

  static void add_pieces(const UnitPattern& pattern, double* sums) {
    if (pattern.shared) return;
    for (int64_t piece = 1; piece < pattern.pieces; ++piece)
      for (int64_t u = 0; u < pattern.units; ++u) sums[u] += sums[piece * pattern.units + u];
  }

  template <class T>
  static void blend(const FactorTask& task) {
    const T gain = static_cast<T>(task.plan->factor_gain);
    const double clipped = task.plan->factor * task.plan->factor;
    T* const rows = static_cast<T*>(task.rows);
    T* const columns = static_cast<T*>(task.columns);
    const auto into = [&](T* average, const double* sums, int64_t count, int64_t length) {
      for (int64_t i = 0; i < count; ++i) {
        const T mean = static_cast<T>(sums[i] * clipped / static_cast<double>(length));
        average[i] += gain * (mean - average[i]);
      }
    };
    into(rows, task.row_sums, task.matrices * task.row_count, task.column_count);
    into(columns, task.column_sums, task.matrices * task.column_count, task.row_count);
    for (int64_t m = 0; m < task.matrices; ++m) {
      const double sum = Warp().sum(task.row_count, [&](int64_t i) {
        return static_cast<double>(rows[m * task.row_count + i]);
      });
      const double mean = sum / static_cast<double>(task.row_count);
      static_cast<T*>(task.scales)[m] = static_cast<T>(1 / std::max(mean, task.plan->factor_floor));
    }
  }

  static int64_t row_of(const RowsTask& task, int64_t i) {
    return task.index_dtype == GA_I32 ? static_cast<const int32_t*>(task.indices)[i]
                                      : static_cast<const int64_t*>(task.indices)[i];
  }

  // Room for size elements, more than doubled when it is short.
  template <class T>
  static void grow(std::vector<T>& v, size_t size) {
    if (size > v.capacity()) v.reserve(std::max(size, 2 * v.capacity()));
  }

  // Entries of a row set, with what it holds.
  void make_room(RowSet& set, int64_t capacity) {
    auto* const entries =
        static_cast<RowEntry*>(allocate(static_cast<size_t>(capacity) * sizeof(RowEntry)));
    if (set.size > 0)
      std::memcpy(entries, set.entries, static_cast<size_t>(set.size) * sizeof(RowEntry));
    free(set.entries, static_cast<size_t>(set.capacity) * sizeof(RowEntry));
    row_capacity_ += capacity - set.capacity;
    set.entries = entries;
    set.capacity = capacity;
  }

  void add_row(const RowsTask& task, int64_t index) {
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

  const Kernels& kernels_;
  Threads threads_;
  MatmulEngine matmul_{threads_};
  int64_t cache_;
  BatchNorm batchnorm_;
  bool stream_ = false;
  ScalarTables tables_ = {};
  TaskTables tasks_;
  static constexpr int kKept = 64;
  ga_step_result kept_[kKept] = {};
  int64_t row_capacity_ = 0;  // of all sets
  std::vector<Work> work_;
  std::vector<int64_t> items_;
  std::vector<UnitTask> unit_tasks_;
  std::vector<UpdateTask> row_tasks_;
  // Of accumulate_rows: chains by entry of the set, the next contribution of each one, and the
  // entries of the call.
  std::vector<Chain> chains_;
  std::vector<int64_t> next_;
  std::vector<Touched> order_;
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Backend> make_cpu_backend(const ga_config& config) {
  return std::make_unique<cpu::CpuBackend>(config);
}

}  // namespace ga
