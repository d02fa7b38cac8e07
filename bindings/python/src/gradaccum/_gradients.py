# SPDX-License-Identifier: Apache-2.0
"""How long gradients are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from . import _native, _raw
from .enums import GradientLife
from .options import Config


class Kept:
    """Loans of gradients, for as long as the library says that it may read them."""

    def __init__(self, config: Config) -> None:
        self.live = config.gradient_life != GradientLife.CONSUMED
        self.lent = config.gradient_life == GradientLife.LENT  # the library writes to gradients
        self.late = False  # parts of the open micro-batch are read when it ends
        self._loans: deque[tuple[int, Any]] = deque()  # by the number that the library gives the gradient
        self._info = _raw.ga_kept_info()
        self._oldest = 0

    def opened(self, c: int) -> None:
        """A micro-batch was opened."""
        self._ask(c, 0)
        self.late = self._info.until_micro_end != 0

    def added(self, c: int, loan: Any) -> None:
        """A gradient by part was added."""
        if self.live or self.late:
            self._ask(c, self._loans[0][0] if self._loans else 0)
            self._loans.append((self._info.latest, loan))
            while self._loans and not self._is_read(c, self._loans[0][0]):
                self._loans.popleft()

    def added_all(self, c: int, loans: Sequence[Any]) -> None:
        """A micro-batch was added as a whole."""
        if self.live:
            self._ask(c, 0)
            first = self._info.latest - len(loans) + 1
            self._loans.extend((first + i, loan) for i, loan in enumerate(loans) if loan is not None)
            self.release(c)

    def release(self, c: int) -> None:
        """Lets go of what is not read any more."""
        if self._loans:
            self._oldest = 0
            self._loans = deque(entry for entry in self._loans if self._is_read(c, entry[0]))

    def _ask(self, c: int, since: int) -> None:
        _native.ga_gradients_kept(c, since, self._info.this)
        self._oldest = self._info.oldest

    def _is_read(self, c: int, number: int) -> bool:
        """For one gradient after the other."""
        if self._oldest < number:
            self._ask(c, number)
        return self._oldest == number

    def clear(self) -> list[Any]:
        """After the context was closed: lets go of all, and returns it."""
        loans = [loan for _, loan in self._loans]
        self._loans.clear()
        return loans
