# SPDX-License-Identifier: Apache-2.0
"""The step under backward where two processes have a model in parts (FSDP2), beside the step after it.

usage: fsdp_eager.py [--out FOLDER] [--layers N] [--width N] [--windows N] [--batch N]

Trains a transformer three times, in windows of four micro-batches that are clipped by their norm over both ranks, of
which one overflows and is skipped: with step() after backward; with eager=True, which updates parameters while backward
goes on; and with step() again, keeping the gradients that FSDP2 has reduced. With these, one process makes the same steps
alone. All four end with the same bits, or the exit status is 1. Prints how much of the step is hidden, and writes
FOLDER/fsdp_eager.csv, of when gradients came and when the step was done, which gnuplot draws if it is there.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import gradaccum as ga
import gradaccum.torch
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS, MICROS, LENGTH, WORDS, OVERFLOWS = 2, 4, 16, 64, 2
CLIP = ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=6.0)
ADAMW = {"lr": 1e-3, "weight_decay": 0.01}


class Transformer(nn.Module):
    """Says which word comes next."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layers(self.words(x), mask=self.mask, is_causal=True))
        return out


@dataclass
class Run:
    """One training, as a rank has seen it."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)  # seconds of step()
    windows: list[float] = field(default_factory=list)  # seconds of the last micro-batch's backward and step()
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # reduced, of each micro-batch
    arrived: list[tuple[str, float]] = field(default_factory=list)  # of the last window, from its backward on
    results: list[ga.StepResult] = field(default_factory=list)


def batch_of(rank: int, window: int, micro: int, size: int) -> Tensor:
    """The rank's sequences: rank 1 has three times as many as rank 0."""
    generator = torch.Generator().manual_seed(100 * window + micro)
    x = torch.randint(0, WORDS, (size, LENGTH + 1), generator=generator)
    return x[: size // 4] if rank == 0 else x[size // 4 :]


def train(rank: int, options: argparse.Namespace, mesh: Any, *, eager: bool = False, keeps: bool = False) -> Run:
    """keeps: takes gradients from .grad, and keeps them."""
    torch.manual_seed(0)
    net = Transformer(options.layers, options.width)
    for layer in (*net.layers.layers, net):
        fully_shard(layer, mesh=mesh)
    run, begun = Run(), time.perf_counter()
    for name, parameter in net.named_parameters():
        hook: Any = lambda _, name=name: run.arrived.append((name, time.perf_counter() - begun))
        parameter.register_post_accumulate_grad_hook(hook)
    config = ga.Config(gradient_kind=ga.GradientKind.SUM if keeps else ga.GradientKind.MEAN, eager_threads=int(eager))
    optimizer = gradaccum.torch.AdamW(
        net.named_parameters(), **ADAMW, data_mesh=mesh, clip=CLIP, config=config, accum_steps=MICROS, eager=eager,
    )  # fmt: skip
    for window in range(options.windows):
        for micro in range(MICROS):
            x = batch_of(rank, window, micro, options.batch)
            loss = nn.functional.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            if (window, micro, rank) == (OVERFLOWS, 1, 1):
                loss = loss * float("inf")
            torch.distributed.barrier()
            begun = time.perf_counter()
            run.arrived.clear()
            if keeps:
                (loss * len(x)).backward()
                run.gradients.append({name: p.grad.full_tensor().clone() for name, p in net.named_parameters()})
                optimizer.accumulate(weight=len(x))
            else:
                optimizer.backward(loss, weight=len(x))
        ended = time.perf_counter()
        optimizer.step()
        done = time.perf_counter()
        assert optimizer.result is not None
        run.results.append(optimizer.result)
        if window != OVERFLOWS and window > 0:  # arrays are made in the first one
            run.steps.append(done - ended)
            run.windows.append(done - begun)
    run.arrived += [("backward", ended - begun), ("step", done - begun)]
    run.parameters = {name: p.full_tensor().detach().clone() for name, p in net.named_parameters()}
    return run


def in_one_process(kept: Run, options: argparse.Namespace) -> dict[str, Tensor]:
    """The parameters that one process reaches with the gradients that FSDP2 has reduced."""
    torch.manual_seed(0)
    found = {name: p.detach().clone() for name, p in Transformer(options.layers, options.width).named_parameters()}
    with ga.Context(ga.Config(gradient_kind=ga.GradientKind.SUM)) as context:
        group = context.add_group(ga.Optimizer(ga.OptimizerKind.ADAMW, ga.Flavor.TORCH, **ADAMW))
        for name, value in found.items():
            context.add_param(group, name, value)
        context.set_clip(CLIP)
        alone = ga.Communicator.from_all_gather(0, 1, bytes)
        context.set_communicator(alone, ga.CommunicatorOptions(shard=ga.CommShard.PARAMETERS))
        for micro, gradients in enumerate(kept.gradients):
            # FSDP2 has divided by the number of ranks, which is a power of two.
            context.accumulate([gradients[name] * RANKS for name in found], weight=options.batch)
            if micro % MICROS == MICROS - 1:
                context.step()
    return found


def draw(runs: dict[str, Run], folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table, plot = folder / "fsdp_eager.csv", folder / "fsdp_eager.gp"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["way", "what", "milliseconds"])
        for way, run in runs.items():
            rows.writerows([way, what, f"{1e3 * seconds:.3f}"] for what, seconds in run.arrived)
    lines = [
        "set terminal svg size 900,260 dynamic; set output 'fsdp_eager.svg'",
        "set xlabel 'milliseconds from the beginning of the last backward of a window'; set xrange [0:*]",
        "set yrange [0.5:2.5]; set ytics (" + ", ".join(f"'{way}' {2 - k}" for k, way in enumerate(runs)) + ")",
        "set key outside top center horizontal",
    ]
    for k, run in enumerate(runs.values()):
        ended, done = (1e3 * seconds for _, seconds in run.arrived[-2:])
        box = f"set object rectangle from {{:.3f}},{1.75 - k} to {{:.3f}},{2.25 - k} behind fc rgb '{{}}' fs solid noborder"
        lines += [box.format(0, ended, "#c8d6e8"), box.format(ended, done, "#d95f02")]
    titles = ["title 'a gradient is there'", "notitle"]
    marks = [f"'-' using 1:({2 - k}) with points pt 2 lc rgb '#1b4f8a' {titles[k]}" for k in range(len(runs))]
    keys = [f"keyentry with boxes fs solid lc rgb '{color}' title '{what}'"
            for color, what in (("#c8d6e8", "backward"), ("#d95f02", "step()"))]  # fmt: skip
    lines.append("plot " + ", ".join(marks + keys))
    for run in runs.values():
        lines += [f"{1e3 * seconds:.3f}" for _, seconds in run.arrived[:-2]] + ["e"]
    plot.write_text("\n".join(lines) + "\n")
    print(table)
    if shutil.which("gnuplot"):
        subprocess.run(["gnuplot", plot.name], cwd=folder, check=True)
        print(folder / "fsdp_eager.svg")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def work(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,))
    late, early = train(rank, options, mesh), train(rank, options, mesh, eager=True)
    kept = train(rank, options, mesh, keeps=True)
    torch.distributed.destroy_process_group()
    if rank > 0:
        return
    elements = sum(p.numel() for p in late.parameters.values())
    clipped = sum(result.clip_factor < 1 for result in late.results if result.applied)
    print(f"{elements / 1e6:.1f} M parameters on {RANKS} ranks, {options.windows} windows of {MICROS} micro-batches with "
          f"the weights {options.batch // 4} and {options.batch - options.batch // 4}")  # fmt: skip
    print(f"clipped: {clipped}, skipped: {late.results[-1].skipped}; updated under backward: {early.results[-1].eager} "
          f"of {len(late.parameters)} parameters, {early.results[-1].eager_redone} again")  # fmt: skip
    for what, run in (("after backward", late), ("under backward", early)):
        print(f"{what}: step() {1e3 * statistics.median(run.steps):.2f} ms, with the last backward "
              f"{1e3 * statistics.median(run.windows):.2f} ms")  # fmt: skip
    hidden = 1 - statistics.median(early.steps) / statistics.median(late.steps)
    print(f"hidden: {hidden:.0%} of step()")
    draw({"after backward": late, "under backward": early}, pathlib.Path(options.out))
    equal = (same(late.parameters, early.parameters), same(late.parameters, kept.parameters),
             same(late.parameters, in_one_process(kept, options)))  # fmt: skip
    print("bits: under backward {}, with gradients from .grad {}, of one process {}".format(
        *("equal" if found else "DIFFERENT" for found in equal)))  # fmt: skip
    if not all(equal):
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="examples/out")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (options, folder), nprocs=RANKS)


if __name__ == "__main__":
    main()
