# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/moving about Keras: their blocks run, and what they say of the numbers is so.

Exact is what whole batches give, or, with batch normalisation, the mean of the micro-batches' gradients.
Errors are in parts of the distance that exact training moves.
"""

import functools
import json
import os
import pathlib
import re
import subprocess
import warnings
from collections.abc import Iterator
from typing import Any

import gradaccum.keras as gk
import keras
import networks
import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parent
PAGES = pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "docs" / "moving"
DATA = networks.made_data()
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
K = 4
BLOCKS = ("model", "batch_norm", "mixed", "optimizer")  # of the page on GradientAccumulator


@pytest.fixture(autouse=True)
def single(double: None) -> Iterator[None]:
    """f32, as in the programs that move."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")


def blocks(whose: str) -> dict[str, str]:
    text = "".join((PAGES / page).read_text() for page in ("gradientaccumulator.md", "keras.md"))
    return dict(re.findall(rf"<!-- test: {whose}_(\w+) -->\n```python\n(.*?)```", text, re.S))


def run(name: str, monkeypatch: pytest.MonkeyPatch, whose: str = "ours") -> dict[str, Any]:
    """The weights that a block ends with."""
    fit = keras.Model.fit

    @functools.wraps(fit)
    def fit_from(model: Any, *arguments: Any, **options: Any) -> Any:
        if name == "batch_norm":  # the block makes its own network
            networks.set_weights(model, DATA, "dense/")
        return fit(model, *arguments, **{"verbose": 0, **options})

    monkeypatch.setattr(keras.Model, "fit", fit_from)
    names = {
        "cnn": lambda: networks.cnn(keras, DATA), "loss": LOSS, "images": DATA["images"], "labels": DATA["labels"]
    }  # fmt: skip
    exec(compile(blocks(whose)[name], f"docs/moving: {name}", "exec"), names)
    monkeypatch.undo()
    return networks.weights(names["model"])


def gradient(model: Any, x: Any, y: Any) -> dict[str, Any]:
    """What plain SGD with a learning rate of 1 takes off a plain model that is compiled with it, which is put back."""
    before = networks.weights(model)
    model.train_on_batch(x, y)
    after = networks.weights(model)
    networks.set_weights(model, before, "")
    return {name: before[name] - after[name] for name in before}


def clipped(gradients: dict[str, Any], of: dict[str, Any]) -> dict[str, Any]:
    """Adaptive gradient clipping: by output unit, and whole for a bias."""

    def norm(x: Any) -> Any:
        axes = tuple(range(x.ndim - 1)) if x.ndim > 1 else None
        return np.sqrt(np.sum(np.square(x, dtype="float64"), axis=axes, keepdims=True))

    out = {}
    for name, g in gradients.items():
        limit = 0.01 * np.maximum(norm(of[name]), 1e-3)
        out[name] = np.where(norm(g) > limit, g * (limit / np.maximum(norm(g), 1e-6)), g)
    return out


def windows(batch: int = 64) -> Iterator[tuple[Any, Any]]:
    for _ in range(2):
        for begin in range(0, len(DATA["images"]), batch):
            yield DATA["images"][begin : begin + batch], DATA["labels"][begin : begin + batch]


def exact(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights before and after two epochs of whole batches."""
    if name == "mixed":
        keras.config.set_dtype_policy("mixed_float16")
    if name == "batch_norm":
        return _exact_batch_norm()
    model = networks.cnn(keras, DATA)
    before = networks.weights(model)
    if name == "model":
        model.compile(keras.optimizers.SGD(1.0), LOSS)
        for x, y in windows():
            now = networks.weights(model)
            step = clipped(gradient(model, x, y), now)
            networks.set_weights(model, {key: now[key] - 0.05 * step[key] for key in now}, "")
    else:
        adam = keras.optimizers.Adam(1e-3, epsilon=1e-4)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9) if name != "mixed" else adam, LOSS)
        model.fit(DATA["images"], DATA["labels"], batch_size=64, epochs=2, shuffle=False, verbose=0)
    return before, networks.weights(model)


def _exact_batch_norm() -> tuple[dict[str, Any], dict[str, Any]]:
    inputs = keras.Input((28, 28, 1))
    hidden = keras.layers.Dense(32)(keras.layers.Flatten()(inputs))
    x = keras.layers.Activation("relu")(keras.layers.BatchNormalization(momentum=0.9)(hidden))
    model = networks.set_weights(keras.Model(inputs, keras.layers.Dense(10)(x)), DATA, "dense/")
    model.compile(keras.optimizers.SGD(1.0), LOSS)
    before = networks.weights(model)
    for x, y in windows():
        now = networks.weights(model)
        parts = [(x[i : i + 16], y[i : i + 16]) for i in range(0, len(x), 16)]
        gradients = [gradient(model, *part) for part in parts]
        after = {
            name: now[name] - 0.05 * sum(len(b) * g[name] for (_, b), g in zip(parts, gradients, strict=True)) / len(x)
            for name in now
        }  # fmt: skip
        values = x.reshape(len(x), -1).astype("float64") @ now["0/kernel"] + now["0/bias"]
        for name, new in (("1/moving_mean", values.mean(0)), ("1/moving_variance", values.var(0))):
            after[name] = 0.9 * now[name] + 0.1 * new
        networks.set_weights(model, after, "")
    return before, networks.weights(model)


def error(found: dict[str, Any], before: dict[str, Any], want: dict[str, Any]) -> float:
    """The distance from what is wanted, in parts of the distance that was to go."""
    assert want.keys() <= found.keys()
    off = sum(np.sum(np.square(found[name].astype("float64") - want[name])) for name in want)
    return float(
        np.sqrt(off / sum(np.sum(np.square(before[name].astype("float64") - want[name])) for name in want))
    )


@pytest.mark.parametrize("name", [*BLOCKS, "keras"])
def test_a_block_is_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(run(name, monkeypatch), *exact(name)) < (1e-3 if name == "mixed" else 2e-5)


def test_every_block_is_run() -> None:
    assert blocks("ours").keys() == blocks("theirs").keys() == {*BLOCKS, "keras"}


def regression(
    sizes: list[int], optimizer: Any, wrapped: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights before and after, by windows of micro-batches or by whole batches."""
    model = networks.regression(keras, DATA)
    before = networks.weights(model)
    parts = list(networks.micro_batches(DATA, sizes))
    if wrapped:
        model = gk.wrap(model, K)
    else:
        parts = [
            tuple(np.concatenate(one) for one in zip(*parts[i : i + K], strict=True))
            for i in range(0, len(parts), K)
        ]
    model.compile(optimizer, "mse")
    for x, y in parts:
        model.train_on_batch(x, y)
    if wrapped:
        model.flush()
    return before, networks.weights(model)


@pytest.mark.parametrize("case", networks.WINDOWS)
def test_windows(case: str) -> None:
    sizes = networks.WINDOWS[case]
    _, found = regression(sizes, keras.optimizers.SGD(0.1))
    assert error(found, *regression(sizes, keras.optimizers.SGD(0.1), wrapped=False)) < 2e-6


# ---- Keras' gradient_accumulation_steps


def test_the_block_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.2 < error(run("keras", monkeypatch, "theirs"), *exact("keras")) < 0.3


def test_the_accumulators_of_keras() -> None:
    """Their dtype, as docs/moving/keras.md says."""
    keras.config.set_dtype_policy("bfloat16")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=K)
    optimizer.build(model.trainable_variables)
    assert optimizer._accumulated_gradients[0].dtype == "bfloat16"


def by_keras(sizes: list[int], **options: Any) -> tuple[dict[str, Any], Any]:
    """The weights after Keras' own accumulation, and its optimizer."""
    model = networks.regression(keras, DATA)
    model.compile(keras.optimizers.SGD(gradient_accumulation_steps=K, **options), "mse")
    for x, y in networks.micro_batches(DATA, sizes):
        model.train_on_batch(x, y)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    return networks.weights(model), model.optimizer


@pytest.mark.parametrize("case, least, most", [("full", 0, 2e-6), ("tail", 0.5, 0.6), ("uneven", 0.28, 0.35)])
def test_windows_of_keras(case: str, least: float, most: float) -> None:
    sizes = networks.WINDOWS[case]
    found, _ = by_keras(sizes, learning_rate=0.1)
    off = error(found, *regression(sizes, keras.optimizers.SGD(0.1), wrapped=False))
    assert least <= off < most


def schedule() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=4, decay_rate=0.5)


@pytest.mark.parametrize(
    "case, options, least", [("schedule", {}, 0.78), ("ema", {"use_ema": True, "ema_momentum": 0.9}, 0.46)]
)
def test_what_counts_micro_batches_in_keras(case: str, options: dict[str, Any], least: float) -> None:
    """The schedule and the moving average of the weights, over 16 windows."""
    sizes = [4] * 64
    rate = schedule if case == "schedule" else lambda: 0.1

    def trained(wrapped: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        model = networks.regression(keras, DATA)
        before = networks.weights(model)
        parts = list(networks.micro_batches(DATA, sizes if wrapped else [16] * 16))
        model = gk.wrap(model, K) if wrapped else model
        model.compile(keras.optimizers.SGD(learning_rate=rate(), **options), "mse")
        for x, y in parts:
            model.train_on_batch(x, y)
        model.optimizer.finalize_variable_values(model.trainable_variables)
        return before, networks.weights(model)

    before, want = trained(False)
    theirs, _ = by_keras(sizes, learning_rate=rate(), **options)
    assert error(trained(True)[1], before, want) < 1e-5
    assert least < error(theirs, before, want) < least + 0.01


@pytest.mark.parametrize("scale, least, most", [(2.0**15, 0.1, 0.5), (2.0**8, 0.0, 1e-3)])
def test_gradients_of_micro_batches_that_overflow(scale: float, least: float, most: float) -> None:
    """Under mixed_float16 with images 2.75 times as bright: those of whole batches do not, with either scale."""
    keras.config.set_dtype_policy("mixed_float16")
    found, steps = [], []
    for size in (64, 64 // K):
        model = networks.cnn(keras, DATA)
        before = networks.weights(model)
        model = model if size == 64 else gk.wrap(model, K)
        adam = keras.optimizers.Adam(1e-3, epsilon=1e-4)
        model.compile(keras.optimizers.LossScaleOptimizer(adam, initial_scale=scale), LOSS)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model.fit(2.75 * DATA["images"], DATA["labels"], batch_size=size, epochs=2, shuffle=False, verbose=0)
        found.append(networks.weights(model))
        steps.append(int(adam.iterations))
    assert least <= error(found[1], before, found[0]) < most
    skipped = ["a window was skipped" in str(one.message) for one in seen]
    assert steps == [6, 6 - sum(skipped)] and sum(skipped) == (least > 0)


def test_the_loss_scale_counts_micro_batches_in_keras() -> None:
    scales = []
    for wrapped in (False, True):
        model = networks.regression(keras, DATA)
        model = gk.wrap(model, K) if wrapped else model
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=None if wrapped else K)
        model.compile(
            keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0, dynamic_growth_steps=4), "mse"
        )
        for x, y in networks.micro_batches(DATA, [4] * 36):
            model.train_on_batch(x, y)
        scales.append(model.step_result.loss_scale if wrapped else float(model.optimizer.dynamic_scale))
    assert scales == [4 * 2**9, 4 * 2**2]  # after 36 micro-batches; the scale of the 9th step


# ---- GradientAccumulator 0.5.2, with TensorFlow 2.15


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("theirs")
    np.savez(folder / "data.npz", **DATA)
    (folder / "blocks.json").write_text(json.dumps({name: blocks("theirs")[name] for name in BLOCKS}))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KERAS"))}
    command = [os.environ["GA_PEERS_PYTHON"], str(FOLDER / "peer.py"), str(folder)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(folder / "theirs.npz"))


def of(theirs: dict[str, Any], case: str) -> dict[str, Any]:
    return {
        name.removeprefix(case + "/"): value for name, value in theirs.items() if name.startswith(case + "/")
    }


@pytest.mark.peer
@pytest.mark.parametrize(
    "name, least, most",
    [("model", 1.2, 1.3), ("batch_norm", 0.2, 0.3), ("mixed", 0.1, 0.2), ("optimizer", 1.4, 1.5)],
)
def test_a_block_of_theirs(name: str, least: float, most: float, theirs: dict[str, Any]) -> None:
    off = error(of(theirs, name), *exact(name))
    assert least < off < most


@pytest.mark.peer
@pytest.mark.parametrize("case, least, most", [("full", 0, 1e-5), ("tail", 0.5, 0.6), ("uneven", 0.28, 0.35)])
def test_windows_of_theirs(case: str, least: float, most: float, theirs: dict[str, Any]) -> None:
    off = error(
        of(theirs, case), *regression(networks.WINDOWS[case], keras.optimizers.SGD(0.1), wrapped=False)
    )
    assert least <= off < most


@pytest.mark.peer
@pytest.mark.parametrize(
    "name, least, moves", [("momentum", 1.3, 61), ("adam", 1.6, 61), ("rmsprop", 1.2, 16)]
)
def test_the_optimizer_of_theirs(name: str, least: float, moves: int, theirs: dict[str, Any]) -> None:
    make = networks.optimizers(keras.optimizers)[name]
    before, want = regression([4] * 64, make(), wrapped=False)
    _, ours = regression([4] * 64, make())
    found = of(theirs, f"optimizer_{name}")
    went, should = (
        np.sqrt(sum(np.sum(np.square(weights[key] - before[key])) for key in before))
        for weights in (found, want)
    )
    assert error(ours, before, want) < 1e-4
    assert least < went / should < least + 0.1 and found["moves"] == moves


@pytest.mark.peer
@pytest.mark.parametrize("case", ["drawn", "sorted"])
def test_the_statistics_of_theirs(case: str, theirs: dict[str, Any]) -> None:
    rows = np.sort(DATA["rows"], axis=0) if case == "sorted" else DATA["rows"]
    layer = gk.AccumBatchNormalization(momentum=0.0)
    model = gk.wrap(keras.Sequential([keras.Input((6,)), layer]), K)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(rows, rows, batch_size=16, shuffle=False, verbose=0)
    want = rows.astype("float64").var(0)
    np.testing.assert_allclose(np.array(layer.moving_variance), want, rtol=1e-5)
    ratio = theirs[f"variance_{case}"] / want
    assert (0.94 < ratio.mean() < 0.98) if case == "drawn" else (0.1 < ratio.mean() < 0.2)


@pytest.mark.peer
def test_layers_that_they_replace(theirs: dict[str, Any]) -> None:
    model = networks.normalised(keras)
    before = keras.ops.convert_to_numpy(model(DATA["rows"]))
    after = keras.ops.convert_to_numpy(gk.replace_batchnorm_layers(model, accum_steps=K)(DATA["rows"]))
    np.testing.assert_array_equal(before, after)
    assert theirs["replaced"] > 0.1
