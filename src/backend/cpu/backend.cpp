// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backend/cpu/kernels.hpp"
#include "backend/cpu/matmul.hpp"
#include "backend/cpu/threads.hpp"
#include "error.hpp"

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
    work_.reserve(static_cast<size_t>(chunks));
    items_.reserve(static_cast<size_t>(chunks) + 1);
    threads_.reserve(chunks);
    // Gradients and accumulators of a window against the cache: past it, written lines are not
    // wanted there.
    stream_ = 2 * accumulator_bytes > cache_;
  }

  int64_t table_bytes(int64_t chunks) const override {
    return chunks * static_cast<int64_t>(sizeof(Work) + sizeof(int64_t)) +
           Threads::reserve_bytes(chunks) + matmul_.bytes();
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

  void update(Span<const UpdateTask> tasks) override {
    run<UpdateTask>(tasks, [](const CpuBackend& self, const UpdateTask& task, const Work& w) {
      self.kernels_.update[task.op](task, w.offset, w.count);
    });
  }

  void finish(Span<const FinishTask> tasks) override {
    run<FinishTask>(tasks, [](const CpuBackend& self, const FinishTask& task, const Work& w) {
      self.kernels_.finish(task, w.offset, w.count);
    });
  }

  void prepare_matmul() override { matmul_.open(); }

  bool matmul(const MatmulTask& task) override { return matmul_.run(task, kernels_, stream_); }

 private:
  // A chunk of a task.
  struct Work {
    int32_t task;
    int32_t count;
    int64_t offset;
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

  const Kernels& kernels_;
  Threads threads_;
  MatmulEngine matmul_{threads_};
  int64_t cache_;
  bool stream_ = false;
  std::vector<Work> work_;
  std::vector<int64_t> items_;
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Backend> make_cpu_backend(const ga_config& config) {
  return std::make_unique<cpu::CpuBackend>(config);
}

}  // namespace ga
