// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/matmul.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>

#include "backend/newton_schulz.hpp"
#include "core/error.hpp"
#include "core/module.hpp"
#include "core/os/system.hpp"
#include "core/tensor.hpp"

namespace ga::cpu {
namespace {

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Cuts C into pieces, one for each thread: bands of whole rows if every band is high enough,
// because a cache line of C then belongs to one thread. Small products are not cut. Constants were
// measured.
struct Cut {
  int64_t rows, columns;            // of a piece
  int64_t row_count, column_count;  // pieces down and across

  Cut(const MatmulTask& task, int threads) {
    constexpr double kWorth = 1 << 18;  // multiply-adds that pay for a thread
    const double work = static_cast<double>(task.m) * static_cast<double>(task.n) *
                        static_cast<double>(std::max<int64_t>(task.k, 16));
    const int64_t pieces =
        std::max<int64_t>(1, static_cast<int64_t>(std::min<double>(threads, work / kWorth)));
    const int64_t down = std::clamp<int64_t>(task.m / 32, 1, pieces);
    const int64_t across = std::clamp<int64_t>(task.n / 128, 1, pieces / down);
    // Multiples of the kernels' blocks and of cache lines.
    rows = down == 1 ? task.m : divide_up(divide_up(task.m, down), 8) * 8;
    columns = across == 1 ? task.n : divide_up(divide_up(task.n, across), 16) * 16;
    row_count = divide_up(task.m, rows);
    column_count = divide_up(task.n, columns);
  }
};

// A band is one or two chunks of the target. A thread computes the rows of the product that the
// band lies in, in its own cache, and adds them with the kernel that adds gradients. Measured
// against a product that adds to the target itself: 0.7 of the time if the target is in memory, and
// the norm is free; 1.2 to 1.4 of the time if it is in a cache.
constexpr int64_t kLongestBand = 2 * kChunk;
constexpr int64_t kLongestRow = 4096;  // rows at the end of a band are computed twice
constexpr int64_t kLongestBanded = 128;
constexpr int64_t kScratch = kLongestBand + 2 * kLongestRow;

// A product that several threads work on.
struct Job {
  const ga_matmul_module& module;
  const MatmulTask& task;
  float* scratch;  // for each thread a band, then the module's workspace
  std::atomic<const char*> error{nullptr};

  float* band_of(int64_t thread) const { return scratch + thread * (kScratch + module.workspace); }

  // c [rows x columns], n elements from row to row <- [c +] scale times a block of the product.
  void multiply(int64_t thread, int64_t row, int64_t rows, int64_t column, int64_t columns,
                float scale, float* c, bool keep) {
    const MatmulTask& t = task;
    const int64_t a_at = t.transpose_a ? row : row * t.lda;
    const int64_t b_at = t.transpose_b ? column * t.ldb : column;
    const char* e = nullptr;
    if (t.dtype == GA_BF16 && t.k > 0) {  // of an iteration, without scale and keep
      e = module.multiply_bf16(rows, columns, t.k, static_cast<const uint16_t*>(t.a) + a_at, t.lda,
                               t.transpose_a, static_cast<const uint16_t*>(t.b) + b_at, t.ldb,
                               t.transpose_b, c, t.n);
    } else {
      const bool empty = t.k == 0;  // a and b may be NULL then
      const float* const a = static_cast<const float*>(t.a) + (empty ? 0 : a_at);
      const float* const b = static_cast<const float*>(t.b) + (empty ? 0 : b_at);
      e = module.multiply(rows, columns, t.k, scale, a, t.lda, t.transpose_a, b, t.ldb,
                          t.transpose_b, keep ? 1.0f : 0.0f, c, t.n, band_of(thread) + kScratch);
    }
    if (e) error.store(e, std::memory_order_relaxed);
  }
};

constexpr int64_t kSmallestCopy = 16384;  // elements that pay for a thread

struct BandJob : Job {
  const Kernels& kernels;
  int64_t band, bands, threads;

  void operator()(int64_t thread) {
    const int64_t end = (thread + 1) * bands / threads;
    for (int64_t i = thread * bands / threads; i < end; ++i) run_band(thread, i * band);
  }

  void run_band(int64_t thread, int64_t first) {
    float* const product = band_of(thread);
    const int64_t last = std::min(first + band, task.m * task.n);
    const int64_t row = first / task.n;
    multiply(thread, row, divide_up(last, task.n) - row, 0, task.n, 1, product, false);
    AccumulateTask add = {};
    add.target = {task.target + first, GA_F32};
    add.count = last - first;
    add.partials = task.partials + first / kChunk;
    add.source[0] = {product + first % task.n, GA_F32, task.scale, task.divisor};
    add.sources = 1;
    add.keep = task.keep ? 1 : 0;
    for (int64_t offset = 0; offset < add.count; offset += kChunk)
      kernels.accumulate(add, offset, std::min(kChunk, add.count - offset), true);
  }
};

struct DirectJob : Job {
  Cut cut;

  void operator()(int64_t piece) {
    const int64_t row = piece / cut.column_count * cut.rows;
    const int64_t column = piece % cut.column_count * cut.columns;
    const MatmulTask& t = task;
    const auto scale = static_cast<float>(t.divisor ? t.scale / *t.divisor : t.scale);
    multiply(piece, row, std::min(cut.rows, t.m - row), column, std::min(cut.columns, t.n - column),
             scale, t.target + row * t.n + column, t.keep);
  }
};

// NULL if the module is not there.
const ga_matmul_module* find_onednn() {
  return static_cast<const ga_matmul_module*>(find_module("onednn", GA_MATMUL_ABI));
}

}  // namespace

void MatmulEngine::open(int64_t converted, ga_precision precision) {
  if (!module_) {
    threads_.reserve(threads_.count());
    cache_ = os::second_level_cache();
    const ga_matmul_module* const onednn = find_onednn();
    const ga_matmul_module& module = onednn ? *onednn : own_;
    scratch_.resize(static_cast<size_t>(threads_.count() * (kScratch + module.workspace)));
    module_ = &module;
  }
  if (precision == GA_PRECISION_TF32)
    fail(GA_ERROR_UNSUPPORTED,
         "ns_precision was GA_PRECISION_TF32, but there are no products of TF32 on the CPU");
  if (precision == GA_PRECISION_BF16 && module_ == &own_)
    fail(GA_ERROR_UNSUPPORTED,
         "ns_precision was GA_PRECISION_BF16, whose products on the CPU are oneDNN's, but there is "
         "no %s",
         os::library_file("gradaccum_onednn").c_str());
  if (precision == GA_PRECISION_BF16 && !module_->multiply_bf16)
    fail(GA_ERROR_UNSUPPORTED,
         "ns_precision was GA_PRECISION_BF16, but %s has no fast products of bf16 on this "
         "processor, which lacks AVX-512 BF16 and AMX",
         module_->version);
  if (static_cast<size_t>(converted) > converted_.size()) {
    threads_.reserve(converted / kSmallestCopy + 1);
    converted_.resize(static_cast<size_t>(converted));
  }
}

void MatmulEngine::convert(const Kernels& kernels, Source from, int64_t rows, int64_t columns,
                           int64_t stride, float* to) {
  if (columns == stride) {  // one row
    columns = stride = std::max<int64_t>(1, rows * columns);
    rows = 1;
  }
  const int64_t count = rows * columns;
  const auto copy = [&](int64_t piece) {
    const int64_t end = std::min(count, (piece + 1) * kSmallestCopy);
    FinishTask task = {};
    task.gradient = identity(from);
    for (int64_t first = piece * kSmallestCopy, elements; first < end; first += elements) {
      elements = std::min(end - first, columns - first % columns);
      const int64_t at = first / columns * stride + first % columns;
      task.gradient.source.data =
          static_cast<const char*>(from.data) + at * dtype_info(from.format).size;
      task.target = {to + first, GA_F32};
      kernels.finish(task, 0, elements);
    }
  };
  if (count > 0) threads_.run(divide_up(count, kSmallestCopy), count <= kSmallestCopy, copy);
}

bool MatmulEngine::run(const MatmulTask& given, const Kernels& kernels, bool stream) {
  MatmulTask task = given;
  if (task.dtype != GA_F32 && task.k > 0) {
    // Products are computed in f32: an engine multiplies 16-bit numbers only on some processors.
    const int64_t a_rows = task.transpose_a ? task.k : task.m;
    const int64_t b_rows = task.transpose_b ? task.n : task.k;
    const int64_t a_columns = task.m * task.k / a_rows, b_columns = task.k * task.n / b_rows;
    float* const a = converted_.data();
    float* const b = a + a_rows * a_columns;
    convert(kernels, {task.a, task.dtype, 1, nullptr}, a_rows, a_columns, task.lda, a);
    convert(kernels, {task.b, task.dtype, 1, nullptr}, b_rows, b_columns, task.ldb, b);
    task.dtype = GA_F32;
    task.a = a;
    task.b = b;
    task.lda = a_columns;
    task.ldb = b_columns;
  }
  // A product with a large k hides the traffic of its target behind its arithmetic, and in bands it
  // would pack b once per band; a small target, or one of few that are not streamed, is in a cache
  // already.
  const bool banded = stream && task.k <= kLongestBanded && task.n <= kLongestRow &&
                      task.m * task.n * static_cast<int64_t>(sizeof(float)) > cache_;
  if (banded)
    run_bands(task, kernels);
  else
    run_direct(task);
  return banded;
}

void MatmulEngine::orthogonalize(const OrthogonalizeTask& task, const Kernels& kernels) {
  NewtonSchulz(
      task, [&](const MatmulTask& product) { run_direct(product); },
      [&](const Combination& pass) { combine(pass, kernels); })
      .run();
}

void MatmulEngine::combine(const Combination& t, const Kernels& kernels) {
  const auto a = static_cast<double>(static_cast<float>(t.factor ? t.a * *t.factor : t.a));
  const auto finish = [&](const Source& from, Array to, int64_t count) {
    FinishTask task = {};
    task.gradient = identity(from);
    task.target = to;
    kernels.finish(task, 0, count);
  };
  const auto pass = [&](int64_t piece) {
    const int64_t first = piece * kSmallestCopy;
    const int64_t count = std::min(kSmallestCopy, t.count - first);
    const Source x = {static_cast<const char*>(t.x) + first * dtype_info(t.x_dtype).size, t.x_dtype,
                      a, nullptr};
    float* const to = t.to ? t.to + first : nullptr;
    if (t.y) {
      Partial unused;
      AccumulateTask sum = {};
      sum.target = {to, GA_F32};
      sum.count = count;
      sum.partials = &unused;
      sum.keep = t.to == t.y ? 1 : 0;
      sum.sources = t.to == t.y ? 1 : 2;
      sum.source[0] = x;
      sum.source[1] = {t.y + first, GA_F32, static_cast<double>(t.b), nullptr};
      kernels.accumulate(sum, 0, count, false);
    } else if (to) {
      finish(x, {to, GA_F32}, count);
    }
    if (t.narrow)
      finish(to ? Source{to, GA_F32, 1, nullptr} : x, {t.narrow + first, GA_BF16}, count);
  };
  threads_.run(divide_up(t.count, kSmallestCopy), t.count <= kSmallestCopy, pass);
}

void MatmulEngine::run_bands(const MatmulTask& task, const Kernels& kernels) {
  const int64_t chunks = chunk_count(task.m * task.n);
  const int64_t band = chunks >= 2 * threads_.count() ? kLongestBand : kChunk;
  const int64_t bands = divide_up(task.m * task.n, band);
  const int64_t threads = std::min<int64_t>(bands, threads_.count());
  BandJob job = {{*module_, task, scratch_.data()}, kernels, band, bands, threads};
  threads_.run(threads, threads == 1, job);
  check_product(task, job.error);
}

void MatmulEngine::run_direct(const MatmulTask& task) {
  DirectJob job = {{*module_, task, scratch_.data()}, Cut(task, threads_.count())};
  const int64_t pieces = job.cut.row_count * job.cut.column_count;
  threads_.run(pieces, pieces == 1, job);
  check_product(task, job.error);
}

void MatmulEngine::check_product(const MatmulTask& t, const char* error) const {
  if (error)
    fail(GA_ERROR_FAULT, "matrix product of %lld x %lld by %lld x %lld by %s: %s", ll(t.m), ll(t.k),
         ll(t.k), ll(t.n), module_->version, error);
}

}  // namespace ga::cpu

namespace ga {

int32_t onednn_version() {
  int major = 0, minor = 0, patch = 0;
  try {
    if (const ga_matmul_module* const onednn = cpu::find_onednn())
      std::sscanf(onednn->version, "oneDNN %d.%d.%d", &major, &minor, &patch);
  } catch (const Error&) {  // of no use
  }
  return 10000 * major + 100 * minor + patch;
}

}  // namespace ga
