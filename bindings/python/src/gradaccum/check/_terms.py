# SPDX-License-Identifier: Apache-2.0
"""Losses of micro-batches: what they average over, and how the loop has scaled them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

NAMED = "loss"
"""The name of losses that the program names itself."""


@dataclasses.dataclass(eq=False)
class Term:
    """The value of a loss function in a micro-batch."""

    name: str
    where: str
    """The line of the program that has called the function."""
    reduction: str
    """``"mean"``, ``"sum"`` or ``"none"``."""
    count: Any
    """Over how many terms it has averaged or added: a number, or an array that holds it."""
    epsilon: float
    """The rounding of its dtype."""
    call: int
    """The same number for calls from the same places of the program."""
    factors: list[Any] = dataclasses.field(default_factory=list)
    """The derivative of what went backward by this value, an array for each backward."""
    resolved: tuple[float, float] | None = None
    """The factor by which the loop has scaled the mean over the terms, and their number; None: not known."""

    @property
    def key(self) -> str:
        return f"{self.name} in {self.where}"

    @property
    def is_sum(self) -> bool:
        """Whether the program may choose the scale: it adds terms up, or averages over them itself."""
        return self.reduction != "mean"

    def resolve(self) -> None:
        """At the end of a window: turns the derivatives into numbers, and lets go of them.

        The derivative by a sum of n terms is 1/n of that by their mean.
        """
        count, total = float(self.count), 0.0
        self.count = count
        factors, self.factors = self.factors, []
        for factor in factors:
            low, high = float(factor.min()), float(factor.max())
            if high - low > 16 * self.epsilon * max(abs(low), abs(high)):
                return  # the terms have weights of their own
            total += low
        if factors:
            self.resolved = (total * count if self.is_sum else total), count


@dataclasses.dataclass
class Loss:
    """A loss of a micro-batch, resolved to numbers."""

    key: str
    line: str
    """The key without the number of the call."""
    call: int
    factor: float
    terms: float
    free: bool
    """Whether the program may choose its scale."""
    epsilon: float


def losses_of(terms: Sequence[Term]) -> list[Loss]:
    """The losses of a micro-batch that are known.

    Several calls by one line, as of several heads, are told apart by their order, and may have any scale.
    """
    for term in terms:
        term.resolve()
    known = [term for term in terms if term.resolved is not None]
    calls = collections.Counter(term.key for term in known)
    result: list[Loss] = []
    order: collections.Counter[str] = collections.Counter()
    for term in known:
        assert term.resolved is not None
        factor, count = term.resolved
        order[term.key] += 1
        call = f", call {order[term.key]}" if order[term.key] > 1 else ""
        free = term.is_sum or calls[term.key] > 1
        result.append(Loss(term.key + call, term.key, term.call, factor, count, free, term.epsilon))
    return result
