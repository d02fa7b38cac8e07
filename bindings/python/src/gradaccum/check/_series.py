# SPDX-License-Identifier: Apache-2.0
"""Windows of loops that tell the gradients of their micro-batches, and those that the optimizer sees."""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import _where
from ._hosts import finish, host_of, is_marked
from ._sketch import Sketch, Sketches
from ._terms import NAMED, Term
from ._timeline import Contribution, Factor, Joined, MicroBatch, Trace, contributions, multiple
from ._watch import Watcher, never_raises
from ._windows import Traces, settle

_MOST_ENTRIES = 2000
_EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-52}


def epsilon_of(dtype: Any) -> float:
    """The rounding of a dtype of any framework."""
    return _EPSILONS.get(str(dtype).rpartition(".")[2].strip("'>"), 2.0**-23)


class _Optimizer:
    """The windows of one optimizer."""

    def __init__(self, name: str, begin: int) -> None:
        self.name = name
        self.begin = begin  # the first entry of its window
        self.traces: list[Trace] = []
        self.sizes: dict[int, int] = {}  # of the sketches of its parameters
        self.moved: collections.Counter[Any] = collections.Counter()  # at the step before
        self.averages = 0  # since the step before
        self.skipped = 0  # micro-batches of windows that were dropped
        self.is_new = True  # whether no micro-batch of it was seen
        self.is_partial = False  # whether its window had begun before it was watched


class Series(Watcher):
    """Collects what loops tell, from whatever thread a framework calls."""

    def __init__(self, limit: int | None) -> None:
        super().__init__(limit)
        self._lock = threading.RLock()
        self._sketch = Sketch()
        self._indices: dict[Any, int] = {}  # of gradients, by what their parameters are known by
        self._sizes: dict[int, int] = {}  # of their sketches
        self._entries: list[MicroBatch] = []
        self._without_step = 0  # micro-batches since a step
        self._terms: list[Term] = []  # whose backward has begun, before the gradients
        self._named = False  # whether the program names its losses itself
        self._told = False  # whether it tells its micro-batches itself
        self._optimizers: dict[Any, _Optimizer] = {}
        self._moves: collections.Counter[Any] = collections.Counter()  # of each layer of batch normalisation
        self.titles: dict[str, None] = {}
        """Of the frameworks that were watched."""
        self.is_compiled = False
        """Whether frameworks compile what was watched."""
        self.watches_keras = False
        """Whether functions of Keras tell what they do."""
        self.sees_backward = False
        """Whether the gradients of all micro-batches are seen, whoever adds them up."""

    # ---- Beginning and end

    def begin(self) -> None:
        self._active = True
        active.append(self)

    def end(self) -> None:
        try:
            finish()
        except Exception as error:
            self.fail(error)
        self._active = False
        if self in active:
            active.remove(self)
        self._undo()

    # ---- What arrives, as numbers

    @never_raises
    def backward(self, term: Term, factor: Any, count: Any) -> None:
        with self._lock:
            if self._active and (term.name == NAMED or not self._named):
                term.count = count
                term.factors.append(np.asarray(factor, np.float64))
                self._terms.append(term)

    @never_raises
    @np.errstate(all="ignore")
    def add(
        self, gradients: Mapping[Any, Any], weight: Any = None, where: str = "", is_told: bool = False,
        term: Term | None = None,
    ) -> None:  # fmt: skip
        """The gradients of a micro-batch, as its backward has made them.

        :param is_told: whether the program tells of them itself
        :param term: its loss of this weight, if that is not marked
        """
        with self._lock:
            if not self._active or (self._told and not is_told):
                return
            if is_told and not self._told:  # a tape has told of the first one
                self._told = True
                self._terms = [term for entry in self._entries[-1:] for term in entry.terms] + self._terms
                self._entries.clear()
                for own in self._optimizers.values():
                    own.begin = 0
            self._without_step += 1
            if self._without_step > _MOST_ENTRIES:
                self._active, self.failed = False, True
                self.remark(f"The watching ended: no optimizer has made a step in {_MOST_ENTRIES} micro-batches.")
                return
            terms, self._terms = self._terms, []
            if term is not None:
                terms = [dataclasses.replace(term, count=float(weight), factors=[np.ones(1)])]
            self._entries.append(MicroBatch(terms, where=where, added=self._sketches(gradients)))

    @never_raises
    def given(self, _: Mapping[Any, Any], rate: Any, place: Any, key: Any = None) -> None:
        """An optimizer is given the micro-batch that was seen last.

        :param rate: its learning rate now; NaN: it is not known
        :param place: which micro-batch of its window it is, from 0
        """
        with self._lock:
            own = self._optimizer(key)
            own.is_partial = own.is_partial or (own.is_new and int(place) > 0)
            own.is_new = False
            if self._entries and not np.isnan(rate):
                self._entries[-1].rates[id(key)] = (float(rate),)

    @never_raises
    def moved(self, _: Mapping[Any, Any], __: Any, layer: Any = None) -> None:
        """The statistics of a layer of batch normalisation have moved."""
        with self._lock:
            self._moves[layer] += 1

    @never_raises
    def averaged(self, _: Mapping[Any, Any], __: Any, key: Any = None) -> None:
        """A moving average of the parameters of an optimizer has moved."""
        with self._lock:
            self._optimizer(key).averages += 1

    @never_raises
    @np.errstate(all="ignore")
    def update(
        self, gradients: Mapping[Any, Any], is_applied: Any, rate: Any, *clipped: Any, key: Any, name: str, where: str,
        epsilon: float, title: str = "",
    ) -> None:  # fmt: skip
        """An optimizer is about to use gradients.

        :param is_applied: whether what it computes of them is kept
        :param rate: the learning rate; NaN: it is not known
        :param clipped: the gradients once they are clipped, if they are
        """
        with self._lock:
            if not self._active or not bool(is_applied):
                return
            own = self._optimizer(key)
            own.name = name
            self._without_step = 0
            if own.is_partial:
                own.is_partial = False
                self._ended(own)
                return
            if title:
                self.titles[title], self.is_compiled = None, True
            sketches = self._sketches(gradients)
            own.sizes.update({index: self._sizes[index] for index in sketches})
            joined = Joined(own.sizes)
            target = gradient = joined(sketches)
            micro_batches = contributions(self._entries[own.begin :], id(key), joined)
            window = Trace(
                micro_batches or [Contribution([], 1.0, added=target)], epsilon, solved=True, step=where,
                rates=() if np.isnan(rate) else (float(rate),), finite=bool(np.isfinite(target).all()),
                moves=max((self._moves - own.moved).values(), default=0), averages=own.averages,
                spare=self.sees_backward,
            )  # fmt: skip
            window.backward = next((entry.where for entry in reversed(self._entries) if joined.has(entry.added)), "")
            if clipped:
                gradient = joined(self._sketches(dict(zip(gradients, clipped, strict=True))))
                window.factors.append(Factor("clip", where, len(window.contributions), *multiple(gradient, target)))
            window.target, window.gradient = target, gradient
            settle(window, own.traces[-1].gradient if own.traces else None)
            for each in own.traces[-1:]:
                each.gradient = None  # of which only the last is needed
            own.traces.append(window)
            self._ended(own)

    @never_raises
    def weighed(self, kept: Sequence[float] | None, key: Any, name: str, where: str, epsilon: float) -> None:
        """An optimizer of this library has made a step with micro-batches that it multiplied by these numbers.

        :param kept: None: it has dropped them
        """
        with self._lock:
            if not self._active:
                return
            own = self._optimizer(key)
            own.name = name
            own.sizes = dict(self._sizes)
            found = contributions(self._entries[own.begin :], id(key), Joined(own.sizes))
            for each, value in zip(found, kept or (), strict=kept is not None):
                each.kept, each.added = value, None
            if kept is None:
                own.skipped += len(found)
            else:
                own.traces.append(Trace(found, epsilon, step=where))
            self._ended(own)

    def _ended(self, own: _Optimizer) -> None:
        own.begin, own.moved, own.averages = len(self._entries), self._moves.copy(), 0
        self._prune()
        self._count_window(len(own.traces))

    def _optimizer(self, key: Any) -> _Optimizer:
        if key not in self._optimizers:
            self._optimizers[key] = _Optimizer("", 0)
        return self._optimizers[key]

    def _sketches(self, gradients: Mapping[Any, Any]) -> Sketches:
        found = {}
        for key, gradient in gradients.items():
            index = self._indices.setdefault(key, len(self._indices))
            found[index] = self._sketch.of(index, gradient)
            self._sizes[index] = len(found[index])
        return found

    def _prune(self) -> None:
        """Forgets what every optimizer has behind it, once all optimizers are likely to be known."""
        everyone = self._optimizers.values()
        first = min(own.begin if len(own.traces) > 1 else 0 for own in everyone)
        first = max(first, len(self._entries) - _MOST_ENTRIES)  # some may have ended
        del self._entries[:first]
        for own in everyone:
            own.begin = max(0, own.begin - first)

    # ---- What was seen

    def title(self) -> str:
        return ", ".join(self.titles)

    def traces(self) -> Traces:
        return [(own.name, own.traces) for own in self._optimizers.values() if own.traces]

    def notes(self, is_alone: bool) -> list[str]:
        found = []
        for own in self._optimizers.values():
            joined = Joined(own.sizes)
            pending = sum(joined.has(entry.added) for entry in self._entries[own.begin :])
            if pending:
                found.append(f"The recording ended with {pending} micro-batches that no step had applied.")
            if own.skipped:
                found.append(f"{own.skipped} micro-batches were dropped with their window.")
            if own.traces and not self.sees_backward and all(len(window.contributions) == 1 for window in own.traces):
                found.append(
                    f"Each window of {own.name} had one micro-batch. Micro-batches that a program adds up by itself are "
                    "seen only if it calls recording.micro_batch() for each."
                )
        if self.is_compiled and self.titles:
            found.append("Compiled functions were watched by callbacks: what they compute is the same within rounding.")
        return found

    def knows(self, value: Any) -> bool:
        return True

    def name_loss(self, value: Any, weight: Any, reduction: str) -> Any:
        if not is_marked(value):
            raise TypeError(
                f"loss() was given a {type(value).__name__}: expected a tensor of torch, TensorFlow or JAX, whose "
                "derivative it can see; micro_batch(gradients, weight=n) tells of gradients that the program computes"
            )
        self._named = True
        where, call, epsilon = _where.line(), _where.call(), epsilon_of(value.dtype)
        return mark(value, weight, lambda: Term(NAMED, where, reduction, weight, epsilon, call))


active: list[Series] = []
"""Those of the recordings that are going on."""


def mark(value: Any, count: Any, term: Callable[[], Term]) -> Any:
    """The value of a loss, whose backward is told to the recordings that are going on then.

    :param count: over how many terms it has averaged or added
    :param term: makes the loss, for each backward
    """

    def backward(factor: Any, counted: Any) -> None:
        for series in active:
            series.backward(term(), factor, counted)

    try:
        host = host_of([value])
        return value if host.refusal() else host.mark(value, count, backward)
    except Exception as error:
        for series in active:
            series.fail(error)
        return value


def tell(method: str, gradients: Mapping[Any, Any], *arrays: Any, **constants: Any) -> None:
    """Calls a method of the recordings that are going on when what is traced runs, with numbers in place of arrays."""
    keys = list(gradients)

    def called(*found: Any) -> None:
        for series in active:
            given = dict(zip(keys, found, strict=False))
            getattr(series, method)(given, *found[len(given) :], **constants)

    try:
        everything = [*gradients.values(), *arrays]
        host = host_of(everything)
        refusal = host.refusal()
        if not refusal:
            host.call(called, everything)
        for series in active if refusal else ():
            series.remark(refusal)
    except Exception as error:
        for series in active:
            series.fail(error)


def leaves(tree: Any) -> dict[Any, Any]:
    """The arrays of a tree, by their places in it."""
    jax: Any = sys.modules.get("jax")
    if jax is not None:
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    if isinstance(tree, Mapping):
        return {f"[{key!r}]{path}": leaf for key, each in tree.items() for path, leaf in leaves(each).items()}
    if isinstance(tree, (list, tuple)):
        return {f"[{i}]{path}": leaf for i, each in enumerate(tree) for path, leaf in leaves(each).items()}
    return {} if tree is None else {"": tree}

