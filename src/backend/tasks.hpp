// SPDX-License-Identifier: Apache-2.0
// The data of a backend's calls: how arrays are stored (Format), which gradient a loop reads (Source,
// GradientView), and one struct per pass over elements (the tasks).
//
// How an array is stored is one axis, what is done to it another: every loop unpacks its arrays to
// the type it computes in (float, or double for f64 parameters), a tile at a time, and packs what
// it has changed. An array that is of that type already is used in place.
//
// Norms: whoever writes a chunk of an accumulator stores that chunk's Partial, so a norm is the sum
// of a few numbers in the order of the chunks: the same bits however many threads wrote them.
//
// What changes from step to step is not in a task but in the tables of control.hpp, which lie where
// the arrays lie. Pointers in tasks and tables are those of the arrays, unless they are said to be
// the host's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "control.hpp"
#include "ops/batchnorm.hpp"
#include "units.hpp"

namespace ga {

constexpr int64_t kChunk = 65536;

GA_HD constexpr int64_t chunk_count(int64_t elements) { return (elements + kChunk - 1) / kChunk; }

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

// scale / *divisor * data, never written. data NULL: zeros; divisor NULL: 1.
struct Source {
  const void* data;
  int32_t format;
  double scale;
  const double* divisor;

  bool operator==(const Source& s) const {
    return data == s.data && format == s.format && scale == s.scale && divisor == s.divisor;
  }
};

GA_HD double scale_of(const Source& s) { return s.divisor ? s.scale / *s.divisor : s.scale; }

// How what does not fit its dtype is rounded: to nearest, or by a hash of the key and the index of
// the element.
struct Rounding {
  bool stochastic;
  uint64_t key;
};

// What random bits are for: no two uses share any.
enum class Purpose : uint64_t { kAccumulate = 1, kCopy, kState };

// A key for random bits: splitmix64 over all that tells one use from another.
GA_HD uint64_t random_key(uint64_t seed, Purpose purpose, int64_t a, int64_t b, int64_t c) {
  uint64_t z = seed;
  const uint64_t parts[] = {static_cast<uint64_t>(purpose), static_cast<uint64_t>(a),
                            static_cast<uint64_t>(b), static_cast<uint64_t>(c)};
  for (const uint64_t part : parts) {
    z += 0x9e3779b97f4a7c15 + part;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z ^= z >> 31;
  }
  return z;
}

// 16-bit: the sum of two arrays.
struct Pair {
  void* high;
  void* low;
  int32_t dtype;
};

constexpr size_t kRowBatch = 1024;  // rows that the CPU updates at a time

// A matrix with zeros in the rows that are not in the set.
struct SparseRows {
  const void* data;  // of the type computed in
  int64_t columns;
  const RowSet* rows;
};

// rows[i] columns[j] scales[b] for each matrix b: the vectors lie one after the other.
struct OuterProduct {
  const void* rows;  // all of the type computed in
  const void* columns;
  const void* scales;
  int64_t row_count, column_count;
};

// A gradient as an optimizer sees it. numbers NULL: as it is.
struct GradientView {
  Source source;
  const Numbers* numbers;
};

inline GradientView identity(const Source& source) { return {source, nullptr}; }

GA_HD bool is_finite(double x) { return __builtin_fabs(x) <= 1.7976931348623157e308; }
GA_HD bool is_limited(const GradientView& g) { return g.numbers && is_finite(g.numbers->limit); }

// The same, and each unit times its factor.
struct ClippedGradient {
  GradientView gradient;
  const UnitPattern* pattern;  // NULL: no units
  const void* factors;         // of the type computed in; without a limit they are with its scales
};

// The composite formats of one parameter.
struct Composites {
  Pair pair;          // of a compensated accumulator
  SparseRows sparse;  // the accumulator and its row set
  ClippedGradient clipped;
  OuterProduct outer;  // a factored second moment
};

// target <- [keep target +] sources; partials[chunk] of what was stored.
struct AccumulateTask {
  Array target;
  int64_t count;
  Partial* partials;
  Source source[2];
  int sources;            // 1, or 2 without keep
  double keep;            // 0: what is there is not read
  double noise;           // Partial::noise [+]= noise * sum of squares of the contribution
  const MicroPlan* plan;  // in place of keep, noise and the first source's scale; NULL: these
  ga_param param;
  // Rounded stochastically where there is a counter, of windows: the key is random_key(seed,
  // kAccumulate, *counter, contribution, param).
  const int64_t* counter;
  uint64_t seed;
  int64_t contribution;
};

// values[i] is added to row indices[i] of target.
struct RowsTask {
  Array target;  // rows x columns
  int64_t rows, columns;
  RowSet* set;
  bool dense;  // all rows of target hold something already; the set is empty before and after
  const void* indices;
  int32_t index_dtype;
  int64_t count;
  Source values;
  const MicroPlan* plan;  // in place of the scale of values; NULL: that
};

// partials[chunk] of the source; second_squares, if there is a limit, of the view without its factor.
struct NormTask {
  GradientView gradient;
  bool f64;
  int64_t count;
  Partial* partials;
};

// Of all units of a parameter: the squares of its gradient as clipped, and the least factor.
struct UnitTotals {
  double squares, smallest;
};

// The units of a parameter, and what adaptive clipping makes of them.
//   sums[unit]        the squares of the gradient, which is not multiplied by its factor
//   param_sums[unit]  likewise of the parameter, read together with it
//   factors[unit]     what the unit is multiplied by; without a limit with the scales of the view
struct UnitTask {
  GradientView gradient;
  Source param;  // data NULL: none, and no factors
  bool f64;
  const UnitPattern* pattern;
  double* sums;  // pattern->sums()
  double* param_sums;
  void* factors;  // of the type computed in
  UnitTotals* totals;
  double factor, eps;  // ga_clip.agc_factor, agc_eps
};

// param and state <- op(param, gradient, state). What follows the parameter is done on the way.
struct UpdateTask {
  const ParamPlan* plan;
  int64_t count;
  GradientView gradient;
  int op;             // position in AllOps; -1: none
  bool f64;           // computed in double
  bool padded_state;  // state reaches to the end of its last cache line
  bool by_chance;     // param or copy is rounded stochastically; state and average always are
  Array param;
  Array state[kMaxSlots];
  Array copy;          // the parameter in 16 bits, where param is its master; data NULL: none
  Array average;       // [average] + average_gain (param - average); data NULL: none
  Array delivered;     // where the gradient goes under kDeliver
  int64_t first;       // index of the first element, in the gradient and for rounding
  const RowSet* rows;  // of kUpdateRows
  int64_t columns;
  Partial* partials;  // measure: sum_squares of x[0], second_squares of x[1]
  void* emitted;      // measure: x[0], where the Op emits; of the type computed in
};

// target <- gradient, or where that has no source the constant.
struct FinishTask {
  GradientView gradient;
  double constant;
  bool f64;
  Array target;
  int64_t count;
};

// rows, columns <- themselves + gain (mean of the squares of the gradient - themselves), for every
// matrix of the last two axes; scales <- 1 / max(mean of rows, floor). The numbers are in the plan.
struct FactorTask {
  const ParamPlan* plan;
  GradientView gradient;  // not yet clipped by norm: plan->factor is to be multiplied
  const UnitPattern* row_pattern;
  const UnitPattern* column_pattern;
  double* row_sums;
  double* column_sums;
  bool f64;
  void* rows;  // of the type computed in
  void* columns;
  void* scales;
  int64_t row_count, column_count, matrices;
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
  double scale;
  const double* divisor;  // of scale; NULL: 1
  bool keep;
};

// Newton-Schulz iterations: steps times X <- a X + (b G + c G G) X, G = X X', on x scaled first.
// The result is in x after an even number of steps, else at the start of scratch.
struct OrthogonalizeTask {
  const ParamPlan* plan;  // orthogonal_scale
  float* x;               // rows x columns, f32
  int64_t rows, columns;
  int steps;
  float a, b, c;
  float* scratch;  // scratch_size floats

  float* result() const { return steps % 2 == 0 ? x : scratch; }

  static int64_t scratch_size(int64_t rows, int64_t columns) {
    const int64_t small = rows < columns ? rows : columns;
    return rows * columns + 2 * small * small;
  }
};

// A pass over a micro-batch's tensors of a layer with batch normalisation. It is computed in float,
// or in double where dtype is GA_F64.
struct BnTask {
  BnChannel* state;  // of the channels
  int64_t channels, samples, positions;
  bool channels_last;  // [samples, positions, channels], else [samples, channels, positions]
  int32_t mode, dtype;
  bool frozen;           // by the running statistics
  const BnInput* input;  // where the history is: a captured graph follows it when that moves
  int64_t index;         // of the micro-batch whose statistics are taken
  bool aside;            // they go to the next entry of the history and change nothing else
  double eps;
  Array gamma, beta;  // data NULL: 1 and 0
  const void* x;
  const void* dy;
  void* out;  // y, or dx
  // bn_backward_sums: what is summed up, of the type computed in, beside BnChannel::dbeta, dgamma,
  // to which it is added times weight / *divisor in WINDOW mode. divisor NULL: 1. With weight 0
  // neither x nor dy is read.
  void* dgamma;
  void* dbeta;
  double weight;
  const double* divisor;

  GA_HD int64_t elements() const { return samples * positions; }  // of a channel
  GA_HD int64_t count() const { return elements() * channels; }
  GA_HD double share() const { return divisor ? weight / *divisor : weight; }

  GA_HD void take(int64_t channel, const Moments& m) const {
    const BnHistory history = {input->history, channels, channel};
    if (aside)
      history[index + 1] = m;
    else
      ga::take(state[channel], history, index, m, mode, eps);
  }
};

// Statistics of a micro-batch that the program has taken.
struct BnGiven {
  int64_t count;
  Array mean, spread;  // of channels
  bool squares;        // spread: sums of squares; else divided by count
  bool known;          // those that the history has, in place of all the above
};

template <class T>
struct Span {
  T* data;
  size_t size;
};

// An array that the host writes and the loops read: two addresses, on the CPU the same one.
struct Mirror {
  void* host = nullptr;
  void* at = nullptr;
  size_t bytes = 0;
};

// A word of a mirror, where the loops see it, and what the host has there.
struct Word {
  uint64_t* at;
  uint64_t value;
};

// What the calls by parameter go by: one of each for every parameter, in mirrors.
struct TaskTables {
  const UpdateTask* updates = nullptr;   // the host's
  const UpdateTask* measures = nullptr;  // of layer-wise Ops
  const UnitTask* units = nullptr;
  const FactorTask* factored = nullptr;
  // The same where the loops read them.
  const UpdateTask* updates_at = nullptr;
  const UpdateTask* measures_at = nullptr;
  const UnitTask* units_at = nullptr;
  const FactorTask* factored_at = nullptr;
};

}  // namespace ga
