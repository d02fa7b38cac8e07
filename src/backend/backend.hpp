// SPDX-License-Identifier: Apache-2.0
// Where arrays live and loops run. The context says what is to be done to which tensors; a backend
// cuts that into chunks of kChunk elements and does it. One call is one parallel pass over the data
// of all its tasks.
//
// Norms: whoever writes a chunk of an accumulator stores that chunk's Partial, so a norm is the sum
// of a few numbers in the order of the chunks: the same bits however many threads wrote them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "optimizer.hpp"

namespace ga {

constexpr int64_t kChunk = 65536;

constexpr int64_t chunk_count(int64_t elements) { return (elements + kChunk - 1) / kChunk; }

struct Partial {
  double sum_squares;
  double limited;     // the same of the gradient as clipped by value; from Backend::norm alone
  int64_t nonfinite;  // 0 or 1
};

// scale * data, never written. data NULL: zeros.
struct Source {
  const void* data;
  int32_t dtype;
  float scale;
};

// target <- [target +] sources; partials[chunk] of what was stored.
struct AccumulateTask {
  float* target;
  int64_t count;
  Partial* partials;
  Source source[2];
  int sources;  // 1, or 2 without keep
  bool keep;
};

// The gradient an optimizer sees: factor * clamp(scale * source, limit). limit may be infinite.
struct GradientView {
  Source source;
  float scale;
  float limit;
  float factor;
};

// partials[chunk] of the source; limited, where there is a limit, of the view without its factor.
struct NormTask {
  GradientView gradient;
  int64_t count;
  Partial* partials;
};

// param and state <- op(param, gradient, state).
struct UpdateTask {
  int op;  // position in AllOps
  const OpBytes* folded;
  GradientView gradient;
  float* param;
  float* state[kMaxSlots];
  int64_t count;
};

// target <- gradient.
struct FinishTask {
  GradientView gradient;
  float* target;
  int64_t count;
};

// target [m x n] <- [target +] scale a b, all f32 and row-major.
struct MatmulTask {
  int64_t m, n, k;
  const float* a;
  int64_t lda;
  bool transpose_a;
  const float* b;
  int64_t ldb;
  bool transpose_b;
  float* target;
  Partial* partials;
  float scale;
  bool keep;
};

template <class T>
struct Span {
  T* data;
  size_t size;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // A block of zeros for the library's own arrays, 64-byte aligned, page-aligned from 1 MiB on;
  // throws std::bad_alloc. free(NULL) is legal.
  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* data, size_t bytes) noexcept = 0;

  // Room for calls with that many chunks, so that no later call allocates. With accumulators of so
  // many bytes in all, the backend knows whether a window stays in the caches.
  virtual void reserve(int64_t chunks, int64_t accumulator_bytes) = 0;
  // Bytes of the backend's own tables for that many chunks, and of what it has beside them.
  virtual int64_t table_bytes(int64_t chunks) const = 0;

  // All throw GA_ERROR_FAULT when the work broke off half-way.
  virtual void accumulate(Span<const AccumulateTask> tasks) = 0;
  virtual void norm(Span<const NormTask> tasks) = 0;
  virtual void update(Span<const UpdateTask> tasks) = 0;
  virtual void finish(Span<const FinishTask> tasks) = 0;
  // GA_ERROR_UNSUPPORTED, before anything is touched, where there is no matrix engine.
  virtual void prepare_matmul() = 0;
  // Returns whether the partials were stored; else they are stale.
  virtual bool matmul(const MatmulTask& task) = 0;
};

std::unique_ptr<Backend> make_cpu_backend(const ga_config& config);

}  // namespace ga
