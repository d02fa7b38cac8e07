# SPDX-License-Identifier: Apache-2.0
"""What the package raises."""

from __future__ import annotations

from . import _library, _raw
from .enums import Status


class Error(RuntimeError):
    """A call that the library refused, with its message, or that failed.

    A call that fails has changed nothing, unless the status is FAULT.
    """

    status: Status | int
    """Why the call failed; an int for a status of a newer library."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = Status(status) if status in Status.__members__.values() else status

    def __str__(self) -> str:
        return _library.explain(str(self.args[1]))


if not _raw.is_main_interpreter():
    raise ImportError("gradaccum works in the main interpreter of a process only; use threads or processes")
_raw.set_error_class(Error)
