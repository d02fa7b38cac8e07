# SPDX-License-Identifier: Apache-2.0
"""What torch and its compiler do in this process."""

from __future__ import annotations

import ctypes
import sys

import torch

from .. import _native


def has_own_openmp() -> bool:
    """Whether the library's threads are of another OpenMP runtime than torch's, and would spin against them.

    torch makes the symbols of its runtime global: a library that is loaded later uses that one.
    """
    modules = list(sys.modules)
    if modules.index("torch") < modules.index("gradaccum"):
        return False
    found = []
    for module in (_native, torch._C):
        function = getattr(ctypes.CDLL(str(module.__file__)), "omp_get_max_threads", None)
        if function is None:  # built without OpenMP
            return False
        found.append(ctypes.cast(function, ctypes.c_void_p).value)
    return found[0] != found[1]


def autograd_is_compiled() -> bool:
    """Whether backward is compiled, as far as torch's compiler is loaded at all."""
    state, config = (sys.modules.get(f"torch._dynamo.{name}") for name in ("compiled_autograd", "config"))
    return bool(
        getattr(state, "compiled_autograd_enabled", False) or getattr(config, "compiled_autograd", False)
    )
