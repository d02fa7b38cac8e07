# SPDX-License-Identifier: Apache-2.0
"""State by name, and on disk."""

import io
import os
import pathlib
import subprocess
import sys
from typing import Any

import gradaccum as ga
import numpy as np
import pytest
from conftest import Net

ADAMW = ga.Optimizer(ga.OptimizerKind.ADAMW, lr=0.01)


def windows(net: Net, count: int) -> None:
    for _ in range(count):
        for _ in range(2):
            net.context.accumulate(net.gradients())
        net.context.step()


def same(a: Net, b: Net) -> bool:
    return a.w.tobytes() == b.w.tobytes() and a.b.tobytes() == b.b.tobytes()


def test_a_run_goes_on_in_the_middle_of_a_window(tmp_path: pathlib.Path) -> None:
    first = Net(ADAMW)
    windows(first, 2)
    first.context.accumulate(first.gradients())
    path = tmp_path / "run.safetensors"
    first.context.save(path, ga.StateOptions(note="epoch 3, čas"))
    file = io.BytesIO(b"head")
    file.seek(4)
    first.context.save(file)
    memory = first.context.save_bytes()
    assert ga.state_note(path) == "epoch 3, čas"
    rest = first.gradients()
    first.context.accumulate(rest)
    first.context.step()
    for source in (path, str(path), file, memory, bytes(memory), memoryview(memory)):
        second = Net(ADAMW)
        if source is file:
            file.seek(4)
        second.context.load(source)
        assert second.context.window.micro_batches == 1 and second.context.window.steps == 2
        second.context.accumulate(rest)
        second.context.step()
        assert same(first, second)


def test_a_file_of_the_reference_can_be_read(net: Net) -> None:
    import json

    data = bytes(net.context.save_bytes(ga.StateOptions(parts=ga.StateParts.PARAMETERS)))
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    start, end = header["w"]["data_offsets"]
    values = np.frombuffer(data[8 + size + start : 8 + size + end], np.float32)
    np.testing.assert_array_equal(values.reshape(3, 4), net.w)
    assert ga.state_note  # the file has none
    assert header["w"]["shape"] == [3, 4]


def test_settings_that_differ_are_refused_or_taken() -> None:
    data = Net(ADAMW).context.save_bytes()
    other = Net(ga.Optimizer(ga.OptimizerKind.ADAMW, lr=0.5))
    with pytest.raises(ga.Error, match="lr") as error:
        other.context.load(data)
    assert error.value.status is ga.Status.INVALID_ARGUMENT
    other.context.load(data, ga.StateOptions(settings=ga.Settings.TAKE))
    assert other.group.lr == 0.01


def test_progress_ends_a_save(net: Net, tmp_path: pathlib.Path) -> None:
    calls: list[tuple[int, int]] = []
    path = tmp_path / "run.safetensors"
    net.context.save(path, ga.StateOptions(progress=lambda done, of: calls.append((done, of))))
    assert calls and all(0 <= done <= of for done, of in calls)
    old = path.read_bytes()
    windows(net, 1)
    with pytest.raises(ga.Error) as error:
        net.context.save(path, ga.StateOptions(progress=lambda done, of: True))
    assert error.value.status is ga.Status.CANCELLED

    def boom(done: int, of: int) -> None:
        raise KeyError("boom")

    for call in (net.context.save, net.context.load):
        with pytest.raises(KeyError, match="boom"):
            call(path, ga.StateOptions(progress=boom, settings=ga.Settings.KEEP))
    assert path.read_bytes() == old


def test_files_that_fail(net: Net, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ga.Error, match="No such file") as error:
        net.context.save(tmp_path / "no" / "where")
    assert error.value.status is ga.Status.IO
    with pytest.raises(ga.Error) as error:
        net.context.load(b"garbage")
    assert error.value.status is ga.Status.FORMAT
    with pytest.raises(ValueError):
        net.context.save("a\0b")
    data = net.context.save_bytes()

    class Stops(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            return 0

        def write(self, buffer: Any) -> int:
            raise OSError("the disk is full")

    with pytest.raises(EOFError, match="ended at"):
        net.context.load(Stops(data))
    with pytest.raises(OSError, match="full"):
        net.context.save(Stops())

    class Keeps(io.BytesIO):
        views: list[Any] = []

        def write(self, buffer: Any) -> int:
            self.views.append(buffer)
            return super().write(buffer)

    net.context.save(Keeps())
    for view in Keeps.views:
        with pytest.raises(ValueError, match="released"):
            view[0]
    with pytest.raises(ga.Error):
        ga.state_note(tmp_path / "nowhere")
    path = tmp_path / "plain"
    net.context.save(path)
    assert ga.state_note(path) is None


def test_state_by_name() -> None:
    net, other = Net(ADAMW), Net(ADAMW)
    windows(net, 3)
    names = [info.name for info in net.params[0].states]
    assert {"exp_avg", "exp_avg_sq", "step"} <= set(names)
    for mine, theirs in zip(net.params, other.params, strict=True):
        for name in sorted(names):  # "step" is last
            theirs.set_state(name, mine.get_state(name))
    other.w[:], other.b[:] = net.w, net.b
    average: Any = np.from_dlpack(net.params[0].get_state("exp_avg"))  # type: ignore[arg-type]
    assert average.shape == (3, 4) and average.any()
    out = np.empty((3, 4), np.float32)
    assert net.params[0].get_state("exp_avg", out) is out
    np.testing.assert_array_equal(out, average)
    gradients = net.gradients()
    for each in (net, other):
        each.context.accumulate(gradients)
        each.context.step()
    assert same(net, other)
    with pytest.raises(KeyError, match='no state "nothing", but'):
        net.params[0].get_state("nothing")
    with pytest.raises(TypeError, match="int64"):
        net.params[0].set_state("step", np.array([1.0]))
    net.params[0].reset_state()
    assert not np.from_dlpack(net.params[0].get_state("exp_avg")).any()  # type: ignore[arg-type]


def coded(state_dtype: ga.Dtype = ga.Dtype.STATE_8BIT) -> tuple[ga.Context, ga.Param, Any]:
    """A context after three steps of AdamW on a parameter that is large enough for state in 8 bits."""
    w = np.ones((50, 100), np.float32)
    context = ga.Context()
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.ADAMW, lr=0.01, state_dtype=state_dtype))
    param = context.add_param(group, "w", w)
    random = np.random.default_rng(3)
    for _ in range(3):
        context.accumulate([random.standard_normal(w.shape).astype(np.float32)])
        context.step()
    return context, param, w


def test_state_in_8_bits_is_codes_or_numbers() -> None:
    context, param, _ = coded()
    assert {info.name: (info.dtype, info.count) for info in param.states} == {
        "exp_avg": (ga.Dtype.U8, 5000), "exp_avg_scale": (ga.Dtype.F32, 20),
        "exp_avg_sq": (ga.Dtype.U8, 5000), "exp_avg_sq_scale": (ga.Dtype.F32, 20), "step": (ga.Dtype.I64, 1),
    }  # fmt: skip
    plain = coded(ga.Dtype.F32)[1]
    for name in ("exp_avg", "exp_avg_sq"):
        codes: Any = np.from_dlpack(param.get_state(name))  # type: ignore[arg-type]
        scale: Any = np.from_dlpack(param.get_state(f"{name}_scale"))  # type: ignore[arg-type]
        numbers: Any = np.from_dlpack(param.get_state(name, dtype=ga.Dtype.F32))  # type: ignore[arg-type]
        assert codes.dtype == np.uint8 and codes.shape == numbers.shape == (50, 100) and scale.shape == (20,)
        assert numbers.dtype == np.float32
        np.testing.assert_array_equal(np.abs(numbers).reshape(-1)[: 19 * 256].reshape(19, 256).max(1), scale[:19])
        expected: Any = np.from_dlpack(plain.get_state(name))  # type: ignore[arg-type]
        assert np.abs(numbers - expected).max() < 0.5 * np.abs(expected).max()
        assert np.abs(numbers - expected).mean() < 0.1 * np.abs(expected).mean()
        out = np.empty((50, 100), np.float32)
        assert param.get_state(name, out) is out
        np.testing.assert_array_equal(out, numbers)
        # Numbers of codes become the same codes; codes and scales are written as they are.
        for written in (numbers, codes):
            param.set_state(name, np.zeros_like(numbers))
            assert not np.from_dlpack(param.get_state(name, dtype=ga.Dtype.F32)).any()  # type: ignore[arg-type]
            param.set_state(name, written)
            param.set_state(f"{name}_scale", scale)
            np.testing.assert_array_equal(np.from_dlpack(param.get_state(name)), codes)  # type: ignore[arg-type]
            param.get_state(name, out)
            np.testing.assert_array_equal(out, numbers)
    with pytest.raises(ga.Error, match="expected a finite number >= 0"):
        param.set_state("exp_avg_sq", np.full((50, 100), -1, np.float32))
    with pytest.raises(TypeError, match="float64, expected uint8 for codes, or float32 for numbers"):
        param.set_state("exp_avg", np.zeros((50, 100)))
    with pytest.raises(TypeError, match="uint8, expected float32"):
        param.set_state("exp_avg_scale", np.zeros(20, np.uint8))
    with pytest.raises(ValueError, match='dtype was F64, but state "exp_avg" has U8, or F32'):
        param.get_state("exp_avg", dtype=ga.Dtype.F64)
    with pytest.raises(ValueError, match='dtype was F32, but state "step" has I64$'):
        param.get_state("step", dtype=ga.Dtype.F32)
    with pytest.raises(ValueError, match="beside out"):
        param.get_state("exp_avg", out, dtype=ga.Dtype.F32)
    with pytest.raises(TypeError, match="expected a Dtype of elements"):
        ga.Tensor(4096, [1], ga.Dtype.STATE_8BIT)
    assert (ga.Dtype.U8.itemsize, ga.Dtype.STATE_8BIT.itemsize) == (1, 1)
    context.close()


def test_a_run_with_state_in_8_bits_goes_on() -> None:
    first, second = coded(), coded()
    second[2][:] = 0
    gradient = np.full((50, 100), 0.5, np.float32)
    second[0].load(first[0].save_bytes())
    for context, _, _ in (first, second):
        context.accumulate([gradient])
        context.step()
    assert first[2].tobytes() == second[2].tobytes()
    for name in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"):
        a, b = (np.from_dlpack(param.get_state(name)) for _, param, _ in (first, second))  # type: ignore[arg-type]
        np.testing.assert_array_equal(a, b)


# Saves a step of Muon in bf16, or loads it with its settings into a group of f32.
MUON = """
import array, sys
import gradaccum as ga
path, precision = sys.argv[1:]
p, g = array.array("f", [0.0] * 4), array.array("f", range(4))
context = ga.Context()
try:
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.MUON, ns_precision=ga.Precision[precision]))
except ga.Error as error:
    sys.exit(print(error.status.name, error))
context.add_param(group, "p", memoryview(p).cast("B").cast("f", [2, 2]))
try:
    if precision == "BF16":
        context.accumulate([memoryview(g).cast("B").cast("f", [2, 2])])
        context.step()
        context.save(path)
    else:
        context.load(path, ga.StateOptions(settings=ga.Settings.TAKE))
except ga.Error as error:
    print(error.status.name, error)
print(group.optimizer.ns_precision.name, context.window.steps, list(p) == [0.0] * 4)
"""


def test_a_precision_that_this_processor_lacks_is_not_taken(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "state")

    def run(precision: str, **variables: str) -> str:
        done = subprocess.run([sys.executable, "-c", MUON, path, precision], env={**os.environ, **variables},
                              stdout=subprocess.PIPE, text=True, check=True)  # fmt: skip
        return done.stdout

    saved = run("BF16")
    if saved.startswith("UNSUPPORTED"):
        pytest.skip(saved)
    assert saved == "BF16 1 False\n"
    assert run("F32") == saved
    refused = run("F32", ONEDNN_MAX_CPU_ISA="AVX512_CORE")
    assert refused.startswith("UNSUPPORTED ns_precision was GA_PRECISION_BF16")
    assert refused.endswith("\nF32 0 True\n")
