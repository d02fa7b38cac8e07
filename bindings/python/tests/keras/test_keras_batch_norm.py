# SPDX-License-Identifier: Apache-2.0
"""Moving statistics are those of the window."""

import os
import pathlib
import subprocess
import sys
from typing import Any

import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from conftest import BACKEND, Task, distance

L = keras.layers
SPLIT = (5, 1, 4, 2)


def images() -> Any:
    return np.random.default_rng(2).normal(1, 3, size=(12, 4, 5, 3)) + np.arange(12).reshape(12, 1, 1, 1)


def train(model: Any, x: Any, y: Any, windows: int = 2) -> None:
    for _ in range(windows):
        at = 0
        for size in SPLIT:
            model.train_on_batch(x[at : at + size], y[at : at + size])
            at += size
        model.flush()


@pytest.mark.parametrize("axis", [-1, 1])
def test_the_statistics_of_a_window(axis: int) -> None:
    """Of a layer that sees the same inputs in each window, by numpy: mean, biased variance, and their moves."""
    x = images() if axis == -1 else images().transpose(0, 3, 1, 2)
    layer = gk.BatchNormalization(axis=axis, momentum=0.75)
    model = gk.wrap(keras.Sequential([keras.Input(x.shape[1:]), layer, L.Flatten(), L.Dense(2)]), 100)
    model.compile("sgd", "mse")
    train(model, x, np.zeros((12, 2)), windows=3)
    axes = tuple(i for i in range(4) if i != axis % 4)
    mean, variance = np.zeros(3), np.ones(3)
    for _ in range(3):
        mean += 0.25 * (x.mean(axes) - mean)
        variance += 0.25 * (x.var(axes) - variance)
    np.testing.assert_allclose(np.asarray(layer.moving_mean), mean, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(layer.moving_variance), variance, rtol=1e-6)


def test_gradient_accumulators_defect() -> None:
    """Its layer averages variances of micro-batches; of sorted rows they are a small part of the window's."""
    x = np.sort(np.random.default_rng(1).normal(size=(12, 1)), axis=0)
    layer = gk.AccumBatchNormalization(accum_steps=4, momentum=0.0)
    model = gk.wrap(keras.Sequential([keras.Input((1,)), layer, L.Dense(1)]), 4)
    model.compile("sgd", "mse")
    for at in range(0, 12, 3):
        model.train_on_batch(x[at : at + 3], x[at : at + 3])
    np.testing.assert_allclose(np.asarray(layer.moving_variance), x.var(0), rtol=1e-6)
    assert np.mean([x[at : at + 3].var() for at in range(0, 12, 3)]) < 0.3 * x.var()


def cnn() -> Any:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4, 5, 3))
    x = L.Conv2D(4, 3, use_bias=False)(inputs)
    x = L.BatchNormalization(momentum=0.9, epsilon=1e-2, gamma_initializer="random_normal", name="norm")(x)
    x = L.ReLU()(x)
    x = L.BatchNormalization(center=False, scale=False)(L.Flatten()(x))
    return keras.Model(inputs, L.Dense(2)(x))


def test_replaced_layers_keep_everything() -> None:
    x, y = images(), np.random.default_rng(5).normal(size=(12, 2))
    plain = cnn()
    plain.compile("adam", "mse")
    plain.train_on_batch(x, y)  # moves statistics
    model = cnn()
    model.set_weights(plain.get_weights())
    assert gk.replace_batchnorm_layers(model, accum_steps=4) is model
    layer = model.get_layer("norm")
    assert isinstance(layer, gk.AccumBatchNormalization)
    assert (layer.momentum, layer.epsilon) == (0.9, 1e-2)
    assert distance(plain, model) == 0
    np.testing.assert_array_equal(plain.predict(x, verbose=0), model.predict(x, verbose=0))

    # As a window of one micro-batch, it is Keras' layer.
    reference, model = cnn(), gk.wrap(gk.replace_batchnorm_layers(cnn()), 1)
    for one in (reference, model):
        one.compile("sgd", "mse")
        one.train_on_batch(x, y)
        one.train_on_batch(x, y)
    assert distance(reference, model) < 1e-6


def test_outside_of_a_window_it_is_keras_layer() -> None:
    x, y = images(), np.random.default_rng(5).normal(size=(12, 2))
    reference, model = cnn(), gk.replace_batchnorm_layers(cnn())
    for one in (reference, model):
        one.compile("sgd", "mse")
        one.train_on_batch(x, y)
    assert distance(reference, model) == 0


def test_fit_with_validation_and_a_tail() -> None:
    x, y = images(), np.random.default_rng(5).normal(size=(12, 2))
    model = gk.wrap(gk.replace_batchnorm_layers(cnn()), 3)
    model.compile("sgd", "mse")
    before = np.asarray(model.get_layer("norm").moving_mean).copy()
    history = model.fit(
        x, y, batch_size=2, epochs=2, shuffle=False, verbose=0, validation_data=(x, y)
    ).history
    assert int(model.optimizer.iterations) == 4
    assert np.abs(np.asarray(model.get_layer("norm").moving_mean) - before).max() > 0
    loss = float(model.evaluate(x, y, verbose=0))
    np.testing.assert_allclose(history["val_loss"][-1], loss, rtol=1e-6)


def test_a_layer_that_is_shared() -> None:
    """It sees two inputs a micro-batch; the statistics are of both together."""
    x = np.random.default_rng(1).normal(size=(12, 2, 3))
    layer = gk.BatchNormalization(momentum=0.0)
    inputs = keras.Input((2, 3))
    outputs = L.Dense(1)(layer(inputs[:, 0]) + layer(inputs[:, 1] * 3))
    model = gk.wrap(keras.Model(inputs, outputs), 100)
    model.compile("sgd", "mse")
    train(model, x, np.zeros((12, 1)), windows=1)
    seen = np.concatenate([x[:, 0], x[:, 1] * 3])
    np.testing.assert_allclose(np.asarray(layer.moving_mean), seen.mean(0), atol=1e-7)
    np.testing.assert_allclose(np.asarray(layer.moving_variance), seen.var(0), rtol=1e-6)


def test_a_frozen_layer_stays() -> None:
    x, y = images(), np.random.default_rng(5).normal(size=(12, 2))
    model = gk.wrap(gk.replace_batchnorm_layers(cnn()), 4)
    model.get_layer("norm").trainable = False
    model.compile("sgd", "mse")
    before = [np.asarray(v).copy() for v in model.get_layer("norm").moving()]
    train(model, x, y)
    for a, b in zip(before, model.get_layer("norm").moving(), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))


def test_statistics_that_somebody_sets() -> None:
    x, y = images(), np.zeros((12, 2))
    layer = gk.BatchNormalization(momentum=0.5)
    model = gk.wrap(keras.Sequential([keras.Input((4, 5, 3)), layer, L.Flatten(), L.Dense(2)]), 100)
    model.compile("sgd", "mse")
    train(model, x, y, windows=1)
    layer.moving_mean.assign(np.full(3, 100.0))
    train(model, x, y, windows=1)
    np.testing.assert_allclose(np.asarray(layer.moving_mean), 50 + 0.5 * x.mean((0, 1, 2)), rtol=1e-6)


def test_a_discarded_window_moves_nothing() -> None:
    x, y = images(), np.zeros((12, 2))
    layer = gk.BatchNormalization()
    model = gk.wrap(keras.Sequential([keras.Input((4, 5, 3)), layer, L.Flatten(), L.Dense(2)]), 100)
    model.compile("sgd", "mse")
    model.train_on_batch(x[:4], y[:4])
    model.discard()
    np.testing.assert_array_equal(np.asarray(layer.moving_mean), np.zeros(3))


def test_masked_positions_do_not_count() -> None:
    x = np.random.default_rng(1).normal(size=(12, 5, 3))
    x[:, 3:] = 0  # which Masking leaves out
    layer = gk.BatchNormalization(momentum=0.0)
    model = gk.wrap(
        keras.Sequential([keras.Input((5, 3)), L.Masking(), layer, L.GlobalAveragePooling1D(), L.Dense(1)]),
        100,
    )
    model.compile("sgd", "mse")
    train(model, x, np.zeros((12, 1)), windows=1)
    # Keras divides by the count plus 1e-7.
    np.testing.assert_allclose(np.asarray(layer.moving_mean), x[:, :3].mean((0, 1)), rtol=1e-5, atol=1e-7)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="renorm"):
        gk.BatchNormalization(renorm=True)
    if BACKEND == "tensorflow":
        with pytest.raises(ValueError, match="synchronized"):
            gk.BatchNormalization(synchronized=True)

    class Own(L.BatchNormalization):  # type: ignore[misc]
        pass

    with pytest.raises(ValueError, match="Own"):
        gk.replace_batchnorm_layers(keras.Sequential([keras.Input((3,)), Own()]))


def test_like_the_whole_batch_but_for_the_normalisation(task: Task) -> None:
    """Frozen layers normalise alike, so the window equals the batch."""
    x, y = images(), np.random.default_rng(5).normal(size=(12, 2))
    models = []
    for make in (lambda m: m, lambda m: gk.wrap(gk.replace_batchnorm_layers(m), 4)):
        model = make(cnn())
        for layer in model.layers:
            if isinstance(layer, L.BatchNormalization):
                layer.trainable = False
        model.compile("adam", "mse")
        models.append(model)
    models[0].train_on_batch(x, y)
    for at in range(0, 12, 3):
        models[1].train_on_batch(x[at : at + 3], y[at : at + 3])
    assert distance(*models) < 1e-6


@pytest.mark.only("tensorflow")
def test_the_example_of_a_whole_window() -> None:
    root = pathlib.Path(os.environ["GA_HEADER"]).parents[2]
    program = root / "examples" / "python" / "keras_window_norm.py"
    done = subprocess.run([sys.executable, str(program), "5"], capture_output=True, text=True)
    assert done.returncode == 0 and "5 steps" in done.stdout, done.stderr
