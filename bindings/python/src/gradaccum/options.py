# SPDX-License-Identifier: Apache-2.0
"""Configuration and results, as dataclasses. gradaccum.h describes every field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import EnumType
from typing import Any, ClassVar, NamedTuple, Self

from . import _raw
from .enums import (
    Accumulation, AdjustLr, AgcUnits, BnLayout, BnMode, ClipScope, ClipWhen, Device, Dtype, EmaKind,
    Flavor, GradientKind, GradientLife, Master, MicroFlags, Missing, Nonfinite, OptimizerKind, Reduce,
    Rounding, Rows, ScheduleKind, Settings, StateParts, StepOutcome, WindowState,
)  # fmt: skip

# In place of a field's value: the library's default, which the constructor puts there.
_DEFAULT: Any = None


class _Struct:
    """A dataclass whose fields are those of a struct of C, under the same names."""

    _raw: ClassVar[str]
    _arguments: ClassVar[tuple[str, ...]] = ()  # fields that choose the defaults
    _not_fields: ClassVar[tuple[str, ...]] = ()  # that the struct has in another form
    _types: ClassVar[dict[str, Callable[[Any], Any]]] = {}  # of fields that are not as in C

    def __post_init__(self) -> None:
        defaults = self._new()
        for name in self._fields():
            if getattr(self, name) is None:
                object.__setattr__(self, name, self._from_c(name, getattr(defaults, name)))
                continue
            kind = self._types.get(name)
            if isinstance(kind, EnumType) and not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"{type(self).__name__}.{name} was {getattr(self, name)!r}, "
                    f"expected a {kind.__name__}"
                )
        self._write()  # refuses what C has no place for

    @classmethod
    def _fields(cls) -> list[str]:
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        return [name for name in names if name not in cls._not_fields]

    @classmethod
    def _from_c(cls, name: str, value: Any) -> Any:
        return cls._types[name](value) if name in cls._types else value

    def _new(self) -> Any:
        return getattr(_raw, self._raw)(*(int(getattr(self, name)) for name in self._arguments))

    def _write(self) -> Any:
        """The struct of C."""
        struct = self._new()
        for name in self._fields():
            value = getattr(self, name)
            try:
                setattr(struct, name, value)
            except (TypeError, OverflowError):
                raise TypeError(
                    f"{type(self).__name__}.{name} was {value!r}, which has not the type or the range "
                    "of this field"
                ) from None
        return struct

    @classmethod
    def _read(cls, struct: Any) -> Self:
        return cls(**{name: cls._from_c(name, getattr(struct, name)) for name in cls._fields()})


# ---- Configuration


@dataclass(frozen=True, kw_only=True)
class Config(_Struct):
    """Configuration of a context.

    ``stream`` is the address of a ``cudaStream_t``. ``log`` is called with a line for each call; what
    it raises goes to ``sys.unraisablehook``.
    """

    _raw = "ga_config"
    _not_fields = ("log",)
    _types = {
        "device": Device, "gradient_kind": GradientKind, "reduce": Reduce, "missing": Missing,
        "nonfinite": Nonfinite, "gradient_life": GradientLife, "accumulation": Accumulation,
        "noise_scale": bool, "measure_norm": bool,
    }  # fmt: skip

    device: Device = _DEFAULT
    device_ordinal: int = _DEFAULT
    stream: int = _DEFAULT
    num_threads: int = _DEFAULT
    accum_steps: int = _DEFAULT
    gradient_kind: GradientKind = _DEFAULT
    reduce: Reduce = _DEFAULT
    missing: Missing = _DEFAULT
    nonfinite: Nonfinite = _DEFAULT
    gradient_life: GradientLife = _DEFAULT
    accumulation: Accumulation = _DEFAULT
    loss_scale: float = _DEFAULT
    seed: int = _DEFAULT
    noise_scale: bool = _DEFAULT
    noise_smoothing: float = _DEFAULT
    measure_norm: bool = _DEFAULT
    log: Callable[[str], object] | None = None


@dataclass(frozen=True)
class Optimizer(_Struct):
    """An optimizer and its hyper-parameters: those that are not given are the framework's defaults."""

    _raw = "ga_optimizer"
    _arguments = ("kind", "flavor")
    _not_fields = ("ns_coefficients",)
    _types = {
        "kind": OptimizerKind, "flavor": Flavor, "state_dtype": Dtype, "adjust_lr": AdjustLr,
        "nesterov": bool, "amsgrad": bool, "maximize": bool, "centered": bool, "decoupled": bool,
        "always_adapt": bool,
    }  # fmt: skip

    kind: OptimizerKind
    flavor: Flavor = Flavor.TORCH
    lr: float = _DEFAULT
    weight_decay: float = _DEFAULT
    momentum: float = _DEFAULT
    dampening: float = _DEFAULT
    beta1: float = _DEFAULT
    beta2: float = _DEFAULT
    eps: float = _DEFAULT
    nesterov: bool = _DEFAULT
    amsgrad: bool = _DEFAULT
    maximize: bool = _DEFAULT
    state_dtype: Dtype = _DEFAULT
    rho: float = _DEFAULT
    lr_decay: float = _DEFAULT
    initial_accumulator: float = _DEFAULT
    momentum_decay: float = _DEFAULT
    trust_coefficient: float = _DEFAULT
    max_grad_norm: float = _DEFAULT
    eps2: float = _DEFAULT
    beta2_decay: float = _DEFAULT
    clip_threshold: float = _DEFAULT
    ns_coefficients: tuple[float, float, float] = _DEFAULT
    ns_steps: int = _DEFAULT
    adjust_lr: AdjustLr = _DEFAULT
    centered: bool = _DEFAULT
    decoupled: bool = _DEFAULT
    always_adapt: bool = _DEFAULT
    beta3: float = _DEFAULT
    alpha: float = _DEFAULT
    alpha_warmup: int = _DEFAULT
    beta3_warmup: int = _DEFAULT

    def __post_init__(self) -> None:
        if self.ns_coefficients is None:
            object.__setattr__(self, "ns_coefficients", _coefficients(self._new()))
        if len(self.ns_coefficients) != 3:
            raise ValueError(f"Optimizer.ns_coefficients was {self.ns_coefficients!r}, expected three")
        super().__post_init__()

    def _write(self) -> Any:
        struct = super()._write()
        for index, value in enumerate(self.ns_coefficients):
            struct.set_ns_coefficient(index, value)
        return struct

    @classmethod
    def _read(cls, struct: Any) -> Self:
        values = {name: cls._from_c(name, getattr(struct, name)) for name in cls._fields()}
        return cls(**values, ns_coefficients=_coefficients(struct))


def _coefficients(struct: Any) -> tuple[float, float, float]:
    return (struct.ns_coefficient(0), struct.ns_coefficient(1), struct.ns_coefficient(2))


@dataclass(frozen=True)
class Schedule(_Struct):
    """A schedule of the learning rate. ``table`` is for TABLE."""

    _raw = "ga_schedule"
    _arguments = ("kind",)
    _not_fields = ("table",)
    _types = {"kind": ScheduleKind}

    kind: ScheduleKind
    warmup_steps: int = _DEFAULT
    total_steps: int = _DEFAULT
    end_factor: float = _DEFAULT
    power: float = _DEFAULT
    gamma: float = _DEFAULT
    step_size: int = _DEFAULT
    first_step: int = _DEFAULT
    table: Sequence[float] = ()

    def _write(self) -> Any:
        struct = super()._write()
        if self.table:
            struct.set_table(self.table)
        return struct


@dataclass(frozen=True, kw_only=True)
class Clip(_Struct):
    """Clipping of gradients by value, by norm, or by unit."""

    _raw = "ga_clip"
    _types = {"scope": ClipScope, "flavor": Flavor, "agc_units": AgcUnits, "when": ClipWhen}

    scope: ClipScope = _DEFAULT
    max_norm: float = _DEFAULT
    max_value: float = _DEFAULT
    flavor: Flavor = _DEFAULT
    agc_factor: float = _DEFAULT
    agc_eps: float = _DEFAULT
    agc_units: AgcUnits = _DEFAULT
    when: ClipWhen = _DEFAULT


@dataclass(frozen=True, kw_only=True)
class LossScaler(_Struct):
    """A dynamic loss scale for f16."""

    _raw = "ga_loss_scaler"

    initial_scale: float = _DEFAULT
    growth_factor: float = _DEFAULT
    backoff_factor: float = _DEFAULT
    min_scale: float = _DEFAULT
    max_scale: float = _DEFAULT
    growth_interval: int = _DEFAULT
    hysteresis: int = _DEFAULT


@dataclass(frozen=True, kw_only=True)
class Ema(_Struct):
    """A moving average of every parameter."""

    _raw = "ga_ema"
    _types = {"kind": EmaKind, "dtype": Dtype}

    kind: EmaKind = _DEFAULT
    dtype: Dtype = _DEFAULT
    decay: float = _DEFAULT
    gamma: float = _DEFAULT


@dataclass(frozen=True, kw_only=True)
class ParamOptions(_Struct):
    """Options of a parameter."""

    _raw = "ga_param_options"
    _types = {
        "gradient_dtype": Dtype, "accumulator_dtype": Dtype, "master": Master, "rounding": Rounding,
        "rows": Rows,
    }  # fmt: skip

    gradient_dtype: Dtype = _DEFAULT
    accumulator_dtype: Dtype = _DEFAULT
    master: Master = _DEFAULT
    rounding: Rounding = _DEFAULT
    rows: Rows = _DEFAULT
    agc_axes: int = _DEFAULT


@dataclass(frozen=True, kw_only=True)
class MicroOptions(_Struct):
    """Options of a micro-batch."""

    _raw = "ga_micro_options"
    _types = {"flags": MicroFlags}

    loss_scale: float = _DEFAULT
    flags: MicroFlags = _DEFAULT


@dataclass(frozen=True)
class BatchNormOptions(_Struct):
    """Options of a layer of batch normalisation: those that are not given are the flavor's."""

    _raw = "ga_bn_options"
    _arguments = ("flavor",)
    _not_fields = ("flavor",)
    _types = {"mode": BnMode, "layout": BnLayout, "dtype": Dtype, "biased": bool}

    flavor: Flavor = Flavor.TORCH
    mode: BnMode = _DEFAULT
    layout: BnLayout = _DEFAULT
    dtype: Dtype = _DEFAULT
    biased: bool = _DEFAULT
    momentum: float = _DEFAULT
    eps: float = _DEFAULT


@dataclass(frozen=True, kw_only=True)
class StateOptions(_Struct):
    """Options of a save or a load.

    ``progress`` is called with the bytes that are done, and of all; if it returns something true or
    raises, the call ends.
    """

    _raw = "ga_state_options"
    _not_fields = ("progress", "note")
    _types = {
        "parts": StateParts, "settings": Settings, "allow_missing": bool, "allow_extra": bool,
        "unmarked": bool,
    }  # fmt: skip

    parts: StateParts = _DEFAULT
    settings: Settings = _DEFAULT
    allow_missing: bool = _DEFAULT
    allow_extra: bool = _DEFAULT
    unmarked: bool = _DEFAULT
    progress: Callable[[int, int], object] | None = None
    note: str | None = None

    def _write(self) -> Any:
        struct = super()._write()
        if self.note is not None:
            struct.set_note(self.note)
        if self.progress is not None:
            struct.progress = _raw.progress_function()
            struct.progress_user = id(self.progress)  # this object keeps the callable
        return struct


# ---- Results


class StepResult(NamedTuple):
    """What a step did."""

    outcome: StepOutcome
    windows: int
    steps: int
    micro_batches: int
    weight: float
    norm: float
    clip_factor: float
    lr: float
    loss_scale: float
    skipped: int
    dropped: int
    window_dropped: int
    noise_scale: float
    noise_trace: float
    noise_signal: float
    dropped_micros: int

    @property
    def applied(self) -> bool:
        """Whether the step was applied."""
        return self.outcome == StepOutcome.APPLIED


_OUTCOMES = tuple(StepOutcome)


def step_result(values: tuple[Any, ...]) -> StepResult:
    """The result with these fields; an outcome of a later version of the library stays an int."""
    if values[0] < len(_OUTCOMES):
        return StepResult._make((_OUTCOMES[values[0]], *values[1:]))
    return StepResult._make(values)


class _Result:
    """A dataclass that is read from a struct of C."""

    _types: ClassVar[dict[str, Callable[[Any], Any]]] = {}

    @classmethod
    def _read(cls, struct: Any, **others: Any) -> Self:
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        values = {name: getattr(struct, name) for name in names if name not in others}
        for name, kind in cls._types.items():
            values[name] = kind(values[name])
        return cls(**values, **others)


@dataclass(frozen=True)
class Window(_Result):
    """The window: its state and what it holds."""

    _types = {"state": WindowState}

    state: WindowState
    micro_batches: int
    open_micro: int
    accum_steps: int
    weight: float
    windows: int
    steps: int


@dataclass(frozen=True)
class ParamInfo(_Result):
    """What the library knows of a parameter."""

    _types = {
        "dtype": Dtype, "gradient_dtype": Dtype, "accumulator_dtype": Dtype, "frozen": bool,
    }  # fmt: skip

    name: str
    group: int
    dtype: Dtype
    gradient_dtype: Dtype
    accumulator_dtype: Dtype
    data: int
    shape: tuple[int, ...]
    frozen: bool
    count: int
    offset: int
    slot: int
    lr_scale: float
    weight_decay_scale: float


@dataclass(frozen=True)
class BatchNormInfo(_Result):
    """What the library knows of a layer of batch normalisation.

    gamma, beta: the ids of the parameters; -1: none.
    """

    _types = {
        "mode": BnMode, "layout": BnLayout, "dtype": Dtype, "biased": bool, "frozen": bool,
    }  # fmt: skip

    name: str
    channels: int
    gamma: int
    beta: int
    mode: BnMode
    layout: BnLayout
    dtype: Dtype
    biased: bool
    frozen: bool
    momentum: float
    eps: float


@dataclass(frozen=True)
class StateInfo(_Result):
    """An array of state of a parameter."""

    _types = {"dtype": Dtype}

    name: str
    dtype: Dtype
    count: int


@dataclass(frozen=True)
class Memory(_Result):
    """Bytes that the library owns for a context, by purpose."""

    accumulators: int
    optimizer_state: int
    workspace: int
    total: int
    masters: int
    averages: int
    rows: int
    batch_norm: int
    resident: int


@dataclass(frozen=True)
class Build(_Result):
    """The build of the library that is loaded."""

    version: int
    onednn: int
    cuda_runtime: int
    cuda_driver: int
    openmp: int
    compiler: str
    cpu_loops: str
