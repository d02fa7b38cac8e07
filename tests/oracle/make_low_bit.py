#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes low_bit.hpp, beside this file: what bitsandbytes' and torchao's optimizers with state in 8
bits make of a few blocks of 256 elements in three steps on the CPU.

    $(tests/environments low_bit) tests/oracle/make_low_bit.py

NumPy computes every step here too, and must arrive
at the bits of bitsandbytes' parameters, codes and scales. So this is what bitsandbytes does:

Codes. A number is map[code] * absmax. The maps are sorted. The signed one has 0 at 127, 1 at 255, and
no -1; the unsigned one has 0 at 0 and 1 at 255. torchao's maps have the same bits. Optimizers with
one state have the signed map, for the squares of RMSprop and Adagrad too; the second of two states
has the unsigned one.

A step reads the numbers and updates them and the parameters in f32. Only then it rounds the numbers
to codes, so that rounding does not reach the parameters before the next step. absmax is the largest
magnitude of a block's new numbers; the last block may be short. A block of zeros has the codes 0.

A share, clamp(x * (1 / absmax), -1, 1), is not compared with the midpoints of the map. It is rounded
to one of 65536 numbers that are evenly spaced over [-1, 1], for the unsigned map too, and each of
these has a code: the number of midpoints (map[k] + map[k + 1]) / 2 that are less than it. Shares from
0 up to 3e-5 therefore have one code, that of 1.5e-5: a 0 beside other numbers becomes 2.1e-5 of
absmax in the signed map and 1.6e-5 in the unsigned one. bitsandbytes on other devices has the nearest
code, which is the number of midpoints that are less than the share itself. The file has that too.

Hyper-parameters are combined in Python's float64 and rounded to f32 for each operation. torch rounds
a + alpha * b once; fma() does so here. MKL's square root, which torch has, is not the nearest number,
so that it is taken from torch. Weight decay is decoupled in Adam8bit, AdamW8bit, AdEMAMix8bit and
Lion8bit, and added to the gradient in the others. LAMB8bit and LARS8bit have no trust ratio on the
CPU: they are Adam8bit and SGD8bit.

torchao divides by absmax, or 1e-12 if that is more, and takes the upper of two codes from their
midpoint on. The code of its steps is made by torch.compile, so NumPy's agree with its parameters and
scales in all but the last places, and with its codes but for shares at a midpoint.
"""

import itertools
import math
import os
import random

import bitsandbytes
import numpy as np
import torch
import torchao.optim
from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

F32 = np.float32
BLOCK = 256
SHORT = 20  # elements of the last block
ELEMENTS = 2 * BLOCK + SHORT
STEPS = 3
FILLER = 16 * BLOCK  # zeros before them: torchao has 8 bits only for 4096 elements and more
ENTRIES = 65536

draw = random.Random(49)


def number():
    """A float32 of few digits and of mixed size."""
    return draw.randint(-2047, 2047) * 2.0 ** draw.choice((-24, -21, -14, -12, -11, -11, -10, -9))


def gradient(step):
    """One element of 16 is 0; so is the second block, but for a third of it in the second step."""
    g = np.array([number() for _ in range(ELEMENTS)], F32)
    g[5::16] = 0
    second = g[BLOCK:2 * BLOCK]
    second[:] = np.where((np.arange(BLOCK) % 3 == 0) & (step == 2), second, 0)
    return g


start = np.array([number() for _ in range(ELEMENTS)], F32)
gradients = [gradient(step) for step in range(1, STEPS + 1)]


def fma(a, b, c):
    """a * b + c, rounded once."""
    a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
    product = a * b  # exact
    total = product + c
    d = total - product
    error = (product - (total - d)) + (c - d)
    bits = total.view(np.int64)  # rounded to odd, so that the rounding to f32 is the only one
    towards = np.where((error > 0) == (total > 0), bits + 1, bits - 1)
    return np.where((error != 0) & (bits % 2 == 0), towards, bits).view(np.float64).astype(F32)


def root(x):
    return torch.tensor(x).sqrt().numpy()


class Code:
    """A map, and bitsandbytes' codes of the 65536 numbers."""

    def __init__(self, signed):
        self.signed = signed
        self.map = bitsandbytes.functional.create_dynamic_map(signed=signed).numpy()
        self.middles = F32(0.5) * (self.map[:-1] + self.map[1:])
        evenly = F32(-1) + F32(2) * np.arange(ENTRIES).astype(F32) / F32(ENTRIES - 1)
        self.table = self.below(evenly)

    def below(self, shares):
        return np.searchsorted(self.middles, shares, side="left").astype(np.uint8)

    def read(self, codes, scales):
        return self.map[codes] * np.repeat(scales, BLOCK)[:len(codes)]

    def written(self, x):
        """The codes, the nearest ones, and the scales."""
        scales = np.array([np.abs(x[i:i + BLOCK]).max() for i in range(0, len(x), BLOCK)], F32)
        of_each = np.repeat(scales, BLOCK)[:len(x)]
        zero = of_each == 0
        per_scale = F32(1) / np.where(zero, F32(1), of_each)
        shares = np.clip(x * per_scale, F32(-1), F32(1))
        entry = ((shares + F32(1)) * F32(0.5) * F32(ENTRIES - 1) + F32(0.5)).astype(np.int64)
        return (np.where(zero, 0, self.table[entry]).astype(np.uint8),
                np.where(zero, 0, self.below(shares)).astype(np.uint8), scales)


SIGNED, UNSIGNED = Code(True), Code(False)
assert (SIGNED.map == np.array(get_qmap_signed(), F32)).all()
assert (UNSIGNED.map == np.array(get_qmap_unsigned(), F32)).all()


# Each returns the parameters and the numbers of its states after step t.


def average(m, g, beta):
    return fma(g, F32(1 - beta), m * F32(beta))


def average_of_squares(v, g, beta):
    return fma(F32(1 - beta) * g, g, v * F32(beta))


def adam(p, g, states, t, lr, betas, eps, weight_decay):
    m = average(states[0], g, betas[0])
    v = average_of_squares(states[1], g, betas[1])
    divisor = root(v) / F32(math.sqrt(1 - betas[1]**t)) + F32(eps)
    if weight_decay > 0:
        p = p * F32(1 - lr * weight_decay)
    return p + F32(-lr / (1 - betas[0]**t)) * m / divisor, [m, v]


def ademamix(p, g, states, t, lr, betas, alpha, eps, weight_decay):
    fast = average(states[0], g, betas[0])
    slow = average(states[1], g, betas[2])
    v = average_of_squares(states[2], g, betas[1])
    update = ((fast / F32(1 - betas[0]**t) + F32(alpha) * slow) /
              (root(v) / F32(math.sqrt(1 - betas[1]**t)) + F32(eps)))
    if weight_decay > 0:
        p = p * F32(1 - lr * weight_decay)
    return fma(update, F32(-lr), p), [fast, slow, v]


def sgd(p, g, states, t, lr, momentum, weight_decay):
    g = fma(p, F32(weight_decay), g)
    m = g if t == 1 else states[0] * F32(momentum) + g
    return fma(m, F32(-lr), p), [m]


def lion(p, g, states, t, lr, betas, weight_decay):
    if weight_decay > 0:
        p = p * F32(1 - lr * weight_decay)
    direction = np.sign(states[0] * F32(betas[0]) + g * F32(1 - betas[0]))
    return fma(direction, F32(-lr), p), [average(states[0], g, betas[1])]


def rmsprop(p, g, states, t, lr, alpha, eps, weight_decay):
    g = fma(p, F32(weight_decay), g)
    v = average_of_squares(states[0], g, alpha)
    return p + F32(-lr) * g / (root(v) + F32(eps)), [v]


def adagrad(p, g, states, t, lr, eps, weight_decay):
    g = fma(p, F32(weight_decay), g)
    v = fma(g, g, states[0])
    return p + F32(-lr) * g / (root(v) + F32(eps)), [v]


class State:
    """One array of codes of an optimizer, after each step."""

    def __init__(self, name, code):
        self.name, self.code = name, code
        self.codes, self.nearest, self.scales = [], [], []

    def numbers(self):
        """Those that the next step reads."""
        if not self.codes:
            return np.zeros(ELEMENTS, F32)
        return self.code.read(self.codes[-1], self.scales[-1])


def same_bits(a, b):
    return (a.view(np.uint32) == b.view(np.uint32)).all()


def of_bitsandbytes(name, kind, optimizer, replay, options, states):
    """Steps of bitsandbytes, which the replay must equal. states: key and index for each."""
    parameter = torch.nn.Parameter(torch.tensor(start))
    running = optimizer([parameter], **options, min_8bit_size=0)
    parameters, p = [], start
    for t, g in enumerate(gradients, 1):
        parameter.grad = torch.tensor(g)
        running.step()
        theirs = running.state[parameter]
        p, numbers = replay(p, g, [s.numbers() for s, _, _ in states], t, **options)
        assert same_bits(p, parameter.detach().numpy()), (name, t)
        parameters.append(p)
        for (state, k, at), x in zip(states, numbers):
            codes, nearest, scales = state.code.written(x)
            assert (codes == theirs[f"state{k}"].numpy()[at]).all(), (name, t)
            assert same_bits(scales, theirs[f"absmax{k}"].numpy()[at]), (name, t)
            state.codes.append(codes)
            state.nearest.append(nearest)
            state.scales.append(scales)
    return f"bitsandbytes {name}", kind, options, parameters, [s for s, _, _ in states]


def of_torchao(name, kind, optimizer, options):
    """Steps of torchao, in which the last block is left out."""
    whole = ELEMENTS - SHORT
    states = [State("exp_avg", SIGNED), State("exp_avg_sq", UNSIGNED)]
    filler = np.zeros(FILLER, F32)
    parameter = torch.nn.Parameter(torch.tensor(np.concatenate([filler, start[:whole]])))
    running = optimizer([parameter], **options)
    parameters, p = [], start[:whole]
    for t, g in enumerate((g[:whole] for g in gradients), 1):
        parameter.grad = torch.tensor(np.concatenate([filler, g]))
        running.step()
        wanted, numbers = adam(p, g, [s.numbers()[:whole] for s in states], t, **options)
        p = parameter.detach().numpy()[FILLER:].copy()
        parameters.append(p)
        np.testing.assert_allclose(p, wanted, rtol=1e-6, atol=1e-8)
        for state, x in zip(states, numbers):
            theirs = running.state[parameter][state.name]
            codes = theirs.codes.numpy()[FILLER:].copy()
            scales = theirs.scale.numpy()[FILLER // BLOCK:].copy()
            wanted = np.maximum(state.code.written(x)[2], F32(1e-12))
            np.testing.assert_allclose(scales, wanted, rtol=3e-7)
            shares = x / np.repeat(scales, BLOCK)
            nearest = state.code.below(shares)
            middles = state.code.middles[np.minimum(np.minimum(codes, nearest), 254)]
            beside = np.abs(codes.astype(int) - nearest) == 1
            in_the_middle = beside & (np.abs(shares - middles) <= 1e-6 * np.abs(middles))
            assert ((codes == nearest) | in_the_middle).all(), (name, t)
            state.codes.append(codes)
            state.nearest.append(codes)
            state.scales.append(scales)
    return f"torchao {name}", kind, options, parameters, states


def cases():
    """Names and values of options are bitsandbytes'. The second of states is state1 or state2."""
    b = bitsandbytes.optim
    of_adam = lambda: [(State("exp_avg", SIGNED), 1, ...), (State("exp_avg_sq", UNSIGNED), 2, ...)]
    of_one = lambda name: [(State(name, SIGNED), 1, ...)]
    quick = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)
    yield of_bitsandbytes("Adam8bit", "ADAM", b.Adam8bit, adam,
                          dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0), of_adam())
    yield of_bitsandbytes("AdamW8bit", "ADAMW", b.AdamW8bit, adam, quick, of_adam())
    yield of_bitsandbytes("AdEMAMix8bit", "ADEMAMIX", b.AdEMAMix8bit, ademamix,
                          dict(quick, betas=(0.8, 0.95, 0.99), alpha=3.0),
                          [(State("exp_avg", SIGNED), 1, 0), (State("exp_avg_slow", SIGNED), 1, 1),
                           (State("exp_avg_sq", UNSIGNED), 2, ...)])
    yield of_bitsandbytes("SGD8bit", "SGD", b.SGD8bit, sgd,
                          dict(lr=0.01, momentum=0.9, weight_decay=0.1), of_one("momentum_buffer"))
    yield of_bitsandbytes("Lion8bit", "LION", b.Lion8bit, lion,
                          dict(lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), of_one("exp_avg"))
    yield of_bitsandbytes("RMSprop8bit", "RMSPROP", b.RMSprop8bit, rmsprop,
                          dict(lr=0.01, alpha=0.9, eps=1e-3, weight_decay=0.1),
                          of_one("square_avg"))
    yield of_bitsandbytes("Adagrad8bit", "ADAGRAD", b.Adagrad8bit, adagrad,
                          dict(lr=0.01, eps=1e-3, weight_decay=0.1), of_one("sum"))
    yield of_torchao("AdamW8bit", "ADAMW", torchao.optim.AdamW8bit, quick)


def fields(kind, options):
    for name, value in options.items():
        if name == "betas":
            yield from zip(("beta1", "beta2", "beta3"), value)
        else:
            yield "rho" if (kind, name) == ("RMSPROP", "alpha") else name, value


def of_floats(x):
    return "".join(f"{u:08x}" for u in np.ascontiguousarray(x).view(np.uint32))


def of_codes(x):
    return "".join(f"{c:02x}" for c in x)


def of_nearest(nearest, codes):
    return "".join(f"{i:03x}{nearest[i]:02x}" for i in np.flatnonzero(nearest != codes))


def literal(digits, end=","):
    """Writes a string in lines of at most 100 columns."""
    lines = [digits[i:i + 96] for i in range(0, len(digits), 96)] or [""]
    out.write("\n".join(f'  "{line}"' for line in lines) + end + "\n")


def literals(texts, end):
    out.write("  {\n")
    for text in texts:
        literal(text)
    out.write("  }" + end + "\n")


listed = list(cases())
systems = f"bitsandbytes {bitsandbytes.__version__}, torchao {torchao.__version__}"
out = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "low_bit.hpp"), "w")
out.write(f"""// SPDX-License-Identifier: Apache-2.0
//
// Written by make_low_bit.py with {systems}
// and PyTorch {torch.__version__.split("+")[0]}. Not to be edited. All in hexadecimal: a float is the
// 8 digits of its bits, a code is 2 digits.
#pragma once

#include <vector>

#include "gradaccum/gradaccum.h"

namespace ga::test::oracle {{

// clang-format off
constexpr int64_t kLowBitElements = {ELEMENTS};  // two blocks of {BLOCK}, and a short one
constexpr int kLowBitSteps = {STEPS};

struct LowBitState {{
  const char* name;                   // the library's
  bool has_sign;                      // which of the two maps it has
  const char* codes[kLowBitSteps];    // after each step
  const char* nearest[kLowBitSteps];  // if another: 3 digits of the element, 2 of the code
  const char* scales[kLowBitSteps];
}};

struct LowBitCase {{
  const char* name;
  int32_t kind;
  void (*set)(ga_optimizer& o);
  int64_t elements;  // the first so many take part
  const char* parameters[kLowBitSteps];
  std::vector<LowBitState> states;
}};

// What the codes stand for, in units of the scale of the block.
""")
for name, code in (("kSignedMap", SIGNED), ("kUnsignedMap", UNSIGNED)):
    out.write(f"inline const char* const {name} =\n")
    literal(of_floats(code.map), ";")
out.write("\ninline const char* const kLowBitStart =\n")
literal(of_floats(start), ";")
out.write("inline const char* const kLowBitGradients[] = {  // of each step\n")
for g in gradients:
    literal(of_floats(g))
out.write("};\n\ninline std::vector<LowBitCase> low_bit_cases() {\n  return {\n")
for name, kind, options, parameters, states in listed:
    assignments = " ".join(f"o.{field} = {value!r};" for field, value in fields(kind, options))
    out.write(f'  {{"{name}", GA_OPTIMIZER_{kind}, [](ga_optimizer& o) {{\n'
              f"     {assignments} }}, {len(parameters[0])},\n")
    literals(map(of_floats, parameters), ", {")
    for s in states:
        out.write(f'  {{"{s.name}", {"true" if s.code.signed else "false"},\n')
        literals(map(of_codes, s.codes), ",")
        literals(itertools.starmap(of_nearest, zip(s.nearest, s.codes)), ",")
        literals(map(of_floats, s.scales), "},")
    out.write("  }},\n")
out.write("  };\n}\n// clang-format on\n\n}  // namespace ga::test::oracle\n")
