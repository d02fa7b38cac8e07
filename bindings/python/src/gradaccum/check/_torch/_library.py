# SPDX-License-Identifier: Apache-2.0
"""The windows of the optimizers of gradaccum.torch, which are not in ``.grad``."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .._terms import losses_of
from .._timeline import Contribution, MicroBatch, Trace


class Ledger:
    """The weights with which an optimizer of this library has taken micro-batches, as it tells them.

    The library multiplies a gradient by its weight, divides the sum by that of the weights, and undoes the loss scale.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._result = optimizer.result
        self._taken = optimizer.context.window.weight
        self._scale = self._scale_now()
        self._begun: list[tuple[MicroBatch, float, float]] = []  # of this window: each with its weight, and its scale
        self._seen = 0  # micro-batches after the last window
        self.where = ""
        """The line that has called step() last."""

    def begins_step(self, where: str) -> None:
        """Before step(), by which a GradScaler may hand over its scale."""
        self.where, self._scale = where, self._scale_now()

    def _scale_now(self) -> float:
        given = self._optimizer.__dict__.get("grad_scale")  # of torch's GradScaler, during step()
        return float(self._optimizer.context.loss_scale if given is None else given)

    def ask(self, micro_batches: Sequence[MicroBatch]) -> Trace | None:
        """Learns the weight of micro-batches that are new. Returns the window if it has ended.

        :param micro_batches: those of this window that were seen
        """
        window, result = self._optimizer.context.window, self._optimizer.result
        has_ended = result is not self._result
        total = result.weight if has_ended else window.weight
        new = micro_batches[self._seen :]
        if not has_ended and (window.open_micro >= 0 or self._has_gradients()):
            return None
        self._seen = len(micro_batches)
        if not has_ended and window.micro_batches == 0:  # discarded, or nothing yet
            self._begun, self._taken, self._scale = [], 0.0, self._scale_now()
            return None
        self._begun += [(micro, total - self._taken, self._scale) for micro in new]
        self._taken = total
        if not has_ended:
            return None
        begun, self._begun = self._begun, []
        self._result, self._taken, self._scale, self._seen = result, 0.0, self._scale_now(), 0
        return self._trace(begun, total, result.applied)

    def _has_gradients(self) -> bool:
        """Whether a micro-batch is in .grad still."""
        groups = self._optimizer.param_groups
        return any(tensor.grad is not None for group in groups for tensor in group["params"])

    def _trace(self, begun: list[tuple[MicroBatch, float, float]], total: float, applied: bool) -> Trace:
        from gradaccum import GradientKind, Reduce

        config = self._optimizer._config
        own = []
        for micro, weight, scale in begun if applied else []:
            factor = 1.0 if config.gradient_kind == GradientKind.SUM else weight
            if config.reduce == Reduce.MEAN:
                factor = factor / total if total else 0.0
            kept = math.nan if config.reduce == Reduce.MAX else factor / scale
            rates = micro.rates.get(id(self._optimizer), ())
            own.append(Contribution(losses_of(micro.terms), kept, rates=rates))
        backward = begun[-1][0].where if own else ""
        return Trace(own, torch.finfo(torch.float32).eps, backward, skipped=0 if applied else len(begun))


def ledger_of(optimizer: Any) -> Ledger | None:
    """That of an optimizer of gradaccum.torch; None for others."""
    module: Any = sys.modules.get("gradaccum.torch")
    if module is None or not isinstance(optimizer, module.Optimizer):
        return None
    return Ledger(optimizer)
