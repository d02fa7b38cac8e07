# SPDX-License-Identifier: Apache-2.0
"""Names of options, those of GradientAccumulator among them: each has its effect or is refused by name."""

import warnings
from typing import Any

import gradaccum
import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from conftest import PARTS, Task, distance


def functional() -> tuple[Any, Any]:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    return inputs, keras.layers.Dense(3)(keras.layers.Dense(7, activation="tanh")(inputs))


def clipped(task: Task, model: Any) -> Any:
    model.compile(keras.optimizers.SGD(0.5), "mse")
    for start in range(0, 12, 3):
        model.train_on_batch(task.x[start : start + 3], task.y[start : start + 3])
    return model


@pytest.mark.parametrize("name", ["agc", "use_acg", "use_agc"])
def test_spellings_of_clipping(task: Task, name: str) -> None:
    """The gradient of a whole batch, clipped here by its definition."""
    inputs, outputs = functional()
    plain = keras.Model(inputs, outputs)
    before = plain.get_weights()
    plain.compile(keras.optimizers.SGD(1.0), "mse")
    plain.train_on_batch(task.x[:12], task.y[:12])
    want = []
    for old, new in zip(before, plain.get_weights(), strict=True):
        gradient = old - new
        axes = 0 if old.ndim == 2 else None
        norms = [np.sqrt(np.sum(np.square(one), axis=axes, keepdims=True)) for one in (gradient, old)]
        limit = 0.02 * np.maximum(norms[1], 1e-3)
        want.append(old - 0.5 * gradient * np.minimum(1.0, limit / np.maximum(norms[0], 1e-6)))
    for wrapped in (False, True):
        inputs, outputs = functional()
        options = {name: True, "clip_factor": 0.02}
        if wrapped:
            model = gk.wrap(keras.Model(inputs, outputs), PARTS, **options)
        else:
            model = gk.GradientAccumulateModel(accum_steps=PARTS, inputs=inputs, outputs=outputs, **options)
        clipped(task, model)
        for found, wanted in zip(model.get_weights(), want, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_the_former_name_of_accum_steps(task: Task) -> None:
    inputs, outputs = functional()
    for model in (
        gk.GradientAccumulateModel(n_gradients=3, inputs=inputs, outputs=outputs), gk.wrap(task.model(), n_gradients=3),
        gk.GradientAccumulateModel(3, inputs=inputs, outputs=outputs),
        gk.GradientAccumulateModel(3, False, True, 0.2, 1e-2, False, inputs, outputs),
    ):  # fmt: skip
        assert model._options.accum_steps == 3
    clip = model._options.clip
    assert (clip.scope, clip.agc_factor, clip.agc_eps) == (gradaccum.ClipScope.AGC, 0.2, 1e-2)
    with pytest.raises(TypeError, match='given "n_gradients" and "accum_steps"'):
        gk.wrap(task.model(), 3, n_gradients=4)
    with pytest.raises(TypeError, match="by position and by name"):
        gk.GradientAccumulateModel(3, inputs=inputs, outputs=outputs, accum_steps=4)


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("accum_step", "accum_steps"), ("use_adc", "use_agc"), ("clipfactor", "clip_factor"), ("step_log", "step_logs"),
        ("reducton", "reduction"),
    ],
)  # fmt: skip
def test_options_that_are_misspelt(task: Task, name: str, nearest: str) -> None:
    class Derived(gk.GradientAccumulateModel):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    inputs, outputs = functional()
    for make in (
        lambda **o: gk.wrap(task.model(), 2, **o),
        lambda **o: gk.GradientAccumulateModel(accum_steps=2, inputs=inputs, outputs=outputs, **o),
        lambda **o: Derived(accum_steps=2, **o),
    ):
        with pytest.raises(TypeError, match=f'"{name}": the nearest one is "{nearest}"'):
            make(**{name: 1})


def test_mixed_precision_without_a_policy(task: Task) -> None:
    with pytest.warns(UserWarning, match="set_dtype_policy"):
        gk.wrap(task.model(), 2, mixed_precision=True)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gk.wrap(task.model(), 2, mixed_precision=True)


@pytest.mark.parametrize("name", ["GAModelWrapper", "GAOptimizerWrapper", "adaptive_clip_grad"])
def test_names_of_other_versions(name: str) -> None:
    with pytest.raises(ImportError, match=r"write .*accum_steps"):
        exec(f"from gradaccum.keras import {name}")
    with pytest.raises(AttributeError, match="no attribute"):
        gk.unknown  # noqa: B018


def test_accum_steps_by_position_of_a_layer() -> None:
    """Where Keras has the axis."""
    for position in (2, True):
        with pytest.raises(TypeError, match="accum_steps in GradientAccumulator and axis in Keras"):
            gk.AccumBatchNormalization(position)
    assert gk.BatchNormalization(-1).axis == -1 and gk.BatchNormalization(axis=1).axis == 1


@pytest.mark.parametrize(
    "shape, axes", [((), None), ((4,), None), ((4, 3), 0), ((4, 3, 2), 0), ((3, 3, 4, 2), (0, 1, 2))]
)
def test_the_norm_of_units(shape: tuple[int, ...], axes: Any) -> None:
    x = np.random.default_rng(2).normal(size=shape)
    want = np.sqrt(np.sum(x * x, axis=axes, keepdims=axes is not None))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(gk.unitwise_norm(x)), want, rtol=1e-6)


def test_a_window_that_is_skipped_is_said_once(task: Task) -> None:
    task.y[:] = 1e30
    for scaled in (True, False):
        optimizer = keras.optimizers.SGD(0.1)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**120)
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        model = gk.wrap(task.model(), 2)
        model.compile(optimizer, "mse")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(4):
                model.train_on_batch(task.x[:3], np.full((3, 3), 1e30))
        said = [str(one.message) for one in seen if "a window was skipped" in str(one.message)]
        assert len(said) == 1 and ("loss scale" in said[0]) == scaled
        assert not model.step_result.applied


def test_a_train_step_without_gradients(task: Task) -> None:
    class Idle(keras.Sequential):  # type: ignore[misc]
        def train_step(self, *args: Any) -> Any:
            return {"loss": 0.0} if len(args) == 1 else ({"loss": 0.0}, args[0])

    model = gk.wrap(Idle([keras.Input((6,)), keras.layers.Dense(3)]), 2)
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.warns(UserWarning, match="no gradients"):
        model.train_on_batch(task.x[:3], task.y[:3])
    assert distance(model, model) == 0
