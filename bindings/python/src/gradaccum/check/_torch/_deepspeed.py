# SPDX-License-Identifier: Apache-2.0
"""The gradients that an engine of DeepSpeed keeps, of which each rank has a part."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

SCALING = "_backward_prologue_per_tensor"
"""The function of an engine that divides the gradient by each output of the model; that of older ones is in the loss."""


def engines() -> list[Any]:
    """The classes of engines whose step() is to be seen."""
    deepspeed: Any = sys.modules["deepspeed"]
    return [deepspeed.DeepSpeedEngine]


def has_gradients(parameter: Tensor) -> bool:
    """Whether the engine keeps the gradient of a parameter: with ZeRO, or in another dtype."""
    return hasattr(parameter, "_z3_optimizer") or hasattr(parameter, "_hp_mapping")


def count_of(parameter: Tensor) -> int:
    """The elements of a parameter, which ZeRO-3 takes away between uses."""
    return int(getattr(parameter, "ds_numel", 0)) or parameter.numel()


def fragment_of(parameter: Any, whole: Tensor | None = None) -> Tensor:
    """The reduced gradient of a parameter, with zeros where other ranks have it. No rank waits for another one.

    :param whole: another gradient, of which the same elements are wanted
    """
    found = torch.zeros(count_of(parameter), device=parameter.device)
    three = getattr(parameter, "_z3_optimizer", None)
    part = None if whole is None else whole.flatten()
    if three is not None:
        count = parameter.partition_numel()
        begin = torch.distributed.get_rank(three.dp_process_group) * count
        end = min(begin + count, len(found))
        if part is None and begin < end:
            part = three._get_fp32_grad_state_partition(param=parameter, release_swap_buffers=True)[0]
    elif parameter._hp_mapping is not None:
        address = parameter._hp_mapping.lp_fragment_address
        begin, end = address.start, address.start + address.numel
        if part is None:
            part = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    else:
        return found
    if part is not None and begin < end:
        part = part.flatten()
        found[begin:end] = part[begin:end] if len(part) == len(found) else part[: end - begin]
    return found
