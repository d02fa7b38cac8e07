# SPDX-License-Identifier: Apache-2.0
"""Processes that train one model together, and one that trains alone."""

from __future__ import annotations

import contextlib
import enum
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from .. import Context
from ._hooks import Gradients
from ._parts import WHOLE, Whole, is_part
from ._slots import Slot

Statistics = tuple[int, Tensor, Tensor]
"""Of what a layer of batch normalisation has seen: the count, the mean and M2 of each channel."""

Values = Callable[[], Mapping[str, Any]]
"""What must be the same on all ranks, by name."""

Result = TypeVar("Result")

_NONE: Mapping[str, Any] = {}
NO_MESH = (
    "a parameter was a DTensor, which needs data_mesh=: the DeviceMesh over whose ranks samples differ and gradients are "
    "reduced, as that of fully_shard(); or (), if all ranks have the same samples"
)


class Alone:
    """A process that trains by itself: nothing is reduced. What Ranks does for several processes."""

    count = 1
    """Of the ranks whose weights a micro-batch has."""
    may_wait = False
    """Whether a framework may keep the gradients of a micro-batch for a later one of its window."""

    def config(self) -> dict[str, Any]:
        """The fields of a Config that the ranks need."""
        return {}

    def join(self, context: Context) -> None:
        """This process has the context."""

    def part_of(self, tensor: Tensor, name: str, is_named: bool) -> Whole:
        """What this process has of a parameter. is_named: by the program."""
        if is_part(tensor):
            raise ValueError(NO_MESH)
        return WHOLE

    def track(self, slots: Sequence[Slot]) -> None:
        """Parameters have been added."""

    def connect(self) -> None:
        """The parameters of the constructor have been added."""

    def begin(self) -> None:
        """A micro-batch is about to be taken from ``.grad``."""

    def opens(self, tells_ready: bool) -> bool:
        """Whether the next micro-batch takes gradients as backward makes them, and not from .grad at its end."""
        return True

    def open(self, weight: float, is_weighed: bool) -> tuple[float, float | None]:
        """A micro-batch is about to be opened, of the losses of weigh() or others.

        Returns the weight and the loss scale that the library is told.
        """
        return weight, None

    def weigh(self, loss: Tensor, weight: float) -> Tensor:
        """The loss of a micro-batch of that weight, as it is to go backward."""
        return loss

    def take(self, weight: float, loss_scale: float | None) -> tuple[float, float | None]:
        """The weight and the loss scale that the library is told for the gradients of a micro-batch in .grad."""
        return weight, loss_scale

    def merge(self, seen: dict[Any, Statistics], layers: Iterable[Any]) -> dict[Any, Statistics]:
        """The statistics of the micro-batch that was taken."""
        return seen

    def agree(self, call: Call, values: Values | None = None) -> None:
        """A call that all ranks must make together, with the same values."""

    def meet(self, call: Call) -> None:
        """A call that all ranks must make together if each has a part of the state."""

    def vote(self, work: Callable[[], Result]) -> Result:
        """What work() returns. If it raises on one rank of those that meet, it raises on all of them."""
        return work()

    def mark(self) -> dict[str, Any]:
        """What a state dictionary says of the rank that it belongs to."""
        return {}

    @contextlib.contextmanager
    def micro_batch(self, weight: float, gradients: Gradients | None) -> Iterator[None]:
        """Backwards of which the weight is known before. gradients: of the open micro-batch, if it takes them."""
        if gradients is not None:
            gradients.take_as_made()
        yield


class Call(enum.Enum):
    """What a rank does when it meets the others. The value says so in an error."""

    CREATE = "made an optimizer"
    """Makes an optimizer."""
    FORWARD = "was in forward"
    """Is in a forward in which DistributedDataParallel communicates."""
    BACKWARD = "was in backward"
    """Is in backward, before the first gradient is reduced."""
    ACCUMULATE = "called accumulate() or step()"
    """Takes gradients from ``.grad``."""
    STEP = "ended a window"
    """Ends a window."""
    FLUSH = "called flush()"
    """Ends a window that may not be full, or that is empty."""
    MICRO_BATCH = "opened a micro_batch()"
    """Opens a ``micro_batch()``."""
    DISCARD = "called discard()"
    """Drops a window."""
    SAVE = "called state_dict() or save()"
    """Saves."""
    LOAD = "called load_state_dict() or load()"
    """Loads."""
    ADD = "called add_param_group()"
    """Adds a group of parameters."""


_CALLS = list(Call)
_OF_MICRO_BATCHES = (Call.CREATE, Call.FORWARD, Call.BACKWARD, Call.ACCUMULATE, Call.MICRO_BATCH)


class Meeting(Alone):
    """Ranks that say in each call what they do: one that does something else is an error on all of them."""

    whose = ""
    """In messages: of what they are the ranks."""
    _context: Context

    def join(self, context: Context) -> None:
        """This rank has the context."""
        self._context = context

    def _gather(self, own: list[float]) -> list[list[float]]:
        """What each rank gives."""
        raise NotImplementedError

    def _gather_values(self, own: dict[str, str]) -> list[dict[str, str]]:
        """What each rank gives."""
        raise NotImplementedError

    def agree(self, call: Call, values: Values | None = None) -> None:
        """Raises on every rank if some rank makes another call, or with other values."""
        self._meet(call, None, {} if values is None else values())

    def _meet(self, call: Call, weight: float | None, values: Mapping[str, Any] = _NONE) -> list[float]:
        """Tells the others what this rank does, and the weight if it is known. Returns the weights of all."""
        digest = zlib.crc32(repr(sorted(values.items())).encode())
        place = [_CALLS.index(call), self._context.window.micro_batches, weight is not None]
        rows = self._gather([*place, digest, weight or 0.0])
        if any(row[:3] != rows[0][:3] for row in rows):
            self._differ(rows)
        if any(row[3] != rows[0][3] for row in rows):
            self._name_value(values)
        weights = [row[4] for row in rows]
        if not all(0 <= own < math.inf for own in weights):
            raise ValueError(f"the ranks gave the weights {listed(weights)}, expected finite numbers >= 0")
        return weights

    def _differ(self, rows: Sequence[Sequence[float]]) -> NoReturn:
        found = [f"rank {rank} {_place(row)}" for rank, row in enumerate(rows)]
        raise RuntimeError(
            f"the ranks{self.whose} went apart: {'; '.join(found)}. Every rank must bring as many micro-batches to a "
            "window, in the same calls; one that has no samples left gives an empty one the weight 0"
        )

    def _name_value(self, own: Mapping[str, Any]) -> NoReturn:
        found = self._gather_values({key: repr(value) for key, value in own.items()})
        for rank, values in enumerate(found):
            for key in sorted({*found[0], *values}):
                if values.get(key) != found[0].get(key):
                    raise RuntimeError(
                        f"{key} was {found[0].get(key)} on rank 0 and {values.get(key)} on rank {rank}: replicas "
                        "would go apart"
                    )
        raise AssertionError("two digests differed, but no value does")


def joined(a: Statistics | None, b: Statistics) -> Statistics:
    """The statistics of two parts (Chan, Golub and LeVeque 1979)."""
    if a is None:
        return b
    n, mean, m2 = a
    count, other, other_m2 = b
    delta = other - mean
    total = n + count
    return total, mean + delta * (count / total), m2 + other_m2 + delta.square() * (n * count / total)


def _place(row: Sequence[float]) -> str:
    """What a rank did, and where in a window."""
    call, held, is_weighted = _CALLS[int(row[0])], int(row[1]), bool(row[2])
    if call not in _OF_MICRO_BATCHES:
        return f"{call.value} after {held} micro-batches"
    inside = " inside micro_batch()" if call == Call.BACKWARD and is_weighted else ""
    return f"{call.value}{inside} for micro-batch {held + 1} of its window"


def listed(weights: Sequence[float]) -> str:
    """Weights in a message."""
    return ", ".join(f"{weight:g}" for weight in weights)
