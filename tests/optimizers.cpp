// SPDX-License-Identifier: Apache-2.0
#include "optimizers.hpp"

#include <cmath>

namespace ga::test {

namespace {

using O = ga_optimizer&;
using Const = const ga_optimizer&;
using Row = OptimizerRow;
using Field = OptimizerField;

constexpr int32_t torch = GA_FLAVOR_TORCH, keras = GA_FLAVOR_KERAS, bert = GA_FLAVOR_BERT;

Field lr(double x) { return {"lr", &ga_optimizer::lr, x}; }
Field decay(double x) { return {"weight_decay", &ga_optimizer::weight_decay, x}; }
Field momentum(double x) { return {"momentum", &ga_optimizer::momentum, x}; }
Field nesterov(int32_t x) { return {"nesterov", &ga_optimizer::nesterov, x}; }
Field beta1(double x) { return {"beta1", &ga_optimizer::beta1, x}; }
Field beta2(double x) { return {"beta2", &ga_optimizer::beta2, x}; }
Field eps(double x) { return {"eps", &ga_optimizer::eps, x}; }
Field rho(double x) { return {"rho", &ga_optimizer::rho, x}; }
Field accumulator(double x) {
  return {"initial_accumulator", &ga_optimizer::initial_accumulator, x};
}
Field momentum_decay(double x) { return {"momentum_decay", &ga_optimizer::momentum_decay, x}; }
Field max_grad_norm(double x) { return {"max_grad_norm", &ga_optimizer::max_grad_norm, x}; }
Field trust(double x) { return {"trust_coefficient", &ga_optimizer::trust_coefficient, x}; }
Field eps2(double x) { return {"eps2", &ga_optimizer::eps2, x}; }
Field beta2_decay(double x) { return {"beta2_decay", &ga_optimizer::beta2_decay, x}; }
Field threshold(double x) { return {"clip_threshold", &ga_optimizer::clip_threshold, x}; }
Field ns_steps(int32_t x) { return {"ns_steps", &ga_optimizer::ns_steps, x}; }
Field beta3(double x) { return {"beta3", &ga_optimizer::beta3, x}; }
Field clip_exponent(double x) { return {"clip_exponent", &ga_optimizer::clip_exponent, x}; }
Field alpha(double x) { return {"alpha", &ga_optimizer::alpha, x}; }
Field average_lr_power(double x) {
  return {"average_lr_power", &ga_optimizer::average_lr_power, x};
}

Row sgd() {
  Row r = {GA_OPTIMIZER_SGD, "SGD", "sgd"};
  r.state = [](Const o, bool) { return o.momentum != 0 ? "momentum_buffer" : ""; };
  r.lazy = [](Const o) { return o.dampening == 0; };
  r.stands_for_others = true;
  r.paired = {torch};
  r.add_defaults(torch, {lr(1e-3)});
  r.add_defaults(keras, {lr(1e-2)});
  r.add("Sgd", torch, 0.05, [](O) {});
  r.add("SgdDecay", torch, 0.05, [](O o) { o.weight_decay = 0.1; });
  r.add("SgdMomentum", torch, 0.05, [](O o) { o.momentum = 0.9; });
  r.add("SgdDampening", torch, 0.05,
        [](O o) { o.momentum = 0.9, o.dampening = 0.5, o.weight_decay = 0.01; });
  r.add("SgdNesterov", torch, 0.05,
        [](O o) { o.momentum = 0.9, o.nesterov = 1, o.weight_decay = 0.01; });
  r.add("SgdMaximize", torch, 0.05,
        [](O o) { o.momentum = 0.5, o.maximize = 1, o.weight_decay = 0.01; });
  r.add("SgdKeras", keras, 0.05, [](O o) { o.weight_decay = 0.1; });
  r.add("SgdKerasMomentum", keras, 0.05, [](O o) { o.momentum = 0.9, o.weight_decay = 0.01; });
  r.add("SgdKerasNesterov", keras, 0.05,
        [](O o) { o.momentum = 0.9, o.nesterov = 1, o.maximize = 1; });
  r.refuses(torch, {"momentum", "-0.25"}, [](O o) { o.momentum = -0.25; });
  r.refuses(keras, {"momentum", "nan"}, [](O o) { o.momentum = NAN; });
  r.refuses(torch, {"dampening", "-1"}, [](O o) { o.momentum = 0.5, o.dampening = -1; });
  r.refuses(torch, {"dampening", "1.5"}, [](O o) { o.momentum = 0.5, o.dampening = 1.5; });
  r.refuses(torch, {"dampening", "nan"}, [](O o) { o.momentum = 0.5, o.dampening = NAN; });
  r.refuses(keras, {"dampening", "0.25"}, [](O o) { o.momentum = 0.5, o.dampening = 0.25; });
  r.refuses(torch, {"nesterov", "2"}, [](O o) { o.momentum = 0.5, o.nesterov = 2; });
  r.refuses(torch, {"nesterov", "momentum"}, [](O o) { o.nesterov = 1; });
  r.refuses(torch, {"nesterov", "dampening", "0.125"},
            [](O o) { o.momentum = 0.5, o.nesterov = 1, o.dampening = 0.125; });
  r.refuses(keras, {"nesterov", "momentum"}, [](O o) { o.nesterov = 1; });
  return r;
}

Row adam() {
  Row r = {GA_OPTIMIZER_ADAM, "Adam", "adam"};
  r.state = [](Const o, bool) {
    return o.amsgrad ? "exp_avg exp_avg_sq max_exp_avg_sq" : "exp_avg exp_avg_sq";
  };
  r.lazy = [](Const) { return true; };
  r.paired = {torch, keras};
  r.add_defaults(torch, {lr(1e-3), beta1(0.9), beta2(0.999), eps(1e-8)});
  r.add_defaults(keras, {lr(1e-3), beta1(0.9), beta2(0.999), eps(1e-7)});
  r.add("Adam", torch, 1e-2, [](O) {});
  r.add("AdamDecay", torch, 1e-2, [](O o) { o.weight_decay = 0.1; });
  r.add("AdamAmsgrad", torch, 1e-2, [](O o) { o.amsgrad = 1; });
  r.add("AdamDecayAmsgrad", torch, 1e-2,
        [](O o) { o.amsgrad = 1, o.weight_decay = 0.1, o.maximize = 1; });
  r.add("AdamBetas", torch, 1e-2, [](O o) { o.beta1 = 0, o.beta2 = 0.5, o.eps = 1e-3; });
  r.add("AdamKeras", keras, 1e-2, [](O) {});
  r.add("AdamKerasDecay", keras, 1e-2, [](O o) { o.weight_decay = 0.1, o.amsgrad = 1; });
  r.refuses(torch, {"beta1", "1"}, [](O o) { o.beta1 = 1; });
  r.refuses(keras, {"beta1", "-0.1"}, [](O o) { o.beta1 = -0.1; });
  r.refuses(torch, {"beta2", "nan"}, [](O o) { o.beta2 = NAN; });
  r.refuses(torch, {"eps", "-1e-08"}, [](O o) { o.eps = -1e-8; });
  r.refuses(torch, {"amsgrad", "-1"}, [](O o) { o.amsgrad = -1; });
  return r;
}

Row adamw() {
  Row r = {GA_OPTIMIZER_ADAMW, "AdamW", "adamw"};
  r.state = adam().state;
  r.lazy = adam().lazy;
  r.stands_for_others = true;
  r.paired = {bert};
  r.add_defaults(torch, {lr(1e-3), decay(1e-2), beta1(0.9), beta2(0.999), eps(1e-8)});
  r.add_defaults(keras, {lr(1e-3), decay(4e-3), beta1(0.9), beta2(0.999), eps(1e-7)});
  r.add_defaults(bert, {lr(1e-3), decay(1e-2), beta1(0.9), beta2(0.999), eps(1e-6)});
  r.add("AdamW", torch, 1e-2, [](O) {});
  r.add("AdamWAmsgrad", torch, 1e-2,
        [](O o) { o.amsgrad = 1, o.maximize = 1, o.weight_decay = 0.1; });
  r.add("AdamWKeras", keras, 1e-2, [](O) {});
  r.add("AdamWBert", bert, 1e-2, [](O) {});
  r.refuses(bert, {"beta1", "nan"}, [](O o) { o.beta1 = NAN; });
  r.refuses(torch, {"beta2", "1"}, [](O o) { o.beta2 = 1; });
  r.refuses(keras, {"beta2", "1.5"}, [](O o) { o.beta2 = 1.5; });
  r.refuses(bert, {"eps", "nan"}, [](O o) { o.eps = NAN; });
  r.refuses(bert, {"AdamW", "amsgrad"}, [](O o) { o.amsgrad = 1; });
  return r;
}

// The program's own optimizer, which has no formula.
Row external() {
  Row r = {GA_OPTIMIZER_EXTERNAL, "external", nullptr};
  r.add_defaults(torch, {});
  return r;
}

Row rmsprop() {
  Row r = {GA_OPTIMIZER_RMSPROP, "RMSprop", "rmsprop"};
  r.state = [](Const o, bool) {
    if (o.centered)
      return o.momentum != 0 ? "square_avg grad_avg momentum_buffer" : "square_avg grad_avg";
    return o.momentum != 0 ? "square_avg momentum_buffer" : "square_avg";
  };
  r.add_defaults(torch, {lr(1e-2), rho(0.99), eps(1e-8)});
  r.add_defaults(keras, {lr(1e-3), rho(0.9), eps(1e-7)});
  r.add("Rmsprop", torch, 1e-2, [](O) {});
  r.add("RmspropMomentum", torch, 1e-2,
        [](O o) { o.momentum = 0.9, o.rho = 0.9, o.weight_decay = 0.1; });
  r.add("RmspropCentered", torch, 1e-2, [](O o) { o.centered = 1, o.eps = 1e-4, o.maximize = 1; });
  r.add("RmspropCenteredMomentum", torch, 1e-2,
        [](O o) { o.centered = 1, o.momentum = 0.5, o.eps = 1e-4; });
  r.add("RmspropKeras", keras, 1e-2, [](O o) { o.weight_decay = 0.1; });
  r.add("RmspropKerasMomentum", keras, 1e-2, [](O o) { o.momentum = 0.9, o.rho = 0.95; });
  r.add("RmspropKerasCentered", keras, 1e-2,
        [](O o) { o.centered = 1, o.momentum = 0.5, o.rho = 0.95; });
  r.refuses(torch, {"rho", "1"}, [](O o) { o.rho = 1; });
  r.refuses(keras, {"momentum", "-1"}, [](O o) { o.momentum = -1; });
  r.refuses(torch, {"centered", "2"}, [](O o) { o.centered = 2; });
  return r;
}

Row adagrad() {
  Row r = {GA_OPTIMIZER_ADAGRAD, "Adagrad", "adagrad"};
  r.state = [](Const, bool) { return "sum"; };
  r.lazy = [](Const) { return true; };
  r.paired = {torch};
  r.add_defaults(torch, {lr(1e-2), eps(1e-10)});
  r.add_defaults(keras, {lr(1e-3), accumulator(0.1), eps(1e-7)});
  r.add("Adagrad", torch, 0.05, [](O) {});
  r.add("AdagradDecays", torch, 0.05,
        [](O o) { o.lr_decay = 0.1, o.weight_decay = 0.1, o.initial_accumulator = 0.3; });
  r.add("AdagradMaximize", torch, 0.05, [](O o) { o.eps = 1e-3, o.maximize = 1; });
  r.add("AdagradKeras", keras, 0.05, [](O) {});
  r.add("AdagradKerasDecay", keras, 0.05,
        [](O o) { o.initial_accumulator = 0, o.eps = 1e-3, o.weight_decay = 0.1; });
  r.refuses(torch, {"lr_decay", "-1"}, [](O o) { o.lr_decay = -1; });
  r.refuses(torch, {"lr_decay", "nan"}, [](O o) { o.lr_decay = NAN; });
  r.refuses(keras, {"Adagrad", "lr_decay", "0.5"}, [](O o) { o.lr_decay = 0.5; });
  r.refuses(keras, {"initial_accumulator", "-1"}, [](O o) { o.initial_accumulator = -1; });
  r.refuses(torch, {"initial_accumulator", "inf"}, [](O o) { o.initial_accumulator = INFINITY; });
  return r;
}

Row adadelta() {
  Row r = {GA_OPTIMIZER_ADADELTA, "Adadelta", "adadelta"};
  r.state = [](Const, bool) { return "square_avg acc_delta"; };
  r.add_defaults(torch, {lr(1), rho(0.9), eps(1e-6)});
  r.add_defaults(keras, {lr(1e-3), rho(0.95), eps(1e-7)});
  r.add("Adadelta", torch, 1, [](O) {});
  r.add("AdadeltaDecay", torch, 0.5,
        [](O o) { o.rho = 0.5, o.weight_decay = 0.1, o.maximize = 1; });
  r.add("AdadeltaKeras", keras, 0.5, [](O) {});
  r.add("AdadeltaKerasDecay", keras, 0.5, [](O o) { o.eps = 1e-3, o.weight_decay = 0.1; });
  r.refuses(keras, {"rho", "-0.5"}, [](O o) { o.rho = -0.5; });
  r.refuses(torch, {"rho", "nan"}, [](O o) { o.rho = NAN; });
  return r;
}

Row adamax() {
  Row r = {GA_OPTIMIZER_ADAMAX, "Adamax", "adamax"};
  r.state = [](Const, bool) { return "exp_avg exp_inf"; };
  r.add_defaults(torch, {lr(2e-3), beta1(0.9), beta2(0.999), eps(1e-8)});
  r.add_defaults(keras, {lr(1e-3), beta1(0.9), beta2(0.999), eps(1e-7)});
  r.add("Adamax", torch, 1e-2, [](O) {});
  r.add("AdamaxDecay", torch, 1e-2,
        [](O o) { o.beta2 = 0.9, o.eps = 1e-3, o.weight_decay = 0.1, o.maximize = 1; });
  r.add("AdamaxKeras", keras, 1e-2, [](O) {});
  r.add("AdamaxKerasDecay", keras, 1e-2,
        [](O o) { o.beta2 = 0.9, o.eps = 1e-3, o.weight_decay = 0.1; });
  r.refuses(keras, {"beta1", "1"}, [](O o) { o.beta1 = 1; });
  r.refuses(torch, {"eps", "-1"}, [](O o) { o.eps = -1; });
  return r;
}

Row nadam() {
  Row r = {GA_OPTIMIZER_NADAM, "NAdam", "nadam"};
  r.numbers = "mu_product";
  r.state = [](Const, bool) { return "exp_avg exp_avg_sq"; };
  r.add_defaults(torch, {lr(2e-3), beta1(0.9), beta2(0.999), eps(1e-8), momentum_decay(4e-3)});
  r.add_defaults(keras, {lr(1e-3), beta1(0.9), beta2(0.999), eps(1e-7), momentum_decay(1)});
  r.add("Nadam", torch, 1e-2, [](O) {});
  r.add("NadamDecay", torch, 1e-2,
        [](O o) { o.momentum_decay = 0.5, o.weight_decay = 0.1, o.maximize = 1; });
  r.add("NadamDecoupled", torch, 1e-2, [](O o) { o.decoupled = 1, o.weight_decay = 0.1; });
  r.add("NadamKeras", keras, 1e-2, [](O) {});
  r.add("NadamKerasDecay", keras, 1e-2,
        [](O o) { o.beta1 = 0.8, o.eps = 1e-3, o.weight_decay = 0.1; });
  r.refuses(torch, {"momentum_decay", "-1"}, [](O o) { o.momentum_decay = -1; });
  r.refuses(keras, {"momentum_decay", "nan"}, [](O o) { o.momentum_decay = NAN; });
  r.refuses(torch, {"decoupled", "2"}, [](O o) { o.decoupled = 2; });
  r.refuses(keras, {"NAdam", "decoupled"}, [](O o) { o.decoupled = 1; });
  return r;
}

Row radam() {
  Row r = {GA_OPTIMIZER_RADAM, "RAdam", "radam"};
  r.state = [](Const, bool) { return "exp_avg exp_avg_sq"; };
  r.add_defaults(torch, {lr(1e-3), beta1(0.9), beta2(0.999), eps(1e-8)});
  r.add("Radam", torch, 1e-2, [](O) {});
  r.add("RadamDecay", torch, 1e-2,
        [](O o) { o.beta2 = 0.95, o.weight_decay = 0.1, o.maximize = 1; });
  r.add("RadamDecoupled", torch, 1e-2, [](O o) { o.decoupled = 1, o.weight_decay = 0.1; });
  r.add("RadamNeverAdapts", torch, 1e-3, [](O o) { o.beta2 = 0.5; });
  r.refuses(torch, {"decoupled", "-1"}, [](O o) { o.decoupled = -1; });
  r.refuses(torch, {"beta2", "1"}, [](O o) { o.beta2 = 1; });
  return r;
}

Row lion() {
  Row r = {GA_OPTIMIZER_LION, "Lion", "lion"};
  r.state = [](Const, bool) { return "exp_avg"; };
  r.by_sign = true;
  r.add_defaults(torch, {lr(1e-4), beta1(0.9), beta2(0.99)});
  r.add_defaults(keras, {lr(1e-3), beta1(0.9), beta2(0.99)});
  r.add("Lion", torch, 1e-2, [](O) {});
  r.add("LionDecay", torch, 1e-2, [](O o) { o.beta1 = 0.5, o.weight_decay = 0.1, o.maximize = 1; });
  r.add("LionKeras", keras, 1e-2, [](O o) { o.weight_decay = 0.1; });
  r.refuses(keras, {"beta2", "-0.5"}, [](O o) { o.beta2 = -0.5; });
  return r;
}

Row lamb() {
  Row r = {GA_OPTIMIZER_LAMB, "LAMB", "lamb"};
  r.state = [](Const, bool) { return "exp_avg exp_avg_sq"; };
  r.layer_wise = r.stands_for_others = true;
  r.paired = {torch};
  r.add_defaults(torch,
                 {lr(1e-3), decay(1e-2), beta1(0.9), beta2(0.999), eps(1e-6), max_grad_norm(1)});
  r.add_defaults(keras, {lr(1e-3), beta1(0.9), beta2(0.999), eps(1e-7)});
  r.add("Lamb", torch, 1e-2, [](O) {});
  r.add("LambFree", torch, 1e-2, [](O o) { o.weight_decay = 0, o.max_grad_norm = 0; });
  r.add("LambAdapts", torch, 1e-2,
        [](O o) { o.weight_decay = 0, o.always_adapt = 1, o.max_grad_norm = 0.5, o.maximize = 1; });
  r.add("LambDecay", torch, 1e-2, [](O o) { o.weight_decay = 0.1, o.max_grad_norm = 0; });
  r.add("LambKeras", keras, 1e-2, [](O) {});
  r.add("LambKerasDecay", keras, 1e-2, [](O o) { o.weight_decay = 0.1; });
  r.refuses(torch, {"max_grad_norm", "-1"}, [](O o) { o.max_grad_norm = -1; });
  r.refuses(torch, {"max_grad_norm", "nan"}, [](O o) { o.max_grad_norm = NAN; });
  r.refuses(keras, {"LAMB", "max_grad_norm", "2"}, [](O o) { o.max_grad_norm = 2; });
  r.refuses(torch, {"always_adapt", "2"}, [](O o) { o.always_adapt = 2; });
  r.refuses(keras, {"LAMB", "always_adapt"}, [](O o) { o.always_adapt = 1; });
  return r;
}

Row lars() {
  Row r = {GA_OPTIMIZER_LARS, "LARS", "lars"};
  r.state = [](Const o, bool) { return o.momentum != 0 ? "momentum_buffer" : ""; };
  r.layer_wise = r.stands_for_others = true;
  r.paired = {torch};
  r.add_defaults(torch, {lr(1), eps(1e-8), trust(1e-3)});
  r.add("Lars", torch, 0.5, [](O o) { o.weight_decay = 0.01, o.trust_coefficient = 0.1; });
  r.add("LarsFree", torch, 0.05, [](O o) { o.momentum = 0.9; });
  r.add("LarsMomentum", torch, 0.05, [](O o) {
    o.momentum = 0.9, o.dampening = 0.5, o.always_adapt = 1, o.trust_coefficient = 0.1;
  });
  r.add("LarsNesterov", torch, 0.1, [](O o) {
    o.momentum = 0.9, o.nesterov = 1, o.weight_decay = 0.1, o.trust_coefficient = 0.1;
    o.maximize = 1;
  });
  r.refuses(torch, {"always_adapt", "-1"}, [](O o) { o.always_adapt = -1; });
  r.refuses(torch, {"trust_coefficient", "0"}, [](O o) { o.trust_coefficient = 0; });
  r.refuses(torch, {"trust_coefficient", "nan"}, [](O o) { o.trust_coefficient = NAN; });
  r.refuses(torch, {"nesterov", "momentum"}, [](O o) { o.nesterov = 1; });
  r.refuses(torch, {"nesterov", "dampening", "0.125"},
            [](O o) { o.momentum = 0.5, o.nesterov = 1, o.dampening = 0.125; });
  return r;
}

Row adafactor() {
  Row r = {GA_OPTIMIZER_ADAFACTOR, "Adafactor", "adafactor"};
  r.state = [](Const, bool matrix) { return matrix ? "row_var col_var" : "variance"; };
  r.layer_wise = r.stands_for_others = true;
  r.bf16_state = false;
  r.paired = {torch};
  r.add_defaults(torch, {lr(1e-2), eps(0x1p-23), eps2(1e-3), beta2_decay(-0.8), threshold(1)});
  r.add("Adafactor", torch, 1e-2, [](O) {});
  r.add("AdafactorDecay", torch, 0.02,
        [](O o) { o.beta2_decay = -0.5, o.weight_decay = 0.1, o.maximize = 1; });
  r.add("AdafactorClips", torch, 0.05,
        [](O o) { o.clip_threshold = 0.25, o.eps = 1e-3, o.eps2 = 1; });
  r.refuses(torch, {"eps2", "-1"}, [](O o) { o.eps2 = -1; });
  r.refuses(torch, {"beta2_decay", "0.5"}, [](O o) { o.beta2_decay = 0.5; });
  r.refuses(torch, {"beta2_decay", "nan"}, [](O o) { o.beta2_decay = NAN; });
  r.refuses(torch, {"clip_threshold", "0"}, [](O o) { o.clip_threshold = 0; });
  return r;
}

Row muon() {
  Row r = {GA_OPTIMIZER_MUON, "Muon", "muon"};
  r.state = [](Const, bool) { return "momentum_buffer"; };
  r.layer_wise = r.matrices_only = true;
  // The test Muon.DefaultCoefficients checks its coefficients.
  r.add_defaults(torch,
                 {lr(1e-3), decay(0.1), momentum(0.95), nesterov(1), eps(1e-7), ns_steps(5)});
  r.add("Muon", torch, 0.02, [](O) {});
  r.add("MuonMatchRms", torch, 0.01,
        [](O o) { o.adjust_lr = GA_ADJUST_MATCH_RMS, o.maximize = 1; });
  r.add("MuonHeavyBall", torch, 0.02,
        [](O o) { o.nesterov = 0, o.momentum = 0.5, o.adjust_lr = GA_ADJUST_NONE; });
  r.add("MuonCoefficients", torch, 0.02, [](O o) {
    o.ns_coefficients[0] = 2, o.ns_coefficients[1] = -1.5, o.ns_coefficients[2] = 0.5;
    o.ns_steps = 7, o.weight_decay = 0;
  });
  r.add("MuonTable", torch, 0.02, [](O o) {  // more iterations than rows
    static constexpr double table[2][3] = {{3, -3.5, 1.25}, {1.875, -1.25, 0.375}};
    o.ns_table = table[0], o.ns_rows = 2, o.ns_steps = 4;
  });
  // The bound on errors of more iterations would be of no use; test_muon.cpp has them all.
  r.add("MuonYou", torch, 0.02, [](O o) { o.ns_preset = GA_NS_YOU, o.ns_steps = 2; });
  r.add("MuonCautious", torch, 0.02, [](O o) { o.cautious = 1, o.ns_steps = 1; });
  r.add("MuonPolarExpress", torch, 0.02,
        [](O o) { o.ns_preset = GA_NS_POLAR_EXPRESS, o.ns_steps = 2; });
  r.refuses(torch, {"ns_coefficients", "nan"}, [](O o) { o.ns_coefficients[1] = NAN; });
  r.refuses(torch, {"ns_steps", "0"}, [](O o) { o.ns_steps = 0; });
  r.refuses(torch, {"ns_steps", "100"}, [](O o) { o.ns_steps = 100; });
  r.refuses(torch, {"ns_precision", "3"}, [](O o) { o.ns_precision = 3; });
  r.refuses(torch, {"ns_precision", "-1"}, [](O o) { o.ns_precision = -1; });
  r.refuses(torch, {"ns_preset", "3"}, [](O o) { o.ns_preset = 3; });
  r.refuses(torch, {"equilibrate", "4"}, [](O o) { o.equilibrate = 4; });
  r.refuses(torch, {"cautious", "2"}, [](O o) { o.cautious = 2; });
  r.refuses(torch, {"ns_rows", "1", "NULL"}, [](O o) { o.ns_rows = 1; });
  r.refuses(torch, {"ns_rows", "0"}, [](O o) { o.ns_table = o.ns_coefficients; });
  r.refuses(torch, {"ns_rows", "100"},
            [](O o) { o.ns_table = o.ns_coefficients, o.ns_rows = 100; });
  r.refuses(torch, {"ns_table[0][2]", "inf"}, [](O o) {
    static constexpr double table[] = {3, -3, HUGE_VAL};
    o.ns_table = table, o.ns_rows = 1;
  });
  r.refuses(torch, {"ns_preset", "1", "ns_table"},
            [](O o) { o.ns_table = o.ns_coefficients, o.ns_rows = 1, o.ns_preset = GA_NS_YOU; });
  r.refuses(torch, {"adjust_lr", "3"}, [](O o) { o.adjust_lr = 3; });
  r.refuses(torch, {"nesterov", "2"}, [](O o) { o.nesterov = 2; });
  r.refuses(torch, {"momentum", "-1"}, [](O o) { o.momentum = -1; });
  return r;
}

Row adopt() {
  Row r = {GA_OPTIMIZER_ADOPT, "ADOPT", "adopt"};
  r.state = [](Const, bool) { return "exp_avg exp_avg_sq"; };
  r.add_defaults(torch, {lr(1e-3), beta1(0.9), beta2(0.9999), eps(1e-6), clip_exponent(0.25)});
  r.add("Adopt", torch, 1e-2, [](O) {});
  r.add("AdoptDecay", torch, 1e-2,
        [](O o) { o.beta2 = 0.9, o.weight_decay = 0.1, o.maximize = 1; });
  r.add("AdoptDecoupled", torch, 1e-2,
        [](O o) { o.eps = 1e-2, o.decoupled = 1, o.weight_decay = 0.1; });
  r.refuses(torch, {"ADOPT", "beta2", "1"}, [](O o) { o.beta2 = 1; });
  r.refuses(torch, {"ADOPT", "decoupled", "2"}, [](O o) { o.decoupled = 2; });
  r.refuses(torch, {"ADOPT", "clip_exponent", "-0.25"}, [](O o) { o.clip_exponent = -0.25; });
  r.refuses(torch, {"ADOPT", "clip_exponent", "inf"}, [](O o) { o.clip_exponent = INFINITY; });
  return r;
}

Row ademamix() {
  Row r = {GA_OPTIMIZER_ADEMAMIX, "AdEMAMix", "ademamix"};
  r.state = [](Const, bool) { return "exp_avg exp_avg_sq exp_avg_slow"; };
  r.add_defaults(torch, {lr(1e-3), beta1(0.9), beta2(0.999), eps(1e-8), beta3(0.9999), alpha(5)});
  r.add("Ademamix", torch, 1e-2, [](O) {});
  r.add("AdemamixWarmup", torch, 1e-2, [](O o) {
    o.alpha_warmup = 20, o.beta3_warmup = 50, o.beta3 = 0.99, o.weight_decay = 0.1, o.maximize = 1;
  });
  r.refuses(torch, {"AdEMAMix", "beta3", "1"}, [](O o) { o.beta3 = 1; });
  r.refuses(torch, {"AdEMAMix", "alpha", "nan"}, [](O o) { o.alpha = NAN; });
  r.refuses(torch, {"alpha_warmup", "-1"}, [](O o) { o.alpha_warmup = -1; });
  r.refuses(torch, {"beta3_warmup", "-2"}, [](O o) { o.beta3_warmup = -2; });
  return r;
}

Row rowwise_adagrad() {
  Row r = {GA_OPTIMIZER_ROWWISE_ADAGRAD, "row-wise Adagrad", "rowwise_adagrad"};
  r.state = [](Const, bool) { return "sum"; };
  r.lazy = [](Const) { return true; };
  r.bf16_state = false;
  r.stands_for_others = true;
  r.add_defaults(torch, {lr(1e-2), eps(1e-10)});
  r.add("RowwiseAdagrad", torch, 0.05, [](O) {});
  r.add("RowwiseAdagradDecay", torch, 0.05, [](O o) {
    o.eps = 1e-3, o.weight_decay = 0.1, o.initial_accumulator = 0.3, o.maximize = 1;
  });
  r.refuses(torch, {"row-wise Adagrad", "eps", "-1"}, [](O o) { o.eps = -1; });
  return r;
}

Row schedule_free_adamw() {
  Row r = {GA_OPTIMIZER_SCHEDULE_FREE_ADAMW, "Schedule-Free AdamW", "schedule_free_adamw"};
  r.state = [](Const, bool) { return "z exp_avg_sq"; };
  r.numbers = "weight_sum lr_max";
  r.bf16_state = false;
  r.stands_for_others = true;
  r.add_defaults(torch, {lr(2.5e-3), beta1(0.9), beta2(0.999), eps(1e-8), average_lr_power(2)});
  r.add("ScheduleFreeAdamW", torch, 1e-2, [](O) {});
  r.add("ScheduleFreeAdamWDecay", torch, 1e-2, [](O o) {
    o.beta1 = 0.5, o.beta2 = 0.9, o.weight_decay = 0.1, o.maximize = 1, o.average_power = 1.5;
  });
  r.refuses(torch, {"Schedule-Free AdamW", "beta1", "0"}, [](O o) { o.beta1 = 0; });
  r.refuses(torch, {"beta1", "1"}, [](O o) { o.beta1 = 1; });
  r.refuses(torch, {"beta2", "1"}, [](O o) { o.beta2 = 1; });
  r.refuses(torch, {"average_power", "-1"}, [](O o) { o.average_power = -1; });
  r.refuses(torch, {"average_lr_power", "nan"}, [](O o) { o.average_lr_power = NAN; });
  return r;
}

Row schedule_free_sgd() {
  Row r = {GA_OPTIMIZER_SCHEDULE_FREE_SGD, "Schedule-Free SGD", "schedule_free_sgd"};
  r.state = [](Const, bool) { return "z"; };
  r.numbers = "weight_sum lr_max";
  r.bf16_state = false;
  r.add_defaults(torch, {lr(1), momentum(0.9), average_lr_power(2)});
  r.add("ScheduleFreeSgd", torch, 0.05, [](O) {});
  r.add("ScheduleFreeSgdDecay", torch, 0.05, [](O o) {
    o.momentum = 0.5, o.weight_decay = 0.1, o.maximize = 1, o.average_power = 2;
    o.average_lr_power = 0;
  });
  r.refuses(torch, {"Schedule-Free SGD", "momentum", "1"}, [](O o) { o.momentum = 1; });
  r.refuses(torch, {"momentum", "0"}, [](O o) { o.momentum = 0; });
  r.refuses(torch, {"average_power", "inf"}, [](O o) { o.average_power = INFINITY; });
  return r;
}

}  // namespace

const std::vector<OptimizerRow>& optimizer_rows() {
  static const std::vector<OptimizerRow> rows = {sgd(),
                                                 adam(),
                                                 adamw(),
                                                 external(),
                                                 rmsprop(),
                                                 adagrad(),
                                                 adadelta(),
                                                 adamax(),
                                                 nadam(),
                                                 radam(),
                                                 lion(),
                                                 lamb(),
                                                 lars(),
                                                 adafactor(),
                                                 muon(),
                                                 adopt(),
                                                 ademamix(),
                                                 rowwise_adagrad(),
                                                 schedule_free_adamw(),
                                                 schedule_free_sgd()};
  return rows;
}

}  // namespace ga::test
