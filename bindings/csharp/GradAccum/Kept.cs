// SPDX-License-Identifier: Apache-2.0
using System;
using System.Collections.Generic;

namespace GradAccum {
  /// <summary>
  /// What must stay in place longer than a call: the arrays of parameters, and gradients for as long as the library
  /// says that it may read them.
  /// </summary>
  internal sealed class KeptMemory {
    private struct Gradient {
      internal long Number;  // that the library gives it
      internal Pin Pin;
    }

    private readonly Dictionary<int, Pin> parameters = new Dictionary<int, Pin>();
    private readonly Queue<Gradient> gradients = new Queue<Gradient>();  // by number

    private readonly ga_kept_info info = new ga_kept_info();  // what the library has said last
    private long oldest;

    /// <summary>Whether first gradients are read after their call.</summary>
    internal bool Live { get; set; }

    /// <summary>Whether gradients by part are read when their micro-batch ends.</summary>
    internal bool Late { get; private set; }

    /// <summary>The memory of a parameter, in place of that before.</summary>
    internal void SetParameter(int param, Pin pin) {
      pin.Share();
      RemoveParameter(param);
      parameters[param] = pin;
    }

    internal void RemoveParameter(int param) {
      Pin pin;
      if (!parameters.TryGetValue(param, out pin)) return;
      parameters.Remove(param);
      pin.Dispose();
    }

    /// <summary>A micro-batch has been opened.</summary>
    internal void Opened(IntPtr context) {
      Ask(context, 0);
      Late = info.until_micro_end != 0;
    }

    /// <summary>A gradient by part has been added; other: null, or a second array of it.</summary>
    internal void Added(IntPtr context, Pin pin, Pin other = null) {
      if (!Live && !Late) return;
      Ask(context, gradients.Count == 0 ? 0 : gradients.Peek().Number);
      Keep(info.latest, pin);
      if (other != null) Keep(info.latest, other);
      while (gradients.Count > 0 && !IsRead(context, gradients.Peek())) gradients.Dequeue().Pin.Dispose();
    }

    /// <summary>A micro-batch of so many gradients has been added; pins: of the first of them, null: nothing to keep.</summary>
    internal void AddedAll(IntPtr context, int count, Pin[] pins, int pinned) {
      if (!Live) return;
      Ask(context, 0);
      long before = info.latest - count;
      for (int i = 0; i < pinned; ++i) {
        if (pins[i] != null) Keep(before + 1 + i, pins[i]);
      }
      Release(context);
    }

    /// <summary>Lets go of what the library does not read any more.</summary>
    internal void Release(IntPtr context) {
      oldest = 0;
      for (int left = gradients.Count; left > 0; --left) {
        Gradient gradient = gradients.Dequeue();
        if (IsRead(context, gradient)) {
          gradients.Enqueue(gradient);
        } else {
          gradient.Pin.Dispose();
        }
      }
    }

    private void Ask(IntPtr context, long from) {
      Raw.ga_gradients_kept(context, from, info);
      oldest = info.oldest;
    }

    private void Keep(long number, Pin pin) {
      pin.Share();
      gradients.Enqueue(new Gradient {Number = number, Pin = pin});
    }

    // For one gradient after the other.
    private bool IsRead(IntPtr context, Gradient gradient) {
      if (oldest < gradient.Number) Ask(context, gradient.Number);
      return oldest == gradient.Number;
    }

    internal void ReleaseAll() {
      foreach (Gradient gradient in gradients) gradient.Pin.Dispose();
      gradients.Clear();
      foreach (Pin pin in parameters.Values) pin.Dispose();
      parameters.Clear();
      info.Dispose();
    }
  }
}
