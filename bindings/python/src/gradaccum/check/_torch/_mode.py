# SPDX-License-Identifier: Apache-2.0
"""Sees the functions of torch that a loop calls."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, overrides
from torch.overrides import TorchFunctionMode

from .. import _where
from ._losses import FUNCTIONS, term

if TYPE_CHECKING:
    from ._recorder import Recorder

_FAST = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
"""Modules that compute in another way in inference, but not under a mode of torch functions."""
_modes: Any = overrides  # whose functions are not typed


class Mode(TorchFunctionMode):
    """Sees calls of loss functions, of backward, and of functions that change gradients in place."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._paused: torch.nn.Module | None = None  # in whose forward it is not

    def begin(self) -> None:
        """Puts it on the stack."""
        _modes._push_mode(self)

    def end(self) -> None:
        """Takes it off the stack, whatever was put upon it since."""
        above = []
        while (top := _modes._get_current_function_mode()) is not None and top is not self:
            above.append(_modes._pop_mode())
        if top is self:
            _modes._pop_mode()
        for other in reversed(above):
            _modes._push_mode(other)

    def pause(self, module: torch.nn.Module) -> None:
        """Before forward of a module: takes it off if the module would compute in another way because of it."""
        if isinstance(module, _FAST) and not module.training and _modes._get_current_function_mode() is self:
            self._paused = module
            _modes._pop_mode()

    def go_on(self, module: torch.nn.Module) -> None:
        """After forward of that module."""
        if self._paused is module:
            self._paused = None
            _modes._push_mode(self)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if self._recorder.is_within and not _where.is_library(sys._getframe(1)):
            self._recorder.left()
        if func is Tensor.backward:
            self._recorder.went_backward()
        elif args:
            name = getattr(func, "__name__", "")
            if name.endswith("_") and not name.endswith("__"):
                self._recorder.changes(args[0], name)
        if func is torch.autograd.grad:
            self._recorder.is_apart = True
            try:
                return func(*args, **kwargs)
            finally:
                self._recorder.is_apart = False
        value = func(*args, **kwargs)
        if func in FUNCTIONS and isinstance(value, Tensor):
            self._recorder.saw_loss(lambda: term(func, value, args, kwargs), value)
        return value
