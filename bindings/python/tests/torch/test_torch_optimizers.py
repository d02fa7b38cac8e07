# SPDX-License-Identifier: Apache-2.0
"""Every optimizer: uneven micro-batches through the library against whole batches through torch."""

from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import torch

from conftest import Task, close, train

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.3, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95)}),
    ("AdamW", {"lr": torch.tensor(0.01, dtype=torch.float64), "weight_decay": 0.1, "eps": 1e-3}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("Adadelta", {"lr": 1.0, "rho": 0.8}),
    ("Adamax", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("NAdam", {"lr": 0.01, "momentum_decay": 0.1}),
    ("RAdam", {"lr": 0.05}),
    ("RMSprop", {"lr": 0.01, "alpha": 0.9}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
    ("Adafactor", {"lr": 0.05}),
    ("Muon", {"lr": 0.02}),
    ("Muon", {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}),
]


def task_of(name: str) -> tuple[Task, float]:
    # torch's Muon computes in bf16, the library in f32; it takes matrices alone.
    if name == "Muon":
        return Task(torch.float32, bias=False), 2e-2
    # torch keeps NAdam's running product in f32.
    return Task(), 1e-8 if name == "NAdam" else 1e-12


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_window_is_a_whole_batch(name: str, options: dict[str, Any]) -> None:
    task, tolerance = task_of(name)
    want = train(task, lambda params: getattr(torch.optim, name)(params, **options))
    net = task.net()
    optimizer = getattr(gt, name)(net.parameters(), **options)
    assert isinstance(optimizer, torch.optim.Optimizer)
    for step in range(8):
        for loss, size in task.parts(net, step):
            optimizer.backward(loss, weight=size)
        optimizer.step()
        assert optimizer.result is not None
        assert optimizer.result.applied
        assert optimizer.result.micro_batches == 3
    close(want, net, tolerance)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_state_goes_to_torch_and_back(name: str, options: dict[str, Any]) -> None:
    task, tolerance = task_of(name)
    want = train(task, lambda params: getattr(torch.optim, name)(params, **options))
    net = task.net()
    first = getattr(gt, name)(net.parameters(), **options)
    theirs = getattr(torch.optim, name)(net.parameters(), **options)
    last = getattr(gt, name)(net.parameters(), **options)

    def run(optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            task.whole(net, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    run(first, range(3))
    theirs.load_state_dict(first.state_dict())
    run(theirs, range(3, 5))
    last.load_state_dict(theirs.state_dict())
    run(last, range(5, 8))
    close(want, net, tolerance)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_wrap_takes_an_optimizer_over(name: str, options: dict[str, Any]) -> None:
    task, tolerance = task_of(name)
    want = train(task, lambda params: getattr(torch.optim, name)(params, **options))
    net = task.net()
    theirs = getattr(torch.optim, name)(net.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.ConstantLR(theirs, factor=1)
    for step in range(3):
        theirs.zero_grad()
        task.whole(net, step).backward()  # type: ignore[no-untyped-call]
        theirs.step()
        scheduler.step()
    optimizer = gt.wrap(theirs, accum_steps=2)
    for step in range(3, 8):
        for at in (0, 4):
            optimizer.zero_grad()
            loss = task.loss(net, task.x[step][at : at + 4], task.y[step][at : at + 4])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    close(want, net, tolerance)


def test_wrap_refuses_what_it_does_not_know() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match="LBFGS"):
        gt.wrap(torch.optim.LBFGS([parameter]))

    class Own(torch.optim.SGD):
        pass

    with pytest.raises(TypeError, match="Own"):
        gt.wrap(Own([parameter]))
    with pytest.raises(ValueError, match="capturable"):
        gt.wrap(torch.optim.Adam([parameter], capturable=True))


@pytest.mark.parametrize("name", ["Lion", "Lamb", "Lars", "Adopt", "AdEMAMix", "RowWiseAdagrad"])
def test_the_others_step(name: str) -> None:
    """Those that torch has not: a window is what one whole batch is."""
    task = Task()
    nets = [task.net(), task.net()]
    whole, parts = (getattr(gt, name)(net.parameters()) for net in nets)
    for step in range(5):
        whole.backward(task.whole(nets[0], step))
        whole.step()
        for loss, size in task.parts(nets[1], step):
            parts.backward(loss, weight=size)
        parts.step()
    close(nets[0], nets[1], 1e-9)
    assert float((next(nets[0].parameters()) - next(task.net().parameters())).abs().max()) > 1e-6


def test_adopt_takes_the_exponent_of_its_clip() -> None:
    """timm's Adopt, from its definition; a state dictionary without the exponent means 1/4."""
    gradients = (1e-3, 2.0, -0.5, 3.0, 1.0, 4.0)
    for exponent in (0.25, 0.333):
        parameter = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        optimizer = gt.Adopt([parameter], lr=0.125, clip_exponent=exponent)
        p, m, v = 2.0, 0.0, 0.0
        for step, g in enumerate(gradients):
            parameter.grad = torch.tensor(g, dtype=torch.float64)
            optimizer.accumulate()
            optimizer.step()
            if step > 0:
                bound = step**exponent
                m = 0.9 * m + 0.1 * min(max(g / max(v**0.5, 1e-6), -bound), bound)
                p -= 0.125 * m
                v = 0.9999 * v + 0.0001 * g * g
            else:
                v = g * g
            assert abs(float(parameter) - p) < 1e-14
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["clip_exponent"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["clip_exponent"] == 0.25


def test_sparse_adam() -> None:
    for window in (1, 2):
        tables = []
        for ours in (False, True):
            torch.manual_seed(0)
            table = torch.nn.Embedding(20, 4, sparse=True)
            optimizer: Any = (gt if ours else torch.optim).SparseAdam(table.parameters(), lr=0.1)
            for step in range(6):
                # The rows of both micro-batches, as torch sees them in one batch.
                rows = torch.tensor([[step, 3, 3, step + 5], [1, 3, step, 19]])
                if ours:
                    for part in rows.chunk(window):
                        optimizer.backward(table(part).pow(2).sum() * window)
                else:
                    optimizer.zero_grad()
                    table(rows).pow(2).sum().backward()
                optimizer.step()
            tables.append(table.weight.detach())
        assert float((tables[0] - tables[1]).abs().max()) < 1e-5


def test_a_sparse_gradient_needs_rows() -> None:
    table = torch.nn.Embedding(20, 4, sparse=True)
    optimizer = gt.AdamW(table.parameters())
    with pytest.raises(ValueError, match="rows"):
        optimizer.backward(table(torch.tensor([1])).sum())
    optimizer = gt.AdamW([{"params": list(table.parameters()), "rows": ga.Rows.DENSE}])
    optimizer.backward(table(torch.tensor([1])).sum())
    optimizer.step()


def orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz iterations in float64."""
    x = gradient.double() / gradient.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def muon_error(gradient: torch.Tensor, precision: str) -> float:
    p = torch.nn.Parameter(torch.zeros_like(gradient))
    optimizer = gt.Muon([p], lr=1.0, weight_decay=0.0, ns_precision=precision)
    optimizer.backward((p * gradient).sum())
    optimizer.step()
    want = orthogonal(gradient)
    return float((p.detach().double() + want).norm() / want.norm())


def test_the_precision_of_muon() -> None:
    torch.manual_seed(0)
    low_rank = 0.01 * torch.randn(96, 128) + torch.outer(torch.randn(96), torch.randn(128))
    theirs = torch.nn.Parameter(torch.zeros(96, 128))
    theirs.grad = low_rank
    torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0).step()
    want = orthogonal(low_rank)
    of_torch = float((theirs.detach().double() + want).norm() / want.norm())
    assert muon_error(low_rank, "f32") < 5e-5
    with pytest.raises(ga.Error, match="TF32 on the CPU"):
        muon_error(low_rank, "tf32")
    with pytest.raises(ValueError, match="ns_precision was 'fp8', expected one of 'f32', 'tf32', 'bf16'"):
        muon_error(low_rank, "fp8")
    try:
        error = muon_error(low_rank, "bf16")
    except ga.Error as refused:
        assert refused.status == ga.Status.UNSUPPORTED
        pytest.skip(str(refused))
    assert 5e-5 < error < of_torch / 10


def test_the_precision_of_muon_stays() -> None:
    p = torch.nn.Parameter(torch.ones(4, 3))
    theirs = torch.optim.Muon([p], lr=0.1)
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    ours = gt.Muon([parameter], lr=0.1)
    ours.param_groups[0]["ns_precision"] = "tf32"
    with pytest.raises(ga.Error, match="TF32"):
        ours.backward(parameter.sum())
        ours.step()
    ours.param_groups[0]["ns_precision"] = "f32"
    ours.step()  # nothing was lost
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["ns_precision"] == "f32"
    wrapped = gt.wrap(theirs)
    assert wrapped.context.groups[0].optimizer.ns_precision == ga.Precision.F32
    assert "ns_precision" not in theirs.state_dict()["param_groups"][0]
