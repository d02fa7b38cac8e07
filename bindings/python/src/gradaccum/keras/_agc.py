# SPDX-License-Identifier: Apache-2.0
"""The norm that adaptive gradient clipping compares."""

from __future__ import annotations

from typing import Any

from ._private import keras


def unitwise_norm(x: Any) -> Any:
    """The 2-norm of each unit of a variable or a gradient, with dimensions of 1 where it was summed.

    A unit is what one output reads: of weights [in, out] or [in, heads, out] the first axis, of those of a
    convolution all axes but the last. A scalar or a vector is one unit, whose norm is a scalar.
    """
    ops = keras.ops
    x = ops.convert_to_tensor(x)
    rank = len(x.shape)
    if rank < 2:
        return ops.sqrt(ops.sum(ops.square(x)))
    return ops.sqrt(ops.sum(ops.square(x), axis=0 if rank < 4 else tuple(range(rank - 1)), keepdims=True))
