# SPDX-License-Identifier: Apache-2.0
"""What combination of some vectors another vector is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Vector = Any
"""An array of numpy with one dimension, f64."""

_QUANTILE = 2.576  # of the normal distribution, for 99 %
_DEPENDENT = 1e-3  # of a direction that coefficients may not share with the null space


@dataclasses.dataclass(frozen=True)
class Solution:
    """The least-squares solution of ``columns @ values = target``."""

    values: list[float]
    """The coefficients; NaN where the columns do not determine one."""
    errors: list[float]
    """Half of the 99 % interval of each coefficient."""
    sums: list[tuple[list[int], float]]
    """The columns that only have a sum that is determined, and the sum of their coefficients."""
    residual: float = 0.0
    """The part of the target that is no combination of the columns."""


def norm(vector: Vector) -> float:
    """NaN or infinity if an element is."""
    return float(np.linalg.norm(vector))


def solve(columns: Sequence[Vector], target: Vector, epsilon: float, rounding: float = 0.0) -> Solution:
    """The coefficients with which vectors of f64 were added up to a target.

    :param epsilon: the error of the vectors, relative to their norms
    :param rounding: that of the target, if it is larger
    """
    norms = [norm(column) for column in columns]
    count = len(columns)
    values, errors = [0.0] * count, [math.inf] * count
    kept = [i for i in range(count) if 0 < norms[i] < math.inf]
    goal = norm(target)
    if not kept or not math.isfinite(goal):
        return Solution([math.nan] * count, errors, [])
    matrix = np.stack([columns[i] / norms[i] for i in kept], 1)
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    rank = int((s > s[0] * epsilon * 8 * math.sqrt(len(kept))).sum())
    found = vt[:rank].T @ ((u[:, :rank].T @ target) / s[:rank])
    rest = norm(target - matrix @ found)
    freedom = max(1, len(target) - rank)
    noise = max(rest / math.sqrt(freedom), max(epsilon, rounding) * goal / math.sqrt(len(target)))
    spread = _QUANTILE * noise * np.linalg.norm(vt[:rank] / s[:rank, None], axis=0)
    null = vt[rank:] if rank < len(kept) else vt[:0]
    loose = np.linalg.norm(null, axis=0) > _DEPENDENT
    for k, i in enumerate(kept):
        values[i] = math.nan if loose[k] else float(found[k]) / norms[i]
        errors[i] = math.inf if loose[k] else float(spread[k]) / norms[i]
    for i in set(range(count)) - set(kept):
        values[i] = math.nan
    sums = _sums([kept[k] for k in range(len(kept)) if loose[k]], columns, norms, found, kept)
    return Solution(values, errors, sums, rest / goal if goal else 0.0)


def _sums(
    loose: list[int], columns: Sequence[Vector], norms: Sequence[float], found: Vector, kept: list[int]
) -> list[tuple[list[int], float]]:
    """The groups of columns that are multiples of one another: the sum of their coefficients, in the first's unit."""
    groups: list[list[int]] = []
    for i in loose:
        for group in groups:
            first = group[0]
            cosine = float(columns[i] @ columns[first]) / (norms[i] * norms[first])
            if abs(cosine) > 1 - 1e-9:
                group.append(i)
                break
        else:
            groups.append([i])
    result = []
    for group in groups:
        first = group[0]
        total = 0.0
        for i in group:
            sign = math.copysign(1.0, float(columns[i] @ columns[first]))
            total += sign * float(found[kept.index(i)])
        if len(group) > 1:
            result.append((group, total / norms[first]))
    return result
