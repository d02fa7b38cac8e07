# SPDX-License-Identifier: Apache-2.0
"""gradaccum.check: right loops are silent and unchanged, wrong ones are named, with the numbers that they have."""

import contextlib
import copy
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Callable
from typing import Any

import check_loops
import gradaccum
import gradaccum.torch as gt
import pytest
import torch
import torch.nn.functional as F
from check_loops import EVEN, RIGHT, UNEVEN, WRONG, Loop
from gradaccum import check
from gradaccum.check import _where
from gradaccum.check._faults import ADVICE, UNKNOWN
from gradaccum.check._sketch import Sketch
from gradaccum.check._torch._sketch import Sketch as TensorSketch
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")


def watched(train: Callable[[Loop], None], *loop: Any) -> tuple[check.Report, list[Tensor]]:
    """What is reported of a loop, and the parameters afterwards."""
    made = Loop(*loop)
    torch.manual_seed(5)
    with check.record(made.model, made.optimizer) as recording:
        train(made)
    return recording.report, list(made.model.parameters())


def names(report: check.Report) -> list[str]:
    return [fault.name for fault in report.faults]


def doubts(report: check.Report) -> list[str]:
    """Faults, and notes that something may be one."""
    words = (UNKNOWN, "the whole window is multiplied", "a hook changes", "is not known")
    return names(report) + [remark for remark in report.remarks if any(word in remark for word in words)]


def values(report: check.Report, window: int = 0) -> list[float]:
    return [c.value for c in report.optimizers[0].windows[window].coefficients]


@pytest.mark.parametrize("name", RIGHT)
def test_right_loops_are_silent(name: str) -> None:
    train, *loop = RIGHT[name]
    report, _ = watched(train, *loop)
    allowed = 1 if name == "two_optimizers_scaled" else 0  # whose second window is twice as long, divided alike
    assert report.ok and len(doubts(report)) == allowed, report


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops_are_named(name: str) -> None:
    train, *loop = WRONG[name]
    report, _ = watched(train, *loop)
    assert names(report)[0] == name and not report.ok, report
    expected = {"micro-batch lost": ["tail divided by N"]}  # the first window has one micro-batch less
    assert names(report)[1:] == expected.get(name, []), report


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_the_bits_are_those_of_the_loop_alone(name: str) -> None:
    train, *loop = {**RIGHT, **WRONG}[name]
    alone = Loop(*loop)
    torch.manual_seed(5)
    train(alone)
    _, parameters = watched(train, *loop)
    for own, other in zip(alone.model.parameters(), parameters, strict=True):
        assert torch.equal(own.nan_to_num(7), other.nan_to_num(7))


# ---- Numbers


def test_the_multiples_are_those_of_the_loop() -> None:
    """Any numbers by which a program multiplies its losses are found."""
    scales = [0.3, 1.7, 0.001, 250.0]

    def train(loop: Loop) -> None:
        for samples, scale in zip(loop.windows[0], scales, strict=True):
            (loop.loss(samples) * scale).backward()
        loop.optimizer.step()

    report, _ = watched(train, UNEVEN)
    assert values(report) == pytest.approx(scales, rel=1e-5)
    assert [c.right for c in report.optimizers[0].windows[0].coefficients] == [0.4, 0.2, 0.3, 0.1]
    assert report.ok and "0.3 for 0.4, 1.7 for 0.2, 0.001 for 0.3, 250 for 0.1 are none of the patterns" in str(report)


def test_what_happens_between_micro_batches_is_followed() -> None:
    """A decay of the sum before each backward multiplies earlier micro-batches more often."""

    def train(loop: Loop) -> None:
        for samples in loop.windows[0]:
            for parameter in loop.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.data *= 0.5
            loop.loss(samples).backward()
        loop.optimizer.step()

    report, _ = watched(train, EVEN)
    assert values(report) == pytest.approx([0.125, 0.25, 0.5, 1], rel=1e-5)


def test_hooks_of_the_program_are_seen() -> None:
    def train(loop: Loop) -> None:
        for parameter in loop.model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)
        check_loops.divides(loop)

    report, _ = watched(train, EVEN)
    assert values(report) == pytest.approx([0.125] * 4, rel=1e-5)
    assert "multiplied by 0.5, which may be meant" in str(report)


    report, _ = watched(check_loops.clips_in_a_hook, EVEN)
    assert "a hook changes gradients within a micro-batch" in str(report)


def test_gradients_that_no_backward_gave() -> None:
    def train(loop: Loop) -> None:
        parameters = list(loop.model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loop.loss(8), parameters), strict=True):
            parameter.grad = gradient
        loop.optimizer.step()

    report, _ = watched(train, EVEN)
    assert "a step was made with gradients that no backward has given to .grad (window 1)" in str(report)


def test_equal_micro_batches_are_told_apart() -> None:
    """Least squares could not: their gradients are the same."""

    def train(loop: Loop) -> None:
        x, y = check_loops.batch(8)
        for scale in (0.1, 0.2, 0.3, 0.4):
            (F.cross_entropy(loop.model(x), y) * scale).backward()
        loop.optimizer.step()

    report, _ = watched(train, EVEN)
    assert values(report) == pytest.approx([0.1, 0.2, 0.3, 0.4], rel=1e-5)


def test_faults_have_their_numbers_and_lines() -> None:
    train, *loop = WRONG["tail divided by N"]
    fault = watched(train, *loop)[0].faults[0]
    assert fault.windows == [2] and fault.severity == pytest.approx(0.5)
    assert "2 micro-batches were divided by 4" in fault.text and "0.25 for 0.5" in fault.text
    file, _, line = fault.where.partition(":")
    text = pathlib.Path(file).read_text().splitlines()[int(line) - 1]
    assert "backward()" in text and fault.effect and fault.fix and fault.library

    train, *loop = WRONG["clipped before unscale"]
    fault = watched(train, *loop)[0].faults[0]
    file, _, line = fault.where.partition(":")
    assert "clip_grad_norm_" in pathlib.Path(file).read_text().splitlines()[int(line) - 1]
    assert "1024 times too large" in fault.text


def test_a_loss_of_the_programs_own_is_named() -> None:
    def train(loop: Loop, recording: Any = None) -> None:
        for window in loop.windows:
            for samples in window:
                x, y = check_loops.batch(samples)
                loss = -loop.model(x).log_softmax(1).gather(1, y[:, None]).mean()
                if recording is not None:
                    loss = recording.loss(loss, weight=samples)
                (loss / len(window)).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()

    report, _ = watched(train, UNEVEN)
    assert not report.faults and "No loss function was seen" in str(report)
    loop = Loop(UNEVEN)
    with check.record(loop.model, loop.optimizer) as recording:
        train(loop, recording)
        with pytest.raises(ValueError, match="reduction was 'none'"):
            recording.loss(torch.ones(1), 1, "none")
    assert names(recording.report) == ["mean of means over uneven micro-batches"]
    assert values(recording.report) == pytest.approx([0.25] * 4)


# ---- Optimizers of this library


def ours(
    take: Callable[[Any, Loop, list[int]], None], windows: list[list[int]] = UNEVEN, **options: Any
) -> check.Report:
    loop = Loop(windows)
    optimizer = gt.AdamW(loop.model.parameters(), **options)
    with check.record(loop.model, optimizer) as recording:
        for window in windows:
            take(optimizer, loop, window)
    return recording.report


def test_optimizers_of_this_library_tell_their_windows() -> None:
    def weighs(optimizer: Any, loop: Loop, window: list[int]) -> None:
        for samples in window:
            optimizer.backward(loop.loss(samples), weight=samples)
        optimizer.step()

    def accumulates(optimizer: Any, loop: Loop, window: list[int]) -> None:
        for samples in window:
            loop.loss(samples).backward()
            optimizer.accumulate(weight=samples)
        optimizer.flush()

    def counts(optimizer: Any, loop: Loop, window: list[int]) -> None:
        for samples in window:
            loop.loss(samples).backward()
            optimizer.step()
            optimizer.zero_grad()

    def sums(optimizer: Any, loop: Loop, window: list[int]) -> None:
        for samples in window:
            optimizer.backward(loop.loss(samples, "sum"), weight=samples)
        optimizer.step()

    def discards(optimizer: Any, loop: Loop, window: list[int]) -> None:
        optimizer.backward(loop.loss(3), weight=5)
        optimizer.discard()
        weighs(optimizer, loop, window)

    scaled = {"loss_scaler": gradaccum.LossScaler(initial_scale=1024.0)}
    summed = {"config": gradaccum.Config(gradient_kind=gradaccum.GradientKind.SUM)}
    for take, windows, options in (
        (weighs, UNEVEN, {}), (weighs, UNEVEN, scaled), (accumulates, UNEVEN, {}), (counts, EVEN, {"accum_steps": 4}),
        (sums, UNEVEN, summed), (discards, UNEVEN, {}),
    ):  # fmt: skip
        report = ours(take, windows, **options)
        assert report.ok and not doubts(report)
        assert [w.micro_batches for w in report.optimizers[0].windows] == [4, 4, 4], report
    assert names(ours(counts, UNEVEN, accum_steps=4)) == ["mean of means over uneven micro-batches"]
    assert "are none of the patterns" in str(ours(sums, UNEVEN)), "the library is told that sums are means"

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def scales(optimizer: Any, loop: Loop, window: list[int]) -> None:
        for samples in window:
            scaler.scale(loop.loss(samples)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert not doubts(ours(scales, EVEN, accum_steps=4))

    def skipped(optimizer: Any, loop: Loop, window: list[int]) -> None:
        optimizer.backward(loop.loss(3) * math.inf, weight=3)
        optimizer.step()
        weighs(optimizer, loop, window)

    report = ours(skipped)
    assert not report.faults and "3 micro-batches were dropped with their window" in str(report), report


# ---- The parts


def test_sketches_are_those_of_numpy() -> None:
    torch.manual_seed(0)
    for size in (1, 127, 128, 129, 4095, 4096, 4097, 70000, 300001):
        for dtype in (torch.float64, torch.float32):
            tensor = torch.randn(size, dtype=dtype)
            found, wanted = TensorSketch().of(3, tensor), torch.from_numpy(Sketch().of(3, tensor.numpy()))
            assert found.dtype == torch.float64 and float((found - wanted).norm()) <= 1e-6 * float(wanted.norm())
        half = tensor.bfloat16()
        assert torch.equal(TensorSketch().of(3, half), TensorSketch().of(3, half.float()))
    large = torch.randn(5000, 40)
    assert torch.equal(TensorSketch().of(1, large), TensorSketch().of(1, large.clone()))


# ---- Bad input


def test_loops_that_make_no_window() -> None:
    def idle(loop: Loop) -> None:
        pass

    def never_steps(loop: Loop) -> None:
        loop.loss(4).backward()

    def never_goes_back(loop: Loop) -> None:
        loop.loss(4)
        loop.optimizer.step()

    report, _ = watched(idle, EVEN)
    assert not report.ok and "No window was seen" in str(report) and not report.faults
    report, _ = watched(never_steps, EVEN)
    assert not report.ok and "had gradients, but no optimizer" in str(report)
    report, _ = watched(never_goes_back, EVEN)
    assert not report.faults and "had no gradient in any backward" in str(report)


def test_models_compute_and_are_copied_as_without_a_recording(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()  # has another way in inference, which zeroes what is masked
    x, mask = torch.randn(4, 10, 32), torch.zeros(4, 10, dtype=torch.bool)
    mask[:, 6:] = True
    with torch.no_grad():
        alone = encoder(x, src_key_padding_mask=mask)
        with check.record(encoder):
            assert torch.equal(encoder(x, src_key_padding_mask=mask), alone)
    loop = Loop(EVEN)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    _where._shown.cache_clear()
    gone.rmdir()  # paths of lines are shown relative to it
    with check.record(loop.model, loop.optimizer) as recording:
        check_loops.divides(loop)
        loop.loss(4).backward()
        copied = copy.deepcopy(loop.model)
        torch.save(loop.model, tmp_path / "model.pt")
    torch.save(copied, tmp_path / "copied.pt")
    assert recording.report.ok
    assert not torch.overrides._get_current_function_mode_stack()


def test_what_is_put_on_is_taken_off() -> None:
    loop = Loop(EVEN)
    with pytest.raises(AttributeError), check.record(loop.model, [3]):
        pass
    assert not torch.overrides._get_current_function_mode_stack()
    first, second = check.record(loop.model), check.record(loop.model, [loop.optimizer])
    with contextlib.ExitStack() as stack:
        stack.enter_context(first)
        second.__enter__()
        stack.close()  # the first one ends before the second
        check_loops.sum_for_mean(loop)
        second.__exit__(None, None, None)
    assert names(second.report) == ["sum for mean"]
    assert not torch.overrides._get_current_function_mode_stack()
    assert not loop.model._forward_pre_hooks and not torch.nn.modules.module._global_forward_pre_hooks


def test_an_error_of_the_watching_is_not_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("of the test")

    for method in ("_observe", "_rates"):
        with monkeypatch.context() as patch:
            patch.setattr(f"gradaccum.check._torch._recorder.Recorder.{method}", fails)
            report, parameters = watched(check_loops.sum_for_mean, EVEN)
        assert not report.ok and "The watching ended early" in str(report) and "ZeroDivisionError: of the test" in str(report)
        alone = Loop(EVEN)
        torch.manual_seed(5)
        check_loops.sum_for_mean(alone)
        assert all(map(torch.equal, parameters, alone.model.parameters()))


def test_an_exception_of_the_loop_stays_its_own() -> None:
    loop = Loop(EVEN)
    recording = check.record(loop.model, loop.optimizer)
    with pytest.raises(RuntimeError, match="report was asked for within"):
        recording.report  # noqa: B018
    with pytest.raises(KeyboardInterrupt), recording:
        check_loops.sum_for_mean(loop)
        loop.loss(4).backward()
        raise KeyboardInterrupt
    assert names(recording.report) == ["sum for mean"]
    assert "ended with KeyboardInterrupt" in str(recording.report)
    assert "ended with 1 micro-batches that no step" in str(recording.report)
    before = str(recording.report)
    loop.optimizer.zero_grad()
    check_loops.divides(loop)  # is not watched any more
    assert str(recording.report) == before


def test_sparse_gradients_shared_weights_and_several_optimizers() -> None:
    torch.manual_seed(1)
    embedding = torch.nn.Embedding(500, 16, sparse=True)
    head = torch.nn.Linear(16, 500, bias=False)
    tied = torch.nn.Embedding(500, 16)
    tied.weight = head.weight
    net = torch.nn.ModuleList([embedding, head, tied])
    first = torch.optim.SGD(embedding.parameters(), 0.1)
    second = torch.optim.SGD(head.parameters(), 0.1)
    with check.record() as recording:
        for _ in range(3):
            for samples in (8, 8):
                x = torch.randint(0, 500, (samples,))
                (F.cross_entropy(head(embedding(x) + tied(x)), x) / 2).backward()
            first.step()
            second.step()
            net.zero_grad()
    report = recording.report
    assert report.ok and len(report.optimizers) == 2, report
    assert [len(optimizer.windows) for optimizer in report.optimizers] == [3, 3]


def test_wrappers_that_keep_gradients_are_refused_by_name() -> None:
    class FullyShardedDataParallel(torch.nn.Sequential):
        pass

    loop = Loop(EVEN)
    loop.model = FullyShardedDataParallel(*loop.model)
    with check.record(loop.model, loop.optimizer) as recording:
        check_loops.divides(loop)
    assert not recording.report.ok and "FullyShardedDataParallel keeps gradients to itself" in str(recording.report)


def test_a_compiled_model_is_watched_without_its_losses() -> None:
    loop = Loop(EVEN)
    compiled: Any = torch.compile(loop.model, backend="eager")
    loop.model = compiled
    with check.record(compiled, loop.optimizer) as recording:
        check_loops.zeroes_each(loop)
    assert names(recording.report) == ["only the last one"] and "The model is compiled" in str(recording.report)


def test_recordings_end_by_themselves() -> None:
    loop = Loop(EVEN)
    with check.record(loop.model, loop.optimizer, windows=2) as recording:
        check_loops.divides(loop)
    assert len(recording.report.optimizers[0].windows) == 2
    with pytest.raises(RuntimeError, match="entered twice"), recording:
        pass


def test_parameters_may_come_later() -> None:
    """A layer that is unfrozen, and joins the optimizer; statistics that have moved before."""
    loop = Loop(EVEN, lambda: torch.nn.BatchNorm1d(300))
    for _ in range(3):
        loop.loss(8)
    last: Any = list(loop.model.children())[-1]
    last.requires_grad_(False)
    optimizer = torch.optim.SGD(next(iter(loop.model.children())).parameters(), 0.1)

    def window() -> None:
        loop.loss(8).backward()
        optimizer.step()
        optimizer.zero_grad()

    with check.record(loop.model, optimizer) as recording:
        window()
        last.requires_grad_(True)
        optimizer.add_param_group({"params": last.parameters(), "lr": 0.2})
        window()
        for _ in range(2):
            (loop.loss(8) / 2).backward()
            last.bias.grad.mul_(3)
        optimizer.step()
    report = recording.report
    assert names(report) == ["batch norm per micro-batch"] and report.faults[0].windows == [2], report
    assert "moved 2 times in a window of 2" in report.faults[0].text
    assert "mul_" in str(report) and "is no multiple" in str(report), "of the layer that came later"


def test_what_is_kept_of_a_window_is_small() -> None:
    loop = Loop([[4, 4]] * 40)
    with check.record(loop.model, loop.optimizer) as recording:
        check_loops.divides(loop)
        recorder: Any = recording._watchers[0]
        traces = recorder.steps[id(loop.optimizer)].traces
        kept = [each.added for trace in traces for each in trace.contributions]
        assert len(traces) == 40 and all(added is None for added in kept) and not recorder._entries


# ---- Reports


def test_reports_are_text_json_and_pictures(tmp_path: pathlib.Path) -> None:
    train, *loop = WRONG["mean of means over uneven micro-batches"]
    report, _ = watched(train, *loop)
    for ending in ("txt", "json", "svg", "html"):
        report.save(tmp_path / f"report.{ending}")
    text = (tmp_path / "report.txt").read_text()
    assert text.startswith("gradaccum check: Sequential, torch ") and text.endswith("1 fault was found.")
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["ok"] is False and found["optimizers"][0]["faults"][0]["windows"] == [0, 1, 2]
    assert len(found["optimizers"][0]["windows"][0]["coefficients"]) == 4
    picture = xml.etree.ElementTree.parse(tmp_path / "report.svg").getroot()
    bars = [each for each in picture.iter() if each.get("fill") in ("#c0392b", "#2a7f62")]
    assert len(bars) == 4 and len({each.get("width") for each in bars}) == 1, "each has 1/4"
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page and "pulls harder" in page and "http" not in page.replace("http://www.w3.org", "")
    train, *loop = WRONG["non-finite gradient applied"]
    json.loads(watched(train, *loop)[0].json(), parse_constant=lambda name: pytest.fail(name))


def test_the_page(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "docs" / "check.md").read_text()
    blocks = re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", page, re.S)
    assert len(blocks) == page.count("```python") == 4
    for name, block in blocks:
        if name not in ("keras", "optax"):  # which test_keras_check.py runs
            exec(compile(block, name, "exec"), {})
    assert (tmp_path / "check.html").exists()
    rows = re.findall(r"^\| (.+?) \| .* \|$", page.partition("## The faults that are found")[2].partition("Notes, which")[0], re.M)
    assert {name for row in rows[2:] for name in row.split(", ")} == set(ADVICE)


# ---- The command, and the plugin of pytest

PROGRAM = """
import sys, torch
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for i in range(int(sys.argv[1])):
    loss = torch.nn.functional.mse_loss(net(torch.randn(3, 4)), torch.zeros(3, 2))
    (loss / float(sys.argv[2])).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
print("trained")
sys.exit(int(sys.argv[3]))
"""


def command(folder: pathlib.Path, *arguments: str, options: tuple[str, ...] = ()) -> Any:
    (folder / "train.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, "-m", "gradaccum.check", *options, "train.py", *arguments], cwd=folder, text=True,
        capture_output=True, env=os.environ,
    )  # fmt: skip


def test_the_command(tmp_path: pathlib.Path) -> None:
    right = command(tmp_path, "12", "4", "0")
    assert (right.returncode, right.stdout) == (0, "trained\n"), right.stderr
    assert "No fault was found in 3 windows." in right.stderr
    wrong = command(tmp_path, "12", "1", "0", options=("--json", "a.json", "--html", "a.html", "--windows", "2"))
    assert wrong.returncode == 1 and "1. sum for mean, in 2 windows" in wrong.stderr
    assert "Where:  train.py:7" in wrong.stderr
    assert json.loads((tmp_path / "a.json").read_text())["ok"] is False and (tmp_path / "a.html").exists()
    assert command(tmp_path, "12", "4", "7").returncode == 7
    assert command(tmp_path, "2", "4", "0").returncode == 2
    broken = command(tmp_path, "12", "none", "0")
    assert broken.returncode == 1 and "ValueError: could not convert" in broken.stderr
    assert "gradaccum/check" not in broken.stderr.rpartition("ValueError")[0].partition("train.py")[2]


TESTS = """
import torch
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)

def train(divisor):
    for i in range(4):
        loss = torch.nn.functional.mse_loss(net(torch.randn(3, 4)), torch.zeros(3, 2))
        (loss / divisor).backward()
    optimizer.step()
    optimizer.zero_grad()

def test_right(gradaccum_check):
    assert gradaccum_check(train, 4).ok

def test_wrong(gradaccum_check):
    gradaccum_check(train, divisor=1)

def test_idle(gradaccum_check):
    gradaccum_check(lambda: None)
"""


def test_the_plugin(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_training.py").write_text(TESTS)
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "gradaccum_pytest", "-p", "no:cacheprovider", "test_training.py"],
        cwd=tmp_path, text=True, capture_output=True, env=os.environ,
    )  # fmt: skip
    assert "2 failed, 1 passed" in found.stdout, found.stdout
    assert "1. sum for mean" in found.stdout and "No window was seen" in found.stdout
