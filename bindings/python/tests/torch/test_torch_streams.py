# SPDX-License-Identifier: Apache-2.0
"""Streams of CUDA, on a machine without one: which stream each call of the library is made on."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import torch
from conftest import Task
from gradaccum.torch._streams import CudaStreams
from torch import Tensor


@dataclasses.dataclass
class Stream:
    """As torch.cuda.Stream."""

    cuda_stream: int
    device_index: int = 0


class Device:
    """Streams as torch and the library see them, of a device that is not there.

    The library works on the CPU. Every call that the optimizer makes to it is noted, with the stream that is
    current in torch and the one that the library has.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = threading.local()
        self.own = 0  # of the library
        self.calls: list[tuple[int, int]] = []
        self.changes: list[int] = []
        self.kept: dict[int, list[int]] = {}  # by address, the streams that hold up memory
        self.refuses = False
        monkeypatch.setattr(torch.cuda, "current_stream", self.stream)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.record(tensor, stream))
        monkeypatch.setattr(ga.Context, "set_stream", lambda context, stream: self.change(context, stream))

    def stream(self, device: Any = None) -> Stream:
        return Stream(getattr(self.current, "stream", 0))

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before = self.stream().cuda_stream
        self.current.stream = stream
        try:
            yield
        finally:
            self.current.stream = before

    def record(self, tensor: Tensor, stream: Stream) -> None:
        assert tensor.layout is torch.strided  # torch has no record_stream() of sparse tensors
        self.kept.setdefault(tensor.data_ptr(), []).append(stream.cuda_stream)

    def change(self, context: ga.Context, stream: int) -> None:
        if self.refuses:
            raise ga.Error(ga.Status.INVALID_STATE, "stream is being captured")
        self.changes.append(stream)
        self.own = stream

    def serve(self, optimizer: gt.Optimizer) -> None:
        """Gives the optimizer of parameters on the CPU the streams of this device."""
        optimizer._streams = optimizer._gradients.streams = CudaStreams(torch.device("cuda", 0))
        device, guard = self, optimizer.context._guard

        class Guard:
            def __enter__(self) -> Any:
                device.calls.append((device.stream().cuda_stream, device.own))
                return guard.__enter__()

            def __exit__(self, *error: Any) -> Any:
                return guard.__exit__(*error)

            def __getattr__(self, name: str) -> Any:
                return getattr(guard, name)

        object.__setattr__(optimizer.context, "_guard", Guard())

    def check(self) -> None:
        """Every call was made while the library had the current stream."""
        assert self.calls and all(current == own for current, own in self.calls)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_the_stream_of_the_constructor(device: Device) -> None:
    with device.on(7):
        streams = CudaStreams(torch.device("cuda", 0))
    assert streams.config() == {"device": ga.Device.CUDA, "device_ordinal": 0, "stream": 7}




@pytest.mark.parametrize("nonfinite", [ga.Nonfinite.SKIP_STEP, ga.Nonfinite.DROP_MICRO])
def test_every_call_is_on_the_current_stream(task: Task, device: Device, nonfinite: ga.Nonfinite) -> None:
    """Micro-batches, hooks, steps and state, each with another stream current than the one before."""
    net, plain = task.net(), task.net()
    config = ga.Config(nonfinite=nonfinite)
    optimizer = gt.AdamW(net.parameters(), lr=0.1, config=config)
    alone = gt.AdamW(plain.parameters(), lr=0.1, config=config)
    device.serve(optimizer)
    for step in range(3):
        stream = 10 * step
        for loss, weight in task.parts(plain, step):
            alone.backward(loss, weight=weight)
        alone.step()
        for loss, weight in task.parts(net, step):
            stream += 1
            with device.on(stream):
                hooks = [
                    p.register_hook(lambda g, at=100 + i: setattr(device.current, "stream", at) or g)
                    for i, p in enumerate(net.parameters())
                ]
                with optimizer.micro_batch(weight=weight):
                    loss.backward()  # type: ignore[no-untyped-call]
                    device.current.stream = stream  # as backward() leaves it
                for hook in hooks:
                    hook.remove()
        with device.on(stream + 5):
            optimizer.step()
        with device.on(stream + 6):
            optimizer.load_state_dict(optimizer.state_dict())
    device.check()
    assert {100, 101, 102, 103} <= set(device.changes)
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_the_plain_loop(task: Task, device: Device) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1, accum_steps=3)
    device.serve(optimizer)
    for stream, (loss, _) in enumerate(task.parts(net, 0)):
        with device.on(stream):
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with device.on(9):
        optimizer.flush()
        optimizer.discard()
    with device.on(10):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    device.check()
    assert device.changes == [1, 2, 9, 10]


def test_memory_of_gradients_is_kept_for_the_stream_that_reads_it(task: Task, device: Device) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    device.serve(optimizer)
    with device.on(3):
        for (loss, weight), hooked in zip(task.parts(net, 0), (False, True, True), strict=True):
            device.kept.clear()
            if hooked:
                optimizer.backward(loss, weight=weight)
                assert sum(map(len, device.kept.values())) == 4
            else:
                loss.backward()  # type: ignore[no-untyped-call]
                given = {p.grad.data_ptr() for p in net.parameters() if p.grad is not None}
                optimizer.accumulate(weight)
                assert set(device.kept) == given
            assert {stream for streams in device.kept.values() for stream in streams} == {3}
            assert all(p.grad is None for p in net.parameters())


def test_gradients_that_are_read_later_are_kept_for_both_streams(task: Task, device: Device) -> None:
    """With DROP_MICRO, the library reads them when the micro-batch ends, on the stream of the loop."""
    net = task.net()
    config = ga.Config(nonfinite=ga.Nonfinite.DROP_MICRO)
    optimizer = gt.SGD(net.parameters(), lr=0.1, config=config)
    device.serve(optimizer)
    loss, weight = next(task.parts(net, 0))
    with device.on(3):
        hooks = [
            p.register_hook(lambda g: setattr(device.current, "stream", 8) or g) for p in net.parameters()
        ]
        with optimizer.micro_batch(weight=weight):
            loss.backward()  # type: ignore[no-untyped-call]
            device.current.stream = 3
        for hook in hooks:
            hook.remove()
    device.check()
    assert len(device.kept) == 4 and all(streams == [8, 3] for streams in device.kept.values())


def test_sparse_gradients_are_kept(device: Device) -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = gt.SparseAdam(table.parameters(), lr=0.1)
    device.serve(optimizer)
    with device.on(3):
        optimizer.backward(table(torch.tensor([1, 3])).sum())
        table(torch.tensor([1, 3])).sum().backward()
        optimizer.accumulate()
    device.check()
    assert sum(map(len, device.kept.values())) >= 4  # indices and values, each time


def test_statistics_of_batch_normalisation_are_kept(device: Device) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    gt.convert_batchnorm(net, optimizer)
    device.serve(optimizer)
    with device.on(4):
        out = net(torch.randn(6, 3)).square().sum()
        seen = {t.data_ptr() for of in optimizer._layers._seen.values() for t in (of.mean, of.m2)}
        assert len(seen) == 2
        optimizer.backward(out)
    with device.on(5):
        optimizer.step()
    device.check()
    assert all(4 in device.kept[address] for address in seen)


def test_a_capture_that_cannot_be_joined(task: Task, device: Device) -> None:
    """Says what to do, and the window is as it was."""
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    device.serve(optimizer)
    parts = task.parts(net, 0)
    loss, weight = next(parts)
    optimizer.backward(loss, weight=weight)
    loss, weight = next(parts)
    device.refuses = True
    with device.on(6), pytest.raises(ga.Error, match="captured") as error:
        optimizer.backward(loss, weight=weight)
    assert error.value.status is ga.Status.INVALID_STATE
    assert any("torch.cuda.synchronize()" in note for note in error.value.__notes__)
    device.refuses = False
    assert optimizer.context.window.micro_batches == 1
    optimizer.backward(loss, weight=weight)
    assert optimizer.context.window.micro_batches == 2


def test_a_step_that_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a step returns before its outcome is known: parameters have moved, and statistics wait for it."""
    step, nets, asked = ga.Context.step, [], 0
    for pending in (False, True):
        torch.manual_seed(5)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = gt.SGD(net.parameters(), lr=0.1)
        gt.convert_batchnorm(net, optimizer)
        if pending:
            known = ga.Context.step_result
            monkeypatch.setattr(
                ga.Context, "step", lambda own: step(own)._replace(outcome=ga.StepOutcome.PENDING)
            )
            monkeypatch.setattr(ga.Context, "step_result", lambda own: asks.append(1) or known(own))
        asks: list[int] = []
        versions = [p._version for p in net.parameters()]
        for x in torch.randn(4, 6, 3).unbind():
            optimizer.backward(net(x).square().sum())
            optimizer.step()
            assert optimizer.result is not None and optimizer.result.applied
        assert all(p._version > old for p, old in zip(net.parameters(), versions, strict=True))
        asked += len(asks)
        nets.append(net)
    assert asked == 4
    for name, mine in nets[0].state_dict().items():
        assert torch.equal(mine, nets[1].state_dict()[name]), name
    # Without such layers, nothing waits.
    p = torch.nn.Parameter(torch.zeros(3))
    alone = gt.SGD([p], lr=0.1)
    alone.backward(p.sum())
    version = p._version
    alone.step()
    assert alone.result is not None and alone.result.outcome == ga.StepOutcome.PENDING
    assert p._version > version and len(asks) == 4


def test_the_cpu_asks_for_no_stream(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("asked"))
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    for loss, weight in task.parts(net, 0):
        optimizer.backward(loss, weight=weight)
    optimizer.step()
