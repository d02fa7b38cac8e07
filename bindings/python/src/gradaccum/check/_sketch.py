# SPDX-License-Identifier: Apache-2.0
"""A few numbers in place of an array, from which it is seen how arrays are combined.

In a count-sketch every element has a sign and is added to one of a few buckets. The map is linear and has a fixed seed:
if one array is a combination of others, so are their sketches, with the same coefficients, in every process. The sign
of an element is the product of one of its row and one of its column in a matrix of 4096 columns, so that a pass over the
array is a product with a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

COLUMNS = 4096
_CHUNK = 1 << 18  # elements that are converted at once
_BUCKETS = 128  # of an array

Sketches = dict[int, Any]
"""Of the gradients of parameters, by their index; one that has no gradient is missing."""


def size_of(count: int) -> int:
    """How many numbers the sketch of an array with so many elements has. Few numbers are their own sketch."""
    return min(count, _BUCKETS)


def signs(count: int, seed: int) -> Any:
    """As many signs, as f64."""
    return np.random.default_rng(seed).integers(0, 2, count).astype(np.float64) * 2 - 1


def rows_of(count: int) -> int:
    """How many signs the rows of an array with so many elements have."""
    return count // COLUMNS + 1


def fold(flat: Any, total: Any, rows: Any, columns: Any, narrow: Callable[[Any], Any], wide: Callable[[Any], Any]) -> Any:
    """The sketch of an array of numpy or torch with more elements than buckets.

    :param flat: the array, with one dimension
    :param total: zeros of f64 for each column
    :param rows: the signs of rows, in the dtype that narrow() makes
    :param columns: the signs of columns, f64
    :param narrow: makes an array of f32, or f64 if it is that
    :param wide: makes an array of f64
    """
    whole = len(flat) // COLUMNS * COLUMNS
    for begin in range(0, whole, _CHUNK):
        part = narrow(flat[begin : min(begin + _CHUNK, whole)]).reshape(-1, COLUMNS)
        first = begin // COLUMNS
        total += rows[first : first + len(part)] @ part
    total[: len(flat) - whole] += wide(flat[whole:]) * rows[-1]
    return (total * columns).reshape(-1, _BUCKETS).sum(0)


class Sketch:
    """Makes sketches of arrays of numpy."""

    def __init__(self) -> None:
        self._columns = signs(COLUMNS, 0)
        self._rows: dict[tuple[int, Any], Any] = {}

    def of(self, index: int, array: Any) -> Any:
        """The sketch of the array with this index: size_of() numbers, f64."""
        flat = np.asarray(array).reshape(-1)
        if np.iscomplexobj(flat):
            flat = np.concatenate([flat.real, flat.imag])
        if len(flat) == size_of(len(flat)):
            return flat.astype(np.float64)
        dtype = np.dtype(np.float64 if flat.dtype == np.float64 else np.float32)
        if (index, dtype) not in self._rows:
            self._rows[index, dtype] = signs(rows_of(len(flat)), index + 1).astype(dtype)
        return fold(
            flat, np.zeros(COLUMNS), self._rows[index, dtype], self._columns,
            lambda part: part.astype(dtype, copy=False), lambda part: part.astype(np.float64),
        )  # fmt: skip
