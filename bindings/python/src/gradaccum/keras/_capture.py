# SPDX-License-Identifier: Apache-2.0
"""What a training step of Keras has done, seen from outside of its graph."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ._private import keras, loss_module


class Capture:
    """What one run of ``train_step`` hands out: tensors of its graph.

    gradients, variables: the arguments of the optimizer. divisors: of each loss, what its sum was divided by.
    reductions: of the losses that were called. statistics: of each layer of batch normalisation, the count, the
    mean and the variance of its inputs.

    data: what train_step() is given. first: 1 in the first micro-batch of a window, else 0.
    """

    def __init__(self, data: Any = None, first: Any = None) -> None:
        self.first = first
        self.samples = _samples(data)
        self.is_told = False  # by divided_by()
        self.adds_losses = False  # of activations, by add_loss()
        self.has_elements = False  # of samples, in a loss that the program reduces
        self.is_scaled = False  # by the loss scale
        self.gradients: list[Any] | None = None
        self.variables: list[Any] | None = None
        self.divisors: list[Any] = []
        self.reductions: set[str] = set()
        self.statistics: dict[Any, tuple[Any, Any, Any]] = {}

    def applied(self, gradients: Any, variables: Any) -> None:
        """Notes the gradients that the optimizer was given. variables: None: in the order of the model's."""
        if self.gradients is not None:
            raise ValueError("train_step() has applied gradients twice, but a micro-batch has one gradient")
        self.gradients = list(gradients)
        self.variables = None if variables is None else list(variables)

    def reduced(self, values: Any, sample_weight: Any, mask: Any, reduction: str | None) -> None:
        """Notes the divisor of a loss: what Keras is about to divide the sum of values by."""
        ops = keras.ops
        values = ops.convert_to_tensor(values)
        if reduction in (None, "none", "sum"):
            self.reductions.add("sum" if reduction == "sum" else "none")
            self.has_elements |= reduction != "sum" and len(values.shape) > 1
            return
        self.reductions.add("mean")
        if tuple(values.shape) in ((), (0,)):
            return  # a loss that is one number already
        count = elements(values)
        if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
            weights = loss_module.apply_mask(
                None if sample_weight is None else ops.convert_to_tensor(sample_weight, dtype=values.dtype),
                None if mask is None else ops.convert_to_tensor(mask, dtype=values.dtype),
                dtype=values.dtype, reduction=reduction,
            )  # fmt: skip
            self._divided(ops.sum(ops.cast(weights, "float32")))
        elif mask is not None:
            valid = ops.sum(ops.cast(mask, "float32"))
            self._divided(valid * (count / elements(mask)))
        else:
            self._divided(count)

    def told(self, divisor: Any) -> None:
        """Notes what the program says that it divides a loss by."""
        self.is_told = True
        self._divided(keras.ops.cast(divisor, "float32"))

    # JAX lets nothing out of the function whose gradient is taken but what has no gradient.
    def _divided(self, divisor: Any) -> None:
        self.divisors.append(
            divisor if isinstance(divisor, float) else keras.ops.stop_gradient(divisor)
        )

    def normalised(self, layer: Any, count: Any, mean: Any, variance: Any) -> None:
        """Notes the statistics of an input of a layer, which may be called several times."""
        mean, variance = keras.ops.stop_gradient(mean), keras.ops.stop_gradient(variance)
        if layer in self.statistics:
            n, old, spread = self.statistics[layer]
            total = n + count
            share = keras.ops.cast(count / total, mean.dtype)
            delta = mean - old
            mean = old + delta * share
            variance = spread * (1 - share) + variance * share + delta * delta * (share * (1 - share))
            count = total
        self.statistics[layer] = (count, mean, variance)

    def weights(self) -> list[Any]:
        """The divisors. The count of samples stands for losses whose mean the program has made itself."""
        own = self.adds_losses or "none" in self.reductions
        if self.divisors and (self.is_told or not own):
            return self.divisors
        if self.samples is None:
            raise ValueError(
                "train_step() was given no array with a dimension of samples, so the weight of the micro-batch is not "
                "known: divide the loss by gradaccum.keras.divided_by(count)"
            )
        return [*self.divisors, self.samples]


def divided_by(count: Any) -> Any:
    """Tells a wrapped model what a loss that the program reduces itself is divided by, and returns it.

    ``loss = ops.sum(values * mask) / divided_by(ops.sum(mask))``, in a loss function, ``compute_loss()`` or
    ``train_step()``: the weight of the micro-batch, which would be its number of samples without. count: a number or
    a tensor of one element.
    """
    capture = current()
    if capture is not None:
        capture.told(count)
    return count


def _samples(data: Any) -> Any:
    """The first dimension of x: a number where the shape is known, else a tensor of f32; None: there is none."""
    try:
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
    except ValueError:  # a tuple of the program's own
        x = data
    for one in keras.tree.flatten(x):
        shape = getattr(one, "shape", ())
        if getattr(shape, "rank", len(shape) if isinstance(shape, tuple) else None):  # TensorFlow's may be unknown
            samples = keras.ops.shape(one)[0]
            return float(samples) if isinstance(samples, int) else keras.ops.cast(samples, "float32")
    return None


def elements(values: Any, axis: int | None = None) -> Any:
    """The number of elements, or of those with one index of axis: a number where the shape is known, else a tensor of f32."""
    dimensions = list(keras.ops.shape(values))
    if axis is not None:
        del dimensions[axis]
    product: Any = 1
    for dimension in dimensions:
        product = product * (
            dimension if isinstance(dimension, int) else keras.ops.cast(dimension, "float32")
        )
    return float(product) if isinstance(product, int) else product


class _Captures(threading.local):
    current: Capture | None = None


_captures = _Captures()


def current() -> Capture | None:
    """The capture that the step being run, or traced, in this thread belongs to."""
    return _captures.current


@contextlib.contextmanager
def capture(data: Any, first: Any) -> Iterator[Capture]:
    """Within it, optimizers, losses and layers of batch normalisation hand out what they do."""
    outer, _captures.current = _captures.current, Capture(data, first)
    try:
        yield _captures.current
    finally:
        _captures.current = outer


def _reduce_weighted_values(
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
    _of_keras: Any = loss_module.reduce_weighted_values,
) -> Any:
    """Keras' function of this name, which every loss ends in, with an eye on the divisor."""
    if _captures.current is not None:
        _captures.current.reduced(values, sample_weight, mask, reduction)
    return _of_keras(values, sample_weight, mask, reduction, dtype)


loss_module.reduce_weighted_values = _reduce_weighted_values
