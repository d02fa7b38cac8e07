# SPDX-License-Identifier: Apache-2.0
"""Arrays of state under the names of the library, and in torch's words: a dictionary for each parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ._kinds import OURS, Kind
from ._parameters import cut_of
from ._slots import TORCH, Slot, flat


_OTHERS = ("master", "ema", "grad_accum")  # arrays of a parameter that torch's optimizers do not have
_NUMBERS = ("step", "mu_product", "weight_sum", "lr_max")  # arrays of one element, whatever the parameter


def of_torch(names: Iterable[str], slots: list[Slot]) -> list[tuple[str, Slot, str]]:
    """Those names of arrays that are state in torch's sense: each with its parameter and the rest of it."""
    owners = {slot.own.name: slot for slot in slots}
    found = []
    for key in names:
        owner, _, name = key.rpartition(".")
        if owner in owners and name not in _OTHERS:
            found.append((key, owners[owner], name))
    return found


def to_torch(
    arrays: dict[str, Tensor], slots: list[Slot], steps: int | None, *, from_the_start: bool
) -> defaultdict[Tensor, Any]:
    """Takes torch's state out of the arrays.

    steps: of the context, where parameters do not count their own. from_the_start: also that before a first gradient.
    """
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    if from_the_start:
        _add_first_state(arrays, slots)
    began = {key.removesuffix(".step") for key, array in arrays.items() if key.endswith(".step") and int(array)}
    for key, slot, name in of_torch(list(arrays), slots):
        array = arrays[key]
        if steps is None and slot.own.name not in began and not from_the_start:
            continue  # torch has no state of a parameter that had no gradient yet
        if steps is not None:
            state[slot.tensor]["step"] = torch.tensor(float(steps))
        if name == "step":
            state[slot.tensor][name] = array.to(torch.float32)
        else:
            del arrays[key]
            if array.numel() == slot.memory.numel():
                array = slot.part.state(slot.tensor, array.as_strided(slot.shape, slot.stride))
            state[slot.tensor][name] = array
    return state


def _add_first_state(arrays: dict[str, Tensor], slots: list[Slot]) -> None:
    """Adds the state before a first gradient, which files do not have."""
    for slot in slots:
        if f"{slot.own.name}.step" in arrays:
            continue
        for info in slot.own.states:
            value: Any = slot.own.get_state(info.name)
            if info.name in _NUMBERS:
                arrays[f"{slot.own.name}.{info.name}"] = from_dlpack(value).reshape(())
            elif info.name not in _OTHERS and info.count == slot.own.count:
                arrays[f"{slot.own.name}.{info.name}"] = from_dlpack(value)


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


def by_index(state_dict: Mapping[str, Any]) -> dict[int, Any]:
    """The state of each parameter by its place, for which torch.distributed.checkpoint has the name of the parameter."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    state = state_dict["state"]
    return {index: state[key] for index, key in enumerate(keys) if key in state}


def take_group(group: dict[str, Any], loaded: dict[str, Any], kind: Kind) -> None:
    """Makes a group that of a state dictionary, which it changes. Raises if that is not of such an optimizer."""
    if not cut_of(loaded):  # a dictionary of torch's
        loaded |= cut_of(group)
    if cut_of(loaded) != cut_of(group):
        raise ValueError(
            f"a group of the state dictionary has {cut_of(loaded)}, but here {cut_of(group) or 'Muon has no cut'}"
        )
    loaded |= {key: group[key] for key in OURS if key in group and key not in loaded}
    missing = [key for key in kind.keys if key not in loaded and key not in OURS]
    if missing:
        raise ValueError(f"the state dictionary is of another optimizer: its groups have no {missing[0]}")
    kind.check(loaded)
    group.clear()
    group.update(loaded)


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
            array = torch.as_tensor(value).detach()
            if name == "step":
                steps = max(steps, int(array))
                if name in infos:
                    arrays[key] = array.cpu().to(torch.int64).reshape(())
                continue
            if name not in infos:
                raise ValueError(f'the state "{name}" of parameter {index} has no counterpart in this optimizer')
            arrays[key] = flat(array, slot).to(TORCH[infos[name].dtype])
    return arrays, steps
