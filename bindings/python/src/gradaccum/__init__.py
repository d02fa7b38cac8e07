# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation and optimizer steps for programs that compute their own gradients.

A window of micro-batches gives what one batch of all their samples would have given, to rounding::

    with gradaccum.Context() as context:
        adamw = gradaccum.Optimizer(gradaccum.OptimizerKind.ADAMW, lr=3e-4)
        group = context.add_group(adamw)
        w = context.add_param(group, "fc1.weight", weight)
        b = context.add_param(group, "fc1.bias", bias)
        for window in windows:
            for batch in window:
                dw, db = backward(batch)
                context.accumulate([dw, db], weight=len(batch))
            context.step()

What holds for all calls is said here once:

- A call that the library refuses or that fails raises ``Error`` with the message of the library, and has changed
  nothing unless its status is ``Status.FAULT``; an argument of a wrong type, shape or dtype raises ``TypeError`` or
  ``ValueError`` before the library is called.
- Tensors are used in place: the program owns them, and the package refers to a parameter's tensor until ``bind``,
  ``remove`` or ``close``, and to everything else for the call unless the function says more.
- One thread at a time uses a context; a second one gets an ``Error``, with ``Config.eager`` too. The lock of the
  interpreter is released during each call. Contexts are independent of each other.
- Learning rates, norms and scales are plain numbers; sizes are in elements unless the function says bytes.
"""

from __future__ import annotations

import os

from . import _library, _raw  # in this order
from .batch_norm import BatchNorm
from .communicator import Communicator
from .context import Context
from .enums import (
    Accumulation, AdjustLr, AgcUnits, BnLayout, BnMode, BnSpread, ClipScope, ClipWhen, CommAdder, CommKind,
    CommShard, CommWire, Device, Dtype, EmaKind, Equilibrate, Flavor, GradientKind, GradientLife, Master, MicroFlags, Missing,
    NewtonSchulzPreset, Nonfinite, OptimizerKind, Precision, Reduce, Reduced, Rounding, Rows, ScheduleKind, Settings,
    StateParts, Status, StepOutcome, WindowState,
)  # fmt: skip
from .errors import Error
from .micro_batch import Accumulator, MicroBatch
from .options import (
    BatchNormInfo, BatchNormOptions, Build, Clip, CommunicatorOptions, Config, Ema, LossScaler, Memory, MicroOptions, Optimizer,
    ParamInfo, ParamOptions, Schedule, StateInfo, StateOptions, StepResult, Window,
)  # fmt: skip
from .params import FlatEntry, Group, Param
from .tensor import SupportsBuffer, SupportsDLPack, Tensor, TensorLike

__all__ = [
    "Accumulation", "Accumulator", "AdjustLr", "AgcUnits", "BatchNorm", "BatchNormInfo",
    "BatchNormOptions", "BnLayout", "BnMode", "BnSpread", "Build", "Clip", "ClipScope", "ClipWhen",
    "CommAdder", "CommKind", "CommShard", "CommWire", "Communicator", "CommunicatorOptions",
    "Config", "Context", "Device", "Dtype", "Ema", "EmaKind", "Equilibrate", "Error", "FlatEntry", "Flavor",
    "GradientKind", "GradientLife", "Group", "LossScaler", "Master", "Memory", "MicroBatch", "MicroFlags",
    "MicroOptions", "Missing", "NewtonSchulzPreset", "Nonfinite", "Optimizer", "OptimizerKind", "Param", "ParamInfo",
    "ParamOptions", "Precision", "Reduce", "Reduced", "Rounding", "Rows", "Schedule", "ScheduleKind", "Settings", "StateInfo",
    "StateOptions", "StateParts", "Status", "StepOutcome", "StepResult", "SupportsBuffer", "SupportsDLPack",
    "Tensor", "TensorLike", "Window", "WindowState", "build", "build_info", "device_count",
    "no_device_reason", "state_note", "version",
]  # fmt: skip


def version() -> tuple[int, int, int]:
    """The version of the library that is loaded."""
    number = _raw.ga_version()
    return number // 10000, number // 100 % 100, number % 100


__version__ = ".".join(map(str, version()))

if _raw.ga_version() // 100 != _raw.GA_VERSION // 100:
    raise ImportError(
        f"libgradaccum {__version__} was loaded, but this package was built for "
        f"{_raw.GA_VERSION_MAJOR}.{_raw.GA_VERSION_MINOR}"
    )


def build_info() -> str:
    """One line: version, compiler, CPU kernels, threads, and modules."""
    line: str = _raw.ga_build_info()
    return line


def build() -> Build:
    """What build_info() says, in parts. Loads the modules that can be loaded."""
    struct = _raw.ga_build()
    _raw.ga_build_describe(struct)
    return Build._read(struct)


def device_count(device: Device) -> int:
    """Devices of a kind that contexts can be made on."""
    count: int = _raw.ga_device_count(device)
    return count


def no_device_reason(device: Device) -> str:
    """Why no context can be made on a kind of device; "" if one can."""
    return "" if device_count(device) > 0 else _library.explain(_raw.ga_last_error())


def state_note(path: str | os.PathLike[str]) -> str | None:
    """The note in a file that Context.save() has saved; None: it has none."""
    note: str | None = _raw.state_note(os.fsencode(path))
    return note
