# SPDX-License-Identifier: Apache-2.0
"""Threads as ranks."""

import threading
import time
from array import array
from collections.abc import Callable

import gradaccum as ga
import numpy as np
import pytest


def on_ranks(ranks: int, body: Callable[[int, ga.Communicator], None], timeout: float = 60) -> None:
    """Runs body(rank, communicator) in a thread for each rank, and raises what any of them raises."""
    id = ga.Communicator.new_id()
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with ga.Communicator.local(id, rank, ranks, timeout=timeout) as comm:
                body(rank, comm)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def context(p: "array[float]") -> ga.Context:
    made = ga.Context()
    group = made.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1))
    made.add_param(group, "p", p)
    return made


def test_two_threads_are_two_ranks() -> None:
    ended = [array("f", [0, 0]), array("f", [0, 0])]

    def train(rank: int, comm: ga.Communicator) -> None:
        assert (comm.rank, comm.ranks) == (rank, 2)
        with context(ended[rank]) as c:
            c.set_communicator(comm, ga.CommunicatorOptions(check_every=1, hand_out=True))
            c.accumulate([array("f", [4, 8])], weight=[1, 3][rank])
            if rank == 0:
                c.accumulate([array("f", [0, 0])], weight=0)
            result = c.step()
            assert (result.weight, result.micro_batches) == (4, 3)
            c.set_communicator(None)

    on_ranks(2, train)
    assert ended == [array("f", [-4, -8])] * 2


def test_batch_normalisation_over_the_window_of_all_ranks() -> None:
    """Rank 1 has no data, and normalises nothing."""
    x = np.random.default_rng(5).standard_normal((6, 3)).astype(np.float32)
    dy = np.random.default_rng(6).standard_normal((6, 3)).astype(np.float32)
    y, dx = np.empty_like(x), np.empty_like(x)

    def train(rank: int, comm: ga.Communicator) -> None:
        part = [slice(0, 4), slice(0, 0), slice(4, 6)][rank]
        with context(array("f", [0])) as c:
            bn = c.add_batch_norm("bn", 3, options=ga.BatchNormOptions(mode=ga.BnMode.WINDOW))
            c.set_communicator(comm)
            if rank != 1:
                bn.accumulate(x[part])
            bn.finalize()
            assert bn.statistics()[2] == 6
            if rank != 1:
                bn.forward(x[part], y[part])
                with c.micro_batch(len(x[part]), index=0):
                    bn.backward_accumulate(x[part], dy[part])
                with c.micro_batch(len(x[part]), index=0), pytest.raises(ga.Error, match="backward_finalize"):
                    bn.backward(x[part], dy[part], dx[part])
            bn.backward_finalize()
            if rank != 1:
                with c.micro_batch(len(x[part]), index=0):
                    bn.backward(x[part], dy[part], dx[part])
            assert c.step().applied

    on_ranks(3, train)
    mean, variance = x.mean(0, np.float64), x.astype(np.float64).var(0)
    hat = (x - mean) / np.sqrt(variance + 1e-5)
    np.testing.assert_allclose(y, hat, rtol=1e-4, atol=1e-5)
    # Each dy is of a mean over its micro-batch, of 4 samples and of 2.
    weights = np.array([4, 4, 4, 4, 2, 2])[:, None]
    shared = ((weights * dy).sum(0) + hat * (weights * dy * hat).sum(0)) / (weights * 6)
    np.testing.assert_allclose(dx, (dy - shared) / np.sqrt(variance + 1e-5), rtol=1e-4, atol=1e-5)


def test_a_rank_that_does_not_come() -> None:
    comm = ga.Communicator.local(ga.Communicator.new_id(), 0, 2, timeout=0.2)
    with context(array("f", [0])) as c, pytest.raises(ga.Error, match="for rank 1") as caught:
        c.set_communicator(comm)
    assert caught.value.status == ga.Status.COMMUNICATION


def test_abort_frees_a_thread_that_waits() -> None:
    comm = ga.Communicator.local(ga.Communicator.new_id(), 0, 2)
    statuses = []

    def wait() -> None:
        with context(array("f", [0])) as c, pytest.raises(ga.Error) as caught:
            c.set_communicator(comm)
        statuses.append(caught.value.status)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    comm.abort()
    thread.join()
    assert statuses == [ga.Status.COMMUNICATION]


def test_closed_twice_and_used_afterwards() -> None:
    id = ga.Communicator.new_id()
    comm = ga.Communicator.local(id, 0, 1)
    with context(array("f", [0])) as c:
        c.set_communicator(comm)
        comm.close()
        comm.close()
        c.accumulate([array("f", [1])])
        assert c.step().outcome == ga.StepOutcome.APPLIED  # the context keeps what it needs
        for call in (lambda: comm.rank, comm.abort, lambda: c.set_communicator(comm)):
            with pytest.raises(ga.Error, match="closed"):
                call()


def test_bad_arguments() -> None:
    id = ga.Communicator.new_id()
    with pytest.raises(ValueError, match="3 bytes"):
        ga.Communicator.local(b"abc", 0, 1)
    with pytest.raises(ga.Error, match="rank was 2"):
        ga.Communicator.local(id, 2, 2)
    with pytest.raises(ga.Error, match="timeout was 0"):
        ga.Communicator.local(id, 0, 2, timeout=0)
    with pytest.raises(ga.Error):  # no module, or no MPI_Init
        ga.Communicator.mpi(0)
