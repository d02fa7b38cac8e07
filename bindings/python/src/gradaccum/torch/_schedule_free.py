# SPDX-License-Identifier: Apache-2.0
"""Schedule-Free optimizers, as in the package schedulefree: trained at y, evaluated and shipped at the average x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ._kinds import SCHEDULE_FREE_ADAMW, SCHEDULE_FREE_SGD, Kind, WindowOptions, hyper_parameters
from ._optimizer import Optimizer
from ._slots import mark_written
from ._state_dict import KEY

_Number = float | Tensor
# What the package keeps of a group, and the library of each parameter, by the names there.
_COUNTED = {"k": "step", "weight_sum": "weight_sum", "lr_max": "lr_max"}
_AT_FIRST = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "scheduled_lr": 0.0}


class ScheduleFree(Optimizer):
    """What both optimizers have: the two modes, and dictionaries that the package loads, and it those of the package.

    eval() makes the parameters their average, train() makes them what they were, to the last bit. The state is
    also saved after eval(), beside a model with the average, as the package advises; then train() after loading
    computes the parameters from the average, with its rounding. After train(), what is saved goes on exactly.
    """

    def __init__(self, params: Any, kind: Kind, defaults: Mapping[str, Any], **window: Unpack[WindowOptions]) -> None:
        self._is_exchanged = False  # the parameters are their averages: eval()
        self._is_loaded = False  # so they were when the state was saved that has been loaded
        if window.get("ema") is not None:
            raise ValueError("ema was given, but this optimizer has an average of its own, which eval() brings")
        super().__init__(params, kind, {**defaults, "train_mode": True}, **window)

    def eval(self) -> None:
        """Makes the parameters their average. Between windows; a second call does nothing."""
        if not self._is_exchanged and not self._is_loaded:
            self._push()
            self.context.swap_ema(True)
            self._set_mode(exchanged=True)

    def train(self) -> None:
        """Makes the parameters what the next step updates."""
        if self._is_exchanged:
            self.context.swap_ema(False)
        elif self._is_loaded:
            slots = iter(self._parameters.slots)
            shares = [1 - self._beta(group) for group in self.param_groups for _ in group["params"]]
            of_z = [
                (slot, share, from_dlpack(slot.own.get_state("z")))
                for slot, share in zip(slots, shares, strict=True)
                if from_dlpack(slot.own.get_state("step")).item() > 0
            ]
            with torch.no_grad():
                for slot, share, z in of_z:
                    slot.memory.lerp_(z.as_strided(slot.shape, slot.stride).to(slot.dtype), share)
        self._set_mode(exchanged=False)

    def _set_mode(self, *, exchanged: bool) -> None:
        if self._is_exchanged != exchanged:
            mark_written(self._parameters.slots)
        self._is_exchanged, self._is_loaded = exchanged, False
        for group in self.param_groups:
            group["train_mode"] = not exchanged

    def _beta(self, group: Mapping[str, Any]) -> float:
        return float(group["betas"][0] if "betas" in group else group["momentum"])

    def _apply(self) -> None:
        if self._is_exchanged or self._is_loaded:
            raise RuntimeError("step() was called after eval(): train() makes the parameters those of training again")
        super()._apply()

    def state_dict(self, *, as_numbers: bool = False) -> dict[str, Any]:
        """The state in the package's words, which its optimizer loads; see Optimizer.state_dict()."""
        if self._is_exchanged:
            self.context.swap_ema(False)
            try:
                packed = super().state_dict(as_numbers=as_numbers)
            finally:
                self.context.swap_ema(True)
        else:
            packed = super().state_dict(as_numbers=as_numbers)
        for group in packed["param_groups"]:
            states = [packed["state"][index] for index in group["params"] if index in packed["state"]]
            group |= _AT_FIRST
            if states:
                group |= {key: states[0][name].item() for key, name in _COUNTED.items()}
                group["k"] = int(group["k"])
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what state_dict() has given, or that of the package. After train(); between windows.

        If it was saved after eval(), train() comes next.
        """
        if self._is_exchanged:
            raise RuntimeError("load_state_dict() was called after eval(): call train() before parameters are loaded")
        groups = [dict(group) for group in state_dict["param_groups"]]
        state = {index: dict(of) for index, of in state_dict["state"].items()}
        trains = {bool(group.get("train_mode", True)) for group in groups}
        if len(trains) > 1:
            raise ValueError("some groups of the state dictionary were saved after train(), and some after eval()")
        for group in groups:
            counted = {
                name: torch.tensor(max(group.pop(key), 0), dtype=torch.float64)
                for key, name in _COUNTED.items()
                if key in group
            }
            group.pop("scheduled_lr", None)
            for index in group["params"]:
                if index in state and KEY not in state_dict:  # what the package has counted
                    state[index] |= counted
        super().load_state_dict({**state_dict, "param_groups": groups, "state": state})
        self._is_loaded = trains == {False} and any(state.values())
        for group in self.param_groups:
            group["train_mode"] = not self._is_loaded


class AdamWScheduleFree(ScheduleFree):
    """schedulefree.AdamWScheduleFree, which needs no schedule; eval() comes before evaluation, and train() after it."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 0.0025,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: _Number = 0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, SCHEDULE_FREE_ADAMW, hyper_parameters(locals()), **window)


class SGDScheduleFree(ScheduleFree):
    """schedulefree.SGDScheduleFree, which needs no schedule; eval() comes before evaluation, and train() after it."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1.0,
        momentum: _Number = 0.9,
        weight_decay: _Number = 0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, SCHEDULE_FREE_SGD, hyper_parameters(locals()), **window)
