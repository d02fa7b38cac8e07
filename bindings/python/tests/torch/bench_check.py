# SPDX-License-Identifier: Apache-2.0
"""What gradaccum.check costs: windows of 4 of a transformer with 11 million parameters, watched and not.

Prints the least time of a window of each, in turns, and by how much the greatest memory of a process is larger if it
watches (--memory measures one).
"""

import argparse
import contextlib
import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from gradaccum import check
from torch import Tensor, nn

MICROS, WORDS, WIDTH = 4, 3000, 384


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, 0.0, batch_first=True)
        self.inner = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.TransformerEncoder(layer, 5), nn.Linear(WIDTH, WORDS))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


def window(net: nn.Module, optimizer: torch.optim.Optimizer, samples: int) -> None:
    for _ in range(MICROS):
        x = torch.randint(0, WORDS, (samples, 64))
        (F.cross_entropy(net(x).flatten(0, 1), x.flatten()) / MICROS).backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", choices=("plain", "watched"))
    memory = parser.parse_args().memory
    net = Transformer()
    optimizer = torch.optim.AdamW(net.parameters())
    if memory is not None:
        with check.record(net, optimizer) if memory == "watched" else contextlib.nullcontext():
            for _ in range(4):
                window(net, optimizer, 1)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return
    size = sum(parameter.numel() for parameter in net.parameters())
    print(f"{size / 1e6:.1f} M parameters, {torch.get_num_threads()} threads, windows of {MICROS}")
    for samples in (1, 2, 4):
        best = {"plain": 1e9, "watched": 1e9}
        for _ in range(10):
            for name in best:
                with check.record(net, optimizer) if name == "watched" else contextlib.nullcontext():
                    window(net, optimizer, samples)
                    start = time.perf_counter()
                    window(net, optimizer, samples)
                    best[name] = min(best[name], time.perf_counter() - start)
        times = f"plain {best['plain'] * 1e3:.0f} ms, watched {best['watched'] * 1e3:.0f} ms"
        print(f"micro-batches of {64 * samples} tokens: {times}, {best['watched'] / best['plain']:.2f} times")
    used = {}
    for name in ("plain", "watched"):
        runs = [subprocess.check_output([sys.executable, __file__, "--memory", name]) for _ in range(3)]
        used[name] = min(map(int, runs))
    more = used["watched"] - used["plain"]
    print(f"memory: {more / 1e6:.1f} MB more, {more / (4 * size):.1%} of the parameters")


if __name__ == "__main__":
    main()
