# SPDX-License-Identifier: Apache-2.0
"""What ranks under DistributedDataParallel must do alike: whatever differs is an error on each of them, by name."""

import datetime
import os
import pathlib
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import ranks
import torch
from conftest import Task
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
from torch.nn.parallel import DistributedDataParallel


class Loop:
    """A network of two ranks, and a micro-batch of it."""

    def __init__(self, net: torch.nn.Module | None = None, ddp: dict[str, Any] | None = None, **options: Any) -> None:
        self.task = Task()
        self.net = self.task.net() if net is None else net
        self.model = DistributedDataParallel(self.net, **(ddp or {}))
        self.optimizer = gt.SGD(self.net.parameters(), **{"lr": 0.1, "ddp": self.model, **options})

    def loss(self, model: Any = None) -> Any:
        return self.task.whole(self.model if model is None else model, 0)


def tails(rank: int) -> None:
    """One rank has three micro-batches, the other one two."""
    loop = Loop(accum_steps=4)
    for _ in range(3 - rank):
        loop.optimizer.backward(loop.loss(), weight=8)
        loop.optimizer.step()
    loop.optimizer.flush()


def tails_of_nothing(rank: int) -> None:
    """One rank has a micro-batch more than a window."""
    loop = Loop(accum_steps=2)
    for _ in range(3 - rank):
        loop.optimizer.backward(loop.loss(), weight=8)
        loop.optimizer.step()
    loop.optimizer.flush()


def fewer(rank: int) -> None:
    loop = Loop()
    for _ in range(3 - rank):
        loop.optimizer.backward(loop.loss(), weight=8)
    loop.optimizer.step()


def fewer_from_grad(rank: int) -> None:
    loop = Loop()
    for _ in range(3 - rank):
        loop.loss().backward()
        loop.optimizer.accumulate(weight=8)
    loop.optimizer.step()


def other_window(rank: int) -> None:
    loop = Loop()
    for _ in range(2):
        loop.optimizer.backward(loop.loss(), weight=8)
        if rank == 0:
            loop.optimizer.step()


def discarded(rank: int) -> None:
    loop = Loop()
    loop.optimizer.backward(loop.loss(), weight=8)
    if rank == 0:
        loop.optimizer.discard()
    loop.optimizer.backward(loop.loss(), weight=8)


def uneven_from_grad(rank: int) -> None:
    loop = Loop()
    loop.loss().backward()
    loop.optimizer.accumulate(weight=4 - 3 * rank)


def negative(rank: int) -> None:
    loop = Loop()
    loop.optimizer.backward(loop.loss(), weight=1 - 2 * rank)


def not_a_number(rank: int) -> None:
    loop = Loop()
    loop.loss().backward()
    loop.optimizer.accumulate(weight=float("nan") if rank else 1)


def other_rate(rank: int) -> None:
    """As ReduceLROnPlateau does with the loss of one rank."""
    loop = Loop()
    loop.optimizer.backward(loop.loss(), weight=8)
    loop.optimizer.param_groups[0]["lr"] = 0.5 + rank
    loop.optimizer.step()


def other_steps(rank: int) -> None:
    Loop(accum_steps=2 + rank)


def other_seed(rank: int) -> None:
    Loop(config=ga.Config(seed=rank))


def other_ways(rank: int) -> None:
    loop = Loop()
    if rank == 0:
        loop.optimizer.backward(loop.loss(), weight=8)
    else:
        loop.loss().backward()
        loop.optimizer.accumulate(weight=8)


def no_sync(rank: int) -> None:
    loop = Loop()
    with loop.model.no_sync():
        loop.optimizer.backward(loop.loss(), weight=8)


def of_the_module(rank: int) -> None:
    loop = Loop()
    loop.optimizer.backward(loop.loss(loop.net), weight=8)


def two_forwards(rank: int) -> None:
    """DDP reduces the first backward alone."""
    loop = Loop()
    losses = loop.loss(), loop.loss()
    with loop.optimizer.micro_batch(weight=8):
        for loss in losses:
            loss.backward()


def retained(rank: int) -> None:
    loop = Loop()
    loss = loop.loss()
    with loop.optimizer.micro_batch(weight=8):
        loss.backward(retain_graph=True)
        loss.backward()


def join(rank: int) -> None:
    loop = Loop()
    with loop.model.join():
        loop.optimizer.backward(loop.loss(), weight=8)


def outside(rank: int) -> None:
    loop = Loop()
    loop.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, dtype=torch.float64))]})


def frozen_before(rank: int) -> None:
    net = Task().net()
    net[0].weight.requires_grad_(False)
    loop = Loop(net)
    loop.optimizer.backward(loop.loss(), weight=8)
    loop.optimizer.step()
    net[0].weight.requires_grad_(True)
    loop.optimizer.backward(loop.loss(), weight=8)


def no_reduction(rank: int) -> None:
    loop = Loop()
    loop.model.register_comm_hook(None, debugging_hooks.noop_hook)
    loop.optimizer.backward(loop.loss(), weight=8)


def other_hook(rank: int) -> None:
    """A hook that adds up, in place of the mean."""

    def add(_: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        distributed: Any = torch.distributed
        return distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    loop = Loop()
    loop.model.register_comm_hook(None, add)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loop.optimizer.backward(loop.loss(), weight=8)


def no_ddp(rank: int) -> None:
    gt.SGD(Task().net().parameters(), lr=0.1, ddp=Task().net())


REFUSED: dict[Callable[[int], None], tuple[type[Exception], str]] = {
    tails: (
        RuntimeError,
        r"the ranks of ddp went apart: rank 0 was in backward inside micro_batch\(\) for micro-batch 3 of its window; "
        r"rank 1 called flush\(\) after 2 micro-batches\. Every rank must bring as many micro-batches to a window, in "
        "the same calls; one that has no samples left gives an empty one the weight 0",
    ),
    tails_of_nothing: (RuntimeError, r"micro-batch 1 of its window; rank 1 called flush\(\) after 0 micro-batches"),
    fewer: (RuntimeError, "rank 0 was in backward .* micro-batch 3 .*; rank 1 ended a window after 2 micro-batches"),
    fewer_from_grad: (RuntimeError, "rank 0 was in backward for micro-batch 3 .*; rank 1 ended a window after 2"),
    other_window: (RuntimeError, "rank 0 ended a window after 1 micro-batches; rank 1 was in forward"),
    discarded: (RuntimeError, "rank 0 was in forward for micro-batch 1 .*; rank 1 was in forward for micro-batch 2 of"),
    uneven_from_grad: (ValueError, r"the ranks gave the weights 4, 1 to accumulate\(\), but ddp has averaged"),
    negative: (ValueError, "the ranks gave the weights 1, -1, expected finite numbers >= 0"),
    not_a_number: (ValueError, "the ranks gave the weights 1, nan, expected finite numbers >= 0"),
    other_rate: (RuntimeError, r"lr of group 0 was 0\.5 on rank 0 and 1\.5 on rank 1: replicas would go apart"),
    other_steps: (RuntimeError, "accum_steps was 2 on rank 0 and 3 on rank 1"),
    other_seed: (RuntimeError, "seed was 0 on rank 0 and 1 on rank 1"),
    other_ways: (RuntimeError, r"rank 0 was in backward inside micro_batch\(\) for .*; rank 1 was in backward for"),
    no_sync: (RuntimeError, r"gradients of a backward inside no_sync\(\) are not reduced"),
    of_the_module: (RuntimeError, "gradients of a backward were not reduced: each backward needs a forward of ddp"),
    two_forwards: (RuntimeError, "gradients of a backward were not reduced: each backward needs a forward of ddp"),
    retained: (RuntimeError, "gradients of a backward were not reduced: each backward needs a forward of ddp"),
    join: (RuntimeError, r"ddp\.join\(\) was entered: a rank that has no samples left"),
    outside: (ValueError, 'parameter "param4" is not reduced by ddp'),
    frozen_before: (ValueError, 'parameter "param0" is not reduced by ddp: .* had requires_grad=False'),
    no_reduction: (RuntimeError, "the communication hook noop_hook of ddp does not give the mean over all ranks"),
    other_hook: (UserWarning, "the communication hook add of ddp must give every rank the mean of the ranks'"),
    no_ddp: (TypeError, "ddp was a Sequential, expected a DistributedDataParallel"),
}  # fmt: skip


def all_refused(rank: int) -> dict[str, tuple[type[BaseException], str]]:
    found: dict[str, tuple[type[BaseException], str]] = {}
    for case in REFUSED:
        try:
            case(rank)
        except Exception as error:
            found[case.__name__] = type(error), str(error)
    return found


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[type[BaseException], str]]]:
    return ranks.run(tmp_path_factory.mktemp("refused"), 2, all_refused)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_it_is_an_error_on_each_rank(case: Callable[[int], None], refused: list[dict[str, Any]]) -> None:
    kind, text = REFUSED[case]
    for rank in refused:
        assert case.__name__ in rank, "nothing was raised"
        assert rank[case.__name__][0] is kind, rank[case.__name__]
        assert re.search(text, rank[case.__name__][1]), rank[case.__name__][1]


def silent(rank: int, folder: str, ends: bool) -> None:
    """One rank ends after a step, or lives on without another one."""
    torch.set_num_threads(1)
    distributed: Any = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=8)
    )
    loop = Loop()
    loop.optimizer.backward(loop.loss(), weight=8)
    loop.optimizer.step()
    if rank == 1 and ends:
        os._exit(0)
    if rank == 1:
        while not pathlib.Path(folder, "error").exists():
            time.sleep(0.1)
        os._exit(0)
    try:
        loop.optimizer.backward(loop.loss(), weight=8)
    except RuntimeError as error:
        pathlib.Path(folder, "error").write_text(str(error))
    os._exit(0)


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_that_does_not_come_is_an_error(ends: bool, tmp_path: pathlib.Path) -> None:
    ranks.start(2, silent, str(tmp_path), ends)
    assert "a rank of ddp did not come to the same" in (tmp_path / "error").read_text()
