# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold one window together."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any, Self

from . import _raw
from ._transport import AllGather, Transport
from .enums import CommKind, Status
from .errors import Error


class Communicator:
    """One rank of several that hold one window: threads of this process, processes of an MPI program, or GPUs.

    Each rank has a context of its own, to which ``Context.set_communicator()`` gives the communicator. Any
    thread may call any method. A context keeps what it needs, also when the communicator is closed.
    """

    def __init__(self, config: Any, transport: Transport | None = None) -> None:
        self._lock = threading.Lock()
        self._transport = transport  # which a context keeps, too, whose library calls it
        self._users = 0  # calls that read the address
        self._closing = False
        self._address = 0
        self._address = _raw.ga_comm_create(config)

    def __del__(self) -> None:
        if getattr(self, "_address", 0):
            _raw.ga_comm_destroy(self._address)

    @classmethod
    def new_id(cls) -> bytes:
        """What tells one set of local ranks from any other: one thread makes it and gives it to the others."""
        return cls._new_id(CommKind.LOCAL)

    @classmethod
    def new_nccl_id(cls) -> bytes:
        """As ``new_id()`` for ``nccl()``: for one communicator, on all machines.

        The rank that makes it goes on living until all have joined.
        """
        return cls._new_id(CommKind.NCCL)

    @staticmethod
    def _new_id(kind: CommKind) -> bytes:
        buffer = ctypes.create_string_buffer(_raw.GA_COMM_ID_SIZE)
        _raw.ga_comm_unique_id(int(kind), ctypes.addressof(buffer), _raw.GA_COMM_ID_SIZE)
        return buffer.raw

    @classmethod
    def local(cls, id: bytes, rank: int, ranks: int, *, timeout: float = 600) -> Self:
        """Joins the threads of this process that have the same id, and does not wait for them.

        ``rank`` counts from 0 and ``ranks`` says how many there are. A call waits for other ranks for up to
        ``timeout`` seconds.
        """
        return cls._with_id(CommKind.LOCAL, id, rank, ranks, timeout)

    @classmethod
    def nccl(cls, id: bytes, rank: int, ranks: int, *, timeout: float = 600) -> Self:
        """Joins the ranks that have the same id of ``new_nccl_id()``, and waits for them.

        The rank gets the calling thread's current CUDA device.
        """
        return cls._with_id(CommKind.NCCL, id, rank, ranks, timeout)

    @classmethod
    def from_nccl(cls, comm: int, *, timeout: float = 600) -> Self:
        """Is a rank of a communicator of the program's: ``comm`` is the address that its ``ncclComm_t`` is.

        It must live as long as this one. ``abort()``, and a failure that leaves this one of no further use,
        end it with ``ncclCommAbort``.
        """
        if not comm:
            raise ValueError("comm was 0")
        return cls(_config(CommKind.NCCL, nccl_comm=comm, timeout=timeout))

    @classmethod
    def _with_id(cls, kind: CommKind, id: bytes, rank: int, ranks: int, timeout: float) -> Self:
        if len(id) != _raw.GA_COMM_ID_SIZE:
            raise ValueError(f"the id has {len(id)} bytes, expected {_raw.GA_COMM_ID_SIZE}")
        buffer = ctypes.create_string_buffer(id, len(id))
        return cls(_config(kind, id=ctypes.addressof(buffer), rank=rank, ranks=ranks, timeout=timeout))

    @classmethod
    def mpi(cls, comm: Any, *, timeout: float = 600) -> Self:
        """Joins the processes of an MPI program, for which it waits.

        ``comm`` is a communicator of mpi4py, or its number as ``MPI_Comm_c2f`` gives it; it is duplicated.
        """
        number = comm.py2f() if hasattr(comm, "py2f") else comm
        return cls(_config(CommKind.MPI, mpi_comm=number, timeout=timeout))

    @classmethod
    def from_all_gather(cls, rank: int, ranks: int, all_gather: AllGather) -> Self:
        """Is a rank of a transport of the program's, for ``CommShard.PARAMETERS``, which only gathers.

        ``all_gather`` is called with the bytes of this rank, a memoryview that is not to be kept, and returns those of
        all ranks, as many of each, one behind the other. It waits for the other ranks, has its own time limit, and must
        not use the context. What it raises is the text of an ``Error``, after which the communicator is of no further
        use.
        """
        transport = Transport(ranks, all_gather)
        config = _config(CommKind.TABLE, rank=rank, ranks=ranks)
        _raw.set_comm_table(config, transport.address)
        return cls(config, transport)

    # Calls that wait for other ranks last long, and abort() must be possible meanwhile: closing waits until
    # no call reads the address, without a lock that they hold.
    @contextlib.contextmanager
    def _in_use(self) -> Iterator[int]:
        with self._lock:
            if self._closing or not self._address:
                raise Error(Status.INVALID_STATE, "the communicator is closed")
            self._users += 1
        try:
            yield self._address
        finally:
            with self._lock:
                self._users -= 1
                self._free()

    def _free(self) -> None:
        if self._closing and self._users == 0 and self._address:
            _raw.ga_comm_destroy(self._address)
            self._address = 0

    def _size(self) -> tuple[int, int]:
        with self._in_use() as comm:
            rank, ranks = _raw.ga_comm_size(comm)
            return rank, ranks

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
        with self._in_use() as comm:
            _raw.ga_comm_abort(comm)

    def close(self) -> None:
        """Leaves, as soon as no context and no call needs the communicator. A second call does nothing."""
        with self._lock:
            self._closing = True
            self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _config(kind: CommKind, **fields: Any) -> Any:
    config = _raw.ga_comm_config(int(kind))
    for name, value in fields.items():
        setattr(config, name, value)
    return config
