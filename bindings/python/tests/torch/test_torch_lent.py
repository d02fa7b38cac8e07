# SPDX-License-Identifier: Apache-2.0
"""Gradients that the library reads, or adds to, where torch has them: the bits, their life, and the memory."""

import io
import weakref
from collections.abc import Callable
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import torch
from gradaccum import GradientLife
from torch import Tensor
from torch.utils.checkpoint import checkpoint

KEPT = (GradientLife.LIVE, GradientLife.LENT)
WINDOWS = ((1.0,), (3.0, 0.5), (0.0, 2.0, 1.0, 4.0))  # weights of their micro-batches; a gradient of weight 0 is not read
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


class Net(torch.nn.Module):
    """A convolution in another memory order, tied weights, and a layer that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = torch.nn.Conv2d(3, 6, 3)
        self.norm = torch.nn.LayerNorm(24)
        self.table = torch.nn.Embedding(300, 24)
        self.middle = torch.nn.Linear(24, 24)
        self.out = torch.nn.Linear(24, 300, bias=False)
        self.out.weight = self.table.weight
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor, words: Tensor, uses_all: bool) -> Tensor:
        x = self.norm(self.conv(x).flatten(1) + self.table(words))
        return self.out(self.middle(x) if uses_all else x)


def loss_of(net: Net, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 3, 4, 4, generator=generator).to(net.conv.weight.dtype)
    words = torch.randint(300, (7,), generator=generator)
    return torch.nn.functional.cross_entropy(net(x, words, seed % 3 != 0).float(), words)


def by_backward(optimizer: gt.Optimizer, net: Net, seed: int, weight: float) -> None:
    optimizer.backward(loss_of(net, seed), weight=weight)


def by_accumulate(optimizer: gt.Optimizer, net: Net, seed: int, weight: float) -> None:
    optimizer.scale_loss(loss_of(net, seed)).backward()  # type: ignore[no-untyped-call]
    optimizer.accumulate(weight=weight)


def by_two_backwards(optimizer: gt.Optimizer, net: Net, seed: int, weight: float) -> None:
    """The library gets the gradients of each; retain_graph keeps what they were made of."""
    with optimizer.micro_batch(weight=weight):
        for k in range(2):
            optimizer.scale_loss(loss_of(net, seed + 50 * k)).backward(retain_graph=True)  # type: ignore[no-untyped-call]


def after_two_backwards(optimizer: gt.Optimizer, net: Net, seed: int, weight: float) -> None:
    """torch adds up the gradients of both."""
    optimizer.scale_loss(loss_of(net, seed)).backward()  # type: ignore[no-untyped-call]
    by_accumulate(optimizer, net, seed + 50, weight)


def by_reentrant_checkpoints(optimizer: gt.Optimizer, net: Net, seed: int, weight: float) -> None:
    """Parameters that the checkpoints share get several gradients in one backward."""
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(seed)).to(net.conv.weight.dtype).requires_grad_()
    for _ in range(3):
        x = checkpoint(net.middle, x, use_reentrant=True)
    optimizer.backward(x.float().square().mean(), weight=weight)


def of_other_strides(optimizer: gt.Optimizer, net: Net, seed: int, weight: float) -> None:
    for p in net.parameters():
        given = torch.randn(p.shape[::-1], generator=torch.Generator().manual_seed(seed)).to(p.dtype)
        p.grad = given.permute(*reversed(range(p.dim())))
    optimizer.accumulate(weight=weight)


MICRO_BATCHES = (
    by_backward, by_accumulate, by_two_backwards, after_two_backwards, by_reentrant_checkpoints, of_other_strides,
)  # fmt: skip


def bits(net: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def train(
    life: GradientLife, micro_batch: Callable[[gt.Optimizer, Net, int, float], None], dtype: torch.dtype, **options: Any
) -> tuple[list[Tensor], list[float]]:
    net = Net().to(dtype)
    optimizer = gt.AdamW(
        net.parameters(), lr=0.01, clip=ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=0.3),
        config=ga.Config(gradient_life=life), **options,
    )  # fmt: skip
    norms, seed = [], 0
    for weights in (*WINDOWS, *WINDOWS):
        for weight in weights:
            seed += 1
            micro_batch(optimizer, net, seed, weight)
            assert all(p.grad is None for p in net.parameters())
        optimizer.step()
        assert optimizer.result is not None and optimizer.result.applied
        norms.append(optimizer.result.norm)
    return bits(net), norms


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


# ---- The bits


@pytest.mark.parametrize("life", KEPT)
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("micro_batch", MICRO_BATCHES)
def test_the_bits_of_gradients_that_are_consumed(
    micro_batch: Callable[[gt.Optimizer, Net, int, float], None], dtype: torch.dtype, life: GradientLife
) -> None:
    want, got = (train(each, micro_batch, dtype) for each in (GradientLife.CONSUMED, life))
    assert got[1] == want[1]
    assert same(got[0], want[0])


@pytest.mark.parametrize("life", KEPT)
@pytest.mark.parametrize(
    "options",
    [
        {"loss_scaler": ga.LossScaler(initial_scale=1024)},
        {"state_dtype": "8bit"},
        {"state_dtype": "bf16"},
        {"param_options": ga.ParamOptions(accumulator_dtype=ga.Dtype.BF16)},
    ],
)
def test_the_bits_with_options(options: dict[str, Any], life: GradientLife) -> None:
    dtype = BF16 if "param_options" in options else F32
    for micro_batch in (by_backward, by_accumulate):
        want, got = (train(each, micro_batch, dtype, **options) for each in (GradientLife.CONSUMED, life))
        assert same(got[0], want[0]) and got[1] == want[1]


@pytest.mark.parametrize("life", KEPT)
def test_the_bits_of_updates_while_backward_runs(life: GradientLife) -> None:
    ends = []
    for each in (GradientLife.CONSUMED, life):
        net = Net()
        config = ga.Config(gradient_life=each, eager=True, eager_threads=1)
        optimizer = gt.AdamW(net.parameters(), lr=0.01, accum_steps=2, config=config)
        for seed in range(12):
            by_backward(optimizer, net, 3 * seed + 1, 1.0 + seed)
            if seed % 2:
                optimizer.step()
        ends.append(bits(net))
    assert same(*ends)


@pytest.mark.filterwarnings("ignore:GradScaler.unscale_")
@pytest.mark.parametrize("life", KEPT)
def test_a_grad_scaler(life: GradientLife) -> None:
    ends = []
    for each in (GradientLife.CONSUMED, life):
        net = Net()
        optimizer = gt.AdamW(net.parameters(), lr=0.01, accum_steps=2, config=ga.Config(gradient_life=each))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for seed in range(8):
            scaler.scale(loss_of(net, seed)).backward()
            if seed % 3 == 0:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert all(p.grad is None for p in net.parameters())
        ends.append(bits(net))
    assert same(*ends)


@pytest.mark.parametrize("life", KEPT)
def test_an_open_window_is_saved(life: GradientLife) -> None:
    ends = []
    for stops in (False, True):
        net = Net()
        optimizer = gt.AdamW(net.parameters(), lr=0.01, config=ga.Config(gradient_life=life))
        for seed in range(1, 4):
            by_accumulate(optimizer, net, seed, 1.0)
            if stops:
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                optimizer = gt.AdamW(net.parameters(), lr=0.01, config=ga.Config(gradient_life=life))
                optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
        optimizer.step()
        ends.append(bits(net))
    assert same(*ends)


# ---- Who has the memory


def lent(life: GradientLife, **options: Any) -> tuple[torch.nn.Parameter, gt.Optimizer]:
    parameter = torch.nn.Parameter(torch.zeros(1000))
    return parameter, gt.SGD(options.pop("params", [parameter]), lr=1.0, config=ga.Config(gradient_life=life), **options)


@pytest.mark.parametrize("ends", ["step", "discard"])
@pytest.mark.parametrize("life", [GradientLife.CONSUMED, *KEPT])
def test_a_gradient_is_freed_when_the_library_has_read_it(life: GradientLife, ends: str) -> None:
    parameter, optimizer = lent(life)
    first_lives = []
    seen: list[weakref.ref[Tensor]] = []
    for _ in range(3):
        parameter.grad = torch.ones(1000)
        seen.append(weakref.ref(parameter.grad))
        optimizer.accumulate()
        first_lives.append(seen[0]() is not None)
        assert not any(reference() is not None for reference in seen[1:])
    lives_until = {GradientLife.CONSUMED: 0, GradientLife.LIVE: 1, GradientLife.LENT: 3}[life]
    assert first_lives == [k < lives_until for k in range(3)]
    getattr(optimizer, ends)()
    assert seen[0]() is None


@pytest.mark.parametrize("life", KEPT)
def test_an_exception_lets_go_of_gradients(life: GradientLife) -> None:
    net = Net()
    optimizer = gt.SGD(net.parameters(), lr=0.1, config=ga.Config(gradient_life=life))
    by_backward(optimizer, net, 1, 1.0)

    def fail(_: Any) -> Any:
        raise ArithmeticError("from a hook")

    handle = net.conv.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        by_backward(optimizer, net, 2, 1.0)
    handle.remove()
    assert optimizer.context.window.micro_batches == 0
    assert not optimizer.context._kept._loans
    by_backward(optimizer, net, 1, 1.0)
    optimizer.step()
    assert optimizer.result is not None and optimizer.result.applied


def test_only_a_gradient_that_is_lent_is_written() -> None:
    """What a program that keeps a gradient finds in it."""
    found = {}
    for life in (GradientLife.CONSUMED, *KEPT):
        parameter, optimizer = lent(life)
        kept = [torch.full((1000,), value) for value in (1.0, 2.0)]
        for gradient in kept:
            parameter.grad = gradient
            optimizer.accumulate()
        optimizer.step()
        assert parameter.grad is None
        assert torch.equal(parameter.detach(), torch.full((1000,), -1.5))
        found[life] = [float(gradient[0]) for gradient in kept]
    assert found == {GradientLife.CONSUMED: [1, 2], GradientLife.LIVE: [1, 2], GradientLife.LENT: [3, 2]}


def test_gradients_that_share_memory() -> None:
    """torch gives both parameters views of one tensor, which is no gradient to add to."""
    ends = []
    for life in (GradientLife.CONSUMED, GradientLife.LIVE, GradientLife.LENT):
        a, b = (torch.nn.Parameter(torch.ones(64)) for _ in range(2))
        optimizer = gt.SGD([a, b], lr=0.1, config=ga.Config(gradient_life=life))

        def backward(a: Tensor = a, b: Tensor = b) -> None:
            ((a.view(8, 8) + b.view(8, 8)).square() * torch.arange(8.0)).sum().backward()  # type: ignore[no-untyped-call]

        backward()
        assert a.grad is not None and b.grad is not None and a.grad.data_ptr() == b.grad.data_ptr()
        if life == GradientLife.LENT:
            with pytest.raises(ga.Error, match='"param1": its gradient, at .* overlaps .* lent for parameter "param0"'):
                optimizer.accumulate()
            assert optimizer.context.window.micro_batches == 0 and a.grad is not None
            continue
        optimizer.accumulate()
        backward()
        optimizer.accumulate()
        optimizer.step()
        ends.append([a.detach(), b.detach()])
    assert same(*ends)


def test_the_memory_of_accumulators() -> None:
    elements = sum(p.numel() for p in Net().parameters())
    found = {}
    for life in (GradientLife.CONSUMED, *KEPT):
        for steps in (1, 3):
            net = Net()
            optimizer = gt.AdamW(net.parameters(), lr=0.01, accum_steps=steps, config=ga.Config(gradient_life=life))
            for seed in range(steps):
                by_accumulate(optimizer, net, 3 * seed + 1, 1.0)
            optimizer.step()
            found[life, steps] = optimizer.context.memory.accumulators
    assert found[GradientLife.LENT, 1] == found[GradientLife.LENT, 3] == found[GradientLife.LIVE, 1] == 0
    for with_accumulators in ((GradientLife.CONSUMED, 1), (GradientLife.CONSUMED, 3), (GradientLife.LIVE, 3)):
        assert 4 * elements <= found[with_accumulators] < 4.5 * elements


# ---- Refusals


@pytest.mark.parametrize("life", KEPT)
def test_gradients_that_torch_may_overwrite_are_refused(life: GradientLife) -> None:
    device = {"params": [torch.nn.Parameter(torch.zeros(1, device="meta"))]}
    for options in ({"ddp": torch.nn.Linear(1, 1)}, {"data_mesh": ()}, device):
        with pytest.raises(ValueError, match=f"gradient_life was {life.name}, .* may overwrite"):
            lent(life, **options)


def test_what_the_library_does_not_lend_is_refused_by_name() -> None:
    config = ga.Config(gradient_life=GradientLife.LENT, nonfinite=ga.Nonfinite.DROP_MICRO)
    table = torch.nn.Embedding(8, 4, sparse=True)
    with pytest.raises(ga.Error, match="GA_NONFINITE_DROP_MICRO"):
        gt.SGD(table.parameters(), lr=0.1, config=config)
    with pytest.raises(ga.Error, match="GA_CLIP_WHEN_MICRO"):
        lent(GradientLife.LENT, clip=ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=1.0, when=ga.ClipWhen.MICRO))
    with pytest.raises(ga.Error, match="rows was set"):
        gt.SGD(
            [{"params": table.parameters(), "rows": ga.Rows.LAZY}], lr=0.1,
            config=ga.Config(gradient_life=GradientLife.LENT),
        )  # fmt: skip
