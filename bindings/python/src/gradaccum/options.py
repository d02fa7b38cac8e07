# SPDX-License-Identifier: Apache-2.0
"""Configuration and results, as dataclasses. gradaccum.h describes every field."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import EnumType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from . import _raw
from .enums import (
    Accumulation, AdjustLr, AgcUnits, BnLayout, BnMode, ClipScope, ClipWhen, CommAdder, CommShard, CommWire,
    Device, Dtype, EmaKind, Flavor, GradientKind, GradientLife, Master, MicroFlags, Missing, Nonfinite,
    OptimizerKind, Reduce, Rounding, Rows, ScheduleKind, Settings, StateParts, StepOutcome, WindowState,
)  # fmt: skip

if TYPE_CHECKING:
    from .context import Param

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
                    f"{type(self).__name__}.{name} was {getattr(self, name)!r}, expected a {kind.__name__}"
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
            if value is None:  # has no name of its own: the struct has the default
                continue
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
    it raises goes to ``sys.unraisablehook``; so does what ``on_param_done`` raises.
    """

    _raw = "ga_config"
    _not_fields = ("log", "on_param_done")
    _types = {
        "device": Device, "gradient_kind": GradientKind, "reduce": Reduce, "missing": Missing,
        "nonfinite": Nonfinite, "gradient_life": GradientLife, "accumulation": Accumulation,
        "noise_scale": bool, "measure_norm": bool, "eager": bool,
    }  # fmt: skip

    device: Device = _DEFAULT
    """Where the context computes; default ``Device.CPU``."""
    device_ordinal: int = _DEFAULT
    """Which device of that kind; default 0."""
    stream: int = _DEFAULT
    """The CUDA stream that all work is queued on, which must outlive the context, unless
    ``Context.set_stream`` replaces it; default 0: the legacy default stream.
    """
    num_threads: int = _DEFAULT
    """Threads of the CPU kernels; default 0: as many as OpenMP would use."""
    accum_steps: int = _DEFAULT
    """K, the micro-batches of a full window; default 0: any number."""
    gradient_kind: GradientKind = _DEFAULT
    """What gradients are; default ``GradientKind.MEAN``."""
    reduce: Reduce = _DEFAULT
    """What the optimizer sees; default ``Reduce.MEAN``."""
    missing: Missing = _DEFAULT
    """What happens without a gradient; default ``Missing.SKIP``."""
    nonfinite: Nonfinite = _DEFAULT
    """What happens with infinities and NaN; default ``Nonfinite.SKIP_STEP``."""
    gradient_life: GradientLife = _DEFAULT
    """How long gradients stay in place; default ``GradientLife.CONSUMED``."""
    accumulation: Accumulation = _DEFAULT
    """How gradients add up; default ``Accumulation.PLAIN``."""
    loss_scale: float = _DEFAULT
    """What the loss was multiplied by, which is divided out again; finite, not 0; default 1."""
    seed: int = _DEFAULT
    """The seed of stochastic rounding; default 0."""
    noise_scale: bool = _DEFAULT
    """Whether the gradient noise scale is estimated; default False."""
    noise_smoothing: float = _DEFAULT
    """Smoothing of the noise scale over steps, in [0, 1); default 0.9."""
    measure_norm: bool = _DEFAULT
    """Whether every result of a step has the norm, also where only an extra pass tells it; default False."""
    eager: bool = _DEFAULT
    """Whether ``Context.ready()`` begins with the update of parameters, in place of ``Context.step()``; on the
    CPU; default False."""
    eager_threads: int = _DEFAULT
    """Threads of the library that make these updates while the program goes on; default 0: ``Context.ready()``
    makes them."""
    eager_bytes: int = _DEFAULT
    """The most bytes for the second set of arrays that these updates may take; default 0: no limit."""
    log: Callable[[str], object] | None = None
    """Receives a line for each call, when it ends, on the thread of the call; it must not use the context."""
    on_param_done: Callable[["Param"], object] | None = None
    """Receives each parameter that ``Context.ready()`` has named, once in a window, when it is up to date and its
    gradient is not read any more; it must not use the context. With ``eager_threads`` it is called on a thread of the
    library if the parameter is updated in place, else on the thread of the call."""


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
    """The rule."""
    flavor: Flavor = Flavor.TORCH
    """Whose definition of it."""
    lr: float = _DEFAULT
    """The learning rate, or its peak under a schedule; not negative."""
    weight_decay: float = _DEFAULT
    """Weight decay; not negative."""
    momentum: float = _DEFAULT
    """SGD, RMSProp, LARS, Muon; not negative."""
    dampening: float = _DEFAULT
    """SGD, LARS; in [0, 1]."""
    beta1: float = _DEFAULT
    """The decay of the first moment: Adam and its kin, Lion; in [0, 1)."""
    beta2: float = _DEFAULT
    """The decay of the second moment: Adam and its kin; of the momentum: Lion; in [0, 1)."""
    eps: float = _DEFAULT
    """Added to a denominator; not negative."""
    nesterov: bool = _DEFAULT
    """SGD, LARS, Muon."""
    amsgrad: bool = _DEFAULT
    """The largest second moment so far in place of the current one: Adam, AdamW."""
    maximize: bool = _DEFAULT
    """Ascend in place of descend."""
    state_dtype: Dtype = _DEFAULT
    """The type of the state; default: f32, or f64 for f64 parameters; or bf16."""
    rho: float = _DEFAULT
    """RMSProp, Adadelta; in [0, 1)."""
    lr_decay: float = _DEFAULT
    """Adagrad; not negative."""
    initial_accumulator: float = _DEFAULT
    """Adagrad: the initial sum of squares; not negative."""
    momentum_decay: float = _DEFAULT
    """NAdam; not negative."""
    trust_coefficient: float = _DEFAULT
    """LARS; positive."""
    max_grad_norm: float = _DEFAULT
    """LAMB; not negative; 0: no limit."""
    eps2: float = _DEFAULT
    """Adafactor; not negative."""
    beta2_decay: float = _DEFAULT
    """Adafactor; not positive."""
    clip_threshold: float = _DEFAULT
    """Adafactor; positive."""
    ns_coefficients: tuple[float, float, float] = _DEFAULT
    """Muon: a, b and c of a Newton-Schulz iteration."""
    ns_steps: int = _DEFAULT
    """Muon: iterations, 1 to 99."""
    adjust_lr: AdjustLr = _DEFAULT
    """Muon: how the learning rate follows the shape."""
    centered: bool = _DEFAULT
    """RMSProp: divide by the standard deviation."""
    decoupled: bool = _DEFAULT
    """NAdam, RAdam, ADOPT: decoupled weight decay."""
    always_adapt: bool = _DEFAULT
    """LAMB, LARS: adapt also without weight decay."""
    beta3: float = _DEFAULT
    """AdEMAMix: of the slow moving average; in [0, 1)."""
    alpha: float = _DEFAULT
    """AdEMAMix: the weight of the slow moving average; not negative."""
    alpha_warmup: int = _DEFAULT
    """AdEMAMix: steps until alpha has grown from 0."""
    beta3_warmup: int = _DEFAULT
    """AdEMAMix: steps until beta3 has grown from beta1."""
    clip_exponent: float = _DEFAULT
    """ADOPT: step t clips to (t - 1)^clip_exponent; not negative."""

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
    """The formula."""
    warmup_steps: int = _DEFAULT
    """W, the steps of a linear warm-up; default 0."""
    total_steps: int = _DEFAULT
    """T, the steps of the schedule, the warm-up included."""
    end_factor: float = _DEFAULT
    """The last learning rate, as a factor of the first; default 0."""
    power: float = _DEFAULT
    """The power of a polynomial; default 1."""
    gamma: float = _DEFAULT
    """The factor of steps and exponentials."""
    step_size: int = _DEFAULT
    """After how many steps gamma is multiplied in."""
    first_step: int = _DEFAULT
    """Applied steps before the schedule begins; default 0."""
    table: Sequence[float] = ()
    """The learning rates of a table; copied when it is set."""

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
    """Which gradients share a norm; default ``ClipScope.NONE``."""
    max_norm: float = _DEFAULT
    """The largest norm; must be set where a norm is clipped."""
    max_value: float = _DEFAULT
    """The largest absolute value of an element; default infinity."""
    flavor: Flavor = _DEFAULT
    """Whose formula; default ``Flavor.TORCH``."""
    agc_factor: float = _DEFAULT
    """The factor of adaptive clipping; default 0.01."""
    agc_eps: float = _DEFAULT
    """The least norm of a parameter in adaptive clipping; default 1e-3."""
    agc_units: AgcUnits = _DEFAULT
    """The units of adaptive clipping; default ``AgcUnits.TF``."""
    when: ClipWhen = _DEFAULT
    """What is clipped; default ``ClipWhen.STEP``."""


@dataclass(frozen=True, kw_only=True)
class LossScaler(_Struct):
    """A dynamic loss scale for f16."""

    _raw = "ga_loss_scaler"

    initial_scale: float = _DEFAULT
    """The first scale; default 65536."""
    growth_factor: float = _DEFAULT
    """What the scale grows by; more than 1; default 2."""
    backoff_factor: float = _DEFAULT
    """What the scale backs off by; in (0, 1); default 0.5."""
    min_scale: float = _DEFAULT
    """The least scale; default 2^-126."""
    max_scale: float = _DEFAULT
    """The largest scale; default 2^127."""
    growth_interval: int = _DEFAULT
    """Applied steps in a row after which the scale grows; default 2000."""
    hysteresis: int = _DEFAULT
    """Non-finite windows after which the scale backs off; default 1."""


@dataclass(frozen=True, kw_only=True)
class Ema(_Struct):
    """A moving average of every parameter."""

    _raw = "ga_ema"
    _types = {"kind": EmaKind, "dtype": Dtype}

    kind: EmaKind = _DEFAULT
    """How the decay depends on the step; default ``EmaKind.TORCH``."""
    dtype: Dtype = _DEFAULT
    """The type of the average; default: f32, or f64 for f64 parameters; or bf16."""
    decay: float = _DEFAULT
    """The decay of ``EmaKind.TORCH``, in [0, 1]; default 0.999."""
    gamma: float = _DEFAULT
    """The power of ``EmaKind.KARRAS``; default 6.94."""


@dataclass(frozen=True, kw_only=True)
class CommunicatorOptions(_Struct):
    """What ranks exchange and check, for ``Context.set_communicator()``."""

    _raw = "ga_comm_options"
    _types = {
        "wire": CommWire, "hand_out": bool, "shard": CommShard, "adder": CommAdder, "overlap": bool,
    }  # fmt: skip

    wire: CommWire = _DEFAULT
    """What travels from rank to rank; default ``CommWire.EXACT``."""
    hand_out: bool = _DEFAULT
    """Whether rank 0's parameters and state become those of every rank; default: they must agree already."""
    check_every: int = _DEFAULT
    """Every so many windows, ``step()`` compares parameters, and state that every rank has, over the ranks;
    default 0: never."""
    shard: CommShard = _DEFAULT
    """What each rank keeps of optimizer state, master weights and moving averages; default ``CommShard.NONE``.
    It is chosen before the library makes its arrays, and holds until the context is closed."""
    adder: CommAdder = _DEFAULT
    """Who adds gradients up; default ``CommAdder.AUTO``."""
    overlap: bool = _DEFAULT
    """Whether ``Context.ready()`` has gradients exchanged while backward goes on, by a thread of the library;
    every window exchanges all parameters then; default False."""


@dataclass(frozen=True, kw_only=True)
class ParamOptions(_Struct):
    """Options of a parameter."""

    _raw = "ga_param_options"
    _types = {
        "gradient_dtype": Dtype, "accumulator_dtype": Dtype, "master": Master, "rounding": Rounding,
        "rows": Rows, "reduce": lambda value: Reduce(value) if value else None, "write_early": bool,
        "follow_data": bool,
    }  # fmt: skip

    gradient_dtype: Dtype = _DEFAULT
    """The type of gradients; default: the parameter's."""
    accumulator_dtype: Dtype = _DEFAULT
    """The type of the accumulator; default: f32, or f64 for f64 parameters."""
    master: Master = _DEFAULT
    """Whether a parameter of 16 bits has master weights; default ``Master.F32``."""
    rounding: Rounding = _DEFAULT
    """How a parameter of 16 bits is rounded; default ``Rounding.NEAREST``."""
    rows: Rows = _DEFAULT
    """Whether gradients may come by row; default ``Rows.NONE``."""
    agc_axes: int = _DEFAULT
    """Bit d: a unit of adaptive clipping spans axis d; default 0: as the clip says."""
    reduce: Reduce | None = None
    """``Reduce.MAX``: the parameter, of an external group, collects maxima in place of sums; default:
    ``Config.reduce`` holds for it."""
    write_early: bool = _DEFAULT
    """With ``Config.eager``: the parameter, which has 16 bits and master weights and is rounded to nearest, may be
    written from ``Context.ready()`` on, so that ``Context.step()`` makes no copy; default False."""
    follow_data: bool = _DEFAULT
    """Master weights follow what the program writes to the parameter, element by element, so that
    ``Param.changed()`` is needless; not with ``Rounding.STOCHASTIC``; default False."""

    def __post_init__(self) -> None:
        if self.reduce is not None and self.reduce is not Reduce.MAX:
            raise TypeError(
                f"ParamOptions.reduce was {self.reduce!r}, expected Reduce.MAX, or None for that of the context"
            )
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class MicroOptions(_Struct):
    """Options of a micro-batch."""

    _raw = "ga_micro_options"
    _types = {"flags": MicroFlags}

    loss_scale: float = _DEFAULT
    """What the loss was multiplied by; default that of the context."""
    flags: MicroFlags = _DEFAULT
    """Default ``MicroFlags.NONE``."""


@dataclass(frozen=True)
class BatchNormOptions(_Struct):
    """Options of a layer of batch normalisation: those that are not given are the flavor's."""

    _raw = "ga_bn_options"
    _arguments = ("flavor",)
    _not_fields = ("flavor",)
    _types = {"mode": BnMode, "layout": BnLayout, "dtype": Dtype, "biased": bool}

    flavor: Flavor = Flavor.TORCH
    """Whose defaults."""
    mode: BnMode = _DEFAULT
    """Whose statistics the layer normalises by; default ``BnMode.MICRO``."""
    layout: BnLayout = _DEFAULT
    """The order of axes."""
    dtype: Dtype = _DEFAULT
    """The type of activations and their gradients; default f32."""
    biased: bool = _DEFAULT
    """Whether the running variance averages biased variances, as in Keras."""
    momentum: float = _DEFAULT
    """How far the running statistics move in a step, in [0, 1]."""
    eps: float = _DEFAULT
    """Added to the variance; positive."""


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
    """What is saved or loaded; default ``StateParts.ALL``."""
    settings: Settings = _DEFAULT
    """What a load does about settings; default ``Settings.COMPARE``."""
    allow_missing: bool = _DEFAULT
    """A load leaves what the file has nothing of as it is; default False."""
    allow_extra: bool = _DEFAULT
    """A load skips what the context has no place for; default False."""
    unmarked: bool = _DEFAULT
    """A load takes a safetensors file of another program; default False."""
    progress: Callable[[int, int], object] | None = None
    """Called with the bytes that are done, and of all, on the thread of the call."""
    note: str | None = None
    """A text of the program's own that is saved too; default None: none."""

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
    """Whether the step was applied, or why not."""
    windows: int
    """Steps that the context has ended, this one included."""
    steps: int
    """Applied steps, this one included."""
    micro_batches: int
    """Micro-batches of this window."""
    weight: float
    """The sum of the weights of this window."""
    norm: float
    """The 2-norm of the reduced gradient before clipping; NaN if nothing has measured it."""
    clip_factor: float
    """The least factor of a clip by norm; 1 without one."""
    lr: float
    """The learning rate of group 0 in this step; 0 if it was skipped."""
    loss_scale: float
    """The loss scale of this window."""
    skipped: int
    """Windows that were not applied, since the context was created."""
    dropped: int
    """Micro-batches that were dropped, since the context was created."""
    window_dropped: int
    """Micro-batches of this window that were dropped."""
    noise_scale: float
    """The simple noise scale of the gradient; NaN before the first estimate."""
    noise_trace: float
    """The variance of the gradient of one sample."""
    noise_signal: float
    """The squared norm of the gradient of the whole data."""
    dropped_micros: int
    """Bit i: micro-batch i of this window was dropped."""
    eager: int
    """Parameters that ``Context.ready()`` has updated, with ``Config.eager``."""
    eager_waited: int
    """Those that waited for the step, because there was no memory for a second set of their arrays."""
    eager_redone: int
    """Of ``eager``, those that the step updated once more, since it was clipped or an option has changed."""

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
    """Whether there is room for a micro-batch."""
    micro_batches: int
    """Micro-batches in this window, the open one included."""
    open_micro: int
    """The index of the open micro-batch; -1: none is open."""
    accum_steps: int
    """K of this window; 0: any number."""
    weight: float
    """The sum of the weights so far."""
    windows: int
    """Steps that the context has ended."""
    steps: int
    """Applied steps."""


@dataclass(frozen=True)
class ParamInfo(_Result):
    """What the library knows of a parameter."""

    _types = {
        "dtype": Dtype, "gradient_dtype": Dtype, "accumulator_dtype": Dtype, "frozen": bool,
    }  # fmt: skip

    name: str
    """Its name."""
    group: int
    """The id of its group."""
    dtype: Dtype
    """The type of its elements."""
    gradient_dtype: Dtype
    """The type of its gradients."""
    accumulator_dtype: Dtype
    """The type of its accumulator."""
    data: int
    """The address of its elements."""
    shape: tuple[int, ...]
    """Its dimensions."""
    frozen: bool
    """Whether it is frozen."""
    count: int
    """How many elements it has."""
    offset: int
    """Elements from the start of its block; 0 without one."""
    slot: int
    """Its place in a list of gradients: see ``Context.accumulate()``."""
    lr_scale: float
    """What the learning rate of its group is multiplied by."""
    weight_decay_scale: float
    """What the weight decay of its group is multiplied by."""


@dataclass(frozen=True)
class BatchNormInfo(_Result):
    """What the library knows of a layer of batch normalisation.

    gamma, beta: the ids of the parameters; -1: none.
    """

    _types = {
        "mode": BnMode, "layout": BnLayout, "dtype": Dtype, "biased": bool, "frozen": bool,
    }  # fmt: skip

    name: str
    """Its name."""
    channels: int
    """Its channels."""
    gamma: int
    """The id of the parameter that scales; -1: none."""
    beta: int
    """The id of the parameter that shifts; -1: none."""
    mode: BnMode
    """Whose statistics it normalises by."""
    layout: BnLayout
    """The order of the axes of its input."""
    dtype: Dtype
    """The type of the elements of its input."""
    biased: bool
    """Whether the running variance averages biased variances."""
    frozen: bool
    """Whether it is frozen."""
    momentum: float
    """How far the running statistics move to those of a window."""
    eps: float
    """What is added to the variance."""


@dataclass(frozen=True)
class StateInfo(_Result):
    """An array of state of a parameter."""

    _types = {"dtype": Dtype}

    name: str
    """Its name, such as exp_avg."""
    dtype: Dtype
    """The type of its elements."""
    count: int
    """How many elements there are."""


@dataclass(frozen=True)
class Memory(_Result):
    """Bytes that the library owns for a context, by purpose."""

    accumulators: int
    """Accumulators."""
    optimizer_state: int
    """State of optimizers."""
    workspace: int
    """Partial norms, tables and scratch memory."""
    total: int
    """All of it."""
    masters: int
    """Master weights."""
    averages: int
    """Moving averages."""
    rows: int
    """What gradients by row need."""
    batch_norm: int
    """Statistics of batch normalisation."""
    resident: int
    """The part of the total that is written so far."""
    eager: int
    """A second set of what updates write, with ``Config.eager``."""


@dataclass(frozen=True)
class Build(_Result):
    """The build of the library that is loaded."""

    version: int
    """10000 * major + 100 * minor + patch."""
    onednn: int
    """The version of the oneDNN that multiplies matrices on the CPU; 0: none."""
    cuda_runtime: int
    """The version of the CUDA that ``libgradaccum_cuda.so`` was built with; 0: none."""
    cuda_driver: int
    """The newest CUDA that the driver runs; 0: no driver."""
    openmp: int
    """The date of the OpenMP standard, such as 201511; 0: built without OpenMP."""
    compiler: str
    """The compiler."""
    cpu_loops: str
    """The names of the CPU kernels, separated by spaces."""
