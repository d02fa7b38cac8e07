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
from ._parts import WHOLE, is_part
from ._slots import Slot, flat

BLOCK = 256
"""The most elements that share a scale."""
CODES = "_codes"
SCALE = "_scale"
"""What the names of the two tensors end with that a state dictionary has of an array of state in 8 bits.

The codes are not under the name of the array, since an optimizer of torch would take them for numbers there.
"""
_SIZE = 1 << 18  # elements of a coder's parameter


class Coder:
    """Translates between codes and numbers, by a parameter of its own whose state it writes and reads.

    block: how many elements share a scale. Raises ValueError if the optimizer has no codes.
    """

    def __init__(self, settings: Settings, block: int) -> None:
        self._context = Context(Config(num_threads=1))
        # What a precision needs of a device or a processor may not be here, and no step is made.
        settings = dataclasses.replace(settings, state_dtype=Dtype.STATE_8BIT, ns_precision=Precision.F32)
        self._block = block
        rows = _SIZE // block
        self._memory = torch.zeros(rows, block, device="cpu")
        try:
            self._param: Param = self._context.add_param(self._context.add_group(settings), "state", self._memory)
            self._param.set_part((rows, block), (0, 0))  # whose blocks are its rows
        except Error as error:
            self._context.close()
            raise ValueError(f"it has codes, but its optimizer keeps no state in 8 bits: {error}") from None
        self._codes = torch.zeros(_SIZE, dtype=torch.uint8, device="cpu")
        self._scale = torch.zeros(rows, device="cpu")
        self._numbers = torch.zeros(_SIZE, device="cpu")

    def close(self) -> None:
        """Frees the context."""
        self._context.close()

    def has(self, name: str) -> bool:
        """Whether the optimizer keeps this array in 8 bits."""
        return any(info.name == name and info.dtype == Dtype.U8 for info in self._param.states)

    def numbers(self, name: str, codes: Tensor, scale: Tensor) -> Tensor:
        """The numbers that codes stand for, in one dimension as the codes are. Raises ValueError."""
        count = codes.numel()
        found = torch.empty(count, device="cpu")
        for at in range(0, count, self._codes.numel()):
            part = codes[at : at + self._codes.numel()]
            blocks = scale[at // self._block : (at + len(part) - 1) // self._block + 1]
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
        scale = torch.empty(-(-count // self._block), device="cpu")
        for at in range(0, count, self._numbers.numel()):
            part = numbers[at : at + self._numbers.numel()]
            self._numbers.zero_()
            self._numbers[: len(part)] = part
            self._set(name, self._numbers)
            self._param.get_state(name, self._codes)
            self._param.get_state(name + SCALE, self._scale)
            codes[at : at + len(part)] = self._codes[: len(part)]
            blocks = scale[at // self._block : (at + len(part) - 1) // self._block + 1]
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
        self._made: dict[tuple[Settings, int], Coder] = {}

    def __enter__(self) -> Coders:
        return self

    def __exit__(self, *_: object) -> None:
        for coder in self._made.values():
            coder.close()
        self._made.clear()

    def of(self, slot: Slot, block: int = BLOCK) -> Coder:
        """That of the group of a parameter."""
        settings = slot.group.optimizer
        if (settings, block) not in self._made:
            self._made[settings, block] = Coder(settings, block)
        return self._made[settings, block]

    def decoded(self, slot: Slot, name: str, codes: Tensor, scale: Tensor) -> Tensor:
        """The numbers that codes of an array stand for, in one dimension."""
        return self.of(slot, _block(codes, scale)).numbers(name, codes.reshape(-1), scale)

    def numbers(self, slot: Slot, name: str, state: Mapping[str, Any]) -> Tensor:
        """The numbers of an array of which a state dictionary has codes, in the shape of these."""
        codes, scale = state[name + CODES], state.get(name + SCALE)
        if scale is None:
            raise ValueError(f'it has "{name}{CODES}", but no "{name}{SCALE}"')
        if is_part(codes) or is_part(scale):
            raise ValueError("its codes are a DTensor, but parts take numbers, as state_dict(as_numbers=True) has them")
        codes = _plain(codes)
        return self.decoded(slot, name, codes, _plain(scale).to(torch.float32)).reshape(codes.shape)

    def arrays(self, slot: Slot, name: str, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The codes and the scales that a parameter takes, of what a state dictionary has: those, or numbers."""
        counts = {info.name: info.count for info in slot.own.states}
        scales = counts[name + SCALE]
        if name + CODES in state:
            codes, given = state[name + CODES], state.get(name + SCALE)
            if is_whole(slot) and given is not None and given.numel() == scales:
                return _plain(codes), _plain(given).to(torch.float32)
            numbers = flat(self.numbers(slot, name, state), slot)
        else:
            numbers = flat(torch.as_tensor(state[name]), slot)
        codes, scale = self.of(slot, _block_of(counts[name], scales)).codes(name, numbers.reshape(-1))
        return codes.reshape(numbers.shape), scale


def is_whole(slot: Slot) -> bool:
    """Whether codes of a state dictionary are in the order of memory, and their blocks those of the whole."""
    return slot.memory.is_contiguous() and slot.part is WHOLE


def is_scale(name: str, others: Mapping[str, Any]) -> bool:
    """Whether this is the name of the scales of codes that are among the others."""
    return name.endswith(SCALE) and name.removesuffix(SCALE) + CODES in others


def _block_of(count: int, scales: int) -> int:
    """Of how many elements a block has a scale, the last block perhaps of less; 0: there is no such number."""
    sizes = (16, 32, 64, 128, BLOCK)
    return next((size for size in sizes if -(-count // size) == scales), 0)


def _block(codes: Tensor, scale: Tensor) -> int:
    block = _block_of(codes.numel(), scale.numel())
    if codes.dtype != torch.uint8 or block == 0:
        raise ValueError(
            f"it has {codes.numel()} codes of {codes.dtype} and {scale.numel()} scales, expected codes of torch.uint8 "
            f"and a scale for {BLOCK} of them, or for a smaller power of two"
        )
    return block


def _plain(array: Any) -> Tensor:
    return torch.as_tensor(array).detach().cpu().contiguous()
