# SPDX-License-Identifier: Apache-2.0
"""gradaccum.check in loops that need no framework: what they tell, and how multiples are found."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gradaccum import check
from gradaccum.check._sketch import Sketch
from gradaccum.check._solve import solve

SIZES = [[4, 4, 4, 4], [8, 2, 1], [3, 5]]


def train(
    recording: check.Recording | None, windows: Sequence[Sequence[int]] = SIZES, weigh: Any = lambda n, sizes: n / sum(sizes)
) -> Any:
    """Least squares by hand. weigh: what a micro-batch of n samples is multiplied by."""
    random = np.random.default_rng(5)
    matrix, bias = random.normal(size=(6, 3)), np.zeros(3)
    for sizes in windows:
        total = {"matrix": np.zeros_like(matrix), "bias": np.zeros_like(bias)}
        for n in sizes:
            x, y = random.normal(size=(n, 6)), random.normal(size=(n, 3))
            error = 2 * (x @ matrix + bias - y) / n
            gradients = {"matrix": x.T @ error, "bias": error.sum(0)}
            if recording is not None:
                recording.micro_batch(gradients, weight=n)
            for name, gradient in gradients.items():
                total[name] += weigh(n, sizes) * gradient
        if recording is not None:
            recording.step(total)
        matrix, bias = matrix - 0.1 * total["matrix"], bias - 0.1 * total["bias"]
    return matrix


def told(**options: Any) -> check.Report:
    with check.record() as recording:
        train(recording, **options)
    return recording.report


def test_what_a_program_tells_is_enough() -> None:
    report = told()
    assert report.ok and not report.remarks, report
    assert [len(window.coefficients) for window in report.optimizers[0].windows] == [4, 3, 2]
    values = [c.value for c in report.optimizers[0].windows[1].coefficients]
    assert values == pytest.approx([8 / 11, 2 / 11, 1 / 11], rel=1e-12)


@pytest.mark.parametrize("name, weigh", [
    ("sum for mean", lambda n, sizes: 1.0),
    ("mean of means over uneven micro-batches", lambda n, sizes: 1 / len(sizes)),
    ("tail divided by N", lambda n, sizes: 1 / 4),
])  # fmt: skip
def test_what_it_does_wrong_is_named(name: str, weigh: Any) -> None:
    report = told(windows=[[4, 4, 4, 4], [4, 4]] if name.startswith("tail") else SIZES, weigh=weigh)
    assert [fault.name for fault in report.faults] == [name], report
    assert "test_check.py" in report.faults[0].where


def test_a_lost_micro_batch_and_one_that_is_not_finite() -> None:
    report = told(weigh=lambda n, sizes: 0.25 if n == 4 else float(n == 8))
    assert [fault.name for fault in report.faults] == ["micro-batch lost"] or "dropped" in str(report)
    with check.record() as recording:
        for broken in (False, True):
            gradients = list(np.random.default_rng(broken).normal(size=(2, 12)))
            if broken:
                gradients[1][3] = np.nan
            for gradient in gradients:
                recording.micro_batch([gradient], weight=4)
            recording.step([gradients[0] if broken else (gradients[0] + gradients[1]) / 2])
    report = recording.report
    assert not report.faults and "dropped" in str(report), report
    with check.record() as recording:
        gradients = list(np.random.default_rng(7).normal(size=(2, 12)))
        gradients[1][3] = np.nan
        for gradient in gradients:
            recording.micro_batch([gradient], weight=4)
        recording.step([(gradients[0] + np.nan_to_num(gradients[1])) / 2])
    assert [fault.name for fault in recording.report.faults] == ["a non-finite micro-batch swallowed"]


def test_a_sum_tells_its_terms_too() -> None:
    with check.record() as recording:
        random = np.random.default_rng(3)
        sums = [random.normal(size=12) * n for n in (8, 2)]
        for n, gradient in zip((8, 2), sums, strict=True):
            recording.micro_batch([gradient], weight=n, reduction="sum")
        recording.step([sum(sums) / 10])
    report = recording.report
    assert report.ok, report
    assert [c.value for c in report.optimizers[0].windows[0].coefficients] == pytest.approx([0.8, 0.2])


def test_a_recording_changes_nothing_and_needs_its_end() -> None:
    with check.record() as recording:
        watched = train(recording)
        with pytest.raises(RuntimeError, match="within the with block"):
            recording.report
    assert np.array_equal(watched, train(None))
    with pytest.raises(RuntimeError, match="entered twice"), recording:
        pass
    train(recording)  # after the end, nothing is told
    assert len(recording.report.optimizers[0].windows) == len(SIZES)
    with check.record() as recording, pytest.raises(TypeError, match="expected a tensor of torch, TensorFlow or JAX"):
        recording.loss(np.float64(1), weight=3)


def test_what_an_optimizer_has_may_grow() -> None:
    with check.record() as recording:
        random = np.random.default_rng(2)
        for names in ("a", "a", "ab", "ab"):
            gradients = [{name: random.normal(size=12) for name in names} for _ in range(2)]
            for gradient in gradients:
                recording.micro_batch(gradient, weight=4)
            recording.step({name: (gradients[0][name] + gradients[1][name]) / 2 for name in names})
    assert recording.report.ok and len(recording.report.optimizers[0].windows) == 4, recording.report


def test_what_is_kept_of_a_window_is_small() -> None:
    with check.record() as recording:
        train(recording, [[4, 4]] * 30)
        traces: Any = recording._series.traces()[0][1]
        kept = [each.added for trace in traces for each in trace.contributions]
        assert len(traces) == 30 and all(added is None for added in kept) and len(recording._series._entries) <= 4
        assert [trace.gradient is None and trace.target is None for trace in traces] == [True] * 29 + [False]  # with the last one's gradient


def test_recordings_within_one_another_see_the_same() -> None:
    with check.record() as outer, check.record() as inner:
        train(outer)
    for report in (outer.report, inner.report):
        assert report.ok and len(report.optimizers[0].windows) == len(SIZES), report


def test_windows_end_the_watching() -> None:
    with check.record(windows=2) as recording:
        train(recording, [[4, 4]] * 5)
    assert len(recording.report.optimizers[0].windows) == 2


def test_sketches_are_linear_and_keep_norms() -> None:
    random = np.random.default_rng(0)
    for size in (1, 127, 128, 129, 4095, 4096, 4097, 70000, 300001):
        sketch = Sketch()
        for dtype in (np.float64, np.float32, np.float16):
            x, y = random.normal(size=(2, size)).astype(dtype)
            found = sketch.of(3, x) * 2 - sketch.of(3, y)
            difference = x.astype(np.float64) * 2 - y
            exact = sketch.of(3, difference)
            norm = np.linalg.norm(exact)
            assert np.linalg.norm(found - exact) <= 1e-6 * norm
            assert norm / np.linalg.norm(difference) == pytest.approx(1, abs=0.35)
    row = np.zeros((4, 300000))  # a gradient of softmax: the sum over classes is 0 everywhere
    row[0], row[3] = 1, -1
    assert np.linalg.norm(Sketch().of(0, row)) > 100


def test_solutions_are_as_exact_as_their_condition() -> None:
    random = np.random.default_rng(0)
    epsilon = 2.0**-52
    for _ in range(200):
        columns, rows = int(random.integers(1, 9)), 128
        condition = 10 ** (8 * random.random())
        u = np.linalg.qr(random.normal(size=(rows, columns)))[0]
        v = np.linalg.qr(random.normal(size=(columns, columns)))[0]
        matrix = (u * np.logspace(0, -math.log10(condition), columns)) @ v.T
        wanted = random.normal(size=columns)
        found = solve(list(matrix.T), matrix @ wanted, epsilon)
        norms = np.linalg.norm(matrix, axis=0)
        for i, value in enumerate(found.values):
            error = abs(value - wanted[i]) * norms[i]
            assert error <= 10 * condition * epsilon * np.linalg.norm(wanted * norms)


def test_what_is_not_determined_is_not_told() -> None:
    random = np.random.default_rng(0)
    a, b, noise = random.normal(size=(3, 100))
    found = solve([a, b, 2 * b, np.zeros(100)], 0.5 * a + 3 * b, 1e-15)
    assert found.values[0] == pytest.approx(0.5)
    assert [math.isnan(value) for value in found.values] == [False, True, True, True]
    assert found.sums == [([1, 2], pytest.approx(3))]
    found = solve([a, b], 0.5 * a + 3 * b + 0.1 * noise, 1e-15)
    for value, error, right in zip(found.values, found.errors, (0.5, 3), strict=True):
        assert abs(value - right) < error < 0.1
