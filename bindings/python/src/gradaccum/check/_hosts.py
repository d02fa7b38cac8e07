# SPDX-License-Identifier: Apache-2.0
"""How numbers come out of the graphs of frameworks, in the order in which they are computed."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


class Host(Protocol):
    """The arrays of a framework."""

    def refusal(self) -> str:
        """Why numbers cannot come out of what is being computed, or nothing."""

    def call(self, function: Callable[..., None], arrays: Sequence[Any]) -> None:
        """Calls a function with arrays of numpy whenever what is being traced runs, or now."""

    def mark(self, value: Any, count: Any, function: Callable[..., None]) -> Any:
        """The value, whose backward calls a function with the derivative by it, and the count."""


class _Numpy:
    def refusal(self) -> str:
        return ""

    def call(self, function: Callable[..., None], arrays: Sequence[Any]) -> None:
        function(*(np.asarray(array) for array in arrays))

    def mark(self, value: Any, count: Any, function: Callable[..., None]) -> Any:
        raise TypeError(
            f"loss() was given a {type(value).__name__}: expected a tensor of torch, TensorFlow or JAX, whose "
            "derivative it can see; micro_batch(gradients, weight=n) tells of gradients that the program computes"
        )


class _Torch:
    def refusal(self) -> str:
        return ""

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
        if self._clock is None:
            with tf.init_scope(), tf.device("CPU"):
                self._clock = tf.Variable(0, dtype="int64", trainable=False, name="gradaccum_check")
        return tf.identity(self._clock.assign_add(1))

    def call(self, number: int, function: Callable[[], None]) -> None:
        with self._lock:
            self._waiting[number] = function
            while self._next in self._waiting:
                self._waiting.pop(self._next)()
                self._next += 1

    def finish(self) -> None:
        """Calls those that wait for one that was never made, because a step has failed."""
        with self._lock:
            for number in sorted(self._waiting):
                self._waiting.pop(number)()
            self._next = 1 if self._clock is None else int(self._clock) + 1


_order = _Order()


class _TensorFlow:
    def __init__(self) -> None:
        self.tf: Any = sys.modules["tensorflow"]

    def refusal(self) -> str:
        control_flow: Any = importlib.import_module("tensorflow.python.ops.control_flow_util")
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


class _Jax:
    def __init__(self) -> None:
        self.jax: Any = sys.modules["jax"]

    def refusal(self) -> str:
        devices = self.jax.device_count()
        return f"Loops over the {devices} devices of JAX are not watched." if devices > 1 else ""

    def call(self, function: Callable[..., None], arrays: Sequence[Any]) -> None:
        def called(*found: Any) -> None:
            function(*(np.asarray(each) for each in found))

        self.jax.debug.callback(called, *arrays, ordered=True)

    def mark(self, value: Any, count: Any, function: Callable[..., None]) -> Any:
        jax = self.jax

        @jax.custom_vjp  # type: ignore[untyped-decorator]
        def marked(inner: Any, count: Any) -> Any:
            return inner

        def forward(inner: Any, count: Any) -> Any:
            return inner, count

        def backward(count: Any, factor: Any) -> Any:
            self.call(function, [factor, count])
            return factor, jax.numpy.zeros_like(count)

        marked.defvjp(forward, backward)
        return marked(value, jax.numpy.asarray(count, "float32"))


def host_of(array: Any) -> Host:
    """By the type of an array."""
    torch, tf, jax = (sys.modules.get(name) for name in ("torch", "tensorflow", "jax"))
    if torch is not None and isinstance(array, torch.Tensor):
        return _Torch()
    if tf is not None and (tf.is_tensor(array) or isinstance(array, (tf.Variable, tf.IndexedSlices))):
        return _TensorFlow()
    if jax is not None and isinstance(array, jax.Array):
        return _Jax()
    return _Numpy()


def finish() -> None:
    """Waits for functions that are still to be called."""
    jax: Any = sys.modules.get("jax")
    if jax is not None:
        jax.effects_barrier()
    _order.finish()
