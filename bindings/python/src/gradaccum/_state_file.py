# SPDX-License-Identifier: Apache-2.0
"""State files in memory: safetensors, taken apart into arrays and put together again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from .enums import Dtype


def entries(header: bytes) -> dict[str, Any]:
    """The arrays of a file by their names, from its header with the eight bytes of its length."""
    listed: dict[str, Any] = json.loads(header[8:])
    listed.pop("__metadata__", None)
    return listed


def split(data: bytearray) -> tuple[bytes, dict[str, tuple[Dtype, list[int], memoryview]]]:
    """The header of a file, and the dtype, the shape and the memory of its arrays."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = bytes(data[:start])
    if "gradaccum.index" in entries(header):
        raise RuntimeError(
            "there are more parameters than a safetensors header can list (100 MB), so their state cannot be taken "
            "apart into arrays; save() and load() of the context store it in a file"
        )
    arrays = {}
    view = memoryview(data)
    for name, entry in entries(header).items():
        begin, end = entry["data_offsets"]
        arrays[name] = (Dtype[entry["dtype"]], entry["shape"], view[start + begin : start + end])
    return header, arrays


def join(header: bytes, fill: Callable[[str, memoryview], None]) -> bytearray:
    """The file with this header. fill: writes an array, by its name, into its memory."""
    listed = entries(header)
    data = bytearray(len(header) + max((entry["data_offsets"][1] for entry in listed.values()), default=0))
    data[: len(header)] = header
    view = memoryview(data)
    for name, entry in listed.items():
        begin, end = (len(header) + offset for offset in entry["data_offsets"])
        fill(name, view[begin:end])
    return data


def header(arrays: Mapping[str, tuple[Dtype, list[int]]]) -> bytes:
    """The header of a file without checksums, of arrays with these dtypes and shapes."""
    listed: dict[str, Any] = {"__metadata__": {"gradaccum.format": "1 unchecked"}}
    offset = 0
    for name, (dtype, shape) in sorted(arrays.items(), key=lambda item: -item[1][0].itemsize):
        end = offset + math.prod(shape) * dtype.itemsize
        listed[name] = {"dtype": dtype.name, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(listed).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
