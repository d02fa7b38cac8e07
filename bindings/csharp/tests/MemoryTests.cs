// SPDX-License-Identifier: Apache-2.0
using System;
using System.Collections.Generic;
using System.Runtime.CompilerServices;
using System.Threading;

namespace GradAccum.Tests {
  /// <summary>
  /// Arrays stay in place exactly as long as the library keeps their address. A pinned array is alive, and
  /// nothing else here refers to the arrays, so the collector tells which of them are pinned.
  /// </summary>
  public sealed class MemoryTests {
    // In a thread of its own: no address of an array may stay on the stack, which mono's collector searches.
    private static void Aside(Action body) {
      Exception thrown = null;
      Thread thread = new Thread(() => {
        try {
          body();
        } catch (Exception exception) {
          thrown = exception;
        }
      });
      thread.Start();
      thread.Join();
      if (thrown != null) throw new Exception("in a thread of a test: " + thrown);
    }

    private static bool IsAlive(WeakReference reference) {
      for (int i = 0; i < 3; ++i) {
        GC.Collect();
        GC.WaitForPendingFinalizers();
      }
      return reference.IsAlive;
    }

    private readonly List<WeakReference> arrays = new List<WeakReference>();

    private float[] New(int length = 4) {
      float[] array = new float[length];
      for (int i = 0; i < length; ++i) array[i] = i + 1;
      arrays.Add(new WeakReference(array));
      return array;
    }

    private void Pinned(params bool[] expected) {
      for (int i = 0; i < expected.Length; ++i) Expect.Equal(expected[i], IsAlive(arrays[i]), "array " + i + " is pinned");
    }

    private static Context With(Config config, Func<float[]> data, int count = 1) {
      Context context = new Context(config);
      Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1});
      bool lends = config != null && config.GradientLife == GradientLife.Lent;  // which is refused with rows
      ParamOptions options = new ParamOptions {Rows = lends ? Rows.None : Rows.Dense};
      for (int i = 0; i < count; ++i) context.AddParam(group, "w" + i, data(), options, 4);
      return context;
    }

    public void ParametersUntilBoundRemovedOrClosed() {
      Context context = null;
      Aside(() => context = With(null, () => New(), 3));
      Pinned(true, true, true);
      Aside(() => context.FindParam("w0").Bind(New()));
      Pinned(false, true, true, true);
      Aside(() => Expect.Fails(Status.InvalidArgument, () => context.FindParam("w0").Bind(New(3)), "3 elements"));
      Aside(() => context.FindParam("w1").Remove());
      Pinned(false, false, true, true, false);
      context.Dispose();
      Pinned(false, false, false, false, false);
    }

    public void ParametersThatWereRefused() {
      Context context = null;
      Aside(() => {
        context = With(null, () => New());
        Expect.Fails(Status.InvalidArgument, () => context.AddParam(context.Groups[0], "w0", New(), 4), "w0");
      });
      Pinned(true, false);
      context.Dispose();
    }

    public void BlocksUntilTheLastParameterIsGone() {
      Context context = null;
      Aside(() => {
        context = new Context();
        Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd));
        context.AddFlat(New(), new[] {new FlatEntry(group, "a", 0, 2), new FlatEntry(group, "b", 2, 2)});
      });
      Aside(() => context.FindParam("a").Remove());
      Pinned(true);
      Aside(() => context.FindParam("b").Remove());
      Pinned(false);
      context.Dispose();
    }

    public void GradientsForTheCall() {
      Context context = null;
      Aside(() => {
        context = With(null, () => New());
        context.Accumulate(New());
        context.Accumulate(new Tensor[] {New()});
        using (MicroBatch micro = context.BeginMicroBatch()) {
          micro.Accumulate(context.FindParam("w0"), New());
          micro.AccumulateRows(context.FindParam("w0"), new int[] {1}, New(1));
          micro.End();
        }
      });
      Pinned(true, false, false, false, false);
      context.Dispose();
    }

    public void LiveGradientsUntilTheSecondContribution() {
      Context context = null;
      Aside(() => context = With(new Config {GradientLife = GradientLife.Live}, () => New(), 2));
      Aside(() => context.Accumulate(new Tensor[] {New(), New()}));  // 2, 3
      Pinned(true, true, true, true);
      Aside(() => context.Accumulate(new Tensor[] {New(), default(Tensor)}));  // 4
      Pinned(true, true, false, true, false);
      Aside(() => {
        using (MicroBatch micro = context.BeginMicroBatch()) {
          micro.Accumulate(context.FindParam("w1"), New());  // 5
          micro.End();
        }
      });
      Pinned(true, true, false, false, false, false);
      context.Step();
      Aside(() => context.Accumulate(new Tensor[] {New(), New()}));  // 6, 7
      Pinned(true, true, false, false, false, false, true, true);
      context.Step();
      Pinned(true, true, false, false, false, false, false, false);
      Aside(() => context.Accumulate(new Tensor[] {New(), New()}));  // 8, 9
      context.Discard();
      Pinned(true, true, false, false, false, false, false, false, false, false);
      Aside(() => context.Accumulate(new Tensor[] {New(), New()}));  // 10, 11
      context.Dispose();
      Pinned(new bool[12]);
    }

    public void LentGradientsUntilTheStep() {
      Context context = null;
      Aside(() => context = With(new Config {GradientLife = GradientLife.Lent}, () => New(), 2));
      Aside(() => context.Accumulate(new Tensor[] {New(), New()}));  // 2, 3
      Aside(() => context.Accumulate(new Tensor[] {New(), default(Tensor)}));  // 4
      Pinned(true, true, true, true, false);
      Aside(() => {
        using (MicroBatch micro = context.BeginMicroBatch()) {
          micro.Accumulate(context.FindParam("w1"), New());  // 5
          micro.End();
        }
      });
      Pinned(true, true, true, true, false, false);
      context.Step();
      Pinned(true, true, false, false, false, false);
      context.Dispose();
    }

    public void LiveGradientsGiveTheBitsOfConsumedOnes() {
      float[][] results = new float[3][];
      foreach (GradientLife life in new[] {GradientLife.Consumed, GradientLife.Live, GradientLife.Lent}) {
        float[] w = null;
        Context context = null;
        Aside(() => {
          w = new float[] {1, 2, 3, 4};
          context = With(new Config {GradientLife = life}, () => w);
          context.Accumulate(new float[] {0.1f, 0.2f, 0.3f, 0.4f}, 3);
        });
        // The collector would use the memory of the gradient again.
        List<float[]> garbage = new List<float[]>();
        for (int i = 0; i < 1000; ++i) garbage.Add(new float[] {i, i, i, i});
        GC.Collect();
        context.Step();
        context.Dispose();
        results[(int)life] = w;
      }
      Expect.Same(results[0], results[1]);
      Expect.Same(results[0], results[2]);
    }

    public void LiveGradientsOfAMicroBatchThatIsAborted() {
      Context context = null;
      Aside(() => {
        context = With(new Config {GradientLife = GradientLife.Live}, () => New());
        MicroBatch micro = context.BeginMicroBatch();
        micro.Accumulate(context.FindParam("w0"), New());
      });
      Pinned(true, true);
      Aside(() => context.OpenMicro.Abort());
      Pinned(true, false);
      Aside(() => context.Accumulate(New()));
      Pinned(true, false, true);
      context.Step();
      Pinned(true, false, false);
      context.Dispose();
    }

    public void LiveGradientsOfWeightZeroAreNotKept() {
      Context context = null;
      Aside(() => {
        context = With(new Config {GradientLife = GradientLife.Live}, () => New());
        context.Accumulate(new Tensor[] {New()}, 0);
      });
      Pinned(true, false);
      Aside(() => context.Accumulate(New()));
      Pinned(true, false, true);
      context.Dispose();
    }

    public void PartsUntilTheMicroBatchHasEnded() {
      foreach (bool drop in new[] {true, false}) {
        arrays.Clear();
        Context context = null;
        Aside(() => {
          context = With(drop ? new Config {Nonfinite = Nonfinite.DropMicro} : null, () => New(), 2);
          if (!drop) context.SetClip(new Clip {Scope = ClipScope.Global, MaxNorm = 1, When = ClipWhen.Micro});
          MicroBatch micro = context.BeginMicroBatch();
          micro.Accumulate(context.FindParam("w0"), New());
          int[] indices = {1};
          arrays.Add(new WeakReference(indices));
          float[] values = New();
          if (drop) {  // ClipWhen.Micro has no gradients by row
            micro.AccumulateRows(context.FindParam("w0"), indices, values);
          } else {
            micro.Accumulate(context.FindParam("w1"), values);
          }
        });
        Pinned(true, true, true, drop, true);
        Aside(() => context.OpenMicro.End());
        Pinned(true, true, false, false, false);
        Aside(() => {
          MicroBatch micro = context.BeginMicroBatch();
          micro.Accumulate(context.FindParam("w0"), New());
        });
        Pinned(true, true, false, false, false, true);
        Aside(() => context.OpenMicro.Dispose());
        Pinned(true, true, false, false, false, false);
        context.Dispose();
      }
    }

    public void SpansAreRefusedWhereTheLibraryReadsLater() {
      float[] gradient = {1, 1, 1, 1};
      using (Context context = With(new Config {GradientLife = GradientLife.Live}, () => New())) {
        Expect.Fails(Status.InvalidArgument, () => context.Accumulate(new ReadOnlySpan<float>(gradient)), "GradientLife.Live",
                     "Accumulate with a Tensor", "PinnedArray");
        using (MicroBatch micro = context.BeginMicroBatch()) {
          Expect.Fails(Status.InvalidArgument,
                       () => micro.Accumulate(context.FindParam("w0"), new ReadOnlySpan<float>(gradient)), "GradientLife.Live");
        }
      }
      using (Context context = With(new Config {Nonfinite = Nonfinite.DropMicro}, () => New())) {
        context.Accumulate(new ReadOnlySpan<float>(gradient));
        Param param = context.FindParam("w0");
        using (MicroBatch micro = context.BeginMicroBatch()) {
          Expect.Fails(Status.InvalidArgument, () => micro.Accumulate(param, new Span<float>(gradient)), "DropMicro",
                       "Accumulate with a Tensor");
          Expect.Fails(Status.InvalidArgument,
                       () => micro.AccumulateRows(param, new ReadOnlySpan<int>(new int[1]), new ReadOnlySpan<float>(gradient)),
                       "AccumulateRows with a Tensor");
        }
      }
      using (Context context = With(null, () => New())) {
        Param param = context.FindParam("w0");
        context.Groups[0].SetClip(new Clip {Scope = ClipScope.Global, MaxNorm = 1, When = ClipWhen.Micro});
        using (MicroBatch micro = context.BeginMicroBatch()) {
          Expect.Fails(Status.InvalidArgument, () => micro.Accumulate(param, new Span<float>(gradient)), "ClipWhen.Micro");
        }
        context.Groups[0].SetClip(null);
        using (MicroBatch micro = context.BeginMicroBatch()) {
          micro.Accumulate(param, new Span<float>(gradient));
          micro.End();
        }
      }
    }

    private Context Clipped(ClipWhen when, bool ofGroup) {
      Context context = With(null, () => New());
      Clip clip = new Clip {Scope = ClipScope.Global, MaxNorm = 1, When = when};
      if (ofGroup) {
        context.Groups[0].SetClip(clip);
      } else {
        context.SetClip(clip);
      }
      return context;
    }

    private static bool TakesSpans(Context context) {
      Param param = context.FindParam("w0");
      using (MicroBatch micro = context.BeginMicroBatch()) {
        try {
          micro.Accumulate(param, new ReadOnlySpan<float>(new float[4]));
          return true;
        } catch (GradAccumException exception) {
          Expect.Equal(Status.InvalidArgument, exception.Status);
          Expect.True(exception.Message.Contains("under ClipWhen.Micro"), exception.Message);
          return false;
        }
      }
    }

    public void SpansAsTheClipsSayThatAreSet() {
      using (Context context = Clipped(ClipWhen.Micro, false)) {
        Group group = context.Groups[0];
        Expect.True(!TakesSpans(context), "under the clip of the context");
        group.SetClip(new Clip());
        Expect.True(!TakesSpans(context), "no group has the clip of the context");
        context.SetClip(null);
        Expect.True(TakesSpans(context), "without a clip of the context");
        Group other = context.AddGroup(new Optimizer(OptimizerKind.Sgd));
        other.SetClip(new Clip {MaxValue = 1, When = ClipWhen.Micro});
        Expect.True(!TakesSpans(context), "under the clip of another group");
        other.SetClip(new Clip {MaxValue = 1});
        Expect.True(TakesSpans(context), "under clips of the step");
      }
    }

    public void SpansAsTheClipsSayThatAreLoaded() {
      StateOptions take = new StateOptions {Settings = StateSettings.Take};
      string path = System.IO.Path.GetTempFileName();
      try {
        foreach (bool ofGroup in new[] {false, true}) {
          foreach (ClipWhen when in new[] {ClipWhen.Step, ClipWhen.Micro}) {
            byte[] state;
            using (Context saved = Clipped(when, ofGroup)) state = saved.SaveToMemory();
            System.IO.File.WriteAllBytes(path, state);
            bool micro = when == ClipWhen.Micro;
            for (int way = 0; way < 3; ++way) {
              using (Context context = Clipped(micro ? ClipWhen.Step : ClipWhen.Micro, ofGroup)) {
                context.LoadFromMemory(state, new StateOptions {Settings = StateSettings.Keep});
                Expect.Equal(micro, TakesSpans(context), "after a load that keeps the clip");
                if (way == 0) context.Load(path, take);
                if (way == 1) context.Load(new System.IO.MemoryStream(state), take);
                if (way == 2) context.LoadFromMemory(state, take);
                Expect.Equal(!micro, TakesSpans(context), "after a load that takes the clip");
              }
            }
          }
        }
      } finally {
        System.IO.File.Delete(path);
      }
    }

    /// <summary>Under DropMicro, what is read at the end is what was there at the end.</summary>
    public void PartsAreReadAtTheEnd() {
      float[] w = {0, 0, 0, 0}, gradient = {1, 1, 1, 1};
      using (Context context = With(new Config {Nonfinite = Nonfinite.DropMicro}, () => w)) {
        using (MicroBatch micro = context.BeginMicroBatch()) {
          micro.Accumulate(context.FindParam("w0"), gradient);
          gradient[0] = float.NaN;
          micro.End();
        }
        Expect.Equal(StepOutcome.SkippedEmpty, context.Step().Outcome);
        Expect.Equal(1L, context.GetStepResult().Dropped);
      }
    }

    public void ContextsLeftToTheCollector() {
      WeakReference weak = null;
      Aside(() => {
        Context context = With(new Config {Log = line => {}}, () => New());
        context.Accumulate(New());
        weak = new WeakReference(context);
      });
      Expect.True(!IsAlive(weak), "the context was collected");
      Pinned(false, false);
    }

    /// <summary>Pinned arrays outlive the object that pinned them, while the library has the address.</summary>
    public void PinnedArraysOfParameters() {
      Context context = null;
      Aside(() => {
        context = new Context();
        PinnedArray<float> pinned = new PinnedArray<float>(New());
        context.AddParam(context.AddGroup(new Optimizer(OptimizerKind.Sgd)), "w", pinned, 4);
        pinned.Dispose();
        Expect.Throws<ObjectDisposedException>(() => pinned.Tensor.ToString());
      });
      Pinned(true);
      context.Dispose();
      Pinned(false);
    }

    public void ManyContexts() {
      if (Environment.GetEnvironmentVariable("LD_PRELOAD") != null) {
        throw new SkipException("AddressSanitizer keeps freed memory");
      }
      long before = 0;
      for (int i = 0; i < 6000; ++i) {
        if (i == 2000) before = Resident();
        using (Context context = With(null, () => new float[4])) {
          context.Accumulate(new float[4]);
          context.Step();
        }
      }
      long grown = Resident() - before;
      // 4000 contexts: a leak of a kilobyte in each is seen, a heap that grows by a segment is not.
      Expect.True(grown < 16 << 20, "resident memory grew by " + grown + " bytes");
    }

    internal static long Resident() {
      GC.Collect();
      GC.WaitForPendingFinalizers();
      GC.Collect();
      string[] pages = System.IO.File.ReadAllText("/proc/self/statm").Split(' ');
      return long.Parse(pages[1]) * 4096;
    }
  }
}
