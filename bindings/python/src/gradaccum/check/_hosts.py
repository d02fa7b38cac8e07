# SPDX-License-Identifier: Apache-2.0
"""How numbers come out of the graphs of frameworks, in the order in which they are computed."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np


class Host:
    """The arrays of numpy, which have no backward. Those of frameworks derive from it."""

    def refusal(self) -> str:
        """Why numbers cannot come out of what is being computed, or nothing."""
        return ""

    def call(self, function: Callable[..., None], arrays: Sequence[Any]) -> None:
        """Calls a function with arrays of numpy whenever what is being traced runs, or now."""
        function(*(np.asarray(array) for array in arrays))

    def mark(self, value: Any, count: Any, function: Callable[..., None]) -> Any:
        """The value, whose backward calls a function with the derivative by it, and the count."""
        return value


class _Torch(Host):
    def __init__(self, array: Any) -> None:
        self._array = array

    def refusal(self) -> str:
        functorch: Any = sys.modules["torch"]._C._functorch
        wrapped = functorch.is_functorch_wrapped_tensor(self._array)
        return "What torch.func transforms is not watched." if wrapped else ""

    def call(self, function: Callable[..., None], arrays: Sequence[Any]) -> None:
        function(*(_numpy_of_torch(array) for array in arrays))

    def mark(self, value: Any, count: Any, function: Callable[..., None]) -> Any:
        if value.requires_grad:
            value.register_hook(lambda factor: self.call(function, [factor, count]))
        return value


def _numpy_of_torch(array: Any) -> Any:
    if not hasattr(array, "detach"):
        return np.asarray(array)
    array = array.detach().to_dense() if array.layout is not sys.modules["torch"].strided else array.detach()
    return (array.float() if array.is_floating_point() and array.itemsize == 2 else array).cpu().numpy()


class _Order:
    """Calls functions in the order of numbers that they come with, in threads of TensorFlow."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._clock: Any = None
        self._next = 1
        self._waiting: dict[int, Callable[[], None]] = {}

    def tick(self, tf: Any) -> Any:
        """The next number. A variable is written in the order of a program, but calls of Python are not made in it."""
        self.begin(tf)
        return tf.identity(self._clock.assign_add(1))

    def begin(self, tf: Any) -> None:
        """Before anything is traced. The variable is none that a strategy of the program makes."""
        if self._clock is None:
            variables: Any = importlib.import_module("tensorflow.python.ops.resource_variable_ops")
            with tf.init_scope(), tf.device("CPU"):
                self._clock = variables.ResourceVariable(0, dtype="int64", trainable=False, name="gradaccum_check")

    def call(self, number: int, function: Callable[[], None]) -> None:
        with self._lock:
            self._waiting[number] = function
            if len(self._waiting) > _MOST_WAITING:  # one was never made, because its step has failed
                self._next = min(self._waiting)
            while self._next in self._waiting:
                self._waiting.pop(self._next)()
                self._next += 1

    def finish(self) -> None:
        """Calls those that wait for one that was never made, because a step has failed."""
        with self._lock:
            for number in sorted(self._waiting):
                self._waiting.pop(number)()
            self._next = 1 if self._clock is None else int(self._clock) + 1


_MOST_WAITING = 64
_order = _Order()


class _Parallel(threading.local):
    is_on = False


_parallel = _Parallel()


def in_parallel(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls TensorFlow's pfor, in whose loops no number has an order."""
    outer, _parallel.is_on = _parallel.is_on, True
    try:
        return original(*args, **kwargs)
    finally:
        _parallel.is_on = outer


class _TensorFlow(Host):
    def __init__(self) -> None:
        self.tf: Any = sys.modules["tensorflow"]

    def refusal(self) -> str:
        control_flow: Any = importlib.import_module("tensorflow.python.ops.control_flow_util")
        if _parallel.is_on:
            return "What tf.vectorized_map and jacobians compute is not watched."
        if self.tf.distribute.get_strategy().num_replicas_in_sync > 1:
            return "A strategy of TensorFlow with several replicas is not watched."
        graph = self.tf.compat.v1.get_default_graph()
        if not self.tf.executing_eagerly() and control_flow.GraphOrParentsInXlaContext(graph):
            return "A function that XLA compiles is not watched: tf.function(jit_compile=False) lets it be."
        return ""

    def call(self, function: Callable[..., None], arrays: Sequence[Any]) -> None:
        dense = [self.tf.convert_to_tensor(array) for array in arrays]

        def called(number: Any, *tensors: Any) -> None:
            _order.call(int(number), functools.partial(function, *(each.numpy() for each in tensors)))

        self.tf.py_function(called, [_order.tick(self.tf), *dense], [])

    def mark(self, value: Any, count: Any, function: Callable[..., None]) -> Any:
        tf = self.tf

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def marked(inner: Any) -> Any:
            def backward(factor: Any) -> Any:
                self.call(function, [factor, count])
                return factor

            return tf.identity(inner), backward

        return marked(value)


class _Jax(Host):
    def __init__(self, array: Any) -> None:
        self.jax: Any = sys.modules["jax"]
        self._array = array

    def refusal(self) -> str:
        if type(self._array).__name__ == "BatchTracer":
            return "What jax.vmap transforms is not watched."
        devices = self.jax.device_count()
        return f"Loops over the {devices} devices of JAX are not watched." if devices > 1 else ""

    def call(self, function: Callable[..., None], arrays: Sequence[Any]) -> None:
        def called(*found: Any) -> None:
            function(*(np.asarray(each) for each in found))

        self.jax.debug.callback(called, *arrays, ordered=True)

    def mark(self, value: Any, count: Any, function: Callable[..., None]) -> Any:
        return _marker().bind(value, self.jax.numpy.asarray(count, "float32"), function=function)


@functools.cache
def _marker() -> Any:
    """The identity of JAX whose transposition calls a function. With a rule of custom_vjp, nothing goes forward."""
    ad, batching, mlir = (importlib.import_module(f"jax.interpreters.{name}") for name in ("ad", "batching", "mlir"))
    core: Any = importlib.import_module("jax.extend.core")
    marker = core.Primitive("gradaccum_mark")
    marker.def_impl(lambda value, count, *, function: value)
    marker.def_abstract_eval(lambda value, count, *, function: value)

    def forward(primals: Any, tangents: Any, *, function: Any) -> Any:
        tangent = tangents[0]
        return primals[0], tangent if type(tangent) is ad.Zero else marker.bind(tangent, primals[1], function=function)

    def transpose(factor: Any, value: Any, count: Any, *, function: Any) -> Any:
        if type(factor) is not ad.Zero:
            _Jax(factor).call(function, [factor, count])
        return [factor, None]

    mlir.register_lowering(marker, lambda context, value, count, *, function: [value])
    ad.primitive_jvps[marker] = forward
    ad.primitive_transposes[marker] = transpose
    batching.primitive_batchers[marker] = lambda given, dims, *, function: (
        marker.bind(*given, function=function), dims[0],
    )  # fmt: skip
    return marker


def host_of(arrays: Iterable[Any]) -> Host:
    """By the types of arrays; some may be plain numbers, or of numpy."""
    torch, tf, jax = (sys.modules.get(name) for name in ("torch", "tensorflow", "jax"))
    for array in arrays:
        if torch is not None and isinstance(array, torch.Tensor):
            return _Torch(array)
        if tf is not None and (tf.is_tensor(array) or isinstance(array, (tf.Variable, tf.IndexedSlices))):
            return _TensorFlow()
        if jax is not None and isinstance(array, jax.Array):
            return _Jax(array)
    return Host()


def is_marked(value: Any) -> bool:
    """Whether the derivative by a value can be seen."""
    return type(host_of([value])) is not Host


def begin() -> None:
    """Before loops of TensorFlow are watched."""
    tf: Any = sys.modules.get("tensorflow")
    if tf is not None:
        _order.begin(tf)


def finish() -> None:
    """Waits for functions that are still to be called."""
    jax: Any = sys.modules.get("jax")
    if jax is not None:
        jax.effects_barrier()
    _order.finish()
