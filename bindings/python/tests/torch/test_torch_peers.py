# SPDX-License-Identifier: Apache-2.0
"""What other ways to accumulate do to the numbers, each beside the library on the same task.

The peers' numbers are asserted too: once a peer is mended, its case here fails, and docs/moving is to be
changed.
"""

from collections.abc import Sequence
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import torch
from conftest import Task


def moved(task: Task, net: torch.nn.Module) -> torch.Tensor:
    """What the first weight has moved by."""
    return (next(net.parameters()) - next(task.net().parameters())).detach()


def whole(task: Task, samples: int) -> torch.Tensor:
    """The movement by one batch of the first samples."""
    net = task.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    task.loss(net, task.x[0][:samples], task.y[0][:samples]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return moved(task, net)


def ours(task: Task, sizes: Sequence[int]) -> torch.Tensor:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    for loss, size in task.parts(net, 0, sizes):
        optimizer.backward(loss, weight=size)
    optimizer.step()
    return moved(task, net)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def by_accelerate(task: Task, sizes: Sequence[int], steps: int) -> torch.Tensor:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps)
    net = task.net()
    ends = torch.tensor(sizes).cumsum(0).tolist()
    samples = torch.utils.data.TensorDataset(task.x[0][: ends[-1]], task.y[0][: ends[-1]])
    batches = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    loader = torch.utils.data.DataLoader(samples, batch_sampler=batches)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(task.loss(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
    return moved(task, net)


def test_uneven_micro_batches(task: Task) -> None:
    sizes = (5, 2, 1)
    assert off(ours(task, sizes), whole(task, 8)) < 1e-12
    assert off(by_accelerate(task, sizes, 3), whole(task, 8)) > 0.05


def test_a_short_tail(task: Task) -> None:
    assert off(ours(task, (2, 2)), whole(task, 4)) < 1e-12
    halved = by_accelerate(task, (2, 2), 4)
    assert abs(float(halved.norm() / whole(task, 4).norm()) - 0.5) < 1e-9


def test_bf16_adds_up_in_f32() -> None:
    """1,024 equal gradients: a bf16 sum stops growing at 256 of them."""
    ones = torch.ones(4, dtype=torch.bfloat16)
    steps = []
    for adds in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        if adds:
            optimizer: Any = gt.SGD([parameter], lr=1.0, config=ga.Config(reduce=ga.Reduce.SUM))
        else:
            optimizer = torch.optim.SGD([parameter], lr=1.0)
        for _ in range(1024):
            parameter.grad = ones.clone() if adds or parameter.grad is None else parameter.grad.add_(ones)
            if adds:
                optimizer.accumulate()
        optimizer.step()
        steps.append(float(parameter[0].detach()))
    assert steps == [-256.0, -1024.0]


def test_clipping_before_unscaling(task: Task) -> None:
    """Clipping scaled gradients clips nearly everything away; here the order is not the caller's to get wrong."""
    net, other = task.net(), task.net()
    scaled = torch.optim.SGD(net.parameters(), lr=0.1)
    (task.whole(net, 0) * 1024).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for parameter in net.parameters():
        parameter.grad = parameter.grad / 1024 if parameter.grad is not None else None
    scaled.step()
    optimizer = gt.SGD(
        other.parameters(), lr=0.1, loss_scaler=ga.LossScaler(initial_scale=1024),
        clip=ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=1.0),
    )  # fmt: skip
    optimizer.backward(task.whole(other, 0), weight=8)
    optimizer.step()
    assert off(moved(task, net), whole(task, 8)) > 0.9
    assert optimizer.result is not None
    assert off(moved(task, other) / optimizer.result.clip_factor, whole(task, 8)) < 1e-9
