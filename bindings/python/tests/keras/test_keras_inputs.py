# SPDX-License-Identifier: Apache-2.0
"""Bad input and interruptions: a message, and nothing is lost or half-changed."""

import importlib
from typing import Any

import gradaccum
import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from conftest import PARTS, Task, distance, parts, whole


def test_arguments(task: Task) -> None:
    for steps in (0, -1, 1.5, True, {1: 2}, {0: 0}):
        with pytest.raises(ValueError, match="accum_steps"):
            gk.wrap(task.model(), steps)
        with pytest.raises(ValueError, match="accum_steps"):
            gk.GradientAccumulateOptimizer("sgd", steps)
    with pytest.raises(ValueError, match="accum_steps is missing"):
        gk.wrap(task.model())
    with pytest.raises(TypeError, match=r"expected a keras\.Model"):
        gk.wrap("model", 2)
    with pytest.raises(ValueError, match="wrapped already"):
        gk.wrap(gk.wrap(task.model(), 2), 2)
    with pytest.raises(TypeError, match="accum_step"):
        gk.wrap(task.model(), accum_step=2)
    with pytest.raises(TypeError, match="unknown"):
        gk.GradientAccumulateModel(accum_steps=2, inputs=keras.Input((3,)), unknown=1)
    with pytest.raises(ValueError, match="experimental_distributed_support"):
        gk.wrap(task.model(), 2, experimental_distributed_support=True)
    with pytest.raises(ValueError, match="reduction"):
        gk.GradientAccumulateOptimizer("sgd", 2, "AVERAGE")
    with pytest.raises(ValueError, match="already"):
        gk.GradientAccumulateOptimizer(gk.GradientAccumulateOptimizer("sgd", 2), 2)
    with pytest.raises(ValueError, match="clips by itself"):
        gk.wrap(task.model(), 2, use_agc=True).compile(keras.optimizers.SGD(clipnorm=1.0), "mse")
    with pytest.raises(ValueError, match="use_agc"):
        gk.wrap(task.model(), 2, use_agc=True, clip=gradaccum.Clip(max_norm=1.0))
    with pytest.raises(ValueError, match="steps_per_execution"):
        gk.wrap(task.model(), 2).compile("sgd", "mse", steps_per_execution=4)
    with pytest.raises(ValueError, match="LIVE"):
        config = gradaccum.Config(gradient_life=gradaccum.GradientLife.LIVE)
        gk.GradientAccumulateOptimizer("sgd", 2, config=config)


@pytest.mark.only("torch")
def test_several_processes_of_torch_raise(task: Task) -> None:
    """Nothing reduces the gradients of fit(), so that each process would train a model of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # a group without other processes

    distributed: Any = importlib.import_module("torch.distributed")
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ValueError, match="several processes of torch.distributed"):
            gk.wrap(task.model(), 2).compile("sgd", "mse")
    finally:
        distributed.destroy_process_group()
    gk.wrap(task.model(), 2).compile("sgd", "mse")


def test_a_model_that_is_not_compiled(task: Task) -> None:
    model = gk.wrap(task.model(), 2)
    with pytest.raises(ValueError, match="compile"):
        model.fit(task.x, task.y, verbose=0)


def test_a_layer_added_after_compile(task: Task) -> None:
    model = gk.wrap(task.model(), 2)
    model.compile("sgd", "mse")
    model.train_on_batch(task.x[:3], task.y[:3])
    model.add(keras.layers.Dense(3))
    model.compile(model.optimizer, "mse")  # the same optimizer, which knows the former variables
    with pytest.raises(ValueError, match="not one of those"):
        model.train_on_batch(task.x[:3], task.y[:3])
    model.compile("sgd", "mse")
    model.train_on_batch(task.x[:3], task.y[:3])


@pytest.mark.parametrize("policy", [gradaccum.Nonfinite.SKIP_STEP, gradaccum.Nonfinite.DROP_MICRO])
def test_losses_that_are_not_numbers(task: Task, policy: Any) -> None:
    task.y[3] = np.nan  # of the second micro-batch
    model = gk.wrap(task.model(), PARTS, config=gradaccum.Config(nonfinite=policy))
    model.compile("sgd", "mse")
    before = model.get_weights()
    for start in range(0, 12, 3):
        model.train_on_batch(task.x[start : start + 3], task.y[start : start + 3])
    if policy == gradaccum.Nonfinite.SKIP_STEP:
        assert not model.step_result.applied
        assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
        return
    assert model.step_result.window_dropped == 1
    reference = task.model()
    reference.compile("sgd", "mse")
    keep = [0, 1, 2, 6, 7, 8, 9, 10, 11]
    reference.train_on_batch(task.x[keep], task.y[keep])
    assert distance(reference, model) < 1e-6


class Stop(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.at = at
        self.error = error

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self.at:
            raise self.error


@pytest.mark.parametrize("keep", [False, True])
def test_fit_that_is_interrupted(task: Task, keep: bool) -> None:
    model = gk.wrap(task.model(), PARTS, keep_window=keep)
    model.compile("sgd", "mse")
    with pytest.raises(KeyboardInterrupt):
        parts(task, model, callbacks=[Stop(5, KeyboardInterrupt)])  # two micro-batches of the second window
    assert int(model.optimizer.iterations) == 1
    result = model.flush()
    assert (result is None) != keep
    if keep:
        assert result.micro_batches == 2


def test_an_exception_in_fit(task: Task) -> None:
    """On JAX, whose fit() takes the values out of the variables: they are there again."""

    def batches() -> Any:
        for index in range(8):
            yield task.x[3 * index : 3 * index + 3], np.zeros((3, 3 if index < 5 else 4))

    model = gk.wrap(task.model(), PARTS, keep_window=True)
    model.compile("sgd", "mse", metrics=["mae"])
    with pytest.raises(Exception):  # noqa: B017: each backend has one of its own
        model.fit(batches(), steps_per_epoch=8, verbose=0)
    assert int(model.optimizer.iterations) == 1 and model.flush().micro_batches == 1
    reference = task.model()
    reference.compile("sgd", "mse")
    for rows in (slice(0, 12), slice(12, 15)):
        reference.train_on_batch(task.x[rows], np.zeros((len(task.x[rows]), 3)))
    assert distance(reference, model) < 1e-6
    model.evaluate(task.x, task.y, verbose=0)


def test_an_exception_in_a_step(task: Task) -> None:
    """A micro-batch that fails is not part of the window; the others are."""
    reference, model = task.model(), gk.wrap(task.model(), PARTS)
    reference.compile("sgd", "mse")
    model.compile("sgd", "mse")
    model.train_on_batch(task.x[:3], task.y[:3])
    with pytest.raises(Exception):  # noqa: B017: each backend has one of its own
        model.train_on_batch(task.x[:3], np.zeros((3, 7, 2)))
    model.train_on_batch(task.x[3:6], task.y[3:6])
    assert model.flush().micro_batches == 2
    reference.train_on_batch(task.x[:6], task.y[:6])
    assert distance(reference, model) < 1e-6


def test_training_that_stops_early(task: Task) -> None:
    class StopTraining(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch >= 5

    reference, model = task.model(), gk.wrap(task.model(), PARTS)
    model.compile("sgd", "mse")
    parts(task, model, callbacks=[StopTraining()])
    reference.compile("sgd", "mse")
    reference.train_on_batch(task.x[:12], task.y[:12])
    reference.train_on_batch(task.x[12:18], task.y[12:18])
    assert distance(reference, model) < 1e-6


def test_numbers_of_steps_in_the_logs(task: Task) -> None:
    model = gk.wrap(task.model(), PARTS, step_logs=True, config=gradaccum.Config(measure_norm=True))
    model.compile("sgd", "mse", metrics=["mae"])
    seen: list[dict[str, Any]] = []

    class Look(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(dict(logs))

    history = parts(task, model, callbacks=[Look()]).history
    assert "grad_norm" not in seen[2] and seen[3]["grad_norm"] > 0
    assert history["steps"] == [4, 8]
    assert set(history) == {
        "loss", "mae", "grad_norm", "clip_factor", "lr", "loss_scale", "noise_scale", "steps",
    }  # fmt: skip


def test_a_model_that_is_not_wrapped(task: Task) -> None:
    """Compiled with the optimizer: it says what to do, loses nothing by that, and trains once it is wrapped."""
    reference, model = task.model(), task.model()
    reference.compile("sgd", "mse")
    model.compile(gk.GradientAccumulateOptimizer("sgd", PARTS), "mse")
    before = model.get_weights()
    for call in (model.fit, model.train_on_batch):
        with pytest.raises(RuntimeError, match=r"gradaccum\.keras\.wrap"):
            call(task.x[:3], task.y[:3])
        assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    whole(task, reference)
    parts(task, gk.wrap(model))
    assert distance(reference, model) < 1e-6


def test_gradients_of_another_shape(task: Task) -> None:
    model = task.model()
    optimizer = gk.GradientAccumulateOptimizer("sgd", 2)
    gradients = [keras.ops.zeros(v.shape) for v in model.trainable_variables]
    gradients[1] = keras.ops.zeros((8,))
    with pytest.raises(ValueError, match="shape"):
        optimizer.apply(gradients, model.trainable_variables)
    with pytest.raises(ValueError, match="gradients, expected"):
        optimizer.apply(gradients[:2])
    gradients[1] = keras.ops.zeros((7,), dtype="float32")  # which is converted
    optimizer.apply(gradients, model.trainable_variables)
    assert optimizer.flush().micro_batches == 1


@pytest.mark.only("tensorflow")
def test_distribution_is_refused(task: Task) -> None:
    import subprocess
    import sys

    program = """
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
import keras, gradaccum.keras as gk
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = gk.wrap(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), 2)
try:
    model.compile("sgd", "mse")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "tf.distribute" in done.stdout and "a rank" in done.stdout, done.stdout + done.stderr


def test_weights_that_are_written_within_a_window_of_16_bits(task: Task) -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("bfloat16")
    reference, model = (gk.wrap(task.model(), 2) for _ in range(2))
    for one in (reference, model):
        one.compile("sgd", "mse")
    model.train_on_batch(task.x[:3], task.y[:3])
    written = [w * 0.5 for w in model.get_weights()]
    model.set_weights(written)
    with pytest.raises(RuntimeError, match="master copy"):
        model.train_on_batch(task.x[3:6], task.y[3:6])
    model.discard()
    reference.set_weights(written)
    for one in (reference, model):
        for start in (0, 3):
            one.train_on_batch(task.x[start : start + 3], task.y[start : start + 3])
        assert one.step_result.applied
    assert distance(reference, model) == 0
