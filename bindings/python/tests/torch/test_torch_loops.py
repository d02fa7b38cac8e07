# SPDX-License-Identifier: Apache-2.0
"""Loops that programs bring along, with the optimizer's line changed, against whole batches of torch in f64.

Micro-batches are uneven, and the last window of the epoch is short. A loop is exact, refused, warned of once, or the
same as torch's own, as docs/moving says: nothing else. Run as a program, this prints the distances.
"""

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

K = 4
SIZES = [(12, 12, 12, 8)] * 5 + [(12, 5)]
CLIP = 0.3
RATE = 0.05
RULE: dict[str, Any] = {"lr": 0.2, "momentum": 0.9}  # which sees a gradient that is K times too small
GLOBAL = ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=CLIP)
Batch = tuple[Tensor, Tensor]


def _windows() -> list[Batch]:
    generator = torch.Generator().manual_seed(11)
    return [
        (
            torch.randn(sum(sizes), 5, generator=generator, dtype=torch.float64),
            torch.randn(sum(sizes), 3, generator=generator, dtype=torch.float64),
        )
        for sizes in SIZES
    ]


WHOLE = _windows()
MICRO: list[list[Batch]] = [
    list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))
    for (x, y), sizes in zip(WHOLE, SIZES, strict=True)
]


def network() -> Any:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()


def loss_of(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.mse_loss(net(x), y)


def vector(net: torch.nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def off(net: torch.nn.Module, want: torch.nn.Module, start: torch.nn.Module | None = None) -> float:
    """The distance of two networks, in parts of the way that the second one has gone."""
    begin = vector(network() if start is None else start)
    return float((vector(net) - vector(want)).norm() / (vector(want) - begin).norm())


def whole(
    *, clip: bool = False, scheduler: Any = None, batches: Any = None
) -> Any:
    """A network that torch trains by whole batches."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), **RULE)
    schedule = None if scheduler is None else scheduler(optimizer)
    for x, y in WHOLE if batches is None else batches:
        optimizer.zero_grad()
        loss = loss_of(net, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        if schedule is not None:
            _advance(schedule, loss)
    return net


def _advance(schedule: Any, loss: Tensor) -> None:
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        schedule.step(loss.item())
    else:
        schedule.step()


# ---- The loops. Each returns what it has trained.


def by_hand(module: Any, **options: Any) -> Any:
    """nanoGPT's: K losses divided by K, clipped, one step; the division does not know the tail."""
    net = network()
    optimizer = module.SGD(net.parameters(), **RULE, **options)
    for batch in MICRO:
        for x, y in batch:
            (loss_of(net, x, y) / K).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return net


def backward(
    divide: bool = False, cast: bool = False, norm: bool = False, split: bool = False, **options: Any
) -> Any:
    net = network()
    optimizer = gt.SGD(net.parameters(), **RULE, **options)
    for batch in MICRO:
        optimizer.zero_grad(set_to_none=True)
        for x, y in batch:
            loss = loss_of(net, x, y)
            weight: Any = torch.tensor(len(x)) if cast else len(x)
            if split:  # terms whose sum is the loss
                optimizer.backward(0.75 * loss, weight=weight)
                loss = 0.25 * loss_of(net, x, y)
            optimizer.backward(loss / K if divide else loss, weight=weight)
        if norm:
            assert torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP) == 0
        optimizer.step()
    return net


def counting(way: str = "accumulate", **options: Any) -> Any:
    net = network()
    optimizer: Any = gt.wrap(torch.optim.SGD(net.parameters(), **RULE), accum_steps=K, **options)
    for batch in MICRO:
        for x, y in batch:
            optimizer.zero_grad()
            loss_of(net, x, y).backward()  # type: ignore[no-untyped-call]
            if way == "clip_grad_norm_":
                torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            if way == "accumulate":
                optimizer.accumulate(weight=len(x))
            optimizer.step()
        optimizer.flush()
    return net


def written_rates(ours: bool) -> Any:
    """nanoGPT's and timm's: the program writes each rate itself, and keeps an average of the weights."""
    net = network()
    optimizer = (gt if ours else torch.optim).AdamW(net.parameters(), lr=0.0, weight_decay=0.1)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step, ((x, y), batch) in enumerate(zip(WHOLE, MICRO, strict=True)):
        for group in optimizer.param_groups:
            group["lr"] = RATE / (1 + step)
        for part, target in batch if ours else [(x, y)]:
            loss = loss_of(net, part, target)
            if ours:
                optimizer.backward(loss, weight=len(part))
            else:
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update_parameters(net)
    return average.module


def every_k() -> Any:
    """K backwards before each step, beside accum_steps."""
    net = network()
    optimizer = gt.SGD(net.parameters(), **RULE, accum_steps=K)
    for batch in MICRO:
        optimizer.zero_grad()
        for x, y in batch:
            loss_of(net, x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net


def zeroed_too_late() -> Any:
    net = network()
    optimizer = gt.SGD(net.parameters(), **RULE, accum_steps=K)
    for batch in MICRO:
        for x, y in batch:
            loss_of(net, x, y).backward()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            optimizer.step()
    return net


def mixed() -> Any:
    """A regulariser of its own backward, before the step."""
    net = network()
    optimizer = gt.SGD(net.parameters(), **RULE)
    for x, y in MICRO[0]:
        optimizer.backward(loss_of(net, x, y), weight=len(x))
    sum(p.square().sum() for p in net.parameters()).backward()
    optimizer.step()
    return net


def dropped() -> Any:
    """A bad micro-batch is meant to drop the window."""
    net = network()
    optimizer = gt.SGD(net.parameters(), **RULE)
    for batch in MICRO:
        for k, (x, y) in enumerate(batch):
            if k == 2:
                optimizer.zero_grad()
                break
            optimizer.backward(loss_of(net, x, y), weight=len(x))
        optimizer.step()
    return net


def scaler(way: str) -> Any:
    net = network()
    options: dict[str, Any] = {"clip": GLOBAL} if way != "unscale" else {}
    if way == "ours":
        options["loss_scaler"] = ga.LossScaler(initial_scale=1024)
    optimizer = gt.SGD(net.parameters(), **RULE, accum_steps=K, **options)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in MICRO:
        for x, y in batch:
            loss = loss_of(net, x, y)
            optimizer.zero_grad()
            if way == "ours":
                optimizer.backward(loss, weight=len(x))
                optimizer.step()
                continue
            theirs.scale(loss).backward()
            if way == "accumulate":
                optimizer.accumulate(weight=len(x))
            if way == "unscale":
                theirs.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            theirs.step(optimizer)
            theirs.update()
        optimizer.flush()
    return net


def closure() -> Any:
    net = network()
    optimizer = gt.SGD(net.parameters(), **RULE, accum_steps=K)
    for batch in MICRO:
        for x, y in batch:

            def evaluate(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, x, y)
                optimizer.backward(loss, weight=len(x))
                return loss

            optimizer.step(evaluate)
        optimizer.flush()
    return net


def compiled(backend: str) -> Any:
    net = network()
    fast: Any = torch.compile(net, backend=backend, dynamic=True)
    optimizer = gt.SGD(net.parameters(), **RULE)
    for batch in MICRO:
        for x, y in batch:
            optimizer.backward(loss_of(fast, x, y), weight=len(x))
        optimizer.step()
    return net


def checkpointed(reentrant: bool) -> Any:
    net = network()
    optimizer = gt.SGD(net.parameters(), **RULE)
    for batch in MICRO:
        for x, y in batch:
            x = x.clone().requires_grad_(reentrant)
            out: Any = checkpoint(net[:2], x, use_reentrant=reentrant)
            optimizer.backward(torch.nn.functional.mse_loss(net[2](out), y), weight=len(x))
        optimizer.step()
    return net


def penalised() -> Any:
    """A gradient penalty, whose backward makes a graph of its own."""
    net = network()
    optimizer = gt.SGD(net.parameters(), **RULE)
    for batch in MICRO:
        for x, y in batch:
            optimizer.backward(_penalty(net, x, y), weight=len(x))
        optimizer.step()
    return net


def _penalty(net: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return loss_of(net, x, y) + slope.square().sum(1).mean()


def whole_penalised() -> Any:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), **RULE)
    for x, y in WHOLE:
        optimizer.zero_grad()
        _penalty(net, x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net


def step_in_hooks() -> Any:
    """One optimizer for each parameter, which steps in a hook while backward goes on."""
    net = network()
    optimizers = {p: gt.SGD([p], **RULE, accum_steps=K) for p in net.parameters()}

    def hook(p: Tensor) -> None:
        optimizers[p].accumulate(weight=samples)  # type: ignore[index]
        optimizers[p].step()  # type: ignore[index]

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for batch in MICRO:
        for x, y in batch:
            samples = len(x)
            loss_of(net, x, y).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers.values():
            optimizer.flush()
    return net


@dataclass
class Row:
    """A loop, what it is compared with, and what is to come of it."""

    name: str
    loop: Callable[[], Any]
    want: Callable[[], Any] = whole
    warns: str = ""
    raises: str = ""
    apart: float = 0.0
    """The least distance of a loop that is warned of; else it is exact."""
    documented: float = 0.0
    """The distance of a loop that is not exact, cannot be seen, and has a line in docs/moving."""


clipped = functools.partial(whole, clip=True)
ROWS = [
    Row("nanoGPT, only the optimizer changed: as torch's", functools.partial(by_hand, gt),
        functools.partial(by_hand, torch.optim)),
    Row("nanoGPT, backward with weights and clip", functools.partial(backward, clip=GLOBAL), clipped),
    Row("backward, weights that are tensors", functools.partial(backward, cast=True)),
    Row("backward of loss / K, accum_steps", functools.partial(backward, True, accum_steps=K), warns="divided by 4",
        apart=1e-2),
    Row("backward of loss / K", functools.partial(backward, True), warns="divided by 4", apart=1e-2),
    Row("Run:AI, with accumulate", counting),
    Row("Run:AI, only the optimizer changed", functools.partial(counting, "step"), documented=0.098),
    Row("clip_grad_norm_ in a loop that counts", functools.partial(counting, "clip_grad_norm_"), clipped,
        documented=0.33),
    Row("clip_grad_norm_ after backward", functools.partial(backward, norm=True), clipped, documented=0.49),
    Row("two losses, two backwards", functools.partial(backward, split=True), documented=0.41),
    Row("Run:AI with clip", functools.partial(counting, clip=GLOBAL), clipped),
    Row("K backwards a step, beside accum_steps", every_k, warns="16 for one update", apart=0.1),
    Row("zero_grad between backward and step", zeroed_too_late, warns="found no gradient", apart=0.9),
    Row("a plain backward before step", mixed, raises=r"came by backward\(\)"),
    Row("zero_grad to drop a window", dropped, raises=r"discard\(\)"),
    Row("loss_scaler and clip", functools.partial(scaler, "ours"), clipped),
    Row("GradScaler after accumulate", functools.partial(scaler, "accumulate"), raises="loss_scaler="),
    Row("GradScaler, unscale_ and clip_grad_norm_", functools.partial(scaler, "unscale"), warns="unscale_", apart=0.01),
    Row("written rates, weight decay and an average", functools.partial(written_rates, True),
        functools.partial(written_rates, False)),
    Row("closures", closure),
    Row("torch.compile (dynamo)", functools.partial(compiled, "eager")),
    Row("torch.compile (AOTAutograd)", functools.partial(compiled, "aot_eager")),
    Row("checkpoints", functools.partial(checkpointed, False)),
    Row("reentrant checkpoints", functools.partial(checkpointed, True)),
    Row("gradient penalty", penalised, whole_penalised),
    Row("an optimizer for each parameter, in hooks", step_in_hooks),
]  # fmt: skip


def measure(row: Row) -> tuple[float, list[str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        net = row.loop()
    mine = [str(entry.message) for entry in found]
    return off(net, row.want()), mine


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_loop(row: Row) -> None:
    if row.raises:
        with pytest.raises(RuntimeError, match=row.raises):
            row.loop()
        return
    distance, found = measure(row)
    if row.warns:
        assert len(found) == 1 and re.search(row.warns, found[0]), found
        assert distance > row.apart
    elif row.documented:
        assert not found
        assert distance == pytest.approx(row.documented, rel=0.05)
    else:
        assert not found
        assert distance < 1e-11


# ---- Schedulers: stepped once an update, and never seen otherwise

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.7),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.8)]
    ),
    "SWALR": lambda o: SWALR(o, 0.01, 3),
}


def scheduled(make: Callable[[Any], Any], each_micro_batch: bool) -> Any:
    net = network()
    optimizer = gt.SGD(net.parameters(), **RULE, accum_steps=K)
    schedule = make(optimizer)
    for (x, y), batch in zip(WHOLE, MICRO, strict=True):
        loss = loss_of(net, x, y)  # a plateau is one of the window's loss
        for part, target in batch:
            optimizer.backward(loss_of(net, part, target), weight=len(part))
            optimizer.step()
            if each_micro_batch:
                _advance(schedule, loss)
        optimizer.flush()
        if not each_micro_batch:
            _advance(schedule, loss)
    return net


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler(name: str) -> None:
    row = Row(
        name, functools.partial(scheduled, SCHEDULERS[name], False),
        functools.partial(whole, scheduler=SCHEDULERS[name]),
    )  # fmt: skip
    test_a_loop(row)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            scheduled(SCHEDULERS[name], True)
        except ValueError as error:
            assert name == "OneCycleLR" and "Tried to step" in str(error)
    assert any("schedul" in str(entry.message) for entry in found)


def test_a_scheduler_whose_rates_change_between_windows() -> None:
    """Stepped with each micro-batch, it counts K times too fast, and no rate changes within a window."""
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduled(lambda o: lr_scheduler.StepLR(o, K, 0.5), True)


# ---- Averages


@pytest.mark.parametrize("ema", [False, True])
def test_averaged_models(ema: bool) -> None:
    def normalised() -> Any:
        net = network()
        net[0] = torch.nn.Linear(5, 7, bias=False).double()  # the gradient of a bias would be rounding alone
        net.insert(1, torch.nn.BatchNorm1d(7).double())
        return net

    def averaged(net: Any) -> Any:
        return AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9) if ema else None)

    want, net = normalised(), normalised()
    theirs, ours = torch.optim.SGD(want.parameters(), **RULE), gt.SGD(net.parameters(), **RULE)
    assert gt.convert_batchnorm(net, ours) == 1
    averages = averaged(want), averaged(net)
    for x, y in WHOLE:  # one micro-batch each, since normalisation is of the micro-batch
        theirs.zero_grad()
        loss_of(want, x, y).backward()  # type: ignore[no-untyped-call]
        theirs.step()
        ours.backward(loss_of(net, x, y), weight=len(x))
        ours.step()
        averages[0].update_parameters(want)
        averages[1].update_parameters(net)
    assert off(averages[1].module, averages[0].module, normalised()) < 1e-11
    for model in averages:
        update_bn([x for x, _ in WHOLE], model)
    for model in (want, net):
        update_bn([x for x, _ in WHOLE], model)
    for got, expected in ((averages[1].module, averages[0].module), (net, want)):
        for a, b in zip(got.buffers(), expected.buffers(), strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


# ---- Several networks, and parameters that come, freeze, or are seldom used


def gan(ours: bool, way: str = "") -> tuple[Any, Any]:
    torch.manual_seed(2)
    generator = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5)).double()
    critic = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    module: Any = gt if ours else torch.optim
    d = module.Adam(critic.parameters(), lr=0.02, betas=(0.5, 0.9))
    g = module.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9))

    def judge(x: Tensor, real: bool) -> Tensor:
        out = critic(x)
        return torch.nn.functional.binary_cross_entropy_with_logits(
            out, torch.full_like(out, float(real))
        )

    for batch, (x, _) in zip(MICRO, WHOLE, strict=True):
        noise = x[:, :4].flip(0)
        parts = [x] if not ours else [part for part, _ in batch]
        noises = noise.split([len(part) for part in parts])
        d.zero_grad()
        for part, z in zip(parts, noises, strict=True):
            fake = generator(z).detach()
            if not ours:
                ((judge(part, True) + judge(fake, False)) * 0.5).backward()
            elif way == "two backwards":
                with d.micro_batch(weight=len(part)):
                    (judge(part, True) * 0.5).backward()  # type: ignore[no-untyped-call]
                    (judge(fake, False) * 0.5).backward()  # type: ignore[no-untyped-call]
            else:
                d.backward((judge(part, True) + judge(fake, False)) * 0.5, weight=len(part))
        d.step()
        g.zero_grad()
        for z in noises:
            if ours:
                g.backward(judge(generator(z), True), weight=len(z))
            else:
                judge(generator(z), True).backward()  # type: ignore[no-untyped-call]
        if way == "no zero_grad" and ours:
            d.backward(judge(x, True))
        g.step()
    return generator, critic


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", ["", "two backwards"])
def test_a_gan(way: str) -> None:
    start = gan(False)[0]
    for got, want in zip(gan(True, way), gan(False), strict=True):
        assert float((vector(got) - vector(want)).norm() / vector(want).norm()) < 1e-11
    assert start is not None
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) or accumulate\(\)"):
        gan(True, "no zero_grad")


class Adapted(torch.nn.Module):
    """A layer with a low-rank adapter."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        torch.manual_seed(9)
        self.a = torch.nn.Parameter(torch.randn(2, layer.in_features, dtype=torch.float64))
        self.b = torch.nn.Parameter(torch.randn(layer.out_features, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + x @ self.a.T @ self.b.T

    def merge(self, sign: int) -> None:
        with torch.no_grad():
            self.layer.weight += sign * (self.b @ self.a)


def adapted(ours: bool) -> Any:
    """LoRA: a frozen base, an adapter that comes later, weights merged for an evaluation, the base unfrozen."""
    net = network()
    net.requires_grad_(False)
    net[0] = Adapted(net[0])
    module: Any = gt if ours else torch.optim
    optimizer = module.AdamW([net[0].a, net[0].b], lr=RATE)
    for at, ((x, y), batch) in enumerate(zip(WHOLE, MICRO, strict=True)):
        if at == 2:
            net[2] = Adapted(net[2])
            optimizer.add_param_group({"params": [net[2].a, net[2].b], "lr": RATE / 2})
        if at == 3:
            net[0].merge(1)
            net[0].merge(-1)
            optimizer.add_param_group({"params": list(net[0].layer.parameters())})
        if at == 4:
            net[0].layer.requires_grad_(True)
        if at == 5:
            net[0].a.requires_grad_(False)
        optimizer.zero_grad()
        for part, target in batch if ours else [(x, y)]:
            if ours:
                optimizer.backward(loss_of(net, part, target), weight=len(part))
            else:
                loss_of(net, part, target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net


@pytest.mark.filterwarnings("error")
def test_adapters() -> None:
    got, want = adapted(True), adapted(False)
    assert float((vector(got) - vector(want)).norm() / vector(want).norm()) < 1e-11


def experts(ours: bool) -> Any:
    """A head that only some micro-batches use, and a tied one."""
    net = network()
    heads = torch.nn.ModuleList([net[2], torch.nn.Linear(7, 3).double()])
    torch.manual_seed(1)
    heads[1].load_state_dict(torch.nn.Linear(7, 3).double().state_dict())
    model = torch.nn.ModuleList([net[:2], heads])
    optimizer = (gt if ours else torch.optim).AdamW(model.parameters(), lr=RATE)
    for (x, y), batch in zip(WHOLE, MICRO, strict=True):
        losses = []
        optimizer.zero_grad()
        for k, (part, target) in enumerate(batch):
            loss = torch.nn.functional.mse_loss(heads[k % 2](net[:2](part)), target)
            losses.append(loss * len(part) / len(x))
            if ours:
                optimizer.backward(loss, weight=len(part))
        if not ours:
            sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
    return model


@pytest.mark.filterwarnings("error")
def test_a_head_that_some_micro_batches_use() -> None:
    got, want = experts(True), experts(False)
    assert float((vector(got) - vector(want)).norm() / vector(want).norm()) < 1e-11


# ---- The numbers


def main() -> None:
    for row in ROWS:
        try:
            distance, found = measure(row)
            print(f"{row.name}: {distance:.1e} {found}")
        except RuntimeError as error:
            print(f"{row.name}: refused: {error}")


if __name__ == "__main__":
    main()
