# SPDX-License-Identifier: Apache-2.0
"""A fixture of pytest: whether a training loop accumulates as one large batch would.

A package of its own, since pytest imports its plugins for every test run, of programs that train nothing too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gradaccum.check import Report


@pytest.fixture
def gradaccum_check() -> Callable[..., Report]:
    """A function that calls a training loop with the arguments that follow, and fails the test if it has a fault.

    Returns the report. See gradaccum.check.
    """

    def run(train: Callable[..., Any], *arguments: Any, **options: Any) -> Report:
        __tracebackhide__ = True
        from gradaccum import check

        with check.record() as recording:
            train(*arguments, **options)
        if not recording.report.ok:
            pytest.fail(str(recording.report), pytrace=False)
        return recording.report

    return run
