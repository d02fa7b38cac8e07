# SPDX-License-Identifier: Apache-2.0
"""Muon of matrices that FSDP2 leaves whole on every rank, kept by torch on the CPU or not, beside one process."""

import math
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import ranks
import torch
from fsdp import BATCH, STEPS, WINDOWS, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

OPTIONS = {"lr": 0.05, "weight_decay": 0.1}
PRECISIONS = ("f32", "bf16")


def net_of() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 10, bias=False), torch.nn.Tanh(), torch.nn.Linear(10, 4, bias=False)
    )


def loss_of(net: torch.nn.Module, step: int, part: slice) -> Tensor:
    """That of no sample is the loss of any other, since its weight is 0."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 4, generator=generator)
    part = part if part.start < part.stop else slice(0, 1)
    found: Tensor = (net(x[part]) - y[part]).square().mean()
    return found


def in_parts(rank: int, count: int, precision: str, **options: Any) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The matrices that ranks with shares of each micro-batch reach, and what FSDP2 has reduced for each window."""
    net: Any = net_of()
    # HSDP over shards of one rank each: FSDP2 has the matrices as DTensors, whole on every rank.
    mesh = init_device_mesh("cpu", (count, 1), mesh_dim_names=("copy", "shard"))
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=mesh, **options)
    config = ga.Config(gradient_kind=ga.GradientKind.SUM)
    optimizer = gt.Muon(net.named_parameters(), **OPTIONS, ns_precision=precision, data_mesh=mesh, config=config)
    gradients = []
    for step in range(STEPS):
        at = 0
        for counts in WINDOWS[count]:
            share = ranks.mine(rank, tuple(counts))
            (loss_of(net, step, slice(at + share.start, at + share.stop)) * counts[rank]).backward()
            gradients.append([whole(p.grad) * count for p in net.parameters()])
            optimizer.accumulate(weight=counts[rank])
            at += sum(counts)
        optimizer.step()
    return [whole(p) for p in net.parameters()], gradients


def alone(precision: str, gradients: list[list[Tensor]]) -> list[Tensor]:
    """What one process makes of gradients that were reduced, as many in each window."""
    net = net_of()
    config = ga.Config(gradient_kind=ga.GradientKind.SUM)
    optimizer = gt.Muon(net.parameters(), **OPTIONS, ns_precision=precision, distributed=False, config=config)
    size = len(gradients) // STEPS
    for at, of in enumerate(gradients, 1):
        for parameter, gradient in zip(net.parameters(), of, strict=True):
            parameter.grad = gradient.clone()
        optimizer.accumulate(weight=BATCH / size)
        if at % size == 0:
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def whole_batches(precision: str, ulps: int = 0) -> list[Tensor]:
    """What one process reaches, with gradients moved by so many ulps."""
    net = net_of()
    optimizer = gt.Muon(net.parameters(), **OPTIONS, ns_precision=precision, distributed=False)
    for step in range(STEPS):
        loss_of(net, step, slice(0, BATCH)).backward()  # type: ignore[no-untyped-call]
        for parameter in net.parameters():
            for _ in range(ulps):
                assert parameter.grad is not None
                parameter.grad = torch.nextafter(parameter.grad, torch.tensor(math.inf))
        optimizer.accumulate()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def all_ways(rank: int, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for precision in PRECISIONS:
        try:
            kept, gradients = in_parts(rank, count, precision)
        except ga.Error as error:
            if error.status != ga.Status.UNSUPPORTED:
                raise
            continue
        offloaded, _ = in_parts(rank, count, precision, offload_policy=CPUOffloadPolicy(pin_memory=False))
        found[precision] = {"kept": kept, "offloaded": offloaded, "gradients": gradients}
    return found


@pytest.fixture(scope="module", params=[2, 4])
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(tmp_path_factory.mktemp("muon"), request.param, all_ways, request.param)


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Relative, of all matrices together."""
    pairs = [torch.cat([m.double().flatten() for m in of]) for of in (a, b)]
    return float((pairs[0] - pairs[1]).norm() / pairs[1].norm())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_equal_gradients_give_equal_bits(precision: str, found: list[dict[str, Any]]) -> None:
    if precision not in found[0]:
        pytest.skip("this processor has no products of bf16")
    for rank in found:
        of = rank[precision]
        want = alone(precision, of["gradients"])
        for way in ("kept", "offloaded"):
            assert all(map(torch.equal, of[way], want)), way


@pytest.mark.parametrize("precision", PRECISIONS)
def test_whole_batches_are_as_near_as_their_gradients(precision: str, found: list[dict[str, Any]]) -> None:
    """To 1e-6 with products of f32; with those of bf16 as near as runs whose gradients differ by an ulp or two."""
    if precision not in found[0]:
        pytest.skip("this processor has no products of bf16")
    want = whole_batches(precision)
    bound = 1e-6 if precision == "f32" else 2 * max(distance(whole_batches(precision, ulps), want) for ulps in (1, 2))
    for rank in found:
        assert distance(rank[precision]["offloaded"], want) <= bound
