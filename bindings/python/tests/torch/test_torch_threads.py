# SPDX-License-Identifier: Apache-2.0
"""Threads of the library beside those of torch: how many, and of which OpenMP runtime."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

# In processes of their own: libraries and threads of OpenMP stay. All parameters end as a hash.
PROGRAM = """
import hashlib, os, sys
if sys.argv[1] == "gradaccum":
    import gradaccum as ga
import torch
import gradaccum as ga
import gradaccum.torch as gt

def threads():
    return len(os.listdir("/proc/self/task"))

torch.manual_seed(0)
torch.set_num_threads(1)
w = torch.nn.Parameter(torch.randn(1 << 21))
gradients = [torch.randn(1 << 21) for _ in range(8)]
before = threads()
torch.set_num_threads(int(sys.argv[2]))
optimizer = gt.AdamW([w], config=ga.Config(num_threads=int(sys.argv[3])))
for i, gradient in enumerate(gradients):
    w.grad = gradient
    optimizer.accumulate()
    if i % 4 == 3:
        optimizer.step()
    if len(sys.argv) > 4:  # torch's threads between those of the library
        torch.ones(1 << 22).sqrt()
made = threads() - before
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
print(made, hashlib.sha256(w.detach().numpy().tobytes()).hexdigest(), *sorted(loaded))
"""


def run(first: str, torchs: int, ours: int, *both: str, **environment: str) -> tuple[int, str, list[str]]:
    command = [sys.executable, "-c", PROGRAM, first, str(torchs), str(ours), *both]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    made, digest, *loaded = done.stdout.split()
    return int(made), digest, loaded


@pytest.mark.parametrize("torchs, ours, want", [(3, 0, 3), (1, 3, 3)])
def test_num_threads_is_that_of_torch(torchs: int, ours: int, want: int) -> None:
    made, _, _ = run("torch", torchs, ours)
    assert made == want - 1


@pytest.mark.parametrize("first", ["torch", "gradaccum"])
def test_there_is_one_runtime(first: str) -> None:
    """Both need a libgomp.so.1: what is loaded first serves both, and its threads are shared."""
    made, _, loaded = run(first, 3, 0, "both")
    assert made == 2
    assert len(loaded) == 1
    assert ("/torch/" in loaded[0]) == (first == "torch")


def test_two_runtimes_give_the_same_bits(tmp_path: pathlib.Path) -> None:
    """As with a torch whose OpenMP has another name: the library and a libgomp under a new one."""
    library = pathlib.Path(os.environ["GA_LIBRARY"])
    found = re.search(r"libgomp\.so\.1 => (\S+)", subprocess.check_output(["ldd", library], text=True))
    assert found
    for source, name in ((library, "libgradaccum.so.0"), (pathlib.Path(found[1]), "libgomp.so.9")):
        (tmp_path / name).write_bytes(source.read_bytes().replace(b"libgomp.so.1\0", b"libgomp.so.9\0"))
    _, one, _ = run("torch", 3, 0, "both")
    # torch makes the symbols of its runtime global, so a library that is loaded later uses them. One that was
    # loaded before torch has a thread, unless it is given a number.
    for first, ours, want in (("torch", 0, 2), ("gradaccum", 0, 2), ("gradaccum", 3, 4)):
        made, two, loaded = run(first, 3, ours, "both", LD_LIBRARY_PATH=str(tmp_path))
        assert len(loaded) == 2
        assert made == want, (first, ours)
        assert two == one
