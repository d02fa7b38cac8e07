#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over a whole window, layer by layer, with Keras on TensorFlow.

Inside fit() each micro-batch is normalised by its own statistics. To normalise by those of the window, every
layer of batch normalisation has to see all micro-batches before the next layer sees one: the network is run in
stages, and the library keeps the statistics. The result is that of one batch as large as the window, which
this program checks against Keras.

    keras_window_norm.py [steps]
"""

import os
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gradaccum as ga
import keras
import numpy as np
import tensorflow as tf

WINDOW, MICRO, LR = 24, 6, 0.05


def make() -> tuple[Any, Any, Any]:
    """The stages of a small network for images, before and after its layer of batch normalisation."""
    keras.utils.set_random_seed(1)
    below = keras.Sequential([keras.Input((12, 12, 1)), keras.layers.Conv2D(8, 3, use_bias=False)])
    norm = keras.layers.BatchNormalization()
    norm.build((None, 10, 10, 8))
    above = keras.Sequential(
        [keras.Input((10, 10, 8)), keras.layers.ReLU(), keras.layers.Flatten(), keras.layers.Dense(3)]
    )
    return below, norm, above


def loss_of(logits: Any, labels: Any) -> Any:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(losses)


def by_windows(batches: Any) -> list[Any]:
    below, norm, above = make()
    parameters = [*below.trainable_variables, *norm.trainable_variables, *above.trainable_variables]
    arrays = [variable.numpy() for variable in parameters]
    with ga.Context() as context:
        group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, ga.Flavor.KERAS, lr=LR))
        own = [context.add_param(group, str(i), array) for i, array in enumerate(arrays)]
        first, (gamma, beta), rest = own[:1], own[1:3], own[3:]
        options = ga.BatchNormOptions(ga.Flavor.KERAS, mode=ga.BnMode.WINDOW)
        layer = context.add_batch_norm("norm", 8, gamma, beta, options)

        for x, labels in batches:
            parts = [slice(start, start + MICRO) for start in range(0, WINDOW, MICRO)]
            # The first stage, and the statistics of the window.
            inputs = [below(x[part]).numpy() for part in parts]
            for h in inputs:
                layer.accumulate(h)
            layer.finalize()
            # The second stage, forward and backward, with the window's statistics.
            slopes = []
            for k, (h, part) in enumerate(zip(inputs, parts, strict=True)):
                y = np.empty_like(h)
                layer.forward(h, y)
                with tf.GradientTape() as tape:
                    y = tf.convert_to_tensor(y)
                    tape.watch(y)
                    loss = loss_of(above(y), labels[part])
                dy, *gradients = tape.gradient(loss, [y, *above.trainable_variables])
                slopes.append(dy.numpy())
                with context.micro_batch(MICRO, index=k) as micro:
                    layer.backward_accumulate(h, slopes[-1])
                    for param, gradient in zip(rest, gradients, strict=True):
                        micro.accumulate(param, gradient)
            # The first stage again, backward.
            for k, (h, dy, part) in enumerate(zip(inputs, slopes, parts, strict=True)):
                dx = np.empty_like(h)
                with context.micro_batch(MICRO, index=k) as micro:
                    layer.backward(h, dy, dx)
                    with tf.GradientTape() as tape:
                        out = below(x[part])
                    gradients = tape.gradient(out, below.trainable_variables, output_gradients=dx)
                    for param, gradient in zip(first, gradients, strict=True):
                        micro.accumulate(param, gradient)
            context.step()
            for variable, array in zip(parameters, arrays, strict=True):
                variable.assign(array)
        mean, variance, _ = layer.running()
        return [*arrays, np.from_dlpack(mean), np.from_dlpack(variance)]  # type: ignore[arg-type]


def by_batches(batches: Any) -> list[Any]:
    below, norm, above = make()
    model = keras.Sequential([below, norm, above])
    model.compile(keras.optimizers.SGD(LR), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for x, labels in batches:
        model.train_on_batch(x, labels)
    weights = [v.numpy() for v in model.trainable_variables]
    return [*weights, norm.moving_mean.numpy(), norm.moving_variance.numpy()]


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    random = np.random.default_rng(1)
    centres = random.normal(size=(3, 12, 12, 1))
    batches = []
    for _ in range(steps):
        labels = np.sort(random.integers(0, 3, size=WINDOW))  # micro-batches that differ much
        x = (centres[labels] + random.normal(size=(WINDOW, 12, 12, 1))).astype(np.float32)
        batches.append((x, labels))
    windows, whole = by_windows(batches), by_batches(batches)
    difference = max(
        float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) for a, b in zip(windows, whole, strict=True)
    )
    print(
        f"{steps} steps: windows of {WINDOW // MICRO} micro-batches differ from batches by {difference:.1e}"
    )
    assert difference < 1e-4


if __name__ == "__main__":
    main()
