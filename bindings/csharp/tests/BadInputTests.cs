// SPDX-License-Identifier: Apache-2.0
using System;

namespace GradAccum.Tests {
  /// <summary>Whatever a program passes, there is an exception with a clear sentence, and no crash.</summary>
  public sealed class BadInputTests {
    private static Context WithOne(int length = 4) {
      Context context = new Context();
      context.AddParam(context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1}), "w", new float[length], length);
      return context;
    }

    public void Names() {
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd));
        foreach (string name in new[] {"größe", "\U0001F600.weight", "重み", "a b\tc"}) {
          Expect.Equal(name, context.AddParam(group, name, new float[1], 1).Info.Name);
          Expect.Equal(name, context.FindParam(name).Info.Name);
          GradAccumException twice =
              Expect.Fails(Status.InvalidArgument, () => context.AddParam(group, name, new float[1], 1));
          Expect.True(twice.Message.Contains(name), twice.Message);
        }
        Expect.Fails(Status.InvalidArgument, () => context.AddParam(group, "a\0b", new float[1], 1), "NUL");
        Expect.Fails(Status.InvalidArgument, () => context.FindParam("a\0b"), "NUL");
        Expect.Fails(Status.InvalidArgument, () => context.AddParam(group, "\ud83d", new float[1], 1), "surrogate");
        Expect.Fails(Status.InvalidArgument, () => context.AddParam(group, "", new float[1], 1));
        Expect.Throws<ArgumentNullException>(() => context.AddParam(group, null, new float[1], 1));
        Expect.Throws<ArgumentNullException>(() => context.AddParam(null, "x", new float[1], 1));
        Expect.Throws<ArgumentNullException>(() => context.AddParam(group, "x", default(Tensor), 1));
        Expect.Throws<ArgumentNullException>(() => context.AddParam(group, "x", new float[1], (long[])null));
        Expect.Fails(Status.Io, () => context.Load("/no/such/földer\U0001F600"), "földer\U0001F600");
        Expect.Fails(Status.InvalidArgument, () => context.Save("a\0b"), "NUL");
      }
    }

    public void Shapes() {
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd));
        Expect.Fails(Status.InvalidArgument, () => context.AddParam(group, "x", new float[4], -1), "dimension of -1");
        Expect.Fails(Status.InvalidArgument, () => context.AddParam(group, "x", new float[4], 2, -2), "dimension of -2");
        Expect.Fails(Status.InvalidArgument, () => context.AddParam(group, "x", new float[4], long.MaxValue, 2), "2^63");
        Expect.Fails(Status.InvalidArgument, () => context.AddParam(group, "x", new float[4], 1L << 32, 1L << 32), "2^63");
        Expect.Fails(Status.InvalidArgument, () => context.AddParam(group, "x", new float[4], 1L << 62), "4 elements");
        Expect.Fails(Status.InvalidArgument, () => context.AddParam(group, "x", new float[4], 5), "4 elements", "5 expected");
        Expect.Fails(Status.InvalidArgument, () => context.AddParam(group, "x", new float[4], new long[65]));
        Expect.Fails(Status.InvalidArgument, () => context.AddParam(group, "x", new int[4], 4));
        context.AddParam(group, "scalar", new float[1]);
        context.AddParam(group, "empty", new float[0], 0);
        context.AddParam(group, "huge and empty", new float[0], 1L << 62, 1L << 62, 0);
        context.Accumulate(new Tensor[] {new float[] {1}, new float[0], default(Tensor)});
        context.Step();
      }
    }

    public void Gradients() {
      using (Context context = WithOne()) {
        Expect.Throws<ArgumentNullException>(() => context.Accumulate((Tensor[])null));
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new Tensor[0]));
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new Tensor[] {new float[4], new float[4]}), "2");
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new float[3]), "3 elements", "4 expected");
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new ReadOnlySpan<float>(new float[3])), "3 elements");
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new double[4]), "F64", "F32");
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new Span<double>(new double[4])), "F64");
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new Span<byte>(new byte[16])), "Byte");
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new ArraySegment<float>(new float[6], 3, 3)), "3 elements");
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new float[4], -1));
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new float[4], double.NaN));
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new float[4], 1, double.PositiveInfinity));
        Expect.Equal(0L, context.Window.MicroBatches);
        context.Accumulate(new Tensor[] {(float[])null});
        context.Accumulate(new Tensor[] {default(Tensor)});
        Expect.Equal(2L, context.Window.MicroBatches);
      }
    }

    public unsafe void Addresses() {
      using (Context context = WithOne()) {
        byte[] bytes = new byte[64];
        fixed (byte* start = bytes) {
          IntPtr odd = (IntPtr)(start + 1);
          Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new Tensor(odd, 4, DType.F32)), "\"w\"");
          IntPtr even = (IntPtr)start;
          Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new Tensor(even, 3, DType.F32)), "3 elements");
          Expect.Fails(Status.InvalidArgument, () => new Tensor(even, -1, DType.F32), "-1");
          Expect.Fails(Status.InvalidArgument, () => new Tensor(even, 1, (DType)99), "99");
          Expect.Fails(Status.InvalidArgument, () => new Tensor(IntPtr.Zero, 4, DType.F32), "address 0");
          context.Accumulate(new Tensor(even, 4, DType.F32));
          context.Accumulate(new Tensor(even, long.MaxValue, DType.F32));
          context.Discard();
        }
        float[] w = new float[4];
        fixed (float* start = w) {
          IntPtr between = (IntPtr)((byte*)start + 2);
          Expect.Fails(Status.InvalidArgument,
                       () => context.AddParam(context.Groups[0], "odd", new Tensor(between, 2, DType.F32), 2));
        }
      }
    }

    public void PartsOfArrays() {
      Expect.Fails(Status.InvalidArgument, () => Tensor.Of(new float[4], 3, 2), "array of 4");
      Expect.Fails(Status.InvalidArgument, () => Tensor.Of(new float[4], -1, 2));
      Expect.Fails(Status.InvalidArgument, () => Tensor.Of(new float[4], 1, long.MaxValue));
      Expect.Fails(Status.InvalidArgument, () => Tensor.Of(new byte[4], 0, 4), "Byte");
      Expect.Fails(Status.InvalidArgument, () => new PinnedArray<byte>(new byte[4]));
      Expect.Fails(Status.InvalidArgument, () => new PinnedArray<float>(new float[4], DType.F64), "F64");
      Expect.Throws<ArgumentNullException>(() => Tensor.F16(null));
      Expect.Throws<ArgumentNullException>(() => new PinnedArray<float>(null));
      Expect.Equal(2L, Tensor.Of(new float[4], 2, 2).Length);
    }

    public void RowsAndMatrices() {
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd));
        Param param = context.AddParam(group, "e", new float[6], new ParamOptions {Rows = Rows.Dense}, 3, 2);
        using (MicroBatch micro = context.BeginMicroBatch()) {
          Expect.Fails(Status.InvalidArgument, () => micro.AccumulateRows(param, new int[] {0, 1}, new float[3]), "3 elements");
          Expect.Fails(Status.InvalidArgument, () => micro.AccumulateRows(param, new float[] {0}, new float[2]), "indices");
          Expect.Fails(Status.InvalidArgument, () => micro.AccumulateRows(param, new int[] {3}, new float[2]));
          Expect.Fails(Status.InvalidArgument, () => micro.AccumulateRows(param, new int[] {-1}, new float[2]));
          Expect.Fails(Status.InvalidArgument, () => micro.AccumulateRows(param, new int[] {0}, new double[2]), "F64");
          float[] a = new float[6], b = new float[4];  // [3, 2] and [2, 2]
          Expect.Fails(Status.InvalidArgument,
                       () => micro.AccumulateMatmul(param, 3, a, 3, Transpose.No, b, 2, Transpose.No), "A has 6", "9 expected");
          Expect.Fails(Status.InvalidArgument,
                       () => micro.AccumulateMatmul(param, 2, a, 2, Transpose.No, new float[3], 2, Transpose.No), "B has 3");
          Expect.Fails(Status.InvalidArgument,
                       () => micro.AccumulateMatmul(param, 2, a, 1, Transpose.No, b, 2, Transpose.No), "from row to row");
          Expect.Fails(Status.InvalidArgument,
                       () => micro.AccumulateMatmul(param, -1, a, 2, Transpose.No, b, 2, Transpose.No), "negative");
          Expect.Fails(Status.InvalidArgument,
                       () => micro.AccumulateMatmul(param, 2, a, long.MaxValue, Transpose.No, b, 2, Transpose.No), "2^63");
          Expect.Fails(Status.InvalidArgument,
                       () => micro.AccumulateMatmul(param, 2, a, 2, Transpose.No, new double[4], 2, Transpose.No), "F64");
          Expect.Fails(Status.InvalidArgument, () => micro.Accumulate(param, new float[5]), "5 elements");
          Expect.Fails(Status.InvalidArgument, () => micro.Accumulate(param, new Span<float>()), "missing", "6 elements");
          Expect.Throws<ArgumentNullException>(() => micro.Accumulate(param, default(Tensor)));
          Expect.Throws<ArgumentNullException>(() => micro.Accumulate(null, new float[6]));
          Expect.Fails(Status.InvalidArgument, () => micro.Accumulate(param, new Span<ushort>(new ushort[6])));
          micro.Accumulate(param, new float[6]);
          micro.End();
        }
      }
    }

    public void OptionsOutOfRange() {
      Expect.Fails(Status.InvalidArgument, () => new Optimizer((OptimizerKind)99));
      Expect.Fails(Status.InvalidArgument, () => new Optimizer(OptimizerKind.Sgd, (Flavor)99));
      Expect.Fails(Status.Unsupported, () => new Optimizer(OptimizerKind.Muon, Flavor.Bert));
      Expect.Fails(Status.InvalidArgument, () => new Schedule((ScheduleKind)99));
      Expect.Fails(Status.InvalidArgument, () => new Context(new Config {NumThreads = -1}));
      Expect.Fails(Status.InvalidArgument, () => new Context(new Config {Nonfinite = (Nonfinite)99}));
      Expect.Fails(Status.InvalidArgument, () => new Context(new Config {LossScale = 0}));
      Expect.Fails(Status.InvalidArgument, () => new Context(new Config {AccumSteps = -1}));
      Expect.Fails(Status.Unsupported, () => new Context(new Config {Device = Device.Cuda}));
      Expect.Fails(Status.InvalidArgument, () => Library.DeviceCount((Device)99));
      Expect.Throws<ArgumentNullException>(() => new Optimizer(OptimizerKind.Muon).NewtonSchulzCoefficients = null);
      Expect.Fails(Status.InvalidArgument,
                   () => new Optimizer(OptimizerKind.Muon).NewtonSchulzCoefficients = new double[2], "2 Newton-Schulz");
      Expect.Throws<ArgumentNullException>(() => new Optimizer(OptimizerKind.Muon).NewtonSchulzTable = null);
      Expect.Fails(Status.InvalidArgument,
                   () => new Optimizer(OptimizerKind.Muon).NewtonSchulzTable = new double[4], "4 numbers");
      using (Context context = WithOne()) {
        Group group = context.Groups[0];
        Expect.Fails(Status.InvalidArgument, () => context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = -1}));
        Group muon = context.AddGroup(
            new Optimizer(OptimizerKind.Muon) {NewtonSchulzTable = new double[] {3, -3.5, 1.25, 2, -1.5, 0.5}});
        Expect.Equal(6, muon.Optimizer.NewtonSchulzTable.Length);
        Expect.Equal(-1.5, muon.Optimizer.NewtonSchulzTable[4]);
        Expect.Fails(Status.InvalidArgument, () => context.AddGroup(new Optimizer(OptimizerKind.Adam) {Beta1 = 1}));
        Expect.Fails(Status.InvalidArgument, () => group.SetLr(double.NaN));
        Expect.Fails(Status.InvalidArgument, () => group.SetSchedule(new Schedule(ScheduleKind.Linear)));
        Expect.Fails(Status.InvalidArgument, () => group.SetSchedule(new Schedule(ScheduleKind.Table)));
        Expect.Fails(Status.InvalidArgument, () => context.SetClip(new Clip {Scope = ClipScope.Global}));
        Expect.Fails(Status.InvalidArgument, () => context.SetLossScaler(new LossScaler {GrowthFactor = 1}));
        Expect.Fails(Status.InvalidArgument, () => context.SetEma(new Ema {Decay = 2}));
        Expect.Fails(Status.InvalidArgument, () => context.AddBatchNorm("bn", 0, null, null));
        Expect.Fails(Status.InvalidArgument,
                     () => context.AddBatchNorm("bn", 1, null, null, new BatchNormOptions {Momentum = 2}));
        Expect.Fails(Status.InvalidArgument, () => context.SetAccumSchedule(new long[] {1}, new long[] {1}));
        Expect.Fails(Status.InvalidArgument, () => context.SetAccumSchedule(new long[] {0}, new long[0]), "1 from_steps");
        Expect.Fails(Status.InvalidArgument, () => context.SetSteps(-1));
        Expect.Fails(Status.InvalidState, () => context.FindParam("w").CopyEmaTo(new float[4]));
        Expect.Fails(Status.InvalidArgument, () => context.GetStepResult(5));
      }
    }

    public void StrangersAndTheRemoved() {
      using (Context context = WithOne())
      using (Context other = WithOne()) {
        Expect.Fails(Status.InvalidArgument, () => context.AddParam(other.Groups[0], "x", new float[1], 1), "another context");
        Param gone = context.FindParam("w");
        using (MicroBatch micro = context.BeginMicroBatch()) {
          Expect.Fails(Status.InvalidArgument, () => micro.Accumulate(other.FindParam("w"), new float[4]), "another context");
        }
        Expect.Fails(Status.InvalidArgument, () => context.Ready(gone, other.FindParam("w")), "another context");
        gone.Remove();
        foreach (Action use in new Action[] {() => gone.Remove(), () => { ParamInfo info = gone.Info; },
                                             () => gone.Bind(new float[4]), () => gone.SetFrozen(true),
                                             () => { StateInfo[] states = gone.State; }}) {
          Expect.Fails(Status.InvalidArgument, use);
        }
        using (MicroBatch micro = context.BeginMicroBatch()) {
          Expect.Fails(Status.InvalidArgument, () => micro.Accumulate(gone, new float[4]));
        }
        context.Accumulate(new Tensor[] {default(Tensor)});
      }
    }
  }
}
