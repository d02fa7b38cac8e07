# SPDX-License-Identifier: Apache-2.0
"""The torch adapter and gradaccum.check are typed, and the adapter has the arguments of torch's optimizers."""

import inspect
import os
import pathlib
import subprocess
import sys

import gradaccum.torch as gt
import pytest
import torch


def test_types_are_strict(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    folder = pathlib.Path(gt.__file__).parents[1]
    done = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "-p", "gradaccum.torch",
            "-p", "gradaccum.check", "-p", "gradaccum_pytest",
        ],
        env={**os.environ, "MYPYPATH": str(folder.parent)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", [name for name in gt.__all__ if hasattr(torch.optim, name)])
def test_the_signature_is_that_of_torch(name: str) -> None:
    if name == "Optimizer":
        return
    ours = inspect.signature(getattr(gt, name)).parameters
    for key, theirs in inspect.signature(getattr(torch.optim, name)).parameters.items():
        assert key in ours, key
        assert ours[key].kind == theirs.kind, key
        assert ours[key].default == theirs.default, key
