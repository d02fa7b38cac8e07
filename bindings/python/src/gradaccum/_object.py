# SPDX-License-Identifier: Apache-2.0
"""What a context counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .context import Context


class ContextObject:
    """A group, a parameter or a layer of a context."""

    __slots__ = ("context", "id")

    context: Context
    """Its context."""
    id: int
    """Its number: 0, 1, 2, ... in the order in which those of its kind were added."""

    def __init__(self, context: Context, id: int) -> None:
        self.context = context
        self.id = id

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.context is self.context and other.id == self.id

    def __hash__(self) -> int:
        return hash((id(self.context), self.id))
