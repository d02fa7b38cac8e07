# SPDX-License-Identifier: Apache-2.0
"""The life of a context: threads, processes, interpreters, callbacks, copies."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import gradaccum as ga
import numpy as np
import pytest
from conftest import Net
from test_tensors import Exporter


def test_a_closed_context_refuses_everything(net: Net) -> None:
    net.context.close()
    net.context.close()
    assert net.context.closed
    for call in (
        net.context.step, net.context.discard, net.params[0].changed, lambda: net.group.lr,
        lambda: net.context.accumulate([None, None]), lambda: net.context.window,
        lambda: net.context.ready(net.params[0]),
    ):  # fmt: skip
        with pytest.raises(ga.Error, match="closed") as error:
            call()
        assert error.value.status is ga.Status.INVALID_STATE
    with ga.Context() as context:
        pass
    assert context.closed


def test_garbage_is_collected() -> None:
    exporter = Exporter()
    context: ga.Context | None = ga.Context()
    assert context is not None
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD))
    param = context.add_param(group, "p", exporter)
    handle = weakref.ref(context._handle)  # type: ignore[arg-type]
    del context, group
    gc.collect()
    assert handle() is not None and exporter.deleted == 0
    del param
    gc.collect()
    assert handle() is None and exporter.deleted == 1


def test_many_contexts_leave_no_memory() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    data = np.zeros(4096, np.float32)
    before = 0
    for number in range(1500):
        context = ga.Context(ga.Config(num_threads=1))
        group = context.add_group(ga.Optimizer(ga.OptimizerKind.ADAMW))
        context.add_param(group, "p", data)
        context.accumulate([np.ones(4096, np.float32)])
        context.step()
        if number % 2:
            context.close()
        if number == 500:
            before = resident()
    quarantine = 512 if os.environ.get("GA_SANITIZE") else 0  # AddressSanitizer holds freed memory back
    assert resident() - before < (8 + quarantine) << 20


def test_two_threads_do_not_share_a_call() -> None:
    context = ga.Context(ga.Config(num_threads=1))
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD))
    data, gradient = np.zeros(1 << 24, np.float32), np.ones(1 << 24, np.float32)
    context.add_param(group, "p", data)
    context.prepare()
    done: list[int] = []

    def work() -> None:
        while not done:
            try:
                context.accumulate([gradient])
            except ga.Error as error:  # this one came second
                assert "in use by another thread" in str(error)

    thread = threading.Thread(target=work)
    thread.start()
    refused = 0
    end = time.monotonic() + 30
    while refused == 0 and time.monotonic() < end:
        try:
            context.window
        except ga.Error as error:
            refused += "in use by another thread" in str(error)
    done.append(1)
    thread.join()
    assert refused


def test_other_threads_run_during_a_call() -> None:
    context = ga.Context(ga.Config(num_threads=1))
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.ADAMW))
    data, gradient = np.zeros(1 << 24, np.float32), np.ones(1 << 24, np.float32)
    context.add_param(group, "p", data)
    for _ in range(10):
        context.accumulate([gradient])
        call: list[float] = []

        def work() -> None:
            call.append(time.perf_counter())
            context.step()
            call.append(time.perf_counter())

        thread = threading.Thread(target=work)
        times = [time.perf_counter()]
        thread.start()
        while len(call) < 2:
            times.append(time.perf_counter())
        thread.join()
        longest = max(b - a for a, b in zip(times, times[1:], strict=False))
        if longest < (call[1] - call[0]) / 2:
            return
    pytest.fail("this thread stood still in each of ten calls of another one")


def test_close_waits_for_a_call() -> None:
    for _ in range(20):
        context = ga.Context(ga.Config(num_threads=1))
        group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD))
        data, gradient = np.zeros(1 << 20, np.float32), np.ones(1 << 20, np.float32)
        context.add_param(group, "p", data)
        errors: list[str] = []

        def work() -> None:
            try:
                while True:
                    context.accumulate([gradient])
            except ga.Error as error:
                errors.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.002)
        context.close()
        thread.join()
        assert errors == ["the context is closed"]


def test_a_log_sees_every_call() -> None:
    lines: list[str] = []
    net = Net(config=ga.Config(log=lines.append))
    net.context.accumulate(net.gradients())
    net.context.step()
    net.context.close()
    assert any("ga_accumulate" in line for line in lines) and any("ga_step" in line for line in lines)


def test_a_log_that_raises_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: told.append(info.exc_value))

    def log(line: str) -> None:
        raise KeyError(line)

    net = Net(config=ga.Config(log=log))
    net.context.accumulate(net.gradients())
    assert net.context.step().applied
    assert told and all(isinstance(error, KeyError) for error in told)


def test_a_callback_must_not_use_its_context() -> None:
    seen: list[str] = []
    holder: list[ga.Context] = []

    def log(line: str) -> None:
        for call in (lambda: holder[0].window, lambda: holder[0].close()):
            try:
                if holder:
                    call()
            except ga.Error as error:
                seen.append(str(error))

    net = Net(config=ga.Config(log=log))
    holder.append(net.context)
    net.context.accumulate(net.gradients())
    assert len(seen) == 2 and all("a callback used the context" in text for text in seen)


def test_contexts_are_not_copied(net: Net) -> None:
    for thing in (net.context, net.group, net.params[0]):
        for make in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=r"save\(\) and load\(\) carry its state"):
                make(thing)
    for plain in (
        ga.Optimizer(ga.OptimizerKind.ADAMW, lr=0.5), ga.Config(accum_steps=3), net.params[0].info, ga.StateOptions(note="n"),
    ):  # fmt: skip
        assert pickle.loads(pickle.dumps(plain)) == plain
        assert copy.deepcopy(plain) == plain
    result = net.context.step()
    assert repr(pickle.loads(pickle.dumps(result))) == repr(result)
    error = ga.Error(2, "why")
    again = pickle.loads(pickle.dumps(error))
    assert (again.status, str(again)) == (ga.Status.INVALID_STATE, "why")
    assert ga.Error(99, "later").status == 99


def test_a_forked_process_makes_its_own_contexts(net: Net) -> None:
    net.context.accumulate(net.gradients())
    net.context.step()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                net.context.accumulate(net.gradients())
            except ga.Error as error:
                code = 2 if error.status is ga.Status.INVALID_STATE and "fork" in str(error) else 3
            net.context.close()
            own = Net()
            own.context.accumulate(own.gradients())
            if code == 2 and own.context.step().applied:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    net.context.accumulate(net.gradients())
    assert net.context.step().applied


def test_a_fork_during_a_call() -> None:
    context = ga.Context(ga.Config(num_threads=1))
    with context._guard:  # as another thread would be
        context._guard.thread = -1
        child = os.fork()
        if child == 0:
            code = 1
            try:
                try:
                    context.window
                except ga.Error as error:
                    code = 0 if "belongs to the process that was forked" in str(error) else 2
                context.close()
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_spawned_processes() -> None:
    out = run(
        "import multiprocessing as m, gradaccum as ga\n"
        "with m.get_context('spawn').Pool(2) as pool:\n"
        "    print(pool.map(ga.device_count, [ga.Device.CPU] * 3))\n"
    )
    assert out.strip() == "[1, 1, 1]"


def test_sub_interpreters_are_refused() -> None:
    code = (
        "import sys, gradaccum as ga\n"
        "try:\n"
        "    import _interpreters as i\n"
        "except ImportError:\n"
        "    import _xxsubinterpreters as i\n"
        "other = i.create()\n"
        "try:\n"
        "    print('refused', i.run_string(other, 'import gradaccum'))\n"
        "except Exception as error:\n"
        "    print('refused', error)\n"
        "i.destroy(other)\n"
        "c = ga.Context()\n"
        "try:\n"
        "    c.set_accum_steps(-1)\n"
        "except ga.Error as error:\n"
        "    print('alive', error)\n"
    )
    out = run(code)
    assert "refused" in out and ("main interpreter" in out or "subinterpreters" in out)
    assert "alive accum_steps" in out


def test_it_ends_with_the_interpreter() -> None:
    out = run(
        "import gradaccum as ga, array\n"
        "c = ga.Context(ga.Config(log=lambda line: None))\n"
        "g = c.add_group(ga.Optimizer(ga.OptimizerKind.SGD))\n"
        "p = c.add_param(g, 'p', array.array('f', [0]))\n"
        "t = ga.Tensor(8, (0,), ga.Dtype.F32, owner=c)\n"
        "k = t.__dlpack__()\n"
        "print('end')\n"
    )
    assert out == "end\n"


def test_the_build_is_described() -> None:
    assert ga.build().version == 10000 * ga.version()[0] + 100 * ga.version()[1] + ga.version()[2]
    assert ga.build_info().startswith(f"libgradaccum {ga.__version__};")
    assert ga.device_count(ga.Device.CPU) == 1 and ga.no_device_reason(ga.Device.CPU) == ""
    if ga.device_count(ga.Device.CUDA) == 0:
        assert ga.no_device_reason(ga.Device.CUDA)
        with pytest.raises(ga.Error) as error:
            ga.Context(ga.Config(device=ga.Device.CUDA))
        assert error.value.status is ga.Status.UNSUPPORTED


def test_a_cpu_has_no_streams(net: Net) -> None:
    with pytest.raises(ga.Error, match="on the CPU") as error:
        net.context.set_stream(0)
    assert error.value.status is ga.Status.UNSUPPORTED
