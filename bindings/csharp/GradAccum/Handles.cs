// SPDX-License-Identifier: Apache-2.0
using System;

namespace GradAccum {
  /// <summary>Parameters that share an optimizer.</summary>
  public sealed partial class Group : IEquatable<Group> {
    internal Group(Context context, int id) {
      Context = context;
      Id = id;
    }
  }

  /// <summary>A parameter.</summary>
  public sealed partial class Param : IEquatable<Param> {
    internal Param(Context context, int id) {
      Context = context;
      Id = id;
    }

    /// <summary>Its name.</summary>
    public string Name {
      get { return Info.Name; }
    }

    /// <summary>What the library knows of it.</summary>
    public ParamInfo Info {
      get {
        using (Call call = Context.Begin()) return Context.Describe(call.Context, Id);
      }
    }

    /// <summary>
    /// Tells that the parameter has moved to other memory, which holds its values now. Between windows. An
    /// array is pinned as by <see cref="Context.AddParam(Group, string, Tensor, long[])"/>, and the one before
    /// is unpinned.
    /// </summary>
    /// <param name="data">The memory.</param>
    public void Bind(Tensor data) {
      using (Call call = Context.Begin()) {
        ParamInfo info = Context.Describe(call.Context, Id);
        Context.RequirePlace("parameter \"" + info.Name + "\"", data);
        Lengths.Require("parameter \"" + info.Name + "\": its memory", data, info.Count, info.DType);
        using (Pin pin = new Pin(data)) {
          Raw.ga_param_bind(call.Context, Id, pin.Address);
          Context.Kept.SetParameter(Id, pin);
        }
      }
    }

    /// <summary>
    /// Says where the parameter lies in one that ranks have in parts, with Shard.Parameters. Between windows.
    /// </summary>
    /// <param name="wholeShape">The shape of the whole, as many numbers as this part has axes.</param>
    /// <param name="first">Where this part begins, on each axis.</param>
    /// <param name="copies">How many ranks have the same part; at least 1.</param>
    public void SetPart(long[] wholeShape, long[] first, int copies = 1) {
      if (wholeShape == null) throw new ArgumentNullException("wholeShape");
      if (first == null) throw new ArgumentNullException("first");
      int axes = Info.Shape.Length;
      if (wholeShape.Length != axes || first.Length != axes) {
        throw GradAccumException.Invalid("the parameter has " + axes + " axes, but whole_shape had " +
                                         wholeShape.Length + " numbers and first " + first.Length);
      }
      using (Call call = Context.Begin()) Raw.ga_param_set_part(call.Context, Id, wholeShape, first, copies);
    }

    /// <summary>
    /// Removes the parameter, whose memory the library does not touch any more. Its place in a list of
    /// gradients stays. Between windows.
    /// </summary>
    public void Remove() {
      using (Call call = Context.Begin()) {
        Raw.ga_param_remove(call.Context, Id);
        Context.Removed(Id);
      }
    }

    /// <summary>
    /// The reduced gradient, for a group with <see cref="OptimizerKind.External"/>, after an applied step.
    /// </summary>
    public Gradient Gradient {
      get {
        using (Call call = Context.Begin()) {
          IntPtr data;
          int dtype;
          long count;
          Raw.ga_gradient(call.Context, Id, out data, out dtype, out count);
          return new Gradient(Context, data, (DType)dtype, count);
        }
      }
    }

    /// <summary>
    /// Writes the moving average of the parameter; before the first step, the parameter itself. With
    /// <see cref="Shard.Optimizer"/>, on every rank.
    /// </summary>
    /// <param name="destination">Room for all elements, of any floating-point dtype.</param>
    public void CopyEmaTo(Tensor destination) {
      using (Call call = Context.Begin()) {
        ParamInfo info = Context.Describe(call.Context, Id);
        Context.RequirePlace("the destination", destination);
        Lengths.Require("the destination", destination, info.Count);
        using (Pin to = new Pin(destination)) {
          Raw.ga_ema_copy_to(call.Context, Id, to.Address, (int)destination.DType);
        }
      }
    }

    /// <summary>Writes the moving average of the parameter: see the overload for a tensor.</summary>
    /// <typeparam name="T">float or double.</typeparam>
    /// <param name="destination">Room for all elements.</param>
    public unsafe void CopyEmaTo<T>(Span<T> destination) where T : struct {
      fixed (byte* address = &Spans.Address((ReadOnlySpan<T>)destination)) {
        Context.RequireHost();
        CopyEmaTo(Spans.Tensor((IntPtr)address, destination.Length, DTypes.Of<T>()));
      }
    }

    /// <summary>The arrays that the library keeps for the parameter.</summary>
    public StateInfo[] State {
      get {
        using (Call call = Context.Begin()) return Describe(call.Context);
      }
    }

    /// <summary>
    /// Reads an array that the library keeps, in the memory of the host. Between windows; with
    /// <see cref="Shard.Optimizer"/>, on every rank. State under <see cref="DType.State8Bit"/> is read as codes, by
    /// byte, or as the numbers that these stand for, by float.
    /// </summary>
    /// <typeparam name="T">The type of its elements; ushort for the two dtypes of 16 bits.</typeparam>
    /// <param name="name">Its name, such as exp_avg.</param>
    /// <returns>A copy.</returns>
    public unsafe T[] GetState<T>(string name) where T : struct {
      if (name == null) throw new ArgumentNullException("name");
      using (Call call = Context.Begin()) {
        StateInfo? found = Find(call.Context, name);
        // An unknown name is for the library to refuse, whose message lists what there is.
        T[] values = new T[found.HasValue ? found.Value.Count : 0];
        DType dtype = DTypes.Of<T>(found.HasValue ? found.Value.DType : DType.F16);
        byte none = 0;
        fixed (byte* address = &Spans.Address(new ReadOnlySpan<T>(values))) {
          IntPtr to = values.Length > 0 ? (IntPtr)address : (IntPtr)(&none);
          Raw.ga_state_get(call.Context, Id, name, to, (int)dtype, values.LongLength);
        }
        return values;
      }
    }

    /// <summary>
    /// Writes an array that the library keeps. Between windows; with <see cref="Shard.Optimizer"/>, on every rank.
    /// State under <see cref="DType.State8Bit"/> is written by codes (<see cref="Tensor.U8"/>), with the scales of
    /// their blocks under a name of their own; or by floats, whose scales and nearest codes are written.
    /// </summary>
    /// <param name="name">Its name.</param>
    /// <param name="values">Its elements, of its dtype, in the memory of the host.</param>
    public unsafe void SetState(string name, Tensor values) {
      if (name == null) throw new ArgumentNullException("name");
      byte none = 0;
      using (Call call = Context.Begin())
      using (Pin from = new Pin(values)) {
        IntPtr data = values.Length > 0 ? from.Address : (IntPtr)(&none);
        Raw.ga_state_set(call.Context, Id, name, data, (int)values.DType, values.Length);
      }
    }

    private StateInfo[] Describe(IntPtr context) {
      int count;
      Raw.ga_state_count(context, Id, out count);
      StateInfo[] states = new StateInfo[count];
      using (ga_state_info native = new ga_state_info()) {
        for (int i = 0; i < count; ++i) {
          Raw.ga_state_describe(context, Id, i, native);
          states[i] = new StateInfo(native);
        }
      }
      return states;
    }

    private StateInfo? Find(IntPtr context, string name) {
      foreach (StateInfo state in Describe(context)) {
        if (state.Name == name) return state;
      }
      return null;
    }
  }

  /// <summary>A batch-normalisation layer. Its backward calls are those of <see cref="MicroBatch"/>.</summary>
  public sealed partial class BatchNorm : IEquatable<BatchNorm> {
    private readonly DType dtype;

    internal BatchNorm(Context context, IntPtr native, int id) {
      Context = context;
      Id = id;
      BatchNormInfo info = Describe(native);
      Channels = info.Channels;
      dtype = info.DType;
    }

    /// <summary>Its channels.</summary>
    public long Channels { get; }

    /// <summary>What the library knows of it.</summary>
    public BatchNormInfo Info {
      get {
        using (Call call = Context.Begin()) return Describe(call.Context);
      }
    }

    /// <summary>Takes statistics that the program has computed itself.</summary>
    /// <param name="count">Elements of each channel.</param>
    /// <param name="mean">The mean of each channel, f32 or f64.</param>
    /// <param name="spread">The spread of each channel, of the same dtype.</param>
    /// <param name="kind">What the spread is.</param>
    public void AccumulateStats(long count, Tensor mean, Tensor spread, Spread kind) {
      using (Call call = Context.Begin()) {
        RequireStatistics("mean", mean, mean.DType);
        RequireStatistics("spread", spread, mean.DType);
        using (Pin first = new Pin(mean))
        using (Pin second = new Pin(spread)) {
          Raw.ga_bn_accumulate_stats(call.Context, Id, count, first.Address, second.Address, (int)kind, (int)mean.DType);
        }
      }
    }

    /// <summary>Reads the running statistics, in the memory of the host.</summary>
    /// <param name="mean">Room for the mean of each channel; null: not wanted.</param>
    /// <param name="variance">Room for the variance of each channel; null: not wanted.</param>
    /// <returns>How often the running statistics have moved.</returns>
    public long Running(double[] mean, double[] variance) {
      return Read(Raw.ga_bn_running, mean, variance);
    }

    /// <summary>Sets the running statistics. Between windows.</summary>
    /// <param name="mean">The mean of each channel, f32 or f64.</param>
    /// <param name="variance">The variance of each channel, of the same dtype.</param>
    /// <param name="steps">How often they have moved.</param>
    public void SetRunning(Tensor mean, Tensor variance, long steps) {
      using (Call call = Context.Begin()) {
        RequireStatistics("mean", mean, mean.DType);
        RequireStatistics("variance", variance, mean.DType);
        using (Pin first = new Pin(mean))
        using (Pin second = new Pin(variance)) {
          Raw.ga_bn_running_set(call.Context, Id, first.Address, second.Address, (int)mean.DType, steps);
        }
      }
    }

    /// <summary>Reads the statistics that the layer normalises by now, with the biased variance.</summary>
    /// <param name="mean">Room for the mean of each channel; null: not wanted.</param>
    /// <param name="variance">Room for the variance of each channel; null: not wanted.</param>
    /// <returns>The elements of a channel that they are of.</returns>
    public long Statistics(double[] mean, double[] variance) {
      return Read(Raw.ga_bn_statistics, mean, variance);
    }

    // A function of C that writes a mean and a variance for each channel, and a number.
    private delegate void Reader(IntPtr context, int layer, IntPtr mean, IntPtr variance, int dtype, out long number);

    private long Read(Reader read, double[] mean, double[] variance) {
      using (Call call = Context.Begin()) {
        if (mean != null) RequireStatistics("mean", mean, DType.F64);
        if (variance != null) RequireStatistics("variance", variance, DType.F64);
        using (Pin first = new Pin(mean))
        using (Pin second = new Pin(variance)) {
          long number;
          read(call.Context, Id, first.Address, second.Address, (int)DType.F64, out number);
          return number;
        }
      }
    }

    private BatchNormInfo Describe(IntPtr context) {
      using (ga_bn_info native = new ga_bn_info()) {
        Raw.ga_bn_describe(context, Id, native);
        return new BatchNormInfo(native);
      }
    }

    internal long Count(long samples, long positions) {
      return Lengths.Product("the batch", samples, Channels, positions);
    }

    internal Pin Borrow(string name, Tensor tensor, long count) {
      if (tensor.Owner != null) Context.RequireHost();
      if (count > 0 || !tensor.IsNone) Lengths.Require(name, tensor, count, dtype);
      return new Pin(tensor);
    }

    private void RequireStatistics(string name, Tensor tensor, DType expected) {
      Lengths.Require(name, tensor, Channels, expected);
    }
  }
}
