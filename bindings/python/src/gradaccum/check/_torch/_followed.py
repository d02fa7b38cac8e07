# SPDX-License-Identifier: Apache-2.0
"""What is kept of parameters and of optimizers that are followed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._sketch import size_of
from .._timeline import Trace
from ._deepspeed import count_of
from ._library import ledger_of


class Parameter:
    """A parameter whose gradient is followed."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor = tensor
        self.name = name
        self.is_sharded = hasattr(tensor, "to_local")
        """A DTensor, whose gradient FSDP2 reduces before it assigns it to .grad."""
        self.size = size_of(count_of(local(tensor)))
        """Of a sketch."""
        self.had_gradient = False
        self.is_of_keras = False
        """Whether it is of a model that optimizers of Keras may train."""
        self.sketch: Tensor | None = None  # of .grad as it was seen last
        self._seen: tuple[Callable[[], Tensor | None], int] | None = None  # that .grad, and its version

    def is_as_seen(self) -> bool:
        gradient = self.tensor.grad
        if gradient is None or self._seen is None:
            return gradient is None and self._seen is None
        return self._seen[0]() is gradient and self._seen[1] == gradient._version

    def see(self, sketch: Tensor | None) -> None:
        gradient = self.tensor.grad
        self.sketch = sketch
        self._seen = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def forget(self) -> None:
        """.grad is about to change in a way that its version may not tell."""
        self._seen = (_nothing, -1)


def _nothing() -> None:
    """A reference to no tensor."""


class Steps:
    """The windows of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: list[int] = []
        self.begin = 0  # the first entry of its window
        self.start: dict[int, Tensor | None] = {}  # the gradients with which the last window was stepped
        self.traces: list[Trace] = []
        self.pending = 0
        """Micro-batches after the last step."""
        self.is_partial = False
        """Whether its first window had begun before it was watched."""
        self.skipped = 0
        """Micro-batches of steps that a fused optimizer did not make, for a gradient was not finite."""
        self.ledger = ledger_of(optimizer)
        """What an optimizer of this library tells, whose window is not in ``.grad``."""

    def begins(self, begin: int, start: dict[int, Tensor | None]) -> None:
        """Its next window begins."""
        self.begin, self.start = begin, start

    def rates_now(self) -> tuple[float, ...]:
        """The learning rates of the groups."""
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group)


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank has; another tensor itself."""
    of: Any = getattr(tensor, "to_local", None)
    if of is None:
        return tensor
    with torch.no_grad():
        found: Tensor = of()
    return found


def address_of(tensor: Tensor) -> int:
    """By which a gradient is known again under another name, such as .data."""
    tensor = local(tensor)
    try:
        return tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)
    except RuntimeError:  # of torch.func, which has no memory
        return 0


def is_distributed() -> bool:
    """Whether there are several processes of torch.distributed."""
    distributed: Any = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)
