// SPDX-License-Identifier: Apache-2.0
using System;
using System.Runtime.InteropServices;

namespace GradAccum {
  /// <summary>Reads elements, which must not be used after it has returned.</summary>
  /// <typeparam name="T">The type of the elements.</typeparam>
  /// <param name="elements">The elements.</param>
  public delegate void SpanReader<T>(ReadOnlySpan<T> elements);

  /// <summary>Writes elements, which must not be used after it has returned.</summary>
  /// <typeparam name="T">The type of the elements.</typeparam>
  /// <param name="elements">The elements.</param>
  public delegate void SpanWriter<T>(Span<T> elements);

  /// <summary>
  /// The reduced, clipped gradient of a parameter whose optimizer is the program's own: see
  /// <see cref="Param.Gradient"/>. It can be read until the next micro-batch, step or discard; after that its
  /// members throw.
  /// </summary>
  public sealed class Gradient {
    private readonly Context context;
    private readonly long generation;
    private readonly IntPtr data;

    internal Gradient(Context context, IntPtr data, DType dtype, long count) {
      this.context = context;
      generation = context.Generation;
      this.data = data;
      DType = dtype;
      Count = count;
    }

    /// <summary>The type of the elements.</summary>
    public DType DType { get; }

    /// <summary>How many elements there are.</summary>
    public long Count { get; }

    /// <summary>
    /// The address of the gradient, on a device in its memory. Nothing warns a program that reads there after
    /// the view is dead.
    /// </summary>
    public IntPtr Address {
      get {
        using (Call call = context.Begin()) {
          RequireAlive();
          return data;
        }
      }
    }

    /// <summary>Reads the gradient in place. No call on the context is legal meanwhile.</summary>
    /// <typeparam name="T">float or double, or ushort for the two dtypes of 16 bits.</typeparam>
    /// <param name="reader">What reads.</param>
    public unsafe void Read<T>(SpanReader<T> reader) where T : struct {
      if (reader == null) throw new ArgumentNullException("reader");
      using (Call call = context.Begin()) {
        RequireAlive();
        context.RequireHost();
        DTypes.RequireSize<T>(DType);
        int count = Views.SpanLength(Count);
        context.RunCallback(() => reader(new ReadOnlySpan<T>(data.ToPointer(), count)));
      }
    }

    /// <summary>Copies the gradient.</summary>
    /// <typeparam name="T">float or double, or ushort for the two dtypes of 16 bits.</typeparam>
    /// <param name="destination">Room for all elements.</param>
    public void CopyTo<T>(T[] destination) where T : struct {
      if (destination == null) throw new ArgumentNullException("destination");
      if (destination.LongLength < Count) {
        throw GradAccumException.Invalid("the array has " + destination.LongLength + " elements, fewer than the " + Count +
                                         " of the gradient");
      }
      Read<T>(elements => elements.CopyTo(destination));
    }

    private void RequireAlive() {
      if (context.Generation != generation) {
        throw GradAccumException.State("the gradient is gone: a micro-batch, a step, a discard or a load came after it");
      }
    }
  }

  /// <summary>
  /// The accumulator of a parameter, where a kernel of the program writes Alpha * gradient + Beta * data: see
  /// <see cref="MicroBatch.Acquire"/>. It can be used until it is released or its micro-batch is closed;
  /// after that its members throw.
  /// </summary>
  public sealed partial class Accumulator {
    private readonly Context context;
    private readonly MicroBatch micro;
    private readonly int param;
    private readonly IntPtr data;
    private bool released;

    internal Accumulator(Context context, MicroBatch micro, int param, ga_accumulator native) : this(native) {
      this.context = context;
      this.micro = micro;
      this.param = param;
      data = native.data;
    }

    /// <summary>Whether nothing is to be written: the weight is 0, or the parameter is frozen.</summary>
    public bool IsEmpty {
      get { return data == IntPtr.Zero; }
    }

    /// <summary>
    /// The address of the accumulator, on a device in its memory; 0 if nothing is to be written. Nothing warns
    /// a program that writes there after the accumulator was released.
    /// </summary>
    public IntPtr Address {
      get {
        using (Call call = context.Begin()) {
          RequireAlive();
          return data;
        }
      }
    }

    /// <summary>Writes the accumulator in place. No call on the context is legal meanwhile.</summary>
    /// <typeparam name="T">float or double, or ushort for the two dtypes of 16 bits.</typeparam>
    /// <param name="writer">What writes. It is not called if nothing is to be written.</param>
    public unsafe void Write<T>(SpanWriter<T> writer) where T : struct {
      if (writer == null) throw new ArgumentNullException("writer");
      using (Call call = context.Begin()) {
        RequireAlive();
        context.RequireHost();
        DTypes.RequireSize<T>(DType);
        if (IsEmpty) return;
        int count = Views.SpanLength(Rows * LeadingDimension);
        context.RunCallback(() => writer(new Span<T>(data.ToPointer(), count)));
      }
    }

    /// <summary>Makes what was written part of the micro-batch.</summary>
    public void Release() {
      if (released) throw GradAccumException.State("the accumulator was released before");
      micro.Release(param);
      released = true;
    }

    private void RequireAlive() {
      if (released || !micro.IsOpen) {
        throw GradAccumException.State("the accumulator is gone: it was released, or its micro-batch was closed");
      }
    }
  }

  internal static class Views {
    internal static int SpanLength(long count) {
      if (count > int.MaxValue) {
        throw GradAccumException.Unsupported("a span has no " + count + " elements; Address gives the memory of more");
      }
      return (int)count;
    }
  }
}
