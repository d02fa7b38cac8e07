// SPDX-License-Identifier: Apache-2.0
// Where arrays live and loops run. The context says what is to be done to which tensors; a backend
// cuts that into chunks of kChunk elements and does it. One call is one parallel pass over the data
// of all its tasks.
//
// How an array is stored is one axis, what is done to it another: every loop unpacks its arrays to
// the type it computes in (float, or double for f64 parameters), a tile at a time, and packs what
// it has changed. An array that is of that type already is used in place.
//
// Norms: whoever writes a chunk of an accumulator stores that chunk's Partial, so a norm is the sum
// of a few numbers in the order of the chunks: the same bits however many threads wrote them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "optimizer.hpp"
#include "units.hpp"

namespace ga {

constexpr int64_t kChunk = 65536;

constexpr int64_t chunk_count(int64_t elements) { return (elements + kChunk - 1) / kChunk; }

struct Partial {
  double sum_squares;
  double limited;     // the same of the gradient as clipped by value; from Backend::norm alone
  double noise;       // of the contributions, each times AccumulateTask::noise
  int64_t nonfinite;  // 0 or 1
};

// How an array is stored: a ga_dtype, or one of these, whose data is a descriptor.
enum Format : int32_t {
  kPair = 8,     // Pair
  kSparse = 9,   // SparseRows
  kOuter = 10,   // OuterProduct
  kClipped = 11  // ClippedGradient
};

struct Array {
  void* data;
  int32_t format;
};

// scale * data, never written. data NULL: zeros.
struct Source {
  const void* data;
  int32_t format;
  double scale;
};

// How what does not fit its dtype is rounded: to nearest, or by a hash of the key and the index of
// the element.
struct Rounding {
  bool stochastic;
  uint64_t key;
};

// 16-bit: the sum of two arrays.
struct Pair {
  void* high;
  void* low;
  int32_t dtype;
};

// The rows of a matrix that a window has touched, as a sparse set (Briggs & Torczon 1993): row r is
// in it exactly when entries[slots[r]].row is r. So nothing is ever cleared.
struct RowEntry {
  int64_t row;
  Partial partial;
};
constexpr size_t kRowBatch = 1024;  // rows that are updated at a time
struct RowSet {
  uint32_t* slots;
  std::vector<RowEntry> entries;  // in the order of their first contribution
};

// A matrix with zeros in the rows that are not in the set.
struct SparseRows {
  const void* data;  // of the type computed in
  int64_t columns;
  const uint32_t* slots;
  const RowEntry* entries;
  int64_t size;
};

// rows[i] columns[j] scales[b] for each matrix b: the vectors lie one after the other.
struct OuterProduct {
  const void* rows;  // all of the type computed in
  const void* columns;
  const void* scales;
  int64_t row_count, column_count;
};

// The gradient an optimizer sees: factor * clamp(scale * source, limit). limit may be infinite.
struct GradientView {
  Source source;
  double scale;
  double limit;
  double factor;
};

inline GradientView identity(const Source& source) { return {source, 1, HUGE_VAL, 1}; }

// The same, and each unit times its factor.
struct ClippedGradient {
  GradientView gradient;
  const UnitPattern* pattern;  // NULL: no units
  const void* factors;         // of the type computed in; without a limit they are with its scales
};

// target <- [keep target +] sources; partials[chunk] of what was stored.
struct AccumulateTask {
  Array target;
  int64_t count;
  Partial* partials;
  Source source[2];
  int sources;   // 1, or 2 without keep
  double keep;   // 0: what is there is not read
  double noise;  // Partial::noise [+]= noise * sum of squares of the contribution
  Rounding rounding;
};

// values[i] is added to row indices[i] of target.
struct RowsTask {
  Array target;  // rows x columns
  int64_t columns;
  RowSet* set;
  bool dense;  // all rows of target hold something already; the set is empty before and after
  const void* indices;
  int32_t index_dtype;
  int64_t count;
  Source values;
};

// partials[chunk] of the source; limited, where there is a limit, of the view without its factor.
struct NormTask {
  GradientView gradient;
  bool f64;
  int64_t count;
  Partial* partials;
};

// sums[unit]: the squares of the gradient, which is not multiplied by its factor, over each unit;
// likewise of the parameter, read together with it.
struct UnitTask {
  GradientView gradient;
  Source param;  // data NULL: none
  bool f64;
  const UnitPattern* pattern;
  double* sums;  // pattern->sums()
  double* param_sums;
};

// factors[unit] <- scale times what adaptive clipping multiplies a unit by, from the two sums of
// squares.
struct AgcTask {
  const double* gradients;
  const double* params;
  void* factors;  // of the type computed in
  bool f64;
  int64_t units;
  double factor, eps;
  double scale;
  double* clipped_squares;  // of the whole gradient after it
  double* smallest;         // of the factors
};

// param and state <- op(param, gradient, state). What follows the parameter is done on the way.
struct UpdateTask {
  // What changes from step to step comes first.
  int64_t count;
  const OpBytes* folded;
  GradientView gradient;
  int op;             // position in AllOps; -1: the parameter stays, what follows it is done
  bool f64;           // computed in double
  bool padded_state;  // state reaches to the end of its last cache line
  Array param;
  Array state[kMaxSlots];
  Array copy;     // the parameter in 16 bits, where param is its master; data NULL: none
  Array average;  // [average] + average_gain (param - average); data NULL: none
  double average_gain;
  int64_t first;      // index of the first element, in the gradient and for rounding
  Rounding rounding;  // of param or copy
  uint64_t key;       // of the rounding of state and average, always stochastic
  Partial* partials;  // measure: sum_squares and limited of x[0] and x[1]
  void* emitted;      // measure: x[0], where the Op emits; of the type computed in
  // Backend::update_by_units: what makes the factors that the gradient is clipped by.
  const UnitTask* units;
  const AgcTask* agc;
};

// target <- gradient, or where that has no source the constant.
struct FinishTask {
  GradientView gradient;
  double constant;
  bool f64;
  Array target;
  int64_t count;
  Rounding rounding;
};

// rows, columns <- themselves + gain (mean of the squares of the gradient - themselves), for every
// matrix of the last two axes; scales <- 1 / max(mean of rows, floor).
struct FactorTask {
  GradientView gradient;
  const UnitPattern* row_pattern;
  const UnitPattern* column_pattern;
  double* row_sums;
  double* column_sums;
  bool f64;
  void* rows;  // of the type computed in
  void* columns;
  void* scales;
  int64_t row_count, column_count, matrices;
  double gain, floor;
};

// target [m x n] <- [target +] scale a b, row-major; target is f32.
struct MatmulTask {
  int64_t m, n, k;
  const void* a;
  int64_t lda;
  bool transpose_a;
  const void* b;
  int64_t ldb;
  bool transpose_b;
  int32_t dtype;  // of a and b
  float* target;
  Partial* partials;
  float scale;
  bool keep;
};

// Newton-Schulz iterations: steps times X <- a X + (b G + c G G) X, G = X X', on x scaled first.
struct OrthogonalizeTask {
  float* x;  // rows x columns, f32
  int64_t rows, columns;
  float scale;
  int steps;
  float a, b, c;
  float* scratch;  // scratch_size floats

  static int64_t scratch_size(int64_t rows, int64_t columns) {
    const int64_t small = rows < columns ? rows : columns;
    return rows * columns + 2 * small * small;
  }
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
  // What stays in the last cache from one pass to the next.
  virtual int64_t cache_bytes() const = 0;
  // Bytes of the backend's own tables for that many chunks, and of what it has beside them.
  virtual int64_t table_bytes(int64_t chunks) const = 0;

  // All throw GA_ERROR_FAULT when the work broke off half-way.
  virtual void accumulate(Span<const AccumulateTask> tasks) = 0;
  virtual void norm(Span<const NormTask> tasks) = 0;
  virtual void measure(Span<const UpdateTask> tasks) = 0;
  virtual void update(Span<const UpdateTask> tasks) = 0;
  virtual void finish(Span<const FinishTask> tasks) = 0;
  virtual void unit_norms(Span<const UnitTask> tasks) = 0;
  virtual void agc(Span<const AgcTask> tasks) = 0;
  // unit_norms, agc and update of gradients clipped by units in one, piece by piece: for patterns
  // that are shared, where no unit lies in two pieces. A piece is then read but once.
  virtual void update_by_units(Span<const UpdateTask> tasks) = 0;
  virtual void factor(Span<const FactorTask> tasks) = 0;

  // The position of the first index outside of [0, rows), or -1. Makes room in the set for all of
  // them, and for so many that wait: accumulate_rows does not allocate.
  virtual int64_t prepare_rows(const RowsTask& task, int64_t rows, int64_t waiting) = 0;
  virtual void accumulate_rows(const RowsTask& task) = 0;

  // GA_ERROR_UNSUPPORTED, before anything is touched, where there is no matrix engine. converted:
  // elements of the matrices of the next product that are not f32.
  virtual void prepare_matmul(int64_t converted) = 0;
  // Returns whether the partials were stored; else they are stale.
  virtual bool matmul(const MatmulTask& task) = 0;
  // Returns where the result is: x, or in scratch.
  virtual float* orthogonalize(const OrthogonalizeTask& task) = 0;
};

std::unique_ptr<Backend> make_cpu_backend(const ga_config& config);

}  // namespace ga
