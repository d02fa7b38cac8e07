# SPDX-License-Identifier: Apache-2.0
"""Ranks under DistributedDataParallel whose shares differ, against one process that sees whole batches in f64."""

from collections.abc import Callable, Iterator
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import ranks
import torch
from conftest import Task, train
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 4
WINDOWS = {2: ((4, 1), (1, 2)), 3: ((3, 1, 0), (1, 2, 1))}  # samples of each rank in the micro-batches of a window
KEEP = {"lr": 0.05, "momentum": 0.9}

Parts = Iterator[tuple[Tensor, Tensor, int]]
Case = Callable[[int, int], Any]


def parts(task: Task, rank: int, count: int, step: int) -> Parts:
    """A rank's share of each micro-batch of a window."""
    at = 0
    for counts in WINDOWS[count]:
        share = ranks.mine(rank, counts)
        micro = slice(at + share.start, at + share.stop)
        yield task.x[step][micro], task.y[step][micro], counts[rank]
        at += sum(counts)


def start(task: Task, **options: Any) -> tuple[Any, Any]:
    net = task.net()
    return net, DistributedDataParallel(net, **options)


def loop(
    task: Task, rank: int, count: int, take: Callable[[Any, Any, Tensor, Tensor, int], None],
    make: Callable[..., Any] = gt.SGD, ddp: dict[str, Any] | None = None, before: Callable[[Any], None] | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Trains, and returns the parameters and the result of the last step."""
    net, model = start(task, **(ddp or {}))
    if before is not None:
        before(model)
    options = {**(KEEP if make is gt.SGD else {"lr": 0.01}), **options}
    optimizer = make(net.named_parameters(), ddp=model, **options)
    for step in range(STEPS):
        for x, y, n in parts(task, rank, count, step):
            take(optimizer, model, x, y, n)
        optimizer.step()
    found = net.state_dict()
    masters = {
        param.name: torch.utils.dlpack.from_dlpack(param.get_state("master")).reshape(found[param.name].shape)
        for param in optimizer.context.params if task.dtype in (torch.float16, torch.bfloat16)
    }  # fmt: skip
    return {
        "net": found, "masters": masters, "weight": optimizer.result.weight, "noise": optimizer.noise_scale,
    }  # fmt: skip


# ---- Ways in


def mean(model: Any, x: Tensor, y: Tensor, n: int) -> Any:
    """The mean over the samples; of none, NaN, of which all gradients are NaN."""
    if n == 0:  # a sample that a mask takes out
        x, y = torch.ones(1, 5, dtype=x.dtype), torch.ones(1, 3, dtype=y.dtype)
    dtype = next(model.parameters()).dtype
    each = (model(x.to(dtype)).double() - y).square().mean(1)
    mask = torch.full_like(each, float(n > 0))
    return (mask * each).sum() / mask.sum()


def by_backward(optimizer: Any, model: Any, x: Tensor, y: Tensor, n: int) -> None:
    optimizer.backward(mean(model, x, y, n), weight=n)


def by_micro_batch(optimizer: Any, model: Any, x: Tensor, y: Tensor, n: int) -> None:
    with optimizer.micro_batch(weight=n):
        mean(model, x, y, n).backward()


def by_two_losses(optimizer: Any, model: Any, x: Tensor, y: Tensor, n: int) -> None:
    with optimizer.micro_batch(weight=n):
        for share in (0.25, 0.75):
            optimizer.scale_loss(mean(model, x, y, n) * share).backward()


def by_sum(optimizer: Any, model: Any, x: Tensor, y: Tensor, n: int) -> None:
    optimizer.backward(mean(model, x, y, n) * n if n else mean(model, x, y, n), weight=n)


def by_sum_from_grad(optimizer: Any, model: Any, x: Tensor, y: Tensor, n: int) -> None:
    (mean(model, x, y, n) * n if n else model(torch.ones(1, 5, dtype=x.dtype)).sum() * 0).backward()
    optimizer.accumulate(weight=n)


def backwards(rank: int, count: int) -> Any:
    return loop(Task(), rank, count, by_backward)


def adamw(rank: int, count: int) -> Any:
    return loop(Task(), rank, count, by_backward, gt.AdamW, config=ga.Config(noise_scale=True))


def micro_batches(rank: int, count: int) -> Any:
    return loop(Task(), rank, count, by_micro_batch)


def two_losses(rank: int, count: int) -> Any:
    return loop(Task(), rank, count, by_two_losses)


def scaled(rank: int, count: int) -> Any:
    return loop(Task(), rank, count, by_two_losses, loss_scaler=ga.LossScaler(initial_scale=1024))


def clipped(rank: int, count: int) -> Any:
    clip = ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=0.1)
    return loop(Task(), rank, count, by_backward, clip=clip)


def drop_micro(rank: int, count: int) -> Any:
    return loop(Task(), rank, count, by_backward, config=ga.Config(nonfinite=ga.Nonfinite.DROP_MICRO))


def sums(rank: int, count: int) -> Any:
    return loop(Task(), rank, count, by_sum, config=ga.Config(gradient_kind=ga.GradientKind.SUM))


def sums_from_grad(rank: int, count: int) -> Any:
    return loop(Task(), rank, count, by_sum_from_grad, config=ga.Config(gradient_kind=ga.GradientKind.SUM))


def bucket_view(rank: int, count: int) -> Any:
    return loop(Task(), rank, count, by_two_losses, ddp={"gradient_as_bucket_view": True})


def static_graph(rank: int, count: int) -> Any:
    return loop(Task(), rank, count, by_backward, ddp={"static_graph": True})


def find_unused(rank: int, count: int) -> Any:
    return loop(Task(), rank, count, by_backward, ddp={"find_unused_parameters": True})


def small_buckets(rank: int, count: int) -> Any:
    return loop(Task(), rank, count, by_micro_batch, ddp={"bucket_cap_mb": 0.0001})


class Checkpointed(torch.nn.Sequential):
    """Each layer is a backward within the backward."""

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_()
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class CheckpointedTask(Task):
    def net(self) -> torch.nn.Sequential:
        return Checkpointed(*super().net())


def checkpoints(rank: int, count: int) -> Any:
    return loop(CheckpointedTask(), rank, count, by_two_losses)


def tails(rank: int, count: int) -> Any:
    """Windows of four micro-batches, of which the last has two."""
    task = Task()
    net, model = start(task)
    optimizer = gt.SGD(net.parameters(), ddp=model, accum_steps=4, **KEEP)
    for step in range(3):
        for x, y, n in parts(task, rank, count, step):
            optimizer.backward(mean(model, x, y, n), weight=n)
            optimizer.step()
    assert optimizer.flush() and not optimizer.flush()
    return {"net": net.state_dict(), "masters": {}, "weight": optimizer.result.weight}


def of_16_bits(rank: int, count: int, dtype: torch.dtype) -> Any:
    task = Task(dtype)
    return loop(task, rank, count, by_two_losses, loss_scaler=ga.LossScaler(initial_scale=2.0**12))


def f16(rank: int, count: int) -> Any:
    return of_16_bits(rank, count, torch.float16)


def bf16(rank: int, count: int) -> Any:
    return of_16_bits(rank, count, torch.bfloat16)


def compressed(rank: int, count: int) -> Any:
    def before(model: Any) -> None:
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)

    return loop(Task(torch.float32), rank, count, by_backward, before=before)


def begin(name: str) -> torch.nn.Module:
    """The network in f64, with the values that it has in the case's dtype."""
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "compressed": torch.float32}.get(name, torch.float64)
    return Task(dtype).net().double()


def reference(name: str) -> dict[str, Tensor]:
    """What torch reaches by whole batches, in f64 and in one process."""

    def whole(make: Callable[..., torch.optim.Optimizer], clip: float | None = None) -> dict[str, Tensor]:
        task = Task()
        net = begin(name)
        optimizer = make(net.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            task.whole(net, step).backward()  # type: ignore[no-untyped-call]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
        return net.state_dict()

    if name == "adamw":
        return train(Task(), lambda params: torch.optim.AdamW(params, lr=0.01), STEPS).state_dict()
    if name == "tails":
        task = Task()
        net = task.net()
        optimizer = torch.optim.SGD(net.parameters(), **KEEP)
        for batch in (slice(0, 2), slice(2, 3)):
            optimizer.zero_grad()
            loss = task.loss(net, task.x[batch].flatten(0, 1), task.y[batch].flatten(0, 1))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return net.state_dict()
    return whole(lambda params: torch.optim.SGD(params, **KEEP), 0.1 if name == "clipped" else None)


# Each with how far it may be away: rounding in f64; in 16 bits, that of a backward, 2^-11 or 2^-8 in each number.
EXACT: dict[str, tuple[Case, float]] = {
    case.__name__: (case, 1e-12)
    for case in (
        backwards, adamw, micro_batches, two_losses, scaled, clipped, drop_micro, sums, sums_from_grad, bucket_view,
        static_graph, find_unused, small_buckets, checkpoints, tails,
    )
}  # fmt: skip
EXACT |= {"f16": (f16, 2**-9), "bf16": (bf16, 2**-6), "compressed": (compressed, 2**-6)}


def all_exact(rank: int, count: int) -> dict[str, Any]:
    return {name: case(rank, count) for name, (case, _) in EXACT.items()}


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(tmp_path_factory.mktemp("ranks"), request.param, all_exact, request.param)


@pytest.mark.parametrize("name", EXACT)
def test_uneven_shares_are_one_batch(name: str, found: list[dict[str, Any]]) -> None:
    want, first, tolerance = reference(name), begin(name).state_dict(), EXACT[name][1]
    for rank in found:
        for key, value in {**rank[name]["net"], **rank[name]["masters"]}.items():
            right = want[key] - first[key]
            off = float((value.double() - first[key] - right).norm() / right.norm())
            assert off <= tolerance, f"{key}: {off}"
        for kind in ("net", "masters"):
            for key, value in rank[name][kind].items():
                assert torch.equal(value, found[0][name][kind][key]), "ranks differ"
        assert rank[name]["weight"] == 8


def test_noise_scale_is_that_of_whole_micro_batches(found: list[dict[str, Any]]) -> None:
    task = Task()
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.01, config=ga.Config(noise_scale=True))
    for step in range(STEPS):
        for loss, n in task.parts(net, step, [sum(counts) for counts in WINDOWS[len(found)]]):
            optimizer.backward(loss, weight=n)
        optimizer.step()
    for rank in found:
        assert rank["adamw"]["noise"] == found[0]["adamw"]["noise"]
        assert rank["adamw"]["noise"] == pytest.approx(optimizer.noise_scale, rel=1e-9)


# ---- Statistics, rows, unused branches, hooks of one's own, GradScaler


class Normalised(torch.nn.Module):
    """Its first layer normalises the samples themselves, whose statistics do not depend on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(5, dtype=torch.float64, momentum=0.25)
        torch.manual_seed(3)
        self.out = torch.nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.norm(x))


SHARES = {2: ((4, 2), (0, 2)), 3: ((2, 2, 0), (2, 0, 2))}  # none of one sample, which has no variance


def statistics(rank: int, count: int) -> Any:
    task, net = Task(), Normalised()
    model = DistributedDataParallel(net)
    optimizer = gt.SGD(net.parameters(), lr=0.1, ddp=model)
    assert gt.convert_batchnorm(net, optimizer) == 1
    for step in range(STEPS):
        at = 0
        for counts in SHARES[count]:
            share = ranks.mine(rank, counts)
            part = slice(at + share.start, at + share.stop)
            x, y = task.x[step][part], task.y[step][part]
            if not len(x):
                x, y = torch.full((2, 5), 1e3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
            optimizer.backward((model(x) - y).square().mean(), weight=counts[rank])
            at += sum(counts)
        optimizer.step()
    return {key: value.clone() for key, value in net.state_dict().items()}


class Branches(torch.nn.Module):
    """An embedding with gradients of rows, and a branch that not every rank takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.Embedding(8, 4, sparse=True, dtype=torch.float64)
        self.left = torch.nn.Linear(4, 3, dtype=torch.float64)
        self.right = torch.nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, rows: Tensor, left: bool) -> Any:
        return (self.left if left else self.right)(self.table(rows))


ROWS = torch.tensor([[0, 1, 2, 2, 5], [3, 1, 7, 0, 6]])


def branches(rank: int, count: int) -> Any:
    """Rank 0 has four samples in the left branch, the others one in the right one, and the third none."""
    net = Branches()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    groups = [
        {"params": net.table.parameters(), "rows": ga.Rows.LAZY},
        {"params": [*net.left.parameters(), *net.right.parameters()]},
    ]
    optimizer = gt.SGD(groups, lr=0.1, ddp=model)
    for rows in ROWS:
        mine = rows[:4] if rank == 0 else rows[4:] if rank == 1 else rows[:0]
        out = model(mine, rank == 0)
        optimizer.backward(out.square().sum() / len(mine), weight=len(mine))  # of none, 0 / 0
        optimizer.step()
    return dict(net.state_dict())


def scaler_of_torch(rank: int, count: int) -> Any:
    """An unchanged loop with a GradScaler, in which one rank overflows once: no rank makes this step."""
    task = Task()
    net, model = start(task)
    optimizer = gt.SGD(net.parameters(), lr=0.1, ddp=model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        loss = task.loss(model, task.x[step][rank : rank + 2], task.y[step][rank : rank + 2])
        loss = loss * (float("inf") if step == 1 and rank == 1 else 1)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    return {"steps": torch.tensor(optimizer.context.window.steps), **net.state_dict()}


OTHERS: list[Case] = [statistics, branches, scaler_of_torch]


def all_others(rank: int, count: int) -> dict[str, Any]:
    return {case.__name__: case(rank, count) for case in OTHERS}


@pytest.fixture(scope="module", params=[2, 3])
def others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(tmp_path_factory.mktemp("others"), request.param, all_others, request.param)


def test_replicas_have_equal_bits(others: list[dict[str, Any]]) -> None:
    for name, values in others[0].items():
        for key, value in values.items():
            for rank in others[1:]:
                assert torch.equal(rank[name][key], value), f"{name}: {key}"
    assert int(others[0]["scaler_of_torch"]["steps"]) == 2


def test_running_statistics_are_those_of_all_ranks(others: list[dict[str, Any]]) -> None:
    task = Task()
    running, spread = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    for step in range(STEPS):
        running = 0.75 * running + 0.25 * task.x[step].mean(0)
        spread = 0.75 * spread + 0.25 * task.x[step].var(0)
    for rank in others:
        assert torch.allclose(rank["statistics"]["norm.running_mean"], running, rtol=1e-13, atol=1e-13)
        assert torch.allclose(rank["statistics"]["norm.running_var"], spread, rtol=1e-13, atol=1e-13)


def test_rows_and_branches(others: list[dict[str, Any]]) -> None:
    net = Branches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for rows in ROWS:
        optimizer.zero_grad()
        out = torch.cat([net(rows[:4], True), net(rows[4:], False)])
        (out.square().sum() / 5).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for rank in others:
        for key, value in net.state_dict().items():
            assert torch.allclose(rank["branches"][key], value, rtol=1e-12, atol=1e-12), key
