#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run.py NOTEBOOK ...: runs the cells of notebooks one after the other, without Jupyter. A cell that raises ends it."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

for path in map(pathlib.Path, sys.argv[1:]):
    names: dict[str, Any] = {"__name__": path.stem}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            if cell["outputs"] or cell["execution_count"] is not None:
                raise SystemExit(f"{path}: cell {cell['id']} has outputs; notebooks are kept without them")
            exec(compile("".join(cell["source"]), f"{path}: cell {cell['id']}", "exec"), names)
