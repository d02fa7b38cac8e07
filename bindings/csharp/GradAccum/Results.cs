// SPDX-License-Identifier: Apache-2.0
using System;
using System.Runtime.InteropServices;

namespace GradAccum {
  /// <summary>What a step has done.</summary>
  [StructLayout(LayoutKind.Sequential)]
  public struct StepResult {
    // In the order in which the raw layer writes them.
    internal const int Integers = 11;
    internal const int Reals = 8;
    private readonly long outcome, windows, steps, microBatches, skipped, dropped, windowDropped, droppedMicros,
                          eager, eagerWaited, eagerRedone;
    private readonly double weight, norm, clipFactor, lr, lossScale, noiseScale, noiseTrace, noiseSignal;

    /// <summary>Whether the step was applied, or why not.</summary>
    public StepOutcome Outcome {
      get { return (StepOutcome)outcome; }
    }

    /// <summary>Steps that the context has ended, this one included.</summary>
    public long Windows {
      get { return windows; }
    }

    /// <summary>Applied steps, this one included.</summary>
    public long Steps {
      get { return steps; }
    }

    /// <summary>Micro-batches of this window.</summary>
    public long MicroBatches {
      get { return microBatches; }
    }

    /// <summary>Windows that were not applied, since the context was created.</summary>
    public long Skipped {
      get { return skipped; }
    }

    /// <summary>Micro-batches that were dropped, since the context was created.</summary>
    public long Dropped {
      get { return dropped; }
    }

    /// <summary>Micro-batches of this window that were dropped.</summary>
    public long WindowDropped {
      get { return windowDropped; }
    }

    /// <summary>Bit i: micro-batch i of this window was dropped.</summary>
    public ulong DroppedMicros {
      get { return unchecked((ulong)droppedMicros); }
    }

    /// <summary>Parameters that <see cref="Context.Ready"/> has updated, with <see cref="Config.Eager"/>.</summary>
    public long Eager {
      get { return eager; }
    }

    /// <summary>Those that waited for the step, because there was no memory for a second set of their arrays.</summary>
    public long EagerWaited {
      get { return eagerWaited; }
    }

    /// <summary>
    /// Of <see cref="Eager"/>, those that the step updated once more, since it was clipped or an option has changed.
    /// </summary>
    public long EagerRedone {
      get { return eagerRedone; }
    }

    /// <summary>The sum of the weights of this window.</summary>
    public double Weight {
      get { return weight; }
    }

    /// <summary>The 2-norm of the reduced gradient before clipping; NaN if nothing has measured it.</summary>
    public double Norm {
      get { return norm; }
    }

    /// <summary>The least factor of a clip by norm; 1 without one.</summary>
    public double ClipFactor {
      get { return clipFactor; }
    }

    /// <summary>The learning rate of group 0 in this step; 0 if it was skipped.</summary>
    public double Lr {
      get { return lr; }
    }

    /// <summary>The loss scale of this window.</summary>
    public double LossScale {
      get { return lossScale; }
    }

    /// <summary>The simple noise scale of the gradient; NaN before the first estimate.</summary>
    public double NoiseScale {
      get { return noiseScale; }
    }

    /// <summary>The variance of the gradient of one sample.</summary>
    public double NoiseTrace {
      get { return noiseTrace; }
    }

    /// <summary>The squared norm of the gradient of the whole data.</summary>
    public double NoiseSignal {
      get { return noiseSignal; }
    }
  }

  /// <summary>The state of a window.</summary>
  [StructLayout(LayoutKind.Sequential)]
  public struct Window {
    // In the order in which the raw layer writes them.
    internal const int Integers = 6;
    internal const int Reals = 1;
    private readonly long state, microBatches, openMicro, accumSteps, windows, steps;
    private readonly double weight;

    /// <summary>Whether there is room for a micro-batch.</summary>
    public WindowState State {
      get { return (WindowState)state; }
    }

    /// <summary>Micro-batches in this window, the open one included.</summary>
    public long MicroBatches {
      get { return microBatches; }
    }

    /// <summary>The index of the open micro-batch; -1: none is open.</summary>
    public long OpenMicro {
      get { return openMicro; }
    }

    /// <summary>K of this window; 0: any number.</summary>
    public long AccumSteps {
      get { return accumSteps; }
    }

    /// <summary>Steps that the context has ended.</summary>
    public long Windows {
      get { return windows; }
    }

    /// <summary>Applied steps.</summary>
    public long Steps {
      get { return steps; }
    }

    /// <summary>The sum of the weights so far.</summary>
    public double Weight {
      get { return weight; }
    }
  }

  /// <summary>Bytes that the library owns for a context, by purpose.</summary>
  public struct MemoryUse {
    internal MemoryUse(ga_memory native) {
      Accumulators = native.accumulators;
      OptimizerState = native.optimizer_state;
      Workspace = native.workspace;
      Total = native.total;
      Masters = native.masters;
      Averages = native.averages;
      Rows = native.rows;
      BatchNorm = native.batch_norm;
      Resident = native.resident;
      Eager = native.eager;
    }

    /// <summary>Accumulators.</summary>
    public long Accumulators { get; }

    /// <summary>State of optimizers.</summary>
    public long OptimizerState { get; }

    /// <summary>Partial norms, tables and scratch memory.</summary>
    public long Workspace { get; }

    /// <summary>All of it.</summary>
    public long Total { get; }

    /// <summary>Master weights.</summary>
    public long Masters { get; }

    /// <summary>Moving averages.</summary>
    public long Averages { get; }

    /// <summary>What gradients by row need.</summary>
    public long Rows { get; }

    /// <summary>Statistics of batch normalisation.</summary>
    public long BatchNorm { get; }

    /// <summary>The part of the total that is written so far.</summary>
    public long Resident { get; }

    /// <summary>A second set of what updates write, with <see cref="Config.Eager"/>.</summary>
    public long Eager { get; }
  }

  /// <summary>What the library was built with.</summary>
  public sealed class Build {
    internal Build(ga_build native) {
      Version = native.version;
      OneDnn = native.onednn;
      CudaRuntime = native.cuda_runtime;
      CudaDriver = native.cuda_driver;
      OpenMp = native.openmp;
      Compiler = native.compiler;
      CpuLoops = native.cpu_loops;
    }

    /// <summary>10000 * major + 100 * minor + patch.</summary>
    public int Version { get; }

    /// <summary>The version of oneDNN; 0: it could not be loaded.</summary>
    public int OneDnn { get; }

    /// <summary>The version of the CUDA run time; 0: none.</summary>
    public int CudaRuntime { get; }

    /// <summary>The newest CUDA that the driver runs; 0: no driver.</summary>
    public int CudaDriver { get; }

    /// <summary>The date of OpenMP's specification; 0: built without.</summary>
    public int OpenMp { get; }

    /// <summary>The compiler.</summary>
    public string Compiler { get; }

    /// <summary>The names of the CPU kernels, separated by spaces.</summary>
    public string CpuLoops { get; }
  }

  /// <summary>An array that the library keeps for a parameter.</summary>
  public struct StateInfo {
    internal StateInfo(ga_state_info native) {
      Name = native.name;
      DType = (DType)native.dtype;
      Count = native.count;
    }

    /// <summary>Its name, such as exp_avg.</summary>
    public string Name { get; }

    /// <summary>The type of its elements.</summary>
    public DType DType { get; }

    /// <summary>How many elements there are.</summary>
    public long Count { get; }
  }

  /// <summary>What the library knows of a batch-normalisation layer.</summary>
  public sealed class BatchNormInfo {
    internal BatchNormInfo(ga_bn_info native) {
      Name = native.name;
      Channels = native.channels;
      GammaId = native.gamma;
      BetaId = native.beta;
      Mode = (BatchNormMode)native.mode;
      Layout = (BatchNormLayout)native.layout;
      DType = (DType)native.dtype;
      Biased = native.biased != 0;
      Frozen = native.frozen != 0;
      Momentum = native.momentum;
      Eps = native.eps;
    }

    /// <summary>Its name.</summary>
    public string Name { get; }

    /// <summary>Its channels.</summary>
    public long Channels { get; }

    /// <summary>The id of the parameter of its scale; -1: none.</summary>
    public int GammaId { get; }

    /// <summary>The id of the parameter of its shift; -1: none.</summary>
    public int BetaId { get; }

    /// <summary>Whose statistics it normalises by.</summary>
    public BatchNormMode Mode { get; }

    /// <summary>The order of the axes of its input.</summary>
    public BatchNormLayout Layout { get; }

    /// <summary>The type of the elements of its input.</summary>
    public DType DType { get; }

    /// <summary>Whether the running variance averages biased variances.</summary>
    public bool Biased { get; }

    /// <summary>Whether it is frozen.</summary>
    public bool Frozen { get; }

    /// <summary>How far the running statistics move to those of a window.</summary>
    public double Momentum { get; }

    /// <summary>What is added to the variance.</summary>
    public double Eps { get; }
  }

  /// <summary>What the library knows of a parameter.</summary>
  public sealed class ParamInfo {
    internal ParamInfo(ga_param_info native) {
      Name = native.name;
      GroupId = native.group;
      DType = (DType)native.dtype;
      GradientDType = (DType)native.gradient_dtype;
      AccumulatorDType = (DType)native.accumulator_dtype;
      Address = native.data;
      Frozen = native.frozen != 0;
      Count = native.count;
      Offset = native.offset;
      LrScale = native.lr_scale;
      WeightDecayScale = native.weight_decay_scale;
      Slot = (int)native.slot;
      shape = new long[native.rank];
      for (int axis = 0; axis < shape.Length; ++axis) shape[axis] = native.dimension(axis);
    }

    /// <summary>Its name.</summary>
    public string Name { get; }

    /// <summary>The id of its group.</summary>
    public int GroupId { get; }

    /// <summary>The type of its elements.</summary>
    public DType DType { get; }

    /// <summary>The type of its gradients.</summary>
    public DType GradientDType { get; }

    /// <summary>The type of its accumulator.</summary>
    public DType AccumulatorDType { get; }

    /// <summary>The address of its memory.</summary>
    public IntPtr Address { get; }

    /// <summary>Whether it is frozen.</summary>
    public bool Frozen { get; }

    /// <summary>How many elements it has.</summary>
    public long Count { get; }

    /// <summary>Elements from the start of its block; 0 without one.</summary>
    public long Offset { get; }

    /// <summary>What the learning rate of its group is multiplied by.</summary>
    public double LrScale { get; }

    /// <summary>What the weight decay of its group is multiplied by.</summary>
    public double WeightDecayScale { get; }

    private readonly long[] shape;

    /// <summary>Its dimensions.</summary>
    public long[] Shape {
      get { return (long[])shape.Clone(); }
    }

    /// <summary>Its place in a list of gradients: see <see cref="Context.Accumulate(Tensor[], double, double, bool)"/>.</summary>
    public int Slot { get; }

    // Elements of a row, which is what dimension 0 counts.
    internal long RowLength {
      get {
        long length = 1;
        for (int axis = 1; axis < shape.Length; ++axis) length *= shape[axis];
        return length;
      }
    }

    internal long RowCount {
      get { return shape.Length == 0 ? 1 : shape[0]; }
    }
  }
}
