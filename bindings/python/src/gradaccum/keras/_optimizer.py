# SPDX-License-Identifier: Apache-2.0
"""An optimizer of Keras whose steps are made by the library."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from .. import Clip, Config, StepResult
from ._accumulation import Accumulation
from ._backends import Variables, backend
from ._capture import current
from ._private import KerasSaveable, keras

_PACKAGE = "gradaccum"
NOT_WRAPPED: Final = (
    "the model is not wrapped, so the optimizer sees no weights of micro-batches and no ends of epochs: train the "
    "model by gradaccum.keras.wrap(model)"
)


# A LossScaleOptimizer by its class, because compile() would put another one around it under mixed_float16.
@keras.saving.register_keras_serializable(package=_PACKAGE)
class GradientAccumulateOptimizer(keras.optimizers.LossScaleOptimizer):  # type: ignore[misc]
    """An optimizer that accumulates micro-batches, and steps once per window.

    Compile a wrapped model with it, or leave that to ``wrap()`` and compile with the optimizer itself. In a loop
    of your own, outside of ``tf.function`` and ``jax.jit``, ``apply_gradients()`` adds a micro-batch of weight 1.

    optimizer: of ``keras.optimizers``, which describes the step: its hyper-parameters, schedule, clipping, weight
    decay, moving average; a LossScaleOptimizer around it gives a loss scale. Its own ``apply()`` is never called,
    and its slots are never made.
    accum_steps: micro-batches in a window; or a schedule {step: micro-batches}.
    reduction: "MEAN": of the window, each micro-batch by the divisor of its loss; "SUM": of the gradients of the
    micro-batches.
    clip, config: of the library, for what Keras has no words for.
    """

    built: bool
    """Whether the variables are known."""

    def __init__(
        self,
        optimizer: Any = "sgd",
        accum_steps: int | dict[int, int] = 1,
        reduction: str = "MEAN",
        name: str = "gradient_accumulate_optimizer",
        *,
        clip: Clip | None = None,
        config: Config | None = None,
    ) -> None:
        super(keras.optimizers.LossScaleOptimizer, self).__init__(learning_rate=0.0, name=name)
        optimizer = keras.optimizers.get(optimizer)
        if isinstance(optimizer, GradientAccumulateOptimizer):
            raise ValueError("the optimizer is a GradientAccumulateOptimizer already")
        scaler = None
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scaler, optimizer = optimizer, optimizer.inner_optimizer
        # Not a child of this one, or Keras would save it beside this one.
        self.accumulation = Accumulation(optimizer, scaler, accum_steps, reduction, clip, config)
        self.rest = _Rest(self.accumulation)
        self._store: dict[str, Any] = {}  # what was loaded before the variables were known

    # ---- What Keras asks of an optimizer

    def build(self, variables: Any) -> None:
        """Tells which variables are trained. No slots are made."""
        if not self.built:
            self.accumulation.build(variables)
            self.built = True

    def begin(self, variables: Any) -> None:
        """Before training, outside of graphs: takes over what was loaded before the variables were known."""
        self.build(variables)
        if self._store:
            store, self._store = self._store, {}
            self.load_own_variables(store)

    @property
    def variables(self) -> list[Any]:
        """The variables that the graph reads: the loss scale, or none. Slots are the library's."""
        return self.accumulation.state_variables() if hasattr(self, "accumulation") else []

    @property
    def iterations(self) -> Any:
        """Applied steps."""
        return self.accumulation.optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the next step, which callbacks may set."""
        return self.accumulation.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.accumulation.optimizer.learning_rate = learning_rate

    def scale_loss(self, loss: Any) -> Any:
        """The loss times the loss scale; the loss itself without one."""
        own = self.accumulation
        capture = current()
        if capture is not None:
            capture.is_scaled = True
        if own.scale is not None:
            return keras.ops.multiply(loss, keras.ops.cast(own.scale, loss.dtype))
        factor = own.optimizer.loss_scale_factor
        return loss if factor is None else loss * factor

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Adds a micro-batch; the last one of a window makes the step."""
        if not self.built:
            self.build(trainable_variables)
        capture = current()
        if capture is not None:
            capture.applied(grads, trainable_variables)
            return
        if any(backend().is_symbolic(grad) for grad in grads if grad is not None):
            raise RuntimeError(
                "a step of the library lies outside of graphs: train the model by gradaccum.keras.wrap(model), or "
                "call apply_gradients() outside of tf.function and jax.jit"
            )
        self.accumulation.add(trainable_variables, list(grads), [1.0], {}, Variables())

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Hands gradients out of the graph of JAX. RuntimeError: the model is not wrapped."""
        capture = current()
        if capture is None:
            raise RuntimeError(NOT_WRAPPED)
        capture.applied(grads, None)
        return trainable_variables, optimizer_variables

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """As in Keras: variables that do not decay. Before training."""
        self.accumulation.optimizer.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: Any) -> None:
        """At the end of fit(): with use_ema, variables become their moving averages."""
        self.accumulation.finish(Variables())

    # ---- What SwapEMAWeights asks of an optimizer

    @property
    def _trainable_variables(self) -> list[Any]:
        return self.accumulation.variables if hasattr(self, "accumulation") else []

    @_trainable_variables.setter
    def _trainable_variables(self, variables: Any) -> None:
        pass  # the empty list that every optimizer of Keras begins with

    @property
    def _model_variables_moving_average(self) -> list[Any]:
        if not self.accumulation.optimizer.use_ema:
            raise AttributeError("there are no moving averages, since use_ema is False")
        return self.accumulation.averages(Variables()) if self.built else []  # not built: nothing to exchange

    # ---- Windows

    def flush(self) -> StepResult | None:
        """Makes the step of a window that is not full. None: the window was empty."""
        return self.accumulation.flush(Variables())

    def discard(self) -> None:
        """Drops the window."""
        self.accumulation.discard()

    @property
    def result(self) -> StepResult | None:
        """The result of the last step."""
        return self.accumulation.result

    # ---- Saving

    def save_own_variables(self, store: Any) -> None:
        """Saves what the plain optimizer would save, in its order."""
        self.rest.head, self.rest.data = b"", b""
        if not self.built:
            return
        plain, self.rest.head, self.rest.data = self.accumulation.save(Variables())
        own = self.accumulation
        if own.scaler is not None:  # its iterations, its learning rate, its counter and the scale come first
            scale = np.asarray(keras.ops.convert_to_numpy(own.scale))
            plain = [np.asarray(0), np.asarray(0, np.float32), np.asarray(0), scale, *plain]
        for index, array in enumerate(plain):
            store[str(index)] = array

    def load_own_variables(self, store: Any) -> None:
        """Loads what this optimizer or the plain one has saved. ValueError: it is of another kind or model."""
        if not len(store.keys()):
            return
        if not self.built:
            self._store = {key: np.asarray(store[key]) for key in store.keys()}  # noqa: SIM118: not a dict
            return
        plain = [np.asarray(store[str(index)]) for index in range(len(store.keys()))]
        own = self.accumulation
        if own.scaler is not None:
            scale, plain = plain[3], plain[4:]
            own.scale.assign(float(scale))
        wanted = len(own.variables_of_keras())
        if len(plain) != wanted:
            raise ValueError(
                f"the saved optimizer has {len(plain)} variables, and this one, of kind "
                f"{type(own.optimizer).__name__}, {wanted}: it is of another kind or of another model"
            )
        own.load(plain)

    def get_config(self) -> dict[str, Any]:
        """The arguments, for saving."""
        own = self.accumulation
        steps = own.accum_steps
        return {
            "name": self.name,
            "optimizer": keras.saving.serialize_keras_object(own.scaler or own.optimizer),
            "accum_steps": sorted(steps.items()) if isinstance(steps, dict) else steps,
            "reduction": own.reduction,
            "clip": as_numbers(own.own_clip),
            "config": as_numbers(own.config),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The optimizer that get_config() was called of."""
        config = dict(config)
        steps = config.pop("accum_steps", 1)
        clip, own = config.pop("clip", None), config.pop("config", None)
        optimizer = keras.saving.deserialize_keras_object(
            config.pop("optimizer"), custom_objects=custom_objects
        )
        return cls(
            optimizer,
            {int(step): int(k) for step, k in steps} if isinstance(steps, (list, tuple)) else steps,
            clip=of_numbers(Clip, clip), config=of_numbers(Config, own), **config,
        )  # fmt: skip


class _Rest(KerasSaveable):  # type: ignore[misc]
    """What an optimizer saves beside the variables of the plain one, under a path that plain Keras ignores."""

    def __init__(self, accumulation: Accumulation) -> None:
        self.accumulation = accumulation
        self.head = b""
        self.data = b""

    def _obj_type(self) -> str:
        return "Metric"  # the kind of object without children

    def save_own_variables(self, store: Any) -> None:
        if self.head:
            store["0"] = np.frombuffer(self.head, np.uint8)
            store["1"] = np.frombuffer(self.data, np.uint8)
            store["2"] = np.asarray(0 if self.accumulation.is_empty else 1)
        self.head, self.data = b"", b""

    def load_own_variables(self, store: Any) -> None:
        if len(store.keys()):
            head, rest = (np.asarray(store[key]).tobytes() for key in ("0", "1"))
            self.accumulation.load(None, head, rest, is_empty=not int(np.asarray(store["2"])))


def as_numbers(options: Clip | Config | None) -> dict[str, Any] | None:
    """Options of the library, for saving."""
    if options is None:
        return None
    return {
        field.name: (int(value) if isinstance(value, int) else value)
        for field in dataclasses.fields(options)
        if field.name not in ("log", "stream")
        for value in [getattr(options, field.name)]
    }


def of_numbers(kind: Any, numbers: dict[str, Any] | None) -> Any:
    """The options that as_numbers() was given."""
    if numbers is None:
        return None
    return kind(**{name: kind._from_c(name, value) for name, value in numbers.items()})
