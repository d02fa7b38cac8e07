# SPDX-License-Identifier: Apache-2.0
"""Optimizers of Keras in the library's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import AdjustLr, Clip, ClipScope, Flavor, OptimizerKind
from .. import Optimizer as Settings
from ._private import keras

# Where Keras has another name than the library's.
_RENAMED = {
    "adam_beta_1": "beta1", "adam_beta_2": "beta2",
    "beta_1": "beta1", "beta_2": "beta2", "epsilon": "eps", "initial_accumulator_value": "initial_accumulator",
}  # fmt: skip
AVERAGE = "average"  # Keras' name of the moving average of a variable


@dataclass(frozen=True)
class Kind:
    """An optimizer of the library, and of Keras."""

    optimizer: OptimizerKind
    """Of the library."""
    fields: tuple[str, ...]
    """Attributes of Keras' optimizer that are hyper-parameters."""
    slots: dict[str, str]
    """Keras' names of its state, with the library's."""

    def kinds(self) -> tuple[Kind, ...]:
        """A kind for each group that the variables are shared out to."""
        return (self,)

    def group_of(self, optimizer: Any, variable: Any) -> int:
        """Which of these a variable belongs to."""
        return 0

    def factor(self, optimizer: Any, slot: str) -> float:
        """What the library's array of a slot is multiplied by in Keras."""
        return 1.0

    def values(self, optimizer: Any) -> tuple[Any, ...]:
        """The hyper-parameters that an optimizer has now, to see whether one has changed."""
        own = [getattr(optimizer, name) for name in self.fields]
        return (learning_rate(optimizer), optimizer.weight_decay or 0.0, *own)

    def settings(self, optimizer: Any) -> Settings:
        """The optimizer with the hyper-parameters that it has now."""
        lr, weight_decay, *own = self.values(optimizer)
        fields = {_RENAMED.get(name, name): value for name, value in zip(self.fields, own, strict=True)}
        return Settings(self.optimizer, Flavor.KERAS, lr=lr, weight_decay=weight_decay, **fields)

    def state_name(self, slot: str) -> str:
        """The library's name of a slot of Keras."""
        return "ema" if slot == AVERAGE else self.slots[slot]


class _Muon(Kind):
    """Muon for the matrices that Keras leaves to it, and Adam beside it for the other variables."""

    def kinds(self) -> tuple[Kind, ...]:
        return (self, _ADAM_OF_MUON)

    def group_of(self, optimizer: Any, variable: Any) -> int:
        return int(optimizer._should_use_adamw(variable))

    def factor(self, optimizer: Any, slot: str) -> float:
        return 1.0 / (1.0 - optimizer.momentum) if slot == "momentum" else 1.0

    def settings(self, optimizer: Any) -> Settings:
        lr, weight_decay, *own = self.values(optimizer)
        momentum, nesterov, ns_steps, a, b, c, rate = own
        adjust = AdjustLr.NONE if rate is None else AdjustLr.MATCH_RMS
        times = 1.0 if rate is None else rate / 0.2  # of the step alone, not of the decay
        return Settings(
            self.optimizer, Flavor.TORCH, lr=lr * times, weight_decay=weight_decay / times, momentum=momentum,
            nesterov=nesterov, ns_steps=ns_steps, ns_coefficients=(a, b, c), adjust_lr=adjust,
        )  # fmt: skip


class _AdamOfMuon(Kind):
    def values(self, optimizer: Any) -> tuple[Any, ...]:
        own = [getattr(optimizer, name) for name in self.fields]
        ratio = optimizer.adam_lr_ratio  # of the step alone, not of the decay
        return (learning_rate(optimizer) * ratio, (optimizer.adam_weight_decay or 0.0) / ratio, *own)


_MOMENTS = {"momentum": "exp_avg", "velocity": "exp_avg_sq"}
_ADAM = Kind(
    OptimizerKind.ADAM,
    ("beta_1", "beta_2", "epsilon", "amsgrad"),
    {**_MOMENTS, "velocity_hat": "max_exp_avg_sq"},
)
_BETAS = ("beta_1", "beta_2", "epsilon")
_ADAM_OF_MUON = _AdamOfMuon(OptimizerKind.ADAM, ("adam_beta_1", "adam_beta_2", "epsilon"), _MOMENTS)

KINDS = {
    "SGD": Kind(OptimizerKind.SGD, ("momentum", "nesterov"), {"momentum": "momentum_buffer"}),
    "Adam": _ADAM,
    "AdamW": Kind(OptimizerKind.ADAMW, _ADAM.fields, _ADAM.slots),
    "Adagrad": Kind(OptimizerKind.ADAGRAD, ("initial_accumulator_value", "epsilon"), {"accumulator": "sum"}),
    "Adadelta": Kind(
        OptimizerKind.ADADELTA, ("rho", "epsilon"),
        {"accumulated_grad": "square_avg", "accumulated_delta_var": "acc_delta"},
    ),
    "Adamax": Kind(OptimizerKind.ADAMAX, _BETAS, {"momentum": "exp_avg", "norm": "exp_inf"}),
    "Nadam": Kind(OptimizerKind.NADAM, _BETAS, _MOMENTS),
    "RMSprop": Kind(
        OptimizerKind.RMSPROP, ("rho", "momentum", "epsilon", "centered"),
        {"velocity": "square_avg", "momentum": "momentum_buffer", "average_gradient": "grad_avg"},
    ),
    "Lion": Kind(OptimizerKind.LION, ("beta_1", "beta_2"), {"momentum": "exp_avg"}),
    "Lamb": Kind(OptimizerKind.LAMB, _BETAS, _MOMENTS),
    "Muon": _Muon(
        OptimizerKind.MUON, ("momentum", "nesterov", "ns_steps", "muon_a", "muon_b", "muon_c", "rms_rate"),
        {"momentum": "momentum_buffer"},
    ),
}  # fmt: skip


def kind_of(optimizer: Any) -> Kind:
    """The kind of an optimizer of Keras. ValueError: the library has no such optimizer, or an option of it."""
    of = type(optimizer)  # on torch, a class of the same name over Keras' own
    kind = KINDS.get(of.__name__) if of.__module__.startswith("keras.") else None
    if kind is None:
        raise ValueError(
            f"{of.__module__}.{of.__qualname__} has no counterpart in the library; "
            f"those of keras.optimizers that have one are {', '.join(KINDS)}"
        )
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"the {of.__name__} accumulates by gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps} itself: leave that out, and give accum_steps here"
        )
    for name in ("rms_rate", "adam_lr_ratio"):
        value = getattr(optimizer, name, 1)
        if value is not None and not value > 0:
            raise ValueError(f"{name} of the {of.__name__} was {value}, expected a number above 0")
    return kind


def clip_of(optimizer: Any) -> Clip | None:
    """How an optimizer of Keras clips."""
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        return Clip(scope=ClipScope.PER_TENSOR, max_norm=optimizer.clipnorm, flavor=Flavor.KERAS)
    if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
        return Clip(scope=ClipScope.GLOBAL, max_norm=optimizer.global_clipnorm, flavor=Flavor.KERAS)
    if optimizer.clipvalue and optimizer.clipvalue > 0:
        return Clip(max_value=optimizer.clipvalue)
    return None


def learning_rate(optimizer: Any) -> float:
    """The learning rate of the next step, rounded as Keras has it."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


@dataclass(frozen=True)
class Entry:
    """A variable of a plain Keras optimizer: what it is, and of which variable of the model."""

    slot: str
    """"iteration", "learning_rate", "u_product", or the name of a slot."""
    index: int = -1
    """Which variable of the model the slot belongs to; -1: none."""


def layout(optimizer: Any, variables: list[Any]) -> list[Entry]:
    """The variables that Keras would have made for an optimizer, in its order, without making them."""
    config = optimizer.get_config()
    schedule = not hasattr(optimizer._learning_rate, "assign")
    if schedule:
        config["learning_rate"] = 0.0  # whose variable is left out below
    twin = type(optimizer).from_config(config)
    stand_ins = [
        keras.Variable(keras.ops.zeros((1,) * len(variable.shape), variable.dtype), name=f"variable{index}")
        for index, variable in enumerate(variables)
    ]
    places = {stand_in.name: index for index, stand_in in enumerate(stand_ins)}
    if hasattr(twin, "_should_use_adamw"):  # which goes by names of layers
        twin._should_use_adamw = lambda one: optimizer._should_use_adamw(variables[places[one.name]])
    twin.build(stand_ins)
    entries = []
    for variable in twin.variables:
        owner, _, slot = variable.name.partition("_")
        if variable is twin._iterations:
            entries.append(Entry("iteration"))
        elif variable is twin._learning_rate:
            if not schedule:
                entries.append(Entry("learning_rate"))
        elif variable is getattr(twin, "_u_product", None):
            entries.append(Entry("u_product"))
        else:
            entries.append(Entry(slot, places[owner]))
    return entries
