// SPDX-License-Identifier: Apache-2.0
using System;
using System.IO;
using System.Reflection;

namespace GradAccum.Tests {
  /// <summary>What a program does with the library, against numbers that are worked out here.</summary>
  public sealed class TrainingTests {
    private static Context WithOne(float[] w, Config config = null, ParamOptions options = null) {
      Context context = new Context(config);
      Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 0.5});
      context.AddParam(group, "w", w, options, w.Length);
      return context;
    }

    public void MicroBatchesAverageByWeight() {
      float[] w = {1, 2, 3, 4, 5, 6}, b = {0.5f};
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 0.5});
        Param first = context.AddParam(group, "w", w, 2, 3);
        Param second = context.AddParam(group, "b", b, 1);
        Expect.Equal(0, first.Id);
        Expect.Equal(1, second.Slot);
        Expect.Equal(2, context.SlotCount);
        context.Accumulate(new Tensor[] {new float[] {1, 1, 1, 1, 1, 1}, new float[] {2}}, 3);
        context.Accumulate(new Tensor[] {new float[] {5, 5, 5, 5, 5, 5}, default(Tensor)}, 1);
        Window window = context.Window;
        Expect.Equal(WindowState.Open, window.State);
        Expect.Equal(2L, window.MicroBatches);
        Expect.Equal(4.0, window.Weight);
        StepResult result = context.Step();
        Expect.Equal(StepOutcome.Applied, result.Outcome);
        Expect.Equal(1L, result.Steps);
        // Means: (3 * 1 + 1 * 5) / 4 = 2 and 3 * 2 / 4 = 1.5.
        Expect.Near(Math.Sqrt(6 * 4 + 1.5 * 1.5), result.Norm, 1e-6, "norm");
        Expect.Same(new float[] {0, 1, 2, 3, 4, 5}, w, "w");
        Expect.Near(0.5 - 0.75, b[0], 1e-7, "b");
        Expect.Equal(1L, context.GetStepResult().Steps);
      }
    }

    public void EveryKindOfMemoryGivesTheSameBits() {
      float[] gradient = {0.1f, -0.7f, 3, 1e-3f};
      float[] expected = null;
      for (int way = 0; way < 7; ++way) {
        float[] w = {1, 2, 3, 4};
        using (Context context = WithOne(w)) {
          unsafe {
            switch (way) {
              case 0:
                context.Accumulate(new Tensor[] {gradient}, 2);
                break;
              case 1:
                context.Accumulate(new ReadOnlySpan<float>(gradient), 2);
                break;
              case 2:
                context.Accumulate(new Span<float>(gradient), 2);
                break;
              case 3:
                using (PinnedArray<float> pinned = new PinnedArray<float>(gradient)) context.Accumulate(pinned, 2);
                break;
              case 4:
                fixed (float* address = gradient) {
                  context.Accumulate(new Tensor((IntPtr)address, 4, DType.F32), 2);
                }
                break;
              case 5:
                float[] longer = {9, 9, 0.1f, -0.7f, 3, 1e-3f, 9};
                context.Accumulate(new ArraySegment<float>(longer, 2, 4), 2);
                break;
              default:
                float[] around = {9, 0.1f, -0.7f, 3, 1e-3f};
                using (MicroBatch micro = context.BeginMicroBatch(2)) {
                  micro.Accumulate(context.FindParam("w"), new ReadOnlySpan<float>(around, 1, 4));
                  micro.End();
                }
                break;
            }
          }
          context.Step();
        }
        if (expected == null) expected = w;
        Expect.Same(expected, w, "way " + way);
        Expect.Near(1 - 0.5 * 0.1, w[0], 1e-7);
      }
    }

    public void SixteenBits() {
      ushort[] w = {0x3f80, 0x4000};  // bf16: 1, 2
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1});
        context.AddParam(group, "w", Tensor.BF16(w), 2);
        ushort[] gradient = {0x3f00, 0x3f80};  // 0.5, 1
        context.Accumulate(new ReadOnlySpan<ushort>(gradient));
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new Tensor[] {Tensor.F16(gradient)}), "F16", "BF16");
        context.Step();
        Expect.Same(new ushort[] {0x3f00, 0x3f80}, w);
      }
    }

    public void FlatBlocks() {
      float[] block = {1, 2, 3, 9, 5}, gradient = {1, 1, 1, 7, 2};
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1});
        Param[] added = context.AddFlat(block, new[] {
          new FlatEntry(group, "a", 0, 3), new FlatEntry(group, "b", 4, 1) {Options = new ParamOptions()}
        });
        Expect.Equal(2, added.Length);
        Expect.Equal(1, context.SlotCount);
        Expect.Equal(4L, added[1].Info.Offset);
        context.Accumulate(gradient);
        context.Step();
        Expect.Same(new float[] {0, 1, 2, 9, 3}, block);
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new float[4]), "4 elements", "5 expected");
        Expect.Fails(Status.InvalidArgument, () => context.AddFlat(block, new[] {new FlatEntry(group, "c", 3, 3)}), "\"c\"");
      }
    }

    public void GradientsByRow() {
      float[] table = {1, 1, 2, 2, 3, 3};
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1});
        Param param = context.AddParam(group, "e", table, new ParamOptions {Rows = Rows.Lazy}, 3, 2);
        using (MicroBatch micro = context.BeginMicroBatch()) {
          micro.AccumulateRows(param, new int[] {2, 0, 2}, new float[] {1, 2, 10, 20, 1, 2});
          micro.AccumulateRows<long, float>(param, new long[] {1}, new float[] {5, 5});
          micro.End();
        }
        context.Step();
        Expect.Same(new float[] {-9, -19, -3, -3, 1, -1}, table);
      }
    }

    public void MatrixProducts() {
      float[] w = new float[6];
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1});
        Param param = context.AddParam(group, "w", w, 2, 3);
        float[] dy = {1, 2, 3, 4};        // [batch 2, out 2]
        float[] x = {1, 0, 2, 0, 1, -1};  // [batch 2, in 3]
        using (MicroBatch micro = context.BeginMicroBatch()) {
          try {
            micro.AccumulateMatmul(param, 2, dy, 2, Transpose.Yes, x, 3, Transpose.No);
          } catch (GradAccumException exception) when (exception.Status == Status.Unsupported) {
            throw new SkipException(exception.Message);
          }
          micro.End();
        }
        context.Step();
        Expect.Same(new float[] {-1, -3, 1, -2, -4, 0}, w);
      }
    }

    public void MatrixProductsOfSpans() {
      float[] byTensors = new float[6], bySpans = new float[6];
      float[] a = {9, 1, 2, 3, 4, 9};                // [batch 2, out 2], from element 1 on
      float[] b = {9, 9, 1, 0, 2, 9, 0, 1, -1, 9};   // [batch 2, in 3], 4 from row to row, from element 2 on
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1});
        Param first = context.AddParam(group, "tensors", byTensors, 2, 3);
        Param second = context.AddParam(group, "spans", bySpans, 2, 3);
        using (MicroBatch micro = context.BeginMicroBatch()) {
          try {
            micro.AccumulateMatmul(first, 2, Tensor.Of(a, 1, 4), 2, Transpose.Yes, Tensor.Of(b, 2, 7), 4, Transpose.No);
          } catch (GradAccumException exception) when (exception.Status == Status.Unsupported) {
            throw new SkipException(exception.Message);
          }
          micro.AccumulateMatmul(second, 2, new ReadOnlySpan<float>(a, 1, 4), 2, Transpose.Yes,
                                 new ReadOnlySpan<float>(b, 2, 7), 4, Transpose.No);
          Expect.Fails(Status.InvalidArgument,
                       () => micro.AccumulateMatmul(second, 2, new ReadOnlySpan<float>(a, 0, 3), 2, Transpose.Yes,
                                                    new ReadOnlySpan<float>(b), 4, Transpose.No),
                       "A has 3", "4 expected");
          Expect.Fails(Status.InvalidArgument,
                       () => micro.AccumulateMatmul(second, 2, new ReadOnlySpan<float>(a), 2, Transpose.Yes,
                                                    new ReadOnlySpan<float>(b, 0, 6), 4, Transpose.No),
                       "B has 6", "7 expected");
          Expect.Fails(Status.InvalidArgument,
                       () => micro.AccumulateMatmul(second, 2, new ReadOnlySpan<ushort>(new ushort[4]), 2, Transpose.Yes,
                                                    new ReadOnlySpan<ushort>(new ushort[7]), 4, Transpose.No),
                       "UInt16");
          micro.End();
        }
        context.Step();
        Expect.Same(new float[] {-1, -3, 1, -2, -4, 0}, byTensors);
        Expect.Same(byTensors, bySpans);
      }
    }

    public void AcquiredAccumulators() {
      float[] w = {1, 2};
      using (Context context = WithOne(w)) {
        Accumulator dead;
        using (MicroBatch micro = context.BeginMicroBatch(2)) {
          Accumulator accumulator = micro.Acquire(context.FindParam("w"));
          Expect.Equal(0.0, accumulator.Beta);
          Expect.Equal(2.0, accumulator.Alpha);
          Expect.Equal(2L, accumulator.Rows);
          Expect.Equal(1L, accumulator.Columns);
          Expect.Equal(1L, accumulator.LeadingDimension);
          Expect.Fails(Status.InvalidArgument, () => accumulator.Write<double>(elements => {}), "Double");
          accumulator.Write<float>(elements => {
            for (int i = 0; i < elements.Length; ++i) elements[i] = (float)accumulator.Alpha * (i + 1);
          });
          Expect.Throws<InvalidOperationException>(
              () => accumulator.Write<float>(elements => { throw new InvalidOperationException("mine"); }), "mine");
          accumulator.Release();
          dead = accumulator;
          Expect.Fails(Status.InvalidState, () => accumulator.Write<float>(elements => {}), "gone");
          micro.End();
        }
        Expect.Fails(Status.InvalidState, () => { IntPtr address = dead.Address; }, "gone");
        context.Step();
        Expect.Same(new float[] {0.5f, 1}, w);
      }
    }

    public void ExternalOptimizers() {
      float[] w = {1, 2};
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.External));
        Param param = context.AddParam(group, "w", w, 2);
        context.Accumulate(new float[] {2, 4}, 2);
        context.Accumulate(new float[] {4, 8}, 2);
        context.Step();
        Gradient gradient = param.Gradient;
        float[] copy = new float[2];
        gradient.CopyTo(copy);
        Expect.Same(new float[] {3, 6}, copy);
        Expect.Fails(Status.InvalidArgument, () => gradient.CopyTo(new float[1]));
        Expect.Fails(Status.InvalidArgument, () => gradient.CopyTo(new double[2]));
        gradient.Read<float>(elements => Expect.Fails(Status.InvalidState, () => context.Step()));
        gradient.Read<float>(elements => Expect.Fails(Status.InvalidState, () => context.Dispose(), "callback"));
        Expect.Equal(2L, gradient.Count);
        context.Accumulate(new float[] {1, 1});
        Expect.Fails(Status.InvalidState, () => gradient.CopyTo(copy), "gone");
        context.Discard();
        Expect.Fails(Status.InvalidState, () => { Gradient none = param.Gradient; });
      }
    }

    public void Maxima() {
      float[] amax = {0, 0};
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.External));
        ParamOptions options = new ParamOptions();
        Expect.True(options.Reduce == null, "the default is that of the context");
        Expect.Throws<ArgumentException>(() => options.Reduce = Reduce.Mean, "expected Max");
        options.Reduce = Reduce.Max;
        Expect.True(options.Reduce == Reduce.Max, "the reduction is kept");
        Param param = context.AddParam(group, "amax", amax, options, 2);
        context.Accumulate(new float[] {-1, -4}, 5);
        context.Accumulate(new float[] {-3, -2}, 2);
        context.Step();
        float[] copy = new float[2];
        param.Gradient.CopyTo(copy);
        Expect.Same(new float[] {-1, -2}, copy);
        options.Reduce = null;
        Expect.True(options.Reduce == null, "the reduction is taken back");
      }
    }

    public void GroupsAndSchedules() {
      float[] w = {0};
      using (Context context = WithOne(w)) {
        Group group = context.Groups[0];
        Expect.Equal(0.5, group.Lr);
        group.SetSchedule(new Schedule(ScheduleKind.Table) {Table = new double[] {1, 0.25}});
        Expect.Equal(1.0, group.Lr);
        context.Accumulate(new float[] {1});
        context.Step();
        Expect.Equal(1.0, group.LastLr);
        Expect.Equal(0.25, group.Lr);
        group.SetSchedule(null);
        group.SetLr(0.125);
        group.SetWeightDecay(0.5);
        Expect.Equal(0.125, group.Optimizer.Lr);
        Expect.Equal(0.5, group.Optimizer.WeightDecay);
        Optimizer other = group.Optimizer;
        other.Lr = 2;
        group.SetOptimizer(other);
        Expect.Equal(2.0, group.Lr);
        Expect.Equal(group, context.Groups[0]);
        context.SetSteps(7);
        Expect.Equal(7L, context.Window.Steps);
        context.SetAccumSteps(2);
        Expect.Equal(2L, context.Window.AccumSteps);
        context.SetAccumSchedule(new long[] {0, 8}, new long[] {1, 3});
        context.Accumulate(new float[] {1});
        Expect.Equal(WindowState.Full, context.Window.State);
        Expect.Fails(Status.WindowFull, () => context.Accumulate(new float[] {1}));
        context.Step();
        Expect.Equal(3L, context.Window.AccumSteps);
      }
    }

    public void ClippingLossScaleAndFrozen() {
      float[] w = {0, 0};
      using (Context context = WithOne(w)) {
        Param param = context.FindParam("w");
        context.SetClip(new Clip {Scope = ClipScope.Global, MaxNorm = 1, Flavor = Flavor.Keras});
        context.Accumulate(new float[] {3, 4});
        StepResult result = context.Step();
        Expect.Near(5, result.Norm, 1e-6);
        Expect.Near(0.2, result.ClipFactor, 1e-7);
        Expect.Near(-0.3, w[0], 1e-7);
        context.SetClip(null);
        context.SetLossScaler(new LossScaler {InitialScale = 1024});
        Expect.Equal(1024.0, context.LossScale);
        Expect.Equal(IntPtr.Zero, context.DeviceLossScale);
        context.Accumulate(new float[] {float.PositiveInfinity, 0});
        Expect.Equal(StepOutcome.SkippedNonfinite, context.Step().Outcome);
        Expect.Equal(512.0, context.LossScale);
        param.SetFrozen(true);
        Expect.True(param.Info.Frozen, "frozen");
        context.Groups[0].SetFrozen(false);
        Expect.True(!param.Info.Frozen, "not frozen");
        param.SetLrScale(0.5);
        param.SetWeightDecayScale(0.25);
        Expect.Equal(0.5, param.Info.LrScale);
        Expect.Equal(0.25, param.Info.WeightDecayScale);
        param.Changed();
      }
    }

    private static void SameClip(Clip expected, Clip actual) {
      foreach (PropertyInfo property in typeof(Clip).GetProperties()) {
        Expect.Equal(property.GetValue(expected), property.GetValue(actual), property.Name);
      }
    }

    public void ClipsAreReadBack() {
      Clip none = new Clip();
      Clip clip = new Clip {Scope = ClipScope.Global, MaxNorm = 2, Flavor = Flavor.Keras, When = ClipWhen.Micro};
      Clip own = new Clip {
        Scope = ClipScope.Agc, MaxValue = 0.5, AgcFactor = 0.25, AgcEps = 0.125, AgcUnits = AgcUnits.Torch
      };
      using (Context context = WithOne(new float[2]))
      using (Context loaded = WithOne(new float[2])) {
        Group group = context.Groups[0];
        Group other = context.AddGroup(new Optimizer(OptimizerKind.Sgd));
        SameClip(none, context.Clip);
        SameClip(none, group.Clip);
        context.SetClip(clip);
        group.SetClip(own);
        SameClip(clip, context.Clip);
        SameClip(own, group.Clip);
        SameClip(clip, other.Clip);
        group.Clip.MaxValue = 7;  // of a copy
        SameClip(own, group.Clip);
        Group last = loaded.AddGroup(new Optimizer(OptimizerKind.Sgd));
        loaded.LoadFromMemory(context.SaveToMemory(), new StateOptions {Settings = StateSettings.Take});
        SameClip(clip, loaded.Clip);
        SameClip(own, loaded.Groups[0].Clip);
        SameClip(clip, last.Clip);
        context.SetClip(null);
        SameClip(none, context.Clip);
        SameClip(own, group.Clip);
        SameClip(none, other.Clip);
        group.SetClip(null);
        SameClip(none, group.Clip);
      }
    }

    public void MovingAverages() {
      float[] w = {1};
      using (Context context = WithOne(w)) {
        Param param = context.FindParam("w");
        context.SetEma(new Ema {Decay = 0.5});
        for (int step = 0; step < 2; ++step) {
          context.Accumulate(new float[] {1});
          context.Step();
        }
        // Parameters 0.5 and 0; the average 0.5, then 0.25.
        float[] average = new float[1];
        param.CopyEmaTo(average);
        Expect.Equal(0.25f, average[0]);
        param.CopyEmaTo(new Span<float>(average));
        double[] wide = new double[1];
        param.CopyEmaTo(wide);
        Expect.Equal(0.25, wide[0]);
        using (context.SwapEma()) Expect.Equal(0.25f, w[0]);
        Expect.Equal(0f, w[0]);
        Expect.True(context.Memory.Averages >= 4, "memory of averages");
      }
    }

    public void StateByName() {
      float[] w = {1, 2};
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.AdamW));
        Param param = context.AddParam(group, "w", w, 2);
        context.Prepare();
        Expect.True(Array.Exists(param.State, state => state.Name == "exp_avg" && state.Count == 2), "exp_avg");
        param.SetState("exp_avg", new float[] {0.5f, 0.25f});
        param.SetState("step", new long[] {3});
        Expect.Same(new float[] {0.5f, 0.25f}, param.GetState<float>("exp_avg"));
        Expect.Equal(3L, param.GetState<long>("step")[0]);
        Expect.Fails(Status.InvalidArgument, () => param.GetState<float>("nothing"), "exp_avg");
        Expect.Fails(Status.InvalidArgument, () => param.SetState("exp_avg", new float[1]));
        Expect.Fails(Status.InvalidArgument, () => param.GetState<double>("exp_avg"));
        param.ResetState();
        Expect.Equal(0L, param.GetState<long>("step")[0]);
      }
    }

    // ADAMW on a parameter that is large enough for state in 8 bits.
    private static Param OfCodes(Context context, float[] w) {
      Group group = context.AddGroup(new Optimizer(OptimizerKind.AdamW) {Lr = 0.01, StateDType = DType.State8Bit});
      return context.AddParam(group, "w", w, 50, 100);
    }

    private static void StepsOfCodes(Context context, int steps) {
      float[] gradient = new float[5000];
      for (int step = 0; step < steps; ++step) {
        for (int i = 0; i < gradient.Length; ++i) gradient[i] = (float)Math.Sin(0.7 * i + step);
        context.Accumulate(gradient);
        context.Step();
      }
    }

    public void StateIn8Bits() {
      float[] w = new float[5000], other = new float[5000];
      using (Context context = new Context())
      using (Context second = new Context()) {
        Param param = OfCodes(context, w), loaded = OfCodes(second, other);
        StepsOfCodes(context, 3);
        string[] names = Array.ConvertAll(param.State, state => state.Name + " " + state.DType + " " + state.Count);
        Array.Sort(names, StringComparer.Ordinal);
        Expect.Same(new[] {"exp_avg U8 5000", "exp_avg_scale F32 20", "exp_avg_sq U8 5000", "exp_avg_sq_scale F32 20",
                           "step I64 1"}, names);
        byte[] codes = param.GetState<byte>("exp_avg");
        float[] numbers = param.GetState<float>("exp_avg"), scale = param.GetState<float>("exp_avg_scale");
        float largest = 0;
        for (int i = 0; i < 256; ++i) largest = Math.Max(largest, Math.Abs(numbers[i]));
        Expect.Equal(scale[0], largest);
        // Numbers of codes become the same codes, and codes are written as they are.
        foreach (Tensor written in new Tensor[] {numbers, Tensor.U8(codes)}) {
          param.ResetState();
          StepsOfCodes(context, 1);
          param.SetState("exp_avg", written);
          param.SetState("exp_avg_scale", scale);
          Expect.Same(codes, param.GetState<byte>("exp_avg"));
        }
        Expect.Fails(Status.InvalidArgument, () => param.GetState<double>("exp_avg"), "f32 for the numbers");
        Expect.Fails(Status.InvalidArgument, () => param.GetState<byte>("exp_avg_scale"), "Byte");

        second.LoadFromMemory(context.SaveToMemory());
        StepsOfCodes(context, 2);
        StepsOfCodes(second, 2);
        Expect.Same(w, other);
        foreach (string name in new[] {"exp_avg", "exp_avg_sq"}) {
          Expect.Same(param.GetState<byte>(name), loaded.GetState<byte>(name), name);
          Expect.Same(param.GetState<float>(name + "_scale"), loaded.GetState<float>(name + "_scale"), name);
        }
      }
    }

    public void BatchNormalisation() {
      float[] gamma = {1, 2}, beta = {0, 1};
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1});
        Param scale = context.AddParam(group, "gamma", gamma, 2);
        Param shift = context.AddParam(group, "beta", beta, 2);
        BatchNorm layer = context.AddBatchNorm("bn", 2, scale, shift, new BatchNormOptions {Eps = 1e-12});
        float[] x = {1, 10, 3, 30}, y = new float[4], dx = new float[4];  // [2 samples, 2 channels]
        layer.Forward(x, 2, 1, y);
        Expect.Near(-1, y[0], 1e-6);
        Expect.Near(1 + 2, y[3], 1e-5);
        double[] mean = new double[2], variance = new double[2];
        Expect.Equal(2L, layer.Statistics(mean, variance));
        Expect.Near(2, mean[0], 1e-12);
        Expect.Near(100, variance[1], 1e-9);
        using (MicroBatch micro = context.BeginMicroBatch()) {
          float[] dy = {1, 1, 3, 1};
          micro.BackwardAccumulate(layer, x, dy, 2, 1);
          micro.Backward(layer, x, dy, 2, 1, dx);
          Expect.Fails(Status.InvalidArgument, () => micro.Backward(layer, x, new float[3], 2, 1, dx), "dy", "3 elements");
          micro.End();
        }
        context.Step();
        // The gradient of beta is the sum of dy, and that of gamma the sum of dy xhat: -1 + 3.
        Expect.Near(0 - 4, beta[0], 1e-6);
        Expect.Near(1 - 2, gamma[0], 1e-5);
        Expect.Equal(1L, layer.Running(mean, null));
        Expect.Near(0.2, mean[0], 1e-7);
        layer.SetRunning(new double[] {1, 2}, new double[] {4, 9}, 5);
        Expect.Equal(5L, layer.Running(mean, variance));
        Expect.Equal(9.0, variance[1]);
        layer.Infer(x, 2, 1, y);
        layer.SetFrozen(true);
        Expect.Fails(Status.InvalidArgument, () => layer.Forward(x, 3, 1, y), "x", "4 elements");
        Expect.Fails(Status.InvalidArgument, () => layer.Forward(x, long.MaxValue, 1, y), "2^63");
        Expect.Fails(Status.InvalidArgument, () => layer.Forward(x, -1, 1, y), "dimension");
        Expect.Fails(Status.InvalidArgument, () => layer.Forward(new double[4], 2, 1, y), "F64");
      }
    }

    private static void SameInfo(BatchNormInfo info, string name, long channels, Param gamma, Param beta,
                                 BatchNormOptions options, bool frozen) {
      Expect.Equal(name, info.Name);
      Expect.Equal(channels, info.Channels);
      Expect.Equal(gamma == null ? -1 : gamma.Id, info.GammaId);
      Expect.Equal(beta == null ? -1 : beta.Id, info.BetaId);
      Expect.Equal(options.Mode, info.Mode);
      Expect.Equal(options.Layout, info.Layout);
      Expect.Equal(options.DType, info.DType);
      Expect.Equal(options.Biased, info.Biased);
      Expect.Equal(frozen, info.Frozen);
      Expect.Equal(options.Momentum, info.Momentum);
      Expect.Equal(options.Eps, info.Eps);
    }

    public void LayersAreDescribedAndFoundByName() {
      BatchNormOptions options = new BatchNormOptions {
        Mode = BatchNormMode.Cumulative, Layout = BatchNormLayout.ChannelsLast, DType = DType.F64, Biased = true,
        Momentum = 0.25, Eps = 0.5
      };
      using (Context context = new Context())
      using (Context other = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd));
        Param gamma = context.AddParam(group, "gamma", new float[] {1, 1, 1}, 3);
        Param beta = context.AddParam(group, "beta", new float[3], 3);
        Expect.Equal(0, context.BatchNormCount);
        BatchNorm first = context.AddBatchNorm("first", 3, gamma, beta, options);
        BatchNorm second = context.AddBatchNorm("second", 2, null, null);
        Expect.Equal(2, context.BatchNormCount);
        SameInfo(first.Info, "first", 3, gamma, beta, options, false);
        SameInfo(second.Info, "second", 2, null, null, new BatchNormOptions(), false);
        first.SetFrozen(true);
        SameInfo(first.Info, "first", 3, gamma, beta, options, true);
        first.SetFrozen(false);

        BatchNorm found = context.FindBatchNorm("first");
        Expect.Equal(first, found);
        Expect.Equal(first.GetHashCode(), found.GetHashCode());
        Expect.True(!found.Equals(second) && !found.Equals(null), "another layer");
        Expect.True(!found.Equals(other.AddBatchNorm("first", 3, null, null)), "the layer of another context");
        // A layer that was found knows what its tensors are.
        Expect.Equal(3L, found.Channels);
        double[] x = {1, 2, 3, 3, 6, 9}, y = new double[6];
        found.Forward(x, 2, 1, y);
        Expect.Near(1 / Math.Sqrt(1.5), y[3], 1e-12);
        Expect.Fails(Status.InvalidArgument, () => found.Infer(x, 3, 1, y), "9 expected");
        Expect.Fails(Status.InvalidArgument, () => found.Infer(new float[6], 2, 1, y), "expected F64");
        foreach (string absent in new[] {"third", "gamma", ""}) {
          Expect.Fails(Status.InvalidArgument, () => context.FindBatchNorm(absent),
                       "the context has no layer \"" + absent + "\"");
        }
        Expect.Throws<ArgumentNullException>(() => context.FindBatchNorm(null));
      }
    }

    public void BatchNormalisationInPasses() {
      using (Context context = new Context()) {
        BatchNorm layer = context.AddBatchNorm("bn", 1, null, null, new BatchNormOptions {Mode = BatchNormMode.Window});
        layer.Accumulate(new float[] {1, 3}, 2, 1);
        layer.AccumulateStats(2, new double[] {6}, new double[] {2}, Spread.M2);
        layer.FinalizeStats();
        double[] mean = new double[1], variance = new double[1];
        Expect.Equal(4L, layer.Statistics(mean, variance));
        // 1, 3, 5, 7.
        Expect.Near(4, mean[0], 1e-12);
        Expect.Near(5, variance[0], 1e-12);
      }
    }

    public void SavedAndLoaded() {
      string path = Path.GetTempFileName();
      try {
        byte[] expected = null;
        for (int way = 0; way < 3; ++way) {
          float[] w = {1, 2}, gradient = {0.25f, -0.5f};
          byte[] memory = null;
          MemoryStream stream = new MemoryStream();
          stream.WriteByte(42);
          using (Context context = WithOne(w)) {
            context.Accumulate(gradient);
            context.Step();
            if (way == 0) context.Save(path, new StateOptions {Note = "épo\U0001F600"});
            if (way == 1) memory = context.SaveToMemory();
            if (way == 2) context.Save(stream);
          }
          if (way == 0) Expect.Equal("épo\U0001F600", Library.StateNote(path));
          float[] again = {0, 0};
          using (Context context = WithOne(again)) {
            if (way == 0) context.Load(path);
            if (way == 1) context.LoadFromMemory(memory);
            if (way == 2) {
              Expect.Equal(stream.Length, stream.Position);
              stream.Position = 1;
              context.Load(stream);
            }
            Expect.Same(w, again, "way " + way);
            Expect.Equal(1L, context.Window.Steps);
            if (expected == null) expected = context.SaveToMemory();
            Expect.Same(expected, context.SaveToMemory(), "state");
            Expect.Fails(Status.Format, () => context.LoadFromMemory(new byte[10]));
            Expect.Fails(Status.Format, () => context.LoadFromMemory(new byte[0]));
          }
        }
        Expect.Fails(Status.Io, () => Library.StateNote(path + ".missing"));
      } finally {
        File.Delete(path);
      }
    }

    public void WhatTheLibraryTells() {
      Expect.True(Library.Version >= 100, "version");
      Expect.True(Library.BuildInfo.Contains("libgradaccum"), "build info");
      Build build = Library.DescribeBuild();
      Expect.Equal(Library.Version, build.Version);
      Expect.True(build.Compiler.Length > 0 && build.CpuLoops.Contains("scalar"), "compiler and loops");
      Expect.Equal(1, Library.DeviceCount(Device.Cpu));
      string reason;
      if (Library.DeviceCount(Device.Cuda, out reason) == 0) Expect.True(reason.Length > 0, "why there is no device");
      using (Context context = WithOne(new float[1])) {
        context.Synchronize();
        Expect.Fails(Status.Unsupported, () => context.SetStream(IntPtr.Zero), "on the CPU");
        Expect.True(context.Memory.Total > 0, "memory");
        Expect.Equal(1, context.ParamCount);
      }
    }

    /// <summary>Results are laid out as in C: field by field, they are those of the struct.</summary>
    public unsafe void ResultsHaveTheFieldsOfTheStruct() {
      float[] w = {1, 2};
      using (Context context = WithOne(w, new Config {
               NoiseScale = true, MeasureNorm = true, Nonfinite = Nonfinite.DropMicro, LossScale = 2, AccumSteps = 4
             })) {
        for (int window = 0; window < 3; ++window) {
          context.Accumulate(new float[] {1 + window, 2}, 3);
          context.Accumulate(new float[] {4, float.NaN}, 1);
          context.Accumulate(new float[] {2, 5}, 2, last: window == 1);
          if (window == 2) {
            using (Call call = context.Begin())
            using (ga_window_info native = new ga_window_info()) {
              Raw.ga_window(call.Context, ga_window_info.getCPtr(native).Handle);
              Window info = default(Window);
              info.Prepare();
              Raw.ga_window(call.Context, (IntPtr)(&info));
              Expect.Equal(native.state, (int)info.State);
              Expect.Equal(native.micro_batches, info.MicroBatches);
              Expect.Equal(native.open_micro, info.OpenMicro);
              Expect.Equal(native.accum_steps, info.AccumSteps);
              Expect.Equal(native.windows, info.Windows);
              Expect.Equal(native.steps, info.Steps);
              Expect.Equal(native.weight, info.Weight);
            }
          }
          context.Step();
        }
        StepResult result = context.GetStepResult();
        using (Call call = context.Begin())
        using (ga_step_result native = new ga_step_result()) {
          Raw.ga_step_result_get(call.Context, 0, 1, ga_step_result.getCPtr(native).Handle);
          Expect.Equal(native.outcome, (int)result.Outcome);
          Expect.Equal(native.windows, result.Windows);
          Expect.Equal(native.steps, result.Steps);
          Expect.Equal(native.micro_batches, result.MicroBatches);
          Expect.Equal(native.weight, result.Weight);
          Expect.Equal(native.norm, result.Norm);
          Expect.Equal(native.clip_factor, result.ClipFactor);
          Expect.Equal(native.lr, result.Lr);
          Expect.Equal(native.loss_scale, result.LossScale);
          Expect.Equal(native.skipped, result.Skipped);
          Expect.Equal(native.dropped, result.Dropped);
          Expect.Equal(native.window_dropped, result.WindowDropped);
          Expect.Equal(native.noise_scale, result.NoiseScale);
          Expect.Equal(native.noise_trace, result.NoiseTrace);
          Expect.Equal(native.noise_signal, result.NoiseSignal);
          Expect.Equal(native.dropped_micros, result.DroppedMicros);
          Expect.Equal(3L, result.Dropped);
        }
      }
    }

    /// <summary>Every property of options reads what was written, and no other one changes.</summary>
    public void OptionsKeepWhatIsSet() {
      foreach (Func<object> make in new Func<object>[] {
                 () => new Config(), () => new Optimizer(OptimizerKind.Muon), () => new Schedule(ScheduleKind.Step),
                 () => new Clip(), () => new LossScaler(), () => new Ema(), () => new ParamOptions(),
                 () => new BatchNormOptions(), () => new StateOptions()
               }) {
        object defaults = make();
        foreach (var property in defaults.GetType().GetProperties()) {
          if (!property.CanWrite) continue;
          object options = make();
          object value = property.GetValue(options, null);
          Type type = property.PropertyType;
          object other = type == typeof(bool)     ? !(bool)value
                         : type.IsEnum            ? Enum.ToObject(type, Convert.ToInt32(value) + 1)
                         : type == typeof(string) ? "é"
                         : type == typeof(IntPtr) ? (object)new IntPtr(0x123456789abc)
                         : type == typeof(long)   ? (long)value + (1L << 40)
                         : type == typeof(ulong)  ? (ulong)value + (1UL << 63)
                         : type == typeof(int)    ? (int)value + 70000
                         : type == typeof(uint)   ? (uint)value + (1U << 31)
                         : type == typeof(double) ? (object)1.25
                         : type == typeof(double[]) ? new double[] {1, 2, 3}
                                                    : null;
          if (other == null) continue;  // callbacks
          property.SetValue(options, other, null);
          object read = property.GetValue(options, null);
          if (type == typeof(double[])) {
            Expect.Same((double[])other, (double[])read, property.Name);
          } else {
            Expect.Equal(other, read, defaults.GetType().Name + "." + property.Name);
          }
          foreach (var unchanged in defaults.GetType().GetProperties()) {
            if (unchanged.Name == property.Name || unchanged.PropertyType == typeof(double[])) continue;
            Expect.Equal(unchanged.GetValue(defaults, null), unchanged.GetValue(options, null),
                         unchanged.Name + " after " + property.Name);
          }
        }
      }
    }
  }
}
