// SPDX-License-Identifier: Apache-2.0
// An Op is the update formula for one element:
//
//     struct Op : ElementWise {
//       using Real = T;                                    // float, or double for f64 parameters
//       static constexpr int slots = 2;                    // state values per element
//       static constexpr SlotNames slot_names = {"exp_avg", "exp_avg_sq"};  // torch's, in any flavor
//       GA_HD Op(const ga_optimizer&, const StepInput&);   // folds the hyper-parameters, in double
//       GA_HD T operator()(T p, T g, T* state) const;      // the new p; state is updated in place
//     };
//
// It is trivially copyable and knows no pointer, index, dtype or loop. A mode is a template flag or
// another Op. The loops (one file for the CPU, one for CUDA) are instantiated for every Op of every
// optimizer in ops/all.hpp.
//
// The Op of a layer-wise optimizer, struct Op : LayerWise, has a pass before that one, over the
// same elements, which may update state and takes norms over the whole parameter:
//
//       static constexpr int norms = 2;                    // 1 or 2
//       static constexpr Pass measuring = {...};           // what each of the two passes touches
//       static constexpr Pass updating = {...};
//       GA_HD void measure(T p, T g, T* state, T* x) const;  // the norms are those of x[0], x[1]
//
// The Op is folded before each pass, the second time with StepInput::norm. Where it emits, x[0] is
// kept, in the accumulator, and is the gradient of the second pass.
//
// An optimizer is a header beside this one; lion.hpp is the one to copy, lamb.hpp where it is
// layer-wise (all.hpp has the whole list of what a new one needs):
//
//     struct Lion : OptimizerBase {
//       static constexpr int32_t kind = GA_OPTIMIZER_LION;
//       static constexpr const char* name = "Lion";
//       template <class T> using Ops = TypeList<...>;
//       static bool has_flavor(int32_t flavor);
//       static void defaults(ga_optimizer&);               // for optimizer.flavor
//       static void check(const ga_optimizer&);            // throws Error
//       static int select(const ga_optimizer&, bool matrix);  // which of Ops; matrix: rank >= 2
//     };
#pragma once

#include <math.h>

#include <cstdint>

#include "gradaccum/gradaccum.h"
#include "hd.hpp"

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

// Applied steps, of a parameter or of the context, and running products over them: beta^t, never by
// pow. All zeros before the first.
struct Clock {
  int64_t step;
  double beta1_power, beta2_power;
  double own[2];  // products of the optimizer's own, see OptimizerBase::advance

  GA_HD void advance(const ga_optimizer& o) {
    if (step == 0) beta1_power = beta2_power = own[0] = own[1] = 1;
    ++step;
    beta1_power = next(beta1_power, o.beta1);
    beta2_power = next(beta2_power, o.beta2);
  }

  // Zero before it is subnormal: multiplying such numbers, for ever, is slow.
  GA_HD static double next(double power, double factor) {
    const double product = power * factor;
    return product < 1e-290 ? 0 : product;
  }
};

// What changes from step to step, and from parameter to parameter. clock is that of the step being
// taken, so its first step is 1.
struct StepInput {
  double lr;
  Clock clock;
  // Of layer-wise optimizers alone:
  int64_t rows, columns;  // shape[0], and the product of the other extents
  double gradient_norm;   // 2-norm of the parameter's gradient as the Op sees it
  double norm[2];         // 2-norms of what measure() gave; 0 before it has run
};

// What a pass touches.
struct Pass {
  bool gradient, reads_state, writes_state;
  bool parameter = true;
};

constexpr int kMaxSlots = 3;

// What torch.optim calls the state, or timm where torch lacks the optimizer: the key under which the
// state of a parameter is kept. Null behind the last. What can be computed anew has no name.
struct SlotNames {
  const char* of[kMaxSlots];
};

struct ElementWise {
  static constexpr SlotNames slot_names = {};
  static constexpr int norms = 0;
  static constexpr Pass measuring = {false, false, false};
  static constexpr Pass updating = {true, true, true};
  // The state is not the slots element by element, but for each matrix of the last two axes a
  // vector over its rows and one over its columns, the moving averages of the means of g^2; the one
  // slot that the Op sees is their product over the mean of the former, and it only reads it.
  static constexpr bool factored = false;
  static constexpr bool emits = false;
  static constexpr bool reads_gradient_norm = false;  // StepInput::gradient_norm
  // What is emitted is made orthogonal as a matrix, after division by its norm.
  static constexpr bool orthogonal = false;
};

struct LayerWise : ElementWise {
  static constexpr int norms = 2;
};

// Throws Error unless low <= value < high, or value == high where that is legal, and value is finite.
// For fields that check_optimizer() does not look at itself.
void check_range(const char* optimizer, const char* name, double value, double low, double high,
                 bool high_is_legal = false);

// What holds for most optimizers.
struct OptimizerBase {
  static constexpr bool bf16_state = true;
  static constexpr bool matrices_only = false;
  // Whether max_grad_norm is for it.
  static constexpr bool limits_norm = false;
  static bool has_flavor(int32_t flavor) { return flavor == GA_FLAVOR_TORCH; }
  static void check(const ga_optimizer&) {}
  static int select(const ga_optimizer&, bool) { return 0; }
  // Whether rows without a gradient can be left alone, their state with them.
  static bool lazy(const ga_optimizer&) { return false; }
  // What the state of a new parameter begins with.
  static double initial(const ga_optimizer&, int) { return 0; }
  GA_HD static void advance(const ga_optimizer& o, Clock& clock) { clock.advance(o); }
  // Of ADAFACTOR: the share of the new mean of g^2 in the moving average; the least mean of rows.
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
