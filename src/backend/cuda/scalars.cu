// SPDX-License-Identifier: Apache-2.0
// Scalars of a window (decide.hpp) by one block, and bytes that travel as arguments.
#include <cstring>

#include "backend/cuda/kernels.hpp"
#include "backend/cuda/loops.hpp"
#include "backend/decide.hpp"

namespace ga::cuda {
namespace {

struct ClearWindow {
  static constexpr bool kWide = true;
  ScalarTables tables;

  GA_DEVICE void operator()(Block& block) const { ga::clear_window(block, tables); }
};

struct OpenMicro {
  GA_DEVICE void operator()(Block& block, const ScalarTables& tables,
                            const Contributions& micro) const {
    ga::open_micro(block, tables, micro);
  }
};

struct JudgeMicro {
  Micro of;
  int64_t index;

  GA_DEVICE void operator()(Block& block, const ScalarTables& tables,
                            const Contributions& micro) const {
    sum_micro(block, micro);
    ga::judge_micro(block, tables, micro, of, index);
  }
};

// MicroInputs on the device, or in the arguments.
struct InputsAt {
  const MicroInput* at;
  GA_DEVICE const MicroInput* data() const { return at; }
};
struct InputsHere {
  MicroInput inputs[kMostInputs];
  GA_DEVICE const MicroInput* data() const { return inputs; }
};

template <class Pass, class Inputs>
struct MicroPass {
  static constexpr bool kWide = true;
  ScalarTables tables;
  MicroPlan* plans;
  int64_t count;
  Pass pass;
  Inputs inputs;

  GA_DEVICE void operator()(Block& block) const {
    pass(block, tables, {inputs.data(), plans, count});
  }
};

template <class Pass>
void launch_micro(const Queue& queue, const ScalarTables& tables, const MicroList& list,
                  const Pass& pass) {
  if (list.at) {
    launch(MicroPass<Pass, InputsAt>{tables, list.plans, list.count, pass, {list.at}}, 1,
           queue.stream);
    return;
  }
  if (list.count > static_cast<int64_t>(kMostInputs))
    fail(GA_ERROR_INTERNAL, "%lld contributions were given to one launch",
         static_cast<long long>(list.count));
  MicroPass<Pass, InputsHere> kernel;  // only what is used of it is written
  kernel.tables = tables;
  kernel.plans = list.plans;
  kernel.count = list.count;
  kernel.pass = pass;
  for (int64_t i = 0; i < list.count; ++i) kernel.inputs.inputs[i] = list.host[i];
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

template <size_t kWords>
void launch_upload(const Queue& queue, void* to, const void* from, size_t bytes) {
  Upload<kWords> kernel;  // only what is used of it is written
  kernel.to = static_cast<uint64_t*>(to);
  kernel.bytes = static_cast<int64_t>(bytes);
  std::memcpy(kernel.words, from, bytes);
  launch(kernel, 1, queue.stream);
}

template <size_t kMost>
struct UploadWords {
  int64_t count;
  Word words[kMost];

  GA_DEVICE void operator()(Block& block) const {
    block.each_item(count, [&](int64_t i) { *words[i].at = words[i].value; });
  }
};

template <size_t kMost>
void launch_words(const Queue& queue, const Word* words, size_t count) {
  UploadWords<kMost> kernel;  // only what is used of it is written
  kernel.count = static_cast<int64_t>(count);
  std::memcpy(kernel.words, words, count * sizeof(Word));
  launch(kernel, 1, queue.stream);
}

struct Scale {
  const float* from;
  double factor;
  const double* plan_factor;
  float* to;
  int64_t count;

  GA_DEVICE void operator()(Block& block) const {
    const float a = static_cast<float>(plan_factor ? factor * *plan_factor : factor);
    block.each([&](int thread) {
      for (int64_t i = block.index() * kThreads + thread; i < count; i += block.count() * kThreads)
        to[i] = from[i] * a;
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

void open_micro(const Queue& queue, const ScalarTables& tables, const MicroList& list) {
  launch_micro(queue, tables, list, OpenMicro());
}

void judge_micro(const Queue& queue, const ScalarTables& tables, const MicroList& list,
                 const Micro& micro, int64_t index) {
  launch_micro(queue, tables, list, JudgeMicro{micro, index});
}

void upload(const Queue& queue, void* to, const void* from, size_t bytes) {
  constexpr size_t kMost = 4088, kFew = 64;
  static_assert(sizeof(Upload<kMost>) <= kMostArguments);
  for (size_t at = 0; at < bytes; at += 8 * kMost) {
    const size_t left = bytes - at, size = left < 8 * kMost ? left : 8 * kMost;
    void* const part = static_cast<char*>(to) + at;
    const void* const source = static_cast<const char*>(from) + at;
    if (size <= 8 * kFew)
      launch_upload<kFew>(queue, part, source, size);
    else
      launch_upload<kMost>(queue, part, source, size);
  }
}

void upload(const Queue& queue, Span<const Word> words) {
  constexpr size_t kMost = 2040, kFew = 64;
  static_assert(sizeof(UploadWords<kMost>) <= kMostArguments);
  for (size_t at = 0; at < words.size; at += kMost) {
    const size_t count = words.size - at < kMost ? words.size - at : kMost;
    if (count <= kFew)
      launch_words<kFew>(queue, words.data + at, count);
    else
      launch_words<kMost>(queue, words.data + at, count);
  }
}

void scale_alpha(const Queue& queue, double scale, const double* divisor, float beta,
                 float* alpha_beta) {
  launch(ScaleAlpha{scale, divisor, beta, alpha_beta}, 1, queue.stream);
}

void scale(const Queue& queue, const float* from, double factor, const double* plan_factor,
           float* to, int64_t count) {
  const int64_t blocks = (count + 4 * kThreads - 1) / (4 * kThreads);
  launch(Scale{from, factor, plan_factor, to, count}, blocks_for(queue, blocks), queue.stream);
}

}  // namespace ga::cuda
