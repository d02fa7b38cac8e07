# SPDX-License-Identifier: Apache-2.0
"""The enumerations of gradaccum.h, with the numbers that they have there."""

from enum import IntEnum, IntFlag


class Status(IntEnum):
    """Why a call failed."""

    INVALID_ARGUMENT = 1
    """An argument is not legal: an unknown id, a number out of range, memory that is too small."""
    INVALID_STATE = 2
    """The call is not legal now."""
    OUT_OF_MEMORY = 3
    """There is not enough memory."""
    UNSUPPORTED = 4
    """Not in this build, on this machine or with these options."""
    NONFINITE = 5
    """The window holds infinities or NaN, under ``Nonfinite.FAIL``."""
    FAULT = 6
    """The call has failed half-way; the message says what is legal now."""
    INTERNAL = 7
    """A defect of the library: please report the message."""
    WINDOW_FULL = 8
    """The window holds K micro-batches: ``Context.step()`` must be called next."""
    IO = 9
    """A file could not be read or written."""
    FORMAT = 10
    """A file or buffer is not a state of this library, or is damaged."""
    COMMUNICATION = 11
    """Other ranks did not take part, failed, or differ from this one."""
    CANCELLED = 12
    """A callback of the program has asked to stop."""


class OptimizerKind(IntEnum):
    """An optimizer. docs/reference.md has the fields that each one reads."""

    SGD = 0
    """Stochastic gradient descent, with momentum, dampening and Nesterov's variant."""
    ADAM = 1
    """Adam (Kingma and Ba 2015), and AMSGrad."""
    ADAMW = 2
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""
    EXTERNAL = 3
    """The program's own optimizer, which reads ``Param.gradient()``."""
    RMSPROP = 4
    """RMSProp (Tieleman and Hinton 2012), also centered."""
    ADAGRAD = 5
    """Adagrad (Duchi et al. 2011)."""
    ADADELTA = 6
    """Adadelta (Zeiler 2012)."""
    ADAMAX = 7
    """AdaMax (Kingma and Ba 2015)."""
    NADAM = 8
    """NAdam (Dozat 2016)."""
    RADAM = 9
    """RAdam (Liu et al. 2020)."""
    LION = 10
    """Lion (Chen et al. 2023)."""
    LAMB = 11
    """LAMB (You et al. 2020)."""
    LARS = 12
    """LARS (You et al. 2017)."""
    ADAFACTOR = 13
    """Adafactor (Shazeer and Stern 2018)."""
    MUON = 14
    """Muon (Jordan et al. 2024), for matrices only. Needs oneDNN, or cuBLAS on a device."""
    ADOPT = 15
    """ADOPT (Taniguchi et al. 2024), whose first step moves nothing."""
    ADEMAMIX = 16
    """AdEMAMix (Pagliardini et al. 2024)."""
    ROWWISE_ADAGRAD = 17
    """Adagrad with one sum of squares for each row, for embeddings."""


class Flavor(IntEnum):
    """Whose definition, where frameworks differ."""

    TORCH = 0
    """That of PyTorch and timm."""
    KERAS = 1
    """That of Keras."""
    BERT = 2
    """That of the BERT release, for AdamW only."""


class Dtype(IntEnum):
    """Of elements. DEFAULT leaves the choice to the library, where a field says so."""

    DEFAULT = 0
    """The choice of the library."""
    F32 = 1
    """IEEE binary32."""
    F64 = 2
    """IEEE binary64."""
    F16 = 3
    """IEEE binary16."""
    BF16 = 4
    """bfloat16: the upper half of a binary32."""
    I32 = 5
    """32-bit integers, for indices."""
    I64 = 6
    """64-bit integers, for indices."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return (0, 4, 8, 2, 2, 4, 8)[self]


class AdjustLr(IntEnum):
    """MUON's factor of the learning rate for a matrix."""

    ORIGINAL = 0
    """By the square root of max(1, rows / columns)."""
    MATCH_RMS = 1
    """So that steps are as large as those of AdamW."""
    NONE = 2
    """Not at all."""


class Device(IntEnum):
    """Where a context computes."""

    CPU = 0
    """On the processor; tensors are in the memory of the host."""
    CUDA = 1
    """On an NVIDIA GPU; tensors are addresses of its memory."""


class GradientKind(IntEnum):
    """What gradients are: means over their micro-batch, or sums."""

    MEAN = 0
    """Means over the samples of the micro-batch."""
    SUM = 1
    """Sums over them."""


class Reduce(IntEnum):
    """What the optimizer sees: the sum over the window, divided by the sum of the weights or not."""

    MEAN = 0
    """The sum divided by the sum of the weights."""
    SUM = 1
    """The sum."""
    MAX = 2
    """The largest number that each element has had in the window; for single parameters:
    ``ParamOptions.reduce``."""


class Missing(IntEnum):
    """What happens to a parameter without a gradient in the window."""

    SKIP = 0
    """Nothing."""
    ZERO = 1
    """A step with a gradient of zero, in which momentum and weight decay still move it."""


class Nonfinite(IntEnum):
    """What happens if a gradient is infinite or NaN."""

    SKIP_STEP = 0
    """The step is skipped, and the window is emptied."""
    FAIL = 1
    """``Context.step()`` fails, and the window is kept until ``Context.discard()``."""
    DROP_MICRO = 2
    """A micro-batch that is not finite counts with weight 0. Gradients by part are read when their
    micro-batch ends.
    """
    IGNORE = 3
    """Nothing is checked."""


class Accumulation(IntEnum):
    """How gradients add up in a 16-bit accumulator."""

    PLAIN = 0
    """Rounded to the type of the accumulator."""
    RUNNING_MEAN = 1
    """As the mean so far, which does not overflow."""
    COMPENSATED = 2
    """With a second number for what rounding has lost."""
    STOCHASTIC = 3
    """Rounded up or down at random."""


class GradientLife(IntEnum):
    """How long the program leaves a gradient in place: for the call, or until the step."""

    CONSUMED = 0
    """Until the call returns."""
    LIVE = 1
    """The first gradient of a parameter in a window until the call that brings the second one has returned,
    else until the step.
    """


class MicroFlags(IntFlag):
    """LAST: this micro-batch ends the window."""

    NONE = 0
    """None of them."""
    LAST = 1
    """This micro-batch ends the window, as short as it is."""


class WindowState(IntEnum):
    """The state of the window."""

    EMPTY = 0
    """There is no micro-batch."""
    OPEN = 1
    """There are micro-batches, and room for more."""
    FULL = 2
    """There are K micro-batches: ``Context.step()`` must be called next."""
    INVALID = 3
    """A call has failed half-way: ``Context.discard()`` must be called next."""


class StepOutcome(IntEnum):
    """What a step did."""

    APPLIED = 0
    """Parameters and state were updated."""
    SKIPPED_EMPTY = 1
    """There was no micro-batch, or the weights add up to 0."""
    SKIPPED_NONFINITE = 2
    """An accumulated gradient is infinite or NaN."""
    SKIPPED_ERROR = 3
    """On a device: indices of rows were out of range, or ranks did not agree."""
    PENDING = 4
    """On a device: the outcome is not known yet."""
    SKIPPED_WEIGHT = 5
    """The sum of the weights is too small or too large to divide by."""
    SKIPPED_DISCARD = 6
    """Another rank has discarded the window, and so has this call; it is not counted."""


class ScheduleKind(IntEnum):
    """A schedule of the learning rate."""

    CONSTANT = 0
    """Constant after the warm-up."""
    LINEAR = 1
    """Linear decay."""
    COSINE = 2
    """Half a cosine."""
    POLYNOMIAL = 3
    """A power of linear decay."""
    INVERSE_SQRT = 4
    """The inverse square root of the steps."""
    STEP = 5
    """Multiplied by gamma after every step_size steps."""
    EXPONENTIAL = 6
    """Multiplied by gamma after every step."""
    TABLE = 7
    """Read from a table."""
    BERT = 8
    """The schedule of the BERT release."""


class ClipScope(IntEnum):
    """What has a norm of its own in clipping."""

    NONE = 0
    """Nothing is clipped by norm."""
    GLOBAL = 1
    """All parameters together."""
    PER_TENSOR = 2
    """Each parameter has a norm of its own."""
    AGC = 3
    """Adaptive gradient clipping of units (Brock et al. 2021)."""


class AgcUnits(IntEnum):
    """Which axes a unit of adaptive gradient clipping spans."""

    TF = 0
    """Weights [in, out] and [height, width, in, out]."""
    NFNETS = 1
    """The same layouts, as the NFNets release has it."""
    TORCH = 2
    """Weights [out, in] and [out, in, height, width]."""


class ClipWhen(IntEnum):
    """What is clipped: the reduced gradient, or that of every micro-batch."""

    STEP = 0
    """The reduced gradient of the window."""
    MICRO = 1
    """The gradient of every micro-batch. Gradients by part are read when their micro-batch ends."""


class EmaKind(IntEnum):
    """How a moving average forgets."""

    TORCH = 0
    """The decay is constant."""
    KARRAS = 1
    """The window grows with the run (Karras et al. 2024)."""


class Master(IntEnum):
    """Whether a 16-bit parameter has an f32 copy that the optimizer updates."""

    F32 = 0
    """The library keeps an f32 copy, which the parameter is rounded from."""
    NONE = 1
    """The optimizer reads and rounds the parameter itself."""


class Rounding(IntEnum):
    """How a 16-bit parameter is rounded."""

    NEAREST = 0
    """To nearest."""
    STOCHASTIC = 1
    """Up or down at random."""


class Rows(IntEnum):
    """What a step does to rows without a gradient."""

    NONE = 0
    """Gradients by row are not legal."""
    DENSE = 1
    """A step with a gradient of zeros."""
    LAZY = 2
    """Rows and their state stay as they are."""


class StateParts(IntEnum):
    """What is saved or loaded."""

    ALL = 0
    """The parameters and what the library keeps."""
    LIBRARY = 1
    """Not the parameters."""
    PARAMETERS = 2
    """The parameters and the running statistics of batch normalisation: a model file."""


class Settings(IntEnum):
    """What a load does about settings in the file that differ."""

    COMPARE = 0
    """The load fails if one differs that changes numbers."""
    TAKE = 1
    """Hyper-parameters, schedules, clips and the like are taken from the file."""
    KEEP = 2
    """The settings of the context are kept."""


class BnMode(IntEnum):
    """Whose mean and variance a layer takes."""

    MICRO = 0
    """The statistics of the micro-batch."""
    WINDOW = 1
    """The statistics of the whole window, in two sweeps."""
    CUMULATIVE = 2
    """The statistics of the micro-batches of the window so far."""


class BnLayout(IntEnum):
    """[samples, channels, positions] or [samples, positions, channels]."""

    CHANNELS_FIRST = 0
    """[samples, channels, positions]."""
    CHANNELS_LAST = 1
    """[samples, positions, channels]."""


class BnSpread(IntEnum):
    """The mean squared deviation from the mean, or the sum of squared deviations."""

    VARIANCE = 0
    """The mean squared deviation from the mean."""
    M2 = 1
    """The sum of squared deviations."""


class CommKind(IntEnum):
    """Whom a rank is connected with."""

    LOCAL = 0
    """Threads of this process."""
    MPI = 1
    """Processes of an MPI program."""
    TABLE = 2
    """By functions of a C program; not for Python."""
    NCCL = 3
    """Threads or processes with a GPU each."""


class CommWire(IntEnum):
    """What travels from rank to rank."""

    EXACT = 0
    """Gradients as the accumulators have them."""
    BF16 = 1
    """Gradients of f32 rounded to bf16; they are added in f32."""


class CommShard(IntEnum):
    """What each rank keeps of optimizer state, master weights and moving averages."""

    NONE = 0
    """All of it."""
    OPTIMIZER = 1
    """A part of about one in as many as there are ranks: the rank updates that part of the parameters and gets
    the others' (ZeRO-1). ``Param.get_state()``, ``Param.set_state()``, ``Param.ema()`` and
    ``Context.swap_ema()`` are then called by every rank in the same order."""


class CommAdder(IntEnum):
    """Who adds gradients up over the ranks."""

    LIBRARY = 0
    """The library, in the order of the ranks, with the same bits on every transport."""
    TRANSPORT = 1
    """MPI or NCCL, in its own order. Local ranks have no such transport."""
    AUTO = 2
    """NCCL, unless gradients travel as bf16; with others the library."""
