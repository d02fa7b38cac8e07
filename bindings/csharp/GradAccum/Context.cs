// SPDX-License-Identifier: Apache-2.0
using System;
using System.Collections.Generic;
using System.IO;
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
      handle = Natives.First(() => Create(config));
      if (config == null) return;
      handle.Kept.Live = config.GradientLife == GradientLife.Live;
      onDevice = config.Device != Device.Cpu;
    }

    private ContextHandle Create(Config config) {
      IntPtr created;
      if (config == null) {
        Raw.ga_context_create(null, out created);
        return new ContextHandle(created, default(GCHandle));
      }
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
      Pin pin = new Pin(data);
      try {
        using (Call call = Begin()) {
          int param;
          Raw.ga_param_add(call.Context, Id(group), name, pin.Address, (int)data.DType, shape,
                           options == null ? null : options.Native, out param);
          slots = null;
          handle.Kept.SetParameter(param, pin);
          pin = null;
          return new Param(this, param);
        }
      } finally {
        if (pin != null) pin.Release();
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
      Pin pin = new Pin(data);
      try {
        using (Call call = Begin()) {
          int first;
          Raw.ga_params_add_flat(call.Context, pin.Address, (int)data.DType, natives,
                                 options == null ? null : options.Native, out first);
          slots = null;
          Param[] added = new Param[entries.Length];
          for (int i = 0; i < added.Length; ++i) {
            pin.Share();
            handle.Kept.SetParameter(first + i, pin);
            added[i] = new Param(this, first + i);
          }
          return added;
        }
      } finally {
        pin.Release();
        GC.KeepAlive(entries);
      }
    }

    /// <summary>How many parameters were added, removed ones included.</summary>
    public int ParamCount {
      get {
        using (Call call = Begin()) {
          int count;
          Raw.ga_param_count(call.Context, out count);
          return count;
        }
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

    /// <summary>How many places a list of gradients has.</summary>
    public int SlotCount {
      get {
        using (Call call = Begin()) {
          UIntPtr count;
          Raw.ga_slot_count(call.Context, out count);
          return (int)count.ToUInt64();
        }
      }
    }

    /// <summary>Allocates the library's arrays, which the first contribution would do otherwise.</summary>
    public void Prepare() {
      using (Call call = Begin()) Raw.ga_prepare(call.Context);
    }

    // ---- Windows ------------------------------------------------------------------------------------

    /// <summary>Sets K of the windows to come. Between windows.</summary>
    /// <param name="accumSteps">K; 0: any number.</param>
    public void SetAccumSteps(long accumSteps) {
      using (Call call = Begin()) Raw.ga_context_set_accum_steps(call.Context, accumSteps);
    }

    /// <summary>
    /// Makes K a function of applied steps: from step fromSteps[i] on, it is accumSteps[i]. Empty arrays
    /// remove the schedule. Between windows.
    /// </summary>
    /// <param name="fromSteps">Applied steps, ascending, the first 0.</param>
    /// <param name="accumSteps">As many values of K; 0: any number.</param>
    public void SetAccumSchedule(long[] fromSteps, long[] accumSteps) {
      if (fromSteps == null) throw new ArgumentNullException("fromSteps");
      if (accumSteps == null) throw new ArgumentNullException("accumSteps");
      if (fromSteps.Length != accumSteps.Length) {
        throw GradAccumException.Invalid("there were " + fromSteps.Length + " from_steps and " + accumSteps.Length +
                                         " accum_steps");
      }
      using (Call call = Begin()) {
        Raw.ga_context_set_accum_schedule(call.Context, fromSteps, accumSteps, (ulong)fromSteps.Length);
      }
    }

    /// <summary>Sets the number of applied steps, for a run that goes on from elsewhere. Between windows.</summary>
    /// <param name="steps">The number.</param>
    public void SetSteps(long steps) {
      using (Call call = Begin()) Raw.ga_context_set_steps(call.Context, steps);
    }

    /// <summary>The state of the window.</summary>
    public unsafe Window Window {
      get {
        Window window;
        long* fields = (long*)&window;
        using (Call call = Begin()) {
          Raw.ga_window_fields(call.Context, (IntPtr)fields, (IntPtr)(fields + Window.Integers));
        }
        return window;
      }
    }

    /// <summary>
    /// Tells that nothing more comes to these parameters in this window: contributions to them are refused until
    /// it has ended. With <see cref="Config.Eager"/> their update begins as soon as the last micro-batch has begun;
    /// <see cref="Step"/> makes those that are left, with the same bits. Parameters that are updated in place
    /// (<see cref="Nonfinite.Ignore"/>, and no <see cref="ClipScope.Global"/>) leave no way but <see cref="Step"/>: to
    /// discard the window, to set an option and to read or save state are refused.
    /// With <see cref="CommunicatorOptions.Overlap"/> their gradients are exchanged by a thread of the library, as
    /// soon as the last micro-batch has begun, while the program goes on; <see cref="Step"/> exchanges what is left,
    /// with the same bits. Ranks need not call it alike.
    /// </summary>
    /// <param name="parameters">Any number of the context's parameters.</param>
    public void Ready(params Param[] parameters) {
      if (parameters == null) throw new ArgumentNullException("parameters");
      IntPtr[] ids = new IntPtr[parameters.Length];
      for (int i = 0; i < ids.Length; ++i) {
        if (parameters[i] == null) throw new ArgumentNullException("parameters[" + i + "]");
        ids[i] = (IntPtr)Id(parameters[i]);
      }
      using (Call call = Begin()) Raw.ga_params_ready(call.Context, ids);
    }

    /// <summary>
    /// Ends the window: averages, checks and clips its gradient, and updates parameters and state in place.
    /// An empty window is legal and skipped.
    /// </summary>
    /// <returns>What the step has done.</returns>
    public unsafe StepResult Step() {
      StepResult result;
      long* fields = (long*)&result;
      using (Call call = Begin()) {
        ++generation;
        Raw.ga_step_fields(call.Context, (IntPtr)fields, (IntPtr)(fields + StepResult.Integers));
        handle.Kept.Release(call.Context);
      }
      return result;
    }

    /// <summary>The result of a step. The last 64 are kept.</summary>
    /// <param name="window">Its number in <see cref="StepResult.Windows"/>; 0: the last one.</param>
    /// <param name="wait">Whether to wait for a device; else the outcome may be pending.</param>
    /// <returns>The result.</returns>
    public unsafe StepResult GetStepResult(long window = 0, bool wait = true) {
      StepResult result;
      long* fields = (long*)&result;
      using (Call call = Begin()) {
        Raw.ga_step_result_get_fields(call.Context, window, wait ? 1 : 0, (IntPtr)fields, (IntPtr)(fields + StepResult.Integers));
      }
      return result;
    }

    /// <summary>Drops the window, an open micro-batch included.</summary>
    public void Discard() {
      using (Call call = Begin()) {
        ++generation;
        Raw.ga_discard(call.Context);
        openMicro = null;
        handle.Kept.Release(call.Context);
      }
    }

    // ---- Accumulate ---------------------------------------------------------------------------------

    /// <summary>
    /// Adds a micro-batch to the window. An array is pinned for the call, and under
    /// <see cref="GradientLife.Live"/> for as long as the library reads it.
    /// </summary>
    /// <param name="gradients">
    /// A gradient for each <see cref="AddParam(Group, string, Tensor, long[])"/> and <see cref="AddFlat"/>, in
    /// their order; null or <c>default(Tensor)</c>: none in this micro-batch.
    /// </param>
    /// <param name="weight">Samples, tokens, or 1.</param>
    /// <param name="lossScale">What the loss was multiplied by; 0: as the context has it.</param>
    /// <param name="last">This micro-batch ends the window, which is then full whatever K is.</param>
    public void Accumulate(Tensor[] gradients, double weight = 1, double lossScale = 0, bool last = false) {
      if (gradients == null) throw new ArgumentNullException("gradients");
      using (Call call = Begin()) {
        SlotTable table = Slots(call.Context);
        bool live = handle.Kept.Live;
        IntPtr[] places = addresses.Length == gradients.Length ? addresses : new IntPtr[gradients.Length];
        int pinned = 0;
        try {
          for (int i = 0; i < gradients.Length; ++i) {
            if (i < table.Length) table.Require(i, ref gradients[i]);
            if (gradients[i].Owner == null || (gradients[i].Address != IntPtr.Zero && !live)) {
              places[i] = gradients[i].Address;
              continue;
            }
            if (pins.Length < gradients.Length) Array.Resize(ref pins, gradients.Length);
            RequirePlace("a gradient", gradients[i]);
            pins[i] = new Pin(gradients[i]);
            pinned = i + 1;
            places[i] = pins[i].Address;
          }
          ++generation;
          Raw.ga_accumulate(call.Context, places, weight, lossScale, last ? (uint)Raw.GA_MICRO_LAST : 0);
          handle.Kept.AddedAll(call.Context, gradients.Length, pins, pinned);
        } finally {
          for (int i = 0; i < pinned; ++i) {
            if (pins[i] == null) continue;
            pins[i].Release();
            pins[i] = null;
          }
        }
      }
      GC.KeepAlive(gradients);
    }

    /// <summary>Adds a micro-batch to the window, for a context with one parameter or one block.</summary>
    /// <param name="gradient">The gradient.</param>
    /// <param name="weight">Samples, tokens, or 1.</param>
    /// <param name="lossScale">What the loss was multiplied by; 0: as the context has it.</param>
    /// <param name="last">This micro-batch ends the window, which is then full whatever K is.</param>
    public void Accumulate(Tensor gradient, double weight = 1, double lossScale = 0, bool last = false) {
      using (Call call = Begin()) {
        SlotTable table = Slots(call.Context);
        if (table.Length == 1 && gradient.Address != IntPtr.Zero && !handle.Kept.Live) {
          table.Require(0, ref gradient);
          addresses[0] = gradient.Address;
          ++generation;
          Raw.ga_accumulate(call.Context, addresses, weight, lossScale, last ? (uint)Raw.GA_MICRO_LAST : 0);
          GC.KeepAlive(gradient.Owner);
          return;
        }
      }
      Accumulate(new Tensor[] {gradient}, weight, lossScale, last);
    }

    /// <summary>
    /// Adds a micro-batch to the window, for a context with one parameter or one block. Not under
    /// <see cref="GradientLife.Live"/>: the library would read the span after the call.
    /// </summary>
    /// <typeparam name="T">float or double, or ushort for the two dtypes of 16 bits.</typeparam>
    /// <param name="gradient">The gradient.</param>
    /// <param name="weight">Samples, tokens, or 1.</param>
    /// <param name="lossScale">What the loss was multiplied by; 0: as the context has it.</param>
    /// <param name="last">This micro-batch ends the window, which is then full whatever K is.</param>
    public unsafe void Accumulate<T>(ReadOnlySpan<T> gradient, double weight = 1, double lossScale = 0,
                                     bool last = false) where T : struct {
      using (Call call = Begin()) {
        if (handle.Kept.Live) RefuseSpan("Accumulate", "under GradientLife.Live the library reads a gradient after the call");
        SlotTable table = Slots(call.Context);
        if (table.Length != 1) {
          throw GradAccumException.Invalid("a span is the gradient of a context with one parameter or block, and this one has " +
                                           table.Length + "; Accumulate(Tensor[]) takes several");
        }
        fixed (byte* address = &Spans.Address(gradient)) {
          Tensor tensor = Spans.Tensor((IntPtr)address, gradient.Length, DTypes.Of<T>(table.DTypeOf(0)));
          table.Require(0, ref tensor);
          RequireHost();
          addresses[0] = tensor.Address;
          ++generation;
          Raw.ga_accumulate(call.Context, addresses, weight, lossScale, last ? (uint)Raw.GA_MICRO_LAST : 0);
        }
      }
    }

    /// <summary>Adds a micro-batch to the window: see the overload for a ReadOnlySpan.</summary>
    /// <typeparam name="T">float or double, or ushort for the two dtypes of 16 bits.</typeparam>
    /// <param name="gradient">The gradient.</param>
    /// <param name="weight">Samples, tokens, or 1.</param>
    /// <param name="lossScale">What the loss was multiplied by; 0: as the context has it.</param>
    /// <param name="last">This micro-batch ends the window, which is then full whatever K is.</param>
    public void Accumulate<T>(Span<T> gradient, double weight = 1, double lossScale = 0, bool last = false)
        where T : struct {
      Accumulate((ReadOnlySpan<T>)gradient, weight, lossScale, last);
    }

    /// <summary>Opens a micro-batch, for gradients that come one by one.</summary>
    /// <param name="weight">Samples, tokens, or 1.</param>
    /// <param name="index">
    /// -1: the next one; else its number in the window, to open it again with the same weight and loss scale.
    /// </param>
    /// <param name="lossScale">What the loss was multiplied by; 0: as the context has it.</param>
    /// <param name="last">This micro-batch ends the window, which is then full whatever K is.</param>
    /// <returns>The micro-batch, which discards the window if it is disposed of before it was ended.</returns>
    public MicroBatch BeginMicroBatch(double weight = 1, long index = -1, double lossScale = 0, bool last = false) {
      using (Call call = Begin()) {
        ++generation;
        Raw.ga_micro_begin(call.Context, index, weight, lossScale, last ? (uint)Raw.GA_MICRO_LAST : 0);
        handle.Kept.Opened(call.Context);
        return openMicro = new MicroBatch(this);
      }
    }

    // ---- Clipping, loss scale, EMA ------------------------------------------------------------------

    /// <summary>Sets the clipping of all groups without a clip of their own.</summary>
    /// <param name="clip">The clip, which is copied; null: none.</param>
    public void SetClip(Clip clip) {
      using (Call call = Begin()) {
        Raw.ga_context_set_clip(call.Context, clip == null ? null : clip.Native);
      }
    }

    internal void SetClip(int group, Clip clip) {
      using (Call call = Begin()) {
        Raw.ga_group_set_clip(call.Context, group, clip == null ? null : clip.Native);
      }
    }

    /// <summary>
    /// The clip of the context, as it was set or loaded; the defaults without one. Changing it changes a copy.
    /// </summary>
    public Clip Clip {
      get {
        using (Call call = Begin()) {
          ga_clip native = new ga_clip();
          Raw.ga_context_clip(call.Context, native);
          return new Clip(native);
        }
      }
    }

    /// <summary>Gives the context a loss scale that follows the gradients. Between windows.</summary>
    /// <param name="scaler">How it moves; null: the loss scale of the configuration again.</param>
    public void SetLossScaler(LossScaler scaler) {
      using (Call call = Begin()) {
        Raw.ga_context_set_loss_scaler(call.Context, scaler == null ? null : scaler.Native);
      }
    }

    /// <summary>What the program multiplies its loss by until the next step.</summary>
    public double LossScale {
      get {
        using (Call call = Begin()) {
          double scale;
          IntPtr device;
          Raw.ga_loss_scale(call.Context, out scale, out device);
          return scale;
        }
      }
    }

    /// <summary>The address of the loss scale, a float on the device; 0 for a context on the CPU.</summary>
    public IntPtr DeviceLossScale {
      get {
        using (Call call = Begin()) {
          double scale;
          IntPtr device;
          Raw.ga_loss_scale(call.Context, out scale, out device);
          return device;
        }
      }
    }

    /// <summary>Keeps a moving average of every parameter. Legal until the library makes its arrays.</summary>
    /// <param name="ema">The average; null: none.</param>
    public void SetEma(Ema ema) {
      using (Call call = Begin()) Raw.ga_context_set_ema(call.Context, ema == null ? null : ema.Native);
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

    // ---- State on disk ------------------------------------------------------------------------------

    /// <summary>Saves to a file, as a whole or not at all. No micro-batch may be open.</summary>
    /// <param name="path">The file.</param>
    /// <param name="options">What is saved; null: everything.</param>
    public void Save(string path, StateOptions options = null) {
      if (path == null) throw new ArgumentNullException("path");
      using (Call call = Begin())
      using (Transfer transfer = new Transfer(guard, options, null)) {
        Raw.ga_save(call.Context, path, transfer.Options);
      }
    }

    /// <summary>Loads from a file, as a whole or not at all. Between windows.</summary>
    /// <param name="path">The file.</param>
    /// <param name="options">What is loaded; null: everything.</param>
    public void Load(string path, StateOptions options = null) {
      if (path == null) throw new ArgumentNullException("path");
      using (Call call = Begin())
      using (Transfer transfer = new Transfer(guard, options, null)) {
        ++generation;
        Raw.ga_load(call.Context, path, transfer.Options);
      }
    }

    /// <summary>Saves to a stream that can seek, from its position on.</summary>
    /// <param name="stream">The stream, whose position is then behind the state.</param>
    /// <param name="options">What is saved; null: everything.</param>
    public void Save(Stream stream, StateOptions options = null) {
      if (stream == null) throw new ArgumentNullException("stream");
      if (!stream.CanSeek || !stream.CanWrite) {
        throw GradAccumException.Invalid("the stream cannot seek and write: the header of a state is written last");
      }
      using (Call call = Begin())
      using (Transfer transfer = new Transfer(guard, options, stream)) {
        Raw.ga_state_write(call.Context, Callbacks.Write, transfer.User, transfer.Options);
        stream.Position = transfer.End;
      }
    }

    /// <summary>Loads from a stream that can seek, from its position to its end.</summary>
    /// <param name="stream">The stream.</param>
    /// <param name="options">What is loaded; null: everything.</param>
    public void Load(Stream stream, StateOptions options = null) {
      if (stream == null) throw new ArgumentNullException("stream");
      if (!stream.CanSeek || !stream.CanRead) {
        throw GradAccumException.Invalid("the stream cannot seek and read: most of a state is read twice");
      }
      using (Call call = Begin())
      using (Transfer transfer = new Transfer(guard, options, stream)) {
        ++generation;
        long size = stream.Length - stream.Position;
        Raw.ga_state_read(call.Context, Callbacks.Read, transfer.User, size, transfer.Options);
      }
    }

    /// <summary>Saves to memory. A state of 2 GiB or more needs a file or a stream.</summary>
    /// <param name="options">What is saved; null: everything.</param>
    /// <returns>The state.</returns>
    public unsafe byte[] SaveToMemory(StateOptions options = null) {
      using (Call call = Begin())
      using (Transfer transfer = new Transfer(guard, options, null)) {
        UIntPtr size;
        Raw.ga_save_to_memory(call.Context, transfer.Options, IntPtr.Zero, 0, out size);
        if (size.ToUInt64() > int.MaxValue) {
          throw GradAccumException.Invalid("the state takes " + size + " bytes, more than an array has; save it to a file or stream");
        }
        byte[] state = new byte[(int)size.ToUInt64()];
        fixed (byte* address = state) {
          Raw.ga_save_to_memory(call.Context, transfer.Options, (IntPtr)address, (ulong)state.Length, out size);
        }
        return state;
      }
    }

    /// <summary>Loads from memory.</summary>
    /// <param name="state">What <see cref="SaveToMemory"/> has returned.</param>
    /// <param name="options">What is loaded; null: everything.</param>
    public void LoadFromMemory(byte[] state, StateOptions options = null) {
      if (state == null) throw new ArgumentNullException("state");
      LoadFromMemory(new ReadOnlySpan<byte>(state), options);
    }

    /// <summary>Loads from memory.</summary>
    /// <param name="state">The bytes of a state.</param>
    /// <param name="options">What is loaded; null: everything.</param>
    public unsafe void LoadFromMemory(ReadOnlySpan<byte> state, StateOptions options = null) {
      byte none = 0;
      using (Call call = Begin())
      using (Transfer transfer = new Transfer(guard, options, null)) {
        ++generation;
        fixed (byte* address = &MemoryMarshal.GetReference(state)) {
          // An empty array has no address, and C takes none.
          IntPtr data = state.Length > 0 ? (IntPtr)address : (IntPtr)(&none);
          Raw.ga_load_from_memory(call.Context, data, (ulong)state.Length, transfer.Options);
        }
      }
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

    /// <summary>How many batch-normalisation layers were added.</summary>
    public int BatchNormCount {
      get {
        using (Call call = Begin()) {
          int count;
          Raw.ga_bn_count(call.Context, out count);
          return count;
        }
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

    // ---- Queries ------------------------------------------------------------------------------------

    /// <summary>The memory that the library owns for this context.</summary>
    public MemoryUse Memory {
      get {
        using (Call call = Begin())
        using (ga_memory native = new ga_memory()) {
          Raw.ga_context_memory(call.Context, native);
          return new MemoryUse(native);
        }
      }
    }

    /// <summary>Waits until all work of the context is done, on a device.</summary>
    public void Synchronize() {
      using (Call call = Begin()) Raw.ga_synchronize(call.Context);
    }

    /// <summary>
    /// Gives the context another stream in place of that of its Config: later work is queued there, behind all that was
    /// queued before. Waits for nothing; also legal within a window.
    /// </summary>
    /// <param name="stream">
    /// The program's cudaStream_t, of the device and driver context of the stream before it; zero: the legacy default
    /// stream.
    /// </param>
    /// <exception cref="GradAccumException">
    /// InvalidState: one of the two streams is being captured, and the other is no part of that capture. Unsupported:
    /// the context is on the CPU.
    /// </exception>
    public void SetStream(IntPtr stream) {
      using (Call call = Begin()) Raw.ga_context_set_stream(call.Context, stream);
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

  /// <summary>What the library says of the gradients of a context, for checks of their lengths.</summary>
  internal sealed class SlotTable {
    private readonly long[] bytes;    // of a gradient
    private readonly DType[] dtypes;  // Default: there are several in a block, or the parameter is removed
    private readonly int[][] paramsOf;
    private readonly ParamInfo[] infos;  // null: removed

    internal SlotTable(Context owner, IntPtr context, int slotCount, int paramCount) {
      bytes = new long[slotCount];
      dtypes = new DType[slotCount];
      infos = new ParamInfo[paramCount];
      List<int>[] lists = new List<int>[slotCount];
      for (int slot = 0; slot < slotCount; ++slot) lists[slot] = new List<int>();
      for (int param = 0; param < paramCount; ++param) {
        ParamInfo info;
        try {
          info = owner.Describe(context, param);
        } catch (GradAccumException exception) {
          if (exception.Status != Status.InvalidArgument) throw;
          continue;
        }
        infos[param] = info;
        int size = DTypes.Size(info.GradientDType);
        bytes[info.Slot] = Math.Max(bytes[info.Slot], (info.Offset + info.Count) * size);
        dtypes[info.Slot] = lists[info.Slot].Count == 0 || dtypes[info.Slot] == info.GradientDType
                                ? info.GradientDType
                                : DType.Default;
        lists[info.Slot].Add(param);
      }
      paramsOf = new int[slotCount][];
      for (int slot = 0; slot < slotCount; ++slot) paramsOf[slot] = lists[slot].ToArray();
    }

    internal int Length {
      get { return bytes.Length; }
    }

    internal DType DTypeOf(int slot) {
      return dtypes[slot];
    }

    internal ParamInfo Info(int param) {
      return param >= 0 && param < infos.Length ? infos[param] : null;
    }

    internal void Require(int slot, ref Tensor gradient) {
      if (gradient.IsNone || paramsOf[slot].Length == 0) return;
      if (dtypes[slot] != DType.Default && gradient.DType != dtypes[slot]) {
        throw GradAccumException.Invalid(Name(slot) + ": gradient has dtype " + gradient.DType + ", expected " + dtypes[slot]);
      }
      int size = DTypes.Size(gradient.DType);
      long expected = bytes[slot] / size + (bytes[slot] % size == 0 ? 0 : 1);
      if (gradient.Length < expected) {
        throw GradAccumException.Invalid(Name(slot) + ": gradient has " + gradient.Length + " elements, fewer than the " +
                                         expected + " expected");
      }
    }

    private string Name(int slot) {
      string name = "parameter \"" + infos[paramsOf[slot][0]].Name + "\"";
      return paramsOf[slot].Length > 1 ? "the block that begins with " + name : name;
    }
  }

  /// <summary>Checks of lengths, before C sees an address.</summary>
  internal static class Lengths {
    internal static long Product(string what, params long[] factors) {
      long product = 1;
      bool empty = false;
      foreach (long factor in factors) {
        if (factor < 0) throw GradAccumException.Invalid(what + " has a dimension of " + factor);
        empty |= factor == 0;
      }
      if (empty) return 0;
      foreach (long factor in factors) {
        if (product > long.MaxValue / factor) throw GradAccumException.Invalid(what + " has 2^63 elements or more");
        product *= factor;
      }
      return product;
    }

    internal static long Sum(string what, long first, long second) {
      if (first > long.MaxValue - second) throw GradAccumException.Invalid(what + " ends beyond 2^63 elements");
      return first + second;
    }

    internal static void Require(string what, Tensor tensor, long count) {
      if (tensor.Length < count) {
        throw GradAccumException.Invalid(what + " has " + tensor.Length + " elements, fewer than the " + count + " expected");
      }
    }

    internal static void Require(string what, Tensor tensor, long count, DType dtype) {
      if (tensor.IsNone) throw GradAccumException.Invalid(what + " is missing; " + count + " elements were expected");
      if (tensor.DType != dtype) {
        throw GradAccumException.Invalid(what + " has dtype " + tensor.DType + ", expected " + dtype);
      }
      Require(what, tensor, count);
    }
  }

  /// <summary>Addresses of spans.</summary>
  internal static class Spans {
    internal static ref byte Address<T>(ReadOnlySpan<T> span) where T : struct {
      // Of the first element alone: the bytes of all may be more than a span counts.
      return ref MemoryMarshal.GetReference(MemoryMarshal.AsBytes(span.Slice(0, Math.Min(span.Length, 1))));
    }

    // An empty span may have no address.
    internal static Tensor Tensor(IntPtr address, long length, DType dtype) {
      return length == 0 ? default(Tensor) : new Tensor(address, length, dtype);
    }
  }
}
