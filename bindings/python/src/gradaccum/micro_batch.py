# SPDX-License-Identifier: Apache-2.0
"""Gradients that come by part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from . import _native, _raw
from .enums import Dtype
from .errors import Error
from .options import MicroOptions
from .params import Param
from .tensor import ANY_INDEX, Tensor, TensorLike

if TYPE_CHECKING:
    from .context import Context


class Accumulator:
    """Where a kernel of the program writes ``alpha * gradient + beta * tensor``.

    tensor is None if nothing is to be written. With beta 0, it must not be read.
    """

    __slots__ = ("alpha", "beta", "tensor")

    def __init__(self, tensor: Tensor | None, alpha: float, beta: float) -> None:
        self.tensor = tensor
        self.alpha = alpha
        self.beta = beta


class MicroBatch:
    """A micro-batch whose gradients come by part. Made by Context.micro_batch().

    As a context manager it begins the micro-batch and ends it. After an exception, it aborts the
    micro-batch; if something of it has been added already, it discards the window and says so in a note of
    the exception. A window with parameters that are updated in place (``Context.ready()``) cannot be discarded:
    the micro-batch then stays open, and the note says that.
    """

    def __init__(self, context: Context, weight: float, index: int, options: MicroOptions | None) -> None:
        self.context = context
        self._weight = weight
        self._index = index
        self._options = options

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.end()
        elif not self.context.closed:
            try:
                self.abort()
            except Error:
                note = "A part of the micro-batch had been added, so the window was discarded."
                try:
                    self.context.discard()
                except Error as refusal:
                    note = f"The micro-batch is still open, because the window could not be discarded: {refusal}"
                error.add_note(note)

    def begin(self) -> None:
        """Opens the micro-batch."""
        with self.context._guard as c:
            options = None if self._options is None else self._options._write()
            _native.ga_micro_begin(c, self._index, self._weight, options)
            self.context._kept.opened(c)

    def end(self) -> None:
        """Closes the micro-batch: its gradients are in the window."""
        with self.context._guard as c:
            _native.ga_micro_end(c)
            self.context._kept.release(c)

    def abort(self) -> None:
        """Drops the micro-batch as if it had never been opened, as long as nothing of it was added."""
        with self.context._guard as c:
            _raw.ga_micro_abort(c)
            self.context._kept.release(c)

    def accumulate(self, param: Param, gradient: TensorLike | int, *, owner: object = None) -> None:
        """Adds a gradient to one parameter. An int is an address, whose memory owner owns: see Context.accumulate()."""
        context = self.context
        with context._guard as c:
            id = context._own(param)
            loan = gradient
            if type(gradient) is not int:
                loan = _native.borrow(gradient, param._gradient)
            _native.ga_accumulate_part(c, id, loan)
            context._kept.added(c, loan if owner is None else owner)

    def accumulate_rows(self, param: Param, indices: TensorLike, values: TensorLike) -> None:
        """Adds a gradient that has only some rows: values[i] to row indices[i]. Needs ParamOptions.rows."""
        context = self.context
        with context._guard as c:
            id = context._own(param)
            of = f'of parameter "{param.name}"'
            rows = context._where.borrow(indices, f"row indices {of}", ANY_INDEX)
            _, index_dtype, shape, _ = _raw.describe(rows)
            if len(shape) != 1:
                raise ValueError(f"row indices {of}: the shape was {list(shape)}, expected one dimension")
            block = context._where.borrow(
                values, f"rows {of}", param.gradient_dtype, (shape[0], *param.shape[1:])
            )
            _raw.ga_accumulate_rows(c, id, rows, index_dtype, shape[0], block)
            context._kept.added(c, (rows, block))

    def accumulate_matmul(self, param: Param, a: TensorLike, b: TensorLike) -> None:
        """Adds the matrix product ``a @ b`` to a parameter: for ``y = x @ W.T``, ``(W, dy.T, x)``.

        The parameter is taken as a matrix of its first dimension and the rest. a and b may be transposed,
        and parts of larger matrices: nothing is copied.
        """
        context = self.context
        with context._guard as c:
            id = context._own(param)
            rows = param.shape[0] if param.shape else 1
            columns = param.count // rows if rows else 0
            left, of_a, k = self._matrix(param, a, "a", rows, None, 0)
            right, of_b, _ = self._matrix(param, b, "b", k, columns, _raw.describe(left)[1])
            dtype = _raw.describe(left)[1]
            _raw.ga_accumulate_matmul(c, id, k, left, *of_a, right, *of_b, dtype)
            context._kept.added(c, (left, right))

    def _matrix(
        self, param: Param, tensor: TensorLike, name: str, rows: int, columns: int | None, dtype: int
    ) -> tuple[Any, tuple[int, int], int]:
        what = f'matrix {name} for parameter "{param.name}"'
        loan = self.context._where.borrow(tensor, what, dtype, dense=False)
        _, _, shape, strides = _raw.describe(loan)
        if len(shape) != 2 or shape[0] != rows or (columns is not None and shape[1] != columns):
            wanted = f"[{rows}, {'k' if columns is None else columns}]"
            raise ValueError(f"{what}: the shape was {list(shape)}, expected {wanted}")
        for transposed, outer, inner in ((0, 0, 1), (1, 1, 0)):
            count, length = shape[outer], shape[inner]
            leading = strides[outer] if count > 1 else 1
            if (strides[inner] == 1 or length <= 1) and (count <= 1 or leading >= length):
                return loan, (max(length, leading), transposed), shape[1]
        raise ValueError(f"{what}: the strides were {list(strides)}; neither rows nor columns are dense")

    @contextlib.contextmanager
    def accumulator(self, param: Param) -> Iterator[Accumulator]:
        """Hands out the accumulator of a parameter, whose every element is then to be written.

        ``with micro.accumulator(w) as a:``; at its end, what was written is part of the micro-batch.
        """
        context = self.context
        with context._guard as c:
            struct = _raw.ga_accumulator()
            _raw.ga_accumulator_acquire(c, context._own(param), struct)
            tensor = None
            if struct.data:
                tensor = Tensor(
                    struct.data, param.shape, Dtype(struct.dtype), device=context._where.device,
                    ordinal=context._where.ordinal, owner=context._handle,
                )  # fmt: skip
        try:
            yield Accumulator(tensor, struct.alpha, struct.beta)
        finally:
            if not context.closed:
                with context._guard as c:
                    _raw.ga_accumulator_release(c, param.id)
