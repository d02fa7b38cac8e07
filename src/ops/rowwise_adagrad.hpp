// SPDX-License-Identifier: Apache-2.0
// Row-wise Adagrad, as FBGEMM's EXACT_ROWWISE_ADAGRAD and torchrec's RowWiseAdagrad: Adagrad (Duchi,
// Hazan & Singer 2011) with one number of state for each row of D elements:
//
//   s <- s + (sum over the row of g^2) / D
//   p <- keep p - lr / (sqrt(s) + eps) g
// with FBGEMM's decoupled decay, keep = 1 - lr wd. The loops add the mean to s.
#pragma once

#include "ops/decay.hpp"

namespace ga {

template <class T>
struct RowwiseAdagradOp : ElementWise {
  using Real = T;
  static constexpr int slots = 1;
  static constexpr SlotNames slot_names = {"sum"};
  static constexpr bool row_state = true;
  static constexpr Pass updating = {true, true, false};
  Decay<T> decay;
  T eps, lr;

  GA_HD RowwiseAdagradOp(const ga_optimizer& o, const StepInput& in)
      : decay(o, in, true), eps(T(o.eps)), lr(T(in.lr)) {}

  GA_HD T operator()(T p, T g, T* state) const {
    return decay.keep * p - lr / (square_root(state[0]) + eps) * g;
  }
};

struct RowwiseAdagrad : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_ROWWISE_ADAGRAD;
  static constexpr const char* name = "row-wise Adagrad";
  static constexpr bool bf16_state = false;
  template <class T>
  using Ops = TypeList<RowwiseAdagradOp<T>>;

  static void defaults(ga_optimizer& o) {
    o.lr = 1e-2;
    o.eps = 1e-10;
  }

  static bool lazy(const ga_optimizer&) { return true; }
  static double initial(const ga_optimizer& o, int) { return o.initial_accumulator; }
};

}  // namespace ga
