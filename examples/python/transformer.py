# SPDX-License-Identifier: Apache-2.0
"""A small transformer learns the lines of a text: whole batches, and windows of micro-batches.

usage: transformer.py [--text FILE] [--steps N] [--state f32|bf16|8bit] [--seed N] [--out FOLDER]

Three runs see the same batches of 32 lines. One takes each batch whole. One adds up four micro-batches as
loops by hand do, each divided by four, although their lines have different numbers of characters. One gives
each micro-batch to gradaccum with its number of characters. The last one is the first one but for rounding.
Writes the losses as a table and a picture. Needs torch, and for the picture matplotlib; a progress bar comes
with tqdm. docs/torch.md explains the optimizer.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

import gradaccum.torch as gt
import torch
from torch import Tensor, nn

try:
    from tqdm import tqdm
except ImportError:

    def tqdm(steps: Iterable[int], **_: object) -> Iterable[int]:  # type: ignore[no-redef]
        return steps


LINES, MICROS, LENGTH, WIDTH = 32, 4, 96, 64
PAD = 0


def encode(text: str) -> Tensor:
    """Lines of bytes, [lines, LENGTH + 1], filled up with PAD."""
    lines = [line.encode()[: LENGTH + 1] for line in text.splitlines() if len(line) > 1]
    return torch.tensor([list(line) + [PAD] * (LENGTH + 1 - len(line)) for line in lines])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layers(self.bytes(x) + self.places, mask=self.mask, is_causal=True))
        return out


def loss_of(net: nn.Module, lines: Tensor) -> tuple[Tensor, int]:
    """The mean over the characters that there are, and their number."""
    x, y = lines[:, :-1], lines[:, 1:]
    loss = nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten(), ignore_index=PAD)
    return loss, int((y != PAD).sum())


def train(way: str, data: Tensor, options: argparse.Namespace) -> Iterator[tuple[nn.Module, float]]:
    """After each step, the network and its loss before the step."""
    torch.manual_seed(options.seed)
    net = Transformer()
    params = net.parameters()
    optimizer: torch.optim.Optimizer
    if way == "gradaccum":
        optimizer = gt.AdamW(params, lr=1e-3, state_dtype=None if options.state == "f32" else options.state)
    else:
        optimizer = torch.optim.AdamW(params, lr=1e-3)
    generator = torch.Generator().manual_seed(options.seed + 1)
    for _ in tqdm(range(options.steps), desc=way):
        # Sorted, so that micro-batches differ in length, as batches do that are made of alike lines.
        batch = data[torch.randperm(len(data), generator=generator)[:LINES]]
        batch = batch[(batch != PAD).sum(1).argsort()]
        total, characters = 0.0, 0
        for part in batch.chunk(1 if way == "whole" else MICROS):
            loss, count = loss_of(net, part)
            if isinstance(optimizer, gt.Optimizer):
                optimizer.backward(loss, weight=count)
            else:
                (loss if way == "whole" else loss / MICROS).backward()
            total += loss.item() * count
            characters += count
        optimizer.step()
        optimizer.zero_grad()
        yield net, total / characters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--text", type=Path, default=here / "docs" / "reference.md")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--state", choices=("f32", "bf16", "8bit"), default="f32", help="of gradaccum's AdamW")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=here / "examples" / "out")
    options = parser.parse_args()
    data = encode(options.text.read_text())
    print(f"{len(data)} lines of {options.text.name}")
    ways = {"whole": "whole batches", "hand": "by hand", "gradaccum": "gradaccum"}
    losses: dict[str, list[float]] = {}
    nets: dict[str, nn.Module] = {}
    for way in ways:
        for net, loss in train(way, data, options):
            losses.setdefault(way, []).append(loss)
            nets[way] = net
    first = torch.cat([p.detach().flatten() for p in nets["whole"].parameters()])
    for way in ("hand", "gradaccum"):
        other = torch.cat([p.detach().flatten() for p in nets[way].parameters()])
        print(
            f"{ways[way]:10} mean of the last 20 losses {sum(losses[way][-20:]) / 20:.4f}, "
            f"parameters {float((first - other).norm() / first.norm()):.2g} from whole batches"
        )

    options.out.mkdir(parents=True, exist_ok=True)
    with open(options.out / "transformer.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", *losses])
        table.writerows([i + 1, *row] for i, row in enumerate(zip(*losses.values(), strict=True)))
    try:
        from matplotlib import pyplot
    except ImportError:
        print("matplotlib is not installed, so there is no picture")
        return
    figure, (top, bottom) = pyplot.subplots(2, sharex=True)
    for way, name in ways.items():
        top.plot(losses[way], label=name, linestyle={"whole": "-", "hand": ":", "gradaccum": "--"}[way])
        if way != "whole":
            differences = [abs(a - b) for a, b in zip(losses[way], losses["whole"], strict=True)]
            bottom.semilogy(differences, label=name)
    top.set_ylabel("loss")
    bottom.set_ylabel("difference from whole batches")
    bottom.set_xlabel("step")
    top.legend()
    bottom.legend()
    figure.savefig(options.out / "transformer.svg")
    print(f"{options.out / 'transformer.svg'}")


if __name__ == "__main__":
    main()
