# SPDX-License-Identifier: Apache-2.0
"""Watches a training loop of torch, without a change to what it computes."""

from __future__ import annotations

import collections
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _where
from .._journal import Journal
from .._sketch import Sketches
from .._terms import NAMED, Term
from .._timeline import Change, Joined, MicroBatch, Trace, contributions, trace
from .._watch import Watcher, never_raises
from .._windows import Traces
from ._deepspeed import SCALING, engines, fragment_of, has_gradients
from ._followed import Parameter, Steps, address_of, is_distributed, local
from ._library import Ledger
from ._mode import Mode
from ._sketch import Sketch

_UNREAD = frozenset({"FullyShardedDataParallel"})
"""Modules whose gradients are not in .grad of their parameters. (FSDP2's are, and those of DeepSpeed are read.)"""
_MOST_ENTRIES = 2000
_Quiet: Any = torch._C.DisableTorchFunction


class Recorder(Watcher):
    """Follows the gradients of parameters from backward to the optimizer."""

    def __init__(self, limit: int | None, journal: Journal | None = None) -> None:
        super().__init__(limit)
        self._journal = journal
        self._handles: list[Any] = []
        self._parameters: list[Parameter] = []
        self._index: dict[int, int] = {}  # of a parameter, by its id
        self._frozen: dict[int, tuple[str, Tensor]] = {}  # those that may have gradients later, by their ids
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._norms: list[Any] = []  # layers with batch normalisation
        self._moved: list[int] = []  # how often the statistics of each had moved at the last step
        self._averages: collections.Counter[int] = collections.Counter()  # of parameters: how often each has moved
        self._sketch = Sketch()
        self._entries: list[MicroBatch | Change] = []
        self._group: Change | None = None  # that is going on
        self._base: dict[int, Tensor | None] = {}  # .grad before the first entry
        self._addresses: dict[int, int] = {}  # of gradients: the parameter
        self._terms: list[Term] = []  # whose backward has begun, before the first gradient
        self._open: MicroBatch | None = None  # has gradients, and may get more
        self._coming: Sketches = {}  # gradients that are about to be added, unless torch.autograd.grad() returns them
        self._where = ""  # the last backward
        self._model: torch.nn.Module | None = None
        self._mode: Mode | None = None
        self._stepping: dict[int, Any] = {}  # the optimizer that was called, by the id of its Steps
        self.steps: dict[int, Steps] = {}
        """By the id of the optimizer."""
        self.is_apart = False
        """Whether torch.autograd.grad() runs, whose gradients go nowhere by themselves."""
        self._scaled = -1  # the last backward whose gradients an engine has divided
        self._named = False  # whether the program names its losses itself

    # ---- Beginning and end

    def begin(self, model: torch.nn.Module | None, optimizers: Iterable[Any]) -> None:
        self._active = True
        self._model = model
        if model is not None:
            self._attach(model)
        for optimizer in optimizers:
            self.know(optimizer)
        self._handles += [
            register_optimizer_step_pre_hook(self._step), register_optimizer_step_post_hook(self._stepped),
        ]  # fmt: skip
        if self._journal is not None:
            self.replace(torch, "save", self._saved)
        self.replace(torch.optim.swa_utils.AveragedModel, "update_parameters", self._averaged)
        if model is not None and type(model).__name__ == "OptimizedModule":
            self._handles.append(model.register_forward_pre_hook(self._forward))
            self.knows_losses = False
            self.remark(
                "The model is compiled: loss functions are not seen, so that only what happens to gradients after "
                "backward is known, unless recording.loss() names the losses."
            )
        else:
            # Hooks of all modules: one of the model would go with it into files and copies.
            self._handles += [
                register_module_forward_pre_hook(self._forward),
                register_module_forward_hook(self._forwarded, always_call=True),
            ]
            self._mode = Mode(self)
            self._mode.begin()

    def end(self) -> None:
        if self._active:
            self._close()
        self._active = False
        if self._mode is not None:
            self._mode.end()
            self._mode = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._undo()
        for steps in self.steps.values():
            steps.pending = self._pending(steps)

    def _attach(self, model: torch.nn.Module) -> None:
        """Follows the parameters of a model."""
        for module in model.modules():
            if module in self._modules:
                continue
            self._modules.add(module)
            if type(module).__name__ in _UNREAD:
                self.remark(f"{type(module).__name__} keeps gradients to itself: they are not read.")
                return
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.num_batches_tracked is not None:
                self._norms.append(module)
                self._moved.append(int(module.num_batches_tracked))
        layer = getattr(sys.modules.get("keras"), "Layer", None)
        self._follow(model.named_parameters(), is_of_keras=layer is not None and isinstance(model, layer))

    def _follow(self, named: Iterable[tuple[str, Tensor]], *, is_of_keras: bool = False) -> None:
        for name, tensor in named:
            if id(tensor) in self._index or not tensor.is_leaf:
                continue
            if not tensor.requires_grad:
                self._frozen[id(tensor)] = (name, tensor)
                continue
            self._frozen.pop(id(tensor), None)
            index = len(self._parameters)
            self._index[id(tensor)] = index
            parameter = Parameter(tensor, name)
            parameter.is_of_keras = is_of_keras
            self._parameters.append(parameter)
            hook: Any = tensor.register_hook
            after: Any = tensor.register_post_accumulate_grad_hook
            if not parameter.is_sharded:
                self._handles.append(hook(lambda gradient, index=index: self._reached(index, gradient)))
            self._handles.append(after(lambda _, index=index: self._accumulated(index)))
            if tensor.grad is not None:
                with _Quiet(), torch.no_grad():
                    parameter.see(self._sketch.of(index, local(tensor.grad)))
                self._base[index] = parameter.sketch

    # ---- Forward and losses

    @never_raises
    def _forward(self, module: torch.nn.Module, _: Any) -> None:
        if self._mode is not None:
            self._mode.pause(module)
        if not self._active or torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
            return  # a checkpoint computes again
        if self._model is None and module not in self._modules:
            self._attach(module)
        unfrozen = [named for named in self._frozen.values() if named[1].requires_grad]
        if unfrozen:
            self._follow(unfrozen)
        if self._open is not None and module in self._modules:
            self._close()

    def _forwarded(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        if self._mode is not None:
            self._mode.go_on(module)

    def _saved(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The program has saved something, if to a file."""
        result = original(*args, **kwargs)
        if self._journal is not None and self._active:
            for steps in list(self.steps.values())[:1]:
                self._journal.saved(self._pending(steps))
        return result

    def _pending(self, steps: Steps) -> int:
        """Micro-batches after the last step."""
        own = self._joined(steps)
        entries = self._entries[steps.begin :]
        return sum(isinstance(entry, MicroBatch) and own.has(entry.added) for entry in entries)

    def _averaged(self, original: Callable[..., Any], average: Any, *args: Any, **kwargs: Any) -> Any:
        self._averages[id(average)] += 1
        return original(average, *args, **kwargs)

    def _close(self) -> None:
        """What comes next belongs to another micro-batch."""
        self._coming.clear()
        self._observe_shards()
        for steps in self.steps.values():
            if steps.ledger is not None:
                self._ask(steps, steps.ledger)
        self._open = None

    @never_raises
    def saw_loss(self, found: Callable[[], Term], value: Tensor) -> None:
        if not self._active or self._named or not value.requires_grad or torch._C._current_graph_task_id() != -1:
            return
        self._add(found(), value)

    def knows(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def name_loss(self, value: Tensor, weight: Any, reduction: str) -> Tensor:
        """Functions of torch are no longer asked."""
        self._named = True
        found = Term(NAMED, _where.line(), reduction, weight, torch.finfo(value.dtype).eps, _where.call())
        self._add(found, value)
        return value

    def _add(self, found: Term, value: Tensor) -> None:
        if self._open is not None:
            self._close()

        def note(gradients: tuple[Tensor, ...]) -> None:
            if self.is_apart or not self._active or (self._named and found.name != NAMED):
                return
            terms = self._terms if self._open is None else self._open.terms
            if found not in terms:
                terms.append(found)
            found.factors.append(gradients[0].detach())

        with _Quiet():
            node: Any = value.grad_fn
            if node.name() == "AliasBackward0":  # of a class of tensors, as fastai's: a change in place drops it
                node = node.next_functions[0][0]
            node.register_prehook(note)

    # ---- Backward

    @never_raises
    def went_backward(self) -> None:
        self._where = _where.line()
        self._observe_shards()

    def _observe_shards(self) -> None:
        """Before a backward: once it has begun, what it adds cannot be told from what was there."""
        if self._open is None and any(parameter.is_sharded for parameter in self._parameters):
            with _Quiet(), torch.no_grad():
                self._observe()

    @never_raises
    def _reached(self, index: int, gradient: Tensor | None) -> None:
        """A gradient is about to be added to .grad."""
        if not self._active or self.is_apart or gradient is None:
            return
        with _Quiet(), torch.no_grad():
            parameter = self._parameters[index]
            parameter.had_gradient = True
            if self._open is None:
                self._observe()
                self._begin_micro_batch()
            _add(self._coming, index, self._sketch.of(index, gradient))
            if has_gradients(parameter.tensor) and self._open is not None:
                self._open.parts[index] = self._sketch.of(index, fragment_of(parameter.tensor, gradient))

    def _begin_micro_batch(self) -> None:
        if not self.steps and len(self._entries) > _MOST_ENTRIES:
            self._active, self.failed = False, True
            self.remark(f"The watching ended: no optimizer has made a step after {_MOST_ENTRIES} micro-batches.")
            return
        if self._journal is not None:
            self._journal.begins_micro_batch()
        self._open = MicroBatch(self._terms, self._rates())
        self._terms = []
        self._entries.append(self._open)

    @never_raises
    def _accumulated(self, index: int) -> None:
        """A gradient was added to .grad."""
        if self._open is None and self._parameters[index].is_sharded:
            self._begin_micro_batch()
        micro = self._open
        if not self._active or micro is None:
            return
        with _Quiet(), torch.no_grad():
            parameter = self._parameters[index]
            gradient = parameter.tensor.grad
            if gradient is None:
                return
            micro.where = self._where
            after = self._sketch.of(index, local(gradient))
            if parameter.is_sharded:
                parameter.had_gradient = True
                self._coming[index] = after if parameter.sketch is None else after - parameter.sketch
            found = self._coming.pop(index, None)
            if found is None:
                return
            _add(micro.added, index, found)
            parameter.see(after)
            self._addresses[address_of(gradient)] = index
            if parameter.sketch is not None:
                micro.after[index] = parameter.sketch

    # ---- Changes of .grad between backwards

    @never_raises
    def changes(self, gradients: Any, name: str) -> None:
        """A function of torch is about to change tensors, which may be gradients."""
        tensors = gradients if isinstance(gradients, (list, tuple)) else (gradients,)
        if not tensors or not isinstance(tensors[0], Tensor) or not self._addresses:
            return
        with _Quiet(), torch.no_grad():
            addresses = [address_of(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
            indices = [
                self._addresses[address] for address in addresses
                if address in self._addresses and self._is_gradient(address)
            ]  # fmt: skip
            if not indices or torch._C._current_graph_task_id() != -1:
                return
            purpose, where = _where.purpose() or name, _where.line()
            group = self._group
            if group is None or (group.purpose, group.where) != (purpose, where):
                self._observe()
                group = self._group = Change(purpose, where)
                self._entries.append(group)
            group.touched.update(indices)
            for index in indices:
                self._parameters[index].forget()

    @property
    def is_within(self) -> bool:
        """Whether a function of a library was changing gradients when it was seen last."""
        return self._group is not None and self._group.purpose in _where.PURPOSES

    @never_raises
    def left(self) -> None:
        """The program goes on after that function, whatever it does to gradients itself."""
        if torch._C._current_graph_task_id() == -1:
            with _Quiet(), torch.no_grad():
                self._observe()

    def _is_gradient(self, address: int) -> bool:
        """Whether a gradient is still where one was."""
        gradient = self._parameters[self._addresses[address]].tensor.grad
        return gradient is not None and address_of(gradient) == address

    def _observe(self, *, all_of_them: bool = False) -> None:
        """Notes what has changed in .grad since it was seen last, and ends the change that is going on.

        :param all_of_them: versions are not trusted, which numpy and out= leave as they are
        """
        changed: dict[int, Tensor | None] = {}
        in_place = all_of_them or is_distributed()  # a reduction writes without a new version
        for index, parameter in enumerate(self._parameters):
            if parameter.is_as_seen() and not (in_place and parameter.tensor.grad is not None):
                continue
            gradient = parameter.tensor.grad
            found = None if gradient is None else self._sketch.of(index, local(gradient))
            if found is not None and parameter.sketch is not None and torch.equal(found, parameter.sketch):
                parameter.see(found)
                continue
            if gradient is not None:
                self._addresses[address_of(gradient)] = index
            if found is not None or parameter.sketch is not None:
                changed[index] = found
            parameter.see(found)
        group, self._group = self._group, None
        if group is not None:
            group.after.update({index: changed.pop(index) for index in group.touched if index in changed})
        if changed:
            self._entries.append(Change("", "", changed))

    # ---- The optimizer

    def _rates(self) -> dict[int, tuple[float, ...]]:
        return {key: steps.rates_now() for key, steps in self.steps.items()}

    def know(self, optimizer: torch.optim.Optimizer) -> Steps | None:
        """The windows of an optimizer; None if it has no parameter that is followed."""
        base: Any = optimizer
        while (inner := getattr(base, "optimizer", None) or getattr(base, "_optimizer", None)) is not None:
            base = inner  # of accelerate and Lightning
        tensors = [tensor for group in base.param_groups for tensor in group["params"]]
        indices = [self._index[id(tensor)] for tensor in tensors if id(tensor) in self._index]
        steps = self.steps.get(id(base))
        if steps is None and indices:
            steps = self.steps[id(base)] = Steps(base)
            steps.is_partial = any(self._base.get(index) is not None for index in indices)
        if steps is not None:
            new = [index for index in indices if index not in steps.start]
            steps.start.update({index: self._gradient_at(steps.begin, index) for index in new})
            steps.parameters = indices  # a group may have been added
        return steps

    def _gradient_at(self, position: int, index: int) -> Tensor | None:
        """The sketch of a gradient before an entry."""
        found = self._base.get(index)
        for entry in self._entries[:position]:
            found = entry.after.get(index, found)
        return found

    def _step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._active:
            return None
        steps = self.know(optimizer)
        if steps is None or self._stepping.get(id(steps), optimizer) is not optimizer:
            return None  # or a wrapper of it is stepping
        self._stepping[id(steps)] = optimizer
        where = _where.line()
        if steps.ledger is not None:
            steps.ledger.begins_step(where)
            self._close()
            return None
        given = args[1:] if args and args[0] is optimizer else args
        closure = kwargs.get("closure", given[0] if given else None)
        if not callable(closure):
            self._window(steps, where)
            return None

        def called() -> Any:
            result = closure()
            self._window(steps, where)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": called}
        head = args[: len(args) - len(given)]
        return (*head, called, *given[1:]), kwargs

    def _stepped(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for key in [key for key, outer in self._stepping.items() if outer is optimizer]:
            del self._stepping[key]
        if self._active and id(optimizer) in self.steps and self.steps[id(optimizer)].ledger is not None:
            self._close()

    # ---- DeepSpeed, whose engine takes .grad away

    def watch_deepspeed(self) -> None:
        """It was imported."""
        for engine in engines():
            self.replace(engine, "step", self._step_of_engine)
            if hasattr(engine, SCALING):
                self.replace(engine, SCALING, self._scaled_by_engine)

    def _scaled_by_engine(self, original: Callable[..., Any], engine: Any, gradient: Any) -> Any:
        """The gradient by an output of the model, between its loss and its parameters."""
        found = original(engine, gradient)
        task = torch._C._current_graph_task_id()
        if found is not gradient and task != self._scaled:
            self._scaled = task
            for term in self._terms:
                term.factors[-1:] = [term.factors[-1] / engine.gradient_accumulation_steps()]
        return found

    def _step_of_engine(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        skipped = engine.skipped_steps
        steps = self._window_of_engine(engine, _where.line())
        result = original(engine, *args, **kwargs)
        if steps is not None and engine.skipped_steps > skipped:  # for an overflow
            steps.skipped += len(steps.traces.pop().contributions)
        return result

    @never_raises
    def _window_of_engine(self, engine: Any, where: str) -> Steps | None:
        """An engine may be about to use the gradients that it keeps. Returns the windows, if one has ended."""
        known = [p for p in engine.module.parameters() if id(p) in self._index and has_gradients(p)]
        if not self._active or not known:
            if self._active and not isinstance(engine.optimizer, torch.optim.Optimizer):
                self.remark(f"DeepSpeed's {type(engine.optimizer).__name__} without ZeRO keeps gradients: not read.")
            return None
        with _Quiet(), torch.no_grad():
            if self._open is not None:
                for index, found in self._coming.items():
                    _add(self._open.added, index, found)
                self._open.where = self._where
            self._close()
            optimizer = engine.optimizer
            if id(optimizer) not in self.steps:
                self.steps[id(optimizer)] = Steps(optimizer)
                place = engine.micro_steps % engine.gradient_accumulation_steps()
                self.steps[id(optimizer)].is_partial = place > 0
            steps = self.steps[id(optimizer)]
            if not engine.is_gradient_accumulation_boundary():
                return None
            if steps.is_partial:
                steps.begins(len(self._entries), {})
                steps.is_partial = False
                return None
            steps.parameters = [self._index[id(p)] for p in known]
            joined = self._joined(steps)
            scale = float(getattr(optimizer, "cur_scale", None) or getattr(optimizer, "loss_scale", None) or 1.0)
            gradient = joined({self._index[id(p)]: self._sketch.of(self._index[id(p)], fragment_of(p)) for p in known})
            found = Trace(
                contributions(self._entries[steps.begin :], id(optimizer), joined),
                max(torch.finfo(p.dtype).eps for p in known), self._where, solved=True, fragmented=True,
                finite=bool(np.isfinite(gradient).all()), target=gradient / scale, gradient=gradient / scale,
            )  # fmt: skip
            steps.begins(len(self._entries), {})
            self._ended(steps, found, where)
            return steps

    @never_raises
    def _ask(self, steps: Steps, ledger: Ledger) -> None:
        """What a gradaccum optimizer has taken since it was asked last, and whether it has ended a window."""
        own = self._joined(steps)
        micro_batches = [
            entry for entry in self._entries[steps.begin :] if isinstance(entry, MicroBatch) and own.has(entry.added)
        ]
        found = ledger.ask(micro_batches)
        if found is not None:
            steps.begins(len(self._entries), {})
            self._ended(steps, found, ledger.where)

    @never_raises
    def _window(self, steps: Steps, where: str) -> None:
        """The optimizer is about to read .grad."""
        with _Quiet(), torch.no_grad():
            self._observe(all_of_them=True)
            self._close()
            if steps.is_partial and self._journal is None:  # a resumed window is compared as it is
                steps.begins(len(self._entries), self._sketches(steps))
                steps.is_partial = False
                return
            epsilon = max(torch.finfo(self._parameters[index].tensor.dtype).eps for index in steps.parameters)
            entries = self._entries[steps.begin :]
            own = id(steps.optimizer)
            found = trace(entries, steps.start, self._joined(steps), epsilon, own, is_distributed())
            steps.begins(len(self._entries), self._sketches(steps))
            # A fused optimizer unscales by itself, and skips the step by itself.
            scale, overflow = (getattr(steps.optimizer, name, None) for name in ("grad_scale", "found_inf"))
            if scale is not None:
                found.unscale(float(scale), where)
            if overflow is not None and float(overflow):
                steps.skipped += len(found.contributions)
                return
            self._ended(steps, found, where)

    def _ended(self, steps: Steps, found: Trace, where: str) -> None:
        """An optimizer has ended a window, or is about to."""
        moved = [int(layer.num_batches_tracked) for layer in self._norms]
        found.step = where
        found.rates = steps.rates_now()
        found.moves = max((now - before for now, before in zip(moved, self._moved, strict=True)), default=0)
        found.averages = max(self._averages.values(), default=0)
        self._averages.clear()
        found.sharded = self.is_sharded(steps)
        steps.traces.append(found)
        if self._journal is not None:
            self._journal_of(steps, self._journal)
        self._moved = moved
        self._prune()
        self._count_window(len(steps.traces))

    def _journal_of(self, steps: Steps, journal: Journal) -> None:
        joined = self._joined(steps)
        tensors = {index: local(self._parameters[index].tensor) for index in steps.parameters}
        with _Quiet(), torch.no_grad():
            parameters = joined({index: self._sketch.of(index, tensor) for index, tensor in tensors.items()})
        name = f"{type(steps.optimizer).__name__} {list(self.steps).index(id(steps.optimizer)) + 1}"
        gradient = joined({} if steps.ledger is not None else self._sketches(steps))
        journal.window(name, len(steps.traces[-1].contributions), steps.rates_now(), gradient, parameters)

    def is_sharded(self, steps: Steps) -> bool:
        """Whether the gradients of ranks are added up before they are seen."""
        return any(self._parameters[index].is_sharded for index in steps.parameters)

    def _sketches(self, steps: Steps) -> dict[int, Tensor | None]:
        return {index: self._parameters[index].sketch for index in steps.parameters}

    def _joined(self, steps: Steps) -> Joined:
        return Joined({index: self._parameters[index].size for index in steps.parameters})

    def _prune(self) -> None:
        """Forgets what every optimizer has behind it, once all optimizers are likely to be known."""
        if any(len(steps.traces) < 2 for steps in self.steps.values()):
            return
        first = min(steps.begin for steps in self.steps.values())
        for entry in self._entries[:first]:
            self._base.update(entry.after)
        del self._entries[:first]
        for steps in self.steps.values():
            steps.begin -= first

    # ---- What was seen

    def title(self) -> str:
        is_used = self.steps or not all(each.is_of_keras for each in self._parameters)
        return f"torch {torch.__version__}" if is_used or not self._parameters else ""

    def traces(self) -> Traces:
        return [(type(steps.optimizer).__name__, steps.traces) for steps in self.steps.values()]

    def gather(self, own: Any) -> list[Any]:
        distributed: Any = torch.distributed
        if not is_distributed():
            return [own]
        found: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, own)
        return found

    def notes(self, is_alone: bool) -> list[str]:
        said = []
        for steps in self.steps.values():
            if is_distributed() and not is_alone and self.is_sharded(steps):
                said.append("Gradients are DTensors: that the ranks' mean is what was reduced is taken for granted.")
            if steps.pending:
                said.append(f"The recording ended with {steps.pending} micro-batches that no step had applied.")
            skipped = steps.skipped + sum(window.skipped for window in steps.traces)
            if skipped:
                said.append(f"{skipped} micro-batches were dropped with their window, for a gradient was not finite.")
        held = {index for steps in self.steps.values() if steps.traces for index in steps.parameters}
        followed = [(index, each) for index, each in enumerate(self._parameters) if not each.is_of_keras]
        without_gradient = [each.name for _, each in followed if not each.had_gradient]
        without_optimizer = [each.name for index, each in followed if each.had_gradient and index not in held]
        for names, what in (
            (without_gradient, "had no gradient in any backward"),
            ([] if self.is_limited else without_optimizer, "had gradients, but no optimizer with them made a step"),
        ):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                said.append(f"{', '.join(names[:3])}{more} {what}.")
        return said


def _add(sketches: Sketches, index: int, found: Tensor) -> None:
    """Adds to the sketch of a parameter, if there is one."""
    before = sketches.get(index)
    sketches[index] = found if before is None else before + found
