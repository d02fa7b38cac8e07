# SPDX-License-Identifier: Apache-2.0
"""The weight of a micro-batch is what its loss was divided by."""

from typing import Any

import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from conftest import BACKEND, Task, distance

CLOSE = 1e-6
SPLIT = (5, 1, 4, 2)  # uneven micro-batches of a batch of 12


def compare(reference: Any, model: Any, x: Any, y: Any, weights: Any = None, windows: int = 2) -> None:
    """One batch of 12 through Keras, and in uneven parts through a window."""
    for _ in range(windows):
        reference.train_on_batch(x, y, sample_weight=weights)
        at = 0
        for size in SPLIT:
            part = slice(at, at + size)
            model.train_on_batch(
                x[part],
                [one[part] for one in y] if isinstance(y, list) else y[part],
                sample_weight=None if weights is None else weights[part],
            )
            at += size
        model.flush()
    assert distance(reference, model) < CLOSE


def both(task: Task, loss: Any, make: Any = None, **options: Any) -> tuple[Any, Any]:
    make = task.model if make is None else make
    reference, model = make(), gk.wrap(make(), 100)
    for one in (reference, model):
        one.compile(keras.optimizers.SGD(0.1), loss() if callable(loss) else loss, **options)
    return reference, model


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_reductions(task: Task, reduction: str, weighted: bool) -> None:
    reference, model = both(task, lambda: keras.losses.MeanSquaredError(reduction=reduction))
    weights = np.random.default_rng(5).uniform(0.1, 3, size=12) if weighted else None
    compare(reference, model, task.x[:12], task.y[:12], weights)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
def test_tokens_that_are_masked(task: Task, reduction: str) -> None:
    tokens = np.random.default_rng(3).integers(1, 9, size=(12, 6))
    for row, length in enumerate((6, 1, 3, 5, 2, 6, 1, 1, 4, 2, 6, 3)):
        tokens[row, length:] = 0
    y = np.random.default_rng(4).integers(0, 5, size=(12, 6))

    def make() -> Any:
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"), keras.layers.Embedding(9, 4, mask_zero=True),
                keras.layers.Dense(5, activation="softmax"),
            ]
        )  # fmt: skip

    loss = lambda: keras.losses.SparseCategoricalCrossentropy(reduction=reduction)  # noqa: E731
    reference, model = both(task, loss, make)
    compare(reference, model, tokens, y)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_regularisers_count_once(task: Task, reduction: str) -> None:
    def make() -> Any:
        return task.model(
            lambda: [
                keras.layers.Dense(7, kernel_regularizer=keras.regularizers.L2(0.1), activation="tanh"),
                keras.layers.Dense(3, bias_regularizer="l1"),
            ]
        )

    reference, model = both(task, lambda: keras.losses.MeanSquaredError(reduction=reduction), make)
    compare(reference, model, task.x[:12], task.y[:12], windows=3)


def two_heads(length: int | None = None) -> Any:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    second = keras.layers.Dense(4)(hidden)
    if length is not None:
        second = keras.layers.Reshape((2, 2))(second)
    return keras.Model(inputs, [keras.layers.Dense(3)(hidden), second])


def test_two_losses(task: Task) -> None:
    """The second one is a mean over two elements a sample: the ratio of the divisors stays."""
    y = [task.y[:12], np.random.default_rng(4).normal(size=(12, 2, 2))]
    reference, model = both(task, lambda: ["mse", "mae"], lambda: two_heads(2), loss_weights=[1.0, 0.3])
    compare(reference, model, task.x[:12], y)


def test_losses_without_a_common_weight(task: Task) -> None:
    """One loss is divided by the sum of its weights, the other by the samples."""
    losses = lambda: [  # noqa: E731
        keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), keras.losses.MeanSquaredError(),
    ]  # fmt: skip
    model = gk.wrap(two_heads(), 4)
    model.compile("sgd", losses())
    weights = np.linspace(0.1, 3, 12)
    y = [task.y[:12], np.zeros((12, 4))]
    model.train_on_batch(task.x[:3], [one[:3] for one in y], sample_weight=weights[:3])
    with pytest.raises(ValueError, match="different numbers of elements"):
        model.train_on_batch(task.x[3:6], [one[3:6] for one in y], sample_weight=weights[3:6])
    assert model.flush().micro_batches == 1

    model = gk.wrap(two_heads(), 4)
    model.compile("sgd", [keras.losses.MeanSquaredError(reduction="sum"), "mse"])
    with pytest.raises(ValueError, match="no common weight"):
        model.train_on_batch(task.x[:3], [one[:3] for one in y])


def test_a_loss_that_is_one_number(task: Task) -> None:
    """The weight is the number of samples, where a loss is reduced already."""
    reference, model = both(task, lambda: lambda y, p: keras.ops.mean(keras.ops.square(y - p)))
    compare(reference, model, task.x[:12], task.y[:12])


def test_a_loss_of_the_models_own(task: Task) -> None:
    class Own(keras.Sequential):  # type: ignore[misc]
        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
        ) -> Any:  # fmt: skip
            return keras.ops.mean(keras.ops.abs(keras.ops.subtract(y_pred, y)))

    def make() -> Any:
        keras.utils.set_random_seed(3)
        return Own([keras.Input((6,)), keras.layers.Dense(3)])

    reference, model = both(task, None, make)
    compare(reference, model, task.x[:12], task.y[:12])


def test_sums_with_losses_of_activations(task: Task) -> None:
    def make() -> Any:
        return task.model(lambda: [keras.layers.Dense(3, activity_regularizer="l2")])

    model = gk.wrap(make(), 2)
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    with pytest.raises(ValueError, match="add_loss"):
        model.train_on_batch(task.x[:3], task.y[:3])


def test_class_weights(task: Task) -> None:
    y = np.random.default_rng(4).integers(0, 3, size=12)
    loss = lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # noqa: E731
    reference, model = both(task, loss)
    for one, size in ((reference, 12), (model, 3)):
        one.fit(
            task.x[:12], y, batch_size=size, shuffle=False, verbose=0, class_weight={0: 1.0, 1: 5.0, 2: 0.2}
        )
    assert distance(reference, model) < CLOSE


def test_an_empty_batch(task: Task) -> None:
    reference, model = both(task, "mse")
    reference.train_on_batch(task.x[:6], task.y[:6])
    model.train_on_batch(task.x[:6], task.y[:6])
    if BACKEND != "tensorflow":  # where Keras cannot
        with pytest.raises((RuntimeError, TypeError)):
            model.train_on_batch(task.x[:0], task.y[:0])
    else:
        model.train_on_batch(task.x[:0], task.y[:0])
    model.flush()
    assert distance(reference, model) < CLOSE
