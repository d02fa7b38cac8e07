# SPDX-License-Identifier: Apache-2.0
"""What differs between Keras' backends: where the memory of tensors is, and how a step is compiled.

On torch the library works on the memory of variables. Arrays of TensorFlow and JAX must not be written, so
parameters have arrays of the library's side there, which are copied back after each step.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from .. import Dtype, Tensor
from ._capture import Capture, capture, unpack
from ._private import keras

_DTYPES = {"float32": Dtype.F32, "float64": Dtype.F64, "float16": Dtype.F16, "bfloat16": Dtype.BF16}


class Variables:
    """The values of variables, in the variables themselves."""

    def __getitem__(self, variable: Any) -> Any:
        return variable.value

    def write(self, variables: Sequence[Any], arrays: Sequence[Any]) -> None:
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array)


class Shared:
    """The memory of a variable that the library reads and writes."""

    def __init__(self, variable: Any, backend: Backend, values: Variables) -> None:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if dtype not in _DTYPES:
            raise ValueError(
                f'variable "{variable.path}" was {dtype}, expected float32, float64, float16 or bfloat16'
            )
        self.variable = variable
        self.dtype = _DTYPES[dtype]
        self.seen: Any = None  # what the variable held when the two were last alike
        self.array: Any = None
        if backend.in_place:
            native = values[variable].detach()
            self.data: Any = native
            self.seen = backend.token(values[variable])
        else:
            self.array = backend.to_numpy(values[variable]).copy()
            self.seen = backend.token(values[variable])
            self.data = Tensor(
                self.array.__array_interface__["data"][0], self.array.shape, self.dtype, owner=self.array
            )

    def is_written(self, backend: Backend, values: Variables) -> bool:
        """Whether somebody else has written the variable since."""
        return not backend.same(self.seen, values[self.variable])

    def pull(self, backend: Backend, values: Variables) -> None:
        """Takes over what the variable holds."""
        native = values[self.variable]
        if not backend.in_place:
            np.copyto(self.array, backend.to_numpy(native))
        self.seen = backend.token(native)


class Backend(Protocol):
    """One of Keras' backends."""

    in_place: bool

    def to_numpy(self, native: Any) -> Any:
        """A view of a tensor, or a copy."""

    def token(self, native: Any) -> Any:
        """What tells whether a variable still holds what it holds now."""

    def same(self, token: Any, native: Any) -> bool:
        """Whether it does."""

    def gradient(self, native: Any, dtype: str, shape: Any) -> Any:
        """A gradient as Context.accumulate() takes it, and what is to live until then."""

    def is_symbolic(self, native: Any) -> bool:
        """Whether a tensor has no numbers, because it is part of a graph that is being made."""

    def wrote(self, shared: Sequence[Shared], values: Variables) -> None:
        """After a step of the library: hands the parameters to Keras."""

    def train_function(self, model: Any) -> Callable[..., Any]:
        """A function that runs train_step() compiled, and accumulates what it hands out."""


class _Torch:
    in_place = True

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")

    def to_numpy(self, native: Any) -> Any:
        return keras.ops.convert_to_numpy(native)

    def token(self, native: Any) -> Any:
        return native.data_ptr(), native._version

    def same(self, token: Any, native: Any) -> bool:
        return bool(token == self.token(native))

    def gradient(self, native: Any, dtype: str, shape: Any) -> Any:
        if native.layout is not self.torch.strided:
            native = native.to_dense()
        native = native.detach().to(getattr(self.torch, dtype)).contiguous()
        return native.data_ptr(), native

    def is_symbolic(self, native: Any) -> bool:
        return bool(self.torch.compiler.is_compiling())

    def wrote(self, shared: Sequence[Shared], values: Variables) -> None:
        natives = [values[one.variable] for one in shared]
        self.torch.autograd.graph.increment_version(natives)
        for one, native in zip(shared, natives, strict=True):
            one.seen = self.token(native)

    def train_function(self, model: Any) -> Callable[..., Any]:
        def run(data: Any) -> Any:
            with capture() as got:
                logs = model.train_step(data)
            return logs, got

        if model.jit_compile and not model.run_eagerly:
            run = self.torch.compile(run)

        def function(data: Any) -> Any:
            logs, got = run(data[0])
            model._accumulation.traced(got)
            _take(model, got, got.weights(), got.statistics, Variables())
            return logs

        return function


class _TensorFlow:
    in_place = False

    def __init__(self) -> None:
        self.tf: Any = importlib.import_module("tensorflow")

    def to_numpy(self, native: Any) -> Any:
        return native.numpy() if hasattr(native, "numpy") else np.asarray(native)

    # A tensor that was read from a variable shares its memory until somebody writes the variable, which
    # then gets another one, since this tensor is kept.
    def token(self, native: Any) -> Any:
        native = self.tf.convert_to_tensor(native)
        return native, self._address(native)

    def same(self, token: Any, native: Any) -> bool:
        return bool(token[1] == self._address(self.tf.convert_to_tensor(native)))

    def _address(self, native: Any) -> int:
        from .. import _native, _raw

        where = _raw.expect("a variable", 0, None, 0, False, False, 1, 0, 0)
        address: int = _raw.describe(_native.borrow(native, where))[0]
        return address

    def gradient(self, native: Any, dtype: str, shape: Any) -> Any:
        if isinstance(native, self.tf.IndexedSlices):
            native = self.tf.convert_to_tensor(native)
        if native.dtype.name != dtype:
            native = self.tf.cast(native, dtype)
        return native, native

    def is_symbolic(self, native: Any) -> bool:
        return not self.tf.executing_eagerly()

    def wrote(self, shared: Sequence[Shared], values: Variables) -> None:
        values.write([one.variable for one in shared], [one.array for one in shared])
        for one in shared:
            one.seen = self.token(values[one.variable])

    def train_function(self, model: Any) -> Callable[..., Any]:
        tf = self.tf

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def run(data: Any) -> Any:
            with capture() as got:
                logs = model.train_step(data)
            gradients = None
            if got.gradients is not None:
                gradients = tuple(
                    tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in got.gradients
                )
            model._accumulation.traced(got)
            statistics = tuple(got.statistics.get(layer) for layer in model._accumulation.layers)
            return logs, gradients, tuple(got.weights()), statistics

        if not model.run_eagerly:
            run = tf.function(run, reduce_retracing=True, jit_compile=model.jit_compile)
        run = model._autoconvert_optionals(run)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def next_step(iterator: Any) -> Any:
            return tf.experimental.Optional.from_value(run(iterator.get_next()))

        if not model.run_eagerly:
            next_step = tf.function(next_step, reduce_retracing=True)

        def function(iterator: Any) -> Any:
            if isinstance(iterator, tf.data.Iterator):
                found = next_step(iterator)
                if not found.has_value():
                    raise StopIteration
                out = found.get_value()
            else:
                out = run(next(iterator))
            logs, gradients, weights, statistics = out
            got = model._accumulation.trace
            seen = {
                layer: one
                for layer, one in zip(model._accumulation.layers, statistics, strict=True)
                if one is not None
            }
            _take(model, got, weights, seen, Variables(), gradients)
            return logs

        return function


class _JaxState(Variables):
    """The values of variables while fit() has taken them out: in the state that goes from step to step."""

    def __init__(self, jax: Any, places: dict[int, tuple[int, int]], state: list[list[Any]]) -> None:
        self.jax = jax
        self.places = places
        self.state = state

    def __getitem__(self, variable: Any) -> Any:
        part, index = self.places[id(variable)]
        return self.state[part][index]

    def write(self, variables: Sequence[Any], arrays: Sequence[Any]) -> None:
        wanted = [
            np.asarray(array).astype(self[variable].dtype, copy=False)
            for variable, array in zip(variables, arrays, strict=True)
        ]
        for variable, value in zip(variables, self.jax.device_put(wanted, may_alias=False), strict=True):
            part, index = self.places[id(variable)]
            self.state[part][index] = value


class _Jax:
    in_place = False

    def __init__(self) -> None:
        self.jax: Any = importlib.import_module("jax")

    def to_numpy(self, native: Any) -> Any:
        return np.asarray(native)

    # An array of JAX never changes, so a variable that was not written holds the same one.
    def token(self, native: Any) -> Any:
        return native

    def same(self, token: Any, native: Any) -> bool:
        return token is native

    def gradient(self, native: Any, dtype: str, shape: Any) -> Any:
        native = native.astype(dtype)
        native.block_until_ready()
        return native.unsafe_buffer_pointer(), native

    def is_symbolic(self, native: Any) -> bool:
        return isinstance(native, self.jax.core.Tracer)

    def wrote(self, shared: Sequence[Shared], values: Variables) -> None:
        values.write([one.variable for one in shared], [one.array for one in shared])
        for one in shared:
            one.seen = self.token(values[one.variable])

    def train_function(self, model: Any) -> Callable[..., Any]:
        accumulation = model._accumulation
        accumulation.make_report()
        # Statistics that only an applied step moves go in and do not come out, so that they stay the same.
        places = {id(v): index for index, v in enumerate(model.non_trainable_variables)}
        kept = {places[id(v)] for layer in accumulation.layers for v in layer.moving() if id(v) in places}

        def run(trainable: Any, moving: Any, others: Any, own: Any, metrics: Any, data: Any) -> Any:
            non_trainable = list(others)
            for index, value in moving.items():
                non_trainable[index] = value
            with capture() as got:
                logs, state = model.train_step((trainable, non_trainable, own, metrics), data)
            accumulation.traced(got)
            non_trainable = [None if i in kept else value for i, value in enumerate(state[1])]
            return logs, got.gradients, non_trainable, state[3]

        if not model.run_eagerly and model.jit_compile:
            run = self.jax.jit(run, donate_argnums=(2, 4))

        def function(state: Any, iterator: Any) -> Any:
            trainable, non_trainable, own, metrics = state
            moving = {index: non_trainable[index] for index in kept}
            others = [None if index in kept else value for index, value in enumerate(non_trainable)]
            accumulation.before(metrics)
            logs, gradients, others, metrics = run(trainable, moving, others, own, metrics, next(iterator))
            for index, value in moving.items():
                others[index] = value
            parts = [list(trainable), others, list(own), metrics]
            found = _JaxState(self.jax, accumulation.places, parts)
            report = np.asarray(metrics[-1])
            divisors, statistics = unpack(report, accumulation.layers)
            weights = divisors[: len(accumulation.trace.weights())]
            _take(model, accumulation.trace, weights, statistics, found, gradients)
            return logs, tuple(parts)

        return function


def _take(
    model: Any,
    got: Capture,
    weights: Sequence[Any],
    statistics: dict[Any, Any],
    values: Variables,
    gradients: Sequence[Any] | None = None,
) -> None:
    """Adds a micro-batch to the window, and makes the step if that was the last one of it."""
    gradients = got.gradients if gradients is None else gradients
    if gradients is not None:
        numbers = [float(weight) for weight in weights]
        model._accumulation.add(got.variables, gradients, numbers, statistics, values)


@functools.cache
def backend() -> Backend:
    """The backend that Keras runs on."""
    name = keras.backend.backend()
    if name == "torch":
        return _Torch()
    if name == "tensorflow":
        return _TensorFlow()
    if name == "jax":
        return _Jax()
    raise ValueError(f"Keras runs on {name}, expected tensorflow, jax or torch")
