# SPDX-License-Identifier: Apache-2.0
"""The code of docs/keras.md and its example run, and what the page says of backends is so."""

import gzip
import os
import pathlib
import re
import runpy
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


@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "SGD"])
def test_rows_that_occur_several_times(kind: str) -> None:
    """Keras on TensorFlow squares each part of their gradient, and the library their sum."""
    models = []
    for wrapped in (False, True):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(4, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model = gk.wrap(model, 1) if wrapped else model
        model.compile(getattr(keras.optimizers, kind)(0.1), "mse")
        for _ in range(2):
            model.train_on_batch(np.array([[1, 1, 2]] * 4), np.ones((4, 1)))
        models.append(model)
    differ = BACKEND == "tensorflow" and kind != "SGD"
    assert (distance(*models) > 0.05) == differ and (differ or distance(*models) < 1e-5)


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
