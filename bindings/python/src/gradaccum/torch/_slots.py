# SPDX-License-Identifier: Apache-2.0
"""Parameters of torch beside those of the library, and gradients that fit them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import Dtype, Group, MicroBatch, Param
from ._parts import Whole

TORCH = {
    Dtype.F32: torch.float32, Dtype.F64: torch.float64, Dtype.F16: torch.float16, Dtype.BF16: torch.bfloat16,
    Dtype.I64: torch.int64, Dtype.U8: torch.uint8,
}  # fmt: skip
_NOTHING = torch.zeros(1, device="cpu")  # the address of tensors without an element, which torch gives none


class Slot:
    """A parameter of torch, and that of the library with the same memory."""

    __slots__ = (
        "address", "dtype", "gradients", "group", "hook", "is_whole", "own", "part", "place", "rows", "shape", "stride",
        "tensor", "tells", "touched", "version",
    )  # fmt: skip

    def __init__(
        self, tensor: Tensor, part: Whole, own: Param, group: Group, rows: bool, follows: bool
    ) -> None:
        self.tensor = tensor
        self.group = group
        self.part = part
        self.own = own
        self.rows = rows
        self.place = own.slot
        self.dtype = tensor.dtype
        memory = self.memory
        self.shape = memory.shape
        self.stride = memory.stride()
        self.address = memory.data_ptr()
        self.version = self.writes()
        self.touched = False  # whether it has a gradient in this window
        self.gradients = 0  # that the open micro-batch has given it
        self.is_whole: bool | None = None  # whether a micro-batch gives it one gradient; None: not known yet
        # Whether the library has to be told if the program writes the parameter.
        self.tells = not follows and any(info.name == "master" for info in own.states)
        self.hook: Any = None

    @property
    def memory(self) -> Tensor:
        """The tensor whose memory the library has."""
        return self.part.memory(self.tensor)

    def writes(self) -> int:
        """A number that grows if the program writes the parameter; torch counts for a DTensor and its memory apart."""
        return self.tensor._version + self.memory._version


def mark_written(slots: list[Slot]) -> None:
    """Tells autograd that the library has written parameters."""
    torch.autograd.graph.increment_version([slot.tensor for slot in slots])
    for slot in slots:
        slot.version = slot.writes()


def address_of(gradient: Tensor) -> int:
    """The address of its elements; one that is not read if there is none, since 0 stands for no gradient."""
    return gradient.data_ptr() or _NOTHING.data_ptr()


def is_sparse(gradient: Tensor | None) -> bool:
    """Whether it has some rows alone."""
    return gradient is not None and gradient.layout is not torch.strided


def fits(gradient: Tensor, slot: Slot) -> bool:
    """Whether it has the dtype and the memory order of its parameter."""
    if gradient.shape != slot.shape:
        raise RuntimeError(
            f'the gradient of parameter "{slot.own.name}" had the shape {list(gradient.shape)}, expected '
            f"{list(slot.shape)}: the parameter has changed while a window was open"
        )
    return gradient.dtype is slot.dtype and gradient.stride() == slot.stride and not gradient.is_neg()


def like(gradient: Tensor, slot: Slot) -> Tensor:
    """The gradient in the dtype and the memory order of its parameter."""
    return torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=gradient.device).copy_(
        gradient
    )


def add(micro: MicroBatch, slot: Slot, gradient: Tensor) -> list[Tensor]:
    """Adds a gradient to the open micro-batch. Returns what is to live until its end."""
    gradient = slot.part.gradient(gradient.detach())
    slot.touched = True
    if gradient.layout is torch.sparse_coo:
        if not slot.rows:
            raise ValueError(
                f'parameter "{slot.own.name}" has a sparse gradient: give its group "rows": gradaccum.Rows.LAZY '
                "(or DENSE)"
            )
        if gradient.sparse_dim() != 1:
            raise ValueError(f'the gradient of parameter "{slot.own.name}" is sparse in more than its rows')
        indices = gradient._indices()[0].contiguous()
        values = gradient._values().to(slot.tensor.dtype).contiguous()
        micro.accumulate_rows(slot.own, indices, values)
        return [indices, values]
    if gradient.layout is not torch.strided:
        raise ValueError(f'the gradient of parameter "{slot.own.name}" has the layout {gradient.layout}')
    if not fits(gradient, slot):
        gradient = like(gradient, slot)
    micro.accumulate(slot.own, address_of(gradient), owner=gradient)
    return [gradient]


def flat(array: Tensor, slot: Slot) -> Tensor:
    """An array of state in the order of memory."""
    array = slot.part.array(array.detach()).cpu()
    memory = slot.memory
    if array.numel() != memory.numel() or memory.is_contiguous():
        return array.contiguous()
    found = torch.empty(slot.own.shape, dtype=array.dtype)
    found.as_strided(memory.shape, slot.stride).copy_(array)
    return found
