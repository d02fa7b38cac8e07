# SPDX-License-Identifier: Apache-2.0
"""Muon of all kinds: tensors that are cut into matrices, coefficients, variants, beside torch and other packages."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import torch
from torch import Tensor

JORDAN = ((3.4445, -4.775, 2.0315),) * 5
YOU = (
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)  # fmt: skip
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonal(gradient: Tensor, rows: tuple[tuple[float, ...], ...] = JORDAN, cushion: float = 1.0) -> Tensor:
    """Newton-Schulz iterations in float64, of a matrix or of a batch of them."""
    x = gradient.double() / (cushion * gradient.double().norm(dim=(-2, -1), keepdim=True))
    for a, b, c in rows:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def one_step(shape: tuple[int, ...], cut: dict[str, int], **options: Any) -> tuple[Tensor, Tensor]:
    """The gradient, and what a step of Muon takes from zeros."""
    torch.manual_seed(0)
    gradient = torch.randn(shape)
    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = gt.Muon([{"params": [p], **cut}], lr=1.0, weight_decay=0.0, **options)
    optimizer.backward((p * gradient).sum())
    optimizer.step()
    return gradient, -p.detach().double()


def is_near(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).norm() < 5e-5 * want.norm())


def test_tensors_are_cut_into_matrices() -> None:
    gradient, got = one_step((8, 3, 5, 5), {"output_axis": 0})  # a convolution
    assert is_near(got.flatten(1), orthogonal(gradient.flatten(1)))
    gradient, got = one_step((4, 6, 10), {"batch_axes": 1, "output_axis": 1})  # experts
    assert is_near(got, orthogonal(gradient))
    gradient, got = one_step((12, 10), {"matrix_parts": 3})  # heads
    assert all(is_near(a, orthogonal(g)) for a, g in zip(got.split(4), gradient.split(4), strict=True))
    gradient, got = one_step((10, 12), {"split_axis": 1, "matrix_parts": 3})
    for a, g in zip(got.split(4, dim=1), gradient.split(4, dim=1), strict=True):
        assert is_near(a, math.sqrt(10 / 4) * orthogonal(g.T).T)
    with pytest.raises(ga.Error, match=r"rank is 4.*cut_matrices"):
        one_step((8, 3, 5, 5), {})
    with pytest.raises(ga.Error, match="matrix_parts was 5"):
        one_step((12, 10), {"matrix_parts": 5})


def test_the_cut_stays() -> None:
    p, q = torch.nn.Parameter(torch.ones(4, 3, 2)), torch.nn.Parameter(torch.ones(4, 3, 2))
    ours = gt.Muon([{"params": [p], "batch_axes": 1, "output_axis": 1}], lr=0.1)
    other = gt.Muon([{"params": [q], "batch_axes": 1, "output_axis": 2}], lr=0.1)
    ours.backward(p.square().sum())
    ours.step()
    before = q.detach().clone()
    with pytest.raises(ValueError, match=r"'output_axis': 1.*'output_axis': 2"):
        other.load_state_dict(ours.state_dict())
    assert torch.equal(q, before)
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.param_groups[0]["output_axis"] = 2
    with pytest.raises(RuntimeError, match="cannot change"):
        ours.backward(p.square().sum())
        ours.step()
    whole, parts = torch.nn.Parameter(torch.ones(4, 6)), torch.nn.Parameter(torch.ones(4, 6))
    saved = gt.Muon([whole], lr=0.1)
    saved.backward(whole.square().sum())
    saved.step()
    with pytest.raises(ga.Error, match="matrix_parts"):
        gt.Muon([{"params": [parts], "matrix_parts": 2}], lr=0.1).load_state_dict(saved.state_dict())
    matrix = torch.nn.Parameter(torch.ones(4, 6))
    cut = gt.Muon([{"params": [matrix], "matrix_parts": 2}], lr=0.1)
    cut.load_state_dict(torch.optim.Muon([torch.nn.Parameter(torch.ones(4, 6))], lr=0.2).state_dict())
    assert cut.param_groups[0]["matrix_parts"] == 2
    assert cut.param_groups[0]["lr"] == 0.2


def test_coefficients() -> None:
    _, named = one_step((6, 9), {}, ns_coefficients="you")
    gradient, rows = one_step((6, 9), {}, ns_coefficients=YOU)
    assert torch.equal(named, rows)
    assert is_near(named, orthogonal(gradient, YOU))
    _, express = one_step((6, 9), {}, ns_coefficients="polar_express")
    assert is_near(express, orthogonal(gradient, POLAR_EXPRESS, 1.02))
    with pytest.raises(ValueError, match="ns_coefficients was 'fast', expected one of 'you', 'polar_express'"):
        one_step((6, 9), {}, ns_coefficients="fast")
    with pytest.raises(ValueError, match="expected three numbers in each row"):
        one_step((6, 9), {}, ns_coefficients=((1.0, 2.0, 3.0, 4.0), (5.0, 6.0)))


def test_cautious_weight_decay() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(6, 9), torch.randn(6, 9)
    moved = {}
    for cautious, decay in ((False, 0.0), (False, 0.5), (True, 0.5)):
        p = torch.nn.Parameter(start.clone())
        optimizer = gt.Muon([p], lr=0.1, weight_decay=decay, cautious=cautious)
        optimizer.backward((p * gradient).sum())
        optimizer.step()
        moved[cautious, decay] = p.detach()
    plain, decayed, careful = moved.values()
    towards_zero = (start - plain) * start >= 0
    assert towards_zero.any()
    assert not towards_zero.all()
    assert torch.equal(careful, torch.where(towards_zero, decayed, plain))


def train(start: Tensor, make: Callable[[list[Any]], Any], steps: int = 6, parts: int = 1) -> Tensor:
    """What steps of a regression make of a weight, each by so many micro-batches."""
    torch.manual_seed(1)
    p = torch.nn.Parameter(start.clone())
    optimizer = make([p])
    for _ in range(steps):
        x, y = torch.randn(12, start[0].numel()).to(start.dtype), torch.randn(12, len(start)).to(start.dtype)
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = (xs @ p.flatten(1).T - ys).square().mean()
            if isinstance(optimizer, gt.Optimizer):
                optimizer.backward(loss, weight=len(xs))
            else:
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return p.detach().double()


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 3, 2)])
@pytest.mark.parametrize("options", [{}, {"beta2": 0.9}, {"beta2": 0.9, "adjust_lr_fn": "match_rms_adamw"}])
def test_beside_pytorch_optimizer(shape: tuple[int, ...], options: dict[str, Any], monkeypatch: Any) -> None:
    """Its Muon and NorMuon, with an iteration in float64 in place of bfloat16."""
    theirs = pytest.importorskip("pytorch_optimizer")
    for module in ("muon", "normuon", "base"):
        path = f"pytorch_optimizer.optimizer.muon.{module}.zero_power_via_newton_schulz_5"
        original = theirs.optimizer.utils.matrix.zero_power_via_newton_schulz_5
        monkeypatch.setattr(path, functools.partial(original, dtype=torch.float64), raising=False)
    torch.manual_seed(0)
    start = torch.randn(shape)
    same = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}

    def make_theirs(params: list[Any]) -> Any:
        kind = theirs.NorMuon if "beta2" in options else theirs.Muon
        more = {"beta2": options["beta2"]} if "beta2" in options else {}
        group = {"params": params, "use_muon": True, "use_adjusted_lr": "adjust_lr_fn" in options, **same, **more}
        return kind([group], foreach=False)

    def make_ours(params: list[Any]) -> gt.Muon:
        cut = {"output_axis": 0} if len(shape) > 2 else {}
        return gt.Muon([{"params": params, **cut}], **same, **options)

    want = train(start.double(), make_theirs)
    for parts in (1, 3):
        got = train(start, make_ours, parts=parts)
        assert (got - want).norm() < 1e-4 * (start - want).norm()


def test_the_variants_together() -> None:
    """Those of nanochat, written anew in float64, without Muon+, which gives each O the same norm."""
    lr, decay, momentum, beta2 = 0.05, 0.4, 0.9, 0.8
    torch.manual_seed(0)
    start = torch.randn(3, 6, 10)
    want, b, v = start.double(), torch.zeros(3, 6, 10).double(), torch.zeros(3, 6, 1).double()
    p = torch.nn.Parameter(start.clone())
    optimizer = gt.Muon(
        [{"params": [p], "batch_axes": 1, "output_axis": 1}], lr=lr, weight_decay=decay, momentum=momentum,
        beta2=beta2, equilibrate="outputs", cautious=True, ns_coefficients="polar_express",
    )  # fmt: skip
    for _ in range(5):
        gradients = torch.randn(4, 3, 6, 10)
        for gradient in gradients:
            optimizer.backward((p * gradient).sum())
        optimizer.step()
        g = gradients.double().mean(0)
        b = b + (1 - momentum) * (g - b)
        x = g + momentum * (b - g)
        x = x / x.norm(dim=-1, keepdim=True)
        o = orthogonal(x, POLAR_EXPRESS, 1.02)
        mean = o.square().mean(dim=-1, keepdim=True)
        v = v + (1 - beta2) * (mean - v)
        scaled = o / v.sqrt()
        o = scaled * o.norm(dim=(-2, -1), keepdim=True) / scaled.norm(dim=(-2, -1), keepdim=True)
        want = want - lr * o - lr * decay * want * (o * want >= 0)
    assert (p.detach() - want).norm() < 1e-4 * (start - want).norm()
    assert "second_momentum_buffer" in optimizer.state_dict()["state"][0]


@pytest.mark.parametrize("nesterov", [False, True])
def test_normuon_of_dion(nesterov: bool) -> None:
    """Microsoft's, written anew in float64: its momentum is a sum of gradients, of which each matrix forgets the scale."""
    lr, decay, mu, beta2 = 0.05, 0.4, 0.9, 0.8
    torch.manual_seed(0)
    start = torch.randn(2, 12, 7)
    want, m, v = start.double(), torch.zeros(2, 12, 7).double(), torch.zeros(2, 12, 1).double()
    p = torch.nn.Parameter(start.clone())
    optimizer = gt.Muon(
        [{"params": [p], "batch_axes": 1, "output_axis": 1}], lr=lr, weight_decay=decay, momentum=mu, beta2=beta2,
        nesterov=nesterov, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    for _ in range(5):
        gradients = torch.randn(3, 2, 12, 7)
        for gradient in gradients:
            optimizer.backward((p * gradient).sum())
        optimizer.step()
        g = gradients.double().mean(0)
        m = mu * m + g
        u = orthogonal(mu * m + g if nesterov else m)
        v = torch.lerp(v, u.square().mean(dim=-1, keepdim=True), 1 - beta2)
        scaled = u / (v.sqrt() + 1e-8)
        u = scaled * (u.norm(dim=(-2, -1), keepdim=True) / scaled.norm(dim=(-2, -1), keepdim=True))
        want = (1 - lr * decay) * want - lr * 0.2 * math.sqrt(12) * u
    assert (p.detach() - want).norm() < 1e-4 * (start - want).norm()


def test_a_state_dictionary_has_the_variances() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(6, 5, 7)

    def make() -> tuple[torch.nn.Parameter, gt.Muon]:
        p = torch.nn.Parameter(torch.ones(5, 7))
        return p, gt.Muon([p], lr=0.1, beta2=0.9)

    def go(p: torch.nn.Parameter, optimizer: gt.Muon, some: Tensor) -> None:
        for gradient in some:
            optimizer.backward((p * gradient).sum())
            optimizer.step()

    p, whole = make()
    go(p, whole, gradients)
    q, first = make()
    go(q, first, gradients[:3])
    r, second = make()
    r.data.copy_(q.data)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    go(r, second, gradients[3:])
    assert torch.equal(p, r)
