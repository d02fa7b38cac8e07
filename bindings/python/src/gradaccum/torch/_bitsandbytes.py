# SPDX-License-Identifier: Apache-2.0
"""State dictionaries of bitsandbytes' optimizers, whose 8-bit state has codes of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..enums import OptimizerKind
from ._optimizer import Optimizer

_WRAPPED = "__bnb_optimizer_quant_state__"
_BLOCKS = (256, 2048)  # elements that share a scale: of this version, and of older ones
# The arrays of state1 and of state2 by the library's names.
_MOMENTS = (("exp_avg",), ("exp_avg_sq",))
_STATES: dict[OptimizerKind, tuple[tuple[str, ...], ...]] = {
    OptimizerKind.ADAM: _MOMENTS,
    OptimizerKind.ADAMW: _MOMENTS,
    OptimizerKind.ADEMAMIX: (("exp_avg", "exp_avg_slow"), ("exp_avg_sq",)),
    OptimizerKind.LION: (("exp_avg",),),
    OptimizerKind.SGD: (("momentum_buffer",),),
    OptimizerKind.RMSPROP: (("square_avg",),),
    OptimizerKind.ADAGRAD: (("sum",),),
}
# What the first number of "betas" is.
_FIRST_BETA = {OptimizerKind.SGD: "momentum", OptimizerKind.RMSPROP: "alpha"}
_NEVER_NEGATIVE = ("exp_avg_sq", "square_avg", "sum")


def from_bitsandbytes(state_dict: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """What ``optimizer.load_state_dict()`` takes, of a state dictionary of bitsandbytes' optimizer of that name.

    That is Adam, AdamW, AdEMAMix, Lion, SGD, RMSprop or Adagrad, with state in 8 bits or in 32. bitsandbytes' Adam
    decouples weight decay, so with weight decay its state goes to an AdamW. The numbers that the codes stand for are
    loaded: exactly where state is f32 here, and as the nearest codes of the library with ``state_dtype="8bit"``, which
    adds one more rounding. lr, weight_decay, betas and eps, or what the optimizer has in their place, are taken from the
    dictionary; other hyper-parameters stay.
    """
    kind = optimizer._kind.optimizer
    if kind not in _STATES:
        raise TypeError(f"an optimizer of bitsandbytes has no state for {kind.name}")
    ours, theirs = optimizer.param_groups, state_dict["param_groups"]
    if len(ours) != len(theirs):
        raise ValueError(f"the state dictionary has {len(theirs)} groups, but the optimizer {len(ours)}")
    groups = [_group(kind, own, group) for own, group in zip(ours, theirs, strict=True)]
    state: dict[Any, dict[str, Any]] = {}
    for index, wrapped in state_dict["state"].items():
        of = {**wrapped, **wrapped.get(_WRAPPED, {})}
        if "state1" not in of:
            raise ValueError(f'the state of parameter {index} has no "state1", so it is not of bitsandbytes')
        state[index] = {"step": torch.tensor(float(of["step"]))}
        for number, names in enumerate(_STATES[kind], 1):
            try:
                for name, array in zip(names, _arrays(of, number, len(names)), strict=True):
                    state[index][name] = array.clamp(min=0) if name in _NEVER_NEGATIVE else array
            except (KeyError, ValueError) as error:
                raise ValueError(f"the state of parameter {index}: {error}") from None
    return {"state": state, "param_groups": groups}


def _group(kind: OptimizerKind, own: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    decay = theirs.get("weight_decay", 0.0)
    if kind == OptimizerKind.ADAM and decay != 0:
        raise ValueError(
            f"weight_decay was {decay}, which bitsandbytes' Adam decouples: load the state dictionary into an AdamW"
        )
    if any(theirs.get(key) for key in ("t_alpha", "t_beta3")):
        raise ValueError("a group has t_alpha or t_beta3, whose schedules are not those of alpha_warmup and beta3_warmup")
    group = dict(own)
    taken = {key: theirs[key] for key in ("params", "lr", "initial_lr", "weight_decay", "alpha") if key in theirs}
    if "betas" in own:
        taken["betas"] = tuple(theirs["betas"])[: len(own["betas"])]
    elif kind in _FIRST_BETA:
        taken[_FIRST_BETA[kind]] = theirs["betas"][0]
    if kind != OptimizerKind.SGD and "eps" in own:
        taken["eps"] = theirs["eps"]
    group.update(taken)
    return group


def _arrays(of: Mapping[str, Any], number: int, count: int) -> Iterator[Tensor]:
    """The numbers of state1 or state2, of which AdEMAMix' state1 has two arrays."""
    stored = of[f"state{number}"].detach().cpu()
    if stored.dtype != torch.uint8:
        yield from stored.float() if count > 1 else [stored.float()]
        return
    if f"absmax{number}" not in of:
        raise ValueError("its state has no scales of blocks, as that of block_wise=False in older versions")
    table, scales = of[f"qmap{number}"].cpu().float(), of[f"absmax{number}"].cpu().float()
    if count == 1:
        yield _numbers(stored, table, scales)
        return
    last = stored[-1].reshape(-1)[-(stored[-1].numel() % _BLOCKS[0]) :]
    if scales.numel() and stored[-1].numel() % _BLOCKS[0] and scales[-1, -1] == 0 and last.any():
        raise ValueError(
            f"its {stored[-1].numel()} elements are no multiple of {_BLOCKS[0]}, for which bitsandbytes on a GPU gives "
            "one scale to two blocks of its averages"
        )
    for codes, scale in zip(stored, scales, strict=True):
        yield _numbers(codes, table, scale)


def _numbers(codes: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    count = codes.numel()
    for block in _BLOCKS:
        if scales.numel() == -(-count // block):
            shares = table.index_select(0, codes.reshape(-1).int())
            return (shares * scales.reshape(-1).repeat_interleave(block)[:count]).reshape(codes.shape)
    raise ValueError(f"it has {count} codes and {scales.numel()} scales, expected one for {_BLOCKS[0]} codes")
