# SPDX-License-Identifier: Apache-2.0
"""What raises where ranks have parameters in parts, on every rank; and where the part of a rank lies."""

import datetime
import itertools
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import fsdp
import gradaccum as ga
import gradaccum.torch as gt
import pytest
import ranks
import torch
from fsdp import Cut, mean
from gradaccum.torch._communicator import Exchange, Kind
from gradaccum.torch._parts import box_of, shards_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

Case = Callable[[int], None]


def sharded(rank: int, **options: Any) -> tuple[Cut, Any]:
    cut = Cut("fsdp", rank, 2)
    return cut, cut.optimizer(**options)


def loss_of(cut: Cut) -> Any:
    rows, y, _ = cut.micro_batches(0)[0]
    return mean(cut.net, rows, y)


def parameter(placements: list[Placement], shape: tuple[int, ...] = (4, 3)) -> torch.nn.Parameter:
    mesh = init_device_mesh("cpu", (2,))
    return torch.nn.Parameter(DTensor.from_local(torch.ones(shape), mesh, placements, run_check=False))


# ---- Arguments


def no_mesh(rank: int) -> None:
    gt.AdamW(Cut("fsdp", rank, 2).net.parameters())


def no_mesh_alone(rank: int) -> None:
    gt.AdamW(Cut("fsdp", rank, 2).net.parameters(), distributed=False)


def no_mesh_later(rank: int) -> None:
    optimizer = gt.AdamW(torch.nn.Linear(2, 2).parameters(), distributed=False)
    optimizer.add_param_group({"params": Cut("fsdp", rank, 2).net.parameters()})


def ddp_too(rank: int) -> None:
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    gt.AdamW(net.parameters(), ddp=net, data_mesh=())


def no_parts(rank: int) -> None:
    gt.AdamW(torch.nn.Linear(2, 2).parameters(), data_mesh=init_device_mesh("cpu", (2,)))


def only_reduced(rank: int) -> None:
    gt.AdamW(torch.nn.Linear(2, 2).parameters(), reduced=ga.Reduced.SUM)


def no_device_mesh(rank: int) -> None:
    sharded(rank, data_mesh=2)


def eager_on_one(rank: int) -> None:
    sharded(rank, eager=rank == 1)


def not_distributed(rank: int) -> None:
    sharded(rank, distributed=False)


def elsewhere(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    net = torch.nn.Linear(4, 4, device="meta")
    fully_shard(net, mesh=mesh)
    gt.AdamW(net.parameters(), data_mesh=mesh)


# ---- Parameters


def plain(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(net[0], mesh=mesh)
    gt.AdamW(net.named_parameters(), data_mesh=mesh)


def plain_without_a_name(rank: int) -> None:
    gt.AdamW([parameter([Shard(0)]), torch.nn.Parameter(torch.ones(2))], data_mesh=())


def on_one_rank(rank: int) -> None:
    """As the stages of a pipeline."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))["data"]
    net = torch.nn.Linear(4, 4)
    fully_shard(net, mesh=mesh)
    gt.AdamW(net.parameters(), data_mesh=mesh)


def not_on_the_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    w = torch.nn.Parameter(distribute_tensor(torch.ones(3), mesh["tensor"], [Shard(0)]))
    gt.AdamW([("w", w)], data_mesh=mesh["data"])


def partial(rank: int) -> None:
    gt.AdamW([("w", parameter([Partial()]))], data_mesh=())


def not_a_box(rank: int) -> None:
    gt.AdamW([("w", parameter([_StridedShard(0, split_factor=2)]))], data_mesh=())


def other_shape(rank: int) -> None:
    """Rank 0 has five rows of eight."""
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(5 - 2 * rank, 2)
    w = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([8, 2]), stride=(2, 1))
    gt.AdamW([("w", torch.nn.Parameter(w))], data_mesh=())


def transposed(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    w = DTensor.from_local(torch.ones(3, 2).T, mesh, [Shard(0)], run_check=False)
    gt.AdamW([("w", torch.nn.Parameter(w))], data_mesh=())


def other_names(rank: int) -> None:
    """Ranks that give one parameter different names leave holes."""
    gt.AdamW([(f"w{rank}", parameter([Shard(0)]))], data_mesh=())


def muon(rank: int) -> None:
    gt.Muon([("w", parameter([Shard(0)]))], data_mesh=())


def lamb(rank: int) -> None:
    gt.Lamb([("w", parameter([Shard(1)]))], data_mesh=())


def muon_of_whole(rank: int) -> None:
    """Is not refused: each rank makes the same step."""
    w = parameter([Replicate()])
    optimizer = gt.Muon([("w", w)], lr=0.1, data_mesh=())
    optimizer.backward((w.to_local() * torch.eye(4, 3)).sum(), weight=3)
    optimizer.step()
    assert optimizer.result.applied
    group: Any = optimizer._ranks
    assert group._exchange._gloo.group._get_backend(torch.device("cpu")).options._timeout == datetime.timedelta(seconds=120)
    raise ArithmeticError("the step was made")


def drop_micro(rank: int) -> None:
    sharded(rank, config=ga.Config(nonfinite=ga.Nonfinite.DROP_MICRO))


def clip_by_value(rank: int) -> None:
    sharded(rank, clip=ga.Clip(max_value=1.0))


def batch_norm(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    fully_shard(net, mesh=mesh)
    optimizer = gt.AdamW(net.named_parameters(), data_mesh=mesh)
    gt.convert_batchnorm(net, optimizer)
    optimizer.backward(net(torch.randn(3, 4)).sum())
    optimizer.step()


def bad_in_one(rank: int) -> None:
    """One rank alone has a parameter that is cut otherwise than it says."""
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(4 - rank, 2)
    w = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([8, 2]), stride=(2, 1))
    gt.AdamW([("w", torch.nn.Parameter(w))], data_mesh=())


# ---- Weights


def weight_of_a_micro_batch(rank: int) -> None:
    cut, optimizer = sharded(rank)
    with optimizer.micro_batch(weight=2):
        loss_of(cut).backward()


def weight_of_one_rank(rank: int) -> None:
    cut, optimizer = sharded(rank)
    loss_of(cut).backward()
    optimizer.accumulate(weight=1 + rank)


def negative(rank: int) -> None:
    cut, optimizer = sharded(rank)
    optimizer.backward(loss_of(cut), weight=1 - 2 * rank)


def weights_of_the_same_samples(rank: int) -> None:
    w = parameter([Shard(0)])
    optimizer = gt.AdamW([w], data_mesh=())
    optimizer.backward(w.sum().full_tensor(), weight=1 + rank)
    optimizer.step()


def after_one_that_was_refused(rank: int) -> None:
    """A backward() that raises before its micro-batch says nothing of the next one."""
    cut, optimizer = sharded(rank)
    loss_of(cut).backward()
    with pytest.raises(RuntimeError, match=r"has a \.grad of an earlier backward"):
        optimizer.backward(loss_of(cut), weight=2)
    optimizer.zero_grad()
    with optimizer.micro_batch(weight=2):
        raise AssertionError("the micro-batch was opened")


def without_gradients(rank: int) -> None:
    """set_requires_gradient_sync(False) keeps them, and the window ends."""
    cut, optimizer = sharded(rank)
    cut.net.set_requires_gradient_sync(False)
    optimizer.backward(loss_of(cut))
    with pytest.warns(UserWarning, match="a micro-batch of weight 1 gave no gradient to any parameter"):
        optimizer.step()
    raise ArithmeticError("a warning was given")


# ---- Ranks that go apart


def step_and_backward(rank: int) -> None:
    cut, optimizer = sharded(rank)
    optimizer.backward(loss_of(cut))
    loss = loss_of(cut)
    if rank == 0:
        optimizer.step()
    else:
        optimizer.backward(loss)


def flush_and_backward(rank: int) -> None:
    cut, optimizer = sharded(rank)
    loss = loss_of(cut)
    if rank == 0:
        optimizer.flush()
    else:
        optimizer.backward(loss)


def other_ways(rank: int) -> None:
    cut, optimizer = sharded(rank)
    loss = loss_of(cut)
    if rank == 0:
        optimizer.backward(loss)
    else:
        with optimizer.micro_batch():
            loss.backward()


def discard_and_step(rank: int) -> None:
    cut, optimizer = sharded(rank)
    optimizer.backward(loss_of(cut))
    (optimizer.discard if rank == 0 else optimizer.step)()


def state_and_step(rank: int) -> None:
    cut, optimizer = sharded(rank)
    optimizer.backward(loss_of(cut))
    (optimizer.state_dict if rank == 0 else optimizer.step)()


def library_and_step(rank: int) -> None:
    """A call of optimizer.context that all ranks make together."""
    cut, optimizer = sharded(rank)
    optimizer.backward(loss_of(cut))
    (optimizer.context.save_bytes if rank == 0 else optimizer.step)()


def group_and_flush(rank: int) -> None:
    optimizer = gt.AdamW([("a", parameter([Shard(0)]))], data_mesh=())
    other = ("b", parameter([Shard(0)]))
    if rank == 0:
        optimizer.add_param_group({"params": [other]})
    else:
        optimizer.flush()


def other_rate(rank: int) -> None:
    cut, optimizer = sharded(rank)
    optimizer.backward(loss_of(cut))
    optimizer.param_groups[0]["lr"] = 0.5 + rank
    optimizer.step()


def other_steps(rank: int) -> None:
    sharded(rank, accum_steps=2 + rank)


def other_meshes(rank: int) -> None:
    """One rank says that all have the same samples."""
    cut = Cut("fsdp", rank, 2)
    cut.optimizer(data_mesh=cut.data if rank else ())


def long_messages(rank: int) -> None:
    """What does not fit into the first frame follows it."""
    exchange = Exchange()
    for sizes in ((0, 5000), (2031, 2033), (2032, 2032), (9000, 1)):
        found = exchange.gather(Kind.VOTE, bytes([rank]) * sizes[rank])
        assert found == [bytes([other]) * size for other, size in enumerate(sizes)], sizes
    raise ArithmeticError("all arrived")


# ---- State


def state_of_another_rank(rank: int) -> None:
    _, optimizer = sharded(rank)
    state = optimizer.state_dict()
    if rank == 1:
        state["gradaccum"]["rank"] = 0
    optimizer.load_state_dict(state)


def state_of_a_process_alone(rank: int) -> None:
    cut, optimizer = sharded(rank)
    alone = gt.AdamW(fsdp.Net().named_parameters(), distributed=False, **fsdp.ADAMW)
    optimizer.load_state_dict(alone.state_dict())


def state_in_other_parts(rank: int) -> None:
    cut, optimizer = sharded(rank)
    optimizer.backward(loss_of(cut))
    optimizer.step()
    state = optimizer.state_dict()
    del state["gradaccum"]
    of = state["state"][0]
    of["exp_avg"] = of["exp_avg"].redistribute(placements=[Replicate()])
    optimizer.load_state_dict(state)


APART = "the ranks went apart: rank 0 "
REFUSED: dict[Case, tuple[type[Exception] | tuple[type[Exception], ...], str]] = {
    no_mesh: (ValueError, r"a parameter was a DTensor, which needs data_mesh=: .* or \(\), if all ranks have the same"),
    no_mesh_alone: (ValueError, "a parameter was a DTensor, which needs data_mesh="),
    no_mesh_later: (ValueError, "a parameter was a DTensor, which needs data_mesh="),
    ddp_too: (ValueError, "ddp and data_mesh were given, but gradients are reduced by one of them alone"),
    no_parts: (ValueError, r"data_mesh was given, but no parameter is a DTensor, as those of fully_shard\(\) are"),
    only_reduced: (ValueError, "reduced was given without data_mesh, over which gradients are reduced"),
    no_device_mesh: (TypeError, r"data_mesh was a int, expected a DeviceMesh, or \(\) for no data parallelism"),
    eager_on_one: (RuntimeError, "eager was False on rank 0 and True on rank 1: replicas would go apart"),
    not_distributed: (ValueError, "distributed was False, but with data_mesh= the ranks train one model together"),
    elsewhere: (ValueError, r"a parameter was on meta, but .* on the CPU: fully_shard\(\.\.\., offload_policy=CPUOff"),
    plain: (ValueError, r'parameter "1.weight" is no DTensor, but data_mesh has the ranks \[0, 1\], over which its grad'),
    plain_without_a_name: (ValueError, r'"param1" is no DTensor, which does not say .* model\.named_parameters\(\), so'),
    on_one_rank: (ValueError, r'parameter "param0" is on DeviceMesh.* does not say what other ranks have: give the opti'),
    not_on_the_mesh: (ValueError, r'parameter "w" is on DeviceMesh.*, but data_mesh has the ranks \[0, 1\], over which'),
    partial: (ValueError, r'parameter "w" has the placements \[Partial\(sum\)\], of which P\(sum\) neither cuts it nor'),
    not_a_box: (ValueError, r'"w" of shape \[8, 3\] is cut by .* not adjacent: of axis 0, one rank has \[0, 2\), \[4, 6\)'),
    other_shape: (ValueError, r'"w" of shape \[8, 2\] is cut by .*, which gives rank \d the shape \[4, 2\], but its part'),
    transposed: (ValueError, r'parameter "w" had strides \(1, 2\), expected a contiguous part'),
    other_names: (ga.Error, r'parameter "w0": the ranks have 12 of its 24 elements, whose shape is \[8, 3\]'),
    muon: (ValueError, 'parameter "w" is cut between ranks, but MUON needs whole parameters: leave it whole on every'),
    lamb: (ValueError, 'parameter "w" is cut between ranks, but LAMB needs whole parameters'),
    muon_of_whole: (ArithmeticError, "the step was made"),
    drop_micro: (ga.Error, "DROP_MICRO does not go together with"),
    clip_by_value: (ga.Error, "max_value does not go together with"),
    batch_norm: (ga.Error, "a layer with batch normalisation does not go together with"),
    bad_in_one: ((ValueError, RuntimeError), r"which gives rank 1 the shape \[4, 2\], but its part has \[3, 2\]"),
    weight_of_a_micro_batch: (ValueError, r"the ranks gave the weights 2, 2 to micro_batch\(\), but the gradients are"),
    weight_of_one_rank: (ValueError, r"the weights 1, 2 to accumulate\(\), .* opt\.backward\(loss, weight=\.\.\.\) does"),
    after_one_that_was_refused: (ValueError, r"the ranks gave the weights 2, 2 to micro_batch\(\)"),
    negative: (ValueError, "the ranks gave the weights 1, -1, expected finite numbers >= 0"),
    weights_of_the_same_samples: (ga.Error, r"has brought 1 micro-batches of weight 2 in all, but another rank with the"),
    without_gradients: (ArithmeticError, "a warning was given"),
    step_and_backward: (RuntimeError, APART + r"ended a window after 1 micro-batches; rank 1 was in backward inside mic"),
    flush_and_backward: (RuntimeError, APART + r"called flush\(\) after 0 micro-batches; rank 1 was in backward inside"),
    other_ways: (RuntimeError, APART + r"was in backward inside micro_batch\(\) for .*; rank 1 opened a micro_batch\(\)"),
    discard_and_step: (RuntimeError, APART + r"called discard\(\) after 1 micro-batches; rank 1 ended a window after 1"),
    state_and_step: (RuntimeError, APART + r"called state_dict\(\) or save\(\) after 1 micro-batches; rank 1 ended a w"),
    library_and_step: (RuntimeError, APART + "was in a call that its library makes together .*; rank 1 was in a call of"),
    group_and_flush: (RuntimeError, APART + r"called add_param_group\(\) after 0 micro-batches; rank 1 called flush\(\)"),
    other_rate: (RuntimeError, r"lr of group 0 was 0\.5 on rank 0 and 1\.5 on rank 1: replicas would go apart"),
    other_steps: (RuntimeError, "accum_steps was 2 on rank 0 and 3 on rank 1"),
    other_meshes: (ga.Error, "data_ranks is 2 on rank 1, but 1 on rank 0"),
    long_messages: (ArithmeticError, "all arrived"),
    state_of_another_rank: ((ValueError, RuntimeError), r"of the state dictionary is of {'rank': 0, 'ranks': 2}, expect"),
    state_of_a_process_alone: (ValueError, r'"gradaccum" of the state dictionary is of a process alone, expected {.rank'),
    state_in_other_parts: (ValueError, r'the state of parameter "table.weight" is a DTensor of \[Replicate\(\)\] on Dev'),
}  # fmt: skip


def all_refused(rank: int) -> dict[str, tuple[type[BaseException], str, float]]:
    found = {}
    for case in REFUSED:
        start = time.monotonic()
        try:
            case(rank)
        except Exception as error:
            found[case.__name__] = type(error), str(error), time.monotonic() - start
    return found


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(tmp_path_factory.mktemp("refused"), 2, all_refused)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_it_is_an_error_on_each_rank(case: Case, refused: list[dict[str, Any]]) -> None:
    kinds, text = REFUSED[case]
    for rank in refused:
        assert case.__name__ in rank, "nothing was raised"
        kind, message, seconds = rank[case.__name__]
        assert issubclass(kind, kinds), (kind, message)
        assert re.search(text, message), message
        assert seconds < 60


def silent(rank: int, folder: str) -> None:
    """One rank ends after a step."""
    torch.set_num_threads(1)
    distributed: Any = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=8)
    )
    w = parameter([Shard(0)])
    optimizer = gt.AdamW([("w", w)], data_mesh=())
    optimizer.backward(w.sum().full_tensor())
    if rank == 0:
        try:
            optimizer.step()
        except RuntimeError as error:
            pathlib.Path(folder, "error").write_text(str(error))
    os._exit(0)


def test_a_rank_that_ends_is_an_error(tmp_path: pathlib.Path) -> None:
    ranks.start(2, silent, str(tmp_path))
    assert "a rank did not come to the same call of the optimizer" in (tmp_path / "error").read_text()


# ---- Where parts lie


def cut_by_torch(whole: torch.Tensor, placements: Any, mesh: tuple[int, ...], coordinate: tuple[int, ...]) -> Any:
    """The elements that torch's own placements give a rank."""
    for placement, size, index in zip(placements, mesh, coordinate, strict=True):
        if not placement.is_replicate():
            whole = placement._split_tensor(whole, size, with_padding=False)[0][index]
    return whole


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 7, 8, 11, 12, 29])
def test_boxes_are_what_torch_cuts(rows: int) -> None:
    whole = torch.arange(rows * 6).reshape(rows, 6)
    boxes = 0
    for mesh in ((2,), (4,), (2, 3), (3, 2), (2, 2, 2)):
        kinds = [Replicate(), Shard(0), Shard(1), *(_StridedShard(0, split_factor=n) for n in (2, 3))]
        for placements in itertools.product(kinds, repeat=len(mesh)):
            for coordinate in itertools.product(*map(range, mesh)):
                want = cut_by_torch(whole, placements, mesh, coordinate)
                axes = [
                    [i for begin, end in runs for i in range(begin, end)]
                    for runs in box_of((rows, 6), mesh, shards_of(placements, "w"), coordinate)
                ]
                assert torch.equal(want, whole[axes[0]][:, axes[1]]), (placements, coordinate)
                boxes += 1
    assert boxes > 1000
