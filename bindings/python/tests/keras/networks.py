# SPDX-License-Identifier: Apache-2.0
"""Networks that Keras 2 and Keras 3 make alike, from weights at hand: for what is compared with GradientAccumulator."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]
WINDOWS = {"full": [16] * 8, "tail": [16] * 6, "uneven": [20, 20, 20, 4]}  # sizes of micro-batches


def made_data() -> dict[str, Any]:
    """The data, and the weights that networks begin with, by network, layer and name."""
    random = np.random.default_rng(5)

    def draw(*shape: int, scale: float = 1.0) -> Any:
        return (scale * random.normal(size=shape)).astype("float32")

    x = draw(256, 6)
    templates = draw(10, 28, 28, 1)
    labels = random.integers(10, size=168)
    return {
        "x": x,
        "y": np.tanh(x @ draw(6, 3)) + 0.3 * draw(256, 3),
        "rows": draw(64, 6) + 2,
        "labels": labels,
        "images": templates[labels] + draw(168, 28, 28, 1),
        "cnn/0/kernel": draw(5, 5, 1, 4, scale=0.2),
        "cnn/0/bias": draw(4, scale=0.1),
        "cnn/1/kernel": draw(576, 10, scale=0.04),
        "cnn/1/bias": draw(10, scale=0.1),
        "dense/0/kernel": draw(784, 32, scale=0.04),
        "dense/0/bias": draw(32, scale=0.1),
        "dense/1/gamma": 1 + draw(32, scale=0.1),
        "dense/1/beta": draw(32, scale=0.1),
        "dense/2/kernel": draw(32, 10, scale=0.2),
        "dense/2/bias": draw(10, scale=0.1),
        "regression/0/kernel": draw(6, 7, scale=0.4),
        "regression/0/bias": draw(7, scale=0.1),
        "regression/1/kernel": draw(7, 3, scale=0.4),
        "regression/1/bias": draw(3, scale=0.1),
    }


def weights(model: Any) -> dict[str, Any]:
    """Those of the layers, by the number of the layer among those that have some, and their names."""
    return {
        name: np.array(
            weight.numpy() if hasattr(weight, "numpy") and "torch" not in str(type(weight)) else weight
        )
        for name, weight in _named(model)
    }


def set_weights(model: Any, data: Arrays, network: str) -> Any:
    """Sets those that there is data for."""
    for name, weight in _named(model):
        if network + name in data:
            weight.assign(data[network + name])
    return model


def _named(model: Any) -> Iterator[tuple[str, Any]]:
    layers = [layer for layer in model.layers if layer.weights]
    for number, layer in enumerate(layers):
        for weight in layer.weights:
            yield f"{number}/{weight.name.split('/')[-1].split(':')[0]}", weight


def cnn(keras: Any, data: Arrays) -> Any:
    """Two layers for images of 28 x 28."""
    inputs = keras.Input((28, 28, 1))
    x = keras.layers.MaxPooling2D()(keras.layers.Conv2D(4, 5, activation="relu")(inputs))
    outputs = keras.layers.Dense(10, dtype="float32")(keras.layers.Flatten()(x))
    return set_weights(keras.Model(inputs, outputs), data, "cnn/")


def regression(keras: Any, data: Arrays) -> Any:
    """Two dense layers."""
    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(3)(keras.layers.Dense(7, activation="tanh")(inputs))
    return set_weights(keras.Model(inputs, outputs), data, "regression/")


def normalised(keras: Any) -> Any:
    """A layer of batch normalisation in which nothing is as it comes."""
    inputs = keras.Input((6,))
    layer = keras.layers.BatchNormalization(momentum=0.5, epsilon=0.1)
    model = keras.Model(inputs, layer(inputs))
    layer.set_weights([np.linspace(a, a + 1, 6) for a in (1, 2, 3, 4)])
    return model


def micro_batches(data: Arrays, sizes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
    """Of the regression, one after the other."""
    begin = 0
    for size in sizes:
        yield data["x"][begin : begin + size], data["y"][begin : begin + size]
        begin += size


def optimizers(module: Any) -> dict[str, Callable[[], Any]]:
    """Those that are compared."""
    return {
        "momentum": lambda: module.SGD(0.01, momentum=0.9),
        "adam": lambda: module.Adam(0.01),
        "rmsprop": lambda: module.RMSprop(0.01),
    }
