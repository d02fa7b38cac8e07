# SPDX-License-Identifier: Apache-2.0
"""The parameters of an optimizer of torch, as the library has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from .. import Context, Group, ParamOptions, Rows
from ._kinds import Kind, state_dtype_of
from ._parts import Whole
from ._ranks import Alone
from ._slots import Slot

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_DTYPE = attrgetter("dtype")
_GRAD = attrgetter("grad")
_COUNT, _IS_CONTIGUOUS = Tensor.numel, Tensor.is_contiguous


CUT = ("batch_axes", "output_axis", "split_axis", "matrix_parts")
"""The keys of a group that say how Muon cuts its parameters into matrices: see ParamOptions."""


def cut_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says of it."""
    return {key: int(group.get(key, 0)) for key in CUT} if any(key in group for key in CUT) else {}


@dataclasses.dataclass
class _Group:
    """A group of the library, and what that of torch was made with."""

    own: Group
    size: int  # parameters
    cut: dict[str, Any]
    state_dtype: str | None
    known: tuple[Any, ...]  # the hyper-parameters that the library has


class Parameters:
    """Parameters and groups of the library, beside those in param_groups of torch, which are the truth.

    options: of all parameters. by_shape: the optimizer goes by rows and columns.
    """

    def __init__(self, kind: Kind, options: ParamOptions, device: torch.device, by_shape: bool) -> None:
        self.slots: list[Slot] = []
        self.tensors: list[Tensor] = []  # of the slots
        self._kind = kind
        self._options = options
        self._device = device
        self._by_shape = by_shape
        self._dtypes: list[torch.dtype] = []
        self._counts: list[int] = []
        self._dense = True  # whether all are contiguous
        self._are_whole = True  # whether none is a DTensor
        self._groups: list[_Group] = []

    def add(self, context: Context, group: dict[str, Any], ranks: Alone) -> None:
        """Adds a group, as a whole or not at all. ranks: may refuse parameters."""
        self._kind.check(group)
        names = group.get("param_names") or [
            f"param{len(self.slots) + i}" for i in range(len(group["params"]))
        ]
        is_named = "param_names" in group
        parts = [
            ranks.part_of(tensor, name, is_named) for tensor, name in zip(group["params"], names, strict=True)
        ]
        self._check_whole(names, parts)
        views = [
            self._view(part.memory(tensor), group) for tensor, part in zip(group["params"], parts, strict=True)
        ]
        if "state_dtype" in group:
            group["state_dtype"] = state_dtype_of(group)  # as a string, for torch.load
        own_group = context.add_group(self._kind.settings(group))
        if (schedule := self._kind.schedule(group)) is not None:
            own_group.set_schedule(schedule)
        rows = Rows(group.get("rows", Rows.NONE))
        if "rows" in group:
            group["rows"] = int(rows)  # what torch.load takes without further ado
        options = dataclasses.replace(self._options, rows=rows) if rows else self._options
        cut = cut_of(group)
        if cut:
            options = dataclasses.replace(options, cut_matrices=True, **cut)
        added: list[Slot] = []
        try:
            for tensor, part, view, name in zip(group["params"], parts, views, names, strict=True):
                own = context.add_param(own_group, name, view, options=options)
                added.append(Slot(tensor, part, own, own_group, rows != Rows.NONE, options.follow_data))
            ranks.track(added)
        except BaseException:
            for slot in added:
                slot.own.remove()
            self._index(context)
            raise
        self.slots += added
        self._index(context)
        self._groups.append(_Group(own_group, len(views), cut, state_dtype_of(group), self._kind.values(group)))

    def _index(self, context: Context) -> None:
        self.tensors = [slot.tensor for slot in self.slots]
        memories = [slot.memory for slot in self.slots]
        self._dtypes = [memory.dtype for memory in memories]
        self._counts = [memory.numel() for memory in memories]
        # Places in the library are those of the list, unless a group was refused half-way.
        in_order = [slot.place for slot in self.slots] == list(range(context.slot_count))
        self._dense = in_order and all(memory.is_contiguous() and memory.numel() for memory in memories)
        self._are_whole = all(memory is tensor for memory, tensor in zip(memories, self.tensors, strict=True))

    def _check_whole(self, names: Sequence[str], parts: Sequence[Whole]) -> None:
        """Raises if the optimizer cannot update a part of a parameter."""
        if not self._kind.needs_whole:
            return
        for name, part in zip(names, parts, strict=True):
            if part.is_cut:
                raise ValueError(
                    f'parameter "{name}" is cut between ranks, but {self._kind.optimizer.name} needs whole parameters: '
                    "leave it whole on every rank of one mesh (Replicate, in place of fully_shard() or a plan that "
                    "cuts it), or give it another optimizer, as AdamW"
                )

    def _view(self, tensor: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The memory of a parameter as a dense tensor: its dimensions in the order of the memory."""
        if tensor.dtype not in _FLOATS:
            raise TypeError(f"a parameter was {tensor.dtype}, expected float32, float64, float16 or bfloat16")
        if tensor.layout != torch.strided:
            raise TypeError("a parameter was sparse, expected a dense tensor")
        if tensor.device != self._device:
            raise ValueError(f"a parameter was on {tensor.device}, but the first one is on {self._device}")
        if self._device.type not in ("cpu", "cuda"):
            raise ValueError(f"parameters were on {self._device}, expected the CPU or CUDA")
        plain = tensor.detach()
        if plain.is_contiguous():
            return plain
        strides: Sequence[int] = plain.stride()
        order = sorted(range(plain.dim()), key=lambda axis: (-strides[axis], axis))
        plain = plain.permute(order)
        if not plain.is_contiguous():
            raise ValueError(
                f"a parameter of shape {list(tensor.shape)} had strides {tensor.stride()}, which are not dense"
            )
        if self._by_shape or Rows(group.get("rows", Rows.NONE)):
            raise ValueError(
                f"a parameter of shape {list(tensor.shape)} had strides {tensor.stride()}, but this optimizer goes "
                "by rows and columns: make it contiguous()"
            )
        return plain

    def look_at_groups(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises if the program has taken groups away, or put other parameters into one."""
        if len(param_groups) != len(self._groups):
            raise RuntimeError(
                f"param_groups has {len(param_groups)} groups, but the optimizer has {len(self._groups)}: groups "
                "cannot be taken away, and add_param_group() adds one; for other parameters make a new optimizer"
            )
        for i, (group, made) in enumerate(zip(param_groups, self._groups, strict=True)):
            if state_dtype_of(group) != made.state_dtype:
                raise RuntimeError(
                    f"group {i} was made with state_dtype {made.state_dtype!r}, and now has {state_dtype_of(group)!r}: "
                    "the dtype of state cannot change"
                )
            if cut_of(group) != made.cut:
                raise RuntimeError(
                    f"group {i} was made with {made.cut or 'no cut'}, and now has {cut_of(group) or 'none'}: how Muon "
                    "cuts parameters into matrices cannot change"
                )
        tensors = [tensor for group in param_groups for tensor in group["params"]]
        if len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors)):
            return
        at = 0
        for i, (group, made) in enumerate(zip(param_groups, self._groups, strict=True)):
            if len(group["params"]) != made.size or not all(map(is_, group["params"], self.tensors[at:])):
                raise RuntimeError(
                    f'the list "params" of group {i} was changed, but the optimizer has the parameters that the group '
                    "was made of: add_param_group() adds others, requires_grad_(False) freezes one, and for the rest "
                    "make a new optimizer"
                )
            at += made.size

    def look_at_memory(self, is_expected: Callable[[Slot], bool], *, may_move: bool) -> None:
        """Tells the library which parameters have moved or were written; raises if they may not.

        is_expected: whether a parameter that was written holds what the library has rounded.
        """
        for slot in self.slots:
            tensor = slot.memory
            if tensor.shape != slot.shape or tensor.stride() != slot.stride or tensor.dtype is not slot.dtype:
                raise RuntimeError(
                    f'parameter "{slot.own.name}" was {slot.dtype} of shape {list(slot.shape)} and strides '
                    f"{slot.stride}, and is another one now: convert a model before its optimizer is made"
                )
            if tensor.data_ptr() != slot.address:
                if not may_move:
                    raise RuntimeError(f'parameter "{slot.own.name}" has moved while a window was open')
                slot.own.bind(self._view(tensor, {}))
                slot.address = tensor.data_ptr()
            if slot.writes() != slot.version:
                if slot.tells and not is_expected(slot):
                    if not may_move:
                        raise RuntimeError(f'parameter "{slot.own.name}" was written while a window was open')
                    slot.own.changed()
                slot.version = slot.writes()

    def gradients(self) -> list[Any]:
        """What is in .grad, as gradients of the memory that the library has."""
        found = list(map(_GRAD, self.tensors))
        if self._are_whole:
            return found
        return [
            None if gradient is None else slot.part.gradient(gradient)
            for gradient, slot in zip(found, self.slots, strict=True)
        ]

    def are_plain(self, gradients: list[Tensor]) -> bool:
        """Whether all parameters have gradients, dense and of their dtype and size: seen with few calls."""
        try:
            return (
                self._dense
                and list(map(_DTYPE, gradients)) == self._dtypes
                and list(map(_COUNT, gradients)) == self._counts
                and all(map(_IS_CONTIGUOUS, gradients))
            )
        except (AttributeError, TypeError, RuntimeError):  # of None; of a sparse tensor
            return False

    def push(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Passes on what was written to param_groups."""
        self.look_at_groups(param_groups)
        for group, made in zip(param_groups, self._groups, strict=True):
            values = self._kind.values(group)
            if values != made.known:
                made.own.optimizer = self._kind.settings(group)
                if "warmup_steps" in self._kind.keys:
                    made.own.set_schedule(self._kind.schedule(group))
                made.known = values

    def values(self) -> dict[str, Any]:
        """The hyper-parameters of all groups, by names for messages."""
        return {
            f"{key} of group {i}": value
            for i, made in enumerate(self._groups)
            for key, value in zip(self._kind.keys, made.known, strict=True)
        }
