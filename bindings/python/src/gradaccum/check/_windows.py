# SPDX-License-Identifier: Apache-2.0
"""From what was seen of windows to the coefficients of micro-batches."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._faults import Coefficient, Window
from ._solve import Vector, solve
from ._terms import Loss
from ._timeline import Trace

_F32 = 2.0**-23
_EXPLAINED = 1e-3  # what may remain of a gradient that is a sum of others, in 16 bits too
Traces = list[tuple[str, list[Trace]]]
"""For each optimizer its name and its windows."""


@np.errstate(all="ignore")
def windows_of(seen: Traces, gather: Callable[[Any], list[Any]]) -> list[tuple[str, list[Window]]]:
    """For each optimizer its name and its windows.

    :param gather: what is given to it, of each rank
    """
    own = [(name, [_own(trace) for trace in traces]) for name, traces in seen]
    ranks = gather(own)
    result = []
    for which, (name, _) in enumerate(own):
        count = min(len(rank[which][1]) if which < len(rank) else 0 for rank in ranks)
        windows = []
        before: Vector = None
        for index in range(count):
            traces = _whole([rank[which][1][index] for rank in ranks])
            windows.append(_window(index, traces, before))
            before = traces[0].gradient
        result.append((name, windows))
    return result


def _whole(ranks: list[Trace]) -> list[Trace]:
    """With the gradients of parameters of which each rank has a part."""
    if not ranks[0].fragmented:
        return ranks
    total = sum(trace.gradient for trace in ranks)
    return [dataclasses.replace(trace, target=total, gradient=total) for trace in ranks]


def _own(trace: Trace) -> Trace:
    """Without what another optimizer's losses left in .grad, and was dropped."""
    all_of_them = trace.contributions
    keys = {loss.key for each in all_of_them if each.kept for loss in each.losses}
    own = [
        i for i, each in enumerate(all_of_them)
        if each.kept or not each.losses or not keys or not keys.isdisjoint(loss.key for loss in each.losses)
    ]  # fmt: skip
    shift = {i: sum(k < i for k in own) for i in range(len(all_of_them) + 1)}
    factors = [dataclasses.replace(factor, after=shift[factor.after]) for factor in trace.factors]
    return dataclasses.replace(trace, contributions=[all_of_them[i] for i in own], factors=factors)


def _tell_roles(micro_batches: list[list[Loss]]) -> None:
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


def settle(trace: Trace, before: Vector) -> None:
    """Solves for the multiples of a window of one process, and lets go of what that needs.

    :param before: the gradient of the window before, or None
    """
    ((kept,), trace.left, trace.together) = _solved([trace], before)
    for each, (value, error) in zip(trace.contributions, kept, strict=True):
        each.kept, each.error, each.added = value, error, None
    trace.target, trace.solved = None, False


def _window(index: int, ranks: list[Trace], before: Vector) -> Window:
    first = ranks[0]
    losses_of = [[each.losses for each in trace.contributions] for trace in ranks]
    kept = [[(each.kept, each.error) for each in trace.contributions] for trace in ranks]
    left, together = first.left, first.together
    if first.sharded:
        kept = [[(value / len(ranks), 0.0) for value, _ in own] for own in kept]
    elif first.solved:
        kept, left, together = _solved(ranks, before)
    elif any(factor.purpose != "clip" and not factor.is_exact(first.epsilon) for factor in first.factors):
        kept = [[(math.nan, math.inf)] * len(own) for own in kept]
    for own in losses_of:
        _tell_roles(own)
    everything = [losses for own in losses_of for losses in own if losses]
    totals: dict[str, float] = collections.defaultdict(float)
    places: collections.Counter[str] = collections.Counter()  # micro-batches with a loss
    free = {loss.line for losses in everything for loss in losses if loss.free}
    for losses in everything:
        for loss in losses:
            totals[loss.key] += loss.terms
            places[loss.key] += 1
    coefficients = []
    for rank, own in enumerate(losses_of):
        for micro, losses in enumerate(own):
            value, error = kept[rank][micro]
            dropped = abs(value) <= error < math.inf
            if not totals:
                coefficients.append(Coefficient(rank, micro, 1, value, error, 1, "", True, dropped))
            for loss in losses:
                right = loss.terms / totals[loss.key] if totals[loss.key] else 0.0
                factor = loss.factor if value or error else 0.0  # it may be NaN, and does not matter
                blur = abs(factor) * error + 4 * max(loss.epsilon, _F32) * abs(value * factor)
                any_scale = loss.line in free or places[loss.key] < len(everything)
                coefficients.append(
                    Coefficient(rank, micro, loss.terms, value * factor, blur, right, loss.key, any_scale, dropped)
                )
    mine = first.contributions
    swallowed = [i for i, (value, _) in enumerate(kept[0]) if value != 0 and not mine[i].is_finite]
    return Window(
        index, max(len(own) for own in kept), coefficients, first.factors, left, [each.lost for each in mine],
        first.finite, swallowed, first.emptied, [each.rates for each in mine if each.rates] + [first.rates],
        first.moves, first.backward, first.step, len(ranks), first.epsilon, together, first.averages, first.spare,
    )  # fmt: skip


def _own_parts(ranks: Sequence[Trace]) -> list[Vector]:
    """What would be in the gradient if each rank kept of a micro-batch its own gradient, for its part of parameters."""
    if not ranks[0].fragmented or len({len(trace.contributions) for trace in ranks}) > 1:
        return []
    together = zip(*(trace.contributions for trace in ranks), strict=True)
    return [sum(each.part for each in micro) for micro in together]


def _solved(
    ranks: Sequence[Trace], before: Vector
) -> tuple[list[list[tuple[float, float]]], float, list[str]]:
    """The coefficients by least squares, where gradients were not followed from one change to the next."""
    places = [(rank, micro) for rank, trace in enumerate(ranks) for micro in range(len(trace.contributions))]
    columns = [ranks[rank].contributions[micro].added for rank, micro in places]
    own = _own_parts(ranks)
    columns += own
    target = ranks[0].target
    if before is not None and len(before) == len(target):  # or the optimizer has other parameters since
        columns.append(before)
    else:
        before = None
    kept = [[(math.nan, math.inf)] * len(trace.contributions) for trace in ranks]
    is_known = bool(columns) and len(target) >= 2 * len(columns)
    solution = solve(columns if is_known else [], target, _F32, ranks[0].epsilon)
    for (rank, micro), value, error in zip(places, solution.values, solution.errors, strict=False):
        kept[rank][micro] = (value, error)
    for rank, micro in places:  # what is not finite is not in a sum of the others
        if solution.residual <= _EXPLAINED and not ranks[rank].contributions[micro].is_finite:
            kept[rank][micro] = (0.0, 0.0)
    if not is_known:
        return kept, 0.0, []
    for micro in range(len(own)):
        value, error = (found[len(places) + micro] for found in (solution.values, solution.errors))
        if abs(value) > 4 * error:  # it was not reduced: so it is seen by the first rank
            kept[0][micro] = (kept[0][micro][0] + value, error)
    left = 0.0
    if before is not None and abs(solution.values[-1]) > 4 * solution.errors[-1]:
        left = solution.values[-1]
    names = [f"micro-batch {micro + 1}" + (f" of rank {rank}" if len(ranks) > 1 else "") for rank, micro in places]
    names += [f"micro-batch {micro + 1} as each rank has it" for micro in range(len(own))] + ["the window before"]
    together = [
        f"the gradients of {' and '.join(names[i] for i in group)} are multiples of one another: only the sum of what "
        f"they were multiplied by is known, {total:.4g}" for group, total in solution.sums
    ]  # fmt: skip
    return kept, left, together
