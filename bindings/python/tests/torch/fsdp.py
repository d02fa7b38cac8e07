# SPDX-License-Identifier: Apache-2.0
"""A small transformer that ranks have in parts, and the same one in plain torch: one process, whole batches, f64."""

from collections.abc import Callable, Sequence
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import ranks
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 4
BATCH = 20
ADAMW = {"lr": 0.02, "weight_decay": 0.1}
MAX_NORM = 0.3
CLIP = ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=MAX_NORM)
WINDOWS = {  # by the number of ranks with samples of their own: how many each has in the micro-batches of a window
    1: ((5,), (3,), (8,), (4,)),
    2: ((1, 4), (2, 1), (8, 0), (3, 1)),
    4: ((1, 2, 1, 1), (0, 1, 2, 0), (2, 1, 1, 4), (1, 0, 1, 2)),
}
EVEN = {2: ((2, 2),) * 5, 4: ((1, 1, 1, 1),) * 5}


class Net(torch.nn.Module):
    """A layer of a transformer. Neither 2 nor 4 ranks divide the rows of all its parameters."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.Embedding(7, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.q, self.v, self.o = (torch.nn.Linear(6, 6) for _ in range(3))
        self.k = torch.nn.Linear(6, 6, bias=False)  # whose gradient is 0 but for rounding
        self.up, self.down = torch.nn.Linear(6, 10), torch.nn.Linear(10, 6)
        self.out = torch.nn.Linear(6, 3)
        self.to(dtype)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.table(rows)
        h = self.norm(x)
        q, k, v = (part(h).unflatten(2, (-1, 3)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(torch.tanh(self.up(x)))
        result: Tensor = self.out(x.mean(1))
        return result


PLAN = {name: ColwiseParallel() for name in ("q", "k", "v", "up")} | {name: RowwiseParallel() for name in ("o", "down")}


def batches() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, 7, (STEPS, BATCH, 4), generator=generator)
    return rows, torch.randn(STEPS, BATCH, 3, generator=generator, dtype=torch.float64)


def mean(net: torch.nn.Module, rows: Tensor, y: Tensor) -> Tensor:
    """The loss. That of no sample is the loss of any other, since its weight is 0."""
    if len(rows) == 0:
        rows, y = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 3)
    loss: Tensor = (net(rows).double() - y).square().mean()
    return loss


def micro_batches(step: int, place: int, windows: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor, int]]:
    """The samples of one rank of those with other samples, in each micro-batch of a window."""
    (rows, y), at, found = batches(), 0, []
    for counts in windows:
        share = ranks.mine(place, tuple(counts))
        part = slice(at + share.start, at + share.stop)
        found.append((rows[step][part], y[step][part], counts[place]))
        at += sum(counts)
    assert at == BATCH
    return found


def reference(
    skipped: Sequence[int] = (), average: float | None = None
) -> tuple[dict[str, Tensor], dict[str, Any], list[float]]:
    """What torch reaches: the parameters (their average, if a decay is given), its optimizer's state and the norms."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    (rows, y), norms = batches(), []
    mean_of = torch.optim.swa_utils.get_ema_multi_avg_fn(0.999 if average is None else average)
    averaged = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=mean_of)
    for step in range(STEPS):
        if step in skipped:
            continue
        optimizer.zero_grad()
        mean(net, rows[step], y[step]).backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)))
        optimizer.step()
        averaged.update_parameters(net)
    state = {name: optimizer.state[parameter] for name, parameter in net.named_parameters()}
    ended = net if average is None else averaged.module
    return ended.state_dict(), state, norms


# ---- Ranks


class Cut:
    """A network in parts, and over which ranks its gradients are reduced."""

    def __init__(self, how: str, rank: int, count: int, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        self.net: Any = Net(dtype)
        self.data: DeviceMesh | tuple[()] = ()
        self.count, self.place = 1, 0  # of the ranks that have samples of their own
        if how in ("fsdp", "hsdp"):
            names = {"fsdp": ("data",), "hsdp": ("copy", "shard")}[how]
            self.data = init_device_mesh("cpu", (count,) if how == "fsdp" else (2, 2), mesh_dim_names=names)
            self.count, self.place = count, rank
        else:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
            parallelize_module(self.net, mesh["tensor"], PLAN)
            if how == "fsdp+tp":
                self.data, self.count, self.place = mesh["data"], 2, rank // 2
        if self.data:
            for part in (self.net.up, self.net.o, self.net):
                fully_shard(part, mesh=self.data, **options)

    def optimizer(self, **options: Any) -> Any:
        return self.optimizer_of(self.net.named_parameters(), **options)

    def optimizer_of(self, params: Any, **options: Any) -> Any:
        return gt.AdamW(params, **{**ADAMW, "clip": CLIP, "data_mesh": self.data, **options})

    def micro_batches(self, step: int, windows: Any = None) -> list[tuple[Tensor, Tensor, int]]:
        return micro_batches(step, self.place, (windows or WINDOWS)[self.count])

    def whole(self) -> dict[str, Tensor]:
        return {name: whole(value) for name, value in self.net.state_dict().items()}


def whole(value: Tensor) -> Tensor:
    found: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach().clone()


Take = Callable[[Any, Any, Tensor, Tensor, int], None]


def by_backward(optimizer: Any, net: Any, rows: Tensor, y: Tensor, n: int) -> None:
    optimizer.backward(mean(net, rows, y), weight=n)


def window(cut: Cut, optimizer: Any, step: int, take: Take = by_backward) -> None:
    for rows, y, n in cut.micro_batches(step):
        take(optimizer, cut.net, rows, y, n)
    optimizer.step()


def train(cut: Cut, optimizer: Any, take: Take = by_backward, first: int = 0) -> dict[str, Any]:
    """Trains, and returns the parameters and what the last step says."""
    for step in range(first, STEPS):
        window(cut, optimizer, step, take)
    return ended(cut, optimizer)


def ended(cut: Cut, optimizer: Any) -> dict[str, Any]:
    result = optimizer.result
    return {
        "net": cut.whole(), "weight": result.weight, "norm": result.norm, "micro_batches": result.micro_batches,
        "skipped": result.skipped,
    }  # fmt: skip
