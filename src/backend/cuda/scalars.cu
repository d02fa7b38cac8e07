// SPDX-License-Identifier: Apache-2.0
// One block's work on the scalars of a window (decide.hpp, ranks.hpp), and bytes that travel as arguments.
#include <cstring>

#include "backend/cuda/kernels.hpp"
#include "backend/cuda/loops.hpp"
#include "backend/decide.hpp"
#include "backend/decide/ranks.hpp"

namespace ga::cuda {
namespace {

struct ClearWindow {
  static constexpr bool kWide = true;
  ScalarTables tables;

  GA_DEVICE void operator()(Block& block) const { ga::clear_window(block, tables); }
};

struct SumRank {
  static constexpr bool kWide = true;
  ScalarTables tables;
  WindowTotals totals;
  const uint64_t* brought;
  double* out;

  GA_DEVICE void operator()(Block& block) const {
    ga::sum_rank(block, tables, totals, brought, out);
  }
};

struct AddRanks {
  static constexpr bool kWide = true;
  ScalarTables tables;
  const double* records;
  int64_t words;
  int32_t ranks;

  GA_DEVICE void operator()(Block& block) const {
    ga::add_ranks(block, tables, records, words, ranks);
  }
};

struct SumPieces {
  static constexpr bool kWide = true;
  ScalarTables tables;
  const UnitTask* units;
  double* out;

  GA_DEVICE void operator()(Block& block) const { ga::sum_pieces(block, tables, units, out); }
};

struct AddPieces {
  static constexpr bool kWide = true;
  ScalarTables tables;
  const double* sums;
  int32_t ranks;

  GA_DEVICE void operator()(Block& block) const { ga::add_pieces(block, tables, sums, ranks); }
};

struct OpenMicro {
  GA_DEVICE void operator()(Block& block, const ScalarTables& tables,
                            const Contributions& micro) const {
    ga::open_micro(block, tables, micro);
  }
};

struct DecideMicro {
  Micro of;
  int64_t index;

  GA_DEVICE void operator()(Block& block, const ScalarTables& tables,
                            const Contributions& micro) const {
    sum_micro(block, micro);
    ga::decide_micro(block, tables, micro, of, index);
  }
};

// The inputs are on the device, or else among the arguments.
template <class Pass>
struct MicroPass {
  static constexpr bool kWide = true;
  ScalarTables tables;
  MicroList list;
  Pass pass;
  MicroInput inputs[kMostInputs];

  GA_DEVICE void operator()(Block& block) const {
    pass(block, tables, {list.at ? list.at : inputs, list.plans, list.count});
  }
};

template <class Pass>
void launch_micro(const Queue& queue, const ScalarTables& tables, const MicroList& list,
                  const Pass& pass) {
  if (!list.at && list.count > static_cast<int64_t>(kMostInputs))
    fail(GA_ERROR_INTERNAL, "%lld contributions were given to one launch",
         static_cast<long long>(list.count));
  MicroPass<Pass> kernel;  // only what is used of it is written
  kernel.tables = tables;
  kernel.list = list;
  kernel.pass = pass;
  if (!list.at) std::copy_n(list.host, list.count, kernel.inputs);
  launch(kernel, 1, queue.stream);
}

// ---- Bytes --------------------------------------------------------------------------------------

template <size_t kWords>
struct Upload {
  uint64_t* to;
  int64_t bytes;
  uint64_t words[kWords];

  GA_DEVICE void operator()(Block& block) const {
    const bool aligned = reinterpret_cast<uintptr_t>(to) % 8 == 0;
    const int64_t whole = aligned ? bytes / 8 : 0;
    block.each_item(whole, [&](int64_t i) { to[i] = words[i]; });
    block.each_item(bytes - 8 * whole, [&](int64_t i) {
      const int64_t at = 8 * whole + i;
      const uint64_t word = words[at / 8] >> (8 * (at % 8));  // little-endian
      reinterpret_cast<unsigned char*>(to)[at] = static_cast<unsigned char>(word);
    });
  }
};

template <size_t kMost>
struct UploadWords {
  int64_t count;
  Word words[kMost];

  GA_DEVICE void operator()(Block& block) const {
    block.each_item(count, [&](int64_t i) { *words[i].at = words[i].value; });
  }
};

// f(i) for all i below n, in all blocks.
template <class F>
GA_DEVICE void each_of_grid(Block& block, int64_t n, F f) {
  block.each([&](int thread) {
    const int64_t stride = block.count() * kThreads;
    for (int64_t i = block.index() * kThreads + thread; i < n; i += stride) f(i);
  });
}

struct Combine {
  Combination task;

  GA_DEVICE void operator()(Block& block) const {
    const Combination& t = task;
    const bool factors = t.factor && t.count > t.each;
    const float one = static_cast<float>(t.factor ? t.a * *t.factor : t.a);
    each_of_grid(block, t.count, [&](int64_t i) {
      const float a = factors ? static_cast<float>(t.a * t.factor[i / t.each]) : one;
      float sum = a * (t.x_dtype == GA_BF16 ? from_bf16(static_cast<const uint16_t*>(t.x)[i])
                                            : static_cast<const float*>(t.x)[i]);
      if (t.y) sum += t.y[i] * t.b;
      if (t.to) t.to[i] = sum;
      if (t.narrow) t.narrow[i] = to_bf16(sum);
    });
  }
};

// Between a tensor and packed matrices.
struct Pack {
  Cut cut;
  float* tensor;
  float* packed;
  int64_t first, count;
  bool back;

  GA_DEVICE void operator()(Block& block) const {
    each_of_grid(block, count, [&](int64_t i) {
      float& in_tensor = tensor[cut.place(first + i)];
      (back ? in_tensor : packed[i]) = back ? packed[i] : in_tensor;
    });
  }
};

// Adds up the squares in each chunk of a line. A line is `each` elements that lie side by side.
constexpr int64_t kWarps = kThreads / kLanes;
struct ChunkSquares {
  const float* x;
  int64_t each, lines;
  double* sums;

  GA_DEVICE void operator()(Block& block) const {
    const int64_t chunks = chunk_count(each), first = block.index() * kWarps;
    const int64_t left = chunks * lines - first;
    block.each_warp(left < kWarps ? left : kWarps, [&](int64_t k, auto& warp) {
      const int64_t at = (first + k) % chunks * kChunk;
      const float* const from = x + (first + k) / chunks * each + at;
      const double sum = warp.sum(each - at < kChunk ? each - at : kChunk, [&](int64_t i) {
        return static_cast<double>(from[i]) * static_cast<double>(from[i]);
      });
      if (warp.leader()) sums[first + k] = sum;
    });
  }
};

// Adds up the sums of the chunks of each line.
struct AddChunks {
  int64_t chunks, lines;
  const double* sums;
  double* out;

  GA_DEVICE void operator()(Block& block) const {
    const int64_t first = block.index() * kWarps, left = lines - first;
    block.each_warp(left < kWarps ? left : kWarps, [&](int64_t k, auto& warp) {
      const double* const own = sums + (first + k) * chunks;
      const double sum = warp.sum(chunks, [&](int64_t c) { return own[c]; });
      if (warp.leader()) out[first + k] = sum;
    });
  }
};

// Adds up the squares of each column in each stretch of kRows rows. The sums of a stretch lie side by side, as the
// columns do.
struct ColumnSquares {
  static constexpr int64_t kRows =
      128;  // all sums together take a 64th of the room of the matrices
  MatrixRun run;
  double* sums;

  GA_DEVICE void operator()(Block& block) const {
    const int64_t stretches = (run.rows + kRows - 1) / kRows;
    each_of_grid(block, run.matrices * stretches * run.columns, [&](int64_t i) {
      const int64_t stretch = i / run.columns, column = i % run.columns;
      const int64_t matrix = stretch / stretches, row = stretch % stretches * kRows;
      const float* at = run.x + (matrix * run.rows + row) * run.columns + column;
      double sum = 0;
      for (int64_t left = run.rows - row < kRows ? run.rows - row : kRows; left > 0; --left) {
        sum += static_cast<double>(*at) * static_cast<double>(*at);
        at += run.columns;
      }
      sums[i] = sum;
    });
  }
};

// Adds up the sums of the stretches of each column.
struct AddStretches {
  MatrixRun run;
  const double* sums;
  double* out;

  GA_DEVICE void operator()(Block& block) const {
    const int64_t stretches = (run.rows + ColumnSquares::kRows - 1) / ColumnSquares::kRows;
    each_of_grid(block, run.matrices * run.columns, [&](int64_t i) {
      const double* at = sums + i / run.columns * stretches * run.columns + i % run.columns;
      double sum = 0;
      for (int64_t s = 0; s < stretches; ++s) sum += at[s * run.columns];
      out[i] = sum;
    });
  }
};

struct LineScales {
  double* out;
  int64_t count;
  double eps;

  GA_DEVICE void operator()(Block& block) const {
    each_of_grid(block, count, [&](int64_t i) { out[i] = reciprocal_norm(out[i], eps); });
  }
};

// A block for each matrix.
struct VarianceScales {
  const ParamPlan* plan;
  float* variances;
  int64_t outputs, inputs;
  double beta2;
  double* ratios;
  double* out;

  GA_DEVICE void operator()(Block& block) const {
    if ((plan->actions & kUpdate) == 0) return;
    float* const own = variances + block.index() * outputs;
    double* const sums = out + block.index() * outputs;
    double* const ratio = ratios + block.index();
    block.each_item(outputs, [&](int64_t k) {
      own[k] = next_variance(own[k], sums[k] / static_cast<double>(inputs), beta2);
    });
    block.each_warp(1, [&](int64_t, auto& warp) {
      const double before = warp.sum(outputs, [&](int64_t k) { return sums[k]; });
      const double after = warp.sum(outputs, [&](int64_t k) {
        const double scale = variance_scale(own[k]);
        return sums[k] * scale * scale;
      });
      if (warp.leader()) *ratio = after > 0 ? square_root(before / after) : 0;
    });
    block.each_item(outputs, [&](int64_t k) { sums[k] = *ratio * variance_scale(own[k]); });
  }
};

struct ScaleLines {
  MatrixRun run;
  const double* by_row;
  const double* by_column;

  GA_DEVICE void operator()(Block& block) const {
    each_of_grid(block, run.count(), [&](int64_t i) {
      const int64_t row = i / run.columns;
      float scaled = run.x[i] * static_cast<float>(by_row ? by_row[row] : 1);
      if (by_column)  // the product of both may be too large for a float
        scaled *= static_cast<float>(by_column[row / run.rows * run.columns + i % run.columns]);
      run.x[i] = scaled;
    });
  }
};

template <class Kernel>
void launch_items(const Queue& queue, const Kernel& kernel, int64_t items) {
  launch(kernel, blocks_for(queue, (items + 4 * kThreads - 1) / (4 * kThreads)), queue.stream);
}

struct ScaleAlpha {
  double scale;
  const double* divisor;
  float beta;
  float* alpha_beta;

  GA_DEVICE void operator()(Block& block) const {
    block.once([&] {
      alpha_beta[0] = static_cast<float>(divisor ? scale / *divisor : scale);
      alpha_beta[1] = beta;
    });
  }
};

}  // namespace

void clear_window(const Queue& queue, const ScalarTables& tables) {
  launch(ClearWindow{tables}, 1, queue.stream);
}

void sum_rank(const Queue& queue, const ScalarTables& tables, const WindowTotals& totals,
              const uint64_t* brought, double* out) {
  launch(SumRank{tables, totals, brought, out}, 1, queue.stream);
}

void add_ranks(const Queue& queue, const ScalarTables& tables, const double* records, int64_t words,
               int32_t ranks) {
  launch(AddRanks{tables, records, words, ranks}, 1, queue.stream);
}

void sum_pieces(const Queue& queue, const ScalarTables& tables, const UnitTask* units,
                double* out) {
  launch(SumPieces{tables, units, out}, 1, queue.stream);
}

void add_pieces(const Queue& queue, const ScalarTables& tables, const double* sums, int32_t ranks) {
  launch(AddPieces{tables, sums, ranks}, 1, queue.stream);
}

void open_micro(const Queue& queue, const ScalarTables& tables, const MicroList& list) {
  launch_micro(queue, tables, list, OpenMicro());
}

void decide_micro(const Queue& queue, const ScalarTables& tables, const MicroList& list,
                  const Micro& micro, int64_t index) {
  launch_micro(queue, tables, list, DecideMicro{micro, index});
}

void upload(const Queue& queue, void* to, const void* from, size_t bytes) {
  constexpr size_t kMost = 4088;  // words
  for (size_t at = 0; at < bytes; at += 8 * kMost) {
    const size_t size = std::min(bytes - at, 8 * kMost);
    launch_sized<Upload, 64, kMost>(queue, (size + 7) / 8, [&](auto& kernel) {
      kernel.to = reinterpret_cast<uint64_t*>(static_cast<char*>(to) + at);
      kernel.bytes = static_cast<int64_t>(size);
      std::memcpy(kernel.words, static_cast<const char*>(from) + at, size);
      return 1;
    });
  }
}

void upload(const Queue& queue, Span<const Word> words) {
  constexpr size_t kMost = 2040;
  for (size_t at = 0; at < words.size; at += kMost) {
    const size_t count = std::min(words.size - at, kMost);
    launch_sized<UploadWords, 64, kMost>(queue, count, [&](auto& kernel) {
      kernel.count = static_cast<int64_t>(count);
      std::copy_n(words.data + at, count, kernel.words);
      return 1;
    });
  }
}

void scale_alpha(const Queue& queue, double scale, const double* divisor, float beta,
                 float* alpha_beta) {
  launch(ScaleAlpha{scale, divisor, beta, alpha_beta}, 1, queue.stream);
}

void combine(const Queue& queue, const Combination& task) {
  launch_items(queue, Combine{task}, task.count);
}

void pack(const Queue& queue, const Cut& cut, float* tensor, int64_t first, int64_t count,
          float* packed, bool back) {
  launch_items(queue, Pack{cut, tensor, packed, first, count, back}, count);
}

void sum_squares(const Queue& queue, const float* x, int64_t each, int64_t lines, double* room,
                 double* out) {
  const int64_t chunks = chunk_count(each);
  const auto blocks = [](int64_t warps) { return (warps + kWarps - 1) / kWarps; };
  launch(ChunkSquares{x, each, lines, chunks > 1 ? room : out}, blocks(chunks * lines),
         queue.stream);
  if (chunks == 1) return;
  launch(AddChunks{chunks, lines, room, out}, blocks(lines), queue.stream);
}

void sum_columns(const Queue& queue, const MatrixRun& run, double* room, double* out) {
  const int64_t stretches = (run.rows + ColumnSquares::kRows - 1) / ColumnSquares::kRows;
  const int64_t columns = run.matrices * run.columns;
  launch_items(queue, ColumnSquares{run, stretches > 1 ? room : out}, columns * stretches);
  if (stretches > 1) launch_items(queue, AddStretches{run, room, out}, columns);
}

void line_scales(const Queue& queue, double* out, int64_t count, double eps) {
  launch_items(queue, LineScales{out, count, eps}, count);
}

void variance_scales(const Queue& queue, const OrthogonalizeTask& task, int64_t first,
                     int64_t matrices, double* ratios, double* out) {
  const int64_t outputs = task.cut.outputs();
  launch(VarianceScales{task.plan, task.variances + first * outputs, outputs, task.cut.inputs(),
                        task.beta2, ratios, out},
         matrices, queue.stream);
}

void scale_lines(const Queue& queue, const MatrixRun& run, const double* by_row,
                 const double* by_column) {
  launch_items(queue, ScaleLines{run, by_row, by_column}, run.count());
}

cudaError_t load_kernels() { return Loading::all(); }

}  // namespace ga::cuda
