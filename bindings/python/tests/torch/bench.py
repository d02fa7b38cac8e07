# SPDX-License-Identifier: Apache-2.0
"""A window of 4 on the shapes of GPT-2 124M: torch's accumulation, clipping and fused AdamW, and the library.

Both get their gradients from the same backward. Prints the least time of a window of each, in turns, and what
memory each needs beyond the parameters; a run with --memory ours|torch measures memory alone.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import torch

MICROS, CLIP = 4, 1.0


def shapes(layers: int) -> list[tuple[int, ...]]:
    d = 768
    block: list[tuple[int, ...]] = [
        (d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,),
    ]  # fmt: skip
    return [(50257, d), (1024, d), *(block * layers), (d,), (d,)]


class Run:
    def __init__(self, ours: bool, layers: int) -> None:
        torch.manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes(layers)]
        self.one = torch.ones(())
        self.gradients = [torch.randn(shape) * 1e-3 for shape in shapes(layers)]
        self.ours = ours
        clip = ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=CLIP)
        self.optimizer: Any = (
            gt.AdamW(self.params, clip=clip) if ours else torch.optim.AdamW(self.params, fused=True)
        )

    def backward(self) -> None:
        """One tensor after the other, as layers come; each gradient is a temporary of backward's."""
        for parameter, gradient in zip(reversed(self.params), reversed(self.gradients), strict=True):
            torch.autograd.backward([parameter * self.one], [gradient])

    def window(self) -> None:
        for _ in range(MICROS):
            if self.ours:
                with self.optimizer.micro_batch():
                    self.backward()
            else:
                self.backward()
        if not self.ours:
            torch._foreach_mul_([p.grad for p in self.params], 1 / MICROS)
            torch.nn.utils.clip_grad_norm_(self.params, CLIP, foreach=True)
        self.optimizer.step()
        if not self.ours:
            self.optimizer.zero_grad()


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def resident() -> int:
    """The most KiB that were resident in this process; getrusage would count the one that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--memory", choices=("ours", "torch"))
    options = parser.parse_args()
    if options.memory is not None:
        run = Run(options.memory == "ours", options.layers)
        before = resident()
        for _ in range(2):
            run.window()
        largest = max(p.numel() for p in run.params) * 4
        elements = sum(p.numel() for p in run.params) * 4
        grown = (resident() - before) * 1024
        print(
            f"{options.memory}: {grown / 2**20:.0f} MiB beyond parameters of {elements / 2**20:.0f} MiB, "
            f"the largest of which has {largest / 2**20:.0f} MiB"
        )
        return
    runs = {name: Run(name == "ours", options.layers) for name in ("torch", "ours")}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.windows):
        for name, run in runs.items():
            times[name].append(timed(run.window))
    backward = min(
        timed(lambda: [torch.mul(g, runs["ours"].one) for g in runs["ours"].gradients]) for _ in range(3)
    )
    least = {name: min(list_) for name, list_ in times.items()}
    print(
        f"torch {least['torch'] * 1e3:.1f} ms, ours {least['ours'] * 1e3:.1f} ms a window; "
        f"making its gradients costs both about {MICROS * backward * 1e3:.1f} ms"
    )
    print(f"ours is {least['torch'] / least['ours']:.2f} times as fast (target 1.2)")
    for name in runs:
        subprocess.run(
            [sys.executable, __file__, "--memory", name, "--layers", str(options.layers)], check=True
        )


if __name__ == "__main__":
    main()
