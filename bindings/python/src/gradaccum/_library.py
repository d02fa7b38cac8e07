# SPDX-License-Identifier: Apache-2.0
"""Chooses which library the package gets: the one beside it, or that of the package gradaccum_cuda.

A module for GPUs works only with a library that the same compiler has built, so gradaccum_cuda contains both. Its
library has the name and the ABI of the package's own; once it is loaded, the loader gives it to _native too.
"""

from __future__ import annotations

import importlib.util
import os
import sys

_NAME = "libgradaccum.so.0"
_MODULE = "libgradaccum_cuda.so"


def _find(folders: list[str], name: str = _NAME) -> str | None:
    paths = (os.path.join(folder, name) for folder in folders if folder)
    return next(filter(os.path.exists, paths), None)


def _for_gpus() -> str | None:
    """The library of gradaccum_cuda, if that is installed."""
    spec = importlib.util.find_spec("gradaccum_cuda")
    return _find(list(spec.submodule_search_locations or [])) if spec else None


def _is_replaceable() -> bool:
    """Whether the package would get the library in its folder, without a module for GPUs.

    Not in a folder of a build, nor where the program has loaded a library or names one for the loader.
    """
    if sys.platform != "linux":
        return False
    import ctypes

    own = [os.path.dirname(__file__)]
    named = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if not _find(own) or _find(own, _MODULE) or _find(named):
        return False
    try:
        ctypes.CDLL(_NAME, os.RTLD_NOLOAD)
    except OSError:
        return True
    return False


def choose() -> None:
    """Loads the library of gradaccum_cuda, if that is installed and has the version of this package."""
    library = _for_gpus()
    if library is None or not _is_replaceable():
        return
    import ctypes
    from importlib.metadata import version

    own, other = version("gradaccum"), version("gradaccum-cuda")
    if own != other:  # without a module for GPUs, a program might train for hours on the CPU
        raise ImportError(
            f"gradaccum is {own}, but gradaccum_cuda, which has the library for GPUs, is {other}: "
            f"pip install 'gradaccum[cuda]=={own}', or pip uninstall gradaccum-cuda"
        )
    try:
        ctypes.CDLL(library)
    except OSError as error:
        raise ImportError(f"the library of gradaccum_cuda could not be loaded: {error}") from error


def explain(message: str) -> str:
    """A message of the library, and after one about the missing module for GPUs, how to install it."""
    if f"module {_MODULE} could not be loaded" not in message or _for_gpus():
        return message
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        extras = metadata("gradaccum").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return message
    return f"{message}; pip install 'gradaccum[cuda]' installs this module" if "cuda" in extras else message


choose()
