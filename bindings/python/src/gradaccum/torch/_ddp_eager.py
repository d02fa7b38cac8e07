# SPDX-License-Identifier: Apache-2.0
"""Parameters that are updated while a DistributedDataParallel still reduces the gradients of others.

DistributedDataParallel (DDP) reduces gradients by the bucket, and writes them to ``.grad`` at the end of backward. A
communication hook makes the same reductions in its place. When a bucket is reduced, the thread of gloo that has done it
gives the gradients to the micro-batch that is open in the library, and says that they are complete, while backward goes
on. The weights of all ranks, by which the library divides, are therefore gathered before backward.

A gradient is complete only if its micro-batch has one backward. Each backward reduces every bucket, so this holds for
all parameters or for none, and on all ranks alike: once a micro-batch had one backward, the last one of each window is
opened before its backward.
"""

# Annotations are evaluated here: DDP compares those of a hook with its own.
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from .. import Clip, ClipScope, ClipWhen, Config, MicroBatch, Nonfinite
from ._ddp import Ranks
from ._hooks import Gradients, Told
from ._ranks import Call
from ._slots import Slot, add, is_sparse


class Buckets(Told[torch.nn.Module]):
    """What the communication hook of a DistributedDataParallel knows. Optimizers of one module share it."""

    def __init__(self, owner: torch.nn.Module | None) -> None:
        super().__init__(owner)
        self.takers: weakref.WeakSet[EagerRanks] = weakref.WeakSet()
        self.kept: dict[int, int] = {}  # of parameters with a .grad before this backward, the address of .grad


def reduce(buckets: Buckets, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook: the mean over the ranks, with the bits that DDP gives without a hook."""
    distributed: Any = torch.distributed
    ddp: Any = buckets.owner()
    group = distributed.group.WORLD if ddp is None else ddp.process_group
    _divide(buckets, bucket, distributed.get_world_size(group))
    gives = [taker.takes(bucket) for taker in list(buckets.takers)]

    def reduced(future: Any) -> Tensor:
        result: Tensor = future.value()[0]
        for give in gives:
            give()
        return result

    work = distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
    found: torch.futures.Future[Tensor] = work.get_future().then(reduced)
    return found


def _divide(buckets: Buckets, bucket: GradBucket, ranks: int) -> None:
    """Divides as DDP does: it multiplies by 1/n as it copies a gradient, and divides one that was there already."""
    buffer = bucket.buffer()
    if is_sparse(buffer):
        buffer.div_(ranks)
        return
    if not buckets.kept:
        buffer.mul_(1 / ranks)
        return
    for tensor, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if buckets.kept.get(id(tensor)) == gradient.data_ptr():
            gradient.div_(ranks)
        else:
            gradient.mul_(1 / ranks)


class Taking:
    """What the open micro-batch of an optimizer takes from buckets, on the threads of gloo that reduce them.

    A context manager: after it, a reduction that is still under way gives nothing, and keeps nothing of the optimizer.
    """

    def __init__(self, owner: Gradients, micro: MicroBatch) -> None:
        self.taken: list[Slot] = []
        self.error: BaseException | None = None
        self._owner: Gradients | None = owner
        self._micro = micro
        self._buckets: list[list[tuple[Slot, Tensor]]] = []  # of those that are reduced, or were
        self._lock = threading.Lock()  # held while gradients are given to the library

    @property
    def has_begun(self) -> bool:
        """Whether something may have been taken."""
        return bool(self._buckets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # until what is being taken was taken
            self._owner = None
            del self._micro
            for parts in self._buckets:
                parts.clear()

    def follow(self, parts: list[tuple[Slot, Tensor]]) -> Callable[[], None]:
        """Before a bucket of these gradients is reduced. Returns what is to be called when it is."""
        owner = self._owner
        if owner is None:
            return lambda: None
        owner.writes([slot for slot, _ in parts])
        self._buckets.append(parts)
        return functools.partial(self._give, parts)

    def _give(self, parts: list[tuple[Slot, Tensor]]) -> None:
        with self._lock:
            owner = self._owner
            if owner is None or self.error is not None:
                return
            try:
                for slot, gradient in parts:
                    slot.gradients += 1
                    self.taken.append(slot)
                    add(self._micro, slot, gradient)
                    owner.context.ready(slot.own)
            except BaseException as error:
                self.error = error


class EagerRanks(Ranks):
    """The processes of a DistributedDataParallel whose optimizer updates parameters while backward goes on."""

    def __init__(self, ddp: torch.nn.Module, config: Config) -> None:
        super().__init__(ddp, config)
        if getattr(self._ddp, "_use_python_reducer", False):
            raise ValueError(
                'eager was True, but ddp was made with optimize_ddp="python_reducer" of torch.compile, which has no '
                "buckets"
            )
        hooks = self._ddp._comm_hooks
        named = self._ddp._get_ddp_logging_data().get("comm_hook")
        if named and not (hooks and hooks[0][0] is reduce):
            raise ValueError(
                f"eager was True, but ddp has the communication hook {named}: DistributedDataParallel takes one hook, "
                "and eager needs it, to be told when a bucket is reduced"
            )
        self._slots: dict[int, Slot] = {}  # by the id of their tensor
        self._taking: Taking | None = None  # of the open micro-batch
        self._is_whole: bool | None = None  # whether a micro-batch has one backward; None: not known yet
        self._count = 0  # backwards of this micro-batch
        self._used: set[int] = set()  # ids of parameters with a gradient of this rank in this backward

    def track(self, slots: Sequence[Slot]) -> None:
        """Parameters have been added: their gradients are looked for in buckets."""
        super().track(slots)
        self._slots.update({id(slot.tensor): slot for slot in slots})

    def connect(self) -> None:
        """Has DDP call the hook, which other optimizers of the module may have given it already."""
        if not self._ddp._comm_hooks:
            self._ddp.register_comm_hook(Buckets(self._ddp), reduce)
        self._buckets: Buckets = self._ddp._comm_hooks[0][1]
        self._buckets.takers.add(self)

    # ---- Micro-batches

    def opens(self, tells_ready: bool) -> bool:
        """Whether updates may begin within the next micro-batch, since earlier ones had one backward."""
        return tells_ready and self._is_whole is True

    def open(self, weight: float, is_weighed: bool) -> tuple[float, float | None]:
        """Gathers the weights before backward, by which the library divides."""
        self._weights = self._meet(Call.MICRO_BATCH, weight)
        return self.take(weight, None)

    @contextlib.contextmanager
    def micro_batch(self, weight: float, gradients: Gradients | None) -> Iterator[None]:
        """Backwards of which the weight of this rank is known before; their buckets go to gradients."""
        self._count = 0
        taking = None if gradients is None or gradients.micro is None else Taking(gradients, gradients.micro)
        self._taking = taking
        try:
            with super().micro_batch(weight, gradients), taking or contextlib.nullcontext():
                yield
            if taking is not None:
                if taking.error is not None:
                    raise taking.error
                self.begin()
                for slot in taking.taken:
                    slot.tensor.grad = None
        except BaseException:
            # What was taken depends on the threads of gloo, but all ranks are to go on alike.
            if taking is not None and taking.has_begun and not self._context.closed:
                self._context.discard()
            raise
        finally:
            self._taking = None
            if taking is not None:
                self._weights = None
        if self._count == 1 and self._is_whole is None:
            self._is_whole = True

    # ---- Hooks

    def reached(self, parameter: int, gradient: Tensor) -> Tensor | None:
        """A gradient of this rank is there: notes what its bucket needs to know, and weighs it."""
        tensor = self._tracked[parameter]
        if self._is_ready:
            self._buckets.kept.clear()
            self._used.clear()
            self._count += 1
            if self._count > 1 and self._weight is not None:
                self._is_whole = False
                if self._taking is not None:
                    raise RuntimeError(
                        "a micro-batch had a second backward, but the updates of its parameters have begun after the "
                        "first, since earlier micro-batches had one. From now on all updates wait for step(): do this "
                        "window again"
                    )
        if tensor.grad is not None and not is_sparse(tensor.grad):
            self._buckets.kept[id(tensor)] = tensor.grad.data_ptr()
        self._used.add(id(tensor))
        return super().reached(parameter, gradient)

    def takes(self, bucket: GradBucket) -> Callable[[], None]:
        """Before a bucket is reduced. Returns what is to be called when it is."""
        if self._taking is None:
            return lambda: None
        parts = []
        if not is_sparse(bucket.buffer()):
            for tensor, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                slot = self._slots.get(id(tensor))
                # A parameter that has no gradient here may have one on another rank, which the end of backward tells.
                if slot is not None and id(tensor) in self._used:
                    parts.append((slot, gradient.as_strided(slot.shape, slot.stride)))  # the memory order of both
        return self._taking.follow(parts)


def eager_ranks(ddp: torch.nn.Module, config: Config, clip: Clip | None) -> Ranks:
    """The processes of a DistributedDataParallel whose optimizer has eager, with a clip or none."""
    if config.nonfinite == Nonfinite.DROP_MICRO or (clip is not None and clip.when == ClipWhen.MICRO):
        return Ranks(ddp, config)  # each micro-batch is checked as a whole, at its end: all updates wait for step()
    if config.nonfinite == Nonfinite.IGNORE and (clip is None or clip.scope != ClipScope.GLOBAL):
        raise ValueError(
            "eager was True, but with Nonfinite.IGNORE and without a clip by the global norm, parameters are updated "
            "in place: after an exception in backward, replicas under ddp= would differ for good. With "
            "Nonfinite.SKIP_STEP, the window is dropped"
        )
    return EagerRanks(ddp, config)
