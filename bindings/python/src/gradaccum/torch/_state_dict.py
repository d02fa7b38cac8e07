# SPDX-License-Identifier: Apache-2.0
"""Arrays of state under the names of the library, and in torch's words: a dictionary for each parameter."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from .. import Dtype
from . import _state_file as state_file
from ._codes import CODES, SCALE, Coders, is_scale, is_whole
from ._kinds import OURS, Kind
from ._parameters import cut_of
from ._slots import TORCH, Slot, flat


KEY = "gradaccum"  # of a state dictionary: all that the library keeps
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
    arrays: dict[str, Tensor], slots: list[Slot], steps: int | None, coders: Coders, *, from_the_start: bool,
    as_numbers: bool,
) -> defaultdict[Tensor, Any]:
    """Takes torch's state out of the arrays.

    steps: of the context, where parameters do not count their own. from_the_start: also that before a first gradient.
    as_numbers: state in 8 bits as numbers, which it is where codes would not be those of the whole parameter too.
    """
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    if from_the_start:
        _add_first_state(arrays, slots)
    began = {key.removesuffix(".step") for key, array in arrays.items() if key.endswith(".step") and int(array)}
    for key, slot, name in of_torch(list(arrays), slots):
        if key not in arrays or (key.endswith(SCALE) and _is_coded(arrays, key.removesuffix(SCALE))):
            continue  # scales go with their codes
        array = arrays[key]
        if steps is None and slot.own.name not in began and not from_the_start:
            continue  # torch has no state of a parameter that had no gradient yet
        if steps is not None:
            state[slot.tensor]["step"] = torch.tensor(float(steps))
        if name == "step":
            state[slot.tensor][name] = array.to(torch.float32)
        else:
            del arrays[key]
            if array.dtype == torch.uint8:
                scale = arrays.pop(key + SCALE)
                if as_numbers or not is_whole(slot):
                    array = coders.decoded(slot, name, array, scale)
                else:
                    state[slot.tensor][name + SCALE] = scale
                    name += CODES
            if array.numel() == slot.memory.numel():
                array = slot.part.state(slot.tensor, array.as_strided(slot.shape, slot.stride))
            state[slot.tensor][name] = array
    return state


def _add_first_state(arrays: dict[str, Tensor], slots: list[Slot]) -> None:
    """Adds the state before a first gradient, which files do not have."""
    for slot in slots:
        if f"{slot.own.name}.step" in arrays:
            continue
        coded = {info.name for info in slot.own.states if info.dtype == Dtype.U8}
        for info in slot.own.states:
            value: Any = slot.own.get_state(info.name)
            is_scale_of_codes = info.name.removesuffix(SCALE) in coded and info.name not in coded
            if info.name in _NUMBERS:
                arrays[f"{slot.own.name}.{info.name}"] = from_dlpack(value).reshape(())
            elif info.name not in _OTHERS and (info.count == slot.own.count or is_scale_of_codes):
                arrays[f"{slot.own.name}.{info.name}"] = from_dlpack(value)


def joined(
    own: Mapping[str, Any], state: Mapping[int, Mapping[str, Any]], slots: list[Slot], mark: Mapping[str, Any]
) -> tuple[bytearray, dict[str, Tensor]]:
    """The file of which state_dict() has made what is under KEY, own, and torch's state; and its arrays.

    mark: what the ranks of this process write there.
    """
    found = {key: own[key] for key in ("rank", "ranks") if key in own}
    if found != mark:
        raise ValueError(
            f'"{KEY}" of the state dictionary is of {found or "a process alone"}, expected '
            f"{mark or 'one of a process alone'}: without that key, torch's state is loaded"
        )
    arrays = dict(own["arrays"])
    header = bytes(own["header"].tolist())
    with Coders() as coders:
        _take_from_torch(arrays, state_file.entries(header), state, slots, coders)
    return state_file.join(header, arrays), arrays


def _take_from_torch(
    arrays: dict[str, Tensor], listed: Mapping[str, Any], state: Mapping[int, Mapping[str, Any]], slots: list[Slot],
    coders: Coders,
) -> None:
    """Puts back what to_torch() has taken out: those that are listed in the header and that the arrays lack."""
    indices = {id(slot): index for index, slot in enumerate(slots)}
    for key, slot, name in of_torch(listed, slots):
        if key in arrays or (key.endswith(SCALE) and _is_listed_as_codes(listed, key.removesuffix(SCALE))):
            continue
        index = indices[id(slot)]
        of = state.get(index, {})
        coded = _is_listed_as_codes(listed, key)
        _check_coded(slot, name, coded)
        if name not in of and not (coded and name + CODES in of):
            raise ValueError(f'the state dictionary has no "{name}" of parameter {index}')
        if coded:
            with _named(name, index):
                arrays[key], arrays[key + SCALE] = coders.arrays(slot, name, of)
        else:
            arrays[key] = flat(of[name], slot)


def _is_coded(arrays: Mapping[str, Tensor], key: str) -> bool:
    return key in arrays and arrays[key].dtype == torch.uint8


def _is_listed_as_codes(listed: Mapping[str, Any], key: str) -> bool:
    return key in listed and listed[key]["dtype"] == "U8"


def _check_coded(slot: Slot, name: str, coded: bool) -> None:
    """Raises unless an array of state is in 8 bits here if it was where it was saved."""
    here = any(info.name == name and info.dtype == Dtype.U8 for info in slot.own.states)
    if coded != here:
        saved, own = ("8 bits", "another dtype") if coded else ("another dtype", "8 bits")
        raise ValueError(
            f'"{name}" of parameter "{slot.own.name}" was saved in {saved}, but has {own} here: a state dictionary '
            'without the key "gradaccum" has its numbers loaded, if not an open window'
        )


@contextlib.contextmanager
def _named(name: str, index: int) -> Iterator[None]:
    """Says whose state was refused."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f'the state "{name}" of parameter {index}: {error}') from None


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
    loaded.pop("state_dtype", None)  # state becomes what it is here
    if "state_dtype" in group:
        loaded["state_dtype"] = group["state_dtype"]
    loaded |= {key: group[key] for key in OURS if key in group and key not in loaded}
    missing = [key for key in kind.keys if key not in loaded and key not in OURS]
    if missing:
        raise ValueError(f"the state dictionary is of another optimizer: its groups have no {missing[0]}")
    kind.check(loaded)
    group.clear()
    group.update(loaded)


def from_torch(
    state: Mapping[int, Mapping[str, Any]], slots: list[Slot], coders: Coders
) -> tuple[dict[str, Tensor], int]:
    """The state of torch's own optimizer as arrays of the library, and how many steps it has made.

    State in 8 bits becomes numbers, or numbers the nearest codes, if the parameter's own state is that.
    """
    arrays: dict[str, Tensor] = {}
    steps = 0
    for index, slot in enumerate(slots):
        infos = {info.name: info for info in slot.own.states}
        of = state.get(index, {})
        for name, value in of.items():
            if value is None or is_scale(name, of):
                continue
            coded = name.endswith(CODES)
            name = name.removesuffix(CODES)
            key = f"{slot.own.name}.{name}"
            array = torch.as_tensor(value).detach()
            if name == "step":
                steps = max(steps, int(array))
                if name in infos:
                    arrays[key] = array.cpu().to(torch.int64).reshape(())
                continue
            if name not in infos:
                raise ValueError(f'the state "{name}" of parameter {index} has no counterpart in this optimizer')
            with _named(name, index):
                if infos[name].dtype == Dtype.U8:
                    arrays[key], arrays[key + SCALE] = coders.arrays(slot, name, of)
                    continue
                if coded:
                    array = coders.numbers(slot, name, of)
            arrays[key] = flat(array, slot).to(TORCH[infos[name].dtype])
    return arrays, steps
