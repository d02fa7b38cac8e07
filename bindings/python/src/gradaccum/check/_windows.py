# SPDX-License-Identifier: Apache-2.0
"""From what a recorder saw to the coefficients of micro-batches."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._faults import Coefficient, Window
from ._losses import Term
from ._recorder import Recorder, Steps
from ._solve import solve
from ._timeline import Factor, Trace

_F32 = 2.0**-23


@dataclasses.dataclass
class _Loss:
    """A loss of a micro-batch, resolved to numbers."""

    key: str
    line: str
    """The key without the number of the call."""
    call: int
    factor: float
    terms: float
    free: bool
    epsilon: float


@dataclasses.dataclass
class _Part:
    """A window as one rank has seen it."""

    losses: list[list[_Loss]]
    kept: list[float]
    factors: list[Factor]
    left: float
    lost: list[float]
    finite: bool
    emptied: bool
    broken: list[int]
    added: list[Tensor]
    target: Tensor
    gradient: Tensor
    rates: list[tuple[float, ...]]
    moves: int
    backward: str
    step: str
    epsilon: float
    is_sharded: bool
    """Whether the ranks' gradients were reduced before they were seen, to their mean."""


def windows_of(recorder: Recorder, group: Any | None) -> list[tuple[str, list[Window]]]:
    """For each optimizer its name and its windows, over the ranks of a group of torch.distributed if there is one."""
    own = [
        (type(steps.optimizer).__name__, _parts(steps, recorder.is_sharded(steps)))
        for steps in recorder.steps.values()
    ]
    ranks = [own]
    if group is not None:
        distributed: Any = torch.distributed
        ranks = [own] * distributed.get_world_size(group)
        found: list[Any] = [None] * len(ranks)
        distributed.all_gather_object(found, own, group=group)
        ranks = found
    result = []
    for which, (name, parts) in enumerate(own):
        count = min(len(rank[which][1]) if which < len(rank) else 0 for rank in ranks)
        windows = []
        for index in range(count):
            before = parts[index - 1].gradient if index else None
            windows.append(_window(index, [rank[which][1][index] for rank in ranks], before))
        result.append((name, windows))
    return result


def _parts(steps: Steps, is_sharded: bool) -> list[_Part]:
    return [
        _part(trace, rates, moves, line, is_sharded)
        for trace, rates, moves, line in zip(steps.traces, steps.rates, steps.moves, steps.lines, strict=True)
    ]


def _part(trace: Trace, rates: list[tuple[float, ...]], moves: int, line: str, is_sharded: bool) -> _Part:
    losses = [_losses(terms) for terms in trace.terms]
    keys = {loss.key for kept, own in zip(trace.kept, losses, strict=True) if kept for loss in own}
    # What another optimizer's losses left in .grad, and was dropped, is no micro-batch of this one.
    own = [
        i for i, kept in enumerate(trace.kept)
        if kept or not losses[i] or not keys or not keys.isdisjoint(loss.key for loss in losses[i])
    ]  # fmt: skip
    shift = {i: sum(k < i for k in own) for i in range(len(losses) + 1)}
    factors = [dataclasses.replace(factor, after=shift[factor.after]) for factor in trace.factors]
    return _Part(
        [losses[i] for i in own], [trace.kept[i] for i in own], factors, trace.left, [trace.lost[i] for i in own],
        trace.finite, trace.emptied, [i for i, k in enumerate(own) if trace.broken[k]],
        [trace.added[i] for i in own] if trace.added else [], trace.target, trace.gradient,
        [rates[i] for i in own if rates[i]] + rates[-1:], moves, trace.where, line, trace.epsilon, is_sharded,
    )  # fmt: skip


def _losses(terms: Sequence[Term]) -> list[_Loss]:
    """Several calls by one line, as of several heads, are told apart by their order, and may have any scale."""
    known = [term for term in terms if term.resolved is not None]
    calls = collections.Counter(term.key for term in known)
    result: list[_Loss] = []
    order: collections.Counter[str] = collections.Counter()
    for term in known:
        assert term.resolved is not None
        factor, count = term.resolved
        order[term.key] += 1
        call = f", call {order[term.key]}" if order[term.key] > 1 else ""
        free = term.is_sum or calls[term.key] > 1
        result.append(_Loss(term.key + call, term.key, term.call, factor, count, free, term.epsilon))
    return result


def _tell_roles(micro_batches: list[list[_Loss]]) -> None:
    """A function for losses that each micro-batch calls from another place, as a GAN's, computes another loss in each."""
    calls: dict[str, list[int]] = collections.defaultdict(list)
    for losses in micro_batches:
        for loss in losses:
            calls[loss.key].append(loss.call)
    for losses in micro_batches:
        for loss in losses:
            places = calls[loss.key]
            if len(places) == len(set(places)) > 1:
                loss.key += f", place {places.index(loss.call) + 1}"


def _window(index: int, ranks: list[_Part], before: Tensor | None) -> Window:
    first = ranks[0]
    kept = [[(value, 0.0) for value in part.kept] for part in ranks]
    left = first.left
    together: list[str] = []
    if first.is_sharded:
        kept = [[(value / len(ranks), 0.0) for value in part.kept] for part in ranks]
    elif len(ranks) > 1:
        kept, left, together = _solved(ranks, before)
    elif any(factor.purpose != "clip" and not factor.is_exact(first.epsilon) for factor in first.factors):
        kept = [[(math.nan, math.inf)] * len(part.kept) for part in ranks]
    for part in ranks:
        _tell_roles(part.losses)
    everything = [losses for part in ranks for losses in part.losses if losses]
    totals: dict[str, float] = collections.defaultdict(float)
    places: collections.Counter[str] = collections.Counter()  # micro-batches with a loss
    free = {loss.line for losses in everything for loss in losses if loss.free}
    for losses in everything:
        for loss in losses:
            totals[loss.key] += loss.terms
            places[loss.key] += 1
    coefficients = []
    for rank, part in enumerate(ranks):
        for micro, losses in enumerate(part.losses):
            value, error = kept[rank][micro]
            dropped = abs(value) <= error if len(ranks) > 1 else value == 0
            if not totals:
                coefficients.append(Coefficient(rank, micro, 1, value, error, 1, "", True, dropped))
            for loss in losses:
                right = loss.terms / totals[loss.key] if totals[loss.key] else 0.0
                blur = abs(loss.factor) * error + 4 * max(loss.epsilon, _F32) * abs(value * loss.factor)
                any_scale = loss.line in free or places[loss.key] < len(everything)
                coefficients.append(
                    Coefficient(rank, micro, loss.terms, value * loss.factor, blur, right, loss.key, any_scale, dropped)
                )
    swallowed = [i for i in first.broken if first.kept[i]]
    return Window(
        index, max(len(part.kept) for part in ranks), coefficients, first.factors, left, first.lost, first.finite,
        swallowed, first.emptied, first.rates, first.moves, first.backward, first.step, len(ranks), first.epsilon,
        together,
    )  # fmt: skip


def _solved(
    ranks: list[_Part], before: Tensor | None
) -> tuple[list[list[tuple[float, float]]], float, list[str]]:
    """The coefficients by least squares, where gradients were not followed from one change to the next."""
    places = [(rank, micro) for rank, part in enumerate(ranks) for micro in range(len(part.added))]
    columns = [ranks[rank].added[micro] for rank, micro in places]
    if before is not None and len(before) == 0:
        before = None
    if before is not None:
        columns.append(before)
    kept = [[(math.nan, math.inf)] * len(part.added) for part in ranks]
    if not columns or len(ranks[0].target) < 2 * len(columns):
        return kept, 0.0, []
    solution = solve(columns, ranks[0].target, max(ranks[0].epsilon, _F32))
    for (rank, micro), value, error in zip(places, solution.values, solution.errors, strict=False):
        kept[rank][micro] = (value, error)
    left = 0.0
    if before is not None and abs(solution.values[-1]) > 4 * solution.errors[-1]:
        left = solution.values[-1]
    names = [f"micro-batch {micro + 1} of rank {rank}" for rank, micro in places] + ["the window before"]
    together = [
        f"the gradients of {' and '.join(names[i] for i in group)} are multiples of one another: only the sum of what "
        f"they were multiplied by is known, {total:.4g}" for group, total in solution.sums
    ]  # fmt: skip
    return kept, left, together
