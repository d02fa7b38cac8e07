# SPDX-License-Identifier: Apache-2.0
"""Ranks that have parameters with state in 8 bits in parts: their bits, and what they save and load."""

from typing import Any

import fsdp
import gradaccum as ga
import gradaccum.torch as gt
import pytest
import ranks
import torch
from fsdp import CLIP, STEPS
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

SUM = ga.Config(gradient_kind=ga.GradientKind.SUM)


def in_8_bits(rank: int, count: int, folder: str) -> Any:
    """Four ranks save after two of four windows, by torch.distributed.checkpoint and at one path; any ranks go on."""
    found = []
    for way in ("whole", "checkpoint", "path"):
        net = coded_net()
        fully_shard(net, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (count,)))
        optimizer = coded(net, data_mesh=net[0].weight.device_mesh)
        path, first = f"{folder}/coded.{way}", 0
        if way != "whole" and count == 2:
            first = 2
            if way == "path":
                optimizer.load(path)
            else:
                module, state = get_state_dict(net, optimizer)
                checkpoint.load({"net": module, "optimizer": state}, checkpoint_id=path)
                set_state_dict(net, optimizer, model_state_dict=module, optim_state_dict=state)
        for step in range(first, STEPS):
            optimizer.backward(net(coded_batch(step)).square().mean(), weight=4)
            optimizer.step()
            if step == 1 and way == "path" and count == 4:
                optimizer.save(path)
            if step == 1 and way == "checkpoint" and count == 4:
                module, state = get_state_dict(net, optimizer)
                checkpoint.save({"net": module, "optimizer": state}, checkpoint_id=path)
        info = {info.name: info.dtype for info in optimizer.context.params[0].states}
        assert info["exp_avg"] == info["exp_avg_sq"] == ga.Dtype.U8
        found.append({name: fsdp.whole(value) for name, value in net.state_dict().items()})
    return found


def coded_as_numbers(rank: int, count: int, _: str) -> Any:
    """Codes of one process, whose blocks lie in two parts, go to ranks as numbers, and so do those of a mesh of one."""
    torch.manual_seed(5)
    value, gradient = torch.randn(66, 128), torch.randn(66, 128)
    alone = torch.nn.Parameter(value.clone())
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (count, 1), mesh_dim_names=("copy", "one"))
    optimizers = [gt.AdamW([alone], state_dtype="8bit", distributed=False)]
    for of, placements in ((mesh["copy"], [Shard(0)]), (mesh, [Replicate(), Shard(0)])):
        tensor = torch.nn.Parameter(distribute_tensor(value, of, placements))
        optimizers.append(gt.AdamW([tensor], state_dtype="8bit", data_mesh=()))
    alone.grad = gradient
    optimizers[0].accumulate()
    optimizers[0].step()
    state = optimizers[0].state_dict()
    assert state["state"][0]["exp_avg_scale"].numel() == 33
    found = [optimizers[0].state_dict(as_numbers=True)["state"][0]]
    for optimizer in optimizers[1:]:
        optimizer.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        found.append(optimizer.state_dict()["state"][0])
    return [{name: fsdp.whole(of[name]) for name in ("exp_avg", "exp_avg_sq")} for of in found]


def coded_net() -> Any:
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(96, 72), torch.nn.Linear(72, 640), torch.nn.Linear(640, 8))


def coded(net: Any, **options: Any) -> Any:
    return gt.AdamW(net.named_parameters(), **fsdp.ADAMW, state_dtype="8bit", clip=CLIP, **options)


def coded_batch(step: int) -> Tensor:
    return torch.randn(4, 96, generator=torch.Generator().manual_seed(step))


def all_cases(rank: int, count: int, folder: str) -> dict[str, Any]:
    cases = [in_8_bits, coded_as_numbers] if count == 2 else [in_8_bits]
    return {case.__name__: case(rank, count, folder) for case in cases}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What four ranks reach, and then two, which go on from what the four have saved."""
    state = tmp_path_factory.mktemp("state")
    return {
        count: ranks.run(tmp_path_factory.mktemp(f"ranks{count}"), count, all_cases, count, str(state))
        for count in (4, 2)
    }


def test_state_in_8_bits_goes_on_on_any_ranks(found: dict[int, list[dict[str, Any]]]) -> None:
    """All ranks have the same samples, so that the mean of their gradients is exact."""
    net = coded_net()
    with ga.Context(SUM) as context:
        kind = ga.Optimizer(ga.OptimizerKind.ADAMW, ga.Flavor.TORCH, **fsdp.ADAMW, state_dtype=ga.Dtype.STATE_8BIT)
        group = context.add_group(kind)
        for name, value in net.named_parameters():
            context.add_param(group, name, value.data).set_part(value.shape, [0] * value.dim())
        context.set_clip(CLIP)
        alone = ga.Communicator.from_all_gather(0, 1, bytes)
        context.set_communicator(alone, ga.CommunicatorOptions(shard=ga.CommShard.PARAMETERS))
        for step in range(STEPS):
            net.zero_grad()
            net(coded_batch(step)).square().mean().backward()
            context.accumulate([value.grad for value in net.parameters()], weight=1)
            context.step()
    for count in (2, 4):
        for rank in found[count]:
            for way in rank["in_8_bits"]:
                for name, value in net.state_dict().items():
                    assert torch.equal(value, way[name]), name


def test_codes_of_one_process_become_numbers(found: dict[int, list[dict[str, Any]]]) -> None:
    for rank in found[2]:
        want, *others = rank["coded_as_numbers"]
        for got in others:
            for name, least in (("exp_avg", 2.0**-15), ("exp_avg_sq", 2.0**-31)):
                step = torch.maximum(want[name].abs() / 15, want[name].abs().max() * least)
                assert ((got[name] - want[name]).abs() <= step).all()
