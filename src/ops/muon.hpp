// SPDX-License-Identifier: Apache-2.0
// Muon (Jordan et al. 2024), as torch.optim.Muon, for a matrix of R rows and C columns:
//
//   b <- mu b + (1 - mu) g
//   X = mu b + (1 - mu) g with Nesterov, else b;  O = X made orthogonal by Newton-Schulz
//   p <- (1 - lr wd) p - lr s O
//
//   s   ORIGINAL sqrt(max(1, R / C))   MATCH_RMS 0.2 sqrt(max(R, C))   NONE 1
//
// Passes: the first reads g, b, writes b, writes X over g and takes the norm of X; the second reads
// p and O and writes p.
#pragma once

#include <cmath>

#include "core/error.hpp"
#include "ops/decay.hpp"

namespace ga {

template <class T>
struct MuonOp : LayerWise {
  using Real = T;
  static constexpr int slots = 1;
  static constexpr SlotNames slot_names = {"momentum_buffer"};
  static constexpr int norms = 1;
  static constexpr bool emits = true;
  static constexpr bool orthogonal = true;
  static constexpr Pass measuring = {true, true, true, false};
  static constexpr Pass updating = {true, false, false};
  Decay<T> decay;
  T mu, gain, of_b, of_g, lr;

  GA_HD MuonOp(const ga_optimizer& o, const StepInput& in)
      : decay(o, in, true),
        mu(T(o.momentum)),
        gain(T(1 - o.momentum)),
        of_b(T(o.nesterov ? o.momentum : 1)),
        of_g(T(o.nesterov ? 1 - o.momentum : 0)) {
    const double rows = static_cast<double>(in.rows), columns = static_cast<double>(in.columns);
    double scale = 1;
    if (o.adjust_lr == GA_ADJUST_ORIGINAL) scale = square_root(larger(1.0, rows / columns));
    if (o.adjust_lr == GA_ADJUST_MATCH_RMS) scale = 0.2 * square_root(larger(rows, columns));
    lr = T(in.lr * scale);
  }

  GA_HD void measure(T, T g, T* state, T* x) const {
    const T b = mu * state[0] + gain * g;
    state[0] = b;
    x[0] = of_b * b + of_g * g;
  }

  GA_HD T operator()(T p, T g, T*) const { return decay.keep * p - lr * g; }
};

struct Muon : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_MUON;
  static constexpr const char* name = "Muon";
  static constexpr bool matrices_only = true;
  template <class T>
  using Ops = TypeList<MuonOp<T>>;

  static void defaults(ga_optimizer& o) {
    o.lr = 1e-3;
    o.weight_decay = 0.1;
    o.momentum = 0.95;
    o.nesterov = 1;
    o.eps = 1e-7;
    o.ns_coefficients[0] = 3.4445;
    o.ns_coefficients[1] = -4.7750;
    o.ns_coefficients[2] = 2.0315;
    o.ns_steps = 5;
    o.adjust_lr = GA_ADJUST_ORIGINAL;
  }

  static void check(const ga_optimizer& o) {
    for (int i = 0; i < 3; ++i)
      if (!std::isfinite(o.ns_coefficients[i]))
        fail(GA_ERROR_INVALID_ARGUMENT,
             "Muon: ns_coefficients[%d] was %g, expected a finite number", i, o.ns_coefficients[i]);
    if (o.ns_steps < 1 || o.ns_steps > 99)
      fail(GA_ERROR_INVALID_ARGUMENT, "Muon: ns_steps was %d, expected 1 to 99", o.ns_steps);
    if (o.adjust_lr < GA_ADJUST_ORIGINAL || o.adjust_lr > GA_ADJUST_NONE)
      fail(GA_ERROR_INVALID_ARGUMENT, "Muon: adjust_lr was %d, expected 0 to 2 (ga_adjust_lr)",
           o.adjust_lr);
    if (o.ns_precision < GA_PRECISION_F32 || o.ns_precision > GA_PRECISION_BF16)
      fail(GA_ERROR_INVALID_ARGUMENT, "Muon: ns_precision was %d, expected 0 to 2 (ga_precision)",
           o.ns_precision);
  }
};

}  // namespace ga
