# SPDX-License-Identifier: Apache-2.0
"""Hooks of torch that keep nothing alive."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

Owner = TypeVar("Owner")


class Told(Generic[Owner]):
    """A hook that tells an object, as long as there is one. A copy of it tells nobody."""

    def __init__(self, owner: Owner | None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)

    def owner(self) -> Owner | None:
        """The object, if it is there still."""
        return None if self._owner is None else self._owner()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)
