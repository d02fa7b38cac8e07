# SPDX-License-Identifier: Apache-2.0
"""What programs do around fit(): each equals one run of plain Keras by whole batches, or is said."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from conftest import PARTS, Task, distance, parts, whole

CLOSE = 1e-6


def run(task: Task, make: Callable[[], Any], compiled: Callable[[], dict[str, Any]], **fit: Any) -> tuple[Any, Any]:
    """A plain model and a wrapped one after the same epochs. Values of fit that can be called are made anew."""
    models = []
    for one, train in ((make(), whole), (gk.wrap(make(), PARTS), parts)):
        one.compile(**compiled())
        train(task, one, **{name: value() if callable(value) else value for name, value in fit.items()})
        models.append(one)
    return models[0], models[1]


CALLBACKS: dict[str, Callable[[], Any]] = {
    "plateau": lambda: keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.2, patience=1, min_delta=10.0),
    "stopping": lambda: keras.callbacks.EarlyStopping(
        "val_loss", patience=2, min_delta=10.0, restore_best_weights=True
    ),
    "schedule": lambda: keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.5),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_between_epochs(task: Task, name: str) -> None:
    reference, model = run(
        task, task.model, lambda: {"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": "mse"}, epochs=5,
        validation_data=lambda: (task.x[:8], task.y[:8]), callbacks=lambda: [CALLBACKS[name]()],
    )  # fmt: skip
    assert distance(reference, model) < CLOSE
    assert len(reference.history.epoch) == len(model.history.epoch) == (3 if name == "stopping" else 5)
    parts(task, model)  # which goes on with the state of the optimizer
    whole(task, reference)
    assert distance(reference, model) < CLOSE


def test_weights_of_samples_and_a_short_tail(task: Task) -> None:
    weights = np.random.default_rng(5).uniform(0.1, 3, size=len(task.x))
    compiled = lambda: {"optimizer": "sgd", "loss": "mse", "weighted_metrics": ["mae"]}  # noqa: E731
    reference, model = run(task, task.model, compiled, sample_weight=weights)
    assert distance(reference, model) < CLOSE


def test_a_generator_of_uneven_batches(task: Task) -> None:
    def batches(sizes: list[int]) -> Iterator[Any]:
        while True:
            at = 0
            for size in sizes:
                yield task.x[at : at + size], task.y[at : at + size], np.linspace(0.5, 2, 45)[at : at + size]
                at += size

    sizes = [1, 2, 5, 4, 3, 3, 9, 1, 7, 2, 8]  # the last window has 3
    reference, model = task.model(), gk.wrap(task.model(), 4)
    for one, of in ((reference, [12, 16, 17]), (model, sizes)):
        one.compile("adam", "mse")
        one.fit(batches(of), steps_per_epoch=len(of), epochs=2, verbose=0, shuffle=False)
    assert distance(reference, model) < CLOSE


def test_several_outputs_with_weights_and_a_regulariser(task: Task) -> None:
    def make() -> Any:
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
        outputs = {"a": keras.layers.Dense(3, name="a")(hidden), "b": keras.layers.Dense(1, name="b")(hidden)}
        return keras.Model(inputs, outputs)

    task.y = {"a": task.y, "b": task.y[:, :1]}
    compiled = lambda: {  # noqa: E731
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": {"a": "mse", "b": "mae"},
        "loss_weights": {"a": 0.3, "b": 2.0},
    }  # fmt: skip
    reference, model = run(task, make, compiled)
    assert distance(reference, model) < CLOSE


class Penalty(keras.layers.Layer):  # type: ignore[misc]
    """Adds the mean of the squares of its input to the loss."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.3 * keras.ops.mean(keras.ops.square(x)))
        return x


def test_added_losses(task: Task) -> None:
    """A mean over samples is exact, and refused beside a loss with another divisor."""
    make = lambda: task.model(lambda: [keras.layers.Dense(3), Penalty()])  # noqa: E731
    reference, model = run(task, make, lambda: {"optimizer": "sgd", "loss": "mse"})
    assert distance(reference, model) < CLOSE

    model = gk.wrap(make(), 4)
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    model.train_on_batch(task.x[:3], task.y[:3], sample_weight=np.array([1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match="different numbers of elements"):
        model.train_on_batch(task.x[3:6], task.y[3:6], sample_weight=np.array([1.0, 1.0, 1.0]))


def test_activity_regularisers(task: Task) -> None:
    """Which Keras divides by the samples."""
    make = lambda: task.model(  # noqa: E731
        lambda: [keras.layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.5))]
    )
    reference, model = run(task, make, lambda: {"optimizer": "sgd", "loss": "mse"})
    assert distance(reference, model) < CLOSE


@pytest.mark.parametrize("mixed", [False, True])
def test_a_model_that_is_compiled_again(task: Task, mixed: bool) -> None:
    """With the same optimizer, whose state stays, as in Keras."""
    if mixed:
        keras.config.set_floatx("float32")
    reference, model = task.model(), gk.wrap(task.model(), PARTS)
    for one, train in ((reference, whole), (model, parts)):
        optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9)
        if mixed:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
        for loss in ("mse", "mae"):
            one.compile(optimizer, loss)
            train(task, one)
    assert int(model.optimizer.iterations) == 16
    assert distance(reference, model) < (1e-4 if mixed else CLOSE)


def test_a_window_that_compile_drops(task: Task) -> None:
    model = gk.wrap(task.model(), PARTS)
    model.compile("sgd", "mse")
    model.train_on_batch(task.x[:3], task.y[:3])
    with pytest.warns(UserWarning, match="open window of the former one is lost"):
        model.compile("sgd", "mse")
    model.train_on_batch(task.x[:3], task.y[:3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.compile(model.optimizer, "mae")
    assert model.flush().micro_batches == 1
    with pytest.raises(ValueError, match="has trained with losses that are means"):
        model.compile(model.optimizer, keras.losses.MeanSquaredError(reduction="sum"))
