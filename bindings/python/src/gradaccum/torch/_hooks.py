# SPDX-License-Identifier: Apache-2.0
"""Gradients that an open micro-batch takes as backward makes them, by hooks that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from .. import Context, MicroBatch
from ._slots import Slot, add, mark_written
from ._streams import Streams

Owner = TypeVar("Owner")


def _nobody() -> None:
    """A reference to no object."""


class Told(Generic[Owner]):
    """A hook that tells an object, as long as there is one. A copy of it tells nobody.

    function: is called with the object, arguments, and what the hook is given.
    """

    def __init__(self, owner: Owner | None, function: Callable[..., Any] | None = None, *arguments: Any) -> None:
        self.owner: Callable[[], Owner | None] = _nobody if owner is None else weakref.ref(owner)
        """The object, if it is there still."""
        self._function: Any = function
        self._arguments = arguments

    def __call__(self, *given: Any) -> Any:
        owner = self.owner()
        return None if owner is None else self._function(owner, *self._arguments, *given)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)


class Gradients:
    """The gradients of an optimizer's parameters that its open micro-batch takes as backward makes them.

    writes_ahead: whether the library may write parameters before the step.
    """

    def __init__(self, context: Context, streams: Streams, slots: list[Slot], *, writes_ahead: bool) -> None:
        self.streams = streams
        self.slots = slots
        self.micro: MicroBatch | None = None  # that is open
        self._context = context
        self._writes_ahead = writes_ahead
        self._tells_ready = False  # whether the library hears of gradients that are complete
        self._held: list[Tensor] = []  # which the library reads when the micro-batch ends

    @property
    def context(self) -> Context:
        """The context of the library, whose work goes to torch's current stream from now on."""
        self.streams.follow(self._context)
        return self._context

    @property
    def has_any(self) -> bool:
        """Whether the open micro-batch has got a gradient."""
        return bool(self._held) or any(slot.gradients for slot in self.slots)

    def open(self, micro: MicroBatch, tells_ready: bool) -> None:
        """Gradients go to this micro-batch. tells_ready: updates may begin before it ends."""
        self.micro, self._tells_ready = micro, tells_ready

    def close(self) -> list[Tensor]:
        """No micro-batch takes gradients. Returns what is to live until it has ended."""
        self.micro = None
        held, self._held = self._held, []
        self.streams.keep(held)
        for slot in self.slots:
            slot.gradients = 0
        return held

    def take_as_made(self) -> None:
        """Has hooks take gradients out of .grad as backward makes them."""
        for slot in self.slots:
            if slot.hook is None and slot.tensor.requires_grad:
                register: Any = slot.tensor.register_post_accumulate_grad_hook
                slot.hook = register(Told(self, type(self).take, slot))

    def take(self, slot: Slot, _: Tensor) -> None:
        """Takes a gradient that backward has just put into .grad, and has the update begin if no other follows."""
        micro, gradient = self.micro, slot.tensor.grad
        if micro is None:
            return
        if gradient is None:
            raise RuntimeError(
                f'the gradient of parameter "{slot.own.name}" is gone from .grad, where another hook, or an open '
                "micro-batch of another optimizer, has taken it"
            )
        self._count(slot)
        context = self.context  # on the stream of this node of backward
        alive = add(micro, slot, gradient)
        if context._kept.late:
            self._held += alive
        self.streams.keep([gradient])
        slot.tensor.grad = None
        if self._tells_ready and slot.is_whole:
            context.ready(slot.own)
            self.writes([slot])

    def take_rest(self) -> None:
        """Takes what is left in .grad, of parameters that had no hook when the micro-batch was opened."""
        assert self.micro is not None
        for slot in self.slots:
            if slot.tensor.grad is not None:
                self._held += [slot.tensor.grad, *add(self.micro, slot, slot.tensor.grad)]
                slot.tensor.grad = None

    def writes(self, slots: list[Slot]) -> None:
        """Tells autograd that parameters may be updated from now on, while backward may still read them."""
        if self._writes_ahead:
            mark_written(slots)

    def _count(self, slot: Slot) -> None:
        slot.gradients += 1
        if slot.gradients > 1:
            if slot.is_whole:  # the loop has changed, so the others may get several gradients too
                for other in self.slots:
                    other.is_whole = None
            slot.is_whole = False

    def learn(self) -> None:
        """At the end of a micro-batch: remembers which parameters have got one gradient."""
        for slot in self.slots:
            if slot.gradients == 1 and slot.is_whole is None:
                slot.is_whole = True
