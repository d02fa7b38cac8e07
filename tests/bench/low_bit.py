#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""AdamW with state in 8 bits: gradaccum.torch's, bitsandbytes' and torchao's, on the CPU. How far a path of steps is
from that with state of f32, and how long a step takes, in turns.

    low_bit.py [THREADS]     with a Python that has torch and gradaccum; bitsandbytes and torchao if they are there

The path: 80 x 64 parameters from 0, gradients d + u with u uniform in [-1, 1] and d = 0.5 of either sign by element.
Every third gradient is multiplied by a factor, so that a block has elements that are small beside the others.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import gradaccum.torch as gt
import torch

ROWS, COLUMNS = 80, 64  # torchao has 8 bits for whole blocks alone
Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def makers() -> dict[str, Make]:
    """What makes the optimizer of each system, for those that are installed."""
    made: dict[str, Make] = {
        "f32": lambda p: gt.AdamW(p, lr=1e-3, weight_decay=0),
        "gradaccum": lambda p: gt.AdamW(p, lr=1e-3, weight_decay=0, state_dtype="8bit"),
    }
    try:
        import bitsandbytes

        made["bitsandbytes"] = lambda p: bitsandbytes.optim.AdamW8bit(p, lr=1e-3, weight_decay=0)
    except ImportError as error:
        print(f"bitsandbytes is skipped: {error}")
    try:
        import torchao.optim

        made["torchao"] = lambda p: torchao.optim.AdamW8bit(p, lr=1e-3, weight_decay=0)
    except ImportError as error:
        print(f"torchao is skipped: {error}")
    return made


def path(make: Make, steps: int, factor: float) -> torch.Tensor:
    """What the parameters have moved by."""
    generator = torch.Generator().manual_seed(3)
    index = torch.arange(ROWS * COLUMNS)
    small = torch.where(index % 3 == 0, factor, 1.0)
    sign = torch.where(index % 2 == 0, 0.5, -0.5)
    parameter = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = make([parameter])
    for _ in range(steps):
        noise = 2 * torch.rand(ROWS * COLUMNS, generator=generator) - 1
        parameter.grad = (small * (sign + noise)).view(ROWS, COLUMNS)
        optimizer.step()
    return parameter.detach().view(-1).double()


def race(made: dict[str, Make], elements: int, rounds: int) -> dict[str, float]:
    """The median of a step, in nanoseconds an element."""
    sides: dict[str, tuple[Any, Any, list[float]]] = {}
    for name, make in made.items():
        parameter = torch.nn.Parameter(torch.zeros(elements // 256, 256))
        optimizer = make([parameter])
        sides[name] = (parameter, optimizer, [])
    gradient = torch.randn_like(parameter)
    for _ in range(rounds + 1):  # the first makes the state
        for parameter, optimizer, times in sides.values():
            parameter.grad = gradient.clone()
            start = time.perf_counter()
            optimizer.step()
            times.append(1e9 * (time.perf_counter() - start) / elements)
    return {name: statistics.median(times[1:]) for name, (_, _, times) in sides.items()}


def main() -> None:
    """Prints both tables."""
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    made = makers()
    print("distance from the path with state of f32, over its length; of the small elements alone")
    for steps, factor in ((10, 0.02), (60, 0.02), (1000, 0.02), (1000, 5e-4)):
        exact = path(made["f32"], steps, factor)
        small = torch.arange(len(exact)) % 3 == 0
        for name, make in made.items():
            if name == "f32":
                continue
            off = path(make, steps, factor) - exact
            print(
                f"  {steps:5} steps, factor {factor:g}: {name:13}"
                f" {off.norm() / exact.norm():8.4f} {off[small].norm() / exact[small].norm():8.4f}"
            )
    print("a step of 16 Mi elements, ns an element")
    for name, median in race(made, 1 << 24, 7).items():
        print(f"  {name:13} {median:8.3f}")


if __name__ == "__main__":
    main()
