# SPDX-License-Identifier: Apache-2.0
"""Contexts, and what belongs to them."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NoReturn, Self

from . import _native, _raw
from ._gradients import Kept
from ._guard import Guard, Handle
from ._members import ContextMembers
from .batch_norm import BatchNorm, describe_layer
from .communicator import Communicator
from .enums import Dtype, StepOutcome
from .micro_batch import Accumulator as Accumulator
from .micro_batch import MicroBatch
from .options import (
    BatchNormOptions, CommunicatorOptions, Config, MicroOptions, Optimizer, ParamOptions, StateOptions, StepResult,
)  # fmt: skip
from .params import FlatEntry, Group, Param, Slot, describe_param
from .tensor import TensorLike, Where

_OUTCOMES = tuple(StepOutcome)


def _step_result(values: tuple[Any, ...]) -> StepResult:
    """The result with these fields; an outcome of a later version of the library stays an int."""
    if values[0] < len(_OUTCOMES):
        return StepResult._make((_OUTCOMES[values[0]], *values[1:]))
    return StepResult._make(values)


class Context(ContextMembers):
    """Adds up the gradients of micro-batches and makes optimizer steps on parameters in place.

    Tensors of numpy, torch and so on are used in place. The context keeps those of parameters until they
    are bound anew or it is closed, and gradients as long as the library reads them: for the call, but with
    GradientLife.LIVE and LENT, Nonfinite.DROP_MICRO and ClipWhen.MICRO.

    One thread at a time uses a context; different contexts are independent. Every method raises
    ``Error`` if the library refuses the call, TypeError or ValueError for a tensor of the wrong kind,
    and then has changed nothing, unless the status is FAULT.
    """

    def __init__(self, config: Config | None = None) -> None:
        config = Config() if config is None else config
        tell = None if config.on_param_done is None else self._teller(config.on_param_done)
        self._handle: Handle | None = Handle(config, tell)
        self._guard = Guard(self._handle.address, tell)
        self._where = Where(config.device, config.device_ordinal, config.stream)
        self._kept = Kept(config)
        self._result = _raw.ga_step_result().this
        self._params: list[Param] = []
        self._slots: list[Slot] = []
        self._expected: list[Any] = []

    def _teller(self, listener: Callable[[Param], object]) -> Callable[[int], object]:
        # The library outlives a context that is left to the collector, and does not keep it alive.
        reference = weakref.ref(self)

        def tell(id: int) -> None:
            context = reference()
            if context is not None:
                listener(context._params[id])

        return tell

    # ---- Life

    def close(self) -> None:
        """Frees what the library owns for the context, and lets go of its tensors.

        Waits for a call of another thread. Memory that a view still shows is freed with the view.
        """
        guard = self._guard
        if guard.is_in_callback():
            guard.refuse()
        guard.address = 0  # no call begins any more
        with guard.lock if guard.process == os.getpid() else contextlib.nullcontext():
            if self._handle is not None:
                self._handle.lent_gradients = self._kept.clear()  # if a view keeps the handle
            self._handle = None

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._guard.address == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a gradaccum.Context cannot be copied or pickled, because it uses memory of this process; "
            "save() and load() carry its state"
        )

    def _own(self, thing: Group | Param | BatchNorm) -> int:
        if thing.context is not self:
            raise ValueError(f"{thing!r} belongs to another context")
        return thing.id

    def _lent(self) -> dict[int, Any]:
        assert self._handle is not None
        return self._handle.lent

    # ---- Groups and parameters

    def add_group(self, optimizer: Optimizer) -> Group:
        """Adds a group: parameters that share an optimizer. Legal while the window is empty."""
        with self._guard as c:
            return Group(self, _raw.ga_group_add(c, optimizer._write()))

    @property
    def groups(self) -> list[Group]:
        """All groups."""
        with self._guard as c:
            return [Group(self, id) for id in range(_raw.ga_group_count(c))]

    def add_param(
        self,
        group: Group,
        name: str,
        data: TensorLike,
        *,
        shape: Sequence[int] | None = None,
        dtype: Dtype | None = None,
        options: ParamOptions | None = None,
    ) -> Param:
        """Adds a parameter, which step() reads and writes in place. Legal while the window is empty.

        shape: default that of the tensor; one for memory without dimensions, such as an ``array.array``.
        dtype: default that of the tensor; must be given for F16 and BF16 in 16-bit integers.
        """
        with self._guard as c:
            loan = self._where.borrow(
                data, f'data of parameter "{name}"', int(dtype or 0), shape, written=True
            )
            address, found, own_shape, _ = _raw.describe(loan)
            id = _raw.ga_param_add(
                c, self._own(group), name, address, found, own_shape if shape is None else shape,
                None if options is None else options._write(),
            )  # fmt: skip
            return self._added(c, [id], loan, is_flat=False)[0]

    def add_flat(
        self,
        data: TensorLike,
        entries: Sequence[FlatEntry],
        *,
        dtype: Dtype | None = None,
        options: ParamOptions | None = None,
    ) -> list[Param]:
        """Adds the parameters in one block of memory, which may have gaps: all of them or none.

        The block has one gradient in accumulate(): a block with the same offsets.
        """
        with self._guard as c:
            proxies, own_options, end = [], [], 0
            for entry in entries:
                proxy = _raw.ga_flat_entry()
                proxies.append(proxy)
                proxy.set_name(entry.name)
                proxy.set_shape(entry.shape)
                proxy.group = self._own(entry.group)
                proxy.offset = entry.offset
                count = math.prod(entry.shape)
                if entry.offset < 0 or count < 0:
                    raise ValueError(f'parameter "{entry.name}": offset and shape must not be negative')
                end = max(end, entry.offset + count)
                if entry.options is not None:
                    own_options.append(entry.options._write())
                    proxy.options = own_options[-1]
            loan = self._where.borrow(data, "data", int(dtype or 0), least=end, written=True)
            address, found, _, _ = _raw.describe(loan)
            first = _raw.ga_params_add_flat(
                c, address, found, [int(proxy.this) for proxy in proxies],
                None if options is None else options._write(),
            )  # fmt: skip
            ids = list(range(first, first + len(proxies)))
            return self._added(c, ids, loan, is_flat=True)

    def _added(self, c: int, ids: list[int], loan: Any, *, is_flat: bool) -> list[Param]:
        params = [Param(self, id, describe_param(c, id)) for id in ids]
        self._lent().update((id, loan) for id in ids)
        slot = Slot(params, is_flat)
        self._params += params
        self._slots.append(slot)
        self._expected.append(slot.expected(self._where))
        return params

    @property
    def params(self) -> list[Param]:
        """The parameters that were not removed."""
        return [param for param in self._params if not param.is_removed]

    def find_param(self, name: str) -> Param:
        """The parameter of a name."""
        with self._guard as c:
            id: int = _raw.ga_param_find(c, name)
            return self._params[id]

    # ---- Accumulate and step

    def accumulate(
        self,
        gradients: Sequence[TensorLike | int | None],
        weight: float = 1.0,
        options: MicroOptions | None = None,
        *,
        owners: Sequence[object] | None = None,
    ) -> None:
        """Adds a micro-batch to the window.

        gradients: one for each parameter and flat block in the order they were added; None: none in this
        micro-batch. An int is an address of memory like that of the parameter, which nobody can check.
        weight: samples, tokens, or 1.
        owners: of gradients that are addresses: objects that own the memory, one for each gradient or None. The
        context keeps them as long as the library reads it.
        """
        with self._guard as c:
            loans = _native.borrow_all(gradients, self._expected)
            _native.ga_accumulate(c, loans, weight, None if options is None else options._write())
            self._kept.added_all(c, loans if owners is None else owners)

    def micro_batch(
        self, weight: float = 1.0, *, index: int = -1, options: MicroOptions | None = None
    ) -> MicroBatch:
        """A micro-batch whose gradients come by part: ``with context.micro_batch(n) as micro:``.

        index: of the window's micro-batches, to open one again; -1: the next.
        """
        return MicroBatch(self, weight, index, options)

    def ready(self, *params: Param) -> None:
        """Tells that nothing more comes to these parameters in this window.

        Contributions to them are refused until it has ended. With ``Config.eager`` their update begins as soon as
        the last micro-batch has begun; step() makes those that are left, with the same bits. Parameters that are
        updated in place (``Nonfinite.IGNORE``, and no ``ClipScope.GLOBAL``) leave no way but step(): to discard the
        window, to set an option and to read or save state are refused.

        With ``CommunicatorOptions.overlap`` their gradients are exchanged by a thread of the library, as soon as the
        last micro-batch has begun, while the program goes on; step() exchanges what is left, with the same bits.
        Ranks need not call it alike.
        """
        with self._guard as c:
            _raw.ga_params_ready(c, [self._own(param) for param in params])

    def step(self) -> StepResult:
        """Ends the window: averages, checks and clips its gradient, and updates the parameters."""
        with self._guard as c:
            _native.ga_step(c, self._result)
            self._kept.release(c)
            return _step_result(_native.values_of(self._result))

    def step_result(self, window: int = 0, *, wait: bool = True) -> StepResult:
        """The result of a window by its number; 0: of the last one. The last 64 are kept."""
        with self._guard as c:
            _native.ga_step_result_get(c, window, int(wait), self._result)
            return _step_result(_native.values_of(self._result))

    def discard(self) -> None:
        """Drops the window, an open micro-batch included."""
        with self._guard as c:
            _raw.ga_discard(c)
            self._kept.release(c)

    def set_accum_schedule(self, schedule: Sequence[tuple[int, int]]) -> None:
        """Sets K by applied steps: pairs of the first step and K. An empty sequence removes it."""
        with self._guard as c:
            pairs = list(schedule)
            _raw.ga_context_set_accum_schedule(
                c, [pair[0] for pair in pairs], [pair[1] for pair in pairs], len(pairs)
            )

    # ---- Clipping, loss scale, EMA

    @property
    def loss_scale(self) -> float:
        """The factor that the program multiplies its loss by until the next step."""
        with self._guard as c:
            scale: float = _raw.ga_loss_scale(c)[0]
            return scale

    @property
    def loss_scale_address(self) -> int:
        """The address of that factor, an f32 on the device, for work on the stream."""
        with self._guard as c:
            address: int = _raw.loss_scale_address(c)
            return address

    def set_communicator(
        self, communicator: Communicator | None, options: CommunicatorOptions | None = None
    ) -> None:
        """Makes the context one of the communicator's ranks; None: it is alone again.

        Every rank calls it, between windows, with the same groups, parameters and options; the first difference
        is named in an ``Error``. From then on every rank calls ``step()``, ``discard()`` and what saves and loads
        in the same order; with ``CommShard.OPTIMIZER`` also what reads and writes state and moving averages.
        docs/devices.md has the rest.
        """
        struct = None if options is None else options._write()
        with self._guard as c:
            if communicator is None:
                _raw.ga_context_set_comm(c, 0, struct)
                return
            with communicator._in_use() as comm:
                assert self._handle is not None
                self._handle.transports.append(communicator._transport)
                _raw.ga_context_set_comm(c, comm, struct)

    @contextlib.contextmanager
    def ema_swapped(self) -> Iterator[None]:
        """Within it, the parameters are their moving averages: ``with context.ema_swapped():``.

        With ``CommShard.OPTIMIZER``, every rank enters and leaves it.
        """
        self.swap_ema(True)
        try:
            yield
        finally:
            if not self.closed:
                self.swap_ema(False)

    # ---- Batch normalisation

    def add_batch_norm(
        self,
        name: str,
        channels: int,
        gamma: Param | None = None,
        beta: Param | None = None,
        options: BatchNormOptions | None = None,
    ) -> BatchNorm:
        """Adds a layer of batch normalisation. gamma, beta: parameters [channels], or none."""
        options = BatchNormOptions() if options is None else options
        with self._guard as c:
            ids = [-1 if param is None else self._own(param) for param in (gamma, beta)]
            id = _raw.ga_bn_add(c, name, channels, *ids, options._write())
            return BatchNorm(self, id, describe_layer(c, id))

    @property
    def batch_norms(self) -> list[BatchNorm]:
        """All layers of batch normalisation."""
        with self._guard as c:
            ids = range(_raw.ga_bn_count(c))
            return [BatchNorm(self, id, describe_layer(c, id)) for id in ids]

    def find_batch_norm(self, name: str) -> BatchNorm:
        """The layer of a name."""
        with self._guard as c:
            id: int = _raw.ga_bn_find(c, name)
            return BatchNorm(self, id, describe_layer(c, id))

    # ---- State on disk

    def save(self, target: str | os.PathLike[str] | BinaryIO, options: StateOptions | None = None) -> None:
        """Saves the state of the run to a file, as a whole or not at all, or to an open one that can seek."""
        options = StateOptions() if options is None else options
        with self._guard as c:
            if isinstance(target, (str, os.PathLike)):
                _raw.ga_save(c, os.fsencode(target), options._write())
                return
            file, start = target, target.tell()

            def write(offset: int, data: memoryview) -> None:
                file.seek(start + offset)
                while data:
                    data = data[file.write(data) :]

            _raw.ga_state_write(c, _raw.write_function(), id(write), options._write())

    def load(
        self,
        source: str | os.PathLike[str] | BinaryIO | bytes | bytearray | memoryview,
        options: StateOptions | None = None,
    ) -> None:
        """Loads what save() or save_bytes() has saved, as a whole or not at all. The window is empty."""
        options = StateOptions() if options is None else options
        with self._guard as c:
            if isinstance(source, (str, os.PathLike)):
                _raw.ga_load(c, os.fsencode(source), options._write())
            elif isinstance(source, (bytes, bytearray, memoryview)):
                with memoryview(source) as view, view.cast("B") as data:
                    _raw.load_from_buffer(c, data, options._write())
            else:
                file, start = source, source.tell()
                size = file.seek(0, os.SEEK_END) - start

                def read(offset: int, data: memoryview) -> None:
                    file.seek(start + offset)
                    while data:
                        count = file.readinto(data)  # type: ignore[attr-defined]
                        if not count:
                            raise EOFError(f"the file ended at {file.tell()}")
                        data = data[count:]

                _raw.ga_state_read(c, _raw.read_function(), id(read), size, options._write())

    def save_bytes(self, options: StateOptions | None = None) -> bytearray:
        """The state of the run, in memory."""
        struct = (StateOptions() if options is None else options)._write()
        with self._guard as c:
            data = bytearray(_raw.ga_save_to_memory(c, struct, None, 0))
            _raw.save_to_buffer(c, struct, data)
            return data

    # ---- Memory and devices

    def set_stream(self, stream: int) -> None:
        """Gives the context another stream in place of ``Config.stream``: later work is queued there.

        It runs behind all that was queued before. Waits for nothing; also legal within a window.
        stream: the address that the program's ``cudaStream_t`` is, of the device and driver context of the
        stream before it; 0: the legacy default stream. Error INVALID_STATE: one of the two streams is being
        captured, and the other is no part of that capture; the context then keeps its stream.
        """
        with self._guard as c:
            _raw.ga_context_set_stream(c, stream)
            self._where.set_stream(stream)


