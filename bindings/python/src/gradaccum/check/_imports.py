# SPDX-License-Identifier: Apache-2.0
"""Calls a function when a framework is there: at once, or as soon as the program has imported it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any


class Imports(importlib.abc.MetaPathFinder):
    """Waits for modules that are imported while it is begun."""

    def __init__(
        self, names: Iterable[str], function: Callable[[str], None], failed: Callable[[Exception], None]
    ) -> None:
        self._waiting = list(names)
        self._function = function
        self._failed = failed  # is told of an error within an import of the program's

    def begin(self) -> None:
        """Calls the function with the names of modules that were imported before."""
        there = [name for name in self._waiting if name in sys.modules]
        for name in there:
            self._waiting.remove(name)
            self._function(name)
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Waits no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module as Python finds it, with an eye on the end of its import."""
        if name not in self._waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return None
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if name in self._waiting:
                self._waiting.remove(name)
                try:
                    self._function(name)
                except Exception as error:
                    self._failed(error)

        loader.exec_module = executed
        return spec
