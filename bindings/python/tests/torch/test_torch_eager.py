# SPDX-License-Identifier: Apache-2.0
"""Updates while backward runs: the bits of the step, what goes ahead and what waits, refusals."""

import math
import os
import pathlib
import re
import types
from collections.abc import Sequence
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import torch
from conftest import Task
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

IN_PLACE = ga.Config(nonfinite=ga.Nonfinite.IGNORE)
Bits = list[list[int]]


def bits(net: torch.nn.Module) -> Bits:
    return [tensor.detach().view(-1).view(torch.uint8).tolist() for tensor in net.parameters()]


def losses(task: Task, net: torch.nn.Module, step: int, micros: int) -> list[tuple[Tensor, int]]:
    return list(task.parts(net, step, (5, 2, 1) if micros == 3 else (8,)))


def trained(
    task: Task, micros: int, eager: bool, factors: Sequence[float] = (1,) * 5, **options: Any
) -> tuple[Bits, dict[str, Any], list[ga.StepResult]]:
    """Parameters, state and results after five windows, whose losses are multiplied by these factors."""
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.05, accum_steps=micros, eager=eager, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    results = []
    for step, factor in enumerate(factors):
        for loss, size in losses(task, net, step, micros):
            optimizer.backward(loss * factor, weight=size)
        optimizer.step()
        scheduler.step()
        assert optimizer.result is not None
        results.append(optimizer.result)
    kept = optimizer.state_dict()
    return bits(net), {str(i): state for i, state in kept["state"].items()}, results


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "in place": {"config": IN_PLACE},
    "in place by a thread": {"config": ga.Config(nonfinite=ga.Nonfinite.IGNORE, eager_threads=1)},
    "by a thread": {"config": ga.Config(eager_threads=1)},
    "not clipped": {"clip": ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=1e6)},
    "clipped": {"clip": ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=0.01)},
    "averages": {"ema": ga.Ema(decay=0.9)},
    "loss scale": {"loss_scaler": ga.LossScaler(initial_scale=1024.0)},
    "parts": {"config": ga.Config(nonfinite=ga.Nonfinite.DROP_MICRO)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_the_step(case: str, micros: int, dtype: torch.dtype) -> None:
    task = Task(dtype)
    # A window is skipped, where the policy is not to ignore it.
    factors = (1, 1, 1 if "in place" in case else math.nan, 1, 1)
    plain, plain_state, _ = trained(task, micros, False, factors, **CASES[case])
    ours, state, results = trained(task, micros, True, factors, **CASES[case])
    assert ours == plain
    assert state.keys() == plain_state.keys()
    for key in state:
        for name in state[key]:
            assert torch.equal(state[key][name], plain_state[key][name]), (key, name)
    # Parameters wait until a micro-batch has shown that their gradients come in one piece.
    ahead = 0 if case == "parts" else 4
    applied = [r for r in results if r.applied]
    assert len(applied) == (5 if "in place" in case else 4)
    if "thread" not in case:  # a step takes over what threads have not begun
        assert [r.eager for r in applied[1:]] == [ahead] * (len(applied) - 1)
        assert applied[0].eager == (ahead if micros == 3 else 0)
    assert all((r.eager_redone == r.eager) == (case == "clipped" or r.eager == 0) for r in applied)


@pytest.mark.parametrize("nonfinite", [ga.Nonfinite.IGNORE, ga.Nonfinite.SKIP_STEP])
def test_a_parameter_is_up_to_date_within_backward(task: Task, nonfinite: ga.Nonfinite) -> None:
    """In place, that of the last layer is written before the first layer has its gradient."""
    done: list[str] = []
    net: Any = task.net()
    optimizer = gt.SGD(
        [(name, tensor) for name, tensor in net.named_parameters()],
        lr=0.1, accum_steps=1, eager=True,
        config=ga.Config(nonfinite=nonfinite, on_param_done=lambda param: done.append(param.name)),
    )  # fmt: skip
    optimizer.backward(task.whole(net, 0))  # each parameter is seen
    optimizer.step()
    done.clear()
    before = net[2].weight.detach().clone()
    seen: list[tuple[bool, bool]] = []

    def see(_: Tensor) -> None:
        seen.append(("2.weight" in done, not torch.equal(net[2].weight, before)))

    net[0].weight.register_hook(see)
    optimizer.backward(task.whole(net, 1))
    in_place = nonfinite == ga.Nonfinite.IGNORE
    assert seen == [(in_place, in_place)]
    optimizer.step()
    assert sorted(done) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_tied_weights_are_whole_when_their_hook_is_called() -> None:
    got = []
    for eager in (False, True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(12, 4)
        out = torch.nn.Linear(4, 12, bias=False)
        out.weight = table.weight
        optimizer = gt.AdamW(table.parameters(), lr=0.05, accum_steps=2, eager=eager, config=IN_PLACE)
        rows = torch.tensor([1, 5, 1, 7])
        for _ in range(4):
            for part in rows.split(2):
                optimizer.backward(torch.nn.functional.cross_entropy(out(table(part)), part), weight=2)
            optimizer.step()
            assert optimizer.result is not None and optimizer.result.eager == eager
        got.append(bits(table))
    assert got[0] == got[1]


def test_what_comes_in_several_parts_waits(task: Task) -> None:
    """A layer in two reentrant checkpoints gets a gradient of each, and its hook cannot tell the last one."""
    got = []
    for eager in (False, True):
        torch.manual_seed(0)
        shared, last = torch.nn.Linear(5, 5).double(), torch.nn.Linear(5, 3).double()
        net = torch.nn.ModuleList([shared, last])
        optimizer = gt.AdamW(net.parameters(), lr=0.01, accum_steps=1, eager=eager, config=IN_PLACE)
        for step in range(4):
            x: Any = task.x[step].clone().requires_grad_()
            for _ in range(2):
                x = checkpoint(shared, x, use_reentrant=True)
            optimizer.backward(torch.nn.functional.mse_loss(last(x), task.y[step]))
            optimizer.step()
            assert optimizer.result is not None
            assert optimizer.result.eager == (2 if eager and step > 0 else 0)
        got.append(bits(net))
    assert got[0] == got[1]


def test_a_part_after_the_whole_is_refused_once(task: Task) -> None:
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.01, accum_steps=1, eager=True)
    optimizer.backward(task.whole(net, 0))
    optimizer.step()
    before = bits(net)
    for attempt in range(2):
        halves = [loss for loss, _ in task.parts(net, 1, (4, 4))]

        def micro_batch(halves: list[Tensor] = halves) -> None:
            with optimizer.micro_batch():
                for loss in halves:
                    (loss / 2).backward()  # type: ignore[no-untyped-call]

        if attempt == 0:
            with pytest.raises(ga.Error, match="after ga_params_ready"):
                micro_batch()
            assert optimizer.context.window.micro_batches == 0
            assert bits(net) == before
        else:
            micro_batch()
            optimizer.step()
            assert optimizer.result is not None and optimizer.result.applied
    assert bits(net) != before


def reads_late(net: Any, x: Tensor) -> Tensor:
    """A loss whose backward reads a weight after the weight's gradient is complete."""
    weight = net[2].weight
    product: Tensor = net[0](x) @ weight.detach().t()
    return product.sum() + weight.sum()


def test_autograd_notices_what_is_written_in_place(task: Task) -> None:
    got = []
    for eager in (False, True):  # apart, the weight is as it was until the step
        net = task.net()
        optimizer = gt.SGD(net.parameters(), lr=0.1, accum_steps=1, eager=eager)
        for step in range(3):
            optimizer.backward(reads_late(net, task.x[step]))
            optimizer.step()
        got.append(bits(net))
    assert got[0] == got[1]

    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1, accum_steps=1, eager=True, config=IN_PLACE)
    optimizer.backward(task.whole(net, 0))
    optimizer.step()

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
        optimizer.backward(reads_late(net, task.x[1]))
    assert any("step() ends the window" in note for note in error.value.__notes__)
    assert all(tensor.grad is None for tensor in net.parameters())
    optimizer.step()
    assert optimizer.result is not None and optimizer.result.eager == 1
    optimizer.backward(task.whole(net, 1))
    optimizer.step()
    assert optimizer.result.eager == 4


def test_a_window_that_is_not_full_has_a_last_micro_batch() -> None:
    task = Task(torch.float32)
    for steps in (None, 4):
        net = task.net()
        optimizer = gt.AdamW(net.parameters(), lr=0.01, accum_steps=steps, eager=True)
        for loss, size in task.parts(net, 0):
            optimizer.backward(loss, weight=size, last=size == 1)
        optimizer.step()
        assert optimizer.result is not None
        assert (optimizer.result.weight, optimizer.result.eager) == (8, 4)


def test_hyper_parameters_are_those_of_the_step() -> None:
    """A rate that is written between backward and step() is taken; in place, it is too late and refused."""
    task = Task(torch.float32)
    got = []
    for eager in (False, True):
        net = task.net()
        optimizer = gt.SGD(net.parameters(), lr=0.1, accum_steps=1, eager=eager)
        for step in range(3):
            optimizer.backward(task.whole(net, step))
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 2)
            optimizer.step()
        got.append(bits(net))
        assert optimizer.result is not None and optimizer.result.eager_redone == 4 * eager
    assert got[0] == got[1]
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1, accum_steps=1, eager=True, config=IN_PLACE)
    for step in range(2):
        optimizer.backward(task.whole(net, step))
        if step == 1:
            optimizer.param_groups[0]["lr"] = 0.2
            with pytest.raises(ga.Error, match="in place"):
                optimizer.step()
            with pytest.raises(ga.Error, match="in place"):
                optimizer.state_dict()
            with pytest.raises(ga.Error, match="in place"):
                optimizer.discard()
            optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()


def test_a_grad_scaler_leaves_the_same_bits(task: Task) -> None:
    """It has to see the gradients in .grad after backward, so nothing goes ahead."""
    got = []
    for eager in (False, True):
        net = Task(torch.float32).net()
        optimizer = gt.AdamW(net.parameters(), lr=0.01, accum_steps=1, eager=eager)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = Task(torch.float32).whole(net, step).float()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.result is not None and optimizer.result.eager == 0
        got.append(bits(net))
    assert got[0] == got[1]


def test_early_copies_of_16_bits() -> None:
    task = Task(torch.bfloat16)
    factors = (1, 1, math.nan, 1, 1)  # what was written early is put back
    plain, _, _ = trained(task, 1, False, factors)
    early, _, results = trained(task, 1, True, factors, param_options=ga.ParamOptions(write_early=True))
    assert early == plain
    assert [result.eager for result in results if result.applied] == [0, 4, 4, 4]


def test_what_cannot_go_ahead_is_refused(task: Task) -> None:
    net = task.net()
    with pytest.raises(ga.Error, match="eager_bytes"):
        gt.AdamW(net.parameters(), eager=True, config=ga.Config(eager_bytes=-1))


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = types.SimpleNamespace(device_index=0, cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    with FakeTensorMode():  # has tensors of a GPU where there is none
        net = torch.nn.Linear(3, 2, device="cuda")
    with pytest.raises(ga.Error, match="for the CPU alone") as error:
        gt.AdamW(net.parameters(), eager=True)
    assert error.value.status == ga.Status.UNSUPPORTED


def test_the_guide_offloads_a_model() -> None:
    path = pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "docs" / "python.md"
    (block,) = re.findall(r"<!-- test: offload -->\n```python\n(.*?)```", path.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(compile(block, str(path), "exec"), names)
    assert names["optimizer"].result.eager == 4
