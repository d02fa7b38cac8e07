# SPDX-License-Identifier: Apache-2.0
"""An optimizer of torch that exists, taken over."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, Unpack

import torch

from .. import Rows
from . import _kinds
from ._optimizer import Optimizer

_taken: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _refuse(*_: Any) -> NoReturn:
    raise RuntimeError(
        "step() was called of an optimizer that wrap() has taken over, with its state: call that of what wrap() "
        "returned"
    )


def wrap(optimizer: torch.optim.Optimizer, **window: Unpack[_kinds.WindowOptions]) -> Optimizer:
    """An optimizer that accumulates, in place of one of torch: ``opt = wrap(opt, accum_steps=4)``.

    It takes over the kind, the numbers, the groups and the state. The groups are the same dictionaries, so a
    scheduler that was made for the optimizer moves them on. The optimizer itself is empty: its ``step`` raises, and so
    does a second ``wrap``. What cannot be taken over exactly raises TypeError or ValueError.
    """
    if optimizer in _taken:
        raise ValueError("the optimizer was taken over by wrap() before, and its state with it")
    kind = _kinds.kind_of(optimizer)
    state: dict[str, Any] = optimizer.state_dict()
    if kind is _kinds.SPARSE_ADAM:
        for group in optimizer.param_groups:
            group.setdefault("rows", int(Rows.LAZY))
    result = Optimizer(optimizer.param_groups, kind, optimizer.defaults, **window)
    result._load_from_torch(state["state"])
    optimizer.state.clear()
    result._wrapped = weakref.ref(optimizer)
    _taken.add(optimizer)
    optimizer.register_step_pre_hook(_refuse)
    return result
