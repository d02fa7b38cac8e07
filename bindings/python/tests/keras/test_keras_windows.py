# SPDX-License-Identifier: Apache-2.0
"""N micro-batches equal one batch N times as large, in fit() and out of it."""

from typing import Any

import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from conftest import BATCH, PARTS, Task, distance, moved, parts, whole

EXACT = 1e-6  # Keras rounds numbers of Python, and on torch products too, to f32 even in f64


class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(7, activation="tanh")
        self.outer = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.outer(self.inner(x))


class Derived(gk.GradientAccumulateModel):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(accum_steps=PARTS)
        self.inner = keras.layers.Dense(7, activation="tanh")
        self.outer = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.outer(self.inner(x))


def functional() -> Any:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(7, activation="tanh")(inputs)))


def subclassed(of: type = Subclassed) -> Any:
    keras.utils.set_random_seed(3)
    model = of()
    model(np.zeros((1, 6)))
    return model


def check(task: Task, reference: Any, model: Any, **options: Any) -> None:
    reference.compile("adam", "mse", **options)
    model.compile("adam", "mse", **options)
    whole(task, reference)
    parts(task, model)
    assert distance(reference, model) < EXACT
    assert int(model.optimizer.iterations) == 8


def test_sequential(task: Task) -> None:
    check(task, task.model(), gk.wrap(task.model(), PARTS))
    assert moved(gk.wrap(task.model(), PARTS), task.model) == 0


def test_in_f32(task: Task) -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    check(task, task.model(), gk.wrap(task.model(), PARTS))


def test_functional(task: Task) -> None:
    check(task, functional(), gk.wrap(functional(), PARTS))


def test_subclassed(task: Task) -> None:
    check(task, subclassed(), gk.wrap(subclassed(), PARTS))


def test_the_model_of_gradient_accumulator(task: Task) -> None:
    plain = functional()
    model = gk.GradientAccumulateModel(accum_steps=PARTS, inputs=plain.input, outputs=plain.output)
    check(task, functional(), model)


def test_a_model_derived_from_it(task: Task) -> None:
    check(task, subclassed(), subclassed(Derived))


def test_eager(task: Task) -> None:
    check(task, task.model(), gk.wrap(task.model(), PARTS), run_eagerly=True)


@pytest.mark.only("tensorflow", "jax")  # torch.compile takes a minute
def test_compiled_by_xla(task: Task) -> None:
    check(task, task.model(), gk.wrap(task.model(), PARTS), jit_compile=True)


def test_not_compiled_by_xla(task: Task) -> None:
    check(task, task.model(), gk.wrap(task.model(), PARTS), jit_compile=False)


def test_a_model_that_is_compiled_goes_on(task: Task) -> None:
    reference, model = task.model(), task.model()
    for one in (reference, model):
        one.compile("adam", "mse")
        whole(task, one)
    whole(task, reference)
    parts(task, gk.wrap(model, PARTS))
    assert distance(reference, model) < EXACT
    assert int(model.optimizer.iterations) == 16


def test_validation_sees_the_last_step(task: Task) -> None:
    reference, model = task.model(), gk.wrap(task.model(), PARTS)
    seen = []
    for one, train in ((reference, whole), (model, parts)):
        one.compile("adam", "mse", metrics=["mae"])
        seen.append(train(task, one, validation_data=(task.x[:8], task.y[:8])).history)
    for name in ("val_loss", "val_mae"):
        np.testing.assert_allclose(seen[1][name], seen[0][name], rtol=1e-6)
    assert set(seen[0]) == set(seen[1])


def test_train_on_batch_counts(task: Task) -> None:
    reference, model = task.model(), gk.wrap(task.model(), PARTS)
    reference.compile("sgd", "mse")
    model.compile("sgd", "mse")
    for start in range(0, 2 * BATCH, BATCH):
        reference.train_on_batch(task.x[start : start + BATCH], task.y[start : start + BATCH])
    for start in range(0, 2 * BATCH, BATCH // PARTS):
        before = model.get_weights()[0]
        model.train_on_batch(task.x[start : start + BATCH // PARTS], task.y[start : start + BATCH // PARTS])
        model.evaluate(task.x[:4], task.y[:4], verbose=0)  # which ends no window
        ends = (start + BATCH // PARTS) % BATCH == 0
        assert (np.abs(before - model.get_weights()[0]).max() > 0) == ends
    assert distance(reference, model) < EXACT
    assert model.step_result.micro_batches == PARTS


def test_flush_and_discard(task: Task) -> None:
    reference, model = task.model(), gk.wrap(task.model(), PARTS)
    reference.compile("sgd", "mse")
    model.compile("sgd", "mse")
    assert model.flush() is None
    model.train_on_batch(task.x[20:25], task.y[20:25])
    model.discard()
    assert model.flush() is None
    for start, end in ((0, 5), (5, 7)):  # uneven, and short
        model.train_on_batch(task.x[start:end], task.y[start:end])
    assert model.flush().applied
    reference.train_on_batch(task.x[:7], task.y[:7])
    assert distance(reference, model) < EXACT


def test_a_schedule_of_steps(task: Task) -> None:
    reference, model = task.model(), gk.wrap(task.model(), {0: 2, 2: 3})
    reference.compile("sgd", "mse")
    model.compile("sgd", "mse")
    for start, end in ((0, 6), (6, 12), (12, 21)):
        reference.train_on_batch(task.x[start:end], task.y[start:end])
    for start in range(0, 21, 3):
        model.train_on_batch(task.x[start : start + 3], task.y[start : start + 3])
    assert distance(reference, model) < EXACT


def test_the_sum_of_micro_batches(task: Task) -> None:
    reference, model = task.model(), gk.wrap(task.model(), PARTS, reduction="SUM")
    reference.compile(keras.optimizers.SGD(0.01 * PARTS), "mse")
    model.compile(keras.optimizers.SGD(0.01), "mse")
    reference.train_on_batch(task.x[:BATCH], task.y[:BATCH])
    for start in range(0, BATCH, 3):
        model.train_on_batch(task.x[start : start + 3], task.y[start : start + 3])
    assert distance(reference, model) < EXACT


def test_a_loop_of_ones_own(task: Task) -> None:
    """apply_gradients() outside of graphs: gradients that the program has made itself."""
    reference, model = task.model(), task.model()
    plain = keras.optimizers.Adam(0.01)
    optimizer = gk.GradientAccumulateOptimizer(keras.optimizers.Adam(0.01), accum_steps=2)
    random = np.random.default_rng(1)
    for _ in range(3):
        grads = [[random.normal(size=v.shape) for v in model.trainable_variables] for _ in range(2)]
        mean = [(a + b) / 2 for a, b in zip(*grads, strict=True)]
        plain.apply([keras.ops.convert_to_tensor(g) for g in mean], reference.trainable_variables)
        for one in grads:
            tensors = [keras.ops.convert_to_tensor(g) for g in one]
            optimizer.apply_gradients(zip(tensors, model.trainable_variables, strict=True))
    assert int(optimizer.iterations) == 3
    assert distance(reference, model) < EXACT


def test_weights_that_somebody_writes(task: Task) -> None:
    reference, model = task.model(), gk.wrap(task.model(), PARTS)
    reference.compile("adam", "mse")
    model.compile("adam", "mse")
    whole(task, reference, epochs=1)
    parts(task, model, epochs=1)
    other = [w * 0.5 for w in reference.get_weights()]
    reference.set_weights(other)
    model.set_weights(other)
    whole(task, reference, epochs=1)
    parts(task, model, epochs=1)
    assert distance(reference, model) < EXACT


def test_two_models_at_once(task: Task) -> None:
    reference, models = task.model(), [gk.wrap(task.model(), PARTS) for _ in range(2)]
    reference.compile("adam", "mse")
    whole(task, reference, epochs=1)
    for model in models:
        model.compile("adam", "mse")
    for start in range(0, len(task.x), 3):
        for model in models:
            model.train_on_batch(task.x[start : start + 3], task.y[start : start + 3])
    for model in models:
        model.flush()
        assert distance(reference, model) < EXACT


@pytest.mark.only("tensorflow")
def test_a_train_step_of_ones_own(task: Task) -> None:
    import tensorflow as tf

    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return {"mine": loss}

    keras.utils.set_random_seed(3)
    model = Own([keras.Input((6,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(3)])
    reference = task.model()
    check(task, reference, gk.wrap(model, PARTS))


def test_compile_and_fit_of_ones_own(task: Task) -> None:
    """They take what they are given and pass it on, as programs that extend Keras' do."""

    class Own(keras.Sequential):  # type: ignore[misc]
        def compile(self, optimizer: Any, mine: str, **kwargs: Any) -> None:
            super().compile(optimizer=optimizer, loss=mine, **kwargs)

        def fit(self, *args: Any, **kwargs: Any) -> Any:
            return super().fit(*args, **kwargs)

    class Other(Own):
        def compile(self, *args: Any, **kwargs: Any) -> None:
            super().compile(*args, **kwargs)

    for kind in (Own, Other):
        keras.utils.set_random_seed(3)
        model = kind([keras.Input((6,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(3)])
        model = gk.wrap(model, PARTS)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        parts(task, model)
        reference = task.model()
        reference.compile(keras.optimizers.Adam(0.01), "mse")
        whole(task, reference)
        assert distance(reference, model) < EXACT
        with pytest.raises(TypeError, match="multiple values"):
            model.fit(task.x, x=task.x)
        with pytest.raises(ValueError, match="steps_per_execution was 2"):
            model.compile("adam", "mse", steps_per_execution=2)

    class Two(keras.Sequential):  # type: ignore[misc]
        def compile(self, generator: Any, discriminator: Any) -> None:
            super().compile()

    model = gk.wrap(Two([keras.Input((6,)), keras.layers.Dense(3)]), PARTS)
    with pytest.raises(ValueError, match="no argument named optimizer"):
        model.compile("adam", "adam")


def test_layers_that_are_frozen(task: Task) -> None:
    reference, model = task.model(), gk.wrap(task.model(), PARTS)
    for one in (reference, model):
        one.layers[0].trainable = False
    check(task, reference, model)
    np.testing.assert_array_equal(model.layers[0].get_weights()[0], task.model().layers[0].get_weights()[0])


def test_an_embedding(task: Task) -> None:
    """Whose gradient is sparse on TensorFlow. Keras' Adam squares each part of a repeated row there, so SGD."""
    task.x = np.random.default_rng(3).integers(0, 11, size=(len(task.x), 5))
    models = []
    for make, train in ((lambda m: m, whole), (lambda m: gk.wrap(m, PARTS), parts)):
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Embedding(11, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
        model = make(keras.Sequential([keras.Input((5,), dtype="int32"), *layers]))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        train(task, model)
        models.append(model)
    assert distance(*models) < EXACT
