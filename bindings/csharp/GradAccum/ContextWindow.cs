// SPDX-License-Identifier: Apache-2.0
using System;

namespace GradAccum {
  // The window: its gradients, its length and its step.
  public sealed partial class Context {
    // ---- Windows ------------------------------------------------------------------------------------

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
      StepResult result = default(StepResult);
      result.Prepare();
      using (Call call = Begin()) {
        ++generation;
        Raw.ga_step(call.Context, (IntPtr)(&result));
        handle.Kept.Release(call.Context);
      }
      return result;
    }

    /// <summary>The result of a step. The last 64 are kept.</summary>
    /// <param name="window">Its number in <see cref="StepResult.Windows"/>; 0: the last one.</param>
    /// <param name="wait">Whether to wait for a device; else the outcome may be pending.</param>
    /// <returns>The result.</returns>
    public unsafe StepResult GetStepResult(long window = 0, bool wait = true) {
      StepResult result = default(StepResult);
      result.Prepare();
      using (Call call = Begin()) Raw.ga_step_result_get(call.Context, window, wait ? 1 : 0, (IntPtr)(&result));
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
    /// <see cref="GradientLife.Live"/> and <see cref="GradientLife.Lent"/> for as long as the library reads it.
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
            pins[i].Dispose();
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
    /// <see cref="GradientLife.Live"/> or <see cref="GradientLife.Lent"/>: the library would read the span after the
    /// call.
    /// </summary>
    /// <typeparam name="T">float or double, or ushort for the two dtypes of 16 bits.</typeparam>
    /// <param name="gradient">The gradient.</param>
    /// <param name="weight">Samples, tokens, or 1.</param>
    /// <param name="lossScale">What the loss was multiplied by; 0: as the context has it.</param>
    /// <param name="last">This micro-batch ends the window, which is then full whatever K is.</param>
    public unsafe void Accumulate<T>(ReadOnlySpan<T> gradient, double weight = 1, double lossScale = 0,
                                     bool last = false) where T : struct {
      using (Call call = Begin()) {
        if (handle.Kept.Live) RefuseSpan("Accumulate", "under GradientLife.Live and GradientLife.Lent the library reads a gradient after the call");
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
  }
}
