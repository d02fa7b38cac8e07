# SPDX-License-Identifier: Apache-2.0
"""What gradaccum.check found in releases of other packages, from the windows that tests/check/history recorded."""

import json
import math
import os
import pathlib
import re
import sys
from typing import Any

import pytest
from gradaccum.check import Coefficient, Window, find
from gradaccum.check._faults import UNKNOWN, remarks
from gradaccum.check._timeline import Factor

ROOT = pathlib.Path(os.environ["GA_HEADER"]).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "check"))

from cases import CASES  # noqa: E402


def made(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass of numbers from JSON, which has null for what is not finite."""
    return kind(**{name: math.nan if value is None else value for name, value in values.items()})


def windows(values: list[dict[str, Any]]) -> list[Window]:
    return [
        made(Window, {
            **each,
            "coefficients": [made(Coefficient, c) for c in each["coefficients"]],
            "factors": [made(Factor, factor) for factor in each["factors"]],
            "rates": [tuple(rates) for rates in each["rates"]],
        }) for each in values
    ]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_found_again(name: str) -> None:
    report = json.loads((ROOT / "tests" / "check" / "reports" / f"{name}.json").read_text())
    (optimizer,) = report["optimizers"]
    seen = windows(optimizer["windows"])
    found = [fault.name for fault in find(seen)]
    if not found and any(UNKNOWN in remark for remark in remarks(seen)):
        found = ["not determined"]
    assert found == CASES[name][2]
    assert len(optimizer["windows"]) >= 3 and all(window["coefficients"] for window in optimizer["windows"])


def test_there_is_no_other_report() -> None:
    assert {path.stem for path in (ROOT / "tests" / "check" / "reports").iterdir()} == set(CASES)


def test_the_page_has_the_verdicts() -> None:
    page = (ROOT / "docs" / "check.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| `history ([\w.-]+)` \| ([^|]+) \|$", page, re.M)
    assert {name: verdict for _, name, verdict in rows} == {
        name: ", ".join(faults) or "no fault" for name, (_, _, faults) in CASES.items()
    }
    for releases, name, _ in rows:
        packages = CASES[name][0].replace("==", " ")
        assert all(release in packages for release in releases.split(", ")), name
