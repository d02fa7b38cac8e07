# SPDX-License-Identifier: Apache-2.0
"""Training loops as people write them, right and wrong, for the tests of gradaccum.check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.optim.swa_utils
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

WIDTH, CLASSES = 20, 5
EVEN = [[8, 8, 8, 8]] * 3
UNEVEN = [[8, 4, 6, 2], [3, 9, 1, 7], [5, 5, 8, 2]]


def model(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 300), *layers, nn.Tanh(), nn.Linear(300, CLASSES))


def batch(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, WIDTH), torch.randint(0, CLASSES, (samples,))


class Loop:
    """A model, its optimizer, and windows of micro-batches."""

    def __init__(self, windows: list[list[int]], *layers: Callable[[], nn.Module]) -> None:
        torch.manual_seed(1)
        self.model = model(*(layer() for layer in layers))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.windows = windows

    def loss(self, samples: int, reduction: str = "mean") -> Tensor:
        x, y = batch(samples)
        return F.cross_entropy(self.model(x), y, reduction=reduction)


# ---- Right


def divides(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) / len(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def weighs(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) * samples / sum(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def sums(loop: Loop) -> None:
    for window in loop.windows:
        loop.optimizer.zero_grad()
        for samples in window:
            loop.loss(samples, "sum").backward()
        loop.optimizer.step()


def sums_over_terms(loop: Loop) -> None:
    for window in loop.windows:
        loop.optimizer.zero_grad()
        for samples in window:
            (loop.loss(samples, "sum") / sum(window)).backward()
        loop.optimizer.step()


def clips(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) * samples / sum(window)).backward()
        clip_grad_norm_(loop.model.parameters(), 0.01)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def clips_values(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) * samples / sum(window)).backward()
        clip_grad_value_(loop.model.parameters(), 0.001)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def divides_at_the_end(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            loop.loss(samples, "sum").backward()
        for parameter in loop.model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(sum(window))
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def scales(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for window in loop.windows:
        for samples in window:
            scaler.scale(loop.loss(samples) * samples / sum(window)).backward()
        scaler.unscale_(loop.optimizer)
        clip_grad_norm_(loop.model.parameters(), 0.01)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()


def without_accumulation(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            loop.optimizer.zero_grad()
            loop.loss(samples).backward()
            loop.optimizer.step()


def schedules(loop: Loop) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) * samples / sum(window)).backward()
        loop.optimizer.step()
        schedule.step()
        loop.optimizer.zero_grad()


def two_losses(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            x, y = batch(samples)
            out = loop.model(x)
            loss = F.cross_entropy(out, y) + 0.1 * F.mse_loss(out, torch.zeros_like(out))
            (loss * samples / sum(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def skips(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, window in enumerate(loop.windows):
        for i, samples in enumerate(window):
            loss = loop.loss(samples)
            if number == 1 and i == 2:
                loss = loss * float("inf")
            scaler.scale(loss * samples / sum(window)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()


def adversaries(loop: Loop) -> None:
    """A generator's backward leaves gradients in the discriminator, which are dropped before its own."""
    other = nn.Linear(4, WIDTH)
    generator = torch.optim.SGD(other.parameters(), 0.1)
    for window in loop.windows:
        for samples in window:
            generator.zero_grad()
            F.mse_loss(loop.model(other(torch.randn(samples, 4))), torch.ones(samples, CLASSES)).backward()
            generator.step()
            loop.optimizer.zero_grad()
            loop.loss(samples).backward()
            loop.optimizer.step()


class Checkpointed(nn.Module):
    """A layer that is computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return found


def closes(loop: Loop) -> None:
    """The last micro-batch of each window is computed in step(), as Lightning does."""
    for window in loop.windows:
        def backward(samples: int, window: list[int] = window) -> Tensor:
            loss = loop.loss(samples) * samples / sum(window)
            loss.backward()
            return loss

        for samples in window[:-1]:
            backward(samples)
        loop.optimizer.step(lambda window=window, backward=backward: float(backward(window[-1]).detach()))
        loop.optimizer.zero_grad()


def goes_back_twice(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            x, y = batch(samples)
            out = loop.model(x)
            (F.cross_entropy(out, y) * samples / sum(window)).backward(retain_graph=True)
            (0.5 * F.mse_loss(out, torch.zeros_like(out)) * samples / sum(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=False)


def means_by_hand(loop: Loop) -> None:
    """No reduction in the loss function: the program averages over the window itself."""
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples, "none").sum() / sum(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def freezes(loop: Loop) -> None:
    next(loop.model.parameters()).requires_grad_(False)
    weighs(loop)


def ignores_tokens(loop: Loop) -> None:
    """Labels of -100 do not count: the mean is over the others."""
    for window in loop.windows:
        batches = [batch(samples + 4) for samples in window]
        for i, (_, y) in enumerate(batches):
            y[: i + 1] = -100
        tokens = sum(int((y != -100).sum()) for _, y in batches)
        for x, y in batches:
            (F.cross_entropy(loop.model(x), y) * (y != -100).sum() / tokens).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def in_bf16(loop: Loop) -> None:
    loop.model.bfloat16()
    for window in loop.windows:
        for samples in window:
            x, y = batch(samples)
            (F.cross_entropy(loop.model(x.bfloat16()), y) / len(window)).backward()
        clip_grad_norm_(loop.model.parameters(), 0.01)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def several_heads(loop: Loop) -> None:
    """One line computes the losses of all heads."""
    heads = [nn.Linear(CLASSES, CLASSES) for _ in range(4)]
    for window in loop.windows:
        for samples in window:
            x, y = batch(samples)
            out = loop.model(x)
            loss = sum((F.cross_entropy(head(out), y) for head in heads), torch.zeros(()))
            (loss * samples / sum(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def penalizes(loop: Loop) -> None:
    """torch.autograd.grad() computes gradients of parameters that go nowhere but into the loss."""
    parameters = list(loop.model.parameters())
    for window in loop.windows:
        for samples in window:
            loss = loop.loss(samples)
            norm = sum(g.square().sum() for g in torch.autograd.grad(loss, parameters, create_graph=True))
            ((loss + 0.01 * norm) * samples / sum(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def evaluates(loop: Loop) -> None:
    """A validation between micro-batches, with gradients enabled and without."""
    averaged = torch.optim.swa_utils.AveragedModel(loop.model)
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) * samples / sum(window)).backward()
            with torch.no_grad():
                loop.loss(5)
            loop.loss(5)
        loop.optimizer.step()
        averaged.update_parameters(loop.model)
        loop.optimizer.zero_grad()


def searches_lines(loop: Loop) -> None:
    optimizer = torch.optim.LBFGS(loop.model.parameters(), 0.1, max_iter=3)
    for window in loop.windows:
        batches = [batch(samples) for samples in window]

        def closure(batches: list[Any] = batches, window: list[int] = window) -> float:
            optimizer.zero_grad()
            total = 0.0
            for x, y in batches:
                loss = F.cross_entropy(loop.model(x), y) * len(x) / sum(window)
                loss.backward()
                total += float(loss.detach())
            return total

        optimizer.step(closure)


def two_optimizers(loop: Loop) -> None:
    """Each clips its own part of the model, before either is zeroed."""
    parts = [nn.ModuleList(list(loop.model.children())[:1]), nn.ModuleList(list(loop.model.children())[1:])]
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in parts]
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) * samples / sum(window)).backward()
        for part, optimizer in zip(parts, optimizers, strict=True):
            clip_grad_norm_(part.parameters(), 0.01)
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def two_optimizers_scaled(loop: Loop) -> None:
    """One scaler, and optimizers that step at different rates."""
    first, second = list(loop.model.children())[0], list(loop.model.children())[-1]
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (first, second)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for window in loop.windows:
        for i, samples in enumerate(window):
            scaler.scale(loop.loss(samples) / 2).backward()
            if i % 2:
                scaler.step(optimizers[0])
                optimizers[0].zero_grad()
                scaler.update()
        scaler.step(optimizers[1])
        scaler.update()
        optimizers[1].zero_grad()


def sequences(loop: Loop) -> None:
    """Four sequences in each micro-batch, of any length."""
    for window in loop.windows:
        for samples in window:
            scores = loop.model(torch.randn(10 * samples, 4, WIDTH)).log_softmax(-1)
            lengths = torch.full((4,), 10 * samples)
            targets = torch.randint(1, CLASSES, (4, 3))
            (F.ctc_loss(scores, targets, lengths, torch.full((4,), 3)) / len(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def weighted_classes(loop: Loop) -> None:
    """Labels of 255 do not count, and the others with the weight of their class."""
    criterion = nn.CrossEntropyLoss(weight=torch.arange(1.0, CLASSES + 1), ignore_index=255)
    for window in loop.windows:
        batches = [batch(samples + 2) for samples in window]
        for _, y in batches:
            y[0] = 255
        weights = [float((y[1:] + 1).sum()) for _, y in batches]
        for (x, y), weight in zip(batches, weights, strict=True):
            (criterion(loop.model(x), y) * weight / sum(weights)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def judges_two_kinds(loop: Loop) -> None:
    """One function for the losses of real and of made samples, which are one update."""

    def judge(samples: int, kind: float) -> Tensor:
        found = loop.model(torch.randn(samples, WIDTH))
        return F.binary_cross_entropy_with_logits(found, torch.full_like(found, kind))

    for window in loop.windows:
        judge(window[0], 1.0).backward()
        judge(window[0], 0.0).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def decodes(loop: Loop) -> None:
    """As many losses in a micro-batch as it has steps."""
    for window in loop.windows:
        for steps in window:
            losses = [loop.loss(4) for _ in range(steps)]
            (torch.stack(losses).sum() / len(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def weighs_losses(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            x, y = batch(samples)
            out = loop.model(x)
            ((F.cross_entropy(out, y) + 0.25 * F.mse_loss(out, torch.zeros_like(out))) / 4).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def different_tasks(loop: Loop) -> None:
    for window in loop.windows:
        for i, samples in enumerate(window):
            x, y = batch(samples)
            out = loop.model(x)
            loss = F.mse_loss(out, torch.zeros_like(out)) if i == 0 else F.cross_entropy(out, y)
            (loss / len(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def has_nothing_to_learn(loop: Loop) -> None:
    """The loss of one micro-batch is 0."""
    for window in loop.windows:
        for i, samples in enumerate(window):
            out = loop.model(torch.randn(samples, WIDTH))
            loss = F.hinge_embedding_loss(out + 1e3 * (i == 2), -torch.ones_like(out), margin=1.0)
            (loss / len(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def clip_then_divide(loop: Loop) -> None:
    """What follows the clipping is no clipping, whatever the functions are called."""
    for number, window in enumerate(loop.windows):
        for samples in window:
            loop.loss(samples).backward()
        clip_grad_norm_(loop.model.parameters(), 0.01)
        for parameter in loop.model.parameters():
            assert parameter.grad is not None
            if number == 0:
                parameter.grad = parameter.grad / len(window)
            elif number == 1:
                torch.div(parameter.grad.data, len(window), out=parameter.grad.data)
            else:
                array = parameter.grad.numpy()
                array /= len(window)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def looks_ahead(loop: Loop) -> None:
    """Two backwards for each step (SAM): the first is dropped, and the update is that of the second."""
    parameters = list(loop.model.parameters())
    for window in loop.windows:
        for _ in range(2):
            loop.optimizer.zero_grad()
            loop.loss(window[0]).backward()
            moves = [0.01 * p.grad for p in parameters if p.grad is not None]
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        loop.optimizer.step()


def fused(loop: Loop) -> None:
    """The optimizer unscales by itself, and skips a window by itself."""
    optimizer = torch.optim.AdamW(loop.model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, window in enumerate(loop.windows):
        for i, samples in enumerate(window):
            loss = loop.loss(samples) * (float("inf") if number == 1 and i == 2 else 1.0)
            scaler.scale(loss * samples / sum(window)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def under_autocast(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                (loop.loss(samples) * samples / sum(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


class Wrapper(torch.optim.Optimizer):
    """An optimizer within another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def wrapped(loop: Loop) -> None:
    optimizer = Wrapper(loop.optimizer)
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) * samples / sum(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def pipelines(loop: Loop) -> None:
    """The forward of a micro-batch comes before the backward of the one before."""
    for window in loop.windows:
        losses = [loop.loss(window[0]) * window[0] / sum(window)]
        for samples in window[1:]:
            losses.append(loop.loss(samples) * samples / sum(window))
            losses.pop(0).backward()
        losses.pop().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


RIGHT: dict[str, tuple[Any, ...]] = {
    "checkpoints": (weighs, UNEVEN, lambda: Checkpointed(True), lambda: Checkpointed(False)),
    "closes": (closes, UNEVEN), "goes_back_twice": (goes_back_twice, UNEVEN),
    "means_by_hand": (means_by_hand, UNEVEN), "freezes": (freezes, UNEVEN), "ignores_tokens": (ignores_tokens, UNEVEN),
    "in_bf16": (in_bf16, EVEN), "several_heads": (several_heads, UNEVEN), "penalizes": (penalizes, UNEVEN),
    "evaluates": (evaluates, UNEVEN), "searches_lines": (searches_lines, UNEVEN),
    "two_optimizers": (two_optimizers, UNEVEN), "two_optimizers_scaled": (two_optimizers_scaled, EVEN),
    "sequences": (sequences, UNEVEN), "weighted_classes": (weighted_classes, UNEVEN),
    "judges_two_kinds": (judges_two_kinds, EVEN), "decodes": (decodes, UNEVEN), "weighs_losses": (weighs_losses, EVEN),
    "different_tasks": (different_tasks, EVEN), "has_nothing_to_learn": (has_nothing_to_learn, EVEN),
    "clip_then_divide": (clip_then_divide, EVEN), "looks_ahead": (looks_ahead, EVEN), "fused": (fused, UNEVEN),
    "under_autocast": (under_autocast, UNEVEN), "wrapped": (wrapped, UNEVEN), "pipelines": (pipelines, UNEVEN),
    "divides": (divides, EVEN), "weighs": (weighs, UNEVEN), "sums": (sums, UNEVEN),
    "sums_over_terms": (sums_over_terms, UNEVEN), "clips": (clips, UNEVEN), "clips_values": (clips_values, UNEVEN),
    "divides_at_the_end": (divides_at_the_end, UNEVEN), "scales": (scales, UNEVEN),
    "without_accumulation": (without_accumulation, UNEVEN), "schedules": (schedules, UNEVEN),
    "two_losses": (two_losses, UNEVEN), "skips": (skips, UNEVEN), "adversaries": (adversaries, EVEN),
}  # fmt: skip


# ---- Wrong


def sum_for_mean(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            loop.loss(samples).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def divided_twice(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) / len(window) / len(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def zeroes_each(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            loop.optimizer.zero_grad()
            (loop.loss(samples) / len(window)).backward()
        loop.optimizer.step()


def steps_early(loop: Loop) -> None:
    """The step comes before the last backward, whose gradient zero_grad() then drops."""
    for window in loop.windows:
        for i, samples in enumerate(window):
            if i == len(window) - 1:
                loop.optimizer.step()
            (loop.loss(samples) / len(window)).backward()
        loop.optimizer.zero_grad()


def never_zeroes(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) / len(window)).backward()
        loop.optimizer.step()


def decays_the_last(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) / len(window)).backward()
        loop.optimizer.step()
        for parameter in loop.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)


def clips_each(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) / len(window)).backward()
            clip_grad_norm_(loop.model.parameters(), 0.01)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def clips_scaled(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for window in loop.windows:
        for samples in window:
            scaler.scale(loop.loss(samples) / len(window)).backward()
        clip_grad_norm_(loop.model.parameters(), 1.0)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()


def divides_by_four(loop: Loop) -> None:
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) / 4).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def schedules_each(loop: Loop) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) / len(window)).backward()
            schedule.step()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def applies_nan(loop: Loop) -> None:
    for number, window in enumerate(loop.windows):
        for i, samples in enumerate(window):
            loss = loop.loss(samples) / len(window)
            if number == 1 and i == 2:
                loss = loss * float("nan")
            loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def swallows(loop: Loop) -> None:
    for number, window in enumerate(loop.windows):
        for i, samples in enumerate(window):
            loss = loop.loss(samples) / len(window)
            if number == 1 and i == 2:
                loss = loss * float("inf")
            loss.backward()
        for parameter in loop.model.parameters():
            assert parameter.grad is not None
            torch.nan_to_num_(parameter.grad, 0.0, 0.0, 0.0)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def adds_one_sample(loop: Loop) -> None:
    loop.model.bfloat16()
    x, y = batch(1)
    for window in loop.windows:
        for _ in window:
            (F.cross_entropy(loop.model(x.bfloat16()), y) / len(window)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def clips_in_a_hook(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
    divides(loop)


def averages_each(loop: Loop) -> None:
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    for window in loop.windows:
        for samples in window:
            (loop.loss(samples) / len(window)).backward()
            average.update_parameters(loop.model)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


WRONG: dict[str, tuple[Any, ...]] = {
    "moving average per micro-batch": (averages_each, EVEN),
    "sum for mean": (sum_for_mean, EVEN),
    "divided twice": (divided_twice, EVEN),
    "mean of means over uneven micro-batches": (divides, UNEVEN),
    "tail divided by N": (divides_by_four, [[8, 8, 8, 8], [8, 8, 8, 8], [8, 8]]),
    "only the last one": (zeroes_each, EVEN),
    "micro-batch lost": (steps_early, EVEN),
    "not zeroed": (never_zeroes, EVEN),
    "leak from the window before": (decays_the_last, EVEN),
    "clipped per micro-batch": (clips_each, EVEN),
    "clipped before unscale": (clips_scaled, EVEN),
    "schedule moved per micro-batch": (schedules_each, EVEN),
    "non-finite gradient applied": (applies_nan, EVEN),
    "a non-finite micro-batch swallowed": (swallows, EVEN),
    "batch norm per micro-batch": (divides, EVEN, lambda: nn.BatchNorm1d(300)),
    "lost in rounding": (adds_one_sample, [[1] * 300]),
}
