# SPDX-License-Identifier: Apache-2.0
"""Tensors of Keras' backends through the package itself: used in place, or refused where they are written."""

from typing import Any

import gradaccum as ga
import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from conftest import Task


def test_gradients_are_read_in_place() -> None:
    w = np.zeros((2, 3), np.float32)
    with ga.Context(ga.Config(accum_steps=2)) as context:
        group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1.0))
        context.add_param(group, "w", w)
        for scale in (1.0, 3.0):
            gradient: Any = keras.ops.convert_to_tensor(np.full((2, 3), scale, np.float32))
            context.accumulate([gradient])
        context.step()
    np.testing.assert_array_equal(w, np.full((2, 3), -2.0))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_dtypes(dtype: str) -> None:
    tensor: Any = keras.ops.convert_to_tensor(np.ones((2, 3)), dtype=dtype)
    w = keras.ops.convert_to_numpy(keras.ops.zeros((2, 3), dtype=dtype)).copy()
    own = {"float64": ga.Dtype.F64, "float16": ga.Dtype.F16, "bfloat16": ga.Dtype.BF16}[dtype]
    with ga.Context() as context:
        group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=0.5))
        context.add_param(group, "w", w.view(np.uint16) if dtype == "bfloat16" else w, dtype=own)
        context.accumulate([tensor])
        context.step()
    np.testing.assert_array_equal(w.astype(np.float64), np.full((2, 3), -0.5))


@pytest.mark.only("jax")
def test_an_array_that_must_not_be_written() -> None:
    """Arrays of JAX never change. DLPack does not say so of TensorFlow's, which are shared with others."""
    parameter: Any = keras.ops.zeros((2, 3), dtype="float32")
    with ga.Context() as context:
        group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD))
        with pytest.raises(ValueError, match="read-only"):
            context.add_param(group, "w", parameter)
        assert context.params == []


@pytest.mark.only("jax")
@pytest.mark.parametrize("overwrite", [None, 1])
def test_arrays_of_variables_never_change(task: Task, overwrite: int | None) -> None:
    """JAX keeps the memory of an array that it is given, if it happens to be aligned: one of many is."""
    model = gk.wrap(task.model(lambda: [keras.layers.Dense(k, "tanh") for k in [*range(5, 45), 3]]), 1)
    use_ema = overwrite is not None
    model.compile(keras.optimizers.SGD(0.1, use_ema=use_ema, ema_overwrite_frequency=overwrite), "mse")
    for step in range(3):
        held: Any = [variable.value for variable in model.trainable_variables]
        before = [np.array(array) for array in held]
        model.fit(task.x[:12], task.y[:12], batch_size=12, verbose=0)
        for array, copy in zip(held, before, strict=True):
            np.testing.assert_array_equal(np.asarray(array), copy)
        assert any((a != b).any() for a, b in zip(model.get_weights(), before, strict=True)), step
