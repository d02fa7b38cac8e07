# SPDX-License-Identifier: Apache-2.0
"""The processes that train one model together with this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import Clip, Config, Reduced
from ._ddp import Ranks
from ._parts import is_part
from ._ranks import NO_MESH, Alone
from ._sharded import Sharded


def ranks_of(
    config: Config, tensors: Sequence[Tensor], *, ddp: torch.nn.Module | None, data_mesh: Any, reduced: Reduced | None,
    distributed: bool, eager: bool, clip: Clip | None,
) -> Alone:  # fmt: skip
    """The processes that train together with this one, whose optimizer has these parameters.

    eager: parameters may be updated before the end of backward.
    """
    if data_mesh is not None:
        if ddp is not None:
            raise ValueError("ddp and data_mesh were given, but gradients are reduced by one of them alone")
        return Sharded(config, tensors, data_mesh, Reduced.MEAN if reduced is None else reduced, distributed)
    if reduced is not None:
        raise ValueError("reduced was given without data_mesh, over which gradients are reduced")
    if any(map(is_part, tensors)):
        raise ValueError(NO_MESH)
    if ddp is not None and eager:
        from ._ddp_eager import eager_ranks  # of torch.distributed, which a torch may lack

        return eager_ranks(ddp, config, clip)
    if ddp is not None:
        return Ranks(ddp, config)
    world = torch.distributed.is_available() and torch.distributed.is_initialized()
    if world and torch.distributed.get_world_size() > 1 and distributed:
        raise RuntimeError(
            "there are several processes, whose gradients this optimizer does not reduce: pass ddp= the "
            "DistributedDataParallel, or distributed=False for processes that train apart"
        )
    return Alone()
