# SPDX-License-Identifier: Apache-2.0
"""Schedule-Free optimizers beside the package schedulefree: steps, evaluation, state dictionaries both ways."""

import copy
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import schedulefree
import torch
from torch import Tensor

from conftest import Task, close

CASES: list[tuple[str, dict[str, Any]]] = [
    ("AdamWScheduleFree", {"lr": 0.05}),
    ("AdamWScheduleFree", {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1, "warmup_steps": 3, "r": 1.5}),
    ("AdamWScheduleFree", {"lr": torch.tensor(0.05, dtype=torch.float64), "weight_lr_power": 0.5, "eps": 1e-3}),
    ("SGDScheduleFree", {"lr": 0.1}),
    ("SGDScheduleFree", {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.1, "warmup_steps": 5, "r": 1.0}),
]
each = pytest.mark.parametrize(("name", "options"), CASES)


def theirs_of(name: str, net: torch.nn.Module, options: dict[str, Any]) -> Any:
    optimizer = getattr(schedulefree, name)(net.parameters(), **options)
    optimizer.train()
    return optimizer


def run_theirs(task: Task, net: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        task.whole(net, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def run_ours(task: Task, net: torch.nn.Module, optimizer: Any, steps: range) -> None:
    net.zero_grad()
    for step in steps:
        for loss, size in task.parts(net, step):
            optimizer.backward(loss, weight=size)
        optimizer.step()
        assert optimizer.result.applied


def values(net: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


@each
def test_it_steps_and_averages_as_the_package(name: str, options: dict[str, Any], task: Task) -> None:
    nets = [task.net(), task.net()]
    theirs, ours = theirs_of(name, nets[0], options), getattr(gt, name)(nets[1].parameters(), **options)
    for begin in (0, 4):
        run_theirs(task, nets[0], theirs, range(begin, begin + 4))
        run_ours(task, nets[1], ours, range(begin, begin + 4))
        close(*nets, 1e-12)
        trained = values(nets[1])
        theirs.eval()
        for _ in range(2):
            ours.eval()
        assert ours.param_groups[0]["train_mode"] is False
        close(*nets, 1e-12)
        assert not same(values(nets[1]), trained)
        theirs.train()
        for _ in range(2):
            ours.train()
        assert ours.param_groups[0]["train_mode"] is True
        assert same(values(nets[1]), trained)


@each
@pytest.mark.parametrize("evaluates", [False, True])
def test_state_goes_to_the_package_and_back(name: str, options: dict[str, Any], evaluates: bool, task: Task) -> None:
    want, net = task.net(), task.net()
    reference = theirs_of(name, want, options)
    run_theirs(task, want, reference, range(9))
    first, last = (getattr(gt, name)(net.parameters(), **options) for _ in range(2))
    theirs = theirs_of(name, net, options)
    run_ours(task, net, first, range(3))
    if evaluates:
        first.eval()
    theirs.load_state_dict(first.state_dict())
    if evaluates:
        average = values(net)
        first.eval()
        assert same(values(net), average)
        theirs.train()
    run_theirs(task, net, theirs, range(3, 6))
    if evaluates:
        theirs.eval()
    last.load_state_dict(copy.deepcopy(theirs.state_dict()))
    if evaluates:
        last.eval()  # which they are
        with pytest.raises(RuntimeError, match=r"train\(\)"):
            run_ours(task, net, last, range(6, 7))
        last.discard()
        last.train()
    run_ours(task, net, last, range(6, 9))
    close(want, net, 1e-12)


@each
def test_what_is_saved_after_train_goes_on_to_the_bit(name: str, options: dict[str, Any]) -> None:
    task = Task(torch.bfloat16)
    nets = [task.net(), task.net()]
    whole, half = (getattr(gt, name)(net.parameters(), **options) for net in nets)
    for optimizer, net in ((whole, nets[0]), (half, nets[1])):
        run_ours(task, net, optimizer, range(3))
        loss, size = next(iter(task.parts(net, 3)))
        optimizer.backward(loss, weight=size)
    other = task.net()
    resumed = getattr(gt, name)(other.parameters(), **options)
    other.load_state_dict(nets[1].state_dict())
    resumed.load_state_dict(copy.deepcopy(half.state_dict()))
    for optimizer, net in ((whole, nets[0]), (resumed, other)):
        optimizer.step()
        run_ours(task, net, optimizer, range(4, 6))
        optimizer.eval()
    assert same(values(nets[0]), values(other))


def test_what_is_saved_after_eval_goes_on(task: Task) -> None:
    """The parameters are the average then; train() takes y from it, with its rounding."""
    nets = [task.net(), task.net()]
    optimizers = [gt.AdamWScheduleFree(net.parameters(), lr=0.05) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        run_ours(task, net, optimizer, range(3))
    optimizers[1].eval()
    saved = copy.deepcopy((nets[1].state_dict(), optimizers[1].state_dict()))
    other = task.net()
    resumed = gt.AdamWScheduleFree(other.parameters(), lr=1.0)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.param_groups[0]["train_mode"] is False
    again = resumed.state_dict()
    assert again["param_groups"][0]["train_mode"] is False
    resumed.train()
    close(nets[0], other, 1e-12)
    run_ours(task, nets[0], optimizers[0], range(3, 5))
    run_ours(task, other, resumed, range(3, 5))
    close(nets[0], other, 1e-12)


def test_an_average_is_not_trained(task: Task) -> None:
    net = task.net()
    optimizer = gt.SGDScheduleFree(net.parameters(), lr=0.1)
    run_ours(task, net, optimizer, range(2))
    optimizer.eval()
    state = optimizer.state_dict()
    with pytest.raises(RuntimeError, match="train"):
        optimizer.load_state_dict(state)
    with pytest.raises((RuntimeError, ga.Error), match="exchanged|eval"):
        run_ours(task, net, optimizer, range(2, 3))
    optimizer.train()
    loss, size = next(iter(task.parts(net, 2)))
    optimizer.backward(loss, weight=size)
    with pytest.raises(ga.Error, match="ga_ema_swap"):
        optimizer.eval()
    with pytest.raises(ValueError, match="eval"):
        gt.AdamWScheduleFree(net.parameters(), ema=ga.Ema())
