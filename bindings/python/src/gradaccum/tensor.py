# SPDX-License-Identifier: Apache-2.0
"""Tensors: those of other packages, which are used in place, and those of this one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from . import _native, _raw
from .enums import Device, Dtype


class SupportsDLPack(Protocol):
    """A tensor of numpy, torch, JAX, CuPy and so on."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class SupportsBuffer(Protocol):
    """An object with the buffer protocol: ``array.array``, a ``memoryview``, a ``bytearray``."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


TensorLike: TypeAlias = SupportsDLPack | SupportsBuffer
"""What a tensor may be: an object with DLPack or the buffer protocol, or a ``Tensor``."""

_DLPACK_DEVICES = {Device.CPU: 1, Device.CUDA: 2}
_ANY_FLOAT = 0
ANY_INDEX = -1
CODES_OR_NUMBERS = -2
"""uint8 or float32: state in 8 bits, whose codes or whose numbers a tensor has."""


class Tensor:
    """Memory with a shape and a dtype: of the library, or of the program at an address.

    Other packages take it over by ``from_dlpack`` without a copy. ``owner`` is kept alive with it; without
    one, the program keeps the memory in place as long as anybody uses it.
    """

    __slots__ = ("address", "device", "dtype", "ordinal", "owner", "read_only", "shape")

    def __init__(
        self,
        address: int,
        shape: Sequence[int],
        dtype: Dtype,
        *,
        device: Device = Device.CPU,
        ordinal: int = 0,
        read_only: bool = False,
        owner: object = None,
    ) -> None:
        dimensions = tuple(int(dimension) for dimension in shape)
        if any(dimension < 0 for dimension in dimensions):
            raise ValueError(f"the shape was {dimensions}, expected dimensions >= 0")
        if not isinstance(dtype, Dtype) or dtype in (Dtype.DEFAULT, Dtype.STATE_8BIT):
            raise TypeError(f"the dtype was {dtype!r}, expected a Dtype of elements")
        if address < 0 or (address == 0 and 0 not in dimensions):
            raise ValueError(f"the address was {address}")
        self.address = address
        self.shape = dimensions
        self.dtype = dtype
        self.device = device
        self.ordinal = ordinal
        self.read_only = read_only
        self.owner = owner

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_DEVICES[self.device], self.ordinal

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy:
            raise BufferError("a gradaccum.Tensor is not copied; copy what was made of it")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError("a gradaccum.Tensor stays on its device")
        versioned = max_version is not None and max_version[0] >= 1
        if self.read_only and not versioned:
            raise BufferError("a read-only tensor needs version 1 of DLPack")
        return _raw.export_tensor(
            self.address, self.dtype, self.shape, *self.__dlpack_device__(), self.read_only,
            versioned, self,
        )  # fmt: skip

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"<gradaccum.Tensor {self.dtype.name} [{shape}] at {self.address:#x} on {self.device.name}>"


class Where:
    """Where the tensors of a context are, and how they are borrowed."""

    __slots__ = ("_place", "_stream", "device", "ordinal")

    def __init__(self, device: Device, ordinal: int, stream: int) -> None:
        self.device = device
        self.ordinal = ordinal
        self._stream = [0]  # shared with everything that is expected
        self._place = (_DLPACK_DEVICES[device], ordinal, self._stream)
        self.set_stream(stream)

    def set_stream(self, stream: int) -> None:
        """Has the tensors that are borrowed from now on come to another stream."""
        self._stream[0] = stream or 1  # DLPack's 1: the legacy stream

    def expect(
        self,
        what: str,
        dtype: int = _ANY_FLOAT,
        shape: Sequence[int] | None = None,
        *,
        least: int = 0,
        written: bool = False,
        dense: bool = True,
    ) -> Any:
        """What ``borrow`` is to check. Without a shape, a tensor has at least that many elements."""
        return _raw.expect(what, dtype, shape, least, written, dense, *self._place)

    def borrow(self, tensor: object, what: str, *arguments: Any, **options: Any) -> Any:
        """A loan of the memory of a tensor, which ends when nobody refers to it any more."""
        return _native.borrow(tensor, self.expect(what, *arguments, **options))


HOST = Where(Device.CPU, 0, 0)


def new_tensor(shape: Sequence[int], dtype: Dtype) -> Tensor:
    """Fresh memory of the host."""
    loan = _native.borrow(bytearray(max(1, math.prod(shape)) * dtype.itemsize), _BYTES)
    return Tensor(_raw.describe(loan)[0], shape, dtype, owner=loan)


_BYTES = HOST.expect("memory", Dtype.U8, written=True)
