# SPDX-License-Identifier: Apache-2.0
"""The Keras adapter is typed."""

import os
import pathlib
import subprocess
import sys

import gradaccum.keras as gk
import pytest


def test_types_are_strict(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    folder = pathlib.Path(gk.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "-p", "gradaccum.keras"],
        env={**os.environ, "MYPYPATH": str(folder.parent)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
