# SPDX-License-Identifier: Apache-2.0
"""Models of Keras that train by windows."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from .. import Clip, Config, StepResult
from ._accumulation import Accumulation
from ._backends import Variables, backend
from ._batch_norm import BatchNormalization
from ._capture import current
from ._optimizer import GradientAccumulateOptimizer
from ._options import Options, named, split
from ._private import Functional, KerasSaveable, is_functional, keras, registered


class Accumulating:
    """What a model gains by wrap()."""

    _options: Options
    optimizer: Any
    """As in Keras."""
    built: bool
    """As in Keras."""
    dtype_policy: Any
    """As in Keras."""
    trainable_variables: Any
    """As in Keras."""
    train_function: Any
    """As in Keras."""
    _flatten_layers: Any

    @property
    def _accumulation(self) -> Accumulation:
        accumulation: Accumulation = self.optimizer.accumulation
        return accumulation

    # ---- Training

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As in Keras. The optimizer describes the step, which the library makes."""
        base: Any = super()
        call = _Call(base.compile, keras.Model.compile, args, kwargs)
        if not call.takes("optimizer"):
            raise ValueError(f"compile() of {type(self).__qualname__} has no argument named optimizer")
        executions = call.get("steps_per_execution", 1)
        if executions != 1:
            raise ValueError(
                f"steps_per_execution was {executions}, expected 1: the window lies between executions"
            )
        _check_alone(self)
        former = getattr(self, "optimizer", None)
        optimizer = call.get("optimizer", "rmsprop")
        if optimizer is not None:
            optimizer = keras.optimizers.get(optimizer)
            if (
                call.get("auto_scale_loss", True)
                and self.dtype_policy.name == "mixed_float16"
                and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            ):
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
            optimizer = self._options.optimizer(optimizer, former)
        if isinstance(former, GradientAccumulateOptimizer) and former is not optimizer:
            former.accumulation.warn_of_loss()
        call.set("optimizer", optimizer)
        if call.takes("auto_scale_loss"):
            call.set("auto_scale_loss", False)
        call()
        if optimizer is not None:
            self.optimizer = (
                optimizer  # a compile() of the user's may have let Keras scale the loss once more
            )
            _set_up(self, getattr(self, "loss", None))

    def compile_from_config(self, config: Any) -> None:
        """For loading, as in Keras, which calls no compile() that it does not know."""
        base: Any = super()
        own: Any = type(self).compile
        if own is not Accumulating.compile or base.compile.__func__ is not keras.Model.compile:
            base.compile_from_config(config)
            return
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def make_train_function(self, force: bool = False) -> Any:
        """Makes the function that `fit` calls for each micro-batch, as Keras' own models do."""
        if self.built and self.optimizer is not None:
            self.optimizer.begin(self.trainable_variables)
        if self.train_function is None or force:
            accumulation = self._accumulation
            layers = self._flatten_layers()
            accumulation.layers = [layer for layer in layers if isinstance(layer, BatchNormalization)]
            self.train_function = backend().train_function(self)
            if keras.backend.backend() == "jax":
                accumulation.set_places(self)
        return self.train_function

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """As in Keras. A window that is short at the end of an epoch is applied before validation.

        What ends fit() early, Ctrl-C for instance, drops the open window, unless wrap() was given
        keep_window=True.
        """
        base: Any = super()
        call = _Call(base.fit, keras.Model.fit, args, kwargs)
        given = call.get("callbacks")
        own = [_Windows()] + ([StepResults()] if self._options.step_logs else [])
        if isinstance(given, keras.callbacks.CallbackList):
            own = [one for one in own if not any(type(one) is type(other) for other in given.callbacks)]
            for one in own:
                one.set_model(self)
            given.callbacks[:0] = own
        else:
            listed = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
            call.set("callbacks", [*own, *listed])
        try:
            return call()
        except BaseException:
            if not self._options.keep_window and getattr(self, "optimizer", None) is not None:
                self.discard()
            raise

    def __reduce__(self) -> Any:
        """For pickle and copy.deepcopy: what Keras saves, and how the model was wrapped."""
        base: Any = super()
        (file,) = base.__reduce__()[1]
        return _unpickled, (file, vars(self._options))

    def flush(self) -> StepResult | None:
        """Makes the step of a window that is not full. None: the window was empty. Between batches."""
        return self._accumulation.flush(Variables())

    def discard(self) -> None:
        """Drops the window."""
        self._accumulation.discard()

    @property
    def step_result(self) -> StepResult | None:
        """The result of the last step of the library; None: there was none yet."""
        return self._accumulation.result

    # ---- Hooks of train_step()

    def _aggregate_additional_loss(self, loss: Any) -> Any:
        """Where losses are sums over the batch, regularisers count in the first micro-batch of a window."""
        base: Any = super()
        loss = base._aggregate_additional_loss(loss)
        capture = current()
        if capture is None:
            return loss
        model: Any = self
        regularised = sum(variable.regularizer is not None for variable in model.trainable_variables)
        adds_losses = len(model.losses) > regularised
        if not self._accumulation.summed:
            capture.adds_losses = adds_losses
            return loss
        if adds_losses:
            raise ValueError(
                "the model adds losses of its activations by add_loss(), and its loss is a sum over the batch: "
                "whether they are sums, too, is not known"
            )
        return loss * keras.ops.cast(capture.first, loss.dtype)


class GradientAccumulateModel(Accumulating, keras.Model):  # type: ignore[misc]
    """A model that trains by windows, by the name and the arguments that it has in GradientAccumulator.

    ``GradientAccumulateModel(accum_steps=4, inputs=..., outputs=...)`` is ``wrap(keras.Model(inputs, outputs))``;
    a subclass with a call() of its own passes accum_steps to ``super().__init__()``.

    use_agc, clip_factor, eps: adaptive gradient clipping, of the window's gradient. mixed_precision: has no
    effect, since the dtype policy of Keras decides. experimental_distributed_support: must be False.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not GradientAccumulateModel or not (args or kwargs):  # Keras asks without for a subclass
            return super().__new__(cls)
        own, rest, of_keras = split(args, kwargs)
        return wrap(keras.Model(*rest, **of_keras), **own)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own, rest, of_keras = split(args, kwargs)
        options = Options(**own)
        of_class = type(self)
        if is_functional(rest, of_keras) and not issubclass(of_class, Functional):
            # Keras would put Functional among the bases of this class here, and for good: then no other subclass could
            # have a call() of its own.
            of_class.__bases__ = (*of_class.__bases__, Functional)
        super().__init__(*rest, **of_keras)
        object.__setattr__(self, "_options", options)

    def get_config(self) -> dict[str, Any]:
        """As in Keras, with the options that the constructor takes."""
        config: dict[str, Any] = super().get_config()
        return {**self._options.saved(type(self).__init__), **config}


def wrap(
    model: Any,
    accum_steps: int | dict[int, int] | None = None,
    *,
    reduction: str = "MEAN",
    use_agc: bool = False,
    clip_factor: float = 0.01,
    eps: float = 1e-3,
    clip: Clip | None = None,
    config: Config | None = None,
    keep_window: bool = False,
    step_logs: bool = False,
    mixed_precision: bool = False,
    experimental_distributed_support: bool = False,
    **others: Any,
) -> Any:
    """Makes a model train by windows: ``compile()`` and ``fit()`` stay as they are. Returns the same model.

    accum_steps: micro-batches in a window; or a schedule {step: micro-batches}; None: those of the
    GradientAccumulateOptimizer that the model is compiled with, after loading for instance.
    reduction: "MEAN" or "SUM", as for GradientAccumulateOptimizer.
    use_agc, clip_factor, eps: adaptive gradient clipping of the window's gradient. clip: any other clipping that
    the optimizer has no words for. config: of the library's context.
    keep_window: whether a window stays open when fit() ends early. step_logs: adds StepResults to the logs.
    mixed_precision: has no effect, since the dtype policy of Keras decides. Other spellings of GradientAccumulator,
    ``agc`` and ``n_gradients``, are taken; any other name is a TypeError.

    A model that is compiled goes on with the state of its optimizer.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"the model was {model!r}, expected a keras.Model")
    if isinstance(model, Accumulating):
        raise ValueError("the model is wrapped already")
    given = named({} if accum_steps is None else {"accum_steps": accum_steps}, others, "wrap()")
    compiled = getattr(model, "optimizer", None)
    if "accum_steps" not in given:
        if not isinstance(compiled, GradientAccumulateOptimizer):
            raise ValueError(
                "accum_steps is missing: the model is not compiled with a GradientAccumulateOptimizer"
            )
        given["accum_steps"] = compiled.accumulation.accum_steps
    agc = given.pop("use_agc", False)
    options = Options(
        **given, use_agc=use_agc or agc, reduction=reduction, clip_factor=clip_factor, eps=eps, clip=clip,
        config=config, keep_window=keep_window, step_logs=step_logs, mixed_precision=mixed_precision,
        experimental_distributed_support=experimental_distributed_support,
    )  # fmt: skip
    if compiled is not None:
        _check_alone(model)
        if model.steps_per_execution != 1:
            raise ValueError(f"steps_per_execution was {model.steps_per_execution}, expected 1")
        own = options.optimizer(compiled)
    # A class of the same name, so that Keras saves the model as what it was. What Keras makes by this class has its
    # options.
    of = type(model)
    names = {
        "__module__": of.__module__, "__qualname__": of.__qualname__, "__init__": of.__init__, "_options": options,
    }  # fmt: skip
    model.__class__ = type(of.__name__, (Accumulating, of), names)
    if of in registered:
        registered[type(model)] = registered[of]
    if compiled is not None:
        if own is not compiled and compiled.built:
            store: dict[str, Any] = {}
            compiled.save_own_variables(store)
            own.build(model.trainable_variables)
            own.load_own_variables(store)
        object.__setattr__(model, "optimizer", own)
        model._compile_config.config["optimizer"] = keras.saving.serialize_keras_object(own)
        _set_up(model, model._compile_config.config.get("loss"))
        model.train_function = None
    return model


def _unpickled(file: Any, options: dict[str, Any]) -> Any:
    model = KerasSaveable._unpickle_model(file)
    return model if isinstance(model, Accumulating) else wrap(model, **options)


class _Call:
    """A call of a method that may be the user's and pass on what it is given."""

    def __init__(self, method: Any, of_keras: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.method, self.args, self.kwargs = method, list(args), kwargs
        parameters = list(inspect.signature(method).parameters.values())
        if any(one.kind is one.VAR_POSITIONAL for one in parameters):
            parameters = list(inspect.signature(of_keras).parameters.values())[1:]
        self._names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD][: len(args)]

    def get(self, name: str, default: Any = None) -> Any:
        if name in self._names:
            return self.args[self._names.index(name)]
        return self.kwargs.get(name, default)

    def set(self, name: str, value: Any) -> None:
        if name in self._names:
            self.args[self._names.index(name)] = value
        else:
            self.kwargs[name] = value

    def takes(self, name: str) -> bool:
        parameters = inspect.signature(self.method).parameters
        return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def __call__(self) -> Any:
        return self.method(*self.args, **self.kwargs)


def _set_up(model: Any, loss: Any) -> None:
    """Tells the window what compile() says of the loss: whether it is a sum over the batch."""
    if isinstance(loss, dict) and "class_name" in loss:  # as compile() keeps it
        loss = keras.saving.deserialize_keras_object(loss)
    losses = [keras.losses.get(one) for one in keras.tree.flatten(loss) if one is not None]
    reductions = {getattr(one, "reduction", "sum_over_batch_size") for one in losses}
    model._accumulation.set_summed(bool(reductions) and reductions <= {"sum", "none", None})


def _check_alone(model: Any) -> None:
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "the model was made under a tf.distribute strategy of several replicas, and one is supported: let each "
            "replica be a process, a rank, see «What gradaccum.keras does not have» in docs/keras.md"
        )
    if keras.distribution.distribution() is not None:
        raise ValueError(
            "a keras.distribution is set, and one device is supported: let each device have a process, a rank, see "
            "«What gradaccum.keras does not have» in docs/keras.md"
        )
    if _torch_processes() > 1:
        raise ValueError(
            "there are several processes of torch.distributed, whose gradients nothing would reduce: one is supported; "
            "gradaccum.torch takes a DistributedDataParallel, ddp="
        )


def _torch_processes() -> int:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or keras.backend.backend() != "torch":
        return 1
    alone = not (distributed.is_available() and distributed.is_initialized())
    return 1 if alone else int(distributed.get_world_size())


class _Windows(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the window with the epoch: before validation, and before any other callback sees the model."""

    def __init__(self) -> None:
        super().__init__()
        self.trains = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.trains = True

    def on_test_begin(self, logs: Any = None) -> None:
        if self.trains:
            self.model.flush()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trains = False
        self.model.flush()


class StepResults(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds the numbers of the last step to the logs, where progress bars, History and TensorBoard find them.

    grad_norm, clip_factor, lr, loss_scale, noise_scale, steps, as in ``gradaccum.StepResult``. Comes before the
    callbacks that read the logs: ``wrap(model, step_logs=True)`` sees to that.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Adds the numbers to the logs of a micro-batch."""
        self._add(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the numbers to the logs of an epoch."""
        self._add(logs)

    def _add(self, logs: Any) -> None:
        result = self._model._accumulation.result
        if logs is not None and result is not None:
            logs.update(
                grad_norm=result.norm, clip_factor=result.clip_factor, lr=result.lr, loss_scale=result.loss_scale,
                noise_scale=result.noise_scale, steps=result.steps,
            )  # fmt: skip
