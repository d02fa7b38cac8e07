# SPDX-License-Identifier: Apache-2.0
"""The code of docs/keras.md and its example run, and what the page says of backends is so."""

import gzip
import os
import pathlib
import re
import runpy
import subprocess
import sys
from typing import Any

import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from conftest import BACKEND, Task, distance

ROOT = pathlib.Path(os.environ["GA_HEADER"]).parents[2]


def blocks(page: str) -> dict[str, str]:
    text = (ROOT / "docs" / page).read_text()
    return dict(re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", text, re.S))


def test_the_guide(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    found = blocks("keras.md")
    lines = [line for line in found["keras"].splitlines() if line and not line.startswith("import")]
    assert len(lines) <= 10
    names: dict[str, Any] = {}
    exec(compile(found["keras"], "docs/keras.md", "exec"), names)
    assert int(names["model"].optimizer.iterations) == 2 * 15  # 900 samples, of which the last window has 4
    exec(compile(found["saved"], "docs/keras.md", "exec"), names)
    assert int(names["model"].optimizer.iterations) == 3 * 15 + 1  # without a validation split, 1000 samples


def test_the_notebook() -> None:
    folder = ROOT / "docs" / "notebooks"
    subprocess.run([sys.executable, str(folder / "run.py"), str(folder / "keras.ipynb")], check=True)


def test_the_first_program_makes_the_step_of_one_batch() -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    runpy.run_path(str(ROOT / "examples" / "first" / "first_keras.py"))


def test_callbacks_have_the_variables_by_self_model(task: Task) -> None:
    seen: list[bool] = []

    class Look(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            try:
                model.get_weights()
                seen.append(True)
            except TypeError:
                seen.append(False)
            self.model.set_weights([0 * one for one in self.model.get_weights()])

    model = gk.wrap(task.model(), 2)
    model.compile("sgd", "mse")
    model.fit(task.x[:3], task.y[:3], verbose=0, callbacks=[Look()])
    assert seen == [BACKEND != "jax"]


def test_two_means() -> None:
    """The block of a mean over words beside a mean over samples, against whole batches with these losses."""
    random = np.random.default_rng(2)
    batches = []
    for _ in range(2):
        mask = (random.uniform(size=(12, 6)) < np.linspace(0.1, 0.9, 12)[:, None]).astype("float64")
        labels = {"words": random.integers(0, 5, size=(12, 6)), "next": random.integers(0, 2, size=(12, 1))}
        batches.append((random.integers(0, 9, size=(12, 6)), labels, mask))

    def made() -> Any:
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6,), dtype="int32")
        hidden = keras.layers.Dense(7, activation="tanh")(keras.layers.Embedding(9, 4)(inputs))
        following = keras.layers.Dense(1, name="next")(keras.layers.GlobalAveragePooling1D()(hidden))
        return keras.Model(inputs, {"words": keras.layers.Dense(5, name="words")(hidden), "next": following})

    reference = made()
    means = {
        "words": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
        "next": keras.losses.BinaryCrossentropy(from_logits=True),
    }
    reference.compile(keras.optimizers.SGD(0.5), means)
    for x, y, mask in batches:
        reference.train_on_batch(x, y, sample_weight={"words": mask, "next": np.ones(12)})
    names = {"gk": gk, "keras": keras, "np": np, "batches": batches, "model": made()}
    names["optimizer"] = keras.optimizers.SGD(0.5)
    exec(compile(blocks("keras.md")["two"], "docs/keras.md", "exec"), names)
    assert int(names["model"].optimizer.iterations) == 2
    assert distance(reference, names["model"]) < 1e-6


ROWS = {
    "SGD": lambda: keras.optimizers.SGD(0.1), "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.1), "AdamW": lambda: keras.optimizers.AdamW(0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1), "RMSprop": lambda: keras.optimizers.RMSprop(0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.1), "Adadelta": lambda: keras.optimizers.Adadelta(10.0),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "global_clipnorm": lambda: keras.optimizers.SGD(5.0, global_clipnorm=0.1),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_occur_several_times(kind: str) -> None:
    """Keras on TensorFlow takes each part of their gradient for itself, and the library their sum, which is that of a
    product with rows of zeros and a one."""
    x = np.array([[1, 1, 2]] * 4)

    def made(products: bool) -> Any:
        if products:
            layers = [keras.Input((3, 4)), keras.layers.Dense(2, use_bias=False)]
        else:
            layers = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(4, 2)]
        model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
        random = np.random.default_rng(1)
        model.set_weights([random.normal(size=w.shape) * (w.ndim > 1) for w in model.get_weights()])
        return model

    models = [made(True), made(False), gk.wrap(made(False), 1)]
    for model, data in zip(models, (np.eye(4)[x], x, x), strict=True):
        model.compile(ROWS[kind](), "mse")
        for _ in range(2):
            model.train_on_batch(data, np.ones((4, 1)))
    exact, plain, wrapped = models
    differ = BACKEND == "tensorflow" and kind not in ("SGD", "momentum")
    assert distance(exact, wrapped) < 1e-5
    assert (distance(exact, plain) > 0.01) == differ and (differ or distance(exact, plain) < 1e-5)


def test_the_example(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    random = np.random.default_rng(1)
    for which, count in (("train", 128), ("t10k", 32)):
        for kind, header, size, values in (("images-idx3", 16, 784, 256), ("labels-idx1", 8, 1, 10)):
            content = random.integers(values, size=count * size, dtype=np.uint8)
            with gzip.open(tmp_path / f"{which}-{kind}-ubyte.gz", "wb") as file:
                file.write(bytes(header) + content.tobytes())
    script = str(ROOT / "examples" / "python" / "keras_fashion.py")
    plot = tmp_path / "loss.svg"
    options = ["--data", str(tmp_path), "--samples", "130", "--test-samples", "32", "--epochs", "1"]
    for more, least, most in ((["--plot", str(plot)], 1e-4, 1.0), (["--no-batch-norm"], 0.0, 1e-5)):
        monkeypatch.setattr(sys, "argv", [script, *options, *more])
        runpy.run_path(script, run_name="__main__")
        printed = capsys.readouterr().out
        (apart,) = re.findall(r"weights are (\S+) of their norm apart", printed)
        assert least <= float(apart) < most
        assert "--plot" not in more or "no plot" in printed or "<svg" in plot.read_text()
