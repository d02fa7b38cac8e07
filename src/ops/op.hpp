// SPDX-License-Identifier: Apache-2.0
// An Op is the update formula for one element:
//
//     struct Op : ElementWise {
//       using Real = T;                                    // float, or double for f64 parameters
//       static constexpr int slots = 2;                    // state values per element
//       static constexpr SlotNames slot_names = {"exp_avg", "exp_avg_sq"};  // see SlotNames
//       GA_HD Op(const ga_optimizer&, const StepInput&);   // folds the hyper-parameters, in double
//       GA_HD T operator()(T p, T g, T* state) const;      // the new p; state is updated in place
//     };
//
// An Op is trivially copyable and knows no pointer, index, dtype or loop. A mode is a template flag
// or another Op. Kernels are instantiated for every Op of every optimizer in ops/all.hpp.
//
// The Op of a layer-wise optimizer, struct Op : LayerWise, has a first pass over the elements,
// before the update, which may write state and takes norms over the whole parameter:
//
//       static constexpr int norms = 2;                    // 1 or 2
//       static constexpr Pass measuring = {...};           // what the two passes read and write
//       static constexpr Pass updating = {...};
//       GA_HD void measure(T p, T g, T* state, T* x) const;  // the norms are those of x[0], x[1]
//
// The Op is folded before each pass, the second time with StepInput::norm. If Op::emits, x[0] is
// stored in the accumulator and becomes the gradient of the second pass.
//
// An optimizer is a header beside this one; all.hpp lists all that a new optimizer needs:
//
//     struct Lion : OptimizerBase {
//       static constexpr int32_t kind = GA_OPTIMIZER_LION;
//       static constexpr const char* name = "Lion";
//       template <class T> using Ops = TypeList<...>;
//       static bool has_flavor(int32_t flavor);
//       static void defaults(ga_optimizer&);               // for optimizer.flavor
//       static void check(const ga_optimizer&);            // throws Error
//       static int select(const ga_optimizer&, bool matrix);  // index in Ops; matrix: rank >= 2
//     };
#pragma once

#include <math.h>

#include <cstdint>

#include "core/hd.hpp"
#include "gradaccum/gradaccum.h"

namespace ga {

template <class... T>
struct TypeList {
  static constexpr int size = sizeof...(T);
};

template <class... Lists>
struct ConcatTypes;
template <class... A>
struct ConcatTypes<TypeList<A...>> {
  using type = TypeList<A...>;
};
template <class... A, class... B, class... Rest>
struct ConcatTypes<TypeList<A...>, TypeList<B...>, Rest...> {
  using type = typename ConcatTypes<TypeList<A..., B...>, Rest...>::type;
};

// Arithmetic on subnormals is slow.
GA_HD double flush_small(double x) { return x < 1e-290 ? 0 : x; }

// x^n for x in [0, 1], by squaring: its bits depend on x and n alone, on every platform, so that a run
// that goes on from a saved step, or with another beta, has those of one that was never interrupted.
GA_HD double power(double x, int64_t n) {
  double product = 1;
  for (; n > 0; n >>= 1) {
    if (n & 1) product *= x;
    x = x < 1e-145 ? 0 : x * x;
  }
  return flush_small(product);
}

// Applied steps of a parameter or of the context, and what an optimizer keeps of them: see
// OptimizerBase::clock_numbers. All zeros before the first step.
constexpr int kClockNumbers = 2;
struct Clock {
  int64_t step;
  double numbers[kClockNumbers];

  GA_HD bool operator==(const Clock& c) const {
    return step == c.step && numbers[0] == c.numbers[0] && numbers[1] == c.numbers[1];
  }
};
// One of them: its name in a state, as torch.optim has it (NULL: there is none), what it is before the first
// step, and the largest that it may be; the least is 0.
struct ClockNumber {
  const char* name;
  double initial, most;
};

// The numbers that change from step to step or from parameter to parameter: an Op takes lr and
// weight_decay from here, where the parameter's own factors are part of them. clock includes the
// current step, so clock.step starts at 1.
struct StepInput {
  double lr, weight_decay;
  Clock clock;
  // For layer-wise optimizers alone:
  int64_t rows, columns;  // of a matrix, else shape[0] and the product of the other dimensions
  double gradient_norm;   // 2-norm of the parameter's gradient after clipping
  double norm[2];         // 2-norms of measure()'s x[0], x[1]; 0 before the second pass
};

// What a pass reads and writes.
struct Pass {
  bool gradient, reads_state, writes_state;
  bool parameter = true;
};

constexpr int kMaxSlots = 3;

// The names of the state slots in torch.optim, whatever the flavor, or in timm if torch lacks the
// optimizer: the keys under which the state is saved. Null after the last name.
struct SlotNames {
  const char* of[kMaxSlots];
};

// How a state slot may be kept in 8 bits (GA_STATE_8BIT, backend/codes.hpp). A signed code keeps fewer
// octaves than one of numbers that are never negative. kNone: a slot that codes would spoil, and that stays f32:
// whose average is so slow, or whose differences are so small, that rounding hides what a step adds to it, or of
// which the largest value so far is taken, which rounding would raise.
enum class Code : unsigned char { kNone, kSigned, kPositive };
struct SlotCodes {
  Code of[kMaxSlots];
};
constexpr bool has_codes(const SlotCodes& codes) {
  for (const Code code : codes.of)
    if (code != Code::kNone) return true;
  return false;
}

struct ElementWise {
  static constexpr SlotNames slot_names = {};
  static constexpr SlotCodes codes = {};
  static constexpr int norms = 0;
  static constexpr Pass measuring = {false, false, false};
  static constexpr Pass updating = {true, true, true};
  // For each matrix of the last two axes, the state is an EMA of the mean of g^2 for each row and
  // for each column. The Op only reads its one slot: (row EMA) (column EMA) / (mean of row EMAs).
  static constexpr bool factored = false;
  // The one slot has a value for each row, an index of the first axis, in place of one per element. The
  // mean of g^2 over the row is added to it before the update, which only reads it.
  static constexpr bool row_state = false;
  static constexpr bool emits = false;
  static constexpr bool reads_gradient_norm = false;  // StepInput::gradient_norm
  // The emitted x[0] is divided by its norm and made orthogonal as a matrix.
  static constexpr bool orthogonal = false;
  // After the slots comes one more state, of f32, with a value for each output of each matrix.
  static constexpr bool output_state = false;
};

struct LayerWise : ElementWise {
  static constexpr int norms = 2;
};

// Throws Error unless value is finite and in [low, high), or equals high where high_is_legal. For
// fields that check_optimizer() does not check itself.
void check_range(const char* optimizer, const char* name, double value, double low, double high,
                 bool high_is_legal = false);

// Defaults that suit most optimizers.
struct OptimizerBase {
  static constexpr bool bf16_state = true;
  static constexpr bool matrices_only = false;
  // Whether the optimizer reads max_grad_norm.
  static constexpr bool limits_norm = false;
  static bool has_flavor(int32_t flavor) { return flavor == GA_FLAVOR_TORCH; }
  static void check(const ga_optimizer&) {}
  static int select(const ga_optimizer&, bool) { return 0; }
  // Whether an update may skip rows without a gradient, and their state.
  static bool lazy(const ga_optimizer&) { return false; }
  static constexpr ClockNumber clock_numbers[kClockNumbers] = {};
  // Of an optimizer whose parameter lies between its average x, which is not stored, and its first state z,
  // x + (1 - share) (z - x): the share. 0: it has no average of its own.
  static double share_of_average(const ga_optimizer&) { return 0; }
  // The initial value of a state slot.
  static double initial(const ga_optimizer&, int) { return 0; }
  // lr: the group's learning rate in this step.
  GA_HD static void advance(const ga_optimizer&, Clock& clock, double lr) {
    (void)lr, ++clock.step;
  }
  // For factored state: the weight of the new mean of g^2 in the EMAs; the smallest mean row EMA.
  GA_HD static double factor_gain(const ga_optimizer&, const Clock&) { return 0; }
  GA_HD static double factor_floor(const ga_optimizer&) { return 0; }
};

GA_HD float square_root(float x) { return sqrtf(x); }
GA_HD double square_root(double x) { return sqrt(x); }
GA_HD float absolute(float x) { return fabsf(x); }
GA_HD double absolute(double x) { return fabs(x); }
template <class T>
GA_HD T larger(T a, T b) {
  return a > b ? a : b;
}
template <class T>
GA_HD T sign(T x) {
  return T(x > T(0)) - T(x < T(0));
}

}  // namespace ga
