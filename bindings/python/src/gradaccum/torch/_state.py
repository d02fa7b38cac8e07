# SPDX-License-Identifier: Apache-2.0
"""``optimizer.state``: empty, since the library keeps the state, and loud where a program would change it."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any, NoReturn

from torch import Tensor

_WAY = (
    "the library keeps the state of parameters: state_dict() and load_state_dict() carry all of it, and get_state(), "
    "set_state() and reset_state() of optimizer.context.params[i] that of one parameter"
)


class MissingState(KeyError):
    """An item of a parameter's state was asked for, which ``optimizer.state`` does not have."""

    def __str__(self) -> str:  # that of a KeyError is in quotation marks
        return str(self.args[0])


def refuse(what: str) -> NoReturn:
    """Raises for a write, described by what, that the library would not see."""
    raise RuntimeError(f"{what} would change nothing: {_WAY}")


class _ReadOnly(dict[Any, Any]):
    """A dictionary that is empty and stays so."""

    _name = "state"

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        refuse(f"an assignment to an item of {self._name}")

    def __delitem__(self, key: Any) -> NoReturn:
        refuse(f"del of an item of {self._name}")

    def __ior__(self, other: Any) -> NoReturn:  # type: ignore[misc]
        refuse(f"|= of {self._name}")

    def clear(self) -> NoReturn:
        refuse(f"{self._name}.clear()")

    def pop(self, *_: Any) -> NoReturn:
        refuse(f"{self._name}.pop()")

    def popitem(self) -> NoReturn:
        refuse(f"{self._name}.popitem()")

    def setdefault(self, *_: Any) -> NoReturn:
        refuse(f"{self._name}.setdefault()")

    def update(self, *_: Any, **__: Any) -> NoReturn:
        refuse(f"{self._name}.update()")

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


class _OfParameter(_ReadOnly):
    _name = "optimizer.state[parameter]"

    def __missing__(self, key: Any) -> NoReturn:
        raise MissingState(f'optimizer.state[parameter] has no "{key}": {_WAY}')


class State(_ReadOnly, defaultdict[Tensor, Any]):
    """What programs find that walk ``optimizer.state``: no parameter has an entry, and any has an empty one."""

    _name = "optimizer.state"

    def __missing__(self, key: Any) -> _OfParameter:
        return _OfParameter()


def is_asked_for() -> bool:
    """Whether torch.distributed.checkpoint calls for the state that a first step makes.

    It gives all parameters gradients of 0, sets learning rates to 0, calls step() and zero_grad(), and means no step.
    """
    frame = sys._getframe(1)
    for _ in range(5):  # torch wraps step()
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == "_init_optim_state" and "distributed/checkpoint" in frame.f_code.co_filename:
            return True
    return False
