# SPDX-License-Identifier: Apache-2.0
"""What all watchers have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ._windows import Traces


class Watcher:
    """Follows the loops of some framework, and never disturbs them."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._active = False
        self._at_end: list[Callable[[], None]] = []
        self._replaces = False  # functions of frameworks
        self.remarks: list[str] = []
        """What could not be seen."""
        self.is_limited = False
        """Whether as many windows were watched as was asked for."""
        self.failed = False
        """Whether the watching has ended before the loop."""
        self.knows_losses = True
        """Whether calls of loss functions are seen."""

    def end(self) -> None:
        """Ends the watching."""
        raise NotImplementedError

    def at_end(self, function: Callable[[], None]) -> None:
        """Is called at the end, the last one first."""
        self._at_end.append(function)

    def replace(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        """Until the end, a function of a framework goes to a hook, with the function itself before its arguments."""
        own = vars(owner).get(name)
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs) if self._replaces else original(*args, **kwargs)

        def undo() -> None:
            if vars(owner).get(name) is not call:
                return  # somebody has replaced it since, and may call it
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        setattr(owner, name, call)
        self._replaces = True
        self.at_end(undo)

    def _undo(self) -> None:
        """At the end."""
        self._replaces = False
        while self._at_end:
            self._at_end.pop()()

    def title(self) -> str:
        """What was watched; empty: nothing."""
        raise NotImplementedError

    def traces(self) -> Traces:
        """The windows that were seen."""
        raise NotImplementedError

    def notes(self, is_alone: bool) -> list[str]:
        """Sentences about what was seen. is_alone: the other ranks may have ended."""
        raise NotImplementedError

    def gather(self, own: Any) -> list[Any]:
        """What each rank gives."""
        return [own]

    def knows(self, value: Any) -> bool:
        """Whether a loss is of the framework."""
        raise NotImplementedError

    def name_loss(self, value: Any, weight: Any, reduction: str) -> Any:
        """The program tells what a loss averages over. Returns the loss."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        self._active, self.failed = False, True
        self.remark(
            f"The watching ended early, by a defect of gradaccum.check or a tensor that it does not know: "
            f"{type(error).__name__}: {error}"
        )

    def remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    def _count_window(self, count: int) -> None:
        """After as many windows of an optimizer as was asked for, the watching ends."""
        if self._limit is not None and count >= self._limit:
            self._active, self.is_limited = False, True


Method = TypeVar("Method", bound=Callable[..., Any])


def never_raises(method: Method) -> Method:
    """What a loop calls without knowing: an error ends the watching, and not the loop."""

    @functools.wraps(method)
    def call(self: Watcher, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.fail(error)
            return None

    return cast(Method, call)
