#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PEERS with state in 8 bits: the AdamW of bitsandbytes and of torchao, in one process with the library, on the same
tensors, with the same threads.

    low_bit.py FOLDER [--quick] [--threads N] [--json FILE]

A figure without a suffix is the time of a peer's step over that of the library's window of one micro-batch. One of a
path is how far a peer's parameters end from those with state in f32, over how far the library's do; its text has both,
as fractions of the way, and in parentheses those of the small elements alone.

A path: 80 x 64 parameters from 0, gradients d + u with u uniform in [-1, 1] and d = 0.5 of either sign by element.
Every third gradient is multiplied by a factor, so that a block has elements that are small beside the others.

FOLDER is the benchmark's build folder. The figures are added to FILE, which gradaccum_bench has written.
`run` in this folder makes the environment low_bit of tests/environments and starts this script.
"""

import argparse
import importlib
import os
import statistics
import sys

import torch
import torch_window as tw

GA_STATE_8BIT = 16
ROWS, COLUMNS = 80, 64  # torchao has 8 bits for whole blocks alone
MOST = 1e9  # a norm that no gradient has: nothing is clipped
TARGETS = {"bitsandbytes": 5.0, "torchao": 1.5}


class Library:
    """The library's AdamW, in the shape of an optimizer of PyTorch."""

    def __init__(self, library, parameters, threads, state_dtype):
        self.parameters = parameters
        self.window = tw.Window(library, parameters, threads, tw.LIVE, state_dtype, MOST)

    def step(self):
        self.window.run([tw.pointers([p.grad for p in self.parameters])])


def makers(library, threads):
    """Functions that make the optimizer of each system over parameters."""
    made = {
        "f32": lambda parameters: Library(library, parameters, threads, 0),
        "8bit": lambda parameters: Library(library, parameters, threads, GA_STATE_8BIT),
    }
    for name in ("bitsandbytes", "torchao"):
        try:
            adamw = importlib.import_module(f"{name}.optim").AdamW8bit
        except ImportError as error:
            print(f"PEERS: {name} is skipped, because it does not run here: {error}")
            continue
        made[name] = lambda parameters, adamw=adamw: adamw(parameters, lr=tw.LR, weight_decay=0.01)
    return made


def path(make, steps, factor):
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


def check_same(made):
    """Checks that the first step, which no state in 8 bits has had a part in, is the same by all."""
    steps = {name: path(make, 1, 0.02) for name, make in made.items()}
    for name, moved in steps.items():
        worst = float((moved - steps["f32"]).abs().max())
        # torchao has 1 - beta2^t in f32.
        if not worst <= 1e-4 * tw.LR or not moved.abs().min() > 0:
            raise RuntimeError(f"the first step of {name} differs by {worst}")


def measure_paths(made, report, quick):
    for steps, factor in ((10, 0.02), (60, 0.02), (1000, 0.02), (1000, 5e-4)):
        if quick and steps > 60:
            continue
        exact = path(made["f32"], steps, factor)
        small = torch.arange(len(exact)) % 3 == 0
        off = {name: path(make, steps, factor) - exact for name, make in made.items() if name != "f32"}
        far = {name: float(x.norm() / exact.norm()) for name, x in off.items()}
        text = {
            name: f"{far[name]:.4f} ({float(x[small].norm() / exact[small].norm()):.4f})"
            for name, x in off.items()
        }
        for name in off:
            if name != "8bit":
                report.figure(
                    f"PEERS_{name}_path_{steps}_{factor:g}",
                    [far[name] / far["8bit"]],
                    None,
                    f"from f32: {text[name]} / {text['8bit']}",
                )


def measure_steps(made, report, options):
    shape = ((1 << (22 if options.quick else 24)) // 256, 256)
    gradient = torch.randn(shape)
    sides = {}
    for name, make in made.items():
        parameter = torch.nn.Parameter(torch.zeros(shape))
        parameter.grad = gradient.clone()
        sides[name] = make([parameter]).step
        sides[name]()  # makes the state
    t = tw.race(5 if options.quick else 9, sides)
    ns = {name: 1e9 * statistics.median(seconds) / gradient.numel() for name, seconds in t.items()}
    for name in made:
        if name not in ("f32", "8bit"):
            report.figure(
                f"PEERS_{name}",
                tw.ratios(t[name], t["8bit"]),
                TARGETS[name],
                f"{ns[name]:.3f} ns / {ns['8bit']:.3f} ns an element, threads: {options.threads}; "
                f"the library with state in f32: {ns['f32']:.3f} ns",
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    made = makers(tw.Library(options.folder), options.threads)
    check_same(made)
    openmp = tw.assert_one_libgomp()
    versions = [f"{name} {sys.modules[name].__version__}" for name in TARGETS if name in made]
    machine = ", ".join([f"PyTorch {torch.__version__}", *versions, f"threads: {options.threads}"])
    machine += f", one OpenMP: {os.path.basename(openmp)} of PyTorch"
    print(machine)
    report = tw.Report()
    measure_paths(made, report, options.quick)
    measure_steps(made, report, options)
    if options.json:
        report.write(options.json, machine, "machine_low_bit")


if __name__ == "__main__":
    sys.exit(main())
