# SPDX-License-Identifier: Apache-2.0
"""The code of docs/moving for torch runs, and its loops reach what whole batches reach."""

import os
import pathlib
import re
import runpy
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from conftest import Task, close

K = 4  # of the Trainer's block


def blocks() -> dict[str, str]:
    folder = pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "docs" / "moving"
    pages = ("torch", "counting", "accelerate", "lightning", "transformers")
    text = "".join((folder / f"{page}.md").read_text() for page in pages)
    found = dict(re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", text, re.S))
    assert len(found) == text.count("```python")
    return found


def test_the_guide_of_the_package() -> None:
    path = pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "docs" / "python.md"
    first, second = re.findall(r"<!-- test: torch -->\n```python\n(.*?)```", path.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(compile(first, str(path), "exec"), names)
    assert names["optimizer"].result.weight == 39
    exec(compile(second, str(path), "exec"), names)
    assert "exp_avg_codes" in names["optimizer"].state_dict()["state"][0]


def test_the_first_program_makes_the_step_of_one_batch() -> None:
    runpy.run_path(str(pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "examples" / "first" / "first_torch.py"))


def test_the_notebook() -> None:
    folder = pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "docs" / "notebooks"
    subprocess.run([sys.executable, str(folder / "run.py"), str(folder / "torch.ipynb")], check=True)


def test_the_example(tmp_path: pathlib.Path) -> None:
    script = pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "examples" / "python" / "transformer.py"
    command = [sys.executable, str(script), "--steps", "10", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = dict(re.findall(r"^(by hand|gradaccum) .*parameters (\S+) from", done.stdout, re.M))
    assert float(found["gradaccum"]) < 1e-4 < 1e-3 < float(found["by hand"])
    assert len((tmp_path / "transformer.csv").read_text().splitlines()) == 11


def run(name: str, task: Task, clips: bool = True, sizes: tuple[int, ...] = (2, 2, 2, 2)) -> dict[str, Any]:
    lines = [line for line in blocks()[name].splitlines() if clips or "clip_grad_norm_" not in line]
    net = task.net()
    batches = [
        list(zip(task.x[step].split(sizes), task.y[step].split(sizes), strict=True)) for step in range(5)
    ]
    names: dict[str, Any] = {
        "net": net, "torch": torch, "K": len(sizes), "batches": batches, "loss_of": task.loss, "trained": net,
    }  # fmt: skip
    exec(compile("\n".join(lines), f"docs/moving: {name}", "exec"), names)
    return names


def trained(name: str, task: Task, sizes: tuple[int, ...]) -> torch.nn.Module:
    """The network of a block, after a Trainer has run if the block only describes the module."""
    if name.partition("_")[0] in ("accelerate", "lightning"):
        pytest.importorskip(name.partition("_")[0])
    got = run(name, task, clips=name == "ours", sizes=sizes)
    if "Module" in got:
        import lightning

        flat = [micro for batch in got["batches"] for micro in batch]
        module = got["Module"](got["net"])
        steps = got["trainer"].accumulate_grad_batches if "trainer" in got else 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(
                max_epochs=1, accumulate_grad_batches=steps, accelerator="cpu", logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(module, torch.utils.data.DataLoader(flat, batch_size=None))
    net: torch.nn.Module = got["trained"]
    return net


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (3, 2, 2, 1), (5, 3)])
@pytest.mark.parametrize("name", ["ours", "counting", "accelerate", "lightning"])
def test_a_loop_reaches_what_whole_batches_reach(name: str, sizes: tuple[int, ...], task: Task) -> None:
    """By the loop by hand, whose only micro-batch is the batch."""
    want = run("hand", task, clips=name == "ours", sizes=(8,))["trained"]
    if sizes == (2, 2, 2, 2):  # alike, so that the loop by hand is right
        close(want, run("hand", task, clips=name == "ours")["trained"], 1e-12)
    close(want, trained(name, task, sizes), 1e-12)


@pytest.mark.parametrize("name", ["accelerate_theirs", "lightning_theirs"])
@pytest.mark.filterwarnings("ignore")
def test_a_loop_of_theirs_does_so_with_equal_micro_batches(name: str, task: Task) -> None:
    want = run("hand", task, clips=False, sizes=(8,))["trained"]
    close(want, trained(name, task, (2, 2, 2, 2)), 1e-12)
    with pytest.raises(AssertionError):
        close(want, trained(name, task, (3, 2, 2, 1)), 1e-3)
