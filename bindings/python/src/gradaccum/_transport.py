# SPDX-License-Identifier: Apache-2.0
"""A transport whose only function is a callable of the program: a ga_comm_table of ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from .enums import Dtype

AllGather = Callable[[memoryview], bytes | bytearray | memoryview]
"""Takes the bytes of this rank and returns those of all ranks, one behind the other."""

_FAILED = 1

_AllToAll = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32,
    ctypes.c_void_p,
)  # fmt: skip
_AllGather = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32,
    ctypes.c_void_p,
)  # fmt: skip
_Broadcast = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p
)
_ErrorText = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)


class _Table(ctypes.Structure):
    """ga_comm_table of comm.h."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("user", ctypes.c_void_p),
        ("all_to_all", _AllToAll),
        ("all_gather", _AllGather),
        ("broadcast", _Broadcast),
        ("abort", ctypes.c_void_p),
        ("error_text", _ErrorText),
        ("all_reduce", ctypes.c_void_p),
        ("reduce_scatter", ctypes.c_void_p),
        ("any_thread", ctypes.c_int32),
        ("on_stream", ctypes.c_int32),
    )


class Transport:
    """The table. It must live as long as the library may call it: as the contexts that use the communicator."""

    def __init__(self, ranks: int, all_gather: AllGather) -> None:
        self._ranks = ranks
        self._all_gather = all_gather
        self._text = ctypes.create_string_buffer(1)
        self._table = _Table(
            struct_size=ctypes.sizeof(_Table),
            all_to_all=_AllToAll(lambda *_: self._refuse("all_to_all")),
            all_gather=_AllGather(self._gather),
            broadcast=_Broadcast(lambda *_: self._refuse("broadcast")),
            error_text=_ErrorText(lambda *_: ctypes.addressof(self._text)),
        )
        self.address = ctypes.addressof(self._table)

    def _fail(self, text: str) -> int:
        self._text = ctypes.create_string_buffer(text.encode("utf-8", "replace"))
        return _FAILED

    def _refuse(self, function: str) -> int:
        return self._fail(
            f"the communicator has no {function}, because Communicator.from_all_gather() made it: all_gather is enough "
            "for CommShard.PARAMETERS alone"
        )

    def _gather(
        self, _: Any, send: int | None, recv: int | None, stride: int, count: int, dtype: int, __: Any
    ) -> int:
        size = count * Dtype(dtype).itemsize
        step = stride * Dtype(dtype).itemsize
        try:
            with _bytes_at(send, size).toreadonly() as own:
                with memoryview(self._all_gather(own)) as found, found.cast("B") as flat:
                    if len(flat) != self._ranks * size:
                        raise ValueError(
                            f"all_gather returned {len(flat)} bytes, expected {self._ranks * size}: {size} of each of "
                            f"{self._ranks} ranks"
                        )
                    for rank in range(self._ranks):
                        _bytes_at((recv or 0) + rank * step, size)[:] = flat[rank * size : (rank + 1) * size]
        except BaseException as error:  # which cannot pass through C
            return self._fail(f"{type(error).__name__}: {error}")
        return 0


def _bytes_at(address: int | None, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address or 0)).cast("B")
