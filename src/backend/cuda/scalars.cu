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

struct Combine {
  Combination task;

  GA_DEVICE void operator()(Block& block) const {
    const Combination& t = task;
    const float a = static_cast<float>(t.factor ? t.a * *t.factor : t.a);
    block.each([&](int thread) {
      const int64_t stride = block.count() * kThreads;
      for (int64_t i = block.index() * kThreads + thread; i < t.count; i += stride) {
        float sum = a * (t.x_dtype == GA_BF16 ? from_bf16(static_cast<const uint16_t*>(t.x)[i])
                                              : static_cast<const float*>(t.x)[i]);
        if (t.y) sum += t.y[i] * t.b;
        if (t.to) t.to[i] = sum;
        if (t.narrow) t.narrow[i] = to_bf16(sum);
      }
    });
  }
};

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
  const int64_t blocks = (task.count + 4 * kThreads - 1) / (4 * kThreads);
  launch(Combine{task}, blocks_for(queue, blocks), queue.stream);
}

cudaError_t load_kernels() { return Loading::all(); }

}  // namespace ga::cuda
