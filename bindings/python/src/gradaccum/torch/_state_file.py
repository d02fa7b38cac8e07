# SPDX-License-Identifier: Apache-2.0
"""State files in memory: safetensors, taken apart into tensors and put together again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_IN_FILES = {
    "F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _IN_FILES.items()}


def entries(header: bytes) -> dict[str, Any]:
    """The arrays of a file by their names, from its header with the eight bytes of its length."""
    listed: dict[str, Any] = json.loads(header[8:])
    listed.pop("__metadata__", None)
    return listed


def split(data: bytearray) -> tuple[Tensor, dict[str, Tensor]]:
    """The header of a file, and its arrays, each a storage of its own in the same memory."""
    start = 8 + int.from_bytes(data[:8], "little")
    arrays = {}
    for name, entry in entries(bytes(data[:start])).items():
        begin, end = entry["data_offsets"]
        dtype = _IN_FILES[entry["dtype"]]
        flat = torch.empty(0, dtype=dtype)
        if end > begin:
            flat = torch.frombuffer(
                data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=start + begin
            )
        arrays[name] = flat.reshape(entry["shape"])
    return torch.frombuffer(data, dtype=torch.uint8, count=start).clone(), arrays


def join(header: bytes, arrays: Mapping[str, Tensor]) -> bytearray:
    """The file of which these are the header and the arrays."""
    listed = entries(header)
    data = bytearray(len(header) + max((entry["data_offsets"][1] for entry in listed.values()), default=0))
    data[: len(header)] = header
    for name, entry in listed.items():
        begin, end = (len(header) + offset for offset in entry["data_offsets"])
        if name not in arrays:
            raise ValueError(
                f'the state dictionary has "{name}", but no parameter of that name: an optimizer of '
                "named_parameters() keeps their names"
            )
        array = arrays[name].detach().cpu().contiguous()
        if array.numel() * array.element_size() != end - begin:
            raise ValueError(
                f'the array "{name}" of the state dictionary has another size than when it was saved'
            )
        if end > begin:
            torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=begin).copy_(
                array.reshape(-1).view(torch.uint8)
            )
    return data


def header(arrays: Mapping[str, Tensor]) -> bytes:
    """The header of a file without checksums."""
    listed: dict[str, Any] = {"__metadata__": {"gradaccum.format": "1 unchecked"}}
    offset = 0
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].element_size()):
        size = array.numel() * array.element_size()
        listed[name] = {
            "dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, offset + size],
        }  # fmt: skip
        offset += size
    text = json.dumps(listed).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
