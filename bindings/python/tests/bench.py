# SPDX-License-Identifier: Apache-2.0
"""Prints what a call costs, in microseconds: the least of many short runs."""

import timeit
from typing import Any

import gradaccum as ga
import numpy as np
from gradaccum import _native


def cost(what: str, call: Any, number: int = 1000, repeat: int = 200) -> float:
    least = min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6
    print(f"{what:58} {least:10.3f} us")
    return least


def make(*shape: int) -> tuple[ga.Context, Any]:
    context = ga.Context(ga.Config(num_threads=1))
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD))
    context.add_param(group, "p", np.zeros(shape, np.float32))
    return context, np.ones(shape, np.float32)


context, gradient = make(1)
c, result, expected = context._guard.address, context._result, context._expected[0]
loans = [_native.borrow(gradient, expected)]
cost("raw: ga_accumulate", lambda: _native.ga_accumulate(c, loans, 1.0, None))
cost("raw: ga_step", lambda: _native.ga_step(c, result))
cost("numpy's own __dlpack__", lambda: gradient.__dlpack__(max_version=(1, 0)))
cost("raw: borrow an array of numpy", lambda: _native.borrow(gradient, expected))
cost("accumulate", lambda: context.accumulate([gradient]))
cost("step", context.step)
part = context.micro_batch()
param = context.params[0]
with part:
    cost("micro.accumulate", lambda: part.accumulate(param, gradient))

large, gradient = make(1 << 22)  # 16 MiB
c, loans = large._guard.address, [gradient.ctypes.data]
of_c, ours = 0.0, 0.0
for _ in range(2):
    of_c = cost("16 MiB: raw", lambda: _native.ga_accumulate(c, loans, 1.0, None), 1, 100)
    ours = cost("16 MiB: accumulate", lambda: large.accumulate([gradient]), 1, 100)
print(f"16 MiB: {of_c / ours:.3f} of the raw layer's speed")

try:
    import torch
except ImportError:
    print("torch is not installed")
else:
    tensor = torch.ones(1)
    cost("torch's own __dlpack__", lambda: tensor.__dlpack__(max_version=(1, 0)))
    cost("raw: borrow a tensor of torch", lambda: _native.borrow(tensor, expected))
    many, tensors = ga.Context(ga.Config(num_threads=1)), [torch.ones(4) for _ in range(300)]
    group = many.add_group(ga.Optimizer(ga.OptimizerKind.SGD))
    for number in range(300):
        many.add_param(group, f"p{number}", torch.ones(4))
    c, addresses = many._guard.address, [tensor.data_ptr() for tensor in tensors]
    cost("300 tensors: raw", lambda: _native.ga_accumulate(c, addresses, 1.0, None), 10)
    cost("300 tensors: accumulate, data_ptr", lambda: many.accumulate([t.data_ptr() for t in tensors]), 10)
