# SPDX-License-Identifier: Apache-2.0
"""Contexts, and what belongs to them."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, NoReturn, Self

from . import _native, _raw
from .communicator import Communicator
from .enums import (
    BnLayout, BnSpread, ClipWhen, Device, Dtype, GradientLife, Nonfinite, Settings, Status,
)  # fmt: skip
from .errors import Error
from .options import (
    BatchNormInfo, BatchNormOptions, Clip, CommunicatorOptions, Config, Ema, LossScaler, Memory,
    MicroOptions, Optimizer, ParamInfo, ParamOptions, Schedule, StateInfo, StateOptions, StepResult, Window, step_result,
)  # fmt: skip
from .tensor import ANY_INDEX, HOST, Tensor, TensorLike, Where, new_tensor


class _Handle:
    """A context of C, which lives as long as the context or a view of its memory."""

    __slots__ = ("__weakref__", "address", "log", "lent", "lent_gradients", "tell")

    def __init__(self, config: Config, tell: Callable[[int], object] | None) -> None:
        self.address = 0
        self.log = config.log
        self.tell = tell
        self.lent: dict[int, Any] = {}  # of each parameter, the loan of its memory
        self.lent_gradients: list[Any] = []  # which threads of the library may still read
        struct = config._write()
        if self.log is not None:
            struct.log = _raw.log_function()
            struct.log_user = id(self.log)
        if tell is not None:
            struct.on_param_done = _raw.param_done_function()
            struct.on_param_done_user = id(tell)
        self.address = _raw.ga_context_create(struct)

    def __del__(
        self,
        destroy: Callable[[int], None] = _native.ga_context_destroy,
        runs_callback: Callable[[object], bool] = _native.runs_callback,
    ) -> None:
        if self.address and runs_callback(self.tell):  # the context would wait for this thread, its own
            threading.Thread(target=self._destroy, daemon=False).start()
        elif self.address:
            destroy(self.address)

    def _destroy(self) -> None:
        _native.ga_context_destroy(self.address)


# Threads of the library call on_param_done, but not while the interpreter ends, and not in a child.
_native.begin_callbacks()
atexit.register(_native.end_callbacks)
os.register_at_fork(after_in_child=_native.forget_callbacks)


class _Guard:
    """Lets one thread at a time into a context."""

    __slots__ = ("address", "lock", "process", "tell", "thread")

    def __init__(self, address: int, tell: Callable[[int], object] | None) -> None:
        self.address = address
        self.tell = tell
        self.lock = threading.Lock()
        self.thread = 0
        self.process = os.getpid()

    def __enter__(self, ident: Callable[[], int] = threading.get_ident) -> int:
        if not self.lock.acquire(False):
            self.refuse()
        address = self.address
        if not address:
            self.lock.release()
            self.refuse()
        self.thread = ident()
        return address

    def __exit__(self, *_: object) -> None:
        self.thread = 0
        self.lock.release()

    def is_in_callback(self) -> bool:
        """Whether this thread runs a callback of the context."""
        return self.thread == threading.get_ident() or _native.runs_callback(self.tell)

    def refuse(self) -> NoReturn:
        if self.is_in_callback():
            why = "a callback used the context whose call it was called from"
        elif not self.address:
            why = "the context is closed"
        elif self.process != os.getpid():
            why = "the context belongs to the process that was forked; create one in this process"
        else:
            why = "the context is in use by another thread; one thread at a time uses a context"
        raise Error(Status.INVALID_STATE, why)


class _Kept:
    """Loans of gradients that the library reads after the call that brought them."""

    _READ = object()  # in place of a first gradient that has been read

    def __init__(self, config: Config) -> None:
        self.live = config.gradient_life == GradientLife.LIVE
        self.drops = config.nonfinite == Nonfinite.DROP_MICRO
        self.late = self.drops  # parts are read when the micro-batch ends
        self.first: dict[int, Any] = {}
        self.until_step: list[Any] = []
        self.until_end: list[Any] = []

    def added(self, param: Param, loan: Any, known: bool) -> None:
        if self.late:
            self.until_end.append(loan)
        if self.live:
            self.keep_first(param, loan, known)

    def added_all(self, *loans: Any) -> None:
        if self.late:
            self.until_end += loans
        if self.live:
            self.until_step += loans

    # A micro-batch that is dropped or has the weight 0 is not read, so the one after it may be the first
    # that is. What is not known is kept until the step.
    def keep_first(self, param: Param, loan: Any, known: bool) -> None:
        if self.drops or not known:
            self.until_step.append(loan)
        else:
            self.first[param.id] = self._READ if param.id in self.first else loan

    def micro_ended(self) -> None:
        self.until_end.clear()

    def window_ended(self) -> None:
        self.until_end.clear()
        self.until_step.clear()
        self.first.clear()

    def loans(self) -> list[Any]:
        first = [loan for loan in self.first.values() if loan is not self._READ]
        return [*first, *self.until_step, *self.until_end]

    def count(self) -> int:
        """How many loans are kept."""
        return len(self.loans())


class _Slot:
    """One of the gradients of accumulate(): that of a parameter or of a flat block."""

    __slots__ = ("is_flat", "params")

    def __init__(self, params: list[Param], is_flat: bool) -> None:
        self.params = params
        self.is_flat = is_flat

    def expected(self, where: Where) -> Any:
        """What the gradient must be like; None: it is not read any more."""
        alive = [param for param in self.params if not param.is_removed]
        if not alive:
            return None
        first = alive[0]
        if not self.is_flat:
            return first._gradient
        itemsize = first.gradient_dtype.itemsize
        end = max((param._offset + param.count) * param.gradient_dtype.itemsize for param in alive)
        what = f'gradient of the block of parameter "{first.name}"'
        return where.expect(what, first.gradient_dtype, least=-(-end // itemsize))


@dataclass(frozen=True)
class FlatEntry:
    """One parameter within a block of memory."""

    name: str
    """Its name."""
    group: Group
    """Its group."""
    shape: Sequence[int]
    """Its dimensions."""
    offset: int
    """Elements from the start of the block."""
    options: ParamOptions | None = None
    """Its options; None: the defaults."""


class Context:
    """Adds up the gradients of micro-batches and makes optimizer steps on parameters in place.

    Tensors of numpy, torch and so on are used in place. The context keeps those of parameters until they
    are bound anew or it is closed, and gradients as long as the library reads them: for the call, but with
    GradientLife.LIVE, Nonfinite.DROP_MICRO and ClipWhen.MICRO.

    One thread at a time uses a context; different contexts are independent. Every method raises
    ``Error`` if the library refuses the call, TypeError or ValueError for a tensor of the wrong kind,
    and then has changed nothing, unless the status is FAULT.
    """

    def __init__(self, config: Config | None = None) -> None:
        config = Config() if config is None else config
        tell = None if config.on_param_done is None else self._teller(config.on_param_done)
        self._handle: _Handle | None = _Handle(config, tell)
        self._guard = _Guard(self._handle.address, tell)
        self._where = Where(config.device, config.device_ordinal, config.stream)
        self._kept = _Kept(config)
        self._result = _raw.ga_step_result().this
        self._params: list[Param] = []
        self._slots: list[_Slot] = []
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
                self._handle.lent_gradients = self._kept.loans()  # if a view keeps the handle
            self._handle = None
            self._kept.window_ended()

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
                count = 1
                for dimension in entry.shape:
                    count *= dimension
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
        params = [Param(self, id, _describe(c, id)) for id in ids]
        self._lent().update((id, loan) for id in ids)
        slot = _Slot(params, is_flat)
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

    @property
    def slot_count(self) -> int:
        """How many gradients accumulate() takes: one for each parameter and flat block that was added."""
        with self._guard as c:
            slots: int = _raw.ga_slot_count(c)
            return slots

    # ---- Accumulate and step

    def accumulate(
        self,
        gradients: Sequence[TensorLike | int | None],
        weight: float = 1.0,
        options: MicroOptions | None = None,
    ) -> None:
        """Adds a micro-batch to the window.

        gradients: one for each parameter and flat block in the order they were added; None: none in this
        micro-batch. An int is an address of memory like that of the parameter, which nobody can check.
        weight: samples, tokens, or 1.
        """
        with self._guard as c:
            loans = _native.borrow_all(gradients, self._expected)
            _native.ga_accumulate(c, loans, weight, None if options is None else options._write())
            if self._kept.live and weight != 0:
                for slot, loan in zip(self._slots, loans, strict=True):
                    if loan is not None:
                        for param in slot.params:
                            self._kept.keep_first(param, loan, True)

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
            self._kept.window_ended()
            return step_result(_native.values_of(self._result))

    def step_result(self, window: int = 0, *, wait: bool = True) -> StepResult:
        """The result of a window by its number; 0: of the last one. The last 64 are kept."""
        with self._guard as c:
            _native.ga_step_result_get(c, window, int(wait), self._result)
            return step_result(_native.values_of(self._result))

    @property
    def window(self) -> Window:
        """The state of the window."""
        with self._guard as c:
            struct = _raw.ga_window_info()
            _raw.ga_window(c, struct)
            return Window._read(struct)

    def discard(self) -> None:
        """Drops the window, an open micro-batch included."""
        with self._guard as c:
            _raw.ga_discard(c)
            self._kept.window_ended()

    def set_accum_steps(self, accum_steps: int) -> None:
        """Sets K of the windows to come; 0: any number of micro-batches."""
        with self._guard as c:
            _raw.ga_context_set_accum_steps(c, accum_steps)

    def set_accum_schedule(self, schedule: Sequence[tuple[int, int]]) -> None:
        """Sets K by applied steps: pairs of the first step and K. An empty sequence removes it."""
        with self._guard as c:
            pairs = list(schedule)
            _raw.ga_context_set_accum_schedule(
                c, [pair[0] for pair in pairs], [pair[1] for pair in pairs], len(pairs)
            )

    def set_steps(self, steps: int) -> None:
        """Sets the number of applied steps, for a run that goes on from elsewhere."""
        with self._guard as c:
            _raw.ga_context_set_steps(c, steps)

    # ---- Clipping, loss scale, EMA

    def set_clip(self, clip: Clip | None) -> None:
        """Clips the gradients of all groups without a clip of their own; None: clips no more."""
        with self._guard as c:
            _raw.ga_context_set_clip(c, None if clip is None else clip._write())
            self._clips_changed(c)

    @property
    def clip(self) -> Clip:
        """The clip that was set or loaded; the defaults without one."""
        with self._guard as c:
            struct = _raw.ga_clip()
            _raw.ga_context_clip(c, struct)
            return Clip._read(struct)

    def _clips_changed(self, c: int) -> None:
        """Asks the library whether it reads parts when their micro-batch ends."""
        struct = _raw.ga_clip()
        _raw.ga_context_clip(c, struct)
        whens = {struct.when}
        for id in range(_raw.ga_group_count(c)):
            _raw.ga_group_clip(c, id, struct)
            whens.add(struct.when)
        # A MICRO clip that clips nothing counts too, although the library then reads parts in the call.
        self._kept.late = self._kept.drops or ClipWhen.MICRO in whens

    def set_loss_scaler(self, scaler: LossScaler | None) -> None:
        """Gives the context a dynamic loss scale; None removes it."""
        with self._guard as c:
            _raw.ga_context_set_loss_scaler(c, None if scaler is None else scaler._write())

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

    def set_ema(self, ema: Ema | None) -> None:
        """Keeps a moving average of every parameter; None: keeps none."""
        with self._guard as c:
            _raw.ga_context_set_ema(c, None if ema is None else ema._write())

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
            comm = communicator._enter()
            try:
                _raw.ga_context_set_comm(c, comm, struct)
            finally:
                communicator._exit()

    def swap_ema(self, on: bool) -> None:
        """Exchanges parameters and their moving averages, or takes that back.

        With ``CommShard.OPTIMIZER``, on every rank.
        """
        with self._guard as c:
            _raw.ga_ema_swap(c, int(on))

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
            return BatchNorm(self, id, _describe_layer(c, id))

    @property
    def batch_norms(self) -> list[BatchNorm]:
        """All layers of batch normalisation."""
        with self._guard as c:
            ids = range(_raw.ga_bn_count(c))
            return [BatchNorm(self, id, _describe_layer(c, id)) for id in ids]

    def find_batch_norm(self, name: str) -> BatchNorm:
        """The layer of a name."""
        with self._guard as c:
            id: int = _raw.ga_bn_find(c, name)
            return BatchNorm(self, id, _describe_layer(c, id))

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
            self._kept.window_ended()
            if options.settings == Settings.TAKE:
                self._clips_changed(c)

    def save_bytes(self, options: StateOptions | None = None) -> bytearray:
        """The state of the run, in memory."""
        struct = (StateOptions() if options is None else options)._write()
        with self._guard as c:
            data = bytearray(_raw.ga_save_to_memory(c, struct, None, 0))
            _raw.save_to_buffer(c, struct, data)
            return data

    # ---- Memory and devices

    def prepare(self) -> None:
        """Allocates the library's arrays, which the first contribution would do otherwise."""
        with self._guard as c:
            _raw.ga_prepare(c)

    @property
    def memory(self) -> Memory:
        """Bytes that the library owns for the context."""
        with self._guard as c:
            struct = _raw.ga_memory()
            _raw.ga_context_memory(c, struct)
            return Memory._read(struct)

    def synchronize(self) -> None:
        """Waits until all work of the context is done."""
        with self._guard as c:
            _raw.ga_synchronize(c)

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


class Group:
    """Parameters that share an optimizer. Made by Context.add_group()."""

    __slots__ = ("context", "id")

    def __init__(self, context: Context, id: int) -> None:
        self.context = context
        self.id = id

    def __repr__(self) -> str:
        return f"<gradaccum.Group {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and other.context is self.context and other.id == self.id

    def __hash__(self) -> int:
        return hash((id(self.context), self.id))

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, with the learning rate and the weight decay that were set last."""
        with self.context._guard as c:
            struct = _raw.ga_optimizer(0, 0)
            _raw.ga_group_optimizer(c, self.id, struct)
            return Optimizer._read(struct)

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        with self.context._guard as c:
            _raw.ga_group_set_optimizer(c, self.id, optimizer._write())

    @property
    def lr(self) -> float:
        """The learning rate of the next applied step. What is set is its peak under a schedule."""
        with self.context._guard as c:
            lr: float = _raw.ga_group_lr(c, self.id)
            return lr

    @lr.setter
    def lr(self, lr: float) -> None:
        with self.context._guard as c:
            _raw.ga_group_set_lr(c, self.id, lr)

    @property
    def last_lr(self) -> float:
        """The learning rate of the last applied step; 0 before the first."""
        with self.context._guard as c:
            lr: float = _raw.ga_group_last_lr(c, self.id)
            return lr

    def set_weight_decay(self, weight_decay: float) -> None:
        """Sets the weight decay."""
        with self.context._guard as c:
            _raw.ga_group_set_weight_decay(c, self.id, weight_decay)

    def set_frozen(self, frozen: bool) -> None:
        """Freezes or unfreezes each parameter that the group has now."""
        with self.context._guard as c:
            _raw.ga_group_set_frozen(c, self.id, int(frozen))

    def set_schedule(self, schedule: Schedule | None) -> None:
        """Sets the schedule of the learning rate; None removes it."""
        with self.context._guard as c:
            _raw.ga_group_set_schedule(c, self.id, None if schedule is None else schedule._write())

    def set_clip(self, clip: Clip | None) -> None:
        """Gives the group a clip of its own; None: the context's again."""
        with self.context._guard as c:
            _raw.ga_group_set_clip(c, self.id, None if clip is None else clip._write())
            self.context._clips_changed(c)

    @property
    def clip(self) -> Clip:
        """What the group is clipped by: a clip of its own, or the context's."""
        with self.context._guard as c:
            struct = _raw.ga_clip()
            _raw.ga_group_clip(c, self.id, struct)
            return Clip._read(struct)


def _describe(c: int, id: int) -> ParamInfo:
    struct = _raw.ga_param_info()
    _raw.ga_param_describe(c, id, struct)
    shape = tuple(struct.dimension(axis) for axis in range(struct.rank))
    return ParamInfo._read(struct, shape=shape)


class Param:
    """A parameter. Made by Context.add_param()."""

    __slots__ = (
        "_gradient", "_offset", "context", "count", "dtype", "gradient_dtype", "id", "is_removed", "name",
        "shape",
    )  # fmt: skip

    def __init__(self, context: Context, id: int, info: ParamInfo) -> None:
        self.context = context
        self.id = id
        self.name = info.name
        self.shape = info.shape
        self.dtype = info.dtype
        self.gradient_dtype = info.gradient_dtype
        self.count = info.count
        self.is_removed = False
        self._offset = info.offset
        self._gradient = context._where.expect(
            f'gradient of parameter "{info.name}"', info.gradient_dtype, info.shape
        )

    def __reduce__(self) -> NoReturn:
        self.context.__reduce__()

    def __repr__(self) -> str:
        return f'<gradaccum.Param "{self.name}" {self.dtype.name} {list(self.shape)}>'

    @property
    def info(self) -> ParamInfo:
        """What the library knows of the parameter."""
        with self.context._guard as c:
            return _describe(c, self.id)

    @property
    def slot(self) -> int:
        """Which gradient of accumulate() is the parameter's; those of a flat block share one."""
        with self.context._guard as c:
            slot: int = _raw.ga_param_slot(c, self.id)
            return slot

    def bind(self, data: TensorLike) -> None:
        """Tells that the parameter has moved: data holds its values now. Between windows."""
        context = self.context
        with context._guard as c:
            loan = context._where.borrow(
                data, f'data of parameter "{self.name}"', self.dtype, self.shape, written=True
            )
            _raw.ga_param_bind(c, self.id, loan)
            context._lent()[self.id] = loan

    def changed(self) -> None:
        """Tells that the program has written the parameter: its master weights are taken anew.

        Needless without master weights, and with ``ParamOptions(follow_data=True)``.
        """
        with self.context._guard as c:
            _raw.ga_param_changed(c, self.id)

    def set_frozen(self, frozen: bool) -> None:
        """Freezes the parameter, or unfreezes it. Between windows."""
        with self.context._guard as c:
            _raw.ga_param_set_frozen(c, self.id, int(frozen))

    def set_lr_scale(self, lr_scale: float) -> None:
        """Multiplies the group's learning rate for this parameter."""
        with self.context._guard as c:
            _raw.ga_param_set_lr_scale(c, self.id, lr_scale)

    def set_weight_decay_scale(self, weight_decay_scale: float) -> None:
        """Multiplies the group's weight decay for this parameter."""
        with self.context._guard as c:
            _raw.ga_param_set_weight_decay_scale(c, self.id, weight_decay_scale)

    def remove(self) -> None:
        """Removes the parameter: its tensor is not touched any more. Between windows."""
        context = self.context
        with context._guard as c:
            slot = _raw.ga_param_slot(c, self.id)
            _raw.ga_param_remove(c, self.id)
            self.is_removed = True
            context._lent().pop(self.id)
            context._expected[slot] = context._slots[slot].expected(context._where)

    def gradient(self) -> Tensor:
        """The reduced, clipped gradient of a parameter of an EXTERNAL group, in place.

        Legal after an applied step until the next accumulate(), discard() or step(); the memory is the
        context's, and holds something else after that.
        """
        context = self.context
        with context._guard as c:
            address, dtype, count = _raw.ga_gradient(c, self.id)
            shape = self.shape if count == self.count else (count,)
            return Tensor(
                address, shape, Dtype(dtype), device=context._where.device,
                ordinal=context._where.ordinal, read_only=True, owner=context._handle,
            )  # fmt: skip

    def ema(self, out: TensorLike | None = None) -> Tensor | TensorLike:
        """Writes the moving average of the parameter to out, of any dtype; default a new tensor.

        With ``CommShard.OPTIMIZER``, on every rank.
        """
        context = self.context
        with context._guard as c:
            if out is None:
                if context._where.device != Device.CPU:
                    raise ValueError("a context on a device needs out, a tensor on that device")
                out = new_tensor(self.shape, self.count, self.dtype)
            loan = context._where.borrow(
                out, f'moving average of parameter "{self.name}"', 0, self.shape, written=True
            )
            _raw.ga_ema_copy_to(c, self.id, loan, _raw.describe(loan)[1])
            return out

    # ---- State by name

    @property
    def states(self) -> list[StateInfo]:
        """The arrays of state that the parameter has, or will have once it is not frozen."""
        with self.context._guard as c:
            return self._states(c)

    def _states(self, c: int) -> list[StateInfo]:
        infos = []
        for index in range(_raw.ga_state_count(c, self.id)):
            struct = _raw.ga_state_info()
            _raw.ga_state_describe(c, self.id, index, struct)
            infos.append(StateInfo._read(struct))
        return infos

    def _state(self, c: int, name: str) -> tuple[StateInfo, tuple[int, ...]]:
        infos = self._states(c)
        for info in infos:
            if info.name == name:
                return info, self.shape if info.count == self.count else (info.count,)
        names = ", ".join(info.name for info in infos) or "none"
        raise KeyError(f'parameter "{self.name}" has no state "{name}", but {names}')

    def get_state(self, name: str, out: TensorLike | None = None) -> Tensor | TensorLike:
        """Reads an array of state into out, in the host's memory; default a new tensor.

        With ``CommShard.OPTIMIZER``, on every rank.
        """
        with self.context._guard as c:
            info, shape = self._state(c, name)
            if out is None:
                out = new_tensor(shape, info.count, info.dtype)
            loan = HOST.borrow(out, f'state "{name}"', info.dtype, shape, written=True)
            _raw.ga_state_get(c, self.id, name, loan, info.dtype, info.count)
            return out

    def set_state(self, name: str, data: TensorLike) -> None:
        """Writes an array of state whole. "step" must be written last.

        With ``CommShard.OPTIMIZER``, on every rank.
        """
        with self.context._guard as c:
            info, shape = self._state(c, name)
            loan = HOST.borrow(data, f'state "{name}"', info.dtype, shape)
            _raw.ga_state_set(c, self.id, name, loan, info.dtype, info.count)

    def reset_state(self) -> None:
        """Puts all state of the parameter back to the beginning. Between windows."""
        with self.context._guard as c:
            _raw.ga_state_reset(c, self.id)


class Accumulator:
    """Where a kernel of the program writes ``alpha * gradient + beta * tensor``.

    tensor is None if nothing is to be written. With beta 0, it must not be read.
    """

    __slots__ = ("alpha", "beta", "tensor")

    def __init__(self, tensor: Tensor | None, alpha: float, beta: float) -> None:
        self.tensor = tensor
        self.alpha = alpha
        self.beta = beta


class MicroBatch:
    """A micro-batch whose gradients come by part. Made by Context.micro_batch().

    As a context manager it begins the micro-batch and ends it. After an exception, it aborts the
    micro-batch; if something of it has been added already, it discards the window and says so in a note of
    the exception. A window with parameters that are updated in place (``Context.ready()``) cannot be discarded:
    the micro-batch then stays open, and the note says that.
    """

    def __init__(self, context: Context, weight: float, index: int, options: MicroOptions | None) -> None:
        self.context = context
        self._weight = weight
        self._index = index
        self._options = options
        # Whether gradients are read: the weight is that of the first opening.
        self._reads = weight != 0 or index != -1
        self._known = index == -1

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.end()
        elif not self.context.closed:
            try:
                self.abort()
            except Error:
                note = "A part of the micro-batch had been added, so the window was discarded."
                try:
                    self.context.discard()
                except Error as refusal:
                    note = f"The micro-batch is still open, because the window could not be discarded: {refusal}"
                error.add_note(note)

    def begin(self) -> None:
        """Opens the micro-batch."""
        with self.context._guard as c:
            options = None if self._options is None else self._options._write()
            _native.ga_micro_begin(c, self._index, self._weight, options)

    def end(self) -> None:
        """Closes the micro-batch: its gradients are in the window."""
        with self.context._guard as c:
            _native.ga_micro_end(c)
            self.context._kept.micro_ended()

    def abort(self) -> None:
        """Drops the micro-batch as if it had never been opened, as long as nothing of it was added."""
        with self.context._guard as c:
            _raw.ga_micro_abort(c)
            self.context._kept.micro_ended()

    def accumulate(self, param: Param, gradient: TensorLike | int) -> None:
        """Adds a gradient to one parameter. An int is an address, as in Context.accumulate()."""
        context = self.context
        with context._guard as c:
            id = context._own(param)
            loan = gradient
            if type(gradient) is not int:
                loan = _native.borrow(gradient, param._gradient)
            _native.ga_accumulate_part(c, id, loan)
            if self._reads:
                context._kept.added(param, loan, self._known)

    def accumulate_rows(self, param: Param, indices: TensorLike, values: TensorLike) -> None:
        """Adds a gradient that has only some rows: values[i] to row indices[i]. Needs ParamOptions.rows."""
        context = self.context
        with context._guard as c:
            id = context._own(param)
            of = f'of parameter "{param.name}"'
            rows = context._where.borrow(indices, f"row indices {of}", ANY_INDEX)
            _, index_dtype, shape, _ = _raw.describe(rows)
            if len(shape) != 1:
                raise ValueError(f"row indices {of}: the shape was {list(shape)}, expected one dimension")
            block = context._where.borrow(
                values, f"rows {of}", param.gradient_dtype, (shape[0], *param.shape[1:])
            )
            _raw.ga_accumulate_rows(c, id, rows, index_dtype, shape[0], block)
            context._kept.added_all(rows, block)

    def accumulate_matmul(self, param: Param, a: TensorLike, b: TensorLike) -> None:
        """Adds the matrix product ``a @ b`` to a parameter: for ``y = x @ W.T``, ``(W, dy.T, x)``.

        The parameter is taken as a matrix of its first dimension and the rest. a and b may be transposed,
        and parts of larger matrices: nothing is copied.
        """
        context = self.context
        with context._guard as c:
            id = context._own(param)
            rows = param.shape[0] if param.shape else 1
            columns = param.count // rows if rows else 0
            left, of_a, k = self._matrix(param, a, "a", rows, None, 0)
            right, of_b, _ = self._matrix(param, b, "b", k, columns, _raw.describe(left)[1])
            dtype = _raw.describe(left)[1]
            _raw.ga_accumulate_matmul(c, id, k, left, *of_a, right, *of_b, dtype)
            context._kept.added_all(left, right)

    def _matrix(
        self, param: Param, tensor: TensorLike, name: str, rows: int, columns: int | None, dtype: int
    ) -> tuple[Any, tuple[int, int], int]:
        what = f'matrix {name} for parameter "{param.name}"'
        loan = self.context._where.borrow(tensor, what, dtype, dense=False)
        _, _, shape, strides = _raw.describe(loan)
        if len(shape) != 2 or shape[0] != rows or (columns is not None and shape[1] != columns):
            wanted = f"[{rows}, {'k' if columns is None else columns}]"
            raise ValueError(f"{what}: the shape was {list(shape)}, expected {wanted}")
        m, k = shape
        if strides[1] == 1 or k <= 1:
            leading = max(k, strides[0] if m > 1 else 1)
            if m <= 1 or strides[0] >= k:
                return loan, (leading, 0), k
        if strides[0] == 1 or m <= 1:
            leading = max(m, strides[1] if k > 1 else 1)
            if k <= 1 or strides[1] >= m:
                return loan, (leading, 1), k
        raise ValueError(f"{what}: the strides were {list(strides)}; neither rows nor columns are dense")

    @contextlib.contextmanager
    def accumulator(self, param: Param) -> Iterator[Accumulator]:
        """Hands out the accumulator of a parameter, whose every element is then to be written.

        ``with micro.accumulator(w) as a:``; at its end, what was written is part of the micro-batch.
        """
        context = self.context
        with context._guard as c:
            struct = _raw.ga_accumulator()
            _raw.ga_accumulator_acquire(c, context._own(param), struct)
            tensor = None
            if struct.data:
                tensor = Tensor(
                    struct.data, param.shape, Dtype(struct.dtype), device=context._where.device,
                    ordinal=context._where.ordinal, owner=context._handle,
                )  # fmt: skip
        try:
            yield Accumulator(tensor, struct.alpha, struct.beta)
        finally:
            if not context.closed:
                with context._guard as c:
                    _raw.ga_accumulator_release(c, param.id)


def _describe_layer(c: int, id: int) -> BatchNormInfo:
    struct = _raw.ga_bn_info()
    _raw.ga_bn_describe(c, id, struct)
    return BatchNormInfo._read(struct)


class BatchNorm:
    """A layer of batch normalisation. Made by Context.add_batch_norm().

    Tensors x, y, dy and dx are [samples, channels, ...] or, with BnLayout.CHANNELS_LAST,
    [samples, ..., channels].
    """

    __slots__ = ("_dtype", "_layout", "channels", "context", "id", "name")

    def __init__(self, context: Context, id: int, info: BatchNormInfo) -> None:
        self.context = context
        self.id = id
        self.name = info.name
        self.channels = info.channels
        self._dtype = info.dtype
        self._layout = info.layout

    def __repr__(self) -> str:
        return f'<gradaccum.BatchNorm "{self.name}" [{self.channels}]>'

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchNorm) and other.context is self.context and other.id == self.id

    def __hash__(self) -> int:
        return hash((id(self.context), self.id))

    @property
    def info(self) -> BatchNormInfo:
        """What the library knows of the layer."""
        with self.context._guard as c:
            return _describe_layer(c, self.id)

    def _input(self, x: TensorLike) -> tuple[Any, tuple[int, ...], int, int]:
        what = f'x of layer "{self.name}"'
        loan = self.context._where.borrow(x, what, self._dtype)
        shape: tuple[int, ...] = _raw.describe(loan)[2]
        axis = 1 if self._layout == BnLayout.CHANNELS_FIRST else len(shape) - 1
        if len(shape) < 2 or shape[axis] != self.channels:
            raise ValueError(
                f"{what}: the shape was {list(shape)}, expected {self.channels} channels at axis {axis}"
            )
        positions = 1
        for other, dimension in enumerate(shape):
            positions *= dimension if other not in (0, axis) else 1
        return loan, shape, shape[0], positions

    def _like(self, tensor: TensorLike, name: str, shape: tuple[int, ...], written: bool) -> Any:
        what = f'{name} of layer "{self.name}"'
        return self.context._where.borrow(tensor, what, self._dtype, shape, written=written)

    def accumulate(self, x: TensorLike) -> None:
        """Takes the statistics of a micro-batch."""
        with self.context._guard as c:
            loan, _, samples, positions = self._input(x)
            _raw.ga_bn_accumulate(c, self.id, loan, samples, positions)

    def accumulate_stats(
        self, count: int, mean: TensorLike, spread: TensorLike, kind: BnSpread = BnSpread.VARIANCE
    ) -> None:
        """Takes statistics [channels] that the program has computed itself, in F32 or F64."""
        where = self.context._where
        with self.context._guard as c:
            shape = (self.channels,)
            first = where.borrow(mean, f'mean of layer "{self.name}"', 0, shape)
            dtype = _raw.describe(first)[1]
            second = where.borrow(spread, f'spread of layer "{self.name}"', dtype, shape)
            _raw.ga_bn_accumulate_stats(c, self.id, count, first, second, kind, dtype)

    def finalize(self) -> None:
        """Ends the first sweep of a layer in WINDOW mode.

        With a communicator every rank makes the call, also one without data, and the layer normalises by
        the statistics of all ranks.
        """
        with self.context._guard as c:
            _raw.ga_bn_finalize(c, self.id)

    def forward(self, x: TensorLike, y: TensorLike) -> None:
        """Normalises x of a micro-batch to y."""
        with self.context._guard as c:
            loan, shape, samples, positions = self._input(x)
            _raw.ga_bn_forward(c, self.id, loan, samples, positions, self._like(y, "y", shape, True))

    def backward_accumulate(self, x: TensorLike, dy: TensorLike) -> None:
        """Sums over dy and x of the open micro-batch: the gradients of gamma and beta."""
        with self.context._guard as c:
            loan, shape, samples, positions = self._input(x)
            gradient = self._like(dy, "dy", shape, False)
            _raw.ga_bn_backward_accumulate(c, self.id, loan, gradient, samples, positions)

    def backward_finalize(self) -> None:
        """Ends the sweep of backward_accumulate of a layer in WINDOW mode.

        With a communicator the call is required before backward, on every rank, and adds up what dx needs
        of all ranks; alone it may be left out.
        """
        with self.context._guard as c:
            _raw.ga_bn_backward_finalize(c, self.id)

    def backward(self, x: TensorLike, dy: TensorLike, dx: TensorLike) -> None:
        """Writes dx of the open micro-batch."""
        with self.context._guard as c:
            loan, shape, samples, positions = self._input(x)
            gradient = self._like(dy, "dy", shape, False)
            out = self._like(dx, "dx", shape, True)
            _raw.ga_bn_backward(c, self.id, loan, gradient, samples, positions, out)

    def infer(self, x: TensorLike, y: TensorLike) -> None:
        """Normalises by the running statistics, at any time."""
        with self.context._guard as c:
            loan, shape, samples, positions = self._input(x)
            _raw.ga_bn_infer(c, self.id, loan, samples, positions, self._like(y, "y", shape, True))

    def set_frozen(self, frozen: bool) -> None:
        """Freezes the layer, which then normalises by its running statistics, or unfreezes it."""
        with self.context._guard as c:
            _raw.ga_bn_set_frozen(c, self.id, int(frozen))

    def running(self) -> tuple[Tensor, Tensor, int]:
        """The running mean and variance in F64, and how often they have moved."""
        with self.context._guard as c:
            mean, variance = (new_tensor((self.channels,), self.channels, Dtype.F64) for _ in range(2))
            steps = _raw.ga_bn_running(c, self.id, mean.address, variance.address, Dtype.F64)
            return mean, variance, steps

    def set_running(self, mean: TensorLike, variance: TensorLike, steps: int) -> None:
        """Sets the running statistics [channels], in F32 or F64."""
        with self.context._guard as c:
            shape = (self.channels,)
            first = HOST.borrow(mean, f'running mean of layer "{self.name}"', 0, shape)
            dtype = _raw.describe(first)[1]
            second = HOST.borrow(variance, f'running variance of layer "{self.name}"', dtype, shape)
            _raw.ga_bn_running_set(c, self.id, first, second, dtype, steps)

    def statistics(self) -> tuple[Tensor, Tensor, int]:
        """The mean and the biased variance that the layer normalises by now in F64, and of how many."""
        with self.context._guard as c:
            mean, variance = (new_tensor((self.channels,), self.channels, Dtype.F64) for _ in range(2))
            count = _raw.ga_bn_statistics(c, self.id, mean.address, variance.address, Dtype.F64)
            return mean, variance, count
