# SPDX-License-Identifier: Apache-2.0
"""Layers of batch normalisation whose running statistics the library moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from .. import BatchNorm, BnSpread
from ._ranks import Alone, Statistics, joined
from ._habits import warn
from ._streams import Streams

Layer: TypeAlias = Any
"""A module of torch with batch normalisation: modules declare no buffers."""


@dataclass
class _Seen:
    """The statistics of what a layer has normalised since the last micro-batch."""

    count: int
    mean: Tensor
    m2: Tensor
    versions: tuple[int, ...]  # of the buffers before


class Layers:
    """The layers of one optimizer, and what they have seen in training since its last micro-batch."""

    def __init__(self) -> None:
        self._own: dict[Layer, BatchNorm] = {}
        self._versions: dict[Layer, tuple[int, ...]] = {}  # of the buffers that the library has
        self._seen: dict[Layer, _Seen] = {}
        self._written = 0  # versions of the optimizer's parameters before the first input in _seen
        self._are_away = False

    def __len__(self) -> int:
        return len(self._own)

    def __contains__(self, module: Layer) -> bool:
        return module in self._own

    def add(self, module: Layer, own: BatchNorm) -> None:
        """The layer belongs to this optimizer from now on; own is its counterpart in the library."""
        self._own[module] = own
        self._set_running(module)

    def forget(self, module: Layer) -> None:
        """The layer belongs to another optimizer from now on."""
        self._own.pop(module, None)
        self._versions.pop(module, None)
        self._seen.pop(module, None)

    def _set_running(self, module: Layer) -> None:
        self._own[module].set_running(
            module.running_mean.detach().cpu().double(), module.running_var.detach().cpu().double(),
            int(module.num_batches_tracked),
        )  # fmt: skip
        self._versions[module] = _versions(module)

    # ---- Training

    def takes(self, module: Layer, parameters: Iterable[Tensor] | None) -> bool:
        """Whether the optimizer moves the statistics of the layer, which is about to be called in training.

        It does not if momentum is None, as in torch.optim.swa_utils.update_bn, nor if something else trains the
        parameters: then the statistics move with each forward, as in torch. parameters is None if backward calls the
        layer again, when updates before the step may have written them.
        """
        if module not in self._own or module.momentum is None:
            return False
        if parameters is None:
            return not self._are_away
        seen = self._seen.get(module)
        if seen is not None and seen.versions != _versions(module):  # a model was loaded
            self._seen.clear()
        if not self._seen:
            self._written = sum(parameter._version for parameter in parameters)
        elif not self._are_away and module is next(iter(self._seen)):
            if sum(parameter._version for parameter in parameters) != self._written:
                self._leave()
        return not self._are_away

    def saw(self, module: Layer, x: Tensor) -> None:
        """Adds the statistics of an input to those that the layer has seen for the next micro-batch."""
        axes = [axis for axis in range(x.dim()) if axis != 1]
        count = x.numel() // x.shape[1]
        if count == 0:
            return
        variance, mean = torch.var_mean(x.detach().double(), axes, correction=0)
        versions = _versions(module)
        old = self._seen.get(module)
        before = (old.count, old.mean, old.m2) if old is not None and old.versions == versions else None
        self._seen[module] = _Seen(*joined(before, (count, mean, variance * count)), versions)

    def _leave(self) -> None:
        """Moves the statistics as torch does, until the optimizer takes a micro-batch."""
        names = ", ".join(f'"{self._own[module].name}"' for module in self._seen)
        for module, seen in self._seen.items():
            if seen.versions == _versions(module) and seen.count > 1:
                with torch.no_grad():
                    module.running_mean.lerp_(seen.mean.to(module.running_mean), module.momentum)
                    variance = (seen.m2 / (seen.count - 1)).to(module.running_var)
                    module.running_var.lerp_(variance, module.momentum)
                    module.num_batches_tracked.add_(1)
        self._seen.clear()
        self._are_away = True
        warn(
            f"the parameters were written after a forward in training that no micro-batch of the optimizer of "
            f"convert_batchnorm() took, as if another optimizer trained them: the running statistics of {names} "
            "move with each forward, as torch moves them, until that optimizer takes a micro-batch"
        )

    # ---- Windows

    def look(self) -> None:
        """At the start of a window: takes running statistics that the program has written."""
        self._are_away = False
        for module, own in self._own.items():
            if module.momentum != own.info.momentum:
                raise RuntimeError(
                    f'the momentum of layer "{own.name}" has changed since convert_batchnorm()'
                )
            if _versions(module) != self._versions[module]:
                self._set_running(module)

    def tell(self, streams: Streams, ranks: Alone) -> None:
        """Gives the library the statistics of the micro-batch that is open, or the next, over all ranks."""
        for module, (count, mean, m2) in ranks.merge(self._take(), self._own).items():
            self._own[module].accumulate_stats(count, mean, m2, BnSpread.M2)
            streams.keep([mean, m2])

    def _take(self) -> dict[Any, Statistics]:
        """The count, mean and M2 of what each layer has seen, which begins anew."""
        taken: dict[Any, Statistics] = {
            module: (seen.count, seen.mean, seen.m2)
            for module, seen in self._seen.items()
            if seen.versions == _versions(module)  # else: what was written since then stands for them
        }
        self._seen.clear()
        self._are_away = False
        return taken

    def drop(self) -> None:
        """Forgets what the layers have seen."""
        self._seen.clear()

    def written(self) -> dict[Layer, tuple[Tensor, Tensor, int]]:
        """Before a step: the statistics that the library has of layers whose buffers the program has written."""
        found = {}
        for module, own in self._own.items():
            if _versions(module) != self._versions[module]:
                mean, variance, steps = own.running()
                found[module] = (from_dlpack(mean), from_dlpack(variance), steps)
        return found

    def publish(self, written: dict[Layer, tuple[Tensor, Tensor, int]] | None = None) -> None:
        """Copies the running statistics of the library to the buffers of torch.

        written: by written() before the step. The step then moves what the program has written.
        """
        for module, own in self._own.items():
            mean, variance, steps = own.running()
            moved = [from_dlpack(mean), from_dlpack(variance)]
            if written and module in written:
                *old, old_steps = written[module]
                kept = 1 - module.momentum if steps > old_steps else 1.0
                for new, before, buffer in zip(
                    moved, old, (module.running_mean, module.running_var), strict=True
                ):
                    new += kept * (buffer.detach().cpu().double() - before)
                steps += int(module.num_batches_tracked) - old_steps
                own.set_running(moved[0], moved[1], steps)
            with torch.no_grad():
                module.running_mean.copy_(moved[0])
                module.running_var.copy_(moved[1])
                module.num_batches_tracked.fill_(steps)
            self._versions[module] = _versions(module)


def _versions(module: Layer) -> tuple[int, ...]:
    buffers = (module.running_mean, module.running_var, module.num_batches_tracked)
    return tuple(number for buffer in buffers for number in (id(buffer), buffer._version))
