# SPDX-License-Identifier: Apache-2.0
"""Processes over gloo, each of which runs a function as a rank."""

import datetime
import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch

# What takes seconds to import. Ranks are forked from a server that has done so, and has never computed: the only threads
# that it has are those of OpenBLAS, which stops them for a fork.
_IMPORTED = (
    "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "gradaccum.torch", "pytest",
)  # fmt: skip


def _rank(rank: int, ranks: int, folder: str, module: str, name: str, arguments: tuple[Any, ...]) -> None:
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    torch.set_num_threads(1)
    distributed: Any = torch.distributed
    timeout = datetime.timedelta(seconds=120)  # of a rank that waits for one that does not come
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks, timeout=timeout
    )
    found = getattr(importlib.import_module(module), name)(rank, *arguments)
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.barrier()  # a rank that ends must not be what another one sees
    distributed.destroy_process_group()


def start(ranks: int, function: Callable[..., None], *arguments: Any) -> None:
    """Calls the function in a process for each rank, with the rank and the arguments, and waits for all of them."""
    multiprocessing: Any = torch.multiprocessing
    multiprocessing.set_forkserver_preload(list(_IMPORTED))
    multiprocessing.start_processes(function, args=arguments, nprocs=ranks, start_method="forkserver")


def run(folder: pathlib.Path, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What the function returns on each rank; it is called with the rank, and the arguments."""
    start(ranks, _rank, ranks, str(folder), function.__module__, function.__name__, arguments)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def mine(rank: int, counts: tuple[int, ...]) -> slice:
    """A rank's part of the samples of a micro-batch, of which each rank has so many."""
    at = sum(counts[:rank])
    return slice(at, at + counts[rank])
