# SPDX-License-Identifier: Apache-2.0
"""Releases of other packages, what of theirs is run, and what gradaccum.check finds there.

A name has the packages that are installed, the arguments of loops.py, and the faults, the worst first. The torch
environment of tests/environments has what is not named, and the keras environment for the last of them.
"""

LONG = "mean of means over uneven micro-batches"
CASES: dict[str, tuple[str, str, list[str]]] = {
    # Tokens: each micro-batch had the same weight, until the loss was divided by the tokens of the window.
    "transformers-4.44-language-model": ("transformers==4.44.2 accelerate==0.33.0", "language_model 16", [LONG]),
    "transformers-4.57-language-model": ("transformers==4.57.0 accelerate==1.10.1", "language_model 16", []),
    # The last window of an epoch went on into the next epoch.
    "transformers-4.49-language-model-tail": (
        "transformers==4.49.0 accelerate==1.4.0", "language_model 21", ["not determined"]
    ),
    "transformers-4.57-language-model-tail": ("transformers==4.57.0 accelerate==1.10.1", "language_model 21", []),
    # Models that take any argument were trusted to divide.
    "transformers-4.46-classifier": ("transformers==4.46.3 accelerate==1.0.1", "classifier 16", ["sum for mean"]),
    "transformers-4.49-classifier": ("transformers==4.49.0 accelerate==1.4.0", "classifier 16", []),
    "transformers-5.23-classifier": ("transformers==5.23.0", "classifier 16", ["sum for mean"]),
    "sentence-transformers-3.3": (
        "sentence-transformers==3.3.1 transformers==4.46.3 accelerate==1.0.1 datasets==3.1.0", "sentences 16",
        ["sum for mean"],
    ),
    "sentence-transformers-5.1": (
        "sentence-transformers==5.1.0 transformers==4.57.0 accelerate==1.10.1 datasets==4.0.0", "sentences 16", []
    ),
    # Tails.
    "accelerate-0.33-tail": ("accelerate==0.33.0", "accelerate 83", ["tail divided by N"]),
    "accelerate-1.15-tail": ("accelerate==1.15.0", "accelerate 83", ["tail divided by N"]),
    "lightning-2.0-tail": ("lightning==2.0.9 numpy==1.26.4 setuptools==75.8.0", "lightning 83", ["tail divided by N"]),
    "lightning-2.6-tail": ("lightning==2.6.6", "lightning 83", ["tail divided by N"]),
    "ignite-0.5-tail": ("pytorch-ignite==0.5.5", "ignite 83", [LONG]),
    "fastai-2.8-tail": ("fastai==2.8.12 pandas scipy pyyaml requests", "fastai 83", ["leak from the window before"]),
    "mmengine-0.10-even-tail": ("mmengine==0.10.7", "mmengine 80", []),
    "mmengine-0.10-tail": ("mmengine==0.10.7", "mmengine 83", [LONG]),
    # Keras on JAX, and optax.
    "keras-3.5": ("keras==3.5.0 jax==0.4.31 jaxlib==0.4.31", "keras 64", []),
    "keras-3.5-uneven": ("keras==3.5.0 jax==0.4.31 jaxlib==0.4.31", "keras 62", [LONG]),
    "keras-3.5-schedule": ("keras==3.5.0 jax==0.4.31 jaxlib==0.4.31", "keras_schedule 64", ["schedule moved per micro-batch"]),
    "keras-3.15": ("keras==3.15.1", "keras 64", []),
    "keras-3.15-uneven": ("keras==3.15.1", "keras 62", [LONG]),
    "keras-3.15-schedule": ("keras==3.15.1", "keras_schedule 64", ["schedule moved per micro-batch"]),
    "keras-3.15-average": ("keras==3.15.1", "keras_average 64", ["moving average per micro-batch"]),
    "optax-0.2.8": ("optax==0.2.8", "optax 64", []),
    "optax-0.2.8-uneven": ("optax==0.2.8", "optax 62", [LONG]),
    "optax-0.2.8-nan": ("optax==0.2.8", "optax_nan 64", ["non-finite gradient applied"]),
    "optax-0.2.8-skip": ("optax==0.2.8", "optax_skip 64", []),
    # The sum in f32 got a rank's own last micro-batch once the others had been reduced.
    "deepspeed-0.18.6": ("deepspeed==0.18.6", "1 128", ["last micro-batch not reduced"]),
    "deepspeed-0.19.8": ("deepspeed==0.19.8", "1 128", []),
}  # fmt: skip
