# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold one window together."""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType
from typing import Any, Self

from . import _raw
from .enums import CommKind, Status
from .errors import Error


class Communicator:
    """One rank of several that hold one window: threads of this process, or processes of an MPI program.

    Each rank has a context of its own, to which ``Context.set_communicator()`` gives the communicator. Any
    thread may call any method. A context keeps what it needs, also when the communicator is closed.
    """

    def __init__(self, config: Any) -> None:
        self._lock = threading.Lock()
        self._users = 0  # calls that read the address
        self._closing = False
        self._address = 0
        self._address = _raw.ga_comm_create(config)

    def __del__(self) -> None:
        if getattr(self, "_address", 0):
            _raw.ga_comm_destroy(self._address)

    @staticmethod
    def new_id() -> bytes:
        """What tells one set of local ranks from any other: one thread makes it and gives it to the others."""
        buffer = ctypes.create_string_buffer(_raw.GA_COMM_ID_SIZE)
        _raw.ga_comm_unique_id(int(CommKind.LOCAL), ctypes.addressof(buffer), _raw.GA_COMM_ID_SIZE)
        return buffer.raw

    @classmethod
    def local(cls, id: bytes, rank: int, ranks: int, *, timeout: float = 600) -> Self:
        """Joins the threads of this process that have the same id, and does not wait for them.

        ``rank`` counts from 0 and ``ranks`` says how many there are. A call waits for other ranks for up to
        ``timeout`` seconds.
        """
        if len(id) != _raw.GA_COMM_ID_SIZE:
            raise ValueError(f"the id has {len(id)} bytes, expected {_raw.GA_COMM_ID_SIZE}")
        config = _raw.ga_comm_config(int(CommKind.LOCAL))
        buffer = ctypes.create_string_buffer(id, len(id))
        config.id = ctypes.addressof(buffer)
        config.rank = rank
        config.ranks = ranks
        config.timeout = timeout
        return cls(config)

    @classmethod
    def mpi(cls, comm: Any, *, timeout: float = 600) -> Self:
        """Joins the processes of an MPI program, for which it waits.

        ``comm`` is a communicator of mpi4py, or its number as ``MPI_Comm_c2f`` gives it; it is duplicated.
        """
        config = _raw.ga_comm_config(int(CommKind.MPI))
        config.mpi_comm = comm.py2f() if hasattr(comm, "py2f") else comm
        config.timeout = timeout
        return cls(config)

    # Calls that wait for other ranks last long, and abort() must be possible meanwhile: closing waits until
    # no call reads the address, without a lock that they hold.
    def _enter(self) -> int:
        with self._lock:
            if self._closing or not self._address:
                raise Error(Status.INVALID_STATE, "the communicator is closed")
            self._users += 1
            return self._address

    def _exit(self) -> None:
        with self._lock:
            self._users -= 1
            self._free()

    def _free(self) -> None:
        if self._closing and self._users == 0 and self._address:
            _raw.ga_comm_destroy(self._address)
            self._address = 0

    def _size(self) -> tuple[int, int]:
        comm = self._enter()
        try:
            rank, ranks = _raw.ga_comm_size(comm)
            return rank, ranks
        finally:
            self._exit()

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self._size()[0]

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self._size()[1]

    def abort(self) -> None:
        """Has calls that wait for other ranks fail now, and all later ones; of local ranks those of every rank."""
        comm = self._enter()
        try:
            _raw.ga_comm_abort(comm)
        finally:
            self._exit()

    def close(self) -> None:
        """Leaves, as soon as no context and no call needs the communicator. A second call does nothing."""
        with self._lock:
            self._closing = True
            self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
