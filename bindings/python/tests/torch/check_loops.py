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


RIGHT: dict[str, tuple[Any, ...]] = {
    "checkpoints": (weighs, UNEVEN, lambda: Checkpointed(True), lambda: Checkpointed(False)),
    "closes": (closes, UNEVEN), "goes_back_twice": (goes_back_twice, UNEVEN),
    "means_by_hand": (means_by_hand, UNEVEN), "freezes": (freezes, UNEVEN), "ignores_tokens": (ignores_tokens, UNEVEN),
    "in_bf16": (in_bf16, EVEN), "several_heads": (several_heads, UNEVEN), "penalizes": (penalizes, UNEVEN),
    "evaluates": (evaluates, UNEVEN), "searches_lines": (searches_lines, UNEVEN),
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


WRONG: dict[str, tuple[Any, ...]] = {
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
