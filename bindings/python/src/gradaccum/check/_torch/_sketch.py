# SPDX-License-Identifier: Apache-2.0
"""Sketches of tensors, on their devices."""

from __future__ import annotations

import torch
from torch import Tensor

from .._sketch import COLUMNS, fold, rows_of, signs, size_of


class Sketch:
    """Makes sketches of tensors."""

    def __init__(self) -> None:
        self._columns: dict[torch.device, Tensor] = {}
        self._rows: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    def of(self, index: int, tensor: Tensor) -> Tensor:
        """The sketch of the tensor with this index: size_of() numbers, f64 on its device."""
        if not torch.is_autocast_enabled(tensor.device.type):
            return self._of(index, tensor)
        with torch.autocast(tensor.device.type, enabled=False):
            return self._of(index, tensor)

    def _of(self, index: int, tensor: Tensor) -> Tensor:
        flat = (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach().reshape(-1)
        count = flat.numel()
        if count == size_of(count):
            return flat.to(torch.float64, copy=True)
        device = flat.device
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        if (index, device, dtype) not in self._rows:
            self._rows[index, device, dtype] = torch.from_numpy(signs(rows_of(count), index + 1)).to(device, dtype)
        if device not in self._columns:
            self._columns[device] = torch.from_numpy(signs(COLUMNS, 0)).to(device)
        total = torch.zeros(COLUMNS, dtype=torch.float64, device=device)
        found: Tensor = fold(
            flat, total, self._rows[index, device, dtype], self._columns[device], lambda part: part.to(dtype),
            lambda part: part.to(torch.float64),
        )  # fmt: skip
        return found
