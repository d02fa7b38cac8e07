# SPDX-License-Identifier: Apache-2.0
"""What a training step of Keras has done, seen from outside of its graph."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final

from ._private import keras, loss_module

MOST_LOSSES: Final = 16
_SPLIT: Final = 4096.0  # numbers are handed out in two parts, since f32 holds integers up to 2^24 alone


class Capture:
    """What one run of ``train_step`` hands out: tensors of its graph.

    gradients, variables: the arguments of the optimizer. divisors: of each loss, what its sum was divided by.
    statistics: of each layer of batch normalisation, the count, the mean and the variance of its inputs.
    """

    def __init__(self) -> None:
        self.gradients: list[Any] | None = None
        self.variables: list[Any] | None = None
        self.divisors: list[Any] = []
        self.reductions: set[str] = set()
        self.samples: Any = None
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
        if reduction in (None, "none", "sum"):
            self.reductions.add("sum")
            return
        self.reductions.add("mean")
        values = ops.convert_to_tensor(values)
        if tuple(values.shape) in ((), (0,)):
            return  # a loss that is one number already: a mean over the samples
        count = _count(values)
        if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
            weights = loss_module.apply_mask(
                None if sample_weight is None else ops.convert_to_tensor(sample_weight, dtype=values.dtype),
                None if mask is None else ops.convert_to_tensor(mask, dtype=values.dtype),
                dtype=values.dtype, reduction=reduction,
            )  # fmt: skip
            self.divisors.append(ops.sum(ops.cast(weights, "float32")))
        elif mask is not None:
            valid = ops.sum(ops.cast(mask, "float32"))
            self.divisors.append(valid * (count / _count(mask)))
        else:
            self.divisors.append(count)
        if len(self.divisors) > MOST_LOSSES:
            raise ValueError(f"a model has at most {MOST_LOSSES} losses here")

    def normalised(self, layer: Any, count: Any, mean: Any, variance: Any) -> None:
        """Notes the statistics of an input of a layer, which may be called several times."""
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
        """The divisors; of losses that are one number or none, the count of samples."""
        return self.divisors or [self.samples]

    def packed(self, layers: list[Any]) -> Any:
        """Divisors and statistics in one vector, for a graph that hands out variables alone."""
        ops = keras.ops
        real = keras.config.floatx()
        parts = []
        weights = self.weights()
        for divisor in weights:
            parts += [_parts(divisor)]
        parts.append(ops.zeros((2 * (MOST_LOSSES - len(weights)),), real))
        for layer in layers:
            channels = layer.moving_mean.shape[0]
            if layer in self.statistics:
                count, mean, variance = self.statistics[layer]
                parts += [_parts(count), ops.cast(mean, real), ops.cast(variance, real)]
            else:
                parts.append(ops.zeros((2 + 2 * channels,), real))
        return ops.concatenate(parts)


def packed_size(layers: list[Any]) -> int:
    """How many elements packed() has."""
    return 2 * MOST_LOSSES + sum(2 + 2 * int(layer.moving_mean.shape[0]) for layer in layers)


def unpack(vector: Any, layers: list[Any]) -> tuple[list[float], dict[Any, tuple[float, Any, Any]]]:
    """What packed() has put into a vector, which is one of numpy by now."""
    pairs = vector[: 2 * MOST_LOSSES].astype("float64").reshape(-1, 2)
    divisors = [float(high * _SPLIT + low) for high, low in pairs]
    statistics = {}
    at = 2 * MOST_LOSSES
    for layer in layers:
        channels = int(layer.moving_mean.shape[0])
        count = float(vector[at]) * _SPLIT + float(vector[at + 1])
        mean = vector[at + 2 : at + 2 + channels]
        at += 2 + 2 * channels
        if count:
            statistics[layer] = (count, mean, vector[at - channels : at])
    return divisors, statistics


def _count(values: Any) -> Any:
    """The number of elements: a number where the shape is known, else a tensor of f32."""
    product: Any = 1
    for dimension in keras.ops.shape(values):
        product = product * (
            dimension if isinstance(dimension, int) else keras.ops.cast(dimension, "float32")
        )
    return float(product) if isinstance(product, int) else product


def _parts(number: Any) -> Any:
    ops = keras.ops
    if isinstance(number, (int, float)):
        high = float(number // _SPLIT)
        return ops.convert_to_tensor([high, number - high * _SPLIT], dtype=keras.config.floatx())
    number = ops.cast(number, keras.config.floatx())
    high = ops.floor(number / _SPLIT)
    return ops.stack([high, number - high * _SPLIT])


class _Captures(threading.local):
    current: Capture | None = None


_captures = _Captures()


def current() -> Capture | None:
    """The capture that the step being run, or traced, in this thread belongs to."""
    return _captures.current


@contextlib.contextmanager
def capture() -> Iterator[Capture]:
    """Within it, optimizers, losses and layers of batch normalisation hand out what they do."""
    outer, _captures.current = _captures.current, Capture()
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
