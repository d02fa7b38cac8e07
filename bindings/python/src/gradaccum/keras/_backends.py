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
from ._capture import Capture, capture
from ._private import keras

_DTYPES = {"float32": Dtype.F32, "float64": Dtype.F64, "float16": Dtype.F16, "bfloat16": Dtype.BF16}
_ALIGNED = 64  # bytes, as JAX wants the memory of an array


class Variables:
    """The values of variables, in the variables themselves."""

    def __getitem__(self, variable: Any) -> Any:
        return variable.value

    def write(self, variables: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Writes arrays to variables, which keep none of their memory."""
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(backend().detached(array))


class Shared:
    """The memory of a variable that the library reads and writes."""

    def __init__(self, variable: Any, backend: Backend, values: Variables) -> None:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if dtype not in _DTYPES:
            raise ValueError(
                f'variable "{variable.path}" was {dtype}, expected float32, float64, float16 or bfloat16'
            )
        self.variable = variable
        self.shape = tuple(int(dimension) for dimension in variable.shape)
        self.real = dtype
        self.dtype = _DTYPES[dtype]
        native = values[variable]
        self.seen: Any = backend.token(native)  # what the variable held when the two were last alike
        self.array: Any = None
        if backend.in_place:
            self.data: Any = native.detach()
        else:
            self.array = backend.to_numpy(native).copy()
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

    in_place: bool = False
    """Whether the library works on the memory of variables."""

    def to_numpy(self, native: Any) -> Any:
        """A view of a tensor, or a copy."""

    def detached(self, array: Any) -> Any:
        """An array that a variable may keep."""
        return array

    def token(self, native: Any) -> Any:
        """What tells whether a variable still holds what it holds now."""

    def same(self, token: Any, native: Any) -> bool:
        """Whether it does."""

    def gradient(self, native: Any, shared: Shared) -> Any:
        """A gradient of a variable as Context.accumulate() takes it, and what is to live until then."""

    def is_symbolic(self, native: Any) -> bool:
        """Whether a tensor has no numbers, because it is part of a graph that is being made."""

    def wrote(self, shared: Sequence[Shared], values: Variables) -> None:
        """After a step of the library: hands the parameters to Keras."""

    def train_function(self, model: Any) -> Callable[..., Any]:
        """A function that runs train_step() compiled, and accumulates what it hands out."""


def _check_shape(gradient: Any, shared: Shared) -> None:
    """Before its address is handed out."""
    if tuple(gradient.shape) != shared.shape:
        raise ValueError(
            f'the gradient of variable "{shared.variable.path}" had the shape {list(gradient.shape)}, expected '
            f"{list(shared.shape)}"
        )


class _Torch(Backend):
    in_place = True

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")

    def to_numpy(self, native: Any) -> Any:
        return keras.ops.convert_to_numpy(native)

    def token(self, native: Any) -> Any:
        return native.data_ptr(), native._version

    def same(self, token: Any, native: Any) -> bool:
        return bool(token == self.token(native))

    def gradient(self, native: Any, shared: Shared) -> Any:
        if native.layout is not self.torch.strided:
            native = native.to_dense()
        native = native.detach().to(getattr(self.torch, shared.real)).contiguous()
        _check_shape(native, shared)
        return native.data_ptr(), native

    def is_symbolic(self, native: Any) -> bool:
        return bool(self.torch.compiler.is_compiling())

    def wrote(self, shared: Sequence[Shared], values: Variables) -> None:
        natives = [values[one.variable] for one in shared]
        self.torch.autograd.graph.increment_version(natives)
        for one, native in zip(shared, natives, strict=True):
            one.seen = self.token(native)

    def train_function(self, model: Any) -> Callable[..., Any]:
        own = model._accumulation

        def run(data: Any) -> Any:
            with capture(data, own.first) as got:
                logs = model.train_step(data)
            return logs, got

        if model.jit_compile and not model.run_eagerly:
            run = self.torch.compile(run)

        def function(data: Any) -> Any:
            logs, got = run(data[0])
            own.traced(got)
            if got.gradients is not None:
                weights = [float(weight) for weight in own.weights(got)]
                own.add(got.variables, got.gradients, weights, got.statistics, Variables())
            return logs

        return function


class _TensorFlow(Backend):
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

    def gradient(self, native: Any, shared: Shared) -> Any:
        if isinstance(native, self.tf.IndexedSlices):
            native = self.tf.convert_to_tensor(native)
        if native.dtype.name != shared.real:
            native = self.tf.cast(native, shared.real)
        return native, native

    def is_symbolic(self, native: Any) -> bool:
        return not self.tf.executing_eagerly()

    def wrote(self, shared: Sequence[Shared], values: Variables) -> None:
        tf = self.tf
        for one in shared:
            tensor = tf.constant(one.array)
            one.variable.value.assign(tensor, read_value=False)
            one.seen = tensor, self._address(tensor)  # whose memory the variable has now

    def train_function(self, model: Any) -> Callable[..., Any]:
        tf = self.tf
        own = model._accumulation
        names: list[str] = []  # of the logs, when they are a dictionary of tensors

        # Its results are one flat list, which TensorFlow unpacks faster than a structure: logs, weights, and of
        # each layer that has statistics three, and of each variable that has a gradient one.
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def run(data: Any) -> Any:
            with capture(data, own.first) as got:
                logs = model.train_step(data)
            own.traced(got)
            names[:] = logs or ()
            flat = [logs[name] for name in names] + own.weights(got)
            for layer in own.layers:
                flat += got.statistics.get(layer, ())
            flat += [tf.convert_to_tensor(g) for g in got.gradients or () if g is not None]
            return flat

        if not model.run_eagerly:
            run = tf.function(run, reduce_retracing=True, jit_compile=model.jit_compile)
        run = model._autoconvert_optionals(run)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def next_step(iterator: Any) -> Any:
            return run(iterator.get_next())

        if not model.run_eagerly:
            next_step = tf.function(next_step, reduce_retracing=True)

        def function(iterator: Any) -> Any:
            if isinstance(iterator, tf.data.Iterator):
                out = iter(next_step(iterator))
            else:
                out = iter(run(next(iterator)))
            got = own.trace
            logs = {name: next(out) for name in names}
            weights = [next(out) for _ in own.weights(got)]
            seen = {
                layer: (next(out), next(out), next(out)) for layer in own.layers if layer in got.statistics
            }
            gradients = [None if g is None else next(out) for g in got.gradients or ()]
            if gradients:
                own.add(got.variables, gradients, [float(w) for w in weights], seen, Variables())
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
            backend().detached(np.asarray(array).astype(self[variable].dtype, copy=False))
            for variable, array in zip(variables, arrays, strict=True)
        ]
        for variable, value in zip(variables, self.jax.device_put(wanted), strict=True):
            part, index = self.places[id(variable)]
            self.state[part][index] = value


class _Jax(Backend):
    def __init__(self) -> None:
        self.jax: Any = importlib.import_module("jax")

    def to_numpy(self, native: Any) -> Any:
        return np.asarray(native)

    # JAX keeps an array of numpy that is aligned for it, even with may_alias=False, and copies another one
    # later. So it gets a copy, which nobody writes, and which it needs not copy again.
    def detached(self, array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        memory = np.empty(array.nbytes + _ALIGNED, np.uint8)
        begin = -memory.__array_interface__["data"][0] % _ALIGNED
        copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return copy

    # An array of JAX never changes, so a variable that was not written holds the same one.
    def token(self, native: Any) -> Any:
        return native

    def same(self, token: Any, native: Any) -> bool:
        return token is native

    def gradient(self, native: Any, shared: Shared) -> Any:
        if native.dtype != shared.real:
            native = native.astype(shared.real)
        _check_shape(native, shared)
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
        layers = accumulation.layers
        # Statistics that only an applied step moves go in and do not come out, so that they stay the same.
        places = {id(v): index for index, v in enumerate(model.non_trainable_variables)}
        kept = {places[id(v)] for layer in layers for v in layer.moving() if id(v) in places}

        def run(trainable: Any, moving: Any, others: Any, own: Any, metrics: Any, first: Any, data: Any) -> Any:
            non_trainable = list(others)
            for index, value in moving.items():
                non_trainable[index] = value
            with capture(data, first) as got:
                logs, state = model.train_step((trainable, non_trainable, own, metrics), data)
            if got.variables is None:  # stateless_apply() knows no more than their order
                got.variables = list(model.trainable_variables)
            accumulation.traced(got)
            non_trainable = [None if i in kept else value for i, value in enumerate(state[1])]
            seen = [got.statistics.get(layer) for layer in layers]
            return logs, got.gradients, non_trainable, state[3], accumulation.weights(got), seen

        if not model.run_eagerly and model.jit_compile:
            run = self.jax.jit(run, donate_argnums=(2, 4))

        def step(state: list[Any], data: Any) -> Any:
            trainable, non_trainable, own, metrics = state
            moving = {index: non_trainable[index] for index in kept}
            others = [None if index in kept else value for index, value in enumerate(non_trainable)]
            first = np.float32(accumulation.is_empty)
            try:
                out = run(trainable, moving, others, own, metrics, first, data)
            except self.jax.errors.UnexpectedTracerError as error:
                raise ValueError(
                    "train_step() computes a loss or a layer of batch normalisation within a transformation of JAX, "
                    "jax.jit or jax.checkpoint for instance, out of which its divisor or statistics cannot be handed"
                ) from error
            logs, gradients, others, state[3], weights, seen = out
            for index, value in moving.items():
                others[index] = value
            state[1] = others
            if gradients is not None:
                statistics = {layer: one for layer, one in zip(layers, seen, strict=True) if one is not None}
                found = _JaxState(self.jax, accumulation.places, state)
                accumulation.add(
                    accumulation.trace.variables, gradients, [float(one) for one in weights], statistics, found
                )
            return logs

        def function(state: Any, iterator: Any) -> Any:
            data = next(iterator)
            parts = [list(part) for part in state]
            try:
                return step(parts, data), tuple(parts)
            except BaseException:  # fit() has taken the values out of the variables
                names = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
                model._jax_state = dict(zip(names, parts, strict=True))
                model.jax_state_sync()
                raise

        return function


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
