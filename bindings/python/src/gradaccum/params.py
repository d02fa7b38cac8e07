# SPDX-License-Identifier: Apache-2.0
"""Groups and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from . import _raw
from ._members import GroupMembers, ParamMembers
from .enums import Device, Dtype
from .options import ParamInfo, ParamOptions, StateInfo
from .tensor import CODES_OR_NUMBERS, HOST, Tensor, TensorLike, Where, new_tensor

if TYPE_CHECKING:
    from .context import Context


@dataclass(frozen=True)
class FlatEntry:
    """One parameter within a block of memory."""

    name: str
    """Its name."""
    group: Group
    """Its group."""
    shape: Sequence[int]
    """Its dimensions."""
    offset: int
    """Elements from the start of the block."""
    options: ParamOptions | None = None
    """Its options; None: the defaults."""


class Group(GroupMembers):
    """Parameters that share an optimizer. Made by Context.add_group()."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<gradaccum.Group {self.id}>"


def describe_param(c: int, id: int) -> ParamInfo:
    """What a context of C knows of a parameter."""
    struct = _raw.ga_param_info()
    _raw.ga_param_describe(c, id, struct)
    shape = tuple(struct.dimension(axis) for axis in range(struct.rank))
    return ParamInfo._read(struct, shape=shape)


class Param(ParamMembers):
    """A parameter. Made by Context.add_param()."""

    __slots__ = ("_gradient", "_offset", "count", "dtype", "gradient_dtype", "is_removed", "name", "shape")

    def __init__(self, context: Context, id: int, info: ParamInfo) -> None:
        super().__init__(context, id)
        self.name = info.name
        self.shape = info.shape
        self.dtype = info.dtype
        self.gradient_dtype = info.gradient_dtype
        self.count = info.count
        self.is_removed = False
        self._offset = info.offset
        self._gradient = context._where.expect(
            f'gradient of parameter "{info.name}"', info.gradient_dtype, info.shape, written=context._kept.lent
        )

    def __reduce__(self) -> NoReturn:
        self.context.__reduce__()

    def __repr__(self) -> str:
        return f'<gradaccum.Param "{self.name}" {self.dtype.name} {list(self.shape)}>'

    @property
    def info(self) -> ParamInfo:
        """What the library knows of the parameter."""
        with self.context._guard as c:
            return describe_param(c, self.id)

    def bind(self, data: TensorLike) -> None:
        """Tells that the parameter has moved: data holds its values now. Between windows."""
        context = self.context
        with context._guard as c:
            loan = context._where.borrow(
                data, f'data of parameter "{self.name}"', self.dtype, self.shape, written=True
            )
            _raw.ga_param_bind(c, self.id, loan)
            context._lent()[self.id] = loan

    def set_part(self, whole_shape: Sequence[int], first: Sequence[int], copies: int = 1) -> None:
        """Tells where the parameter lies in one that ranks have in parts, with ``CommShard.PARAMETERS``.

        whole_shape: of the whole. first: where this part begins, on each axis. copies: ranks that have the same part.
        Between windows.
        """
        whole, begin = list(whole_shape), list(first)
        if len(whole) != len(self.shape) or len(begin) != len(self.shape):
            raise ValueError(
                f'parameter "{self.name}" has the shape {list(self.shape)}, but whole_shape was {whole} and first {begin}'
            )
        with self.context._guard as c:
            _raw.ga_param_set_part(c, self.id, whole, begin, copies)

    def remove(self) -> None:
        """Removes the parameter: its tensor is not touched any more. Between windows."""
        context = self.context
        with context._guard as c:
            slot = _raw.ga_param_slot(c, self.id)
            _raw.ga_param_remove(c, self.id)
            self.is_removed = True
            context._lent().pop(self.id)
            context._expected[slot] = context._slots[slot].expected(context._where)

    def gradient(self) -> Tensor:
        """The reduced, clipped gradient of a parameter of an EXTERNAL group, in place.

        Legal after an applied step until the next accumulate(), discard() or step(); the memory is the
        context's, and holds something else after that.
        """
        context = self.context
        with context._guard as c:
            address, dtype, count = _raw.ga_gradient(c, self.id)
            shape = self.shape if count == self.count else (count,)
            return Tensor(
                address, shape, Dtype(dtype), device=context._where.device,
                ordinal=context._where.ordinal, read_only=True, owner=context._handle,
            )  # fmt: skip

    def ema(self, out: TensorLike | None = None) -> Tensor | TensorLike:
        """Writes the moving average of the parameter to out, of any dtype; default a new tensor.

        With ``CommShard.OPTIMIZER``, on every rank.
        """
        context = self.context
        with context._guard as c:
            if out is None:
                if context._where.device != Device.CPU:
                    raise ValueError("a context on a device needs out, a tensor on that device")
                out = new_tensor(self.shape, self.dtype)
            loan = context._where.borrow(
                out, f'moving average of parameter "{self.name}"', 0, self.shape, written=True
            )
            _raw.ga_ema_copy_to(c, self.id, loan, _raw.describe(loan)[1])
            return out

    # ---- State by name

    @property
    def states(self) -> list[StateInfo]:
        """The arrays of state that the parameter has, or will have once it is not frozen."""
        with self.context._guard as c:
            return self._states(c)

    def _states(self, c: int) -> list[StateInfo]:
        infos = []
        for index in range(_raw.ga_state_count(c, self.id)):
            struct = _raw.ga_state_info()
            _raw.ga_state_describe(c, self.id, index, struct)
            infos.append(StateInfo._read(struct))
        return infos

    def _state(self, c: int, name: str) -> tuple[StateInfo, tuple[int, ...]]:
        infos = self._states(c)
        for info in infos:
            if info.name == name:
                return info, self.shape if info.count == self.count else (info.count,)
        names = ", ".join(info.name for info in infos) or "none"
        raise KeyError(f'parameter "{self.name}" has no state "{name}", but {names}')

    def get_state(
        self, name: str, out: TensorLike | None = None, *, dtype: Dtype | None = None
    ) -> Tensor | TensorLike:
        """Reads an array of state into out, in the host's memory; default a new tensor.

        dtype: of the new tensor; default that of the array. State under ``Dtype.STATE_8BIT`` is read as codes of
        ``Dtype.U8``, or with ``Dtype.F32`` or an out of float32 as the numbers that the codes stand for.
        With ``CommShard.OPTIMIZER``, on every rank.
        """
        with self.context._guard as c:
            info, shape = self._state(c, name)
            if out is None:
                dtype = info.dtype if dtype is None else dtype
                if dtype != info.dtype and (info.dtype, dtype) != (Dtype.U8, Dtype.F32):
                    raise ValueError(
                        f'dtype was {dtype.name}, but state "{name}" has {info.dtype.name}'
                        + (", or F32 for the numbers that its codes stand for" if info.dtype == Dtype.U8 else "")
                    )
                out = new_tensor(shape, dtype)
            elif dtype is not None:
                raise ValueError("dtype was given beside out, which has one")
            loan, dtype = self._borrow_state(out, info, shape, written=True)
            _raw.ga_state_get(c, self.id, name, loan, dtype, info.count)
            return out

    def _borrow_state(
        self, tensor: TensorLike, info: StateInfo, shape: tuple[int, ...], *, written: bool = False
    ) -> tuple[Any, Dtype]:
        """A loan of a tensor for an array of state, and the dtype of what it has of that."""
        expected = CODES_OR_NUMBERS if info.dtype == Dtype.U8 else info.dtype
        loan = HOST.borrow(tensor, f'state "{info.name}"', expected, shape, written=written)
        return loan, Dtype(_raw.describe(loan)[1])

    def set_state(self, name: str, data: TensorLike) -> None:
        """Writes an array of state whole. "step" must be written last.

        State under ``Dtype.STATE_8BIT`` is written by codes of uint8, with the scales of their blocks under a name of their
        own, or by numbers of float32, whose scales and nearest codes are written.
        With ``CommShard.OPTIMIZER``, on every rank.
        """
        with self.context._guard as c:
            info, shape = self._state(c, name)
            loan, dtype = self._borrow_state(data, info, shape)
            _raw.ga_state_set(c, self.id, name, loan, dtype, info.count)


class Slot:
    """One of the gradients of accumulate(): that of a parameter or of a flat block."""

    __slots__ = ("is_flat", "params")

    def __init__(self, params: list[Param], is_flat: bool) -> None:
        self.params = params
        self.is_flat = is_flat

    def expected(self, where: Where) -> Any:
        """What the gradient must be like; None: it is not read any more."""
        alive = [param for param in self.params if not param.is_removed]
        if not alive:
            return None
        first = alive[0]
        if not self.is_flat:
            return first._gradient
        itemsize = first.gradient_dtype.itemsize
        end = max((param._offset + param.count) * param.gradient_dtype.itemsize for param in alive)
        what = f'gradient of the block of parameter "{first.name}"'
        lent = first.context._kept.lent
        return where.expect(what, first.gradient_dtype, least=-(-end // itemsize), written=lent)
