# SPDX-License-Identifier: Apache-2.0
"""The code of the documentation runs."""

import os
import pathlib
import re
import runpy

from collections.abc import Iterator, Mapping
from typing import Any

import gradaccum as ga
import numpy as np
import pytest


def test_the_code_of_the_guide_runs() -> None:
    guide = pathlib.Path(os.environ.get("GA_HEADER", "")).parents[2:3]
    path = pathlib.Path(*guide, "docs", "python.md")
    if not path.exists():
        pytest.skip("docs/python.md is not beside GA_HEADER")
    blocks = re.findall(r"<!-- test -->\n```python\n(.*?)```", path.read_text(), re.S)
    assert len(blocks) == 1
    for block in blocks:
        exec(compile(block, str(path), "exec"), {})
    lines = [line for line in blocks[0].splitlines() if line and "import" not in line]
    assert len(lines) <= 10


@pytest.mark.parametrize("page", ["first-window.md", "mixed-precision.md", "clipping.md"])
def test_the_blocks_of_a_page_run_one_after_the_other(page: str) -> None:
    text = (pathlib.Path(os.environ.get("GA_HEADER", "")).parents[2] / "docs" / page).read_text()
    blocks = re.findall(r"<!-- test: \w+ -->\n```python\n(.*?)```", text, re.S)
    assert len(blocks) == text.count("```python") > 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_the_first_program_makes_the_step_of_one_batch() -> None:
    path = pathlib.Path(os.environ.get("GA_HEADER", "")).parents[2] / "examples" / "first" / "first.py"
    runpy.run_path(str(path))


def test_the_names_of_the_guide_exist() -> None:
    for name in ("Context", "Group", "Param", "BatchNorm", "Tensor", "Error"):
        assert getattr(ga, name).__doc__


class Regression:
    """Mean squared errors of a linear layer with a scale, whose gradients are large enough to be clipped."""

    def __init__(self) -> None:
        random = np.random.default_rng(11)
        self.x = random.normal(size=(24 * 8, 5)) * 3
        self.y = random.normal(size=(24 * 8, 4))
        self.begin = {
            "dense/kernel": random.normal(size=(5, 4)), "dense/bias": np.zeros(4), "LayerNorm/gamma": np.ones(4),
        }  # fmt: skip

    def batches(self, size: int) -> Iterator[np.ndarray[Any, Any]]:
        yield from np.split(np.arange(len(self.x)), len(self.x) // size)

    def gradients(self, at: Mapping[str, Any], batch: np.ndarray[Any, Any]) -> list[Any]:
        kernel, bias, gamma = at.values()
        hidden = self.x[batch] @ kernel + bias
        off = 2 * (hidden * gamma - self.y[batch]) / (len(batch) * 4)
        return [self.x[batch].T @ (off * gamma), (off * gamma).sum(0), (off * hidden).sum(0)]


def bert_recipe(task: Regression, steps: int, first: int) -> dict[str, Any]:
    """create_optimizer() of BERT's release, in float64, on windows of 4 micro-batches of which the first has `first`.

    https://github.com/google-research/bert/blob/master/optimization.py, with the accumulation that
    https://github.com/hpandana/gradient-accumulation-tf-estimator describes.
    """
    weights = {name: value.copy() for name, value in task.begin.items()}
    m, v = ({name: np.zeros_like(value) for name, value in weights.items()} for _ in range(2))
    added = [np.zeros_like(value) for value in weights.values()]
    total, warmup = 4 * steps, 4 * (steps // 10)
    for micro_batch, batch in enumerate(task.batches(2)):
        added = [a + g for a, g in zip(added, task.gradients(weights, batch), strict=True)]
        if (micro_batch + 1) % 4 != first % 4:
            continue
        global_step = micro_batch + 1 - 4 if first == 4 else micro_batch
        rate = 2e-5 * (global_step / warmup if global_step < warmup else 1 - min(global_step, total) / total)
        mean = [a / 4 for a in added]
        norm = np.sqrt(sum(np.sum(a**2) for a in mean))
        for (name, w), g in zip(weights.items(), mean, strict=True):
            g = g / max(norm, 1.0)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            update = m[name] / (np.sqrt(v[name]) + 1e-6)
            if not any(part in name for part in ("LayerNorm", "layer_norm", "bias")):
                update = update + 0.01 * w
            w -= rate * update
        added = [np.zeros_like(a) for a in added]
    return weights


def test_the_recipe_of_bert() -> None:
    path = pathlib.Path(os.environ.get("GA_HEADER", "")).parents[2] / "docs" / "moving" / "bert.md"
    (block,) = re.findall(r"<!-- test: bert -->\n```python\n(.*?)```", path.read_text(), re.S)
    task = Regression()
    parameters = {name: value.copy() for name, value in task.begin.items()}
    names: dict[str, Any] = {
        "parameters": parameters, "batches": task.batches(2), "steps": 24,
        "gradients_of": lambda batch: task.gradients(parameters, batch),
    }  # fmt: skip
    exec(compile(block, str(path), "exec"), names)
    want = bert_recipe(task, steps=24, first=4)
    apart = {
        first: max(
            float(np.abs(found[name] - want[name]).max() / np.abs(want[name] - task.begin[name]).max())
            for name in want
        )
        for first, found in ((4, parameters), (1, bert_recipe(task, steps=24, first=1)))
    }
    assert apart[4] < 1e-10
    assert apart[1] > 1e-2  # the recipe as it was shared: each window is one micro-batch late
