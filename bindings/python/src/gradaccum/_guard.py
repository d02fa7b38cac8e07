# SPDX-License-Identifier: Apache-2.0
"""A context of C, and who may be in it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from . import _native, _raw
from .enums import Status
from .errors import Error
from .options import Config


class Handle:
    """A context of C, which lives as long as the context or a view of its memory."""

    __slots__ = ("__weakref__", "address", "log", "lent", "lent_gradients", "tell", "transports")

    def __init__(self, config: Config, tell: Callable[[int], object] | None) -> None:
        self.address = 0
        self.log = config.log
        self.tell = tell
        self.lent: dict[int, Any] = {}  # of each parameter, the loan of its memory
        self.lent_gradients: list[Any] = []  # which threads of the library may still read
        self.transports: list[Any] = []  # of communicators, which the context of C may call until it ends
        struct = config._write()
        if self.log is not None:
            struct.log = _raw.log_function()
            struct.log_user = id(self.log)
        if tell is not None:
            struct.on_param_done = _raw.param_done_function()
            struct.on_param_done_user = id(tell)
        self.address = _raw.ga_context_create(struct)

    def __del__(
        self,
        destroy: Callable[[int], None] = _native.ga_context_destroy,
        runs_callback: Callable[[object], bool] = _native.runs_callback,
    ) -> None:
        if self.address and runs_callback(self.tell):  # the context would wait for this thread, its own
            threading.Thread(target=self._destroy, daemon=False).start()
        elif self.address:
            destroy(self.address)

    def _destroy(self) -> None:
        _native.ga_context_destroy(self.address)


# Threads of the library call on_param_done, but not while the interpreter ends, and not in a child.
_native.begin_callbacks()
atexit.register(_native.end_callbacks)
if sys.platform != "win32":  # which has no fork()
    os.register_at_fork(after_in_child=_native.forget_callbacks)


class Guard:
    """Lets one thread at a time into a context."""

    __slots__ = ("address", "lock", "process", "tell", "thread")

    def __init__(self, address: int, tell: Callable[[int], object] | None) -> None:
        self.address = address
        self.tell = tell
        self.lock = threading.Lock()
        self.thread = 0
        self.process = os.getpid()

    def __enter__(self, ident: Callable[[], int] = threading.get_ident) -> int:
        if not self.lock.acquire(False):
            self.refuse()
        address = self.address
        if not address:
            self.lock.release()
            self.refuse()
        self.thread = ident()
        return address

    def __exit__(self, *_: object) -> None:
        self.thread = 0
        self.lock.release()

    def is_in_callback(self) -> bool:
        """Whether this thread runs a callback of the context."""
        return self.thread == threading.get_ident() or _native.runs_callback(self.tell)

    def refuse(self) -> NoReturn:
        """Raises the reason why this thread may not use the context."""
        if self.is_in_callback():
            why = "a callback used the context whose call it was called from"
        elif not self.address:
            why = "the context is closed"
        elif self.process != os.getpid():
            why = "the context belongs to the process that was forked; create one in this process"
        else:
            why = "the context is in use by another thread; one thread at a time uses a context"
        raise Error(Status.INVALID_STATE, why)
