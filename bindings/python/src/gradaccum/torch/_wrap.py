# SPDX-License-Identifier: Apache-2.0
"""An optimizer of torch that exists, taken over."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from . import _kinds
from ._optimizer import Optimizer, WindowOptions


def wrap(optimizer: torch.optim.Optimizer, **window: Unpack[WindowOptions]) -> Optimizer:
    """An optimizer that accumulates, in place of one of torch: ``opt = wrap(opt, accum_steps=4)``.

    It takes over the kind, the numbers, the groups and the state. The groups are the same dictionaries, so a
    scheduler that was made for the optimizer moves them on. The optimizer itself must not step any more.
    What cannot be taken over exactly raises TypeError or ValueError.
    """
    kind = _kinds.kind_of(optimizer)
    state: dict[str, Any] = optimizer.state_dict()
    result = Optimizer(optimizer.param_groups, kind, optimizer.defaults, **window)
    if state["state"]:
        result._load_from_torch(state["state"])
    return result
