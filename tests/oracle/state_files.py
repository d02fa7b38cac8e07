#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Carries state from the library to PyTorch or Keras and back, by the functions in docs/checkpoints.md.

Usage: state_files.py LIBRARY DOCUMENT torch|keras     exits with 77 if a package is not installed.

The program that took over must go on as the library does, to rounding, and what it gives back must load
and go on too.
"""
import ctypes as C
import os
import pathlib
import re
import sys
import tempfile

import numpy as np

library, document, framework = sys.argv[1:]
try:
    import safetensors  # noqa: F401
    if framework == "torch":
        import torch
    else:
        os.environ["KERAS_BACKEND"] = "jax"
        import keras
except ImportError as missing:
    print("skipped:", missing)
    sys.exit(77)

text = pathlib.Path(document).read_text()
blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.S)
          if f"{framework}" in block]
assert len(blocks) == 1, "one block of code for each program"
exec(blocks[0])  # pylint: disable=exec-used

lib = C.CDLL(library)
lib.ga_last_error.restype = C.c_char_p
SGD, ADAM, ADAMW, TORCH, KERAS, F32 = 0, 1, 2, 0, 1, 1


def call(name, *arguments):
    status = getattr(lib, name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: {status}: {lib.ga_last_error().decode()}")


class Optimizer(C.Structure):
    """The first fields of ga_optimizer, and room for the others."""
    _fields_ = [("struct_size", C.c_size_t), ("kind", C.c_int32), ("flavor", C.c_int32),
                ("lr", C.c_double), ("weight_decay", C.c_double), ("momentum", C.c_double),
                ("rest", C.c_double * 40)]


class StateOptions(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("parts", C.c_int32), ("settings", C.c_int32),
                ("allow_missing", C.c_int32), ("allow_extra", C.c_int32), ("unmarked", C.c_int32),
                ("reserved", C.c_int32), ("progress", C.c_void_p), ("user", C.c_void_p),
                ("note", C.c_char_p)]


class Context:
    """Parameters in arrays of numpy, and one layer with batch normalisation."""

    def __init__(self, kind, flavor, tensors, layer=None, **hyper_parameters):
        self.ctx = C.c_void_p()
        call("ga_context_create", None, C.byref(self.ctx))
        o = Optimizer()
        call("ga_optimizer_init", C.byref(o), C.c_size_t(C.sizeof(o)), kind, flavor)
        for name, value in hyper_parameters.items():
            setattr(o, name, value)
        call("ga_group_add", self.ctx, C.byref(o), None)
        self.tensors = {name: np.array(x, np.float32) for name, x in tensors.items()}
        for name, x in self.tensors.items():
            call("ga_param_add", self.ctx, 0, name.encode(), C.c_void_p(x.ctypes.data), F32, x.ndim,
                 (C.c_int64 * x.ndim)(*x.shape), None, None)
        if layer:
            call("ga_bn_add", self.ctx, layer[0].encode(), C.c_int64(layer[1]), -1, -1, None, None)

    def step(self, gradients):
        pointers = (C.c_void_p * len(gradients))(*[g.ctypes.data for g in gradients])
        call("ga_accumulate", self.ctx, pointers, C.c_size_t(len(gradients)), C.c_double(1), None)
        call("ga_step", self.ctx, None)

    def save(self, path):
        call("ga_save", self.ctx, path.encode(), None)

    def load(self, path, allow_missing=False):
        options = StateOptions()
        call("ga_state_options_init", C.byref(options), C.c_size_t(C.sizeof(options)))
        options.allow_missing = int(allow_missing)
        call("ga_load", self.ctx, path.encode(), C.byref(options))

    def running(self, values=None):
        mean, variance, steps = np.zeros(2), np.zeros(2), C.c_int64()
        if values:
            call("ga_bn_running_set", self.ctx, 0, C.c_void_p(values[0].ctypes.data),
                 C.c_void_p(values[1].ctypes.data), 2, C.c_int64(3))
        call("ga_bn_running", self.ctx, 0, C.c_void_p(mean.ctypes.data),
             C.c_void_p(variance.ctypes.data), 2, C.byref(steps))
        return mean, variance, steps.value


random = np.random.default_rng(5)


def gradients_for(tensors, steps):
    return [[random.normal(size=x.shape).astype(np.float32) for x in tensors.values()]
            for _ in range(steps)]


def near(a, b, what):
    error = np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)))
    assert error <= 2e-6, f"{what}: {error}"


def torch_model():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(3, 2)
            self.bn = torch.nn.BatchNorm1d(2, affine=False)
    return Net()


def to_torch_and_back(kind, make, allow_missing=False, **hyper_parameters):
    folder = tempfile.mkdtemp()
    ours, theirs = folder + "/ours.safetensors", folder + "/theirs.safetensors"
    model = torch_model()
    start = {name: p.detach().numpy() for name, p in model.named_parameters()}
    context = Context(kind, TORCH, start, ("bn", 2), **hyper_parameters)
    for gradients in gradients_for(start, 5):
        context.step(gradients)
    context.running((np.array([0.5, -1.25]), np.array([2.0, 0.75])))
    context.save(ours)

    model = torch_model()  # with other numbers
    optimizer = make(model.parameters())
    load_into_torch(ours, model, optimizer)
    if kind == SGD:  # which keeps no step by itself
        for state in optimizer.state.values():
            del state["step"]
    near(model.bn.running_mean.numpy(), [0.5, -1.25], "running_mean")
    assert model.bn.num_batches_tracked.item() == 3
    more = gradients_for(start, 4)

    def go_on(gradients):
        context.step(gradients)
        for p, g in zip(model.parameters(), gradients):
            p.grad = torch.from_numpy(g.copy())
        optimizer.step()
        for name, p in model.named_parameters():
            near(context.tensors[name], p.detach().numpy(), name)

    for gradients in more[:2]:
        go_on(gradients)
    save_from_torch(theirs, model, optimizer)
    context = Context(kind, TORCH, start, ("bn", 2), **hyper_parameters)
    context.load(theirs, allow_missing)
    for gradients in more[2:]:
        go_on(gradients)


def to_keras_and_back():
    folder = tempfile.mkdtemp()
    ours, theirs = folder + "/ours.safetensors", folder + "/theirs.safetensors"

    def make():
        keras.utils.set_random_seed(1)
        keras.backend.clear_session()
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2),
                                  keras.layers.BatchNormalization(scale=False, center=False)])
        optimizer = keras.optimizers.Adam(0.125)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    model, optimizer = make()
    start = {v.path: v.numpy() for v in model.trainable_variables}
    layer = (model.layers[-1].moving_mean.path.rsplit("/", 1)[0], 2)
    context = Context(ADAM, KERAS, start, layer, lr=0.125)
    for gradients in gradients_for(start, 5):
        context.step(gradients)
    context.running((np.array([0.5, -1.25]), np.array([2.0, 0.75])))
    context.save(ours)
    model, optimizer = make()
    load_into_keras(ours, model, optimizer, 5)
    near(model.layers[-1].moving_mean.numpy(), [0.5, -1.25], "moving_mean")
    more = gradients_for(start, 4)

    def go_on(gradients):
        context.step(gradients)
        optimizer.apply(gradients, model.trainable_variables)
        for v in model.trainable_variables:
            near(context.tensors[v.path], v.numpy(), v.path)

    for gradients in more[:2]:
        go_on(gradients)
    save_from_keras(theirs, model, optimizer)
    context = Context(ADAM, KERAS, start, layer, lr=0.125)
    context.load(theirs, allow_missing=True)  # num_batches_tracked, which Keras does not count
    call("ga_context_set_steps", context.ctx, C.c_int64(7))
    for gradients in more[2:]:
        go_on(gradients)


if framework == "torch":
    to_torch_and_back(ADAMW, lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.125), lr=0.01,
                      weight_decay=0.125)
    to_torch_and_back(ADAM, lambda p: torch.optim.Adam(p, 0.01), lr=0.01)
    to_torch_and_back(SGD, lambda p: torch.optim.SGD(p, 0.25, momentum=0.5), allow_missing=True,
                      lr=0.25, momentum=0.5)
else:
    to_keras_and_back()
print(f"{framework}: there and back")
