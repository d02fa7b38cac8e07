// SPDX-License-Identifier: Apache-2.0
using System;
using System.Runtime.InteropServices;

namespace GradAccum {
  /// <summary>
  /// Groups, parameters and a window of micro-batches. One thread at a time uses a context; a call while
  /// another one runs is refused, with <see cref="Config.Eager"/> too. Different contexts are independent.
  /// </summary>
  /// <example>
  /// <code>
  /// using (var context = new Context()) {
  ///   Group group = context.AddGroup(new Optimizer(OptimizerKind.AdamW) { Lr = 3e-4 });
  ///   context.AddParam(group, "fc1.weight", w, 512, 784);
  ///   context.AddParam(group, "fc1.bias", b, 512);
  ///   foreach (window) {
  ///     foreach (micro-batch of the window) {
  ///       Backward();
  ///       context.Accumulate(new Tensor[] { dw, db }, samplesInThisMicroBatch);
  ///     }
  ///     context.Step();
  ///   }
  /// }
  /// </code>
  /// </example>
  public sealed partial class Context : IDisposable {
    private readonly Guard guard = new Guard();
    private readonly ContextHandle handle;
    private readonly bool onDevice;

    private SlotTable slots;  // null: to be asked for
    private IntPtr[] addresses = new IntPtr[0];
    private Pin[] pins = new Pin[0];

    // What has been handed out for as long as the window does not move on.
    private long generation;
    private MicroBatch openMicro;

    /// <summary>A context with the defaults of the library.</summary>
    public Context() : this(null) {}

    /// <summary>A context.</summary>
    /// <param name="config">How it works, which is copied; null: the defaults.</param>
    public Context(Config config) {
      if (config == null) config = new Config();
      handle = Natives.First(() => Create(config));
      handle.Kept.Live = config.GradientLife != GradientLife.Consumed;
      onDevice = config.Device != Device.Cpu;
    }

    private ContextHandle Create(Config config) {
      IntPtr created;
      lock (config) {  // contexts in two threads may share it
        if (config.Log == null && config.OnParamDone == null) {
          Raw.ga_context_create(config.Native, out created);
          return new ContextHandle(created, default(GCHandle));
        }
        GCHandle listener = GCHandle.Alloc(new Listener(guard, this, config));
        ContextHandle made = null;
        if (config.Log != null) {
          config.Native.log = Callbacks.Log;
          config.Native.log_user = GCHandle.ToIntPtr(listener);
        }
        if (config.OnParamDone != null) {
          guard.ExpectDone();
          config.Native.on_param_done = Callbacks.ParamDone;
          config.Native.on_param_done_user = GCHandle.ToIntPtr(listener);
        }
        guard.Enter();
        try {
          Raw.ga_context_create(config.Native, out created);
          made = new ContextHandle(created, listener);
          if (config.OnParamDone != null && Type.GetType("Mono.Runtime") != null) made.EndWithDomain(guard);
        } finally {
          config.Native.log = IntPtr.Zero;
          config.Native.log_user = IntPtr.Zero;
          config.Native.on_param_done = IntPtr.Zero;
          config.Native.on_param_done_user = IntPtr.Zero;
          if (made == null) listener.Free();
          guard.Exit();
        }
        return made;
      }
    }

    /// <summary>
    /// Frees what the context owns. If another thread is in a call on the context, waits for its end.
    /// Further calls of Dispose do nothing, and other calls throw ObjectDisposedException.
    /// </summary>
    public void Dispose() {
      if (guard.Close()) handle.Dispose();
    }

    internal Call Begin() {
      return new Call(guard, handle);
    }

    // ---- Groups -------------------------------------------------------------------------------------

    /// <summary>Adds a group: parameters that share an optimizer. Between windows.</summary>
    /// <param name="optimizer">The optimizer, which is copied.</param>
    /// <returns>The group.</returns>
    public Group AddGroup(Optimizer optimizer) {
      if (optimizer == null) throw new ArgumentNullException("optimizer");
      using (Call call = Begin()) {
        int group;
        Raw.ga_group_add(call.Context, optimizer.Native, out group);
        return new Group(this, group);
      }
    }

    /// <summary>The groups, in the order in which they were added.</summary>
    public Group[] Groups {
      get {
        using (Call call = Begin()) {
          int count;
          Raw.ga_group_count(call.Context, out count);
          Group[] groups = new Group[count];
          for (int i = 0; i < count; ++i) groups[i] = new Group(this, i);
          return groups;
        }
      }
    }

    // ---- Parameters ---------------------------------------------------------------------------------

    /// <summary>
    /// Adds a parameter, which <see cref="Step"/> updates in place. Between windows. An array stays pinned
    /// until the parameter is bound to other memory or removed, or the context is disposed of.
    /// </summary>
    /// <param name="group">Its group.</param>
    /// <param name="name">Its name, which no other parameter of the context has.</param>
    /// <param name="data">Its memory.</param>
    /// <param name="shape">Its dimensions; none for a scalar.</param>
    /// <returns>The parameter.</returns>
    public Param AddParam(Group group, string name, Tensor data, params long[] shape) {
      return AddParam(group, name, data, null, shape);
    }

    /// <summary>Adds a parameter with options. Otherwise as without.</summary>
    /// <param name="group">Its group.</param>
    /// <param name="name">Its name, which no other parameter of the context has.</param>
    /// <param name="data">Its memory.</param>
    /// <param name="options">Its options; null: the defaults.</param>
    /// <param name="shape">Its dimensions; none for a scalar.</param>
    /// <returns>The parameter.</returns>
    public Param AddParam(Group group, string name, Tensor data, ParamOptions options, params long[] shape) {
      if (name == null) throw new ArgumentNullException("name");
      if (shape == null) throw new ArgumentNullException("shape");
      RequirePlace("parameter \"" + name + "\"", data);
      Lengths.Require("parameter \"" + name + "\": its memory", data, Lengths.Product("parameter \"" + name + "\"", shape));
      using (Pin pin = new Pin(data))
      using (Call call = Begin()) {
        int param;
        Raw.ga_param_add(call.Context, Id(group), name, pin.Address, (int)data.DType, shape,
                         options == null ? null : options.Native, out param);
        slots = null;
        handle.Kept.SetParameter(param, pin);
        return new Param(this, param);
      }
    }

    /// <summary>
    /// Adds the parameters in one block of memory: all of them or none. In a list of gradients the block has
    /// one place, for a block of gradients with the same offsets.
    /// </summary>
    /// <param name="data">The block.</param>
    /// <param name="entries">The parameters.</param>
    /// <param name="options">Their options, unless an entry has its own; null: the defaults.</param>
    /// <returns>The parameters.</returns>
    public Param[] AddFlat(Tensor data, FlatEntry[] entries, ParamOptions options = null) {
      if (entries == null) throw new ArgumentNullException("entries");
      RequirePlace("a block of parameters", data);
      IntPtr[] natives = new IntPtr[entries.Length];
      for (int i = 0; i < entries.Length; ++i) {
        if (entries[i] == null) throw new ArgumentNullException("entries[" + i + "]");
        string name = "parameter \"" + entries[i].Native.name + "\"";
        Id(entries[i].Group);
        long count = Lengths.Product(name, entries[i].Shape);
        long offset = entries[i].Native.offset;
        if (offset < 0) throw GradAccumException.Invalid(name + ": its offset is " + offset);
        Lengths.Require(name + ": the block", data, Lengths.Sum(name, offset, count));
        natives[i] = ga_flat_entry.getCPtr(entries[i].Native).Handle;
      }
      using (Pin pin = new Pin(data))
      using (Call call = Begin()) {
        int first;
        Raw.ga_params_add_flat(call.Context, pin.Address, (int)data.DType, natives,
                               options == null ? null : options.Native, out first);
        GC.KeepAlive(entries);
        slots = null;
        Param[] added = new Param[entries.Length];
        for (int i = 0; i < added.Length; ++i) {
          handle.Kept.SetParameter(first + i, pin);
          added[i] = new Param(this, first + i);
        }
        return added;
      }
    }

    /// <summary>The parameter of a name.</summary>
    /// <param name="name">The name.</param>
    /// <returns>The parameter.</returns>
    public Param FindParam(string name) {
      if (name == null) throw new ArgumentNullException("name");
      using (Call call = Begin()) {
        int param;
        Raw.ga_param_find(call.Context, name, out param);
        return new Param(this, param);
      }
    }

    // ---- Clipping, loss scale, EMA ------------------------------------------------------------------

    /// <summary>What the program multiplies its loss by until the next step.</summary>
    public double LossScale {
      get {
        IntPtr device;
        return ReadLossScale(out device);
      }
    }

    /// <summary>The address of the loss scale, a float on the device; 0 for a context on the CPU.</summary>
    public IntPtr DeviceLossScale {
      get {
        IntPtr device;
        ReadLossScale(out device);
        return device;
      }
    }

    private double ReadLossScale(out IntPtr device) {
      double scale;
      using (Call call = Begin()) Raw.ga_loss_scale(call.Context, out scale, out device);
      return scale;
    }

    /// <summary>
    /// Makes the context one of the communicator's ranks. Every rank calls it, between windows, with the same
    /// groups, parameters and options; the first difference is named in an exception. From then on every rank
    /// calls <see cref="Step"/>, <see cref="Discard"/> and what saves and loads in the same order; with
    /// <see cref="Shard.Optimizer"/> also what reads and writes state and moving averages. docs/devices.md has the
    /// rest.
    /// </summary>
    /// <param name="communicator">The communicator; null: the context is alone again.</param>
    /// <param name="options">May be null.</param>
    public void SetCommunicator(Communicator communicator, CommunicatorOptions options = null) {
      using (Call call = Begin()) {
        IntPtr context = call.Context;
        ga_comm_options native = options == null ? null : options.Native;
        if (communicator == null) {
          Raw.ga_context_set_comm(context, IntPtr.Zero, native);
        } else {
          communicator.Use(comm => Raw.ga_context_set_comm(context, comm, native));
        }
      }
    }

    /// <summary>
    /// Exchanges parameters and moving averages, or takes that back. Between windows; with
    /// <see cref="Shard.Optimizer"/>, on every rank.
    /// </summary>
    /// <param name="on">true: exchanges; false: takes it back, to the last bit.</param>
    public void SwapEma(bool on) {
      using (Call call = Begin()) {
        ++generation;
        Raw.ga_ema_swap(call.Context, on ? 1 : 0);
      }
    }

    /// <summary>
    /// Exchanges parameters and moving averages for a scope, whose ends are both on every rank with
    /// <see cref="Shard.Optimizer"/>.
    /// </summary>
    /// <returns>What takes that back when it is disposed of.</returns>
    public EmaScope SwapEma() {
      SwapEma(true);
      return new EmaScope(this);
    }

    // ---- Batch normalisation ------------------------------------------------------------------------

    /// <summary>Adds a batch-normalisation layer. Between windows.</summary>
    /// <param name="name">Its name, which no other layer has.</param>
    /// <param name="channels">Its channels.</param>
    /// <param name="gamma">The parameter of its scale; null: none, as with 1.</param>
    /// <param name="beta">The parameter of its shift; null: none, as with 0.</param>
    /// <param name="options">Its options, which are copied; null: those of PyTorch.</param>
    /// <returns>The layer.</returns>
    public BatchNorm AddBatchNorm(string name, long channels, Param gamma, Param beta, BatchNormOptions options = null) {
      if (name == null) throw new ArgumentNullException("name");
      if (options == null) options = new BatchNormOptions();
      using (Call call = Begin()) {
        int layer;
        Raw.ga_bn_add(call.Context, name, channels, gamma == null ? -1 : Id(gamma), beta == null ? -1 : Id(beta),
                      options.Native, out layer);
        return new BatchNorm(this, call.Context, layer);
      }
    }

    /// <summary>The batch-normalisation layer of a name.</summary>
    /// <param name="name">The name.</param>
    /// <returns>The layer.</returns>
    public BatchNorm FindBatchNorm(string name) {
      if (name == null) throw new ArgumentNullException("name");
      using (Call call = Begin()) {
        int layer;
        Raw.ga_bn_find(call.Context, name, out layer);
        return new BatchNorm(this, call.Context, layer);
      }
    }

    // ---- What the other classes need ----------------------------------------------------------------

    internal KeptMemory Kept {
      get { return handle.Kept; }
    }

    internal long Generation {
      get { return generation; }
    }

    internal MicroBatch OpenMicro {
      get { return openMicro; }
    }

    internal void MovedOn() {
      ++generation;
    }

    internal void MicroClosed() {
      openMicro = null;
    }

    internal bool IsClosed {
      get { return guard.IsClosed; }
    }

    internal bool RunCallback(Action body) {
      return guard.Callback(body);
    }

    internal void Removed(int param) {
      ++generation;
      slots = null;
      handle.Kept.RemoveParameter(param);
    }

    internal ParamInfo Describe(IntPtr context, int param) {
      using (ga_param_info native = new ga_param_info()) {
        Raw.ga_param_describe(context, param, native);
        return new ParamInfo(native);
      }
    }

    internal int Id(Group group) {
      if (group == null) throw new ArgumentNullException("group");
      if (group.Context != this) throw GradAccumException.Invalid("the group belongs to another context");
      return group.Id;
    }

    internal int Id(Param param) {
      if (param == null) throw new ArgumentNullException("param");
      if (param.Context != this) throw GradAccumException.Invalid("the parameter belongs to another context");
      return param.Id;
    }

    internal int Id(BatchNorm layer) {
      if (layer == null) throw new ArgumentNullException("layer");
      if (layer.Context != this) throw GradAccumException.Invalid("the layer belongs to another context");
      return layer.Id;
    }

    /// <summary>Arrays are in the memory of the host.</summary>
    internal void RequirePlace(string what, Tensor tensor) {
      if (tensor.Owner != null) RequireHost();
      if (tensor.IsNone) throw new ArgumentNullException(what);
    }

    internal void RequireHost() {
      if (onDevice) {
        throw GradAccumException.Invalid(
            "the context is on a device, whose memory is given by address: Tensor(IntPtr, long, DType)");
      }
    }

    internal static void RefuseSpan(string method, string why) {
      throw GradAccumException.Invalid(
          "a span stays in place only for the call, and " + why + ": use " + method +
          " with a Tensor, which is an array, a PinnedArray or an address with a length");
    }

    internal SlotTable Slots(IntPtr context) {
      if (slots != null) return slots;
      UIntPtr count;
      Raw.ga_slot_count(context, out count);
      int paramCount;
      Raw.ga_param_count(context, out paramCount);
      slots = new SlotTable(this, context, (int)count.ToUInt64(), paramCount);
      addresses = new IntPtr[slots.Length];
      return slots;
    }
  }

  /// <summary>While it exists, parameters and moving averages are exchanged.</summary>
  public sealed class EmaScope : IDisposable {
    private Context context;

    internal EmaScope(Context context) {
      this.context = context;
    }

    /// <summary>Takes the exchange back.</summary>
    public void Dispose() {
      Context exchanged = context;
      context = null;
      if (exchanged != null && !exchanged.IsClosed) exchanged.SwapEma(false);
    }
  }
}
