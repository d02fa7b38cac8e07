# SPDX-License-Identifier: Apache-2.0
"""A small transformer that two processes have in parts (FSDP2), trained by windows of four micro-batches.

usage: fsdp.py [--steps N] [--ranks N]

The ranks get different numbers of sequences. Each window is clipped by its norm over all ranks, and is one batch of all
their sequences: the same one for any number of ranks, so that the losses that are printed are the same but for rounding.
Needs torch. docs/torch.md explains the optimizer.
"""

from __future__ import annotations

import argparse
import tempfile

import gradaccum
import gradaccum.torch
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORDS, WIDTH, LENGTH, MICROS, SEQUENCES = 50, 32, 12, 4, 16


class Transformer(nn.Module):
    """Says after each word how often it has been there."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, LENGTH)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layers(self.words(x), mask=self.mask, is_causal=True))
        return out


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    times = (x.unsqueeze(1) == x.unsqueeze(2)).tril().sum(2) - 1
    return nn.functional.cross_entropy(net(x).flatten(0, 1), times.flatten())


def train(rank: int, ranks: int, steps: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    net = Transformer()
    for layer in (*net.layers.layers, net):
        fully_shard(layer, mesh=mesh)
    optimizer = gradaccum.torch.AdamW(
        net.named_parameters(), lr=3e-3, data_mesh=mesh,
        clip=gradaccum.Clip(scope=gradaccum.ClipScope.GLOBAL, max_norm=0.5),
    )  # fmt: skip
    cuts = [SEQUENCES * (r * (r + 1)) // (ranks * (ranks + 1)) for r in range(ranks + 1)]
    words = torch.Generator().manual_seed(1)
    for step in range(steps):
        total = torch.zeros(())
        for _ in range(MICROS):
            x = torch.randint(0, WORDS // 10, (SEQUENCES, LENGTH), generator=words)[cuts[rank] : cuts[rank + 1]]
            loss = loss_of(net, x)
            optimizer.backward(loss, weight=len(x))
            total += loss.detach() * len(x)
        optimizer.step()
        torch.distributed.all_reduce(total)
        result = optimizer.result
        if rank == 0 and result is not None and (step % 10 == 0 or step == steps - 1):
            print(
                f"step {step + 1}: loss {float(total) / result.weight:.5f} of {result.weight:g} sequences, "
                f"norm {result.norm:.5f}, clipped by {result.clip_factor:.5f}", flush=True,
            )  # fmt: skip
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (options.ranks, options.steps, folder), nprocs=options.ranks)


if __name__ == "__main__":
    main()
