// SPDX-License-Identifier: Apache-2.0
// The data of a backend's calls: how arrays are stored (Format), which gradient a kernel reads
// (Source, GradientView), and one struct per pass over elements (the tasks). The compute type is
// float, or double for f64 parameters. docs/architecture.md tells how these work together.
//
// Numbers that change from step to step are in the tables of control.hpp, not in a task. Pointers
// in tasks and tables are valid where the arrays live, except where a comment says: for the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numbers/binned.hpp"
#include "numbers/control.hpp"
#include "numbers/cut.hpp"
#include "numbers/units.hpp"
#include "ops/batchnorm.hpp"
#include "ops/muon.hpp"

namespace ga {

constexpr int64_t kChunk = 65536;

GA_HD constexpr int64_t chunk_count(int64_t elements) { return (elements + kChunk - 1) / kChunk; }

// Further values of Array::format beside ga_dtype. Their data is a descriptor.
enum Format : int32_t {
  kPair = 8,      // Pair
  kSparse = 9,    // SparseRows
  kOuter = 10,    // OuterProduct
  kClipped = 11,  // ClippedGradient
  // The UpdateTask of a parameter that follows, to be read as its master weights, with each element that the
  // program has written since, and so is not what its master weight rounds to, in the place of the latter.
  kFollowed = 12,       // from its share on
  kFollowedWhole = 13,  // from the parameter's first element on; the share alone exists
  // Codes of state in 8 bits (codes.hpp), whose scales are in an array of their own.
  kSignedCodes = 14,
  kPositiveCodes = 15
};

struct Array {
  void* data;
  int32_t format;
};

// The read-only array scale / *divisor * data. data NULL: zeros; divisor NULL: 1.
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

// Rounding to a narrower dtype: to nearest, or stochastically with random bits hashed from the key
// and the element's index.
struct Rounding {
  bool stochastic;
  uint64_t key;
};

// The uses of random bits, none of which shares bits with another.
enum class Purpose : uint64_t { kAccumulate = 1, kCopy, kState };

// A key for random bits: splitmix64 over the seed, the purpose and what tells its uses apart.
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

// The sum of two 16-bit arrays.
struct Pair {
  void* high;
  void* low;
  int32_t dtype;
};

constexpr size_t kRowBatch = 1024;  // rows per batch in the CPU's update of rows

// A matrix whose rows outside of the row set are zeros.
struct SparseRows {
  const void* data;  // of the compute type
  int64_t columns;
  const RowSet* rows;
};

// rows[i] columns[j] scales[b] for each matrix b, whose vectors follow those of matrix b - 1. columns
// NULL: rows[i] alone.
struct OuterProduct {
  const void* rows;  // like columns and scales of the compute type
  const void* columns;
  const void* scales;
  int64_t row_count, column_count;
};

// A gradient as the optimizer sees it. numbers NULL: the source unchanged.
struct GradientView {
  Source source;
  const Numbers* numbers;
};

GA_HD GradientView identity(const Source& source) { return {source, nullptr}; }

GA_HD bool is_finite(double x) { return __builtin_fabs(x) <= 1.7976931348623157e308; }
GA_HD bool is_limited(const GradientView& g) { return g.numbers && is_finite(g.numbers->limit); }

// The numbers of a GradientView in the compute type.
template <class T>
struct View {
  T source_scale, scale, limit, factor;

  GA_HD explicit View(const GradientView& g)
      : source_scale(static_cast<T>(scale_of(g.source))),
        scale(g.numbers ? static_cast<T>(g.numbers->scale) : T(1)),
        limit(g.numbers ? static_cast<T>(g.numbers->limit) : static_cast<T>(HUGE_VAL)),
        factor(g.numbers ? static_cast<T>(g.numbers->factor) : T(1)) {}

  // What units are summed over and clipped in. Without a limit, an element is multiplied by the
  // source's scale alone, as an accumulator would hold it, and unit_scale() is part of the sums and
  // of the factors.
  GA_HD static View of_units(const GradientView& g) {
    View view(g);
    if (!is_limited(g)) view.scale = 1;
    return view;
  }

  // X: T, or a register of T
  template <class X>
  GA_HD X scaled(X x) const {
    return x * source_scale * scale;
  }
  template <class X>
  GA_HD X clamped(X x) const {
    const X low = X{} - limit, high = X{} + limit;
    return x < low ? low : (x > high ? high : x);
  }
  GA_HD T operator()(T x) const { return clamped(scaled(x)) * factor; }

  // Whether clamped(scaled(x)) is x * source_scale, or x itself.
  GA_HD bool is_plain() const { return scale == 1 && limit == static_cast<T>(HUGE_VAL); }
  GA_HD bool is_identity() const { return is_plain() && source_scale == 1; }
};

// See View::of_units().
GA_HD double unit_scale(const GradientView& g) {
  return is_limited(g) || !g.numbers ? 1 : g.numbers->scale;
}

// A GradientView with each unit multiplied by a factor.
struct ClippedGradient {
  GradientView gradient;
  const UnitPattern* pattern;  // NULL: no units
  const void* factors;         // as UnitTask::factors
};

// The composite formats of one parameter.
struct Composites {
  Pair pair;          // a compensated accumulator
  SparseRows sparse;  // the accumulator and its row set
  ClippedGradient clipped;
  OuterProduct outer;  // a factored second moment, or a state by rows
};

// target <- [keep target +] sources. partials[chunk] is of the stored values.
struct AccumulateTask {
  Array target;
  int64_t count;
  Partial* partials;
  Source source[2];
  int sources;            // 1, or 2, and then target is not read
  double keep;            // >= 0; 0: target is not read; or kMaximum, of the Reduction
  double noise;           // Partial::noise [+]= noise * sum of squares of the contribution
  const MicroPlan* plan;  // replaces keep, noise and the first source's scale unless NULL
  // A device runs many tasks in one launch, which looks up the scale by parameter. -1: the task gets a launch of its
  // own, because its scale differs from that of the others, or because it may run on a second stream.
  ga_param param;
  int32_t key;  // of the parameter, see Tensor::key
  // The number of the window. Unless NULL, target is rounded stochastically with the key
  // random_key(seed, kAccumulate, *counter, contribution, key).
  const int64_t* counter;
  uint64_t seed;
  int64_t contribution;
};

// values[i] is added to row indices[i] of target.
struct RowsTask {
  Array target;  // rows x columns
  int64_t rows, columns;
  RowSet* set;
  bool dense;  // every row of target already holds a gradient; the set is and stays empty
  const void* indices;
  int32_t index_dtype;
  int64_t count;
  Source values;
  const MicroPlan* plan;  // replaces the scale of values unless NULL
};

// partials[chunk] <- Partial of the source; with a limit, second_squares is of the clamped source.
struct NormTask {
  GradientView gradient;
  bool f64;
  int64_t count;
  Partial* partials;
};

// sums[chunk] <- the binned sum of squares of the source. On the CPU alone.
struct BinnedTask {
  Source source;
  bool f64;
  int64_t count;
  BinnedSum* sums;
};

// Over all units of a parameter: squares of the clipped gradient, and the smallest factor.
struct UnitTotals {
  double squares, smallest;
};

// Sums over the units of a parameter, and the factors of adaptive clipping.
//   sums[unit]        squares of the gradient before it is multiplied by the factor
//   param_sums[unit]  squares of the parameter, read in the same pass
//   factors[unit]     multiplies the unit; includes unit_scale()
struct UnitTask {
  GradientView gradient;
  Source param;  // data NULL: gradient sums alone, no factors
  bool f64;
  const UnitPattern* pattern;
  double* sums;  // pattern->sums()
  double* param_sums;
  void* factors;  // of the compute type
  UnitTotals* totals;
  int64_t cut;         // totals: after so many units sums begin anew; 0: nowhere
  double factor, eps;  // ga_clip.agc_factor, agc_eps
};

// For every matrix of the last two axes, updates rows and columns, EMAs of the gradient's mean
// squares, with plan->factor_gain; scales <- 1 / max(mean of rows, plan->factor_floor).
// columns NULL: rows <- rows + mean of the squares of the gradient, and nothing else.
struct FactorTask {
  const ParamPlan* plan;
  GradientView gradient;  // not yet clipped by norm: the kernel multiplies by plan->factor
  const UnitPattern* row_pattern;
  const UnitPattern* column_pattern;
  double* row_sums;
  double* column_sums;
  bool f64;
  void* rows;  // like columns and scales of the compute type
  void* columns;
  void* scales;
  int64_t row_count, column_count, matrices;
};

// Where an update writes that leaves what it reads as it is: arrays of the same formats. Those of f32 and f64
// lie at multiples of 64 bytes.
struct Targets {
  Array param, state[kMaxSlots], copy, average;
  float* scales[kMaxSlots];  // of states of codes
  Array emitted;             // of a first pass, of the compute type; may be that of param
  bool stream;               // stores bypass the caches
};

// param, state <- op(param, gradient, state). The same pass writes copy and average.
struct UpdateTask {
  const ParamPlan* plan;
  int64_t count;
  GradientView gradient;
  int op;             // position in AllOps; -1: no Op
  bool f64;           // computed in double
  bool padded_state;  // the state arrays are padded to a whole cache line
  bool stochastic;    // round param and copy stochastically, as state and average always are
  // Before param is read, its elements that do not round to those of copy become the latter (kFollowed). This
  // holds whether or not the update is taken back: param then rounds to what the program has written.
  bool follows;
  Array param;
  Array state[kMaxSlots];
  float* scales[kMaxSlots];  // of states of codes, one for each code_block elements
  Array copy;       // the 16-bit parameter, if param is the master weights; data NULL: none
  Array average;    // EMA: average + average_gain (param - average); data NULL: none
  Array delivered;  // target of the gradient under kDeliver
  int64_t first;  // index of the first element in the gradient; on a device also in the random bits
  int64_t drawn;  // index of the first element in the random bits, on the CPU
  const RowSet* rows;  // under kUpdateRows
  int64_t columns;
  int32_t code_block;           // a power of two
  const FactorTask* row_state;  // of an Op with state by rows, where the kernels read it; else NULL
  Partial* partials;            // measure: sum_squares of x[0], second_squares of x[1]
  int64_t cut;    // measure: after so many elements chunks begin anew; 0: nowhere, as on a device
  void* emitted;  // measure: x[0] if Op::emits, of the compute type

  GA_HD int64_t stretch() const { return cut > 0 ? cut : count > 0 ? count : 1; }
};

// target <- gradient, or the constant if there is none.
struct FinishTask {
  GradientView gradient;  // its source may have no data
  double constant;
  bool f64;
  Array target;
  int64_t count;
  const int64_t* contributed;  // ParamState::contributed, where only the device knows; else NULL

  GA_HD bool has_gradient() const {
    return gradient.source.data && (!contributed || *contributed != 0);
  }
};

// target [m x n] <- [target +] scale / *divisor a b, row-major, in f32. divisor NULL: 1. On a device,
// `batch` such products, whose matrices are so many elements apart; 0 and 1: one.
struct MatmulTask {
  int64_t m, n, k;
  const void* a;
  int64_t lda;
  bool transpose_a;
  const void* b;
  int64_t ldb;
  bool transpose_b;
  int32_t dtype;  // of a and b
  bool tf32;      // f32 factors may be rounded to TF32, see Backend::prepare_matmul()
  float* target;
  Partial* partials;
  double scale;
  const double* divisor;
  bool keep;
  bool symmetric;  // the product is, and the target: one half of it tells the other
  int64_t batch, a_stride, b_stride, target_stride;
};

// Newton-Schulz iterations on each matrix of a tensor: X <- X / norm, then `steps` times
// X <- a X + (b G + c G G) X, G = X X'. The result takes the place of x. What comes before and after:
// ops/muon.hpp.
struct OrthogonalizeTask {
  const ParamPlan* plan;  // orthogonal_scale: 1 / norm, of a tensor that is one matrix
  float* x;               // the tensor, f32
  Cut cut;
  int steps;
  NewtonSchulzTable table;
  double eps;  // the smallest norm
  ga_equilibrate equilibrate;
  float* variances;  // one for each output of each matrix; NULL: without beta2
  double beta2;
  ga_precision precision;  // of the factors of products
  float* scratch;          // scratch_size() floats

  // Whether the norms of the matrices are not that of the tensor, which orthogonal_scale has.
  bool has_own_norms() const { return cut.matrices > 1 || equilibrate != GA_EQUILIBRATE_NONE; }

  // How many matrices are made at once where there are many: as many as have room in this much scratch.
  static int64_t at_once(const Cut& cut) {
    constexpr int64_t kMost = int64_t{1} << 24;
    const int64_t most = kMost / (room(cut) > 0 ? room(cut) : 1);
    return most < 1 ? 1 : most < cut.matrices ? most : cut.matrices;
  }
  // For one matrix, and enough for all options that a group may change: the factor of X, a number for each
  // row and column; the other X, two matrices as small as G; X where it is not packed in the tensor; for
  // bf16 the factors.
  static int64_t room(const Cut& cut) {
    const int64_t small = cut.small() * cut.small(), size = cut.size();
    const int64_t all = 2 * (1 + cut.rows + cut.columns) + size + 2 * small +
                        (cut.axes > 0 ? size : 0) + (size + small + 1) / 2;
    return (all + 15) / 16 * 16;  // whole cache lines
  }
  static int64_t scratch_size(const Cut& cut) { return at_once(cut) * room(cut); }
};

// Packed matrices, one behind the other.
struct MatrixRun {
  float* x;
  int64_t matrices, rows, columns;

  GA_HD int64_t size() const { return rows * columns; }
  GA_HD int64_t count() const { return matrices * size(); }
};

// A pass over matrices: to <- a *factor x + b y, and narrow <- to, rounded to bf16. factor NULL: 1; else
// there is one for every `each` elements. x_dtype: GA_F32 or GA_BF16. y NULL: without b y; then to may be
// x, or NULL. With b = 1, to may be y. narrow may be NULL, or x of bf16.
struct Combination {
  double a;
  const double* factor;
  const void* x;
  int32_t x_dtype;
  float b;
  const float* y;
  float* to;
  uint16_t* narrow;
  int64_t count = 0, each = 0;
};

// A pass over a micro-batch's tensors in a layer with batch normalisation. The compute type is
// double if dtype is GA_F64, else float.
struct BnTask {
  BnChannel* state;  // one per channel
  int64_t channels, samples, positions;
  bool channels_last;  // [samples, positions, channels], else [samples, channels, positions]
  int32_t mode, dtype;
  bool frozen;           // normalise by the running statistics
  const BnInput* input;  // holds the address of the history, which may move under a captured graph
  int64_t index;         // number of the micro-batch whose statistics are taken
  bool aside;            // statistics go to entry index + 1 of the history and change nothing else
  double eps;
  Array gamma, beta;  // data NULL: 1 and 0
  const void* x;
  const void* dy;
  void* out;  // y, or dx
  // bn_backward_sums: the gradients of gamma and beta, of the compute type, which go to BnChannel
  // too; WINDOW mode adds weight / *divisor times them there. divisor NULL: 1. With weight 0, x and
  // dy are not read.
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

// Statistics of a micro-batch that the program has taken itself.
struct BnGiven {
  int64_t count;
  Array mean, spread;  // one element per channel
  bool squares;        // spread: sums of squared deviations, else these sums / count
  bool known;          // take the entry of the history instead; the other fields are ignored
};

template <class T>
struct Span {
  T* data;
  size_t size;
};

// An array that the host writes and the kernels read, each by its own address (equal on the CPU).
struct Mirror {
  void* host = nullptr;
  void* at = nullptr;
  size_t bytes = 0;
};

// A word of a mirror: its address for the kernels, and the value that the host wrote.
struct Word {
  uint64_t* at;
  uint64_t value;
};

// The tasks of the calls that name parameters: one of each kind per parameter, in mirrors.
struct TaskTables {
  const UpdateTask* updates = nullptr;   // the first four: for the host
  const UpdateTask* measures = nullptr;  // of layer-wise Ops
  const UnitTask* units = nullptr;
  const FactorTask* factored = nullptr;
  // For the kernels.
  const UpdateTask* updates_at = nullptr;
  const UpdateTask* measures_at = nullptr;
  const UnitTask* units_at = nullptr;
  const FactorTask* factored_at = nullptr;
};

}  // namespace ga
