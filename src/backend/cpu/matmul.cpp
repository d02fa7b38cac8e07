// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/matmul.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
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

  void operator()(int64_t piece) { run_piece(piece, piece); }

  void run_piece(int64_t thread, int64_t piece) {
    const int64_t row = piece / cut.column_count * cut.rows;
    const int64_t column = piece % cut.column_count * cut.columns;
    const MatmulTask& t = task;
    const auto scale = static_cast<float>(t.divisor ? t.scale / *t.divisor : t.scale);
    multiply(thread, row, std::min(cut.rows, t.m - row), column,
             std::min(cut.columns, t.n - column), scale, t.target + row * t.n + column, t.keep);
  }
};

// The lower half of a symmetric product, in square blocks. A thread takes every `step`-th of them.
struct SymmetricJob : Job {
  int64_t block, blocks;

  // As many blocks as give each thread some, but not so small that products of them are slow. Constants were measured.
  static int64_t block_of(int64_t n, int64_t threads) {
    constexpr int64_t kSmallest = 64, kLargest = 192;
    int64_t blocks = std::max<int64_t>(4, divide_up(n, kLargest));
    while (blocks * (blocks + 1) / 2 < 4 * threads && n / (blocks + 1) >= kSmallest) ++blocks;
    return divide_up(divide_up(n, blocks), 16) * 16;
  }
  // Whether half a product in blocks is faster than a whole one.
  static bool pays(const MatmulTask& task) { return task.symmetric && task.m >= 256; }

  void run(int64_t thread, int64_t first, int64_t step) {
    int64_t at = 0;
    for (int64_t i = 0; i < blocks; ++i)
      for (int64_t j = 0; j <= i; ++j)
        if (at++ % step == first) run_block(thread, i * block, j * block);
  }

 private:
  void run_block(int64_t thread, int64_t row, int64_t column) {
    const int64_t n = task.n;
    multiply(thread, row, std::min(block, n - row), column, std::min(block, n - column),
             static_cast<float>(task.scale), task.target + row * n + column, task.keep);
    mirror(row, column);
  }

  // Copies a block to its place across the diagonal, while it is in the cache of the thread.
  void mirror(int64_t row, int64_t column) const {
    constexpr int64_t kTile = 16;  // a cache line
    const int64_t n = task.n, last_row = std::min(n, row + block);
    const int64_t last_column = std::min(n, column + block);
    for (int64_t top = row; top < last_row; top += kTile)
      for (int64_t left = column; left < std::min(last_column, top + kTile); left += kTile)
        for (int64_t r = top; r < std::min(last_row, top + kTile); ++r)
          for (int64_t c = left; c < std::min({r, last_column, left + kTile}); ++c)
            task.target[c * n + r] = task.target[r * n + c];
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

// The engine of NewtonSchulz: on all threads, or on one of them, where others have matrices of their own.
class MatmulEngine::Iterations {
 public:
  static constexpr int64_t kTogether = -1;
  Iterations(MatmulEngine& engine, const Kernels& kernels, int64_t thread)
      : engine_(engine), kernels_(kernels), thread_(thread) {}

  const char* error() const { return error_; }  // of a product on one thread

  void multiply(const MatmulTask& task) {
    if (SymmetricJob::pays(task)) return multiply_symmetric(task);
    if (thread_ == kTogether) return engine_.run_direct(task);
    DirectJob job = {{*engine_.module_, task, engine_.scratch_.data()}, Cut(task, 1)};
    job.run_piece(thread_, 0);
    if (job.error) error_ = job.error;
  }

  void combine(const Combination& t) {
    const auto a = static_cast<double>(static_cast<float>(t.factor ? t.a * *t.factor : t.a));
    const auto finish = [&](const Source& from, Array to, int64_t count) {
      FinishTask task = {};
      task.gradient = identity(from);
      task.target = to;
      kernels_.finish(task, 0, count);
    };
    each_piece(t.count, [&](int64_t first, int64_t count) {
      const Source x = {static_cast<const char*>(t.x) + first * dtype_info(t.x_dtype).size,
                        t.x_dtype, a, nullptr};
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
        kernels_.accumulate(sum, 0, count, false);
      } else if (to) {
        finish(x, {to, GA_F32}, count);
      }
      if (t.narrow)
        finish(to ? Source{to, GA_F32, 1, nullptr} : x, {t.narrow + first, GA_BF16}, count);
    });
  }

  void pack(const ga::Cut& cut, const float* x, int64_t first, int64_t count, float* to) {
    each_run(cut, first, count, [&](int64_t packed, int64_t place, int64_t run) {
      std::copy_n(x + place, run, to + packed);
    });
  }
  void unpack(const ga::Cut& cut, const float* from, float* x, int64_t first, int64_t count) {
    each_run(cut, first, count, [&](int64_t packed, int64_t place, int64_t run) {
      std::copy_n(from + packed, run, x + place);
    });
  }

  void scales(const MatrixRun& run, double eps, double* room, double* out) {
    for (int64_t i = 0; i < run.matrices; ++i) {
      const float* const x = run.x + i * run.size();
      each_piece(run.size(), [&](int64_t first, int64_t count) {
        room[first / kSmallestCopy] = squares(x + first, count);
      });
      double sum = 0;
      for (int64_t k = 0; k < divide_up(run.size(), kSmallestCopy); ++k) sum += room[k];
      out[i] = reciprocal_norm(sum, eps);
    }
  }

  void line_squares(const MatrixRun& run, bool of_columns, double*, double* out) {
    const int64_t n = run.columns;
    if (!of_columns)
      return each_row(run, [&](int64_t row) { out[row] = squares(run.x + row * n, n); });
    each_column_block(run, [&](int64_t matrix, int64_t first, int64_t last) {
      double* const sums = out + matrix * n;
      std::fill(sums + first, sums + last, 0.0);
      for (int64_t row = matrix * run.rows; row < (matrix + 1) * run.rows; ++row)
        for (int64_t c = first; c < last; ++c)
          sums[c] += double{run.x[row * n + c]} * double{run.x[row * n + c]};
    });
  }

  void line_scales(double* out, int64_t count, double eps) {
    for (int64_t i = 0; i < count; ++i) out[i] = reciprocal_norm(out[i], eps);
  }

  void variance_scales(const OrthogonalizeTask& task, int64_t first, int64_t matrices, double*,
                       double* out) {
    const int64_t outputs = task.cut.outputs();
    const auto inputs = static_cast<double>(task.cut.inputs());
    for (int64_t i = 0; i < matrices; ++i, out += outputs) {
      float* const variances = task.variances + (first + i) * outputs;
      double before = 0, after = 0;
      for (int64_t k = 0; k < outputs; ++k) {
        variances[k] = next_variance(variances[k], out[k] / inputs, task.beta2);
        const double scale = variance_scale(variances[k]);
        before += out[k];
        after += out[k] * scale * scale;
        out[k] = scale;
      }
      const double ratio = after > 0 ? std::sqrt(before / after) : 0;
      for (int64_t k = 0; k < outputs; ++k) out[k] *= ratio;
    }
  }

  void scale_lines(const MatrixRun& run, const double* by_row, const double* by_column) {
    const int64_t n = run.columns;
    each_row(run, [&](int64_t row) {
      float* const x = run.x + row * n;
      const auto scale = static_cast<float>(by_row ? by_row[row] : 1);
      if (!by_column) {
        for (int64_t c = 0; c < n; ++c) x[c] *= scale;
        return;
      }
      const double* const columns = by_column + row / run.rows * n;
      for (int64_t c = 0; c < n; ++c) x[c] = x[c] * scale * static_cast<float>(columns[c]);
    });
  }

 private:
  void multiply_symmetric(const MatmulTask& task) {
    const bool together = thread_ == kTogether;
    const int64_t threads = together ? engine_.threads_.count() : 1;
    const int64_t block = SymmetricJob::block_of(task.m, threads);
    SymmetricJob job = {
        {*engine_.module_, task, engine_.scratch_.data()}, block, divide_up(task.m, block)};
    const auto pass = [&](int64_t thread) { job.run(thread, thread, threads); };
    if (together)
      engine_.threads_.run(threads, threads == 1, pass);
    else
      job.run(thread_, 0, 1);
    if (together)
      engine_.check_product(task, job.error);
    else if (job.error)
      error_ = job.error;
  }

  double squares(const float* x, int64_t count) {
    double sum = 0;
    for (int64_t first = 0; first < count; first += kChunk) {
      Partial partial;
      NormTask task = {};
      task.gradient = identity({x + first, GA_F32, 1, nullptr});
      task.count = std::min(kChunk, count - first);
      task.partials = &partial;
      kernels_.norm(task, 0, task.count);
      sum += partial.sum_squares;
    }
    return sum;
  }

  // f(packed, place, run): runs of elements that lie together in the tensor, from element `packed` of those
  // that are wanted and from element `place` of the tensor on.
  template <class F>
  void each_run(const ga::Cut& cut, int64_t from, int64_t count, F&& f) {
    const int64_t longest = cut.run();
    each_piece(count, [&](int64_t first, int64_t elements) {
      for (int64_t i = first, run; i < first + elements; i += run) {
        run = std::min(longest - (from + i) % longest, first + elements - i);
        f(i, cut.place(from + i), run);
      }
    });
  }

  // How many pieces lines are put together in: no more than each_piece() makes of all elements, for which
  // there is room (Threads::reserve).
  static int64_t most_pieces(const MatrixRun& run, int64_t lines) {
    return std::clamp<int64_t>(run.count() / kSmallestCopy, 1, lines);
  }

  // f(row) for all rows of all matrices.
  template <class F>
  void each_row(const MatrixRun& run, F&& f) {
    const int64_t rows = run.matrices * run.rows;
    const int64_t together = divide_up(rows, most_pieces(run, rows));
    const auto pass = [&](int64_t piece) {
      for (int64_t row = piece * together; row < std::min(rows, (piece + 1) * together); ++row)
        f(row);
    };
    each_of(divide_up(rows, together), pass);
  }

  // f(matrix, first, last) for blocks of whole cache lines of columns.
  template <class F>
  void each_column_block(const MatrixRun& run, F&& f) {
    const int64_t most = most_pieces(run, divide_up(run.columns, 64));
    const int64_t block = divide_up(divide_up(run.columns, most), 16) * 16;
    const int64_t blocks = divide_up(run.columns, block);
    const auto pass = [&](int64_t piece) {
      const int64_t first = piece % blocks * block;
      f(piece / blocks, first, std::min(run.columns, first + block));
    };
    each_of(run.matrices * blocks, pass);
  }

  // f(first, count) for all elements.
  template <class F>
  void each_piece(int64_t count, F&& f) {
    const auto pass = [&](int64_t piece) {
      const int64_t first = piece * kSmallestCopy;
      f(first, std::min(kSmallestCopy, count - first));
    };
    each_of(divide_up(count, kSmallestCopy), pass);
  }

  template <class Pass>
  void each_of(int64_t pieces, const Pass& pass) {
    if (thread_ == kTogether) return engine_.threads_.run(pieces, pieces <= 1, pass);
    for (int64_t piece = 0; piece < pieces; ++piece) pass(piece);
  }

  MatmulEngine& engine_;
  const Kernels& kernels_;
  const int64_t thread_;
  const char* error_ = nullptr;
};

// Each thread makes whole matrices, which stay in its cache, as long as there is one for every thread; what is
// left, all threads make together.
void MatmulEngine::orthogonalize(const OrthogonalizeTask& task, const Kernels& kernels) {
  const int64_t matrices = task.cut.matrices, room = OrthogonalizeTask::room(task.cut);
  const int64_t threads = threads_.count();
  const bool one_each = threads > 1 && OrthogonalizeTask::at_once(task.cut) >= threads;
  const int64_t apart = one_each ? matrices / threads * threads : 0;
  std::atomic<const char*> error{nullptr};
  const auto own = [&](int64_t thread) {
    Iterations on_thread(*this, kernels, thread);
    for (int64_t i = thread; i < apart && !on_thread.error(); i += threads)
      NewtonSchulz(task, on_thread, i, 1, task.scratch + thread * room).run();
    if (on_thread.error()) error.store(on_thread.error(), std::memory_order_relaxed);
  };
  if (apart > 0) threads_.run(threads, false, own);
  if (error)
    fail(GA_ERROR_FAULT, "matrix products of %lld x %lld by %s: %s", ll(task.cut.rows),
         ll(task.cut.columns), module_->version, error.load());
  Iterations together(*this, kernels, Iterations::kTogether);
  for (int64_t i = apart; i < matrices; ++i) NewtonSchulz(task, together, i, 1, task.scratch).run();
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
