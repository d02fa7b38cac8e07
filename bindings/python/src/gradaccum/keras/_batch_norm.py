# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation whose moving statistics are those of the window."""

from __future__ import annotations

from typing import Any

from ._capture import current, elements
from ._private import keras


# Named as Keras' layer, because the paths of a file of weights are made of the names of classes.
@keras.saving.register_keras_serializable(package="gradaccum")
class BatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras' layer, whose moving statistics move once per step, by the exact statistics of the window.

    Each micro-batch is normalised by its own statistics, as before. Takes the arguments of
    ``keras.layers.BatchNormalization`` but renorm and synchronized. Outside of a wrapped model it is Keras' layer.
    accum_steps is that of GradientAccumulator and has no effect: the window is the optimizer's.
    """

    def __init__(self, *args: Any, accum_steps: Any = None, **kwargs: Any) -> None:
        if args and (isinstance(args[0], bool) or args[0] > 0):
            raise TypeError(
                f"{args[0]!r} was given by position, which is accum_steps in GradientAccumulator and axis in Keras: "
                "give it by name"
            )
        super().__init__(*args, **kwargs)
        _check(self)

    def moving(self) -> list[Any]:
        """The variables that an applied step moves."""
        return [self.moving_mean, self.moving_variance]

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Normalises inputs, as Keras does."""
        capture = current()
        if capture is None or not training or not self.trainable:
            return super().call(inputs, training=training, mask=mask)
        ops = keras.ops
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        x = ops.cast(inputs, dtype)
        mean, variance = self._moments(x, mask)
        count = elements(x, self.axis) if mask is None else ops.sum(ops.cast(mask, "float32"))
        capture.normalised(self, count, mean, variance)
        outputs = ops.batch_normalization(
            x=x, mean=mean, variance=variance, axis=self.axis,
            offset=ops.cast(self.beta, dtype) if self.center else None,
            scale=ops.cast(self.gamma, dtype) if self.scale else None, epsilon=self.epsilon,
        )  # fmt: skip
        return ops.cast(outputs, self.compute_dtype)


AccumBatchNormalization = BatchNormalization
"""GradientAccumulator's name of it."""


def replace_batchnorm_layers(model: Any, accum_steps: Any = None) -> Any:
    """Makes the layers of batch normalisation of a model those of this package, and returns the model.

    They stay the same objects, with their weights, statistics and options. A model that is compiled already must
    be compiled again. accum_steps is that of GradientAccumulator and has no effect.
    """
    for layer in model._flatten_layers():
        if type(layer) is keras.layers.BatchNormalization:
            _check(layer)
            layer.__class__ = BatchNormalization
        elif isinstance(layer, keras.layers.BatchNormalization) and not isinstance(layer, BatchNormalization):
            raise ValueError(
                f'layer "{layer.path}" is a {type(layer).__qualname__}, a class of its own over Keras\' '
                "BatchNormalization: derive it from gradaccum.keras.BatchNormalization"
            )
    model.train_function = None
    return model


def _check(layer: Any) -> None:
    for option in ("renorm", "synchronized"):
        if getattr(layer, option):
            raise ValueError(f'layer "{layer.name}" has {option}=True, which is not supported')
