// SPDX-License-Identifier: Apache-2.0
// The numbers are those of gradaccum.h, as SWIG has read them.
namespace GradAccum {
  /// <summary>What a call of the library has returned.</summary>
  public enum Status {
    /// <summary>The call has succeeded.</summary>
    Ok = Raw.GA_OK,
    /// <summary>An argument is not legal: an unknown id, a number out of range, memory that is too small.</summary>
    InvalidArgument = Raw.GA_ERROR_INVALID_ARGUMENT,
    /// <summary>The call is not legal now.</summary>
    InvalidState = Raw.GA_ERROR_INVALID_STATE,
    /// <summary>There is not enough memory.</summary>
    OutOfMemory = Raw.GA_ERROR_OUT_OF_MEMORY,
    /// <summary>Not in this build, on this machine or with these options.</summary>
    Unsupported = Raw.GA_ERROR_UNSUPPORTED,
    /// <summary>The window holds infinities or NaN, under <see cref="Nonfinite.Fail"/>.</summary>
    Nonfinite = Raw.GA_ERROR_NONFINITE,
    /// <summary>The call has failed half-way; the message says what is legal now.</summary>
    Fault = Raw.GA_ERROR_FAULT,
    /// <summary>A defect of the library: please report the message.</summary>
    Internal = Raw.GA_ERROR_INTERNAL,
    /// <summary>The window holds K micro-batches: <see cref="Context.Step"/> must be called next.</summary>
    WindowFull = Raw.GA_ERROR_WINDOW_FULL,
    /// <summary>A file could not be read or written.</summary>
    Io = Raw.GA_ERROR_IO,
    /// <summary>A file or buffer is not a state of this library, or is damaged.</summary>
    Format = Raw.GA_ERROR_FORMAT,
    /// <summary>Other ranks did not take part, failed, or differ from this one.</summary>
    Communication = Raw.GA_ERROR_COMMUNICATION,
    /// <summary>A callback of the program has asked to stop.</summary>
    Cancelled = Raw.GA_ERROR_CANCELLED
  }

  /// <summary>The rule by which parameters are updated.</summary>
  public enum OptimizerKind {
    /// <summary>Stochastic gradient descent, with momentum, dampening and Nesterov's variant.</summary>
    Sgd = Raw.GA_OPTIMIZER_SGD,
    /// <summary>Adam (Kingma and Ba 2015), and AMSGrad.</summary>
    Adam = Raw.GA_OPTIMIZER_ADAM,
    /// <summary>Adam with decoupled weight decay (Loshchilov and Hutter 2019).</summary>
    AdamW = Raw.GA_OPTIMIZER_ADAMW,
    /// <summary>The program's own optimizer, which reads <see cref="Param.Gradient"/>.</summary>
    External = Raw.GA_OPTIMIZER_EXTERNAL,
    /// <summary>RMSProp (Tieleman and Hinton 2012), also centered.</summary>
    RmsProp = Raw.GA_OPTIMIZER_RMSPROP,
    /// <summary>Adagrad (Duchi et al. 2011).</summary>
    Adagrad = Raw.GA_OPTIMIZER_ADAGRAD,
    /// <summary>Adadelta (Zeiler 2012).</summary>
    Adadelta = Raw.GA_OPTIMIZER_ADADELTA,
    /// <summary>AdaMax (Kingma and Ba 2015).</summary>
    Adamax = Raw.GA_OPTIMIZER_ADAMAX,
    /// <summary>NAdam (Dozat 2016).</summary>
    NAdam = Raw.GA_OPTIMIZER_NADAM,
    /// <summary>RAdam (Liu et al. 2020).</summary>
    RAdam = Raw.GA_OPTIMIZER_RADAM,
    /// <summary>Lion (Chen et al. 2023).</summary>
    Lion = Raw.GA_OPTIMIZER_LION,
    /// <summary>LAMB (You et al. 2020).</summary>
    Lamb = Raw.GA_OPTIMIZER_LAMB,
    /// <summary>LARS (You et al. 2017).</summary>
    Lars = Raw.GA_OPTIMIZER_LARS,
    /// <summary>Adafactor (Shazeer and Stern 2018).</summary>
    Adafactor = Raw.GA_OPTIMIZER_ADAFACTOR,
    /// <summary>Muon (Jordan et al. 2024), for matrices only. Needs oneDNN, or cuBLAS on a device.</summary>
    Muon = Raw.GA_OPTIMIZER_MUON,
    /// <summary>ADOPT (Taniguchi et al. 2024), whose first step moves nothing.</summary>
    Adopt = Raw.GA_OPTIMIZER_ADOPT,
    /// <summary>AdEMAMix (Pagliardini et al. 2024).</summary>
    AdEmaMix = Raw.GA_OPTIMIZER_ADEMAMIX,
    /// <summary>Adagrad with one sum of squares for each row, for embeddings.</summary>
    RowwiseAdagrad = Raw.GA_OPTIMIZER_ROWWISE_ADAGRAD
  }

  /// <summary>Whose definition of an optimizer, where frameworks differ.</summary>
  public enum Flavor {
    /// <summary>That of PyTorch and timm.</summary>
    Torch = Raw.GA_FLAVOR_TORCH,
    /// <summary>That of Keras.</summary>
    Keras = Raw.GA_FLAVOR_KERAS,
    /// <summary>That of the BERT release, for AdamW only.</summary>
    Bert = Raw.GA_FLAVOR_BERT
  }

  /// <summary>The type of the elements of a tensor.</summary>
  public enum DType {
    /// <summary>The default of the option that takes a type.</summary>
    Default = 0,
    /// <summary>A float.</summary>
    F32 = Raw.GA_F32,
    /// <summary>A double.</summary>
    F64 = Raw.GA_F64,
    /// <summary>IEEE binary16, as the 16 bits of a ushort.</summary>
    F16 = Raw.GA_F16,
    /// <summary>The upper half of a float, as the 16 bits of a ushort.</summary>
    BF16 = Raw.GA_BF16,
    /// <summary>An int, for indices.</summary>
    I32 = Raw.GA_I32,
    /// <summary>A long, for indices.</summary>
    I64 = Raw.GA_I64
  }

  /// <summary>How Muon scales its learning rate with the shape of a matrix.</summary>
  public enum AdjustLr {
    /// <summary>By the square root of max(1, rows / columns).</summary>
    Original = Raw.GA_ADJUST_ORIGINAL,
    /// <summary>So that steps are as large as those of AdamW.</summary>
    MatchRms = Raw.GA_ADJUST_MATCH_RMS,
    /// <summary>Not at all.</summary>
    None = Raw.GA_ADJUST_NONE
  }

  /// <summary>Where a context computes.</summary>
  public enum Device {
    /// <summary>On the processor; tensors are in the memory of the host.</summary>
    Cpu = Raw.GA_DEVICE_CPU,
    /// <summary>On an NVIDIA GPU; tensors are addresses of its memory.</summary>
    Cuda = Raw.GA_DEVICE_CUDA
  }

  /// <summary>What the gradients of a micro-batch are.</summary>
  public enum GradientKind {
    /// <summary>Means over the samples of the micro-batch.</summary>
    Mean = Raw.GA_GRADIENT_MEAN,
    /// <summary>Sums over them.</summary>
    Sum = Raw.GA_GRADIENT_SUM
  }

  /// <summary>What the optimizer sees of the sum over a window.</summary>
  public enum Reduce {
    /// <summary>The sum divided by the sum of the weights.</summary>
    Mean = Raw.GA_REDUCE_MEAN,
    /// <summary>The sum.</summary>
    Sum = Raw.GA_REDUCE_SUM,
    /// <summary>
    /// The largest number that each element has had in the window; for single parameters:
    /// <see cref="ParamOptions.Reduce"/>.
    /// </summary>
    Max = Raw.GA_REDUCE_MAX
  }

  /// <summary>What happens to a parameter that has no gradient in a window.</summary>
  public enum Missing {
    /// <summary>Nothing.</summary>
    Skip = Raw.GA_MISSING_SKIP,
    /// <summary>A step with a gradient of zero, in which momentum and weight decay still move it.</summary>
    Zero = Raw.GA_MISSING_ZERO
  }

  /// <summary>What happens if a gradient is infinite or NaN.</summary>
  public enum Nonfinite {
    /// <summary>The step is skipped, and the window is emptied.</summary>
    SkipStep = Raw.GA_NONFINITE_SKIP_STEP,
    /// <summary><see cref="Context.Step"/> fails, and the window is kept until <see cref="Context.Discard"/>.</summary>
    Fail = Raw.GA_NONFINITE_FAIL,
    /// <summary>A micro-batch that is not finite counts with weight 0. Gradients by part are read when their micro-batch ends.</summary>
    DropMicro = Raw.GA_NONFINITE_DROP_MICRO,
    /// <summary>Nothing is checked.</summary>
    Ignore = Raw.GA_NONFINITE_IGNORE
  }

  /// <summary>How gradients add up in an accumulator of 16 bits.</summary>
  public enum Accumulation {
    /// <summary>Rounded to the type of the accumulator.</summary>
    Plain = Raw.GA_ACCUMULATE_PLAIN,
    /// <summary>As the mean so far, which does not overflow.</summary>
    RunningMean = Raw.GA_ACCUMULATE_RUNNING_MEAN,
    /// <summary>With a second number for what rounding has lost.</summary>
    Compensated = Raw.GA_ACCUMULATE_COMPENSATED,
    /// <summary>Rounded up or down at random.</summary>
    Stochastic = Raw.GA_ACCUMULATE_STOCHASTIC
  }

  /// <summary>How long the program leaves a gradient in place.</summary>
  public enum GradientLife {
    /// <summary>Until the call returns.</summary>
    Consumed = Raw.GA_GRADIENTS_CONSUMED,
    /// <summary>The first gradient of a parameter in a window until the call that brings the second one has returned, else until the step.</summary>
    Live = Raw.GA_GRADIENTS_LIVE
  }

  /// <summary>The state of a window.</summary>
  public enum WindowState {
    /// <summary>There is no micro-batch.</summary>
    Empty = Raw.GA_WINDOW_EMPTY,
    /// <summary>There are micro-batches, and room for more.</summary>
    Open = Raw.GA_WINDOW_OPEN,
    /// <summary>There are K micro-batches: <see cref="Context.Step"/> must be called next.</summary>
    Full = Raw.GA_WINDOW_FULL,
    /// <summary>A call has failed half-way: <see cref="Context.Discard"/> must be called next.</summary>
    Invalid = Raw.GA_WINDOW_INVALID
  }

  /// <summary>What a step has done.</summary>
  public enum StepOutcome {
    /// <summary>Parameters and state were updated.</summary>
    Applied = Raw.GA_STEP_APPLIED,
    /// <summary>There was no micro-batch, or the weights add up to 0.</summary>
    SkippedEmpty = Raw.GA_STEP_SKIPPED_EMPTY,
    /// <summary>An accumulated gradient is infinite or NaN.</summary>
    SkippedNonfinite = Raw.GA_STEP_SKIPPED_NONFINITE,
    /// <summary>On a device: indices of rows were out of range, or ranks did not agree.</summary>
    SkippedError = Raw.GA_STEP_SKIPPED_ERROR,
    /// <summary>On a device: the outcome is not known yet.</summary>
    Pending = Raw.GA_STEP_PENDING,
    /// <summary>The sum of the weights is too small or too large to divide by.</summary>
    SkippedWeight = Raw.GA_STEP_SKIPPED_WEIGHT,
    /// <summary>Another rank has discarded the window, and so has this call; it is not counted.</summary>
    SkippedDiscard = Raw.GA_STEP_SKIPPED_DISCARD
  }

  /// <summary>Whom a rank is connected with.</summary>
  internal enum CommunicatorKind {
    Local = Raw.GA_COMM_LOCAL,
    Mpi = Raw.GA_COMM_MPI,
    Table = Raw.GA_COMM_TABLE,  // by functions of a C program; not for C#
    Nccl = Raw.GA_COMM_NCCL
  }

  /// <summary>What travels from rank to rank.</summary>
  public enum Wire {
    /// <summary>Gradients as the accumulators have them.</summary>
    Exact = Raw.GA_COMM_WIRE_EXACT,
    /// <summary>Gradients of f32 rounded to bf16; they are added in f32.</summary>
    BF16 = Raw.GA_COMM_WIRE_BF16
  }

  /// <summary>What each rank keeps of optimizer state, master weights and moving averages.</summary>
  public enum Shard {
    /// <summary>All of it.</summary>
    None = Raw.GA_SHARD_NONE,
    /// <summary>
    /// A part of about one in as many as there are ranks: the rank updates that part of the parameters and gets
    /// the others' (ZeRO-1). <see cref="Param.GetState{T}(string)"/>, <see cref="Param.SetState"/>,
    /// <see cref="Param.CopyEmaTo(Tensor)"/> and <see cref="Context.SwapEma(bool)"/> are then called by every rank
    /// in the same order.
    /// </summary>
    Optimizer = Raw.GA_SHARD_OPTIMIZER
  }

  /// <summary>Who adds gradients up over the ranks.</summary>
  public enum Adder {
    /// <summary>The library, in the order of the ranks, with the same bits on every transport.</summary>
    Library = Raw.GA_COMM_ADDER_LIBRARY,
    /// <summary>MPI or NCCL, in its own order. Local ranks have no such transport.</summary>
    Transport = Raw.GA_COMM_ADDER_TRANSPORT,
    /// <summary>NCCL, unless gradients travel as bf16; with others the library.</summary>
    Auto = Raw.GA_COMM_ADDER_AUTO
  }

  /// <summary>Whether a matrix is used as stored or transposed.</summary>
  public enum Transpose {
    /// <summary>As stored.</summary>
    No = Raw.GA_NO_TRANSPOSE,
    /// <summary>Transposed.</summary>
    Yes = Raw.GA_TRANSPOSE
  }

  /// <summary>How a learning rate follows the applied steps. The formulas are in gradaccum.h.</summary>
  public enum ScheduleKind {
    /// <summary>Constant after the warm-up.</summary>
    Constant = Raw.GA_SCHEDULE_CONSTANT,
    /// <summary>Linear decay.</summary>
    Linear = Raw.GA_SCHEDULE_LINEAR,
    /// <summary>Half a cosine.</summary>
    Cosine = Raw.GA_SCHEDULE_COSINE,
    /// <summary>A power of linear decay.</summary>
    Polynomial = Raw.GA_SCHEDULE_POLYNOMIAL,
    /// <summary>The inverse square root of the steps.</summary>
    InverseSqrt = Raw.GA_SCHEDULE_INVERSE_SQRT,
    /// <summary>Multiplied by gamma after every step_size steps.</summary>
    Step = Raw.GA_SCHEDULE_STEP,
    /// <summary>Multiplied by gamma after every step.</summary>
    Exponential = Raw.GA_SCHEDULE_EXPONENTIAL,
    /// <summary>Read from a table.</summary>
    Table = Raw.GA_SCHEDULE_TABLE,
    /// <summary>The schedule of the BERT release.</summary>
    Bert = Raw.GA_SCHEDULE_BERT
  }

  /// <summary>Which gradients share a norm.</summary>
  public enum ClipScope {
    /// <summary>Nothing is clipped by norm.</summary>
    None = Raw.GA_CLIP_NONE,
    /// <summary>All parameters together.</summary>
    Global = Raw.GA_CLIP_GLOBAL,
    /// <summary>Each parameter has a norm of its own.</summary>
    PerTensor = Raw.GA_CLIP_PER_TENSOR,
    /// <summary>Adaptive gradient clipping of units (Brock et al. 2021).</summary>
    Agc = Raw.GA_CLIP_AGC
  }

  /// <summary>Which axes a unit of adaptive gradient clipping spans.</summary>
  public enum AgcUnits {
    /// <summary>Weights [in, out] and [height, width, in, out].</summary>
    Tf = Raw.GA_AGC_TF,
    /// <summary>The same layouts, as the NFNets release has it.</summary>
    NfNets = Raw.GA_AGC_NFNETS,
    /// <summary>Weights [out, in] and [out, in, height, width].</summary>
    Torch = Raw.GA_AGC_TORCH
  }

  /// <summary>What is clipped.</summary>
  public enum ClipWhen {
    /// <summary>The reduced gradient of the window.</summary>
    Step = Raw.GA_CLIP_WHEN_STEP,
    /// <summary>The gradient of every micro-batch. Gradients by part are read when their micro-batch ends.</summary>
    Micro = Raw.GA_CLIP_WHEN_MICRO
  }

  /// <summary>How the decay of an EMA depends on the step.</summary>
  public enum EmaKind {
    /// <summary>Constant.</summary>
    Torch = Raw.GA_EMA_TORCH,
    /// <summary>The window grows with the run (Karras et al. 2024).</summary>
    Karras = Raw.GA_EMA_KARRAS
  }

  /// <summary>Whether a parameter of 16 bits has master weights.</summary>
  public enum Master {
    /// <summary>The library keeps an f32 copy, which the parameter is rounded from.</summary>
    F32 = Raw.GA_MASTER_F32,
    /// <summary>The optimizer reads and rounds the parameter itself.</summary>
    None = Raw.GA_MASTER_NONE
  }

  /// <summary>How a parameter of 16 bits is rounded.</summary>
  public enum Rounding {
    /// <summary>To nearest.</summary>
    Nearest = Raw.GA_ROUND_NEAREST,
    /// <summary>Up or down at random.</summary>
    Stochastic = Raw.GA_ROUND_STOCHASTIC
  }

  /// <summary>What a step does to rows that have received nothing.</summary>
  public enum Rows {
    /// <summary>Gradients by row are not legal.</summary>
    None = Raw.GA_ROWS_NONE,
    /// <summary>A step with a gradient of zeros.</summary>
    Dense = Raw.GA_ROWS_DENSE,
    /// <summary>Rows and their state stay as they are.</summary>
    Lazy = Raw.GA_ROWS_LAZY
  }

  /// <summary>What is saved or loaded.</summary>
  public enum StateParts {
    /// <summary>The parameters and what the library keeps.</summary>
    All = Raw.GA_STATE_ALL,
    /// <summary>Not the parameters.</summary>
    Library = Raw.GA_STATE_LIBRARY,
    /// <summary>The parameters and the running statistics of batch normalisation: a model file.</summary>
    Parameters = Raw.GA_STATE_PARAMETERS
  }

  /// <summary>What a load does about settings in the file.</summary>
  public enum StateSettings {
    /// <summary>The load fails if one differs that changes numbers.</summary>
    Compare = Raw.GA_SETTINGS_COMPARE,
    /// <summary>Hyper-parameters, schedules, clips and the like are taken from the file.</summary>
    Take = Raw.GA_SETTINGS_TAKE,
    /// <summary>The settings of the context are kept.</summary>
    Keep = Raw.GA_SETTINGS_KEEP
  }

  /// <summary>Whose statistics a layer normalises by.</summary>
  public enum BatchNormMode {
    /// <summary>The statistics of the micro-batch.</summary>
    Micro = Raw.GA_BN_MICRO,
    /// <summary>The statistics of the whole window, in two sweeps.</summary>
    Window = Raw.GA_BN_WINDOW,
    /// <summary>The statistics of the micro-batches of the window so far.</summary>
    Cumulative = Raw.GA_BN_CUMULATIVE
  }

  /// <summary>The order of the axes of activations.</summary>
  public enum BatchNormLayout {
    /// <summary>[samples, channels, positions].</summary>
    ChannelsFirst = Raw.GA_BN_CHANNELS_FIRST,
    /// <summary>[samples, positions, channels].</summary>
    ChannelsLast = Raw.GA_BN_CHANNELS_LAST
  }

  /// <summary>What describes the spread of given statistics.</summary>
  public enum Spread {
    /// <summary>The mean squared deviation from the mean.</summary>
    Variance = Raw.GA_BN_VARIANCE,
    /// <summary>The sum of squared deviations.</summary>
    M2 = Raw.GA_BN_M2
  }
}
