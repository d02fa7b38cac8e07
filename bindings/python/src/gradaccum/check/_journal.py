# SPDX-License-Identifier: Apache-2.0
"""What the windows of a run began with and stepped with, to be compared with those of another run."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from ._sketch import signs

_NUMBERS = 64  # that are kept of a sketch


class Journal:
    """Of a program that is run for the comparison, in a file.

    stops: whether the program is ended after it has saved a checkpoint with a window open, or two between windows.
    """

    def __init__(self, path: str, stops: bool) -> None:
        self._path = path
        self._stops = stops
        self._ends_at_next = False
        self._windows: dict[str, list[dict[str, Any]]] = {}  # of each optimizer
        self._saves: list[int] = []  # with how many micro-batches in the window

    def window(self, optimizer: str, micro_batches: int, rates: Any, gradient: Any, parameters: Any) -> None:
        """An optimizer is about to make a step, or has made one. Sketches of gradient and parameters."""
        self._windows.setdefault(optimizer, []).append(
            {"micro_batches": micro_batches, "rates": list(rates), "gradient": _folded(gradient),
             "parameters": _folded(parameters)}
        )  # fmt: skip

    def saved(self, pending: int) -> None:
        """The program has written a checkpoint, with so many micro-batches in the window."""
        self._saves.append(pending)
        if self._stops and (pending or sum(not each for each in self._saves) > 1):
            self._ends_at_next = True

    def begins_micro_batch(self) -> None:
        """The program goes on. If it is to be stopped, it ends here, as if it had been killed."""
        if self._ends_at_next:
            self.write(is_stopped=True)
            os._exit(0)

    def write(self, *, is_stopped: bool = False) -> None:
        """At the end."""
        with open(self._path, "w", encoding="utf-8") as file:
            json.dump({"windows": self._windows, "saves": self._saves, "is_stopped": is_stopped}, file)


def _folded(sketch: Any) -> list[float]:
    """A sketch of a sketch."""
    rest = -len(sketch) % _NUMBERS
    folded = np.pad(sketch * signs(len(sketch), 0), (0, rest)).reshape(-1, _NUMBERS).sum(0)
    return [float(each) for each in folded]
