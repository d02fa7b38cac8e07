# SPDX-License-Identifier: Apache-2.0
"""What ranks send each other: bytes, over a group of gloo, between the hosts.

Calls of the library and those of the optimizer share one group, so that ranks that go apart see it: each message says
what it belongs to, and all begin with a frame of the same size.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any

import torch

_FRAME = 2048  # bytes, into which a message of ga_step fits
_HEAD = struct.Struct("<qq")  # what it belongs to, and the bytes behind the head
_ROOM = _FRAME - _HEAD.size


class Kind(enum.IntEnum):
    """What a message belongs to."""

    MEETING = 0
    """A call of the optimizer, which says which one."""
    VALUES = 1
    """The values in which ranks differ."""
    PARTS = 2
    """The parts of parameters that are added."""
    VOTE = 3
    """Whether a rank has failed."""
    LIBRARY = 4
    """A call of the library."""


_WORDS = (
    "was in a call of the optimizer", "compared values", "added parameters", "loaded a state",
    "was in a call that its library makes together with all ranks, as discard() is",
)  # fmt: skip


class Exchange:
    """A group of gloo with all processes of the world."""

    def __init__(self) -> None:
        distributed: Any = torch.distributed
        self.rank: int = distributed.get_rank()
        self.ranks: int = distributed.get_world_size()
        self._group = distributed.new_group(backend="gloo", timeout=_timeout(distributed.group.WORLD))

    def gather(self, kind: Kind, own: bytes | memoryview) -> list[bytes]:
        """What each rank gives. Raises RuntimeError on all of them if one is in another kind of call."""
        frame = bytearray(_FRAME)
        _HEAD.pack_into(frame, 0, kind, len(own))
        frame[_HEAD.size : _HEAD.size + min(len(own), _ROOM)] = own[:_ROOM]
        frames = self._all_gather(frame)
        heads = [_HEAD.unpack_from(found) for found in frames]
        if any(head[0] != kind for head in heads):
            raise RuntimeError("the ranks went apart: " + _listed([_WORDS[head[0]] for head in heads]))
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
        return [bytes(one) for one in found]

    def all_gather(self, own: memoryview) -> bytes:
        """The transport of the library's own messages."""
        return b"".join(self.gather(Kind.LIBRARY, own))

    def _all_gather(self, own: bytearray) -> list[bytearray]:
        distributed: Any = torch.distributed
        found = [bytearray(len(own)) for _ in range(self.ranks)]
        tensors = [torch.frombuffer(memory, dtype=torch.uint8) for memory in found]
        try:
            distributed.all_gather(tensors, torch.frombuffer(own, dtype=torch.uint8), group=self._group)
        except Exception as error:
            raise RuntimeError(
                f"a rank did not come to the same call of the optimizer as this one, or has ended: {error}"
            ) from error
        return found


def _listed(words: Sequence[str]) -> str:
    return "; ".join(f"rank {rank} {word}" for rank, word in enumerate(words))


def _timeout(group: Any) -> Any:
    """That of the default group; None, the default of gloo, if it does not tell."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return None
