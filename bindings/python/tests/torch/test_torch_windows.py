# SPDX-License-Identifier: Apache-2.0
"""Windows in torch's loops: three ways in, tails, schedulers, 16 bits, checkpointing, refusals."""

import copy
import gc
import io
import math
import pathlib
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import torch
from conftest import DEVICE, Task, close, train
from torch.utils.checkpoint import checkpoint

KEEP = ga.Config(nonfinite=ga.Nonfinite.DROP_MICRO)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


# ---- The ways in


def test_gradients_from_backward_are_freed_at_once(task: Task) -> None:
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.01)
    alive: list[int] = []
    seen: list[weakref.ref[Any]] = []
    for parameter in net.parameters():
        parameter.register_hook(
            lambda g: alive.append(sum(r() is not None for r in seen)) or seen.append(weakref.ref(g))
        )
    for loss, size in task.parts(net, 0):
        optimizer.backward(loss, weight=size)
        assert all(parameter.grad is None for parameter in net.parameters())
    assert optimizer.context.window.micro_batches == 3
    assert optimizer.context.window.weight == 8


def test_micro_batch_of_several_backwards(task: Task) -> None:
    want = train(task, adamw)
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.01)
    for step in range(8):
        # Two backwards make one micro-batch: the mean over it is the sum of their shares.
        with optimizer.micro_batch(weight=8):
            for loss, size in task.parts(net, step):
                (loss * (size / 8)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    close(want, net, 1e-12)


def test_accumulate_takes_grad(task: Task) -> None:
    want = train(task, adamw)
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.01)
    for step in range(8):
        for loss, size in task.parts(net, step):
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.accumulate(weight=size)
            assert all(parameter.grad is None for parameter in net.parameters())
        optimizer.step()
    close(want, net, 1e-12)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_unchanged_loop_counts(task: Task, set_to_none: bool) -> None:
    want = train(task, adamw)
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.01, accum_steps=4)
    applied = []
    for step in range(8):
        for loss, _ in task.parts(net, step, (2, 2, 2, 2)):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            applied.append(optimizer.context.window.steps)
    assert applied == [(i + 1) // 4 for i in range(32)]
    close(want, net, 1e-12)


def test_an_unchanged_loop_with_a_closure(task: Task) -> None:
    want = train(task, adamw)
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.01)
    for step in range(8):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = task.whole(net, step)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        assert float(optimizer.step(closure)) > 0
    close(want, net, 1e-12)


def test_the_tail_is_flushed(task: Task) -> None:
    """A window of two of four is a batch of two: not half a step, and nothing leaks into the next epoch."""
    nets = [task.net(), task.net()]
    theirs = torch.optim.SGD(nets[0].parameters(), lr=0.1)
    ours = gt.SGD(nets[1].parameters(), lr=0.1, accum_steps=4)
    theirs.zero_grad()
    task.loss(nets[0], task.x[0][:4], task.y[0][:4]).backward()  # type: ignore[no-untyped-call]
    theirs.step()
    for at in (0, 2):
        task.loss(nets[1], task.x[0][at : at + 2], task.y[0][at : at + 2]).backward()  # type: ignore[no-untyped-call]
        ours.step()
    assert ours.flush()
    assert not ours.flush()
    close(nets[0], nets[1], 1e-12)


def test_last_ends_a_window_that_is_not_full(task: Task) -> None:
    want = train(task, adamw)
    for steps in (None, 4):
        net = task.net()
        optimizer = gt.AdamW(net.parameters(), lr=0.01, accum_steps=steps)
        for step in range(8):
            for loss, size in task.parts(net, step):
                optimizer.backward(loss, weight=size, last=size == 1)
            assert optimizer.context.window.state == ga.WindowState.FULL
            with pytest.raises(ga.Error):
                optimizer.backward(task.whole(net, step))
            optimizer.step()
        close(want, net, 1e-12)


def test_step_without_gradients_does_nothing(task: Task) -> None:
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.01)
    optimizer.step()
    assert optimizer.result is None
    close(net, task.net(), 0)


# ---- What frameworks do with an optimizer


def test_schedulers_move_the_groups(task: Task) -> None:
    def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)

    for cycles in (one_cycle, lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)):
        nets = [task.net(), task.net()]
        theirs = torch.optim.AdamW(nets[0].parameters(), lr=0.01)
        ours = gt.AdamW(nets[1].parameters(), lr=0.01)
        schedulers = [cycles(theirs), cycles(ours)]
        for step in range(8):
            theirs.zero_grad()
            task.whole(nets[0], step).backward()  # type: ignore[no-untyped-call]
            theirs.step()
            for loss, size in task.parts(nets[1], step):
                ours.backward(loss, weight=size)
            ours.step()
            for scheduler in schedulers:
                scheduler.step()
        assert ours.param_groups[0]["betas"] == theirs.param_groups[0]["betas"]
        close(*nets, 1e-12)


def test_a_scheduler_stepped_per_micro_batch_is_noticed(task: Task) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1, accum_steps=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.warns(UserWarning, match="scheduler"):
        for loss, _ in task.parts(net, 0, (4, 4)):
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            scheduler.step()


def test_groups_are_added_and_frozen(task: Task) -> None:
    nets = [task.net(), task.net()]
    optimizers: list[Any] = []
    for net, module in zip(nets, (torch.optim, gt), strict=True):
        optimizer = module.AdamW(net[0].parameters(), lr=0.01)
        optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.05, "weight_decay": 0.0})
        optimizers.append(optimizer)
    for step in range(6):
        for net, optimizer in zip(nets, optimizers, strict=True):
            net[0].weight.requires_grad_(step not in (2, 3))
            optimizer.zero_grad()
            task.whole(net, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    close(*nets, 1e-12)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizers[1].add_param_group({"params": list(nets[1][2].parameters())})
    assert len(optimizers[1].param_groups) == 2


def test_parameters_that_unfreeze_get_hooks(task: Task) -> None:
    net = task.net()
    net[0].weight.requires_grad_(False)
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    optimizer.backward(task.whole(net, 0))
    optimizer.step()
    before = net[0].weight.clone()
    net[0].weight.requires_grad_(True)
    optimizer.backward(task.whole(net, 1))
    assert net[0].weight.grad is None
    optimizer.step()
    assert float((net[0].weight - before).abs().max()) > 0


def test_written_parameters_and_moved_ones() -> None:
    """bf16 with f32 masters: a parameter that the program writes is taken anew, our own steps are not."""
    task = Task(torch.bfloat16)
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=1e-4)
    for step in range(20):  # each step is below half a unit of bf16: only masters show it
        optimizer.backward(task.whole(net, step))
        optimizer.step()
    master = optimizer.context.params[0].get_state("master")
    kept = torch.from_dlpack(master) if not isinstance(master, torch.Tensor) else master
    assert float((kept - net[0].weight.float()).abs().max()) > 0
    version = net[0].weight._version
    with torch.no_grad():
        net[0].weight.fill_(0.5)
    assert net[0].weight._version > version
    optimizer.backward(task.whole(net, 0))
    optimizer.step()
    assert float((net[0].weight.float() - 0.5).abs().max()) < 0.01

    net[0].weight.data = net[0].weight.data.clone()  # moves
    before = net[0].weight.clone()
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    optimizer.backward(task.whole(net, 1))
    optimizer.step()
    assert float((net[0].weight - before).abs().max()) > 0
    optimizer.backward(task.whole(net, 1))
    net[0].weight.data = net[0].weight.data.clone()
    with pytest.raises(RuntimeError, match="moved"):
        optimizer.step()


WRITES: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "clamp": lambda p: p.data.clamp_(-0.5, 0.5),
    "mul": lambda p: p.data.mul_(0.5),
    "add": lambda p: p.data.add_(1),
    "replaced": lambda p: setattr(p, "data", p.data.roll(1)),
    "copied": lambda p: p.data.copy_(p.data.flip(0)),
    "one_number": lambda p: p.data.view(torch.int16)[3:5].bitwise_xor_(1),  # to the next one
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WRITES)
def test_data_that_the_program_writes(dtype: torch.dtype, way: str) -> None:
    """Elements that were written are what the next step moves; the others keep what masters know of them."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(70).to(dtype))
    optimizer = gt.SGD([parameter], lr=2**-10)
    master = parameter.detach().float()
    for step in range(12):
        if step % 4 == 3:
            before = parameter.detach().clone()
            WRITES[way](parameter)
            written = parameter.detach().view(torch.int16) != before.view(torch.int16)
            assert bool(written.any())
            master = torch.where(written, parameter.detach().float(), master)
        for sign in (1, 3):
            parameter.grad = (sign * torch.randn(70)).to(dtype)
            gradient = parameter.grad.float() if sign == 1 else (gradient + parameter.grad.float()) / 2
            optimizer.accumulate()
        optimizer.step()
        master = master - 2**-10 * gradient
        assert torch.equal(parameter.detach(), master.to(dtype))


def test_steps_move_versions(task: Task) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    loss = task.whole(net, 0)
    optimizer.backward(loss)
    out = net[2].weight * net[2].weight
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()  # type: ignore[no-untyped-call]


def test_16_bits_keep_masters() -> None:
    """torch in f32 against bf16 parameters with f32 masters; torch's own bf16 is far from it."""
    task = Task(torch.bfloat16)
    ours = task.net()
    optimizer = gt.AdamW(ours.parameters(), lr=1e-3, accum_steps=1)
    wide = Task(torch.float32)
    reference = wide.net()
    with torch.no_grad():
        for a, b in zip(reference.parameters(), ours.parameters(), strict=True):
            a.copy_(b)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(30):
        gradients = torch.autograd.grad(task.whole(ours, step), list(ours.parameters()))
        for p, q, g in zip(ours.parameters(), reference.parameters(), gradients, strict=True):
            p.grad = g
            q.grad = g.float()
        optimizer.step()
        theirs.step()
    for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
        assert float((p.float() - q).abs().max()) <= 2**-8 * float(q.abs().max())


def test_channels_last() -> None:
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
        optimizer = (gt if ours else torch.optim).AdamW(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        assert net.weight.is_contiguous(memory_format=torch.channels_last)
        results.append(net.weight.detach().clone())
        if ours:
            saved = optimizer.state_dict()["state"][0]["exp_avg"]
            assert saved.shape == net.weight.shape and saved.stride() == net.weight.stride()
    assert float((results[0] - results[1]).abs().max()) < 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    task = Task()
    want = train(task, adamw)
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.01)
    for step in range(8):
        at = 0
        for size in (5, 2, 1):
            x = task.x[step][at : at + size].clone().requires_grad_()
            middle: Any = checkpoint(net[:2], x, use_reentrant=reentrant)
            loss = torch.nn.functional.mse_loss(net[2](middle), task.y[step][at : at + size])
            optimizer.backward(loss, weight=size)
            at += size
        optimizer.step()
    close(want, net, 1e-12)


def test_tied_weights() -> None:
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(12, 4).double()
        out = torch.nn.Linear(4, 12, bias=False).double()
        out.weight = table.weight
        optimizer: Any = (gt if ours else torch.optim).AdamW(table.parameters(), lr=0.05)
        rows = torch.tensor([1, 5, 1, 7])
        for _ in range(4):
            if ours:
                for part in rows.split(2):
                    optimizer.backward(torch.nn.functional.cross_entropy(out(table(part)), part), weight=2)
            else:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(out(table(rows)), rows).backward()
            optimizer.step()
        results.append(table.weight.detach())
    assert float((results[0] - results[1]).abs().max()) < 1e-12


def test_a_nan_skips_its_window_or_its_micro_batch(task: Task) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    for loss, size in task.parts(net, 0):
        optimizer.backward(loss * (math.nan if size == 2 else 1), weight=size)
    optimizer.step()
    assert optimizer.result is not None and not optimizer.result.applied
    close(net, task.net(), 0)

    nets = [task.net(), task.net()]
    dropping = gt.SGD(nets[0].parameters(), lr=0.1, config=KEEP)
    plain = gt.SGD(nets[1].parameters(), lr=0.1)
    for loss, size in task.parts(nets[0], 0):
        dropping.backward(loss * (math.nan if size == 2 else 1), weight=size)
    for loss, size in task.parts(nets[1], 0):
        if size != 2:
            plain.backward(loss, weight=size)
    dropping.step()
    plain.step()
    assert dropping.result is not None and dropping.result.window_dropped == 1
    close(*nets, 1e-12)


def test_clipping_is_of_the_window(task: Task) -> None:
    net, other = task.net(), task.net()
    theirs = torch.optim.SGD(net.parameters(), lr=1.0)
    ours = gt.SGD(other.parameters(), lr=1.0, clip=ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=0.01))
    for step in range(3):
        theirs.zero_grad()
        task.whole(net, step).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        theirs.step()
        for loss, size in task.parts(other, step):
            ours.backward(loss, weight=size)
        ours.step()
        assert ours.result is not None and abs(ours.result.norm / float(norm) - 1) < 1e-9
    close(net, other, 1e-12)


# ---- Loss scales


def test_loss_scaler(task: Task) -> None:
    want = train(task, adamw)
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.01, loss_scaler=ga.LossScaler(initial_scale=1024))
    for step in range(8):
        for k, (loss, size) in enumerate(task.parts(net, step)):
            if k == 0:
                with optimizer.micro_batch(weight=size):
                    optimizer.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
            else:
                optimizer.backward(loss, weight=size)
        optimizer.step()
    close(want, net, 1e-12)


@pytest.mark.parametrize("accum_steps", [None, 2])
def test_a_grad_scaler_works_on_grad(task: Task, accum_steps: int | None) -> None:
    want = train(task, adamw)
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.01, accum_steps=accum_steps)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0, growth_interval=3)
    for step in range(8):
        for loss, _ in task.parts(net, step, (8,) if accum_steps is None else (4, 4)):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    close(want, net, 1e-12)


def test_a_grad_scaler_that_cannot_see_gradients_is_refused(task: Task) -> None:
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(DEVICE)
    optimizer.backward(scaler.scale(task.whole(net, 0)))
    with pytest.raises(RuntimeError, match="loss_scaler="):
        scaler.step(optimizer)


# ---- State


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("at", range(3))
def test_a_run_goes_on_from_any_micro_batch(at: int, order: bool, dtype: torch.dtype) -> None:
    """torch.save in the middle of a window, load in a new optimizer: the same bits as without."""
    task = Task(dtype)
    options: dict[str, Any] = {"lr": 0.01, "loss_scaler": ga.LossScaler(initial_scale=64)}
    ends = []
    for stops in (False, True):
        net = task.net()
        optimizer = gt.AdamW(net.parameters(), **options)
        for step in range(4):
            for k in range(3):
                if stops and step == 2 and k == at:
                    file = io.BytesIO()
                    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
                    net = task.net()
                    optimizer = gt.AdamW(net.parameters(), **options)
                    file.seek(0)
                    saved = torch.load(file)
                    for part in (net, optimizer) if order else (optimizer, net):
                        part.load_state_dict(saved["net" if part is net else "optimizer"])
                loss, size = list(task.parts(net, step))[k]
                optimizer.backward(loss, weight=size)
            optimizer.step()
        ends.append(net)
    close(*ends, 0)


def test_the_file_of_the_library(task: Task, tmp_path: pathlib.Path) -> None:
    ends = []
    for stops in (False, True):
        net = task.net()
        optimizer = gt.NAdam(net.named_parameters(), lr=0.01)
        for step in range(4):
            for k, (loss, size) in enumerate(task.parts(net, step)):
                optimizer.backward(loss, weight=size)
                if stops and step == 1 and k == 1:
                    optimizer.save(tmp_path / "run.safetensors")
                    net = task.net()
                    optimizer = gt.NAdam(net.named_parameters(), lr=0.01)
                    optimizer.load(tmp_path / "run.safetensors")
                    next(iter(task.parts(net, step)))
                    rest = list(task.parts(net, step))[2:]
                    for other, weight in rest:
                        optimizer.backward(other, weight=weight)
                    break
            optimizer.step()
        ends.append(net)
    close(*ends, 0)
    header = (tmp_path / "run.safetensors").read_bytes()
    assert b'"0.weight.exp_avg"' in header


def test_a_state_that_does_not_fit_changes_nothing(task: Task) -> None:
    net = task.net()
    optimizer = gt.AdamW(net.parameters(), lr=0.01)
    optimizer.backward(task.whole(net, 0))
    optimizer.step()
    before = optimizer.state_dict()
    theirs = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    task.whole(net, 0).backward()  # type: ignore[no-untyped-call]
    theirs.step()
    with pytest.raises(ValueError, match="another optimizer: its groups have no betas"):
        optimizer.load_state_dict(theirs.state_dict())
    damaged = copy.deepcopy(before)
    damaged["param_groups"][0]["lr"] = 5.0
    damaged["state"][0]["exp_avg"][0, 0] += 1
    with pytest.raises(ga.Error, match="exp_avg"):
        optimizer.load_state_dict(damaged)
    assert optimizer.param_groups[0]["lr"] == 0.01
    after = optimizer.state_dict()
    assert torch.equal(before["state"][0]["exp_avg"], after["state"][0]["exp_avg"])


def test_copies_are_refused(task: Task) -> None:
    optimizer = gt.AdamW(task.net().parameters())
    for copies in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            copies(optimizer)


def test_an_optimizer_is_collected(task: Task) -> None:
    net = task.net()
    optimizer = gt.AdamW(net.parameters())
    optimizer.backward(task.whole(net, 0))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    task.whole(net, 0).backward()  # type: ignore[no-untyped-call]  # its hooks are harmless
    assert net[0].weight.grad is not None


# ---- Refusals


def test_refusals(task: Task) -> None:
    net = task.net()
    with pytest.raises(ValueError, match="capturable"):
        gt.AdamW(net.parameters(), capturable=True)
    with pytest.raises(ValueError, match="differentiable"):
        gt.SGD(net.parameters(), differentiable=True)
    with pytest.raises(TypeError, match="complex64"):
        gt.SGD([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="dense"):
        gt.SGD([torch.nn.Parameter(torch.ones(4, 4)[:, ::2])])
    with pytest.raises(ValueError, match="accum_steps"):
        gt.SGD(net.parameters(), accum_steps=0)
    with pytest.raises(ga.Error, match="lr"):
        gt.SGD(net.parameters(), lr=math.nan)
    optimizer = gt.SGD(net.parameters())
    with optimizer.micro_batch():
        task.whole(net, 0).backward()  # type: ignore[no-untyped-call]
        for call in (optimizer.step, optimizer.flush, optimizer.accumulate):
            with pytest.raises(RuntimeError, match="micro-batch"):
                call()
        with pytest.raises(RuntimeError, match="open already"), optimizer.micro_batch():
            pass
    task.whole(net, 0).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"\.grad"):
        optimizer.backward(task.whole(net, 0))


def test_an_exception_in_backward_drops_the_micro_batch(task: Task) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1)

    def fail(_: Any) -> Any:
        raise ArithmeticError("from a hook")

    handle = net[0].weight.register_hook(fail)
    with pytest.raises(ArithmeticError) as caught:
        optimizer.backward(task.whole(net, 0))
    assert any("window was discarded" in note for note in caught.value.__notes__)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert optimizer.context.window.micro_batches == 0
    handle.remove()
    optimizer.backward(task.whole(net, 0))
    optimizer.step()
    assert optimizer.result is not None and optimizer.result.applied


def test_parameters_without_gradients_stay(task: Task) -> None:
    nets = [task.net(), task.net()]
    for net, module in zip(nets, (torch.optim, gt), strict=True):
        optimizer: Any = module.AdamW(net.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            task.loss(net[2], torch.tanh(task.x[step] @ torch.ones(5, 7).double()), task.y[step]).backward()
            optimizer.step()
    close(*nets, 1e-12)
    close(nets[1][0], task.net()[0], 0)


def test_batch_norm_moves_once_a_step() -> None:
    def layers() -> torch.nn.Sequential:
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)
        )

    net, reference = layers(), layers()
    optimizer = gt.SGD(net.parameters(), lr=0.0)
    assert gt.convert_batchnorm(net, optimizer) == 1
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(8, 3, 8, 8) * (step + 1)
        reference(x)  # moves its statistics by the whole batch
        mean = net[1].running_mean.clone()
        for part, size in zip(x.split([5, 2, 1]), (5, 2, 1), strict=True):
            optimizer.backward(net(part).square().mean(), weight=size)
            assert torch.equal(net[1].running_mean, mean)
        optimizer.step()
        assert torch.allclose(net[1].running_mean, reference[1].running_mean, rtol=1e-5, atol=1e-6)
        assert torch.allclose(net[1].running_var, reference[1].running_var, rtol=1e-5, atol=1e-6)
        assert int(net[1].num_batches_tracked) == step + 1
    net.eval()
    reference.eval()
    x = torch.randn(4, 3, 8, 8)
    assert torch.allclose(net(x), reference(x), atol=1e-5)
    assert set(net.state_dict()) == set(reference.state_dict())
