# SPDX-License-Identifier: Apache-2.0
"""Which work makes threads."""

import subprocess
import sys

import pytest

# In a process of its own: threads of OpenMP stay.
PROGRAM = """
import os, sys
import gradaccum as ga
import numpy as np

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
elements, config = int(sys.argv[1]), ga.Config(num_threads=int(sys.argv[2]))
weight = np.zeros(elements, np.float32)
with ga.Context(config) as context:
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.ADAMW, lr=1e-3))
    context.add_param(group, "weight", weight)
    for _ in range(4):
        context.accumulate([np.ones(elements, np.float32)])
    context.step()
    print(threads() - before)
"""


def made(elements: int, num_threads: int) -> int:
    command = [sys.executable, "-c", PROGRAM, str(elements), str(num_threads)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("num_threads", [0, 3])
def test_small_work_stays_on_the_thread_of_the_call(num_threads: int) -> None:
    assert made(1000, num_threads) == 0


def test_large_work_has_as_many_threads_as_were_asked_for() -> None:
    assert made(1 << 21, 1) == 0
    assert made(1 << 21, 3) == 2
