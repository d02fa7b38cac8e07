# SPDX-License-Identifier: Apache-2.0
"""The tensors of other packages: what is taken in place, and what is refused."""

import array
import ctypes
import gc
import weakref
from typing import Any

import gradaccum as ga
import ml_dtypes
import numpy as np
import pytest
from conftest import Net
from gradaccum import _native
from gradaccum.tensor import Where


def one(data: Any, **options: Any) -> tuple[ga.Context, ga.Param]:
    context = ga.Context()
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1.0))
    return context, context.add_param(group, "p", data, **options)


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class TensorStruct(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", Device), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Plain(ctypes.Structure):
    _fields_ = [("tensor", TensorStruct), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", TensorStruct),
    ]  # fmt: skip


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Exporter:
    """A framework that exports an array of floats in any way that the protocol knows."""

    def __init__(self, versioned: bool = True, **changes: Any) -> None:
        self.values = np.zeros(16, np.float32)
        self.versioned = versioned
        self.changes = changes
        self.deleted = 0
        self.asked: list[dict[str, Any]] = []
        self.shape = (ctypes.c_int64 * 2)(2, 3)
        self.strides = (ctypes.c_int64 * 2)(*changes.get("strides", (3, 1)))
        self.deleter = DELETER(self.delete)

    def delete(self, _: int) -> None:
        self.deleted += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.changes.get("device", (1, 0))

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        if not self.versioned and options:
            raise TypeError("no such option")
        if "raises" in self.changes:
            raise self.changes["raises"]
        managed = Versioned() if self.versioned else Plain()
        if isinstance(managed, Versioned):
            managed.major, managed.flags = self.changes.get("major", 1), self.changes.get("flags", 0)
        tensor = managed.tensor
        tensor.data = self.values.ctypes.data
        tensor.device = Device(*self.__dlpack_device__())
        tensor.ndim, tensor.shape = 2, ctypes.addressof(self.shape)
        tensor.code, tensor.bits, tensor.lanes = *self.changes.get("type", (2, 32)), self.changes.get("lanes", 1)
        if not self.changes.get("null_strides"):
            tensor.strides = ctypes.addressof(self.strides)
        tensor.byte_offset = self.changes.get("byte_offset", 0)
        managed.deleter = ctypes.cast(self.deleter, ctypes.c_void_p)
        self.managed = managed
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return new_capsule(ctypes.addressof(managed), name, None)


def test_tensors_of_a_device_come_to_the_stream_of_the_time() -> None:
    where = Where(ga.Device.CUDA, 3, 0)
    before = where.expect("a tensor")  # as a context keeps it for a parameter
    for stream, asked in ((0, 1), (77, 77), (5, 5), (0, 1)):  # DLPack's 1 is the legacy default stream
        where.set_stream(stream)
        for expected in (before, where.expect("a tensor")):
            exporter = Exporter(device=(2, 3))
            assert _native.borrow(exporter, expected) is not None
            assert exporter.asked == [{"max_version": (1, 0), "stream": asked}]


def test_every_dtype_is_taken_in_place() -> None:
    for dtype, expected in (
        (np.float32, ga.Dtype.F32), (np.float64, ga.Dtype.F64), (np.float16, ga.Dtype.F16),
        (ml_dtypes.bfloat16, ga.Dtype.BF16),
    ):  # fmt: skip
        data = np.full((2, 3), 4, dtype)
        context, param = one(data)
        assert param.dtype is expected and param.shape == (2, 3) and param.info.data == data.ctypes.data
        context.accumulate([np.ones((2, 3), dtype)])
        context.step()
        assert (data == 3).all()


def test_integers_of_16_bits_need_a_dtype() -> None:
    data = np.full(4, 4, ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match="give the dtype"):
        one(data.view(np.uint16))
    context, param = one(data.view(np.int16), dtype=ga.Dtype.BF16)
    assert param.dtype is ga.Dtype.BF16
    context.accumulate([np.ones(4, ml_dtypes.bfloat16).view(np.uint16)])
    context.step()
    assert (data == 3).all()


def test_bytes_are_no_parameter() -> None:
    for data in (np.zeros(4, np.uint8), bytearray(4)):
        with pytest.raises(TypeError, match="uint8, expected float32, float64, float16 or bfloat16"):
            one(data)
    with pytest.raises(TypeError, match="bits|format"):
        one(np.zeros(4, np.int8))


def test_buffers_of_the_standard_library() -> None:
    data = array.array("d", [4.0] * 6)
    context, param = one(data, shape=(2, 3))
    assert param.dtype is ga.Dtype.F64 and param.shape == (2, 3)
    context.accumulate([memoryview(array.array("d", [1.0] * 6))])
    context.step()
    assert data.tolist() == [3.0] * 6
    block = bytearray(8)
    context, param = one(memoryview(block).cast("f"))
    context.accumulate([memoryview(b"\0\0\x80?" * 2).cast("f")])  # read-only, but only read
    context.step()
    assert memoryview(block).cast("f").tolist() == [-1.0, -1.0]


def test_memory_that_is_used_is_not_resized() -> None:
    data = array.array("f", [0.0] * 3)
    context, param = one(data)
    with pytest.raises(BufferError):
        data.append(1.0)
    context.close()
    data.append(1.0)


def test_an_address_with_shape_and_dtype() -> None:
    data = np.full((2, 3), 4, np.float32)
    context, param = one(ga.Tensor(data.ctypes.data, (2, 3), ga.Dtype.F32))
    gradient = np.ones((2, 3), np.float32)
    context.accumulate([ga.Tensor(gradient.ctypes.data, (2, 3), ga.Dtype.F32)])
    context.accumulate([gradient.ctypes.data])
    context.step()
    assert (data == 3).all()
    with pytest.raises(ValueError, match="read-only"):
        param.bind(ga.Tensor(data.ctypes.data, (2, 3), ga.Dtype.F32, read_only=True))
    for arguments in ((0, (1,), ga.Dtype.F32), (-8, (1,), ga.Dtype.F32), (8, (-1,), ga.Dtype.F32)):
        with pytest.raises(ValueError):
            ga.Tensor(*arguments)
    with pytest.raises(TypeError, match="Dtype"):
        ga.Tensor(8, (1,), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of its element size"):
        param.bind(ga.Tensor(data.ctypes.data + 2, (2, 3), ga.Dtype.F32))


def test_a_tensor_goes_to_other_packages() -> None:
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = ga.Tensor(data.ctypes.data, (2, 3), ga.Dtype.F32, owner=data)
    view: Any = np.from_dlpack(tensor)  # type: ignore[arg-type]
    assert view.ctypes.data == data.ctypes.data and view.shape == (2, 3)
    view[0, 0] = 7
    assert data[0, 0] == 7
    assert "F32 [2, 3]" in repr(tensor)
    owner = weakref.ref(tensor.owner)  # type: ignore[arg-type]
    del tensor, data
    gc.collect()
    assert owner() is not None
    del view
    gc.collect()
    assert owner() is None
    unused = ga.Tensor(8, (0,), ga.Dtype.F64)
    assert unused.__dlpack__() is not None and unused.__dlpack__(max_version=(1, 1)) is not None
    for options in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError):
            unused.__dlpack__(**options)


def test_byte_offsets_and_null_strides() -> None:
    for versioned in (True, False):
        exporter = Exporter(versioned, byte_offset=8, null_strides=True)
        context, param = one(exporter)
        assert param.shape == (2, 3)
        context.accumulate([np.ones((2, 3), np.float32)])
        context.step()
        assert exporter.values.tolist() == [0, 0] + [-1] * 6 + [0] * 8
        asked = [{"max_version": (1, 0)}] if versioned else [{"max_version": (1, 0)}, {}]
        assert exporter.asked == asked
        assert exporter.deleted == 0
        context.close()
        assert exporter.deleted == 1


def test_a_gradient_is_given_back_after_the_call(net: Net) -> None:
    exporter = Exporter()
    context, param = one(np.zeros((2, 3), np.float32))
    context.accumulate([exporter])
    assert exporter.deleted == 1
    with pytest.raises(ga.Error):
        context.accumulate([exporter], -1.0)
    assert exporter.deleted == 2


def test_what_dlpack_cannot_give_is_refused() -> None:
    for changes, kind, words in (
        ({"major": 2}, BufferError, "version 2 of DLPack"),
        ({"flags": 1}, ValueError, "read-only, but it is written"),
        ({"flags": 2}, BufferError, "copied by its framework"),
        ({"strides": (1, 2)}, ValueError, "not dense and row-major"),
        ({"device": (2, 1)}, ValueError, "is on CUDA device 1, but the context on the CPU"),
        ({"device": (10, 0)}, ValueError, "type 10"),
        ({"type": (5, 64)}, TypeError, "type 5 with 64 bits, expected float32"),
        ({"type": (0, 32)}, TypeError, "elements of int32"),
        ({"lanes": 4}, TypeError, "vectors"),
        ({"byte_offset": 2}, ValueError, "multiple of its element size"),
        ({"raises": BufferError("it is sparse.")}, BufferError, "refused: it is sparse"),
    ):  # fmt: skip
        exporter = Exporter(**changes)  # type: ignore[arg-type]
        with pytest.raises(kind, match=f'data of parameter "p": .*{words}'):
            one(exporter)
        assert exporter.deleted == ("raises" not in changes)
    with pytest.raises(KeyboardInterrupt):
        one(Exporter(raises=KeyboardInterrupt()))
    with pytest.raises(MemoryError):
        one(Exporter(raises=MemoryError()))


def test_read_only_memory_is_never_written() -> None:
    data = np.zeros(3, np.float32)
    data.flags.writeable = False
    for read_only in (data, memoryview(data), memoryview(bytes(12)).cast("f")):
        with pytest.raises(ValueError, match="read-only"):
            one(read_only)

    class OlderWithBuffer(bytes):
        """Exports without the flag, as packages did before version 1 of DLPack."""

        def __dlpack__(self) -> Any:
            return Exporter.__dlpack__(exporter)

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    exporter = Exporter(versioned=False)
    with pytest.raises(ValueError, match="read-only"):
        one(OlderWithBuffer(24))
    assert exporter.deleted == 1


def test_a_tensor_that_requires_grad_is_refused() -> None:
    class Leaf(Exporter):
        requires_grad = True

    with pytest.raises(ValueError, match=r"requires grad; pass tensor.detach\(\)"):
        one(Leaf())


def test_gradients_of_the_wrong_kind_are_refused(net: Net) -> None:
    dw, db = net.gradients()
    for bad, kind, words in (
        (dw.T.copy(), ValueError, r"shape \[4, 3\], expected \[3, 4\]"),
        (dw.T.copy().T, ValueError, "not dense"),
        (dw[:2], ValueError, "shape"),
        (dw.astype(np.float64), TypeError, "float64, expected float32"),
        (dw.astype(">f4"), ValueError, "byte order"),
        (dw.astype(np.complex64), TypeError, "expected float32"),
        (memoryview(dw)[::2], ValueError, "not dense"),
        (dw.tolist(), TypeError, "a list is no tensor"),
        ("text", TypeError, "a str is no tensor"),
        (1.5, TypeError, "a float is no tensor"),
        (np.zeros(12, "V3"), TypeError, "expected float32"),
    ):  # fmt: skip
        with pytest.raises(kind, match=f'gradient of parameter "w": .*{words}'):
            net.context.accumulate([bad, db])  # type: ignore[list-item]
    for count in ([dw], [dw, db, db]):
        with pytest.raises(ValueError, match="expected 2: one for each parameter"):
            net.context.accumulate(count)
    with pytest.raises(TypeError):
        net.context.accumulate(5)  # type: ignore[arg-type]
    assert net.context.window.micro_batches == 0


def test_an_int_is_no_tensor_but_for_gradients(net: Net) -> None:
    with pytest.raises(TypeError, match="a int is no tensor"):
        net.context.add_param(net.group, "x", 5)  # type: ignore[arg-type]


def test_parameters_must_not_overlap(net: Net) -> None:
    with pytest.raises(ga.Error, match="overlap"):
        net.context.add_param(net.group, "x", net.w[1])
    with pytest.raises(ga.Error, match='"w"'):
        net.context.add_param(net.group, "w", np.zeros(3, np.float32))


def test_empty_and_scalar_tensors() -> None:
    context, param = one(np.zeros((0, 3), np.float32))
    assert param.count == 0
    scalar = np.array(4, np.float32)
    param = context.add_param(context.groups[0], "s", scalar)
    assert param.shape == ()
    context.accumulate([np.zeros((0, 3), np.float32), np.array(1, np.float32)])
    context.step()
    assert scalar == 3


def test_a_list_that_changes_meanwhile(net: Net) -> None:
    gradients: list[Any] = []

    class Shrinks(Exporter):
        def __dlpack__(self, **options: Any) -> Any:
            gradients.clear()
            return super().__dlpack__(**options)

    gradients += [Shrinks(), net.gradients()[1]]
    with pytest.raises((ValueError, IndexError)):
        net.context.accumulate(gradients)
