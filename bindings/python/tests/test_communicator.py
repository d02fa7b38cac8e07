# SPDX-License-Identifier: Apache-2.0
"""Threads as ranks."""

import gc
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

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


@pytest.mark.parametrize("reduced", ga.Reduced)
def test_ranks_with_parameters_of_their_own(reduced: ga.Reduced) -> None:
    """Rows of a matrix, whose gradients the program has reduced; weights are 1 : 3."""
    parts = [array("f", [0, 0]), array("f", [0, 0, 0, 0])]
    rows = [(0, 1), (1, 2)]

    def train(rank: int, comm: ga.Communicator) -> None:
        first, count = rows[rank]
        with ga.Context(ga.Config(gradient_kind=ga.GradientKind.SUM)) as c:
            group = c.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1))
            p = c.add_param(group, "p", ga.Tensor(parts[rank].buffer_info()[0], (count, 2), ga.Dtype.F32, owner=parts))
            with pytest.raises(ValueError, match="whole_shape"):
                p.set_part([3], [first])
            p.set_part([3, 2], [first, 0])
            c.set_clip(ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=100))
            c.set_communicator(comm, ga.CommunicatorOptions(shard=ga.CommShard.PARAMETERS, reduced=reduced))
            mean = reduced == ga.Reduced.MEAN
            c.accumulate([array("f", [(2 if mean else 4) * x for x in (1, 2, 3, 4, 5, 6)[2 * first :][: 2 * count]])], weight=[1, 3][rank])
            result = c.step()
            assert (result.weight, result.micro_batches) == (4, 2)
            assert result.norm == pytest.approx(91**0.5, rel=1e-15)

    on_ranks(2, train)
    assert parts == [array("f", [-1, -2]), array("f", [-3, -4, -5, -6])]


class Meeting:
    """What threads give to each other: an all_gather for each of them."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._given = [b""] * ranks

    def of(self, rank: int) -> Callable[[memoryview], bytes]:
        def all_gather(own: memoryview) -> bytes:
            assert own.readonly
            self._given[rank] = bytes(own)
            self._barrier.wait()
            found = b"".join(self._given)
            self._barrier.wait()
            return found

        return all_gather


def halves(rank: int, comm: ga.Communicator, p: "array[float]") -> ga.Context:
    """A context with a half of four elements, which communicators of both ranks hold together."""
    made = ga.Context(ga.Config(gradient_kind=ga.GradientKind.SUM))
    group = made.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1))
    made.add_param(group, "p", p).set_part([4], [2 * rank])
    made.set_clip(ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=1))
    made.set_communicator(comm, ga.CommunicatorOptions(shard=ga.CommShard.PARAMETERS))
    return made


def test_ranks_over_a_callable() -> None:
    """The same bits as over threads of the library, also when nobody but the context has the communicator."""
    ended = [array("f", [0, 0]) for _ in range(4)]

    def train(rank: int, comm: ga.Communicator, p: "array[float]") -> None:
        with halves(rank, comm, p) as c:
            del comm
            gc.collect()
            for _ in range(2):
                c.accumulate([array("f", [0.3 + rank, 0.7])], weight=[1, 3][rank])
                assert c.step().weight == 4

    def over_threads(rank: int, comm: ga.Communicator) -> None:
        train(rank, comm, ended[rank])

    meeting = Meeting(2)

    def over_callables(rank: int, _: ga.Communicator) -> None:
        train(rank, ga.Communicator.from_all_gather(rank, 2, meeting.of(rank)), ended[2 + rank])

    on_ranks(2, over_threads)
    on_ranks(2, over_callables)
    assert ended[0][0] != 0 and ended[2:] == ended[:2]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (lambda own: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda own: bytes(own)[1:], r"ValueError: all_gather returned \d+ bytes, expected \d+: \d+ of each of 1 ranks"),
        (lambda own: None, "TypeError: memoryview: a bytes-like object is required"),
    ],
)
def test_a_callable_that_fails(found: Any, text: str) -> None:
    comm = ga.Communicator.from_all_gather(0, 1, found)
    with context(array("f", [0])) as c, pytest.raises(ga.Error, match=text) as caught:
        c.set_communicator(comm)
    assert caught.value.status is ga.Status.COMMUNICATION


def test_what_a_step_of_ranks_with_their_own_parameters_sends() -> None:
    """For a clip of all, one message of less than 4 KiB with up to 20 groups, and a second one for the groups beyond."""
    sent: list[int] = []

    def all_gather(own: memoryview) -> bytes:
        sent.append(len(own))
        return bytes(own)

    for groups, want in ((1, [1360]), (20, [1360]), (21, [1360, 64])):
        with ga.Context(ga.Config(gradient_kind=ga.GradientKind.SUM)) as context:
            weights = [np.ones(3, np.float32) for _ in range(groups)]
            for k, weight in enumerate(weights):
                group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1.0))
                context.add_param(group, f"w{k}", weight)
            context.set_clip(ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=1.0))
            options = ga.CommunicatorOptions(shard=ga.CommShard.PARAMETERS)
            context.set_communicator(ga.Communicator.from_all_gather(0, 1, all_gather), options)
            for _ in range(2):
                context.accumulate([np.ones(3, np.float32) for _ in weights])
                sent.clear()
                assert context.step().clip_factor < 1
                assert sent == want


def test_a_callable_that_gathers_does_nothing_else() -> None:
    """A memoryview is not to be kept, and what needs more than all_gather says so."""
    kept: list[memoryview] = []

    def all_gather(own: memoryview) -> bytes:
        kept.append(own)
        return bytes(own) * 2

    comm = ga.Communicator.from_all_gather(1, 2, all_gather)
    assert (comm.rank, comm.ranks) == (1, 2)
    with context(array("f", [0] * 8)) as c:
        c.set_communicator(comm)
        with pytest.raises(ValueError, match="released"):
            kept[0][0]
        c.accumulate([array("f", [1] * 8)])
        with pytest.raises(ga.Error, match="the communicator has no all_to_all, because Communicator.from_all_gather"):
            c.step()


class Ended:
    """What a rank has after two windows."""

    def __init__(self) -> None:
        self.large = np.ones(70000, np.float32)
        self.small = np.ones(3, np.float32)
        self.average = np.ones(70000, np.float32)
        self.state_bytes = 0


def train_in_parts(options: ga.CommunicatorOptions) -> list[Ended]:
    """Trains two parameters, the first of which ranks divide, in two micro-batches a window.

    Backward comes to the second parameter first.
    """
    ended = [Ended(), Ended()]

    def train(rank: int, comm: ga.Communicator) -> None:
        mine = ended[rank]
        with ga.Context() as c:
            group = c.add_group(ga.Optimizer(ga.OptimizerKind.ADAM))
            large = c.add_param(group, "large", mine.large)
            small = c.add_param(group, "small", mine.small)
            c.set_communicator(comm, options)
            for k in range(4):
                gradient = (np.arange(70000) % 7 - 3 + k + rank).astype(np.float32)
                last = k % 2 == 1
                flags = ga.MicroFlags.LAST if last else ga.MicroFlags.NONE
                with c.micro_batch(1 + rank, options=ga.MicroOptions(flags=flags)) as micro:
                    micro.accumulate(small, gradient[:3])
                    if last:
                        c.ready(small)
                    micro.accumulate(large, gradient)
                    if last:
                        c.ready(small, large)
                        with pytest.raises(ga.Error, match='"large"'):
                            micro.accumulate(large, gradient)
                if last and options.overlap:
                    with pytest.raises(ga.Error, match="being exchanged"):
                        c.save_bytes()
                if last:
                    assert c.step().applied
            large.get_state("exp_avg", mine.average)
            mine.state_bytes = c.memory.optimizer_state

    on_ranks(2, train)
    return ended


def test_ranks_that_shard_and_overlap() -> None:
    plain = train_in_parts(ga.CommunicatorOptions())[0]
    assert plain.large[0] != 1
    for ended in train_in_parts(ga.CommunicatorOptions(shard=ga.CommShard.OPTIMIZER, overlap=True)):
        np.testing.assert_array_equal(ended.large, plain.large)
        np.testing.assert_array_equal(ended.small, plain.small)
        np.testing.assert_array_equal(ended.average, plain.average)
        assert ended.state_bytes < plain.state_bytes * 3 / 5


def test_local_ranks_do_not_add() -> None:
    options = ga.CommunicatorOptions(adder=ga.CommAdder.TRANSPORT)
    with (
        ga.Communicator.local(ga.Communicator.new_id(), 0, 1) as comm,
        context(array("f", [0])) as c,
        pytest.raises(ga.Error, match="adder") as caught,
    ):
        c.set_communicator(comm, options)
    assert caught.value.status is ga.Status.UNSUPPORTED


def test_what_is_ready_takes_no_more_gradients() -> None:
    p, two = array("f", [1]), array("f", [2])
    with context(p) as c, context(array("f", [0])) as other:
        c.ready()
        c.accumulate([two])
        with pytest.raises(ValueError, match="another context"):
            c.ready(*c.params, *other.params)
        c.accumulate([two])
        c.ready(*c.params)
        with pytest.raises(ga.Error, match='"p"') as caught:
            c.accumulate([two])
        assert caught.value.status is ga.Status.INVALID_STATE
        c.step()
        c.accumulate([two])
        c.step()
    assert p[0] == -3


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
        assert comm._address == 0  # freed: no call uses it
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
    with pytest.raises(ga.Error, match="rank was 2"):
        ga.Communicator.from_all_gather(2, 2, bytes)
    with pytest.raises(ga.Error, match="timeout was 0"):
        ga.Communicator.local(id, 0, 2, timeout=0)
    with pytest.raises(ga.Error):  # no module, or no MPI_Init
        ga.Communicator.mpi(0)
    with pytest.raises(ValueError, match="3 bytes"):
        ga.Communicator.nccl(b"abc", 0, 1)
    with pytest.raises(ga.Error, match="rank was 2"):
        ga.Communicator.nccl(id, 2, 2)
    with pytest.raises(ValueError, match="comm was 0"):
        ga.Communicator.from_nccl(0)
    with pytest.raises(ga.Error):  # no module, or no NCCL is loaded
        ga.Communicator.from_nccl(8)
