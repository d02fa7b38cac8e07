# SPDX-License-Identifier: Apache-2.0
"""Ranks that have a network in parts, with shares of each micro-batch that differ, against whole batches in f64."""

import copy
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import fsdp
import gradaccum as ga
import gradaccum.torch as gt
import pytest
import ranks
import torch
from conftest import Task
from fsdp import BATCH, CLIP, EVEN, STEPS, Cut, by_backward, ended, mean, reference, train, window
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

Case = Callable[[int, int, str], Any]

SUM = ga.Config(gradient_kind=ga.GradientKind.SUM)


# ---- Ways to cut


def sharded(rank: int, count: int, _: str) -> Any:
    cut = Cut("fsdp", rank, count)
    return train(cut, cut.optimizer())


def offloaded(rank: int, count: int, _: str) -> Any:
    cut = Cut("fsdp", rank, count, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return train(cut, cut.optimizer())


def hybrid(rank: int, count: int, _: str) -> Any:
    cut = Cut("hsdp", rank, count)
    return train(cut, cut.optimizer())


def tensor_parallel(rank: int, count: int, _: str) -> Any:
    """Two pairs of ranks, each of which has the network, and all have the same samples."""
    cut = Cut("tp", rank, count)
    return train(cut, cut.optimizer())


def both(rank: int, count: int, _: str) -> Any:
    cut = Cut("fsdp+tp", rank, count)
    return train(cut, cut.optimizer())


# ---- Ways in


def added_by_the_framework(rank: int, count: int, _: str) -> Any:
    cut = Cut("fsdp", rank, count)
    for module in (cut.net.up, cut.net.o, cut.net):
        module.set_gradient_divide_factor(1.0)
    return train(cut, cut.optimizer(reduced=ga.Reduced.SUM))


def from_grad(rank: int, count: int, _: str) -> Any:
    """The program multiplies by weights itself."""

    def take(optimizer: Any, net: Any, rows: Tensor, y: Tensor, n: int) -> None:
        (mean(net, rows, y) * n).backward()  # type: ignore[no-untyped-call]
        optimizer.accumulate(weight=n)

    cut = Cut("fsdp", rank, count)
    return train(cut, cut.optimizer(config=SUM), take)


def by_micro_batch(rank: int, count: int, _: str) -> Any:
    """Two losses in each."""

    def take(optimizer: Any, net: Any, rows: Tensor, y: Tensor, n: int) -> None:
        with optimizer.micro_batch(weight=n):
            for share in (0.25, 0.75):
                (mean(net, rows, y) * n * share).backward()

    cut = Cut("fsdp", rank, count)
    return train(cut, cut.optimizer(config=SUM), take)


def sum_by_backward(rank: int, count: int, _: str) -> Any:
    def take(optimizer: Any, net: Any, rows: Tensor, y: Tensor, n: int) -> None:
        optimizer.backward(mean(net, rows, y) * n, weight=n)

    cut = Cut("fsdp", rank, count)
    return train(cut, cut.optimizer(config=SUM), take)


def as_it_is(rank: int, count: int, _: str) -> Any:
    """A loop that is not changed: equal micro-batches, and a last window that flush() ends."""
    cut = Cut("fsdp", rank, count)
    optimizer = cut.optimizer(accum_steps=5)
    for step in range(STEPS):
        for rows, y, _n in cut.micro_batches(step, EVEN):
            optimizer.zero_grad()
            mean(cut.net, rows, y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert not optimizer.flush()
    mean(cut.net, rows, y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    found = ended(cut, optimizer)
    assert optimizer.context.window.micro_batches == 1 and optimizer.flush()
    assert optimizer.result.weight == count and optimizer.context.window.steps == STEPS + 1
    return found


def kept_back(rank: int, count: int, _: str) -> Any:
    """Gradients are reduced with the last micro-batch of a window alone."""
    cut = Cut("fsdp", rank, count)
    optimizer = cut.optimizer()
    for step in range(STEPS):
        micros = cut.micro_batches(step)
        for k, (rows, y, n) in enumerate(micros):
            cut.net.set_requires_gradient_sync(k == len(micros) - 1)
            optimizer.backward(mean(cut.net, rows, y), weight=n)
        optimizer.step()
    return ended(cut, optimizer)


def scaled(rank: int, count: int, _: str) -> Any:
    def take(optimizer: Any, net: Any, rows: Tensor, y: Tensor, n: int) -> None:
        with optimizer.micro_batch(weight=n):
            optimizer.scale_loss(mean(net, rows, y) * n).backward()

    cut = Cut("fsdp", rank, count)
    optimizer = cut.optimizer(loss_scaler=ga.LossScaler(initial_scale=1024), config=SUM)
    window(cut, optimizer, 0, take)
    cut = Cut("fsdp", rank, count)
    return train(cut, cut.optimizer(loss_scaler=ga.LossScaler(initial_scale=1024)))


# ---- Windows that are skipped or dropped, averages, groups


def skipped(rank: int, count: int, _: str) -> Any:
    """One rank overflows in one micro-batch: no rank makes this step, and the loss scale falls on all."""
    cut = Cut("fsdp", rank, count)
    optimizer = cut.optimizer(loss_scaler=ga.LossScaler(initial_scale=1024))
    for step in range(STEPS):
        for k, (rows, y, n) in enumerate(cut.micro_batches(step)):
            factor = float("inf") if (step, k, rank) == (1, 2, 0) else 1.0
            optimizer.backward(mean(cut.net, rows, y) * factor, weight=n)
        optimizer.step()
        assert optimizer.result.applied == (step != 1)
        assert optimizer.context.loss_scale == (1024 if step < 1 else 512)
    return ended(cut, optimizer)


def discarded(rank: int, count: int, _: str) -> Any:
    cut = Cut("fsdp", rank, count)
    optimizer = cut.optimizer()
    rows, y, n = cut.micro_batches(2)[0]
    optimizer.backward(mean(cut.net, rows, y), weight=n)
    optimizer.discard()
    with pytest.raises(ZeroDivisionError), optimizer.micro_batch():
        mean(cut.net, rows, y).backward()  # type: ignore[no-untyped-call]
        raise ZeroDivisionError
    return train(cut, optimizer)


def averaged(rank: int, count: int, _: str) -> Any:
    cut = Cut("fsdp", rank, count)
    optimizer = cut.optimizer(ema=ga.Ema(decay=0.75))
    found = train(cut, optimizer)
    with optimizer.context.ema_swapped():
        return {**found, "net": cut.whole()}


def in_groups(rank: int, count: int, _: str) -> Any:
    """A group is added before the first window, and another one after it would begin."""
    cut = Cut("fsdp", rank, count)
    named = list(cut.net.named_parameters())
    optimizer = cut.optimizer_of([{"params": named[:3]}])
    optimizer.add_param_group({"params": named[3:5]})
    optimizer.add_param_group({"params": named[5:]})
    return train(cut, optimizer)


# ---- State


def state_of(rank: int, count: int, _: str) -> Any:
    """State tensors are DTensors like their parameters, which torch's own optimizer takes."""
    cut = Cut("fsdp" if count == 2 else "fsdp+tp", rank, count)
    optimizer = cut.optimizer()
    found = train(cut, optimizer)
    state = optimizer.state_dict()
    torchs = torch.optim.AdamW(cut.net.parameters())
    torchs.load_state_dict(state)
    for parameter in cut.net.parameters():
        of = torchs.state[parameter]
        assert of["step"] == STEPS
        if hasattr(parameter, "placements"):
            assert of["exp_avg"].placements == parameter.placements
            assert of["exp_avg"].device_mesh == parameter.device_mesh
    names = [name for name, _ in cut.net.named_parameters()]
    found["state"] = {
        name: {key: fsdp.whole(state["state"][index][key]) for key in ("exp_avg", "exp_avg_sq")}
        for index, name in enumerate(names)
    }
    return found


def state_dict_of(old: Any) -> Any:
    return old.state_dict()


def load_state(new: Any, state: Any) -> None:
    new.load_state_dict(state)


def through_a_dictionary(rank: int, count: int, _: str) -> Any:
    """In the middle of a window."""
    return resumed(rank, count, state_dict_of, load_state, copies=True)


def through_files(rank: int, count: int, folder: str) -> Any:
    path = f"{folder}/part{rank}.safetensors"
    return resumed(rank, count, lambda old: old.save(path), lambda new, _: new.load(path), copies=False)


def of_the_whole(rank: int, count: int, _: str) -> Any:
    """The state that torch's own optimizer has in one process, of which each rank takes its part."""
    cut = Cut("fsdp", rank, count)
    optimizer = cut.optimizer()
    for step in range(2):
        window(cut, optimizer, step)
    state = optimizer.state_dict()
    del state["gradaccum"]
    for of in state["state"].values():
        of.update({key: fsdp.whole(value) for key, value in of.items()})
    other = Cut("fsdp", rank, count)
    other.net.load_state_dict(cut.net.state_dict())
    new = other.optimizer()
    new.load_state_dict(state)
    return train(other, new, first=2)


def through_one_path(rank: int, count: int, folder: str) -> Any:
    """Four ranks save in the middle of a window; any ranks go on."""
    cut = Cut("fsdp", rank, count)
    optimizer = cut.optimizer()
    path = f"{folder}/run.safetensors"
    if count == 4:
        for step in range(2):
            window(cut, optimizer, step)
        for rows, y, n in cut.micro_batches(2)[:2]:
            optimizer.backward(mean(cut.net, rows, y), weight=n)
        optimizer.save(path)
        cut = Cut("fsdp+tp", rank, count)
        optimizer = cut.optimizer()
    optimizer.load(path)
    assert optimizer.context.window.micro_batches == 2
    for rows, y, n in cut.micro_batches(2)[2:]:
        optimizer.backward(mean(cut.net, rows, y), weight=n)
    optimizer.step()
    return train(cut, optimizer, first=3)


def in_16_bits(rank: int, count: int, _: str) -> None:
    """With master weights."""
    resumed(rank, count, state_dict_of, load_state, copies=True, dtype=torch.bfloat16)


def resumed(
    rank: int, count: int, save: Callable[[Any], Any], load: Callable[[Any, Any], None], *, copies: bool,
    dtype: torch.dtype = torch.float64,
) -> Any:  # fmt: skip
    """Another process of this rank goes on after two micro-batches of the third window, with the same bits."""
    cut = Cut("fsdp", rank, count, dtype)
    optimizer = cut.optimizer()
    for step in range(2):
        window(cut, optimizer, step)
    micros = cut.micro_batches(2)
    for rows, y, n in micros[:2]:
        optimizer.backward(mean(cut.net, rows, y), weight=n)
    saved = save(optimizer)
    other = Cut("fsdp", rank, count, dtype)
    if copies:
        other.net.load_state_dict(cut.net.state_dict())
    new = other.optimizer()
    load(new, saved)
    results = []
    for of, on in ((cut, optimizer), (other, new)):
        for rows, y, n in micros[2:]:
            on.backward(mean(of.net, rows, y), weight=n)
        on.step()
        results.append(train(of, on, first=3))
    for name, value in results[0]["net"].items():
        assert torch.equal(value, results[1]["net"][name]), name
    return results[1]


def to_other_ranks(rank: int, count: int, folder: str) -> Any:
    """Four ranks train two windows and save by torch.distributed.checkpoint; any ranks go on."""
    cut = Cut("fsdp", rank, count)
    optimizer = cut.optimizer()
    path = f"{folder}/reshard"
    if count == 4:
        for step in range(2):
            window(cut, optimizer, step)
        net, state = get_state_dict(cut.net, optimizer)
        assert optimizer.context.window.steps == 2
        checkpoint.save({"net": net, "optimizer": state}, checkpoint_id=path)
        cut = Cut("hsdp", rank, count)
        optimizer = cut.optimizer()
    net, state = get_state_dict(cut.net, optimizer)
    checkpoint.load({"net": net, "optimizer": state}, checkpoint_id=path)
    set_state_dict(cut.net, optimizer, model_state_dict=net, optim_state_dict=state)
    assert optimizer.context.window.steps == 2
    return train(cut, optimizer, first=2)


# ---- Other optimizers


def taken_over(rank: int, count: int, _: str) -> Any:
    """wrap() of an optimizer of torch that has made two steps."""
    cut = Cut("fsdp", rank, count)
    optimizer = cut.optimizer()
    for step in range(2):
        window(cut, optimizer, step)
    torchs = torch.optim.AdamW(cut.net.named_parameters(), **fsdp.ADAMW)
    state = optimizer.state_dict()
    torchs.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    return train(cut, gt.wrap(torchs, data_mesh=cut.data, clip=CLIP), first=2)


def schedule_free(rank: int, count: int, _: str) -> Any:
    """By the average, which one process reaches with whole batches."""
    cut = Cut("fsdp", rank, count)
    nets = []
    for net, options in ((cut.net, {"data_mesh": cut.data}), (fsdp.Net(), {"distributed": False})):
        optimizer = gt.AdamWScheduleFree(net.named_parameters(), lr=0.1, **options)
        for step in range(STEPS):
            rows, y = (of[step] for of in fsdp.batches())
            for part in cut.micro_batches(step) if net is cut.net else [(rows, y, BATCH)]:
                by_backward(optimizer, net, *part)
            optimizer.step()
        optimizer.eval()
        nets.append({name: fsdp.whole(value) for name, value in net.state_dict().items()})
    return nets


# ---- Bits


def reduced_gradients(rank: int, count: int, _: str) -> Any:
    """With what the framework has reduced."""
    return {dtype: reduced_in(rank, count, dtype) for dtype in (torch.float32, torch.bfloat16)}


def reduced_in(rank: int, count: int, dtype: torch.dtype) -> Any:
    cut = Cut("fsdp" if count == 2 else "hsdp", rank, count, dtype)
    optimizer = cut.optimizer(config=SUM)
    kept = []

    def take(optimizer: Any, net: Any, rows: Tensor, y: Tensor, n: int) -> None:
        (mean(net, rows, y) * n).backward()  # type: ignore[no-untyped-call]
        kept.append({name: fsdp.whole(parameter.grad) for name, parameter in net.named_parameters()})
        optimizer.accumulate(weight=n)

    return {**train(cut, optimizer, take), "gradients": kept}


def in_one_process(
    gradients: list[dict[str, Tensor]], count: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], float]:
    """What one process reaches in the mode of ranks with parts, given their reduced gradients."""
    found = {name: value.detach().clone() for name, value in fsdp.Net(dtype).named_parameters()}
    with ga.Context(SUM) as context:
        group = context.add_group(ga.Optimizer(ga.OptimizerKind.ADAMW, ga.Flavor.TORCH, **fsdp.ADAMW))
        for name, value in found.items():
            context.add_param(group, name, value, options=ga.ParamOptions(follow_data=True))
        context.set_clip(CLIP)
        alone = ga.Communicator.from_all_gather(0, 1, bytes)
        context.set_communicator(alone, ga.CommunicatorOptions(shard=ga.CommShard.PARAMETERS))
        size = len(gradients) // STEPS
        for step in range(STEPS):
            for k, of in enumerate(gradients[step * size :][:size]):
                counts = fsdp.WINDOWS[count][k]
                context.accumulate([of[name] * count for name in found], weight=sum(counts))  # a power of two: exact
            norm = context.step().norm
    return found, norm


def ahead(rank: int, count: int, _: str) -> Any:
    """With updates while backward runs, and without; clipped and not."""
    found = []
    for clip in (CLIP, ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=1e6)):
        for eager in (False, True):
            cut = Cut("fsdp", rank, count, torch.float32)
            options = {"clip": clip, "accum_steps": len(fsdp.WINDOWS[count]), "eager": eager}
            optimizer = cut.optimizer(**options)
            result = train(cut, optimizer)
            found.append(result | {"eager": optimizer.result.eager, "redone": optimizer.result.eager_redone})
    return found


# ---- Gradients that arrive in other placements


def partial_gradients(rank: int, count: int, _: str) -> Any:
    """As under sequence parallelism: each rank has the gradient of its part of the samples."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (count,))
    x = torch.arange(24, dtype=torch.float64).reshape(8, 3) / 24
    found = []
    for way in ("backward", "accumulate"):
        w = torch.nn.Parameter(distribute_tensor(torch.ones(3, dtype=torch.float64), mesh, [Replicate()]))
        optimizer = gt.SGD([w], lr=1.0, data_mesh=())
        loss = (distribute_tensor(x, mesh, [Shard(0)]) * w).square().sum().full_tensor()
        if way == "backward":
            optimizer.backward(loss, weight=4)
        else:
            loss.backward()
            assert isinstance(w.grad.placements[0], Partial)
            optimizer.accumulate()
        optimizer.step()
        found.append(fsdp.whole(w))
    return {"first": found[0], "second": found[1], "want": 1 - 2 * x.square().sum(0)}


# ---- Stages of a pipeline


def stages(rank: int, count: int, _: str) -> Any:
    """Two pairs of ranks have different parameters, and each window is clipped by the norm of all."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    nets = [Task().net() for _ in range(2)]
    with torch.no_grad():
        nets[1][0].weight.neg_()
    whole, stage = copy.deepcopy(nets), rank // 2
    fully_shard(nets[stage], mesh=mesh["data"])
    named = [(f"{stage}.{name}", parameter) for name, parameter in nets[stage].named_parameters()]
    optimizer = gt.AdamW(named, **fsdp.ADAMW, data_mesh=mesh["data"], clip=CLIP)
    torchs = torch.optim.AdamW([parameter for net in whole for parameter in net.parameters()], **fsdp.ADAMW)
    task = Task()
    for step, batch in enumerate(batches_of(task, rank % 2, 2)):
        for x, y in batch:
            optimizer.backward(task.loss(nets[stage], x, y), weight=len(x))
        optimizer.step()
        torchs.zero_grad()
        sum(task.whole(net, step) for net in whole).backward()  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(torchs.param_groups[0]["params"], fsdp.MAX_NORM)
        torchs.step()
        assert optimizer.result.norm == pytest.approx(float(norm), rel=1e-12)
    return {name: fsdp.whole(value) for name, value in nets[stage].state_dict().items()}, whole[stage].state_dict()


# ---- The guide


def batches_of(task: Task, rank: int, count: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Two micro-batches of each batch, of which the ranks have unequal shares."""
    sizes = {2: ((1, 4), (2, 1)), 4: ((1, 1, 1, 2), (1, 0, 1, 1))}[count]
    found = []
    for x, y in zip(task.x[:3], task.y[:3], strict=True):
        parts, at = [], 0
        for counts in sizes:
            share = ranks.mine(rank, counts)
            parts.append((x[at + share.start : at + share.stop], y[at + share.start : at + share.stop]))
            at += sum(counts)
        found.append(parts)
    return found


def documented(rank: int, count: int, _: str) -> Any:
    """The block of docs/torch.md, and the same batches as a whole in torch."""
    page = pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "docs" / "torch.md"
    (block,) = re.findall(r"<!-- test: fsdp -->\n```python\n(.*?)```", page.read_text(), re.S)
    task = Task()
    names: dict[str, Any] = {
        "torch": torch, "net": task.net(), "batches": batches_of(task, rank, count),
        "loss_of": lambda net, x, y: task.loss(net, x, y) if len(x) else net(torch.ones(1, 5).double()).sum(),
    }  # fmt: skip
    exec(compile(block, str(page), "exec"), names)
    net = task.net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        task.whole(net, step).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return {name: fsdp.whole(value) for name, value in names["net"].state_dict().items()}, net.state_dict()


# ---- The tests

TWO: list[Case] = [
    sharded, offloaded, added_by_the_framework, from_grad, by_micro_batch, sum_by_backward, as_it_is, kept_back, scaled,
    skipped, discarded, averaged, in_groups, state_of, through_a_dictionary, through_files, of_the_whole,
    through_one_path, to_other_ranks, taken_over,
]  # fmt: skip
FOUR: list[Case] = [
    sharded, hybrid, tensor_parallel, both, from_grad, as_it_is, skipped, state_of, through_files, through_one_path,
    to_other_ranks,
]  # fmt: skip
OTHERS: dict[int, list[Case]] = {
    2: [reduced_gradients, ahead, partial_gradients, schedule_free, documented, in_16_bits],
    4: [reduced_gradients, ahead, partial_gradients, schedule_free, documented, stages],
}


def all_cases(rank: int, count: int, folder: str) -> dict[str, Any]:
    return {case.__name__: case(rank, count, folder) for case in [*{2: TWO, 4: FOUR}[count], *OTHERS[count]]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What four ranks reach, and then two, which go on from a state that the four have saved."""
    state = tmp_path_factory.mktemp("state")
    return {
        count: ranks.run(tmp_path_factory.mktemp(f"ranks{count}"), count, all_cases, count, str(state))
        for count in (4, 2)
    }


@pytest.mark.parametrize(("count", "case"), [(2, case) for case in TWO] + [(4, case) for case in FOUR])
def test_parts_are_one_batch(count: int, case: Case, found: dict[int, list[dict[str, Any]]]) -> None:
    name = case.__name__
    want, _, norms = reference([1] if name == "skipped" else [], 0.75 if name == "averaged" else None)
    first = fsdp.Net().state_dict()
    for rank in found[count]:
        for key, value in rank[name]["net"].items():
            right = want[key] - first[key]
            off = float((value - want[key]).norm() / right.norm())
            assert off <= 1e-12, f"{key}: {off}"
        assert rank[name]["weight"] == (5 * count if name == "as_it_is" else BATCH)
        assert rank[name]["norm"] == pytest.approx(norms[-1], rel=1e-12)
        assert rank[name]["skipped"] == (name == "skipped")


@pytest.mark.parametrize("count", [2, 4])
def test_the_state_is_that_of_torch(count: int, found: dict[int, list[dict[str, Any]]]) -> None:
    _, want, _ = reference()
    for rank in found[count]:
        for name, state in rank["state_of"]["state"].items():
            for key, value in state.items():
                off = float((value - want[name][key]).norm() / want[name][key].norm())
                assert off <= 1e-12, f"{name}: {key}: {off}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 4])
def test_the_bits_are_those_of_one_process(
    count: int, dtype: torch.dtype, found: dict[int, list[dict[str, Any]]]
) -> None:
    for rank in found[count]:
        case = rank["reduced_gradients"][dtype]
        want, norm = in_one_process(case["gradients"], count, dtype)
        assert case["norm"] == norm
        for name, value in case["net"].items():
            assert value.dtype is dtype and torch.equal(value, want[name]), name


@pytest.mark.parametrize("count", [2, 4])
def test_updates_while_backward_runs_leave_the_same_bits(
    count: int, found: dict[int, list[dict[str, Any]]]
) -> None:
    for rank in found[count]:
        for late, early in (rank["ahead"][:2], rank["ahead"][2:]):
            assert late["eager"] == 0 and early["eager"] > 0
            assert early["norm"] == late["norm"]
            for name, value in late["net"].items():
                assert torch.equal(value, early["net"][name]), name
        clipped, not_clipped = rank["ahead"][1], rank["ahead"][3]
        assert clipped["redone"] == clipped["eager"] and not_clipped["redone"] == 0


@pytest.mark.parametrize("count", [2, 4])
def test_partial_gradients_are_added(count: int, found: dict[int, list[dict[str, Any]]]) -> None:
    for rank in found[count]:
        case = rank["partial_gradients"]
        for key in ("first", "second"):
            torch.testing.assert_close(case[key], case["want"], rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("count", "case"), [(2, schedule_free), (4, schedule_free), (2, documented), (4, documented), (4, stages)]
)
def test_it_is_what_one_process_reaches(count: int, case: Case, found: dict[int, list[dict[str, Any]]]) -> None:
    for rank in found[count]:
        got, want = rank[case.__name__]
        for name, value in got.items():
            torch.testing.assert_close(value, want[name], rtol=1e-12, atol=1e-14)


def test_the_example_of_updates_under_backward(tmp_path: pathlib.Path) -> None:
    """Which compares bits itself."""
    script = pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "examples" / "python" / "fsdp_eager.py"
    small = ["--layers", "1", "--width", "32", "--windows", "4", "--out", str(tmp_path)]
    shown = subprocess.run([sys.executable, str(script), *small], capture_output=True, text=True, check=True).stdout
    assert "skipped: 1" in shown
    assert "bits: under backward equal, with gradients from .grad equal, of one process equal" in shown
    assert (tmp_path / "fsdp_eager.csv").exists()


def test_the_example() -> None:
    """The losses of one process are those of two."""
    script = pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "examples" / "python" / "fsdp.py"
    one, two = (
        subprocess.run(
            [sys.executable, str(script), "--steps", "11", "--ranks", count], capture_output=True, text=True, check=True
        ).stdout
        for count in ("1", "2")
    )
    assert len(one.splitlines()) == 2 and "clipped by 0." in one
    for left, right in zip(re.findall(r"[\d.]+", one), re.findall(r"[\d.]+", two), strict=True):
        assert float(left.rstrip(".")) == pytest.approx(float(right.rstrip(".")), rel=1e-4)
