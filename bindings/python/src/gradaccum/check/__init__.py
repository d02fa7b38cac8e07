# SPDX-License-Identifier: Apache-2.0
"""Is my accumulation right?

Watches a training loop of torch for some windows, and says which multiple of each micro-batch's mean loss went into
the updates. N micro-batches are one batch N times as large if each has the multiple n / sum of n, n being the terms
(samples, tokens) of its loss. What differs has a name, an effect and a remedy::

    from gradaccum import check

    with check.record(model, optimizer) as recording:
        train(model, optimizer)          # unchanged, for a few windows
    print(recording.report)

or, without touching the file, ``python -m gradaccum.check train.py``. The loop computes the same bits as without it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from . import _where
from ._faults import Coefficient, Fault, Window, find, remarks
from ._losses import NAMED, Count, Term
from ._recorder import Recorder, is_distributed
from ._report import Optimizer, Report
from ._windows import windows_of

__all__ = ["Coefficient", "Fault", "Optimizer", "Recording", "Report", "Window", "find", "record"]


class Recording:
    """Watches the loops of one thread while it is entered, once."""

    def __init__(self, model: torch.nn.Module | None, optimizer: Any, windows: int | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._recorder = Recorder(windows)
        self._report: Report | None = None
        self._entered = False

    def __enter__(self) -> Recording:
        if self._entered:
            raise RuntimeError("a recording was entered twice: record() makes another one")
        self._entered = True
        given = self._optimizer
        optimizers = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
        try:
            self._recorder.begin(self._model, optimizers)
        except BaseException:
            self._recorder.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.end()
        if kind is not None:
            self._recorder.remarks.append(f"The loop ended with {kind.__name__}: the report is about what came before.")
        self._report = _report(self._recorder, self._model, alone=kind is not None)

    @property
    def report(self) -> Report:
        """What was found, once the loop has ended."""
        if self._report is None:
            raise RuntimeError("report was asked for within the with block, whose end it needs")
        return self._report

    def loss(self, value: torch.Tensor, weight: Count, reduction: str = "mean") -> torch.Tensor:
        """Names the loss of a micro-batch where it is no loss function of torch, before backward.

        :param value: the loss, before it is divided for the accumulation
        :param weight: over how many terms it is a mean or a sum
        :param reduction: ``"mean"`` or ``"sum"``
        :return: the value
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction was {reduction!r}, expected "mean" or "sum"')
        epsilon = torch.finfo(value.dtype).eps
        self._recorder.name_loss(Term(NAMED, _where.line(), reduction, weight, epsilon, _where.call()), value)
        return value


def record(model: torch.nn.Module | None = None, optimizer: Any = None, windows: int | None = None) -> Recording:
    """Watches a training loop while the result is entered as a context.

    :param model: None: every module that is called
    :param optimizer: those that are known from the start, one or a list; others of the model's parameters are found
        when they make a step
    :param windows: after how many windows of an optimizer the watching ends; None: with the context
    """
    return Recording(model, optimizer, windows)


def _report(recorder: Recorder, model: torch.nn.Module | None, alone: bool) -> Report:
    """alone: the other ranks may have ended."""
    distributed: Any = torch.distributed
    group = distributed.group.WORLD if is_distributed() and not alone else None
    optimizers = [
        Optimizer(name, windows, find(windows)) for name, windows in windows_of(recorder, group)
    ]  # fmt: skip
    said = list(recorder.remarks)
    for optimizer in optimizers:
        said += remarks(optimizer.windows)
        if not any(window.coefficients for window in optimizer.windows):
            continue
        if recorder.knows_losses and all(not c.loss for window in optimizer.windows for c in window.coefficients):
            said.append(
                "No loss function of torch was seen whose terms count alike: what the loop did to its losses before "
                "backward is not known; r.loss(loss, weight=n) names a loss."
            )
    for steps in recorder.steps.values():
        if group is not None and recorder.is_sharded(steps):
            said.append("Gradients are DTensors: that the ranks' mean is what was reduced is taken for granted.")
        if steps.pending:
            said.append(f"The recording ended with {steps.pending} micro-batches that no step had applied.")
        skipped = steps.skipped + sum(trace.skipped for trace in steps.traces)
        if skipped:
            said.append(f"{skipped} micro-batches were dropped with their window, for a gradient was not finite.")
    for names, what in (
        (recorder.without_gradient(), "had no gradient in any backward"),
        ([] if recorder.is_limited else recorder.without_optimizer(), "had gradients, but no optimizer with them made a step"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            said.append(f"{', '.join(names[:3])}{more} {what}.")
    name = type(model).__name__ if model is not None else "all models that were called"
    return Report(f"{name}, torch {torch.__version__}", optimizers, list(dict.fromkeys(said)), recorder.failed)
