# SPDX-License-Identifier: Apache-2.0
"""The optimizer of compile() describes the step: compared with Keras' own, step for step."""

import functools
from typing import Any

import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from conftest import PARTS, Task, distance, parts, whole

O = keras.optimizers
CASES: dict[str, Any] = {
    "SGD": lambda: O.SGD(0.1),
    "SGD momentum": lambda: O.SGD(0.1, momentum=0.9),
    "SGD nesterov": lambda: O.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda: O.Adam(0.01),
    "Adam amsgrad": lambda: O.Adam(0.01, amsgrad=True, beta_1=0.8, weight_decay=0.1),
    "AdamW": lambda: O.AdamW(0.01),
    "Adagrad": lambda: O.Adagrad(0.1),
    "Adadelta": lambda: O.Adadelta(1.0),
    "Adamax": lambda: O.Adamax(0.01),
    "Nadam": lambda: O.Nadam(0.01),
    "RMSprop": lambda: O.RMSprop(0.01),
    "RMSprop centered": lambda: O.RMSprop(0.01, momentum=0.9, centered=True),
    "Lion": lambda: O.Lion(0.001),
    "Lamb": lambda: O.Lamb(0.01),
    "clipnorm": lambda: O.Adam(0.01, clipnorm=0.01),
    "clipvalue": lambda: O.SGD(0.1, clipvalue=0.01),
    "global_clipnorm": lambda: O.SGD(0.1, global_clipnorm=0.02),
    "ema": lambda: O.SGD(0.1, use_ema=True, ema_momentum=0.7),
    "ema overwritten": lambda: O.Adam(0.01, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3),
    "schedule": lambda: O.Adam(O.schedules.ExponentialDecay(0.01, 2, 0.5)),
    "callable": lambda: O.SGD(lambda: 0.05),
    "fixed scale": lambda: O.Adam(0.01, loss_scale_factor=128.0),
    "scaler": lambda: O.LossScaleOptimizer(O.Adam(0.01), initial_scale=64.0, dynamic_growth_steps=3),
}


@pytest.mark.parametrize("case", CASES)
def test_like_keras(task: Task, case: str) -> None:
    reference, model = task.model(), gk.wrap(task.model(), PARTS)
    reference.compile(CASES[case](), "mse")
    model.compile(CASES[case](), "mse")
    whole(task, reference)
    parts(task, model)
    # Keras rounds numbers of Python to f32 even in f64.
    assert distance(reference, model) < 1e-6
    assert int(model.optimizer.iterations) == int(reference.optimizer.iterations) == 8
    rate = float(keras.ops.convert_to_numpy(reference.optimizer.learning_rate))
    assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == rate


def test_variables_that_do_not_decay(task: Task) -> None:
    models = []
    for make, train in ((lambda m: m, whole), (lambda m: gk.wrap(m, PARTS), parts)):
        model = make(task.model())
        optimizer = O.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        model.compile(optimizer, "mse")
        train(task, model)
        models.append(model)
    assert distance(*models) < 1e-6


def test_callbacks_that_set_the_rate(task: Task) -> None:
    models = []
    for make, train in ((lambda m: m, whole), (lambda m: gk.wrap(m, PARTS), parts)):
        model = make(task.model())
        model.compile(O.SGD(0.1), "mse")
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=0, min_delta=10.0),
        ]
        train(task, model, epochs=4, callbacks=callbacks)
        models.append(model)
    assert distance(*models) < 1e-6
    assert float(keras.ops.convert_to_numpy(models[1].optimizer.learning_rate)) < 1e-4


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_validation_by_moving_averages(task: Task, swap_on_epoch: bool) -> None:
    """SwapEMAWeights exchanges variables and averages, and back."""
    models, losses = [], []
    for make, train in ((lambda m: m, whole), (lambda m: gk.wrap(m, PARTS), parts)):
        model = make(task.model())
        model.compile(O.SGD(0.125, use_ema=True, ema_momentum=0.75), "mse")
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
        history = train(task, model, epochs=3, callbacks=[swap], validation_data=(task.x, task.y)).history
        losses.append([*history["val_loss"], model.evaluate(task.x, task.y, verbose=0)])
        models.append(model)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    assert distance(*models) < 1e-6

    model = gk.wrap(task.model(), PARTS)
    model.compile("adam", "mse")
    with pytest.raises(ValueError, match="use_ema=False"):
        model.evaluate(task.x, task.y, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])


def test_averages_before_the_first_step_and_within_a_window(task: Task) -> None:
    losses = []
    for early in (True, False):
        model = gk.wrap(task.model(), PARTS)
        model.compile(O.SGD(0.125, use_ema=True, ema_momentum=0.75), "mse")
        evaluate = functools.partial(model.evaluate, task.x, task.y, verbose=0)
        if early:
            assert evaluate(callbacks=[keras.callbacks.SwapEMAWeights()]) == evaluate()
        for _ in range(2 * PARTS + 1):
            model.train_on_batch(task.x[:3], task.y[:3])
        before = model.get_weights()
        with pytest.raises(RuntimeError, match="within a window"):
            evaluate(callbacks=[keras.callbacks.SwapEMAWeights()])
        assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
        model.discard()
        losses += [evaluate(callbacks=[keras.callbacks.SwapEMAWeights()]), evaluate()]
        for a, b in zip(before, model.get_weights(), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-14)  # on TensorFlow, Keras exchanges by sums
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-12)
    assert losses[0] > 1.001 * losses[1]


def test_constraints(task: Task) -> None:
    models = []
    for make, train in ((lambda m: m, whole), (lambda m: gk.wrap(m, PARTS), parts)):
        model = make(
            task.model(
                lambda: [
                    keras.layers.Dense(
                        7, kernel_constraint=keras.constraints.MaxNorm(0.6), activation="tanh"
                    ),
                    keras.layers.Dense(3, kernel_constraint="non_neg"),
                ]
            )
        )
        model.compile("adam", "mse")
        train(task, model)
        models.append(model)
    assert distance(*models) < 1e-6
    assert models[1].get_weights()[2].min() >= 0


def test_adaptive_clipping_is_of_the_window(task: Task) -> None:
    """GradientAccumulator clips each micro-batch: semantics of a window are those of its batch."""
    whole_batch, windows = gk.wrap(task.model(), 1, use_agc=True), gk.wrap(task.model(), PARTS, use_agc=True)
    for model, train in ((whole_batch, whole), (windows, parts)):
        model.compile(O.SGD(1.0), "mse")
        train(task, model)
    assert distance(whole_batch, windows) < 1e-6

    # One step, by the definition of NFNets: units are the columns of a Dense kernel.
    model, plain = gk.wrap(task.model(), PARTS, use_agc=True, clip_factor=0.02), task.model()
    model.compile(O.SGD(1.0), "mse")
    plain.compile(O.SGD(1.0), "mse")
    before = plain.get_weights()
    plain.train_on_batch(task.x[:12], task.y[:12])
    for start in range(0, 12, 3):
        model.train_on_batch(task.x[start : start + 3], task.y[start : start + 3])
    for w, after, ours in zip(before, plain.get_weights(), model.get_weights(), strict=True):
        g = w - after
        axes = 0 if w.ndim == 2 else None
        norm, size = (np.sqrt((a * a).sum(axes, keepdims=True)) for a in (g, w))
        most = 0.02 * np.maximum(size, 1e-3)
        np.testing.assert_allclose(ours, w - np.where(norm > most, g * most / norm, g), rtol=0, atol=1e-6)


def test_a_loss_scale_that_overflows(task: Task) -> None:
    model = gk.wrap(task.model(), PARTS)
    model.compile(O.LossScaleOptimizer(O.SGD(0.1), initial_scale=2.0**100), "mse")
    before = model.get_weights()
    task.y[4] = np.inf
    for start in range(0, 12, 3):
        model.train_on_batch(task.x[start : start + 3], task.y[start : start + 3])
    assert not model.step_result.applied
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    assert float(keras.ops.convert_to_numpy(model.optimizer.variables[0])) == 2.0**99
    for start in range(12, 24, 3):
        model.train_on_batch(task.x[start : start + 3], task.y[start : start + 3])
    assert model.step_result.applied
    assert int(model.optimizer.iterations) == 1


MUON: dict[str, Any] = {
    "Muon": lambda: O.Muon(0.02),
    "Muon with others": lambda: O.Muon(
        0.02, exclude_layers=["last"], rms_rate=0.5, momentum=0.8, weight_decay=0.1, adam_weight_decay=0.2,
        adam_lr_ratio=0.25, ns_steps=3, muon_a=2.0, muon_b=-1.5, muon_c=0.5,
    ),
    "Muon as it is": lambda: O.Muon(0.05, rms_rate=None, nesterov=False, weight_decay=None, adam_weight_decay=None),
    "Muon clipped": lambda: O.Muon(O.schedules.ExponentialDecay(0.05, 2, 0.5), global_clipnorm=0.02),
}  # fmt: skip


def with_names(task: Task) -> Any:
    """In f32, which matrices of Muon have."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    return task.model(
        lambda: [
            keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(5, activation="tanh", name="wide_embedding"),
            keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3, name="last"),
        ]
    )  # fmt: skip


@pytest.mark.parametrize("case", MUON)
def test_muon_and_adam_beside_it(task: Task, case: str) -> None:
    reference, model = with_names(task), gk.wrap(with_names(task), PARTS)
    reference.compile(MUON[case](), "mse")
    model.compile(MUON[case](), "mse")
    whole(task, reference)
    parts(task, model)
    assert distance(reference, with_names(task)) > 0.02
    assert distance(reference, model) < 2e-4  # iterations in f32 magnify its rounding


def test_muon_takes_no_doubles(task: Task) -> None:
    model = gk.wrap(task.model(), PARTS)
    model.compile(O.Muon(), "mse")
    with pytest.raises(Exception, match="Muon"):
        parts(task, model)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(task: Task, policy: str) -> None:
    models = []
    for make, train in ((lambda m: m, whole), (lambda m: gk.wrap(m, PARTS, mixed_precision=True), parts)):
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)
        model = make(task.model())
        model.compile(O.SGD(0.1), "mse")
        assert (
            isinstance(model.optimizer, O.LossScaleOptimizer) == (policy == "mixed_float16")
            or make is not None
        )
        train(task, model, epochs=3)
        models.append(model)
    assert distance(*models) < 5e-3  # of 16-bit activations
    assert distance(models[1], task.model()) > 0.02


def test_what_the_library_has_not() -> None:
    for optimizer, name in (
        (O.Ftrl(), "Ftrl"), (O.Adafactor(), "Adafactor"), (O.Muon(rms_rate=0.0), "rms_rate"),
        (O.Muon(adam_lr_ratio=0.0), "adam_lr_ratio"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            gk.GradientAccumulateOptimizer(optimizer)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        gk.GradientAccumulateOptimizer(O.Adam(gradient_accumulation_steps=2))

    class Own(O.SGD):  # type: ignore[misc]
        pass

    with pytest.raises(ValueError, match="Own has no counterpart"):
        gk.GradientAccumulateOptimizer(Own())
