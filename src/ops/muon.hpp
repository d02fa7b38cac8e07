// SPDX-License-Identifier: Apache-2.0
// Muon (Jordan et al. 2024), as torch.optim.Muon, for a matrix of R outputs and C inputs:
//
//   b <- mu b + (1 - mu) g
//   X = mu b + (1 - mu) g with Nesterov, else b;  O = X made orthogonal by Newton-Schulz
//   p <- (1 - lr wd) p - lr s O
//
//   s   ORIGINAL sqrt(max(1, R / C))   MATCH_RMS 0.2 sqrt(max(R, C))   NONE 1
//
// Cautious (Chen et al. 2025, arXiv 2510.12402): wd is 0 for elements whose p and O have opposite signs.
//
// Before it is divided by its norm, X may be equilibrated: elements are divided by the norm of their output,
// of their input or of both (MuonEq, Chang et al. 2026, arXiv 2603.28254). With beta2, in place of O
// (NorMuon, Li et al. 2025, arXiv 2510.05491, with the norm of the matrix kept as in modded-nanogpt):
//
//   v_r <- beta2 v_r + (1 - beta2) mean of O_r^2;  N_r = O_r / sqrt(v_r);  O_r <- N_r |O| / |N|
//
// Passes: the first reads g, b, writes b, writes X over g and takes the norm of X; the second reads
// p and O and writes p.
#pragma once

#include <cmath>

#include "core/error.hpp"
#include "ops/decay.hpp"

namespace ga {

// The coefficients a, b, c of each iteration.
struct NewtonSchulzTable {
  const double* data;
  int32_t rows;

  const double* operator[](int iteration) const {
    return data + 3 * (iteration < rows ? iteration : rows - 1);
  }
};

// X is divided by its norm times 1.02, a factor that the first row contains here.
constexpr double kCushion = 1.02, kCushion3 = kCushion * kCushion * kCushion;
constexpr double kPolarExpress[5][3] = {
    {8.156554524902461 / kCushion, -22.48329292557795 / kCushion3,
     15.878769915207462 / (kCushion3 * kCushion * kCushion)},
    {4.042929935166739, -2.808917465908714, 0.5000178451051316},
    {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
    {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
    {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}};
constexpr double kYou[5][3] = {{4.0848, -6.8946, 2.9270},
                               {3.9505, -6.3029, 2.6377},
                               {3.7418, -5.5913, 2.3037},
                               {2.8769, -3.1427, 1.2046},
                               {2.8366, -3.0525, 1.2012}};

// What a matrix is multiplied by before the first iteration, from the squares of its elements.
GA_HD double reciprocal_norm(double squares, double eps) {
  const double norm = larger(square_root(squares), eps);
  return norm > 0 ? 1 / norm : 0;
}

inline NewtonSchulzTable newton_schulz_table(const ga_optimizer& o) {
  if (o.ns_preset == GA_NS_POLAR_EXPRESS) return {kPolarExpress[0], 5};
  if (o.ns_preset == GA_NS_YOU) return {kYou[0], 5};
  if (o.ns_table) return {o.ns_table, o.ns_rows};
  return {o.ns_coefficients, 1};
}

// Of MUON with beta2: the mean square of an output's update, and what the update is multiplied by before
// its matrix gets its norm back.
GA_HD float next_variance(float variance, double mean, double beta2) {
  return static_cast<float>(variance + (1 - beta2) * (mean - static_cast<double>(variance)));
}
GA_HD double variance_scale(float variance) {
  constexpr double kLeast = 1e-10;
  return 1 / square_root(larger(static_cast<double>(variance), kLeast));
}

template <class T, bool kVariance>
struct MuonOp : LayerWise {
  using Real = T;
  static constexpr int slots = 1;
  static constexpr SlotNames slot_names = {
      {"momentum_buffer", kVariance ? "second_momentum_buffer" : nullptr}};
  static constexpr SlotCodes codes = {Code::kSigned};
  static constexpr int norms = 1;
  static constexpr bool emits = true;
  static constexpr bool orthogonal = true;
  static constexpr bool output_state = kVariance;
  static constexpr Pass measuring = {true, true, true, false};
  static constexpr Pass updating = {true, false, false};
  Decay<T> decay;
  T keep_away, mu, gain, of_b, of_g, lr;

  GA_HD MuonOp(const ga_optimizer& o, const StepInput& in)
      : decay(o, in, true),
        keep_away(o.cautious ? T(1) : decay.keep),
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

  GA_HD T operator()(T p, T g, T*) const {
    const bool away = ((p < T(0)) & (g > T(0))) | ((p > T(0)) & (g < T(0)));
    return (away ? keep_away : decay.keep) * p - lr * g;
  }
};

struct Muon : OptimizerBase {
  static constexpr int32_t kind = GA_OPTIMIZER_MUON;
  static constexpr const char* name = "Muon";
  static constexpr bool matrices_only = true;
  static constexpr int32_t kMostRows = 99;  // of ns_table
  template <class T>
  using Ops = TypeList<MuonOp<T, false>, MuonOp<T, true>>;  // without and with beta2

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

  static int select(const ga_optimizer& o, bool) { return o.beta2 > 0; }

  static void check(const ga_optimizer& o) {
    const auto choice = [](const char* name, int32_t value, int32_t last, const char* type) {
      if (value < 0 || value > last)
        fail(GA_ERROR_INVALID_ARGUMENT, "Muon: %s was %d, expected 0 to %d (%s)", name, value, last,
             type);
    };
    for (int i = 0; i < 3; ++i)
      if (!std::isfinite(o.ns_coefficients[i]))
        fail(GA_ERROR_INVALID_ARGUMENT,
             "Muon: ns_coefficients[%d] was %g, expected a finite number", i, o.ns_coefficients[i]);
    if (o.ns_steps < 1 || o.ns_steps > 99)
      fail(GA_ERROR_INVALID_ARGUMENT, "Muon: ns_steps was %d, expected 1 to 99", o.ns_steps);
    choice("adjust_lr", o.adjust_lr, GA_ADJUST_NONE, "ga_adjust_lr");
    choice("ns_precision", o.ns_precision, GA_PRECISION_BF16, "ga_precision");
    choice("ns_preset", o.ns_preset, GA_NS_POLAR_EXPRESS, "ga_newton_schulz");
    choice("cautious", o.cautious, 1, "0 or 1");
    choice("equilibrate", o.equilibrate, GA_EQUILIBRATE_BOTH, "ga_equilibrate");
    if ((o.ns_table == nullptr) != (o.ns_rows == 0) || o.ns_rows < 0 || o.ns_rows > kMostRows)
      fail(GA_ERROR_INVALID_ARGUMENT, "Muon: ns_rows was %d, expected %s", o.ns_rows,
           o.ns_table ? "1 to 99" : "0, since ns_table was NULL");
    if (o.ns_table && o.ns_preset != GA_NS_OWN)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "Muon: ns_preset was %d, but there is an ns_table, which it would replace", o.ns_preset);
    for (int32_t i = 0; i < 3 * o.ns_rows; ++i)
      if (!std::isfinite(o.ns_table[i]))
        fail(GA_ERROR_INVALID_ARGUMENT, "Muon: ns_table[%d][%d] was %g, expected a finite number",
             i / 3, i % 3, o.ns_table[i]);
  }
};

}  // namespace ga
