# SPDX-License-Identifier: Apache-2.0
"""A small CNN learns Fashion-MNIST in Keras: by whole batches, and by windows of micro-batches.

usage: keras_fashion.py [--data FOLDER] [--samples N] [--epochs N] [--accum-steps K] [--plot FILE]

Two runs see the same batches of 64 in the same order, from the same weights: one takes each batch whole, the
other one in K micro-batches, which gradaccum adds up to a step. Both clip adaptively (AGC). The network has batch
normalisation, which normalises a micro-batch by its own mean and variance, not by those of the whole batch, so the
runs differ from the first step on. With --no-batch-norm they differ by rounding alone. The moving statistics are
those of the whole window.

KERAS_BACKEND is tensorflow, jax or torch. The data are those of Debian's package dataset-fashion-mnist.
docs/keras.md explains the model and its window.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path
from typing import Any

import gradaccum.keras as gk
import keras
import numpy as np

BATCH = 64


def read(path: Path, offset: int, count: int) -> Any:
    """The first bytes of an IDX file, after its header."""
    with gzip.open(path) as file:
        return np.frombuffer(file.read(offset + count), np.uint8, offset=offset)


def load(folder: Path, which: str, count: int) -> tuple[Any, Any]:
    images = read(folder / f"{which}-images-idx3-ubyte.gz", 16, count * 28 * 28)
    labels = read(folder / f"{which}-labels-idx1-ubyte.gz", 8, count)
    return images.reshape(-1, 28, 28, 1).astype("float32") / 255, labels.astype("int32")


def network(batch_norm: bool) -> Any:
    keras.utils.set_random_seed(0)
    layers: list[Any] = [keras.Input((28, 28, 1))]
    for channels in (16, 32):
        layers.append(keras.layers.Conv2D(channels, 3, strides=2, padding="same", use_bias=not batch_norm))
        if batch_norm:
            layers.append(gk.BatchNormalization(momentum=0.9))
        layers.append(keras.layers.ReLU())
    layers += [keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential(layers)


class Losses(keras.callbacks.Callback):  # type: ignore[misc]
    """The mean loss of each step: Keras' log is a mean over the epoch so far, and starts anew with it."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.steps = 0
        self.sums = (0.0, 0)  # up to the last step
        self.micro_batches = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.sums, self.micro_batches = (0.0, 0), 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.micro_batches += 1
        self._note(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._note(logs)

    def _note(self, logs: Any) -> None:
        result = self.model.step_result
        if result is not None and result.steps > self.steps:
            total, count = self.sums
            self.sums = (float(logs["loss"]) * self.micro_batches, self.micro_batches)
            self.losses.append((self.sums[0] - total) / (self.micro_batches - count))
            self.steps = result.steps


def train(
    accum_steps: int, data: Any, test: Any, epochs: int, batch_norm: bool
) -> tuple[Any, list[float], float]:
    """The model, the loss of each step, and the accuracy on the test data."""
    model = gk.wrap(network(batch_norm), accum_steps, use_agc=True, clip_factor=0.05)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    losses = Losses()
    # Without shuffling, the steps of both runs are of the same samples.
    model.fit(
        *data,
        batch_size=BATCH // accum_steps,
        epochs=epochs,
        shuffle=False,
        validation_data=test,
        callbacks=[losses],
    )
    return model, losses.losses, float(model.evaluate(*test, verbose=0)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--samples", type=int, default=12800, help="of the training data; %(default)s")
    parser.add_argument("--test-samples", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--accum-steps", type=int, default=4, help="micro-batches in a window, a divisor of 64"
    )
    parser.add_argument("--no-batch-norm", dest="batch_norm", action="store_false")
    parser.add_argument("--plot", type=Path, help="file of the loss curves: .svg, .png or .pdf")
    options = parser.parse_args()
    if options.accum_steps < 2 or BATCH % options.accum_steps:
        parser.error(f"--accum-steps was {options.accum_steps}, expected a divisor of {BATCH} from 2 on")
    if options.samples < BATCH:
        parser.error(f"--samples was {options.samples}, expected at least {BATCH}")
    data = load(options.data, "train", options.samples // BATCH * BATCH)
    test = load(options.data, "t10k", options.test_samples)
    print(f"Keras {keras.__version__} on {keras.backend.backend()}, {len(data[0])} samples")
    micro = BATCH // options.accum_steps
    names = {1: f"batches of {BATCH}", options.accum_steps: f"{options.accum_steps} micro-batches of {micro}"}
    weights, losses = {}, {}
    for accum_steps, name in names.items():
        print(name)
        model, losses[name], accuracy = train(accum_steps, data, test, options.epochs, options.batch_norm)
        weights[name] = np.concatenate([np.ravel(one) for one in model.get_weights()])
        print(
            f"{name}: {len(losses[name])} steps, last loss {losses[name][-1]:.4f}, test accuracy {accuracy:.2%}"
        )
    first, last = list(weights.values())[0], list(weights.values())[-1]
    apart = float(np.linalg.norm(first - last) / np.linalg.norm(first))
    print(f"weights are {apart:.2g} of their norm apart")
    if options.plot is None:
        return
    try:
        from matplotlib import pyplot
    except ImportError:
        print("matplotlib is not installed, so there is no plot")
        return
    for name, curve in losses.items():
        pyplot.plot(curve, label=name, linewidth=1)
    pyplot.xlabel("step")
    pyplot.ylabel("loss")
    pyplot.legend()
    pyplot.savefig(options.plot)
    print(options.plot)


if __name__ == "__main__":
    main()
