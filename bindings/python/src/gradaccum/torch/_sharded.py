# SPDX-License-Identifier: Apache-2.0
"""Several processes that have parts of the parameters, as fully_shard() and parallelize_module() cut them.

The framework gives each rank the mean of the ranks' gradients, of this rank's part. The loss of a rank is multiplied by
the weight of its micro-batch before backward, so that the step can divide by the sum of all weights. Ranks tell each
other their weights, and what a step needs of all gradients, over a group of gloo, between the hosts.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import Communicator, CommShard, CommunicatorOptions, Config, GradientKind, Reduced
from ._communicator import Exchange, Kind
from ._parts import WHOLE, Part, Whole, is_part
from ._ranks import Call, Meeting, Result, Values, listed
from ._slots import Slot


class Sharded(Meeting):
    """The processes of the world, each with its parts of the parameters."""

    may_wait = True
    """By set_requires_gradient_sync(False)."""

    def __init__(
        self, config: Config, tensors: Sequence[Tensor], data_mesh: Any, reduced: Reduced, distributed: bool
    ) -> None:
        _check(tensors, distributed)
        if isinstance(data_mesh, tuple) and not data_mesh:
            self._data, self._data_ranks, self._data_rank = set[int](), 1, 0
        else:
            self._data, self._data_ranks, self._data_rank = _places(data_mesh)
        self._reduced = reduced
        self._sums = config.gradient_kind == GradientKind.SUM
        self._exchange = Exchange()

    def config(self) -> dict[str, Any]:
        """Gradients arrive with the weights of their losses."""
        return {"gradient_kind": GradientKind.SUM}

    # ---- Parameters

    def part_of(self, tensor: Tensor, name: str, is_named: bool) -> Whole:
        """Raises if ranks cannot have the parameter together, or its gradient is not reduced."""
        part = Part(tensor, name) if is_part(tensor) else WHOLE
        members = part.members()
        if not self._data <= members:
            raise ValueError(
                f'parameter "{name}" {part.where()}, but data_mesh has the ranks {sorted(self._data)}, over which its '
                "gradient is not reduced: let fully_shard() have its module, or give it an optimizer of its own"
            )
        if len(members) < self._exchange.ranks and not is_named:
            raise ValueError(
                f'parameter "{name}" {part.where()}, which does not say what other ranks have: give the optimizer '
                "model.named_parameters(), so that one parameter has one name on all of them"
            )
        if not part.memory(tensor).is_contiguous():
            raise ValueError(f'parameter "{name}" had strides {part.memory(tensor).stride()}, expected a contiguous part')
        return part

    def track(self, slots: Sequence[Slot]) -> None:
        """Tells the library where the parts of this rank lie, and how many ranks have the same ones."""
        boxes = self.vote(lambda: {slot.own.name: list(slot.part.box(slot.tensor)) for slot in slots})
        found = [json.loads(other) for other in self._exchange.gather(Kind.PARTS, json.dumps(boxes).encode())]
        for slot in slots:
            own = boxes[slot.own.name]
            slot.own.set_part(slot.tensor.shape, own[0], sum(other.get(slot.own.name) == own for other in found))

    def connect(self) -> None:
        """Makes the context one of the ranks."""
        communicator = Communicator.from_all_gather(
            self._exchange.rank, self._exchange.ranks, self._exchange.all_gather
        )
        options = CommunicatorOptions(
            shard=CommShard.PARAMETERS, reduced=self._reduced, data_ranks=self._data_ranks, data_rank=self._data_rank
        )
        self._context.set_communicator(communicator, options)

    # ---- Micro-batches

    def weigh(self, loss: Tensor, weight: float) -> Tensor:
        """The loss times its weight, unless the program has multiplied it."""
        return loss if self._sums or weight == 1 else loss * weight

    def open(self, weight: float, is_weighed: bool) -> tuple[float, float | None]:
        """Meets the others. Raises if the losses have weights that they were not multiplied by."""
        weights = self._meet(Call.BACKWARD if is_weighed else Call.MICRO_BATCH, weight)
        if not is_weighed:
            self._check_weights("micro_batch()", weights)
        return weight, None

    def take(self, weight: float, loss_scale: float | None) -> tuple[float, float | None]:
        """Meets the others. Raises if the gradients have weights that their losses were not multiplied by."""
        weights = self._meet(Call.ACCUMULATE, weight, {"the scale of the gradients": loss_scale})
        self._check_weights("accumulate()", weights)
        return weight, loss_scale

    def _check_weights(self, call: str, weights: Sequence[float]) -> None:
        if not self._sums and any(weight != 1 for weight in weights):
            raise ValueError(
                f"the ranks gave the weights {listed(weights)} to {call}, but the gradients are those of losses that "
                "nobody has multiplied by them: opt.backward(loss, weight=...) does that, or the program does it and "
                "says so by Config(gradient_kind=GradientKind.SUM)"
            )

    # ---- Meetings

    def agree(self, call: Call, values: Values | None = None) -> None:
        """Raises on every rank if some rank makes another call, or with other values."""
        alike = {} if values is None else dict(values())
        alike.pop("params", None)  # whose parts the library compares
        self._meet(call, None, alike)

    def meet(self, call: Call) -> None:
        """Raises on every rank if some rank makes another call."""
        self._meet(call, None)

    def vote(self, work: Callable[[], Result]) -> Result:
        """What work() returns, once it has succeeded on all ranks."""
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        texts = self._exchange.gather(Kind.VOTE, text.encode())
        if failure is not None:
            raise failure
        for rank, other in enumerate(texts):
            if other:
                raise RuntimeError(f"rank {rank} has failed, so that no rank goes on: {other.decode()}")
        return result

    def mark(self) -> dict[str, Any]:
        """This rank, and how many there are."""
        return {"rank": self._exchange.rank, "ranks": self._exchange.ranks}

    def _gather(self, own: list[float]) -> list[list[float]]:
        return [list(array("d", other)) for other in self._exchange.gather(Kind.MEETING, array("d", own).tobytes())]

    def _gather_values(self, own: dict[str, str]) -> list[dict[str, str]]:
        return [json.loads(other) for other in self._exchange.gather(Kind.VALUES, json.dumps(own).encode())]


def _check(tensors: Sequence[Tensor], distributed: bool) -> None:
    """Raises if the parameters of an optimizer are not parts, or not on the CPU."""
    if not any(map(is_part, tensors)):
        raise ValueError("data_mesh was given, but no parameter is a DTensor, as those of fully_shard() are")
    if not distributed:
        raise ValueError("distributed was False, but with data_mesh= the ranks train one model together")
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"a parameter was on {tensor.device}, but with data_mesh= the optimizer works on the CPU: "
                "fully_shard(..., offload_policy=CPUOffloadPolicy()) keeps parameters and gradients there"
            )


def _places(mesh: Any) -> tuple[set[int], int, int]:
    """The ranks of a data mesh, how many there are, and the place of this rank among them."""
    if not all(hasattr(mesh, name) for name in ("get_coordinate", "mesh", "shape")):
        raise TypeError(f"data_mesh was a {type(mesh).__name__}, expected a DeviceMesh, or () for no data parallelism")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"data_mesh was {mesh}, which does not have this rank")
    place = 0
    for index, size in zip(coordinate, mesh.shape, strict=True):
        place = place * size + index
    return set(mesh.mesh.flatten().tolist()), mesh.size(), place
