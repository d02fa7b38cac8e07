# SPDX-License-Identifier: Apache-2.0
"""gradaccum.check in loops of Keras on each of its backends."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from check_models import MEAN, X, Y, accumulating, block, fit, is_silent, loss, made, names, values
from conftest import BACKEND
from gradaccum import check

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SCHEDULE = "schedule moved per micro-batch"
AVERAGE = "moving average per micro-batch"
STATISTICS = "batch norm per micro-batch"

# ---- Loops that are right

RIGHT: dict[str, Callable[[], check.Report]] = {
    "plain": lambda: fit(made(), keras.optimizers.SGD(0.1)),
    "even micro-batches": lambda: fit(made(), accumulating()),
    "clipped": lambda: fit(made(), accumulating(global_clipnorm=0.01)),
    "clipped by value": lambda: fit(made(), accumulating(clipvalue=1e-3)),
    "decay": lambda: fit(made(), accumulating(weight_decay=0.1)),
    "a loss scale": lambda: fit(made(), keras.optimizers.LossScaleOptimizer(accumulating())),
    "a fixed loss scale": lambda: fit(made(), accumulating(loss_scale_factor=64.0)),
    "a loss by its name": lambda: fit(
        keras.Sequential([made(), keras.layers.Softmax()]), accumulating(), given="sparse_categorical_crossentropy"
    ),
    "compiled": lambda: fit(made(), accumulating(), **({} if BACKEND == "torch" else {"jit_compile": True})),
    "eager": lambda: fit(made(), accumulating(), run_eagerly=True),
    "a penalty": lambda: fit(made(keras.layers.Dense(4, kernel_regularizer="l2")), accumulating()),
    "dropout": lambda: fit(made(keras.layers.Dropout(0.2)), accumulating()),
    "one optimizer after another": lambda: (fit(made(), accumulating()), fit(made(), accumulating()))[1],
    "this library": lambda: fit(gk.wrap(made(), accum_steps=4), keras.optimizers.Adam(0.01), samples=30),
    "this library with a loss scale": lambda: fit(
        gk.wrap(made(), accum_steps=4), keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), samples=44
    ),
    "this library with sums": lambda: fit(
        gk.wrap(made(), accum_steps=4), keras.optimizers.Adam(0.01), given=loss(reduction="sum")
    ),
    "this library's layers": lambda: fit(
        gk.wrap(made(gk.BatchNormalization()), accum_steps=4), keras.optimizers.Adam(0.01)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_loops_are_silent(name: str) -> None:
    report = RIGHT[name]()
    assert is_silent(report), report
    windows = report.optimizers[0].windows
    micro_batches = 1 if name == "plain" else 4
    assert len(windows) >= 4 and windows[0].micro_batches == micro_batches
    assert f"on {BACKEND}" in report.title


def test_multiples_are_those_of_keras() -> None:
    """Whose micro-batches have 1/N of the mean each."""
    report = fit(made(), accumulating(clipnorm=0.01))
    for window in range(6):
        assert values(report, window) == pytest.approx([0.25] * 4, rel=1e-6)
    assert report.optimizers[0].windows[0].factors[0].purpose == "clip"


# ---- Loops that are wrong


def schedule() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)


WRONG: dict[str, tuple[list[str], Callable[[], check.Report]]] = {
    "uneven": ([MEAN], lambda: fit(made(), accumulating(), samples=30)),
    "schedule": (
        [SCHEDULE], lambda: fit(made(), keras.optimizers.Adam(schedule(), gradient_accumulation_steps=4))
    ),
    "average": ([AVERAGE], lambda: fit(made(), accumulating(use_ema=True))),
    "statistics": ([STATISTICS], lambda: fit(made(keras.layers.BatchNormalization()), accumulating())),
    "sums": (["sum for mean"], lambda: fit(made(), accumulating(), given=Sums())),
}  # fmt: skip


class Sums(keras.losses.Loss):  # type: ignore[misc]
    """Multiplies the mean by 4, so that four micro-batches that are averaged have 1 each."""

    def __init__(self) -> None:
        super().__init__(name="sums")
        self._mean = loss()

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return 4 * self._mean(y_true, y_pred, sample_weight)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops_are_named(name: str) -> None:
    wanted, run = WRONG[name]
    report = run()
    assert names(report) == wanted and not report.ok, report
    windows = report.optimizers[0].windows
    assert [window.moves for window in windows[1:]] == [4 if name == "statistics" else 0] * (len(windows) - 1)
    assert [window.averages for window in windows[1:]] == [4 if name == "average" else 0] * (len(windows) - 1)


def test_a_weight_of_the_whole_loss_is_told() -> None:
    report = fit(made(), accumulating(), loss_weights=[0.5])
    assert report.ok and "the whole window is multiplied by 0.5, which may be meant" in str(report)


def test_what_is_left_at_the_end_is_told() -> None:
    report = fit(made(), accumulating(), samples=44)
    assert report.ok and "ended with 2 micro-batches that no step had applied" in str(report)


def test_masked_terms_do_not_count() -> None:
    keras.utils.set_random_seed(1)
    words = keras.Sequential([
        keras.Input((5,), dtype="int32"), keras.layers.Embedding(7, 4, mask_zero=True), keras.layers.Dense(3),
    ])  # fmt: skip
    random, tokens = np.random.default_rng(1), np.zeros((16, 5), "int32")
    for row, length in enumerate([5, 5, 5, 5, 1, 1, 1, 1, 2, 2, 2, 2, 5, 5, 5, 5]):
        tokens[row, :length] = random.integers(1, 7, length)
    words.compile(accumulating(), loss())
    with check.record(words) as recording:
        words.fit(tokens, random.integers(0, 3, (16, 5)), batch_size=4, verbose=0, shuffle=False)
    report = recording.report
    assert names(report) == [MEAN], report
    assert [c.terms for c in report.optimizers[0].windows[0].coefficients] == [20, 4, 8, 20]


def test_an_overflow_drops_a_micro_batch() -> None:
    scaler = keras.optimizers.LossScaleOptimizer(accumulating(), initial_scale=64.0)
    model = made()
    model.compile(scaler, loss())
    weights = np.ones(20)
    weights[4] = np.inf
    with check.record(model) as recording:
        model.fit(X[:20], Y[:20], sample_weight=weights, batch_size=4, verbose=0, shuffle=False)
    report = recording.report
    assert not report.faults and "was computed and dropped" in str(report), report
    assert values(report) == pytest.approx([0.25, 0, 0.25, 0.25, 0.25], rel=1e-6)


# ---- What a recording leaves


def test_it_computes_the_same_and_leaves_nothing() -> None:
    functions = [
        keras.optimizers.Optimizer.apply, keras.optimizers.Optimizer._clip_gradients,
        keras.optimizers.LossScaleOptimizer.apply, keras.layers.BatchNormalization.call, keras.Model.make_train_function,
        sys.modules["keras.src.losses.loss"].reduce_weighted_values, gk._optimizer.Accumulation.add,
    ]  # fmt: skip

    def trained(is_watched: bool) -> Any:
        model = made(keras.layers.BatchNormalization())
        model.compile(accumulating(global_clipnorm=0.1), loss())
        for _ in range(2):
            with check.record(model) if is_watched else check.record(windows=0) as recording:
                model.fit(X, Y, batch_size=4, epochs=1, verbose=0, shuffle=False)
        assert len(recording.report.optimizers[0].windows) == (3 if is_watched else 0)
        model.fit(X, Y, batch_size=4, epochs=1, verbose=0, shuffle=False)
        return model.get_weights()

    alone = made(keras.layers.BatchNormalization())
    alone.compile(accumulating(global_clipnorm=0.1), loss())
    for _ in range(3):
        alone.fit(X, Y, batch_size=4, epochs=1, verbose=0, shuffle=False)
    for a, b in zip(trained(True), alone.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    assert functions == [
        keras.optimizers.Optimizer.apply, keras.optimizers.Optimizer._clip_gradients,
        keras.optimizers.LossScaleOptimizer.apply, keras.layers.BatchNormalization.call, keras.Model.make_train_function,
        sys.modules["keras.src.losses.loss"].reduce_weighted_values, gk._optimizer.Accumulation.add,
    ]  # fmt: skip


def test_what_a_program_has_replaced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    with check.record():
        watched = keras.optimizers.Optimizer.apply

        def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(optimizer)
            return watched(optimizer, *args, **kwargs)

        monkeypatch.setattr(keras.optimizers.Optimizer, "apply", apply)
    model = made()
    model.compile(accumulating(), loss())
    model.fit(X[:8], Y[:8], batch_size=4, verbose=0)
    assert calls and keras.optimizers.Optimizer.apply is apply
    monkeypatch.delattr(keras.optimizers.Optimizer, "apply")


PROGRAM = """
import numpy as np, keras
x, y = np.random.rand(30, 4), np.random.rand(30, 1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(gradient_accumulation_steps=4), "mse")
model.fit(x, y, batch_size=4, epochs=2, verbose=0)
"""


def test_the_command_imports_nothing_before_the_program(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "gradaccum.check", "--json", "report.json", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1 and MEAN in done.stderr, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["title"].endswith(f"on {BACKEND}") and report["optimizers"][0]["faults"][0]["where"] == "train.py:6"


def test_the_page() -> None:
    exec(compile(block("keras"), "keras", "exec"), {})
