# SPDX-License-Identifier: Apache-2.0
"""What happened to the gradients of a window, as sketches, and which multiple of each micro-batch came out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ._sketch import Sketches
from ._solve import Vector, norm
from ._terms import Loss, Term, losses_of

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
    parts: Sketches = dataclasses.field(default_factory=dict)
    """Of this, what lies in this rank's part of each parameter, if the rank keeps only that."""
    after: Sketches = dataclasses.field(default_factory=dict)
    """``.grad`` afterwards, of the parameters that had a gradient."""


@dataclasses.dataclass
class Change:
    """Something else than a backward has changed ``.grad``."""

    purpose: str
    """``"clip"``, ``"unscale"``, ``"zero_grad"``, the name of a function of torch, or empty if it was not seen."""
    where: str
    after: dict[int, Any] = dataclasses.field(default_factory=dict)
    """``.grad`` afterwards, of the parameters where it has changed; None: there is none any more."""
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
class Contribution:
    """What a micro-batch gave to a window."""

    losses: list[Loss]
    kept: float
    """Which multiple of its gradient reached the optimizer, but for clipping."""
    error: float = 0.0
    """Half of the 99 % interval of that."""
    rates: tuple[float, ...] = ()
    """The learning rates at that time."""
    lost: float = 0.0
    """Which part of what it has added to the sum is no multiple of its gradient."""
    is_finite: bool = True
    """Whether its gradient is."""
    added: Vector = None
    """The sketch of its gradient, if that is to be solved for."""
    part: Vector = None
    """The sketch of what lies in this rank's part of the parameters, if it keeps only that."""


@dataclasses.dataclass
class Trace:
    """A window of an optimizer, as one process has seen it."""

    contributions: list[Contribution]
    epsilon: float
    """The rounding of the gradients' dtype."""
    backward: str = ""
    """The line that called backward for the last micro-batch."""
    factors: list[Factor] = dataclasses.field(default_factory=list)
    left: float = 0.0
    """Which multiple of the gradient of the window before is in this one."""
    skipped: int = 0
    """Micro-batches before it that were dropped because a gradient was not finite."""
    emptied: bool = False
    """Whether they were those of this window, which was stepped without them."""
    finite: bool = True
    """Whether the gradient that the optimizer saw is finite."""
    solved: bool = False
    """Whether the multiples are still to be solved for, since the gradient was not followed to the step."""
    target: Vector = None
    """If so, the sketch of the gradient that the optimizer saw, before the clipping of the whole window."""
    gradient: Vector = None
    """If so, the sketch of the gradient that the optimizer saw."""
    fragmented: bool = False
    """Whether target and gradient are those of this rank's part, so that those of all ranks are to be added up."""
    together: list[str] = dataclasses.field(default_factory=list)
    """What is known of micro-batches whose gradients are multiples of one another."""
    spare: bool = False
    """Whether gradients are seen, too, that the program computes for something else than a step."""
    sharded: bool = False
    """Whether the ranks' gradients were reduced before they were seen, to their mean."""
    step: str = ""
    """The line that called step()."""
    rates: tuple[float, ...] = ()
    """The learning rates at the step."""
    moves: int = 0
    """How often the statistics of batch normalisation moved."""
    averages: int = 0
    """How often a moving average of the parameters moved."""

    def unscale(self, scale: float, where: str) -> None:
        """The optimizer divides by a loss scale itself."""
        for each in self.contributions:
            each.kept /= scale
        self.left /= scale
        if self.target is not None:
            self.target = self.target / scale
        self.factors.append(Factor("unscale", where, len(self.contributions), 1 / scale, 0.0))


class Joined:
    """Makes one vector of the sketches of some parameters."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._sizes = sizes

    def __call__(self, sketches: Mapping[int, Any]) -> Vector:
        parts = []
        for index, size in self._sizes.items():
            part = sketches.get(index)
            parts.append(np.zeros(size) if part is None else np.asarray(part.cpu() if hasattr(part, "cpu") else part))
        return np.concatenate(parts) if parts else np.zeros(0)

    def has(self, sketches: Iterable[int]) -> bool:
        return not self._sizes.keys().isdisjoint(sketches)


@np.errstate(all="ignore")
def trace(
    entries: Sequence[MicroBatch | Change], start: Mapping[int, Any], joined: Joined, epsilon: float, key: int,
    is_solved: bool,
) -> Trace:  # fmt: skip
    """Follows the gradient from the end of the window before to the step.

    :param start: ``.grad`` when the window before was stepped
    :param epsilon: the rounding of the gradients' dtype
    :param key: the id of the optimizer, by which micro-batches have its learning rates
    :param is_solved: whether the multiples are to be solved for
    """
    state: dict[int, Any] = dict(start)
    window = Trace([], epsilon, solved=is_solved)
    terms: list[list[Term]] = []
    own = window.contributions
    now = joined(state)
    target = now
    window.left = 1.0 if norm(now) else 0.0
    group: set[int] = set()  # the parameters of the last micro-batch
    for entry in entries:
        if isinstance(entry, MicroBatch):
            if not joined.has(entry.added):
                continue
            before, window.emptied = now, False
            state.update(entry.after)
            now = target = joined(state)
            gradient = joined(entry.added)
            # A hook of the program may have changed the gradient after it was seen.
            value, residual = multiple(now - before, gradient) if norm(gradient) else (1.0, 0.0)
            blur = max(_EXACT, 4 * epsilon) * max(1.0, _ratio(norm(now), norm(gradient)))
            lost = residual if residual > blur or epsilon > _EXACT else 0.0
            if abs(value - 1) <= blur or lost:
                value = 1.0
            if not group.isdisjoint(entry.added) or not own or own[-1].kept != 1 or value != 1:
                group = set()
                terms.append([])
                rates = entry.rates.get(key, ())
                own.append(Contribution([], value, rates=rates, lost=lost, added=np.zeros_like(gradient)))
            else:  # other parameters than the one before, as in an ensemble: it is one micro-batch
                own[-1].lost = max(own[-1].lost, lost)
            group |= entry.added.keys()
            terms[-1] += entry.terms
            window.backward = entry.where
            own[-1].added = own[-1].added + gradient
            continue
        if not joined.has(entry.after):
            continue
        before = now
        state.update(entry.after)
        now = joined(state)
        if not norm(now) and not np.isfinite(before).all():
            window.skipped, group = window.skipped + len(own), set()
            window.emptied = True
            own.clear()
            terms.clear()
            window.factors.clear()
            window.left = 0.0
            target = now
            continue
        value, residual = multiple(now, before)
        factor = Factor(entry.purpose, entry.where, len(own), value, residual)
        window.factors.append(factor)
        if entry.purpose == "clip":
            continue  # what it multiplies is not what the loop gives to a micro-batch
        for each in own:
            each.kept *= value
        window.left = window.left * value if factor.is_exact(epsilon) else 0.0
        target = target * value if factor.is_exact(epsilon) else now
    window.finite = bool(np.isfinite(now).all())
    for each, found in zip(own, terms, strict=True):
        each.losses = losses_of(found)
        each.is_finite = bool(np.isfinite(each.added).all())
        if not is_solved:  # the factors tell everything, or nothing does
            each.added = None
    if is_solved:
        window.target, window.gradient = target, now
    return window


def contributions(entries: Iterable[MicroBatch | Change], key: int, joined: Joined) -> list[Contribution]:
    """What micro-batches gave to a window whose multiples are to be solved for.

    Several in a row that have no parameter in common are one.

    :param key: the id of the optimizer, by which micro-batches have its learning rates
    """
    found: list[Contribution] = []
    terms: list[list[Term]] = []
    seen: set[int] = set()  # the parameters of the last one
    for entry in entries:
        if not isinstance(entry, MicroBatch) or not joined.has(entry.added):
            continue
        if not found or not seen.isdisjoint(entry.added):
            seen = set()
            terms.append([])
            found.append(Contribution([], 1.0, rates=entry.rates.get(key, ()), added=joined({})))
        seen |= entry.added.keys()
        terms[-1] += entry.terms
        found[-1].added = found[-1].added + joined(entry.added)
        if entry.parts:
            found[-1].part = joined(entry.parts)
    for each, losses in zip(found, terms, strict=True):
        each.losses = losses_of(losses)
        each.is_finite = bool(np.isfinite(each.added).all())
    return found


def _ratio(a: float, b: float) -> float:
    return a / b if 0 < b < math.inf else 0.0


def multiple(now: Vector, before: Vector) -> tuple[float, float]:
    """The number with which one vector is the other, and what remains, relative to it."""
    square = float(before @ before)
    length = norm(now)
    if not length:
        return 0.0, 0.0
    if not square or not math.isfinite(square):
        return 1.0, 1.0
    value = float(now @ before) / square
    return value, norm(now - before * value) / length
