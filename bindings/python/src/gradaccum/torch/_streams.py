# SPDX-License-Identifier: Apache-2.0
"""The stream that the work of an optimizer is queued on: the one that is current in torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import Context, Device, Error, Status


class Streams:
    """Of parameters on the CPU: there are none."""

    def config(self) -> dict[str, Any]:
        """The fields of a Config that say where the context works."""
        return {}

    def follow(self, context: Context) -> None:
        """Has the context queue what follows on the current stream, behind all that it has queued before."""

    def keep(self, tensors: Iterable[Tensor | None]) -> None:
        """Keeps the memory of tensors that the library was given until it has read them.

        torch gives memory that is freed to the next tensor of the stream that it was allocated on, at once.
        """


class CudaStreams(Streams):
    """Of parameters on a GPU. A hook may run in another thread, and on another stream, than the loop."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)

    def config(self) -> dict[str, Any]:
        """The device, and the stream that was current when this object was made."""
        stream = self._stream
        return {"device": Device.CUDA, "device_ordinal": stream.device_index, "stream": stream.cuda_stream}

    def follow(self, context: Context) -> None:
        """Changes the stream of the context, if another is current in this thread."""
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream == self._stream.cuda_stream:
            return
        try:
            context.set_stream(stream.cuda_stream)
        except Error as error:
            if error.status == Status.INVALID_STATE:
                error.add_note(
                    "The optimizer works on torch's current stream, which has changed. Before a capture, "
                    "torch.cuda.synchronize() ends its earlier work, as torch.cuda.graph does; within one, "
                    "side.wait_stream(torch.cuda.current_stream()) makes another stream a part of it."
                )
            raise
        self._stream = stream

    def keep(self, tensors: Iterable[Tensor | None]) -> None:
        """Tells torch's allocator that the stream of the context uses these tensors."""
        for tensor in tensors:
            if tensor is None:
                continue
            parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
            for part in parts:
                part.record_stream(self._stream)


def streams_of(device: torch.device) -> Streams:
    """The streams of a device that parameters are on."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
