# SPDX-License-Identifier: Apache-2.0
"""An optimizer of torch whose windows are right."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from .. import (
    Clip, ClipScope, Config, Context, Dtype, Ema, GradientLife, LossScaler, MicroFlags, MicroOptions,
    Nonfinite, ParamOptions, Reduced, Rounding, Rows, Settings, StateOptions, StateParts, StepOutcome, StepResult,
    WindowState,
)  # fmt: skip
from . import _state_file as state_file
from ._codes import Coders
from ._habits import Habits, warn
from ._hooks import Gradients
from ._kinds import Kind
from ._layers import Layers
from ._parameters import Parameters
from ._processes import ranks_of
from ._ranks import Alone, Call
from ._runtime import autograd_is_compiled, has_own_openmp
from ._slots import Slot, add, address_of, fits, flat, is_sparse, like, mark_written
from ._state import State, is_asked_for, refuse
from ._state_dict import KEY, by_index, from_torch, joined, take_group, to_torch
from ._streams import streams_of

# Of Config, what may differ between ranks.
_OF_ONE_RANK = {"device_ordinal", "stream", "num_threads", "log", "on_param_done"}
# Of an implementation, which torch's own optimizers look for in a group that they load.
_CHOICES = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


class Optimizer(torch.optim.Optimizer):
    """An optimizer of torch that accumulates micro-batches in the library, and steps there.

    Three ways lead to a step. Gradients go to the window as backward makes them, and are freed at once:

        opt.backward(loss, weight=n)            # or: with opt.micro_batch(weight=n): loss.backward()
        ...
        opt.step()

    Or they are taken from ``.grad`` after each backward, by ``opt.accumulate(weight=n)``. Or the loop stays
    as it is, ``zero_grad``, ``backward``, ``step``: with accum_steps, ``step`` counts, and every K-th one
    updates the parameters; ``flush()`` applies what is left at the end of an epoch.

    params: as for torch: parameters, pairs of a name and a parameter, or groups of them.
    kind, defaults: the optimizer, and its hyper-parameters in torch's words. ``param_groups`` are the truth:
    what a scheduler writes there is passed on before each step.
    accum_steps: micro-batches in a window; None: as many as come before ``step``.
    weight of a micro-batch: of how many samples or tokens its loss is the mean. The default of 1 is right only
    if all micro-batches are as large.
    clip: of the window's gradient, in place of ``clip_grad_norm_``. loss_scaler: in place of a GradScaler.
    config: policies of the window; its device, stream and accum_steps are set here. With a ``gradient_life``
    of LIVE, the library reads the first gradients of a window where torch has them, until the second micro-batch or
    ``step``; with LENT it adds to them there until ``step``. A program that has kept one must not write to it until then.
    param_options: of all parameters. A group may have the key ``rows``: ``gradaccum.Rows`` of embeddings with
    sparse gradients; and those of ``ParamOptions`` that say how Muon cuts a parameter into matrices: ``batch_axes``,
    ``output_axis``, ``split_axis``, ``matrix_parts``, of which those that are left out are 0.
    state_dtype: "bf16" rounds state stochastically, and "8bit" keeps it as codes of 8 bits with a scale for each block
    of 256 of them, but for parameters of at most 4096 elements (gradaccum.Dtype.STATE_8BIT). A group may have a
    ``state_dtype`` of its own.
    ddp: the DistributedDataParallel that reduces every backward. The weight of a micro-batch is then that of this
    rank's samples alone, 0 if it has none, and the ranks' micro-batches together are one, of all their weights. All
    ranks make the same calls: what differs is an error on each of them. ``accumulate`` and ``step`` learn the weight
    after the reduction, and raise unless all ranks give the same one. distributed: False allows several processes
    that do not train one model together.
    data_mesh: needed if parameters are DTensors, of ``fully_shard`` and ``parallelize_module``: the DeviceMesh over whose
    ranks samples differ and gradients are reduced, that of fully_shard; () if all ranks have the same samples.
    ``backward`` multiplies its loss by the weight, which is this rank's, and 0 if it has no samples. All processes make
    the same calls, those that save and load too. reduced: ``gradaccum.Reduced.SUM`` if the gradients of these ranks are
    added, by ``set_gradient_divide_factor(1.0)``, and not averaged.

    eager: the same as ``Config(eager=True)``. On the CPU, in the first of the three ways, a parameter is updated
    while the backward of the window's last micro-batch is still running, and ``step`` makes the updates that are
    left, with the same bits. The last micro-batch is the one that fills accum_steps, or that of
    ``opt.backward(loss, last=True)``. A parameter waits for ``step`` until an earlier micro-batch has given it its
    gradient in one piece. One that gets several pieces always waits, since no hook can tell the last piece: if a
    micro-batch has several backwards, or reentrant checkpoints share the parameter. Under ddp=, a parameter is updated
    when its bucket is reduced, which needs the communication hook that a DistributedDataParallel can have.
    """

    _step_supports_amp_scaling = True  # a GradScaler sets grad_scale and found_inf for step()

    def __init__(
        self,
        params: Any,
        kind: Kind,
        defaults: Mapping[str, Any],
        *,
        accum_steps: int | None = None,
        clip: Clip | None = None,
        loss_scaler: LossScaler | None = None,
        ema: Ema | None = None,
        config: Config | None = None,
        param_options: ParamOptions | None = None,
        state_dtype: Dtype | str | None = None,
        ddp: torch.nn.Module | None = None,
        data_mesh: Any = None,
        reduced: Reduced | None = None,
        distributed: bool = True,
        eager: bool = False,
    ) -> None:
        if accum_steps is not None and accum_steps < 1:
            raise ValueError(f"accum_steps was {accum_steps}, expected at least 1, or None")
        self._kind = kind
        self._context: Context | None = None
        param_options = ParamOptions() if param_options is None else param_options
        # What the program writes to a parameter, by .data too, goes into its master weights. Where these are rounded
        # stochastically, that cannot be seen in the numbers, and the parameter's version has to tell it.
        self._param_options = dataclasses.replace(
            param_options, follow_data=param_options.rounding == Rounding.NEAREST
        )
        self._ranks = Alone()
        self._all_touched = False  # whether all parameters have gradients in this window
        self._layers = Layers()  # by convert_batchnorm
        self._masters: dict[str, Tensor] = {}  # of a window that was loaded, by the parameter's name
        self._rates: list[float] = []  # at the start of the window
        self._warned = False
        self._wrapped: weakref.ref[torch.optim.Optimizer] | None = None  # whose schedulers look at it
        self._accum_steps = accum_steps
        self._habits = Habits(accum_steps)
        self._is_scaled = False  # whether scale_loss() was called since the last micro-batch
        self._is_explicit = False  # whether a micro-batch of this window came otherwise than by step()
        self._no_state = State()
        self._is_asked_for = False  # what the state is before a first gradient: see is_asked_for()
        self._packed_state: defaultdict[Tensor, Any] | None = None  # while torch packs a state dictionary
        self.result: StepResult | None = None
        if self._param_options.gradient_dtype not in (0, None):
            raise ValueError(
                "param_options has a gradient_dtype, but gradients of torch have that of their parameter"
            )
        if state_dtype is not None:
            defaults = {**defaults, "state_dtype": state_dtype}
        super().__init__(params, {**_CHOICES, **defaults})

        tensors = [p for group in self.param_groups for p in group["params"]]
        device = tensors[0].device if tensors else torch.device("cpu")
        by_shape = kind.by_shape or (clip is not None and clip.scope == ClipScope.AGC)
        self._parameters = Parameters(kind, self._param_options, device, by_shape)
        config = self._config = Config() if config is None else config
        is_alone = device.type == "cpu" and ddp is None and data_mesh is None
        if config.gradient_life != GradientLife.CONSUMED and not is_alone:
            raise ValueError(
                f"gradient_life was {config.gradient_life.name}, which is not supported with ddp= and data_mesh=, nor on a "
                "GPU: torch may overwrite gradients before the step has read them"
            )
        self._eager = eager or config.eager
        self._drops = config.nonfinite == Nonfinite.DROP_MICRO
        self._ranks = ranks_of(
            config, tensors, ddp=ddp, data_mesh=data_mesh, reduced=reduced, distributed=distributed,
            eager=self._eager, clip=clip,
        )  # fmt: skip
        changes: dict[str, Any] = {"accum_steps": 0 if accum_steps is None else accum_steps, "eager": self._eager}
        self._streams = streams_of(device)
        changes.update(self._streams.config())
        changes.update(self._ranks.config())
        if device.type == "cpu" and config.num_threads == 0:
            changes["num_threads"] = 1 if has_own_openmp() else torch.get_num_threads()
        self._context = Context(dataclasses.replace(config, **changes))
        if clip is not None:
            self._context.set_clip(clip)
        if loss_scaler is not None:
            self._context.set_loss_scaler(loss_scaler)
        if ema is not None:
            self._context.set_ema(ema)
        self._scales = loss_scaler is not None
        writes_ahead = config.nonfinite == Nonfinite.IGNORE or self._param_options.write_early
        self._gradients = Gradients(self._context, self._streams, self._parameters.slots, writes_ahead=writes_ahead)
        self._ranks.join(self._context)
        for group in self.param_groups:
            self._parameters.add(self.context, group, self._ranks)
        self._ranks.agree(Call.CREATE, lambda: {
            **{key: value for key, value in vars(config).items() if key not in _OF_ONE_RANK},
            "eager": self._eager, "kind": kind, "accum_steps": accum_steps, "clip": clip, "ema": ema,
            "loss_scaler": loss_scaler, "param_options": param_options,
            "state_dtypes": [group.get("state_dtype") for group in self.param_groups],
            "params": [(slot.own.name, tuple(slot.shape), slot.dtype) for slot in self._parameters.slots],
        })  # fmt: skip
        self._ranks.connect()

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning's wrapper takes the class of an optimizer without its attributes, and has this one besides.
        wrapped = self.__dict__.get("_optimizer")
        if wrapped is None or name in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(wrapped, name, value)

    # ---- Parameters

    @property
    def accum_steps(self) -> int | None:
        """Micro-batches in a window; None: as many as come before ``step``. ``last`` and ``flush`` end one sooner."""
        return self._accum_steps

    @property
    def context(self) -> Context:
        """The context of the library, whose work goes to torch's current stream from now on."""
        assert self._context is not None
        self._streams.follow(self._context)
        return self._context

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does. Between windows."""
        if self._context is not None:
            self._ranks.meet(Call.ADD)
            self._parameters.look_at_groups(self.param_groups)
        super().add_param_group(param_group)
        if self._context is not None:
            try:
                self._parameters.add(self.context, self.param_groups[-1], self._ranks)
            except BaseException:
                self.param_groups.pop()
                raise

    # ---- Micro-batches

    def micro_batch(self, weight: float = 1.0, *, last: bool = False) -> contextlib.AbstractContextManager[None]:
        """A micro-batch whose gradients go to the window as backward makes them, and are freed at once.

        last: it ends the window, also one that is not full.

        An exception drops the micro-batch; if some of it is in the window already, it drops the window and
        says so in a note. If eager has updated parameters in place by then, the window cannot be dropped: a note
        says so, and ``step`` ends it with the gradients that it has. Under ddp=, gradients are taken at the end,
        after the reduction, or with eager in the last micro-batch when their bucket is reduced, and each backward
        follows a forward of its own. With data_mesh=, a weight other than 1 needs
        ``Config(gradient_kind=GradientKind.SUM)``, and losses that the program has multiplied by it.
        """
        return self._micro_batch(float(weight), last)  # which a program may have as a tensor

    @contextlib.contextmanager
    def _micro_batch(self, weight: float, last: bool, *, is_weighed: bool = False) -> Iterator[None]:
        """is_weighed: its losses are those of weigh()."""
        if self._gradients.micro is not None:
            raise RuntimeError("a micro-batch is open already")
        if any(tensor.grad is not None for tensor in self._parameters.tensors):
            raise RuntimeError(
                "a parameter has a .grad of an earlier backward: call zero_grad() or accumulate() first"
            )
        tells_ready = self._eager and (last or self._is_last())
        if not self._ranks.opens(tells_ready):
            try:
                with self._ranks.micro_batch(weight, None):
                    yield
                self._take(weight, None, last)
            except BaseException:
                for tensor in self._parameters.tensors:
                    tensor.grad = None
                self._layers.drop()
                raise
            return
        if autograd_is_compiled():
            raise RuntimeError(
                "compiled autograd would trace the hooks that take gradients: call loss.backward() and then "
                "accumulate() instead"
            )
        self._begin()
        own = weight
        weight, loss_scale = self._ranks.open(own, is_weighed)
        if tells_ready:
            self._push()  # updates begin before step()
        micro = self.context.micro_batch(weight, options=_options(last, loss_scale))
        try:
            with micro:
                self._gradients.open(micro, tells_ready)
                try:
                    with self._ranks.micro_batch(own, self._gradients):
                        yield
                    _ = self.context  # back from the streams of the hooks
                    self._gradients.take_rest()
                    self._layers.tell(self._streams, self._ranks)
                    self._took(weight, self._gradients.has_any)
                    self._gradients.learn()
                except BaseException:
                    for tensor in self._parameters.tensors:
                        tensor.grad = None
                    self._layers.drop()
                    raise
                finally:
                    held = self._gradients.close()
        except BaseException as error:
            # A micro-batch stays open if it cannot be dropped, since parameters were updated in place.
            if tells_ready and not self.context.closed and self.context.window.open_micro >= 0:
                micro.end()
                error.add_note("The micro-batch was ended as it was: step() ends the window.")
            raise
        del held

    def _is_last(self) -> bool:
        """Whether the next micro-batch fills the window."""
        return self.accum_steps is not None and self.context.window.micro_batches + 1 >= self.accum_steps

    def _took(self, weight: float, any_gradient: bool, is_scaled: bool = False) -> None:
        """At the end of a micro-batch: says what its gradients show of the loop."""
        self._habits.reaches(weight, any_gradient, may_wait=self._ranks.may_wait)
        if any_gradient and self._scales and not (self._is_scaled or is_scaled):
            self._habits.scales_nothing()
        self._is_scaled = False

    def backward(self, loss: Tensor, weight: float = 1.0, *, last: bool = False, **options: Any) -> None:
        """``loss.backward(**options)`` as a micro-batch. A loss_scaler's scale is applied.

        The losses of a window are averaged, each by its weight: terms of one micro-batch's loss are to be added
        before. last: it ends the window, also one that is not full.
        """
        self._habits.sees_loss(loss, weight)
        weight = float(weight)
        loss = self._ranks.weigh(self.scale_loss(loss), weight)
        with self._micro_batch(weight, last, is_weighed=True):
            loss.backward(**options)  # type: ignore[no-untyped-call]

    def accumulate(self, weight: float = 1.0) -> None:
        """Takes the gradients of a micro-batch from ``.grad``, which becomes None."""
        self._habits.sees_accelerate(True)
        self._take(weight, None)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale of loss_scaler; the loss itself without one."""
        self._is_scaled = True
        return loss * self.context.loss_scale if self._scales else loss

    def _begin(self, *, counted: bool = False) -> None:
        """Before a micro-batch: at the start of a window, sees whether parameters have moved or changed."""
        is_first = self.context.window.micro_batches == 0
        self._habits.begins(is_first)
        self._is_explicit = not counted or (self._is_explicit and not is_first)
        if is_first:
            self._parameters.look_at_groups(self.param_groups)
            self._parameters.look_at_memory(self._is_rounded_master, may_move=True)
            self._layers.look()
            self._rates = [float(group["lr"]) for group in self.param_groups]

    def _is_rounded_master(self, slot: Slot) -> bool:
        """Whether a 16-bit parameter is what its master weights round to, as when both were loaded."""
        master = self._masters.get(slot.own.name)
        if master is None:
            if self.context.window.micro_batches > 0:
                return False
            master = from_dlpack(slot.own.get_state("master"))
        master = master.to(slot.tensor.dtype)
        return torch.equal(master, flat(slot.tensor, slot).reshape(master.shape))

    def _take(
        self, weight: float, loss_scale: float | None, last: bool = False, *, counted: bool = False
    ) -> None:
        """Adds what is in ``.grad`` as a micro-batch."""
        if self._gradients.micro is not None:
            raise RuntimeError("a micro-batch is open: its gradients are taken by backward")
        weight = float(weight)
        is_scaled = loss_scale is not None
        self._ranks.begin()
        self._begin(counted=counted)
        self._habits.gathers(self._parameters.tensors)
        weight, loss_scale = self._ranks.take(weight, loss_scale)
        options = _options(last, loss_scale)
        self._layers.tell(self._streams, self._ranks)
        gradients = self._parameters.gradients()
        if self._parameters.are_plain(gradients):
            self.context.accumulate(list(map(Tensor.data_ptr, gradients)), weight, options, owners=gradients)
            self._all_touched = True
        elif not any(map(is_sparse, gradients)):
            given: list[Tensor | None] = [None] * self.context.slot_count
            for gradient, slot in zip(gradients, self._parameters.slots, strict=True):
                if gradient is not None:
                    given[slot.place] = gradient if fits(gradient, slot) else like(gradient, slot)
                    slot.touched = True
            addresses = [None if gradient is None else address_of(gradient) for gradient in given]
            self.context.accumulate(addresses, weight, options, owners=given)
        else:
            alive: list[Tensor] = []
            with self.context.micro_batch(weight, options=options) as micro:
                for gradient, slot in zip(gradients, self._parameters.slots, strict=True):
                    if gradient is not None:
                        alive += add(micro, slot, gradient)
        self._streams.keep(gradients)
        self._took(weight, any(gradient is not None for gradient in gradients), is_scaled)
        for tensor in self._parameters.tensors:
            tensor.grad = None

    # ---- Steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes what is in ``.grad`` as a micro-batch of weight 1, if there is anything, and ends the window.

        With accum_steps, a window ends when it is full; until then, step() returns without one.
        """
        if is_asked_for():
            self._is_asked_for = True
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._habits.sees_closure(closure, self.context.window.micro_batches > 0)
        if self._gradients.micro is not None:
            raise RuntimeError("step() was called in an open micro-batch")
        # A GradScaler takes them back by itself only if step() returns.
        scale = self.__dict__.get("grad_scale")
        if scale is None and "found_inf" in self.__dict__:
            self._habits.unscales()
        try:
            self._step(None if scale is None else float(scale))
        except BaseException:
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise
        return loss

    def _step(self, scale: float | None) -> None:
        took = any(tensor.grad is not None for tensor in self._parameters.tensors)
        if took:
            if self._is_explicit and self.context.window.micro_batches > 0:
                raise RuntimeError(
                    "step() found gradients in .grad, in a window whose micro-batches came by backward() or "
                    "accumulate(): zero_grad() drops them if they are of another loss, and accumulate(weight=...) "
                    "after that backward takes them"
                )
            self._habits.sees_accelerate(False)
            self._take(1.0, scale, counted=True)
        elif scale is not None:
            raise RuntimeError(
                "a GradScaler must see the gradients that it has scaled in .grad, but they were accumulated "
                "before: give the optimizer a loss_scaler= in its place, and use opt.scale_loss(loss)"
            )
        window = self.context.window
        held = window.micro_batches
        full = window.state == WindowState.FULL or self.accum_steps is None or held >= self.accum_steps
        if held > 0 and full:
            self._apply()
        else:
            self._habits.steps(took, self._parameters.tensors)
            if self.result is None:
                self._opt_called = False  # a scheduler that is stepped now is stepped first, and says so

    def flush(self) -> bool:
        """Ends a window that is not full, as at the end of an epoch. Returns whether there was one.

        Under ddp=, all ranks call it, also those that have no window.
        """
        if self._gradients.micro is not None:
            raise RuntimeError("flush() was called in an open micro-batch")
        self._ranks.agree(Call.FLUSH)
        if self.context.window.micro_batches == 0:
            return False
        self._apply()
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``.grad``, as torch does. The window is not there: ``discard`` drops it.

        Between micro-batches of an open window it does nothing, and raises if it comes after some and not after
        others, without a ``step``.
        """
        is_open = self._gradients.micro is not None
        if is_open and any(slot.gradients for slot in self._parameters.slots):
            raise RuntimeError(
                "zero_grad() was called in a micro-batch after its backward, but drops nothing of it: an exception "
                "drops the micro-batch, and discard() the window"
            )
        within = not is_open and self.context.window.micro_batches > 0
        if within and not is_asked_for():
            self._habits.zeroes(any(tensor.grad is not None for tensor in self._parameters.tensors))
        super().zero_grad(set_to_none)

    def discard(self) -> None:
        """Drops the window."""
        self._ranks.meet(Call.DISCARD)
        self.context.discard()
        self._window_ended()

    def _apply(self) -> None:
        self._parameters.look_at_memory(self._is_rounded_master, may_move=False)
        if not self._warned and self.context.window.micro_batches > 1:
            if self._rates != [float(group["lr"]) for group in self.param_groups]:
                self._warned = True
                warn(
                    "a learning rate changed while a window was open: a scheduler counts steps, not "
                    "micro-batches, so call scheduler.step() after a step that was applied (opt.result)"
                )
        self._push()
        self._ranks.agree(Call.STEP, self._values)
        self._habits.applies(self.context.window.micro_batches)
        written = self._layers.written()
        self.result = self.context.step()
        pending = self.result.outcome == StepOutcome.PENDING  # on a GPU
        if pending and self._layers:  # their statistics go to buffers of torch if it was applied
            self.result = self.context.step_result()
        if pending or self.result.applied:
            mark_written([slot for slot in self._parameters.slots if slot.touched or self._all_touched])
        if self.result.applied:
            self._layers.publish(written)
        self._window_ended()
        # What a scheduler looks at, to warn if it is stepped first.
        self._opt_called = True
        wrapped: Any = None if self._wrapped is None else self._wrapped()
        if wrapped is not None:
            wrapped._opt_called = True

    def _window_ended(self) -> None:
        self._masters.clear()
        self._layers.drop()
        self._habits.window_ended()
        self._is_explicit = False
        self._all_touched = False
        for slot in self._parameters.slots:
            slot.touched = False

    def _push(self) -> None:
        """Passes on what was written to param_groups."""
        self._parameters.push(self.param_groups)

    def _values(self) -> dict[str, Any]:
        """What a step is made with."""
        values: dict[str, Any] = {"windows": self.context.window.windows}
        if self._scales:
            values["loss_scale"] = self.context.loss_scale
        return values | self._parameters.values()

    @property
    def noise_scale(self) -> float:
        """The noise scale that the last step has measured; needs ``Config(noise_scale=True)``."""
        return float("nan") if self.result is None else self.result.noise_scale

    # ---- State

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Empty: the library keeps the state. What would change it here raises; ``state_dict`` has it."""
        return self._no_state if self._packed_state is None else self._packed_state

    @state.setter
    def state(self, value: Any) -> None:
        if self._context is not None and value is not self._no_state:
            refuse("an assignment to optimizer.state")

    def state_dict(self, *, as_numbers: bool = False) -> dict[str, Any]:
        """The state in torch's words, which torch's own optimizer loads.

        What the library keeps besides, an open window too, is under the key "gradaccum".

        State in 8 bits is there as it is, for which torch has no words: "exp_avg_codes" of torch.uint8 and
        "exp_avg_scale" in place of "exp_avg", so that a step of torch's own optimizer raises KeyError. (A parameter that
        is not contiguous has numbers of float32, from which the same codes are made again.) as_numbers: such numbers for
        every parameter, as torch's own optimizer loads them, and no key "gradaccum".
        """
        self._ranks.meet(Call.SAVE)
        self._push()
        data = self.context.save_bytes(StateOptions(parts=StateParts.LIBRARY))
        header, arrays = state_file.split(data)
        steps = None if self._kind.counts_steps else self.context.window.steps
        with Coders() as coders:
            state = to_torch(
                arrays, self._parameters.slots, steps, coders, from_the_start=self._is_asked_for, as_numbers=as_numbers
            )
        self._packed_state = state
        try:
            packed = super().state_dict()
        finally:
            self._packed_state = None
        if not as_numbers:
            packed[KEY] = {"header": header, "arrays": arrays, **self._ranks.mark()}
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what state_dict() of this class has given, or that of torch's own optimizer. Between windows.

        What came from here goes on exactly, in the middle of a window too. As in torch, hyper-parameters are
        those that were saved. Without the key "gradaccum", the state is taken as torch's: numbers become the nearest
        codes where state is in 8 bits here, and codes become numbers where it is not.
        """
        self._ranks.meet(Call.LOAD)
        groups, before = self.param_groups, [dict(group) for group in self.param_groups]
        state = by_index(state_dict)
        if self.context.window.micro_batches > 0:
            raise RuntimeError("load_state_dict() was called within a window; discard() drops it")
        try:
            super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
            for group, loaded in zip(groups, self.param_groups, strict=True):
                take_group(group, loaded, self._kind)
            self.param_groups = groups  # the same dictionaries, which a scheduler may hold
            if KEY in state_dict:
                data, arrays = self._ranks.vote(
                    lambda: joined(state_dict[KEY], state, self._parameters.slots, self._ranks.mark())
                )
                options = StateOptions(parts=StateParts.LIBRARY, settings=Settings.KEEP)
                self._push()
                self.context.load(data, options)
                self._masters = {
                    key.removesuffix(".master"): array
                    for key, array in arrays.items()
                    if key.endswith(".master")
                }
                # The library has written what these round to.
                mark_written([slot for slot in self._parameters.slots if slot.tensor.element_size() == 2])
                self._layers.publish()
                self._window_loaded()
            else:
                self._push()
                self._load_from_torch(state)
        except BaseException:
            self.param_groups = groups
            for group, old in zip(groups, before, strict=True):
                group.clear()
                group.update(old)
            self._push()
            raise

    def _load_from_torch(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        with Coders() as coders:
            arrays, steps = self._ranks.vote(lambda: from_torch(state, self._parameters.slots, coders))
        options = StateOptions(
            parts=StateParts.LIBRARY, settings=Settings.KEEP, allow_missing=True, unmarked=True
        )
        if arrays:
            self.context.load(state_file.join(state_file.header(arrays), arrays), options)
        for index, slot in enumerate(self._parameters.slots):
            if not state.get(index):
                slot.own.reset_state()
        self.context.set_steps(steps)

    def save(self, target: str | os.PathLike[str] | BinaryIO, options: StateOptions | None = None) -> None:
        """Saves parameters and state to a file of the library, as Context.save() does.

        With data_mesh=, all ranks give one path, which becomes the index of a file of each rank, and load() brings it to
        any ranks; or each gives a path of its own.
        """
        self._ranks.meet(Call.SAVE)
        self._push()
        self.context.save(target, options)

    def load(
        self, source: str | os.PathLike[str] | BinaryIO | bytes, options: StateOptions | None = None
    ) -> None:
        """Loads what save() has saved, parameters too. Hyper-parameters stay those of param_groups."""
        self._ranks.meet(Call.LOAD)
        self._push()
        self.context.load(source, dataclasses.replace(options or StateOptions(), settings=Settings.KEEP))
        mark_written(self._parameters.slots)
        self._layers.publish()
        self._window_loaded()

    def _window_loaded(self) -> None:
        window = self.context.window
        counted = window.weight / self._ranks.count  # of weight 1; dropped micro-batches have added nothing
        self._is_explicit = counted != window.micro_batches and not (
            self._drops and counted < window.micro_batches and counted.is_integer()
        )
        self._rates = [float(group["lr"]) for group in self.param_groups]
        self._all_touched = True

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a gradaccum optimizer cannot be copied or pickled, because it uses memory of this process; "
            "state_dict() and load_state_dict() carry its state"
        )

    def __deepcopy__(self, _: Any) -> NoReturn:
        self.__reduce__()


def _options(last: bool, loss_scale: float | None = None) -> MicroOptions | None:
    if not last and loss_scale is None:
        return None
    options = MicroOptions(flags=MicroFlags.LAST if last else MicroFlags.NONE)
    return options if loss_scale is None else dataclasses.replace(options, loss_scale=loss_scale)
