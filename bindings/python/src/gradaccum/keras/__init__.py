# SPDX-License-Identifier: Apache-2.0
"""Keras models that train by windows: N micro-batches equal one batch N times as large.

``model = wrap(model, accum_steps=4)``, then ``compile()`` and ``fit()`` as before. For Keras 3 on TensorFlow, JAX
and torch, in the host's memory. The names and arguments of GradientAccumulator are here, too.
"""

from ._batch_norm import AccumBatchNormalization, BatchNormalization, replace_batchnorm_layers
from ._capture import divided_by
from ._model import GradientAccumulateModel, StepResults, wrap
from ._optimizer import GradientAccumulateOptimizer

__all__ = [
    "AccumBatchNormalization", "BatchNormalization", "GradientAccumulateModel", "GradientAccumulateOptimizer",
    "StepResults", "divided_by", "replace_batchnorm_layers", "wrap",
]  # fmt: skip
