# SPDX-License-Identifier: Apache-2.0
"""What ranks send each other: bytes, over a group of gloo, between the hosts.

Calls of the library and those of the optimizer share one group, so that ranks that go apart see it: each message says
what it belongs to, and all begin with a frame of the same size.
"""

from __future__ import annotations

import ctypes
import enum
import struct
from collections.abc import Sequence
from typing import Any

import torch

from ._gloo import Gloo

_FRAME = 2048  # bytes, into which a message of ga_step fits
_HEAD = struct.Struct("<qq")  # what it belongs to, and the bytes behind the head
_ROOM = _FRAME - _HEAD.size


class Kind(enum.Enum):
    """What a message belongs to. The value says so in an error."""

    MEETING = "was in a call of the optimizer"
    """A call of the optimizer, which says which one."""
    VALUES = "compared values"
    """The values in which ranks differ."""
    PARTS = "added parameters"
    """The parts of parameters that are added."""
    VOTE = "loaded a state"
    """Whether a rank has failed."""
    LIBRARY = "was in a call that its library makes together with all ranks, as discard() is"
    """A call of the library."""


_KINDS = list(Kind)


class Exchange:
    """A group of gloo with all processes of the world."""

    def __init__(self) -> None:
        world: Any = torch.distributed.group.WORLD
        devices = [torch.device("cpu"), torch.device("cuda")]
        self._gloo = Gloo(world, devices, "a rank did not come to the same call of the optimizer")
        self.rank = torch.distributed.get_rank()
        self.ranks = self._gloo.count

    def gather(self, kind: Kind, own: bytes | memoryview) -> list[bytes]:
        """What each rank gives. Raises RuntimeError on all of them if one is in another kind of call."""
        frame = bytearray(_FRAME)
        _HEAD.pack_into(frame, 0, _KINDS.index(kind), len(own))
        frame[_HEAD.size : _HEAD.size + min(len(own), _ROOM)] = own[:_ROOM]
        frames = self._all_gather(frame)
        heads = [_HEAD.unpack_from(found) for found in frames]
        if any(_KINDS[head[0]] is not kind for head in heads):
            raise RuntimeError("the ranks went apart: " + _listed([_KINDS[head[0]].value for head in heads]))
        sizes = [head[1] for head in heads]
        found = [frame[_HEAD.size : _HEAD.size + min(size, _ROOM)] for frame, size in zip(frames, sizes, strict=True)]
        longest = max(sizes) - _ROOM
        if longest > 0:
            rest = bytearray(longest)
            rest[: max(len(own) - _ROOM, 0)] = own[_ROOM:]
            others = self._all_gather(rest)
            found = [
                first + other[: max(size - _ROOM, 0)]
                for first, other, size in zip(found, others, sizes, strict=True)
            ]
        return found

    def all_gather(self, own: memoryview) -> bytes:
        """The transport of the library's own messages."""
        return b"".join(self.gather(Kind.LIBRARY, own))

    def _all_gather(self, own: bytearray) -> list[bytes]:
        found = self._gloo.gather(torch.frombuffer(own, dtype=torch.uint8))
        return [ctypes.string_at(tensor.data_ptr(), tensor.numel()) for tensor in found]


def _listed(words: Sequence[str]) -> str:
    return "; ".join(f"rank {rank} {word}" for rank, word in enumerate(words))
