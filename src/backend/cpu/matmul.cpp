// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/matmul.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "error.hpp"
#include "module.hpp"

namespace ga::cpu {
namespace {

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A product cut into pieces of C, one for each thread.
struct Cut {
  int64_t rows, columns;            // of a piece
  int64_t row_count, column_count;  // pieces down and across

  Cut(const MatmulTask& task, int threads);
};

// Bands of whole rows as long as each is high enough: a thread then has lines of C to itself. Small
// products stay whole; the numbers were measured.
Cut::Cut(const MatmulTask& task, int threads) {
  constexpr double kWorth = 1 << 18;  // multiply-adds that are worth a thread
  const double work = static_cast<double>(task.m) * static_cast<double>(task.n) *
                      static_cast<double>(std::max<int64_t>(task.k, 16));
  const int64_t pieces =
      std::max<int64_t>(1, static_cast<int64_t>(std::min<double>(threads, work / kWorth)));
  const int64_t down = std::clamp<int64_t>(task.m / 32, 1, pieces);
  const int64_t across = std::clamp<int64_t>(task.n / 128, 1, pieces / down);
  // Whole steps of the kernels, and of cache lines.
  rows = down == 1 ? task.m : divide_up(divide_up(task.m, down), 8) * 8;
  columns = across == 1 ? task.n : divide_up(divide_up(task.n, across), 16) * 16;
  row_count = divide_up(task.m, rows);
  column_count = divide_up(task.n, columns);
}

// What the threads of one product share.
struct Job {
  const ga_matmul_module& module;
  const MatmulTask& task;
  std::atomic<const char*> error{nullptr};

  // c [rows x columns] <- [c +] scale times those rows and columns of the product; n to the next
  // row
  void multiply(int64_t row, int64_t rows, int64_t column, int64_t columns, float scale, float* c,
                bool keep) {
    const MatmulTask& t = task;
    const bool empty = t.k == 0;  // then a and b may be NULL
    const float* a = empty ? nullptr : t.a + (t.transpose_a ? row : row * t.lda);
    const float* b = empty ? nullptr : t.b + (t.transpose_b ? column * t.ldb : column);
    if (const char* e = module.multiply(rows, columns, t.k, scale, a, t.lda, t.transpose_a, b,
                                        t.ldb, t.transpose_b, keep ? 1.0f : 0.0f, c, t.n))
      error.store(e, std::memory_order_relaxed);
  }
};

// A band is one or two chunks of the target, and the rows of the product that they lie in: made in
// a thread's own cache, then added by the loop that adds gradients. Measured against a product that
// adds to the target itself: 0.7 of the time where the target is in memory, and its norm is free.
constexpr int64_t kLongestBand = 2 * kChunk;
// Rows that are cut by the end of a band are made twice; where they are longer, that is too much.
constexpr int64_t kLongestRow = 4096;
constexpr int64_t kLongestBanded = 128;
constexpr int64_t kScratch = kLongestBand + 2 * kLongestRow;

struct BandJob : Job {
  const Kernels& kernels;
  bool stream;
  float* scratch;
  int64_t band, bands, threads;

  static void run(void* data, int64_t thread) {
    BandJob& job = *static_cast<BandJob*>(data);
    const int64_t end = (thread + 1) * job.bands / job.threads;
    for (int64_t i = thread * job.bands / job.threads; i < end; ++i)
      job.run_band(i * job.band, job.scratch + thread * kScratch);
  }

  void run_band(int64_t first, float* product) {
    const int64_t last = std::min(first + band, task.m * task.n);
    const int64_t row = first / task.n;
    multiply(row, divide_up(last, task.n) - row, 0, task.n, 1, product, false);
    const AccumulateTask add = {task.target + first,
                                last - first,
                                task.partials + first / kChunk,
                                {{product + first % task.n, GA_F32, task.scale}, {}},
                                1,
                                task.keep};
    for (int64_t offset = 0; offset < add.count; offset += kChunk)
      kernels.accumulate(add, offset, std::min(kChunk, add.count - offset), stream);
  }
};

struct DirectJob : Job {
  Cut cut;

  static void run(void* data, int64_t piece) {
    DirectJob& job = *static_cast<DirectJob*>(data);
    const int64_t row = piece / job.cut.column_count * job.cut.rows;
    const int64_t column = piece % job.cut.column_count * job.cut.columns;
    const MatmulTask& t = job.task;
    job.multiply(row, std::min(job.cut.rows, t.m - row), column,
                 std::min(job.cut.columns, t.n - column), t.scale, t.target + row * t.n + column,
                 t.keep);
  }
};

}  // namespace

void MatmulEngine::open() {
  if (module_) return;
  threads_.reserve(threads_.count());
  cache_ = sysconf(_SC_LEVEL2_CACHE_SIZE);
  scratch_.resize(static_cast<size_t>(threads_.count() * kScratch));
  module_ = static_cast<const ga_matmul_module*>(open_module("onednn", GA_MATMUL_ABI));
}

bool MatmulEngine::run(const MatmulTask& task, const Kernels& kernels, bool stream) {
  // A long product hides what it does with its target behind its arithmetic, and cut in bands it
  // would pack b once for each; a small target is in the cache already.
  const bool banded = task.k <= kLongestBanded && task.n <= kLongestRow &&
                      task.m * task.n * static_cast<int64_t>(sizeof(float)) > cache_;
  if (banded)
    run_bands(task, kernels, stream);
  else
    run_direct(task);
  return banded;
}

void MatmulEngine::run_bands(const MatmulTask& task, const Kernels& kernels, bool stream) {
  const int64_t chunks = chunk_count(task.m * task.n);
  const int64_t band = chunks >= 2 * threads_.count() ? kLongestBand : kChunk;
  const int64_t bands = divide_up(task.m * task.n, band);
  const int64_t threads = std::min<int64_t>(bands, threads_.count());
  BandJob job = {{*module_, task}, kernels, stream, scratch_.data(), band, bands, threads};
  threads_.run(threads, threads == 1, BandJob::run, &job);
  if (const char* error = job.error.load(std::memory_order_relaxed)) fail_product(task, error);
}

void MatmulEngine::run_direct(const MatmulTask& task) {
  DirectJob job = {{*module_, task}, Cut(task, threads_.count())};
  const int64_t pieces = job.cut.row_count * job.cut.column_count;
  threads_.run(pieces, pieces == 1, DirectJob::run, &job);
  if (const char* error = job.error.load(std::memory_order_relaxed)) fail_product(task, error);
}

void MatmulEngine::fail_product(const MatmulTask& task, const char* error) const {
  fail(GA_ERROR_FAULT, "matrix product of %lld x %lld by %lld x %lld by %s: %s",
       static_cast<long long>(task.m), static_cast<long long>(task.k),
       static_cast<long long>(task.k), static_cast<long long>(task.n), module_->version, error);
}

}  // namespace ga::cpu
