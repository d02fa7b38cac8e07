# SPDX-License-Identifier: Apache-2.0
"""Is my accumulation right?

Watches a training loop of torch, Keras or optax for some windows, and says which multiple of each micro-batch's mean loss
went into the updates. N micro-batches are one batch N times as large if each has the multiple n / sum of n, n being the
terms (samples, tokens) of its loss. What differs has a name, an effect and a remedy::

    from gradaccum import check

    with check.record(model, optimizer) as recording:
        train(model, optimizer)          # unchanged, for a few windows
    print(recording.report)

or, without touching the file, ``python -m gradaccum.check train.py``. A loop of torch computes the same bits as without
it, and a compiled function of TensorFlow or JAX the same within rounding.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from . import _where
from ._faults import Coefficient, Fault, Window, find, remarks
from ._imports import Imports
from ._journal import Journal
from ._optax import wrap
from ._report import Optimizer, Report
from ._series import Series, leaves, tell
from ._terms import NAMED, Term
from ._watch import Watcher
from ._windows import windows_of

__all__ = ["Coefficient", "Fault", "Optimizer", "Recording", "Report", "Window", "find", "record", "wrap"]


class Recording:
    """Watches the loops of one thread while it is entered, once."""

    def __init__(self, model: Any, optimizer: Any, windows: int | None, journal: Journal | None = None) -> None:
        self._model = model
        self._journal = journal
        self._optimizers = (
            list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
        )
        self._limit = windows
        self._series = Series(windows)
        self._watchers: list[Watcher] = [self._series]
        self._imports = Imports(("torch", "deepspeed", "keras", "gradaccum.keras"), self._imported, self._series.fail)
        self._report: Report | None = None
        self._entered = False

    def __enter__(self) -> Recording:
        if self._entered:
            raise RuntimeError("a recording was entered twice: record() makes another one")
        self._entered = True
        try:
            self._series.begin()
            self._imports.begin()
        except BaseException:
            self._end()
            raise
        return self

    def _imported(self, name: str) -> None:
        """A framework is there."""
        if name in ("torch", "deepspeed"):
            if not self._is_of_keras(self._model) or not all(self._is_of_keras(each) for each in self._optimizers):
                self._watch_torch(name)
            return
        from . import _keras

        watch = _keras.watch if name == "keras" else _keras.watch_library
        try:
            watch(self._series)
        except Exception as error:  # a release that is not known
            self._series.fail(error)

    def _watch_torch(self, name: str) -> None:
        from . import _torch

        if name == "deepspeed":
            for recorder in self._watchers:
                if isinstance(recorder, _torch.Recorder):
                    recorder.watch_deepspeed()
            return
        recorder = _torch.Recorder(self._limit, self._journal)
        self._watchers.insert(0, recorder)
        recorder.begin(self._model, [each for each in self._optimizers if not self._is_of_keras(each)])

    @staticmethod
    def _is_of_keras(thing: Any) -> bool:
        keras: Any = sys.modules.get("keras") if thing is not None else None
        return keras is not None and isinstance(thing, (keras.Layer, keras.optimizers.Optimizer))

    def _end(self) -> None:
        self._imports.end()
        for watcher in self._watchers:
            watcher.end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()
        said = [] if kind is None else [f"The loop ended with {kind.__name__}: the report is about what came before."]
        self._report = _report(self._watchers, self._model, said, is_alone=kind is not None)

    @property
    def report(self) -> Report:
        """What was found, once the loop has ended."""
        if self._report is None:
            raise RuntimeError("report was asked for within the with block, whose end it needs")
        return self._report

    def loss(self, value: Any, weight: Any, reduction: str = "mean") -> Any:
        """Names the loss of a micro-batch where it is no loss function of torch or Keras, before backward.

        :param value: the loss, a tensor of torch, TensorFlow or JAX, before it is divided for the accumulation
        :param weight: over how many terms it is a mean or a sum
        :param reduction: ``"mean"`` or ``"sum"``
        :return: the value, in the place of which it is to be used
        """
        _check(reduction)
        watcher = next(each for each in self._watchers if each.knows(value))
        return watcher.name_loss(value, weight, reduction)

    def micro_batch(self, gradients: Any, weight: Any = None, reduction: str = "mean") -> None:
        """Tells the gradients of a micro-batch, where nothing else does: of a program that differentiates by itself.

        :param gradients: a dict, a list or a tree of JAX, of arrays, as backward has made them
        :param weight: over how many terms their loss is a mean or a sum; None: loss() has told
        :param reduction: ``"mean"`` or ``"sum"``
        """
        _check(reduction)
        where = _where.line()
        given = {(None, path): gradient for path, gradient in leaves(gradients).items()}
        term = None if weight is None else Term(NAMED, where, reduction, 0.0, 0.0, _where.call())
        tell("add", given, *(() if weight is None else (weight,)), where=where, is_told=True, term=term)

    def step(self, gradients: Any) -> None:
        """Tells the gradients that an optimizer is about to use, where nothing else does: a window ends.

        :param gradients: of the form that micro_batch() was given
        """
        given = {(None, path): gradient for path, gradient in leaves(gradients).items()}
        tell("update", given, True, float("nan"), key=None, name="step()", where=_where.line(), epsilon=0.0)


def record(model: Any = None, optimizer: Any = None, windows: int | None = None) -> Recording:
    """Watches a training loop while the result is entered as a context.

    :param model: None: every module of torch that is called, every model of Keras
    :param optimizer: those that are known from the start, one or a list; others of the model's parameters are found
        when they make a step
    :param windows: after how many windows of an optimizer the watching ends; None: with the context
    """
    return Recording(model, optimizer, windows)


def _check(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction was {reduction!r}, expected "mean" or "sum"')


def _report(watchers: list[Watcher], model: Any, said: list[str], is_alone: bool) -> Report:
    """is_alone: the other ranks may have ended."""
    optimizers = []
    for watcher in watchers:
        gather = (lambda own: [own]) if is_alone else watcher.gather
        try:
            windows = windows_of(watcher.traces(), gather)
        except Exception as error:
            watcher.fail(error)
            windows = []
        found = [Optimizer(name, seen, find(seen)) for name, seen in windows]
        optimizers += found
        said += watcher.remarks
        for optimizer in found:
            said += remarks(optimizer.windows)
            coefficients = [c for window in optimizer.windows for c in window.coefficients]
            if coefficients and watcher.knows_losses and all(not c.loss for c in coefficients):
                said.append(
                    "No loss function was seen whose terms count alike: what the loop did to its losses "
                    "before backward is not known; recording.loss(loss, weight=n) names a loss."
                )
        said += watcher.notes(is_alone)
    titles = [title for watcher in watchers if (title := watcher.title())]
    name = type(model).__name__ if model is not None else "all models that were called"
    failed = any(watcher.failed for watcher in watchers)
    return Report(", ".join([name, *titles]), optimizers, list(dict.fromkeys(said)), failed)
