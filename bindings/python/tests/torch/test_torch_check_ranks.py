# SPDX-License-Identifier: Apache-2.0
"""gradaccum.check over two ranks of a DistributedDataParallel, and of FSDP2."""

import contextlib
from collections.abc import Callable
from typing import Any

import check_loops
import pytest
import ranks
import torch
from gradaccum import check
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

Loss = Callable[[Tensor, int, list[int]], Tensor]
EVEN = [[4, 4], [4, 4], [4, 4]]  # samples of each rank in the micro-batches of a window
BY_RANK = [[6, 2], [6, 2], [6, 2]]
UNEVEN = [[6, 2], [1, 3], [4, 4]]


def _mean(loss: Tensor, rank: int, shares: list[int]) -> Tensor:
    return loss / len(EVEN)


def _weighted(loss: Tensor, rank: int, shares: list[int]) -> Tensor:
    return loss * shares[rank] * 2 / sum(map(sum, UNEVEN))


def _twice(loss: Tensor, rank: int, shares: list[int]) -> Tensor:
    return loss / len(EVEN) / 2


def _summed(loss: Tensor, rank: int, shares: list[int]) -> Tensor:
    return loss / len(EVEN) * 2


CASES: dict[str, tuple[Loss, list[list[int]], str, str | None]] = {
    # How the loss is scaled, the shares of the ranks, which micro-batches are inside no_sync(), and the fault.
    "mean": (_mean, EVEN, "++-", None),
    "always_reduced": (_mean, EVEN, "---", None),
    "weighted": (_weighted, UNEVEN, "++-", None),
    "ignored": (_mean, BY_RANK, "++-", "weights of ranks ignored"),
    "twice": (_twice, EVEN, "++-", "1/R once too often over ranks"),
    "summed": (_summed, EVEN, "++-", "sum over ranks for mean"),
    "last": (_mean, EVEN, "--+", "last micro-batch not reduced"),
    "never": (_mean, EVEN, "+++", "gradients not reduced over ranks"),
}


SHARDED = ("mean", "weighted", "ignored", "twice")
"""Cases that FSDP2 trains too, which reduces in every backward."""


def trains(rank: int) -> dict[str, tuple[str, list[str]]]:
    """For each case the report of a rank, and the names of its faults."""
    return {
        "equal": _case(rank, *CASES["mean"][:3], alike=True),
        **{name: _case(rank, *case[:3]) for name, case in CASES.items()},
        **{f"sharded_{name}": _case(rank, *CASES[name][:3], sharded=True) for name in SHARDED},
    }


def _case(
    rank: int, scale: Loss, shares: list[list[int]], inside: str, *, sharded: bool = False, alike: bool = False
) -> tuple[str, list[str]]:
    torch.manual_seed(1)
    module: Any = check_loops.model()
    if sharded:
        fully_shard(module[0])
        ddp: Any = fully_shard(module)
        inside = "---"
    else:
        ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    torch.manual_seed(rank)
    with check.record(ddp, optimizer) as recording:
        for _ in range(3):
            for share, within in zip(shares, inside, strict=True):
                if alike:
                    torch.manual_seed(4)
                x, y = check_loops.batch(share[rank])
                with ddp.no_sync() if within == "+" else contextlib.nullcontext():
                    loss = torch.nn.functional.cross_entropy(ddp(x), y)
                    scale(loss, rank, share).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return str(recording.report), [fault.name for fault in recording.report.faults]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, list[str]]]]:
    return ranks.run(tmp_path_factory.mktemp("check"), 2, trains)


@pytest.mark.parametrize("name", [*CASES, *(f"sharded_{name}" for name in SHARDED)])
def test_ranks_are_one_batch_or_named(found: list[dict[str, tuple[str, list[str]]]], name: str) -> None:
    wanted = CASES[name.removeprefix("sharded_")][3]
    for rank in found:
        text, faults = rank[name]
        assert faults == ([] if wanted is None else [wanted]), text
    assert found[0][name] == found[1][name], "the ranks report the same"


def test_equal_gradients_of_ranks_are_known_together(found: list[dict[str, tuple[str, list[str]]]]) -> None:
    text, faults = found[0]["equal"]
    assert not faults and "? ? ? ? ? ? for" in text, text
    assert "micro-batch 3 of rank 1 are multiples of one another: only the sum of what they were multiplied by is known, 3" in text
