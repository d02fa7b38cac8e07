# SPDX-License-Identifier: Apache-2.0
"""The pages of the API are made without a warning, and have every public name."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

import gradaccum
import gradaccum.check
import gradaccum.torch
import pytest


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    pytest.importorskip("pdoc", reason="pdoc is not installed")
    guide = pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "docs" / "python.md"
    (line,) = re.findall(r"^python (-m pdoc .*)$", guide.read_text(), re.M)
    folder = tmp_path_factory.mktemp("pages")
    command = [sys.executable, "-W", "error", *shlex.split(line)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warn" not in done.stderr, done.stderr
    return folder / "pages"


@pytest.mark.parametrize("module", [gradaccum, gradaccum.check, gradaccum.torch], ids=lambda module: module.__name__)
def test_every_public_name_has_its_place(pages: pathlib.Path, module: types.ModuleType) -> None:
    text = pages.joinpath(*module.__name__.split(".")).with_suffix(".html").read_text()
    places = set(re.findall(r'id="([\w.]+)"', text))
    assert set(module.__all__) <= places
    members = {f"{name}.{member}" for name in module.__all__ for member in dir(getattr(module, name))}
    assert len(members & places) > len(module.__all__)


def test_there_is_nothing_else(pages: pathlib.Path) -> None:
    found = {str(path.relative_to(pages)) for path in pages.rglob("*.html")}
    assert found == {"index.html", "gradaccum.html", "gradaccum/check.html", "gradaccum/torch.html"}
