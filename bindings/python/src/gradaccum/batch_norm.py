# SPDX-License-Identifier: Apache-2.0
"""Layers of batch normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _raw
from ._members import BatchNormMembers
from .enums import BnLayout, BnSpread, Dtype
from .options import BatchNormInfo
from .tensor import HOST, Tensor, TensorLike, new_tensor

if TYPE_CHECKING:
    from .context import Context


def describe_layer(c: int, id: int) -> BatchNormInfo:
    """What a context of C knows of a layer."""
    struct = _raw.ga_bn_info()
    _raw.ga_bn_describe(c, id, struct)
    return BatchNormInfo._read(struct)


class BatchNorm(BatchNormMembers):
    """A layer of batch normalisation. Made by Context.add_batch_norm().

    Tensors x, y, dy and dx are [samples, channels, ...] or, with BnLayout.CHANNELS_LAST,
    [samples, ..., channels].
    """

    __slots__ = ("_dtype", "_layout", "channels", "name")

    def __init__(self, context: Context, id: int, info: BatchNormInfo) -> None:
        super().__init__(context, id)
        self.name = info.name
        self.channels = info.channels
        self._dtype = info.dtype
        self._layout = info.layout

    def __repr__(self) -> str:
        return f'<gradaccum.BatchNorm "{self.name}" [{self.channels}]>'

    @property
    def info(self) -> BatchNormInfo:
        """What the library knows of the layer."""
        with self.context._guard as c:
            return describe_layer(c, self.id)

    def _input(self, x: TensorLike) -> tuple[Any, tuple[int, ...], int, int]:
        what = f'x of layer "{self.name}"'
        loan = self.context._where.borrow(x, what, self._dtype)
        shape: tuple[int, ...] = _raw.describe(loan)[2]
        axis = 1 if self._layout == BnLayout.CHANNELS_FIRST else len(shape) - 1
        if len(shape) < 2 or shape[axis] != self.channels:
            raise ValueError(
                f"{what}: the shape was {list(shape)}, expected {self.channels} channels at axis {axis}"
            )
        positions = math.prod(dimension for other, dimension in enumerate(shape) if other not in (0, axis))
        return loan, shape, shape[0], positions

    def _like(self, tensor: TensorLike, name: str, shape: tuple[int, ...], written: bool) -> Any:
        what = f'{name} of layer "{self.name}"'
        return self.context._where.borrow(tensor, what, self._dtype, shape, written=written)

    def accumulate(self, x: TensorLike) -> None:
        """Takes the statistics of a micro-batch."""
        with self.context._guard as c:
            loan, _, samples, positions = self._input(x)
            _raw.ga_bn_accumulate(c, self.id, loan, samples, positions)

    def accumulate_stats(
        self, count: int, mean: TensorLike, spread: TensorLike, kind: BnSpread = BnSpread.VARIANCE
    ) -> None:
        """Takes statistics [channels] that the program has computed itself, in F32 or F64."""
        where = self.context._where
        with self.context._guard as c:
            shape = (self.channels,)
            first = where.borrow(mean, f'mean of layer "{self.name}"', 0, shape)
            dtype = _raw.describe(first)[1]
            second = where.borrow(spread, f'spread of layer "{self.name}"', dtype, shape)
            _raw.ga_bn_accumulate_stats(c, self.id, count, first, second, kind, dtype)

    def forward(self, x: TensorLike, y: TensorLike) -> None:
        """Normalises x of a micro-batch to y."""
        self._normalise(_raw.ga_bn_forward, x, y)

    def backward_accumulate(self, x: TensorLike, dy: TensorLike) -> None:
        """Sums over dy and x of the open micro-batch: the gradients of gamma and beta."""
        with self.context._guard as c:
            loan, shape, samples, positions = self._input(x)
            gradient = self._like(dy, "dy", shape, False)
            _raw.ga_bn_backward_accumulate(c, self.id, loan, gradient, samples, positions)

    def backward(self, x: TensorLike, dy: TensorLike, dx: TensorLike) -> None:
        """Writes dx of the open micro-batch."""
        with self.context._guard as c:
            loan, shape, samples, positions = self._input(x)
            gradient = self._like(dy, "dy", shape, False)
            out = self._like(dx, "dx", shape, True)
            _raw.ga_bn_backward(c, self.id, loan, gradient, samples, positions, out)

    def infer(self, x: TensorLike, y: TensorLike) -> None:
        """Normalises by the running statistics, at any time."""
        self._normalise(_raw.ga_bn_infer, x, y)

    def _normalise(self, function: Callable[..., Any], x: TensorLike, y: TensorLike) -> None:
        with self.context._guard as c:
            loan, shape, samples, positions = self._input(x)
            function(c, self.id, loan, samples, positions, self._like(y, "y", shape, True))

    def running(self) -> tuple[Tensor, Tensor, int]:
        """The running mean and variance in F64, and how often they have moved."""
        return self._statistics(_raw.ga_bn_running)

    def set_running(self, mean: TensorLike, variance: TensorLike, steps: int) -> None:
        """Sets the running statistics [channels], in F32 or F64."""
        with self.context._guard as c:
            shape = (self.channels,)
            first = HOST.borrow(mean, f'running mean of layer "{self.name}"', 0, shape)
            dtype = _raw.describe(first)[1]
            second = HOST.borrow(variance, f'running variance of layer "{self.name}"', dtype, shape)
            _raw.ga_bn_running_set(c, self.id, first, second, dtype, steps)

    def statistics(self) -> tuple[Tensor, Tensor, int]:
        """The mean and the biased variance that the layer normalises by now in F64, and of how many."""
        return self._statistics(_raw.ga_bn_statistics)

    def _statistics(self, function: Callable[..., int]) -> tuple[Tensor, Tensor, int]:
        with self.context._guard as c:
            mean, variance = (new_tensor((self.channels,), Dtype.F64) for _ in range(2))
            return mean, variance, function(c, self.id, mean.address, variance.address, Dtype.F64)
