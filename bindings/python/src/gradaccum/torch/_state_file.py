# SPDX-License-Identifier: Apache-2.0
"""State files in memory, as tensors of torch."""

from __future__ import annotations

from collections.abc import Mapping
import torch
from torch import Tensor

from .. import _state_file as files

_IN_FILES = {
    "F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "U8": torch.uint8,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _IN_FILES.items()}

entries = files.entries


def split(data: bytearray) -> tuple[Tensor, dict[str, Tensor]]:
    """The header of a file, and its arrays, each a storage of its own in the same memory."""
    head, found = files.split(data)
    arrays = {}
    for name, (dtype, shape, memory) in found.items():
        kind = _IN_FILES[dtype]
        flat = torch.frombuffer(memory, dtype=kind) if len(memory) else torch.empty(0, dtype=kind)
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
    return files.header({name: (_NAMES[array.dtype], list(array.shape)) for name, array in arrays.items()})
