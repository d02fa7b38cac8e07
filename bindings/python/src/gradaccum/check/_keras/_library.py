# SPDX-License-Identifier: Apache-2.0
"""The windows of gradaccum.keras, which no optimizer of Keras makes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .. import _where
from .._hosts import finish
from .._series import Series, tell

_F32 = 2.0**-23


def known_by(variable: Any) -> int:
    """The same for a variable of Keras and the one of TensorFlow that it has."""
    tensorflow: Any = sys.modules.get("tensorflow")
    inner = getattr(variable, "_value", None)
    return id(inner if tensorflow is not None and isinstance(inner, tensorflow.Variable) else variable)


def known(variables: Iterable[Any], gradients: Iterable[Any]) -> dict[int, Any]:
    """The gradients that there are, by what their variables are known by."""
    pairs = zip(variables, gradients, strict=False)
    return {known_by(variable): gradient for variable, gradient in pairs if gradient is not None}


class Library:
    """Follows the weights with which the library takes micro-batches.

    The library multiplies a gradient by its weight, divides the sum by that of the weights, and undoes the loss scale.
    """

    def __init__(self, series: Series, backend: str) -> None:
        self._series = series
        self._backend = backend
        self._weights: dict[Any, list[float]] = {}  # of the open windows

    def added(
        self, original: Callable[..., Any], own: Any, variables: Any, gradients: Any, divisors: Any, *rest: Any
    ) -> Any:
        """A micro-batch is added, outside of graphs."""
        finish()  # with what the graph has told
        if self._backend != "tensorflow":  # whose tape has told
            tell("add", known(own.variables if variables is None else variables, gradients), where=_where.line())
        weights = self._weights.setdefault(own, [])
        weights.append(1.0 if own.summed else own._weight(divisors))
        return original(own, variables, gradients, divisors, *rest)

    def stepped(self, original: Callable[..., Any], own: Any, values: Any) -> Any:
        """The library ends a window."""
        result = original(own, values)
        weights = self._weights.pop(own, [])
        total = 1.0 if own.summed or own.reduction == "SUM" else math.fsum(weights)
        kept = [weight / total / result.loss_scale if total else 0.0 for weight in weights]
        where = _where.line()
        self._series.weighed(kept if result.applied else None, own, type(own.optimizer).__name__, where, _F32)
        return result

    def discarded(self, original: Callable[..., Any], own: Any) -> None:
        """The library drops a window."""
        original(own)
        if self._weights.pop(own, None):
            self._series.weighed(None, own, type(own.optimizer).__name__, "", _F32)
