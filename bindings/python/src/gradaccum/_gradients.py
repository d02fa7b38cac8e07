# SPDX-License-Identifier: Apache-2.0
"""How long gradients are kept, and what they must be like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .enums import GradientLife, Nonfinite
from .options import Config
from .tensor import Where

if TYPE_CHECKING:
    from .params import Param


class Kept:
    """Loans of gradients that the library reads after the call that brought them."""

    _READ = object()  # in place of a first gradient that has been read

    def __init__(self, config: Config) -> None:
        self.live = config.gradient_life == GradientLife.LIVE
        self.drops = config.nonfinite == Nonfinite.DROP_MICRO
        self.late = self.drops  # parts are read when the micro-batch ends
        self.first: dict[int, Any] = {}
        self.until_step: list[Any] = []
        self.until_end: list[Any] = []

    def added(self, param: Param, loan: Any, known: bool) -> None:
        """A gradient was added; known: its micro-batch has not been opened before."""
        if self.late:
            self.until_end.append(loan)
        if self.live:
            self.keep_first(param, loan, known)

    def added_all(self, *loans: Any) -> None:
        """What belongs to a gradient by rows or by a product was added."""
        if self.late:
            self.until_end += loans
        if self.live:
            self.until_step += loans

    def keep_first(self, param: Param, loan: Any, known: bool) -> None:
        """The first gradient of a parameter is read until the second one comes.

        A micro-batch that is dropped or has the weight 0 is not read, so the one after it may be the first
        that is. What is not known is kept until the step.
        """
        if self.drops or not known:
            self.until_step.append(loan)
        else:
            self.first[param.id] = self._READ if param.id in self.first else loan

    def micro_ended(self) -> None:
        """The micro-batch has ended."""
        self.until_end.clear()

    def window_ended(self) -> None:
        """The window has ended."""
        self.until_end.clear()
        self.until_step.clear()
        self.first.clear()

    def loans(self) -> list[Any]:
        """What is kept."""
        first = [loan for loan in self.first.values() if loan is not self._READ]
        return [*first, *self.until_step, *self.until_end]

    def count(self) -> int:
        """How many loans are kept."""
        return len(self.loans())


class Slot:
    """One of the gradients of accumulate(): that of a parameter or of a flat block."""

    __slots__ = ("is_flat", "params")

    def __init__(self, params: list[Param], is_flat: bool) -> None:
        self.params = params
        self.is_flat = is_flat

    def expected(self, where: Where) -> Any:
        """What the gradient must be like; None: it is not read any more."""
        alive = [param for param in self.params if not param.is_removed]
        if not alive:
            return None
        first = alive[0]
        if not self.is_flat:
            return first._gradient
        itemsize = first.gradient_dtype.itemsize
        end = max((param._offset + param.count) * param.gradient_dtype.itemsize for param in alive)
        what = f'gradient of the block of parameter "{first.name}"'
        return where.expect(what, first.gradient_dtype, least=-(-end // itemsize))
