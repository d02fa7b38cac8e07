# SPDX-License-Identifier: Apache-2.0
"""A regression that Keras trains by whole batches and the library by windows, in f64."""

import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_ENABLE_X64", "1")

import warnings

import keras
import numpy as np
import pytest

BATCH, PARTS = 12, 4  # samples in a batch, and micro-batches in a window
BACKEND = keras.backend.backend()


@pytest.fixture(autouse=True)
def double() -> Any:
    """Everything in f64, unless a test says otherwise."""
    warnings.filterwarnings("ignore", "__array__ implementation doesn't accept", DeprecationWarning)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def pytest_configure(config: Any) -> None:
    config.addinivalue_line(
        "markers", "only(*backends): the case is of these backends, and no case of others"
    )
    config.addinivalue_line(
        "markers",
        "peer: the case compares with GradientAccumulator, which $GA_PEERS_PYTHON has; on TensorFlow",
    )


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    peers = BACKEND == "tensorflow" and os.environ.get("GA_PEERS_PYTHON")

    def is_here(item: Any) -> bool:
        backends = next(item.iter_markers("only"), _ALL).args
        if BACKEND not in backends or (item.get_closest_marker("peer") and not peers):
            return False
        # Cases are dealt out, so that each runs on one backend, but for those about what differs between backends.
        if not os.environ.get("GA_TEST_SHARED") or len(backends) != 3 or item.path.stem in _EACH:
            return True
        return _ALL.args[zlib.crc32(item.name.encode()) % 3] == BACKEND

    others = [item for item in items if not is_here(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and os.environ.get("GA_TEST_SHARED"):
        print("\nskipped: other backends have the cases of this file")
        session.exitstatus = 77


_EACH = ("test_keras_fit", "test_keras_tensors", "test_keras_train_steps", "test_keras_windows")
_ALL = pytest.mark.only("tensorflow", "jax", "torch").mark


class Task:
    """Data, and models that begin alike."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        self.x = random.normal(size=(3 * BATCH + 9, 6))  # the last batch is short: 9 samples
        self.y = np.tanh(self.x @ random.normal(size=(6, 3)))

    def model(self, layers: Callable[[], Sequence[Any]] | None = None) -> Any:
        keras.utils.set_random_seed(3)
        if layers is None:
            made = [keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(3)]
        else:
            made = list(layers())
        return keras.Sequential([keras.Input((6,)), *made])


def whole(task: Task, model: Any, epochs: int = 2, **options: Any) -> Any:
    """Trains by whole batches, with Keras."""
    return model.fit(task.x, task.y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **options)


def parts(task: Task, model: Any, epochs: int = 2, **options: Any) -> Any:
    """Trains by micro-batches, PARTS of which are a batch."""
    return model.fit(
        task.x, task.y, batch_size=BATCH // PARTS, epochs=epochs, shuffle=False, verbose=0, **options
    )


def distance(a: Any, b: Any) -> float:
    """The largest difference of two models' weights, against the largest of them."""
    left, right = a.get_weights(), b.get_weights()
    assert len(left) == len(right)
    return max(
        float(np.abs(np.asarray(p, "float64") - np.asarray(q, "float64")).max() / max(1.0, np.abs(q).max()))
        for p, q in zip(left, right, strict=True)
    )


def moved(model: Any, make: Callable[[], Any]) -> float:
    """How far a model is from where it began."""
    return distance(model, make())


@pytest.fixture
def task() -> Task:
    return Task()
