# SPDX-License-Identifier: Apache-2.0
"""Updates under DistributedDataParallel while backward runs: the bits of the same loop without eager."""

import functools
import gc
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import ranks
import torch
from conftest import Task
from gradaccum.torch._ddp_eager import Taking
from test_torch_ddp import Branches, CheckpointedTask, mean
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
# Samples of each rank in the micro-batches of a window; a rank has none in the last one, which updates ahead.
WINDOWS = {2: ((4, 1), (0, 3)), 3: ((3, 1, 0), (1, 0, 3))}
GLOBAL = ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=1e6)
EARLY = ga.ParamOptions(write_early=True)  # of 16 bits, within backward

Found = dict[str, Any]
Case = Callable[[int, int, bool], Found]


def found_of(net: torch.nn.Module, optimizer: Any, results: list[Any]) -> Found:
    state = optimizer.state_dict()["state"]
    return {
        "bits": {
            **{key: value.clone() for key, value in net.state_dict().items()},
            **{f"{i}.{key}": value for i, of in state.items() for key, value in of.items() if torch.is_tensor(value)},
        },
        "eager": [result.eager for result in results],
        "redone": [result.eager_redone for result in results],
        "applied": [result.applied for result in results],
        "numbers": [(result.weight, result.norm, result.clip_factor, optimizer.noise_scale) for result in results],
        "grads": [name for name, tensor in net.named_parameters() if tensor.grad is not None],
    }  # fmt: skip


def by_backward(optimizer: Any, model: Any, x: Tensor, y: Tensor, n: int, last: bool) -> None:
    optimizer.backward(mean(model, x, y, n), weight=n)


def by_last(optimizer: Any, model: Any, x: Tensor, y: Tensor, n: int, last: bool) -> None:
    optimizer.backward(mean(model, x, y, n), weight=n, last=last)


def by_micro_batch(optimizer: Any, model: Any, x: Tensor, y: Tensor, n: int, last: bool) -> None:
    with optimizer.micro_batch(weight=n):
        optimizer.scale_loss(mean(model, x, y, n)).backward()


def by_two_losses(optimizer: Any, model: Any, x: Tensor, y: Tensor, n: int, last: bool) -> None:
    with optimizer.micro_batch(weight=n):
        for share in (0.25, 0.75):
            optimizer.scale_loss(mean(model, x, y, n) * share).backward()


def loop(
    rank: int, count: int, eager: bool, take: Callable[..., None] = by_backward, task: Task | None = None,
    ddp: dict[str, Any] | None = None, factors: tuple[float, ...] = (1,) * STEPS, accum_steps: int | None = 2,
    **options: Any,
) -> Found:  # fmt: skip
    """Trains with AdamW; what the second rank wants is multiplied by a factor in each window."""
    task = task or Task(torch.float32)
    net = task.net()
    model = DistributedDataParallel(net, **{"bucket_cap_mb": 0.0001, **(ddp or {})})
    optimizer = gt.AdamW(
        net.named_parameters(), lr=0.01, ddp=model, accum_steps=accum_steps, eager=eager, **options
    )
    results = []
    for step, factor in enumerate(factors):
        at = 0
        for i, counts in enumerate(WINDOWS[count]):
            share = ranks.mine(rank, counts)
            part = slice(at + share.start, at + share.stop)
            y = task.y[step][part] * (factor if rank == 1 else 1)
            take(optimizer, model, task.x[step][part], y, counts[rank], i == 1)
            at += sum(counts)
        optimizer.step()
        results.append(optimizer.result)
    return found_of(net, optimizer, results)


def of(**options: Any) -> Case:
    def case(rank: int, count: int, eager: bool) -> Found:
        return loop(rank, count, eager, **options)

    return case


# ---- Loops of their own


class Normalised(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(5, 6)
        self.norm = torch.nn.BatchNorm1d(6, momentum=0.25)
        self.out = torch.nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.norm(self.first(x)))


def statistics(rank: int, count: int, eager: bool) -> Found:
    task, net = Task(torch.float32), Normalised()
    model = DistributedDataParallel(net, bucket_cap_mb=0.0001)
    optimizer = gt.AdamW(net.parameters(), lr=0.01, ddp=model, accum_steps=1, eager=eager)
    assert gt.convert_batchnorm(net, optimizer) == 1
    results = []
    for step in range(STEPS):
        part = slice(2 * rank, 2 * rank + 2)
        optimizer.backward((model(task.x[step][part].float()) - task.y[step][part]).square().mean(), weight=2)
        optimizer.step()
        results.append(optimizer.result)
    return found_of(net, optimizer, results)


ROWS = torch.tensor([[0, 1, 2, 2, 5], [3, 1, 7, 0, 6], [0, 3, 2, 6, 6]])


def branches(rank: int, count: int, eager: bool) -> Found:
    """Rows wait, and a parameter that this rank does not use."""
    net = Branches()
    model = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.0001)
    groups = [
        {"params": net.table.parameters(), "rows": ga.Rows.LAZY},
        {"params": [*net.left.parameters(), *net.right.parameters()]},
    ]
    optimizer = gt.SGD(groups, lr=0.1, ddp=model, accum_steps=1, eager=eager)
    results = []
    for step, rows in enumerate(ROWS):
        mine = rows[:4] if rank == 0 else rows[4:] if rank == 1 else rows[:0]
        out = model(mine, rank == 0 or step == 2)  # the right branch is used by no rank at last
        optimizer.backward(out.square().sum() / len(mine), weight=len(mine))  # of none, 0 / 0
        optimizer.step()
        results.append(optimizer.result)
    return found_of(net, optimizer, results)


def images(rank: int, count: int, eager: bool) -> Found:
    """Weights whose memory is not in the order of their dimensions."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Tanh(), torch.nn.Conv2d(4, 2, 3))
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = DistributedDataParallel(net)
    optimizer = gt.AdamW(net.parameters(), lr=0.01, ddp=model, accum_steps=1, eager=eager)
    results = []
    for _ in range(STEPS):
        x = torch.randn(2 * count, 3, 7, 7).to(memory_format=torch.channels_last)
        optimizer.backward(model(x[2 * rank : 2 * rank + 2]).square().mean(), weight=2)
        optimizer.step()
        results.append(optimizer.result)
    return found_of(net, optimizer, results)


def kept_zeros(rank: int, count: int, eager: bool) -> Found:
    """Gradients in .grad, some of them views of buckets from the backward before: nothing goes ahead."""
    task = Task(torch.float32)
    net = task.net()
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = gt.AdamW(net.parameters(), lr=0.01, ddp=model, accum_steps=1, eager=eager)
    results = []
    for step in range(STEPS):
        for _ in range(2):
            mean(model, task.x[step][rank : rank + 3], task.y[step][rank : rank + 3], 3).backward()
        optimizer.step()
        results.append(optimizer.result)
    return found_of(net, optimizer, results)


def autocast(rank: int, count: int, eager: bool) -> Found:
    def take(optimizer: Any, model: Any, x: Tensor, y: Tensor, n: int, last: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean(model, x, y, n)
        optimizer.backward(loss, weight=n)

    return loop(rank, count, eager, take)


def tails(rank: int, count: int, eager: bool) -> Found:
    """Windows of three micro-batches, of which flush() ends the last one: its micro-batches do not go ahead."""
    task = Task(torch.float32)
    net = task.net()
    model = DistributedDataParallel(net)
    optimizer = gt.AdamW(net.parameters(), lr=0.01, ddp=model, accum_steps=3, eager=eager)
    results = []
    for i in range(8):
        optimizer.backward(mean(model, task.x[i][rank : rank + 2], task.y[i][rank : rank + 2], 2), weight=2)
        optimizer.step()
        if i in (2, 5):
            results.append(optimizer.result)
    assert optimizer.flush() and not optimizer.flush()
    return found_of(net, optimizer, [*results, optimizer.result])


def scaler_of_torch(rank: int, count: int, eager: bool) -> Found:
    task = Task(torch.float32)
    net = task.net()
    model = DistributedDataParallel(net)
    optimizer = gt.AdamW(net.parameters(), lr=0.01, ddp=model, accum_steps=1, eager=eager)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    results = []
    for step in range(STEPS):
        loss = mean(model, task.x[step][rank : rank + 2], task.y[step][rank : rank + 2], 2).float()
        scaler.scale(loss * (math.inf if step == 1 and rank == 1 else 1)).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        results.append(optimizer.result)
    return found_of(net, optimizer, results)


def two_optimizers(rank: int, count: int, eager: bool) -> Found:
    """Two of one DistributedDataParallel share its communication hook."""
    task = Task(torch.float32)
    net: Any = task.net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.0001)
    first, second = (
        gt.AdamW(net[i].named_parameters(), lr=0.01, ddp=model, accum_steps=1, eager=eager) for i in (0, 2)
    )
    results = []
    for step in range(STEPS):
        with first.micro_batch(weight=2), second.micro_batch(weight=2):
            mean(model, task.x[step][rank : rank + 2], task.y[step][rank : rank + 2], 2).backward()
        first.step()
        second.step()
        results += [first.result, second.result]
    return found_of(net, first, results)


AHEAD = [0, 4, 4, 4]  # nothing goes ahead until a micro-batch has had one backward
FIRST = [4, 4, 4, 4]  # in a window of two micro-batches, the first one shows it
NEVER = [0, 0, 0, 0]
NAN = (1, 1, math.nan, 1)

CASES: dict[str, tuple[Case, list[int] | None]] = {
    "plain": (of(), FIRST),
    "by micro_batch": (of(take=by_micro_batch), FIRST),
    "by last": (of(take=by_last, accum_steps=None), FIRST),
    "a window is skipped": (of(factors=NAN), FIRST),
    "ignores": (of(config=ga.Config(nonfinite=ga.Nonfinite.IGNORE), clip=GLOBAL), FIRST),
    "by a thread": (of(config=ga.Config(eager_threads=1)), None),
    "clipped": (of(clip=ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=0.01)), FIRST),
    "not clipped": (of(clip=GLOBAL), FIRST),
    "scaled": (of(take=by_micro_batch, loss_scaler=ga.LossScaler(initial_scale=1024.0), factors=NAN), FIRST),
    "averages": (of(ema=ga.Ema(decay=0.9)), FIRST),
    "noise": (of(config=ga.Config(noise_scale=True)), FIRST),
    "sums": (of(config=ga.Config(gradient_kind=ga.GradientKind.SUM)), FIRST),
    "drops": (of(config=ga.Config(nonfinite=ga.Nonfinite.DROP_MICRO), factors=NAN), NEVER),
    "clips micro-batches": (
        of(clip=ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=0.1, when=ga.ClipWhen.MICRO)), NEVER,
    ),
    "f64": (of(task=Task()), NEVER),
    "bf16": (of(task=Task(torch.bfloat16)), FIRST),
    "bf16 early": (
        of(task=Task(torch.bfloat16), param_options=EARLY, factors=NAN), FIRST,
    ),
    "f16": (of(task=Task(torch.float16), loss_scaler=ga.LossScaler(initial_scale=256.0)), FIRST),
    "one bucket": (of(ddp={"bucket_cap_mb": 25}), FIRST),
    "bucket view": (of(ddp={"gradient_as_bucket_view": True}), FIRST),
    "static graph": (of(ddp={"static_graph": True}, accum_steps=2), FIRST),
    "finds unused": (of(ddp={"find_unused_parameters": True}), FIRST),
    "two losses": (of(take=by_two_losses), NEVER),
    "two losses in buckets": (of(take=by_two_losses, ddp={"gradient_as_bucket_view": True}), NEVER),
    "checkpoints": (of(task=CheckpointedTask(torch.float32)), FIRST),
    "statistics": (statistics, None),
    "branches": (branches, None),
    "images": (images, AHEAD),
    "kept zeros": (kept_zeros, NEVER),
    "autocast": (autocast, FIRST),
    "tails": (tails, [4, 4, 0]),
    "scaler of torch": (scaler_of_torch, NEVER),
    "two optimizers": (two_optimizers, [0, 0, *6 * [2]]),
}  # fmt: skip


# ---- What happens within backward, and what is refused


def start(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any, Any, Callable[[], Any]]:
    """A network, its DistributedDataParallel, an optimizer with windows of one micro-batch, and what makes a loss."""
    task = Task(dtype)
    net: Any = task.net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.00001)
    optimizer = gt.SGD(net.named_parameters(), lr=0.1, ddp=model, eager=True, **{"accum_steps": 1, **options})
    rank = torch.distributed.get_rank()
    return net, model, optimizer, lambda: mean(model, task.x[0][rank : rank + 2], task.y[0][rank : rank + 2], 2)


def train(optimizer: Any, loss: Callable[[], Any], windows: int = 1) -> int:
    """How many parameters the last window has updated ahead."""
    for _ in range(windows):
        optimizer.backward(loss(), weight=2)
        optimizer.step()
    assert optimizer.result.applied
    return int(optimizer.result.eager)


def error_of(call: Callable[[], Any]) -> str:
    """The error that a call raises, with its notes."""
    try:
        call()
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "no error"


def state_of(net: torch.nn.Module, optimizer: Any) -> Found:
    return {
        "net": [tensor.detach().clone() for tensor in net.parameters()],
        "grads": sum(tensor.grad is not None for tensor in net.parameters()),
        "micro_batches": optimizer.context.window.micro_batches,
        "open": optimizer.context.window.open_micro,
    }


def within_backward(rank: int) -> Found:
    """The last layer is written before the first layer has its gradient."""
    net, _, optimizer, loss = start(torch.bfloat16, param_options=EARLY)
    train(optimizer, loss, 2)
    before = net[2].weight.detach().clone()
    seen: Found = {}

    def see(_: Tensor) -> None:
        end = time.monotonic() + 30
        while torch.equal(net[2].weight, before) and time.monotonic() < end:
            time.sleep(0.001)
        seen.update(written=not torch.equal(net[2].weight, before))

    handle = net[0].weight.register_hook(see)
    train(optimizer, loss)
    handle.remove()
    return seen


def twice(optimizer: Any, loss: Callable[[], Any]) -> None:
    with optimizer.micro_batch(weight=2):
        for _ in range(2):
            (loss() / 2).backward()


def second_backward(rank: int) -> Found:
    net, _, optimizer, loss = start()
    train(optimizer, loss, 2)
    before = state_of(net, optimizer)
    error = error_of(lambda: twice(optimizer, loss))
    after = state_of(net, optimizer)
    twice(optimizer, loss)
    optimizer.step()
    return {
        "before": before, "error": error, "after": after, "ahead": optimizer.result.eager,
        "last": state_of(net, optimizer),
    }  # fmt: skip


class ReadsLate(torch.nn.Module):
    """Backward reads a weight after the weight's gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(5, 4, bias=False), torch.nn.Linear(4, 3, bias=False)
        self.bfloat16()

    def forward(self, x: Tensor) -> Any:
        weight = self.second.weight
        return (self.first(x) @ weight.detach().t()).sum() + weight.sum()


def reads_late(rank: int) -> Found:
    net = ReadsLate()
    model = DistributedDataParallel(net, bucket_cap_mb=0.00001)
    optimizer = gt.SGD(net.named_parameters(), lr=0.1, ddp=model, accum_steps=1, eager=True, param_options=EARLY)
    x = torch.ones(2, 5, dtype=torch.bfloat16)
    optimizer.backward(model(x))
    optimizer.step()
    before = state_of(net, optimizer)
    error = error_of(lambda: optimizer.backward(model(x)))
    return {"before": before, "error": error, "after": state_of(net, optimizer)}


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ArithmeticError("backward has failed")


def fails(rank: int) -> Found:
    """In backward, between two buckets. DistributedDataParallel then refuses another forward, so a new one follows."""
    net, model, optimizer, loss = start(torch.bfloat16, param_options=EARLY, accum_steps=2)
    train(optimizer, loss, 3)
    before = state_of(net, optimizer)
    handle = net[1].register_forward_hook(lambda module, inputs, out: Fails.apply(out))
    error = error_of(lambda: optimizer.backward(loss(), weight=2))
    handle.remove()
    after = state_of(net, optimizer)
    again = error_of(loss)
    del model, optimizer, loss
    gc.collect()  # the hooks of the old one are gone
    model = DistributedDataParallel(net, bucket_cap_mb=0.0001)
    optimizer = gt.SGD(net.named_parameters(), lr=0.1, ddp=model, eager=True, accum_steps=1)
    task = Task(torch.float32)
    ahead = train(optimizer, lambda: mean(model, task.x[0][rank : rank + 2], task.y[0][rank : rank + 2], 2), 2)
    return {
        "before": before, "error": error, "after": after, "again": again, "ahead": ahead,
        "last": state_of(net, optimizer),
    }  # fmt: skip


def library_refuses(rank: int) -> Found:
    """An error on the thread of gloo comes out of the micro-batch, and what follows is in order."""
    net, _, optimizer, loss = start()
    train(optimizer, loss, 2)
    before = state_of(net, optimizer)

    def told_too_soon() -> None:
        with optimizer.micro_batch(weight=2):
            optimizer.context.ready(optimizer.context.params[0])
            loss().backward()

    error = error_of(told_too_soon)
    after = state_of(net, optimizer)
    return {
        "before": before, "error": error, "after": after, "ahead": train(optimizer, loss),
        "last": state_of(net, optimizer),
    }  # fmt: skip


def apart(rank: int) -> Found:
    """One rank alone says that a micro-batch is the last."""
    net, _, optimizer, loss = start(accum_steps=None)
    optimizer.backward(loss(), weight=2, last=True)
    optimizer.step()
    before = state_of(net, optimizer)
    error = error_of(lambda: optimizer.backward(loss(), weight=2, last=rank == 0))
    after = state_of(net, optimizer)
    optimizer.backward(loss(), weight=2, last=True)
    optimizer.step()
    return {
        "before": before, "error": error, "after": after, "ahead": optimizer.result.eager,
        "last": state_of(net, optimizer),
    }  # fmt: skip


def without_sync(rank: int) -> Found:
    net, model, optimizer, loss = start()
    train(optimizer, loss, 2)
    before = state_of(net, optimizer)

    def outside() -> None:
        with model.no_sync():
            optimizer.backward(loss(), weight=2)

    def inside() -> None:
        with optimizer.micro_batch(weight=2), model.no_sync():
            loss().backward()

    def not_again() -> None:
        with optimizer.micro_batch(weight=2):
            of = loss()
            of.backward(retain_graph=True)
            of.backward()

    errors = [error_of(call) for call in (outside, inside, not_again)]
    after = state_of(net, optimizer)
    return {
        "before": before, "error": "\n".join(errors), "after": after, "ahead": train(optimizer, loss),
        "last": state_of(net, optimizer),
    }  # fmt: skip


def from_grad(rank: int) -> Found:
    """After a micro-batch that went ahead, one whose gradients the program has put into .grad."""
    net, _, optimizer, loss = start()
    train(optimizer, loss, 2)
    before = state_of(net, optimizer)
    for tensor in net.parameters():
        tensor.grad = torch.zeros_like(tensor)
    error = error_of(lambda: optimizer.accumulate(weight=1 + rank))
    optimizer.zero_grad()
    after = state_of(net, optimizer)
    return {
        "before": before, "error": error, "after": after, "ahead": train(optimizer, loss),
        "last": state_of(net, optimizer),
    }  # fmt: skip


def hooks(rank: int) -> Found:
    """One hook of the program, before or after; a module of torch.compile; an optimizer that is gone."""
    task = Task(torch.float32)
    net = task.net()
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    found = {"before": error_of(lambda: gt.SGD(net.parameters(), lr=0.1, ddp=model, eager=True))}
    model = DistributedDataParallel(net)
    model._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
    found["built-in"] = error_of(lambda: gt.SGD(net.parameters(), lr=0.1, ddp=model, eager=True))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DistributedDataParallel(net)
    found["compiled"] = error_of(lambda: gt.SGD(net.parameters(), lr=0.1, ddp=model, eager=True))
    net, model, optimizer, loss = start()
    found["after"] = error_of(lambda: model.register_comm_hook(None, default_hooks.allreduce_hook))
    train(optimizer, loss)
    optimizer = None
    gc.collect()
    loss().backward()
    plain = task.net()  # reduced without a hook
    plain.load_state_dict(net.state_dict())
    part = slice(rank, rank + 2)
    other = DistributedDataParallel(plain)
    mean(other, task.x[0][part], task.y[0][part], 2).backward()
    found["gone"] = [torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), plain.parameters(), strict=True)]
    model.zero_grad()
    found["again"] = train(gt.SGD(net.parameters(), lr=0.1, ddp=model, eager=True, accum_steps=1), loss, 2)
    net = task.net()
    model = DistributedDataParallel(net)
    ignore = ga.Config(nonfinite=ga.Nonfinite.IGNORE)
    found["in place"] = error_of(lambda: gt.SGD(net.parameters(), lr=0.1, ddp=model, eager=True, config=ignore))
    found["one rank"] = error_of(lambda: gt.SGD(net.parameters(), lr=0.1, ddp=model, eager=rank == 1))
    return found


OTHERS: list[Callable[[int], Found]] = [
    within_backward, second_backward, reads_late, fails, library_refuses, apart, without_sync, from_grad,
    hooks,
]  # fmt: skip


# ---- Tests


def all_cases(rank: int, count: int) -> dict[str, dict[Any, Any]]:
    found: dict[str, dict[Any, Any]] = {}
    if count == 2:
        found["others"] = {of_two.__name__: of_two(rank) for of_two in OTHERS}
    for name, (case, _) in CASES.items():
        found[name] = {}
        for eager in (False, True):
            torch.manual_seed(5)
            found[name][eager] = case(rank, count, eager)
    return found


Runs = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What so many ranks have found, each number of them run once."""
    return functools.cache(lambda count: ranks.run(tmp_path_factory.mktemp("ranks"), count, all_cases, count))


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def same(a: Found, b: Found) -> None:
    assert a["bits"].keys() == b["bits"].keys()
    for key, value in a["bits"].items():
        assert value.dtype is b["bits"][key].dtype, key
        assert torch.equal(bytes_of(value), bytes_of(b["bits"][key])), key


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [2, 3])
def test_the_bits_are_those_without_eager(count: int, name: str, runs: Runs) -> None:
    found = runs(count)
    for rank in found:
        plain, eager = rank[name][False], rank[name][True]
        same(plain, eager)
        same(found[0][name][True], eager)
        assert plain["eager"] == [0] * len(plain["eager"])
        assert plain["applied"] == eager["applied"]
        assert str(plain["numbers"]) == str(eager["numbers"])  # of which some are NaN
        assert plain["grads"] == eager["grads"] == []
        ahead = CASES[name][1]
        if ahead is not None:
            assert [n if applied else ahead[0] for n, applied in zip(eager["eager"], eager["applied"])] == ahead
            assert eager["redone"] == (ahead if name == "clipped" else [0] * len(ahead))


@pytest.fixture(params=[0, 1])
def others(request: pytest.FixtureRequest, runs: Runs) -> Any:
    """What one of two ranks has found."""
    return runs(2)[request.param]["others"]


def test_a_parameter_is_written_within_backward(others: Any) -> None:
    assert others["within_backward"]["written"]


DROPPED = "A part of the micro-batch had been added, so the window was discarded."


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("second_backward", ["a micro-batch had a second backward", DROPPED]),
        ("reads_late", ["modified by an inplace operation", DROPPED]),
        ("fails", ["ArithmeticError: backward has failed", DROPPED]),
        ("library_refuses", ["after ga_params_ready", DROPPED]),
        ("apart", ["rank 0 opened a micro_batch()", "rank 1 was in backward inside micro_batch()"]),
        (
            "without_sync",
            ["no_sync() are not reduced", "no_sync() are not reduced", "each backward needs a forward of ddp", DROPPED],
        ),
        ("from_grad", ["the ranks gave the weights 1, 2 to accumulate()"]),
    ],
)
def test_an_exception_drops_the_window(name: str, messages: list[str], runs: Runs, others: Any) -> None:
    of = others[name]
    at = 0
    for message in messages:
        assert message in of["error"][at:], of["error"]
        at = of["error"].index(message, at) + len(message)
    for a, b in zip(of["before"]["net"], of["after"]["net"], strict=True):
        assert torch.equal(a, b)
    assert (of["after"]["grads"], of["after"]["micro_batches"], of["after"]["open"]) == (0, 0, -1)
    if name == "fails":
        assert "Expected to have finished reduction" in of["again"]  # as without eager
    if "last" in of:
        assert of["ahead"] == (0 if name == "second_backward" else 4)
        for a, b in zip(of["last"]["net"], runs(2)[0]["others"][name]["last"]["net"], strict=True):
            assert torch.equal(a, b)
        assert not torch.equal(of["last"]["net"][0], of["after"]["net"][0])


def test_hooks_of_communication(others: Any) -> None:
    of = others["hooks"]
    assert "ValueError: eager was True, but ddp has the communication hook allreduce_hook" in of["before"]
    assert "has the communication hook BuiltinCommHookType.FP16_COMPRESS" in of["built-in"]
    assert 'ValueError: eager was True, but ddp was made with optimize_ddp="python_reducer"' in of["compiled"]
    assert "can only be called once" in of["after"]  # by DistributedDataParallel
    assert of["gone"] == [True] * 4
    assert of["again"] == 4
    assert "eager was False on rank 0 and True on rank 1" in of["one rank"]
    assert "ValueError: eager was True, but with Nonfinite.IGNORE" in of["in place"]


def test_buckets_are_taken_one_after_the_other() -> None:
    """Threads of gloo may have reduced two at once, but one thread at a time uses a context."""
    net = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1 << 21)) for _ in range(4)])
    optimizer = gt.AdamW(net.parameters(), lr=0.01, eager=True)
    micro = optimizer.context.micro_batch(1.0, options=ga.MicroOptions(flags=ga.MicroFlags.LAST))
    start = threading.Barrier(4)

    def reduced(give: Callable[[], None]) -> None:
        start.wait()
        give()

    with micro, Taking(optimizer._gradients, micro) as taking:
        gives = [taking.follow([(slot, torch.ones(1 << 21))]) for slot in optimizer._parameters.slots]
        threads = [threading.Thread(target=reduced, args=[give]) for give in gives]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert taking.error is None
    assert len(taking.taken) == 4
    optimizer.step()
    assert optimizer.result is not None
    assert optimizer.result.eager == 4


def test_a_reduction_that_comes_late_gives_nothing() -> None:
    """After an exception in backward, when a bucket may still be under way, and keep the optimizer."""
    net = torch.nn.Linear(3, 2)
    optimizer = gt.AdamW(net.parameters(), lr=0.01, eager=True)
    micro = optimizer.context.micro_batch()
    with micro, Taking(optimizer._gradients, micro) as taking:
        gives = [taking.follow([(slot, torch.ones_like(slot.tensor))]) for slot in optimizer._parameters.slots]
    alive = weakref.ref(optimizer.context)
    del micro, optimizer
    gc.collect()
    assert alive() is None
    for give in gives:
        give()
    assert not taking.taken
