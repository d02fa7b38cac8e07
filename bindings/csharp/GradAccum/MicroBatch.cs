// SPDX-License-Identifier: Apache-2.0
using System;

namespace GradAccum {
  /// <summary>
  /// An open micro-batch, made by <see cref="Context.BeginMicroBatch"/>. If it is disposed of before
  /// <see cref="End"/>, <see cref="Abort"/> or <see cref="Discard"/>, the window is discarded: half a
  /// micro-batch never reaches a step.
  /// </summary>
  public sealed partial class MicroBatch : IDisposable {
    private readonly Context context;

    internal MicroBatch(Context context) {
      this.context = context;
    }

    /// <summary>Adds a gradient to a parameter.</summary>
    /// <param name="param">The parameter.</param>
    /// <param name="gradient">
    /// The gradient. An array is pinned for the call, and for as long as the library reads it after that.
    /// </param>
    public void Accumulate(Param param, Tensor gradient) {
      int id = context.Id(param);
      using (Call call = Begin()) {
        context.RequirePlace("gradient", gradient);
        Check(call.Context, id, gradient);
        using (Pin pin = new Pin(gradient)) {
          Raw.ga_accumulate_part(call.Context, id, pin.Address);
          context.Kept.Added(call.Context, pin);
        }
      }
    }

    /// <summary>
    /// Adds a gradient to a parameter. Not where the library reads it after the call: under
    /// <see cref="GradientLife.Live"/> and <see cref="GradientLife.Lent"/>, <see cref="Nonfinite.DropMicro"/> and <see cref="ClipWhen.Micro"/>.
    /// </summary>
    /// <typeparam name="T">float or double, or ushort for the two dtypes of 16 bits.</typeparam>
    /// <param name="param">The parameter.</param>
    /// <param name="gradient">The gradient.</param>
    public unsafe void Accumulate<T>(Param param, ReadOnlySpan<T> gradient) where T : struct {
      int id = context.Id(param);
      using (Call call = Begin()) {
        RefuseSpans("Accumulate", context.Kept.Live);
        ParamInfo info = Info(call.Context, id);
        fixed (byte* address = &Spans.Address(gradient)) {
          DType dtype = DTypes.Of<T>(info == null ? DType.F32 : info.GradientDType);
          Check(call.Context, id, Spans.Tensor((IntPtr)address, gradient.Length, dtype));
          Raw.ga_accumulate_part(call.Context, id, (IntPtr)address);
        }
      }
    }

    /// <summary>Adds a gradient to a parameter: see the overload for a ReadOnlySpan.</summary>
    /// <typeparam name="T">float or double, or ushort for the two dtypes of 16 bits.</typeparam>
    /// <param name="param">The parameter.</param>
    /// <param name="gradient">The gradient.</param>
    public void Accumulate<T>(Param param, Span<T> gradient) where T : struct {
      Accumulate(param, (ReadOnlySpan<T>)gradient);
    }

    /// <summary>
    /// Adds a gradient that has only some rows: values[i] to row indices[i]. Needs
    /// <see cref="ParamOptions.Rows"/>.
    /// </summary>
    /// <param name="param">The parameter.</param>
    /// <param name="indices">Rows, as int or long, in any order; repeated ones add up.</param>
    /// <param name="values">As many rows of the parameter.</param>
    public void AccumulateRows(Param param, Tensor indices, Tensor values) {
      int id = context.Id(param);
      using (Call call = Begin()) {
        CheckRows(call.Context, id, indices, values);
        if (indices.Owner != null || values.Owner != null) context.RequireHost();
        using (Pin indexPin = new Pin(indices))
        using (Pin valuePin = new Pin(values)) {
          Raw.ga_accumulate_rows(call.Context, id, indexPin.Address, (int)indices.DType, indices.Length, valuePin.Address);
          context.Kept.Added(call.Context, indexPin, valuePin);
        }
      }
    }

    /// <summary>
    /// Adds a gradient that has only some rows. Not where the library reads it after the call: under
    /// <see cref="Nonfinite.DropMicro"/> and <see cref="ClipWhen.Micro"/>.
    /// </summary>
    /// <typeparam name="TIndex">int or long.</typeparam>
    /// <typeparam name="T">float or double, or ushort for the two dtypes of 16 bits.</typeparam>
    /// <param name="param">The parameter.</param>
    /// <param name="indices">Rows, in any order; repeated ones add up.</param>
    /// <param name="values">As many rows of the parameter.</param>
    public unsafe void AccumulateRows<TIndex, T>(Param param, ReadOnlySpan<TIndex> indices, ReadOnlySpan<T> values)
        where TIndex : struct where T : struct {
      int id = context.Id(param);
      using (Call call = Begin()) {
        RefuseSpans("AccumulateRows", false);
        ParamInfo info = Info(call.Context, id);
        fixed (byte* indexAddress = &Spans.Address(indices))
        fixed (byte* valueAddress = &Spans.Address(values)) {
          DType dtype = DTypes.Of<TIndex>();
          CheckRows(call.Context, id, Spans.Tensor((IntPtr)indexAddress, indices.Length, dtype),
                    Spans.Tensor((IntPtr)valueAddress, values.Length,
                                 DTypes.Of<T>(info == null ? DType.F32 : info.GradientDType)));
          Raw.ga_accumulate_rows(call.Context, id, (IntPtr)indexAddress, (int)dtype, indices.Length, (IntPtr)valueAddress);
        }
      }
    }

    /// <summary>
    /// Adds the matrix product A B to a parameter, taken as a matrix [m = shape[0], n = the rest]. For
    /// y = x W^T, with x [batch, in] and dy [batch, out], the gradient of W is dy^T x:
    /// AccumulateMatmul(w, batch, dy, out, Transpose.Yes, x, in, Transpose.No).
    /// </summary>
    /// <param name="param">The parameter, whose accumulator is f32.</param>
    /// <param name="k">The columns of A and rows of B.</param>
    /// <param name="a">A, [m, k] after transposition; f32, f16 or bf16.</param>
    /// <param name="lda">Elements from row to row of A as stored.</param>
    /// <param name="transposeA">Whether A is transposed.</param>
    /// <param name="b">B, [k, n] after transposition, of the dtype of A.</param>
    /// <param name="ldb">Elements from row to row of B as stored.</param>
    /// <param name="transposeB">Whether B is transposed.</param>
    public void AccumulateMatmul(Param param, long k, Tensor a, long lda, Transpose transposeA, Tensor b, long ldb,
                                 Transpose transposeB) {
      int id = context.Id(param);
      using (Call call = Begin()) {
        CheckMatmul(call.Context, id, k, a, lda, transposeA, b, ldb, transposeB);
        if (a.Owner != null || b.Owner != null) context.RequireHost();
        using (Pin pinA = new Pin(a))
        using (Pin pinB = new Pin(b)) {
          Raw.ga_accumulate_matmul(call.Context, id, k, pinA.Address, lda, (int)transposeA, pinB.Address, ldb,
                                   (int)transposeB, (int)a.DType);
        }
      }
    }

    /// <summary>Adds a product of matrices to a parameter: see the overload for tensors.</summary>
    /// <typeparam name="T">float; matrices of 16 bits come as tensors, which tell their dtype.</typeparam>
    /// <param name="param">The parameter, whose accumulator is f32.</param>
    /// <param name="k">The columns of A and rows of B.</param>
    /// <param name="a">A, [m, k] after transposition.</param>
    /// <param name="lda">Elements from row to row of A as stored.</param>
    /// <param name="transposeA">Whether A is transposed.</param>
    /// <param name="b">B, [k, n] after transposition.</param>
    /// <param name="ldb">Elements from row to row of B as stored.</param>
    /// <param name="transposeB">Whether B is transposed.</param>
    public unsafe void AccumulateMatmul<T>(Param param, long k, ReadOnlySpan<T> a, long lda, Transpose transposeA,
                                           ReadOnlySpan<T> b, long ldb, Transpose transposeB) where T : struct {
      fixed (byte* addressA = &Spans.Address(a))
      fixed (byte* addressB = &Spans.Address(b)) {
        context.RequireHost();
        AccumulateMatmul(param, k, Spans.Tensor((IntPtr)addressA, a.Length, DTypes.Of<T>()), lda, transposeA,
                         Spans.Tensor((IntPtr)addressB, b.Length, DTypes.Of<T>()), ldb, transposeB);
      }
    }

    /// <summary>
    /// Hands out the accumulator of a parameter, for a kernel of the program's own, which writes every
    /// element and then calls <see cref="Accumulator.Release"/>.
    /// </summary>
    /// <param name="param">The parameter.</param>
    /// <returns>The accumulator.</returns>
    public Accumulator Acquire(Param param) {
      int id = context.Id(param);
      using (Call call = Begin())
      using (ga_accumulator native = new ga_accumulator()) {
        Raw.ga_accumulator_acquire(call.Context, id, native);
        return new Accumulator(context, this, id, native);
      }
    }

    internal void Release(int param) {
      using (Call call = Begin()) {
        Raw.ga_accumulator_release(call.Context, param);
      }
    }

    /// <summary>Closes the micro-batch, which then belongs to the window.</summary>
    public void End() {
      using (Call call = Begin()) {
        context.MovedOn();
        Raw.ga_micro_end(call.Context);
        context.MicroClosed();
        context.Kept.Release(call.Context);
      }
    }

    /// <summary>
    /// Drops the micro-batch as if it had never been opened, as long as nothing of it is in an accumulator.
    /// </summary>
    public void Abort() {
      using (Call call = Begin()) {
        context.MovedOn();
        Raw.ga_micro_abort(call.Context);
        context.MicroClosed();
        context.Kept.Release(call.Context);
      }
    }

    /// <summary>Drops the whole window.</summary>
    public void Discard() {
      RequireOpen();
      context.Discard();
    }

    /// <summary>Discards the window, unless the micro-batch was closed.</summary>
    public void Dispose() {
      if (context.OpenMicro != this || context.IsClosed) return;
      try {
        context.Discard();
      } catch (GradAccumException) {
        // The window cannot be stepped, and every further call says why.
      }
    }

    internal bool IsOpen {
      get { return context.OpenMicro == this; }
    }

    private Call Begin() {
      Call call = context.Begin();
      if (IsOpen) return call;
      call.Dispose();
      RequireOpen();
      return call;
    }

    private void RequireOpen() {
      if (!IsOpen) throw GradAccumException.State("the micro-batch has been closed");
    }

    private ParamInfo Info(IntPtr native, int param) {
      return context.Slots(native).Info(param);
    }

    // A parameter that is removed is for the library to refuse, which reads nothing then.
    private void Check(IntPtr native, int param, Tensor gradient) {
      ParamInfo info = Info(native, param);
      if (info == null) return;
      if (gradient.IsNone && info.Count == 0) return;
      Lengths.Require("parameter \"" + info.Name + "\": gradient", gradient, info.Count, info.GradientDType);
    }

    private void CheckRows(IntPtr native, int param, Tensor indices, Tensor values) {
      ParamInfo info = Info(native, param);
      if (info == null || (indices.IsNone && values.IsNone)) return;
      string name = "parameter \"" + info.Name + "\"";
      if (indices.DType != DType.I32 && indices.DType != DType.I64) {
        throw GradAccumException.Invalid(name + ": indices have dtype " + indices.DType + ", expected I32 or I64");
      }
      long count = Lengths.Product(name + ": the rows", indices.Length, info.RowLength);
      if (count > 0) Lengths.Require(name + ": values", values, count, info.GradientDType);
    }

    private void CheckMatmul(IntPtr native, int param, long k, Tensor a, long lda, Transpose transposeA, Tensor b,
                             long ldb, Transpose transposeB) {
      ParamInfo info = Info(native, param);
      if (info == null) return;
      string name = "parameter \"" + info.Name + "\"";
      if (a.DType != b.DType) throw GradAccumException.Invalid(name + ": A has dtype " + a.DType + ", and B " + b.DType);
      bool first = transposeA == Transpose.No;
      bool second = transposeB == Transpose.No;
      CheckMatrix(name + ": A", a, first ? info.RowCount : k, first ? k : info.RowCount, lda);
      CheckMatrix(name + ": B", b, second ? k : info.RowLength, second ? info.RowLength : k, ldb);
    }

    private static void CheckMatrix(string what, Tensor matrix, long rows, long columns, long stride) {
      if (rows < 0 || columns < 0) throw GradAccumException.Invalid(what + " has a dimension that is negative");
      if (rows == 0 || columns == 0) return;
      if (stride < columns) {
        throw GradAccumException.Invalid(what + " has " + stride + " elements from row to row, fewer than its " +
                                         columns + " columns");
      }
      Lengths.Require(what, matrix, Lengths.Sum(what, Lengths.Product(what, rows - 1, stride), columns));
    }

    private void RefuseSpans(string method, bool live) {
      context.RequireHost();
      if (live) Context.RefuseSpan(method, "under GradientLife.Live and GradientLife.Lent the library reads a gradient after the call");
      if (context.Kept.Late) {
        Context.RefuseSpan(method, "under ClipWhen.Micro and Nonfinite.DropMicro the library reads it when the micro-batch ends");
      }
    }
  }
}
