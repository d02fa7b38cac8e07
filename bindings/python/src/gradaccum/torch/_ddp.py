# SPDX-License-Identifier: Apache-2.0
"""Several processes that train one model under DistributedDataParallel.

DistributedDataParallel (DDP) gives every rank the mean of the ranks' gradients. The gradient of one batch is the
mean weighted by samples, so each rank's gradient is multiplied by its share of the weights before DDP reduces it, in a
hook of each parameter. The ranks tell each other their weights when the first gradient of a backward is ready, which
is before DDP reduces anything: a rank that does something else by then is an error on all of them, and not a
reduction that waits for ever. The weights travel between the hosts, over a group of gloo; no device waits.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import Config, GradientKind
from ._gloo import Gloo
from ._hooks import Gradients, Told
from ._ranks import Call, Meeting, Statistics, joined, listed
from ._slots import Slot

_OWN = "gradaccum.torch._ddp_eager"
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_MEANS = {  # hooks of torch that give the mean over the ranks, up to their rounding
    "allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "fp16_compress_wrapper_hook",
    "bf16_compress_wrapper_hook", "powerSGD_hook", "batched_powerSGD_hook", "quantization_pertensor_hook",
    "quantization_perchannel_hook",
}  # fmt: skip


class Ranks(Meeting):
    """The processes of a DistributedDataParallel."""

    whose = " of ddp"
    """In messages."""

    def __init__(self, ddp: torch.nn.Module, config: Config) -> None:
        module: Any = getattr(ddp, "_orig_mod", ddp)  # of torch.compile
        if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise TypeError(f"ddp was a {type(ddp).__name__}, expected a DistributedDataParallel")
        self._ddp: Any = module
        self._sums = config.gradient_kind == GradientKind.SUM
        distributed: Any = torch.distributed
        self._gloo = Gloo(
            module.process_group, [module.device], "a rank of ddp did not come to the same backward, step() or flush()",
            distributed.get_process_group_ranks(module.process_group),
        )  # fmt: skip
        self.count = self._gloo.count
        named = {
            name: parameter for name, parameter in module.module.named_parameters()
            if name not in module.parameters_to_ignore
        }  # fmt: skip
        self._reduced = {id(parameter) for parameter in named.values()}
        logged = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        trained = sum(parameter.requires_grad for parameter in named.values())
        if trained == logged.get("num_parameter_tensors"):
            # DDP reduces those that had requires_grad when it was made; these are the same.
            self._reduced = {id(parameter) for parameter in named.values() if parameter.requires_grad}
        self._tracked: list[Tensor] = []
        self._waiting: list[tuple[str, Tensor]] = []  # without requires_grad, so that they have no hook yet
        self._is_ready = False  # whether a forward has made DDP ready to reduce the next backward
        self._reduces = False  # whether a backward of this micro-batch is reduced
        self._backwards: set[int] = set()  # the last one that is reduced, and those that it runs within itself
        self._given: set[int] = set()  # the parameters to which it has given gradients
        self._fault: str | None = None  # why gradients in .grad are not those of all ranks
        self._weight: float | None = None  # of the micro_batch() that is open
        self._weights: Sequence[float] | None = None  # of all ranks, in the micro-batch that is open
        self._last: Sequence[float] = ()  # of the micro-batch that was taken
        self._share = 1.0  # what a gradient of this rank is multiplied by
        self._hooks = 0  # of communication, that were checked
        module.register_forward_pre_hook(Told(self, type(self).forward))

    def track(self, slots: Sequence[Slot]) -> None:
        """Parameters have been added: their gradients are weighed before they are reduced."""
        self._track([(slot.own.name, slot.tensor) for slot in slots])

    def _track(self, named: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            if tensor.requires_grad and id(tensor) not in self._reduced:
                raise ValueError(
                    f'parameter "{name}" is not reduced by ddp: it is not in the module, is ignored, or had '
                    "requires_grad=False when the DistributedDataParallel was made"
                )
        for name, tensor in named:
            if tensor.requires_grad:
                hook = Told(self, type(self).reached, len(self._tracked))
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                self._tracked.append(tensor)
            else:
                self._waiting.append((name, tensor))

    # ---- Hooks

    def forward(self, _: torch.nn.Module, __: Any) -> None:
        """Before a forward of DDP, which decides there whether the backward is reduced."""
        if not torch.is_grad_enabled():
            return
        if self._ddp._join_config.enable:
            raise RuntimeError(
                "ddp.join() was entered: a rank that has no samples left gives empty micro-batches the weight 0, "
                "since every rank must take part in every micro-batch"
            )
        if self._ddp.will_sync_module_buffers() or not getattr(self._ddp, "_has_rebuilt_buckets", False):
            self._meet(Call.FORWARD, None)  # DDP communicates in this forward
        if len(self._ddp._comm_hooks) != self._hooks:
            self._check_hooks()
        unfrozen = [named for named in self._waiting if named[1].requires_grad]
        if unfrozen:
            self._track(unfrozen)
            self._waiting = [named for named in self._waiting if not named[1].requires_grad]
        if all(tensor.grad is None for tensor in self._tracked):  # zero_grad() was called
            self._fault = None
        self._is_ready = self._ddp.require_backward_grad_sync
        if not self._is_ready:
            self._fault = (
                "gradients of a backward inside no_sync() are not reduced: leave no_sync() out, since every "
                "micro-batch must be reduced before it is accumulated"
            )

    def _check_hooks(self) -> None:
        self._hooks = len(self._ddp._comm_hooks)
        for hook, _ in self._ddp._comm_hooks:
            name = getattr(hook, "__name__", type(hook).__name__)
            if getattr(hook, "__module__", "") == _OWN:
                continue
            if not getattr(hook, "__module__", "").startswith(_HOOKS):
                warnings.warn(
                    f"the communication hook {name} of ddp must give every rank the mean of the ranks' gradients, "
                    "which is not checked",
                    stacklevel=4,
                )
            elif name not in _MEANS:
                raise RuntimeError(f"the communication hook {name} of ddp does not give the mean over all ranks")

    def reached(self, parameter: int, gradient: Tensor) -> Tensor | None:
        """Before a gradient of this rank is added to .grad, and reduced. Returns what takes its place."""
        backward = torch._C._current_graph_task_id()
        if self._is_ready:
            self._is_ready, self._reduces = False, True
            self._backwards.clear()
            self._given.clear()
            weights = self._meet(Call.BACKWARD, self._weight)
            self._weights = None if self._weight is None else weights
            if self._weight is not None:
                self._share = self._share_of(self._weight, max(weights))
        elif not self._reduces or (backward not in self._backwards and parameter in self._given):
            # A checkpoint runs backwards within a backward: they give gradients to other parameters than it.
            self._fault = self._fault or (
                "gradients of a backward were not reduced: each backward needs a forward of ddp itself before it, not "
                "of its module, and no other backward between them"
            )
            return None
        self._backwards.add(backward)
        self._given.add(parameter)
        if self._share == 1:
            return None
        return gradient * self._share if self._share else torch.zeros_like(gradient)

    def _share_of(self, weight: float, most: float) -> float:
        """What the gradients of a rank are multiplied by: at most 1, so that 16 bits do not overflow."""
        if most == 0 or (self._sums and weight > 0):
            return 1.0
        return weight / most

    # ---- Micro-batches and steps

    def opens(self, tells_ready: bool) -> bool:
        """Gradients are in .grad once they are reduced."""
        return False

    @contextlib.contextmanager
    def micro_batch(self, weight: float, gradients: Gradients | None) -> Iterator[None]:
        """Backwards of which the weight of this rank is known before."""
        self._weight, self._weights, self._share = float(weight), None, 1.0
        try:
            yield
        except BaseException:
            self._weights, self._reduces = None, False
            raise
        finally:
            self._weight, self._share = None, 1.0

    def begin(self) -> None:
        """A micro-batch is about to be taken: raises if something of it was not reduced."""
        self._reduces = False
        if self._fault is not None:  # until a forward finds that the gradients are gone from .grad
            self._weights = None
            raise RuntimeError(self._fault)

    def take(self, weight: float, loss_scale: float | None) -> tuple[float, float | None]:
        """The weight over all ranks, and the loss scale that undoes what the reduction has divided by."""
        weights, self._weights = self._weights, None
        if weights is None:  # the backward did not know them
            weights = self._meet(Call.ACCUMULATE, float(weight))
            if not self._sums and max(weights) != min(weights):
                raise ValueError(
                    f"the ranks gave the weights {listed(weights)} to accumulate(), but ddp has averaged their "
                    "gradients as if the weights were equal: use opt.backward(loss, weight=...) or "
                    "opt.micro_batch(weight=...), which know the weight before"
                )
        self._last = weights
        # DDP has divided by the number of ranks, and reached() by the largest weight: the library undoes both, as it
        # undoes a loss scale.
        most = max(weights)
        if self._sums:
            divisor = 1 / self.count
        else:
            divisor = math.fsum(own / most for own in weights) / self.count if most > 0 else 1.0
        if divisor != 1:
            loss_scale = (self._context.loss_scale if loss_scale is None else loss_scale) * divisor
        return math.fsum(weights), loss_scale

    def merge(self, seen: dict[Any, Statistics], layers: Iterable[Any]) -> dict[Any, Statistics]:
        """The statistics of the micro-batch of all ranks."""
        merged: dict[Any, Statistics] = {}
        layers = list(layers)
        if not layers:
            return merged
        parts = []
        for layer in layers:
            zero = torch.zeros(layer.num_features, dtype=torch.float64)
            count, mean, m2 = seen.get(layer, (0, zero, zero))
            parts += [torch.tensor([count], dtype=torch.float64), mean.cpu(), m2.cpu()]
        sizes = [len(part) for part in parts]
        for weight, found in zip(self._last, self._gloo.gather(torch.cat(parts)), strict=True):
            split = torch.split(found, sizes)
            for i, layer in enumerate(layers):
                count, mean, m2 = int(split[3 * i][0]), split[3 * i + 1], split[3 * i + 2]
                if weight > 0 and count > 0:
                    merged[layer] = joined(merged.get(layer), (count, mean, m2))
        return {  # back to the device of the layer, whose context takes no other
            layer: (count, mean.to(layer.running_mean.device), m2.to(layer.running_mean.device))
            for layer, (count, mean, m2) in merged.items()
        }

    def _gather(self, own: list[float]) -> list[list[float]]:
        return [row.tolist() for row in self._gloo.gather(torch.tensor(own, dtype=torch.float64))]

    def _gather_values(self, own: dict[str, str]) -> list[dict[str, str]]:
        return self._gloo.gather_objects(own)
