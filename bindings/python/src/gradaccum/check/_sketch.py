# SPDX-License-Identifier: Apache-2.0
"""A few numbers in place of a tensor, from which it is seen how tensors are combined."""

from __future__ import annotations

import torch
from torch import Tensor

_COLUMNS = 4096
_CHUNK = 1 << 18  # elements that are converted at once
_BUCKETS = 128  # of a tensor


class Sketch:
    """A count-sketch of each of some tensors: every element has a sign and is added to one of a few buckets.

    The map is linear and has a fixed seed: if one tensor is a combination of others, so are their sketches, with the
    same coefficients, in every process. The sign of an element is the product of one of its row and one of its column
    in a matrix of 4096 columns, so that a pass over the tensor is a product with a vector.
    """

    def __init__(self) -> None:
        self._signs: dict[torch.device, Tensor] = {}
        self._rows: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    def of(self, index: int, tensor: Tensor) -> Tensor:
        """The sketch of the tensor with this index: size_of() numbers, f64 on its device."""
        if not torch.is_autocast_enabled(tensor.device.type):
            return self._of(index, tensor)
        with torch.autocast(tensor.device.type, enabled=False):
            return self._of(index, tensor)

    def _of(self, index: int, tensor: Tensor) -> Tensor:
        flat = (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach().reshape(-1)
        size = flat.numel()
        if size <= _BUCKETS:
            return flat.to(torch.float64, copy=True)
        whole = size // _COLUMNS * _COLUMNS
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        total = torch.zeros(_COLUMNS, dtype=torch.float64, device=flat.device)
        signs = self._of_rows(index, size // _COLUMNS + 1, flat.device, dtype)
        for begin in range(0, whole, _CHUNK):
            rows = flat[begin : min(begin + _CHUNK, whole)].to(dtype).view(-1, _COLUMNS)
            first = begin // _COLUMNS
            total += signs[first : first + len(rows)] @ rows
        total[: size - whole] += flat[whole:].to(torch.float64) * signs[-1]
        return (total * self._of_columns(flat.device)).view(_BUCKETS, -1).sum(1)

    def _of_rows(self, index: int, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        key = (index, device, dtype)
        if key not in self._rows:
            self._rows[key] = _signs(count, index + 1).to(device, dtype)
        return self._rows[key]

    def _of_columns(self, device: torch.device) -> Tensor:
        if device not in self._signs:
            self._signs[device] = _signs(_COLUMNS, 0).to(device, torch.float64)
        return self._signs[device]


def size_of(tensor: Tensor) -> int:
    """How many numbers the sketch of a tensor has. Few numbers are their own sketch."""
    return min(tensor.numel(), _BUCKETS)


def _signs(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (count,), generator=generator, dtype=torch.int8) * 2 - 1
