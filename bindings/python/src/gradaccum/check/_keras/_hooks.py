# SPDX-License-Identifier: Apache-2.0
"""Lets a recording see what Keras 3 does, on each of its backends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from .. import _where
from .._hosts import begin, in_parallel
from .._series import Series, active, epsilon_of, mark, tell
from .._terms import Term
from ._library import Library, known


class _Within(threading.local):
    """What is being called, or traced, in this thread."""

    applying = False
    variables: Any = ()


_within = _Within()


def watch(series: Series) -> None:
    """Changes functions of Keras until the series ends."""
    keras: Any = sys.modules["keras"]
    backend = keras.backend.backend()
    optimizers: Any = keras.optimizers
    losses: Any = sys.modules.get("keras.src.losses.loss")
    wanted = [(optimizers.Optimizer, "_backend_apply_gradients"), (optimizers.Optimizer, "_clip_gradients"),
              (losses, "reduce_weighted_values")]  # fmt: skip
    missing = [name for owner, name in wanted if not hasattr(owner, name)]
    if missing or backend not in ("tensorflow", "jax", "torch"):
        series.remark(f"Keras {keras.__version__} on {backend} is not watched: {', '.join(missing) or 'unknown'}.")
        return
    series.titles[f"keras {keras.__version__} on {backend}"] = None
    series.is_compiled = backend != "torch"
    series.sees_backward = backend == "tensorflow"
    if any(each.watches_keras for each in active):
        return  # another recording, around this one, whose hooks tell both
    series.watches_keras = True
    begin()
    hooks = _Hooks(series, keras, backend)
    series.replace(losses, "reduce_weighted_values", hooks.reduced)
    series.replace(optimizers.Optimizer, "apply", hooks.applied)
    for name in ("apply", "stateless_apply"):
        series.replace(optimizers.LossScaleOptimizer, name, hooks.gave)
    series.replace(optimizers.Optimizer, "_backend_apply_gradients", hooks.applied_to)
    series.replace(optimizers.Optimizer, "_clip_gradients", hooks.clipped)
    series.replace(optimizers.Optimizer, "_update_model_variables_moving_average", hooks.averaged)
    series.replace(keras.layers.BatchNormalization, "call", hooks.normalised)
    series.replace(keras.Model, "make_train_function", hooks.made_function)
    if backend == "tensorflow":
        series.replace(sys.modules["tensorflow"].GradientTape, "gradient", hooks.differentiated)
        series.replace(sys.modules["tensorflow.python.ops.parallel_for.control_flow_ops"], "pfor", in_parallel)


def watch_library(series: Series) -> None:
    """Changes functions of gradaccum.keras until the series ends."""
    keras: Any = sys.modules["keras"]
    model: Any = sys.modules["gradaccum.keras._model"].Accumulating
    accumulation: Any = sys.modules["gradaccum.keras._accumulation"].Accumulation
    backend = keras.backend.backend()
    library = Library(series, backend)
    series.replace(model, "make_train_function", _Hooks(series, keras, backend).made_function)
    series.replace(accumulation, "add", library.added)
    series.replace(accumulation, "step", library.stepped)
    series.replace(accumulation, "discard", library.discarded)


class _Hooks:
    """Each is called with the function that it replaces, and its arguments."""

    def __init__(self, series: Series, keras: Any, backend: str) -> None:
        self._series = series
        self._keras = keras
        self._backend = backend
        self._models: set[Any] = set()  # whose training is traced anew

    # ---- Losses

    def reduced(
        self, original: Any, values: Any, sample_weight: Any = None, mask: Any = None,
        reduction: Any = "sum_over_batch_size", dtype: Any = None,
    ) -> Any:  # fmt: skip
        """Every loss ends here."""
        result = original(values, sample_weight, mask, reduction, dtype)
        ops = self._keras.ops
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            weights = ops.cast(sample_weight, "float32")
            count = ops.sum(weights if mask is None else weights * ops.cast(mask, "float32"))
        elif mask is not None:
            count = ops.sum(ops.cast(mask, "float32"))
        else:
            count = 1.0
            for length in ops.shape(values):
                count = count * (length if isinstance(length, int) else ops.cast(length, "float32"))
        caller: Any = sys._getframe(2).f_locals.get("self")
        name, where, call = str(getattr(caller, "name", "loss")), _where.line(), _where.call()
        kind = {"sum": "sum", "none": "none", None: "none"}.get(reduction, "mean")
        epsilon = epsilon_of(self._keras.backend.standardize_dtype(result.dtype))
        return mark(result, count, lambda: Term(name, where, kind, 0.0, epsilon, call))

    # ---- Gradients

    def differentiated(self, original: Any, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """TensorFlow's tape has made gradients."""
        found = original(tape, target, sources, *args, **kwargs)
        flat: Any = sys.modules["tensorflow"].nest.flatten
        gradients = known(flat(sources), flat(found))
        if gradients:
            tell("add", gradients, where=_where.line())
        return found

    def gave(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """A wrapper of an optimizer is given gradients."""
        is_stateless = original.__name__ == "stateless_apply"
        gradients = kwargs.get("grads", args[1 if is_stateless else 0] if args else ())
        variables = optimizer._trainable_variables
        if not is_stateless:
            variables = kwargs.get("trainable_variables", args[1] if len(args) > 1 else None) or variables
        return self._giving(gradients, variables, lambda: original(optimizer, *args, **kwargs))

    def applied(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """An optimizer is given gradients."""
        grads = list(grads)
        variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)

        def call() -> Any:
            if grads and optimizer.gradient_accumulation_steps:
                place = optimizer._iterations % optimizer.gradient_accumulation_steps
                tell("given", {}, _number(optimizer.learning_rate), place, key=optimizer)
            return original(optimizer, grads, trainable_variables)

        return self._giving(grads, variables, call)

    def _giving(self, gradients: Any, variables: Any, call: Callable[[], Any]) -> Any:
        """The gradients of a micro-batch go to an optimizer, outside of any other."""
        if _within.applying:
            return call()
        _within.applying = True
        try:
            if self._backend != "tensorflow":  # where the tape has told
                given = known(variables, gradients)
                if given:
                    tell("add", given, where=_where.line())
            return call()
        finally:
            _within.applying = False

    def applied_to(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any) -> Any:
        """An optimizer goes through with gradients of these variables."""
        outer, _within.variables = _within.variables, trainable_variables
        try:
            return original(optimizer, grads, trainable_variables)
        finally:
            _within.variables = outer

    def clipped(self, original: Any, optimizer: Any, grads: Any) -> Any:
        """An optimizer is about to use gradients. On JAX it computes each step, and drops what is within a window."""
        result = original(optimizer, grads)
        is_applied: Any = True
        if self._backend == "jax" and optimizer.gradient_accumulation_steps:
            is_applied = (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0
        gradients = known(_within.variables, grads)
        dtypes = [epsilon_of(self._keras.backend.standardize_dtype(each.dtype)) for each in grads]
        tell(
            "update", gradients, is_applied, _number(optimizer.learning_rate), *(() if result is grads else result), key=optimizer,
            name=type(optimizer).__name__, where=_where.line(), epsilon=max(dtypes, default=0.0),
        )  # fmt: skip
        return result

    # ---- What moves beside the gradients

    def averaged(self, original: Any, optimizer: Any, trainable_variables: Any) -> Any:
        if optimizer.use_ema:
            tell("averaged", {}, _number(0.0), key=optimizer)
        return original(optimizer, trainable_variables)

    def normalised(self, original: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if training and layer.trainable and not self._keras.backend.is_keras_tensor(inputs):
            tell("moved", {}, _number(0.0), layer=id(layer))
        return original(layer, inputs, training=training, mask=mask)

    # ---- fit()

    def made_function(self, original: Any, model: Any, force: bool = False) -> Any:
        """A model is about to train: what it has compiled before is not watched, and XLA lets nothing be."""
        is_new = model not in self._models
        if is_new:
            self._models.add(model)
            self._series.at_end(lambda: setattr(model, "train_function", None))
        compiled = model.jit_compile
        if self._backend != "jax":  # nor does torch.compile
            model.jit_compile = False
        try:
            return original(model, force=force or is_new)
        finally:
            model.jit_compile = compiled


def _number(value: Any) -> Any:
    """A learning rate as an array of the backend, which tells where it is computed."""
    keras: Any = sys.modules["keras"]
    return keras.ops.convert_to_tensor(value, dtype="float32")
