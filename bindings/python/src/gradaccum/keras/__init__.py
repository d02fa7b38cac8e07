# SPDX-License-Identifier: Apache-2.0
"""Keras models that train by windows: N micro-batches equal one batch N times as large.

``model = wrap(model, accum_steps=4)``, then ``compile()`` and ``fit()`` as before. For Keras 3 on TensorFlow, JAX
and torch, in the host's memory. The names and arguments of GradientAccumulator are here, too.
"""

from typing import Any

from . import _clones  # noqa: F401: changes what Keras makes of a wrapped model
from ._agc import unitwise_norm
from ._batch_norm import AccumBatchNormalization, BatchNormalization, replace_batchnorm_layers
from ._capture import divided_by
from ._model import GradientAccumulateModel, StepResults, wrap
from ._optimizer import GradientAccumulateOptimizer

__all__ = [
    "AccumBatchNormalization", "BatchNormalization", "GradientAccumulateModel", "GradientAccumulateOptimizer",
    "StepResults", "divided_by", "replace_batchnorm_layers", "unitwise_norm", "wrap",
]  # fmt: skip

_FORMER = {
    "GAModelWrapper": "GradientAccumulateModel(accum_steps=..., inputs=..., outputs=...), or wrap(model, accum_steps)",
    "GAOptimizerWrapper": "wrap(model, accum_steps), and compile the model with the optimizer itself",
    "adaptive_clip_grad": "wrap(model, accum_steps, use_agc=True), which clips the gradient of the window",
    "compute_norm": "keras.ops.norm()",
}


def __getattr__(name: str) -> Any:
    # Not an AttributeError, whose message an import statement drops.
    if name in _FORMER:
        raise ImportError(f"{name} is of another version of GradientAccumulator: write {_FORMER[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
