# SPDX-License-Identifier: Apache-2.0
"""A window of the library over the variables of a Keras model."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .. import (
    BatchNorm, BatchNormOptions, BnSpread, Clip, Config, Context, Dtype, Ema, Flavor, GradientKind, GradientLife, Group,
    LossScaler, Param, Reduce, Settings, StateOptions, StateParts, StepResult, Tensor, WindowState,
)  # fmt: skip
from .. import _state_file as files
from . import _kinds
from ._backends import Shared, Variables, backend
from ._capture import Capture
from ._private import keras

# Parameters are named by their place, since paths of Keras differ from one instance of a model to another.
_NAME = "variable"
_RATIO = 1e-6  # by which ratios of divisors may differ that are taken as alike


class Accumulation:
    """The window of a model: what its optimizer of Keras describes, done by the library.

    optimizer: the description. scaler: the LossScaleOptimizer around it, or None.
    """

    def __init__(
        self, optimizer: Any, scaler: Any, accum_steps: int | dict[int, int], reduction: str, clip: Clip | None,
        config: Config | None,
    ) -> None:  # fmt: skip
        self.kind = _kinds.kind_of(optimizer)
        self.optimizer = optimizer
        self.scaler = scaler
        self.accum_steps = checked_steps(accum_steps)
        if str(reduction).upper() not in ("MEAN", "SUM"):
            raise ValueError(f'reduction was {reduction!r}, expected "MEAN" or "SUM"')
        self.reduction = str(reduction).upper()
        own = _kinds.clip_of(optimizer)
        if clip is not None and own is not None:
            raise ValueError(f"the {type(optimizer).__name__} clips by itself, and so would clip= or use_agc")
        self.own_clip = clip
        self.clip = clip or own
        self.config = Config() if config is None else config
        if self.config.gradient_life != GradientLife.CONSUMED:
            raise ValueError(f"gradient_life was {self.config.gradient_life.name}, but Keras frees gradients as soon as they are taken")
        self.scale: Any = None
        if scaler is not None:
            self.scale = keras.Variable(
                scaler.initial_scale, dtype="float32", trainable=False, name="loss_scale"
            )
        self.variables: list[Any] = []
        self.layers: list[Any] = []  # of batch normalisation
        self.summed = False  # whether losses are sums over the batch
        self.first: Any = None  # 1 in the first micro-batch of a window, else 0, where graphs read variables
        self._said: set[str] = set()  # what a warning has said
        self.trace = Capture()  # of the last step, or the last trace of one
        self.result: StepResult | None = None
        self.context: Context | None = None
        self._slots: dict[int, int] = {}  # of each variable by its id, the place in variables
        self._shared: list[Shared] = []
        self._params: list[Param] = []
        self._groups: list[Group] = []  # of kind.kinds()
        self._known: list[tuple[Any, ...]] = []  # the hyper-parameters that they have
        self._norms: dict[Any, tuple[BatchNorm, Any, Any]] = {}  # with what the moving statistics held last
        self._ratios: list[float] = []  # of the divisors of the window's first micro-batch
        self.is_empty = True  # whether the window is
        self._pending: dict[str, Any] | None = None  # state that was loaded and is not taken over yet
        self.places: dict[int, tuple[int, int]] = {}

    # ---- Making it

    def build(self, variables: Sequence[Any]) -> None:
        """Tells which variables are trained. Memory is taken with the first micro-batch."""
        self.variables = list(variables)
        self._slots = {id(variable): index for index, variable in enumerate(self.variables)}

    def set_summed(self, summed: bool) -> None:
        """Tells whether losses are sums over the batch."""
        if self.context is not None and summed != self.summed:
            raise ValueError(
                "the optimizer has trained with losses that are "
                f"{'means' if summed else 'sums'} over the batch, and these are {'sums' if summed else 'means'}: call "
                "compile() with a new optimizer"
            )
        self.summed = summed
        if summed and self.first is None and keras.backend.backend() != "jax":
            self.first = keras.Variable(1.0, dtype="float32", trainable=False, name="first_of_window")
            self._set_empty(self.is_empty)

    def settle(self, values: Variables) -> Context:
        """The context, which is made when it is needed first."""
        if self.context is None:
            self.context = self._make(values)
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._take_over(pending, values)
        return self.context

    def _make(self, values: Variables) -> Context:
        changes: dict[str, Any] = {
            "accum_steps": 0 if isinstance(self.accum_steps, dict) else self.accum_steps
        }
        if self.summed:
            changes.update(gradient_kind=GradientKind.SUM, reduce=Reduce.SUM)
        elif self.reduction == "SUM":
            changes.update(reduce=Reduce.SUM)
        factor = self.optimizer.loss_scale_factor
        if factor is not None and self.scaler is None:
            changes.update(loss_scale=float(factor))
        context = Context(dataclasses.replace(self.config, **changes))
        if isinstance(self.accum_steps, dict):
            context.set_accum_schedule(sorted(self.accum_steps.items()))
        if self.clip is not None:
            context.set_clip(self.clip)
        self._set_scaler(context, values)
        if self.optimizer.use_ema:
            context.set_ema(Ema(decay=self.optimizer.ema_momentum))
        on = backend()
        kinds = self.kind.kinds()
        self._groups = [context.add_group(kind.settings(self.optimizer)) for kind in kinds]
        self._known = [kind.values(self.optimizer) for kind in kinds]
        self._shared, self._params = [], []
        for index, variable in enumerate(self.variables):
            if self.optimizer._overwrite_variable_with_gradient(variable):
                raise ValueError(f'variable "{variable.path}" is overwritten with its gradient (float8)')
            shared = Shared(variable, on, values)
            group = self._groups[self.kind.group_of(self.optimizer, variable)]
            param = context.add_param(group, f"{_NAME}{index}", shared.data)
            if not self.optimizer._use_weight_decay(variable):
                param.set_weight_decay_scale(0.0)
            self._shared.append(shared)
            self._params.append(param)
        self._norms = {}
        for index, layer in enumerate(self.layers):
            own = context.add_batch_norm(
                f"batch_norm{index}", int(layer.moving_mean.shape[0]),
                options=BatchNormOptions(Flavor.KERAS, momentum=1.0 - layer.momentum, eps=layer.epsilon),
            )  # fmt: skip
            self._norms[layer] = (own, None, None)
        return context

    def _set_scaler(self, context: Context, values: Variables) -> None:
        """Tells the library the scale that the graph multiplies by."""
        if self.scaler is not None:
            context.set_loss_scaler(
                LossScaler(
                    initial_scale=float(keras.ops.convert_to_numpy(values[self.scale])),
                    growth_interval=int(self.scaler.dynamic_growth_steps),
                )
            )

    def traced(self, got: Capture) -> None:
        """Sees what a step hands out, when it was run or compiled. ValueError: its losses have no common weight."""
        if got.gradients is not None:
            if (self.scaler is not None or self.optimizer.loss_scale_factor) and not got.is_scaled:
                raise ValueError(
                    "train_step() did not call self.optimizer.scale_loss(loss), but the optimizer has a loss scale"
                )
            kinds = {"sum" if kind == "none" and self.summed else kind for kind in got.reductions}
            if {"sum", "mean"} <= kinds:
                raise ValueError(
                    "some losses are sums over the batch and others means, so micro-batches have no common weight"
                )
            if "sum" in kinds and not self.summed:
                raise ValueError(
                    'train_step() called a loss with reduction="sum", which compile() was not given: call compile() '
                    "with it, or, if train_step() divides the sum by a number of the micro-batch, call the loss with "
                    'reduction="none" and divide by gradaccum.keras.divided_by(number)'
                )
            if self.summed and "sum" not in kinds:
                raise ValueError(
                    "compile() was given losses that are sums over the batch, and train_step() trains by others: "
                    "call compile() without them"
                )
            if got.has_elements and not (got.is_told or self.summed):
                self._warn(
                    'a loss with reduction="none" has several elements a sample, and what the program divides it by is '
                    "not seen: the weight of a micro-batch is its number of samples; if the divisor is another number, "
                    "that of unmasked elements for instance, write / gradaccum.keras.divided_by(number)"
                )
        elif self.variables:
            self._warn(
                "train_step() gave self.optimizer no gradients, so nothing is accumulated: it calls apply() or "
                "apply_gradients() of self.optimizer, or on JAX its stateless_apply()"
            )
        self.trace = got

    def warn_of_loss(self) -> None:
        """Before the window is given up."""
        if not self.is_empty:
            self._warn(
                "compile() was given another optimizer, and the open window of the former one is lost: call flush() or "
                "discard() before"
            )

    def weights(self, got: Capture) -> list[Any]:
        """The divisors of the losses of a micro-batch; none without gradients."""
        return [] if got.gradients is None else got.weights()

    # ---- Micro-batches

    def add(
        self,
        variables: Sequence[Any] | None,
        gradients: Sequence[Any],
        divisors: Sequence[float],
        statistics: Mapping[Any, tuple[Any, Any, Any]],
        values: Variables,
    ) -> bool:
        """Adds a micro-batch to the window. Makes the step if it was the last; returns whether it was."""
        weight = self._weight(divisors)
        ordered = self._ordered(variables, gradients)
        context = self.settle(values)
        on = backend()
        if self.is_empty:
            self._pull(values, between=True)
        alive: list[Any] = []
        given: list[Any] = []
        for index, gradient in enumerate(ordered):
            if gradient is None:
                given.append(None)
                continue
            taken, owner = on.gradient(gradient, self._shared[index])
            given.append(taken)
            alive.append(owner)
        if weight:
            self._add_statistics(statistics)  # which belong to the next micro-batch
        context.accumulate(given, weight)
        if self.is_empty:
            self._ratios = [divisor / divisors[0] if divisors[0] else 1.0 for divisor in divisors]
        self._set_empty(False)
        if context.window.state == WindowState.FULL:
            self.step(values)
            return True
        return False

    def _weight(self, divisors: Sequence[float]) -> float:
        if self.reduction == "SUM" and not self.summed:
            return 1.0
        first = divisors[0]
        if not self.is_empty and first:
            for divisor, ratio in zip(divisors, self._ratios, strict=False):
                if abs(divisor / first - ratio) > _RATIO * max(1.0, ratio):
                    raise ValueError(
                        "the losses of the model are means over different numbers of elements, whose ratio "
                        f"changes from micro-batch to micro-batch ({ratio:.6g}, then {divisor / first:.6g}): they "
                        'have no common weight; with reduction="sum" and sample weights that are divided by the '
                        "numbers of a whole window they have, see docs/keras.md"
                    )
        return first

    def _ordered(self, variables: Sequence[Any] | None, gradients: Sequence[Any]) -> list[Any]:
        if variables is None:
            if len(gradients) != len(self.variables):
                raise ValueError(f"there were {len(gradients)} gradients, expected {len(self.variables)}")
            return list(gradients)
        ordered: list[Any] = [None] * len(self.variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            index = self._slots.get(id(variable))
            if index is None:
                raise ValueError(
                    f'variable "{variable.path}" is not one of those that the optimizer was built with: call '
                    "compile() again with a new optimizer"
                )
            ordered[index] = gradient
        return ordered

    def _pull(self, values: Variables, between: bool) -> None:
        """Takes over variables that were written since the last step. between: between windows."""
        on = backend()
        for shared, param in zip(self._shared, self._params, strict=True):
            if not shared.is_written(on, values):
                continue
            if between:
                param.changed()
            elif any(info.name == "master" for info in param.states):
                raise RuntimeError(
                    f'variable "{shared.variable.path}", which has a master copy, was written within a window: '
                    "discard() the window first"
                )
            shared.pull(on, values)
        if between:
            for layer, (own, mean, variance) in self._norms.items():
                now = [values[variable] for variable in layer.moving()]
                if mean is None or not (on.same(mean, now[0]) and on.same(variance, now[1])):
                    arrays = [np.asarray(on.to_numpy(native), dtype=np.float64) for native in now]
                    own.set_running(arrays[0], arrays[1], own.running()[2])
                    self._norms[layer] = (own, on.token(now[0]), on.token(now[1]))

    def _add_statistics(self, statistics: Mapping[Any, tuple[Any, Any, Any]]) -> None:
        on = backend()
        for layer, (count, mean, variance) in statistics.items():
            arrays = [
                np.asarray(x if isinstance(x, np.ndarray) else on.to_numpy(x), dtype=np.float64)
                for x in (mean, variance)
            ]
            self._norms[layer][0].accumulate_stats(
                round(float(count)), arrays[0], arrays[1], BnSpread.VARIANCE
            )

    def _set_empty(self, empty: bool) -> None:
        self.is_empty = empty
        if self.first is not None:
            self.first.assign(1.0 if empty else 0.0)

    # ---- Steps

    def step(self, values: Variables) -> StepResult:
        """Ends the window, and hands its result to Keras."""
        context = self.settle(values)
        self._pull(values, between=False)
        for index, kind in enumerate(self.kind.kinds()):
            known = kind.values(self.optimizer)
            if known != self._known[index]:
                self._groups[index].optimizer = kind.settings(self.optimizer)
                self._known[index] = known
        result = self.result = context.step()
        if result.applied:
            self._hand_over(context, values)
        elif self.scaler is None:
            self._warn("a window was skipped, because its gradient was not finite: see model.step_result")
        else:
            self._warn(
                f"a window was skipped, because its gradient was not finite with the loss scale {result.loss_scale:g}; "
                "micro-batches, whose gradients are larger than those of a whole batch, can overflow where it does "
                "not: with a smaller LossScaleOptimizer(initial_scale=) no window is lost"
            )
        if self.scale is not None:
            values.write([self.scale], [np.float32(context.loss_scale)])
        self._set_empty(True)
        return result

    def _warn(self, text: str) -> None:
        """Warns once of each thing."""
        about = text[:30]
        if about not in self._said:
            self._said.add(about)
            warnings.warn(text, stacklevel=2)

    def _hand_over(self, context: Context, values: Variables) -> None:
        on = backend()
        steps = context.window.steps
        on.wrote(self._shared, values)
        every = self.optimizer.ema_overwrite_frequency
        if self.optimizer.use_ema and every and steps % every == 0:
            self._use_averages(values)
        for shared, param in zip(self._shared, self._params, strict=True):
            if shared.variable.constraint is not None:
                held = shared.variable.constraint(keras.ops.convert_to_tensor(values[shared.variable]))
                values.write([shared.variable], [held])
                shared.pull(on, values)
                param.changed()
        self.optimizer._iterations.assign(steps)
        for layer, (own, _, _) in list(self._norms.items()):
            mean, variance, _ = own.running()
            moving = layer.moving()
            values.write(moving, [np.from_dlpack(mean), np.from_dlpack(variance)])
            tokens = [on.token(values[variable]) for variable in moving]
            self._norms[layer] = (own, tokens[0], tokens[1])

    def _use_averages(self, values: Variables) -> None:
        on = backend()
        averages = [_numpy(param.ema()) for param in self._params]
        values.write([one.variable for one in self._shared], averages)
        for shared, param in zip(self._shared, self._params, strict=True):
            shared.pull(on, values)
            param.changed()

    def averages(self, values: Variables) -> list[Average]:
        """The moving averages of the variables, to be read and written. RuntimeError: a window is open."""
        if not self.is_empty:
            raise RuntimeError(
                "variables and moving averages were to be exchanged within a window: call flush() or discard() first"
            )
        return [Average(self, index, values) for index in range(len(self.variables))]

    def finish(self, values: Variables) -> None:
        """At the end of fit(): variables become their moving averages, as in Keras."""
        if self.optimizer.use_ema and self.context is not None and self.context.window.steps > 0:
            self._use_averages(values)

    def flush(self, values: Variables) -> StepResult | None:
        """Makes the step of a window that is not full; None: it is empty."""
        if self.context is None and self._pending is None:
            return None
        context = self.settle(values)
        return None if context.window.micro_batches == 0 else self.step(values)

    def discard(self) -> None:
        """Drops the window."""
        if self.context is not None:
            self.context.discard()
        self._set_empty(True)

    # ---- State

    def variables_of_keras(self) -> list[_kinds.Entry]:
        """The variables that the plain optimizer would have, in its order."""
        return _kinds.layout(self.optimizer, self.variables)

    def save(self, values: Variables) -> tuple[list[Any], bytes, bytes]:
        """The arrays of the plain optimizer in its order; and the library's file without them: head and rest."""
        context = self.settle(values)
        context.prepare()
        data = context.save_bytes(StateOptions(parts=StateParts.LIBRARY))
        head, arrays = _split(data)
        taken, plain = set(), []
        for entry in self.variables_of_keras():
            if entry.index < 0:
                plain.append(self._number(entry.slot))
                continue
            name, factor = self._state_of(entry)
            variable = self.variables[entry.index]
            dtype = keras.backend.standardize_dtype(variable.dtype)
            if name in arrays:
                taken.add(name)
                array = arrays[name] if factor == 1 else arrays[name] * np.float64(factor)
                plain.append(array.reshape(variable.shape).astype(np.dtype(dtype)))
            else:
                plain.append(np.zeros(variable.shape, np.dtype(dtype)))
        # Slots of 16 bits are kept in the file of the library too, which has more of them.
        rest = b"".join(
            arrays[name].tobytes() for name in arrays if name not in taken or not self._is_exact(name)
        )
        return plain, head, rest

    def _is_exact(self, name: str) -> bool:
        """Whether Keras' own array of a state has all that the library has."""
        owner, _, state = name.partition(".")
        variable = self.variables[int(owner.removeprefix(_NAME))]
        kind = self._kind_of(variable)
        scaled = any(kind.factor(self.optimizer, slot) != 1 for slot, own in kind.slots.items() if own == state)
        return not scaled and keras.backend.standardize_dtype(variable.dtype) in ("float32", "float64")

    def _kind_of(self, variable: Any) -> _kinds.Kind:
        return self.kind.kinds()[self.kind.group_of(self.optimizer, variable)]

    def _state_of(self, entry: _kinds.Entry) -> tuple[str, float]:
        """The library's name of a slot, and what its array is multiplied by in Keras."""
        kind = self._kind_of(self.variables[entry.index])
        return (
            f"{self._params[entry.index].name}.{kind.state_name(entry.slot)}",
            kind.factor(self.optimizer, entry.slot),
        )

    def _number(self, slot: str) -> Any:
        steps = int(keras.ops.convert_to_numpy(self.optimizer._iterations))
        if slot == "iteration":
            return np.asarray(steps)
        if slot == "learning_rate":
            return np.asarray(_kinds.learning_rate(self.optimizer), keras.config.floatx())
        beta = self.optimizer.beta_1  # Nadam's product of momenta, which is a function of the steps
        return np.asarray(
            np.prod([beta * (1 - 0.5 * 0.96**t) for t in range(1, steps + 1)], initial=1.0), np.float32
        )

    def load(
        self, plain: Sequence[Any] | None, head: bytes = b"", rest: bytes = b"", is_empty: bool = True
    ) -> None:
        """Takes what save() has given, or a plain optimizer; it is taken over when it is needed first.

        is_empty: whether the window is; the graph asks for that before.
        """
        if self._pending is None:
            self._pending = {}
        if plain is not None:
            self._pending["plain"] = list(plain)
            entries = self.variables_of_keras()
            for entry, value in zip(entries, plain, strict=True):
                if entry.slot == "iteration":
                    self.optimizer._iterations.assign(int(np.asarray(value)))
                elif entry.slot == "learning_rate":
                    self.optimizer._learning_rate.assign(float(np.asarray(value)))
        if head:
            self._pending.update(head=head, rest=rest)
        self._set_empty(is_empty)

    def _take_over(self, pending: dict[str, Any], values: Variables) -> None:
        context = self.context
        assert context is not None
        self._pull(values, between=True)
        arrays = {}
        for entry, value in zip(self.variables_of_keras(), pending.get("plain", ()), strict=False):
            if entry.index >= 0:
                name, factor = self._state_of(entry)
                array = np.asarray(value)
                arrays[name] = array if factor == 1 else (array / np.float64(factor)).astype(array.dtype)
        if "head" in pending:
            data = _join(pending["head"], arrays, pending["rest"], self._is_exact)
            context.load(data, StateOptions(parts=StateParts.LIBRARY, settings=Settings.KEEP))
        else:
            wanted = {f"{param.name}.{info.name}": info for param in self._params for info in param.states}
            arrays = {
                name: a.astype(_OF_NUMPY[wanted[name].dtype]) for name, a in arrays.items() if name in wanted
            }
            if arrays:
                context.load(
                    _file(arrays),
                    StateOptions(
                        parts=StateParts.LIBRARY, settings=Settings.KEEP, allow_missing=True, unmarked=True
                    ),
                )
            context.set_steps(int(keras.ops.convert_to_numpy(self.optimizer._iterations)))
            self._set_scaler(context, values)

    def set_places(self, model: Any) -> None:
        """Remembers where the values of variables are in the state of a model on JAX."""
        lists = (
            model.trainable_variables, model.non_trainable_variables, self.state_variables(), model.metrics_variables,
        )  # fmt: skip
        self.places = {
            id(v): (part, i) for part, variables in enumerate(lists) for i, v in enumerate(variables)
        }

    def state_variables(self) -> list[Any]:
        """The variables that the graph reads."""
        return [] if self.scale is None else [self.scale]


def checked_steps(accum_steps: int | dict[int, int]) -> int | dict[int, int]:
    """accum_steps, if it is legal."""
    steps = accum_steps.values() if isinstance(accum_steps, dict) else [accum_steps]
    if isinstance(accum_steps, dict) and 0 not in accum_steps:
        raise ValueError(f"accum_steps was {accum_steps!r}: a schedule begins with the step 0")
    for k in steps:
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
            raise ValueError(f"accum_steps was {accum_steps!r}, expected at least 1")
    if isinstance(accum_steps, dict):
        return {int(step): int(k) for step, k in accum_steps.items()}
    return int(accum_steps)


# ---- Arrays of numpy, and files of them

_OF_NUMPY = {
    Dtype.F32: np.dtype(np.float32), Dtype.F64: np.dtype(np.float64), Dtype.F16: np.dtype(np.float16),
    Dtype.BF16: np.dtype(ml_dtypes.bfloat16), Dtype.I64: np.dtype(np.int64), Dtype.U8: np.dtype(np.uint8),
}  # fmt: skip
_DTYPES = {theirs: own for own, theirs in _OF_NUMPY.items()}


class Average:
    """The moving average of a variable, for a callback that exchanges the two."""

    # Saving reads every attribute of an optimizer, so to make one of these must change nothing.
    def __init__(self, accumulation: Accumulation, index: int, values: Variables) -> None:
        self._of = accumulation, index, values

    def _param(self) -> Param:
        accumulation, index, values = self._of
        accumulation.settle(values).prepare()
        return accumulation._params[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(_numpy(self._param().ema()), dtype)

    def assign(self, value: Any) -> None:
        """Writes the average, which before the first step is the variable itself."""
        param = self._param()
        if param.context.window.steps == 0:
            return
        held = _numpy(param.get_state("ema"))
        held[...] = keras.ops.convert_to_numpy(value)
        param.set_state("ema", held)


def _numpy(tensor: Any) -> Any:
    """A tensor of the library as an array of numpy."""
    itemsize = tensor.dtype.itemsize
    bits = Tensor(
        tensor.address, tensor.shape, {1: Dtype.U8, 2: Dtype.F16, 4: Dtype.F32, 8: Dtype.F64}[itemsize], owner=tensor
    )
    return np.from_dlpack(bits).view(_OF_NUMPY[tensor.dtype])


def _split(data: bytearray) -> tuple[bytes, dict[str, Any]]:
    head, found = files.split(data)
    return head, {
        name: np.frombuffer(memory, _OF_NUMPY[dtype]).reshape(shape)
        for name, (dtype, shape, memory) in found.items()
    }


def _join(head: bytes, plain: Mapping[str, Any], rest: bytes, is_exact: Callable[[str], bool]) -> bytearray:
    """The file of this header: arrays that Keras keeps as they are, and the rest in the file's order."""
    at = 0
    listed = files.entries(head)

    def fill(name: str, memory: memoryview) -> None:
        nonlocal at
        if name in plain and is_exact(name):
            _copy(plain[name], _OF_NUMPY[Dtype[listed[name]["dtype"]]], name, memory)
            return
        if at + len(memory) > len(rest):
            raise ValueError(f'the file has not all of "{name}"')
        memory[:] = rest[at : at + len(memory)]
        at += len(memory)

    return files.join(head, fill)


def _file(arrays: Mapping[str, Any]) -> bytearray:
    head = files.header({name: (_DTYPES[a.dtype], list(a.shape)) for name, a in arrays.items()})
    return files.join(head, lambda name, memory: _copy(arrays[name], arrays[name].dtype, name, memory))


def _copy(array: Any, dtype: Any, name: str, memory: memoryview) -> None:
    if array.size * dtype.itemsize != len(memory):
        raise ValueError(f'the array "{name}" has another size than when it was saved')
    if len(memory):
        np.frombuffer(memory, dtype)[:] = np.asarray(array, dtype).reshape(-1)
