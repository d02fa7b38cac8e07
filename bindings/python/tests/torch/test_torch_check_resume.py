# SPDX-License-Identifier: Apache-2.0
"""gradaccum.check --resume: a run that was stopped and resumed makes the steps of one that was not."""

import copy
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradaccum import check
from gradaccum.check import _resume
from gradaccum.check._faults import Fault
from gradaccum.check._journal import Journal

LAST, SAVED = 20, 10  # micro-batches, and those before the checkpoint


def train(state: dict[str, Any] | None, lost: str = "", saved: int = SAVED) -> dict[str, Any]:
    """Windows of 4 micro-batches, from a checkpoint or from the beginning. Returns the checkpoint.

    lost: what of the checkpoint is not used
    """
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))
    optimizer = torch.optim.AdamW(network.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    begin, checkpoint = 0, {}
    if state is not None:
        begin = state["next"] + (4 if lost == "data" else 0)
        if lost != "parameters":
            network.load_state_dict(state["network"])
        if lost != "optimizer":
            optimizer.load_state_dict(state["optimizer"])
        if lost == "optimizer":
            optimizer.param_groups[0]["lr"] = state["optimizer"]["param_groups"][0]["lr"]
        if lost != "schedule":
            schedule.load_state_dict(state["schedule"])
        if lost != "gradients":
            for parameter, gradient in zip(network.parameters(), state["gradients"], strict=True):
                parameter.grad = gradient
    for i in range(begin, LAST):
        random = torch.Generator().manual_seed(i)
        x, y = torch.randn(4, 20, generator=random), torch.randint(0, 5, (4,), generator=random)
        (F.cross_entropy(network(x), y) / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if i == saved - 1:
            checkpoint = copy.deepcopy({
                "network": network.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                "gradients": [parameter.grad for parameter in network.parameters()], "next": i + 1,
            })  # fmt: skip
    return checkpoint


def journal(folder: pathlib.Path, *arguments: Any) -> tuple[list[_resume.Run], dict[str, Any]]:
    """The windows of the optimizer in a run, and its checkpoint."""
    written = Journal(str(folder / "journal"), stops=False)
    with check.Recording(None, None, None, written):
        checkpoint = train(*arguments)
    written.write()
    (windows,) = json.loads((folder / "journal").read_text())["windows"].values()
    return windows, checkpoint


@pytest.mark.parametrize("saved", [SAVED, 8])
@pytest.mark.parametrize("lost, name", [
    ("", ""), ("gradients", "micro-batches lost at a resume"), ("parameters", "parameters lost at a resume"),
    ("optimizer", "optimizer state lost at a resume"), ("schedule", "schedule lost at a resume"),
    ("data", "other data after a resume"),
])  # fmt: skip
def test_what_is_lost_is_named(tmp_path: pathlib.Path, saved: int, lost: str, name: str) -> None:
    whole, checkpoint = journal(tmp_path, None, "", saved)
    assert len(whole) == 5 and [window["micro_batches"] for window in whole] == [4] * 5
    resumed, _ = journal(tmp_path, checkpoint, lost, saved)
    found: Fault | None = _resume._fault(resumed, whole, saved // 4, saved % 4)
    if saved % 4 == 0 and lost == "gradients":
        name = ""  # there were none
    if saved % 4 and lost == "data":
        name = "micro-batches lost at a resume"  # those that it leaves out are of the open window
    assert (found.name if found else "") == name, found
    assert found is None or found.windows and found.fix and found.library


def test_windows_that_are_missing_are_told(tmp_path: pathlib.Path) -> None:
    whole, checkpoint = journal(tmp_path, None)
    resumed, _ = journal(tmp_path, checkpoint)
    found = _resume._fault(resumed[:-1], whole, 2, 2)
    assert found is not None and found.name == "other windows after a resume"


PROGRAM = """
import sys
import torch, gradaccum.torch as gt
import torch.nn.functional as F

torch.manual_seed(1)
network = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))
optimizer = gt.AdamW(network.parameters(), lr=0.01, accum_steps=4)
begin = 0
if "--resume" in sys.argv:
    state = torch.load("last.pt", weights_only=False)
    network.load_state_dict(state["network"])
    if "--loses" not in sys.argv:
        optimizer.load_state_dict(state["optimizer"])
    begin = state["next"]
for i in range(begin, 20):
    random = torch.Generator().manual_seed(i)
    x, y = torch.randn(4, 20, generator=random), torch.randint(0, 5, (4,), generator=random)
    optimizer.backward(F.cross_entropy(network(x), y), weight=4)
    optimizer.step()
    optimizer.zero_grad()
    if "--saves" in sys.argv and i % 5 == 4:
        torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict(), "next": i + 1}, "last.pt")
    print("micro-batch", i, flush=True)
"""


def run(folder: pathlib.Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "gradaccum.check", "--resume=--resume", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ)


def test_the_command(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, "--json", "report.json", "train.py", "--saves")
    assert done.returncode == 0 and "No fault was found in" in done.stderr, done.stderr
    assert "stopped after a checkpoint with 1 micro-batches in the window" in done.stderr
    assert done.stdout.count("micro-batch 4\n") == 2 and done.stdout.count("micro-batch 5\n") == 2
    assert json.loads((tmp_path / "report.json").read_text())["ok"] is True
    done = run(tmp_path, "train.py", "--saves", "--loses")
    assert done.returncode == 1 and "lost at a resume" in done.stderr, done.stderr


def test_a_program_that_saves_nothing(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, "train.py")
    assert done.returncode == 2 and "nothing was compared" in done.stderr, done.stderr
