# SPDX-License-Identifier: Apache-2.0
"""A run that stops goes on: in the middle of a window, and from and to plain Keras."""

import copy
import pathlib
import pickle
from typing import Any

import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from conftest import BACKEND, PARTS, Task, distance, parts, whole
from test_keras_optimizers import CASES, MUON, with_names

KINDS = [
    "SGD momentum", "Adam", "Adam amsgrad", "AdamW", "Adagrad", "Adadelta", "Adamax", "Nadam", "RMSprop centered",
    "Lion", "Lamb", "ema", "schedule", "scaler", "Muon with others",
]  # fmt: skip
OPTIMIZERS = CASES | MUON


def micro(task: Task, model: Any, start: int, end: int) -> None:
    for index in range(start, end):
        part = slice(index * 3 % 36, index * 3 % 36 + 3)
        model.train_on_batch(task.x[part], task.y[part])


def batch_norm(task: Task) -> Any:
    return task.model(
        lambda: [
            keras.layers.Dense(7, activation="tanh"), gk.BatchNormalization(momentum=0.75), keras.layers.Dense(3),
        ]
    )  # fmt: skip


@keras.saving.register_keras_serializable(package="test_keras_state")
class Derived(gk.GradientAccumulateModel):  # type: ignore[misc]
    """A model of the user's own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        keras.utils.set_random_seed(3)
        self.dense = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def get_config(self) -> Any:
        return {"accum_steps": PARTS}


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("at", [6, 8])
def test_a_model_goes_on_bit_for_bit(task: Task, tmp_path: pathlib.Path, case: str, at: int) -> None:
    """6 micro-batches: in the middle of the second window; 8: between windows."""
    model = gk.wrap(with_names(task) if case in MUON else batch_norm(task), PARTS)
    model.compile(OPTIMIZERS[case](), "mse")
    micro(task, model, 0, at)
    path = str(tmp_path / "model.keras")
    model.save(path)
    micro(task, model, at, 14)
    model.flush()

    other = gk.wrap(keras.models.load_model(path))
    assert other.optimizer.accumulation.accum_steps == PARTS
    micro(task, other, at, 14)
    other.flush()
    assert int(other.optimizer.iterations) == int(model.optimizer.iterations) == 4
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


# Plain Keras 3.15 cannot fit() twice with use_ema on JAX.
@pytest.mark.parametrize("case", [case for case in KINDS if (case, BACKEND) != ("ema", "jax")])
def test_from_plain_keras_and_to_it(task: Task, tmp_path: pathlib.Path, case: str) -> None:
    make = with_names if case in MUON else Task.model
    plain, model = make(task), gk.wrap(make(task), PARTS)
    for one in (plain, model):
        one.compile(OPTIMIZERS[case](), "mse")
    whole(task, plain, epochs=1)
    plain.save_weights(tmp_path / "plain.weights.h5")
    if case == "scaler":  # a model that has trained forgets what it had; others are not built yet
        parts(task, model, epochs=1)
    model.load_weights(tmp_path / "plain.weights.h5")
    parts(task, model, epochs=1)
    model.save_weights(tmp_path / "ours.weights.h5")

    back = make(task)
    back.compile(OPTIMIZERS[case](), "mse")
    back.optimizer.build(back.trainable_variables)
    back.load_weights(tmp_path / "ours.weights.h5")
    whole(task, back, epochs=1)
    for _ in range(2):  # fits, each of which ends with the moving averages
        whole(task, plain, epochs=1)
    assert int(back.optimizer.iterations) == 12
    assert distance(plain, back) < (2e-4 if case in MUON else 2e-6)


def test_a_plain_model_loads_the_file(task: Task, tmp_path: pathlib.Path) -> None:
    model = gk.wrap(task.model(), PARTS)
    model.compile("adam", "mse")
    parts(task, model)
    path = str(tmp_path / "model.keras")
    model.save(path)
    plain = keras.models.load_model(path, compile=False)
    assert type(plain) is keras.Sequential
    assert distance(plain, model) == 0

    loaded = keras.models.load_model(path)  # which is to be wrapped before it trains, and says so
    with pytest.raises(RuntimeError, match="wrap"):
        loaded.train_on_batch(task.x[:3], task.y[:3])
    gk.wrap(loaded).train_on_batch(task.x[:3], task.y[:3])


def test_the_model_of_gradient_accumulator_is_saved_as_what_it_is(task: Task, tmp_path: pathlib.Path) -> None:
    inputs = keras.Input((6,))
    model = gk.GradientAccumulateModel(accum_steps=2, inputs=inputs, outputs=keras.layers.Dense(3)(inputs))
    model.compile("adam", "mse")
    micro(task, model, 0, 3)
    model.save(tmp_path / "model.keras")
    other = gk.wrap(keras.models.load_model(tmp_path / "model.keras"))
    micro(task, model, 3, 4)
    micro(task, other, 3, 4)
    assert distance(model, other) == 0


def test_options_come_back(task: Task, tmp_path: pathlib.Path) -> None:
    import gradaccum

    config = gradaccum.Config(nonfinite=gradaccum.Nonfinite.DROP_MICRO, seed=5)
    model = gk.wrap(task.model(), {0: 2, 5: 4}, use_agc=True, clip_factor=0.25, config=config)
    model.compile("sgd", "mse")
    micro(task, model, 0, 3)
    model.save(tmp_path / "model.keras")
    own = gk.wrap(keras.models.load_model(tmp_path / "model.keras")).optimizer.accumulation
    assert own.accum_steps == {0: 2, 5: 4}
    assert (own.clip.scope, own.clip.agc_factor) == (gradaccum.ClipScope.AGC, 0.25)
    assert (own.config.nonfinite, own.config.seed) == (gradaccum.Nonfinite.DROP_MICRO, 5)


def test_checkpoints_of_fit(task: Task, tmp_path: pathlib.Path) -> None:
    """ModelCheckpoint within a window, and BackupAndRestore at an epoch."""
    model = gk.wrap(task.model(), PARTS)
    model.compile("adam", "mse")
    path = str(tmp_path / "at{batch:02d}.keras")
    parts(task, model, epochs=1, callbacks=[keras.callbacks.ModelCheckpoint(path, save_freq=6)])
    other = gk.wrap(keras.models.load_model(tmp_path / "at06.keras"))
    assert other.optimizer.accumulation.settle(_values()).window.micro_batches == 2
    for start in range(18, len(task.x), 3):
        other.train_on_batch(task.x[start : start + 3], task.y[start : start + 3])
    other.flush()
    assert distance(model, other) == 0

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    reference = gk.wrap(task.model(), PARTS)
    reference.compile("adam", "mse")
    parts(task, reference, epochs=3)
    for callbacks in ([Stop()], []):
        model = gk.wrap(task.model(), PARTS)
        model.compile("adam", "mse")
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        try:
            parts(task, model, epochs=3, callbacks=[backup, *callbacks])
        except KeyboardInterrupt:
            assert callbacks
    assert int(model.optimizer.iterations) == 12
    assert distance(reference, model) == 0


def _values() -> Any:
    from gradaccum.keras._backends import Variables

    return Variables()


def test_state_in_16_bits(task: Task, tmp_path: pathlib.Path) -> None:
    """Variables of bfloat16: masters and slots of the library have more bits than Keras' own."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("bfloat16")
    model = gk.wrap(task.model(), PARTS)
    model.compile("adam", "mse")
    micro(task, model, 0, 6)
    model.save(tmp_path / "model.keras")
    micro(task, model, 6, 12)
    other = gk.wrap(keras.models.load_model(tmp_path / "model.keras"))
    micro(task, other, 6, 12)
    assert distance(model, other) == 0


def test_sums_with_regularisers_go_on(task: Task, tmp_path: pathlib.Path) -> None:
    """Regularisers count in the first micro-batch of a window, which was before the save."""

    def make() -> Any:
        return task.model(lambda: [keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.5))])

    model = gk.wrap(make(), PARTS)
    model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction="sum"))
    micro(task, model, 0, 2)
    model.save(tmp_path / "model.keras")
    micro(task, model, 2, 4)
    other = gk.wrap(keras.models.load_model(tmp_path / "model.keras"))
    micro(task, other, 2, 4)
    assert distance(model, make()) > 0
    assert distance(model, other) == 0


@pytest.mark.parametrize("kind", ["wrapped", "derived"])
@pytest.mark.parametrize(
    "copied", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy], ids=["pickle", "copy"]
)
def test_copies_go_on_bit_for_bit(task: Task, kind: str, copied: Any) -> None:
    """From the middle of a window."""
    model = (
        gk.wrap(batch_norm(task), PARTS, keep_window=True)
        if kind == "wrapped"
        else Derived(accum_steps=PARTS)
    )
    model.compile(CASES["Adam"](), "mse")
    micro(task, model, 0, 6)
    other = copied(model)
    assert other is not model
    for one in (model, other):
        micro(task, one, 6, 12)
    assert [a.tobytes() for a in model.get_weights()] == [b.tobytes() for b in other.get_weights()]
    assert other.flush() is None
    untrained = copied(gk.wrap(task.model(), PARTS))
    untrained.compile("sgd", "mse")
    micro(task, untrained, 0, 3)
    assert untrained.flush() is not None


def test_files_that_do_not_fit(task: Task, tmp_path: pathlib.Path) -> None:
    model = task.model()
    model.compile("adam", "mse")
    whole(task, model, epochs=1)
    model.save_weights(tmp_path / "adam.weights.h5")
    other = gk.wrap(task.model(), PARTS)
    other.compile(keras.optimizers.SGD(0.1), "mse")
    other.optimizer.build(other.trainable_variables)
    with pytest.raises(ValueError, match="another kind"):
        other.load_weights(tmp_path / "adam.weights.h5")


def test_no_slots_of_keras(task: Task) -> None:
    model = gk.wrap(task.model(), PARTS)
    model.compile("adam", "mse")
    parts(task, model)
    assert model.optimizer.variables == []
    assert len(model.optimizer.accumulation.optimizer.variables) == 2  # iterations and the learning rate
