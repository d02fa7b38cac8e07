# SPDX-License-Identifier: Apache-2.0
"""What optimizers take: the hyper-parameters of a group in torch's words and in the library's, and the window's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from .. import Clip, Config, Ema, LossScaler, ParamOptions, Reduced, Schedule
from .. import Optimizer as Settings
from ..enums import AdjustLr, Dtype, Equilibrate, Flavor, NewtonSchulzPreset, OptimizerKind, Precision, ScheduleKind

# Where torch or the packages that users know have another name than the library's.
_RENAMED = {
    "initial_accumulator_value": "initial_accumulator",
    "decoupled_weight_decay": "decoupled",
    "d": "clip_threshold",
    "r": "average_power",
    "weight_lr_power": "average_lr_power",
}
_CHOICES: dict[str, tuple[str, dict[Any, Any]]] = {
    "adjust_lr_fn": (
        "adjust_lr",
        {None: AdjustLr.ORIGINAL, "original": AdjustLr.ORIGINAL, "match_rms_adamw": AdjustLr.MATCH_RMS},
    ),
    "ns_precision": (
        "ns_precision",
        {"f32": Precision.F32, "tf32": Precision.TF32, "bf16": Precision.BF16},
    ),
    "equilibrate": (
        "equilibrate",
        {
            None: Equilibrate.NONE, "outputs": Equilibrate.OUTPUTS, "inputs": Equilibrate.INPUTS,
            "both": Equilibrate.BOTH,
        },
    ),
}  # fmt: skip
_STATE_DTYPES = {"f32": Dtype.F32, "bf16": Dtype.BF16, "8bit": Dtype.STATE_8BIT}
OURS: dict[str, Any] = {
    "ns_precision": "f32", "cautious": False, "beta2": 0.0, "equilibrate": None, "maximize": False,
}  # fmt: skip
"""Keys that groups of torch's own optimizers lack, and what that means."""

_OTHERS = {"self", "__class__", "params", "foreach", "fused", "window"}


def hyper_parameters(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What ``param_groups`` has of the arguments of an optimizer, which are the local variables of its constructor."""
    return {name: value for name, value in arguments.items() if name not in _OTHERS}


@dataclass(frozen=True)
class Kind:
    """An optimizer: of the library, and of torch."""

    optimizer: OptimizerKind
    """The rule in the library."""
    keys: tuple[str, ...]
    """Its hyper-parameters as they stand in param_groups."""
    of_torch: type[torch.optim.Optimizer] | None = None
    """The class whose numbers it has, and whose state dictionaries it reads and writes; None: torch has none."""
    flavor: Flavor = Flavor.TORCH
    """Whose definition of the rule."""
    by_shape: bool = False
    """Whether the formula uses the shape of a parameter."""

    @property
    def counts_steps(self) -> bool:
        """Whether each parameter counts its own steps, and not those of the context."""
        return self.flavor == Flavor.TORCH

    @property
    def needs_whole(self) -> bool:
        """Whether the formula uses all elements of a parameter, or of its rows, for each of them."""
        return self.by_shape or self.optimizer in (OptimizerKind.LAMB, OptimizerKind.LARS)

    def check(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError if a group asks for what the library has not."""
        for key in ("capturable", "differentiable"):
            if group.get(key):
                raise ValueError(
                    f"{key}=True is not supported: steps are made by the library, outside of torch's graph"
                )
        if self.optimizer in (OptimizerKind.ADAM, OptimizerKind.ADAMW):
            decoupled = self.optimizer == OptimizerKind.ADAMW
            if bool(group.get("decoupled_weight_decay", decoupled)) != decoupled:
                raise ValueError(
                    f"decoupled_weight_decay of a group is {not decoupled}, but this optimizer is an "
                    f"{'AdamW' if decoupled else 'Adam'}: give the group an optimizer of its own"
                )

    def values(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """The hyper-parameters of a group, to see whether one has changed."""
        return tuple(_plain(_of(group, key)) for key in self.keys)

    def settings(self, group: Mapping[str, Any]) -> Settings:
        """The optimizer of a group."""
        fields: dict[str, Any] = {}
        for key in self.keys:
            value = _plain(_of(group, key))
            if key == "warmup_steps":
                continue  # schedule() has it
            if key == "betas":
                fields.update(zip(("beta1", "beta2", "beta3"), value, strict=False))
            elif key == "eps" and isinstance(value, tuple):  # Adafactor
                eps1, fields["eps2"] = value
                if eps1 is not None:
                    fields["eps"] = eps1
            elif key == "alpha" and self.optimizer == OptimizerKind.RMSPROP:
                fields["rho"] = value
            elif key == "ns_coefficients":
                fields.update(_newton_schulz(value))
            elif key in _CHOICES:
                field, choices = _CHOICES[key]
                if value not in choices:
                    raise ValueError(f"{key} was {value!r}, expected one of {', '.join(map(repr, choices))}")
                fields[field] = choices[value]
            else:
                fields[_RENAMED.get(key, key)] = value
        if (state_dtype := state_dtype_of(group)) is not None:
            fields["state_dtype"] = _STATE_DTYPES[state_dtype]
        return Settings(self.optimizer, self.flavor, **fields)

    def schedule(self, group: Mapping[str, Any]) -> Schedule | None:
        """The schedule of a group, of which the learning rate in ``param_groups`` is the peak."""
        steps = int(group.get("warmup_steps", 0)) if "warmup_steps" in self.keys else 0
        return Schedule(ScheduleKind.CONSTANT, warmup_steps=steps) if steps > 0 else None


def state_dtype_of(group: Mapping[str, Any]) -> str | None:
    """The dtype of the state of a group, as a string; None: that of the library."""
    value = group.get("state_dtype")
    for name, dtype in _STATE_DTYPES.items():
        if (isinstance(value, Dtype) and value == dtype) or (isinstance(value, str) and value == name):
            return name
    if value is not None and value is not Dtype.DEFAULT:
        raise ValueError(
            f"state_dtype was {value!r}, expected one of {', '.join(map(repr, _STATE_DTYPES))}, or None"
        )
    return None


def _newton_schulz(value: Any) -> dict[str, Any]:
    """The name of a table, a row of three numbers for all iterations, or such a row for each."""
    if isinstance(value, str):
        presets = {"you": NewtonSchulzPreset.YOU, "polar_express": NewtonSchulzPreset.POLAR_EXPRESS}
        if value not in presets:
            raise ValueError(f"ns_coefficients was {value!r}, expected one of {', '.join(map(repr, presets))}, or numbers")
        return {"ns_preset": presets[value]}
    if value and isinstance(value[0], tuple):
        if any(len(row) != 3 for row in value):
            raise ValueError(f"ns_coefficients was {value!r}, expected three numbers in each row")
        return {"ns_table": tuple(number for row in value for number in row)}
    return {"ns_coefficients": value}


def _of(group: Mapping[str, Any], key: str) -> Any:
    return group.get(key, OURS[key]) if key in OURS else group[key]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(_plain(element) for element in value)
    return value


_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
_MOMENTS = ("lr", "betas", "eps", "weight_decay", "maximize")

SGD = Kind(
    OptimizerKind.SGD,
    ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"), torch.optim.SGD,
)  # fmt: skip
ADAM = Kind(OptimizerKind.ADAM, _ADAM, torch.optim.Adam)
ADAMW = Kind(OptimizerKind.ADAMW, _ADAM, torch.optim.AdamW)
SPARSE_ADAM = Kind(
    OptimizerKind.ADAM, ("lr", "betas", "eps", "maximize"), torch.optim.SparseAdam, Flavor.KERAS
)
ADAGRAD = Kind(
    OptimizerKind.ADAGRAD,
    ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"), torch.optim.Adagrad,
)  # fmt: skip
ADADELTA = Kind(
    OptimizerKind.ADADELTA, ("lr", "rho", "eps", "weight_decay", "maximize"), torch.optim.Adadelta
)
ADAMAX = Kind(OptimizerKind.ADAMAX, _MOMENTS, torch.optim.Adamax)
NADAM = Kind(OptimizerKind.NADAM, (*_MOMENTS, "momentum_decay", "decoupled_weight_decay"), torch.optim.NAdam)
RADAM = Kind(OptimizerKind.RADAM, (*_MOMENTS, "decoupled_weight_decay"), torch.optim.RAdam)
RMSPROP = Kind(
    OptimizerKind.RMSPROP,
    ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"), torch.optim.RMSprop,
)  # fmt: skip
ADAFACTOR = Kind(
    OptimizerKind.ADAFACTOR, ("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize"),
    getattr(torch.optim, "Adafactor", None), by_shape=True,
)  # fmt: skip
MUON = Kind(
    OptimizerKind.MUON,
    ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn",
     "ns_precision", "cautious", "beta2", "equilibrate"),
    getattr(torch.optim, "Muon", None), by_shape=True,
)  # fmt: skip
LION = Kind(OptimizerKind.LION, ("lr", "betas", "weight_decay", "maximize"))
LAMB = Kind(OptimizerKind.LAMB, (*_MOMENTS, "max_grad_norm", "always_adapt"))
LARS = Kind(
    OptimizerKind.LARS,
    ("lr", "momentum", "dampening", "weight_decay", "nesterov", "trust_coefficient", "eps", "always_adapt",
     "maximize"),
)  # fmt: skip
ADOPT = Kind(OptimizerKind.ADOPT, (*_MOMENTS, "decoupled", "clip_exponent"))
ADEMAMIX = Kind(OptimizerKind.ADEMAMIX, (*_MOMENTS, "alpha", "alpha_warmup", "beta3_warmup"))
ROWWISE_ADAGRAD = Kind(
    OptimizerKind.ROWWISE_ADAGRAD, ("lr", "weight_decay", "initial_accumulator_value", "eps", "maximize"),
    by_shape=True,
)  # fmt: skip

_AVERAGED = ("lr", "weight_decay", "warmup_steps", "r", "weight_lr_power", "maximize")
SCHEDULE_FREE_ADAMW = Kind(OptimizerKind.SCHEDULE_FREE_ADAMW, (*_AVERAGED, "betas", "eps"))
SCHEDULE_FREE_SGD = Kind(OptimizerKind.SCHEDULE_FREE_SGD, (*_AVERAGED, "momentum"))

KINDS = (
    SGD, ADAM, ADAMW, SPARSE_ADAM, ADAGRAD, ADADELTA, ADAMAX, NADAM, RADAM, RMSPROP, ADAFACTOR, MUON, LION, LAMB,
    LARS, ADOPT, ADEMAMIX, ROWWISE_ADAGRAD, SCHEDULE_FREE_ADAMW, SCHEDULE_FREE_SGD,
)  # fmt: skip


def kind_of(optimizer: torch.optim.Optimizer) -> Kind:
    """The kind of an optimizer of torch. TypeError: the library has no such optimizer."""
    if type(optimizer) is torch.optim.Adam:  # which may be an AdamW
        decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
        if len(decoupled) > 1:
            raise ValueError(
                "the groups of an Adam differ in decoupled_weight_decay, which is one optimizer here"
            )
        return ADAMW if True in decoupled else ADAM
    for kind in KINDS:
        if kind.of_torch is type(optimizer):
            return kind
    raise TypeError(
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__} has no counterpart in the library; "
        "those of torch.optim that have one are "
        + ", ".join(kind.of_torch.__name__ for kind in KINDS if kind.of_torch is not None)
    )


class WindowOptions(TypedDict, total=False):
    """What every optimizer takes beside torch's own arguments; Optimizer describes it."""

    accum_steps: int | None
    """Micro-batches in a window; None, the default: as many as come before ``step``."""
    clip: Clip | None
    """Clipping of the window's gradient, in place of ``clip_grad_norm_``."""
    loss_scaler: LossScaler | None
    """A dynamic loss scale, in place of a GradScaler."""
    ema: Ema | None
    """Moving averages of the parameters."""
    config: Config | None
    """Policies of the window; its device, stream and accum_steps are set by the optimizer."""
    param_options: ParamOptions | None
    """Options of all parameters."""
    state_dtype: Dtype | str | None
    """The dtype of the state: "f32", "bf16" or "8bit", see Optimizer; None, the default: f32, or f64 for f64 parameters."""
    eager: bool
    """Updates parameters while the last backward of a window runs; default False. See Optimizer."""
    ddp: torch.nn.Module | None
    """The DistributedDataParallel that reduces every backward."""
    data_mesh: Any
    """The DeviceMesh over whose ranks samples differ, if parameters are DTensors; () if all have the same samples."""
    reduced: Reduced | None
    """What gradients are over the ranks of data_mesh; default ``Reduced.MEAN``."""
    distributed: bool
    """False allows several processes that do not train one model together; default True."""
