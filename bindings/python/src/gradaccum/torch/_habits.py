# SPDX-License-Identifier: Apache-2.0
"""Habits of loops that accumulate by hand, which are wrong here: each is refused, or said once by a warning."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from ._hooks import Told

_CALLERS = ("gradaccum.torch", "torch.", "lightning.", "pytorch_lightning.", "accelerate.")
_ROUNDING = 1e-6  # of 1/K in the dtype of a loss


def warn(text: str) -> None:
    """A warning of the line that has called this package, through a framework or not."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def _is_inside(module: str) -> bool:
    return module.startswith(_CALLERS) or module == "contextlib"


class Habits:
    """What the loop of one optimizer does, as far as the optimizer sees it."""

    def __init__(self, accum_steps: int | None) -> None:
        self._steps = accum_steps or 0
        self._said: set[str] = set()
        self._stepped = True  # whether step() was called since the last micro-batch
        self._idle = 0  # calls of step() in a row without a micro-batch
        self._zeroed = False  # whether zero_grad() was called since the last micro-batch, and step() was not
        # Of this window, micro-batches that followed the one before without a step():
        self._after_zero_grad = 0
        self._at_once = 0
        self._zeroes: bool | None = None  # whether zero_grad() stands between those of earlier windows
        self._backwards = 0  # that one parameter has had since the last micro-batch
        self._gathered = 0  # micro-batches in a row of as many backwards as accum_steps
        self._counts = False  # whether a hook counts backwards
        self._divisors: set[float | None] = set()  # of the losses of this window
        self._waits = 0.0  # the weight of the last micro-batch, if it gave no gradient

    def _say(self, habit: str, text: str) -> None:
        if habit not in self._said:
            self._said.add(habit)
            warn(text)

    # ---- zero_grad()

    def zeroes(self, has_gradients: bool) -> None:
        """zero_grad() is called in an open window. Raises if it was meant to drop the window."""
        if has_gradients or self._stepped or self._zeroed:
            return
        if self._at_once or self._zeroes is False:
            self._refuse_zero_grad()
        self._zeroed = True

    def _refuse_zero_grad(self) -> None:
        raise RuntimeError(
            "zero_grad() was called after some micro-batches of an open window and not after others, but "
            "it drops nothing of the window, whose gradients are not in .grad: discard() drops it"
        )

    # ---- Micro-batches

    def begins(self, is_first: bool) -> None:
        """A micro-batch begins. Raises if zero_grad() was meant to drop earlier ones of its window."""
        if is_first:
            self._after_zero_grad = self._at_once = 0
        elif not self._stepped:
            if self._zeroed:
                self._after_zero_grad += 1
            elif self._after_zero_grad:
                self._refuse_zero_grad()
            else:
                self._at_once += 1
        self._stepped = self._zeroed = False
        self._idle = 0

    def window_ended(self) -> None:
        """The window was stepped or discarded."""
        self._after_zero_grad = self._at_once = 0
        self._stepped, self._zeroed = True, False
        self._idle = 0
        self._divisors.clear()

    def gathers(self, parameters: list[Tensor]) -> None:
        """Gradients are taken from .grad: sees of how many backwards, once a hook counts them."""
        if self._steps < 4 or self._said & {"trainer", "accelerate"}:  # 2 or 3 may be those of several losses
            return
        if not self._counts:
            first = next((p for p in parameters if p.grad is not None and p.requires_grad), None)
            if first is not None:
                self._counts = True
                register: Any = first.register_post_accumulate_grad_hook
                register(Told(self, Habits._counts_backward))
        self._gathered = self._gathered + 1 if self._backwards == self._steps else 0
        self._backwards = 0
        if self._gathered >= 2:
            self._say(
                "gathers",
                f"each of the last {self._gathered} micro-batches had the gradients of {self._steps} backwards, as "
                f"many as accum_steps, which makes {self._steps * self._steps} for one update: call step() after each "
                "backward, or leave accum_steps out",
            )

    def _counts_backward(self, _: Tensor) -> None:
        self._backwards += 1

    # ---- step()

    def steps(self, took: bool, parameters: list[Tensor]) -> None:
        """step() has ended no window."""
        if self._stepped and not took and any(parameter.requires_grad for parameter in parameters):
            self._idle += 1
            if self._idle == self._steps > 1:
                self._say(
                    "idle",
                    f"{self._idle} calls of step() in a row found no gradient and ended no window: backward must come "
                    "between zero_grad() and step(), and accum_steps counts micro-batches, not calls",
                )
        self._stepped = True

    def unscales(self) -> None:
        """A GradScaler has called unscale_() before step(), which is for clipping by hand."""
        if self._steps > 1:
            self._say(
                "unscales",
                "GradScaler.unscale_() was called before step(): what clips gradients in .grad then clips each "
                f"micro-batch, of {self._steps} in a window; the optimizer's clip= clips the window",
            )

    # ---- The loss

    def sees_loss(self, loss: Tensor, weight: float | None = None) -> None:
        """A loss is to go backward: sees whether it was divided as in a loop by hand."""
        if "divides" in self._said:
            return
        divisor = _divisor(loss)
        if divisor is not None and weight is not None and weight == divisor:
            divisor = None  # a mean over the micro-batch
        self._divisors.add(divisor)
        if divisor is not None and divisor == self._steps:
            self._say_divided(divisor, f"accum_steps={self._steps}")

    def applies(self, micro_batches: int) -> None:
        """A step ends a window: sees whether all its losses were divided by the number of its micro-batches."""
        self._say_waits()
        if self._at_once or self._after_zero_grad:
            self._zeroes = self._at_once == 0
        if micro_batches > 1 and self._divisors == {float(micro_batches)}:
            self._say_divided(float(micro_batches), f"{micro_batches} in this one")

    def _say_divided(self, divisor: float, what: str) -> None:
        self._say(
            "divides",
            f"the loss was divided by {divisor:g} before backward, but a window is the mean of its micro-batches "
            f"already ({what}): give the loss as it is, unless the division belongs to it",
        )

    def reaches(self, weight: float, any_gradient: bool, *, may_wait: bool) -> None:
        """A micro-batch ends. may_wait: gradients of one that has none may come with a later one of its window."""
        self._waits = 0.0 if any_gradient else weight
        if not may_wait:
            self._say_waits()

    def _say_waits(self) -> None:
        weight, self._waits = self._waits, 0.0
        if weight > 0:
            self._say(
                "reaches nothing",
                f"a micro-batch of weight {weight:g} gave no gradient to any parameter of the optimizer, and counts as "
                "a gradient of zero. Its parameters are those that the model had when it was made, which "
                "load_state_dict(assign=True) and to_empty() replace; accumulate() leaves nothing in .grad for a "
                "second call",
            )

    def scales_nothing(self) -> None:
        """A micro-batch ends whose loss did not go through scale_loss(), though there is a loss_scaler."""
        self._say(
            "scales nothing",
            "the optimizer has a loss_scaler, and divides gradients by its scale, but scale_loss() was not called for "
            "this micro-batch: call optimizer.scale_loss(loss).backward(), or optimizer.backward(loss)",
        )

    # ---- Frameworks

    def sees_closure(self, closure: Any, held: bool) -> None:
        """step(closure) has called its closure, which is Lightning's if a Trainer calls."""
        if not isinstance(closure, functools.partial) or not closure.args:
            return
        trainer = getattr(closure.args[0], "_trainer", None)
        if trainer is None or not (self._steps > 1 or held):
            return
        clip = getattr(trainer, "gradient_clip_val", None)
        if clip and getattr(closure.args[0], "automatic_optimization", False):
            self._say(
                "clips",
                f"Trainer(gradient_clip_val={clip}) clips each micro-batch, or nothing if its gradient was "
                "accumulated before; give the optimizer clip=gradaccum.Clip(scope=gradaccum.ClipScope.GLOBAL, "
                f"max_norm={clip}), which clips the window",
            )
        batches = getattr(trainer, "accumulate_grad_batches", 1)
        if isinstance(batches, int) and batches > 1:
            self._say(
                "trainer",
                f"Trainer(accumulate_grad_batches={batches}) divides each loss and adds up {batches} backwards, "
                "beside the window of the optimizer, which averages micro-batches: leave it at 1",
            )

    def sees_accelerate(self, explicit: bool) -> None:
        """Gradients are taken from .grad, by accumulate() if explicit: sees whether accelerate accumulates too."""
        module = sys.modules.get("accelerate.state")
        if module is None or not (self._steps > 1 or explicit) or "accelerate" in self._said:
            return
        state: Any = getattr(module, "GradientState", None)
        kept = getattr(state, "_shared_state", None) or {}
        batches = (kept.get("plugin_kwargs") or {}).get("num_steps", 1)
        if isinstance(batches, int) and batches > 1:
            self._say(
                "accelerate",
                f"Accelerator(gradient_accumulation_steps={batches}) divides each loss by {batches}, beside the "
                "window of the optimizer, which averages micro-batches: leave it at 1",
            )


def _divisor(loss: Tensor) -> float | None:
    """K if the loss is something divided by K, or times 1/K, that is no mean of K terms or by its sum."""
    node: Any = loss.grad_fn
    name = "" if node is None else node.name()
    if name not in ("DivBackward0", "MulBackward0"):
        return None
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, torch.Tensor) or other.dim() or other.requires_grad or other.device.type != "cpu":
        return None
    number = float(other)
    if not 0 < number < math.inf:
        return None
    if name == "MulBackward0":
        if number == 0.5:  # half of a square is a loss of its own
            return None
        nearest = round(1 / number)
        number = nearest if abs(number * nearest - 1) < _ROUNDING else 0
    if number < 2 or number != int(number):
        return None
    inner = node.next_functions[0][0]
    if inner is None or inner.name().startswith("SumBackward") or getattr(inner, "_saved_reduction", 1) == 2:
        return None
    terms = 1
    while inner is not None and inner.name() == "AddBackward0":
        terms += 1
        inner = inner.next_functions[0][0]
    return None if terms == number else number
