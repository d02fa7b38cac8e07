# SPDX-License-Identifier: Apache-2.0
"""The code of the documentation runs."""

import os
import pathlib
import re

import gradaccum as ga
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


def test_the_names_of_the_guide_exist() -> None:
    for name in ("Context", "Group", "Param", "BatchNorm", "Tensor", "Error"):
        assert getattr(ga, name).__doc__
