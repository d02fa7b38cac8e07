# SPDX-License-Identifier: Apache-2.0
"""State files in memory, as tensors of torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import _state_file as files
from ._slots import TORCH

_DTYPES = {theirs: own for own, theirs in TORCH.items()}

entries = files.entries


def split(data: bytearray) -> tuple[Tensor, dict[str, Tensor]]:
    """The header of a file, and its arrays, each a storage of its own in the same memory."""
    head, found = files.split(data)
    arrays = {}
    for name, (dtype, shape, memory) in found.items():
        flat = torch.frombuffer(memory, dtype=TORCH[dtype]) if len(memory) else torch.empty(0, dtype=TORCH[dtype])
        arrays[name] = flat.reshape(shape)
    return torch.frombuffer(bytearray(head), dtype=torch.uint8), arrays


def join(header: bytes, arrays: Mapping[str, Tensor]) -> bytearray:
    """The file of which these are the header and the arrays."""

    def fill(name: str, memory: memoryview) -> None:
        if name not in arrays:
            raise ValueError(
                f'the state dictionary has "{name}", but no parameter of that name: an optimizer of '
                "named_parameters() keeps their names"
            )
        array = arrays[name].detach().cpu().contiguous()
        if array.numel() * array.element_size() != len(memory):
            raise ValueError(
                f'the array "{name}" of the state dictionary has another size than when it was saved'
            )
        if len(memory):
            torch.frombuffer(memory, dtype=torch.uint8).copy_(array.reshape(-1).view(torch.uint8))

    return files.join(header, fill)


def header(arrays: Mapping[str, Tensor]) -> bytes:
    """The header of a file without checksums."""
    return files.header({name: (_DTYPES[array.dtype], list(array.shape)) for name, array in arrays.items()})
