# SPDX-License-Identifier: Apache-2.0
"""Running statistics of batch normalisation that move once a step."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .. import BatchNormOptions
from ._hooks import Told
from ._optimizer import Optimizer

_LAYERS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def convert_batchnorm(model: torch.nn.Module, optimizer: Optimizer) -> int:
    """Makes running statistics move once per applied step, by the exact statistics of the whole window.

    The layers of batch normalisation stay the same modules, with their buffers and weights, and normalise
    each micro-batch by its own statistics, as before. Their running statistics are those of a batch as large
    as the window: of everything that the layer has seen in training since the last step. A window that is
    skipped or discarded moves nothing. A layer belongs to the optimizer of the last call. Returns how many
    layers there are. Between windows.

    Layers are torch's own, whose statistics move with each forward, in a copy of the model, once the optimizer is
    gone, and while momentum is None, so that ``torch.optim.swa_utils.update_bn`` works. If another optimizer trains
    the parameters while this one is kept, a warning names the layers, which are torch's own until this one takes
    a micro-batch.
    """
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise ValueError(
                f'layer "{name}" is a SyncBatchNorm, whose statistics are those of several processes'
            )
        if isinstance(module, _LAYERS) and module.track_running_stats and module not in optimizer._layers:
            if module.momentum is None:
                raise ValueError(
                    f'layer "{name}" has momentum None, a cumulative average, which the library has not'
                )
            layers.append((name or "batch_norm", module))
    for name, module in layers:
        _convert(name, module, optimizer)
    return len(layers)


def _convert(name: str, module: Any, optimizer: Optimizer) -> None:
    layer = optimizer.context.add_batch_norm(
        name, module.num_features, options=BatchNormOptions(momentum=module.momentum, eps=module.eps)
    )
    optimizer._layers.add(module, layer)
    for hook in module._forward_hooks.values():
        hooks = getattr(hook, "__self__", None)
        if isinstance(hooks, _Hooks):  # of an earlier optimizer
            old = hooks.owner()
            if old is not None:
                old._layers.forget(module)
            hooks.owner = weakref.ref(optimizer)
            return
    hooks = _Hooks(optimizer)
    module.register_forward_pre_hook(hooks.before)
    module.register_forward_hook(hooks.after, always_call=True)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Hooks(Told[Optimizer]):
    """Hooks of a layer that show the optimizer what it has normalised in training."""

    _hides = False  # whether torch is kept from moving the statistics in this forward

    def before(self, module: Any, inputs: Any) -> None:
        optimizer = self.owner()
        if optimizer is None or not (module.training and module.track_running_stats):
            return
        if optimizer._layers.takes(module, None if _is_in_backward() else optimizer._parameters.tensors):
            module.track_running_stats = False
            self._hides = True

    def after(self, module: Any, inputs: Any, output: Any) -> None:
        if not self._hides:
            return
        module.track_running_stats = True
        self._hides = False
        optimizer = self.owner()
        # There is no output if forward has raised. A recomputation in backward sees the same input again.
        if optimizer is not None and output is not None and not _is_in_backward():
            optimizer._layers.saw(module, inputs[0])
