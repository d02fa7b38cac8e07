// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backend/cpu/kernels.hpp"
#include "backend/cpu/matmul.hpp"
#include "backend/cpu/threads.hpp"
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
  explicit CpuBackend(const ga_config& config)
      : kernels_(choose_isa().kernels()), threads_(config), cache_(last_level_cache()) {}

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

  void reserve(int64_t chunks, int64_t accumulator_bytes) override {
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

  int64_t cache_bytes() const override { return cache_; }

  int64_t table_bytes(int64_t chunks) const override {
    return 2 * chunks * static_cast<int64_t>(sizeof(Work) + sizeof(int64_t) + sizeof(UnitTask)) +
           Threads::reserve_bytes(4 * chunks + 1) + matmul_.bytes() +
           static_cast<int64_t>(chains_.capacity() * sizeof(Chain) +
                                next_.capacity() * sizeof(int64_t) +
                                order_.capacity() * sizeof(Touched));
  }

  void accumulate(Span<const AccumulateTask> tasks) override {
    run<AccumulateTask>(tasks,
                        [](const CpuBackend& self, const AccumulateTask& task, const Work& w) {
                          self.kernels_.accumulate(task, w.offset, w.count, self.stream_);
                        });
  }

  void norm(Span<const NormTask> tasks) override {
    run<NormTask>(tasks, [](const CpuBackend& self, const NormTask& task, const Work& w) {
      self.kernels_.norm(task, w.offset, w.count);
    });
  }

  void measure(Span<const UpdateTask> tasks) override {
    run<UpdateTask>(tasks, [](const CpuBackend& self, const UpdateTask& task, const Work& w) {
      self.kernels_.measure[task.f64][task.op](task, w.offset, w.count);
    });
  }

  void update(Span<const UpdateTask> tasks) override {
    run<UpdateTask>(tasks, [](const CpuBackend& self, const UpdateTask& task, const Work& w) {
      (task.op < 0 ? self.kernels_.follow : self.kernels_.update[task.f64][task.op])(task, w.offset,
                                                                                     w.count);
    });
  }

  void update_by_units(Span<const UpdateTask> tasks) override {
    const int64_t total =
        cut_pieces(tasks, [](const UpdateTask& task) { return task.units->pattern; });
    run_items<UpdateTask>(
        tasks, total, [](const CpuBackend& self, const UpdateTask& task, const Work& w) {
          const UnitPattern& pattern = *task.units->pattern;
          const int64_t piece = w.offset, slab = pattern.slab();
          self.kernels_.unit_norms(*task.units, piece);
          for (int64_t u = pattern.first_unit(piece); u < pattern.first_unit(piece + 1); ++u)
            store_factor(*task.agc, u);
          self.kernels_.update[task.f64][task.op](
              task, pattern.begin(piece) * slab,
              (pattern.begin(piece + 1) - pattern.begin(piece)) * slab);
        });
    for (size_t t = 0; t < tasks.size; ++t) sum_up(*tasks.data[t].agc);
  }

  void finish(Span<const FinishTask> tasks) override {
    run<FinishTask>(tasks, [](const CpuBackend& self, const FinishTask& task, const Work& w) {
      self.kernels_.finish(task, w.offset, w.count);
    });
  }

  void unit_norms(Span<const UnitTask> tasks) override {
    const int64_t total = cut_pieces(tasks, [](const UnitTask& task) { return task.pattern; });
    run_items<UnitTask>(tasks, total,
                        [](const CpuBackend& self, const UnitTask& task, const Work& w) {
                          self.kernels_.unit_norms(task, w.offset);
                        });
    for (size_t t = 0; t < tasks.size; ++t) {
      add_pieces(*tasks.data[t].pattern, tasks.data[t].sums);
      if (tasks.data[t].param.data) add_pieces(*tasks.data[t].pattern, tasks.data[t].param_sums);
    }
  }

  void agc(Span<const AgcTask> tasks) override {
    for (size_t t = 0; t < tasks.size; ++t) {
      for (int64_t u = 0; u < tasks.data[t].units; ++u) store_factor(tasks.data[t], u);
      sum_up(tasks.data[t]);
    }
  }

  void factor(Span<const FactorTask> tasks) override {
    std::vector<UnitTask>& norms = unit_tasks_;
    norms.clear();
    for (size_t t = 0; t < tasks.size; ++t) {
      const FactorTask& task = tasks.data[t];
      norms.push_back({task.gradient, {}, task.f64, task.row_pattern, task.row_sums, nullptr});
      norms.push_back(
          {task.gradient, {}, task.f64, task.column_pattern, task.column_sums, nullptr});
    }
    unit_norms({norms.data(), norms.size()});
    for (size_t t = 0; t < tasks.size; ++t)
      tasks.data[t].f64 ? blend<double>(tasks.data[t]) : blend<float>(tasks.data[t]);
  }

  int64_t prepare_rows(const RowsTask& task, int64_t rows, int64_t waiting) override {
    for (int64_t i = 0; i < task.count; ++i) {
      const int64_t row = row_of(task, i);
      if (row < 0 || row >= rows) return i;
    }
    const auto count = static_cast<size_t>(task.count);
    const size_t most = task.set->entries.size() + static_cast<size_t>(waiting) + count;
    grow(task.set->entries, most);
    grow(chains_, most);
    grow(order_, count);
    next_.resize(std::max(next_.size(), count));
    threads_.reserve(task.count);
    return -1;
  }

  void accumulate_rows(const RowsTask& task) override {
    // The contributions to each row as a chain, in their order; rows in that of their first one.
    std::vector<RowEntry>& entries = task.set->entries;
    const size_t known = task.dense ? 0 : entries.size();
    order_.clear();
    chains_.resize(known, {-1, -1});
    for (int64_t i = 0; i < task.count; ++i) {
      const int64_t row = row_of(task, i);
      uint32_t slot = task.set->slots[row];
      if (slot >= entries.size() || entries[slot].row != row) {
        slot = static_cast<uint32_t>(entries.size());
        task.set->slots[row] = slot;
        entries.push_back({row, {}});
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
    if (task.dense) entries.clear();
  }

  void prepare_matmul(int64_t converted) override { matmul_.open(converted); }

  bool matmul(const MatmulTask& task) override { return matmul_.run(task, kernels_, stream_); }

  float* orthogonalize(const OrthogonalizeTask& task) override {
    return matmul_.orthogonalize(task, kernels_);
  }

 private:
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

  // Cuts tasks into chunks, and these into items of similar size: many small tensors are one item,
  // and there are enough of them for every thread.
  template <class Task>
  void run(Span<const Task> tasks, void (*loop)(const CpuBackend&, const Task&, const Work&)) {
    int64_t total = 0;
    for (size_t t = 0; t < tasks.size; ++t) total += tasks.data[t].count;
    const int64_t item = std::clamp(total / (4 * threads_.count()), kSmallestItem, kChunk);
    work_.clear();
    items_.clear();
    int64_t begun = 0, item_end = 0;
    for (size_t t = 0; t < tasks.size; ++t)
      for (int64_t offset = 0; offset < tasks.data[t].count; offset += kChunk) {
        if (begun >= item_end) {
          items_.push_back(static_cast<int64_t>(work_.size()));
          item_end = begun + item;
        }
        const int64_t count = std::min(kChunk, tasks.data[t].count - offset);
        work_.push_back({static_cast<int32_t>(t), static_cast<int32_t>(count), offset});
        begun += count;
      }
    run_items<Task>(tasks, total, loop);
  }

  // Cuts tasks into the pieces of their patterns: an item is one, or several of small tensors.
  // Returns their elements.
  template <class Task, class PatternOf>
  int64_t cut_pieces(Span<const Task> tasks, PatternOf pattern_of) {
    work_.clear();
    items_.clear();
    int64_t total = 0, begun = kSmallestItem;
    for (size_t t = 0; t < tasks.size; ++t) {
      const UnitPattern& pattern = *pattern_of(tasks.data[t]);
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

  // What a unit's gradient is multiplied by.
  static double factor_of(const AgcTask& task, int64_t u) {
    const double g = std::sqrt(task.gradients[u]);
    const double most = task.factor * std::max(std::sqrt(task.params[u]), task.eps);
    return g > most ? most / std::max(g, 1e-6) : 1;
  }

  static void store_factor(const AgcTask& task, int64_t u) {
    const double factor = task.scale * factor_of(task, u);
    if (task.f64)
      static_cast<double*>(task.factors)[u] = factor;
    else
      static_cast<float*>(task.factors)[u] = static_cast<float>(factor);
  }

  static void sum_up(const AgcTask& task) {
    double clipped = 0, smallest = 1;
    for (int64_t u = 0; u < task.units; ++u) {
      const double factor = factor_of(task, u);
      clipped += task.gradients[u] * factor * factor;
      smallest = std::min(smallest, factor);
    }
    *task.clipped_squares = clipped;
    *task.smallest = smallest;
  }

  // Runs items_, each some of work_, of total elements together.
  template <class Task>
  void run_items(Span<const Task> tasks, int64_t total,
                 void (*loop)(const CpuBackend&, const Task&, const Work&)) {
    if (items_.empty()) return;
    const int64_t items = static_cast<int64_t>(items_.size());
    items_.push_back(static_cast<int64_t>(work_.size()));

    struct Job {
      const CpuBackend& self;
      const Task* tasks;
      void (*loop)(const CpuBackend&, const Task&, const Work&);
    } job = {*this, tasks.data, loop};
    const ga_task body = [](void* data, int64_t item) {
      const Job& j = *static_cast<const Job*>(data);
      const auto end = static_cast<size_t>(j.self.items_[static_cast<size_t>(item) + 1]);
      for (auto w = static_cast<size_t>(j.self.items_[static_cast<size_t>(item)]); w < end; ++w) {
        const Work& work = j.self.work_[w];
        j.loop(j.self, j.tasks[work.task], work);
      }
    };
    threads_.run(items, total <= kAlone, body, &job);
  }

  // The sums of all pieces into those of the first, in their order.
  static void add_pieces(const UnitPattern& pattern, double* sums) {
    if (pattern.shared) return;
    for (int64_t piece = 1; piece < pattern.pieces; ++piece)
      for (int64_t u = 0; u < pattern.units; ++u) sums[u] += sums[piece * pattern.units + u];
  }

  template <class T>
  static void blend(const FactorTask& task) {
    const T gain = static_cast<T>(task.gain);
    T* const rows = static_cast<T*>(task.rows);
    T* const columns = static_cast<T*>(task.columns);
    const auto into = [&](T* average, const double* sums, int64_t count, int64_t length) {
      for (int64_t i = 0; i < count; ++i) {
        const T mean = static_cast<T>(sums[i] / static_cast<double>(length));
        average[i] += gain * (mean - average[i]);
      }
    };
    into(rows, task.row_sums, task.matrices * task.row_count, task.column_count);
    into(columns, task.column_sums, task.matrices * task.column_count, task.row_count);
    for (int64_t m = 0; m < task.matrices; ++m) {
      double sum = 0;
      for (int64_t i = 0; i < task.row_count; ++i)
        sum += static_cast<double>(rows[m * task.row_count + i]);
      const double mean = sum / static_cast<double>(task.row_count);
      static_cast<T*>(task.scales)[m] = static_cast<T>(1 / std::max(mean, task.floor));
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
  bool stream_ = false;
  std::vector<Work> work_;
  std::vector<int64_t> items_;
  std::vector<UnitTask> unit_tasks_;
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
