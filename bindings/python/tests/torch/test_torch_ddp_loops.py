# SPDX-License-Identifier: Apache-2.0
"""Loops over two ranks as people bring them, with uneven shares, against whole batches in f64 in one process."""

import os
import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import gradaccum.torch as gt
import pytest
import ranks
import torch
from conftest import Task
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
SHARES = ((4, 1), (1, 2))  # samples of each rank in the micro-batches of a window
EVEN = ((2, 2), (2, 2))
Batch = tuple[torch.Tensor, torch.Tensor]


def batches(rank: int, shares: tuple[tuple[int, ...], ...] = SHARES) -> list[list[Batch]]:
    """The micro-batches of each window that a rank has."""
    task, found = Task(), []
    for step in range(STEPS):
        at, window = 0, []
        for counts in shares:
            share = ranks.mine(rank, counts)
            part = slice(at + share.start, at + share.stop)
            window.append((task.x[step][part], task.y[step][part]))
            at += sum(counts)
        found.append(window)
    return found


def plain(rank: int, shares: tuple[tuple[int, ...], ...], take: Callable[..., None], **options: Any) -> Any:
    """A loop of torch's pages."""
    net = Task().net()
    model = DistributedDataParallel(net)
    optimizer = gt.SGD(net.parameters(), lr=0.1, ddp=model, **options)
    for window in batches(rank, shares):
        for i, (x, y) in enumerate(window):
            take(optimizer, model, x, y, i == len(window) - 1)
        if not options:
            optimizer.step()
    return net.state_dict()


def weighted(rank: int) -> Any:
    def take(optimizer: Any, model: Any, x: Any, y: Any, last: bool) -> None:
        optimizer.backward(Task().loss(model, x, y), weight=len(x))

    return plain(rank, SHARES, take)


def documented(rank: int) -> Any:
    """The block of docs/torch.md."""
    page = pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "docs" / "torch.md"
    (block,) = re.findall(r"<!-- test: ddp -->\n```python\n(.*?)```", page.read_text(), re.S)
    names = {"torch": torch, "net": Task().net(), "batches": batches(rank), "loss_of": Task().loss}
    exec(compile(block, str(page), "exec"), names)
    return names["net"].state_dict()


def counting(rank: int) -> Any:
    def take(optimizer: Any, model: Any, x: Any, y: Any, last: bool) -> None:
        optimizer.zero_grad()
        Task().loss(model, x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return plain(rank, EVEN, take, accum_steps=2)


def compiled(rank: int) -> Any:
    """torch.compile, whose graph is that of eager mode here, so that no compiler of C++ is needed."""
    net = Task().net()
    model: Any = torch.compile(DistributedDataParallel(net), backend="eager")
    optimizer = gt.SGD(net.parameters(), lr=0.1, ddp=model)
    for window in batches(rank):
        for x, y in window:
            optimizer.backward(Task().loss(model, x, y), weight=len(x))
        optimizer.step()
    return net.state_dict()


def without_sync(rank: int) -> Any:
    """The loop of torch's page on no_sync(): all micro-batches but the last are local."""

    def take(optimizer: Any, model: Any, x: Any, y: Any, last: bool) -> None:
        if last:
            optimizer.backward(Task().loss(model, x, y), weight=len(x))
        else:
            with model.no_sync():
                optimizer.backward(Task().loss(model, x, y), weight=len(x))

    return plain(rank, SHARES, take)


def from_grad(rank: int) -> Any:
    def take(optimizer: Any, model: Any, x: Any, y: Any, last: bool) -> None:
        Task().loss(model, x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.accumulate(weight=len(x))

    return plain(rank, SHARES, take)


def environment(rank: int) -> None:
    """What torchrun sets, by which accelerate and Lightning find their rank."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="test",
    )  # fmt: skip


def by_accelerate(rank: int, accumulate: bool = False, late: bool = False) -> Any:
    import accelerate

    environment(rank)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2 if accumulate else 1)
    net = Task().net()
    model = accelerator.prepare(net)
    own = gt.SGD(net.parameters(), lr=0.1, ddp=model)
    optimizer = accelerator.prepare(own)
    for window in batches(rank):
        for x, y in window:
            if accumulate:
                with accelerator.accumulate(model):
                    accelerator.backward(Task().loss(model, x, y))
                    own.accumulate()
            elif late:
                accelerator.backward(Task().loss(model, x, y))
                own.accumulate(weight=len(x))
            else:
                with own.micro_batch(weight=len(x)):
                    accelerator.backward(Task().loss(model, x, y))
        optimizer.step()
    return net.state_dict()


def accelerate(rank: int) -> Any:
    return by_accelerate(rank)


def accelerate_from_grad(rank: int) -> Any:
    return by_accelerate(rank, late=True)


def accelerate_accumulates(rank: int) -> Any:
    return by_accelerate(rank, accumulate=True)


def by_lightning(rank: int, shares: tuple[tuple[int, ...], ...], automatic: bool, weigh: bool = True) -> Any:
    import lightning as lightning_

    class Module(lightning_.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Task().net()
            self.automatic_optimization = automatic

        def configure_optimizers(self) -> Any:
            options = {"accum_steps": 2} if automatic and not weigh else {}
            return gt.SGD(self.net.parameters(), lr=0.1, ddp=self.trainer.model, **options)

        def training_step(self, batch: Batch, index: int) -> Any:
            loss = Task().loss(self.net, *batch)
            if automatic:
                self.size = len(batch[0])
                return loss
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            with optimizer.micro_batch(weight=len(batch[0])):
                self.manual_backward(loss)
            if index % 2:
                optimizer.step()
            return None

        def on_after_backward(self) -> None:
            if automatic and weigh:
                optimizer: Any = self.optimizers(use_pl_optimizer=False)
                optimizer.accumulate(weight=self.size)

    environment(rank)
    flat = [micro for window in batches(rank, shares) for micro in window]
    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning_.Trainer(
            max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(flat, batch_size=None))
    return module.net.state_dict()


def lightning_manual(rank: int) -> Any:
    return by_lightning(rank, SHARES, automatic=False)


def lightning(rank: int) -> Any:
    return by_lightning(rank, EVEN, automatic=True, weigh=False)


def lightning_from_grad(rank: int) -> Any:
    return by_lightning(rank, SHARES, automatic=True)


EXACT = [weighted, documented, counting, compiled, accelerate, lightning_manual, lightning]
REFUSED: dict[Callable[[int], Any], str] = {
    without_sync: "gradients of a backward inside no_sync() are not reduced",
    from_grad: "the ranks gave the weights 4, 1 to accumulate(), but ddp has averaged",
    accelerate_from_grad: "the ranks gave the weights 4, 1 to accumulate(), but ddp has averaged",
    accelerate_accumulates: "gradients of a backward inside no_sync() are not reduced",
    lightning_from_grad: "the ranks gave the weights 4, 1 to accumulate(), but ddp has averaged",
}


def all_loops(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for loop in (*EXACT, *REFUSED):
        try:
            found[loop.__name__] = loop(rank)
        except ImportError as error:
            found[loop.__name__] = error
        except Exception as error:
            found[loop.__name__] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(tmp_path_factory.mktemp("loops"), 2, all_loops)


def outcome(found: list[dict[str, Any]], rank: int, loop: Callable[[int], Any]) -> Any:
    result = found[rank][loop.__name__]
    if isinstance(result, ImportError):
        pytest.skip(str(result))
    return result


def whole(make: Callable[..., torch.optim.Optimizer], lr: float) -> dict[str, Any]:
    task = Task()
    net = task.net()
    optimizer = make(net.parameters(), lr=lr)
    for step in range(STEPS):
        optimizer.zero_grad()
        task.whole(net, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("loop", EXACT, ids=lambda loop: loop.__name__)
def test_a_loop_is_exact(loop: Callable[[int], Any], found: list[dict[str, Any]]) -> None:
    results = [outcome(found, rank, loop) for rank in range(2)]
    begin = Task().net().state_dict()
    want = whole(torch.optim.AdamW, 1e-2) if loop is documented else whole(torch.optim.SGD, 0.1)
    for result in results:
        assert isinstance(result, dict), result
        for key, value in want.items():
            assert torch.equal(result[key], results[0][key])
            off = float((result[key] - value).norm() / (value - begin[key]).norm())
            assert off < 1e-12, f"{key}: {off}"


@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
def test_a_loop_is_refused(loop: Callable[[int], Any], found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert REFUSED[loop] in outcome(found, rank, loop)
