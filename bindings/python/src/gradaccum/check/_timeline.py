# SPDX-License-Identifier: Apache-2.0
"""What happened to the gradients of a window, as sketches, and which multiple of each micro-batch came out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ._losses import Term

Sketches = dict[int, Tensor]
"""Of the gradients of parameters, by their index; one that has no gradient is missing."""

_EXACT = 1e-5
"""How much of a gradient may be something else than a multiple of what it was, in f32."""


@dataclasses.dataclass
class MicroBatch:
    """A backward, or several without a forward between them."""

    terms: list[Term]
    rates: dict[int, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    """The learning rates that optimizers had, by their ids."""
    where: str = ""
    """The line that called backward."""
    added: Sketches = dataclasses.field(default_factory=dict)
    """What was added to ``.grad``."""
    after: Sketches = dataclasses.field(default_factory=dict)
    """``.grad`` afterwards, of the parameters that had a gradient."""


@dataclasses.dataclass
class Change:
    """Something else than a backward has changed ``.grad``."""

    purpose: str
    """``"clip"``, ``"unscale"``, ``"zero_grad"``, the name of a function of torch, or empty if it was not seen."""
    where: str
    after: dict[int, Tensor | None] = dataclasses.field(default_factory=dict)
    """``.grad`` afterwards, of the parameters where it has changed."""
    touched: set[int] = dataclasses.field(default_factory=set)
    """The parameters that a function of torch was given."""


@dataclasses.dataclass
class Factor:
    """A change of a window's gradient, as the number that it has multiplied it by."""

    purpose: str
    where: str
    after: int
    """How many micro-batches of the window had been added by then."""
    value: float
    residual: float
    """How much of the result is no multiple, as a part of its norm."""

    def is_exact(self, epsilon: float) -> bool:
        return self.residual <= max(_EXACT, 4 * epsilon)


@dataclasses.dataclass
class Trace:
    """A window of an optimizer."""

    terms: list[list[Term]]
    """The losses of each micro-batch."""
    rates: list[dict[int, tuple[float, ...]]]
    """The learning rates at each micro-batch."""
    where: str
    """The line that called backward for the last one."""
    kept: list[float]
    """Which multiple of each micro-batch's gradient reached the optimizer, but for clipping."""
    factors: list[Factor]
    left: float
    """Which multiple of the gradient of the window before is in this one."""
    lost: list[float]
    """Which part of what each micro-batch has added to the sum is no multiple of its gradient."""
    skipped: int
    """Micro-batches before it that were dropped because a gradient was not finite."""
    emptied: bool
    """Whether they were those of this window, which was stepped without them."""
    finite: bool
    """Whether the gradient that the optimizer saw is finite."""
    target: Tensor
    """The sketch of the gradient that the optimizer saw, before the clipping of the whole window; kept as added is."""
    broken: list[bool]
    """Whether the gradient of each micro-batch has numbers that are not finite."""
    added: list[Tensor]
    """The sketches of the micro-batches, of several processes."""
    gradient: Tensor
    """The sketch of the gradient that the optimizer saw; kept as added is."""
    epsilon: float

    def unscale(self, scale: float, where: str) -> None:
        """The optimizer divides by a loss scale itself."""
        self.kept = [value / scale for value in self.kept]
        self.left /= scale
        self.target = self.target / scale
        self.factors.append(Factor("unscale", where, len(self.kept), 1 / scale, 0.0))


class Joined:
    """Makes one vector of the sketches of some parameters."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._sizes = sizes

    def __call__(self, sketches: Mapping[int, Tensor | None]) -> Tensor:
        parts = []
        for index, size in self._sizes.items():
            part = sketches.get(index)
            parts.append(torch.zeros(size, dtype=torch.float64) if part is None else part.cpu())
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def has(self, sketches: Iterable[int]) -> bool:
        return not self._sizes.keys().isdisjoint(sketches)


def trace(
    entries: Sequence[MicroBatch | Change], start: Mapping[int, Tensor | None], joined: Joined, epsilon: float,
    is_distributed: bool,
) -> Trace:  # fmt: skip
    """Follows the gradient from the end of the window before to the step.

    :param start: ``.grad`` when the window before was stepped
    :param epsilon: the rounding of the gradients' dtype
    """
    state: dict[int, Tensor | None] = dict(start)
    micro_batches: list[MicroBatch] = []
    kept: list[float] = []
    added: list[Tensor] = []
    lost: list[float] = []
    factors: list[Factor] = []
    now = joined(state)
    target = now
    left = 1.0 if float(now.norm()) else 0.0
    skipped, emptied = 0, False
    group: set[int] = set()  # the parameters of the last micro-batch
    for entry in entries:
        if isinstance(entry, MicroBatch):
            if not joined.has(entry.added):
                continue
            before, emptied = now, False
            state.update(entry.after)
            now = target = joined(state)
            gradient = joined(entry.added)
            # A hook of the program may have changed the gradient after it was seen.
            value, residual = _multiple(now - before, gradient) if float(gradient.norm()) else (1.0, 0.0)
            blur = max(_EXACT, 4 * epsilon) * max(1.0, _ratio(now.norm(), gradient.norm()))
            lost.append(residual if residual > blur or epsilon > _EXACT else 0.0)
            if abs(value - 1) <= blur or lost[-1]:
                value = 1.0
            if not group.isdisjoint(entry.added) or not micro_batches or kept[-1] != 1 or value != 1:
                group = set()
                micro_batches.append(MicroBatch([], entry.rates))
                kept.append(value)
                added.append(torch.zeros_like(gradient))
            else:  # other parameters than the one before, as in an ensemble: it is one micro-batch
                lost[-2:] = [max(lost[-2:])]
            group |= entry.added.keys()
            micro_batches[-1].terms += entry.terms
            micro_batches[-1].where = entry.where
            added[-1] = added[-1] + gradient
            continue
        if not joined.has(entry.after):
            continue
        before = now
        state.update(entry.after)
        now = joined(state)
        if not float(now.norm()) and not bool(torch.isfinite(before).all()):
            skipped, group = skipped + len(micro_batches), set()
            emptied = True
            micro_batches, kept, added, lost, factors, left = [], [], [], [], [], 0.0
            target = now
            continue
        value, residual = _multiple(now, before)
        factors.append(Factor(entry.purpose, entry.where, len(micro_batches), value, residual))
        if entry.purpose == "clip":
            continue  # what it multiplies is not what the loop gives to a micro-batch
        kept = [each * value for each in kept]
        left = left * value if factors[-1].is_exact(epsilon) else 0.0
        target = target * value if factors[-1].is_exact(epsilon) else now
    finite = bool(torch.isfinite(now).all())
    broken = [not bool(torch.isfinite(each).all()) for each in added]
    if not is_distributed:  # the factors tell everything, or nothing does
        added, target, now = [], now[:0], now[:0]
    return Trace(
        [micro.terms for micro in micro_batches], [micro.rates for micro in micro_batches],
        micro_batches[-1].where if micro_batches else "", kept, factors, left, lost, skipped, emptied, finite, target,
        broken, added, now, epsilon,
    )  # fmt: skip


def _ratio(a: Tensor, b: Tensor) -> float:
    return float(a) / float(b) if 0 < float(b) < math.inf else 0.0


def _multiple(now: Tensor, before: Tensor) -> tuple[float, float]:
    """The number with which one vector is the other, and what remains, relative to it."""
    square = float(before @ before)
    norm = float(now.norm())
    if not norm:
        return 0.0, 0.0
    if not square or not math.isfinite(square):
        return 1.0, 1.0
    value = float(now @ before) / square
    return value, float((now - before * value).norm()) / norm
