# SPDX-License-Identifier: Apache-2.0
"""Models and loops of Keras, for the tests of gradaccum.check."""

import os
import pathlib
from typing import Any

import keras
import numpy as np
from conftest import BACKEND
from gradaccum import check
from gradaccum.check._faults import UNKNOWN

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(48, 6)), RANDOM.integers(0, 3, 48)
MEAN = "mean of means over uneven micro-batches"


def made(*middle: Any) -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(9, activation="tanh"), *middle, keras.layers.Dense(3)]
    )


def loss(**options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def fit(model: Any, optimizer: Any, samples: int = 48, given: Any = None, **options: Any) -> check.Report:
    """Two epochs in micro-batches of 4, under a recording."""
    model.compile(optimizer, loss() if given is None else given, **options)
    with check.record(model, optimizer) as recording:
        model.fit(X[:samples], Y[:samples], batch_size=4, epochs=2, verbose=0, shuffle=False)
    return recording.report


def names(report: check.Report) -> list[str]:
    return [fault.name for fault in report.faults]


def is_silent(report: check.Report) -> bool:
    doubts = (UNKNOWN, "the whole window is multiplied", "is not known", "may be meant", "not watched")
    return report.ok and not any(doubt in remark for doubt in doubts for remark in report.remarks)


def values(report: check.Report, window: int = 0) -> list[float]:
    return [c.value for c in report.optimizers[0].windows[window].coefficients]


def accumulating(**options: Any) -> Any:
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=4, **options)


def block(name: str) -> str:
    page = (pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "docs" / "check.md").read_text()
    return page.partition(f"<!-- test: {name} -->\n```python\n")[2].partition("```")[0]


# ---- Gradients as a program computes them


def by_tape(model: Any, mean: Any, n: int, factor: float) -> list[Any]:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = mean(Y[:n], model(X[:n])) * factor
    found: list[Any] = tape.gradient(value, model.trainable_variables)
    return found


def by_jax(model: Any, mean: Any, n: int, factor: float) -> list[Any]:
    import jax

    def value(trainable: Any) -> Any:
        return mean(Y[:n], model.stateless_call(trainable, [], X[:n])[0]) * factor

    return list(jax.grad(value)([variable.value for variable in model.trainable_variables]))


def by_torch(model: Any, mean: Any, n: int, factor: float) -> list[Any]:
    model.zero_grad()
    (mean(Y[:n], model(X[:n])) * factor).backward()
    return [variable.value.grad.clone() for variable in model.trainable_variables]


def gradients_of(model: Any, mean: Any, n: int, factor: float) -> list[Any]:
    """Of the mean loss over the first n samples, times a factor, by the backend."""
    return {"tensorflow": by_tape, "jax": by_jax, "torch": by_torch}[BACKEND](model, mean, n, factor)
