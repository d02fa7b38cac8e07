# SPDX-License-Identifier: Apache-2.0
"""What programs do to models, optimizers and state in between: right as in torch, or refused in words."""

import io
from collections.abc import Callable
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import torch
from conftest import Task, close, train


def parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float32))


# ---- Parameters


@pytest.mark.parametrize("take", ["backward", "accumulate"])
def test_a_parameter_that_shrinks_in_a_window_is_refused(take: str) -> None:
    p = torch.nn.Parameter(torch.zeros(1 << 16, 4))
    optimizer = gt.SGD([p])
    optimizer.backward(p.sum())
    p.data = p.data[:2]
    with pytest.raises(RuntimeError, match="shape"):
        if take == "backward":
            optimizer.backward(p.sum())
        else:
            p.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.accumulate()


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.to(memory_format=torch.channels_last),
        lambda net: net.half(),
        lambda net: setattr(net.weight, "data", net.weight.data.transpose(2, 3)),
    ],
)
def test_another_order_or_dtype_is_refused(change: Callable[[Any], Any]) -> None:
    net = torch.nn.Conv2d(3, 2, 3, bias=False)
    optimizer = gt.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.backward(net(torch.ones(1, 3, 4, 4)).sum())
    optimizer.step()
    change(net)
    with pytest.raises(RuntimeError, match="convert a model before"):
        optimizer.backward(sum(p.sum() for p in net.parameters()))


def test_another_gradient_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="gradient_dtype"):
        gt.SGD([parameter(1)], param_options=ga.ParamOptions(gradient_dtype=ga.Dtype.F64))


def test_a_parameter_unfrozen_in_a_micro_batch() -> None:
    p, q = parameter(0), parameter(0)
    q.requires_grad_(False)
    optimizer = gt.SGD([p, q], lr=1.0)
    with optimizer.micro_batch(weight=4):
        q.requires_grad_(True)
        (p + q).sum().backward()  # type: ignore[no-untyped-call]
    assert q.grad is None
    optimizer.step()
    assert p.item() == q.item() == -1


def test_versions_of_untouched_parameters_stay() -> None:
    p, q = parameter(1), parameter(1)
    optimizer = gt.SGD([p, q])
    kept = (q * q).sum()
    optimizer.backward(p.sum())
    optimizer.step()
    kept.backward()  # type: ignore[no-untyped-call]
    assert q.grad is not None


def test_a_group_that_is_refused_leaves_the_rest() -> None:
    a = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = gt.Muon([a], lr=0.1)
    with pytest.raises(ga.Error):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2)), parameter(1, 2)]})
    a.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert optimizer.result is not None and optimizer.result.applied
    b = torch.nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [b]})
    (a.sum() + b.sum()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert b[0, 0].item() < 1


@pytest.mark.parametrize("decoupled", [True, False])
def test_an_adam_is_no_adamw(decoupled: bool) -> None:
    optimizer = gt.AdamW if not decoupled else gt.Adam
    with pytest.raises(ValueError, match="decoupled_weight_decay"):
        optimizer([{"params": [parameter(1)], "decoupled_weight_decay": decoupled}])
    ours = gt.Adam([parameter(1)], lr=0.25)
    with pytest.raises(ValueError, match="decoupled_weight_decay"):
        ours.load_state_dict(torch.optim.AdamW([parameter(1)]).state_dict())
    assert ours.param_groups[0]["lr"] == 0.25


# ---- Steps


def test_a_scale_does_not_outlive_a_step_that_failed() -> None:
    p = parameter(0)
    optimizer = gt.SGD([p], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.backward(scaler.scale(p.sum()))
    with pytest.raises(RuntimeError, match="loss_scaler="):
        scaler.step(optimizer)
    optimizer.discard()
    p.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert p.item() == -1


def test_an_infinite_gradient_backs_the_scaler_off() -> None:
    p = parameter(0)
    optimizer = gt.SGD([p], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(p.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert p.item() == -1
    assert scaler.get_scale() == 512


@pytest.mark.filterwarnings("error")
def test_schedulers_go_on_after_a_load_and_a_wrap() -> None:
    theirs = torch.optim.SGD([parameter(0)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(theirs, 1, 0.5)
    optimizer = gt.wrap(theirs)
    optimizer.load_state_dict(optimizer.state_dict())
    for rate in (1.0, 0.5, 0.25):
        assert optimizer.param_groups[0]["lr"] == rate
        optimizer.backward(theirs.param_groups[0]["params"][0].sum())
        assert optimizer.flush()
        assert optimizer.result is not None and optimizer.result.lr == rate
        scheduler.step()


# ---- State


def test_state_that_torch_has_not_is_reset() -> None:
    p, q = parameter(1), parameter(1)
    ours = gt.AdamW([p, q], lr=0.1)
    ours.backward((p + q).sum())
    ours.step()
    theirs = torch.optim.AdamW([p, q], lr=0.1)
    p.sum().backward()  # type: ignore[no-untyped-call]
    theirs.step()
    theirs.zero_grad()
    ours.backward((p + q).sum())
    with pytest.raises(RuntimeError, match="within a window"):
        ours.load_state_dict(theirs.state_dict())
    ours.discard()
    ours.load_state_dict(theirs.state_dict())
    assert set(ours.state_dict()["state"]) == {0}
    ours.load_state_dict(torch.optim.AdamW([p, q]).state_dict())
    assert ours.state_dict()["state"] == {}
    assert ours.context.window.steps == 0


def test_a_first_gradient_after_a_load_is_a_first_one() -> None:
    p, q = parameter(0), parameter(0)
    ours = gt.SGD([p, q], lr=1.0, momentum=0.9, dampening=0.5)
    ours.backward(p.sum())
    ours.step()
    theirs = torch.optim.SGD([p, q], lr=1.0, momentum=0.9, dampening=0.5)
    theirs.load_state_dict(ours.state_dict())
    q.sum().backward()  # type: ignore[no-untyped-call]
    theirs.step()
    assert q.item() == -1


def test_sparse_adam_goes_to_torch_and_back() -> None:
    tables = [torch.nn.Embedding(8, 2, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    reference = torch.optim.SparseAdam(tables[0].parameters(), lr=0.1)
    optimizer: Any = gt.SparseAdam(tables[1].parameters(), lr=0.1)
    for step in range(6):
        if step == 2:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = torch.optim.SparseAdam(tables[1].parameters(), lr=0.1)
            optimizer.load_state_dict(torch.load(file))
        if step == 4:
            optimizer = gt.wrap(optimizer)
        for table, one in zip(tables, (reference, optimizer), strict=True):
            one.zero_grad()
            table(torch.tensor([step, 1])).square().sum().backward()
            one.step()
    close(*tables, 1e-5)


def test_a_state_under_other_names_is_refused_in_words() -> None:
    task = Task()
    net = task.net()
    named, plain = gt.AdamW(net.named_parameters()), gt.AdamW(net.parameters())
    named.backward(task.whole(net, 0))
    named.step()
    with pytest.raises(ValueError, match="names"):
        plain.load_state_dict(named.state_dict())


def test_compiled_autograd(task: Task) -> None:
    """Its trace would hold the hooks; gradients that it has left in .grad are taken."""
    from torch._dynamo import compiled_autograd

    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    with compiled_autograd._enable(lambda graph: graph):
        with pytest.raises(RuntimeError, match="accumulate"):
            optimizer.backward(task.whole(net, 0))
        task.whole(net, 0).backward()  # type: ignore[no-untyped-call]
        optimizer.accumulate()
    optimizer.step()
    close(net, train(task, lambda p: torch.optim.SGD(p, lr=0.1), steps=1), 1e-12)
