# SPDX-License-Identifier: Apache-2.0
"""Arrays of state under the names of the library, and in torch's words: a dictionary for each parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ._slots import TORCH, Slot, flat


def of_torch(names: Iterable[str], slots: list[Slot]) -> list[tuple[str, Slot, str]]:
    """Those names of arrays that are state in torch's sense: each with its parameter and the rest of it."""
    owners = {slot.own.name: slot for slot in slots}
    found = []
    for key in names:
        owner, _, name = key.rpartition(".")
        if owner in owners and name not in ("master", "ema", "grad_accum"):
            found.append((key, owners[owner], name))
    return found


def to_torch(arrays: dict[str, Tensor], slots: list[Slot], steps: int | None) -> defaultdict[Tensor, Any]:
    """Takes torch's state out of the arrays. steps: of the context, where parameters do not count their own."""
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    began = {key.removesuffix(".step") for key, array in arrays.items() if key.endswith(".step") and int(array)}
    for key, slot, name in of_torch(list(arrays), slots):
        array = arrays[key]
        if steps is None and slot.own.name not in began:
            continue  # torch has no state of a parameter that had no gradient yet
        if steps is not None:
            state[slot.tensor]["step"] = torch.tensor(float(steps))
        if name == "step":
            state[slot.tensor][name] = array.to(torch.float32)
        else:
            del arrays[key]
            if array.numel() == slot.tensor.numel():
                array = array.as_strided(slot.tensor.shape, slot.stride)
            state[slot.tensor][name] = array
    return state


def take_from_torch(
    arrays: dict[str, Tensor], names: Iterable[str], state: Mapping[int, Mapping[str, Any]], slots: list[Slot]
) -> None:
    """Puts back what to_torch() has taken out: those of the names that the arrays lack."""
    indices = {id(slot): index for index, slot in enumerate(slots)}
    for key, slot, name in of_torch(names, slots):
        if key not in arrays:
            index = indices[id(slot)]
            if name not in state.get(index, {}):
                raise ValueError(f'the state dictionary has no "{name}" of parameter {index}')
            arrays[key] = flat(state[index][name], slot)


def from_torch(state: Mapping[int, Mapping[str, Any]], slots: list[Slot]) -> tuple[dict[str, Tensor], int]:
    """The state of torch's own optimizer as arrays of the library, and how many steps it has made."""
    arrays: dict[str, Tensor] = {}
    steps = 0
    for index, slot in enumerate(slots):
        infos = {info.name: info for info in slot.own.states}
        for name, value in state.get(index, {}).items():
            if value is None:
                continue
            key = f"{slot.own.name}.{name}"
            array = torch.as_tensor(value).detach().cpu()
            if name == "step":
                steps = max(steps, int(array))
                if name in infos:
                    arrays[key] = array.to(torch.int64).reshape(())
                continue
            if name not in infos:
                raise ValueError(f'the state "{name}" of parameter {index} has no counterpart in this optimizer')
            arrays[key] = flat(array, slot).to(TORCH[infos[name].dtype])
    return arrays, steps
