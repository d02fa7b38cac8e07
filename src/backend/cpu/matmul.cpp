// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/matmul.hpp"

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

struct Job {
  const ga_matmul_module& module;
  const MatmulTask& task;
  const Cut cut;
  std::atomic<const char*> error{nullptr};
};

void multiply_piece(void* data, int64_t index) {
  Job& job = *static_cast<Job*>(data);
  const MatmulTask& t = job.task;
  const int64_t row = index / job.cut.column_count * job.cut.rows;
  const int64_t column = index % job.cut.column_count * job.cut.columns;
  const bool empty = t.k == 0;  // then a and b may be NULL
  const float* a = empty ? nullptr : t.a + (t.transpose_a ? row : row * t.lda);
  const float* b = empty ? nullptr : t.b + (t.transpose_b ? column * t.ldb : column);
  const char* error = job.module.multiply(
      std::min(job.cut.rows, t.m - row), std::min(job.cut.columns, t.n - column), t.k, t.alpha, a,
      t.lda, t.transpose_a, b, t.ldb, t.transpose_b, static_cast<float>(t.beta),
      t.c + row * t.ldc + column, t.ldc);
  if (error) job.error.store(error, std::memory_order_relaxed);
}

}  // namespace

void MatmulEngine::open() {
  if (module_) return;
  threads_.reserve(threads_.count());
  module_ = static_cast<const ga_matmul_module*>(open_module("onednn", GA_MATMUL_ABI));
}

void MatmulEngine::run(const MatmulTask& task) {
  if (task.m == 0 || task.n == 0) return;
  Job job = {*module_, task, Cut(task, threads_.count())};
  const int64_t pieces = job.cut.row_count * job.cut.column_count;
  threads_.run(pieces, pieces == 1, multiply_piece, &job);
  if (const char* error = job.error.load(std::memory_order_relaxed))
    fail(GA_ERROR_FAULT, "matrix product of %lld x %lld by %lld x %lld by %s: %s",
         static_cast<long long>(task.m), static_cast<long long>(task.k),
         static_cast<long long>(task.k), static_cast<long long>(task.n), module_->version, error);
}

}  // namespace ga::cpu
