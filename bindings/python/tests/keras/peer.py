# SPDX-License-Identifier: Apache-2.0
"""Runs GradientAccumulator, in a Python that has it: test_keras_moving.py compares what comes out.

    python peer.py <folder>

reads data.npz and blocks.json (the code of docs/moving/gradientaccumulator.md) from the folder, and writes theirs.npz.
"""

import json
import pathlib
import sys

import gradient_accumulator as peer
import networks
import numpy as np
import tensorflow as tf
from gradient_accumulator.utils import replace_batchnorm_layers

folder = pathlib.Path(sys.argv[1])
data = dict(np.load(folder / "data.npz"))
keras = tf.keras
out = {}


def keep(case, model):
    for name, value in networks.weights(model).items():
        out[f"{case}/{name}"] = value


for case, block in json.loads((folder / "blocks.json").read_text()).items():
    keras.mixed_precision.set_global_policy("float32")
    names = {
        "cnn": lambda: networks.cnn(keras, data),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "images": data["images"],
        "labels": data["labels"],
    }
    if case == "batch_norm":  # the block makes its own network: give its layers the weights
        fit = keras.Model.fit

        def fit_from(model, *arguments, **options):
            networks.set_weights(model, data, "dense/")
            return fit(model, *arguments, **options)

        keras.Model.fit = fit_from
    exec(compile(block, f"docs/moving/gradientaccumulator.md: {case}", "exec"), names)
    if case == "batch_norm":
        keras.Model.fit = fit
    keep(case, names["model"])
keras.mixed_precision.set_global_policy("float32")

# Windows of micro-batches of given sizes, and a tail that is not full.
for case, sizes in networks.WINDOWS.items():
    plain = networks.regression(keras, data)
    model = peer.GradientAccumulateModel(accum_steps=4, inputs=plain.input, outputs=plain.output)
    model.compile(keras.optimizers.legacy.SGD(0.1), "mse")
    for x, y in networks.micro_batches(data, sizes):
        model.train_on_batch(x, y)
    keep(case, model)

# The optimizer: after each of 16 windows.
for name, make in networks.optimizers(keras.optimizers.legacy).items():
    model = networks.regression(keras, data)
    model.compile(peer.GradientAccumulateOptimizer(optimizer=make(), accum_steps=4), "mse")
    before, moves = networks.weights(model), 0
    for x, y in networks.micro_batches(data, [4] * 64):
        model.train_on_batch(x, y)
        after = networks.weights(model)
        moves += any(np.any(after[key] != before[key]) for key in after)
        before = after
    keep(f"optimizer_{name}", model)
    out[f"optimizer_{name}/moves"] = np.int64(moves)

# The moving variance of one window with momentum 0.
for case, rows in (("drawn", data["rows"]), ("sorted", np.sort(data["rows"], axis=0))):
    layer = peer.AccumBatchNormalization(accum_steps=4, momentum=0.0)
    for part in np.split(rows, 4):
        layer(tf.constant(part), training=True)
    out[f"variance_{case}"] = layer.moving_variance.numpy()

# Layers that are replaced.
plain = networks.normalised(keras)
replaced = replace_batchnorm_layers(plain, accum_steps=4)
out["replaced"] = np.float64(np.abs(plain(data["rows"]) - replaced(data["rows"])).max())
np.savez(folder / "theirs.npz", **out)
