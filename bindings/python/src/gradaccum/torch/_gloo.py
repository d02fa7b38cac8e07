# SPDX-License-Identifier: Apache-2.0
"""Messages between the hosts of ranks, over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Gloo:
    """A group of gloo with processes of the world.

    group: whose time limit it takes over, that of the first of these devices for which the group has one.
    missing: how the error begins that is raised if a rank does not come.
    ranks: the processes; None: all.
    """

    def __init__(
        self, group: Any, devices: Sequence[torch.device], missing: str, ranks: Sequence[int] | None = None
    ) -> None:
        self._distributed: Any = torch.distributed
        self._missing = missing
        self.group = self._distributed.new_group(
            ranks, backend="gloo", timeout=_timeout(group, devices), use_local_synchronization=ranks is not None
        )
        self.count: int = self._distributed.get_world_size(self.group)

    def gather(self, own: Tensor) -> list[Tensor]:
        """What each rank gives, as large as that of this one. RuntimeError: a rank did not come."""
        found = [torch.empty_like(own) for _ in range(self.count)]
        try:
            self._distributed.all_gather(found, own, group=self.group)
        except Exception as error:
            raise RuntimeError(f"{self._missing} as this one, or has ended: {error}") from error
        return found

    def gather_objects(self, own: Any) -> list[Any]:
        """What each rank gives, which pickle must know."""
        found: list[Any] = [None] * self.count
        self._distributed.all_gather_object(found, own, group=self.group)
        return found


def _timeout(group: Any, devices: Sequence[torch.device]) -> Any:
    """None, the default of gloo, if the group does not tell."""
    for device in devices:
        try:
            return group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return None
