# SPDX-License-Identifier: Apache-2.0
"""Does a run that was stopped and resumed make the steps of one that was not?"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._faults import Fault
from ._report import Optimizer, Report

# Variables of the environment of a program that is run for the comparison.
JOURNAL = "GRADACCUM_CHECK_JOURNAL"
STOPS = "GRADACCUM_CHECK_STOPS"
_ALIKE = 1e-5  # how far the gradients of two windows may be from one another, as a part of their norm
Run = dict[str, Any]


def compare(program: Sequence[str], resume: str, windows: int) -> Report:
    """Runs a program until it has saved a checkpoint in the middle of a window, resumes it, and runs it whole.

    :param program: its file and its arguments
    :param resume: the arguments that make it resume, which come after them
    :param windows: how many windows of an optimizer are watched
    """
    arguments = list(program)
    with tempfile.TemporaryDirectory() as folder:
        stopped = _run(arguments, f"{folder}/stopped", windows, stops=True)
        if not stopped["is_stopped"]:
            said = ["The program saved no checkpoint by torch.save(), and was not stopped: nothing was compared."]
            return Report(shlex.join(arguments), [], said)
        resumed = _run([*arguments, *shlex.split(resume)], f"{folder}/resumed", windows)
        whole = _run(arguments, f"{folder}/whole", windows)
    said, found, compared = [], [], 0
    saved = stopped["saves"][-1] if stopped["saves"] else 0
    if saved:
        said.append(f"The program was stopped after a checkpoint with {saved} micro-batches in the window.")
    else:
        said.append("The program saves between windows alone: it was stopped after a checkpoint there.")
    for name, right in whole["windows"].items():
        early = stopped["windows"].get(name, [])
        if not all(_is_like(a, b) for a, b in zip(early, right, strict=False)):
            said.append(f"{name}: two runs differ before the checkpoint, and nothing can be said: seed random numbers.")
            continue
        windows_of = resumed["windows"].get(name, [])
        fault = _fault(windows_of, right, len(early), saved, windows)
        found.append(Optimizer(f"{name}, resumed", [], [fault] if fault else []))
        compared += len(windows_of)
    return Report(f"{shlex.join(arguments)}, resumed by {resume}", found, said, compared=compared)


def _run(arguments: Sequence[str], path: str, windows: int, *, stops: bool = False) -> Run:
    """The journal of a run, whose output is shown. SystemExit: the program failed."""
    environment = {**os.environ, JOURNAL: path, STOPS: str(int(stops))}
    command = [sys.executable, "-m", "gradaccum.check", "--windows", str(windows), *arguments]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        sys.exit(code)
    with open(path, encoding="utf-8") as file:
        found: Run = json.load(file)
    return found


def _is_like(a: Run, b: Run) -> bool:
    return all(_distance(a[name], b[name]) <= _ALIKE for name in ("gradient", "parameters"))


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Relative."""
    scale = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    return float(np.linalg.norm(np.subtract(a, b))) / scale if scale else 0.0


def _fault(resumed: list[Run], whole: list[Run], first: int, saved: int, limit: float = math.inf) -> Fault | None:
    """What is not as in the whole run.

    first: the windows before the checkpoint
    saved: micro-batches in the window of the checkpoint
    limit: how many windows were watched at most
    """
    for index, (a, b) in enumerate(zip(resumed, whole[first:], strict=False)):
        at = first + index
        where = f"window {at + 1}"
        if _distance(a["parameters"], b["parameters"]) > _ALIKE:
            if index == 0:
                return Fault("parameters lost at a resume", f"{where} began with other parameters", "", 1.0, [at])
            text = f"the step before {where} had the same gradient and rate, and led to other parameters"
            return Fault("optimizer state lost at a resume", text, "", 1.0, [at])
        if _distance(a["gradient"], b["gradient"]) > _ALIKE:
            own, expected = a["micro_batches"], b["micro_batches"]
            if index == 0 and saved:
                text = (
                    f"{where}, of {expected} micro-batches, had {saved} in the checkpoint, and was stepped with {own} "
                    "others, but not with the same gradient"
                )
                return Fault("micro-batches lost at a resume", text, "", 1.0, [at])
            return Fault("other data after a resume", f"{where} had another gradient", "", 1.0, [at])
        if not np.allclose(a["rates"], b["rates"], rtol=_ALIKE, atol=0.0):
            rates, right = (", ".join(f"{rate:g}" for rate in each["rates"]) for each in (a, b))
            text = f"{where} had the learning rate {rates}, and {right} in the whole run"
            return Fault("schedule lost at a resume", text, "", 1.0, [at])
    if len(whole) < limit and first + len(resumed) != len(whole):
        text = f"{first} steps before the checkpoint and {len(resumed)} after it were {len(whole)} in the whole run"
        return Fault("other windows after a resume", text, "", 1.0, [first + len(resumed)])
    return None
