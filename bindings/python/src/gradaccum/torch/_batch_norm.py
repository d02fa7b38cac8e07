# SPDX-License-Identifier: Apache-2.0
"""Running statistics of batch normalisation that move once a step."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .. import BatchNormOptions
from ._optimizer import Optimizer

_LAYERS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def convert_batchnorm(model: torch.nn.Module, optimizer: Optimizer) -> int:
    """Makes running statistics move once per applied step, by the exact statistics of the whole window.

    The layers of batch normalisation stay the same modules, with their buffers and weights, and normalise
    each micro-batch by its own statistics, as before. Their running statistics are those of a batch as large
    as the window. A window that is skipped or discarded moves nothing. Returns how many layers there are.
    """
    count = 0
    for name, module in model.named_modules():
        if isinstance(module, _LAYERS) and module.track_running_stats and module not in optimizer._layers:
            if module.momentum is None:
                raise ValueError(
                    f'layer "{name}" has momentum None, a cumulative average, which the library has not'
                )
            _convert(name or "batch_norm", module, optimizer)
            count += 1
    return count


def _convert(name: str, module: Any, optimizer: Optimizer) -> None:
    mean, variance = cast(Tensor, module.running_mean), cast(Tensor, module.running_var)
    layer = optimizer.context.add_batch_norm(
        name, module.num_features, options=BatchNormOptions(momentum=module.momentum, eps=module.eps)
    )
    layer.set_running(
        mean.detach().cpu().double(), variance.detach().cpu().double(), int(module.num_batches_tracked)
    )
    optimizer._layers[module] = layer
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        if not module.training:
            return cast(Tensor, plain(x))
        module._check_input_dim(x)
        # A recomputation in backward sees the same input again.
        if torch._C._current_graph_task_id() == -1:
            layer.accumulate(x.detach().to(torch.float32).contiguous())
        return torch.nn.functional.batch_norm(
            x, None, None, module.weight, module.bias, True, 0.0, module.eps
        )

    module.forward = forward
