# SPDX-License-Identifier: Apache-2.0
"""Which line of a program has called into a framework."""

from __future__ import annotations

import os
import sys
from types import FrameType

_FRAMEWORKS = frozenset(
    {"gradaccum", "torch", "lightning", "pytorch_lightning", "accelerate", "transformers", "deepspeed", "contextlib"}
)
_WORDS = ("clip", "unscale", "zero_grad")


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def line() -> str:
    """The innermost line outside of frameworks, as ``file:line``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _package(frame) not in _FRAMEWORKS:
            return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def purpose() -> str:
    """What a framework is about to do to gradients: ``"clip"``, ``"unscale"``, ``"zero_grad"`` or nothing known."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for word in _WORDS:
            if word in frame.f_code.co_name and _package(frame) != "gradaccum":
                return word
        if _package(frame) not in _FRAMEWORKS:
            return ""
        frame = frame.f_back
    return ""
