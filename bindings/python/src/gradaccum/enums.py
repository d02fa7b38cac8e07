# SPDX-License-Identifier: Apache-2.0
"""The enumerations of gradaccum.h, with the numbers that they have there."""

from enum import IntEnum, IntFlag


class Status(IntEnum):
    """Why a call failed."""

    INVALID_ARGUMENT = 1
    INVALID_STATE = 2
    OUT_OF_MEMORY = 3
    UNSUPPORTED = 4
    NONFINITE = 5
    FAULT = 6
    INTERNAL = 7
    WINDOW_FULL = 8
    IO = 9
    FORMAT = 10
    COMMUNICATION = 11
    CANCELLED = 12


class OptimizerKind(IntEnum):
    """An optimizer. docs/reference.md has the fields that each one reads."""

    SGD = 0
    ADAM = 1
    ADAMW = 2
    EXTERNAL = 3
    RMSPROP = 4
    ADAGRAD = 5
    ADADELTA = 6
    ADAMAX = 7
    NADAM = 8
    RADAM = 9
    LION = 10
    LAMB = 11
    LARS = 12
    ADAFACTOR = 13
    MUON = 14
    ADOPT = 15
    ADEMAMIX = 16
    ROWWISE_ADAGRAD = 17


class Flavor(IntEnum):
    """Whose definition, where frameworks differ."""

    TORCH = 0
    KERAS = 1
    BERT = 2


class Dtype(IntEnum):
    """Of elements. DEFAULT leaves the choice to the library, where a field says so."""

    DEFAULT = 0
    F32 = 1
    F64 = 2
    F16 = 3
    BF16 = 4
    I32 = 5
    I64 = 6

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return (0, 4, 8, 2, 2, 4, 8)[self]


class AdjustLr(IntEnum):
    """MUON's factor of the learning rate for a matrix."""

    ORIGINAL = 0
    MATCH_RMS = 1
    NONE = 2


class Device(IntEnum):
    """Where a context computes."""

    CPU = 0
    CUDA = 1


class GradientKind(IntEnum):
    """What gradients are: means over their micro-batch, or sums."""

    MEAN = 0
    SUM = 1


class Reduce(IntEnum):
    """What the optimizer sees: the sum over the window, divided by the sum of the weights or not."""

    MEAN = 0
    SUM = 1


class Missing(IntEnum):
    """What happens to a parameter without a gradient in the window."""

    SKIP = 0
    ZERO = 1


class Nonfinite(IntEnum):
    """What happens if a gradient is infinite or NaN."""

    SKIP_STEP = 0
    FAIL = 1
    DROP_MICRO = 2
    IGNORE = 3


class Accumulation(IntEnum):
    """How gradients add up in a 16-bit accumulator."""

    PLAIN = 0
    RUNNING_MEAN = 1
    COMPENSATED = 2
    STOCHASTIC = 3


class GradientLife(IntEnum):
    """How long the program leaves a gradient in place: for the call, or until the step."""

    CONSUMED = 0
    LIVE = 1


class MicroFlags(IntFlag):
    """LAST: this micro-batch ends the window."""

    NONE = 0
    LAST = 1


class WindowState(IntEnum):
    """The state of the window."""

    EMPTY = 0
    OPEN = 1
    FULL = 2
    INVALID = 3


class StepOutcome(IntEnum):
    """What a step did."""

    APPLIED = 0
    SKIPPED_EMPTY = 1
    SKIPPED_NONFINITE = 2
    SKIPPED_ERROR = 3
    PENDING = 4
    SKIPPED_WEIGHT = 5


class ScheduleKind(IntEnum):
    """A schedule of the learning rate."""

    CONSTANT = 0
    LINEAR = 1
    COSINE = 2
    POLYNOMIAL = 3
    INVERSE_SQRT = 4
    STEP = 5
    EXPONENTIAL = 6
    TABLE = 7
    BERT = 8


class ClipScope(IntEnum):
    """What has a norm of its own in clipping."""

    NONE = 0
    GLOBAL = 1
    PER_TENSOR = 2
    AGC = 3


class AgcUnits(IntEnum):
    """Which axes a unit of adaptive gradient clipping spans."""

    TF = 0
    NFNETS = 1
    TORCH = 2


class ClipWhen(IntEnum):
    """What is clipped: the reduced gradient, or that of every micro-batch."""

    STEP = 0
    MICRO = 1


class EmaKind(IntEnum):
    """How a moving average forgets."""

    TORCH = 0
    KARRAS = 1


class Master(IntEnum):
    """Whether a 16-bit parameter has an f32 copy that the optimizer updates."""

    F32 = 0
    NONE = 1


class Rounding(IntEnum):
    """How a 16-bit parameter is rounded."""

    NEAREST = 0
    STOCHASTIC = 1


class Rows(IntEnum):
    """What a step does to rows without a gradient."""

    NONE = 0
    DENSE = 1
    LAZY = 2


class StateParts(IntEnum):
    """What is saved or loaded."""

    ALL = 0
    LIBRARY = 1
    PARAMETERS = 2


class Settings(IntEnum):
    """What a load does about settings in the file that differ."""

    COMPARE = 0
    TAKE = 1
    KEEP = 2


class BnMode(IntEnum):
    """Whose mean and variance a layer takes."""

    MICRO = 0
    WINDOW = 1
    CUMULATIVE = 2


class BnLayout(IntEnum):
    """[samples, channels, positions] or [samples, positions, channels]."""

    CHANNELS_FIRST = 0
    CHANNELS_LAST = 1


class BnSpread(IntEnum):
    """The mean squared deviation from the mean, or the sum of squared deviations."""

    VARIANCE = 0
    M2 = 1
