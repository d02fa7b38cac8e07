# SPDX-License-Identifier: Apache-2.0
"""Updates ahead of the step: Config.eager, and the callback that tells of them."""

import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import gradaccum as ga
import ml_dtypes
import numpy as np
import pytest
from conftest import Array

LAST = ga.MicroOptions(flags=ga.MicroFlags.LAST)


class Training:
    """Two parameters under momentum. The second one is told to be ready first, as in a backward pass."""

    def __init__(self, config: ga.Config, clip: float = 0, dtype: Any = np.float32, **options: Any) -> None:
        random = np.random.default_rng(1)
        self.data = [random.standard_normal(count).astype(dtype) for count in (70001, 5)]
        self.random = random
        self.context = ga.Context(config)
        group = self.context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=0.5, momentum=0.9))
        self.params = [
            self.context.add_param(group, name, data, options=ga.ParamOptions(**options))
            for name, data in zip("wb", self.data, strict=True)
        ]
        if clip:
            self.context.set_clip(ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=clip))

    def window(self) -> ga.StepResult:
        self.context.accumulate(self.gradients())
        with self.context.micro_batch(options=LAST) as micro:
            for param, gradient in reversed(list(zip(self.params, self.gradients(), strict=True))):
                micro.accumulate(param, gradient)
                self.context.ready(param)
        return self.context.step()

    def gradients(self) -> list[Array]:
        return [self.random.standard_normal(data.shape).astype(data.dtype) for data in self.data]


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("nonfinite", [ga.Nonfinite.SKIP_STEP, ga.Nonfinite.IGNORE])
@pytest.mark.parametrize("life", ga.GradientLife)
def test_parameters_are_those_of_the_step(
    threads: int, nonfinite: ga.Nonfinite, life: ga.GradientLife
) -> None:
    told: list[tuple[ga.Param, int]] = []
    plain = Training(ga.Config(nonfinite=nonfinite, gradient_life=life))
    eager = Training(
        ga.Config(
            nonfinite=nonfinite, gradient_life=life, eager=True, eager_threads=threads,
            on_param_done=lambda param: told.append((param, threading.get_ident())),
        )
    )  # fmt: skip
    in_place = nonfinite is ga.Nonfinite.IGNORE
    assert plain.context.memory.eager == 0
    assert (eager.context.memory.eager == 0) == in_place
    for _ in range(4):
        result = plain.window()
        assert (result.eager, result.eager_waited, result.eager_redone) == (0, 0, 0)
        result = eager.window()
        assert (result.eager_waited, result.eager_redone) == (0, 0)
        # The step makes the updates that a thread has not begun with.
        assert result.eager == 2 if threads == 0 else result.eager <= 2
        for ours, theirs in zip(eager.data, plain.data, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert {param for param, _ in told} == set(eager.params) and len(told) == 2
        own = threading.get_ident()
        assert all(thread == own or (in_place and threads > 0) for _, thread in told)
        told.clear()
    assert eager.context.save_bytes() == plain.context.save_bytes()


def test_what_is_updated_in_place_is_there_at_once() -> None:
    done: list[str] = []
    net = Training(
        ga.Config(
            eager=True, nonfinite=ga.Nonfinite.IGNORE, on_param_done=lambda param: done.append(param.name)
        )
    )
    before = net.data[1].copy()
    with (
        pytest.raises(KeyError, match="in backward") as error,
        net.context.micro_batch(options=LAST) as micro,
    ):
        micro.accumulate(net.params[1], np.ones(5, np.float32))
        net.context.ready(net.params[1])
        assert done == ["b"]
        np.testing.assert_array_equal(net.data[1], before - np.float32(0.5))
        raise KeyError("in backward")
    assert "still open" in error.value.__notes__[0] and "in place" in error.value.__notes__[0]
    micro.end()
    assert net.context.step().eager == 1
    assert done == ["b"]


def test_what_waits_and_what_is_made_anew() -> None:
    eager = Training(ga.Config(eager=True, eager_bytes=1 << 10))
    result = eager.window()
    assert (result.eager, result.eager_waited, result.eager_redone) == (1, 1, 0)
    assert 0 < eager.context.memory.eager <= 1 << 10
    plain, eager = Training(ga.Config(), clip=0.5), Training(ga.Config(eager=True), clip=0.5)
    result = plain.window()
    assert result.clip_factor < 1
    result = eager.window()
    assert (result.eager, result.eager_waited, result.eager_redone) == (2, 0, 2)
    for ours, theirs in zip(eager.data, plain.data, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_parameters_that_may_be_written_early() -> None:
    plain = Training(ga.Config(), dtype=ml_dtypes.bfloat16)
    late = Training(ga.Config(eager=True), dtype=ml_dtypes.bfloat16)
    early = Training(ga.Config(eager=True), dtype=ml_dtypes.bfloat16, write_early=True)
    assert early.context.memory.eager < late.context.memory.eager
    for _ in range(3):
        plain.window()
        assert (late.window().eager, early.window().eager) == (2, 2)
        for one, two, three in zip(plain.data, late.data, early.data, strict=True):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one, three)


@pytest.mark.parametrize("threads", [0, 1])
def test_a_callback_must_not_use_its_context(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: errors.append(info.exc_value))

    def misuse(param: ga.Param) -> None:
        for call in (param.context.step, param.context.close):
            try:
                call()
            except ga.Error as error:
                errors.append(error)
        raise KeyError(param.name)

    config = ga.Config(
        eager=True, eager_threads=threads, nonfinite=ga.Nonfinite.IGNORE, on_param_done=misuse
    )
    net = Training(config)
    with net.context.micro_batch(options=LAST) as micro:
        micro.accumulate(net.params[0], net.gradients()[0])
        net.context.ready(net.params[0])
        while len(errors) < 3:  # of the thread, which may run while this one is in no call
            pass
    assert net.context.step().applied
    assert [type(error) for error in errors] == [ga.Error, ga.Error, KeyError]
    assert all(error.status is ga.Status.INVALID_STATE for error in errors[:2])
    assert "callback" in str(errors[1])


def test_a_context_with_a_callback_of_its_own_is_collected() -> None:
    net = Training(ga.Config(eager=True, eager_threads=1, on_param_done=lambda param: None))
    net.window()
    reference = weakref.ref(net.context)
    del net
    gc.collect()
    assert reference() is None


# A thread of the library calls Python while the program ends, or lets go of its context.
PROGRAM = """
import gc, sys, threading, time
import gradaccum as ga
import numpy as np

called = threading.Event()

def done(param):
    called.set()
    del param
    if what == "drop":
        lent.clear()
        gc.collect()
    elif what == "exit":
        time.sleep(0.2)
    print("told")

def begin():
    context = ga.Context(ga.Config(
        eager=True, eager_threads=1, nonfinite=ga.Nonfinite.IGNORE, on_param_done=done))
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1))
    param = context.add_param(group, "w", np.zeros(4, np.float32))
    micro = context.micro_batch(options=ga.MicroOptions(flags=ga.MicroFlags.LAST))
    micro.begin()
    micro.accumulate(param, np.ones(4, np.float32))
    lent.append(context)
    context.ready(param)

what, lent = sys.argv[1], []
begin()
called.wait(20)
if what == "close":
    lent.pop().close()
    print("closed")
"""


@pytest.mark.parametrize(("what", "lines"), [("exit", "told"), ("drop", "told"), ("close", "told closed")])
def test_a_program_ends_while_a_thread_of_the_library_calls_it(what: str, lines: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == lines.split()
