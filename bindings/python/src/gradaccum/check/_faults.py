# SPDX-License-Identifier: Apache-2.0
"""Names for what is wrong with the micro-batches of a window."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

from ._timeline import Factor

_TOLERANCE = 1e-4
"""Relative, beside the error of a coefficient: losses scale by factors of f32."""
_SIXTEEN_BITS = 1e-4
"""Formats with a larger rounding have 16 bits."""
_LOSES = 0.1
"""The part of a gradient that may be rounded away when it is added: f16 and bf16 sums of few micro-batches keep more."""

_LIBRARY = (
    "gradaccum.torch: opt.backward(loss, weight=n) for each micro-batch, n the terms of its loss; gradaccum.keras: "
    "wrap(model, accum_steps=N)"
)
ADVICE: dict[str, tuple[str, str, str]] = {  # by the names of faults
    "sum for mean": (
        "every update is as large as if the learning rate were multiplied by the number of micro-batches",
        "divide each loss by what all micro-batches of the window average over",
        _LIBRARY,
    ),
    "divided twice": (
        "every update is as small as if the learning rate were divided by the number of micro-batches",
        "divide once: a framework that accumulates may divide already",
        _LIBRARY,
    ),
    "mean of means over uneven micro-batches": (
        "a term (a sample, a token) in a small micro-batch pulls harder than one in a large micro-batch",
        'use reduction="sum" and divide by the terms of the whole window, or weight each mean by n / sum of n',
        _LIBRARY,
    ),
    "tail divided by N": (
        "the last batches of each epoch pull less than the others",
        "divide by the number of micro-batches that the window has, not by that of a full one",
        "gradaccum.torch, gradaccum.keras: a short window is averaged over what it holds",
    ),
    "only the last one": (
        "all micro-batches but the last are computed and thrown away",
        "call zero_grad() after step(), not before each backward",
        "gradaccum.torch: zero_grad() belongs between windows; micro-batches are kept by the library",
    ),
    "micro-batch lost": (
        "a micro-batch is computed and thrown away",
        "call step() after the last backward of a window, and zero_grad() right after step()",
        _LIBRARY,
    ),
    "not zeroed": (
        "every update contains the gradients of all windows before it",
        "call zero_grad() after step()",
        "gradaccum.torch: step() ends the window and begins the next one empty",
    ),
    "leak from the window before": (
        "an update contains gradients that belong to the window before it",
        "call zero_grad() after step(), and step or drop what is left at the end of an epoch",
        "gradaccum.torch: opt.flush() or opt.discard() at the end of an epoch",
    ),
    "clipped per micro-batch": (
        "large micro-batches are cut before they are averaged, so that the sum points elsewhere",
        "clip once, between the last backward of the window and step()",
        "gradaccum.torch: clip=gradaccum.Clip(...) clips the window",
    ),
    "clipped before unscale": (
        "the norm was compared with the limit while it was multiplied by the loss scale, so almost everything is clipped",
        "call scaler.unscale_(optimizer) before clip_grad_norm_",
        "gradaccum.torch: the library unscales before it clips",
    ),
    "non-finite gradient applied": (
        "parameters become NaN or infinite",
        "step through a GradScaler, or test the gradient before step()",
        "gradaccum.torch: nonfinite=gradaccum.Nonfinite.SKIP, or DROP_MICRO",
    ),
    "a non-finite micro-batch swallowed": (
        "a window counts as whole though a micro-batch with inf or NaN was replaced by other numbers: weights decay and "
        "the counter of bias corrections moves",
        "skip the window, or leave the micro-batch out of the mean",
        "gradaccum.torch: nonfinite=gradaccum.Nonfinite.DROP_MICRO leaves it out of the mean",
    ),
    "lost in rounding": (
        "a part of each micro-batch is rounded away, since the sum is kept in 16 bits",
        "keep gradients in f32, or fewer micro-batches in a window",
        "gradaccum.torch: sums are kept in f32",
    ),
    "schedule moved per micro-batch": (
        "the schedule runs through as many times faster as a window has micro-batches",
        "move it with the steps: call scheduler.step() after optimizer.step() alone; for Keras, whose schedules count "
        "micro-batches, multiply decay_steps by their number",
        "gradaccum.torch, gradaccum.keras: the schedule moves with the steps",
    ),
    "batch norm per micro-batch": (
        "running statistics move once for each micro-batch, with variances of micro-batches",
        "use larger micro-batches, or layers whose statistics do not depend on the batch",
        "gradaccum.torch: convert_batchnorm() makes one batch of the window; gradaccum.keras: replace_batchnorm_layers()",
    ),
    "moving average per micro-batch": (
        "the average of the parameters has a shorter memory: it decays once for each micro-batch, and averages the "
        "same parameters again",
        "update the average after optimizer.step() alone",
        "gradaccum.torch, gradaccum.keras: the average moves with the steps",
    ),
    "1/R once too often over ranks": (
        "every update is as small as if the learning rate were divided by the number of ranks",
        "DistributedDataParallel divides already: do not divide by the world size again",
        _LIBRARY,
    ),
    "sum over ranks for mean": (
        "every update is as large as if the learning rate were multiplied by the number of ranks",
        "divide by the number of ranks, or by the terms of all of them",
        _LIBRARY,
    ),
    "weights of ranks ignored": (
        "a term on a rank with few of them pulls harder than one on a rank with many",
        "multiply the loss of each rank by ranks * n / sum of n over the ranks",
        _LIBRARY,
    ),
    "last micro-batch not reduced": (
        "each rank steps with its own last micro-batch: replicas go apart",
        "leave no_sync() before the last backward of the window; a framework that does so by itself has a defect",
        _LIBRARY,
    ),
    "gradients not reduced over ranks": (
        "each rank trains by itself: replicas go apart",
        "leave no_sync() before the last backward of the window",
        _LIBRARY,
    ),
    "micro-batches lost at a resume": (
        "the window that was open when the run ended is stepped without micro-batches, or with others",
        "save the gradients and the place in the window with a checkpoint, or save after a step alone",
        "gradaccum.torch: opt.state_dict() holds the open window",
    ),
    "parameters lost at a resume": (
        "training goes on from other parameters than it had reached",
        "load the model before the first forward, and save it after the last step",
        "gradaccum.torch: parameters and state are in one file of the library",
    ),
    "optimizer state lost at a resume": (
        "moments, or the count for bias corrections, begin anew",
        "save and load optimizer.state_dict(), and load it after the optimizer was made for the model's device",
        "gradaccum.torch: opt.state_dict()",
    ),
    "schedule lost at a resume": (
        "the learning rate jumps",
        "save and load scheduler.state_dict() and optimizer.state_dict(), which has the learning rate",
        "gradaccum.torch: the schedule of the library is in opt.state_dict()",
    ),
    "other data after a resume": (
        "samples are seen twice, or never, or with other random numbers",
        "save the place in the data and the states of random generators, and go on from them",
        "this is the program's to save, whatever the optimizer",
    ),
    "other windows after a resume": (
        "an epoch has more or fewer steps than it would have had",
        "save the place in the epoch and in the window",
        "gradaccum.torch: opt.state_dict() holds the open window; the place in the data is the program's to save",
    ),
}
"""What each fault does to training, and what mends it: by hand, and by this library."""


UNKNOWN = "are none of the patterns"
_SCALES = {
    "sum for mean", "divided twice", "1/R once too often over ranks", "sum over ranks for mean",
}  # fmt: skip
"""Faults that are a factor of the whole window."""


@dataclasses.dataclass
class Fault:
    """What is wrong, in how many windows."""

    name: str
    text: str
    """With the numbers of the first window in which it was found."""
    where: str
    """The line of the program that does it, or empty."""
    severity: float
    """How far the gradient is from that of one batch, as a part of it."""
    windows: list[int] = dataclasses.field(default_factory=list)

    @property
    def effect(self) -> str:
        return ADVICE[self.name][0]

    @property
    def fix(self) -> str:
        return ADVICE[self.name][1]

    @property
    def library(self) -> str:
        return ADVICE[self.name][2]


@dataclasses.dataclass
class Coefficient:
    """What multiple of a micro-batch's mean loss went into an update."""

    rank: int
    micro_batch: int
    terms: float
    """Over how many terms the loss is a mean."""
    value: float
    """NaN if it is not determined."""
    error: float
    """Half of the 99 % interval."""
    right: float
    """The multiple that it has in one batch of the whole window."""
    loss: str = ""
    """The loss function and its line."""
    free: bool = False
    """Whether the program may choose the scale of the whole loss, as of a sum."""
    dropped: bool = False
    """Whether nothing of its gradient is in the update, whatever its loss was multiplied by."""

    def is_(self, value: float) -> bool:
        return abs(self.value - value) <= self.error + _TOLERANCE * max(abs(value), abs(self.value))

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "?"
        return f"{0 if self.is_(0) or abs(self.value) < 1e-6 * self.right else self.value:.4g}"


@dataclasses.dataclass
class Window:
    """What was seen of a window, in numbers."""

    index: int
    micro_batches: int
    """Of each rank."""
    coefficients: list[Coefficient]
    factors: list[Factor]
    left: float
    lost: list[float]
    finite: bool
    swallowed: list[int]
    """The micro-batches with gradients that are not finite, if the sum is."""
    emptied: bool
    """Whether all micro-batches were dropped because of such gradients, and the step was made without them."""
    rates: list[tuple[float, ...]]
    moves: int
    """Of the statistics of batch normalisation."""
    backward: str = ""
    step: str = ""
    ranks: int = 1
    epsilon: float = 0.0
    together: list[str] = dataclasses.field(default_factory=list)
    """What is known of micro-batches whose gradients are multiples of one another."""
    averages: int = 0
    """How often a moving average of the parameters moved."""
    spare: bool = False
    """Whether gradients are seen, too, that the program computes for something else than a step."""

    def by_loss(self) -> list[list[Coefficient]]:
        """The coefficients of each loss."""
        losses: dict[str, list[Coefficient]] = {}
        for c in self.coefficients:
            losses.setdefault(c.loss, []).append(c)
        return list(losses.values())


def find(windows: Sequence[Window]) -> list[Fault]:
    """The faults of the windows of an optimizer, the worst first."""
    found: dict[tuple[str, str], Fault] = {}
    usual = _usual(windows)
    for window in windows:
        for fault in _of(window, usual):
            fault = found.setdefault((fault.name, fault.where), fault)
            if window.index not in fault.windows:
                fault.windows.append(window.index)
    return sorted(found.values(), key=lambda fault: -fault.severity)


def _usual(windows: Sequence[Window]) -> int:
    lengths = collections.Counter(window.micro_batches for window in windows)
    return max(lengths, key=lambda length: (lengths[length], length), default=0)


def _of(window: Window, usual: int) -> Iterable[Fault]:
    n = window.micro_batches
    if not window.finite:
        yield Fault("non-finite gradient applied", "the gradient was not finite when step() was called",
                    window.step, math.inf)  # fmt: skip
        return
    if window.swallowed:
        yield Fault("a non-finite micro-batch swallowed",
                    f"micro-batch {_listed(window.swallowed)} had inf or NaN, and the sum that was applied has not",
                    window.step, 1.0)  # fmt: skip
        return
    if window.emptied:
        yield Fault("a non-finite micro-batch swallowed",
                    "a gradient was not finite, everything was set to 0, and the step was made all the same",
                    window.step, 1.0)  # fmt: skip
        return
    yield from _left(window)
    yield from _clips(window)
    lines = window.by_loss()
    one_is_right = any(not own[0].free and all(c.is_(c.right) for c in own) for own in lines)
    for own in lines:
        fault = _pattern(own, window, usual)
        # A factor that another loss of the window has not is one that the program wants.
        if fault is not None and not (one_is_right and fault.name in _SCALES):
            yield fault
    worst = max(window.lost, default=0.0)
    if worst > _LOSES and window.epsilon > _SIXTEEN_BITS:
        yield Fault("lost in rounding", f"{worst:.0%} of a micro-batch's gradient was rounded away when it was added",
                    window.backward, worst)  # fmt: skip
    if n > 1 and len(set(window.rates)) > 1:
        rates = [", ".join(f"{rate:g}" for rate in each) for each in window.rates]
        yield Fault("schedule moved per micro-batch",
                    f"within one window the learning rate was {'; '.join(dict.fromkeys(rates))}", "", 0.5)  # fmt: skip
    if n > 1 and window.moves > 1:
        yield Fault("batch norm per micro-batch",
                    f"running statistics moved {window.moves} times in a window of {n} micro-batches", "",
                    0.1)  # fmt: skip
    if n > 1 and window.averages > 1:
        yield Fault("moving average per micro-batch",
                    f"the average of the parameters moved {window.averages} times in a window of {n} micro-batches", "",
                    0.1)  # fmt: skip


def _left(window: Window) -> Iterable[Fault]:
    if abs(window.left) <= _TOLERANCE:
        return
    if abs(window.left - 1) <= _TOLERANCE:
        yield Fault("not zeroed", "the gradient of the window before is in this one, whole", window.step, 1.0)
    else:
        yield Fault("leak from the window before", f"{window.left:.4g} of the gradient of the window before is in this "
                    "one", window.step, abs(window.left))  # fmt: skip


def _clips(window: Window) -> Iterable[Fault]:
    n = window.micro_batches
    unscaled: Factor | None = None
    for factor in reversed(window.factors):
        if factor.purpose == "unscale" and factor.value:
            unscaled = factor
        if factor.purpose != "clip":
            continue
        if factor.is_exact(window.epsilon) and abs(factor.value - 1) <= _TOLERANCE:
            continue  # it was below the limit
        much = abs(1 - factor.value) if factor.is_exact(window.epsilon) else factor.residual
        how = f"multiplied by {factor.value:.4g}" if factor.is_exact(window.epsilon) else "cut element by element"
        if factor.after < n:
            yield Fault("clipped per micro-batch",
                        f"after micro-batch {factor.after} of {n} the sum so far was {how}", factor.where,
                        much)  # fmt: skip
        elif unscaled is not None and abs(unscaled.value - 1) > _TOLERANCE:
            yield Fault("clipped before unscale",
                        f"the gradient was {how} while it was {1 / unscaled.value:.4g} times too large", factor.where,
                        much)  # fmt: skip


def _pattern(own: Sequence[Coefficient], window: Window, usual: int) -> Fault | None:
    """What the coefficients of one loss are, if they are not right."""
    seen = [c for c in own if not math.isnan(c.value)]
    if not seen or all(c.is_(c.right) for c in seen):
        return None
    ratios = [c.value / c.right for c in seen if c.right]
    ratio = ratios[0] if ratios else 1.0
    same_ratio = all(c.is_(c.right * ratio) for c in seen)
    n, ranks = window.micro_batches, window.ranks
    if same_ratio and seen[0].free and ratio and not (n > 1 and len(seen) > 1 and all(c.is_(1) for c in seen)):
        return None
    severity = math.sqrt(math.fsum((c.value - c.right) ** 2 for c in seen) /
                         max(1e-300, math.fsum(c.right**2 for c in seen)))  # fmt: skip
    listed = _list(seen)

    def fault(name: str, text: str = "", where: str = window.backward) -> Fault:
        return Fault(name, text or listed, where, severity)

    others = [c for c in seen if c.rank != 0]
    if others and all(c.dropped for c in others) and not all(c.dropped for c in seen):
        return fault("gradients not reduced over ranks")
    last = [c for c in others if c.micro_batch == n - 1]
    if last and n > 1 and all(c.dropped for c in last):
        return fault("last micro-batch not reduced")
    zero = [c.micro_batch for c in seen if c.dropped]
    kept = [c for c in seen if not c.dropped]
    if zero and kept:
        if len(seen) < len(own) or (own[0].loss and _are_right_alone(kept)) or (window.spare and not own[0].loss):
            return None  # the others were dropped, and the update may be that of one batch of these
        if n > 1 and {c.micro_batch for c in kept} == {n - 1}:
            return fault("only the last one")
        return fault("micro-batch lost", f"micro-batch {_listed(zero)} of {n} is not in the update: {listed}")
    even = len({c.terms for c in seen}) == 1
    equal = all(c.is_(seen[0].value) for c in seen)
    if equal and len(seen) > 1:
        each = seen[0]
        if each.is_(1) or (ranks > 1 and each.is_(1 / ranks) and n > 1):
            return fault("sum for mean")
        if not even and each.is_(1 / len(seen)):
            by_rank = collections.defaultdict(set)
            for c in seen:
                by_rank[c.rank].add(c.terms)
            if ranks > 1 and all(len(terms) == 1 for terms in by_rank.values()):
                return fault("weights of ranks ignored")
            return fault("mean of means over uneven micro-batches")
    if (equal or same_ratio) and usual != n and seen[0].is_(1 / (usual * ranks)):
        if n < usual:
            return fault("tail divided by N", f"{n} micro-batches were divided by {usual}: {listed}")
        return fault("leak from the window before",
                     f"{n} micro-batches were added up and divided by {usual}: {listed}")  # fmt: skip
    if same_ratio:
        if n > 1 and _near(ratio, n):
            return fault("sum for mean")
        if ranks > 1 and _near(ratio, ranks):
            return fault("sum over ranks for mean")
        if ranks > 1 and _near(ratio, 1 / ranks):
            return fault("1/R once too often over ranks")
        if n > 2 and _near(ratio, 1 / n):  # a half of two is a factor that many losses have
            return fault("divided twice")
    return None  # see remarks()


def _are_right_alone(kept: Sequence[Coefficient]) -> bool:
    total = math.fsum(c.terms for c in kept)
    return total > 0 and all(c.is_(c.terms / total) for c in kept)


def remarks(windows: Sequence[Window]) -> list[str]:
    """Sentences about what may be meant, and about what could not be followed."""
    result: dict[str, int] = {}
    usual = _usual(windows)
    for window in windows:
        if not window.finite or window.swallowed:
            continue
        lines = window.by_loss()
        for own in lines:
            text = _remark(own, window, usual, len(lines) == 1)
            if text:
                result.setdefault(text, window.index)
        for text in window.together:
            result.setdefault(text, window.index)
        if not window.coefficients and window.factors and window.factors[-1].value:
            result.setdefault("a step was made with gradients that no backward has given to .grad", window.index)
        worst = max(window.lost, default=0.0)
        if worst and window.epsilon <= _SIXTEEN_BITS:
            text = "a hook changes gradients within a micro-batch: right if it is linear, as a mask, wrong if it clips"
            result.setdefault(text, window.index)
        for factor in window.factors:
            if factor.purpose != "clip" and not factor.is_exact(window.epsilon) and window.ranks == 1:
                what = factor.purpose or "something that was not seen"
                place = f" ({factor.where})" if factor.where else ""
                text = f"{what}{place} changed the sum in a way that is no multiple: what remains of each micro-batch is not known"
                result.setdefault(text, window.index)
    return [f"{text} (window {index + 1})." for text, index in result.items()]


def _remark(own: Sequence[Coefficient], window: Window, usual: int, is_alone: bool) -> str:
    """About coefficients that are not right, and no fault by name."""
    seen = [c for c in own if not math.isnan(c.value)]
    if not seen or all(c.is_(c.right) for c in seen) or _pattern(own, window, usual) is not None:
        return ""
    if seen[0].free and all(c.is_(c.terms) for c in seen):
        return ""  # a sum over the terms of the window
    ratio = seen[0].value / seen[0].right if seen[0].right else 0.0
    if ratio and all(c.is_(c.right * ratio) for c in seen):
        return f"{own[0].loss}: the whole window is multiplied by {ratio:.6g}, which may be meant" if is_alone else ""
    zero = [c.micro_batch for c in seen if c.dropped]
    kept = [c for c in seen if not c.dropped]
    if zero and (len(seen) < len(own) or (window.spare and not own[0].loss) or _are_right_alone(kept)):
        return f"micro-batch {_listed(zero)} of {window.micro_batches} was computed and dropped, which may be meant"
    return (
        f"{own[0].loss}: {_list(seen)} {UNKNOWN}: the program may weigh them itself, and if it does not, they are wrong"
    )


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-3 * abs(b)


def _list(seen: Sequence[Coefficient]) -> str:
    shown = [f"{c} for {c.right:.4g}" for c in seen[:8]]
    return "coefficients " + ", ".join(shown) + (", ..." if len(seen) > 8 else "")


def _listed(micro_batches: Iterable[int]) -> str:
    return ", ".join(str(i + 1) for i in sorted(set(micro_batches)))
