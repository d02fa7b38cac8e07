# SPDX-License-Identifier: Apache-2.0
"""Two processes under DistributedDataParallel."""

import pathlib

import gradaccum.torch as gt
import pytest
import ranks
import torch
from conftest import Task, close, train


def rank_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    try:
        task = Task()
        net = task.net()
        with pytest.raises(RuntimeError, match="several processes"):
            gt.AdamW(net.parameters())
        gt.AdamW(net.parameters(), distributed=False)
        model = torch.nn.parallel.DistributedDataParallel(net)
        optimizer = gt.AdamW(net.parameters(), lr=0.01, ddp=model)
        for step in range(6):
            for at in (0, 4):  # a micro-batch of four, two of them here
                part = slice(at + 2 * rank, at + 2 * rank + 2)
                loss = task.loss(model, task.x[step][part], task.y[step][part])
                if step % 2:
                    optimizer.backward(loss, weight=4)
                else:
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.accumulate(weight=4)
            optimizer.step()
        with model.no_sync():
            task.whole(model, 0).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="no_sync"):
            optimizer.accumulate()
        torch.save(net.state_dict(), f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def test_two_processes_are_one(tmp_path: pathlib.Path) -> None:
    ranks.start(2, rank_of_two, str(tmp_path))
    task = Task()
    want = train(task, lambda params: torch.optim.AdamW(params, lr=0.01), steps=6)
    for rank in range(2):
        net = task.net()
        net.load_state_dict(torch.load(tmp_path / f"{rank}.pt"))
        close(want, net, 1e-12)
