# SPDX-License-Identifier: Apache-2.0
"""keras_loops.py <what> <samples> <report>: what Keras and optax accumulate by themselves in windows of 4, watched.

The samples go twice through micro-batches of 8. See tests/check/history, and loops.py for torch.
"""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

os.environ.update(KERAS_BACKEND="jax", TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
from gradaccum import check  # noqa: E402

RANDOM = np.random.default_rng(1)


def data(samples: int) -> tuple[Any, Any]:
    return RANDOM.normal(size=(samples, 20)).astype("float32"), RANDOM.integers(0, 5, samples)


# ---- Keras


def _fit(samples: int, **options: Any) -> None:
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.Input((20,)), keras.layers.Dense(300, activation="tanh"), keras.layers.Dense(5)]
    model = keras.Sequential(layers)
    rate = options.pop("schedule", 0.01)
    optimizer = keras.optimizers.Adam(
        rate if isinstance(rate, float) else rate(keras), gradient_accumulation_steps=4, **options
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(*data(samples), batch_size=8, epochs=2, shuffle=False, verbose=0)


def keras(samples: int) -> None:
    _fit(samples)


def keras_schedule(samples: int) -> None:
    _fit(samples, schedule=lambda keras: keras.optimizers.schedules.CosineDecay(0.01, 100))


def keras_average(samples: int) -> None:
    _fit(samples, use_ema=True)


# ---- optax


def _steps(samples: int, make: Callable[[Any], Any], breaks: int = -1) -> None:
    import jax
    import optax

    tx = check.wrap(make(optax))
    parameters = {"w": RANDOM.normal(size=(20, 5)), "b": np.zeros(5)}
    x, y = data(samples)

    def value(parameters: Any, x: Any, y: Any) -> Any:
        loss = optax.softmax_cross_entropy_with_integer_labels(x @ parameters["w"] + parameters["b"], y)
        return recording.loss(loss.mean(), weight=len(x))

    @jax.jit
    def step(parameters: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = tx.update(jax.grad(value)(parameters, x, y), state, parameters)
        return optax.apply_updates(parameters, updates), state

    state = tx.init(parameters)
    for i, begin in enumerate([*range(0, samples, 8)] * 2):
        rows = slice(begin, begin + 8)
        parameters, state = step(parameters, state, x[rows] * (np.nan if i == breaks else 1), y[rows])


def optax(samples: int) -> None:
    _steps(samples, lambda optax: optax.MultiSteps(optax.adam(0.01), 4))


def optax_nan(samples: int) -> None:
    _steps(samples, lambda optax: optax.MultiSteps(optax.adam(0.01), 4), breaks=1)


def optax_skip(samples: int) -> None:
    def make(optax: Any) -> Any:
        return optax.MultiSteps(optax.adam(0.01), 4, should_skip_update_fn=optax.skip_not_finite)

    _steps(samples, make, breaks=1)


recording = check.record()

if __name__ == "__main__":
    with recording:
        globals()[sys.argv[1]](int(sys.argv[2]))
    recording.report.save(sys.argv[3])
    print(recording.report)
