#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes vectors.hpp, beside this file: what other systems make of a few small parameters in ten
steps.

    python3 -m venv venv
    venv/bin/pip install torch==2.15.0 timm==1.0.31 keras==3.15.1 jax==0.10.2 \
        pytorch_optimizer==4.1.0 schedulefree==1.4.1
    venv/bin/pip install --no-deps torchrec==1.9.2
    venv/bin/python make_vectors.py

These are the versions that it was last run with. PyTorch, timm, pytorch_optimizer, schedulefree, torchrec
and Keras (on JAX) compute in float64, each by its own code. Only what a case names is set, here and in the library: the rest are
the defaults of both. test_vectors.cpp replays the file.
"""
import importlib.metadata
import importlib.util
import os
import random
import sys

os.environ["KERAS_BACKEND"] = "jax"
import jax

jax.config.update("jax_enable_x64", True)
import keras
import pytorch_optimizer
import schedulefree
import timm
import timm.optim
import torch
import torch.optim._muon

keras.config.set_floatx("float64")
torch.set_default_dtype(torch.float64)  # of PyTorch's own scalars too


class InFloat64:
    """The module torch, but for what Muon rounds its matrices to."""
    bfloat16 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


torch.optim._muon.torch = InFloat64()


def from_torchrec(name):
    """A file of torchrec alone: the package needs FBGEMM."""
    path = importlib.util.find_spec("torchrec").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("torchrec", f"{path}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STEPS = 10
KEPT = (1, STEPS)  # the steps after which parameters are written down
LR = (1.0, 0.5, 2.0)  # what the learning rate is multiplied by, in turns
SHAPES = [(4, 3), (3, 5), (7,), (), (2, 3, 2)]
MATRICES = 2  # of these come first
OF_MATRICES = ("MUON", "ROWWISE_ADAGRAD")

draw = random.Random(20)


def number():
    """A float32 of few digits and of mixed size."""
    return draw.randint(-2047, 2047) * 2.0 ** draw.choice((-21, -14, -12, -11, -11, -10, -9))


def tensors(make):
    return [[make() for _ in range(torch.Size(s).numel())] for s in SHAPES]


start = tensors(number)
start[3] = [0.0]
start[4][5] = 0.0
gradients = [tensors(number) for _ in range(STEPS)]
gradients[3][2] = [0.0] * 7
for g in gradients:
    g[0][4] = 0.0
    g[1][2] = 0.0


def run_torch(make, count):
    parameters = [torch.tensor(p).reshape(s).requires_grad_()
                  for p, s in zip(start[:count], SHAPES)]
    optimizer = make(parameters)
    group = optimizer.param_groups[0]
    lr, kept = group["lr"], []
    for step in range(STEPS):
        for p, g, s in zip(parameters, gradients[step], SHAPES):
            p.grad = torch.tensor(g).reshape(s)
        group["lr"] = lr * LR[step % len(LR)]
        optimizer.step()
        if step + 1 in KEPT:
            kept.append([x for p in parameters for x in p.detach().flatten().tolist()])
    return kept


def run_keras(make, count):
    parameters = [keras.Variable(torch.tensor(p).reshape(s).numpy(), dtype="float64")
                  for p, s in zip(start[:count], SHAPES)]
    optimizer = make()
    # What it was given, not what its variable holds, which need not be float64.
    lr, kept = float(optimizer.get_config()["learning_rate"]), []
    for step in range(STEPS):
        optimizer.learning_rate = lr * LR[step % len(LR)]
        optimizer.apply([keras.ops.convert_to_tensor(torch.tensor(g).reshape(s).numpy())
                         for g, s in zip(gradients[step], SHAPES[:count])], parameters)
        if step + 1 in KEPT:
            kept.append([float(x) for p in parameters for x in p.numpy().flatten()])
    return kept


# What the library calls their options. eps and betas are taken apart below.
TORCH = {"alpha": "rho", "momentum_decay": "momentum_decay", "decoupled_weight_decay": "decoupled",
         "initial_accumulator_value": "initial_accumulator", "d": "clip_threshold",
         "trust_coeff": "trust_coefficient", "adjust_lr_fn": "adjust_lr",
         "ns_coefficients": "ns_coefficients", "r": "average_power",
         "weight_lr_power": "average_lr_power"}
KERAS = {"learning_rate": "lr", "beta_1": "beta1", "beta_2": "beta2", "epsilon": "eps",
         "initial_accumulator_value": "initial_accumulator"}
ADJUST = {"original": "GA_ADJUST_ORIGINAL", "match_rms_adamw": "GA_ADJUST_MATCH_RMS"}
EPS32 = 2.0**-23  # PyTorch's own default of Adafactor's eps1 goes by the dtype


def literal(value):
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, str) else repr(value)


def fields(options, names):
    for name, value in options.items():
        if name == "betas":
            yield from zip(("beta1", "beta2", "beta3"), value)
        elif name == "t_alpha_beta3":
            yield from (("alpha_warmup", value), ("beta3_warmup", value))
        elif name == "eps" and isinstance(value, tuple):
            yield from (("eps", value[0]), ("eps2", value[1]))
        elif name == "adjust_lr_fn":
            yield "adjust_lr", ADJUST[value]
        elif name == "ns_coefficients":
            yield from ((f"ns_coefficients[{i}]", x) for i, x in enumerate(value))
        elif name == "max_grad_norm":
            yield name, value or 0.0
        else:
            yield names.get(name, name), value


def trained(optimizer):
    optimizer.train()
    return optimizer


def cases():
    def torch_case(kind, optimizer, options, **fixed):
        system = optimizer.__module__.split(".")[0]
        names = {} if system == "pytorch_optimizer" else TORCH
        return (f"{system} {optimizer.__name__}", kind, "GA_FLAVOR_TORCH", options, names,
                run_torch, lambda p: optimizer(p, **options, **fixed))

    def keras_case(kind, optimizer, options):
        return (f"keras {optimizer.__name__}", kind, "GA_FLAVOR_KERAS", options, KERAS, run_keras,
                lambda: optimizer(**options))

    o, single = torch.optim, dict(foreach=False)
    decay = dict(weight_decay=0.1)
    for options in ({}, dict(lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1),
                    dict(lr=0.05, momentum=0.9, nesterov=True, maximize=True)):
        yield torch_case("SGD", o.SGD, options, **single)
    for options in ({}, dict(lr=0.01, amsgrad=True, weight_decay=0.1)):
        yield torch_case("ADAM", o.Adam, options, **single)
    for options in ({}, dict(lr=0.01, betas=(0.8, 0.95), amsgrad=True, maximize=True)):
        yield torch_case("ADAMW", o.AdamW, options, **single)
    for options in ({}, dict(weight_decay=0.1, momentum=0.9, alpha=0.95),
                    dict(centered=True, momentum=0.5, eps=1e-3, maximize=True)):
        yield torch_case("RMSPROP", o.RMSprop, options, **single)
    for options in ({}, dict(lr=0.05, lr_decay=0.1, weight_decay=0.1,
                             initial_accumulator_value=0.5), dict(eps=1e-3, maximize=True)):
        yield torch_case("ADAGRAD", o.Adagrad, options, **single)
    for options in ({}, dict(lr=0.5, rho=0.95, eps=1e-3, weight_decay=0.1, maximize=True)):
        yield torch_case("ADADELTA", o.Adadelta, options, **single)
    for options in ({}, dict(lr=0.05, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, maximize=True)):
        yield torch_case("ADAMAX", o.Adamax, options, **single)
    for options in ({}, decay, dict(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
                    dict(lr=0.01, betas=(0.8, 0.95), momentum_decay=0.5, eps=1e-3, maximize=True)):
        yield torch_case("NADAM", o.NAdam, options, **single)
    for options in ({}, decay, dict(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
                    dict(lr=0.01, betas=(0.8, 0.95), eps=1e-3, maximize=True),
                    dict(lr=0.01, betas=(0.8, 0.5))):
        yield torch_case("RADAM", o.RAdam, options, **single)
    for options in (dict(eps=(EPS32, 1e-3)), dict(lr=0.1, weight_decay=0.1, eps=(EPS32, 1e-3)),
                    dict(lr=0.5, beta2_decay=-0.5, eps=(1e-3, 0.1), d=1.5, maximize=True)):
        yield torch_case("ADAFACTOR", o.Adafactor, options, **single)
    for options in ({}, dict(lr=0.02, nesterov=False, momentum=0.8, weight_decay=0.0),
                    dict(lr=0.02, adjust_lr_fn="match_rms_adamw", ns_steps=3),
                    dict(lr=0.02, ns_coefficients=(2.0, -1.5, 0.5), ns_steps=7, eps=4.0)):
        yield torch_case("MUON", o.Muon, options)

    for options in ({}, dict(max_grad_norm=None), dict(lr=0.01, weight_decay=0.0),
                    dict(lr=0.01, weight_decay=0.0, always_adapt=True, max_grad_norm=0.25),
                    dict(lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)):
        yield torch_case("LAMB", timm.optim.Lamb, options, **single)
    for options in ({}, decay, dict(momentum=0.9, weight_decay=0.1, trust_coeff=0.02),
                    dict(lr=0.5, momentum=0.9, dampening=0.5, always_adapt=True, eps=1e-3),
                    dict(momentum=0.9, nesterov=True, weight_decay=0.01)):
        yield torch_case("LARS", timm.optim.Lars, options, **single)
    for options in ({}, dict(lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)):
        yield torch_case("LION", timm.optim.Lion, options, **single)
    for options in ({}, dict(lr=0.01, weight_decay=0.1, maximize=True),
                    dict(lr=0.01, betas=(0.8, 0.95), eps=0.5, weight_decay=0.1, decoupled=True)):
        yield torch_case("ADOPT", timm.optim.Adopt, options, clip_exp=0.25, **single)
    for options in ({}, dict(lr=0.01, betas=(0.8, 0.95, 0.99), alpha=8.0, eps=1e-3, maximize=True),
                    dict(lr=0.01, t_alpha_beta3=8, weight_decay=0.1)):
        yield torch_case("ADEMAMIX", pytorch_optimizer.AdEMAMix, options, weight_decouple=True,
                         **single)
    rowwise = from_torchrec("optim/rowwise_adagrad")
    for options in ({}, dict(lr=0.05, initial_accumulator_value=0.3, eps=1e-3, maximize=True)):
        yield torch_case("ROWWISE_ADAGRAD", rowwise.RowWiseAdagrad, options)

    for kind, optimizer, more in (
            ("ADAMW", schedulefree.AdamWScheduleFree, dict(betas=(0.8, 0.95), eps=1e-3)),
            ("SGD", schedulefree.SGDScheduleFree, dict(momentum=0.7))):
        for options in ({}, dict(lr=0.05, r=1.5, weight_lr_power=1.0, weight_decay=0.1, **more)):
            name, _, flavor, options, names, run, make = torch_case(kind, optimizer, options,
                                                                    foreach=False)
            yield (name, f"SCHEDULE_FREE_{kind}", flavor, options, names, run,
                   lambda p, make=make: trained(make(p)))

    k = keras.optimizers
    for options in ({}, dict(momentum=0.9, weight_decay=0.1), dict(momentum=0.9, nesterov=True)):
        yield keras_case("SGD", k.SGD, options)
    for options in ({}, dict(amsgrad=True, weight_decay=0.1)):
        yield keras_case("ADAM", k.Adam, options)
    for options in ({}, dict(learning_rate=0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-3)):
        yield keras_case("ADAMW", k.AdamW, options)
    for options in ({}, dict(momentum=0.9, rho=0.8, weight_decay=0.1),
                    dict(centered=True, momentum=0.5, epsilon=1e-3)):
        yield keras_case("RMSPROP", k.RMSprop, options)
    for options in ({}, dict(learning_rate=0.05, initial_accumulator_value=0.0, epsilon=1e-3,
                             weight_decay=0.1)):
        yield keras_case("ADAGRAD", k.Adagrad, options)
    for options in ({}, dict(learning_rate=0.5, rho=0.8, epsilon=1e-3, weight_decay=0.1)):
        yield keras_case("ADADELTA", k.Adadelta, options)
    for options in ({}, dict(learning_rate=0.05, beta_1=0.8, beta_2=0.9, epsilon=1e-3,
                             weight_decay=0.1)):
        yield keras_case("ADAMAX", k.Adamax, options)
    for options in ({}, dict(learning_rate=0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-3,
                             weight_decay=0.1)):
        yield keras_case("NADAM", k.Nadam, options)
    for options in ({}, dict(learning_rate=0.01, beta_1=0.8, beta_2=0.95, weight_decay=0.1)):
        yield keras_case("LION", k.Lion, options)
    for options in ({}, dict(learning_rate=0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-3,
                             weight_decay=0.1)):
        yield keras_case("LAMB", k.Lamb, options)


def write(text, indent="  "):
    """Lines of at most 100 columns."""
    line = indent
    for word in text.split():
        if len(line) + len(word) > 100:
            print(line.rstrip())
            line = indent
        line += word + " "
    print(line.rstrip())


def listed(numbers, suffix=""):
    def hexadecimal(x):  # without zeros at the end
        digits, exponent = x.hex().split("p")
        return f"{digits.rstrip('0').rstrip('.')}p{exponent}{suffix}"
    return "{" + ", ".join(map(hexadecimal, numbers)) + "}"


sys.stdout = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "vectors.hpp"), "w")
versions = (f"PyTorch {torch.__version__.split('+')[0]}, timm {timm.__version__}, "
            f"pytorch_optimizer {importlib.metadata.version('pytorch_optimizer')},\n"
            f"// schedulefree {importlib.metadata.version('schedulefree')}, "
            f"torchrec {importlib.metadata.version('torchrec')} and")
print(f"""// SPDX-License-Identifier: Apache-2.0
//
// Written by make_vectors.py with {versions} Keras {keras.__version__} (JAX {jax.__version__}). Not to be edited.
#pragma once

#include <vector>

#include "gradaccum/gradaccum.h"

namespace ga::test::oracle {{

// clang-format off
struct Case {{
  const char* name;
  int32_t kind, flavor;
  void (*set)(ga_optimizer& o);
  size_t tensors;            // the first so many take part
  std::vector<double> p[{len(KEPT)}];  // the parameters after the steps in kKept
}};
""")
shapes = ", ".join("{" + ", ".join(map(str, s)) + "}" for s in SHAPES)
print(f"inline const std::vector<std::vector<int64_t>> kShapes = {{{shapes}}};")
print(f"inline const int64_t kKept[] = {{{', '.join(map(str, KEPT))}}};")
print(f"inline const double kLr[] = {{{', '.join(map(str, LR))}}};  // times lr, in turns")
print("inline const std::vector<float> kStart =")
write(listed([x for t in start for x in t], "f") + ";")
print("inline const std::vector<std::vector<float>> kGradients = {  // of each step")
for step in gradients:
    write(listed([x for t in step for x in t], "f") + ",", "    ")
print("};\n")
print("inline std::vector<Case> cases() {\n  return {")
for name, kind, flavor, options, names, run, make in cases():
    count = MATRICES if kind in OF_MATRICES else len(SHAPES)
    settings = [(field, literal(value)) for field, value in fields(options, names)]
    assignments = "".join(f" o.{field} = {value};" for field, value in settings)
    title = " ".join([name] + [f"{field} {value}" for field, value in settings])
    print(f'      {{"{title}",')
    write(f"GA_OPTIMIZER_{kind}, {flavor}, []([[maybe_unused]] ga_optimizer& o) {{{assignments} }},"
          f" {count},", "       ")
    write("{" + ", ".join(listed(p) for p in run(make, count)) + "}},", "       ")
print("  };\n}\n// clang-format on\n\n}  // namespace ga::test::oracle")
