# SPDX-License-Identifier: Apache-2.0
"""State in 8 bits: its codes in state dictionaries, and the numbers that they stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import Config, Context, Dtype, Error, Param, Precision
from .. import Optimizer as Settings
from ._slots import Slot, flat

BLOCK = 256
"""Elements that share a scale."""
CODES = "_codes"
SCALE = "_scale"
"""What the names of the two tensors end with that a state dictionary has of an array of state in 8 bits.

The codes are not under the name of the array, since an optimizer of torch would take them for numbers there.
"""
_SIDE = 512


class Coder:
    """Translates between codes and numbers, by a parameter of its own whose state it writes and reads.

    Raises ValueError if the optimizer has no codes.
    """

    def __init__(self, settings: Settings) -> None:
        self._context = Context(Config(num_threads=1))
        # What a precision needs of a device or a processor may not be here, and no step is made.
        settings = dataclasses.replace(settings, state_dtype=Dtype.STATE_8BIT, ns_precision=Precision.F32)
        self._memory = torch.zeros(_SIDE, _SIDE, device="cpu")
        try:
            self._param: Param = self._context.add_param(self._context.add_group(settings), "state", self._memory)
        except Error as error:
            self._context.close()
            raise ValueError(f"it has codes, but its optimizer keeps no state in 8 bits: {error}") from None
        self._codes = torch.zeros(_SIDE * _SIDE, dtype=torch.uint8, device="cpu")
        self._scale = torch.zeros(_SIDE * _SIDE // BLOCK, device="cpu")
        self._numbers = torch.zeros(_SIDE * _SIDE, device="cpu")

    def close(self) -> None:
        """Frees the context."""
        self._context.close()

    def has(self, name: str) -> bool:
        """Whether the optimizer keeps this array in 8 bits."""
        return any(info.name == name and info.dtype == Dtype.U8 for info in self._param.states)

    def numbers(self, name: str, codes: Tensor, scale: Tensor) -> Tensor:
        """The numbers that codes stand for, in one dimension as the codes are. Raises ValueError."""
        count = codes.numel()
        if codes.dtype != torch.uint8 or scale.numel() != -(-count // BLOCK):
            raise ValueError(
                f"it has {count} codes of {codes.dtype} and {scale.numel()} scales, expected codes of torch.uint8 and "
                f"a scale for {BLOCK} of them"
            )
        found = torch.empty(count, device="cpu")
        for at in range(0, count, self._codes.numel()):
            part = codes[at : at + self._codes.numel()]
            blocks = scale[at // BLOCK : (at + len(part) - 1) // BLOCK + 1]
            self._codes[: len(part)] = part
            self._scale[: len(blocks)] = blocks
            self._set(name, self._codes)
            self._set(name + SCALE, self._scale)
            self._param.get_state(name, self._numbers)
            found[at : at + len(part)] = self._numbers[: len(part)]
        return found

    def codes(self, name: str, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The scales of numbers in one dimension, and the codes nearest to them. Raises ValueError."""
        count = numbers.numel()
        codes = torch.empty(count, dtype=torch.uint8, device="cpu")
        scale = torch.empty(-(-count // BLOCK), device="cpu")
        for at in range(0, count, self._numbers.numel()):
            part = numbers[at : at + self._numbers.numel()]
            self._numbers.zero_()
            self._numbers[: len(part)] = part
            self._set(name, self._numbers)
            self._param.get_state(name, self._codes)
            self._param.get_state(name + SCALE, self._scale)
            codes[at : at + len(part)] = self._codes[: len(part)]
            blocks = scale[at // BLOCK : (at + len(part) - 1) // BLOCK + 1]
            blocks[:] = self._scale[: len(blocks)]
        return codes, scale

    def _set(self, name: str, values: Tensor) -> None:
        try:
            self._param.set_state(name, values)
        except Error as error:
            raise ValueError(f"it cannot be state in 8 bits: {error}") from None


class Coders:
    """The coders of an optimizer's groups, each made when it is needed first. Closed by ``with``."""

    def __init__(self) -> None:
        self._made: dict[Settings, Coder] = {}

    def __enter__(self) -> Coders:
        return self

    def __exit__(self, *_: object) -> None:
        for coder in self._made.values():
            coder.close()
        self._made.clear()

    def of(self, slot: Slot) -> Coder:
        """That of the group of a parameter."""
        settings = slot.group.optimizer
        if settings not in self._made:
            self._made[settings] = Coder(settings)
        return self._made[settings]

    def numbers(self, slot: Slot, name: str, state: Mapping[str, Any]) -> Tensor:
        """The numbers of an array of which a state dictionary has codes, in the shape of these."""
        codes = _local(slot, state[name + CODES])
        scale = state.get(name + SCALE)
        if scale is None:
            raise ValueError(f'it has "{name}{CODES}", but no "{name}{SCALE}"')
        return self.of(slot).numbers(name, codes.reshape(-1), _plain(scale)).reshape(codes.shape)

    def arrays(self, slot: Slot, name: str, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The codes and the scales that a parameter takes, of what a state dictionary has: those, or numbers."""
        if name + CODES in state:
            if slot.memory.is_contiguous() and name + SCALE in state:
                return _local(slot, state[name + CODES]), _plain(state[name + SCALE])
            numbers = flat(self.numbers(slot, name, state), slot)
        else:
            numbers = flat(torch.as_tensor(state[name]), slot)
        codes, scale = self.of(slot).codes(name, numbers.reshape(-1))
        return codes.reshape(numbers.shape), scale


def is_whole(slot: Slot) -> bool:
    """Whether codes of a state dictionary are in the order of memory, and their blocks those of the whole."""
    return slot.memory.is_contiguous() and not slot.part.is_cut


def is_scale(name: str, others: Mapping[str, Any]) -> bool:
    """Whether this is the name of the scales of codes that are among the others."""
    return name.endswith(SCALE) and name.removesuffix(SCALE) + CODES in others


def _local(slot: Slot, array: Any) -> Tensor:
    return slot.part.array(torch.as_tensor(array).detach()).cpu().contiguous()


def _plain(array: Any) -> Tensor:
    return torch.as_tensor(array).detach().cpu().contiguous().to(torch.float32)
