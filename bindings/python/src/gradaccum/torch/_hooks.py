# SPDX-License-Identifier: Apache-2.0
"""Hooks of torch that keep nothing alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from ._slots import Slot, add

if TYPE_CHECKING:
    from ._optimizer import Optimizer

Owner = TypeVar("Owner")


class Told(Generic[Owner]):
    """A hook that tells an object, as long as there is one. A copy of it tells nobody."""

    def __init__(self, owner: Owner | None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)

    def owner(self) -> Owner | None:
        """The object, if it is there still."""
        return None if self._owner is None else self._owner()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)


class Taker(Told["Optimizer"]):
    """A hook of a parameter that takes its gradient out of .grad into the open micro-batch of the optimizer."""

    def __init__(self, owner: Optimizer | None, slot: Slot | None = None) -> None:
        super().__init__(owner)
        self._slot = slot

    def __call__(self, tensor: Tensor) -> None:
        owner, slot = self.owner(), self._slot
        if owner is None or slot is None or owner._open is None:
            return
        if tensor.grad is None:
            raise RuntimeError(
                f'the gradient of parameter "{slot.own.name}" is gone from .grad, where another hook, or an open '
                "micro-batch of another optimizer, has taken it"
            )
        owner._count_gradient(slot)
        context = owner.context  # on the stream of this node of backward
        alive = add(owner._open, slot, tensor.grad)
        if context._kept.late:
            owner._held += alive
        owner._streams.keep([tensor.grad])
        tensor.grad = None
        owner._tell_ready(slot)


def take_gradients(owner: Optimizer) -> None:
    """Has gradients go to the open micro-batch of an optimizer as backward makes them."""
    for slot in owner._parameters.slots:
        if slot.hook is None and slot.tensor.requires_grad:
            register: Any = slot.tensor.register_post_accumulate_grad_hook
            slot.hook = register(Taker(owner, slot))
