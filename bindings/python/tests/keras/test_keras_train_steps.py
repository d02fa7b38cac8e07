# SPDX-License-Identifier: Apache-2.0
"""Models with a train_step() of their own, as in Keras' guides: each equals one batch by plain Keras."""

import warnings
from collections.abc import Callable
from typing import Any

import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from conftest import BACKEND, PARTS, Task, distance, parts, whole
from keras import ops

CLOSE = 1e-6
SPLIT = (5, 1, 4, 2)  # uneven micro-batches of a batch of 12


class Guided(keras.Sequential):  # type: ignore[misc]
    """The trainings steps of Keras' guides «customizing what happens in fit()», around losses of one's own."""

    def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
        """The loss that is trained."""
        return self.compute_loss(x, y, y_pred)

    def updated(self, values: Any, y: Any, y_pred: Any, loss: Any) -> tuple[dict[str, Any], Any]:
        """On JAX, the logs and the metrics, those of compile()."""
        logs, new = {}, []
        for metric in self.metrics:
            own = values[len(new) : len(new) + len(metric.variables)]
            if metric.name == "loss":
                own = metric.stateless_update_state(own, loss)
            else:
                own = metric.stateless_update_state(own, y, y_pred)
            logs[metric.name] = metric.stateless_result(own)
            new += own
        return logs, new

    if BACKEND == "jax":

        def compute_loss_and_updates(
            self, trainable: Any, non_trainable: Any, x: Any, y: Any, training: bool = False
        ) -> Any:
            y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=training)
            return self.loss_of(x, y, y_pred), (y_pred, non_trainable)

        def train_step(self, state: Any, data: Any) -> Any:
            import jax

            trainable, non_trainable, own, metrics = state
            x, y, *_ = data  # train_on_batch() has sample weights, too
            grad_fn = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
            (loss, (y_pred, non_trainable)), grads = grad_fn(trainable, non_trainable, x, y, training=True)
            trainable, own = self.optimizer.stateless_apply(own, grads, trainable)
            logs, metrics = self.updated(metrics, y, y_pred, loss)
            return logs, (trainable, non_trainable, own, metrics)

    elif BACKEND == "tensorflow":

        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            x, y, *_ = data  # train_on_batch() has sample weights, too
            with tf.GradientTape() as tape:
                loss = self.loss_of(x, y, self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return {"mine": loss}

    else:

        def train_step(self, data: Any) -> Any:
            import torch

            x, y, *_ = data  # train_on_batch() has sample weights, too
            self.zero_grad()
            loss = self.loss_of(x, y, self(x, training=True))
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
            return {"mine": loss}


class MetricsOfOnesOwn(Guided):
    """The second form of the guide: a loss object and metrics that are attributes, and sliced by their numbers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    @property
    def metrics(self) -> Any:
        return [self.loss_tracker, self.mae_metric]

    def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
        return self.loss_fn(y, y_pred)

    def updated(self, values: Any, y: Any, y_pred: Any, loss: Any) -> tuple[dict[str, Any], Any]:
        count = len(self.loss_tracker.variables)
        first = self.loss_tracker.stateless_update_state(values[:count], loss)
        second = self.mae_metric.stateless_update_state(values[count:], y, y_pred)
        logs = {"loss": self.loss_tracker.stateless_result(first), "mae": self.mae_metric.stateless_result(second)}
        return logs, first + second


class MeanOfOnesOwn(Guided):
    """No Loss object at all, as in the guide's variational autoencoder."""

    def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
        return ops.mean(ops.sum(ops.square(ops.subtract(y_pred, y)), axis=1)) + 0.1 * ops.mean(ops.abs(y_pred))


class UnreducedLoss(Guided):
    """A Loss object with reduction="none", and a mean of one's own."""

    def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
        return ops.mean(keras.losses.MeanSquaredError(reduction="none")(y, y_pred))


class MaskedMean(Guided):
    """A mean over elements that are counted."""

    def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
        mask = ops.cast(ops.greater(y, 0), y_pred.dtype)
        losses = ops.square(ops.subtract(y_pred, y)) * mask
        return ops.sum(losses) / gk.divided_by(ops.sum(mask))


def made(kind: Any) -> Any:
    keras.utils.set_random_seed(3)
    return kind([keras.Input((6,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(3)])


KINDS = [Guided, MetricsOfOnesOwn, MeanOfOnesOwn, UnreducedLoss, MaskedMean]


def compare(task: Task, reference: Any, model: Any, windows: int = 3, **data: Any) -> None:
    """One batch of 12 through Keras, and in uneven parts through a window."""
    for _ in range(windows):
        reference.train_on_batch(task.x[:12], task.y[:12])
        at = 0
        for size in SPLIT:
            model.train_on_batch(task.x[at : at + size], task.y[at : at + size])
            at += size
        model.flush()
    assert int(model.optimizer.iterations) == windows
    assert distance(reference, model) < CLOSE


def both(make: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    reference, model = make(), gk.wrap(make(), 100)
    for one in (reference, model):
        one.compile(keras.optimizers.SGD(0.1), **{"loss": "mse", **options})
    return reference, model


@pytest.mark.parametrize("kind", KINDS)
def test_uneven_micro_batches(task: Task, kind: Any) -> None:
    options = {} if kind is Guided else {"loss": None}
    reference, model = both(lambda: made(kind), metrics=["mae"] if kind is Guided else None, **options)
    compare(task, reference, model)


@pytest.mark.parametrize("kind", [Guided, MetricsOfOnesOwn, MeanOfOnesOwn])
@pytest.mark.parametrize("eager", [False, True])
def test_fit(task: Task, kind: Any, eager: bool) -> None:
    reference, model = made(kind), gk.wrap(made(kind), PARTS)
    logs = []
    for one, train in ((reference, whole), (model, parts)):
        one.compile("adam", "mse" if kind is Guided else None, run_eagerly=eager)
        logs.append(set(train(task, one).history))
    assert distance(reference, model) < CLOSE and logs[0] == logs[1]
    assert int(model.optimizer.iterations) == 8


def test_regularisers_with_sums(task: Task) -> None:
    """Which count in the first micro-batch of a window."""

    def make() -> Any:
        keras.utils.set_random_seed(3)
        return Regularised([keras.Input((6,)), keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.5))])

    class Regularised(Guided):
        if BACKEND == "jax":  # where train_step() is to hand on losses of the call

            def compute_loss_and_updates(
                self, trainable: Any, non_trainable: Any, x: Any, y: Any, training: bool = False
            ) -> Any:
                y_pred, non_trainable, losses = self.stateless_call(
                    trainable, non_trainable, x, training=training, return_losses=True
                )
                self._losses_override = losses
                loss = self.compute_loss(x, y, y_pred)
                self._losses_override = []
                return loss, (y_pred, non_trainable)

    reference, model = both(make, loss=keras.losses.MeanSquaredError(reduction="sum"))
    for one in (reference, model):
        one.optimizer.learning_rate = 0.01
    compare(task, reference, model)


def test_statistics_of_batch_norm(task: Task) -> None:
    """They leave the function whose gradient is taken, as divisors do."""
    keras.utils.set_random_seed(3)
    layer = gk.BatchNormalization(momentum=0.75)
    model = gk.wrap(Guided([keras.Input((6,)), layer, keras.layers.Dense(3)]), PARTS)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    parts(task, model, epochs=1)
    mean, variance = np.zeros(6), np.ones(6)
    for start in range(0, len(task.x), 12):
        rows = task.x[start : start + 12]
        mean, variance = 0.75 * mean + 0.25 * rows.mean(0), 0.75 * variance + 0.25 * rows.var(0)
    np.testing.assert_allclose(np.asarray(layer.get_weights()[2]), mean, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(layer.get_weights()[3]), variance, rtol=1e-5)


def test_data_of_another_form(task: Task) -> None:
    """x alone, as a generative model is given."""

    class Alone(MeanOfOnesOwn):
        if BACKEND == "jax":

            def train_step(self, state: Any, data: Any) -> Any:
                return super().train_step(state, (data[0], data[0][:, :3]))

        else:

            def train_step(self, data: Any) -> Any:
                return super().train_step((data[0], data[0][:, :3]))

    reference, model = made(Alone), gk.wrap(made(Alone), PARTS)
    for one, size in ((reference, 12), (model, 3)):
        one.compile("sgd")
        one.fit(_Batches(task.x, size), shuffle=False, verbose=0)
    assert distance(reference, model) < CLOSE and int(model.optimizer.iterations) == 4


class _Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __init__(self, x: Any, size: int) -> None:
        super().__init__()
        self.x, self.size = x, size

    def __len__(self) -> int:
        return -(-len(self.x) // self.size)

    def __getitem__(self, index: int) -> Any:
        return (self.x[index * self.size : (index + 1) * self.size],)


def test_sums_that_compile_does_not_know(task: Task) -> None:
    class Summed(Guided):
        def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
            return keras.losses.MeanSquaredError(reduction="sum")(y, y_pred)

    model = gk.wrap(made(Summed), 4)
    model.compile("sgd")
    with pytest.raises(ValueError, match="which compile\\(\\) was not given"):
        model.train_on_batch(task.x[:3], task.y[:3])

    model = gk.wrap(made(MeanOfOnesOwn), 4)
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    with pytest.raises(ValueError, match="trains by others"):
        model.train_on_batch(task.x[:3], task.y[:3])


def test_a_loss_scale_that_is_not_used(task: Task) -> None:
    """The gradients would be divided by a scale that the loss was not multiplied by."""
    for optimizer in (
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), keras.optimizers.SGD(0.1, loss_scale_factor=8.0)
    ):  # fmt: skip
        model = gk.wrap(made(Guided), 4)
        model.compile(optimizer, "mse")
        with pytest.raises(ValueError, match="scale_loss"):
            model.train_on_batch(task.x[:3], task.y[:3])


@pytest.mark.parametrize("told", [False, True])
def test_a_masked_mean_in_a_loss_function(task: Task, told: bool) -> None:
    """As in many programs that train on sequences: its divisor is said, or asked for."""
    y = np.random.default_rng(4).integers(0, 5, size=(12, 6))
    task.x = np.random.default_rng(3).normal(size=(12, 6, 2))

    def loss(labels: Any, y_pred: Any) -> Any:
        losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")(labels, y_pred)
        mask = ops.cast(ops.not_equal(labels, 0), losses.dtype)
        count = ops.sum(mask)
        return ops.sum(losses * mask) / (gk.divided_by(count) if told else count)

    def make() -> Any:
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((6, 2)), keras.layers.Dense(5)])

    task.y = y
    reference, model = both(make, loss=loss)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if told:
            compare(task, reference, model)
        else:
            model.train_on_batch(task.x[:3], task.y[:3])
            model.train_on_batch(task.x[3:6], task.y[3:6])
    assert sum("divided_by" in str(one.message) for one in seen) == (not told)


@pytest.mark.only("jax")
def test_a_loss_within_another_transformation(task: Task) -> None:
    import jax

    class Within(Guided):
        def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
            return jax.jit(lambda a, b: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")(
                a, b, sample_weight=ops.sum(a, axis=1)
            ))(y, y_pred)  # fmt: skip

    model = gk.wrap(made(Within), 4)
    model.compile("sgd")
    before = model.get_weights()
    for call in (model.fit, model.train_on_batch):
        with pytest.raises(ValueError, match="transformation of JAX"):
            call(task.x[:3], task.y[:3])
        assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
