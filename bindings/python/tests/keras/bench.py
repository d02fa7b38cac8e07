# SPDX-License-Identifier: Apache-2.0
"""Time and memory of fit() by windows, beside plain fit() and Keras' own accumulation, on the backend at hand.

    KERAS_BACKEND=tensorflow python bench.py

A line for each network: the time of a micro-batch over that of plain fit() with the same batch size, and the
time of a window of 4 over that of Keras' gradient_accumulation_steps=4. Medians over turns, in one process.
"""

import os
import resource
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gradaccum.keras as gk
import keras
import numpy as np

K = 4
L = keras.layers


def cnn() -> tuple[Any, tuple[int, ...], int]:
    """A small convolutional network, of 0.1 M parameters: the overhead of a step shows."""
    layers = [L.Conv2D(16, 3, activation="relu"), L.MaxPooling2D(), L.Conv2D(32, 3, activation="relu")]
    return keras.Sequential([keras.Input((28, 28, 1)), *layers, L.Flatten(), L.Dense(10)]), (28, 28, 1), 32


def mlp() -> tuple[Any, tuple[int, ...], int]:
    """A network of 9 M parameters: memory traffic shows."""
    layers = [L.Dense(2048, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((1024,)), *layers, L.Dense(1024), L.Dense(10)]), (1024,), 64


def transformer() -> tuple[Any, tuple[int, ...], int]:
    """Six blocks, 1.2 M parameters in 98 variables."""
    inputs = keras.Input((32, 128))
    x = inputs
    for _ in range(6):
        x = L.LayerNormalization()(x + L.MultiHeadAttention(4, 32)(x, x))
        x = L.LayerNormalization()(x + L.Dense(128)(L.Dense(256, activation="gelu")(x)))
    outputs = L.Dense(10)(L.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs), (32, 128), 16


def measure(make: Any, steps: int, turns: int) -> None:
    models = {}
    for name in ("plain", "keras", "ours"):
        keras.utils.set_random_seed(1)
        model, shape, batch = make()
        optimizer = keras.optimizers.Adam(1e-4, gradient_accumulation_steps=K if name == "keras" else None)
        if name == "ours":
            model = gk.wrap(model, K)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        models[name] = model
    random = np.random.default_rng(1)
    x = random.normal(size=(batch * steps, *shape)).astype("float32")
    y = random.integers(0, 10, size=batch * steps)
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(turns + 1):
        for name, model in models.items():
            begin = time.perf_counter()
            model.fit(x, y, batch_size=batch, verbose=0, shuffle=False)
            if turn:
                times[name].append((time.perf_counter() - begin) / steps)
    ours, plain, theirs = (times[name] for name in ("ours", "plain", "keras"))
    print(
        f"{keras.backend.backend()} {make.__name__}: plain {statistics.median(plain) * 1e3:.2f} ms a micro-batch, "
        f"ours / plain {statistics.median(a / b for a, b in zip(ours, plain, strict=True)):.3f}, "
        f"ours / Keras' accumulation {statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.3f}",
        flush=True,
    )


def peak(which: str) -> None:
    """The peak of resident memory of a process that trains one network."""
    model, shape, batch = mlp()
    if which == "ours":
        model = gk.wrap(model, K)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.zeros((batch * 40, *shape), "float32")
    model.fit(x, np.zeros(batch * 40), batch_size=batch, verbose=0)
    print(f"{which}: peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        peak(sys.argv[2])
    else:
        for make, steps in ((cnn, 200), (mlp, 40), (transformer, 40)):
            measure(make, steps, 5)
