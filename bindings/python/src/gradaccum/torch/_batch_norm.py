# SPDX-License-Identifier: Apache-2.0
"""Running statistics of batch normalisation that move once a step."""

from __future__ import annotations

from typing import Any

import torch

from .. import BatchNormOptions
from ._hooks import Told
from ._optimizer import Optimizer, _versions

_LAYERS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def convert_batchnorm(model: torch.nn.Module, optimizer: Optimizer) -> int:
    """Makes running statistics move once per applied step, by the exact statistics of the whole window.

    The layers of batch normalisation stay the same modules, with their buffers and weights, and normalise
    each micro-batch by its own statistics, as before. Their running statistics are those of a batch as large
    as the window: of everything that the layer has seen in training since the last step. A window that is
    skipped or discarded moves nothing. A copy of the model keeps the statistics that it has. Returns how many
    layers there are. Between windows.
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
    layer.set_running(
        module.running_mean.detach().cpu().double(), module.running_var.detach().cpu().double(),
        int(module.num_batches_tracked),
    )  # fmt: skip
    optimizer._layers[module] = layer
    optimizer._layer_versions[module] = _versions(module)
    module.track_running_stats = False  # training moves the buffers no more; evaluation still reads them
    module.register_forward_hook(_Statistics(optimizer))


class _Statistics(Told[Optimizer]):
    """A hook that shows the optimizer what a layer has normalised in training."""

    def __call__(self, module: torch.nn.Module, inputs: Any, output: Any = None) -> None:
        optimizer = self.owner()
        # A recomputation in backward sees the same input again; a copy of the module is not known.
        if optimizer is not None and module.training and module in optimizer._layers:
            if torch._C._current_graph_task_id() == -1:
                optimizer._saw(module, inputs[0])
