# SPDX-License-Identifier: Apache-2.0
"""Which line of a program has called into a library."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
import zlib
from types import FrameType

_INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen")
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "__autograph_generated_file")
"""Parts of paths of what the program has not written: packages, and what TensorFlow makes of its functions."""
PURPOSES = ("clip", "unscale", "zero_grad")
"""Words in names of functions of libraries that change gradients."""


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "gradaccum"


def is_library(frame: FrameType) -> bool:
    """Whether code is not the program's own."""
    return _is_installed(frame.f_code.co_filename) or _is_ours(frame)


@functools.cache
def _is_installed(file: str) -> bool:
    return file.startswith(_INSTALLED) or any(part in file for part in _PACKAGES)


def line() -> str:
    """The innermost line of the program itself, as ``file:line``; of a library, if there is no other."""
    found: FrameType | None = None
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if not is_library(frame):
            found = frame
            break
        if found is None and not _is_ours(frame):
            found = frame
    return "" if found is None else f"{_shown(found.f_code.co_filename)}:{found.f_lineno}"


@functools.cache
def _shown(path: str) -> str:
    """A path as a reader wants it, the same after the program has changed its folder."""
    try:
        near = os.path.relpath(path)
    except (OSError, ValueError):  # the folder is gone, or on another drive
        return path
    return path if near.startswith(os.pardir) else near


def call() -> int:
    """The same number for calls that the program makes from the same places."""
    frames = traceback.walk_stack(sys._getframe(1))
    places = [(frame.f_code.co_filename, frame.f_lasti) for frame, _ in frames if not is_library(frame)]
    return zlib.crc32(repr(places).encode())


def purpose() -> str:
    """What a library is about to do to gradients: ``"clip"``, ``"unscale"``, ``"zero_grad"`` or nothing known."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if not is_library(frame):
            break
        for word in PURPOSES:
            if word in frame.f_code.co_name and not _is_ours(frame):
                return word
    return ""
