# SPDX-License-Identifier: Apache-2.0
"""Parameters that this process has as a whole, or a part of: a DTensor, whose local tensor is what the library has."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Runs = list[tuple[int, int]]
"""Elements of an axis, as intervals [begin, end)."""


class Whole:
    """How a parameter, its gradients and its state are those of a tensor that this process has as a whole."""

    is_cut = False
    """Whether ranks have different elements of the parameter."""

    def where(self) -> str:
        """In messages: on which ranks it is."""
        return "is no DTensor"

    def members(self) -> set[int]:
        """The ranks of the world that are known to have it."""
        return {torch.distributed.get_rank()}

    def memory(self, tensor: Tensor) -> Tensor:
        """The tensor whose memory the library has."""
        return tensor

    def box(self, tensor: Tensor) -> tuple[list[int], list[int]]:
        """Where the elements of this rank begin on each axis of the whole, and how many they are."""
        return [0] * tensor.dim(), list(tensor.shape)

    def gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of this memory."""
        return gradient

    def state(self, tensor: Tensor, array: Tensor) -> Tensor:
        """An array of the shape of the parameter's memory, as torch's own optimizer has it."""
        return array

    def array(self, state: Tensor) -> Tensor:
        """What state() has given."""
        return state


WHOLE = Whole()


def is_part(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def local_of(tensor: Tensor) -> Tensor:
    """The elements of a DTensor that this rank has, once they have arrived."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


class Part(Whole):
    """A parameter that is a DTensor."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        source: Any = tensor
        self._name = name
        self._whole = tuple(tensor.shape)
        self._mesh = source.device_mesh
        self._placements = tuple(source.placements)
        self._shards = shards_of(self._placements, name)
        sizes = zip(self._shards, self._mesh.shape, strict=True)
        self.is_cut = any(shard is not None and size > 1 for shard, size in sizes)

    def where(self) -> str:
        """In messages: its mesh."""
        return f"is on {self._mesh}"

    def members(self) -> set[int]:
        """The ranks of its mesh."""
        return set(self._mesh.mesh.flatten().tolist())

    def box(self, tensor: Tensor) -> tuple[list[int], list[int]]:
        """As of Whole, from its mesh and placements. Raises if they do not make one box of it on every rank."""
        coordinate = self._mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f'parameter "{self._name}" is on {self._mesh}, which does not have this rank')
        mesh, whole = tuple(self._mesh.shape), self._whole
        for other in itertools.product(*map(range, mesh)):  # so that all ranks raise, or none does
            for axis, runs in enumerate(box_of(whole, mesh, self._shards, other)):
                if len(runs) > 1:
                    raise ValueError(
                        f'parameter "{self._name}" of shape {list(whole)} is cut by {list(self._placements)} over '
                        f"{self._mesh} into parts that are not adjacent: of axis {axis}, one rank has "
                        f"{', '.join(f'[{begin}, {end})' for begin, end in runs)}"
                    )
        runs_of = box_of(whole, mesh, self._shards, tuple(coordinate))
        first = [runs[0][0] if runs else 0 for runs in runs_of]
        shape = [runs[0][1] - runs[0][0] if runs else 0 for runs in runs_of]
        found = list(local_of(tensor).shape)
        if found != shape:
            raise ValueError(
                f'parameter "{self._name}" of shape {list(whole)} is cut by {list(self._placements)} over {self._mesh}, '
                f"which gives rank {torch.distributed.get_rank()} the shape {shape}, but its part has {found}"
            )
        return first, shape

    def memory(self, tensor: Tensor) -> Tensor:
        """The local tensor."""
        return local_of(tensor)

    def gradient(self, gradient: Tensor) -> Tensor:
        """The local tensor of the gradient, redistributed to the placements of the parameter."""
        given: Any = gradient
        if is_part(gradient) and (given.placements != self._placements or given.device_mesh != self._mesh):
            given = given.redistribute(self._mesh, self._placements)
        return local_of(given)

    def state(self, tensor: Tensor, array: Tensor) -> Tensor:
        """A DTensor of the mesh and placements of the parameter."""
        state = torch.empty_like(tensor, dtype=array.dtype, requires_grad=False)
        local_of(state).copy_(array)
        return state

    def array(self, state: Tensor) -> Tensor:
        """The local tensor of such a DTensor, or what is one already."""
        given: Any = state
        if is_part(state) and (given.placements != self._placements or given.device_mesh != self._mesh):
            raise ValueError(
                f'the state of parameter "{self._name}" is a DTensor of {list(given.placements)} on {given.device_mesh}, '
                f"expected {list(self._placements)} on {self._mesh}: torch.distributed.checkpoint reshards it"
            )
        return local_of(state)


# ---- Placements

Shards = tuple[tuple[int, int] | None, ...]
"""Of each axis of a mesh: the axis of the tensor that it cuts, and into how many pieces that was cut before."""


def shards_of(placements: Sequence[Any], name: str) -> Shards:
    """What placements cut. Raises ValueError if one neither cuts nor replicates."""
    found: list[tuple[int, int] | None] = []
    for placement in placements:
        is_replicated = placement.is_replicate()
        if not is_replicated and (placement.is_partial() or not isinstance(getattr(placement, "dim", None), int)):
            raise ValueError(
                f'parameter "{name}" has the placements {list(placements)}, of which {placement} neither cuts it nor '
                "replicates it: redistribute() it to Shard or Replicate"
            )
        found.append(None if is_replicated else (placement.dim, int(getattr(placement, "split_factor", 1))))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def box_of(
    whole: tuple[int, ...], mesh: tuple[int, ...], shards: Shards, coordinate: tuple[int, ...]
) -> tuple[Runs, ...]:
    """The elements of each axis that a rank has, whose place in the mesh is coordinate."""
    axes: list[Runs] = [[(0, extent)] if extent else [] for extent in whole]
    for shard, size, index in zip(shards, mesh, coordinate, strict=True):
        if shard is not None:
            axis, pieces = shard
            axes[axis] = _cut(axes[axis], pieces, size, index)
    return tuple(axes)


def _cut(runs: Runs, pieces: int, count: int, index: int) -> Runs:
    """Of the elements in these intervals, cut into pieces, the index-th of count chunks of each piece.

    All chunks are as large as the first but for the last ones, as torch.chunk makes them.
    """
    found: Runs = []
    length = sum(end - begin for begin, end in runs)
    for piece in range(pieces):
        at, end = _chunk(length, pieces, piece)
        first, last = _chunk(end - at, count, index)
        found += _slice(runs, at + first, at + last)
    return _joined(found)


def _chunk(length: int, count: int, index: int) -> tuple[int, int]:
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)


def _slice(runs: Runs, first: int, last: int) -> Runs:
    """The first-th to the last-th of the elements."""
    found, at = [], 0
    for begin, end in runs:
        low, high = max(first - at, 0), min(last - at, end - begin)
        if low < high:
            found.append((begin + low, begin + high))
        at += end - begin
    return found


def _joined(runs: Runs) -> Runs:
    found: Runs = []
    for begin, end in runs:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found
